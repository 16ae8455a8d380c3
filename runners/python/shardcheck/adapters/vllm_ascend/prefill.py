"""Prefill context parallelism as vLLM-Ascend's older model runner does it: a manager on each rank that cuts each prompt, filled up
to a multiple of 2·P tokens, into 2·P chunks and takes one from either end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcheck import Unsupported
from shardcheck.adapters.vllm_ascend.release import MAX_TOKENS, Release
from shardcheck.adapters.vllm_ascend.surroundings import Place


class PrefillLayout:
    """Shares one batch out over `world` ranks."""

    def __init__(self, release: Release, world: int, strategy: str, decodes: str, padded_rows: int) -> None:
        if not release.splits_prefill:
            raise Unsupported("this release has no such manager: its newer runner takes vLLM's")
        if world == 1:
            raise Unsupported("the engine splits nothing where there is one rank")
        if strategy != "head_tail":
            raise Unsupported(f"the engine has no strategy {strategy}: it takes chunks from both ends of every prompt")
        if decodes != "replicated":
            raise Unsupported("every rank has every decode")
        if padded_rows:
            raise Unsupported("the manager is not told of a graph's rows")
        self.release, self.world = release, world

    def share_out(
        self, starts: np.ndarray, computed: np.ndarray, prefills: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Outputs of the operation, each rank's by its own manager."""
        counts = np.diff(starts)
        decodes = (prefills == 0) & (computed > 0) & (counts > 0)
        if ((prefills == 0) & ~decodes & (counts > 0)).any():
            raise Unsupported("a request without a computed token is a prompt to the engine")
        # the runner's batches have decodes in front, and no request without rows
        order = np.concatenate([np.flatnonzero(decodes), np.flatnonzero(~decodes & (counts > 0))]).astype(np.int64)
        ranks = [self._of_rank(rank, counts[order], computed[order], prefills[order]) for rank in range(self.world)]
        flat = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in order] + [np.zeros(0, np.int64)])
        return _gathered(ranks, flat.astype(np.int64))

    def _of_rank(
        self, rank: int, counts: np.ndarray, computed: np.ndarray, prefills: np.ndarray
    ) -> dict[str, np.ndarray]:
        release, world, total = self.release, self.world, int(counts.sum())
        place = Place(world, rank)
        with release.groups.acting(Place(1, 0), place):
            threshold = int(counts[prefills == 0].max(initial=1))
            manager = release.new_manager((1, 0), (world, rank), (len(counts), threshold, MAX_TOKENS), 1)
            manager.initialize_slot_mapping()
            scheduled = counts.astype(np.int32)
            prompts = np.where(prefills, computed + counts, computed)
            manager.init_batch_info(scheduled.copy(), len(counts), computed, prompts)
            arange = np.arange(MAX_TOKENS, dtype=np.int64)
            local, relative = manager.update_tokens_for_pcp(scheduled.copy(), arange)
            seen = self._row_lens(manager, local, computed, scheduled)
            rows = int(local.sum())
            slots = manager.get_padded_slot_mapping(rows, rows, torch.arange(total, dtype=torch.int32), 0)
        of_row = np.repeat(np.arange(len(counts)), local)
        firsts = np.cumsum(counts) - counts
        real = relative < counts[of_row]
        decodes = manager.num_decode_reqs
        first, edge = int(counts[:decodes].sum()), int(counts[:decodes].sum()) * world
        # a decode's rows are read off its first copy, as `logits_indices` are; a prompt's where the mask has no filling
        copies = [world * firsts[r] + np.arange(counts[r]) for r in range(decodes)]
        kept = np.concatenate([*copies, edge + np.flatnonzero(manager.pcp_unpad_mask_cpu[edge : rows * world])])
        restore, slots = manager.pcp_allgather_restore_idx.np[: rows * world], slots.numpy()
        return {
            "rows": np.where(real, firsts[of_row] + relative, -1),
            "positions": computed[of_row] + relative,
            "row_lens": np.where(real, seen, 0),
            "restore": restore[kept.astype(np.int64)],
            # where KV is written from, and the row whose slot it goes to: a decode's own rows take every P-th slot, a prompt's
            # gathered ones their own
            "writes": np.concatenate([rank * rows + np.arange(first), restore[edge:]]),
            "slots": np.concatenate([slots[:edge:world], slots[edge : rows * world]]),
        }

    def _row_lens(
        self, manager: Any, local: np.ndarray, computed: np.ndarray, scheduled: np.ndarray
    ) -> np.ndarray:
        """Tokens that each local row sees: of a chunk, those before it without a mask and its own with a causal one; a
        decode's are the kernel's business on all ranks."""
        total, requests = int(local.sum()), len(local)
        batch = SimpleNamespace(num_computed_tokens_cpu=computed)
        metadata, _ = manager.generate_pcp_metadata(
            total, torch.from_numpy(local), batch, scheduled, torch.zeros(1), requests, requests
        )
        decodes = manager.num_decode_reqs
        seen = [np.arange(computed[r], computed[r] + local[r]) + 1 for r in range(decodes)]
        chunks = metadata.attn_chunk_seqlens.numpy()
        before = [
            np.diff(metadata.head_attn_nomask_seqlens, prepend=0),
            np.diff(metadata.tail_attn_nomask_seqlens, prepend=0),
        ]
        for index, request in enumerate(range(decodes, requests)):
            own = np.arange(chunks[index]) + 1
            seen += [computed[request] + before[half][index] + own for half in (0, 1)]
        return np.concatenate([*seen, np.zeros(0, np.int64)]).astype(np.int64)


def _gathered(ranks: list[dict[str, np.ndarray]], flat: np.ndarray) -> dict[str, np.ndarray]:
    """The operation's outputs: as many rows a rank as the fullest has, its own in order and its filling behind them. `flat` is the row
    of the batch of each row of the engine's."""
    world = len(ranks)
    real = [np.flatnonzero(rank["rows"] >= 0) for rank in ranks]
    width, held = max(len(own) for own in real), len(ranks[0]["rows"])
    gathered = np.concatenate([rank["rows"] for rank in ranks])
    # where a row of the engine's gathered ones stands among those that are given back
    moved = np.full(world * held, -1, np.int64)
    for rank, own in enumerate(real):
        moved[rank * held + own] = rank * width + np.arange(len(own))
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("rows", "positions", "row_lens", "restore", "kv_writer")}
    for rank, own in zip(ranks, real, strict=True):
        padded = lambda values, filling: np.concatenate([values, np.full(width - len(values), filling)])  # noqa: E731
        found["rows"].append(padded(flat[rank["rows"][own]], -1))
        found["positions"].append(padded(rank["positions"][own], 0))
        found["row_lens"].append(padded(rank["row_lens"][own], 0).astype(np.int32))
        restore = np.full(len(flat), -1, np.int64)
        restore[flat] = moved[rank["restore"]]
        found["restore"].append(restore)
        # a write counts where a row's KV goes to the row's own slot
        rightful = (rank["slots"] >= 0) & (gathered[rank["writes"]] == rank["slots"])
        writer = np.zeros(world * width, np.uint8)
        np.add.at(writer, moved[rank["writes"][rightful]], 1)
        found["kv_writer"].append(writer)
    return {name: np.stack(values) for name, values in found.items()}
