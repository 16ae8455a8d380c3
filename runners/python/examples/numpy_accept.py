"""Acceptance of drafted tokens in numpy: by argmax, each draft by itself, or as a block; a vocabulary in shards."""

from __future__ import annotations

import numpy as np

F32 = np.float32


def log_law(logits: np.ndarray, temperature: float, shards: list[slice]) -> np.ndarray:
    """Logarithms of a row's probabilities: each shard has its largest logit and a sum, all have them joined."""
    scaled = (logits / F32(temperature)).astype(F32)
    largest = [scaled[own].max(initial=-np.inf) for own in shards]
    most = max(largest)
    # a shard without a token that can be has nothing to add
    sums = [np.exp(scaled[own] - top).sum() if top > -np.inf else 0.0 for own, top in zip(shards, largest)]
    total = sum(F32(part) * np.exp(F32(top - most)) for part, top in zip(sums, largest))
    return ((scaled - most) - np.log(total)).astype(F32)


def argmax(row: np.ndarray, shards: list[slice]) -> int:
    """The first of the best over the shards, each of which knows the token that its place stands for."""
    best, token = -np.inf, 0
    for own in shards:
        if row[own].size and row[own].max() > best:
            best, token = row[own].max(), own.start + int(row[own].argmax())
    return token


class Sampler:
    """One rank's view of one request: `drafts` end in front of the first that is none."""

    def __init__(self, method, drafts, target, draft, temperature, uniform, noise, shards) -> None:
        self.method, self.temperature, self.uniform, self.noise = method, temperature, uniform, noise
        none = np.flatnonzero(drafts < 0)
        self.drafts = drafts[: none[0]] if none.size else drafts
        self.target, self.draft, self.shards = target, draft, shards

    def emit(self) -> list[int]:
        """The accepted drafts and the token behind them."""
        if self.method == "greedy" or self.temperature == 0:
            best = [argmax(row, self.shards) for row in self.target]
            wrong = [index for index, draft in enumerate(self.drafts) if draft != best[index]]
            accepted = wrong[0] if wrong else len(self.drafts)
            return [*self.drafts[:accepted], best[accepted]]
        accepted, prefix = self.block() if self.method == "block" else (self.standard(), F32(1))
        weights = self.target_law(accepted)
        if accepted < len(self.drafts):
            left = self.residual(accepted, prefix)
            weights = np.log(left) if left.any() else weights
        return [*self.drafts[:accepted], argmax(weights + self.noise[accepted], self.shards)]

    def target_law(self, row: int) -> np.ndarray:
        return log_law(self.target[row], self.temperature, self.shards)

    def ratio(self, row: int) -> np.ndarray:
        """Target over drafter for a draft, as a logarithm; a draft without a law was sure."""
        token = self.drafts[row]
        given = 0 if self.draft is None else log_law(self.draft[row], self.temperature, self.shards)[token]
        return self.target_law(row)[token] - given

    def standard(self) -> int:
        passes = [self.ratio(row) > np.log(self.uniform[row]) for row in range(len(self.drafts))]
        return (passes + [False]).index(False)

    def residual(self, row: int, prefix: np.ndarray) -> np.ndarray:
        """What the drafter leaves over of the target."""
        left = np.exp(self.target_law(row))
        if self.draft is None:
            left[self.drafts[row]] = 0
            return left
        return np.maximum(prefix * left - np.exp(log_law(self.draft[row], self.temperature, self.shards)), 0)

    def block(self) -> tuple[int, np.ndarray]:
        """Drafts that are accepted as a block, and the probability of that prefix."""
        prefix, longest, accepted = F32(1), 0, F32(1)
        for row in range(len(self.drafts)):
            prefix = np.minimum(F32(1), prefix * np.exp(self.ratio(row)))
            bound = prefix
            if row + 1 < len(self.drafts):
                # drafts without a law leave the target without the next one, of which the prefix is a part
                mass = self.residual(row + 1, prefix).sum() * (prefix if self.draft is None else F32(1))
                whole = mass + (1 - prefix)
                bound = mass / whole if whole > 0 else F32(1)
            if prefix > 0 and self.uniform[row] <= bound:
                longest, accepted = row + 1, prefix
        return longest, accepted


def accept(method, ranks, starts, drafts, target, draft, temperature, uniform, noise) -> dict[str, np.ndarray]:
    """Outputs of the operation."""
    (count, columns), tokens = drafts.shape, target.shape[1]
    width = -(-tokens // ranks)
    shards = [slice(min(r * width, tokens), min((r + 1) * width, tokens)) for r in range(ranks)]
    emitted = np.full((count, columns + 1), -1, np.int64)
    accepted, drafted = np.zeros(count, np.int32), 0
    for request in range(count):
        rows = slice(starts[request], starts[request + 1])
        own = drafts[request, : rows.stop - rows.start - 1]
        chance = (temperature[request], uniform[rows], noise[rows]) if method != "greedy" else (0, None, None)
        law = None if draft is None else draft[request]
        with np.errstate(divide="ignore", invalid="ignore"):
            sampler = Sampler(method, own, target[rows], law, *chance, shards)
            found = sampler.emit()
        emitted[request, : len(found)] = found
        accepted[request], drafted = len(found) - 1, drafted + len(sampler.drafts)
    figures = [1 + accepted.sum() / count, accepted.sum() / drafted if drafted else 0]
    every = lambda array: np.repeat(np.asarray(array)[None], ranks, axis=0)  # noqa: E731
    return {"tokens": every(emitted), "accepted": every(accepted), "statistics": every(np.array(figures, F32))}
