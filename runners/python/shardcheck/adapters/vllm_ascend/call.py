"""vLLM-Ascend's own functions on the arrays of a case, for scripts (`shardcheck replay --emit-python`): no adapter, no part of this package."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from cutting import cut, on_ranks

CONTEXT = "vllm_ascend/attention/context_parallel"
# the fused exchange of sparse attention, and the later one of all attention, which takes a rank's own state besides
FUSED, JOINED = "vllm_ascend/ops/triton/sfa_cp.py", "vllm_ascend/ops/triton/dcp/dcp_a2a.py"
MASKED = ("vllm_ascend/worker/dcp_utils.py", "vllm_ascend/worker/pcp_utils.py")
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def given(step: SimpleNamespace, name: str) -> torch.Tensor:
    """An input in its own type."""
    return torch.from_numpy(step.inputs[name]).to(TYPES[step.dtypes[name]])


def layout(release: Path, step: SimpleNamespace) -> dict:
    """The local lengths and `generate_mtp_attention_mask_for_decode` of each rank's manager: what each row sees of each of its tokens."""
    if (release / JOINED).is_file():
        raise NotImplementedError("this release takes its local lengths from vLLM and has no masks: there is nothing of its own to call")
    c, lens = step.configuration, step.inputs["seq_lens"]
    counts = np.diff(step.inputs["query_start_loc"]).astype(np.int32)
    path = next(release / name for name in MASKED if (release / name).is_file())
    common = vars(cut(release / CONTEXT / "common_cp.py", "get_dcp_local_seq_lens"))
    names = ("generate_mtp_attention_mask_for_decode", "_get_cp_local_seq_lens")
    parts = cut(path, *names, **common)
    total = torch.from_numpy(lens.astype(np.int32))
    if "get_dcp_local_seq_lens" in common:
        local = common["get_dcp_local_seq_lens"](total, c["dcp"], c["interleave"])
    else:
        local = parts._get_cp_local_seq_lens(None, total, 1, c["dcp"], c["interleave"])[:, 0]
    local = torch.stack([local[:, rank % c["dcp"]] for rank in range(c["tp"])]).numpy()
    outputs = {"local_lens": local}
    if c["dcp"] == 1:
        return outputs  # the kernel's own causal mask
    masks = np.zeros(step.shapes["row_mask"], np.uint8)
    for rank, mask in enumerate(masks):
        buffer = torch.zeros(
            len(lens), max(counts.max(initial=1), 1), max(lens.max(initial=1), 1), dtype=torch.bool
        )
        manager = SimpleNamespace(
            pcp_world_size=1,
            pcp_world_rank=0,
            dcp_world_size=c["dcp"],
            dcp_world_rank=rank % c["dcp"],
            num_decode_reqs=len(lens),
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=c["interleave"])
            ),
            dcp_mtp_attn_mask=SimpleNamespace(cpu=buffer, np=buffer.numpy()),
        )
        hidden = parts.generate_mtp_attention_mask_for_decode(manager, (lens - counts).tolist(), counts)
        rows = [hidden[request, row] for request, count in enumerate(counts) for row in range(count)]
        for seen, row in zip(mask, rows, strict=True):
            width = min(len(row), len(seen))
            seen[:width] = ~row[:width].numpy()
    outputs["row_mask"] = masks
    return outputs


def merge_states(release: Path, step: SimpleNamespace) -> dict:
    """`_update_out_and_lse` of two states, or the packed and the rank's own state in `_fused_dcp_lse_combine_kernel`."""
    if (release / JOINED).is_file():
        names = ("prefix_out", "prefix_lse", "suffix_out", "suffix_lse")
        out, lse, own, own_lse = (given(step, name) for name in names)
        merged = joined(release, 1, (own, own_lse))(SimpleNamespace(rank_in_group=0), out[None], lse[None])
        return {name: tensor[None] for name, tensor in zip(("out", "lse"), merged, strict=True)}
    update = cut(release / CONTEXT / "common_cp.py", "_update_out_and_lse")._update_out_and_lse
    outs = torch.stack([given(step, "prefix_out"), given(step, "suffix_out")])
    lses = torch.stack([given(step, "prefix_lse"), given(step, "suffix_lse")])
    out, lse = update(outs, lses[..., None])
    return {"out": out[None].to(outs.dtype), "lse": lse[None, ..., 0]}


def merge_partials(release: Path, step: SimpleNamespace) -> dict:
    """The fused exchange where a release has it and the adapter took it, else the exchange of a cached context behind an all-to-all."""
    way = step.effective.get("merge") or ("fused" if (release / FUSED).is_file() else "context")
    outs, lses = given(step, "partial_out"), given(step, "partial_lse")
    if (release / JOINED).is_file():
        merge = joined(release, len(outs), None)
        run = lambda group: merge(group, outs, lses)  # noqa: E731
    else:
        run = fused(release, outs, lses) if way == "fused" else behind_context(release, outs, lses)
    out, lse = zip(*on_ranks(len(outs), run), strict=True)
    outputs = {"out": torch.stack(out).to(outs.dtype)}
    return outputs if lse[0] is None else outputs | {"lse": torch.stack(lse)}


def behind_context(release: Path, outs: torch.Tensor, lses: torch.Tensor) -> object:
    """`_gather_global_context_output` and `_update_global_context_output`, turned as their caller turns it."""
    update = vars(cut(release / CONTEXT / "common_cp.py", "_update_out_and_lse"))
    names = ("_gather_global_context_output", "_update_global_context_output")

    def of_rank(group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        parts = cut(release / CONTEXT / "attention_cp.py", *names, dist=group, **update)
        layer = SimpleNamespace(
            dcp_size=group.world_size,
            dcp_group=group,
            dcp_device_group=group,
            pcp_size=1,
            head_size=outs.shape[-1],
        )
        local = torch.cat([outs[group.rank_in_group], lses[group.rank_in_group][..., None]], -1).permute(
            [1, 2, 0]
        )
        gathered = parts._gather_global_context_output(layer, local.contiguous())
        out, lse = parts._update_global_context_output(layer, gathered.permute([2, 0, 1]).contiguous())
        return out, lse[..., 0]

    return of_rank


def fused(release: Path, outs: torch.Tensor, lses: torch.Tensor) -> object:
    """The kernels of `sfa_dcp_a2a_fused_combine`, launched as it launches them; itself it takes tensors of an NPU alone."""
    kernels = cut(
        release / FUSED,
        "_pack_sfa_dcp_output_lse_kernel",
        "_fused_sfa_dcp_lse_combine_kernel",
        "_lse_pack_dim",
    )
    world, rows, heads, width = outs.shape
    own, lanes, block = heads // world, kernels._lse_pack_dim(outs.dtype), 1 << (width - 1).bit_length()
    constants = {"SCATTER_TOKENS": False, "LSE_PACK_DIM": lanes, "BLOCK_D": block}

    def of_rank(group: SimpleNamespace) -> tuple[torch.Tensor, None]:
        out, lse = outs[group.rank_in_group].clone(), lses[group.rank_in_group][..., None].clone()
        sent = torch.empty(world, own, rows, width + lanes, dtype=out.dtype)
        places = (*out.stride(), lse.stride(0), lse.stride(1), *sent.stride())
        kernels._pack_sfa_dcp_output_lse_kernel[(min(rows * heads, 4),)](
            out, lse, sent, *places, own, width, heads, rows * heads, **constants
        )
        received, merged = torch.empty_like(sent), torch.empty(rows, own, width, dtype=out.dtype)
        group.all_to_all_single(received, sent)
        places = (*received.stride(), *merged.stride())
        kernels._fused_sfa_dcp_lse_combine_kernel[(min(rows * own, 4),)](
            received, merged, *places, width, own, rows * own, DCP_SIZE=world, **constants
        )
        return merged, None

    return of_rank


def joined(release: Path, world: int, own: tuple[torch.Tensor, torch.Tensor] | None) -> object:
    """The kernels of `dcp_a2a_fused_combine`, launched as it launches them, with a rank's own state `out [T, H, D]`, `lse [T, H]` where given:
    `merge(group, outs, lses)` is a rank's output and LSE, which comes from a second exchange in f32."""
    kernels = cut(
        release / JOINED, "_pack_dcp_output_lse_kernel", "_fused_dcp_lse_combine_kernel", "_lse_pack_dim"
    )

    def once(group: SimpleNamespace, out: torch.Tensor, lse: torch.Tensor, asks: bool) -> torch.Tensor:
        rows, heads, width = out.shape
        mine, lanes, block = heads // world, kernels._lse_pack_dim(out.dtype), 1 << (width - 1).bit_length()
        constants = {"SCATTER_TOKENS": False, "LSE_PACK_DIM": lanes, "BLOCK_D": block}
        sent = torch.empty(world, mine, rows, width + lanes, dtype=out.dtype)
        places = (*out.stride(), lse.stride(0), lse.stride(1), *sent.stride())
        kernels._pack_dcp_output_lse_kernel[(min(rows * heads, 4),)](
            out, lse, sent, *places, mine, width, heads, rows * heads, **constants
        )
        received = sent
        if world > 1:
            received = torch.empty_like(sent)
            group.all_to_all_single(received, sent)
        merged = torch.empty(rows, mine, width + asks, dtype=out.dtype)
        local = (received, received, 0, 0, 0, 0, 0)
        if own is not None:
            state = own[0].to(out.dtype)
            local = (state, own[1], *state.stride(), *own[1].stride())
        places = (*received.stride(), *merged.stride())
        constants |= {"RETURN_LSE": asks, "HAS_LOCAL": own is not None}
        kernels._fused_dcp_lse_combine_kernel[(min(rows * mine, 4),)](
            received, merged, *local, *places, width, mine, rows * mine, DCP_SIZE=world, **constants
        )
        return merged

    def merge(
        group: SimpleNamespace, outs: torch.Tensor, lses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = outs[group.rank_in_group].clone(), lses[group.rank_in_group].clone()
        return once(group, out, lse, False), once(group, out.float(), lse, True)[..., -1]

    return merge
