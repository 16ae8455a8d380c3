"""Plain attention in torch behind the harness: the example to copy. One rank computes all, so W is 1."""

import torch

import shardcheck
from shardcheck import Contract, Operation, Unsupported


class PlainSession(shardcheck.Session):
    def __init__(self, configuration):
        super().__init__(configuration)
        c, types = configuration, {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
        if c.tp > 1 or c.kv_dtype not in types:
            raise Unsupported(f"one rank and a cache in {', '.join(types)}, not {c.tp} and {c.kv_dtype}")
        widths = [c.qk_dim] if c.attention.is_mla else [c.qk_dim, c.value_dim]
        shape = (c.blocks * c.block_size, c.kv_heads)
        self.cache = [torch.full((*shape, width), torch.nan, dtype=types[c.kv_dtype]) for width in widths]

    def write_kv(self, key, positions, requests, block_table, value=None):
        positions, requests, table = positions.torch(), requests.torch().long(), block_table.torch().long()
        real = requests >= 0  # the others are graph padding
        block = table[requests[real], positions[real] // self.configuration.block_size]
        slots = torch.full_like(positions, -1)
        slots[real] = block * self.configuration.block_size + positions[real] % self.configuration.block_size
        for cache, given in zip(self.cache, [key, value]):
            cache[slots[real]] = given.torch()[real].to(cache.dtype)
        return {"slots": slots[None]}

    def decode(self, query, seq_lens, query_start_loc, block_table):
        c, q, table = self.configuration, query.torch().float(), block_table.torch().long()
        starts, block = query_start_loc.torch().tolist(), torch.arange(c.block_size)
        out, lse = torch.zeros(*q.shape[:2], c.value_dim), torch.full(q.shape[:2], -torch.inf)
        for request, length in enumerate(seq_lens.torch().tolist()):
            pages = table[request, : -(-length // c.block_size)]
            slots = (pages[:, None] * c.block_size + block).reshape(-1)[:length]
            k = self.cache[0][slots].float().repeat_interleave(c.gathered_heads // c.kv_heads, dim=1)
            v = self.cache[-1][slots].float().repeat_interleave(c.gathered_heads // c.kv_heads, dim=1)
            for row in range(starts[request], starts[request + 1]):
                # causal: what lies before the row, and itself; a row that sees nothing stays 0, its LSE −∞
                seen = length - (starts[request + 1] - row) + 1
                if seen > 0:
                    scores = torch.einsum("hd,nhd->hn", q[row], k[:seen]) * c.softmax_scale
                    lse[row] = torch.logsumexp(scores, dim=1)
                    weights = torch.softmax(scores, dim=1)
                    out[row] = torch.einsum("hn,nhd->hd", weights, v[:seen, :, : c.value_dim])
        return {"out": out.bfloat16()[None], "lse": lse[None]}  # the first axis is the rank

    verify = decode


class Plain(shardcheck.Engine):
    name, version, session_type = "plain-torch", torch.__version__, PlainSession
    # f32 sums in any order, exp and log within 2 ulp, scores complete before the first exp
    attends = Operation(contract=Contract.f32(output="bf16", tile_min=1 << 20))
    operations = {"write_kv": Operation(observables=["slots"]), "decode": attends, "verify": attends}
