"""Attention of new tokens over a cached context that is gathered from all virtual ranks chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy_ranks import F32, Exchange, Rank, attend, rows_of, scaled, weigh

from shardcheck import Reply, Tensor

if TYPE_CHECKING:
    from numpy_dcp import NumpySession


class Context:
    """One step over a cached context: every rank sends the same number of rows, padding included."""

    def __init__(self, session: NumpySession, cached: np.ndarray, budget_tokens: int) -> None:
        self.session, self.cached, self.layout = session, cached, session.layout_of
        block, world = self.layout.block, self.layout.world
        self.padded = -(-cached // (block * world)) * block
        readers = max(1, int((cached > 0).sum()) * world)
        self.window = max(block, budget_tokens // readers // block * block)
        self.chunks = max(1, -(-int(self.padded.max(initial=0)) // self.window))

    def run(self, query: Tensor, key: Tensor, value: Tensor | None, starts, table) -> Reply:
        """The step on all ranks; states stay f32 until the last merge."""
        session, configuration = self.session, self.session.configuration
        exchange = Exchange(configuration.tp, configuration.dcp)
        own, width = configuration.heads_per_rank, configuration.value_dim
        queries = [query.numpy()[:, rank.rank * own : (rank.rank + 1) * own] for rank in session.ranks]
        shape = (len(query.codes), own)
        empty = lambda: (np.zeros((*shape, width), F32), np.full(shape, -np.inf, F32))
        states, order, counts = [empty() for _ in session.ranks], [], []
        rows = list(rows_of(self.cached, starts, False))
        for chunk in range(self.chunks):
            gathered = self._gather(exchange, chunk, table)
            counts.append([len(keys) for keys, _ in gathered[0]])
            order.append([keys for keys, _ in (item for part in gathered for item in part)])
            for rank, tokens in zip(session.ranks, gathered):
                chunk_state = empty()
                for row in rows:
                    self._attend(rank, queries[rank.rank], row.index, tokens[row.request], chunk_state)
                states[rank.rank] = merge_two(states[rank.rank], chunk_state)
        new_keys = key.numpy()
        new_values = new_keys[..., :width] if value is None else value.numpy()
        merged = [
            merge_two(
                states[rank.rank], self._new(rank, queries[rank.rank], new_keys, new_values, starts, empty())
            )
            for rank in session.ranks
        ]
        outputs = {
            "out": Tensor.from_f32(session.output, np.stack([out for out, _ in merged])),
            "lse": np.stack([lse for _, lse in merged]),
            "context_out": np.stack([out for out, _ in states]),
            "context_lse": np.stack([lse for _, lse in states]),
            "gathered_key": self._keys_in_order(order),
            "chunk_lens": session._everywhere(
                np.array(counts, np.int32).reshape(self.chunks, len(self.cached))
            ),
        }
        path = {
            "route": "context",
            "comm_backend": session._path("f32")["comm_backend"],
            "chunks": self.chunks,
        }
        return Reply(outputs, path, exchange.entered)

    def _gather(
        self, exchange: Exchange, chunk: int, table: np.ndarray
    ) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """f32 keys and values of each request's tokens in a chunk, on each rank."""
        begin, session = chunk * self.window, self.session
        sent = np.clip(self.padded - begin, 0, self.window)
        rows = [np.arange(begin, begin + count) for count in sent]
        local = [[rank.tokens(part, table[r]) for r, part in enumerate(rows)] for rank in session.ranks]
        flat = lambda parts, which, whole: np.concatenate([part[which] for part in parts] or [whole[:0]])
        keys = [flat(parts, 0, rank.keys) for rank, parts in zip(session.ranks, local)]
        values = [flat(parts, 1, rank.values) for rank, parts in zip(session.ranks, local)]
        if exchange.world > 1 and sent.sum():
            both = [np.concatenate([k, v], axis=2) for k, v in zip(keys, values)]
            split = session.configuration.qk_dim
            parts = exchange.all_gather("context", both)
            return [
                self._requests(rank, part[..., :split], part[..., split:], sent, begin)
                for rank, part in zip(session.ranks, parts)
            ]
        return [
            self._requests(rank, k[None], v[None], sent, begin)
            for rank, k, v in zip(session.ranks, keys, values)
        ]

    def _requests(self, rank: Rank, keys, values, sent, begin) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens of each request out of `[W, rows, …]`, padding dropped, by member."""
        found, before = [], 0
        for request, count in enumerate(sent):
            held = [
                int(np.clip(self.layout.local_length(self.cached[request], m) - begin, 0, count))
                for m in range(len(keys))
            ]
            pick = lambda codes: np.concatenate([codes[m, before : before + n] for m, n in enumerate(held)])
            found.append(rank.values_of(pick(keys), pick(values)))
            before += int(count)
        return found

    def _attend(self, rank: Rank, query, row: int, tokens, state) -> None:
        """Attention of one row's own heads, each over its KV head among those of the group."""
        configuration = self.session.configuration
        share = configuration.gathered_heads // configuration.kv_heads
        for head in range(configuration.heads_per_rank):
            kv_head = (rank.member * configuration.heads_per_rank + head) // share
            keys, values = (part[:, kv_head : kv_head + 1] for part in tokens)
            out, lse = attend(query[row, head : head + 1], keys, values, configuration.softmax_scale, 1)
            state[0][row, head], state[1][row, head] = out[0], lse[0]

    def _new(self, rank: Rank, query, keys, values, starts, state):
        """The new tokens' own causal attention."""
        for request in range(len(self.cached)):
            first, end = int(starts[request]), int(starts[request + 1])
            for row in range(first, end):
                self._attend(rank, query, row, (keys[first : row + 1], values[first : row + 1]), state)
        return state

    def _keys_in_order(self, order: list[list[np.ndarray]]) -> np.ndarray:
        """`[ranks, Σ cached, K, Dk]`: what each rank gathered, by chunk and request."""
        configuration, requests = self.session.configuration, len(self.cached)
        empty = np.zeros((0, configuration.kv_heads, configuration.qk_dim), F32)
        of_rank = lambda rank: [
            keys for chunk in order for keys in chunk[rank * requests : (rank + 1) * requests]
        ]
        return np.stack([np.concatenate([empty, *of_rank(rank)]) for rank in range(configuration.tp)])


def merge_two(first, second) -> tuple[np.ndarray, np.ndarray]:
    """Merge of two states by their LSEs."""
    weights, lse = weigh(np.stack([first[1], second[1]]))
    return scaled(weights[0], first[0]) + scaled(weights[1], second[0]), lse
