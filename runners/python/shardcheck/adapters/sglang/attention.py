"""A step of attention as SGLang's Triton backend runs it under decode context parallelism: query gather, decode
kernel over each rank's own tokens, merge."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.batches import Batch, project, torch_half
from shardcheck.adapters.caches import Caches, RankCache, is_narrow
from shardcheck.adapters.sglang.layout import Layout
from shardcheck.adapters.sglang.merging import combine, route
from shardcheck.adapters.sglang.options import Options
from shardcheck.adapters.sglang.reads import Reads, check_rows
from shardcheck.adapters.sglang.release import Release
from shardcheck.adapters.sglang.surroundings import Parallel

# Widths of keys that the kernel's MLA form takes, which W = 1 runs, and of values with them.
_LATENT_WIDTHS = {576: 512, 288: 256}


@dataclass
class RankResult:
    """What a rank computed: merged output and LSE of its own heads, its partial, the tokens that each row saw, and
    the query that its kernel received."""

    out: torch.Tensor
    lse: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    row_lens: torch.Tensor
    query: torch.Tensor


class Attention:
    """Steps of attention of one session: what all ranks share."""

    def __init__(
        self,
        release: Release,
        configuration: Configuration,
        caches: Caches,
        executor: Any,
        options: Options,
    ) -> None:
        self.release = release
        self.configuration = configuration
        self.caches = caches
        self.executor = executor
        self.options = options

    def step(self, kind: str, batch: Batch, w_uv: Tensor | None, sinks: torch.Tensor | None = None) -> Reply:
        """Runs a step on all ranks. `kind` is `decode` or `verify`; `sinks [Hall]` are those of all heads."""
        self._check(kind)
        c = self.configuration
        how = route(self.options.merge, c.comm_backend, "e")
        if c.dcp > 1 and how != "reduced" and not c.attention.is_mla:
            raise Unsupported("only MLA layers merge so: others end in the Triton backend's own merge")
        jobs = [
            RankAttention(c, self.caches.of_rank(rank), rank, kind, batch, how, self.options, sinks)
            for rank in range(c.tp)
        ]
        results, collectives = self.executor.run(jobs, c.dcp)
        outs = [project(result.out, rank, w_uv, c.heads_per_rank) for rank, result in enumerate(results)]
        # the engine has no LSE that a sink is in
        names = (*(() if sinks is not None else ("lse",)), "partial_out", "partial_lse", "row_lens")
        stacked = {name: torch.stack([getattr(result, name) for result in results]) for name in names}
        if "partial_out" in stacked:
            stacked["partial_out"] = stacked["partial_out"].float()
        # exact: queries are values of that type, whatever they are held in
        query = torch.stack([result.query for result in results]).to(torch_half(c.dtype))
        effective = {
            "route": kind if sinks is None else "attend_sinks",
            "query_replication": False,
            "project_before_merge": False,
            "kernel": self.release.decode_kernel.__qualname__,
            "indices": self.options.reads if c.dcp > 1 else "none",
        }
        if c.dcp > 1:
            effective |= {"comm_backend": c.comm_backend, "merge": how}
        return Reply({"out": torch.stack(outs), **stacked, "gathered_query": query}, effective, collectives)

    def _check(self, kind: str) -> None:
        c = self.configuration
        if c.project_before_merge:
            raise Unsupported("the engine projects merged outputs, never partials")
        if c.query_replication and c.dcp > 1:
            raise Unsupported(
                "the engine gathers queries, it has no projection that makes them on every rank"
            )
        if c.interleave > 1 and c.dcp > 1:
            raise Unsupported(
                "the Triton backend reads and writes single tokens in turn, it has no interleave size"
            )
        if is_narrow(c.kv_dtype):
            raise Unsupported(
                "the kernel rounds the query to the type of a quantised cache: no contract says that"
            )
        if c.dtype == "f16" and c.gathered_heads == c.kv_heads:
            raise Unsupported("with one query head a KV head the kernel rounds each product to 16 bits: no contract says that")
        if kind == "verify" and self.release.chain_lens is None:
            raise Unsupported(
                "this release has no function for the local lengths of the rows of a multi-token step"
            )
        widths = (c.qk_dim, c.value_dim)
        if c.dcp == 1 and c.attention.is_mla and _LATENT_WIDTHS.get(widths[0]) != widths[1]:
            raise Unsupported(f"on one rank the kernel takes latents of {_LATENT_WIDTHS}, not {widths}")


@dataclass
class RankAttention:
    """A step on one rank."""

    configuration: Configuration
    cache: RankCache
    rank: int
    kind: str
    batch: Batch
    how: str
    options: Options
    sinks: torch.Tensor | None = None

    def run(self, release: Release, group: Any) -> RankResult:
        """Attends to the rank's own tokens and merges with the group."""
        c, self.release, self.group = self.configuration, release, group
        member = group.rank_in_group
        release.groups.act(Parallel(c.dcp, member, group))
        self.layout = Layout(release, c, "backend")
        self.reads = Reads(release, c, self.layout, self.options.reads, member)
        self.lens = self._lens(member)
        backend = self._backend(member)
        first = self.rank * c.heads_per_rank
        query = self.batch.query[:, first : first + c.heads_per_rank].contiguous()
        batch = SimpleNamespace(batch_size=len(query), seq_lens_sum=int(self.lens.sum()), spec_info=None)
        with release.exchanging(self._merge), interpreter.limits():
            out = release.backend.forward_decode(
                backend, query.flatten(1), None, None, self._layer(), batch, save_kv_cache=False, sinks=self._own_sinks()
            )
        out = out.view(len(query), c.heads_per_rank, c.value_dim)
        if c.dcp == 1:
            self._finish_alone(out, backend.forward_metadata.attn_lse)
        return RankResult(out, self.merged_lse, *self.partial, self.lens, self.query)

    def _own_sinks(self) -> torch.Tensor | None:
        """A rank's parameter, the sinks of its own heads; what lies behind it in memory is nobody's, here NaN."""
        if self.sinks is None:
            return None
        own = self.configuration.heads_per_rank
        memory = torch.full((self.configuration.gathered_heads + own,), torch.nan)
        memory[:own] = self.sinks[self.rank * own : (self.rank + 1) * own]
        return memory[:own]

    def _lens(self, member: int) -> torch.Tensor:
        """Tokens of the rank that each row sees, i32 `[T]`: none for padding."""
        batch, requests = self.batch, self.batch.requests
        lens = torch.zeros(len(requests), dtype=torch.int32)
        if self.kind == "verify":
            rows = self.layout.row_lens(batch.seq_lens, batch.query_lens, member)
            lens[: len(rows)] = rows
        else:
            real = requests >= 0
            lens[torch.from_numpy(real)] = self.layout.local_lens(batch.seq_lens[requests[real]], member)
        return lens

    def _backend(self, member: int) -> SimpleNamespace:
        """An object with the attributes that the backend's methods read."""
        c, rows = self.configuration, len(self.lens)
        keys = self.cache.read("key_cache", "cpu").flatten(0, 1)
        values = (
            keys[..., : c.value_dim]
            if c.attention.is_mla
            else self.cache.read("value_cache", "cpu").flatten(0, 1)
        )
        backend = SimpleNamespace(
            dcp_size=c.dcp,
            dcp_rank=member,
            device="cpu",
            device_core_count=0,
            enable_deterministic=False,
            enable_lean_attention=False,
            is_draft_runner=False,
            max_kv_splits=self.options.splits,
            page_size=1,
            req_to_token=self.reads.table(self.batch.seq_lens, self.batch.table),
            static_kv_splits=False,
            swa_v_head_dim=None,
            token_to_kv_pool=SimpleNamespace(
                get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values
            ),
            use_mla=c.attention.is_mla,
            use_pdl=False,
            decode_attention_fwd=self._kernel,
            # the engine's own, but of a row: verification has more than one a request
            _dcp_lens=lambda *_: self.lens,
        )
        indptr, indices = self.reads.of_rows(self.kind, self.batch.seq_lens, self.batch.requests, self.lens, backend)
        check_rows(indptr, indices, len(keys))
        splits = torch.empty(rows, dtype=torch.int32)
        if rows:
            self.release.backend.get_num_kv_splits(backend, splits, self.lens.clamp_min(1))
        shape = (rows, c.gathered_heads, self.options.splits)
        backend.forward_metadata = SimpleNamespace(
            kv_indptr=indptr,
            kv_indices=indices,
            num_kv_splits=splits,
            attn_logits=torch.empty(*shape, c.value_dim),
            # where there is one rank nothing of the engine fills it: a split without tokens is not written
            attn_lse=torch.full(shape, -torch.inf) if c.dcp == 1 else torch.empty(shape),
            swa_attn_logits=None,
            uneven_batch=None,
            **{name: None for name in ("lean_Mp", "lean_Lp", "lean_Op", "lean_locks")},
        )
        return backend

    def _layer(self) -> SimpleNamespace:
        c = self.configuration
        return SimpleNamespace(
            layer_id=0,
            tp_q_head_num=c.heads_per_rank,
            tp_k_head_num=c.kv_heads,
            qk_head_dim=c.qk_dim,
            v_head_dim=c.value_dim,
            scaling=c.softmax_scale,
            logit_cap=0.0,
            logit_capping_method="tanh",
            xai_temperature_len=-1,
            sliding_window_size=-1,
            k_scale=None,
            v_scale=None,
        )

    def _kernel(self, query: torch.Tensor, *arguments: Any, **named: Any) -> None:
        """The decode kernel; takes note of the query that it is given."""
        self.query = query.clone()
        self.release.decode_kernel(query, *arguments, **named)

    def _merge(self, out: torch.Tensor, lse: torch.Tensor, group: Any) -> torch.Tensor:
        """Where the decode of the backend ends: the partial is noted, and merged."""
        self.partial = out.clone(), lse.clone()
        if self.how != "reduced":
            # MLA backends hand over zeros there (`fixup_zero_kv_rows`, a kernel of CUDA)
            empty = self.lens == 0
            out[empty], lse[empty] = 0.0, -torch.inf
        merged, self.merged_lse = combine(self.release, self.how, group, out, lse)
        return merged

    def _finish_alone(self, out: torch.Tensor, attn_lse: torch.Tensor) -> None:
        """The LSE of a rank that merges with nobody, over splits as under DCP; padding is zeroed, as no merge does it."""
        lse = torch.logsumexp(attn_lse, dim=-1)
        self.partial = out.clone(), lse.clone()
        out[self.batch.starts[-1] :], lse[self.batch.starts[-1] :] = 0.0, -torch.inf
        self.merged_lse = lse
