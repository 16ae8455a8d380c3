//! Tensors of the operations on caches and of the merges; those of the others stand with their parameters.

use super::Provenance::{Given, Observable, Output};
use super::{Provenance, TensorSpec};

pub(crate) const fn spec(
    name: &'static str,
    provenance: Provenance,
    shape: &'static str,
    meaning: &'static str,
) -> TensorSpec {
    TensorSpec { name, provenance, shape, meaning }
}

pub(crate) const SEQ_LENS: TensorSpec =
    spec("seq_lens", Given, "i32 [n]", "total tokens of each request, the new rows included; 0 is legal");
pub(crate) const QUERY_START: TensorSpec = spec(
    "query_start_loc",
    Given,
    "i32 [n+1]",
    "first row of each request; rows from the last entry on are graph padding",
);
pub(crate) const BLOCK_TABLE: TensorSpec = spec(
    "block_table",
    Given,
    "i32 [n, width]",
    "block ids, one per virtual block of B·dcp tokens; entries that are not needed hold ids out of range",
);
pub(crate) const OUT: TensorSpec =
    spec("out", Output, "contract's output type [ranks, T, H, V or Dv]", "output of each rank's own heads");
pub(crate) const LSE: TensorSpec =
    spec("lse", Output, "f32 [ranks, T, H]", "natural LSE of each rank's own heads");

pub(super) const LAYOUT: &[TensorSpec] = &[
    SEQ_LENS,
    QUERY_START,
    BLOCK_TABLE,
    spec("local_lens", Output, "i32 [ranks, n]", "tokens of each request that the rank holds"),
    spec("row_lens", Output, "i32 [ranks, T]", "tokens that a causal row sees on the rank; 0 for padding"),
    spec("draft_lens", Output, "i32 [ranks, T]", "tokens that a bidirectional row sees on the rank"),
    spec(
        "slots",
        Output,
        "i64 [ranks, Σ seq_lens]",
        "slot of each position of each request, −1 where not owned",
    ),
    spec("blocks_needed", Output, "i32 [ranks, n]", "block-table entries that each request needs"),
    spec(
        "units",
        Output,
        "i32 [ranks, 3]",
        "tokens of a virtual block, of a prefix-hash unit, of a sub-page",
    ),
    spec("sub_page_table", Output, "i32 [ranks, n, pages]", "block table expanded to sub-pages"),
    spec(
        "row_mask",
        Observable,
        "u8 [ranks, T, tokens]",
        "1 where a causal row sees that token of its request on the rank, 0 where not; what stands behind the rank's tokens of the request is not looked at",
    ),
    spec(
        "read_indptr",
        Observable,
        "i32 [ranks, T+1]",
        "where each causal row's entries of read_slots begin",
    ),
    spec(
        "read_slots",
        Observable,
        "i64 [ranks, entries]",
        "slots that the rank's kernel is told to read, row after row, each row's in order; what stands behind the last row's is not looked at",
    ),
];
pub(super) const WRITE_KV: &[TensorSpec] = &[
    spec("key", Given, "dtype [N, K, Dk]", "keys of N tokens (MLA: latent and rotary part)"),
    spec("value", Given, "dtype [N, K, Dv]", "values of N tokens; absent for MLA"),
    spec("positions", Given, "i64 [N]", "position of each token in its request"),
    spec("requests", Given, "i32 [N]", "request of each token, −1 for graph padding"),
    BLOCK_TABLE,
    spec("slots", Observable, "i64 [ranks, N]", "slot that each rank wrote, −1 for none"),
];
pub(super) const READ_CACHE: &[TensorSpec] = &[
    spec("key_cache", Output, "kv_dtype [ranks, blocks, B, K, Dk]", "raw codes of the cache"),
    spec("value_cache", Output, "kv_dtype [ranks, blocks, B, K, Dv]", "absent for MLA"),
];
pub(super) const LOAD_CACHE: &[TensorSpec] = &[
    spec("key_cache", Given, "kv_dtype [ranks, blocks, B, K, Dk]", "raw codes; unused slots hold NaN"),
    spec("value_cache", Given, "kv_dtype [ranks, blocks, B, K, Dv]", "absent for MLA"),
];
pub(super) const IMPORT_CACHE: &[TensorSpec] = &[
    spec(
        "source_key_cache",
        Given,
        "kv_dtype [source dcp, source blocks, source B, K, Dk]",
        "raw codes of all ranks of one group of the source",
    ),
    spec(
        "source_value_cache",
        Given,
        "kv_dtype [source dcp, source blocks, source B, K, Dv]",
        "absent for MLA",
    ),
    spec(
        "source_block_table",
        Given,
        "i32 [n, source width]",
        "block ids in the given caches, one per virtual block of the source",
    ),
    spec("seq_lens", Given, "i32 [n]", "tokens of each request that are taken over; 0 is legal"),
    BLOCK_TABLE,
];
pub(crate) const QUERY: TensorSpec = spec(
    "query",
    Given,
    "dtype [T, Hall, Dk]",
    "query of every head; a rank projects its own heads unless QREP is on",
);
pub(crate) const UP_PROJECTION: TensorSpec =
    spec("w_uv", Given, "dtype [Hall, Dv, V]", "up-projection; absent: the output stays in the latent space");
pub(crate) const PARTIAL_OUT: TensorSpec =
    spec("partial_out", Observable, "f32 [ranks, T, Hg, Dv or V]", "what the rank hands to the exchange");
pub(crate) const PARTIAL_LSE: TensorSpec =
    spec("partial_lse", Observable, "f32 [ranks, T, Hg]", "LSE that goes with it, in the declared base");
pub(crate) const GATHERED_QUERY: TensorSpec =
    spec("gathered_query", Observable, "dtype [ranks, T, Hg, Dk]", "query that the rank's kernel received");
pub(super) const ATTEND: &[TensorSpec] = &[
    QUERY,
    SEQ_LENS,
    QUERY_START,
    BLOCK_TABLE,
    UP_PROJECTION,
    OUT,
    LSE,
    PARTIAL_OUT,
    PARTIAL_LSE,
    spec("row_lens", Observable, "i32 [ranks, T]", "tokens that each row saw on the rank"),
    GATHERED_QUERY,
];
pub(super) const ATTEND_SINKS: &[TensorSpec] = &[
    QUERY,
    SEQ_LENS,
    QUERY_START,
    BLOCK_TABLE,
    UP_PROJECTION,
    spec(
        "sinks",
        Given,
        "f32 [Hall]",
        "logit of each head's sink: exp of it is one more term of the row's normaliser, and of the merged LSE",
    ),
    OUT,
    LSE,
    PARTIAL_OUT,
    PARTIAL_LSE,
    spec("row_lens", Observable, "i32 [ranks, T]", "tokens that each row saw on the rank"),
    GATHERED_QUERY,
];
pub(super) const CONTEXT: &[TensorSpec] = &[
    spec("query", Given, "dtype [T, Hall, Dk]", "query of every head for the new tokens"),
    spec("key", Given, "dtype [T, K, Dk]", "keys of the new tokens"),
    spec("value", Given, "dtype [T, K, Dv]", "values of the new tokens; absent for MLA"),
    spec("context_lens", Given, "i32 [n]", "cached tokens of each request; 0 is legal"),
    QUERY_START,
    BLOCK_TABLE,
    OUT,
    LSE,
    spec(
        "context_out",
        Observable,
        "f32 [ranks, T, H, Dv]",
        "state of the context alone, after the chunk merges",
    ),
    spec("context_lse", Observable, "f32 [ranks, T, H]", "its LSE, −inf without context"),
    spec(
        "gathered_key",
        Observable,
        "f32 [ranks, Σ context_lens, K, Dk]",
        "context keys by chunk and request, in the order used",
    ),
    spec("chunk_lens", Observable, "i32 [ranks, chunks, n]", "context tokens of each request in each chunk"),
];
pub(super) const MERGE_PARTIALS: &[TensorSpec] = &[
    spec("partial_out", Given, "f32, bf16 or f16 [dcp, T, Hg, D]", "partial outputs; may be a strided view"),
    spec(
        "partial_lse",
        Given,
        "f32 [dcp, T, Hg]",
        "LSEs in the operation's `lse_base`, natural unless it says otherwise; −inf for an empty partial; may be a strided view",
    ),
    spec("out", Output, "that of the given outputs [dcp, T, H, D]", "merged output of each rank's own heads"),
    spec("lse", Output, "f32 [dcp, T, H]", "merged LSE, in the same base"),
];
pub(super) const MERGE_STATES: &[TensorSpec] = &[
    spec("prefix_out", Given, "f32, bf16 or f16 [T, H, D]", "first state; may be a strided view"),
    spec("prefix_lse", Given, "f32 [T, H]", "its natural LSE"),
    spec("suffix_out", Given, "f32, bf16 or f16 [T, H, D]", "second state"),
    spec("suffix_lse", Given, "f32 [T, H]", "its natural LSE"),
    spec("out", Output, "that of the given outputs [1, T, H, D]", "merged output"),
    spec("lse", Output, "f32 [1, T, H]", "merged natural LSE"),
];
pub(super) const MERGE_SEGMENTS: &[TensorSpec] = &[
    spec("segment_max", Given, "f32 [segments, T, H]", "base-2 maximum of each segment"),
    spec("segment_sum", Given, "f32 [segments, T, H]", "sum of 2^(s − max) of each segment"),
    spec("segment_acc", Given, "f32 [segments, T, H, D]", "unnormalised accumulator of each segment"),
    spec("row_lens", Given, "i32 [T]", "tokens of each row, which decide how many segments are read"),
    spec("out", Output, "f32 [1, T, H, D]", "merged output"),
    spec("lse", Output, "f32 [1, T, H]", "merged natural LSE"),
];
pub(super) const PACK_LSE: &[TensorSpec] = &[
    spec("lse", Given, "f32 [n]", "any bit pattern, NaNs included"),
    spec("lanes", Output, "u16 [1, n, 2]", "the two lanes in wire order"),
    spec("unpacked", Output, "f32 [1, n]", "the joined value"),
];
