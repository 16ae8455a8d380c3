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
                return fuse(release, group, self.out, self.lse)
            return self._context(release, group)

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


def fuse(
    release: Release,
    group: Any,
    out: torch.Tensor,
    lse: torch.Tensor,
    local: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fused exchange of a partial `[T, Hg, D]` and its LSE `[T, Hg]`: own heads, with a state of theirs that the rank has besides, where
    given. The LSE comes from a second exchange, of outputs in f32, where a release gives one for those alone; elsewhere there is none."""
    given = group.world_size, 1, group.device_group if group.world_size > 1 else None

    def merged(kind: torch.dtype, **asked: bool) -> torch.Tensor:
        partial = on_npu(out.to(kind)), on_npu(lse[..., None])
        if local is None:
            return release.fused(*partial, *given, **asked).as_subclass(torch.Tensor)
        received = release.fused(*partial, *given, defer_combine=True)
        return combined(release, received, (local[0].to(kind), local[1]), **asked)

    if release.combine is None:
        return merged(out.dtype), None
    return merged(out.dtype), merged(torch.float32, return_lse=True)[..., -1]


def combined(
    release: Release, received: torch.Tensor, local: tuple[torch.Tensor, torch.Tensor], **asked: bool
) -> torch.Tensor:
    """What was received, merged with the rank's own state."""
    out, lse = on_npu(local[0]), on_npu(local[1][..., None])
    merged = release.combine(received, out.shape[-1], 1, local_output=out, local_lse=lse, **asked)
    return merged.as_subclass(torch.Tensor)


def on_npu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that says that it lies on an NPU."""
    return tensor.as_subclass(NpuTensor)


def merge_two(
    release: Release, prefix: tuple[torch.Tensor, torch.Tensor], suffix: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Merges two states `out [T, H, D]`, `lse [T, H]`; says by which function."""
    if release.merges_local:
        with interpreter.limits():
            return *merge_local(release, prefix, suffix), "fused_dcp_lse_combine"
    outs, lses = zip(prefix, suffix, strict=True)
    out, lse = release.update(torch.stack(outs), torch.stack(lses)[..., None])
    return out, lse[..., 0], "_update_out_and_lse"


def merge_local(
    release: Release, prefix: tuple[torch.Tensor, torch.Tensor], suffix: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A history that a rank packed and received, and the attention over new tokens beside it, as attention of a verification merges them. The
    LSE is that of the same states in f32."""
    (out, lse), (own, own_lse) = prefix, suffix

    def merged(kind: torch.dtype, **asked: bool) -> torch.Tensor:
        received = release.pack(on_npu(out.to(kind)), on_npu(lse[..., None]), 1, 1)
        return combined(release, received, (own.to(kind), own_lse), **asked)

    return merged(out.dtype), merged(torch.float32, return_lse=True)[..., -1]


def refuse(how: str, world: int, backend: str, lse_base: str) -> None:
    """Raises where the engine has no such merge."""
    if world == 1:
        raise Unsupported("the engine merges nothing where there is one rank")
    if backend != "a2a":
        raise Unsupported("partials are exchanged by an all-to-all alone")
    if lse_base != "e":
        raise Unsupported(f"the merge {how!r} takes natural LSEs")
