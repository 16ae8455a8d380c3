"""A session: the caches of all ranks, and a method for each operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.batches import Batch, torch_half
from shardcheck.adapters.sessions import CachedSession
from shardcheck.adapters.sglang.attention import Attention
from shardcheck.adapters.sglang.context import Context
from shardcheck.adapters.sglang.layout import Layout
from shardcheck.adapters.sglang.merging import RankMerge, merge_two, pack, refuse_one_rank, route
from shardcheck.adapters.sglang.options import Options
from shardcheck.adapters.sglang.prefill import PrefillLayout
from shardcheck.adapters.sglang.reads import Listed, Reads
from shardcheck.adapters.sglang.release import Release
from shardcheck.adapters.sglang.surroundings import Parallel


class SglangSession(CachedSession):
    """One configuration on a release."""

    def __init__(
        self, release: Release, configuration: Configuration, executor: Any, options: Options
    ) -> None:
        super().__init__(release, configuration, executor)
        self.options = options
        self.layouts = Layout(release, configuration, options.slots)
        self.layout_path = {"slots": self.layouts.slots_by}
        self.contexts = Context(configuration, self.caches, executor)
        self.attention = Attention(release, configuration, self.caches, executor, options)

    def lengths(self, lens: np.ndarray, rows: np.ndarray, members: list[int]) -> dict[str, Any]:
        """Local lengths of every rank, and row lengths and pages where the release has code for them."""
        outputs: dict[str, Any] = {
            "local_lens": torch.stack([self.layouts.local_lens(lens, member) for member in members])
        }
        if self.release.chain_lens is not None:
            outputs["row_lens"] = torch.stack([self.layouts.row_lens(lens, rows, member) for member in members])
        if self.release.new_pages is not None:
            outputs["blocks_needed"] = np.stack([self.layouts.blocks_needed(lens) for _ in members])
        return outputs

    def layout(self, seq_lens: Tensor, query_start_loc: Tensor, block_table: Tensor, **_: Any) -> Reply:
        """Slots and lengths, and the rows of the cache that each row of the batch is told to read, where the release lists them."""
        reply = super().layout(seq_lens, query_start_loc, block_table)
        lens, starts, table = (np.ascontiguousarray(t.numpy()) for t in (seq_lens, query_start_loc, block_table))
        with self.release.watching():
            lists = self._lists(lens, np.diff(starts), table)
        outputs = dict(reply.outputs)
        if lists is not None:
            entries = max(len(rows) for _, rows in lists)
            padded = [np.pad(rows.numpy(), (0, entries - len(rows)), constant_values=-1) for _, rows in lists]
            outputs["read_indptr"] = np.stack([indptr.numpy() for indptr, _ in lists])
            outputs["read_slots"] = np.stack(padded).astype(np.int64)
        return Reply(outputs, {**reply.effective, "reads": self.options.reads}, reply.collectives)

    def _lists(self, lens: np.ndarray, rows: np.ndarray, table: np.ndarray) -> list[Listed] | None:
        """What each rank lists for the rows of a batch, `rows` of each request; `None` where the release has no such list for them."""
        c, several = self.configuration, bool((rows != 1).any())
        # one rank: the adapter's own list, not the engine's
        if c.dcp == 1 or c.interleave > 1 or not len(lens):
            return None
        if several and (self.release.chain_lens is None or self.options.reads == "planner"):
            return None
        lists = []
        for rank in range(c.tp):
            member = rank % c.dcp
            self.release.groups.act(Parallel(c.dcp, member, None))
            reads = Reads(self.release, c, self.layouts, self.options.reads, member)
            of_row = np.repeat(np.arange(len(lens)), rows)
            seen = self.layouts.row_lens(lens, rows, member) if several else self.layouts.local_lens(lens, member)
            backend = reads.backend_of(reads.table(lens, table), seen)
            with interpreter.limits():
                indptr, indices = reads.of_rows("verify" if several else "decode", lens, of_row, seen, backend)
            lists.append((indptr, indices[: int(indptr[-1])]))
        return lists

    def attend_sinks(
        self,
        query: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        block_table: Tensor,
        sinks: Tensor,
        w_uv: Tensor | None = None,
        **_: Any,
    ) -> Reply:
        """Rows whose heads have sinks: one a request is a decode, several a verification."""
        batch = Batch.of(query, seq_lens, query_start_loc, block_table, self.device)
        kind = "verify" if (batch.query_lens > 1).any() else "decode"
        with self.release.watching():
            return self.attention.step(kind, batch, w_uv, torch.from_numpy(np.ascontiguousarray(sinks.numpy())))

    def merge_partials(
        self, partial_out: Tensor, partial_lse: Tensor, lse_base: str = "e", **_: Any
    ) -> Reply:
        """Merges given partials over the ranks of one group; their LSEs are in base `e` or `two`."""
        c = self.configuration
        refuse_one_rank(c.dcp)
        how = route(self.options.merge, c.comm_backend, lse_base)
        outs, lses = partial_out.torch(), partial_lse.torch()
        jobs = [RankMerge(how, outs[member], lses[member], lse_base) for member in range(c.dcp)]
        with self.release.watching():
            results, collectives = self.executor.run(jobs, c.dcp)
        out, lse = (torch.stack(part) for part in zip(*results, strict=True))
        effective = {"comm_backend": c.comm_backend, "merge": how}
        if how == "exchanged":
            effective["lane_order"] = "lo_hi" if outs.element_size() == 2 else "none"
        return Reply({"out": out.to(outs.dtype), "lse": lse.float()}, effective, collectives)

    def merge_states(
        self, prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor, **_: Any
    ) -> Reply:
        """Merges two given states."""
        prefix, suffix = (
            (o.torch(), s.torch()) for o, s in ((prefix_out, prefix_lse), (suffix_out, suffix_lse))
        )
        with self.release.watching():
            out, lse, how = merge_two(self.release, prefix, suffix)
        return Reply({"out": out[None], "lse": lse[None]}, {"view": how}, [0])

    def pack_lse(self, lse: Tensor, **_: Any) -> Reply:
        """The lanes of given LSEs."""
        if self.configuration.lane_order != "lo_hi":
            raise Unsupported("the exchange packs the low half first")
        with self.release.watching():
            lanes = pack(self.release, lse.torch(), torch_half(self.configuration.dtype))
        codes = lanes.view(torch.int16).numpy().view(np.uint16)
        return Reply({"lanes": codes[None]}, {"lane_order": "lo_hi"}, [0])

    def pcp_layout(
        self,
        query_start_loc: Tensor,
        context_lens: Tensor,
        is_prefilling: Tensor,
        world: int,
        strategy: str,
        decodes: str,
        padded_rows: int = 0,
        **_: Any,
    ) -> Reply:
        """Rows of a batch on the ranks of prefill context parallelism."""
        starts, computed = (t.numpy().astype(np.int64) for t in (query_start_loc, context_lens))
        has_decodes = bool(((np.diff(starts) > 0) & (is_prefilling.numpy() == 0)).any())
        shared = PrefillLayout(world, strategy, decodes, padded_rows, has_decodes)
        with self.release.watching():
            outputs, collectives = shared.share_out(self.executor, starts, computed)
        return Reply(outputs, {}, collectives)
