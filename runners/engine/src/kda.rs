//! Kimi delta attention: its gates, and the tensors of the step.

use serde::{Deserialize, Serialize};

use crate::operation::Provenance::{Given, Observable, Output};
use crate::operation::spec;
use crate::{TensorSpec, vocabulary};

vocabulary! {
    /// How the log of a decay is made of its input a, for each key channel.
    KdaGate("gates of KDA") {
        /// −5·σ(exp(A)·(a + bias)): never below −5.
        LowerBound = "lower_bound",
        /// −exp(A)·softplus(a + bias).
        Softplus = "softplus",
    }
}

impl KdaGate {
    /// The bound of [`Self::LowerBound`], as Kimi's configuration has it.
    pub const LOWER_BOUND: f32 = -5.0;
}

/// What a session keeps for the requests of one layer, and how far it may be asked back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KdaPlan {
    /// How decays are made.
    pub gate: KdaGate,
    /// Slots of the session, each with the states of one request.
    pub slots: usize,
    /// Most rows of a step that may be rejected after it.
    pub drafts: usize,
    /// Most tokens of a request that are computed together; 1 is token by token. Chunks begin at a request's first row of a step.
    pub chunk: usize,
}

impl KdaPlan {
    /// ε of the gated norm.
    pub const EPSILON: f32 = 1e-5;
}

pub(crate) const TENSORS: &[TensorSpec] = &[
    spec(
        "query_start_loc",
        Given,
        "i32 [n+1]",
        "first of the T rows of each request; a request may have none",
    ),
    spec(
        "read_slots",
        Given,
        "i32 [n]",
        "slot of the states that a request goes on from, as it was before the step; −1: the request is new and starts from zeros",
    ),
    spec(
        "write_slots",
        Given,
        "i32 [n]",
        "slot that gets its states, a request with no rows included; no two are the same",
    ),
    spec(
        "accepted",
        Given,
        "i32 [n]",
        "rows of the step that last wrote the read slot which count: the request goes on behind them; 0 for a new one",
    ),
    spec("query", Given, "bf16 [T, H, K]", "queries before the convolution"),
    spec("key", Given, "bf16 [T, H, K]", "keys before the convolution"),
    spec(
        "value",
        Given,
        "bf16 [T, HV, V]",
        "values before the convolution; value head h uses query and key head h / (HV / H)",
    ),
    spec("gate", Given, "f32 [T, HV, K]", "a of each key channel's decay"),
    spec("beta", Given, "f32 [T, HV]", "logits of the share of an update that is made"),
    spec("output_gate", Given, "f32 [T, HV, V]", "logits of the gate behind the norm"),
    spec(
        "conv_query",
        Given,
        "f32 [H, K, taps]",
        "weights of the convolution, oldest tap first: the last one is the token's own",
    ),
    spec("conv_key", Given, "f32 [H, K, taps]", "likewise for keys"),
    spec("conv_value", Given, "f32 [HV, V, taps]", "likewise for values"),
    spec("a_log", Given, "f32 [HV]", "A of each value head"),
    spec("dt_bias", Given, "f32 [HV, K]", "bias of each key channel's decay"),
    spec("norm_weight", Given, "f32 [V]", "weight of the norm of a head's output"),
    spec(
        "out",
        Output,
        "contract's output type [P, T, HV / P, V]",
        "output of each rank's own value heads behind norm and gate",
    ),
    spec(
        "core",
        Observable,
        "contract's partial type [P, T, HV / P, V]",
        "what the state gives to the query, before the norm",
    ),
    spec(
        "state",
        Observable,
        "f32 [P, n, HV / P, K, V]",
        "state behind all rows of each request, as its slot holds it",
    ),
    spec(
        "window",
        Observable,
        "bf16 [P, n, C, taps − 1]",
        "last inputs of the rank's C channels, its query heads', key heads' and value heads' in this order, oldest token first; 0 where there was none",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_are_those_on_the_wire() {
        for gate in KdaGate::ALL {
            assert_eq!(gate.name().parse::<KdaGate>().unwrap(), gate);
            assert_eq!(serde_json::to_value(gate).unwrap(), gate.name());
        }
        assert!("sigmoid".parse::<KdaGate>().unwrap_err().contains("softplus"));
    }

    #[test]
    fn a_plan_with_a_field_too_many_is_refused() {
        let plan = KdaPlan { gate: KdaGate::Softplus, slots: 3, drafts: 2, chunk: 4 };
        let mut value = serde_json::to_value(plan).unwrap();
        assert_eq!(serde_json::from_value::<KdaPlan>(value.clone()).unwrap(), plan);
        value["dcp"] = 2.into();
        assert!(serde_json::from_value::<KdaPlan>(value).is_err());
    }
}
