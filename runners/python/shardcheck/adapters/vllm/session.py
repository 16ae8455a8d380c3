"""A session: the caches of all ranks, and a method for each operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Reply, Tensor, Unsupported
from shardcheck.adapters.batches import torch_half
from shardcheck.adapters.sessions import CachedSession
from shardcheck.adapters.vllm.attention import Attention
from shardcheck.adapters.vllm.context import Context
from shardcheck.adapters.vllm.layout import Layout
from shardcheck.adapters.vllm.merging import RankMerge, merge_segments, merge_two, pack
from shardcheck.adapters.vllm.prefill import PrefillLayout
from shardcheck.adapters.vllm.release import Release


class VllmSession(CachedSession):
    """One configuration on a release."""

    def __init__(
        self, release: Release, configuration: Configuration, executor: Any, merge_variant: str
    ) -> None:
        super().__init__(release, configuration, executor)
        self.merge_variant = merge_variant
        self.device, self.layout_path = release.device, {"runner": release.runner}
        self.layouts = Layout(release, configuration)
        self.contexts = Context(configuration, self.caches, executor)
        self.attention = Attention(release, configuration, self.caches, executor)

    def lengths(self, lens: np.ndarray, rows: np.ndarray, members: list[int]) -> dict[str, Any]:
        """Local lengths and row lengths of every rank, where the release has code for them."""
        outputs: dict[str, Any] = {}
        if self.release.has_local_lens:
            outputs["local_lens"] = torch.stack([self.layouts.local_lens(lens, member) for member in members])
        if self.release.verify_row_lens is not None:
            outputs["row_lens"] = torch.stack([self.layouts.row_lens(lens, rows, member) for member in members])
        return outputs

    def written_key(self, key: Tensor, requests: np.ndarray, positions: np.ndarray) -> Tensor:
        """The keys, or the fault that was asked for: one token with the key of the token before it."""
        position = self.release.aliased_token
        codes = np.ascontiguousarray(key.codes)
        for token in () if position is None else np.flatnonzero(positions == position):
            before = np.flatnonzero((positions == position - 1) & (requests == requests[token]))
            if len(before):
                codes = codes.copy()
                codes[token] = codes[before[0]]
        return key if position is None else Tensor(key.dtype, codes)

    def draft(self, **tensors: Tensor) -> Reply:
        """Several rows a request that see all its tokens."""
        return self._attend("draft", **tensors)

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
        given = (t.numpy().astype(np.int64) for t in (query_start_loc, context_lens, is_prefilling))
        layout = PrefillLayout(self.release, world, strategy, decodes, padded_rows)
        with self.release.watching():
            outputs = layout.share_out(*given)
        return Reply(outputs, {}, [0] * world)

    def merge_partials(
        self, partial_out: Tensor, partial_lse: Tensor, lse_base: str = "e", **_: Any
    ) -> Reply:
        """Merges given partials over the ranks of one group; their LSEs are in base `e` or `two`."""
        c, device = self.configuration, self.release.device
        if c.dcp == 1:
            raise Unsupported("the engine merges nothing where there is one rank")
        outs, lses = partial_out.torch(device), partial_lse.torch(device)
        jobs = [RankMerge(c.comm_backend, outs[member], lses[member], lse_base) for member in range(c.dcp)]
        with self.release.watching():
            results, collectives = self.executor.run(jobs, c.dcp)
        out, lse = (torch.stack(part) for part in zip(*results, strict=True))
        effective = {"comm_backend": c.comm_backend}
        if c.comm_backend == "a2a":
            effective["lane_order"] = "lo_hi" if outs.element_size() == 2 else "none"
        return Reply({"out": out, "lse": lse.float()}, effective, collectives)

    def merge_states(
        self, prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor, **_: Any
    ) -> Reply:
        """Merges two given states."""
        device = self.release.device
        prefix, suffix = (
            (o.torch(device), s.torch(device))
            for o, s in ((prefix_out, prefix_lse), (suffix_out, suffix_lse))
        )
        with self.release.watching():
            out, lse, how = merge_two(self.release, self.merge_variant, prefix, suffix)
        return Reply({"out": out[None], "lse": lse[None]}, {"merge": self.merge_variant, "view": how}, [0])

    def merge_segments(
        self,
        tile_tokens: int,
        segment_max: Tensor,
        segment_sum: Tensor,
        segment_acc: Tensor,
        row_lens: Tensor,
        **_: Any,
    ) -> Reply:
        """Merges the given segments of a split kernel."""
        device = self.release.device
        given = [tensor.torch(device) for tensor in (segment_acc, segment_max, segment_sum, row_lens)]
        with self.release.watching():
            out, lse = merge_segments(self.release, tile_tokens, *given)
        return Reply({"out": out[None], "lse": lse[None]}, collectives=[0])

    def pack_lse(self, lse: Tensor, **_: Any) -> Reply:
        """The lanes of given LSEs."""
        if self.configuration.lane_order != "lo_hi":
            raise Unsupported("the exchange packs the low half first")
        with self.release.watching():
            lanes = pack(self.release, lse.torch(self.release.device), torch_half(self.configuration.dtype))
        return Reply(
            {"lanes": lanes.view(torch.int16).cpu().numpy().view(np.uint16)[None]},
            {"lane_order": "lo_hi"},
            [0],
        )
