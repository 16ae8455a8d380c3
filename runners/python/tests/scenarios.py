"""Batches for a release's adapter, and what is right in them: float64 attention over all tokens, slots, lengths and
shares counted by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcheck import Attention, Configuration, Reply, Tensor, Unsupported

BLOCKS = 16
LATENT = Attention("mla", v_head_dim=12, kv_lora_rank=16, qk_rope_head_dim=8)
GROUPED = Attention("gqa", v_head_dim=16, kv_heads=2, head_dim=16)


@dataclass
class Scenario:
    """A batch on a configuration: total lengths of the requests, rows of each, rows of padding."""

    lens: list[int]
    rows: int = 1
    padding: int = 0
    route: str = "decode"
    world: int = 4
    tp: int = 0
    interleave: int = 1
    exchange: str = "ag_rs"
    attention: Attention = LATENT
    project: bool = False
    budget: int = 16
    seed: int = 1

    @property
    def configuration(self) -> Configuration:
        """What the session is opened with."""
        a, tp = self.attention, self.tp or self.world
        sizes = (tp, self.world, 2, self.interleave, 4, BLOCKS)
        return Configuration(a, *sizes, "bf16", 1.0, 0.25, self.exchange, "lo_hi", False, False)


def run(engine: Any, scenario: Scenario) -> dict[str, Any]:
    """Layout, write and one step of a scenario; the largest errors of output, LSE and layout."""
    if scenario.route not in engine.operations:
        return {"unsupported": f"no {scenario.route}"}
    try:
        session = engine.open(scenario.configuration)
        batch = draw(scenario)
        errors = layout_errors(engine, session, scenario, batch)
        reply = step(session, scenario, batch)
    except Unsupported as reason:
        return {"unsupported": str(reason)}
    out, lse = reference(scenario, batch)
    own = scenario.configuration.heads_per_rank
    ranks = range(scenario.configuration.tp)
    rows = len(batch["query"].codes) - scenario.padding
    wanted = [np.stack([a[:rows, r * own : (r + 1) * own] for r in ranks]) for a in (out, lse)]
    errors["out"] = largest(Tensor.of(reply.outputs["out"]).numpy()[:, :rows], wanted[0])
    if "lse" in reply.outputs:
        errors["lse"] = largest(Tensor.of(reply.outputs["lse"]).numpy()[:, :rows], wanted[1])
    return {**errors, "collectives": list(reply.collectives)}


def draw(scenario: Scenario) -> dict[str, Any]:
    """Inputs of a scenario: tokens of all requests, a shuffled block table with wild ids where none is
    needed, rows."""
    c, rng = scenario.configuration, np.random.default_rng(scenario.seed)
    lens = np.array(scenario.lens, dtype=np.int32)
    pages = -(-lens // c.virtual_block_tokens)
    table = np.full((len(lens), max(1, pages.max())), 1 << 20, dtype=np.int32)
    ids = iter(rng.permutation(BLOCKS))
    for request, count in enumerate(pages):
        table[request, :count] = [next(ids) for _ in range(count)]
    requests = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    positions = np.concatenate([np.arange(length) for length in lens]).astype(np.int64)
    rows = len(lens) * scenario.rows
    normal = lambda *shape: Tensor.from_f32("bf16", rng.normal(size=shape))  # noqa: E731
    batch = {
        "key": normal(len(requests), c.kv_heads, c.qk_dim),
        "value": None if c.attention.is_mla else normal(len(requests), c.kv_heads, c.value_dim),
        "positions": Tensor("i64", positions),
        "requests": Tensor("i32", requests),
        "block_table": Tensor("i32", table),
        "seq_lens": Tensor("i32", lens),
        "query_start_loc": Tensor("i32", np.arange(len(lens) + 1, dtype=np.int32) * scenario.rows),
        "query": normal(rows + scenario.padding, c.total_heads, c.qk_dim),
        "w_uv": normal(c.total_heads, c.value_dim, c.attention.v_head_dim) if scenario.project else None,
        "new": normal(rows + scenario.padding, c.kv_heads, c.qk_dim),
    }
    return batch


def step(session: Any, scenario: Scenario, batch: dict[str, Any]) -> Reply:
    """Writes the tokens and runs the step."""
    named = lambda *names: {name: batch[name] for name in names if batch[name] is not None}  # noqa: E731
    session.write_kv(**named("key", "value", "positions", "requests", "block_table"))
    if scenario.route == "context":
        given = named("query", "query_start_loc", "block_table")
        return session.context(scenario.budget, key=batch["new"], context_lens=batch["seq_lens"], **given)
    return getattr(session, scenario.route)(
        **named("query", "seq_lens", "query_start_loc", "block_table", "w_uv")
    )


def layout_errors(engine: Any, session: Any, scenario: Scenario, batch: dict[str, Any]) -> dict[str, Any]:
    """How many slots and local lengths differ from counting by hand."""
    c = scenario.configuration
    given = {name: batch[name] for name in ("seq_lens", "query_start_loc", "block_table")}
    outputs = session.layout(**given).outputs
    positions, requests = batch["positions"].codes, batch["requests"].codes
    owner = positions // c.interleave % c.dcp
    local = positions // (c.interleave * c.dcp) * c.interleave + positions % c.interleave
    block = batch["block_table"].codes[requests, positions // c.virtual_block_tokens]
    slots = [
        np.where(owner == r % c.dcp, block * c.block_size + local % c.block_size, -1) for r in range(c.tp)
    ]
    lens = [
        [((owner == r % c.dcp) & (requests == i)).sum() for i in range(len(scenario.lens))]
        for r in range(c.tp)
    ]
    found = {"slots": int((outputs["slots"] != np.stack(slots)).sum())}
    if "local_lens" in outputs:
        found["local_lens"] = int((Tensor.of(outputs["local_lens"]).codes != np.array(lens)).sum())
    return found


def reference(scenario: Scenario, batch: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Global attention in float64: `out [T, Hall, width]` and natural LSE `[T, Hall]`."""
    c = scenario.configuration
    key, query = batch["key"].numpy().astype(np.float64), batch["query"].numpy().astype(np.float64)
    value = key[..., : c.value_dim] if batch["value"] is None else batch["value"].numpy().astype(np.float64)
    new = batch["new"].numpy().astype(np.float64)
    positions, requests = batch["positions"].codes, batch["requests"].codes
    out, lse = (
        np.zeros((len(query), c.total_heads, c.value_dim)),
        np.full((len(query), c.total_heads), -np.inf),
    )
    for request, length in enumerate(scenario.lens):
        for t in range(scenario.rows):
            row = request * scenario.rows + t
            seen = length if scenario.route in ("draft", "context") else length - scenario.rows + t + 1
            held = (requests == request) & (positions < seen)
            keys, values = key[held], value[held]
            if scenario.route == "context":
                own = new[request * scenario.rows : row + 1]
                keys, values = np.concatenate([keys, own]), np.concatenate([values, own[..., : c.value_dim]])
            for head in range(c.total_heads):
                kv_head = head % c.gathered_heads // (c.gathered_heads // c.kv_heads)
                scores = keys[:, kv_head] @ query[row, head] * c.softmax_scale
                if len(scores):
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights @ values[:, kv_head] / weights.sum()
                    lse[row, head] = scores.max() + np.log(weights.sum())
    if batch["w_uv"] is not None:
        out = np.einsum("thd,hdv->thv", out, batch["w_uv"].numpy().astype(np.float64))
    return out, lse


def largest(seen: np.ndarray, wanted: np.ndarray) -> float | None:
    """The largest error; `None` where anything is NaN."""
    with np.errstate(invalid="ignore"):
        error = np.where(seen == wanted, 0.0, np.abs(seen - wanted))
    return None if np.isnan(error).any() else float(error.max())


def owner(strategy: str, world: int, row: int, count: int, flat: int) -> int:
    """Rank of a prompt's row, of `count` of its request and `flat` before it in the batch."""
    if strategy == "round_robin":
        return flat % world
    short, longer = divmod(count, 2 * world)
    if strategy == "zigzag":
        edge = longer * (short + 1)
        part = row // (short + 1) if row < edge else longer + (row - edge) // short
    else:
        part = row // -(-count // (2 * world))
    return min(part, 2 * world - 1 - part)


def shared(session: Any, batch: list[tuple[int, int, int]], options: dict[str, Any]) -> dict[str, Any]:
    """The outcome of one batch: `wrong` lists the outputs that differ from counting by hand."""
    split = {"world": 3, "strategy": "head_tail", "decodes": "replicated", "padded_rows": 0, **options}
    given = {
        "query_start_loc": Tensor("i32", np.cumsum([0] + [rows for _, rows, _ in batch]).astype(np.int32)),
        "context_lens": Tensor("i32", np.array([computed for computed, _, _ in batch], np.int32)),
        "is_prefilling": Tensor("u8", np.array([prefills for _, _, prefills in batch], np.uint8)),
    }
    try:
        outputs = session.pcp_layout(**given, **split).outputs
    except (AttributeError, Unsupported) as reason:
        return {"unsupported": str(reason)}
    ranks: list[list[int]] = [[] for _ in range(split["world"])]
    position, decodes = [], 0
    for computed, count, prefills in batch:
        chunk = -(-count // (2 * len(ranks)))
        whole = split["strategy"] == "head_tail_or_whole" and (2 * len(ranks) - 1) * chunk >= count
        follows = prefills or split["decodes"] == "split"
        for row in range(count):
            rightful = owner(split["strategy"], len(ranks), row, count, len(position))
            owns = rightful if follows else decodes % len(ranks)
            everywhere = whole or not prefills and split["decodes"] == "replicated"
            for rank in range(len(ranks)) if everywhere else [owns]:
                ranks[rank].append(len(position))
            position.append(computed + row)
        decodes += 0 if prefills or count == 0 else 1
    rows, padded = outputs["rows"], max([split["padded_rows"], *map(len, ranks)])
    real, seen = rows >= 0, np.array(position)[rows]
    gathered = rows.reshape(-1)
    written = [np.sort(gathered[writer == 1]) for writer in outputs["kv_writer"]]
    right = {
        "rows": rows.shape[1] == padded
        and [sorted(own[own >= 0].tolist()) for own in rows] == ranks
        and all((own[: len(ranks[rank])] >= 0).all() for rank, own in enumerate(rows)),
        "positions": (outputs["positions"][real] == seen[real]).all(),
        "row_lens": (outputs["row_lens"] == np.where(real, seen + 1, 0)).all(),
        "restore": all((gathered[places] == np.arange(len(position))).all() for places in outputs["restore"]),
        "kv_writer": all(np.array_equal(once, np.arange(len(position))) for once in written),
    }
    return {"wrong": [name for name, holds in right.items() if not holds]}
