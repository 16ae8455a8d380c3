//! What the oracle allows: the only place where the harness asks the references for values and bounds.

use shardcheck_formats::Contract;
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::bound::{Certified, certify, interval};
use shardcheck_references::visibility::Visible;

use crate::judge::Allowed;
use crate::material::AttentionMaterial;

/// What may be seen of a step, over all heads of all ranks.
#[derive(Debug, Clone)]
pub struct Expected {
    /// `[T, Hall, D]`.
    pub out: Vec<Allowed>,
    /// `[T, Hall]`.
    pub lse: Vec<Allowed>,
    /// By rank within its group.
    pub partials: Vec<ExpectedPartial>,
}

/// What a rank's partial may be, over all heads of all groups.
#[derive(Debug, Clone)]
pub struct ExpectedPartial {
    /// `[T, Hall]`, natural.
    pub lse: Vec<Allowed>,
    /// `[T, Hall, Dv]` as attention gives it.
    pub latent: Vec<Allowed>,
    /// `[T, Hall, V]` after the up-projection, where there is one.
    pub projected: Option<Vec<Allowed>>,
}

impl ExpectedPartial {
    /// The partial of that width.
    pub fn exchanged(&self, dim: usize) -> Option<&[Allowed]> {
        let states = self.lse.len().max(1);
        if self.latent.len() == states * dim {
            return Some(&self.latent);
        }
        self.projected.as_deref().filter(|projected| projected.len() == states * dim)
    }
}

/// What a state may be: `[T, Hall, D]` and `[T, Hall]`.
#[derive(Debug, Clone)]
pub struct ExpectedState {
    /// Outputs.
    pub out: Vec<Allowed>,
    /// Natural LSEs.
    pub lse: Vec<Allowed>,
}

impl Expected {
    /// Larger deviation that is allowed for output `index`; 0 where equality is asked.
    pub fn out_width(&self, index: usize) -> f64 {
        match self.out[index] {
            Allowed::Between { expected, low, high } => (high - expected).max(expected - low),
            _ => 0.0,
        }
    }
}

/// Allowed values of a certified output element.
pub(crate) fn allowed_out(out: f64, pre: f64, dtype: shardcheck_formats::Dtype) -> Allowed {
    let (low, high) = interval(out, pre, dtype);
    // rounding may carry the exact value itself across an end of the interval
    Allowed::Between { expected: out, low: low.min(out), high: high.max(out) }
}
