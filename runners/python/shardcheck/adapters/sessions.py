"""What sessions of engines have in common whose caches the adapter keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardcheck import Configuration, Reply, Session, Tensor
from shardcheck.adapters.caches import Caches


class CachedSession(Session):
    """A session on a release, with the caches of all ranks. Each operation runs watched: what comes from a stub is no result.

    An adapter's own session sets `layouts`, whose `slots` are the engine's, `attention` and `contexts`.
    """

    def __init__(self, release: Any, configuration: Configuration, executor: Any) -> None:
        super().__init__(configuration)
        self.release = release
        self.executor = executor
        self.caches = Caches(configuration)

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
