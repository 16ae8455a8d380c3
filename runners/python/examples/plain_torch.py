"""Plain attention in torch behind the harness: the example to copy. It computes one rank after the other."""

import numpy as np
import torch

import shardcheck
from shardcheck import Contract, Operation, Tensor
from shardcheck.layout import Layout


class PlainSession(shardcheck.Session):
    def __init__(self, configuration):
        super().__init__(configuration)
        c, self.grid = configuration, Layout.of(configuration)
        widths = [c.qk_dim] if c.attention.is_mla else [c.qk_dim, c.value_dim]
        shape = (c.tp, c.blocks * c.block_size, c.kv_heads)
        self.caches = [torch.full((*shape, width), torch.nan) for width in widths]

    def write_kv(self, key, positions, requests, block_table, value=None):
        c, real = self.configuration, np.flatnonzero(requests.codes >= 0)  # the others are graph padding
        at = positions.codes[real]
        slots = self.grid.slot(at, block_table.codes[requests.codes[real], self.grid.table_entry(at)])
        for rank in range(c.tp):
            own = self.grid.owner(at) == rank % c.dcp
            for cache, given in zip(self.caches, [key, value]):
                held = Tensor.from_f32(c.kv_dtype, given.numpy()[real[own]] / c.kv_scale, "saturate")
                cache[rank, slots[own]] = torch.from_numpy(held.numpy() * np.float32(c.kv_scale))

    def decode(self, query, seq_lens, query_start_loc, block_table, mask, w_uv=None):
        c, q, starts = self.configuration, query.torch().float(), query_start_loc.codes
        outs = torch.zeros(c.dcp, *q.shape[:2], c.value_dim)
        lses = torch.full((c.dcp, *q.shape[:2]), -torch.inf)  # of a rank without tokens it stays so
        for request, rank in np.ndindex(len(seq_lens.codes), c.tp):
            length, member, share = seq_lens.codes[request], rank % c.dcp, c.gathered_heads // c.kv_heads
            heads = slice((rank - member) * c.heads_per_rank, (rank - member + c.dcp) * c.heads_per_rank)
            at = self.grid.positions(length, member)
            slots = self.grid.slot(at, block_table.codes[request, self.grid.table_entry(at)])
            tokens = [cache[rank, slots].repeat_interleave(share, 1) for cache in self.caches]
            for row in range(starts[request], starts[request + 1]):
                behind = 0 if mask == "bidirectional" else starts[request + 1] - row - 1
                if n := int((at < length - behind).sum()):
                    scores = torch.einsum("hd,nhd->hn", q[row, heads], tokens[0][:n]) * c.softmax_scale
                    values = tokens[-1][:n, :, : c.value_dim]
                    lses[member, row, heads] = scores.logsumexp(1)
                    outs[member, row, heads] = torch.einsum("hn,nhd->hd", scores.softmax(1), values)
        lse = lses.logsumexp(0)  # the merge: a rank weighs exp(its LSE − the LSE of all)
        out = ((lses - lse).exp().nan_to_num(0)[..., None] * outs).sum(0)
        out = out if w_uv is None else torch.einsum("thd,hdv->thv", out, w_uv.torch().float())
        out, lse = (x.unflatten(1, (c.tp, c.heads_per_rank)).movedim(1, 0) for x in (out, lse))
        return {"out": out.bfloat16(), "lse": lse}  # the first axis is the rank

    verify = draft = decode


class Plain(shardcheck.Engine):
    name, version, session_type = "plain-torch", torch.__version__, PlainSession
    # f32 sums in any order, exp and log within 2 ulp, scores complete before the first exp
    attends = Operation(contract=Contract.f32(output="bf16", tile_min=1 << 20, merge="ag_rs_f32"))
    operations = {"write_kv": Operation(), "decode": attends, "verify": attends, "draft": attends}
