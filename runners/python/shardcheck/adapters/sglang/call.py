"""SGLang's own functions on the arrays of a case, for scripts (`shardcheck replay --emit-python`): no adapter, no part of this package."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import torch
from cutting import cut, on_ranks

KERNELS, DCP = "sglang/kernels/ops/attention", "sglang/srt/layers/dcp"
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "i32": torch.int32}


def given(step: SimpleNamespace, name: str) -> torch.Tensor:
    """An input in its own type."""
    return torch.from_numpy(step.inputs[name]).to(TYPES[step.dtypes[name]])


def merge_states(release: Path, step: SimpleNamespace) -> dict:
    """`merge_state_triton`."""
    merge = cut(
        release / KERNELS / "merge_state.py", "merge_state_kernel", "merge_state_triton"
    ).merge_state_triton
    names = ("prefix_out", "prefix_lse", "suffix_out", "suffix_lse")
    out, lse = merge(*(given(step, name) for name in names))
    return {"out": out[None], "lse": lse[None]}


def merge_partials(release: Path, step: SimpleNamespace) -> dict:
    """`dcp_a2a_lse_reduce`, `cp_lse_ag_out_rs_mla` or `cp_lse_ag_out_rs_mha`: the one that the adapter took, else the one of the exchange."""
    backend, natural = step.configuration["comm_backend"], step.parameters.get("lse_base", "e") == "e"
    way = step.effective.get("merge") or {"a2a": "exchanged"}.get(
        backend, "reduced" if natural else "scattered"
    )
    kernels = cut(
        release / KERNELS / "dcp_kernels.py",
        *("_correct_attn_cp_out_kernel", "CPTritonContext", "correct_attn_out"),
        *("_lse_pack_dim", "_dcp_pack_a2a_send_kernel", "dcp_pack_a2a_send"),
        *("_dcp_lse_combine_kernel", "dcp_lse_combine_triton"),
    )
    seen: dict[str, torch.Tensor] = {}
    parts = vars(kernels) | {"use_symmetric_memory": lambda *_: contextlib.nullcontext()}
    # the two functions that drop the merged LSE are called by way of these, which keep it
    parts["correct_attn_out"] = lambda *a, **k: keep(seen, "lses", kernels.correct_attn_out(*a, **k))
    parts["dcp_lse_combine_triton"] = lambda outs, lses, **k: combined(kernels, seen, outs, lses, **k)
    names = ("_ag_lse", "cp_lse_ag_out_rs_mha", "cp_lse_ag_out_rs_mla", "dcp_a2a_lse_reduce")
    merges = cut(release / DCP / "comm.py", *names, **parts)
    outs, lses = given(step, "partial_out"), given(step, "partial_lse")

    def of_rank(group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        rank = group.rank_in_group
        out, lse = outs[rank].clone(), lses[rank].clone()
        if way == "reduced":
            return merges.cp_lse_ag_out_rs_mha(out, lse, group, return_lse=True)
        if way == "scattered":
            merged = merges.cp_lse_ag_out_rs_mla(out, lse, group, is_lse_base_on_e=natural)
            return merged.transpose(0, 1), seen["lses"].chunk(len(outs), 1)[rank]
        merged = merges.dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=natural)
        return merged, seen["merged"]

    out, lse = zip(*on_ranks(len(outs), of_rank), strict=True)
    return {"out": torch.stack(out).to(outs.dtype), "lse": torch.stack(lse)}


def keep(seen: dict, name: str, result: tuple) -> tuple:
    """Notes the LSE of a merge that its caller drops."""
    seen[name] = result[1]
    return result


def combined(
    kernels: SimpleNamespace, seen: dict, outs: torch.Tensor, lses: torch.Tensor, **named: bool
) -> tuple:
    """The combine as it is called, and its merged LSE from a second call with LSEs that lie dense."""
    seen["merged"] = kernels.dcp_lse_combine_triton(outs, lses.contiguous(), return_lse=True, **named)[1]
    return kernels.dcp_lse_combine_triton(outs, lses, **named)


def layout(release: Path, step: SimpleNamespace) -> dict:
    """`get_dcp_lens`, and `get_dcp_chain_spec_lens` where a release has it and all requests have as many rows."""
    found = vars(cut(release / DCP / "layout.py", "get_dcp_lens", "get_dcp_chain_spec_lens"))
    c, lens = step.configuration, given(step, "seq_lens")
    rows = set(torch.diff(given(step, "query_start_loc")).tolist())
    size = {} if c["interleave"] == 1 else {"interleave_size": c["interleave"]}
    members = [rank % c["dcp"] for rank in range(c["tp"])]
    outputs = {
        "local_lens": torch.stack(
            [found["get_dcp_lens"](lens, c["dcp"], member, **size) for member in members]
        )
    }
    if len(rows) == 1 and "get_dcp_chain_spec_lens" in found:
        count, chain = rows.pop(), found["get_dcp_chain_spec_lens"]
        outputs["row_lens"] = torch.stack(
            [chain(lens, count, c["dcp"], member, **size) for member in members]
        )
    return outputs
