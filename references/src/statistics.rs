//! What a whole output says that no single element does: errors too small for any element's bound, seen together.
//!
//! A certified bound admits the worst that rounding can do, which at long contexts is a hundred times what it does. One
//! lost token, or one rank's LSE off by a thousandth, then hides inside every element's interval, while the residual of
//! the whole output points straight at it. [`Model`] says how a conforming engine's residual is distributed, and
//! [`Model::examine`] looks for what else is in it:
//!
//! | detector | template τ of one state (row and head) | amplitude of a fault |
//! |---|---|---|
//! | χ² | `Σ ((out − o)/σ)² / N` over the case, and over each state of at least 128 elements | – |
//! | token | `p_j(v_j − o)` for token `j`, over all states | −1 lost, +1 counted twice |
//! | block | the same over sixteen consecutive tokens of a rank | −1 |
//! | rank LSE | `g_r(o_r − o)` for rank `r` | the LSE's error |
//! | value scale | `o` | the relative error of V's scale or of the normalisation |
//! | key scale | `Σ p t(v − o)`, `t` the score's derivative by the scale | the relative error of K's scale |
//!
//! With the whitened residual `ρ = (out − o)/σ²`, a template's *score* is `z = ⟨ρ, τ⟩/√⟨τ, τ/σ²⟩` (standard normal in a
//! conforming engine) and its *amplitude* `a = ⟨ρ, τ⟩/⟨τ, τ/σ²⟩`, the least-squares multiple of τ in the residual (North
//! 1943, the matched filter). The largest score is the locator: it names the token or the rank.
//!
//! σ, its assumption (rounding errors independent, of mean zero) and its first gate are those of [`crate::probable`]. A
//! state takes part only if, in every rank that holds a visible token,
//!
//! * scores have a deviation under the softmax of at least `8·u_p`: else all probabilities fall into a few cells of their
//!   format, which rounds them with a bias;
//! * at least 99 % of the scores are distinct: equal ones round alike;
//! * there are at least two tokens: one token's value is the partial output of every head, so that all heads round alike.
//!
//! Two things keep conforming engines silent on any input. The rounding of one token's probability hits all dimensions
//! alike, so where single tokens weigh much, its variance along the template is added (`coherent`). And an amplitude counts
//! only if it is that of a fault: 0.3 to 3 for tokens and blocks, above what the contract itself admits for the others.

mod examination;
mod filter;
mod model;
mod shares;
mod sums;

pub use examination::{Alarm, Detector, Examination, RowSquare, Suspect, UnknownDetector};
pub use filter::Filter;
pub use model::{BLOCK_TOKENS, Floors, Model};
