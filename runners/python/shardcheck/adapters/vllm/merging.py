"""Merges by log-sum-exp as vLLM does them: partials of ranks over a group, and two states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardcheck import Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.batches import owned_copy
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.vllm.release import Release


def combine(
    release: Release,
    backend: str,
    group: Any,
    partial: torch.Tensor,
    lse: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    lse_base: str = "e",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges `partial [T, Hg, D]` and `lse [T, Hg]` of this rank with those of its group: own heads, `[T, H,
    D]` and `[T, H]`.

    `seq_lens` (local, one a request) and `query_start_loc` go to releases whose functions take them, as their
    attention layer passes them.
    """
    if group.world_size == 1:
        return partial, lse
    function = release.correct_and_scatter if backend == "ag_rs" else release.exchange_and_combine
    if function is None:
        raise Unsupported(f"this release has no exchange {backend}")
    wanted = parameters(function)
    if lse_base != "e" and "is_lse_base_on_e" not in wanted:
        raise Unsupported("this release merges natural LSEs only")
    given = {
        "return_lse": True,
        "is_lse_base_on_e": lse_base == "e",
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
    }
    given = {name: value for name, value in given.items() if name in wanted}
    with interpreter.limits():
        if "return_lse" in wanted:
            return function(partial, lse, group, **given)
        # an older function keeps the merged LSE of the group's heads to itself
        out = function(partial, lse, group, **given)
        return out, release.observed_lse().chunk(group.world_size, dim=1)[group.rank_in_group]


@dataclass
class RankMerge:
    """The merge of one rank's given partial, `out [T, Hg, D]` and `lse [T, Hg]`, with those of its group."""

    backend: str
    out: torch.Tensor
    lse: torch.Tensor
    lse_base: str = "e"

    def run(self, release: Release, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Merged output and LSE of the rank's own heads. The engine corrects in place, so it gets copies."""
        release.groups.act(group)
        out, lse = owned_copy(self.out), owned_copy(self.lse)
        return combine(release, self.backend, group, out, lse, lse_base=self.lse_base)


def merge_two(
    release: Release,
    variant: str,
    prefix: tuple[torch.Tensor, torch.Tensor],
    suffix: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Merges two states `out [T, H, D]`, `lse [T, H]`; returns the merged one and how the outputs were handed
    over.

    `variant` is `triton` or `torch`, the engine's own fallback.
    """
    function = release.merge_states if variant == "triton" else release.merge_states_torch
    if function is None:
        raise Unsupported(f"this release has no merge of two states in {variant}")
    outs, how = [prefix[0], suffix[0]], "as given"
    if not _kernel_takes(release, outs):
        # not `contiguous`, which leaves the stride of a single head as it is
        outs = [torch.empty(out.shape, dtype=out.dtype, device=out.device).copy_(out) for out in outs]
        how = "made contiguous"
    lses = [lse.t().contiguous() for lse in (prefix[1], suffix[1])]
    output = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    output_lse = torch.empty_like(lses[0])
    with interpreter.limits():
        function(output, outs[0], lses[0], outs[1], lses[1], output_lse)
    return output, output_lse.t(), how


def _kernel_takes(release: Release, outs: list[torch.Tensor]) -> bool:
    """Whether outputs lie as the kernel reads them: dense, the stride of a single head included, which it steps by from row to
    row; or with the head stride that it is told (padded heads)."""
    if all(out.is_contiguous() and out.stride(1) == out.shape[2] for out in outs):
        return True
    names = getattr(release.merge_kernel, "arg_names", ())
    heads = outs[0].shape[1]
    strided = all(out.stride(2) == 1 and out.stride(0) == heads * out.stride(1) for out in outs)
    return "prefix_head_stride" in names and strided and outs[0].stride(1) == outs[1].stride(1)


def merge_segments(
    release: Release,
    tile_tokens: int,
    acc: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    row_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the segments of a split kernel, `acc [S, T, H, D]` and statistics `[S, T, H]`: output `[T, H,
    D]` and LSE `[T, H]`."""
    by_row = [tensor.movedim(0, 2).contiguous() for tensor in (acc, maxima, sums)]
    with interpreter.limits():
        return release.merge_segments(*by_row, row_lens, tile_tokens, torch.float32)


def pack(release: Release, lse: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """The two 16-bit lanes that LSEs `[n]` travel in behind an output of `half`, `[n, 2]` as bit patterns of that type."""
    count = len(lse)
    out = torch.zeros(count, 1, 1, dtype=half, device=lse.device)
    sent = torch.zeros(1, count, 1, 3, dtype=half, device=lse.device)
    with interpreter.limits():
        release.pack(
            out, lse[:, None].contiguous(), sent, world_size=1, h_per_rank=1, head_dim=1, lse_pack_dim=2
        )
    return sent[0, :, 0, 1:]
