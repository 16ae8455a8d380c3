"""What adapters do with a batch around the engine: its rows, the positions of its tokens, copies of partials that an
engine corrects in place, projections, and attention where the engine's is a compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardcheck import Tensor


@dataclass
class Batch:
    """A step's rows. Row `t` belongs to request `requests[t]`, −1 for graph padding."""

    query: torch.Tensor
    seq_lens: np.ndarray
    starts: np.ndarray
    table: np.ndarray

    @staticmethod
    def of(
        query: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_table: Tensor, device: str
    ) -> Batch:
        """A batch from the tensors of a step: the query as it is on a GPU and where it is f16, a query of bf16 exactly in f32 on a
        CPU."""
        values = (
            query.torch()
            if device != "cpu" or query.dtype == "f16"
            else torch.from_numpy(np.ascontiguousarray(query.numpy(), dtype=np.float32))
        )
        arrays = [np.ascontiguousarray(t.numpy()) for t in (seq_lens, query_start_loc, block_table)]
        return Batch(values.to(device), *arrays)

    @property
    def query_lens(self) -> np.ndarray:
        """Rows of each request."""
        return np.diff(self.starts)

    @property
    def requests(self) -> np.ndarray:
        """Request of each row."""
        requests = np.full(len(self.query), -1)
        requests[: self.starts[-1]] = np.repeat(np.arange(len(self.seq_lens)), self.query_lens)
        return requests


def torch_half(dtype: str) -> torch.dtype:
    """The torch type of activations of a session: `bf16` or `f16`."""
    return {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]


def flat_positions(seq_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(requests i64, positions i64)` of every token of every request, in order."""
    lens = seq_lens.astype(np.int64)
    requests = np.repeat(np.arange(len(lens)), lens)
    positions = np.concatenate([np.arange(length) for length in lens]) if len(lens) else np.zeros(0)
    return requests, positions.astype(np.int64)


def owned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: the engine corrects partials in place, and inputs must stay."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def project(out: torch.Tensor, rank: int, w_uv: Tensor | None, heads: int) -> torch.Tensor:
    """The up-projection of the attention layer, a batched product over the rank's own `heads`, in f32; `out`
    as it is where there is none."""
    if w_uv is None:
        return out
    first = rank * heads
    weights = torch.from_numpy(np.ascontiguousarray(w_uv.numpy()[first : first + heads], dtype=np.float32))
    projected = torch.bmm(out.float().transpose(0, 1), weights.to(out.device))
    return projected.transpose(0, 1).to(out.dtype)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: Sequence[int],
    k_starts: Sequence[int],
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's rows `[rows, H, Dk]` over its keys `[tokens, H, Dk]` in f32: `[rows, H, V]` and `[H,
    rows]`; zeros at LSE −∞ where a request has no keys. A causal mask is aligned at the first row and key."""
    out = torch.zeros(len(q), q.shape[1], v.shape[-1])
    lse = torch.full((q.shape[1], len(q)), float("-inf"))
    for index in range(len(q_starts) - 1):
        rows, keys = (
            slice(q_starts[index], q_starts[index + 1]),
            slice(k_starts[index], k_starts[index + 1]),
        )
        scores = torch.einsum("thd,shd->hts", q[rows], k[keys]) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        if scores.numel():
            lse[:, rows] = torch.logsumexp(scores, dim=-1)
            out[rows] = torch.einsum("hts,shd->thd", torch.softmax(scores, dim=-1), v[keys])
    return out, lse


class IdentityProjection:
    """Stands for the layer's up-projection: the latent is key and value of each head."""

    params_dtype = torch.float32

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def __call__(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        flat = latent.reshape(-1, latent.shape[-1])
        return torch.cat([flat, flat], dim=-1).repeat(1, self.heads), None
