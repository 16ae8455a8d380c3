//! Mixtures of experts: how a router chooses, and how ranks share tokens and experts out: the published variants.

use serde::{Deserialize, Serialize};

use crate::operation::Provenance::{Given, Observable, Output};
use crate::operation::spec;
use crate::{TensorSpec, vocabulary};

vocabulary! {
    /// What a router makes of its logits, in 32 bits.
    Scoring ("scoring") {
        /// Softmax over all experts.
        Softmax = "softmax",
        /// The logistic function of each logit.
        Sigmoid = "sigmoid",
    }
}

vocabulary! {
    /// What the experts of a token are chosen by. Its weights are the scores of the chosen experts in every case.
    ExpertChoice ("choice of experts") {
        /// The scores; a group's score is its largest one.
        Scores = "scores",
        /// Score plus a bias of the expert, which counts for the choice alone; a group's score is the sum of its two largest.
        Biased = "biased",
        /// A table that has the experts of every token id (hash routing).
        Hashed = "hashed",
    }
}

vocabulary! {
    /// What stands for the choice of an expert whose group was not kept.
    MaskedFill ("fill of masked groups") {
        /// 0.0, which wins over kept choices that are negative (aiter, SGLang without bias).
        Zero = "zero",
        /// −∞ (vLLM, transformers, SGLang with bias).
        NegativeInfinity = "negative_infinity",
    }
}

vocabulary! {
    /// Whether the weights of a token are divided by their sum, before they are scaled.
    Renormalise ("renormalisation") {
        /// No.
        Raw = "raw",
        /// By Σw.
        Sum = "sum",
        /// By Σw + 1e-20 (transformers, SGLang).
        SumAndTiny = "sum_and_tiny",
    }
}

vocabulary! {
    /// How the tokens of a layer reach the experts and come back. G ranks share the experts of a layer.
    MoeExchange ("exchange of tokens") {
        /// Merge 0: a rank of prefill context parallelism has experts for its own rows; G = tp, and nothing but the tensor-parallel sum
        /// is exchanged.
        Local = "local",
        /// Merge 1: rows are gathered rank after rank over dp × pcp, summed over tp and reduce-scattered back; G = dp·pcp·tp.
        Gathered = "gathered",
        /// A decode under prefill context parallelism: every rank of pcp has all rows of its dp group, so that sums go to all of them;
        /// G = dp·pcp·tp.
        Redundant = "redundant",
        /// Padded to a multiple of tp, a slice on each rank of tp, sent to the experts and back, gathered, cut; pcp = 1, G = dp·tp.
        Sliced = "sliced",
    }
}

vocabulary! {
    /// How G ranks share the experts out.
    ExpertSharding ("sharding of experts") {
        /// Whole experts (expert parallelism): rank q of G has the experts from ⌊qE/G⌋ to ⌊(q+1)E/G⌋.
        Whole = "whole",
        /// A slice of every expert's inner width (tensor parallelism), likewise.
        Split = "split",
    }
}

vocabulary! {
    /// The expert that every token has, beside those that are chosen.
    SharedExpert ("shared expert") {
        /// There is none.
        None = "none",
        /// Sharded over tp, the same on all dp × pcp ranks that are summed, and scaled beforehand by their number; whole on the slice
        /// of its rank where rows are sliced.
        Replicated = "replicated",
        /// Sharded over all G ranks.
        Sharded = "sharded",
    }
}

vocabulary! {
    /// What an expert computes.
    Activation ("activation") {
        /// `W_down (W_up x)`.
        Linear = "linear",
        /// `W_down (silu(W_gate x) · W_up x)`.
        SiluGated = "silu_gated",
        /// `W_down (s(W_gate x) · l(W_up x))` with `s(g) = 4 tanh(g / 4) σ(g)` and `l(u) = 25 tanh(u / 25)` (SiTU of Kimi-K3).
        SituGated = "situ_gated",
    }
}

impl Activation {
    /// Whether it has a gate beside the up-projection.
    pub fn is_gated(self) -> bool {
        self != Self::Linear
    }
}

/// How the experts of a token and their weights follow from its logits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Router {
    /// What becomes of the logits.
    pub scoring: Scoring,
    /// What experts are chosen by.
    pub choice: ExpertChoice,
    /// Experts of a token, k.
    pub top_k: usize,
    /// Groups of equal size that the experts are in, one behind the other; 1 for none.
    pub groups: usize,
    /// Groups that are kept for a token.
    pub top_groups: usize,
    /// What stands for choices of the others.
    pub fill: MaskedFill,
    /// Whether weights are divided by their sum.
    pub renormalise: Renormalise,
    /// What weights are multiplied by last.
    pub scale: f32,
}

/// How tokens, ranks and experts of a layer go together. Rank `(d, c, t)` of dp × pcp × tp is number `(d·pcp + c)·tp + t`, among all ranks
/// and among the G that share the experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoePlan {
    /// Data-parallel groups, each with tokens of its own.
    pub dp: usize,
    /// Ranks of prefill context parallelism in each.
    pub pcp: usize,
    /// Tensor-parallel ranks in each of those.
    pub tp: usize,
    /// How tokens reach the experts.
    pub exchange: MoeExchange,
    /// How experts are shared out.
    pub sharding: ExpertSharding,
    /// The expert that every token has.
    pub shared: SharedExpert,
    /// What an expert computes.
    pub activation: Activation,
}

impl MoePlan {
    /// All ranks.
    pub fn ranks(&self) -> usize {
        self.dp * self.pcp * self.tp
    }

    /// Ranks G that share the experts out.
    pub fn expert_ranks(&self) -> usize {
        if self.exchange == MoeExchange::Local { self.tp } else { self.ranks() }
    }
}

const LOGITS: TensorSpec = spec("logits", Given, "f32 [N, E]", "router logits of each token");
const BIAS: TensorSpec = spec("bias", Given, "f32 [E]", "bias of the choice; only where it is biased");
const TOKEN_IDS: TensorSpec =
    spec("token_ids", Given, "i64 [N]", "id of each token; only where the choice is hashed");
const HASH_TABLE: TensorSpec =
    spec("hash_table", Given, "i32 [ids, k]", "experts of each token id; only where the choice is hashed");

/// Tensors of [`crate::Operation::Route`].
pub(crate) const ROUTE: &[TensorSpec] = &[
    LOGITS,
    BIAS,
    TOKEN_IDS,
    HASH_TABLE,
    spec("topk_ids", Output, "i32 [1, N, k]", "experts of each token, in any order"),
    spec("topk_weights", Output, "f32 [1, N, k]", "their weights, in the same order"),
];
/// Tensors of [`crate::Operation::Moe`].
pub(crate) const MOE: &[TensorSpec] = &[
    spec("hidden", Given, "bf16 [N, h]", "tokens"),
    spec("dp_tokens", Given, "i32 [dp]", "tokens of each data-parallel group; 0 is legal"),
    LOGITS,
    BIAS,
    TOKEN_IDS,
    HASH_TABLE,
    spec("w_gate", Given, "bf16 [E, I, h]", "gate of each expert; absent for linear ones"),
    spec("w_up", Given, "bf16 [E, I, h]", "up-projection of each expert"),
    spec("w_down", Given, "bf16 [E, h, I]", "down-projection of each expert"),
    spec(
        "shared_gate",
        Given,
        "bf16 [J, h]",
        "gate of the shared expert; absent without one, and for linear ones",
    ),
    spec("shared_up", Given, "bf16 [J, h]", "its up-projection; absent without one"),
    spec("shared_down", Given, "bf16 [h, J]", "its down-projection; absent without one"),
    spec(
        "out",
        Output,
        "contract's output type [ranks, R, h]",
        "Σ w·E(x) over the experts of each row of the rank, and the shared expert; anything behind its last row",
    ),
    spec(
        "expert_tokens",
        Output,
        "i32 [ranks, E]",
        "tokens, padding left out, that the rank ran through its part of each expert",
    ),
    spec(
        "slice_rows",
        Output,
        "i32 [ranks]",
        "rows that the rank enters the exchange with, padding included",
    ),
    spec("topk_ids", Observable, "i32 [ranks, R, k]", "experts of each row of the rank"),
    spec("topk_weights", Observable, "f32 [ranks, R, k]", "their weights"),
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
        hold!(Scoring ExpertChoice MaskedFill Renormalise MoeExchange ExpertSharding SharedExpert Activation);
    }

    #[test]
    fn experts_of_unmerged_ranks_are_shared_over_tensor_parallelism_alone() {
        let plan = |exchange| MoePlan {
            dp: 2,
            pcp: 3,
            tp: 4,
            exchange,
            sharding: ExpertSharding::Whole,
            shared: SharedExpert::None,
            activation: Activation::Linear,
        };
        assert_eq!(plan(MoeExchange::Local).expert_ranks(), 4);
        assert_eq!(plan(MoeExchange::Gathered).expert_ranks(), 24);
    }
}
