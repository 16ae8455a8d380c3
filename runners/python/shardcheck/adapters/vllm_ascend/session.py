"""A session: the caches of all ranks, and a method for each operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Reply, Tensor
from shardcheck.adapters.batches import owned_copy
from shardcheck.adapters.sessions import CachedSession
from shardcheck.adapters.vllm_ascend.attention import Attention
from shardcheck.adapters.vllm_ascend.layout import Layout
from shardcheck.adapters.vllm_ascend.merging import RankMerge, merge_two, refuse
from shardcheck.adapters.vllm_ascend.prefill import PrefillLayout
from shardcheck.adapters.vllm_ascend.release import Release


class AscendSession(CachedSession):
    """One configuration on a release."""

    def __init__(self, release: Release, configuration: Configuration, executor: Any, merge: str) -> None:
        super().__init__(release, configuration, executor)
        self.merge = merge
        self.layouts = Layout(release, configuration)
        self.attention = Attention(release, configuration, self.caches, executor)

    def lengths(self, lens: np.ndarray, rows: np.ndarray, members: list[int]) -> dict[str, Any]:
        """Local lengths and row lengths of every rank, and the masks that rows have where there is more than one."""
        outputs: dict[str, Any] = {}
        if self.release.counts_lens:
            outputs["local_lens"] = torch.stack([self.layouts.local_lens(lens, member) for member in members])
        if self.release.has_masks:
            outputs["row_lens"] = torch.stack([self.layouts.row_lens(lens, rows, member) for member in members])
            if self.configuration.dcp > 1 and len(lens):
                outputs["row_mask"] = self.layouts.row_masks(lens, rows, members)
        return outputs

    def merge_partials(
        self, partial_out: Tensor, partial_lse: Tensor, lse_base: str = "e", **_: Any
    ) -> Reply:
        """Merges given partials over the ranks of one group."""
        c = self.configuration
        refuse(self.merge, c.dcp, c.comm_backend, lse_base)
        outs, lses = partial_out.torch(), partial_lse.torch()
        # the exchange sends what a file of its own packs: given strides reach the packing
        jobs = [
            RankMerge(self.merge, owned_copy(outs[member]), owned_copy(lses[member])) for member in range(c.dcp)
        ]
        with self.release.watching():
            results, collectives = self.executor.run(jobs, c.dcp)
        out, lse = zip(*results, strict=True)
        outputs = {"out": torch.stack(out).to(outs.dtype)}
        if lse[0] is not None:
            outputs["lse"] = torch.stack(lse).float()
        return Reply(outputs, {"comm_backend": "a2a", "merge": self.merge}, collectives)

    def merge_states(
        self, prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor, **_: Any
    ) -> Reply:
        """Merges two given states."""
        prefix, suffix = (
            (o.torch(), s.torch()) for o, s in ((prefix_out, prefix_lse), (suffix_out, suffix_lse))
        )
        with self.release.watching():
            out, lse, by = merge_two(self.release, prefix, suffix)
        outputs = {"out": out[None].to(prefix[0].dtype), "lse": lse[None]}
        return Reply(outputs, {"view": "as given", "merge": by}, [0])

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
        shared = PrefillLayout(self.release, world, strategy, decodes, padded_rows)
        with self.release.watching():
            outputs = shared.share_out(starts, computed, is_prefilling.numpy())
        return Reply(outputs, {}, [0] * world)
