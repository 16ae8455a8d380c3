//! Elements of one tensor against what is allowed, with what a fixed tolerance would have said beside.

use std::collections::BTreeSet;

use crate::judge::{Allowed, Comparison};

use super::report::FixedTolerance;

/// Fixed tolerances that are usual in tests of attention kernels.
const FIXED: [f64; 2] = [1e-2, 2e-2];

/// A row and head of one piece of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Spot {
    /// Index of the piece.
    pub(super) piece: usize,
    /// Row of the batch.
    pub(super) token: usize,
    /// Head of all heads.
    pub(super) head: usize,
}

/// Comparison of one tensor.
pub(super) struct Tally {
    /// Name of the tensor.
    pub(super) tensor: &'static str,
    /// Against the derived intervals.
    pub(super) comparison: Comparison,
    /// Against fixed tolerances.
    pub(super) fixed: Vec<FixedTolerance>,
    /// Rows and heads with an element out of bound.
    pub(super) broken: BTreeSet<Spot>,
    /// Ratio, spot and dimension of the worst element out of bound.
    worst: Option<(f64, Spot, usize)>,
}

impl Tally {
    pub(super) fn new(tensor: &'static str) -> Self {
        let none = |tolerance| FixedTolerance { tolerance, outside: 0, largest_difference: 0.0 };
        Self {
            tensor,
            comparison: Comparison::new(tensor),
            fixed: FIXED.map(none).to_vec(),
            broken: BTreeSet::new(),
            worst: None,
        }
    }

    /// Compares element `dim` of `spot`.
    pub(super) fn element(&mut self, index: usize, (spot, dim): (Spot, usize), seen: f64, allowed: Allowed) {
        self.comparison.element(index, seen, allowed);
        if allowed == Allowed::Undefined {
            return;
        }
        for fixed in &mut self.fixed {
            fixed.element(seen, allowed.expected());
        }
        if allowed.admits(seen) {
            return;
        }
        self.broken.insert(spot);
        let ratio = if seen.is_nan() { f64::INFINITY } else { allowed.ratio(seen) };
        if self.worst.is_none_or(|(worst, ..)| ratio > worst) {
            self.worst = Some((ratio, spot, dim));
        }
    }

    /// The element that misses its bound by most.
    pub(super) fn worst(&self) -> Option<(Spot, usize)> {
        self.worst.map(|(_, spot, dim)| (spot, dim))
    }
}

impl FixedTolerance {
    /// `|seen − expected| ≤ tolerance + tolerance·|expected|`, as `assert_close` has it; equal infinities are close.
    fn element(&mut self, seen: f64, expected: f64) {
        if seen == expected {
            return;
        }
        let difference = (seen - expected).abs();
        // a NaN difference counts as outside
        let inside = difference <= self.tolerance * (1.0 + expected.abs()) && expected.is_finite();
        self.outside += u64::from(!inside);
        self.largest_difference =
            if difference.is_finite() { self.largest_difference.max(difference) } else { f64::INFINITY };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_tolerance_forgives_what_the_interval_does_not() {
        let mut tally = Tally::new("out");
        let spot = Spot { piece: 0, token: 0, head: 0 };
        tally.element(0, (spot, 0), 1.015, Allowed::near(1.0, 1e-3));
        tally.element(1, (spot, 1), f64::NAN, Allowed::near(1.0, 1e-3));
        assert_eq!(tally.fixed.iter().map(|fixed| fixed.outside).collect::<Vec<_>>(), [1, 1]);
        assert_eq!((tally.broken.len(), tally.worst()), (1, Some((spot, 1))));
    }
}
