"""A step of attention as vLLM runs it: query gather, decode kernel over each rank's own tokens, exchange and
merge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.batches import Batch, owned_copy, project, torch_half
from shardcheck.adapters.caches import Caches, RankCache, is_narrow
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.vllm.layout import Layout, check_pages
from shardcheck.adapters.vllm.merging import combine
from shardcheck.adapters.vllm.release import Release

# Splits of the grouped-query kernel, which its caller chooses: what the MLA backend takes for short contexts.
_SPLITS = 1


@dataclass
class RankResult:
    """What a rank computed: merged output and LSE of its own heads, its partial, and the tokens that each row
    saw."""

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

    def step(self, route: str, batch: Batch, w_uv: Tensor | None) -> Reply:
        """Runs a step on all ranks. `route` is `decode`, `verify` or `draft`."""
        self._check(route, batch)
        c = self.configuration
        jobs = [RankAttention(c, rank, self.caches.of_rank(rank), route, batch) for rank in range(c.tp)]
        results, collectives = self.executor.run(jobs, c.dcp)
        outs = [project(result.out, rank, w_uv, c.heads_per_rank) for rank, result in enumerate(results)]
        names = ("lse", "partial_out", "partial_lse")
        stacked = {name: torch.stack([getattr(result, name).float() for result in results]) for name in names}
        row_lens = torch.stack([result.row_lens for result in results])
        # exact: queries are values of that type, whatever they are held in
        query = torch.stack([result.query for result in results]).to(torch_half(c.dtype))
        effective = {
            "route": route,
            "query_replication": c.query_replication,
            "project_before_merge": False,
            "kernel": (
                self.release.decode if c.attention.is_mla and not self.release.full_lse else self.release.decode_kernel
            ).__qualname__,
        }
        if c.dcp > 1:
            effective["comm_backend"] = c.comm_backend
        return Reply(
            {"out": torch.stack(outs), **stacked, "row_lens": row_lens, "gathered_query": query},
            effective,
            collectives,
        )

    @property
    def _in_16_bits(self) -> bool:
        """Whether the kernel computes with 16-bit values: on a device, and in f16 in the interpreter too."""
        return self.release.device != "cpu" or self.configuration.dtype == "f16"

    def _check(self, route: str, batch: Batch) -> None:
        c, release = self.configuration, self.release
        if not release.has_local_lens:
            raise Unsupported("this release has no local lengths to be found")
        if c.project_before_merge:
            raise Unsupported("the engine projects merged outputs, never partials")
        if is_narrow(c.kv_dtype):
            self._check_quantised()
        if self._in_16_bits and not c.attention.is_mla and c.gathered_heads == c.kv_heads:
            raise Unsupported(
                "with one query head a KV head the kernel rounds products to 16 bits: no contract says that"
            )
        if route == "verify" and release.verify_row_lens is None:
            raise Unsupported(
                "this release has no function for the local lengths of the rows of a multi-token step"
            )
        if route == "draft":
            if not (release.drafts and c.attention.is_mla):
                raise Unsupported(
                    "only the MLA backend of newer releases takes blocks whose rows all see the same tokens"
                )
            if len(set(batch.query_lens.tolist())) > 1:
                raise Unsupported("the backend takes draft blocks of one length for all requests")

    def _check_quantised(self) -> None:
        c, release = self.configuration, self.release
        if "k_scale" not in parameters(release.decode_kernel):
            raise Unsupported("the decode kernel of this release takes no scale of a quantised cache")
        if c.dcp > 1 and release.refuses_quantised_dcp:
            raise Unsupported(
                "this release asserts that no cache is quantised under DCP: DCP not support fp8 kvcache now."
            )

        if self._in_16_bits and not math.log2(c.kv_scale).is_integer():
            raise Unsupported(
                "the kernel rounds what it reads from a quantised cache to 16 bits: no contract says that"
            )


@dataclass
class RankAttention:
    """A step on one rank."""

    configuration: Configuration
    rank: int
    cache: RankCache
    route: str
    batch: Batch

    def run(self, release: Release, group: Any) -> RankResult:
        """Gathers queries, attends to the rank's own tokens, and merges with the group."""
        self.release = release
        release.groups.act(group)
        c, member, batch = self.configuration, group.rank_in_group, self.batch
        self.layout = Layout(release, c)
        query = self._query(batch.query, group)
        local = self.layout.local_lens(batch.seq_lens, member)
        partial, lse, row_lens = self._local(query, local, member)
        kept = partial.clone(), lse.clone()
        starts = torch.from_numpy(batch.starts).to(query.device)
        lens = local.to(query.device)
        out, merged = combine(release, c.comm_backend, group, owned_copy(partial), lse, lens, starts)
        if group.world_size == 1:
            # no merge masks padding rows here: whoever runs the step drops them
            out[batch.starts[-1] :], merged[batch.starts[-1] :] = 0.0, float("-inf")
        return RankResult(out, merged, *kept, row_lens, query)

    def _query(self, query: torch.Tensor, group: Any) -> torch.Tensor:
        """Heads of the rank's group, `[T, Hg, Dk]`: gathered as the attention layer does, or taken at once
        under query replication."""
        c = self.configuration
        if c.query_replication:
            first = self.rank // c.dcp * c.gathered_heads
            return query[:, first : first + c.gathered_heads].contiguous()
        own = query[:, self.rank * c.heads_per_rank : (self.rank + 1) * c.heads_per_rank].contiguous()
        return group.all_gather(own, dim=1)

    def _local(
        self, query: torch.Tensor, local: torch.Tensor, member: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention of all rows over the rank's own tokens: partial output, LSE, and the tokens that each row
        sees."""
        batch = self.batch
        if self.route == "draft":
            return self._draft(query, local)
        requests = batch.requests
        real = requests >= 0
        lens = torch.zeros(len(requests), dtype=torch.int32)
        if self.route == "verify":
            lens[: real.sum()] = self.layout.row_lens(batch.seq_lens, batch.query_lens, member)
        else:
            lens[torch.from_numpy(real)] = local[torch.from_numpy(requests[real])]
        # padding rows have no tokens and the table of block 0, as the engine fills them
        table = np.where(real[:, None], batch.table[np.maximum(requests, 0)], 0).astype(np.int32)
        check_pages(table, lens, self.configuration)
        out, lse = self._kernel(query, table, lens, causal=True)
        return out, lse, lens

    def _draft(
        self, query: torch.Tensor, local: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A block whose rows all see the whole request. The backend spreads requests over rows itself; it is
        not shown padding."""
        batch = self.batch
        check_pages(batch.table, local, self.configuration)
        rows = int(batch.starts[-1])
        out, lse = self._kernel(query[:rows], batch.table, local, causal=False)
        padding = len(query) - rows
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding), value=float("nan"))
        lse = torch.nn.functional.pad(lse, (0, 0, 0, padding), value=float("-inf"))
        row_lens = torch.nn.functional.pad(
            local.repeat_interleave(torch.from_numpy(batch.query_lens)), (0, padding)
        )
        return out, lse, row_lens

    def _kernel(
        self, query: torch.Tensor, table: np.ndarray, lens: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.release.device
        if device != "cpu" and self.configuration.gathered_heads == self.configuration.kv_heads:
            raise Unsupported(
                "with one query head a KV head the kernel rounds each product to 16 bits: no contract says that"
            )
        block_table, lens = torch.from_numpy(table).to(device), lens.to(device)
        keys = self.cache.read("key_cache", device)
        with interpreter.limits():
            if self.configuration.attention.is_mla:
                return self._latent(query, keys, block_table, lens, causal)
            return self._grouped(query, keys, self.cache.read("value_cache", device), block_table, lens)

    def _latent(
        self, query: Any, keys: Any, block_table: Any, lens: Any, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The decode of the Triton MLA backend, on an object with the attributes that it reads."""
        c = self.configuration
        if self.release.full_lse:
            return self._latent_with_full_lse(query, keys, block_table, lens)
        scale = torch.tensor(c.kv_scale, dtype=torch.float32, device=query.device)
        backend = SimpleNamespace(
            kv_lora_rank=c.attention.kv_lora_rank,
            scale=c.softmax_scale,
            kv_cache_dtype="fp8" if is_narrow(c.kv_dtype) else "auto",
            dcp_world_size=c.dcp,
            _sm_count=_processors(query.device),
        )
        metadata = SimpleNamespace(
            decode=SimpleNamespace(block_table=block_table, seq_lens=lens),
            causal=causal,
            max_seq_len=max(1, int(lens.max())) if len(lens) else 1,
            num_decodes=len(lens),
            num_decode_tokens=len(query),
        )
        layer = SimpleNamespace(_k_scale=scale, _v_scale=scale)
        return self.release.decode(backend, query, keys[:, :, 0], metadata, layer)

    def _latent_with_full_lse(
        self, query: Any, keys: Any, block_table: Any, lens: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel of that decode, with an LSE in f32: what the backend could have for the asking."""
        c, rows, heads = self.configuration, *query.shape[:2]
        width = c.attention.kv_lora_rank
        if len(lens) and rows > len(lens):
            block_table = block_table.repeat_interleave(rows // len(lens), dim=0)
            lens = lens.repeat_interleave(rows // len(lens))
        out = torch.zeros(rows, heads, width, dtype=query.dtype, device=query.device)
        lse = torch.zeros(rows, heads, dtype=torch.float32, device=query.device)
        longest = max(1, int(lens.max())) if len(lens) else 1
        count = self.release.key_value_splits
        splits = _SPLITS if count is None else count(longest, _processors(query.device))
        logits = torch.empty(rows, heads, splits, width + 1, dtype=torch.float32, device=query.device)
        scale = torch.tensor(c.kv_scale, dtype=torch.float32, device=query.device)
        options = {"k_scale": scale, "v_scale": scale, "is_mla": True}
        known = parameters(self.release.decode_kernel)
        self.release.decode_kernel(
            *(query, keys, keys[..., :width], out, lse, block_table, lens, logits, splits, c.softmax_scale),
            page_size=c.block_size,
            **{name: value for name, value in options.items() if name in known},
        )
        return out, lse

    def _grouped(
        self, query: Any, keys: Any, values: Any, block_table: Any, lens: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The decode kernel as its callers set it up: no backend of the engine puts grouped queries through
        it under DCP."""
        c = self.configuration
        rows, heads = query.shape[:2]
        out = torch.zeros(rows, heads, c.value_dim, dtype=query.dtype, device=query.device)
        precision = torch.float32 if self.release.full_lse else query.dtype
        lse = torch.zeros(rows, heads, dtype=precision, device=query.device)
        logits = torch.empty(rows, heads, _SPLITS, c.value_dim + 1, dtype=torch.float32, device=query.device)
        arguments = (query, keys, values, out, lse, block_table, lens, logits, _SPLITS, c.softmax_scale)
        scale = torch.tensor(c.kv_scale, dtype=torch.float32, device=query.device)
        scales = {"k_scale": scale, "v_scale": scale} if is_narrow(c.kv_dtype) else {}
        self.release.decode_kernel(*arguments, page_size=c.block_size, **scales)
        return out, lse


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
