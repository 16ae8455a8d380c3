"""FlashInfer's own merges on the arrays of a case, for scripts (`shardcheck replay --emit-python`): no adapter, no part of this package.

They run on a GPU. The release is the folder that holds the package `flashinfer`; what that imports must be installed."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def cascade(release: Path) -> ModuleType:
    """The release's module of merges."""
    if not torch.cuda.is_available():
        raise NotImplementedError("merges of FlashInfer need a GPU")
    sys.path.insert(0, str(release))
    import flashinfer.cascade

    return flashinfer.cascade


def output(step: SimpleNamespace, name: str) -> torch.Tensor:
    """Given outputs in their own type."""
    array, dtype = step.inputs[name], step.dtypes[name]
    if dtype not in HALVES or array.shape[-1] not in (64, 128, 256, 512):
        raise NotImplementedError(f"merges take outputs of 16 bits, 64 to 512 wide, not {dtype} of {array.shape[-1]}")
    return torch.from_numpy(array).to("cuda", HALVES[dtype])


def base_2(step: SimpleNamespace, name: str, of: str = "e") -> torch.Tensor:
    """Given LSEs in base 2, rounded once from natural ones."""
    lse = torch.from_numpy(step.inputs[name]).cuda()
    return lse if of == "two" else (lse.double() / math.log(2.0)).float()


def natural(lse: torch.Tensor) -> torch.Tensor:
    """LSEs of base 2 as natural ones, rounded once."""
    return (lse.double() * math.log(2.0)).float()


def merge_states(release: Path, step: SimpleNamespace) -> dict:
    """`merge_state`."""
    merge = cascade(release).merge_state
    out, lse = merge(
        *(output(step, "prefix_out"), base_2(step, "prefix_lse")),
        *(output(step, "suffix_out"), base_2(step, "suffix_lse")),
    )
    return {"out": out[None], "lse": natural(lse)[None]}


def merge_partials(release: Path, step: SimpleNamespace) -> dict:
    """`merge_states` over the partials of all ranks, each of which keeps its own heads."""
    merge, base = cascade(release).merge_states, step.parameters.get("lse_base", "e")
    outs, lses = output(step, "partial_out"), base_2(step, "partial_lse", base)
    out, lse = merge(outs.transpose(0, 1).contiguous(), lses.transpose(0, 1).contiguous())
    lse = lse if base == "two" else natural(lse)
    ranks = len(outs)
    return {"out": torch.stack(out.chunk(ranks, 1)), "lse": torch.stack(lse.chunk(ranks, 1))}
