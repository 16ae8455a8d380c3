"""What the adapter declares: a release's operations, how they round, and what the adapter does itself."""

from __future__ import annotations

from typing import Any

from shardcheck import Contract, Conventions, Operation

OWN_STEPS = (
    "scatter of keys and values into the caches, by the slots that the engine computed",
    "attention of a rank, a kernel of the device: in f32 over the blocks, lengths and mask that the engine hands it; zeros at an LSE of "
    "−∞ for a row that sees nothing, where what the device gives is not known",
    "npu_attention_update, a kernel of the device, behind the engine's own exchange of decode and verification in releases that merge by it; what "
    "it does with empty and broken LSEs is not known and not judged",
    "local lengths of decode where a release takes them from vLLM: counted, and no output of a layout",
    "the fused exchange: the merged LSE is that of a second exchange with outputs in f32, which alone gives one",
    "row lengths, read off the masks of a verification: how many tokens the mask leaves a row, −1 where they are not the rank's first. A request "
    "without history is a prompt to the engine; its mask is asked for all the same",
    "a verification whose new tokens stay out of the exchange: the new tokens' keys and values, out of the caches of the ranks that own them, and "
    "their causal mask",
    "one rank: the causal mask of a verification, which is the kernel's",
    "choice of a rank's query heads; up-projection of merged outputs, in f32",
    "prefill context parallelism: decodes in front of the batch and no request without rows, as the runner has them; a rank's filling, which lies "
    "between its rows, moved behind them and cut to the fullest rank's; the bounds of decodes",
    "merges: the rounding of a merged f32 output to the type of its partials, which is the caller's",
)


def operations(release: Any, merge: str) -> dict[str, Operation]:
    """Capabilities of a release, from the functions that it has."""
    # f32 everywhere, sums of an exchange too
    attention = Contract.f32("f32", merge="ag_rs_f32")
    half = Contract.f32("f16", partial="f16", merge="ag_rs_f32")
    conventions = Conventions(lane_orders=[])
    observables = ["partial_out", "partial_lse", "row_lens", "gathered_query"]
    missing = ["draft_lens", "units", "sub_page_table", "blocks_needed"]
    missing += [] if release.counts_lens else ["local_lens"]
    missing += [] if release.has_masks else ["row_lens"]
    found = {
        "layout": Operation(observables=["row_mask"] if release.has_masks else [], absent=missing),
        "write_kv": Operation(observables=["slots"]).with_f16(),
        "read_cache": Operation(),
        "load_cache": Operation(),
        "decode": Operation(contract=attention, conventions=conventions, observables=observables, dtypes={"f16": half}),
        "merge_partials": Operation(
            contract=Contract.f32("f32", merge="ag_rs_f32"),
            conventions=conventions,
            absent=["lse"] if merge == "fused" and release.combine is None else [],
        ).with_f16(),
        "merge_states": Operation(contract=Contract.f32("f32")).with_f16(),
    }
    if release.has_masks or release.merges_local:
        # new tokens that stay out of the exchange are on no rank in particular
        shown = observables if release.has_masks else ["gathered_query"]
        where = "on_ranks" if release.has_masks else "beside"
        found["verify"] = Operation(
            contract=attention,
            conventions=Conventions(lane_orders=[], new_tokens=where),
            observables=shown,
            dtypes={"f16": half},
        )
    if release.splits_prefill:
        found["pcp_layout"] = Operation()
    return found
