"""Steps of attention for calls of engines (`cutting`): what a rank's cache holds, which request a row is of, ranks of all groups, the up-projection.
numpy and torch, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from cutting import on_ranks


def dense(array: np.ndarray) -> object:
    """A torch tensor of an input: integers and f16 as they are, bf16 as the float32 that it comes as."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


def caches_of(step: SimpleNamespace, rank: int) -> list:
    """Keys, and values where there are any, as the writes before the step leave them on a rank, `[blocks, B, K, width]`; NaN where nothing is.

    Position p lies on rank (p div S) mod W of a group, in the block of table entry p div (B*W): whether a release writes there is not asked."""
    c = step.configuration
    if c["kv_dtype"] not in ("bf16", "f16", "f32"):
        raise NotImplementedError(f"the calls write no cache of {c['kv_dtype']}")
    size, world, block = c["interleave"], c["dcp"], c["block_size"]
    held: dict[str, np.ndarray] = {}
    for write in step.inputs["writes"]:
        requests, positions = write["requests"], write["positions"]
        own = (requests >= 0) & (positions // size % world == rank % world)
        requests, positions = requests[own], positions[own]
        blocks = write["block_table"][requests, positions // (block * world)]
        local = positions // (size * world) * size + positions % size
        for name in ("key", "value"):
            if name in write:
                tokens = write[name]
                cache = held.setdefault(name, np.full((c["blocks"], block, *tokens.shape[1:]), np.nan, tokens.dtype))
                cache[blocks, local % block] = tokens[own]
    return [dense(cache) for cache in held.values()]


def requests_of_rows(step: SimpleNamespace) -> np.ndarray:
    """Request of each row of the query, i64 `[T]`, −1 for padding."""
    counts = np.diff(step.inputs["query_start_loc"])
    requests = np.full(len(step.inputs["query"]), -1)
    requests[: counts.sum()] = np.repeat(np.arange(len(counts)), counts)
    return requests


def row_lengths(step: SimpleNamespace, count: object) -> object:
    """Tokens of a rank that each row sees, i32 `[T]`, none for padding: by `count(lens, rows)`, requests of `lens` tokens and `rows` rows each, asked
    once where all have as many and request by request where not."""
    import torch

    lens, counts = dense(step.inputs["seq_lens"]), np.diff(step.inputs["query_start_loc"]).tolist()
    seen = torch.zeros(len(step.inputs["query"]), dtype=torch.int32)
    if len(set(counts)) == 1 and counts[0]:
        found = [count(lens, counts[0])]
    else:
        found = [count(lens[at : at + 1], rows) for at, rows in enumerate(counts) if rows]
    if found:
        seen[: sum(counts)] = torch.cat(found).to(torch.int32)
    return seen


def own_query(step: SimpleNamespace, rank: int) -> object:
    """The query of a rank's own heads, `[T, H, Dk]`."""
    heads = step.configuration["heads_per_rank"]
    return dense(step.inputs["query"][:, rank * heads : (rank + 1) * heads])


def refuse_rounded_products(c: dict) -> None:
    """Refuses f16 with one query head a KV head: decode kernels multiply element by element there and round each product to 16 bits."""
    if c.get("dtype") == "f16" and c["attention"].get("kv_heads", 1) == c["heads_per_rank"] * c["dcp"]:
        raise NotImplementedError("with one query head a KV head the kernel rounds each product to 16 bits: no contract says that")


def on_all_ranks(step: SimpleNamespace, run: object) -> dict:
    """Outputs and LSEs of a step of which `run(rank, group)` gives a rank's, `[T, H, D]` and `[T, H]`: padding without tokens where no merge makes it
    so, outputs behind the up-projection of the rank's heads where there is one (f32, rounded to the output's type)."""
    import torch

    c, parts = step.configuration, []
    if c["project_before_merge"]:
        raise NotImplementedError("the calls project what is merged, never partials")
    for first in range(0, c["tp"], c["dcp"]):
        parts += on_ranks(c["dcp"], lambda group, first=first: run(first + group.rank_in_group, group))
    outs, lses = [part[0] for part in parts], [part[1].float() for part in parts]
    if c["dcp"] == 1:
        padding = torch.from_numpy(requests_of_rows(step) < 0)
        for out, lse in zip(outs, lses, strict=True):
            out[padding], lse[padding] = 0.0, -torch.inf
    if "w_uv" in step.inputs:
        weights = dense(step.inputs["w_uv"]).float().chunk(c["tp"])
        outs = [
            torch.bmm(out.float().transpose(0, 1), own).transpose(0, 1).to(out.dtype)
            for out, own in zip(outs, weights, strict=True)
        ]
    return {"out": torch.stack(outs), "lse": torch.stack(lses)}
