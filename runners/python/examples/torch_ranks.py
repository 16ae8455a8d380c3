"""Decode context parallelism in torch with a process for each rank, over gloo or NCCL.

    shardcheck run --engine exec:'torchrun --nproc-per-node 4 -m shardcheck.adapter torch_ranks.py:TorchRanks'

A rank holds its own cache, gathers the query of its group, attends over what it holds, and merges by either
backend. Sessions of another number of ranks than there are processes, or of several groups, are unsupported.
"""

import numpy as np
import torch

import shardcheck
from shardcheck import Contract, Conventions, Operation, Reply, Tensor, Unsupported
from shardcheck.layout import Layout
from shardcheck.ranks import Ranks


class RankSession(shardcheck.Session):
    """What one rank does in a session."""

    def __init__(self, configuration, ranks):
        super().__init__(configuration)
        c, self.ranks, self.grid = configuration, ranks, Layout.of(configuration)
        widths = [c.qk_dim] if c.attention.is_mla else [c.qk_dim, c.value_dim]
        shape = (c.blocks * c.block_size, c.kv_heads)
        self.caches = [torch.full((*shape, width), torch.nan, device=ranks.device) for width in widths]

    def write_kv(self, key, positions, requests, block_table, value=None):
        """Writes the tokens that this rank owns; the caches hold values as the KV format rounds them."""
        c = self.configuration
        real = np.flatnonzero(requests.codes >= 0)
        own = real[self.grid.owner(positions.codes[real]) == self.ranks.rank]
        at = positions.codes[own]
        slots = np.full(len(requests.codes), -1)
        slots[own] = self.grid.slot(at, block_table.codes[requests.codes[own], self.grid.table_entry(at)])
        for cache, given in zip(self.caches, [key, value]):
            held = Tensor.from_f32(c.kv_dtype, given.numpy()[own] / c.kv_scale, "saturate")
            cache[slots[own]] = torch.from_numpy(held.numpy() * np.float32(c.kv_scale)).to(cache)
        return {"slots": self.ranks.gather(slots)}

    def decode(self, query, seq_lens, query_start_loc, block_table, mask, w_uv=None):
        """Gathers queries, attends, merges, projects; results go to rank 0 alone."""
        c, ranks = self.configuration, self.ranks
        own = slice(ranks.rank * c.heads_per_rank, (ranks.rank + 1) * c.heads_per_rank)
        q = query.torch(ranks.device)
        if c.dcp > 1 and not c.query_replication:
            q = ranks.all_gather(q[:, own]).movedim(0, 1).flatten(1, 2)
        batch = (seq_lens.codes, query_start_loc.codes, block_table.codes)
        partial, lse = self.attend(q.float(), *batch, mask == "bidirectional")
        weights = None if w_uv is None else w_uv.torch(ranks.device).float()
        before = weights is not None and c.dcp > 1 and c.project_before_merge
        partial = torch.einsum("thd,hdv->thv", partial, weights) if before else partial
        out, merged = self.merge(partial, lse)
        if weights is not None and not before:
            out = torch.einsum("thd,hdv->thv", out, weights[own])
        outputs = {"out": out.bfloat16(), "lse": merged, "partial_out": partial, "partial_lse": lse}
        path = {
            "comm_backend": c.comm_backend if c.dcp > 1 else "none",
            "lane_order": "none",
            "query_replication": c.dcp > 1 and c.query_replication,
            "project_before_merge": before,
        }
        return Reply({name: ranks.gather(value) for name, value in outputs.items()}, path)

    verify = draft = decode

    def attend(self, q, lens, starts, table, bidirectional):
        """Partial `[T, H·W, Dv]` and LSE `[T, H·W]` over the tokens of this rank."""
        c = self.configuration
        out = torch.zeros(*q.shape[:2], c.value_dim, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
        for request, length in enumerate(lens):
            at = self.grid.positions(length, self.ranks.rank)
            slots = self.grid.slot(at, table[request, self.grid.table_entry(at)])
            share = c.gathered_heads // c.kv_heads
            tokens = [cache[slots].repeat_interleave(share, 1) for cache in self.caches]
            for row in range(starts[request], starts[request + 1]):
                behind = 0 if bidirectional else starts[request + 1] - row - 1
                if n := int((at < length - behind).sum()):
                    scores = torch.einsum("hd,nhd->hn", q[row], tokens[0][:n]) * c.softmax_scale
                    lse[row] = scores.logsumexp(1)
                    values = tokens[-1][:n, :, : c.value_dim]
                    out[row] = torch.einsum("hn,nhd->hd", scores.softmax(1), values)
        return out, lse

    def merge(self, out, lse):
        """This rank's own heads `[T, H, …]`, merged by LSE over all ranks."""
        world, rank = self.configuration.dcp, self.ranks.rank
        if world == 1:
            return out, lse
        if self.configuration.comm_backend == "a2a":
            packed = torch.cat([out, lse[..., None]], -1).unflatten(1, (world, -1)).movedim(1, 0)
            received = self.ranks.all_to_all(packed)
            merged = received[..., -1].logsumexp(0)
            return (weights_of(received[..., -1], merged) * received[..., :-1]).sum(0), merged
        lses = self.ranks.all_gather(lse)
        merged = lses.logsumexp(0)
        corrected = weights_of(lses[rank], merged) * out
        scattered = self.ranks.reduce_scatter(corrected.unflatten(1, (world, -1)).movedim(1, 0))
        return scattered, merged.unflatten(1, (world, -1))[:, rank]


def weights_of(lse, merged):
    """exp(LSE − merged LSE), and 0 where there is nothing at all."""
    return (lse - merged).exp().nan_to_num(0)[..., None]


class TorchRanks(shardcheck.Engine):
    """The engine; `backend` is `gloo` or `nccl`."""

    name, version = "torch-ranks", torch.__version__
    # f32 sums in any order, exp and log within 2 ulp, scores complete before the first exp
    attends = Operation(
        contract=Contract.f32(output="bf16", tile_min=1 << 20, merge="ag_rs_f32"),
        conventions=Conventions(empty_partial="zero"),
        observables=["partial_out", "partial_lse"],
    )
    operations = {
        "write_kv": Operation(observables=["slots"]),
        "decode": attends,
        "verify": attends,
        "draft": attends,
    }

    def __init__(self, backend: str | None = None):
        self.ranks = Ranks.join(backend)
        self.devices = [self.ranks.device.partition(":")[0]]

    def open(self, configuration) -> RankSession:
        """A session of as many ranks as there are processes."""
        self.ranks.require(configuration.tp)
        if configuration.dcp != configuration.tp:
            raise Unsupported("one group of all ranks, not several groups")
        return RankSession(configuration, self.ranks)
