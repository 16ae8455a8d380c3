//! Sparse attention: how the tokens that a row attends to are selected, and the tensors of the step.

use serde::{Deserialize, Serialize};

use crate::operation::Provenance::{Given, Observable, Output};
use crate::operation::{
    BLOCK_TABLE, GATHERED_QUERY, LSE, OUT, PARTIAL_LSE, PARTIAL_OUT, QUERY, QUERY_START, SEQ_LENS,
    UP_PROJECTION, spec,
};
use crate::{TensorSpec, vocabulary};

vocabulary! {
    /// Which tokens a row attends to where each rank scores the keys that it has.
    SelectionMode ("mode of selection") {
        /// The k best of all ranks: the k best of each are gathered, and chosen from again.
        Exact = "exact",
        /// The k best of each rank, nothing being exchanged: up to k·W tokens.
        Union = "union",
    }
}

vocabulary! {
    /// How a rank lists the slots of the tokens that it owns.
    SlotList ("list of slots") {
        /// k entries a row, −1 behind the last one of the row.
        Padded = "padded",
        /// One row behind the other; a row without tokens has no entry (ATOM, decode).
        Packed = "packed",
        /// One row behind the other; a row without tokens has one entry, slot 0, which its count leaves out (ATOM, prefill).
        PackedDummy = "packed_dummy",
    }
}

/// How tokens are selected and listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selector {
    /// Tokens k of a row: all that it sees where those are fewer.
    pub top_k: usize,
    /// Which tokens they are.
    pub mode: SelectionMode,
    /// How their slots are listed.
    pub list: SlotList,
}

/// Tensors of [`crate::Operation::SelectSparse`].
pub(crate) const SELECT: &[TensorSpec] = &[
    spec("seq_lens", Given, "i32 [n]", "total length of each request, new rows included"),
    spec("query_start_loc", Given, "i32 [n+1]", "first row of each request, then the rows"),
    spec("block_table", Given, "i32 [n, m]", "physical blocks, the same ids on every rank"),
    spec("index_query", Given, "bf16 or e4m3fn [T, I, D]", "indexer's query heads of each row"),
    spec(
        "index_weights",
        Given,
        "f32 [T, I]",
        "weight of each head, all constant factors and the query's scale in it",
    ),
    spec(
        "index_cache",
        Given,
        "as index_query [ranks, blocks, B, D]",
        "one key for each token in its slot; anything, NaN included, in slots of no token",
    ),
    spec("index_scale", Given, "f32 [ranks, blocks, B]", "scale of each key; only where keys are e4m3fn"),
    spec(
        "topk",
        Output,
        "i32 [ranks, T, k]",
        "global positions that the row attends to, under union those of the rank, in any order; −1 behind",
    ),
    spec("counts", Output, "i32 [ranks, T]", "how many of the row's tokens the rank owns"),
    spec("indptr", Output, "i32 [ranks, T+1]", "first entry of each row in slots, then the end of the last"),
    spec(
        "slots",
        Output,
        "i32 [ranks, T·k]",
        "slots of the row's tokens that the rank owns, in any order; −1 behind the last row",
    ),
    spec(
        "index_scores",
        Observable,
        "f32 [ranks, T, m·B]",
        "score of each of the rank's tokens of the request that the row sees, in their order; anything behind",
    ),
];

/// Tensors of [`crate::Operation::AttendSelected`].
pub(crate) const ATTEND: &[TensorSpec] = &[
    QUERY,
    SEQ_LENS,
    QUERY_START,
    BLOCK_TABLE,
    UP_PROJECTION,
    spec(
        "topk",
        Given,
        "i32 [T, k]",
        "global positions that the row attends to, different ones in any order; −1 behind them, and in rows of padding; absent in a layer that shares a selection",
    ),
    OUT,
    LSE,
    PARTIAL_OUT,
    PARTIAL_LSE,
    GATHERED_QUERY,
    spec("counts", Observable, "i32 [ranks, T]", "how many of the row's tokens the rank owns"),
    spec(
        "indptr",
        Observable,
        "i32 [ranks, T+1]",
        "first entry of each row in slots, then the end of the last",
    ),
    spec(
        "slots",
        Observable,
        "i32 [ranks, T·k]",
        "slots of the row's tokens that the rank owns, in any order; −1 behind the last row",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_are_those_on_the_wire() {
        macro_rules! hold {
            ($($type:ident)+) => {$(
                for value in $type::ALL {
                    assert_eq!(value.name().parse::<$type>().unwrap(), value);
                    assert_eq!(serde_json::to_value(value).unwrap(), value.name());
                }
                assert!("other".parse::<$type>().unwrap_err().contains($type::ALL[0].name()));
            )+};
        }
        hold!(SelectionMode SlotList);
    }
}
