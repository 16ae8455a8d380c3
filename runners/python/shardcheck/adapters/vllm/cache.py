"""The copy of cached rows to a workspace, which is compiled in the release."""

from __future__ import annotations

from typing import Any


def gather_rows(
    src_cache: Any,
    dst: Any,
    block_table: Any,
    cu_seq_lens: Any,
    seq_starts: Any = None,
    scale: Any = None,
    **_: Any,
) -> None:
    """Copies rows of paged caches `[blocks, B, width]` to `dst`, request after request, times `scale` where
    the cache is quantised.

    Stands for `cp_gather_cache` and `gather_and_maybe_dequant_cache`, which are compiled.
    """
    block, bounds = src_cache.shape[1], cu_seq_lens.tolist()
    values = src_cache.float() * scale if scale is not None and src_cache.element_size() == 1 else src_cache
    for request in range(len(bounds) - 1):
        first = int(seq_starts[request]) if seq_starts is not None else 0
        for row in range(bounds[request + 1] - bounds[request]):
            entry, offset = divmod(first + row, block)
            identity = int(block_table[request, entry])
            if not 0 <= identity < len(src_cache):
                raise RuntimeError(
                    f"illegal address: block {identity} of {len(src_cache)}, entry {entry} of {request}"
                )
            dst[bounds[request] + row] = values[identity, offset]
