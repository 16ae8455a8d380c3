"""Which rows of a rank's cache a decode of SGLang is told to read, by the Triton backend, by the plan or by the page table of the MLA backends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Unsupported
from shardcheck.adapters.sglang.layout import Layout
from shardcheck.adapters.sglang.release import Release

# An id of no token: rows of the request table that no kernel should read hold it.
_NOWHERE = 1 << 30

Listed = tuple[torch.Tensor, torch.Tensor]
"""Where each row's tokens begin, i32 `[T + 1]`, and the rows of the cache that they are in, i64."""


class Reads:
    """Lists of one rank. `by` is `backend`, `planner` or `pages`; `member` is the rank's place in its group."""

    def __init__(
        self, release: Release, configuration: Configuration, layout: Layout, by: str, member: int
    ) -> None:
        self.release = release
        self.configuration = configuration
        self.layout = layout
        self.by = by
        self.member = member

    def table(self, seq_lens: np.ndarray, blocks: np.ndarray) -> torch.Tensor:
        """`req_to_token`, i32 `[n, longest]`: the widened id of each token."""
        table = np.full(
            (max(1, len(seq_lens)), max(1, int(seq_lens.max(initial=0)))), _NOWHERE, dtype=np.int32
        )
        for request, length in enumerate(seq_lens.tolist()):
            positions = np.arange(length)
            table[request, :length] = self.layout.widened(blocks, np.full(length, request), positions)
        return torch.from_numpy(table)

    def of_rows(
        self, kind: str, seq_lens: np.ndarray, of_row: np.ndarray, lens: torch.Tensor, backend: Any
    ) -> Listed:
        """The lists of rows of a step `kind` that see `lens` tokens of the rank; row i is of request `of_row[i]`, −1 for padding."""
        requests = torch.from_numpy(np.maximum(of_row, 0))
        indptr = torch.zeros(len(requests) + 1, dtype=torch.int32)
        if self.configuration.dcp == 1:
            indptr[1:] = lens.cumsum(0)
            rows = [backend.req_to_token[r, :n] for r, n in zip(requests, lens.tolist(), strict=True)]
            return indptr, torch.cat(rows).to(torch.int64) if rows else torch.zeros(0, dtype=torch.int64)
        if self.by == "planner":
            if kind == "verify":
                raise Unsupported("the plan takes lengths of requests, not of rows")
            return self._by_planner(seq_lens, of_row, requests, indptr, backend)
        if self.by == "pages":
            return self._by_pages(requests, indptr, lens, backend)
        found = self.release.backend._dcp_kv_indices(backend, requests, lens, indptr)
        return found[0], found[1]

    def _by_planner(
        self, seq_lens: np.ndarray, of_row: np.ndarray, requests: Any, indptr: Any, backend: Any
    ) -> Listed:
        """The plan of the MLA backends, from the ids of all tokens that a row sees."""
        total = torch.zeros(len(requests), dtype=torch.int32)
        real = of_row >= 0
        total[torch.from_numpy(real)] = torch.from_numpy(seq_lens[of_row[real]].astype(np.int32))
        indptr[1:] = total.cumsum(0)
        rows = [backend.req_to_token[r, :n] for r, n in zip(requests, total.tolist(), strict=True)]
        ids = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int32)
        count = self.release.plan(total, indptr, ids, False, {}, len(requests))
        if self.release.translator is None:  # then the plan names rows
            return indptr, ids[:count].to(torch.int64)
        return indptr, self.release.translate(ids[:count]).to(torch.int64)

    def _by_pages(self, requests: Any, indptr: Any, lens: torch.Tensor, backend: Any) -> Listed:
        """The page table of the MLA backends, its pages walked token by token."""
        c, rows = self.configuration, len(requests)
        width = -(-max(1, int(lens.max()) if rows else 1) // c.block_size)
        pages = torch.full((rows, width), _NOWHERE // c.block_size, dtype=torch.int32)
        names = self.release.page_table.arg_names
        values = {"v2p_ptr": None, "HAS_V2P": False}
        sizes = {
            "req_to_token_stride": backend.req_to_token.stride(0),
            "block_table_stride": pages.stride(0),
            "PHYSICAL_PAGE_SIZE": c.block_size,
            "DCP_SIZE": c.dcp,
            "DCP_RANK": self.member,
            "PAGES_PER_BLOCK": 64,
            **{name: value for name, value in values.items() if name in names},
        }
        if rows:
            self.release.page_table[(rows, -(-width // 64))](
                req_to_token_ptr=backend.req_to_token,
                req_pool_indices_ptr=requests,
                local_seq_lens_ptr=lens,
                block_kv_indices_ptr=pages,
                **sizes,
            )
        indptr[1:] = lens.cumsum(0)
        within = [torch.arange(n) for n in lens.tolist()]
        found = [
            row[n // c.block_size] * c.block_size + n % c.block_size
            for row, n in zip(pages, within, strict=True)
        ]
        return indptr, torch.cat(found).to(torch.int64) if found else torch.zeros(0, dtype=torch.int64)

    def backend_of(self, table: torch.Tensor, lens: torch.Tensor) -> SimpleNamespace:
        """What the functions read of a backend."""
        return SimpleNamespace(
            dcp_size=self.configuration.dcp,
            dcp_rank=self.member,
            device="cpu",
            page_size=1,
            req_to_token=table,
            _dcp_lens=lambda *_: lens,
        )


def check_rows(indptr: torch.Tensor, indices: torch.Tensor, held: int) -> None:
    """Raises where a kernel would read a row that the cache doesn't have. The interpreter reads whatever lies there,
    or ends the process, where a device would report an illegal address."""
    if len(indptr) and int(indptr[-1]) > len(indices):
        raise RuntimeError(f"illegal address: {int(indptr[-1])} rows of a list of {len(indices)}")
    bad = indices[(indices < 0) | (indices >= held)]
    if len(bad):
        raise RuntimeError(f"illegal address: row {int(bad[0])} of a cache of {held}")
