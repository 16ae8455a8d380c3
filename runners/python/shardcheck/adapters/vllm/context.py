"""Attention over a cached context as vLLM's MLA layer runs it: chunk plan, gather over ranks, reordering,
merges of chunks.

The layer's own `forward_mha` runs on an object with the attributes that it reads. Two things in it are
compiled kernels and stood in for: the copy of cached rows into the workspace, and the attention of a chunk.
Its up-projection is the identity here, so that keys and values of every head are the latent, as the operation
has it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.batches import IdentityProjection, attend_packed
from shardcheck.adapters.caches import Caches, RankCache, is_narrow
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.vllm.release import Release


class Context:
    """Context steps of one session."""

    def __init__(self, configuration: Configuration, caches: Caches, executor: Any) -> None:
        self.configuration = configuration
        self.caches = caches
        self.executor = executor

    def step(
        self, budget: int, query: Tensor, key: Tensor, context_lens: Tensor, starts: Tensor, table: Tensor
    ) -> Reply:
        """Runs a step on all ranks; `budget` is the workspace in tokens."""
        c = self.configuration
        if not c.attention.is_mla:
            raise Unsupported("the plan and the gather of a context are code of the MLA layer")
        lens, start, blocks = (np.ascontiguousarray(t.numpy()) for t in (context_lens, starts, table))
        queries, keys = (
            torch.from_numpy(np.ascontiguousarray(t.numpy(), dtype=np.float32)) for t in (query, key)
        )
        given = (lens, start, blocks, queries, keys)
        jobs = [RankContext(c, rank, self.caches.of_rank(rank), budget, *given) for rank in range(c.tp)]
        results, collectives = self.executor.run(jobs, c.dcp)
        chunks = max(1, len(results[0].chunk_lens))
        chunk_lens = np.zeros((c.tp, chunks, len(lens)), dtype=np.int32)
        for index, result in enumerate(results):
            for chunk, row in enumerate(result.chunk_lens):
                chunk_lens[index, chunk] = row
        outputs = {
            "out": torch.stack([result.out for result in results]),
            "context_out": torch.stack([result.context_out for result in results]),
            "context_lse": torch.stack([result.context_lse for result in results]),
            "gathered_key": torch.stack([result.gathered_key for result in results]),
            "chunk_lens": chunk_lens,
        }
        return Reply(outputs, {"route": "context", "chunks": len(results[0].chunk_lens)}, collectives)


@dataclass
class ContextResult:
    """What a rank computed: outputs `[T, H, R]`, the context's own state, and per chunk its lengths; keys in
    the order of use."""

    out: torch.Tensor
    context_out: torch.Tensor
    context_lse: torch.Tensor
    gathered_key: torch.Tensor
    chunk_lens: list[np.ndarray]


@dataclass
class RankContext:
    """A step on one rank: stands in for the layer's prefill backend, and keeps what passes by."""

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
        """Calls `forward_mha` on the rank's own heads of all real rows."""
        self.release, self.group = release, group
        self.keys: list[torch.Tensor] = []
        self.chunk_lens: list[np.ndarray] = []
        release.groups.act(group)
        c = self.configuration
        rows, own, latent = int(self.starts[-1]), c.heads_per_rank, c.attention.kv_lora_rank
        q = self.query[:rows, self.rank * own : (self.rank + 1) * own].contiguous()
        new = self.key[:rows]
        out = torch.zeros(len(self.query), own, latent)
        self.context_out = torch.zeros_like(out)
        self.context_lse = torch.full((len(self.query), own), float("-inf"))
        flat = torch.empty(rows, own * latent)
        metadata = SimpleNamespace(
            prefill=self._metadata(self._plan(self.budget)), num_prefills=len(self.lens)
        )
        cache = self.cache.read("key_cache", "cpu")[:, :, 0]
        with interpreter.limits():
            self._layer().forward_mha(
                q, new[:, 0, :latent], new[:, :, latent:], cache, metadata, torch.tensor(c.kv_scale), flat
            )
        out[:rows] = flat.view(rows, own, latent)
        return ContextResult(out, self.context_out, self.context_lse, self._gathered(), self.chunk_lens)

    def _gathered(self) -> torch.Tensor:
        """Context keys of all chunks in the order in which they were attended to, `[tokens, 1, Dk]`."""
        width = self.configuration.qk_dim
        return torch.cat(self.keys).view(-1, 1, width) if self.keys else torch.zeros(0, 1, width)

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, return_softmax_lse: bool, **_: Any) -> Any:
        """Causal attention of new tokens, in the place of a compiled kernel."""
        scale = self.configuration.softmax_scale
        out, lse = attend_packed(q, k, v, self.starts, self.starts, scale, causal=True)
        return (out, lse) if return_softmax_lse else out

    def run_prefill_context_chunk(self, chunk: Any, q: Any, k: Any, v: Any) -> Any:
        """Attention over one chunk without a mask, in the place of a compiled kernel."""
        row = np.zeros(len(self.lens), dtype=np.int32)
        row[chunk.request_slice] = np.asarray(chunk.seq_lens)
        self.chunk_lens.append(row)
        self.keys.append(k[:, 0].clone())
        starts = chunk.query_start_loc.tolist(), chunk.cu_seq_lens.tolist()
        return attend_packed(q, k, v, *starts, self.configuration.softmax_scale, causal=False)

    def kept_context(self, result: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Notes the state of the context alone, `[rows, H, R]` and `[H, rows]`."""
        rows = len(result[0])
        self.context_out[:rows] = result[0][..., : self.configuration.attention.kv_lora_rank]
        self.context_lse[:rows] = result[1].t()
        return result

    def _plan(self, budget: int) -> Any:
        """The engine's chunks; the workspace is as its metadata builder aligns and allocates it."""
        c = self.configuration
        align = SimpleNamespace(
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=c.dcp, cp_kv_cache_interleave_size=c.interleave
            ),
            cache_config=SimpleNamespace(block_size=c.block_size),
        )
        size = self.release.align_workspace(align, budget)
        rows = size + size // c.dcp if c.dcp > 1 else size
        given = {
            "context_lens_cpu": torch.from_numpy(self.lens),
            "prefill_query_start_loc_cpu": torch.from_numpy(self.starts),
            "chunked_prefill_workspace": torch.full((rows, c.qk_dim), float("nan")),
            "chunked_prefill_workspace_size": size,
            "block_size": c.block_size,
            "align_chunk_to_block": True,
            "device": torch.device("cpu"),
            "dcp_world_size": c.dcp,
            "dcp_local_block_size": c.interleave,
            "dcp_virtual_block_size": c.interleave * c.dcp,
            "dcp_manager": SimpleNamespace(kv_gather=self.group.all_gather_into_tensor),
        }
        wanted = parameters(self.release.plan_context)
        return self.release.plan_context(**{name: value for name, value in given.items() if name in wanted})

    def _metadata(self, plan: Any) -> SimpleNamespace:
        return SimpleNamespace(
            block_table=torch.from_numpy(self.table),
            query_start_loc=torch.from_numpy(self.starts),
            max_query_len=int(np.diff(self.starts).max(initial=0)),
            chunked_context=plan,
            q_data_type=torch.float32,
            output_dtype=torch.float32,
            prefill_backend=self,
        )

    def _layer(self) -> Any:
        c = self.configuration
        layer = object.__new__(_observed_layer(self.release))
        latent = c.attention.kv_lora_rank
        attributes = {
            "num_heads": c.heads_per_rank,
            "scale": c.softmax_scale,
            "kv_cache_dtype": "fp8" if is_narrow(c.kv_dtype) else "auto",
            "kv_lora_rank": latent,
            "qk_nope_head_dim": latent,
            "qk_rope_head_dim": c.attention.qk_rope_head_dim,
            "qk_head_dim": c.qk_dim,
            "v_head_dim": latent,
            "kv_b_proj": IdentityProjection(c.heads_per_rank),
            "dcp_world_size": c.dcp,
            "_use_flashinfer_concat_mla_k": False,
            "observer": self,
        }
        vars(layer).update(attributes)
        return layer


_LOCK = threading.Lock()
_LAYERS: dict[type, type] = {}


def _observed_layer(release: Release) -> type:
    """The backend's class with its two context methods watched."""

    def observed(name: str) -> Any:
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            result = getattr(release.mla_backend, name)(self, *arguments, **named)
            return self.observer.kept_context(result)

        return method

    with _LOCK:
        if release.mla_backend not in _LAYERS:
            names = ("_context_parallel_compute_prefill_context", "_compute_prefill_context")
            body = {name: observed(name) for name in names}
            _LAYERS[release.mla_backend] = type("ObservedLayer", (release.mla_backend,), body)
        return _LAYERS[release.mla_backend]
