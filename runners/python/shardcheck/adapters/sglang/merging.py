"""Merges by log-sum-exp as SGLang does them: partials of ranks over a group in three ways, and two states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardcheck import Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.batches import owned_copy
from shardcheck.adapters.sglang.release import Release
from shardcheck.adapters.sglang.surroundings import Parallel


def route(merge: str, backend: str, lse_base: str) -> str:
    """Which merge over ranks an exchange is: `exchanged` (`dcp_a2a_lse_reduce`), `scattered`
    (`cp_lse_ag_out_rs_mla`), which alone of the other two knows base 2, or `reduced` (`cp_lse_ag_out_rs_mha`)."""
    if backend == "a2a":
        return "exchanged"
    return "scattered" if lse_base != "e" else merge


def combine(
    release: Release, how: str, group: Any, partial: torch.Tensor, lse: torch.Tensor, lse_base: str = "e"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges `partial [T, Hg, D]` and `lse [T, Hg]` of this rank with those of its group: own heads, `[T, H, D]` and
    `[T, H]`. What is given may be overwritten."""
    natural = lse_base == "e"
    with interpreter.limits():
        if how == "reduced":
            return release.merge_reduced(partial, lse, group, return_lse=True)
        if how == "scattered":
            # [H, T, D]: its caller turns it round
            out = release.merge_scattered(partial, lse, group, is_lse_base_on_e=natural).transpose(0, 1)
            return out, release.observed_lse().chunk(group.world_size, dim=1)[group.rank_in_group]
        if partial.element_size() == 2 and partial.shape[-1] % 2:
            raise Unsupported(
                "an LSE travels as two more columns of 16 bits: the exchange takes even widths only"
            )
        # its caller hands over dense tensors
        out = release.merge_exchanged(partial.contiguous(), lse.contiguous(), group, is_lse_base_on_e=natural)
        return out, release.observed_lse()


@dataclass
class RankMerge:
    """The merge of one rank's given partial, `out [T, Hg, D]` and `lse [T, Hg]`, with those of its group."""

    how: str
    out: torch.Tensor
    lse: torch.Tensor
    lse_base: str

    def run(self, release: Release, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Merged output and LSE of the rank's own heads. The engine corrects in place, so it gets copies."""
        release.groups.act(Parallel(group.world_size, group.rank_in_group, group))
        out, lse = owned_copy(self.out), owned_copy(self.lse)
        return combine(release, self.how, group, out, lse, self.lse_base)


def merge_two(
    release: Release,
    prefix: tuple[torch.Tensor, torch.Tensor],
    suffix: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Merges two states `out [T, H, D]`, `lse [T, H]`; returns the merged one and how they were handed over: the
    kernel takes no strides."""
    given = (*prefix, *suffix)
    dense = all(tensor.is_contiguous() for tensor in given)
    with interpreter.limits():
        out, lse = release.merge_two(*(tensor.contiguous() for tensor in given))
    return out, lse, "as given" if dense else "made contiguous"


def pack(release: Release, lse: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """The two 16-bit lanes that LSEs `[n]` travel in behind an output of `half`, `[n, 2]`."""
    count = len(lse)
    out = torch.zeros(count, 1, 2, dtype=half)
    sent = torch.zeros(1, count, 1, 4, dtype=half)
    words = sent.view(torch.float32)
    with interpreter.limits():
        release.pack(out, lse[:, None].contiguous(), sent[..., :2], words[..., 1])
    return sent[0, :, 0, 2:]


def refuse_one_rank(world: int) -> None:
    """Raises where there is nothing to merge with."""
    if world == 1:
        raise Unsupported("the engine merges nothing where there is one rank")
