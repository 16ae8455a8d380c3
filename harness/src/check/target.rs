//! What one row and head returned beside what is right, and whether a predicted value is the one that was seen.

use shardcheck_formats::{Dtype, half_ulp};

/// Share of the predicted deviation by which arithmetic may miss it: a slip moves values to where the bound was not made
/// for, and 2⁻⁷ is twice the rounding of the coarsest format that probabilities are usually kept in.
const OF_DEVIATION: f64 = 1.0 / 128.0;
/// The same for an LSE, which is never kept in such a format.
const OF_LSE_DEVIATION: f64 = 1.0 / 1024.0;
/// A prediction must leave at most this share of the squared error that the right value leaves.
const MUST_LEAVE: f64 = 0.25;

/// Seen and right values of a row and head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a> {
    /// `[v_dim]`.
    pub(super) seen: &'a [f64],
    /// Natural.
    pub(super) seen_lse: Option<f64>,
    /// `[v_dim]`: the oracle's output.
    pub(super) right: &'a [f64],
    /// `[v_dim]`: bound of the output before its final rounding.
    pub(super) pre: &'a [f64],
    /// The oracle's LSE.
    pub(super) lse: f64,
    /// Bound of the LSE.
    pub(super) lse_bound: f64,
    /// Format of the output.
    pub(super) output: Dtype,
}

impl Target<'_> {
    /// Dimensions, those that miss their bound by most first.
    pub(super) fn by_deviation(&self) -> Vec<usize> {
        let miss = |d: usize| {
            let miss = (self.seen[d] - self.right[d]).abs() / (self.pre[d] + f64::MIN_POSITIVE);
            if miss.is_nan() { f64::INFINITY } else { miss }
        };
        let mut dims: Vec<(f64, usize)> = (0..self.seen.len()).map(|d| (miss(d), d)).collect();
        dims.sort_by(|a, b| b.0.total_cmp(&a.0));
        dims.into_iter().map(|(_, d)| d).collect()
    }

    /// Whether one element is what a slip gives: within the bound of the right value, one rounding of the output format and
    /// a share of the deviation itself.
    pub(super) fn element_fits(&self, d: usize, predicted: f64) -> bool {
        let seen = self.seen[d];
        if seen.is_nan() || predicted.is_nan() {
            return seen.is_nan() && predicted.is_nan();
        }
        let room = 1.25 * self.pre[d]
            + 2.0 * half_ulp(self.output, predicted)
            + OF_DEVIATION * (predicted - self.right[d]).abs();
        (seen - predicted).abs() <= room
    }

    /// Whether the predicted values of `dims` are those that were seen.
    pub(super) fn elements_fit(&self, dims: &[usize], predicted: &[f64]) -> bool {
        dims.iter().zip(predicted).all(|(d, value)| self.element_fits(*d, *value))
    }

    /// Whether the LSE is what a slip gives; a slip that says nothing of it fits any.
    pub(super) fn lse_fits(&self, predicted: Option<f64>) -> bool {
        let (Some(predicted), Some(seen)) = (predicted, self.seen_lse) else { return true };
        if !predicted.is_finite() || !seen.is_finite() {
            return predicted == seen || predicted.is_nan() && seen.is_nan();
        }
        let room = 1.25 * self.lse_bound
            + 2.0 * half_ulp(Dtype::F32, predicted)
            + OF_LSE_DEVIATION * (predicted - self.lse).abs();
        (seen - predicted).abs() <= room
    }

    /// Whether output and LSE are the predicted ones, and these nearer to what was seen than the right ones: a slip that
    /// changes nothing here explains nothing.
    pub(super) fn is_explained(&self, dims: &[usize], predicted: &[f64], lse: Option<f64>) -> bool {
        if !self.lse_fits(lse) || !self.elements_fit(dims, predicted) {
            return false;
        }
        if self.seen.iter().any(|seen| !seen.is_finite()) {
            return true;
        }
        let square = |difference: f64| difference * difference;
        let left: f64 = dims.iter().zip(predicted).map(|(d, value)| square(self.seen[*d] - value)).sum();
        let before: f64 = dims.iter().map(|d| square(self.seen[*d] - self.right[*d])).sum();
        let by_output = before > 0.0 && left <= MUST_LEAVE * before;
        let by_lse = match (lse, self.seen_lse) {
            (Some(lse), Some(seen)) if !self.lse.is_finite() || !lse.is_finite() => seen != self.lse,
            (Some(lse), Some(seen)) => {
                let off = (seen - self.lse).abs();
                off > self.lse_bound && (seen - lse).abs() <= MUST_LEAVE * off
            }
            _ => false,
        };
        by_output || by_lse
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target<'a>(seen: &'a [f64], seen_lse: Option<f64>) -> Target<'a> {
        let (right, pre) = (&[1.0, 2.0], &[1e-3, 1e-3]);
        Target { seen, seen_lse, right, pre, lse: 3.0, lse_bound: 1e-6, output: Dtype::F32 }
    }

    #[test]
    fn a_slip_that_changes_nothing_explains_nothing() {
        assert!(!target(&[1.0011, 2.0], None).is_explained(&[0, 1], &[1.0, 2.0], None));
        assert!(target(&[1.1, 2.0], None).is_explained(&[0, 1], &[1.1, 2.0], None));
    }

    #[test]
    fn a_wrong_lse_beside_a_right_output_is_explained_by_the_lse_alone() {
        let seen = target(&[1.0, 2.0], Some(4.328));
        assert!(seen.is_explained(&[0, 1], &[1.0, 2.0], Some(3.0 * std::f64::consts::LOG2_E)));
        assert!(!seen.is_explained(&[0, 1], &[1.0, 2.0], Some(3.0)));
    }

    #[test]
    fn nan_is_explained_by_nan_alone() {
        let seen = target(&[f64::NAN, 2.0], None);
        assert!(seen.is_explained(&[0, 1], &[f64::NAN, 2.0], None));
        assert!(!seen.is_explained(&[0, 1], &[1.0, 2.0], None));
    }
}
