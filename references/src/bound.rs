//! The certified bound: how far a conforming implementation may be from the exact result, element by element.
//!
//! [`certify`] takes the inputs that the implementation really holds and the [`Contract`] that it declares, and
//! returns an interval for every output element, every partial output and every LSE. The analysis is a priori
//! (Higham, *Accuracy and Stability of Numerical Algorithms*, ch. 3; block fused multiply-add: Blanchard, Higham,
//! Lopez, Mary & Pranesh 2020; log-sum-exp: Blanchard, Higham & Higham 2021) and holds for *any* order of
//! summation, tiling and split that the contract admits. Nothing is calibrated: a value outside its interval is a
//! fault or a contract that the implementation does not keep.
//!
//! The terms of an output's bound, in the order in which an engine commits the errors ([`Terms`]):
//!
//! | term | what it covers |
//! |---|---|
//! | `score` (E1) | errors of the scores, of exp and of rescaling: relative errors of the softmax weights |
//! | `probability` (E2) | rounding of the probabilities before the product with V |
//! | `sum` (E3) | the sums over tokens, of the output and of the normaliser, and the division |
//! | `partial` (E4) | rounding of partial outputs to the format in which they travel |
//! | `merge` (E5) | arithmetic of the merge |
//! | `rest` | second-order and absolute terms, listed at [`Terms::rest`] |

pub(crate) mod accumulation;
mod certified;
mod chain;
mod lse;
mod merged;
pub(crate) mod output;
mod projection;
pub(crate) mod weights;

pub use certified::{Certified, CertifiedPart, certify, certify_moments, certify_split, interval, ratio};
pub use chain::certify_chain;
pub use merged::{MergeInputs, certify_merge};
pub use output::{PartBound, StateBound, Terms, bound_state};
pub use projection::{
    CertifiedProjection, ProjectionOrder, UnknownProjectionOrder, UpProjection, certify_projected,
};

use shardcheck_formats::contract::Contract;

/// Unit roundoff of binary32, in which every contract keeps scores, normalisers and merges.
pub const U32: f64 = 1.0 / (1u64 << 24) as f64;
/// Smallest normal binary32: where results may be flushed to zero.
pub const TINY32: f64 = f32::MIN_POSITIVE as f64;

/// `γ(n, u) = n·u / (1 − n·u)`: relative error of a chain of `n` operations (Higham, lemma 3.1); infinite from
/// `n·u = 1` on.
pub fn gamma(operations: usize, unit_roundoff: f64) -> f64 {
    let product = operations as f64 * unit_roundoff;
    if product < 1.0 { product / (1.0 - product) } else { f64::INFINITY }
}

/// Relative error that a sum over `tokens` tokens adds to output and normaliser: `γ(h, u_acc) + γ(h, u) + 3u`,
/// the last for the division.
fn summation(contract: &Contract, tokens: usize) -> f64 {
    let depth = contract.depth_for(tokens);
    gamma(depth, contract.u_acc) + gamma(depth, U32) + 3.0 * U32
}

#[cfg(test)]
mod tests;
