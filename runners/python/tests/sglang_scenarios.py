"""One release of SGLang through its adapter, against float64 attention over all tokens: `python -m
tests.sglang_scenarios RELEASE [OPTION=VALUE …]`.

A process serves one release, so the tests run this module once for each and read the JSON that it prints: by
scenario either `unsupported` with the reason, or the largest errors, `null` where something is NaN.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from shardcheck import Attention, Configuration, Tensor
from tests.scenarios import GROUPED, Scenario, largest, run, shared

LATENT = Attention("mla", v_head_dim=512, kv_lora_rank=512, qk_rope_head_dim=64)
EACH = Attention("gqa", v_head_dim=16, kv_heads=8, head_dim=16)

SCENARIOS = {
    "no rank empty": Scenario([37, 9]),
    "three of four ranks empty": Scenario([37, 1]),
    "no rank empty, a2a": Scenario([37, 9], exchange="a2a"),
    "three of four ranks empty, a2a": Scenario([37, 1], exchange="a2a"),
    "two groups, padding, projected": Scenario([37, 5, 17], padding=2, world=2, tp=4, project=True),
    "latents of 576": Scenario([21, 3], world=2, attention=LATENT),
    "latents of 576, one rank": Scenario([21, 3], world=1, attention=LATENT),
    "grouped": Scenario([37, 9], world=2, attention=GROUPED),
    "grouped, width no power of two": Scenario([9], world=2, attention=replace(GROUPED, v_head_dim=14)),
    "grouped, one rank": Scenario([37, 9], world=1, attention=replace(GROUPED, kv_heads=1)),
    "one query head a KV head": Scenario([13, 1], attention=EACH),
    "three ranks": Scenario([37, 9], world=3),
    "verify": Scenario([37, 4], rows=3, padding=1, route="verify"),
    "context": Scenario([30, 0, 7], rows=2, route="context", world=2),
    "context, three ranks": Scenario([30, 0, 7], rows=2, route="context", world=3, budget=9),
    "context, one rank": Scenario([30, 0, 7], rows=2, route="context", world=1),
    "interleave": Scenario([37, 5, 17], world=2, interleave=2),
}

# requests as (tokens computed before, new rows, whether they are a prompt's)
SHARES = {
    "share, zigzag": ([(0, 11, 1), (3, 6, 1), (0, 13, 1)], {"strategy": "zigzag"}),
    "share, zigzag, aligned": ([(0, 12, 1)], {"strategy": "zigzag", "padded_rows": 6}),
    "share, zigzag, too few rows": ([(0, 5, 1)], {"strategy": "zigzag"}),
    "share, round robin": (
        [(0, 11, 1), (20, 1, 0), (3, 5, 1)],
        {"strategy": "round_robin", "decodes": "split"},
    ),
    "share, decodes on every rank": ([(0, 11, 1), (20, 1, 0)], {"strategy": "zigzag"}),
    "share, chunks from both ends": ([(0, 11, 1)], {}),
}


def merges(engine: Any, configuration: Configuration) -> dict[str, Any]:
    """What comes of four partials and of two states where one is empty, all are, or one has an LSE that is no number;
    by case, exchange and base the largest errors of output and LSE, `null` where something is NaN."""
    rng = np.random.default_rng(3)
    outs, lses = (
        rng.normal(size=(4, 3, 8, 8)).astype(np.float32),
        rng.normal(size=(4, 3, 8)).astype(np.float32),
    )
    found: dict[str, Any] = {}
    for case, rank_lse, held in (
        ("plain", None, None),
        ("one empty, zeros", -np.inf, 0.0),
        ("one empty, NaN", -np.inf, np.nan),
        ("one LSE infinite", np.inf, None),
        ("one LSE NaN", np.nan, None),
    ):
        out, lse = outs.copy(), lses.copy()
        if rank_lse is not None:
            lse[2, 1] = rank_lse
            if held is not None:
                out[2, 1] = held
        for exchange, base in (("ag_rs", "e"), ("ag_rs", "two"), ("a2a", "e"), ("a2a", "two")):
            session = engine.open(replace(configuration, comm_backend=exchange))
            given = {"partial_out": Tensor("f32", out), "partial_lse": Tensor("f32", lse)}
            reply = session.merge_partials(**given, lse_base=base)
            found[f"{case}, {exchange}, {base}"] = errors(reply.outputs, out, lse, base)
    return found


def errors(outputs: Any, out: np.ndarray, lse: np.ndarray, base: str) -> dict[str, Any]:
    """The largest errors of a merge of partials; an LSE that is no finite number weighs nothing."""
    unit = np.log(2.0) if base == "two" else 1.0
    counts = np.isfinite(lse)
    natural = np.where(counts, lse.astype(np.float64) * unit, -np.inf)
    top = natural.max(0)
    weights = np.exp(natural - top)
    merged = (weights[..., None] * np.where(counts[..., None], out, 0.0)).sum(0) / weights.sum(0)[..., None]
    sums = (top + np.log(weights.sum(0))) / unit
    wanted = [np.stack(np.split(array, 4, axis=1)) for array in (merged, sums)]
    seen = [Tensor.of(outputs[name]).numpy() for name in ("out", "lse")]
    return {"out": largest(seen[0], wanted[0]), "lse": largest(seen[1], wanted[1])}


def held(lens: np.ndarray, world: int, interleave: int, rank: int) -> np.ndarray:
    """Tokens of a rank among the first `lens`."""
    rounds, rest = np.divmod(lens, world * interleave)
    return rounds * interleave + np.clip(rest - rank * interleave, 0, interleave)


def sweep(release: Any) -> dict[str, list[int]]:
    """Every length, row and rank of many group sizes and interleave sizes, lengths beyond 2^24 among them: by function how
    many were asked and how many are wrong."""
    import torch

    found: dict[str, list[int]] = {}

    def count(name: str, seen: torch.Tensor, wanted: np.ndarray) -> None:
        asked = found.setdefault(name, [0, 0])
        asked[0] += wanted.size
        asked[1] += int((seen.numpy() != wanted).sum())

    near = [np.arange(edge - 40, edge + 40) for edge in (1 << 24, 1 << 25, 1 << 30)]
    lens = np.concatenate([np.arange(600), *near])
    for world, interleave in ((w, s) for w in range(1, 9) for s in (1, 2, 3, 4, 16)):
        named = {"interleave_size": interleave} if interleave > 1 else {}
        if named and not release.has_interleave:
            continue
        rounds, rest = np.divmod(lens, world * interleave)
        given = torch.from_numpy(lens.astype(np.int32))
        for rank in range(world):
            sizes = (world, interleave, rank)
            count("local lengths", release.local_lens(given, world, rank, **named), held(lens, *sizes))
            if release.localize is not None:
                owned = lens // interleave % world == rank
                local = rounds * interleave + rest % interleave
                rows = np.where(owned, local, -1)
                count("rows of the cache", release.localize(given, world, rank, **named), rows)
                sparse = release.remap_sparse(given[:, None], world, rank, interleave)[:, 0]
                count("rows of the cache, sparse, below 2^24", sparse[lens < 1 << 24], rows[lens < 1 << 24])
                count("rows of the cache, sparse, beyond", sparse[lens >= 1 << 24], rows[lens >= 1 << 24])
            for rows in (1, 2, 4, 7) if release.chain_lens is not None else ():
                total = lens[lens >= rows]
                seen = total[:, None] - rows + 1 + np.arange(rows)
                chain = release.chain_lens(
                    torch.from_numpy(total.astype(np.int32)), rows, world, rank, **named
                )
                count("lengths of rows", chain, held(seen, *sizes).reshape(-1))
    return found


def main() -> None:
    """Prints the outcome of every scenario as one JSON object."""
    from shardcheck.adapters.sglang import Engine

    engine = Engine(release=sys.argv[1], **dict(word.split("=") for word in sys.argv[2:]))
    outcomes = {name: run(engine, scenario) for name, scenario in SCENARIOS.items()}
    configuration = SCENARIOS["no rank empty"].configuration
    outcomes["merges"] = merges(engine, configuration)
    outcomes["sweep"] = sweep(engine.release)
    session = engine.open(configuration)
    outcomes.update({name: shared(session, batch, options) for name, (batch, options) in SHARES.items()})
    engine.close()
    stubs = sorted(engine.release.package.ledger.used)
    print(json.dumps({"operations": sorted(engine.operations), "used stubs": stubs, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
