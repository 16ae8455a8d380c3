"""Prefill context parallelism in numpy: which rows of a batch each of P ranks runs, and how they come back."""

from __future__ import annotations

import numpy as np


def prompt_rows(rank: int, world: int, strategy: str, rows: np.ndarray) -> list[np.ndarray] | None:
    """The pieces of a prompt that a rank runs, `rows` being the prompt's; `None` where every rank runs all."""
    count = len(rows)
    mirror = 2 * world - 1 - rank
    if strategy == "contiguous":
        size = -(-count // world)
        return [rows[rank * size : (rank + 1) * size]]
    if strategy == "zigzag":
        blocks = np.array_split(rows, 2 * world)  # the first count mod 2P are longer by one
        return [blocks[rank], blocks[mirror]]
    size = -(-count // (2 * world))
    if strategy == "head_tail_or_whole" and (2 * world - 1) * size >= count:
        return None
    return [rows[part * size : (part + 1) * size] for part in (rank, mirror)]


class Share:
    """The rows that one rank runs, and which of them other ranks run as well."""

    def __init__(self, rank: int, world: int, strategy: str, decodes: str) -> None:
        self.rank, self.world, self.strategy, self.decodes = rank, world, strategy, decodes
        self.rows: list[int] = []
        self.writes: list[bool] = []

    def _add(self, rows: np.ndarray, writes: bool) -> None:
        self.rows += rows.tolist()
        self.writes += [writes] * len(rows)

    def fill(self, starts: np.ndarray, prefills: np.ndarray) -> Share:
        """Takes what is the rank's of a batch."""
        if self.strategy == "round_robin":
            self._add(np.arange(self.rank, starts[-1], self.world), True)
            return self
        decode = 0
        for request, prefilling in enumerate(prefills):
            rows = np.arange(starts[request], starts[request + 1])
            pieces = prompt_rows(self.rank, self.world, self.strategy, rows) if prefilling else None
            if pieces is not None:
                for piece in pieces:
                    self._add(piece, True)
            elif prefilling or self.decodes == "replicated":
                self._add(rows, self.rank == 0)
            elif len(rows):
                if decode % self.world == self.rank:
                    self._add(rows, True)
                decode += 1
        return self


def share_out(starts, computed, prefills, world: int, strategy: str, decodes: str, padded_rows: int) -> dict:
    """Rows, positions and bounds of every rank, and on each the way back and who writes: outputs by name."""
    shares = [Share(rank, world, strategy, decodes).fill(starts, prefills) for rank in range(world)]
    padded = max([padded_rows, *(len(share.rows) for share in shares)])
    rows = np.full((world, padded), -1, np.int64)
    writer = np.zeros((world, padded), np.uint8)
    for share in shares:
        rows[share.rank, : len(share.rows)] = share.rows
        writer[share.rank, : len(share.rows)] = share.writes
    of_row = np.repeat(np.arange(len(computed)), np.diff(starts))
    position = np.arange(len(of_row)) - starts[of_row] + computed[of_row]
    real = rows >= 0
    positions = np.zeros(rows.shape, np.int64)
    positions[real] = position[rows[real]]
    gathered, restore = rows.reshape(-1), np.full(len(of_row), -1, np.int64)
    places = np.flatnonzero(writer.reshape(-1))
    restore[gathered[places]] = places
    everywhere = lambda array: np.stack([array.reshape(-1)] * world)
    return {
        "rows": rows,
        "positions": positions,
        "row_lens": np.where(real, positions + 1, 0).astype(np.int32),
        "restore": everywhere(restore),
        "kv_writer": everywhere(writer),
    }
