"""A step of attention under decode context parallelism with the engine's lengths, masks and merge. The attention of a rank is a kernel
of the device: what stands here for it reads what the engine hands that kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters.batches import Batch, project
from shardcheck.adapters.caches import Caches, RankCache, is_narrow
from shardcheck.adapters.vllm_ascend.layout import Layout
from shardcheck.adapters.vllm_ascend.release import Release


@dataclass
class RankResult:
    """What a rank computed: merged output and LSE of its own heads, its partial, the tokens that each row saw, and the query that
    its kernel received."""

    out: torch.Tensor
    lse: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    row_lens: torch.Tensor
    query: torch.Tensor


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
        jobs = [RankAttention(c, self.caches.of_rank(rank), rank, kind, batch) for rank in range(c.tp)]
        results, collectives = self.executor.run(jobs, c.dcp)
        outs = [project(result.out, rank, w_uv, c.heads_per_rank) for rank, result in enumerate(results)]
        names = ("lse", "partial_out", "partial_lse", "row_lens")
        stacked = {name: torch.stack([getattr(result, name) for result in results]) for name in names}
        # exact: queries are bf16 values, whatever they are held in
        query = torch.stack([result.query for result in results]).to(torch.bfloat16)
        effective = {"route": kind, "query_replication": False, "project_before_merge": False}
        if c.dcp > 1:
            effective |= {"comm_backend": "a2a"}
        return Reply({"out": torch.stack(outs), **stacked, "gathered_query": query}, effective, collectives)

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
            joined = release.process(out, lse[..., None])
            merged = release.weigh(c.value_dim, joined)
        merged_lse = release.observed_lse().view(len(query), c.heads_per_rank)
        return RankResult(merged, merged_lse, out, lse, seen, query)

    def _attend(
        self, layout: Layout, query: torch.Tensor, member: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output `[T, Hg, D]` and LSE `[T, Hg]` over the rank's tokens, and how many of them each row saw; zeros at LSE −∞ for a row
        that sees none."""
        c, batch = self.configuration, self.batch
        keys = self.cache.read("key_cache", "cpu").flatten(0, 1)
        values = keys if c.attention.is_mla else self.cache.read("value_cache", "cpu").flatten(0, 1)
        out = torch.zeros(len(query), query.shape[1], c.value_dim)
        lse = torch.full(query.shape[:2], -torch.inf)
        seen = torch.zeros(len(query), dtype=torch.int32)
        if not len(batch.seq_lens):
            return out, lse, seen
        lens = layout.local_lens(batch.seq_lens, member).tolist()
        masked = self.kind == "verify" and c.dcp > 1
        mask = layout.mask(batch.seq_lens, batch.query_lens, member) if masked else None
        for row, request in enumerate(batch.requests.tolist()):
            if request < 0:
                continue
            length, place = lens[request], row - int(batch.starts[request])
            slots = torch.arange(length)
            blocks = torch.from_numpy(batch.table[request].astype("int64"))[slots // c.block_size]
            chosen = blocks * c.block_size + slots % c.block_size
            if mask is not None:
                chosen = chosen[~mask[request, place, :length]]
            elif self.kind == "verify":  # one rank: the kernel's own causal mask
                chosen = chosen[: length - int(batch.query_lens[request]) + place + 1]
            seen[row] = len(chosen)
            if len(chosen):
                share = query.shape[1] // c.kv_heads
                held = keys[chosen].repeat_interleave(share, 1)
                scores = torch.einsum("hd,nhd->hn", query[row], held) * c.softmax_scale
                lse[row] = scores.logsumexp(1)
                value = values[chosen][..., : c.value_dim].repeat_interleave(share, 1)
                out[row] = torch.einsum("hn,nhd->hd", scores.softmax(1), value)
        return out, lse, seen
