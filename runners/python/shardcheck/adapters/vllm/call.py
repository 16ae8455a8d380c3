"""vLLM's own functions on the arrays of a case, for scripts (`shardcheck replay --emit-python`): no adapter, no part of this package."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import torch
from cutting import cut, on_ranks

# Where releases keep their code, newest place first.
CORRECTION = ("v1/attention/ops/dcp.py", "v1/attention/ops/common.py", "attention/ops/common.py")
EXCHANGE = ("v1/attention/ops/dcp.py", "v1/attention/ops/dcp_alltoall.py")
STATES = ("v1/attention/ops/triton_merge_attn_states.py", "attention/ops/triton_merge_attn_states.py")
LENGTHS = ("v1/attention/backends/utils.py",)
BUILDERS = ("v1/attention/backends/mla/common.py",)
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "i32": torch.int32}


def given(step: SimpleNamespace, name: str) -> torch.Tensor:
    """An input in its own type."""
    return torch.from_numpy(step.inputs[name]).to(TYPES[step.dtypes[name]])


def file_of(release: Path, places: tuple[str, ...]) -> Path:
    """The first of the places that the release has."""
    found = [release / "vllm" / place for place in places if (release / "vllm" / place).is_file()]
    if not found:
        raise SystemExit(f"this release has none of {', '.join(places)}")
    return found[0]


def merge_states(release: Path, step: SimpleNamespace) -> dict:
    """`merge_attn_states` in Triton, with LSEs turned as it takes them."""
    platform = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)
    scope = {"current_platform": platform, "float8_info": torch.finfo(torch.float8_e4m3fn)}
    names = ("merge_attn_states", "merge_attn_states_kernel")
    merge = cut(file_of(release, STATES), *names, **scope).merge_attn_states
    outs = [given(step, name) for name in ("prefix_out", "suffix_out")]
    lses = [given(step, name).t().contiguous() for name in ("prefix_lse", "suffix_lse")]
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    merge(out, outs[0], lses[0], outs[1], lses[1], lse)
    return {"out": out[None], "lse": lse.t()[None]}


def merge_partials(release: Path, step: SimpleNamespace) -> dict:
    """`dcp_a2a_lse_reduce` or `cp_lse_ag_out_rs`, by the exchange of the case."""
    outs, lses = given(step, "partial_out"), given(step, "partial_lse")
    natural = step.parameters.get("lse_base", "e") == "e"
    way = exchanged if step.configuration["comm_backend"] == "a2a" else corrected
    out, lse = zip(*on_ranks(len(outs), way(release, outs, lses, natural)), strict=True)
    return {"out": torch.stack(out).to(outs.dtype), "lse": torch.stack(lse)}


def exchanged(release: Path, outs: torch.Tensor, lses: torch.Tensor, natural: bool) -> object:
    """`dcp_a2a_lse_reduce` on a rank."""

    def all_to_all(
        output: torch.Tensor, sent: torch.Tensor, group: object, async_op: bool = False
    ) -> SimpleNamespace:
        group.all_to_all_single(output, sent)
        return SimpleNamespace(wait=lambda: None)

    merge = cut(
        file_of(release, EXCHANGE),
        *("_dcp_a2a_lse_pack_dim", "_dcp_a2a_send_recv_buffers", "_dcp_a2a_pack_send_kernel"),
        *("_dcp_a2a_unpack_combine_kernel", "_dcp_a2a_pack_send", "_dcp_a2a_unpack_combine"),
        *("_validate_dcp_empty_shard_args", "mask_dcp_empty_shards_", "dcp_a2a_lse_reduce"),
        dist=SimpleNamespace(all_to_all_single=all_to_all),
    ).dcp_a2a_lse_reduce

    def of_rank(group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        rank = group.rank_in_group
        return merge(
            outs[rank].clone(), lses[rank].clone(), group, return_lse=True, is_lse_base_on_e=natural
        )

    return of_rank


def corrected(release: Path, outs: torch.Tensor, lses: torch.Tensor, natural: bool) -> object:
    """`cp_lse_ag_out_rs` on a rank; the merged LSE is the one that `correct_attn_out` returns to it."""
    path, seen = file_of(release, CORRECTION), {}
    kernels = cut(path, "_correct_attn_cp_out_kernel", "kernel", "CPTritonContext")
    scope = vars(kernels) | {"_CORRECT_ATTN_CP_OUT_KERNEL": lambda *a, **k: launched(kernels.kernel, *a, **k)}
    correct = cut(path, "correct_attn_out", **scope).correct_attn_out

    def kept(*arguments: object, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, seen["lse"] = correct(*arguments, **named)
        return out, seen["lse"]

    names = ("_validate_dcp_empty_shard_args", "mask_dcp_empty_shards_", "_cp_lse_common", "cp_lse_ag_out_rs")
    merge = cut(path, *names, **vars(kernels), correct_attn_out=kept).cp_lse_ag_out_rs
    based = {} if natural else {"is_lse_base_on_e": False}

    def of_rank(group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        rank = group.rank_in_group
        out = merge(outs[rank].clone(), lses[rank].clone(), group, **based)
        return out, seen["lse"].chunk(len(outs), 1)[rank]

    return of_rank


def launched(
    kernel: staticmethod,
    outs: torch.Tensor,
    into: torch.Tensor,
    lses: torch.Tensor,
    lse: torch.Tensor,
    rank: int,
    _: object,
    is_base_e: bool,
) -> None:
    """The kernel of `CorrectAttnCPOutKernel` as its `__call__` launches it."""
    constants = {"HEAD_DIM": outs.shape[2], "N_ROUNDED": len(lses), "IS_BASE_E": is_base_e}
    places = (*outs.stride(), *lses.stride(), rank)
    kernel.__func__[(*outs.shape[:2], 1)](outs, into, lses, lse, *places, **constants)


def layout(release: Path, step: SimpleNamespace) -> dict:
    """`get_dcp_local_seq_lens`, or the statement of the metadata builder before there was one."""
    c, lens = step.configuration, given(step, "seq_lens")
    members = [rank % c["dcp"] for rank in range(c["tp"])]
    count = vars(cut(file_of(release, LENGTHS), "get_dcp_local_seq_lens")).get("get_dcp_local_seq_lens")
    if count is None:
        return {"local_lens": torch.stack([by_builder(release, lens, c["dcp"], rank) for rank in members])}
    return {"local_lens": torch.stack([count(lens, c["dcp"], rank, c["interleave"]) for rank in members])}


def by_builder(release: Path, lens: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """What `MLACommonMetadataBuilder.build` makes of lengths: its `if self.dcp_world_size > 1: seq_lens[:num_decodes] = …`."""
    path = file_of(release, BUILDERS)
    statement = next(
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.dcp_world_size > 1"
        and ast.unparse(node.body[0]).startswith("seq_lens[:num_decodes] =")
    )
    scope = {"seq_lens": lens.clone(), "num_decodes": len(lens)}
    scope["self"] = SimpleNamespace(dcp_world_size=world, dcp_rank=rank)
    exec(compile(ast.Module(body=[statement], type_ignores=[]), str(path), "exec"), {}, scope)
    return scope["seq_lens"]
