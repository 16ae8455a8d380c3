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

/// Extents by which an element of a piece gets a flat index.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axes {
    pub(super) tokens: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
}

impl Axes {
    fn index(self, spot: Spot, d: usize) -> usize {
        ((spot.piece * self.tokens + spot.token) * self.heads + spot.head) * self.dim + d
    }

    fn spot(self, index: usize) -> (Spot, usize) {
        let (state, d) = (index / self.dim, index % self.dim);
        let (row, head) = (state / self.heads, state % self.heads);
        (Spot { piece: row / self.tokens, token: row % self.tokens, head }, d)
    }
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
    axes: Axes,
}

impl Tally {
    pub(super) fn new(tensor: &'static str, axes: Axes) -> Self {
        let none = |tolerance| FixedTolerance { tolerance, outside: 0, largest_difference: 0.0 };
        let (comparison, fixed) = (Comparison::new(tensor), FIXED.map(none).to_vec());
        Self { tensor, comparison, fixed, broken: BTreeSet::new(), axes }
    }

    /// Compares one element of a row and head.
    pub(super) fn element(&mut self, (spot, d): (Spot, usize), seen: f64, allowed: Allowed) {
        self.comparison.element(self.axes.index(spot, d), seen, allowed);
        if allowed == Allowed::Undefined {
            return;
        }
        for fixed in &mut self.fixed {
            fixed.element(seen, allowed.expected());
        }
        if !allowed.admits(seen) {
            self.broken.insert(spot);
        }
    }

    /// Row, head and dimension of the element that misses its bound by most.
    pub(super) fn worst(&self) -> Option<(Spot, usize)> {
        self.comparison.worst_index().map(|index| self.axes.spot(index))
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
        let mut tally = Tally::new("out", Axes { tokens: 5, heads: 3, dim: 2 });
        let spot = Spot { piece: 1, token: 4, head: 2 };
        tally.element((spot, 0), 1.015, Allowed::near(1.0, 1e-3));
        tally.element((spot, 1), f64::NAN, Allowed::near(1.0, 1e-3));
        assert_eq!(tally.fixed.iter().map(|fixed| fixed.outside).collect::<Vec<_>>(), [1, 1]);
        assert_eq!((tally.broken.len(), tally.worst()), (1, Some((spot, 1))));
    }
}
