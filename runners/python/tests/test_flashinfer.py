"""The adapter of FlashInfer around a stand-in of the package, which needs no GPU: what it hands over and what it makes of the answers."""

import json
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

from tests.skips import torch_or_skip

FOLDER = Path(__file__).parent
# a bf16 output of unit normal data, and f32 LSEs
CLOSE, CLOSE_LSE = 2e-2, 1e-5

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from shardcheck import Attention, Tensor, Unsupported
from shardcheck.adapters.flashinfer import Engine
from tests.scenarios import GROUPED, Scenario, draw, largest, reference, step
LATENT = Attention("mla", v_head_dim=512, kv_lora_rank=512, qk_rope_head_dim=64)
STEPS = {
    "one rank": Scenario([21, 3], world=1),
    "one rank, verify": Scenario([21, 3], rows=3, padding=2, world=1, route="verify"),
    "two groups, ranks empty, padding": Scenario([9, 1], padding=2, world=2, tp=4),
    "verify": Scenario([21, 3], rows=3, padding=1, world=3, route="verify"),
    "interleave": Scenario([21, 5], world=2, interleave=2, rows=2, route="verify"),
    "grouped": Scenario([9], world=2),
    "reduce-scatter": Scenario([9], world=2),
}
found = {}
for pages in ("blocks", "tokens"):
    engine = Engine(backend="fa2", pages=pages, device="cpu")
    for name, scenario in STEPS.items():
        scenario.exchange = "ag_rs" if name == "reduce-scatter" else "a2a"
        scenario.attention = GROUPED if name == "grouped" else LATENT
        batch = draw(scenario)
        try:
            reply = step(engine.open(scenario.configuration), scenario, batch)
        except Unsupported as reason:
            found[f"{name}, {pages}"] = {"unsupported": str(reason)}
            continue
        out, lse = reference(scenario, batch)
        own, rows = scenario.configuration.heads_per_rank, len(out) - scenario.padding
        ranks = range(scenario.configuration.tp)
        wanted = [np.stack([a[:rows, r * own : (r + 1) * own] for r in ranks]) for a in (out, lse)]
        seen = [Tensor.of(reply.outputs[name]).numpy()[:, :rows] for name in ("out", "lse")]
        found[f"{name}, {pages}"] = {"out": largest(seen[0], wanted[0]), "lse": largest(seen[1], wanted[1])}
rng = np.random.default_rng(1)
out, lse = rng.normal(size=(2, 3, 4, 64)).astype(np.float32), rng.normal(size=(2, 3, 4)).astype(np.float32)
session = engine.open(Scenario([9], world=2, exchange="a2a").configuration)
weights = np.exp(lse) / np.exp(lse).sum(0)
merged, total = (weights[..., None] * out).sum(0), np.log(np.exp(lse).sum(0))
for base, unit in (("e", 1.0), ("two", np.log(2.0))):
    given = {"partial_out": Tensor.from_f32("f16", out), "partial_lse": Tensor("f32", (lse / unit).astype(np.float32))}
    outputs = session.merge_partials(**given, lse_base=base).outputs
    wanted = [np.stack([a[:, :2], a[:, 2:]]) for a in (merged, total / unit)]
    found[f"merge, {base}"] = {n: largest(Tensor.of(outputs[n]).numpy(), w) for n, w in zip(("out", "lse"), wanted)}
states = [t for index in (0, 1) for t in (Tensor.from_f32("f16", out[index]), Tensor("f32", lse[index]))]
outputs = session.merge_states(**dict(zip(("prefix_out", "prefix_lse", "suffix_out", "suffix_lse"), states))).outputs
from shardcheck.adapters.flashinfer.session import head_parts
import torch
found["parts"] = [[part.stop - part.start for part in head_parts(torch.empty(1, heads, width))] for heads, width in ((128, 512), (16, 512), (65, 128))]
found["merge of two"] = {n: largest(Tensor.of(outputs[n]).numpy(), w[None]) for n, w in (("out", merged), ("lse", total))}
print(json.dumps(found))
"""


class FlashinferTest(unittest.TestCase):
    """One process has the stand-in, so that a package that is installed stays out of it."""

    found: dict[str, Any]

    @classmethod
    def setUpClass(cls) -> None:
        torch_or_skip(cls("test_steps_are_right_over_pages_of_either_size"))
        command = [sys.executable, "-c", SCRIPT, str(FOLDER / "stand_ins")]
        done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            raise AssertionError(done.stderr[-3000:])
        cls.found = json.loads(done.stdout)

    def test_steps_are_right_over_pages_of_either_size(self) -> None:
        for pages in ("blocks", "tokens"):
            for name in ("one rank", "one rank, verify", "two groups, ranks empty, padding", "verify", "interleave"):
                with self.subTest(f"{name}, {pages}"):
                    outcome = self.found[f"{name}, {pages}"]
                    self.assertIsNotNone(outcome.get("out"), outcome)
                    self.assertLess(outcome["out"], CLOSE)
                    self.assertLess(outcome["lse"], CLOSE_LSE)

    def test_what_the_kernels_do_not_take_is_refused_with_a_reason(self) -> None:
        self.assertIn("latents of 512", self.found["grouped, blocks"]["unsupported"])
        self.assertIn("all-to-all", self.found["reduce-scatter, blocks"]["unsupported"])

    def test_heads_are_handed_over_as_a_block_has_threads_for_them(self) -> None:
        self.assertEqual(self.found["parts"], [[32] * 4, [32], [64, 64]])

    def test_merges_take_lses_of_either_base(self) -> None:
        for name in ("merge, e", "merge, two", "merge of two"):
            with self.subTest(name):
                self.assertLess(self.found[name]["out"], CLOSE)
                self.assertLess(self.found[name]["lse"], CLOSE_LSE)


if __name__ == "__main__":
    unittest.main()
