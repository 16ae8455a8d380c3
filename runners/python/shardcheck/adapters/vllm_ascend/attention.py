"""A step of attention under decode context parallelism with the engine's lengths, masks and merge. The attention of a rank is a kernel
of the device: what stands here for it reads what the engine hands that kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters.batches import Batch, project, torch_half
from shardcheck.adapters.caches import Caches, RankCache, is_narrow
from shardcheck.adapters.vllm_ascend.layout import Layout
from shardcheck.adapters.vllm_ascend.merging import fuse
from shardcheck.adapters.vllm_ascend.release import Release


@dataclass
class RankResult:
    """What a rank computed: merged output and LSE of its own heads, its partial, the tokens that each row saw, and the query that
    its kernel received."""

    out: torch.Tensor
    lse: torch.Tensor
    query: torch.Tensor
    partial_out: torch.Tensor | None = None
    partial_lse: torch.Tensor | None = None
    row_lens: torch.Tensor | None = None


class Attention:
    """Steps of attention of one session: what all ranks share."""

    def __init__(self, release: Release, configuration: Configuration, caches: Caches, executor: Any) -> None:
        self.release = release
        self.configuration = configuration
        self.caches = caches
        self.executor = executor

    def step(self, kind: str, batch: Batch, w_uv: Tensor | None) -> Reply:
        """Runs a step on all ranks. `kind` is `decode` or `verify`."""
        c = self.configuration
        self._check()
        if len(batch.query) == 0:
            raise Unsupported("a step without a row is never run")
        if kind == "verify" and self.release.merges_local:
            new = [self._new_tokens(batch, first) for first in range(0, c.tp, c.dcp)]
            jobs = [SplitAttention(c, self.caches.of_rank(rank), rank, batch, *new[rank // c.dcp]) for rank in range(c.tp)]
        else:
            jobs = [RankAttention(c, self.caches.of_rank(rank), rank, kind, batch) for rank in range(c.tp)]
        results, collectives = self.executor.run(jobs, c.dcp)
        outs = [project(result.out, rank, w_uv, c.heads_per_rank) for rank, result in enumerate(results)]
        names = ("lse", "partial_out", "partial_lse", "row_lens")
        shown = [name for name in names if getattr(results[0], name) is not None]
        stacked = {name: torch.stack([getattr(result, name) for result in results]) for name in shown}
        if "partial_out" in stacked:
            stacked["partial_out"] = stacked["partial_out"].float()
        # exact: queries are values of that type, whatever they are held in
        query = torch.stack([result.query for result in results]).to(torch_half(c.dtype))
        effective = {"route": kind, "query_replication": False, "project_before_merge": False}
        if c.dcp > 1:
            effective |= {"comm_backend": "a2a"}
        return Reply({"out": torch.stack(outs), **stacked, "gathered_query": query}, effective, collectives)

    def _new_tokens(self, batch: Batch, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the token of every row but padding, `[rows, K, D]`, from the ranks of the group from `first` on whose slots the
        engine gives them."""
        c, layout = self.configuration, Layout(self.release, self.configuration)
        rows = int(batch.starts[-1])
        requests = batch.requests[:rows]
        positions = batch.seq_lens[requests] - batch.starts[1:][requests] + np.arange(rows)
        kind = torch.float16 if c.dtype == "f16" else torch.float32
        found = [torch.full((rows, c.kv_heads, width), torch.nan, dtype=kind) for width in (c.qk_dim, c.value_dim)]
        for member in range(c.dcp):
            slots = layout.slots(batch.table, requests, positions.astype(np.int64), member)
            owned = slots >= 0
            for into, stored in zip(found, held(self.caches.of_rank(first + member), c), strict=True):
                into[owned] = stored[slots[owned]][..., : into.shape[-1]]
        return found[0], found[1]

    def _check(self) -> None:
        c = self.configuration
        if c.project_before_merge:
            raise Unsupported("the engine projects merged outputs, never partials")
        if c.query_replication and c.dcp > 1:
            raise Unsupported("the engine gathers queries, it has no projection that makes them on every rank")
        if c.dcp > 1 and c.comm_backend != "a2a":
            raise Unsupported("partials are exchanged by an all-to-all alone")
        if is_narrow(c.kv_dtype):
            raise Unsupported("quantised caches are kernels of the device")


@dataclass
class RankAttention:
    """A step on one rank."""

    configuration: Configuration
    cache: RankCache
    rank: int
    kind: str
    batch: Batch

    def run(self, release: Release, group: Any) -> RankResult:
        """Attends to the rank's own tokens and merges with the group."""
        c, first = self.configuration, self.rank * self.configuration.heads_per_rank
        own = self.batch.query[:, first : first + c.heads_per_rank].contiguous()
        query = group.all_gather(own, 1)
        out, lse, seen = self._attend(Layout(release, c), query, group.rank_in_group)
        with release.groups.acting(group):
            if release.merges_by_fused:
                merged, merged_lse = fuse(release, group, out, lse)
            else:
                merged = release.weigh(c.value_dim, release.process(out, lse[..., None]))
                merged_lse = release.observed_lse().view(len(query), c.heads_per_rank)
        return RankResult(merged.to(out.dtype), merged_lse, query, out, lse, seen)

    def _attend(
        self, layout: Layout, query: torch.Tensor, member: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output `[T, Hg, D]` and LSE `[T, Hg]` over the rank's tokens, and how many of them each row saw; zeros at LSE −∞ for a row
        that sees none."""
        c, batch = self.configuration, self.batch
        attend = Attending(c, query)
        if not len(batch.seq_lens):
            return attend.out, attend.lse, attend.seen
        lens = layout.local_lens(batch.seq_lens, member).tolist()
        masked = self.kind == "verify" and c.dcp > 1
        mask = layout.mask(batch.seq_lens, batch.query_lens, member) if masked else None
        keys, values = held(self.cache, c)
        for row, request in enumerate(batch.requests.tolist()):
            if request < 0:
                continue
            length, place = lens[request], row - int(batch.starts[request])
            chosen = slots_of(c, batch.table[request], length)
            if mask is not None:
                chosen = chosen[~mask[request, place, :length]]
            elif self.kind == "verify":  # one rank: the kernel's own causal mask
                chosen = chosen[: length - int(batch.query_lens[request]) + place + 1]
            attend.row(row, keys[chosen], values[chosen])
        return attend.out, attend.lse, attend.seen


@dataclass
class SplitAttention:
    """A verification on one rank where a release keeps new tokens out of the exchange: all rows over the rank's part of the history, exchanged,
    and beside what was received each row of the rank's own heads over its request's new tokens `[rows, K, D]`, which every rank has."""

    configuration: Configuration
    cache: RankCache
    rank: int
    batch: Batch
    new_keys: torch.Tensor
    new_values: torch.Tensor

    def run(self, release: Release, group: Any) -> RankResult:
        """Attends to history and new tokens and merges them with the group's."""
        c, batch, first = self.configuration, self.batch, self.rank * self.configuration.heads_per_rank
        own = batch.query[:, first : first + c.heads_per_rank].contiguous()
        query = group.all_gather(own, 1)
        layout = Layout(release, c)
        history = Attending(c, query)
        current = Attending(c, own, group.rank_in_group * c.heads_per_rank)
        histories = batch.seq_lens - batch.query_lens
        lens = layout.local_lens(histories, group.rank_in_group).tolist() if len(histories) else []
        keys, values = held(self.cache, c)
        for row, request in enumerate(batch.requests.tolist()):
            if request < 0:
                continue
            chosen = slots_of(c, batch.table[request], lens[request])
            history.row(row, keys[chosen], values[chosen])
            seen = slice(int(batch.starts[request]), row + 1)
            current.row(row, self.new_keys[seen], self.new_values[seen])
        with release.groups.acting(group):
            merged, merged_lse = fuse(release, group, history.out, history.lse, (current.out, current.lse))
        return RankResult(merged.to(query.dtype), merged_lse, query)


class Attending:
    """Attention of rows, each over tokens of its own, in f32 and stored in the type of the query: zeros at LSE −∞ for a row that sees none. `first` is the first of the rows' heads
    among those of the group."""

    def __init__(self, configuration: Configuration, query: torch.Tensor, first: int = 0) -> None:
        self.configuration, self.query = configuration, query
        share = configuration.heads_per_rank * configuration.dcp // configuration.kv_heads
        self.heads = torch.arange(first, first + query.shape[1]) // share
        self.out = torch.zeros(len(query), query.shape[1], configuration.value_dim, dtype=query.dtype)
        self.lse = torch.full(query.shape[:2], -torch.inf)
        self.seen = torch.zeros(len(query), dtype=torch.int32)

    def row(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Attends to keys `[n, K, Dk]` and values `[n, K, Dv]`."""
        c, query = self.configuration, self.query[row].float()
        self.seen[row] = len(keys)
        if len(keys):
            scores = torch.einsum("hd,nhd->hn", query, keys[:, self.heads].float()) * c.softmax_scale
            self.lse[row] = scores.logsumexp(1)
            value = values[:, self.heads, : c.value_dim].float()
            self.out[row] = torch.einsum("hn,nhd->hd", scores.softmax(1), value).to(self.out.dtype)


def held(cache: RankCache, configuration: Configuration) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a rank's slots, `[slots, K, D]`."""
    keys = cache.read("key_cache", "cpu").flatten(0, 1)
    values = keys if configuration.attention.is_mla else cache.read("value_cache", "cpu").flatten(0, 1)
    return keys, values


def slots_of(configuration: Configuration, table: np.ndarray, count: int) -> torch.Tensor:
    """Slots of the first `count` tokens that a rank holds of a request."""
    slots = torch.arange(count)
    blocks = torch.from_numpy(table.astype("int64"))[slots // configuration.block_size]
    return blocks * configuration.block_size + slots % configuration.block_size
