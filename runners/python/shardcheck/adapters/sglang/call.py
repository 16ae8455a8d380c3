"""SGLang's own functions on the arrays of a case, for scripts (`shardcheck replay --emit-python`): no adapter, no part of this package."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from cutting import cut, on_ranks, stand_in, whole
from stepping import caches_of, dense, on_all_ranks, own_query, refuse_rounded_products, requests_of_rows, row_lengths

KERNELS, DCP = "sglang/kernels/ops/attention", "sglang/srt/layers/dcp"
BACKEND = "sglang/srt/layers/attention/triton_backend.py"
# splits of a row at most, which a server's users set
SPLITS = 2
# what a latent holds, and its rotary part: those that the kernel's MLA form takes, which one rank runs
LATENTS_OF_ONE_RANK = ((512, 64), (256, 32))
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
    outs, lses = given(step, "partial_out"), given(step, "partial_lse")
    natural = step.parameters.get("lse_base", "e") == "e"
    merge = merging(release, way_of(step, "reduced" if natural else "scattered"), natural)

    def of_rank(group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        rank = group.rank_in_group
        return merge(outs[rank].clone(), lses[rank].clone(), group)

    out, lse = zip(*on_ranks(len(outs), of_rank), strict=True)
    return {"out": torch.stack(out).to(outs.dtype), "lse": torch.stack(lse)}


def way_of(step: SimpleNamespace, gathered: str) -> str:
    """Which merge a case takes: the adapter's, else the exchange's, `gathered` behind an all-gather."""
    return step.effective.get("merge") or {"a2a": "exchanged"}.get(step.configuration["comm_backend"], gathered)


def merging(release: Path, way: str, natural: bool) -> object:
    """A merge over ranks, `merge(out, lse, group)` of a rank's partial."""
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

    def merge(out: torch.Tensor, lse: torch.Tensor, group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        if way == "reduced":
            return merges.cp_lse_ag_out_rs_mha(out, lse, group, return_lse=True)
        if way == "scattered":
            merged = merges.cp_lse_ag_out_rs_mla(out, lse, group, is_lse_base_on_e=natural)
            return merged.transpose(0, 1), seen["lses"].chunk(group.world_size, 1)[group.rank_in_group]
        merged = merges.dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=natural)
        return merged, seen["merged"]

    return merge


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


def decode(release: Path, step: SimpleNamespace) -> dict:
    """A decode, by `get_dcp_lens`."""
    count = cut(release / DCP / "layout.py", "get_dcp_lens").get_dcp_lens
    world = step.configuration["dcp"]
    return attended(release, step, lambda lens, _, member: count(lens, world, member))


def verify(release: Path, step: SimpleNamespace) -> dict:
    """A verification, by `get_dcp_chain_spec_lens`."""
    found = vars(cut(release / DCP / "layout.py", "get_dcp_lens", "get_dcp_chain_spec_lens"))
    if "get_dcp_chain_spec_lens" not in found:
        raise NotImplementedError("this release has no lengths for several rows of a request")
    chain, world = found["get_dcp_chain_spec_lens"], step.configuration["dcp"]
    return attended(release, step, lambda lens, rows, member: chain(lens, rows, world, member))


def attend_sinks(release: Path, step: SimpleNamespace) -> dict:
    """A decode with sinks, or a verification where a request has more than one row."""
    return (verify if (np.diff(step.inputs["query_start_loc"]) > 1).any() else decode)(release, step)


def attended(release: Path, step: SimpleNamespace, count: object) -> dict:
    """`TritonAttnBackend.forward_decode` on each rank: gather, attention, merge. `count(lens, rows, member)` is what rows see of a rank."""
    c, way = step.configuration, way_of(step, "reduced")
    refuse(c, way)
    # another mask of scores than the causal one, which no layer here has
    around = vars(whole(release / KERNELS / "score_mod.py")) | {"_is_hip": False, "_is_gfx1250": False}
    kernels = whole(release / KERNELS / "decode_attention.py", **around)
    merge, kernel = merging(release, way, True), kernels.decode_attention_fwd

    def of_rank(rank: int, group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        lens, seen = row_lengths(step, lambda lens, rows: count(lens, rows, group.rank_in_group)), {}

        def merged(out: torch.Tensor, lse: torch.Tensor, group: SimpleNamespace) -> torch.Tensor:
            if way != "reduced":
                # MLA backends hand over zeros there (`fixup_zero_kv_rows`, a kernel of CUDA)
                out[lens == 0], lse[lens == 0] = 0.0, -torch.inf
            out, seen["lse"] = merge(out, lse, group)
            return out

        methods = backend_methods(release, group, merged)
        backend = backend_of(step, methods, kernel, rank, lens)
        query = own_query(step, rank)
        batch = SimpleNamespace(batch_size=len(query), seq_lens_sum=int(lens.sum()), spec_info=None)
        out = methods.forward_decode(
            *(backend, query.flatten(1), None, None, layer_of(step, backend), batch),
            save_kv_cache=False,
            sinks=own_sinks(step, rank),
        )
        if c["dcp"] == 1:
            seen["lse"] = torch.logsumexp(backend.forward_metadata.attn_lse, dim=-1)
        return out.view(len(query), c["heads_per_rank"], -1), seen["lse"]

    return on_all_ranks(step, of_rank)


def refuse(c: dict, way: str) -> None:
    """Says what the backend has not, or what no contract allows for, rather than ask for something else instead."""
    attention = c["attention"]
    if c["dcp"] > 1:
        if c["interleave"] > 1:
            raise NotImplementedError("the Triton backend has no interleave size")
        if c["query_replication"]:
            raise NotImplementedError("the engine gathers queries, it has no projection that makes them on every rank")
        if way != "reduced" and attention["kind"] != "mla":
            raise NotImplementedError("only MLA layers merge by an all-to-all or a reduce-scatter")
    elif attention["kind"] == "mla":
        if (attention["kv_lora_rank"], attention["qk_rope_head_dim"]) not in LATENTS_OF_ONE_RANK:
            raise NotImplementedError("on one rank the kernel takes latents of 512 + 64 and 256 + 32 alone")
    refuse_rounded_products(c)


def backend_methods(release: Path, group: SimpleNamespace, merged: object) -> SimpleNamespace:
    """Methods of `TritonAttnBackend` for a rank, which end in `merged(out, lse, group)`."""
    flags = SimpleNamespace(SGLANG_DISABLE_LEAN_ATTENTION=SimpleNamespace(get=lambda: False))
    stand_in("sglang.srt.environ", envs=flags)
    stand_in("sglang.srt.model_executor.runner_utils.capture_mode", get_is_capture_mode=lambda: False)
    return cut(
        release / BACKEND,
        *("forward_decode", "_dcp_kv_indices", "get_num_kv_splits", "logit_capping_mod"),
        **vars(cut(release / KERNELS / "dcp_kernels.py", "create_triton_kv_indices_for_dcp_triton")),
        get_parallel=lambda: SimpleNamespace(dcp_group=group),
        use_symmetric_memory=lambda *_: contextlib.nullcontext(),
        cp_lse_ag_out_rs_mha=merged,
    )


def backend_of(step: SimpleNamespace, methods: SimpleNamespace, kernel: object, rank: int, lens: torch.Tensor) -> SimpleNamespace:
    """What those methods read of a backend whose rows see `lens` tokens of a rank."""
    c, rows = step.configuration, len(lens)
    keys, *values = (cache.flatten(0, 1) for cache in caches_of(step, rank))
    mla = c["attention"]["kind"] == "mla"
    values = keys[..., : c["attention"]["kv_lora_rank"]] if mla else values[0]
    backend = SimpleNamespace(
        dcp_size=c["dcp"],
        dcp_rank=rank % c["dcp"],
        device="cpu",
        device_core_count=0,
        enable_deterministic=False,
        enable_lean_attention=False,
        is_draft_runner=False,
        max_kv_splits=SPLITS,
        page_size=1,
        req_to_token=ids_of_tokens(step),
        static_kv_splits=False,
        swa_v_head_dim=None,
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values),
        use_mla=mla,
        use_pdl=False,
        decode_attention_fwd=kernel,
        _dcp_lens=lambda *_: lens,
    )
    requests, indptr = dense(np.maximum(requests_of_rows(step), 0)), torch.zeros(rows + 1, dtype=torch.int32)
    if c["dcp"] > 1:
        indptr, indices, _ = methods._dcp_kv_indices(backend, requests, lens, indptr)
    else:
        indptr[1:] = lens.cumsum(0)
        indices = torch.cat([backend.req_to_token[at, :n] for at, n in zip(requests, lens.tolist(), strict=True)]).long()
    if ((indices < 0) | (indices >= len(keys))).any():
        raise IndexError(f"the kernel is sent to rows {indices.tolist()} of a cache of {len(keys)}")
    splits = torch.empty(rows, dtype=torch.int32)
    methods.get_num_kv_splits(backend, splits, lens.clamp_min(1))
    shape = (rows, c["heads_per_rank"] * c["dcp"], SPLITS)
    backend.forward_metadata = SimpleNamespace(
        kv_indptr=indptr,
        kv_indices=indices,
        num_kv_splits=splits,
        attn_logits=torch.empty(*shape, values.shape[-1]),
        attn_lse=torch.full(shape, -torch.inf),
        **dict.fromkeys(("swa_attn_logits", "uneven_batch", "lean_Mp", "lean_Lp", "lean_Op", "lean_locks")),
    )
    return backend


def ids_of_tokens(step: SimpleNamespace) -> torch.Tensor:
    """`req_to_token`, i32 `[n, longest]`: block · (B·W) + position mod (B·W), as whole pages are handed out; far away behind a request."""
    page = step.configuration["block_size"] * step.configuration["dcp"]
    lens, blocks = step.inputs["seq_lens"], step.inputs["block_table"]
    table = np.full((max(1, len(lens)), max(1, lens.max(initial=0))), 1 << 30, np.int32)
    for request, length in enumerate(lens):
        positions = np.arange(length)
        table[request, :length] = blocks[request, positions // page] * page + positions % page
    return dense(table)


def layer_of(step: SimpleNamespace, backend: SimpleNamespace) -> SimpleNamespace:
    """What those methods read of a layer."""
    keys, values = (backend.token_to_kv_pool.get_key_buffer(0), backend.token_to_kv_pool.get_value_buffer(0))
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=step.configuration["heads_per_rank"],
        tp_k_head_num=keys.shape[1],
        qk_head_dim=keys.shape[2],
        v_head_dim=values.shape[2],
        scaling=step.configuration["softmax_scale"],
        logit_cap=0.0,
        logit_capping_method="tanh",
        xai_temperature_len=-1,
        sliding_window_size=-1,
        k_scale=None,
        v_scale=None,
    )


def own_sinks(step: SimpleNamespace, rank: int) -> torch.Tensor | None:
    """A layer's parameter: the sinks of a rank's own heads. What lies behind it in memory is nobody's, here NaN."""
    if "sinks" not in step.inputs:
        return None
    heads = step.configuration["heads_per_rank"]
    memory = torch.full((heads * (1 + step.configuration["dcp"]),), torch.nan)
    memory[:heads] = dense(step.inputs["sinks"][rank * heads : (rank + 1) * heads])
    return memory[:heads]
