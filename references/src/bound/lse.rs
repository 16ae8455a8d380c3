//! Bounds on log-sum-exps.

use super::{U32, gamma};
use crate::moments::{Part, State};
use shardcheck_formats::contract::{Contract, Depth};

/// `SD/(1 − SD) + γ(h, u) + 4u|lse| (+ 1.1·Σpe)`: certified bound on one part's LSE, or on the row's without its
/// merge. `mean_error` is `SD`, the mean of `expm1(δ)`; `rounding` is `Σpe`, the sum of the probabilities'
/// rounding errors, which counts where the normaliser sums rounded probabilities.
pub(super) fn certified(contract: &Contract, tokens: usize, lse: f64, mean_error: f64, rounding: f64) -> f64 {
    if lse == f64::NEG_INFINITY {
        return 0.0;
    }
    let rounded = if contract.l_rounded { 1.1 * rounding } else { 0.0 };
    mean_error / (1.0 - mean_error) + gamma(contract.depth_for(tokens), U32) + 4.0 * U32 * lse.abs() + rounded
}

/// A tighter bound, not a certified one: for errors that don't conspire. `None` where it must not be used.
///
/// ```text
/// 16u(1 + |lse| + max|s|) + 8u·√h + steps·u_acc·Σp·a/8
/// ```
///
/// `h` is the longest chain of additions that the contract admits, n/16 + 16 for a usual kernel: sums that go one after
/// another, over scores that repeat, drift further than blocked ones. The first two terms were calibrated on conforming
/// simulations (largest ratio 0.28) and on a GPU (0.85). The third covers an accumulator that truncates: each of `steps` additions of Q·K loses up to `u_acc` of the
/// running sum, always toward zero, and a running sum that ends near zero averages at most `a/4` on the way.
///
/// Gates: the normaliser sums unrounded probabilities, and `Σp·a ≤ √dk·(1 + max|s|)`, that is, the scores are not
/// what is left after heavy cancellation between query and key, where running sums are far larger than scores.
pub(super) fn practical(contract: &Contract, qk_dim: usize, state: &State) -> Option<f64> {
    let mean_size = state.parts.iter().map(|part| part.weight * part.powers[1][0]).sum();
    practical_of(contract, qk_dim, state.tokens, state.lse, state.max_abs_score, mean_size)
}

/// [`practical`] of one part by itself.
pub(super) fn practical_part(
    contract: &Contract,
    qk_dim: usize,
    part: &Part,
    max_abs_score: f64,
) -> Option<f64> {
    practical_of(contract, qk_dim, part.tokens, part.lse, max_abs_score, part.powers[1][0])
}

fn practical_of(
    contract: &Contract,
    qk_dim: usize,
    tokens: usize,
    lse: f64,
    max_abs_score: f64,
    mean_size: f64,
) -> Option<f64> {
    if lse == f64::NEG_INFINITY {
        return Some(0.0);
    }
    if contract.l_rounded || mean_size > (qk_dim as f64).sqrt() * (1.0 + max_abs_score) {
        return None;
    }
    let (steps, depth) = match contract.depth {
        Depth::PerTile { tile, extra } => {
            (qk_dim.div_ceil(tile) + 1, tokens as f64 / tile as f64 + extra as f64)
        }
        Depth::Any => (qk_dim, tokens as f64),
    };
    let random = 16.0 * U32 * (1.0 + lse.abs() + max_abs_score) + 8.0 * U32 * depth.sqrt();
    Some(random + steps as f64 * contract.u_acc * mean_size / 8.0 + contract.lse_rel * lse.abs())
}
