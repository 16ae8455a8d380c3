"""Attention over a cached context as SGLang's MLA layer runs it: chunk plan, filter of a rank's tokens, gather over
ranks, merges of chunks.

The layer's own `_chunked_prefix_attn_mha` and the plan of its batch run on objects with the attributes that they
read. The attention of a chunk is a compiled kernel and stood in for. The up-projection is the identity here, so that
keys and values of every head are the latent, as the operation has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.batches import IdentityProjection, attend_packed
from shardcheck.adapters.caches import Caches, RankCache, is_narrow
from shardcheck.adapters.sglang.layout import Layout
from shardcheck.adapters.sglang.release import Release
from shardcheck.adapters.sglang.surroundings import LatentPool, Parallel


class Context:
    """Context steps of one session."""

    def __init__(self, configuration: Configuration, caches: Caches, executor: Any) -> None:
        self.configuration = configuration
        self.caches = caches
        self.executor = executor

    def step(
        self, budget: int, query: Tensor, key: Tensor, context_lens: Tensor, starts: Tensor, table: Tensor
    ) -> Reply:
        """Runs a step on all ranks; `budget` is the capacity of a chunk in tokens."""
        c = self.configuration
        lens, start, blocks = (np.ascontiguousarray(t.numpy()) for t in (context_lens, starts, table))
        self._check(budget, lens)
        queries, keys = (
            torch.from_numpy(np.ascontiguousarray(t.numpy(), dtype=np.float32)) for t in (query, key)
        )
        given = (lens, start, blocks, queries, keys)
        jobs = [RankContext(c, rank, self.caches.of_rank(rank), budget, *given) for rank in range(c.tp)]
        results, collectives = self.executor.run(jobs, c.dcp)
        names = ("out", "lse", "gathered_key", "chunk_lens")
        outputs = {name: torch.stack([getattr(found, name) for found in results]) for name in names}
        return Reply(outputs, {"route": "context", "chunks": len(results[0].chunk_lens)}, collectives)

    def _check(self, budget: int, lens: np.ndarray) -> None:
        c = self.configuration
        if not c.attention.is_mla:
            raise Unsupported("the plan and the gather of a context are code of the MLA layer")
        if is_narrow(c.kv_dtype):
            raise Unsupported("the layer reads a quantised cache by a compiled kernel")
        if c.interleave > 1 and c.dcp > 1:
            raise Unsupported("the gather of a context takes single tokens in turn, it has no interleave size")
        if budget < len(lens) and lens.any():
            raise Unsupported("the plan gives each request as much of a chunk, a token at least")


@dataclass
class ContextResult:
    """What a rank computed: output `[T, H, R]` and LSE, keys in the order of use, lengths of each chunk."""

    out: torch.Tensor
    lse: torch.Tensor
    gathered_key: torch.Tensor
    chunk_lens: torch.Tensor


@dataclass
class RankContext:
    """A step on one rank: stands in for the layer's attention, and keeps what passes by."""

    configuration: Configuration
    rank: int
    cache: RankCache
    budget: int
    lens: np.ndarray
    starts: np.ndarray
    table: np.ndarray
    query: torch.Tensor
    key: torch.Tensor

    def run(self, release: Release, group: Any) -> ContextResult:
        """Attends to new tokens, then merges the chunks of the context into that, for the rank's own heads of all real
        rows."""
        c, self.release = self.configuration, release
        rows, own, latent = int(self.starts[-1]), c.heads_per_rank, c.attention.kv_lora_rank
        self.keys: list[torch.Tensor] = []
        batch = self._batch(group)
        q = self.query[:rows, self.rank * own : (self.rank + 1) * own].contiguous()
        new = self.key[:rows].expand(-1, own, -1)
        state = self._attend(q, new, new[..., :latent], self.starts, causal=True)
        if batch.num_prefix_chunks:
            with interpreter.limits():
                out = release.attend_context(
                    self._layer(), q=q, accum_output=state[0], accum_lse=state[1], forward_batch=batch
                )
            state = out, release.observed_lse()
        out = torch.zeros(len(self.query), own, latent)
        lse = torch.full((len(self.query), own), -torch.inf)
        out[:rows], lse[:rows] = state
        keys = torch.cat(self.keys) if self.keys else torch.zeros(0, c.qk_dim)
        chunks = batch.prefix_chunk_seq_lens_cpu
        if chunks is None:
            chunks = torch.zeros(1, len(self.lens))
        return ContextResult(out, lse, keys.view(-1, 1, c.qk_dim), chunks.to(torch.int32))

    def _batch(self, group: Any) -> Any:
        """The batch of a forward, with the chunks that the engine plans for it."""
        c, release = self.configuration, self.release
        layout = Layout(release, c, "backend")
        ids = np.zeros((len(self.lens), max(1, int(self.lens.max(initial=0)))), dtype=np.int32)
        for request, length in enumerate(self.lens.tolist()):
            ids[request, :length] = layout.widened(self.table, np.full(length, request), np.arange(length))
        release.groups.act(
            Parallel(
                c.dcp,
                group.rank_in_group,
                group,
                backend=SimpleNamespace(kv_index_translator=release.static_translator()),
                pool=LatentPool(),
                request_pool=SimpleNamespace(req_to_token=torch.from_numpy(ids)),
            )
        )
        batch = type("Batch", (release.context_batch,), {"get_max_chunk_capacity": lambda _: self.budget})()
        batch.batch_size = len(self.lens)
        batch.extend_prefix_lens = torch.from_numpy(self.lens)
        batch.extend_prefix_lens_cpu = self.lens.tolist()
        batch.req_pool_indices = torch.arange(len(self.lens))
        batch.prepare_chunked_prefix_cache_info(torch.device("cpu"))
        self.batch = batch
        return batch

    def _layer(self) -> SimpleNamespace:
        """The attributes of the layer that its method reads."""
        c = self.configuration
        latent = c.attention.kv_lora_rank
        return SimpleNamespace(
            kv_b_proj=IdentityProjection(c.heads_per_rank),
            num_local_heads=c.heads_per_rank,
            qk_nope_head_dim=latent,
            qk_rope_head_dim=c.attention.qk_rope_head_dim,
            v_head_dim=latent,
            attn_mha=self._attend_chunk,
            _get_mla_kv_buffer=self._rows_of_cache,
        )

    def _rows_of_cache(self, rows: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and rotary parts of rows of the cache, in the place of a method of the cache."""
        held = self.cache.read("key_cache", "cpu").flatten(0, 1)
        bad = rows[(rows < 0) | (rows >= len(held))]
        if len(bad):
            raise RuntimeError(f"illegal address: row {int(bad[0])} of a cache of {len(held)}")
        latent = self.configuration.attention.kv_lora_rank
        found = held[rows.long()]
        return found[:, 0, :latent], found[..., latent:]

    def _attend_chunk(self, q: Any, k: Any, v: Any, batch: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over one chunk without a mask, in the place of a compiled kernel; a request without tokens in it
        gets zeros at LSE −∞."""
        self.keys.append(k[:, 0].clone())
        starts = batch.prefix_chunk_cu_seq_lens[batch.prefix_chunk_idx].numpy()
        return self._attend(q, k, v, starts, causal=False)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: np.ndarray, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend_packed(q, k, v, self.starts, starts, self.configuration.softmax_scale, causal)
        return out, lse.t().contiguous()
