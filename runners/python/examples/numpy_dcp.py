"""Decode context parallelism in numpy: any number of virtual ranks in one process, a paged cache for each.

    shardcheck run --engine exec:'python3 -m shardcheck.adapter examples/numpy_dcp.py:NumpyDcp'

Every rank computes from its own pages alone, in f32, and learns of others through `Exchange`. Partials
are rounded to bf16 for the exchange, and their LSEs travel behind them in two 16-bit lanes. With the options
`--partial f32 --output f32` nothing but the arithmetic itself is rounded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy_accept import accept
from numpy_context import Context
from numpy_prefill import share_out
from numpy_ranks import F32, Exchange, Rank, attend, join_lanes, project, rows_of, scaled, split_lanes, weigh
from numpy_router import route
from numpy_sparse import Step, select

import shardcheck
from shardcheck import Configuration, Contract, Conventions, Operation, Reply, Tensor
from shardcheck.layout import Layout


class NumpySession(shardcheck.Session):
    """All ranks of one session."""

    def __init__(self, configuration: Configuration, output: str, partial: str) -> None:
        super().__init__(configuration)
        self.output, self.partial = output, partial
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

    def import_cache(
        self,
        source_key_cache,
        source_block_table,
        seq_lens,
        block_table,
        source,
        source_value_cache=None,
    ) -> Reply:
        """Tokens from a session of another layout go to the slots that they have here."""
        there = Layout(source["dcp"], source["interleave"], source["block_size"])
        for request, length in enumerate(seq_lens.codes):
            positions = np.arange(length)
            blocks = source_block_table.codes[request][there.table_entry(positions)]
            place = (there.owner(positions), blocks, there.local_index(positions) % there.block)
            for rank in self.ranks:
                slots = rank.slots(positions, block_table.codes[request])
                own = slots >= 0
                taken = tuple(index[own] for index in place)
                rank.keys[slots[own]] = source_key_cache.codes[taken]
                if source_value_cache is not None:
                    rank.values[slots[own]] = source_value_cache.codes[taken]
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

    def merge_partials(self, partial_out, partial_lse, lse_base="e") -> Reply:
        """Merges given partials over one group; their LSEs are in base `e` or `two`."""
        world = self.configuration.dcp
        exchange = Exchange(world, world)
        unit = np.float32(np.log(2)) if lse_base == "two" else np.float32(1)
        given = partial_lse.numpy() * unit
        outs, lses = self._merge(exchange, list(partial_out.numpy()), list(given), partial_out.dtype)
        lses = [lse / unit for lse in lses]
        outputs = {"out": Tensor.from_f32(partial_out.dtype, np.stack(outs)), "lse": np.stack(lses)}
        return Reply(outputs, self._path(partial_out.dtype), exchange.entered)

    def merge_states(self, prefix_out, prefix_lse, suffix_out, suffix_lse) -> Reply:
        """Merges two given states."""
        weights, lse = weigh(np.stack([prefix_lse.numpy(), suffix_lse.numpy()]))
        out = scaled(weights[0], prefix_out.numpy()) + scaled(weights[1], suffix_out.numpy())
        return Reply({"out": Tensor.from_f32(prefix_out.dtype, out[None]), "lse": lse[None]}, {}, [0])

    def merge_segments(self, segment_max, segment_sum, segment_acc, row_lens, tile_tokens) -> Reply:
        """Merges what a split kernel left of its segments: base-2 maxima and sums, accumulators not yet
        divided.
        """
        segments = len(segment_max.codes)
        # a segment takes whole tiles, as few as cover the row with all segments
        tiles = np.maximum(-(-row_lens.codes // (segments * tile_tokens)), 1)
        active = (np.arange(segments)[:, None] < -(-row_lens.codes // (tiles * tile_tokens)))[..., None]
        maxima = np.where(active, segment_max.numpy(), F32(-np.inf))
        most = maxima.max(axis=0, initial=-np.inf).astype(F32)
        base = np.where(np.isfinite(most), most, F32(0))
        weights = np.exp2((maxima - base).astype(np.float64)).astype(F32)
        total = (weights * np.where(active, segment_sum.numpy(), F32(0))).sum(axis=0)
        share = weights / np.where(total > 0, total, F32(1))
        out = scaled(share, segment_acc.numpy()).sum(axis=0, dtype=F32)
        with np.errstate(divide="ignore"):
            lse = ((base + np.log2(total.astype(np.float64))) * np.log(2.0)).astype(F32)
        return Reply({"out": out[None], "lse": lse[None]}, {}, [0])

    def pack_lse(self, lse) -> Reply:
        """Splits the bits of LSEs into two lanes and joins them again."""
        order = self.configuration.lane_order
        lanes = split_lanes(lse.codes, order)
        outputs = {"lanes": lanes[None].copy(), "unpacked": join_lanes(lanes, order)[None]}
        return Reply(outputs, {"lane_order": order}, [0])

    def pcp_layout(
        self, query_start_loc, context_lens, is_prefilling, world, strategy, decodes, padded_rows=0
    ) -> Reply:
        """Shares the rows of a batch out over the ranks of prefill context parallelism."""
        given = (query_start_loc.codes, context_lens.codes, is_prefilling.codes)
        return Reply(share_out(*given, world, strategy, decodes, padded_rows), {}, [0] * world)

    def route(self, logits, router, bias=None, token_ids=None, hash_table=None) -> Reply:
        """Chooses the experts of given logits and weighs them."""
        given = [None if tensor is None else tensor.codes for tensor in (bias, token_ids, hash_table)]
        ids, weights = route(logits.numpy(), router, *given)
        return Reply({"topk_ids": ids[None], "topk_weights": weights[None]}, {}, [0])

    def accept_drafts(
        self,
        query_start_loc,
        draft_tokens,
        target_logits,
        method,
        ranks,
        draft_logits=None,
        temperature=None,
        uniform=None,
        noise=None,
    ) -> Reply:
        """Accepts drafted tokens over a vocabulary in shards."""
        given = [query_start_loc, draft_tokens, target_logits, draft_logits, temperature, uniform, noise]
        arrays = [None if tensor is None else tensor.codes for tensor in given]
        return Reply(accept(method, ranks, *arrays), {}, [0] * ranks)

    def select_sparse(
        self,
        seq_lens,
        query_start_loc,
        block_table,
        index_query,
        index_weights,
        index_cache,
        selector,
        index_scale=None,
    ) -> Reply:
        """Selects the tokens that rows attend to by an indexer whose keys lie over the ranks."""
        whole = [tensor.codes for tensor in (seq_lens, query_start_loc, block_table)]
        values = [index_query.numpy(), index_weights.numpy(), index_cache.numpy()]
        scale = None if index_scale is None else index_scale.numpy()
        step = Step(self.layout_of, selector, *whole, *values, scale)
        outputs, collectives = select(self.configuration.tp, step)
        return Reply(outputs, {"selection": selector["mode"]}, collectives)

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
        if exchange.world > 1:
            partials = [Tensor.from_f32(self.partial, out).numpy() for out in partials]
        outs, merged_lses = self._merge(exchange, partials, lses, self.partial)
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
        path = {
            "route": route,
            "kernel_heads": self._kernel_heads(),
            **self._path(self.partial, projects_first),
        }
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
        configuration, heads = self.configuration, query.shape[1]
        padded = np.pad(query, ((0, 0), (0, self._kernel_heads() - heads), (0, 0)))
        out = np.zeros((*query.shape[:2], configuration.value_dim), F32)
        lse = np.full(query.shape[:2], -np.inf, F32)
        for row in rows:
            count = int(self.layout_of.local_length(row.visible, rank.member))
            keys, values = rank.values_of(*rank.tokens(np.arange(count), table[row.request]))
            state = attend(padded[row.index], keys, values, configuration.softmax_scale, heads)
            out[row.index], lse[row.index] = state[0][:heads], state[1][:heads]
        return out, lse

    def _kernel_heads(self) -> int:
        """Heads of the kernel: the next width that there is one for, if any."""
        heads = self.configuration.gathered_heads
        return min(
            (width for width in self.configuration.kernel_head_widths if width >= heads), default=heads
        )

    def _merge(self, exchange, partials, lses, wire) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Merged outputs and LSEs of each rank's own heads; `wire` is the element type that partials have."""
        world, split = exchange.world, lambda array: np.stack(np.split(array, exchange.world, axis=1))
        if world == 1:
            weighed = [weigh(lse[None]) for lse in lses]
            return [scaled(w[0], out) for (w, _), out in zip(weighed, partials)], [lse for _, lse in weighed]
        if self.configuration.comm_backend == "a2a":
            packed = [split(self._pack(out, lse, wire)) for out, lse in zip(partials, lses)]
            received = [self._unpack(part, wire) for part in exchange.all_to_all("partials", packed)]
            weighed = [weigh(lse) for _, lse in received]
            outs = [scaled(w, out).sum(axis=0, dtype=F32) for (w, _), (out, _) in zip(weighed, received)]
            return outs, [lse for _, lse in weighed]
        weighed = [weigh(gathered) for gathered in exchange.all_gather("lse", lses)]
        members = [rank % world for rank in range(exchange.ranks)]
        corrected = [split(scaled(w[m], out)) for m, (w, _), out in zip(members, weighed, partials)]
        own_lses = [split(lse)[m] for m, (_, lse) in zip(members, weighed)]
        return exchange.reduce_scatter("partials", corrected), own_lses

    def _pack(self, out: np.ndarray, lse: np.ndarray, wire: str) -> np.ndarray:
        """A partial with its LSE behind it: in a column of f32, or in two lanes of 16 bits."""
        if wire == "f32":
            return np.concatenate([out, lse[..., None]], axis=-1)
        lanes = split_lanes(lse, self.configuration.lane_order)
        return np.concatenate([Tensor.from_f32(wire, out).codes, lanes], axis=-1)

    def _unpack(self, packed: np.ndarray, wire: str) -> tuple[np.ndarray, np.ndarray]:
        if wire == "f32":
            return packed[..., :-1], packed[..., -1]
        lse = join_lanes(packed[..., -2:], self.configuration.lane_order)
        return Tensor(wire, packed[..., :-2]).numpy(), lse

    def _group_heads(self, rank: Rank) -> slice:
        first = (rank.rank - rank.member) * self.configuration.heads_per_rank
        return slice(first, first + self.configuration.gathered_heads)

    def _projects_first(self, weights: np.ndarray | None) -> bool:
        return weights is not None and self.configuration.dcp > 1 and self.configuration.project_before_merge

    def _path(self, wire: str, projects_first: bool = False) -> dict[str, object]:
        grouped = self.configuration.dcp > 1
        packs = grouped and self.configuration.comm_backend == "a2a" and wire != "f32"
        return {
            "comm_backend": self.configuration.comm_backend if grouped else "none",
            "lane_order": self.configuration.lane_order if packs else "none",
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


class NumpyDcp(shardcheck.Engine):
    """The engine; `output` and `partial` are element types, `bf16` or `f32`."""

    name, version = "numpy-dcp", "1.0"
    files = ["numpy_ranks", "numpy_context", "numpy_prefill", "numpy_accept", "numpy_sparse"]
    session_type = NumpySession

    def __init__(self, output: str = "bf16", partial: str = "bf16") -> None:
        self.output, self.partial = output, partial
        # one rescale a rank: a rank's scores are all there before the first exp
        contract = Contract.f32(output=output, partial=partial, tile_min=1 << 20, merge="ag_rs_f32")
        lanes = ["hi_lo", "lo_hi"]
        conventions = Conventions(empty_partial="zero", lane_orders=[] if partial == "f32" else lanes)
        moves = Operation(conventions=conventions)
        attends = Operation(
            contract=contract,
            conventions=conventions,
            observables=["partial_out", "partial_lse", "row_lens", "gathered_query"],
        )
        # states of a context and of a merge are f32 until the last merge
        merge_contract = replace(contract, partial="f32")
        gathers = Operation(
            contract=merge_contract,
            conventions=conventions,
            observables=["context_out", "context_lse", "gathered_key", "chunk_lens"],
        )
        # a merge relies on nothing in an empty state
        packs = Conventions(lane_orders=lanes)
        merges = Operation(contract=merge_contract, conventions=packs)
        self.operations = {
            "layout": moves,
            "write_kv": Operation(conventions=conventions, observables=["slots"]),
            "read_cache": moves,
            "load_cache": moves,
            "import_cache": moves,
            "decode": attends,
            "verify": attends,
            "draft": attends,
            "context": gathers,
            "merge_partials": merges,
            "merge_states": merges,
            "merge_segments": Operation(contract=replace(merge_contract, output="f32"), conventions=packs),
            "pack_lse": Operation(conventions=packs),
            "pcp_layout": Operation(),
            "route": Operation(contract=contract),
            "accept_drafts": Operation(),
            "select_sparse": Operation(contract=replace(contract, output="f32")),
        }

    def open(self, configuration: Configuration) -> NumpySession:
        """A session of any number of ranks."""
        return NumpySession(configuration, self.output, self.partial)
