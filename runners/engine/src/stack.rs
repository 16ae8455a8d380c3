//! A small whole transformer: what its layers share, and the tensors of a step through all of them.

mod layers;
mod mixture;
mod pcp;

use serde::{Deserialize, Serialize};

use crate::operation::Provenance::{Given, Observable, Output};
use crate::operation::spec;
use crate::prefill::{LOCAL_ROWS, PREFILLING};
use crate::{Activation, KdaPlan, SlotList, TensorSpec, vocabulary};

pub use layers::{LayerKind, LayerPattern};
pub use mixture::StackExperts;
pub use pcp::StackPcp;

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

/// Layers of a stack, and how they hang together.
///
/// A layer adds attention of its normed stream to the stream, then a gated MLP, or a mixture of such experts, of the stream normed again; behind
/// the last one a norm and the head of the vocabulary follow. Each layer has a KV cache of its own, in the layout of the session; all have the block table and the
/// lengths of the step. A recurrent layer has Kimi delta attention in place of attention, and slots of states in place of a cache.
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
    /// What each of the L layers is; absent: latent attention in all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<LayerPattern>,
    /// Gate, slots and chunks of the recurrent layers, alike in all of them; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrent: Option<KdaPlan>,
    /// What an MLP or an expert computes; absent: `W_down (silu(W_gate x) · W_up x)`.
    #[serde(default = "silu", skip_serializing_if = "is_silu")]
    pub activation: Activation,
    /// Whether what latent attention gives is multiplied by a sigmoid of the layer's normed rows before it is projected; a draft head has no gate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub output_gate: bool,
    /// How a rank lists the slots of selected tokens; absent where no layer has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list: Option<SlotList>,
    /// Drafts k of a request in each step, by a draft head (multi-token prediction); 0: there is none.
    ///
    /// Behind the last layer an engine accepts, of a request's drafts, those in front of the first that is not the token of the row
    /// before it. The head then runs over the rows up to the last accepted one, each with the token behind it and the row's
    /// normed stream, through a layer with a cache of its own; its row behind the last accepted one gives the first new draft. Each further
    /// draft is a row more, with the draft before it and the head's own stream.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub drafts: usize,
    /// How the rows of a step are shared out over ranks of prefill context parallelism; absent: there are none. A draft head runs over
    /// all its rows on each of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcp: Option<StackPcp>,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

fn silu() -> Activation {
    Activation::SiluGated
}

fn is_silu(activation: &Activation) -> bool {
    *activation == silu()
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

    /// Ranks P of prefill context parallelism; 1 where there are none.
    pub fn pcp_ranks(&self) -> usize {
        self.pcp.map_or(1, |pcp| pcp.world)
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

    /// What a layer is.
    pub fn kind(&self, layer: usize) -> LayerKind {
        self.pattern.and_then(|pattern| pattern.kind(layer)).unwrap_or(LayerKind::Latent)
    }

    /// Layers A that attend over a KV cache, in order.
    pub fn attending(&self) -> Vec<usize> {
        (0..self.layers).filter(|layer| self.kind(*layer).attends()).collect()
    }

    /// Recurrent layers N, in order.
    pub fn recurrences(&self) -> Vec<usize> {
        (0..self.layers).filter(|layer| !self.kind(*layer).attends()).collect()
    }

    /// Number of a layer among those that attend, or among recurrent ones.
    pub fn number(&self, layer: usize) -> usize {
        let own = self.kind(layer).attends();
        (0..layer).filter(|earlier| self.kind(*earlier).attends() == own).count()
    }

    /// Number of the selection whose tokens a layer attends to; none where it attends to all, or where no layer before has one to share.
    pub fn selection(&self, layer: usize) -> Option<usize> {
        let selecting = (0..layer).filter(|earlier| self.kind(*earlier) == LayerKind::Selecting).count();
        match self.kind(layer) {
            LayerKind::Selecting => Some(selecting),
            LayerKind::Sharing => selecting.checked_sub(1),
            LayerKind::Latent | LayerKind::Recurrent => None,
        }
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
        "bf16 [A+M, Hall, Dk, h]",
        "query of each head, latent and rotary part (absorbed form), of the A layers that attend; those of a draft head's layer last",
    ),
    spec("w_key", Given, "bf16 [A+M, Dk, h]", "latent and rotary part of a key"),
    spec("w_uv", Given, "bf16 [A+M, Hall, Dv, Vo]", "up-projection of each head"),
    spec("w_output", Given, "bf16 [A+M, h, Hall·Vo]", "a rank has the columns of its own heads"),
    spec(
        "w_output_gate",
        Given,
        "bf16 [A, Hall·Vo, h]",
        "logits of the gate of what attention gives; a rank has the rows of its own heads; absent without gates",
    ),
    spec(
        "w_gate",
        Given,
        "bf16 [D+M, I, h]",
        "of the gated MLP of the D layers that have one, and of a draft head; a rank has the inner elements from r·I / ranks on, rounded down",
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
    spec("router_bias", Given, "f32 [X, E]", "bias of the choice, where it is biased"),
    spec(
        "hash_table",
        Given,
        "i32 [Y, V, k]",
        "experts of each token id, of the first Y layers that have experts, where these are hashed",
    ),
    spec(
        "shared_gate",
        Given,
        "bf16 [X, J, h]",
        "of the expert that every row has, where there is one; a rank has the inner elements from r·J / ranks on, rounded down",
    ),
    spec("shared_up", Given, "bf16 [X, J, h]", "likewise"),
    spec("shared_down", Given, "bf16 [X, h, J]", "likewise, columns"),
    spec(
        "latent_down",
        Given,
        "bf16 [X, z, h]",
        "projection of the rows that experts get, where they are latent: z stands for h in the weights of experts then",
    ),
    spec("latent_norm", Given, "f32 [X, z]", "weight of the norm behind the sum of the experts"),
    spec(
        "latent_up",
        Given,
        "bf16 [X, h, z]",
        "projection behind it; a rank has the columns from r·z / ranks on, rounded down",
    ),
    spec("w_head", Given, "bf16 [V, h]", "a rank has the rows that it has of the embedding"),
    spec(
        "selected",
        Given,
        "i32 [Q, T, k]",
        "positions of the tokens of each row, in the Q layers that have some named: different ones that the row sees, −1 behind the last; absent where there is none",
    ),
    spec(
        "read_slots",
        Given,
        "i32 [n]",
        "slot of the states that a request goes on from in each of the N recurrent layers, as for `kda`; absent where there is none, as the next thirteen",
    ),
    spec("write_slots", Given, "i32 [n]", "slot that gets its states, likewise"),
    spec("accepted", Given, "i32 [n]", "rows that count of the step that wrote the read slot, likewise"),
    spec("kda_query", Given, "bf16 [N, H, K, h]", "a rank has its own of the H heads"),
    spec("kda_key", Given, "bf16 [N, H, K, h]", "likewise"),
    spec("kda_value", Given, "bf16 [N, HV, V, h]", "likewise, of the HV value heads"),
    spec("kda_gate", Given, "bf16 [N, HV, K, h]", "a of each key channel's decay"),
    spec("kda_beta", Given, "bf16 [N, HV, h]", "logits of the share of an update that is made"),
    spec("kda_output_gate", Given, "bf16 [N, HV, V, h]", "logits of the gate behind the norm"),
    spec(
        "kda_convolution",
        Given,
        "f32 [N, 2·H·K + HV·V, taps]",
        "weights of queries, keys and values, in this order; oldest tap first",
    ),
    spec("kda_a_log", Given, "f32 [N, HV]", "A of each value head"),
    spec("kda_bias", Given, "f32 [N, HV, K]", "bias of each key channel's decay"),
    spec("kda_norm", Given, "f32 [N, V]", "weight of the norm of a head's output"),
    spec("kda_output", Given, "bf16 [N, h, HV·V]", "a rank has the columns of its own value heads"),
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
    PREFILLING,
    spec("logits", Output, "f32 [ranks, T, V]", "of all shards, on every rank"),
    spec("tokens", Output, "i32 [ranks, T]", "token of the largest logit, the lowest of equal ones"),
    spec(
        "accepted_drafts",
        Output,
        "i32 [ranks, n]",
        "drafts of each request that are accepted; absent without a draft head, as the next",
    ),
    spec("draft_tokens", Output, "i32 [ranks, n, k]", "new drafts of each request"),
    LOCAL_ROWS,
    spec(
        "restored",
        Observable,
        "contract's output type [ranks, T, h]",
        "rows behind the last norm in the order of the batch, as the products of the head get them; absent without prefill context parallelism, as \
         `is_prefilling` and `rows`, where T stands for the R rows of a rank in all that follows",
    ),
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
        "contract's output type [ranks, A, T, H, Dk]",
        "queries of the rank's own heads, turned to their positions",
    ),
    spec("key", Observable, "contract's output type [ranks, A, T, Dk]", "key of each new row, likewise"),
    spec(
        "attention",
        Observable,
        "output type of decode and verify [ranks, A, T, H, Vo]",
        "what attention gives to the rank's own heads",
    ),
    spec(
        "gated",
        Observable,
        "contract's output type [ranks, A, T, H, Vo]",
        "the same behind its gate, where there is one",
    ),
    spec("router_logits", Observable, "f32 [ranks, X, T, E]", "by which the rank routes each row"),
    spec("topk_ids", Observable, "i32 [ranks, X, T, k]", "experts of each row, in any order"),
    spec(
        "latent",
        Observable,
        "contract's output type [ranks, X, T, z]",
        "rows that latent experts get, on every rank",
    ),
    spec(
        "latent_sum",
        Observable,
        "contract's output type [ranks, X, T, z]",
        "what the experts of all ranks give together",
    ),
    spec("latent_normed", Observable, "contract's output type [ranks, X, T, z]", "the same behind the norm"),
    spec(
        "kda_channels",
        Observable,
        "contract's output type [ranks, N, T, C]",
        "inputs of the convolution: the rank's C channels of queries, keys and values, in this order",
    ),
    spec(
        "kda_gates",
        Observable,
        "f32 [ranks, N, T, HV / ranks · (K + 1 + V)]",
        "inputs of the decays of all its value heads, of their shares, and of their output gates, in this order",
    ),
    spec(
        "kda_out",
        Observable,
        "output type of kda [ranks, N, T, HV / ranks, V]",
        "output of the rank's value heads behind norm and gate",
    ),
    spec(
        "kda_state",
        Observable,
        "f32 [ranks, N, n, HV / ranks, K, V]",
        "state behind all rows of each request, as its slot holds it",
    ),
    spec(
        "kda_window",
        Observable,
        "bf16 [ranks, N, n, C, taps − 1]",
        "last inputs of the convolution, oldest token first; 0 where there was none",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_sharded_stream_are_shared_out_evenly_and_rounded_up() {
        let plan = |stream| StackPlan {
            layers: 3,
            stream,
            experts: None,
            pattern: None,
            recurrent: None,
            activation: Activation::SiluGated,
            output_gate: false,
            list: None,
            drafts: 0,
            pcp: None,
        };
        assert_eq!(plan(StreamLayout::Whole).stream_rows(9, 4), 9);
        assert_eq!([0, 1, 4, 9].map(|rows| plan(StreamLayout::Sharded).stream_rows(rows, 4)), [0, 1, 1, 3]);
        assert_eq!(plan(StreamLayout::Whole).places(), 7);
    }

    #[test]
    fn layers_are_numbered_among_those_of_their_kind() {
        let plan = StackPlan {
            layers: 5,
            stream: StreamLayout::Whole,
            experts: None,
            pattern: Some("kkmkm".parse().unwrap()),
            recurrent: None,
            activation: Activation::SiluGated,
            output_gate: false,
            list: None,
            drafts: 0,
            pcp: None,
        };
        assert_eq!(plan.recurrences(), [0, 1, 3]);
        assert_eq!(plan.attending(), [2, 4]);
        assert_eq!([0, 1, 2, 3, 4].map(|layer| plan.number(layer)), [0, 1, 0, 2, 1]);
        let plain = StackPlan { pattern: None, ..plan };
        assert_eq!(plain.attending().len(), 5);
    }

    #[test]
    fn a_sharing_layer_has_the_last_selection_before_it() {
        let plan = StackPlan {
            layers: 7,
            stream: StreamLayout::Whole,
            experts: None,
            pattern: Some("msrksrr".parse().unwrap()),
            recurrent: None,
            activation: Activation::SiluGated,
            output_gate: false,
            list: Some(SlotList::Packed),
            drafts: 0,
            pcp: None,
        };
        let selections = [0, 1, 2, 3, 4, 5, 6].map(|layer| plan.selection(layer));
        assert_eq!(selections, [None, Some(0), Some(0), None, Some(1), Some(1), Some(1)]);
        assert_eq!(plan.number(4), 3);
        let early = StackPlan { pattern: Some("r".parse().unwrap()), ..plan };
        assert_eq!(early.selection(0), None);
    }

    #[test]
    fn a_plan_reads_back_and_one_with_a_field_too_many_is_refused() {
        let plan = StackPlan {
            layers: 2,
            stream: StreamLayout::Sharded,
            experts: None,
            pattern: Some("km".parse().unwrap()),
            recurrent: None,
            activation: Activation::SiluGated,
            output_gate: false,
            list: None,
            drafts: 0,
            pcp: None,
        };
        let mut value = serde_json::to_value(plan).unwrap();
        assert_eq!(serde_json::from_value::<StackPlan>(value.clone()).unwrap(), plan);
        value["tp"] = 2.into();
        assert!(serde_json::from_value::<StackPlan>(value).is_err());
    }
}
