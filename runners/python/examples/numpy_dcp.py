"""Decode context parallelism in plain numpy: any number of virtual ranks in one process, each with its own
paged cache.

    shardcheck run --engine exec:'python3 -m shardcheck.adapter examples/numpy_dcp.py:NumpyDcp'

Every rank computes from its own pages alone, in f32; what it learns of others goes through `Exchange`. The
option `--output f32` keeps outputs in f32, so that nothing but the arithmetic itself is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import shardcheck
from shardcheck import Configuration, Contract, Conventions, Operation, Reply, Tensor, progress
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
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """`[heads, Dk]` over `[n, K, Dk]` and `[n, K, Dv]`: output `[heads, Dv]` and natural LSE `[heads]`."""
    (count, kv_heads, _), heads = keys.shape, len(query)
    out = np.zeros((heads, values.shape[2]), F32)
    lse = np.full(heads, -np.inf, F32)
    if count == 0:
        return out, lse
    share = heads // kv_heads
    for kv_head in range(kv_heads):
        own = slice(kv_head * share, (kv_head + 1) * share)
        scores = (query[own] @ keys[:, kv_head].T) * F32(scale)
        largest = scores.max(axis=1, keepdims=True)
        weights = exp(scores - largest)
        total = weights.sum(axis=1)
        out[own] = (weights @ values[:, kv_head]) / total[:, None]
        lse[own] = largest[:, 0] + log(total)
    return out, lse


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


class NumpySession(shardcheck.Session):
    """All ranks of one session."""

    def __init__(self, configuration: Configuration, output: str) -> None:
        super().__init__(configuration)
        self.output = output
        self.layout_of = Layout.of(configuration)
        self.ranks = [Rank(configuration, rank) for rank in range(configuration.tp)]

    def layout(self, seq_lens, query_start_loc, block_table) -> Reply:
        """Lengths, slots, units and pages of every rank."""
        layout, lens, starts, table = self.layout_of, seq_lens.codes, query_start_loc.codes, block_table.codes
        count = int(starts[-1])
        row_lens, draft_lens = (
            self._row_lens(lens, starts, count, True),
            self._row_lens(lens, starts, count, False),
        )
        slots = [
            np.concatenate(
                [rank.slots(np.arange(n), table[r]) for r, n in enumerate(lens)] or [np.zeros(0, np.int64)]
            )
            for rank in self.ranks
        ]
        needed = layout.blocks_needed(lens).astype(np.int32)
        sub_page = min(layout.block & -layout.block, 128)
        parts = layout.block // sub_page
        pages = np.full((len(lens), int(needed.max(initial=0)) * parts), -1, np.int32)
        for request, blocks in enumerate(needed):
            pages[request, : blocks * parts] = (
                table[request, :blocks, None] * parts + np.arange(parts)
            ).reshape(-1)
        units = np.array([layout.virtual_block, layout.virtual_block, sub_page], np.int32)
        return self._moved(
            local_lens=np.stack([layout.local_length(lens, rank.member) for rank in self.ranks]).astype(
                np.int32
            ),
            row_lens=row_lens,
            draft_lens=draft_lens,
            slots=np.stack(slots),
            blocks_needed=self._everywhere(needed),
            units=self._everywhere(units),
            sub_page_table=self._everywhere(pages),
        )

    def write_kv(self, key, positions, requests, block_table, value=None) -> Reply:
        """Every rank writes the tokens that it owns."""
        slots = np.full((len(self.ranks), len(positions.codes)), -1, np.int64)
        for rank in self.ranks:
            for request in np.unique(requests.codes[requests.codes >= 0]):
                of_request = np.flatnonzero(requests.codes == request)
                table = block_table.codes[request]
                slots[rank.rank, of_request] = rank.slots(positions.codes[of_request], table)
            rank.write(key, value, slots[rank.rank])
        return self._moved(slots=slots)

    def read_cache(self) -> Reply:
        """The caches as they are."""
        paged = lambda codes: codes.reshape(
            self.configuration.blocks, self.configuration.block_size, *codes.shape[1:]
        )
        dtype = self.configuration.kv_dtype
        outputs = {"key_cache": Tensor(dtype, np.stack([paged(rank.keys) for rank in self.ranks]))}
        if not self.configuration.attention.is_mla:
            outputs["value_cache"] = Tensor(dtype, np.stack([paged(rank.values) for rank in self.ranks]))
        return self._moved(**outputs)

    def load_cache(self, key_cache, value_cache=None) -> Reply:
        """Replaces the caches by the given ones."""
        for rank in self.ranks:
            rank.keys[...] = key_cache.codes[rank.rank].reshape(rank.keys.shape)
            if value_cache is not None:
                rank.values[...] = value_cache.codes[rank.rank].reshape(rank.values.shape)
        return self._moved()

    def decode(self, query, seq_lens, query_start_loc, block_table, w_uv=None) -> Reply:
        """One new row a request."""
        return self._attend("decode", query, seq_lens, query_start_loc, block_table, w_uv)

    def verify(self, query, seq_lens, query_start_loc, block_table, w_uv=None) -> Reply:
        """Several new rows a request, each of which sees what lies before it."""
        return self._attend("verify", query, seq_lens, query_start_loc, block_table, w_uv)

    def draft(self, query, seq_lens, query_start_loc, block_table, w_uv=None) -> Reply:
        """Several new rows a request, each of which sees everything."""
        return self._attend("draft", query, seq_lens, query_start_loc, block_table, w_uv)

    def context(
        self, query, key, context_lens, query_start_loc, block_table, chunk_budget_tokens, value=None
    ) -> Reply:
        """New rows over a cached context that is gathered in chunks, then over the new tokens themselves."""
        return Context(self, context_lens.codes, chunk_budget_tokens).run(
            query, key, value, query_start_loc.codes, block_table.codes
        )

    def merge_partials(self, partial_out, partial_lse) -> Reply:
        """Merges given partials over one group."""
        world = self.configuration.dcp
        exchange = Exchange(world, world)
        outs, lses = self._merge(exchange, list(partial_out.numpy()), list(partial_lse.numpy()))
        outputs = {"out": Tensor.from_f32(partial_out.dtype, np.stack(outs)), "lse": np.stack(lses)}
        return Reply(outputs, self._path(), exchange.entered)

    def merge_states(self, prefix_out, prefix_lse, suffix_out, suffix_lse) -> Reply:
        """Merges two given states."""
        weights, lse = weigh(np.stack([prefix_lse.numpy(), suffix_lse.numpy()]))
        out = scaled(weights[0], prefix_out.numpy()) + scaled(weights[1], suffix_out.numpy())
        return Reply({"out": Tensor.from_f32(prefix_out.dtype, out[None]), "lse": lse[None]}, {}, [0])

    def pack_lse(self, lse) -> Reply:
        """Splits the bits of LSEs into two lanes and joins them again."""
        lanes = np.ascontiguousarray(lse.codes).view(np.uint16).reshape(-1, 2)
        order = self.configuration.lane_order
        wire = lanes[:, ::-1] if order == "hi_lo" else lanes
        joined = np.ascontiguousarray(wire[:, ::-1] if order == "hi_lo" else wire).view(F32).reshape(-1)
        return Reply({"lanes": wire[None].copy(), "unpacked": joined[None]}, {"lane_order": order}, [0])

    def _attend(self, route, query, seq_lens, query_start_loc, block_table, w_uv) -> Reply:
        configuration, own = self.configuration, self.configuration.heads_per_rank
        exchange = Exchange(configuration.tp, configuration.dcp)
        codes = [query.codes[:, rank.rank * own : (rank.rank + 1) * own] for rank in self.ranks]
        gathered = self._gather_heads(exchange, query, codes)
        lens, starts, causal = seq_lens.codes, query_start_loc.codes, route != "draft"
        rows = list(rows_of(lens, starts, causal))
        states = [
            self._local(rank, Tensor(query.dtype, heads).numpy(), rows, lens, block_table.codes)
            for rank, heads in zip(self.ranks, gathered)
        ]
        partials, lses = [state[0] for state in states], [state[1] for state in states]
        weights = None if w_uv is None else w_uv.numpy()
        projects_first = self._projects_first(weights)
        if projects_first:
            partials = [
                project(out, weights[self._group_heads(rank)]) for rank, out in zip(self.ranks, partials)
            ]
        outs, merged_lses = self._merge(exchange, partials, lses)
        if weights is not None and not projects_first:
            outs = [project(out, weights[rank * own : (rank + 1) * own]) for rank, out in enumerate(outs)]
        outputs = {
            "out": Tensor.from_f32(self.output, np.stack(outs)),
            "lse": np.stack(merged_lses),
            "partial_out": np.stack(partials),
            "partial_lse": np.stack(lses),
            "row_lens": self._row_lens(lens, starts, len(query.codes), causal),
            "gathered_query": Tensor(query.dtype, np.stack(gathered)),
        }
        path = {"route": route, "kernel_heads": configuration.gathered_heads, **self._path(projects_first)}
        return Reply(outputs, path, exchange.entered)

    def _gather_heads(self, exchange: Exchange, query: Tensor, own: list[np.ndarray]) -> list[np.ndarray]:
        """Codes of the query of every head of the group, `[T, Hg, Dk]`, on each rank."""
        if exchange.world == 1:
            return own
        if self.configuration.query_replication:
            return [query.codes[:, self._group_heads(rank)] for rank in self.ranks]
        return [np.concatenate(list(parts), axis=1) for parts in exchange.all_gather("query", own)]

    def _local(self, rank, query, rows, lens, table) -> tuple[np.ndarray, np.ndarray]:
        """A rank's partial of every gathered head."""
        out = np.zeros((*query.shape[:2], self.configuration.value_dim), F32)
        lse = np.full(query.shape[:2], -np.inf, F32)
        for row in rows:
            count = int(self.layout_of.local_length(row.visible, rank.member))
            keys, values = rank.values_of(*rank.tokens(np.arange(count), table[row.request]))
            out[row.index], lse[row.index] = attend(
                query[row.index], keys, values, self.configuration.softmax_scale
            )
        return out, lse

    def _merge(self, exchange, partials, lses) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Merged outputs and LSEs of each rank's own heads."""
        world = exchange.world
        if world == 1:
            weighed = [weigh(lse[None]) for lse in lses]
            return [scaled(w[0], out) for (w, _), out in zip(weighed, partials)], [lse for _, lse in weighed]
        split = lambda array: np.stack(np.split(array, world, axis=1))
        if self.configuration.comm_backend == "a2a":
            packed = [
                np.concatenate([split(out), split(lse[..., None])], axis=-1)
                for out, lse in zip(partials, lses)
            ]
            received = exchange.all_to_all("partials", packed)
            weighed = [weigh(part[..., -1]) for part in received]
            outs = [
                scaled(w, part[..., :-1]).sum(axis=0, dtype=F32) for (w, _), part in zip(weighed, received)
            ]
            return outs, [lse for _, lse in weighed]
        weighed = [weigh(gathered) for gathered in exchange.all_gather("lse", lses)]
        members = [rank % world for rank in range(exchange.ranks)]
        corrected = [split(scaled(w[m], out)) for m, (w, _), out in zip(members, weighed, partials)]
        own_lses = [split(lse)[m] for m, (_, lse) in zip(members, weighed)]
        return exchange.reduce_scatter("partials", corrected), own_lses

    def _group_heads(self, rank: Rank) -> slice:
        first = (rank.rank - rank.member) * self.configuration.heads_per_rank
        return slice(first, first + self.configuration.gathered_heads)

    def _projects_first(self, weights: np.ndarray | None) -> bool:
        return weights is not None and self.configuration.dcp > 1 and self.configuration.project_before_merge

    def _path(self, projects_first: bool = False) -> dict[str, object]:
        grouped = self.configuration.dcp > 1
        return {
            "comm_backend": self.configuration.comm_backend if grouped else "none",
            "lane_order": "none",
            "query_replication": grouped and self.configuration.query_replication,
            "project_before_merge": projects_first,
        }

    def _row_lens(self, lens, starts, count: int, causal: bool) -> np.ndarray:
        row_lens = np.zeros((len(self.ranks), count), np.int32)
        for row in rows_of(lens, starts, causal):
            for rank in self.ranks:
                row_lens[rank.rank, row.index] = self.layout_of.local_length(row.visible, rank.member)
        return row_lens

    def _everywhere(self, array: np.ndarray) -> np.ndarray:
        return np.stack([array] * len(self.ranks))

    def _moved(self, **outputs) -> Reply:
        return Reply(outputs, {}, [0] * len(self.ranks))


def project(out: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Up-projection of `[T, heads, Dv]` by `[heads, Dv, V]`."""
    return np.einsum("thd,hdv->thv", out, weights, dtype=F32)


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
        path = {"route": "context", "comm_backend": session._path()["comm_backend"], "chunks": self.chunks}
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
            out, lse = attend(query[row, head : head + 1], keys, values, configuration.softmax_scale)
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


class NumpyDcp(shardcheck.Engine):
    """The engine; `output` is the element type of attention outputs, `bf16` or `f32`."""

    name, version = "numpy-dcp", "1.0"
    session_type = NumpySession

    def __init__(self, output: str = "bf16") -> None:
        self.output = output
        # one rescale a rank: a rank's scores are all there before the first exp
        contract = Contract.f32(output=output, tile_min=1 << 20, merge="ag_rs_f32")
        conventions = Conventions(empty_partial="zero", scale_rounding="divide", overflow="saturate")
        moves = Operation(conventions=conventions)
        attends = Operation(
            contract=contract,
            conventions=conventions,
            observables=["partial_out", "partial_lse", "row_lens", "gathered_query"],
        )
        gathers = Operation(
            contract=contract,
            conventions=conventions,
            observables=["context_out", "context_lse", "gathered_key", "chunk_lens"],
        )
        merges = Operation(contract=contract, conventions=conventions)
        self.operations = {
            "layout": moves,
            "write_kv": Operation(conventions=conventions, observables=["slots"]),
            "read_cache": moves,
            "load_cache": moves,
            "decode": attends,
            "verify": attends,
            "draft": attends,
            "context": gathers,
            "merge_partials": merges,
            "merge_states": merges,
            "pack_lse": Operation(conventions=Conventions(lane_orders=["hi_lo", "lo_hi"])),
        }

    def open(self, configuration: Configuration) -> NumpySession:
        """A session of any number of ranks."""
        return NumpySession(configuration, self.output)
