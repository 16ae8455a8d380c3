"""Virtual ranks in numpy: collectives between them, a paged cache each, attention over it, merges by LSE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardcheck import Configuration, Tensor, progress
from shardcheck.layout import Layout

F32 = np.float32


class Exchange:
    """Collectives between virtual ranks. A list has one entry a rank; ranks of a group follow each other."""

    def __init__(self, ranks: int, world: int) -> None:
        self.ranks, self.world = ranks, world
        self.entered = [0] * ranks

    def all_gather(self, what: str, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Every rank gets `[W, …]` of its group."""
        self._enter(f"all_gather {what}")
        return [np.stack(parts[first : first + self.world]) for first in map(self._first, range(self.ranks))]

    def all_to_all(self, what: str, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Every rank gives `[W, …]`, an entry for each member, and gets one from each."""
        self._enter(f"all_to_all {what}")
        members = [(rank % self.world, self._first(rank)) for rank in range(self.ranks)]
        return [np.stack([parts[first + m][member] for m in range(self.world)]) for member, first in members]

    def reduce_scatter(self, what: str, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Every rank gives `[W, …]` and gets the sum over its group of the entries for it."""
        self._enter(f"reduce_scatter {what}")
        members = [(rank % self.world, self._first(rank)) for rank in range(self.ranks)]
        return [sum(parts[first + m][member] for m in range(self.world)) for member, first in members]

    def _first(self, rank: int) -> int:
        return rank - rank % self.world

    def _enter(self, what: str) -> None:
        for rank in range(self.ranks):
            progress.enter(what, rank)
            self.entered[rank] += 1


@dataclass
class Row:
    """One row of a batch: its index, its request, and the tokens of the whole request that it sees."""

    index: int
    request: int
    visible: int


def rows_of(lens: np.ndarray, starts: np.ndarray, causal: bool) -> Iterator[Row]:
    """Rows of all requests, graph padding left out. Row t of q sees `L - q + 1 + t` tokens, or all L."""
    for request, length in enumerate(lens):
        first, end = int(starts[request]), int(starts[request + 1])
        for row in range(first, end):
            visible = int(length) - (end - first) + 1 + row - first if causal else int(length)
            yield Row(row, request, max(visible, 0))


def attend(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """`[width, Dk]` over `[n, K, Dk]` and `[n, K, Dv]`: output `[width, Dv]` and natural LSE `[width]`.

    The first `heads` of `width` heads share the KV heads evenly, those behind are padding.
    """
    (count, kv_heads, _), width = keys.shape, len(query)
    out = np.zeros((width, values.shape[2]), F32)
    lse = np.full(width, -np.inf, F32)
    if count == 0:
        return out, lse
    share = heads // kv_heads
    for kv_head in range(kv_heads):
        own = slice(kv_head * share, (kv_head + 1) * share if kv_head + 1 < kv_heads else width)
        scores = (query[own] @ keys[:, kv_head].T) * F32(scale)
        largest = scores.max(axis=1, keepdims=True)
        weights = exp(scores - largest)
        total = weights.sum(axis=1)
        out[own] = (weights @ values[:, kv_head]) / total[:, None]
        lse[own] = largest[:, 0] + log(total)
    return out, lse


def split_lanes(lse: np.ndarray, order: str) -> np.ndarray:
    """The bits of f32 LSEs `[…]` as two 16-bit lanes `[…, 2]`, the high half first or last."""
    halves = np.ascontiguousarray(lse, "<f4").view("<u2").reshape(*lse.shape, 2)
    return halves[..., ::-1] if order == "hi_lo" else halves


def join_lanes(lanes: np.ndarray, order: str) -> np.ndarray:
    """The LSEs of lanes, bit for bit."""
    halves = lanes[..., ::-1] if order == "hi_lo" else lanes
    return np.ascontiguousarray(halves).view("<f4").reshape(lanes.shape[:-1])


def exp(values: np.ndarray) -> np.ndarray:
    """exp of f32 values, correct to less than one unit in the last place."""
    return np.exp(values.astype(np.float64)).astype(F32)


def log(values: np.ndarray) -> np.ndarray:
    """log of f32 values, correct to less than one unit in the last place."""
    with np.errstate(divide="ignore"):
        return np.log(values.astype(np.float64)).astype(F32)


def weigh(lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights of states `[states, …]` by their LSEs, and the merged LSE. Not finite means empty."""
    lses = np.where(np.isfinite(lses), lses, F32(-np.inf))
    largest = lses.max(axis=0)
    base = np.where(np.isfinite(largest), largest, F32(0))
    weights = exp(lses - base)
    total = weights.sum(axis=0)
    return weights / np.where(total > 0, total, F32(1)), base + log(total)


def scaled(weights: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`weights · out`; nothing of an empty state counts, whatever lies in it."""
    return np.where(weights[..., None] > 0, out * weights[..., None], F32(0))


class Rank:
    """One rank: a paged cache, and attention over what lies in it."""

    def __init__(self, configuration: Configuration, rank: int) -> None:
        self.configuration, self.layout = configuration, Layout.of(configuration)
        self.rank, self.member = rank, rank % configuration.dcp
        tokens = configuration.blocks * configuration.block_size
        nan = Tensor.from_f32(configuration.kv_dtype, np.float32(np.nan)).codes
        self.keys = np.full((tokens, configuration.kv_heads, configuration.qk_dim), nan)
        width = 0 if configuration.attention.is_mla else configuration.value_dim
        self.values = np.full((tokens, configuration.kv_heads, width), nan)

    def write(self, key: Tensor, value: Tensor | None, slots: np.ndarray) -> None:
        """Casts the tokens that have a slot here into the cache."""
        own = slots >= 0
        self.keys[slots[own]] = self._cast(key.numpy()[own])
        if value is not None:
            self.values[slots[own]] = self._cast(value.numpy()[own])

    def slots(self, positions: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Slot of each position of one request on this rank, −1 where another rank owns it."""
        slots = np.full(len(positions), -1, np.int64)
        own = self.layout.owner(positions) == self.member
        slots[own] = self.layout.slot(
            positions[own], table[self.layout.table_entry(positions[own])].astype(np.int64)
        )
        return slots

    def tokens(self, rows: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes of keys and values at local indices of one request."""
        block = self.layout.block
        slots = table[rows // block].astype(np.int64) * block + rows % block
        return self.keys[slots], self.values[slots]

    def values_of(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """f32 keys and values of codes; the value of MLA is the first part of the key."""
        scale = F32(self.configuration.kv_scale)
        dtype = self.configuration.kv_dtype
        key = Tensor(dtype, keys).numpy() * scale
        if self.configuration.attention.is_mla:
            return key, key[..., : self.configuration.value_dim]
        return key, Tensor(dtype, values).numpy() * scale

    def _cast(self, values: np.ndarray) -> np.ndarray:
        scaled_down = values / F32(self.configuration.kv_scale)
        return Tensor.from_f32(self.configuration.kv_dtype, scaled_down, "saturate").codes


def project(out: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Up-projection of `[T, heads, Dv]` by `[heads, Dv, V]`."""
    return np.einsum("thd,hdv->thv", out, weights, dtype=F32)
