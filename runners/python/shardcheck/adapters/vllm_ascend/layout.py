"""The layout of a batch as vLLM-Ascend computes it: slots, local lengths, and the masks of a verification."""

from __future__ import annotations

import numpy as np
import torch

from shardcheck import Configuration
from shardcheck.adapters.vllm_ascend.release import Release
from shardcheck.adapters.vllm_ascend.surroundings import Place


class Layout:
    """Slots and lengths of one configuration, rank by rank. `member` is a rank's place in its group."""

    def __init__(self, release: Release, configuration: Configuration) -> None:
        self.release = release
        self.configuration = configuration

    def slots(
        self, table: np.ndarray, requests: np.ndarray, positions: np.ndarray, member: int
    ) -> np.ndarray:
        """Slot of each token on a rank, i64 `[N]`, −1 where not owned; tokens of request −1 are not shown to the engine."""
        c = self.configuration
        shown = np.flatnonzero(requests >= 0)
        slots = np.full(len(requests), -1, dtype=np.int64)
        if not len(shown):
            return slots
        count, width = table.shape
        with self.release.groups.acting(Place(c.dcp, member)):
            engine = self.release.block_table(c.block_size, count, width, len(shown), c.interleave)
            engine.block_table.np[:count, :width] = table
            engine.compute_slot_mapping_draft(requests[shown].astype(np.int64), positions[shown].astype(np.int64))
        slots[shown] = engine.slot_mapping.np[: len(shown)]
        return slots

    def local_lens(self, seq_lens: np.ndarray, member: int) -> torch.Tensor:
        """Tokens of each request on a rank, i32 `[n]`; counted here where a release asks vLLM for them."""
        c = self.configuration
        if not self.release.counts_lens:
            rounds, rest = np.divmod(seq_lens.astype(np.int64), c.dcp * c.interleave)
            own = np.clip(rest - member * c.interleave, 0, c.interleave)
            return torch.from_numpy((rounds * c.interleave + own).astype(np.int32))
        manager = self._manager(len(seq_lens), 1, 1, member)
        lens = torch.from_numpy(np.ascontiguousarray(seq_lens, dtype=np.int32))
        return self.release.local_lens(manager, lens, c.dcp, c.interleave)[:, member].to(torch.int32)

    def mask(self, seq_lens: np.ndarray, query_lens: np.ndarray, member: int) -> torch.Tensor:
        """The mask of a verification on a rank, bool `[n, rows, tokens]`: true where a row must not see a token."""
        rows, longest = int(query_lens.max(initial=1)), int(seq_lens.max(initial=1))
        manager = self._manager(len(seq_lens), max(rows, 1), max(longest, 1), member)
        manager.num_decode_reqs = len(seq_lens)
        histories = (seq_lens.astype(np.int64) - query_lens).tolist()
        return manager.generate_mtp_attention_mask_for_decode(histories, query_lens.astype(np.int32))

    def row_lens(self, seq_lens: np.ndarray, query_lens: np.ndarray, member: int) -> torch.Tensor:
        """Tokens that each row sees on a rank, i32 `[rows]`, as the kernel reads them off its length and the mask; −1 where
        what a row sees is not the first of the rank's tokens."""
        lens = self.local_lens(seq_lens, member)
        if self.configuration.dcp == 1 or not len(seq_lens):
            # one rank: the kernel's own causal mask
            rows = [np.arange(n - q + 1, n + 1) for n, q in zip(seq_lens, query_lens, strict=True)]
            return torch.from_numpy(np.concatenate([*rows, np.zeros(0)]).astype(np.int32))
        mask = self.mask(seq_lens, query_lens, member)
        rows = [
            prefix_length(~mask[request, row, : lens[request]])
            for request, count in enumerate(query_lens.tolist())
            for row in range(count)
        ]
        return torch.tensor(rows, dtype=torch.int32)

    def row_masks(self, seq_lens: np.ndarray, query_lens: np.ndarray, members: list[int]) -> np.ndarray:
        """What each row may see of each rank's tokens by the mask of a verification, u8 `[ranks, rows, tokens]`; what stands behind a
        request's own is 0."""
        held = [self.local_lens(seq_lens, member).tolist() for member in members]
        masks = np.zeros((len(members), int(query_lens.sum()), max(map(max, held), default=0)), dtype=np.uint8)
        for index, member in enumerate(members):
            mask = self.mask(seq_lens, query_lens, member)
            places = ((request, row) for request, count in enumerate(query_lens.tolist()) for row in range(count))
            for seen, (request, row) in zip(masks[index], places, strict=True):
                length = held[index][request]
                seen[:length] = ~mask[request, row, :length].numpy()
        return masks

    def _manager(self, requests: int, rows: int, tokens: int, member: int) -> object:
        c = self.configuration
        return self.release.new_manager((c.dcp, member), (1, 0), (requests, rows, tokens), c.interleave)


def prefix_length(seen: torch.Tensor) -> int:
    """How many of the first tokens are seen, −1 where others are."""
    count = int(seen.sum())
    return count if bool(seen[:count].all()) else -1
