//! What a slip would have given in one state, and whether that is what was seen.

use std::borrow::Cow;

use super::call::{Call, Held};
use super::state::State;

/// Dimensions that are compared before all of them.
const SCREENED: usize = 16;

/// Tokens of one source, each with its weight, or with its multiplicity and score.
type Source<'a, T> = (Cow<'a, Held>, Vec<T>);

/// A weighted sum over tokens, or given values.
pub(super) enum Prediction<'a> {
    /// `Σ weight·value`.
    Weighted {
        /// Tokens with their weights, normalised by whatever the slip divides by.
        terms: Vec<Source<'a, (usize, f64)>>,
        /// KV head of the values.
        kv_head: usize,
        /// Factor on all values.
        factor: f64,
        /// Natural LSE, where the slip says one.
        lse: Option<f64>,
    },
    /// Values as they are.
    Given {
        /// `[v_dim]`.
        out: Vec<f64>,
        /// Natural LSE, where the slip says one.
        lse: Option<f64>,
    },
}

impl<'a> Prediction<'a> {
    /// Softmax over tokens of the state's own request: `(token, multiplicity, score)`.
    pub(super) fn softmax(state: &State<'a>, tokens: impl IntoIterator<Item = (usize, f64, f64)>) -> Self {
        Self::softmax_over(
            vec![(Cow::Borrowed(&state.call.requests[state.request].held), tokens.into_iter().collect())],
            state.kv_head,
        )
    }

    /// Softmax over tokens of several sources together. Without any token: zeros and −inf.
    pub(super) fn softmax_over(sources: Vec<Source<'a, (usize, f64, f64)>>, kv_head: usize) -> Self {
        let scores = || sources.iter().flat_map(|(_, tokens)| tokens).filter(|(_, count, _)| *count > 0.0);
        let largest = scores().map(|(_, _, score)| *score).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores().map(|(_, count, score)| count * (score - largest).exp()).sum();
        let lse = if largest == f64::NEG_INFINITY { largest } else { largest + sum.ln() };
        let terms = sources.into_iter().map(|(held, tokens)| {
            let weighed = tokens.into_iter().filter(|(_, count, _)| *count > 0.0);
            (held, weighed.map(|(token, count, score)| (token, count * (score - lse).exp())).collect())
        });
        Self::Weighted { terms: terms.collect(), kv_head, factor: 1.0, lse: Some(lse) }
    }

    /// The same with other weights of own tokens, and no statement about the LSE.
    pub(super) fn weighted(state: &State<'a>, weights: Vec<(usize, f64)>) -> Self {
        let held = Cow::Borrowed(&state.call.requests[state.request].held);
        Self::Weighted { terms: vec![(held, weights)], kv_head: state.kv_head, factor: 1.0, lse: None }
    }

    /// Multiplies all values, builder style.
    pub(super) fn times(mut self, by: f64) -> Self {
        match &mut self {
            Self::Weighted { factor, .. } => *factor *= by,
            Self::Given { out, .. } => out.iter_mut().for_each(|value| *value *= by),
        }
        self
    }

    /// Says nothing about the LSE, builder style.
    pub(super) fn without_lse(mut self) -> Self {
        match &mut self {
            Self::Weighted { lse, .. } | Self::Given { lse, .. } => *lse = None,
        }
        self
    }

    fn lse(&self) -> Option<f64> {
        match self {
            Self::Weighted { lse, .. } | Self::Given { lse, .. } => *lse,
        }
    }

    fn at(&self, call: &Call<'_>, dims: &[usize]) -> Vec<f64> {
        match self {
            Self::Given { out, .. } => dims.iter().map(|d| out[*d]).collect(),
            Self::Weighted { terms, kv_head, factor, .. } => {
                let mut sums = vec![0.0; dims.len()];
                for (held, weights) in terms {
                    for (token, weight) in weights {
                        let value = held.value_at(call, *token, *kv_head);
                        for (sum, d) in sums.iter_mut().zip(dims) {
                            *sum += weight * f64::from(value[*d]);
                        }
                    }
                }
                sums.iter().map(|sum| sum * factor).collect()
            }
        }
    }

    /// Whether the state's output and LSE are this prediction's, each element within what arithmetic leaves.
    pub(super) fn fits(&self, state: &State<'a>) -> bool {
        let target = &state.target;
        if !target.lse_fits(self.lse()) {
            return false;
        }
        let dims = target.by_deviation();
        let screened = &dims[..dims.len().min(SCREENED)];
        if !target.elements_fit(screened, &self.at(state.call, screened)) {
            return false;
        }
        target.is_explained(&dims, &self.at(state.call, &dims), self.lse())
    }
}
