"""One release of vLLM-Ascend through its adapter, against float64 attention over all tokens and against counting: `python -m
tests.vllm_ascend_scenarios RELEASE [OPTION=VALUE …]`.

A process serves one release, so the tests run this module once for each and read the JSON that it prints: by scenario either `unsupported`
with the reason, or the largest errors, `null` where something is NaN; for what is counted, how many were asked and how many are wrong.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardcheck import Configuration, Tensor
from tests.scenarios import GROUPED, Scenario, largest, run, shared

SCENARIOS = {
    "no rank empty": Scenario([37, 9], exchange="a2a"),
    "three of four ranks empty": Scenario([37, 1], exchange="a2a"),
    "two groups, padding, projected": Scenario([37, 5, 17], padding=2, world=2, tp=4, project=True, exchange="a2a"),
    "three ranks": Scenario([37, 9], world=3, exchange="a2a"),
    "one rank": Scenario([37, 9], world=1, exchange="a2a"),
    "grouped": Scenario([37, 9], world=2, attention=GROUPED, exchange="a2a"),
    "interleave": Scenario([37, 5, 17], world=2, interleave=2, exchange="a2a"),
    "verify": Scenario([37, 9], rows=3, padding=1, route="verify", exchange="a2a"),
    "verify, interleave": Scenario([37, 21], rows=3, world=2, interleave=4, route="verify", exchange="a2a"),
    "verify, a row without tokens of a rank": Scenario([37, 3], rows=2, world=3, route="verify", exchange="a2a"),
}

# requests as (tokens computed before, new rows, whether they are a prompt's)
SHARES = {
    "share, prompts": ([(0, 11, 1), (3, 6, 1), (0, 13, 1)], {}),
    "share, decodes": ([(0, 11, 1), (20, 1, 0), (3, 5, 1), (9, 1, 0)], {}),
    "share, verification": ([(7, 3, 0), (0, 11, 1), (20, 2, 0)], {}),
    "share, decodes alone": ([(7, 1, 0), (20, 1, 0)], {}),
    "share, short prompts": ([(0, 1, 1), (0, 2, 1)], {}),
    "share, zigzag": ([(0, 11, 1)], {"strategy": "zigzag"}),
}

# what one rank of four holds beside ordinary ones: LSE and output
BROKEN = {
    "plain": (None, None),
    "one empty, zeros": (-np.inf, 0.0),
    "one empty, NaN": (-np.inf, np.nan),
    "one LSE infinite": (np.inf, None),
    "one LSE NaN": (np.nan, None),
    "first empty, NaN": (-np.inf, np.nan),
    "gap of 100": (-100.0, None),
    "gap of 10000": (1e4, None),
    "all empty, zeros": (-np.inf, 0.0),
    "all empty, NaN": (-np.inf, np.nan),
}


def merges(engine: Any, configuration: Configuration) -> dict[str, Any]:
    """By case and type the largest error of the merge of four partials, and of two states; `null` where something is NaN."""
    rng = np.random.default_rng(3)
    outs, lses = rng.normal(size=(4, 3, 8, 8)), rng.normal(size=(4, 3, 8))
    found: dict[str, Any] = {}
    for case, (rank_lse, held) in BROKEN.items():
        out, lse = outs.copy(), lses.copy()
        ranks = slice(None) if case.startswith("all") else 0 if case.startswith("first") else 2
        if rank_lse is not None:
            lse[ranks, 1] = rank_lse
        if held is not None:
            out[ranks, 1] = held
        session = engine.open(replace(configuration, comm_backend="a2a"))
        for dtype in ("f32", "bf16"):
            given = Tensor.from_f32(dtype, out.astype(np.float32)), Tensor("f32", lse.astype(np.float32))
            reply = session.merge_partials(partial_out=given[0], partial_lse=given[1])
            found[f"{case}, {dtype}"] = error(reply.outputs, given[0].numpy(), given[1].numpy(), 4)
        pair = [Tensor("f32", part[index].astype(np.float32)) for index in (2, 3) for part in (out, lse)]
        reply = session.merge_states(**dict(zip(("prefix_out", "prefix_lse", "suffix_out", "suffix_lse"), pair, strict=True)))
        if not case.startswith("first"):
            states = np.stack([pair[0].numpy(), pair[2].numpy()]), np.stack([pair[1].numpy(), pair[3].numpy()])
            found[f"{case}, states"] = error(reply.outputs, *states, 1)
    return found


def error(outputs: Any, out: np.ndarray, lse: np.ndarray, parts: int) -> float | None:
    """The largest error of a merge over the first axis; an LSE that is no finite number weighs nothing."""
    counts = np.isfinite(lse)
    natural = np.where(counts, lse.astype(np.float64), -np.inf)
    top = natural.max(0)
    weights = np.exp(natural - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(0)
    merged = (weights[..., None] * np.where(counts[..., None], out, 0.0)).sum(0) / np.maximum(total, 1e-300)[..., None]
    wanted = np.stack(np.split(merged, parts, axis=1))
    return largest(Tensor.of(outputs["out"]).numpy(), wanted)


class Counts:
    """How many were asked and how many are wrong, by what was asked."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = {}

    def add(self, name: str, seen: Any, wanted: np.ndarray) -> None:
        """Compares arrays element by element."""
        asked = self.found.setdefault(name, [0, 0])
        asked[0] += wanted.size
        asked[1] += int((np.asarray(seen) != wanted).sum())


def held(lens: np.ndarray, world: int, interleave: int, rank: int) -> np.ndarray:
    """Tokens of a rank among the first `lens`, counted by rounds."""
    rounds, rest = np.divmod(lens, world * interleave)
    return rounds * interleave + np.clip(rest - rank * interleave, 0, interleave)


def sizes() -> list[tuple[int, int]]:
    """Group sizes and interleave sizes."""
    return [(world, interleave) for world in range(2, 9) for interleave in (1, 2, 4, 16, 128)]


def sweep(release: Any) -> dict[str, list[int]]:
    """Lengths, slots and sparse indices of every rank, those beyond 2^24 among them."""
    import torch

    counts = Counts()
    near = [np.arange(edge - 40, edge + 40) for edge in (1 << 24, 1 << 25)]
    lens = np.concatenate([np.arange(600), *near, np.arange((1 << 30) - 40, (1 << 30) + 40)])
    positions, block = np.concatenate([np.arange(2048), *near]), 128
    module = release.package.load("vllm_ascend.attention.context_parallel.sfa_cp")
    if module is not None:
        module.HAS_TRITON = False  # the way without Triton
    for world, interleave in sizes():
        table = np.arange(positions.max() // (block * world), -1, -1, dtype=np.int32)[None]
        rounds, rest = np.divmod(positions, world * interleave)
        local = rounds * interleave + rest % interleave
        for rank in range(world):
            place = SimpleNamespace(world_size=world, rank_in_group=rank)
            manager = release.new_manager((world, rank), (1, 0), (1, 1, 1), interleave)
            given = torch.from_numpy(lens.astype(np.int32))
            seen = release.local_lens(manager, given, world, interleave)[:, rank]
            counts.add("local lengths", seen, held(lens, world, interleave, rank))
            owned = positions // interleave % world == rank
            slots = table[0, positions // (block * world)].astype(np.int64) * block + local % block
            with release.groups.acting(place):
                engine = release.block_table(block, 1, table.shape[1], len(positions), interleave)
                engine.block_table.np[:1] = table
                engine.compute_slot_mapping_draft(np.zeros(len(positions), np.int64), positions)
            counts.add("slots", engine.slot_mapping.np[: len(positions)], np.where(owned, slots, -1))
            layer = SimpleNamespace(dcp_size=world, dcp_rank=rank, _dcp_interleave_size=interleave, _dcp_index_topk=1)
            layer._remap_order, layer._remap_invalid_index = torch.zeros(1), torch.tensor(-1.0)
            indices = release.remap(layer, torch.from_numpy(positions.astype(np.int32))[:, None])[:, 0].numpy()
            far = positions >= 1 << 24
            rows = np.where(owned, local, -1)
            counts.add("sparse indices below 2^24", indices[~far], rows[~far])
            counts.add("sparse indices beyond", indices[far], rows[far])
    return counts.found


def masks(release: Any) -> dict[str, list[int]]:
    """Every row of every verification of 1 to 8 rows behind 0 to 127 tokens, on every rank; and behind 2^24 tokens. What a row sees of its rank
    must be the first of the rank's tokens, as many as it holds below the row's bound."""
    counts = Counts()
    near = [(history, rows) for history in range(128) for rows in range(1, 9)]
    for world, interleave in sizes():
        far = [((1 << 24) + more, 4) for more in (0, world * interleave - 2)] if world == 3 and interleave < 128 else []
        for rank in range(world):
            for batch in (near, far) if far else (near,):
                count_masks(counts, release, batch, (world, interleave, rank))
    return counts.found


def count_masks(
    counts: Counts, release: Any, batch: list[tuple[int, int]], place: tuple[int, int, int]
) -> None:
    """Masks of one batch on one rank, told apart by whether a row sees any token of the rank, and by whether tokens take turns singly."""
    world, interleave, rank = place
    histories, rows = (np.array(part) for part in zip(*batch, strict=True))
    tokens = int((histories + rows).max())
    limits = (len(batch), int(rows.max()), -(-tokens // world) + interleave)
    manager = release.new_manager((world, rank), (1, 0), limits, interleave)
    manager.num_decode_reqs = len(batch)
    mask = manager.generate_mtp_attention_mask_for_decode(histories.tolist(), rows.astype(np.int32)).numpy()
    total = held(histories + rows, *place)
    for request, (history, count) in enumerate(batch):
        bounds = held(history + 1 + np.arange(count), *place)
        wanted = np.arange(total[request]) >= bounds[:, None]
        right = (mask[request, :count, : total[request]] == wanted).all(1)
        way = "single tokens" if interleave == 1 else "interleaved"
        empty = (bounds == 0) & (total[request] > 0)
        reached = "" if history else ", no history"
        counts.add(f"rows that see tokens, {way}", right[~empty], np.ones((~empty).sum(), bool))
        if empty.any():
            counts.add(f"rows that see none, {way}{reached}", right[empty], np.ones(empty.sum(), bool))


def exponents(release: Any) -> dict[str, list[int]]:
    """A rank whose LSE has any exponent and sign, beside an empty one, in the fused exchange: its output comes out as it went in."""
    if release.fused is None:
        return {}
    from shardcheck.adapters.collectives import VirtualExecutor
    from shardcheck.adapters.vllm_ascend.merging import RankMerge

    import torch

    counts = Counts()
    with np.errstate(over="ignore"):
        powers = np.ldexp(np.float32(1.0), np.arange(-149, 128)).astype(np.float32)
        values = np.concatenate([powers * np.float32(scale) for scale in (1.0, 1.9999999)])
    values = np.concatenate([values, -values, [np.float32(0.0)]])
    values = values[np.isfinite(values)]
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.ones(2, len(values), 2, 2, dtype=dtype)
        lse = torch.full((2, len(values), 2), -torch.inf)
        lse[0] = torch.from_numpy(values)[:, None]
        jobs = [RankMerge("fused", out[rank], lse[rank]) for rank in range(2)]
        results, _ = VirtualExecutor(release).run(jobs, 2)
        seen = results[0][0][:, 0, 0].float().numpy()
        small = np.abs(values) < 2.0**-104
        name = str(dtype).removeprefix("torch.")
        counts.add(f"LSEs below 2^-104, {name}", seen[small & (values != 0)], np.ones((small & (values != 0)).sum()))
        counts.add(f"other LSEs, {name}", seen[~small | (values == 0)], np.ones((~small | (values == 0)).sum()))
    return counts.found


def together(release: Any) -> dict[str, list[int]]:
    """Elements of the fused exchange with all rows and ranks of a launch as one block, and those whose bits differ from the same launches
    rank by rank and row by row, on one, three or four cores."""
    if release.fused is None:
        return {}
    import builtins

    import torch

    from shardcheck.adapters import interpreter
    from shardcheck.adapters.collectives import VirtualExecutor
    from shardcheck.adapters.vllm_ascend import surroundings
    from shardcheck.adapters.vllm_ascend.merging import RankMerge

    module = next(filter(None, map(release.package.load, surroundings.FUSED)))
    joint = {name: getattr(module, name) for name in surroundings.FUSED_KERNELS if hasattr(module, name)}
    counts = Counts()

    def merged(outs: Any, lses: Any, cores: int | None) -> np.ndarray:
        module.range = interpreter.rows_at_once if cores is None else builtins.range
        module.get_vectorcore_num = lambda: cores or 1
        for name, kernel in joint.items():
            setattr(module, name, kernel if cores is None else kernel.kernel)
        jobs = [RankMerge("fused", out, lse) for out, lse in zip(outs, lses, strict=True)]
        results, _ = VirtualExecutor(release).run(jobs, len(outs))
        return torch.stack([out for out, _ in results]).contiguous().view(torch.uint8).numpy()

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for world, rows, own, width, cores in ((2, 5, 3, 24, 4), (3, 1, 1, 31, 3), (5, 3, 2, 8, 1), (8, 2, 1, 32, 4)):
            drawn = torch.Generator().manual_seed(world)
            # rows and heads change places, so that strides are not dense
            outs = torch.randn(world, own * world, rows, width, generator=drawn).to(dtype).transpose(1, 2)
            lses = 20 * torch.randn(world, rows, own * world, generator=drawn)
            outs[0, 0], lses[0, 0], lses[:, :, -1] = torch.nan, -torch.inf, -torch.inf
            name = str(dtype).removeprefix("torch.")
            counts.add(name, merged(outs, lses, None), merged(outs, lses, cores))
    return counts.found


def main() -> None:
    """Prints the outcome of every scenario as one JSON object."""
    from shardcheck.adapters.vllm_ascend import Engine

    engine = Engine(release=sys.argv[1], **dict(word.split("=") for word in sys.argv[2:]))
    outcomes: dict[str, Any] = {name: run(engine, scenario) for name, scenario in SCENARIOS.items()}
    configuration = SCENARIOS["no rank empty"].configuration
    outcomes["merges"] = merges(engine, configuration)
    if len(sys.argv) == 2:
        if engine.release.counts_lens:
            outcomes["sweep"] = sweep(engine.release)
        if engine.release.has_masks:
            outcomes["masks"] = masks(engine.release)
        outcomes["exponents"] = exponents(engine.release)
        outcomes["together"] = together(engine.release)
    session = engine.open(configuration)
    outcomes.update({name: shared(session, batch, options) for name, (batch, options) in SHARES.items()})
    engine.close()
    stubs = sorted(engine.release.package.ledger.used)
    print(json.dumps({"operations": sorted(engine.operations), "used stubs": stubs, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
