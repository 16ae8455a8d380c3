"""What the adapter declares: a release's operations, how they round, and what the adapter does itself."""

from __future__ import annotations

from typing import Any

from shardcheck import Contract, Conventions, Operation

OWN_STEPS = (
    "ids of tokens, from the block table: whole pages of B·W ids, as the allocator hands them out",
    "scatter of keys and values into the caches, by the rows that the engine computed",
    "request, ids and length of each query row: the decode kernel sees one row a request; padding rows have no tokens",
    "choice of a rank's query heads; buffers of the decode, as the backend makes them",
    "one rank: rows of the cache in order, the LSE over splits, and zeros in padding rows",
    "up-projection of merged outputs, in f32",
    "sinks of a rank's own heads, the parameter of a layer, with NaN behind them in memory",
    "verify: row lengths of the NPU backend with the indices and the decode of the Triton backend, which itself refuses "
    "masks under DCP",
    "all-to-all, and reduce-scatter, behind the Triton kernel: merges of MLA layers, which get a zeroed state for a rank "
    "without tokens, as fixup_zero_kv_rows (CUDA) makes it",
    "prefill context parallelism: the batch as a forward has it, built from lengths; rows up to the fullest rank's; tokens "
    "that a row sees, from the lengths of its block (zigzag), or the engine's choice of given ones (interleave); no "
    "alignment of a rank's rows but where a graph asks for what it gives",
    "context: attention of a chunk and of new tokens in f32, rows of the cache, and an up-projection that is the identity",
    "merges: copies of given partials, which the engine corrects in place; dense copies for kernels that take no strides; "
    "the rounding of a merged f32 output to the type of its partials, which is the caller's",
)


def operations(release: Any, merge: str) -> dict[str, Operation]:
    """Capabilities of a release, from the functions that it has."""
    # everything is f32 in the interpreter; a row's splits round their LSE, and so does the merge over them, which
    # logsumexp does in f32
    attention = Contract.f32("f32", merge="ag_rs_f32")
    conventions = Conventions(lane_orders=[])
    observables = ["partial_out", "partial_lse", "row_lens", "gathered_query"]
    missing = ["draft_lens", "units", "sub_page_table"]
    missing += [] if release.chain_lens is not None else ["row_lens"]
    missing += [] if release.new_pages is not None else ["blocks_needed"]
    # the all-reduce adds in the partial's own type where partials are weighed in place, the others in f32
    in_place = merge == "reduced" and "mul_" in release.merge_reduced.__code__.co_names
    added = "ag_rs_bf16" if in_place else "ag_rs_f32"
    lanes = Conventions(lane_orders=["lo_hi"])
    # numpy has f16, so that there the interpreter rounds as a device does
    half = Contract.f32("f16", p_dtype="f16", p_floor=2.0**-25, partial="f16", merge="ag_rs_f16" if in_place else "ag_rs_f32")
    found = {
        "layout": Operation(observables=["read_indptr", "read_slots"], absent=missing),
        "write_kv": Operation(observables=["slots"]).with_f16(),
        "read_cache": Operation(),
        "load_cache": Operation(),
        "decode": Operation(contract=attention, conventions=conventions, observables=observables, dtypes={"f16": half}),
        "merge_partials": Operation(contract=Contract.f32("f32", merge=added), conventions=lanes).with_f16(),
        "merge_states": Operation(contract=Contract.f32("f32")).with_f16(),
        "pcp_layout": Operation(),
    }
    found["attend_sinks"] = Operation(
        contract=attention, conventions=conventions, observables=observables, absent=["lse"]
    )
    if release.chain_lens is not None:
        found["verify"] = found["decode"]
    if release.attend_context is not None:
        seen = ["gathered_key", "chunk_lens"]
        found["context"] = Operation(contract=Contract.f32("f32"), observables=seen)
    if release.pack is not None:
        found["pack_lse"] = Operation(conventions=lanes, absent=["unpacked"]).with_f16()
    return found
