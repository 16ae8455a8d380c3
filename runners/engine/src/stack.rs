//! A small whole transformer: what its layers share, and the tensors of a step through all of them.

use serde::{Deserialize, Serialize};

use crate::operation::Provenance::{Given, Observable, Output};
use crate::operation::spec;
use crate::{Router, TensorSpec, vocabulary};

vocabulary! {
    /// Where the rows of the residual stream lie between layers.
    StreamLayout("layouts of the stream") {
        /// Every rank has every row; what layers add is summed over all ranks.
        Whole = "whole",
        /// Rank r has the rows from r·R on, R = ceil(T / ranks), zeros behind the last one. A norm's rows are gathered before a layer
        /// reads them; what layers add is reduce-scattered.
        Sharded = "sharded",
    }
}

/// Layers of a stack that have a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackExperts {
    /// Layers, the first ones, that have a plain MLP.
    pub dense: usize,
    /// How the experts of a row are chosen and weighed in the others.
    pub router: Router,
}

/// Layers of a stack, and how they hang together.
///
/// A layer adds attention of its normed stream to the stream, then a gated MLP, or a mixture of such experts, of the stream normed again; behind
/// the last one a norm and the head of the vocabulary follow. Each layer has a KV cache of its own, in the layout of the session; all have the block table and the
/// lengths of the step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackPlan {
    /// Layers L.
    pub layers: usize,
    /// Where rows lie between them.
    pub stream: StreamLayout,
    /// Layers that have experts in place of an MLP, whole experts being shared out over the ranks; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<StackExperts>,
    /// Drafts k of a request in each step, by a draft head (multi-token prediction); 0: there is none.
    ///
    /// Behind the last layer an engine accepts, of a request's drafts, those in front of the first that is not the token of the row
    /// before it. The head then runs over the rows up to the last accepted one, each with the token behind it and the row's
    /// normed stream, through a layer with a cache of its own; its row behind the last accepted one gives the first new draft. Each further
    /// draft is a row more, with the draft before it and the head's own stream.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub drafts: usize,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl StackPlan {
    /// ε of every norm.
    pub const EPSILON: f32 = 1e-5;

    /// Rows R of the stream on a rank, of a step of so many rows.
    pub fn stream_rows(&self, rows: usize, ranks: usize) -> usize {
        match self.stream {
            StreamLayout::Whole => rows,
            StreamLayout::Sharded => rows.div_ceil(ranks.max(1)),
        }
    }

    /// Layers D that have a plain MLP, the first ones.
    pub fn dense(&self) -> usize {
        self.experts.map_or(self.layers, |experts| experts.dense.min(self.layers))
    }

    /// Layers X that have experts.
    pub fn mixtures(&self) -> usize {
        self.layers - self.dense()
    }

    /// Layers M of draft heads, whose weights stand behind those of the others: 1 where drafts are made.
    pub fn heads_of_drafts(&self) -> usize {
        self.drafts.min(1)
    }

    /// Norms: one for each place, and five of a draft head: of the token behind a row, of the row's stream, before attention, before the MLP, and the
    /// last.
    pub fn norms(&self) -> usize {
        self.places() + 5 * self.heads_of_drafts()
    }

    /// Places of the residual stream that are observed: before each attention and each MLP, and behind the last layer.
    pub fn places(&self) -> usize {
        2 * self.layers + 1
    }
}

pub(crate) const TENSORS: &[TensorSpec] = &[
    spec(
        "token_ids",
        Given,
        "i32 [T]",
        "token of each row; rows behind the last request are graph padding, with any token",
    ),
    spec("seq_lens", Given, "i32 [n]", "total tokens of each request, the new rows included; 0 is legal"),
    spec("query_start_loc", Given, "i32 [n+1]", "first row of each request"),
    spec("block_table", Given, "i32 [n, width]", "block ids, of the caches of all layers alike"),
    spec("embedding", Given, "bf16 [V, h]", "rank r looks up the tokens from r·ceil(V / ranks) on"),
    spec(
        "norm_weight",
        Given,
        "f32 [2L+1+5M, h]",
        "before each attention and each MLP by turns, and the last norm; then those of a draft head, of which there are M, 0 or 1: of the \
         token behind a row, of the row's stream, before attention, before the MLP, and the last",
    ),
    spec(
        "rotary",
        Given,
        "f32 [positions, P]",
        "cosines of the P / 2 angles of a position, then their sines; element i of the last P of a query or key turns with i + P / 2",
    ),
    spec(
        "w_query",
        Given,
        "bf16 [L+M, Hall, Dk, h]",
        "query of each head, latent and rotary part (absorbed form); those of a draft head's layer last",
    ),
    spec("w_key", Given, "bf16 [L+M, Dk, h]", "latent and rotary part of a key"),
    spec("w_uv", Given, "bf16 [L+M, Hall, Dv, Vo]", "up-projection of each head"),
    spec("w_output", Given, "bf16 [L+M, h, Hall·Vo]", "a rank has the columns of its own heads"),
    spec(
        "w_gate",
        Given,
        "bf16 [D+M, I, h]",
        "of the MLP silu(gate)·up of the D layers that have one, and of a draft head; a rank has the inner elements from r·I / ranks on, rounded down",
    ),
    spec("w_up", Given, "bf16 [D+M, I, h]", "likewise"),
    spec("w_down", Given, "bf16 [D+M, h, I]", "likewise, columns"),
    spec(
        "w_router",
        Given,
        "bf16 [X, E, h]",
        "logits of the experts, of the X layers that have some; absent where none has, as the next three",
    ),
    spec("expert_gate", Given, "bf16 [X, E, I, h]", "of each expert, likewise an MLP"),
    spec("expert_up", Given, "bf16 [X, E, I, h]", "likewise"),
    spec("expert_down", Given, "bf16 [X, E, h, I]", "likewise"),
    spec("w_head", Given, "bf16 [V, h]", "a rank has the rows that it has of the embedding"),
    spec(
        "w_draft",
        Given,
        "bf16 [h, 2h]",
        "of a draft head: what stands before its layer, of the normed embedding of the token behind a row and the row's normed stream; absent \
         without a head, as the next two",
    ),
    spec("draft_counts", Given, "i32 [n]", "rows of each request, the last ones, that are drafts"),
    spec(
        "next_tokens",
        Given,
        "i32 [n]",
        "token behind the last row of each request where it is known, as in front of another chunk of a prompt; −1: the row's own",
    ),
    spec("logits", Output, "f32 [ranks, T, V]", "of all shards, on every rank"),
    spec("tokens", Output, "i32 [ranks, T]", "token of the largest logit, the lowest of equal ones"),
    spec(
        "accepted",
        Output,
        "i32 [ranks, n]",
        "drafts of each request that are accepted; absent without a draft head, as the next",
    ),
    spec("draft_tokens", Output, "i32 [ranks, n, k]", "new drafts of each request"),
    spec(
        "hidden",
        Observable,
        "contract's output type [ranks, 2L+1, R, h]",
        "the stream before each attention and each MLP, and behind the last layer",
    ),
    spec(
        "normed",
        Observable,
        "contract's output type [ranks, 2L+1, T, h]",
        "all rows of it behind the norm, as the rank's products get them",
    ),
    spec(
        "update",
        Observable,
        "contract's output type [ranks, 2L, R, h]",
        "what each attention and each MLP adds to the stream, summed over ranks",
    ),
    spec(
        "query",
        Observable,
        "contract's output type [ranks, L, T, H, Dk]",
        "queries of the rank's own heads, turned to their positions",
    ),
    spec("key", Observable, "contract's output type [ranks, L, T, Dk]", "key of each new row, likewise"),
    spec(
        "attention",
        Observable,
        "output type of decode and verify [ranks, L, T, H, Vo]",
        "what attention gives to the rank's own heads",
    ),
    spec("router_logits", Observable, "f32 [ranks, X, T, E]", "by which the rank routes each row"),
    spec("topk_ids", Observable, "i32 [ranks, X, T, k]", "experts of each row, in any order"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_sharded_stream_are_shared_out_evenly_and_rounded_up() {
        let plan = |stream| StackPlan { layers: 3, stream, experts: None, drafts: 0 };
        assert_eq!(plan(StreamLayout::Whole).stream_rows(9, 4), 9);
        assert_eq!([0, 1, 4, 9].map(|rows| plan(StreamLayout::Sharded).stream_rows(rows, 4)), [0, 1, 1, 3]);
        assert_eq!(plan(StreamLayout::Whole).places(), 7);
    }

    #[test]
    fn a_plan_reads_back_and_one_with_a_field_too_many_is_refused() {
        let plan = StackPlan { layers: 2, stream: StreamLayout::Sharded, experts: None, drafts: 0 };
        let mut value = serde_json::to_value(plan).unwrap();
        assert_eq!(serde_json::from_value::<StackPlan>(value.clone()).unwrap(), plan);
        value["tp"] = 2.into();
        assert!(serde_json::from_value::<StackPlan>(value).is_err());
    }
}
