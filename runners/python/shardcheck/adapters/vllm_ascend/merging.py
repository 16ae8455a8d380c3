"""Merges by log-sum-exp as vLLM-Ascend does them: partials of ranks behind one all-to-all in two ways, and two states."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from shardcheck import Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.vllm_ascend.release import Release
from shardcheck.adapters.vllm_ascend.surroundings import NpuTensor

MERGES = ("fused", "context")


@dataclass
class RankMerge:
    """The merge of one rank's given partial, `out [T, Hg, D]` and `lse [T, Hg]`, with those of its group. `how` is `fused`
    (`sfa_dcp_a2a_fused_combine`) or `context` (`_update_out_and_lse` behind the exchange of a cached context)."""

    how: str
    out: torch.Tensor
    lse: torch.Tensor

    def run(self, release: Release, group: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Merged output and LSE of the rank's own heads; no LSE where the engine has none."""
        with release.groups.acting(group), interpreter.limits():
            if self.how == "fused":
                return self._fused(release, group), None
            return self._context(release, group)

    def _fused(self, release: Release, group: Any) -> torch.Tensor:
        out, lse = self.out.as_subclass(NpuTensor), self.lse[..., None].as_subclass(NpuTensor)
        merged = release.fused(out, lse, group.world_size, 1, group.device_group)
        return merged.as_subclass(torch.Tensor)

    def _context(self, release: Release, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # as `forward_impl` does it: [T, Hg, D + 1] turned to [Hg, D + 1, T], exchanged, and back
        layer = SimpleNamespace(
            dcp_size=group.world_size, dcp_device_group=group.device_group, dcp_group=group.device_group, pcp_size=1
        )
        layer.head_size = self.out.shape[-1]
        local = torch.cat([self.out, self.lse[..., None]], dim=-1).permute([1, 2, 0]).contiguous()
        gathered = release.context._gather_global_context_output(layer, local)
        out, lse = release.context._update_global_context_output(layer, gathered.permute([2, 0, 1]).contiguous())
        return out, lse[..., 0]


def merge_two(
    release: Release, prefix: tuple[torch.Tensor, torch.Tensor], suffix: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two states `out [T, H, D]`, `lse [T, H]`."""
    outs, lses = zip(prefix, suffix, strict=True)
    out, lse = release.update(torch.stack(outs), torch.stack(lses)[..., None])
    return out, lse[..., 0]


def refuse(how: str, world: int, backend: str, lse_base: str) -> None:
    """Raises where the engine has no such merge."""
    if world == 1:
        raise Unsupported("the engine merges nothing where there is one rank")
    if backend != "a2a":
        raise Unsupported("partials are exchanged by an all-to-all alone")
    if lse_base != "e":
        raise Unsupported(f"the merge {how!r} takes natural LSEs")
