//! Indexer and compressor of shared rows: plans, and the tensors of the steps.

use serde::{Deserialize, Serialize};

use crate::operation::Provenance::{Given, Observable, Output};
use crate::operation::spec;
use crate::prefill::{CONTEXTS, LOCAL_ROWS, PREFILLING, STARTS};
use crate::{PcpDecodes, PcpStrategy, TensorSpec};

/// How tokens are selected for the rows of a batch over the ranks of prefill context parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexPlan {
    /// Ranks P.
    pub world: usize,
    /// Which rows of a prompt a rank takes.
    pub strategy: PcpStrategy,
    /// What the rows of decodes do.
    pub decodes: PcpDecodes,
    /// Rows that a rank runs at least, such as those of a graph; 0 asks for none.
    pub padded_rows: usize,
    /// Tokens k of a row: all that it sees where those are fewer.
    pub top_k: usize,
}

/// How the tokens of a batch are compressed over the ranks of prefill context parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompressPlan {
    /// Ranks P.
    pub world: usize,
    /// Which rows of a prompt a rank takes.
    pub strategy: PcpStrategy,
    /// What the rows of decodes do.
    pub decodes: PcpDecodes,
    /// Rows that a rank runs at least, such as those of a graph; 0 asks for none.
    pub padded_rows: usize,
    /// Tokens m of a block, by their positions in the request: one entry each.
    pub ratio: usize,
    /// Whether an entry pools the tokens of the block before its own as well, by the first half of their columns; its own are pooled by
    /// the second half (DeepSeek-V4 at a ratio of 4).
    pub overlap: bool,
}

pub(crate) const SELECT: &[TensorSpec] = &[
    STARTS,
    CONTEXTS,
    PREFILLING,
    spec("index_query", Given, "bf16 [N, I, D]", "indexer's query heads of the new rows"),
    spec("index_weights", Given, "f32 [N, I]", "weight of each head, all constant factors in it"),
    spec(
        "index_key",
        Given,
        "bf16 [N, D]",
        "keys of the new rows, each of which a rank takes for its own rows only",
    ),
    spec(
        "index_context",
        Given,
        "bf16 [Σ context_lens, D]",
        "keys of the tokens that were computed before, request after request by position: every rank holds them",
    ),
    spec(
        "topk",
        Output,
        "i32 [P, N, k]",
        "on each rank, the positions that each row of the batch selects, in any order; −1 behind",
    ),
    LOCAL_ROWS,
    spec("row_lens", Observable, "i32 [P, R]", "tokens that each local row saw; 0 for padding"),
    spec(
        "gathered_key",
        Observable,
        "f32 [P, Σ (context_lens + new rows), D]",
        "on each rank, the keys that its rows were scored by: request after request, by position",
    ),
    spec(
        "index_scores",
        Observable,
        "f32 [P, R, longest request]",
        "score of each position that a local row sees; anything behind, and for padding",
    ),
    spec(
        "local_topk",
        Observable,
        "i32 [P, R, k]",
        "positions that each local row selects, before they are gathered; −1 behind, and for padding",
    ),
];

pub(crate) const COMPRESS: &[TensorSpec] = &[
    STARTS,
    CONTEXTS,
    PREFILLING,
    spec(
        "kv",
        Given,
        "f32 [N, C]",
        "what each new row has to be pooled, C = 2d where blocks overlap and d elsewhere; a rank takes those of its own rows only",
    ),
    spec("gate", Given, "f32 [N, C]", "its gate in each column, likewise"),
    spec("gate_bias", Given, "f32 [m, C]", "added to the gate of a token by its place in its block"),
    spec(
        "state_kv",
        Given,
        "f32 [Σ held, C]",
        "rows of the tokens before the new ones that are still needed: those of the block that is not full, behind those of the block before it where blocks overlap and there is one; request after request",
    ),
    spec("state_gate", Given, "f32 [Σ held, C]", "their gates, without the bias"),
    spec(
        "entry_start_loc",
        Output,
        "i32 [P, n+1]",
        "first entry of each request among those that this step makes, then their number",
    ),
    spec(
        "entries",
        Output,
        "f32 [P, entries, d]",
        "on each rank, an entry for each block whose last token is among the new ones: Σ softmax(gate + bias)·kv, column by column",
    ),
    TensorSpec { provenance: Output, ..LOCAL_ROWS },
    spec(
        "entry_lens",
        Output,
        "i32 [P, R]",
        "entries of its request that each local row sees: those of the blocks that end at its position or before; 0 for padding",
    ),
    spec(
        "new_state_kv",
        Output,
        "f32 [P, Σ held, C]",
        "as state_kv behind the new rows, for the step that comes next",
    ),
    spec("new_state_gate", Output, "f32 [P, Σ held, C]", "as state_gate behind the new rows"),
];
