"""The layout of a batch as SGLang computes it: local lengths, row lengths, rows of the cache, pages.

A token has a *widened* id, block · (B·W) + position mod (B·W): pages of a request are B·W ids wide, and where a group
shares the cache every rank reads its own tokens off the same ids.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Unsupported
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.sglang.release import Release


class Layout:
    """Lengths and rows of one configuration, rank by rank. `member` is a rank's place in its group."""

    def __init__(self, release: Release, configuration: Configuration, slots: str) -> None:
        self.release = release
        self.configuration = configuration
        self.slots_by = slots

    def local_lens(self, seq_lens: np.ndarray, member: int) -> torch.Tensor:
        """Tokens of each request on a rank, i32 `[n]`."""
        c = self.configuration
        lens = torch.from_numpy(np.ascontiguousarray(seq_lens, dtype=np.int32))
        return self.release.local_lens(lens, c.dcp, member, **self._interleave).to(torch.int32)

    def row_lens(self, seq_lens: np.ndarray, query_lens: np.ndarray, member: int) -> torch.Tensor:
        """Tokens that each causal row sees on a rank, i32 `[rows]`. The engine's function takes one number of rows
        for all requests."""
        c = self.configuration
        total = torch.from_numpy(np.ascontiguousarray(seq_lens, dtype=np.int32))
        uniform = len(set(query_lens.tolist())) == 1
        groups = (
            [(total, int(query_lens[0]))]
            if uniform
            else [(total[i : i + 1], int(q)) for i, q in enumerate(query_lens)]
        )
        rows = [
            self.release.chain_lens(lens, count, c.dcp, member, **self._interleave)
            for lens, count in groups
            if count > 0
        ]
        return torch.cat(rows).to(torch.int32) if rows else torch.zeros(0, dtype=torch.int32)

    def blocks_needed(self, seq_lens: np.ndarray) -> np.ndarray:
        """Pages of the allocator that each request needs, i32 `[n]`: under DCP its page is B·W ids."""
        none = torch.zeros(1, dtype=torch.int64)
        pages = [
            self.release.new_pages(
                seq_lens=torch.tensor([length]),
                page_size=self.configuration.virtual_block_tokens,
                prefix_lens=none,
            )
            for length in seq_lens.tolist()
        ]
        return np.array(pages, dtype=np.int32)

    def widened(self, table: np.ndarray, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The id of each token, i64 `[N]`, as the allocator hands them out for whole pages."""
        page = self.configuration.virtual_block_tokens
        return table[requests, positions // page].astype(np.int64) * page + positions % page

    def slots(
        self, table: np.ndarray, requests: np.ndarray, positions: np.ndarray, member: int
    ) -> np.ndarray:
        """Row of the cache of each token on a rank, i64 `[N]`, −1 where not owned; tokens of request −1 are not
        shown to the engine."""
        shown = np.flatnonzero(requests >= 0)
        slots = np.full(len(requests), -1, dtype=np.int64)
        if len(shown):
            ids = self.widened(table, requests[shown], positions[shown])
            slots[shown] = self._rows(torch.from_numpy(ids), torch.from_numpy(positions[shown]), member)
        return slots

    def _rows(self, ids: torch.Tensor, positions: torch.Tensor, member: int) -> np.ndarray:
        c, by = self.configuration, self.slots_by
        if by == "sparse":
            return self.release.remap_sparse(ids[:, None], c.dcp, member, c.interleave)[:, 0].numpy()
        if by == "localize" or c.interleave > 1 and c.dcp > 1:
            return self.release.localize(ids, c.dcp, member, **self._interleave).numpy()
        pool = _Pool()
        backend = SimpleNamespace(dcp_size=c.dcp, dcp_rank=member, token_to_kv_pool=pool)
        batch = SimpleNamespace(
            out_cache_loc=ids, out_cache_loc_is_physical=True, positions=positions, dcp_kv_mask=None
        )
        self.release.backend._set_kv_buffer(backend, batch, None, ids, None, None)
        rows = getattr(pool.loc, "loc", pool.loc)
        return rows.numpy() if pool.mask is None else torch.where(pool.mask, rows, -1).numpy()

    @property
    def _interleave(self) -> dict[str, int]:
        c = self.configuration
        if c.interleave == 1 or c.dcp == 1:
            return {}
        if "interleave_size" not in parameters(self.release.local_lens):
            raise Unsupported("this release interleaves by single tokens, it has no interleave size")
        return {"interleave_size": c.interleave}


class _Pool:
    """Stands for the cache that the Triton backend writes to: remembers which rows."""

    def set_kv_buffer(self, _: Any, loc: Any, *__: Any, dcp_kv_mask: Any = None) -> None:
        """Takes note of rows, and of which of them the rank writes."""
        self.loc, self.mask = loc, dcp_kv_mask
