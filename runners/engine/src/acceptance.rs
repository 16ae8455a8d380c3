//! Acceptance of drafted tokens: the published methods, and the tensors of the step.

use crate::operation::Provenance::{Given, Observable, Output};
use crate::operation::spec;
use crate::{TensorSpec, vocabulary};

vocabulary! {
    /// How drafted tokens are accepted. `Mb` is the target's law of a token, `Ms` the drafter's.
    AcceptanceMethod ("method") {
        /// While a draft is the argmax of the target's logits; every request is greedy.
        Greedy = "greedy",
        /// Each draft by itself, with probability min(1, Mb / Ms); the first rejected one is drawn again from max(Mb − Ms, 0)
        /// (Leviathan et al. 2211.17192).
        Standard = "standard",
        /// The longest prefix of drafts that is accepted as a block (Sun et al. 2403.10444).
        Block = "block",
    }
}

pub(crate) const TENSORS: &[TensorSpec] = &[
    spec(
        "query_start_loc",
        Given,
        "i32 [n+1]",
        "first of the T rows of each request: one row for each of its drafts, then the bonus row",
    ),
    spec(
        "draft_tokens",
        Given,
        "i32 [n, K]",
        "drafts; −1 stands for none and ends a request's drafts; entries that have no row hold anything",
    ),
    spec(
        "target_logits",
        Given,
        "f32 [T, V]",
        "logits of the target before the temperature; −∞ for probability 0",
    ),
    spec(
        "draft_logits",
        Given,
        "f32 [n, K, V]",
        "logits that a draft was drawn from, before the temperature; absent: the drafts come without a law (one-hot)",
    ),
    spec(
        "temperature",
        Given,
        "f32 [n]",
        "temperature of each request; 0 is greedy; not given to the greedy method",
    ),
    spec(
        "uniform",
        Given,
        "f32 [T]",
        "number in [0, 1) that decides the row's draft; not given to the greedy method",
    ),
    spec(
        "noise",
        Given,
        "f32 [T, V]",
        "Gumbel noise of a token drawn at the row: the first argmax of log weight + noise; not given to the greedy method",
    ),
    spec(
        "tokens",
        Output,
        "i64 [P, n, K+1]",
        "on each rank, the accepted drafts, then the drawn or bonus token, then −1",
    ),
    spec("accepted", Output, "i32 [P, n]", "on each rank, drafts that were accepted"),
    spec(
        "statistics",
        Observable,
        "f32 [P, 2]",
        "mean acceptance length 1 + Σ accepted / n, and acceptance rate Σ accepted / Σ drafted, 0 without drafts",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_are_those_on_the_wire() {
        for method in AcceptanceMethod::ALL {
            assert_eq!(method.name().parse::<AcceptanceMethod>().unwrap(), method);
            assert_eq!(serde_json::to_value(method).unwrap(), method.name());
        }
        assert!("typical".parse::<AcceptanceMethod>().unwrap_err().contains("block"));
    }
}
