"""Merges of states, LSEs in base 2."""

import torch


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`v [T, N, H, D]` and `s [T, N, H]`: the merged `[T, H, D]` and `[T, H]`; an empty state weighs nothing."""
    assert v.is_contiguous() and s.is_contiguous() and v.shape[:3] == s.shape
    assert s.dtype == torch.float32 and v.dtype in (torch.bfloat16, torch.float16)
    assert v.shape[2] * (v.shape[3] // max(8, v.shape[3] // 32)) <= 1024
    top = s.amax(1)
    weights = torch.exp2(s - torch.where(top.isfinite(), top, 0.0)[:, None])
    total = weights.sum(1)
    parts = torch.where(weights[..., None] > 0, weights[..., None] * v.float(), 0.0).sum(1)
    out = parts / torch.where(total > 0, total, 1.0)[..., None]
    return out.to(v.dtype), torch.where(total > 0, top + total.log2(), -torch.inf)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states `[T, H, D]` and `[T, H]`."""
    return merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
