"""One release of vLLM through its adapter, against float64 attention over all tokens: `python -m
tests.vllm_scenarios RELEASE`.

A process serves one release, so the tests run this module once for each and read the JSON that it prints: by
scenario either `unsupported` with the reason, or the largest errors, `null` where something is NaN.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from shardcheck import Tensor
from tests.scenarios import GROUPED, Scenario, run, shared

SCENARIOS = {
    "one rank, projected": Scenario([37, 3], world=1, project=True),
    "no rank empty": Scenario([37, 9]),
    "no rank empty, a2a": Scenario([37, 9], exchange="a2a"),
    "one rank empty": Scenario([37, 3]),
    "one rank empty, a2a": Scenario([37, 3], exchange="a2a"),
    "two groups, padding, projected": Scenario([37, 5, 17], padding=2, world=2, tp=4, project=True),
    "interleave": Scenario([37, 5, 17], world=2, interleave=2),
    "grouped": Scenario([37, 9], world=2, attention=GROUPED),
    "grouped, width no power of two": Scenario([9], world=2, attention=replace(GROUPED, v_head_dim=14)),
    "three ranks": Scenario([37, 9], world=3),
    "verify": Scenario([37, 4], rows=3, padding=1, route="verify"),
    "draft": Scenario([37, 9], rows=2, padding=1, route="draft"),
    "context": Scenario([30, 0, 7], rows=2, route="context", world=2),
}


def merges(engine: Any) -> dict[str, Any]:
    """Two states of which both are empty in row 0, two of one head, and four partials of which one is empty with NaN in it."""
    rng = np.random.default_rng(2)
    c = SCENARIOS["no rank empty"].configuration
    found: dict[str, Any] = {}
    lse = rng.normal(size=(2, 3, 2)).astype(np.float32)
    lse[:, 0] = -np.inf
    state = [Tensor("f32", rng.normal(size=(3, 2, 8)).astype(np.float32)) for _ in range(2)]
    tensors = {
        "prefix_out": state[0],
        "suffix_out": state[1],
        "prefix_lse": Tensor("f32", lse[0]),
        "suffix_lse": Tensor("f32", lse[1]),
    }
    reply = engine.open(c).merge_states(**tensors)
    found["both states empty"] = {"nan": bool(np.isnan(Tensor.of(reply.outputs["out"]).numpy()[:, 0]).any())}
    # a head of its own, whose stride says nothing of where the next row is
    states = [rng.normal(size=(3, 1, 8)).astype(np.float32) for _ in range(2)]
    apart = [np.lib.stride_tricks.as_strided(state.copy(), state.shape, (32, 96, 4)) for state in states]
    dense, strided = (
        engine.open(c).merge_states(
            prefix_out=Tensor("f32", outs[0]),
            suffix_out=Tensor("f32", outs[1]),
            prefix_lse=Tensor("f32", np.zeros((3, 1), np.float32)),
            suffix_lse=Tensor("f32", np.ones((3, 1), np.float32)),
        )
        for outs in (states, apart)
    )
    outs = [Tensor.of(reply.outputs["out"]).numpy() for reply in (dense, strided)]
    found["one head of any stride"] = {"alike": bool(np.array_equal(*outs))}
    lse = rng.normal(size=(4, 2, 8)).astype(np.float32)
    lse[:, 0] = -np.inf
    out = rng.normal(size=(4, 2, 8, 8)).astype(np.float32)
    reply = engine.open(c).merge_partials(partial_out=Tensor("f32", out), partial_lse=Tensor("f32", lse))
    found["all partials empty"] = {"nan": bool(np.isnan(Tensor.of(reply.outputs["lse"]).numpy()[:, 0]).any())}
    return found


# requests as (tokens computed before, new rows, whether they are a prompt's)
SHARES = {
    "share, prompts": ([(0, 11, 1), (3, 5, 1), (0, 1, 1), (6, 0, 1)], {}),
    "share, decodes on every rank": ([(0, 11, 1), (20, 1, 0), (9, 1, 0)], {}),
    "share, decodes alone": ([(20, 1, 0), (9, 1, 0)], {}),
    "share, rows of a graph": ([(0, 11, 1)], {"padded_rows": 16}),
    "share, verification": ([(7, 3, 0), (0, 9, 1)], {}),
    "share, decodes with an owner": ([(20, 1, 0), (0, 9, 1), (4, 1, 0), (5, 1, 0)], {"decodes": "owned"}),
    "share, short prompts whole": ([(0, 5, 1), (0, 21, 1)], {"strategy": "head_tail_or_whole"}),
    "share, round robin": ([(0, 5, 1)], {"strategy": "round_robin", "decodes": "split"}),
    "share, one rank": ([(0, 5, 1)], {"world": 1}),
}


def shares(engine: Any) -> dict[str, Any]:
    """What is wrong with the rows of each rank of prefill context parallelism, counted row by row."""
    session = engine.open(SCENARIOS["one rank, projected"].configuration)
    return {name: shared(session, batch, options) for name, (batch, options) in SHARES.items()}


def main() -> None:
    """Prints the outcome of every scenario as one JSON object."""
    from shardcheck.adapters.vllm import Engine

    engine = Engine(release=sys.argv[1], **dict(word.split("=") for word in sys.argv[2:]))
    outcomes = {name: run(engine, scenario) for name, scenario in SCENARIOS.items()}
    outcomes.update(merges(engine))
    outcomes.update(shares(engine) if "pcp_layout" in engine.operations else {})
    engine.close()
    stubs = sorted(engine.release.package.ledger.used)
    print(json.dumps({"operations": sorted(engine.operations), "used stubs": stubs, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
