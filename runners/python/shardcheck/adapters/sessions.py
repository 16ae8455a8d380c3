"""What sessions of engines have in common whose caches the adapter keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardcheck import Configuration, Reply, Session, Tensor
from shardcheck.adapters.batches import Batch, flat_positions
from shardcheck.adapters.caches import Caches


class StoredSession(Session):
    """A session with the caches of all ranks, as bytes. An adapter's own session has `_attend`, for one row a request or several."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.caches = Caches(configuration)

    def read_cache(self, **_: Any) -> Reply:
        """The caches as they are."""
        return Reply(self.caches.tensors(), collectives=[0] * self.configuration.tp)

    def load_cache(self, key_cache: Tensor, value_cache: Tensor | None = None, **_: Any) -> Reply:
        """Replaces the caches by the given ones."""
        self.caches.load("key_cache", key_cache)
        if value_cache is not None:
            self.caches.load("value_cache", value_cache)
        return Reply(collectives=[0] * self.configuration.tp)

    def decode(self, **tensors: Tensor) -> Reply:
        """One row a request."""
        return self._attend("decode", **tensors)

    def verify(self, **tensors: Tensor) -> Reply:
        """Several causal rows a request."""
        return self._attend("verify", **tensors)


class CachedSession(StoredSession):
    """A stored session on a release. Each operation runs watched: what comes from a stub is no result.

    An adapter's own session sets `layouts`, whose `slots` are the engine's, `attention` and `contexts`, and says by `lengths` what
    else the release lays out.
    """

    device = "cpu"
    """Where the batch of a step lies."""
    layout_path: dict[str, str] = {}
    """What a layout tells of the way that it took."""

    def __init__(self, release: Any, configuration: Configuration, executor: Any) -> None:
        super().__init__(configuration)
        self.release = release
        self.executor = executor

    def layout(self, seq_lens: Tensor, query_start_loc: Tensor, block_table: Tensor, **_: Any) -> Reply:
        """Slots of every rank, and what `lengths` adds."""
        lens, starts, table = (
            np.ascontiguousarray(t.numpy()) for t in (seq_lens, query_start_loc, block_table)
        )
        requests, positions = flat_positions(lens)
        members = [rank % self.configuration.dcp for rank in range(self.configuration.tp)]
        with self.release.watching():
            slots = [self.layouts.slots(table, requests, positions, member) for member in members]
            outputs = {"slots": np.stack(slots), **self.lengths(lens, np.diff(starts), members)}
        return Reply(outputs, self.layout_path, [0] * len(members))

    def lengths(self, lens: np.ndarray, rows: np.ndarray, members: list[int]) -> dict[str, Any]:
        """What the release lays out beside slots, for requests of `lens` tokens and `rows` rows, by output."""
        raise NotImplementedError

    def write_kv(
        self,
        key: Tensor,
        positions: Tensor,
        requests: Tensor,
        block_table: Tensor,
        value: Tensor | None = None,
        **_: Any,
    ) -> Reply:
        """Scatters tokens into the caches by the engine's slots."""
        table = np.ascontiguousarray(block_table.numpy())
        given = (
            np.ascontiguousarray(requests.numpy()).astype(np.int64),
            np.ascontiguousarray(positions.numpy()),
        )
        key = self.written_key(key, *given)
        slots = []
        for rank in range(self.configuration.tp):
            with self.release.watching():
                slots.append(self.layouts.slots(table, *given, rank % self.configuration.dcp))
            self.caches.write(rank, slots[-1], key, value)
        return Reply({"slots": np.stack(slots)}, collectives=[0] * len(slots))

    def written_key(self, key: Tensor, requests: np.ndarray, positions: np.ndarray) -> Tensor:
        """The keys that are written: the given ones, unless an adapter spoils them on purpose."""
        return key

    def context(
        self,
        chunk_budget_tokens: int,
        query: Tensor,
        key: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor,
        block_table: Tensor,
        **_: Any,
    ) -> Reply:
        """New tokens over a cached context that is gathered in chunks."""
        with self.release.watching():
            return self.contexts.step(
                chunk_budget_tokens, query, key, context_lens, query_start_loc, block_table
            )

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
        batch = Batch.of(query, seq_lens, query_start_loc, block_table, self.device)
        with self.release.watching():
            return self.attention.step(kind, batch, w_uv)
