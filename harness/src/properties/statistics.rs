//! The residual of a whole output: what no single element's bound can see.

use shardcheck_cases::{Body, Case, Family, Probe};

use super::Property;
use crate::residual;

pub(super) const PROPERTIES: &[Property] = &[Property {
    id: "statistics.residual",
    statement: "what an output differs from global attention by is rounding: it has the size of rounding, and the pattern of no lost or \
                doubled token, no shifted LSE of a rank and no wrong scale",
    source: "matched filters over the whitened residual (North 1943); rounding errors as in Higham & Mary 2019",
    bugs: &["vllm-ascend#3850", "sglang#34765", "vllm#27518"],
    tolerance: "χ² ≤ 1.5 over 4,096 elements or more, ≤ 3 in a state of 128 or more; token 6.5 σ, block 8 σ, rank and scales 6 σ, each only \
                with the amplitude of a fault; states with equal or crowded scores take no part",
    families: &[Family::Decode, Family::Verify],
    applies: draws_independent_values,
    check: residual::judge,
}];

/// Values must be of zero mean and scores distinct, and the output must be attention itself.
fn draws_independent_values(case: &Case) -> bool {
    let Body::Attention(attention) = &case.body else { return false };
    let projected = attention.configuration.attention.is_mla() && !attention.latent_output;
    attention.probe == Probe::Gaussian && !projected
}
