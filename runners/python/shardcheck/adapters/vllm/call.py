"""vLLM's own functions on the arrays of a case, for scripts (`shardcheck replay --emit-python`): no adapter, no part of this package."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from cutting import cut, on_ranks, whole
from stepping import caches_of, dense, on_all_ranks, own_query, refuse_rounded_products, requests_of_rows, row_lengths

# Where releases keep their code, newest place first.
CORRECTION = ("v1/attention/ops/dcp.py", "v1/attention/ops/common.py", "attention/ops/common.py")
EXCHANGE = ("v1/attention/ops/dcp.py", "v1/attention/ops/dcp_alltoall.py")
STATES = ("v1/attention/ops/triton_merge_attn_states.py", "attention/ops/triton_merge_attn_states.py")
LENGTHS = ("v1/attention/backends/utils.py",)
BUILDERS = ("v1/attention/backends/mla/common.py",)
KERNELS = ("v1/attention/ops/triton_decode_attention.py", "attention/ops/triton_decode_attention.py")
BACKEND = ("v1/attention/backends/mla/triton_mla.py",)
VERIFICATION = ("v1/attention/backends/mla/rocm_aiter_mla.py",)
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "i32": torch.int32}


def given(step: SimpleNamespace, name: str) -> torch.Tensor:
    """An input in its own type."""
    return torch.from_numpy(step.inputs[name]).to(TYPES[step.dtypes[name]])


def file_of(release: Path, places: tuple[str, ...]) -> Path:
    """The first of the places that the release has."""
    found = [release / "vllm" / place for place in places if (release / "vllm" / place).is_file()]
    if not found:
        raise NotImplementedError(f"this release has none of {', '.join(places)}")
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
    merge = merging(release, step)

    def of_rank(group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        rank = group.rank_in_group
        return merge(group, outs[rank].clone(), lses[rank].clone())

    out, lse = zip(*on_ranks(len(outs), of_rank), strict=True)
    return {"out": torch.stack(out).to(outs.dtype), "lse": torch.stack(lse)}


def merging(release: Path, step: SimpleNamespace) -> object:
    """The merge over ranks of a case, `merge(group, out, lse)` of a rank's partial; by name, what newer releases are told of lengths."""
    way = exchanged if step.configuration["comm_backend"] == "a2a" else corrected
    function, seen = way(release)
    known = inspect.signature(function).parameters
    natural = step.parameters.get("lse_base", "e") == "e"
    based = {} if natural and way is corrected else {"is_lse_base_on_e": natural}

    def merge(
        group: SimpleNamespace, out: torch.Tensor, lse: torch.Tensor, **lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        told = based | {name: value for name, value in lengths.items() if name in known}
        if way is exchanged:
            return function(out, lse, group, return_lse=True, **told)
        out = function(out, lse, group, **told)
        return out, seen["lse"].chunk(group.world_size, 1)[group.rank_in_group]

    return merge


def exchanged(release: Path) -> tuple[object, dict]:
    """`dcp_a2a_lse_reduce`."""

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
    return merge, {}


def corrected(release: Path) -> tuple[object, dict]:
    """`cp_lse_ag_out_rs`, and where the merged LSE is then: the one that `correct_attn_out` returns to it."""
    path, seen = file_of(release, CORRECTION), {}
    kernels = cut(path, "_correct_attn_cp_out_kernel", "kernel", "CPTritonContext")
    scope = vars(kernels) | {"_CORRECT_ATTN_CP_OUT_KERNEL": lambda *a, **k: launched(kernels.kernel, *a, **k)}
    correct = cut(path, "correct_attn_out", **scope).correct_attn_out

    def kept(*arguments: object, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, seen["lse"] = correct(*arguments, **named)
        return out, seen["lse"]

    names = ("_validate_dcp_empty_shard_args", "mask_dcp_empty_shards_", "_cp_lse_common", "cp_lse_ag_out_rs")
    merge = cut(path, *names, **vars(kernels), correct_attn_out=kept).cp_lse_ag_out_rs
    return merge, seen


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
    """Local lengths of all ranks."""
    c, lens = step.configuration, given(step, "seq_lens")
    return {"local_lens": torch.stack([local_lengths(release, c, lens, rank % c["dcp"]) for rank in range(c["tp"])])}


def local_lengths(release: Path, c: dict, lens: torch.Tensor, member: int) -> torch.Tensor:
    """`get_dcp_local_seq_lens`, or the statement of the metadata builder before there was one."""
    count = vars(cut(file_of(release, LENGTHS), "get_dcp_local_seq_lens")).get("get_dcp_local_seq_lens")
    if count is None:
        return by_builder(release, lens, c["dcp"], member)
    return count(lens, c["dcp"], member, c["interleave"])


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


def decode(release: Path, step: SimpleNamespace) -> dict:
    """A decode, by the local lengths of requests."""
    return attended(release, step, lambda lens, _, member: local_lengths(release, step.configuration, lens, member))


def verify(release: Path, step: SimpleNamespace) -> dict:
    """A verification, by `dcp_local_verify_row_lens`."""
    c, counted = step.configuration, vars(cut(file_of(release, LENGTHS), "get_dcp_local_seq_lens"))
    found = vars(cut(file_of(release, VERIFICATION), "dcp_local_verify_row_lens", **counted))
    if not found:
        raise NotImplementedError("this release has no lengths for several rows of a request")
    count = found["dcp_local_verify_row_lens"]
    return attended(release, step, lambda lens, rows, member: count(lens, rows, c["dcp"], member, c["interleave"]))


def draft(release: Path, step: SimpleNamespace) -> dict:
    """Blocks whose rows all see their whole request: the backend gets requests, spreads them over rows itself, and is not shown padding."""
    if step.configuration["attention"]["kind"] != "mla":
        raise NotImplementedError("only the MLA backend takes blocks whose rows all see the same tokens")
    if len(set(np.diff(step.inputs["query_start_loc"]).tolist())) > 1:
        raise NotImplementedError("the backend takes draft blocks of one length for all requests")
    return attended(release, step, None)


def attended(release: Path, step: SimpleNamespace, count: object | None) -> dict:
    """Query gather, the kernel over each rank's own tokens, and the merge. `count(lens, rows, member)` is what rows see of a rank; none is a draft."""
    c = step.configuration
    attend = latent(release, c) if c["attention"]["kind"] == "mla" else grouped(release, c)
    # a world of one merges nothing
    merge, requests = merging(release, step) if c["dcp"] > 1 else None, requests_of_rows(step)
    blocks, rows = step.inputs["block_table"], int(step.inputs["query_start_loc"][-1])
    table = dense(blocks if count is None else np.where(requests[:, None] < 0, 0, blocks[requests]))
    starts, total = dense(step.inputs["query_start_loc"]), dense(step.inputs["seq_lens"])

    def of_rank(rank: int, group: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        member = group.rank_in_group
        query = group.all_gather(own_query(step, rank), dim=1)
        lens = local = local_lengths(release, c, total, member)
        if count is not None:
            lens = row_lengths(step, lambda lens, rows: count(lens, rows, member))
        check_pages(c, table, lens)
        shown = query[:rows] if count is None else query
        out, lse = attend(shown, caches_of(step, rank), table, lens, count is not None)
        hidden = len(query) - len(shown)
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, hidden), value=torch.nan)
        lse = torch.nn.functional.pad(lse, (0, 0, 0, hidden), value=-torch.inf)
        if merge is None:
            return out, lse
        return merge(group, out, lse, seq_lens=local, query_start_loc=starts)

    return on_all_ranks(step, of_rank)


def check_pages(c: dict, table: torch.Tensor, lens: torch.Tensor) -> None:
    """Raises where a kernel would read beyond a row's pages: a device says illegal address, the interpreter reads what lies there."""
    for row, length in enumerate(lens.tolist()):
        pages = -(-length // c["block_size"])
        read = table[row, :pages]
        if pages > table.shape[1] or ((read < 0) | (read >= c["blocks"])).any():
            raise IndexError(f"row {row} is told of {length} tokens of a rank, more than it has pages of: {table[row].tolist()}")


def latent(release: Path, c: dict) -> object:
    """The decode of `TritonMLAImpl`, on an object with what it reads."""
    path = file_of(release, BACKEND)
    fwd = whole(file_of(release, KERNELS), is_hip_=False).decode_attention_fwd
    scope = vars(whole(path)) | {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)}
    scope |= {"decode_attention_fwd": fwd, "is_workspace_manager_initialized": lambda: False}
    methods = vars(cut(path, "forward_mqa", "_forward_decode", **scope))
    method = methods.get("forward_mqa") or methods["_forward_decode"]
    backend = SimpleNamespace(
        kv_lora_rank=c["attention"]["kv_lora_rank"],
        scale=c["softmax_scale"],
        kv_cache_dtype="auto",
        dcp_world_size=c["dcp"],
        _sm_count=1,
    )
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))

    def attend(
        query: torch.Tensor, caches: list, table: torch.Tensor, lens: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        metadata = SimpleNamespace(
            decode=SimpleNamespace(block_table=table, seq_lens=lens),
            causal=causal,
            max_seq_len=max([1, *lens.tolist()]),
            num_decodes=len(lens),
            num_decode_tokens=len(query),
        )
        return method(backend, query, caches[0][:, :, 0], metadata, layer)

    return attend


def grouped(release: Path, c: dict) -> object:
    """The decode kernel of grouped queries as its callers set it up, with one split."""
    refuse_rounded_products(c)
    fwd = whole(file_of(release, KERNELS), is_hip_=False).decode_attention_fwd

    def attend(
        query: torch.Tensor, caches: list, table: torch.Tensor, lens: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, width = *query.shape[:2], caches[1].shape[-1]
        out, lse = query.new_zeros(rows, heads, width), query.new_zeros(rows, heads)
        logits = torch.empty(rows, heads, 1, width + 1)
        fwd(query, *caches, out, lse, table, lens, logits, 1, c["softmax_scale"], page_size=c["block_size"])
        return out, lse

    return attend
