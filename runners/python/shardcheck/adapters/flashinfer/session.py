"""A session: the caches of all ranks, and a method for each operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters.batches import Batch, project, torch_half
from shardcheck.adapters.sessions import StoredSession
from shardcheck.layout import Layout

# Widths that the kernels are built for: latent, and rotary part.
LATENT, ROTARY = 512, 64
# Widths that the merges take, and the most threads of a block, of which a merge of more rows than states gives every head its own.
MERGED = (64, 128, 256, 512)
THREADS = 1024
LOG2_E = float(np.log2(np.e))


class FlashinferSession(StoredSession):
    """One configuration."""

    def __init__(self, configuration: Configuration, engine: Any) -> None:
        super().__init__(configuration)
        self.engine = engine
        self.grid = Layout.of(configuration)

    def write_kv(
        self, key: Tensor, positions: Tensor, requests: Tensor, block_table: Tensor, value: Tensor | None = None, **_: Any
    ) -> Reply:
        """Scatters tokens into the caches."""
        at, of = positions.codes, requests.codes
        real = of >= 0
        table = block_table.codes
        slots = np.full(len(at), -1, dtype=np.int64)
        slots[real] = self.grid.slot(at[real], table[of[real], self.grid.table_entry(at[real])])
        for rank in range(self.configuration.tp):
            own = real & (self.grid.owner(at) == rank % self.configuration.dcp)
            self.caches.write(rank, np.where(own, slots, -1), key, value)
        return Reply(collectives=[0] * self.configuration.tp)

    def merge_states(
        self, prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor, **_: Any
    ) -> Reply:
        """Merges two states by `merge_state`, which takes dense ones."""
        device = self.engine.device
        outs = [merged_width(tensor).torch(device) for tensor in (prefix_out, suffix_out)]
        lses = [to_base_2(tensor.torch(device)) for tensor in (prefix_lse, suffix_lse)]
        dense = all(tensor.is_contiguous() for tensor in (*outs, *lses))
        parts = [
            self.engine.cascade.merge_state(*(a[:, heads].contiguous() for a in (outs[0], lses[0], outs[1], lses[1])))
            for heads in head_parts(outs[0])
        ]
        out, lse = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        view = "as given" if dense else "made contiguous"
        return Reply({"out": out[None], "lse": to_natural(lse)[None]}, {"view": view}, [0])

    def merge_partials(
        self, partial_out: Tensor, partial_lse: Tensor, lse_base: str = "e", **_: Any
    ) -> Reply:
        """Merges given partials of all ranks of a group by `merge_states`; each rank keeps its own heads."""
        c, device = self.configuration, self.engine.device
        if c.dcp > 1 and c.comm_backend != "a2a":
            raise Unsupported("the merge takes the partials of all ranks, as an all-to-all brings them")
        out, given = merged_width(partial_out).torch(device), partial_lse.torch(device)
        lse = given if lse_base == "two" else to_base_2(given)
        merged, total = self._merge(out.transpose(0, 1), lse.transpose(0, 1))
        total = total if lse_base == "two" else to_natural(total)
        heads = [slice(rank * c.heads_per_rank, (rank + 1) * c.heads_per_rank) for rank in range(len(out))]
        outputs = {name: torch.stack([part[:, own] for own in heads]) for name, part in (("out", merged), ("lse", total))}
        return Reply(outputs, {"comm_backend": "a2a"}, [0] * len(out))

    def _attend(
        self,
        kind: str,
        query: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        block_table: Tensor,
        w_uv: Tensor | None = None,
        **_: Any,
    ) -> Reply:
        c, device = self.configuration, self.engine.device
        self._check()
        batch = Batch.of(query, seq_lens, query_start_loc, block_table, "cuda" if device == "cuda" else "cpu")
        rows = batch.query.to(torch_half(c.dtype))
        alone = c.dcp == 1 and kind == "verify"
        found: list[dict[str, torch.Tensor]] = []
        for first in range(0, c.tp, c.dcp):
            heads = slice(first * c.heads_per_rank, (first + c.dcp) * c.heads_per_rank)
            given = rows[:, heads].contiguous()
            lens = [torch.from_numpy(self._row_lens(batch, kind, member)) for member in range(c.dcp)]
            parts = [
                self._rows_alone(batch, given) if alone else self._rows(batch, given, first + member, lens[member])
                for member in range(c.dcp)
            ]
            outs, lses = (torch.stack(part, dim=1) for part in zip(*parts, strict=True))
            merged = (outs[:, 0], lses[:, 0]) if c.dcp == 1 else self._merge(outs, lses)
            for member in range(c.dcp):
                own = slice(member * c.heads_per_rank, (member + 1) * c.heads_per_rank)
                found.append(
                    {
                        "out": project(merged[0][:, own], first + member, w_uv, c.heads_per_rank),
                        "lse": to_natural(merged[1][:, own]),
                        "partial_out": outs[:, member].float(),
                        "partial_lse": lses[:, member],
                        "row_lens": lens[member],
                        "gathered_query": given,
                    }
                )
        outputs = {name: torch.stack([rank[name] for rank in found]) for name in found[0]}
        effective = {"route": kind, "query_replication": False, "project_before_merge": False}
        effective |= {"kernel": f"mla {self.engine.backend}", "pages": self.engine.pages}
        if c.dcp > 1:
            effective["comm_backend"] = "a2a"
        return Reply(outputs, effective, [0] * c.tp)

    def _check(self) -> None:
        c = self.configuration
        if not c.attention.is_mla or (c.value_dim, c.qk_dim) != (LATENT, LATENT + ROTARY):
            raise Unsupported(f"the kernels take latents of {LATENT} and {ROTARY}")
        if c.kv_dtype != c.dtype:
            raise Unsupported("the kernels take a cache in the type of the query")
        if c.project_before_merge or c.query_replication and c.dcp > 1:
            raise Unsupported("projections are the caller's")
        if c.dcp > 1 and c.comm_backend != "a2a":
            raise Unsupported("the merge takes the partials of all ranks, as an all-to-all brings them")

    def _row_lens(self, batch: Batch, kind: str, member: int) -> np.ndarray:
        """Tokens of a rank that each row sees, i32 `[T]`: none for padding."""
        lens, requests = np.zeros(len(batch.requests), np.int32), batch.requests
        real = requests >= 0
        behind = (batch.starts[requests + 1] - np.arange(len(requests)) - 1)[real] if kind == "verify" else 0
        bounds = batch.seq_lens[requests[real]] - behind
        lens[real] = self.grid.local_length(bounds, member)
        return lens

    def _rows(
        self, batch: Batch, query: torch.Tensor, rank: int, lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's partial of every row: output `[T, Hg, 512]` and LSE `[T, Hg]` in base 2."""
        tables = batch.table[np.maximum(batch.requests, 0)]
        starts = np.arange(len(query) + 1, dtype=np.int32)
        return self._run(query, rank, starts, lens.numpy(), tables, causal=False)

    def _rows_alone(self, batch: Batch, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same over one rank, with the kernel's causal mask over a request's rows; rows of padding are requests without tokens."""
        padding = len(query) - int(batch.starts[-1])
        starts = np.concatenate([batch.starts, batch.starts[-1] + 1 + np.arange(padding)]).astype(np.int32)
        lens = np.concatenate([batch.seq_lens, np.zeros(padding)]).astype(np.int32)
        tables = np.concatenate([batch.table, np.zeros((padding, batch.table.shape[1]), batch.table.dtype)])
        return self._run(query, 0, starts, lens, tables, causal=True)

    def _run(
        self, query: torch.Tensor, rank: int, starts: np.ndarray, lens: np.ndarray, tables: np.ndarray, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c, device = self.configuration, self.engine.device
        size = c.block_size if self.engine.pages == "blocks" else 1
        cache = self.caches.of_rank(rank)
        keys = Tensor(cache.dtype, cache.codes["key_cache"]).torch(device).reshape(-1, size, c.qk_dim)
        pages = [self._pages(table, int(length), size) for table, length in zip(tables, lens, strict=True)]
        firsts = np.cumsum([0, *map(len, pages)]).astype(np.int32)
        on_device = lambda array: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)  # noqa: E731
        # one page at least, which no row reads: a tensor without elements has no address
        indices = on_device(np.concatenate([*pages, np.zeros(1)]))
        wrapper, half = self.engine.wrapper(), torch_half(c.dtype)
        wrapper.plan(
            *(on_device(starts), on_device(firsts), indices, on_device(lens), query.shape[1], LATENT, ROTARY, size, causal),
            *(float(c.softmax_scale), half, half),
        )
        latent, rotary = (keys[..., :LATENT].contiguous(), keys[..., LATENT:].contiguous())
        parts = query[..., :LATENT].contiguous(), query[..., LATENT:].contiguous()
        return wrapper.run(*parts, latent, rotary, return_lse=True)

    def _pages(self, table: np.ndarray, length: int, size: int) -> np.ndarray:
        """Pages of `size` tokens that hold the first `length` tokens of a rank."""
        block = self.configuration.block_size
        if size == block:
            return table[: -(-length // block)]
        at = np.arange(length)
        return table[at // block].astype(np.int64) * block + at % block

    def _merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`merge_states` of `[T, N, H, D]` and `[T, N, H]`, as many heads at a time as it can be launched with."""
        parts = [
            self.engine.cascade.merge_states(outs[:, :, heads].contiguous(), lses[:, :, heads].contiguous())
            for heads in head_parts(outs)
        ]
        out, lse = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return out, lse


def merged_width(tensor: Tensor) -> Tensor:
    """A given output, if the merges take such ones."""
    if tensor.shape[-1] not in MERGED:
        raise Unsupported(f"merges take widths of {', '.join(map(str, MERGED))}, not {tensor.shape[-1]}")
    if tensor.dtype not in ("bf16", "f16"):
        raise Unsupported(f"merges take outputs of 16 bits, not {tensor.dtype}")
    return tensor


def head_parts(outs: torch.Tensor) -> list[slice]:
    """Heads `[…, H, D]` in parts for which a block has threads: a thread takes 16 bytes, or a 32nd of the width where that is more."""
    heads, width = outs.shape[-2:]
    most = THREADS // (width // max(8, width // 32))
    return [slice(first, first + most) for first in range(0, heads, most)]


def to_base_2(lse: torch.Tensor) -> torch.Tensor:
    """Natural LSEs in base 2, rounded once."""
    return (lse.double() * LOG2_E).float()


def to_natural(lse: torch.Tensor) -> torch.Tensor:
    """LSEs of base 2 as natural ones, rounded once."""
    return (lse.double() / LOG2_E).float()
