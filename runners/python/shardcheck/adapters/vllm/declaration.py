"""What the adapter declares: a release's operations, how they round, and what the adapter does itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardcheck import Contract, Conventions, Operation

OWN_STEPS = (
    "scatter of keys and values into the paged caches, by the slots that the engine computed, and the cast "
    "to a quantised cache",
    "request, block table and length of each query row: the decode kernel sees one row a request",
    "choice of a rank's query heads; their gather is the engine's one line, all_gather along the heads",
    "padding rows: shown to the kernel without tokens in decode and verify, kept from it in draft and "
    "context; zeroed where no merge does it",
    "up-projection of merged outputs, in f32",
    "verify: the row lengths of one backend (ROCm AITER) with the decode of another (Triton MLA), which "
    "itself refuses causal blocks under DCP",
    "grouped queries: buffers and one split around the decode kernel; no backend uses it for them under DCP",
    "context: attention of a chunk and of new tokens in f32, copy of cached rows to the workspace, and an "
    "up-projection that is the identity",
    "prefill context parallelism: the batch as the runner has it, built from lengths; tokens that a row sees, from the "
    "local length of its request under a causal mask that is aligned at the end",
    "merges: copies of given partials, which the engine corrects in place; LSEs and segments transposed to "
    "the engine's order of axes",
)


def operations(release: Any) -> dict[str, Operation]:
    """Capabilities of a release, from the functions that it has."""
    cpu = release.device == "cpu"
    # Everything is f32 in the interpreter; a 16-bit LSE and output on a GPU, where the backend takes both
    # from the query.
    exact = Contract.f32("f32", merge="ag_rs_f32")
    lse_rel = 0.0 if release.full_lse else 2.0**-8
    # the decode kernel walks a split in blocks of at least 16 tokens, the least that a device's matrix unit takes
    rounded = Contract.bf16(merge="ag_rs_bf16", lse_rel=lse_rel, tile_min=16, kexp=_kexp(cpu))
    # numpy has f16, so that there the interpreter rounds as a device does; a sum is one of f32 in any order
    half = rounded.in_f16() if not cpu else Contract.f32("f16", p_dtype="f16", p_floor=2.0**-25, partial="f16", merge="ag_rs_f16", tile_min=16)
    half = replace(half, lse_rel=0.0 if release.full_lse else 2.0**-11)
    attention = exact if cpu else rounded
    conventions = Conventions(lane_orders=[] if cpu else ["lo_hi"])
    lanes = Conventions(lane_orders=["lo_hi"])
    missing = ["draft_lens", "blocks_needed", "units", "sub_page_table"]
    missing += [] if release.verify_row_lens is not None else ["row_lens"]
    missing += [] if release.has_local_lens else ["local_lens"]
    observables = ["partial_out", "partial_lse", "row_lens", "gathered_query"]
    found = {
        "layout": Operation(absent=missing),
        "write_kv": Operation(observables=["slots"]).with_f16(),
        "read_cache": Operation(),
        "load_cache": Operation(),
        "decode": Operation(contract=attention, conventions=conventions, observables=observables, dtypes={"f16": half}),
        "merge_partials": Operation(
            contract=Contract.f32("f32", merge="ag_rs_bf16", kexp=_kexp(cpu)), conventions=lanes
        ).with_f16(),
        # the kernel by itself: some layers zero an empty state before they call it, the kernel asks for nothing of the kind
        "merge_states": Operation(contract=Contract.f32("f32", kexp=_kexp(cpu))).with_f16(),
    }
    if release.verify_row_lens is not None:
        found["verify"] = found["decode"]
    if release.drafts:
        found["draft"] = found["decode"]
    if release.prefill_manager is not None and release.input_batch is not None:
        found["pcp_layout"] = Operation()
    if release.merge_segments is not None:
        found["merge_segments"] = Operation(contract=Contract.f32("f32", kexp=_kexp(cpu)))
    if release.pack is not None:
        found["pack_lse"] = Operation(conventions=lanes, absent=["unpacked"]).with_f16()
    if release.plans_chunks and cpu:
        seen = ["context_out", "context_lse", "gathered_key", "chunk_lens"]
        found["context"] = Operation(contract=Contract.f32("f32"), observables=seen, absent=["lse"])
    return found


def _kexp(cpu: bool) -> float:
    """Error of exp and log in ulp: numpy's in the interpreter, the fast ones of a device."""
    return 2.0 if cpu else 16.0
