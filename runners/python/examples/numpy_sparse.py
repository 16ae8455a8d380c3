"""Selection of tokens in numpy: each rank scores the keys that it has, the best of all are chosen, each lists its own."""

from __future__ import annotations

import numpy as np

F32 = np.float32


class Step:
    """A batch, its indexer and the caches of all ranks, as values."""

    def __init__(self, layout, selector, seq_lens, starts, table, query, weights, cache, scale=None) -> None:
        self.layout, self.selector, self.lens, self.table = layout, selector, seq_lens, table
        self.query, self.weights, self.cache, self.scale = query, weights, cache, scale
        self.rows = [None] * len(query)
        for request, (first, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            for row in range(first, end):
                self.rows[row] = (request, int(seq_lens[request]) - int(end) + row + 1)

    def slots(self, request: int, positions: np.ndarray) -> np.ndarray:
        """Slots of positions on their owners."""
        return self.layout.slot(positions, self.table[request][self.layout.table_entry(positions)])

    def scores(self, rank: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions that a row sees of a rank's tokens, and their scores."""
        if self.rows[row] is None:
            return np.zeros(0, np.int64), np.zeros(0, F32)
        request, bound = self.rows[row]
        positions = self.layout.positions(max(bound, 0), rank % self.layout.world)
        slots = self.slots(request, positions)
        keys = self.cache[rank].reshape(-1, self.cache.shape[-1])[slots]
        heads = np.maximum(keys @ self.query[row].T, F32(0))
        scores = (heads * self.weights[row]).sum(axis=1, dtype=F32)
        return positions, scores if self.scale is None else scores * self.scale[rank].reshape(-1)[slots]

    def best(self, positions: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The k of the largest scores, of equal ones the first."""
        order = np.argsort(-scores, kind="stable")[: self.selector["top_k"]]
        return positions[order], scores[order]

    def listed(self, rank: int, chosen: list[np.ndarray]) -> dict[str, np.ndarray]:
        """What one rank answers for the tokens of all rows."""
        k, form = self.selector["top_k"], self.selector["list"]
        topk = np.full((len(chosen), k), -1, np.int32)
        counts, indptr, entries = [], [0], []
        for row, positions in enumerate(chosen):
            topk[row, : len(positions)] = positions
            own = positions[self.layout.owner(positions) == rank % self.layout.world]
            entry = list(self.slots(self.rows[row][0], own)) if len(own) else []
            counts.append(len(own))
            if form == "padded":
                entry += [-1] * (k - len(entry))
            elif form == "packed_dummy" and not entry:
                entry = [0]
            entries += entry
            indptr.append(len(entries))
        slots = np.full(len(chosen) * k, -1, np.int32)
        slots[: len(entries)] = entries
        return {"topk": topk, "counts": np.int32(counts), "indptr": np.int32(indptr), "slots": slots}


def select(ranks: int, step: Step) -> tuple[dict[str, np.ndarray], list[int]]:
    """The answers of all ranks, and how many collectives each entered."""
    world, rows = step.layout.world, range(len(step.query))
    local = [[step.best(*step.scores(rank, row)) for row in rows] for rank in range(ranks)]
    exact = step.selector["mode"] == "exact"
    answers = []
    for rank in range(ranks):
        group = range(rank // world * world, rank // world * world + world) if exact else [rank]
        chosen = []
        for row in rows:
            parts = [local[member][row] for member in group]
            pool = [np.concatenate(parts) for parts in zip(*parts)]
            chosen.append(step.best(*pool)[0])
        answers.append(step.listed(rank, chosen))
    outputs = {name: np.stack([answer[name] for answer in answers]) for name in answers[0]}
    return outputs, [int(exact and world > 1)] * ranks
