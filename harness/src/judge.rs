//! Judging values: class of specials first, then `seen within allowed`, written so that NaN cannot pass.

use crate::finding::{Failure, Finding, Measured, Stage, Worst};

/// What one element may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Allowed {
    /// Exactly this number (either zero stands for zero).
    Exactly(f64),
    /// Exactly −∞: the LSE of a row that sees nothing.
    NegativeInfinity,
    /// Between `low` and `high`, both included; `expected` is what the oracle gives.
    Between {
        /// The oracle's value.
        expected: f64,
        /// Smallest value that a conforming engine can give.
        low: f64,
        /// Largest value that a conforming engine can give.
        high: f64,
    },
    /// NaN, or between `low` and `high`: what follows an LSE of NaN, which may spoil a number but not hide.
    OrNan {
        /// The oracle's value where the NaN counts as nothing.
        expected: f64,
        /// Smallest number that a conforming engine can give.
        low: f64,
        /// Largest number that a conforming engine can give.
        high: f64,
    },
    /// Not judged: the contract leaves it undefined.
    Undefined,
}

impl Allowed {
    /// `expected ± bound`.
    pub fn near(expected: f64, bound: f64) -> Self {
        if expected == f64::NEG_INFINITY {
            Self::NegativeInfinity
        } else {
            Self::Between { expected, low: expected - bound, high: expected + bound }
        }
    }

    /// The same in a unit of which `factor` make one, such as another base of a logarithm.
    pub fn scaled(self, factor: f64) -> Self {
        match self {
            Self::Exactly(value) => Self::Exactly(value * factor),
            Self::Between { expected, low, high } => {
                Self::Between { expected: expected * factor, low: low * factor, high: high * factor }
            }
            Self::OrNan { expected, low, high } => {
                Self::OrNan { expected: expected * factor, low: low * factor, high: high * factor }
            }
            Self::NegativeInfinity | Self::Undefined => self,
        }
    }

    /// The same, or NaN.
    #[must_use]
    pub fn or_nan(self) -> Self {
        match self {
            Self::Exactly(value) => Self::OrNan { expected: value, low: value, high: value },
            Self::NegativeInfinity => Self::Exactly(f64::NEG_INFINITY).or_nan(),
            Self::Between { expected, low, high } => Self::OrNan { expected, low, high },
            Self::OrNan { .. } | Self::Undefined => self,
        }
    }

    /// What is allowed in this or in another way of computing the same number.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Between { expected, low, high }, Self::Between { low: least, high: most, .. }) => {
                Self::Between { expected, low: low.min(least), high: high.max(most) }
            }
            _ => self,
        }
    }

    /// Whether `seen` is allowed. Every comparison is of the form "inside", so that NaN is outside.
    pub fn admits(self, seen: f64) -> bool {
        match self {
            Self::Exactly(value) => seen == value,
            Self::NegativeInfinity => seen == f64::NEG_INFINITY,
            Self::Between { low, high, .. } => low <= seen && seen <= high,
            Self::OrNan { low, high, .. } => seen.is_nan() || low <= seen && seen <= high,
            Self::Undefined => true,
        }
    }

    /// |seen − expected| over the deviation allowed on that side; infinite where nothing is allowed or NaN was seen.
    pub fn ratio(self, seen: f64) -> f64 {
        match self {
            Self::OrNan { .. } if seen.is_nan() || seen == self.expected() => 0.0,
            Self::Between { expected, low, high } | Self::OrNan { expected, low, high } => {
                let deviation = seen - expected;
                let room = if deviation < 0.0 { expected - low } else { high - expected };
                if deviation == 0.0 {
                    0.0
                } else if deviation.is_nan() || room <= 0.0 {
                    f64::INFINITY
                } else {
                    deviation.abs() / room
                }
            }
            _ if self.admits(seen) => 0.0,
            _ => f64::INFINITY,
        }
    }

    /// The oracle's value; NaN where nothing is expected.
    pub fn expected(self) -> f64 {
        match self {
            Self::Exactly(value) => value,
            Self::NegativeInfinity => f64::NEG_INFINITY,
            Self::Between { expected, .. } | Self::OrNan { expected, .. } => expected,
            Self::Undefined => f64::NAN,
        }
    }

    fn words(self) -> String {
        match self {
            Self::Exactly(_) | Self::NegativeInfinity => "exactly that".to_owned(),
            Self::Between { low, high, .. } => format!("between {low:e} and {high:e}"),
            Self::OrNan { low, high, .. } => format!("NaN, or between {low:e} and {high:e}"),
            Self::Undefined => "anything".to_owned(),
        }
    }
}

/// What the usual fixed rule `|seen − expected| ≤ tolerance · (1 + |expected|)` would have said: reported beside our
/// own verdict, never judged by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FixedRule {
    /// atol = rtol.
    pub tolerance: f64,
    /// Elements outside.
    pub outside: u64,
    /// Largest |seen − expected|.
    pub largest: f64,
}

/// Comparison of one tensor with what is allowed.
#[derive(Debug, Clone)]
pub struct Comparison {
    tensor: String,
    compared: u64,
    exact: u64,
    out_of_bound: u64,
    worst_ratio: f64,
    worst: Option<(usize, f64, Allowed)>,
    fixed: FixedRule,
    broken: Vec<usize>,
}

/// Most indices of broken elements that a comparison keeps, to name the rows concerned.
const BROKEN_KEPT: usize = 1 << 16;

impl Comparison {
    /// Nothing compared yet.
    pub fn new(tensor: &str) -> Self {
        Self {
            tensor: tensor.to_owned(),
            compared: 0,
            exact: 0,
            out_of_bound: 0,
            worst_ratio: 0.0,
            worst: None,
            fixed: FixedRule { tolerance: 3e-2, outside: 0, largest: 0.0 },
            broken: Vec::new(),
        }
    }

    /// Compares element `index` (flat, for the place).
    pub fn element(&mut self, index: usize, seen: f64, allowed: Allowed) {
        if allowed == Allowed::Undefined {
            return;
        }
        self.compared += 1;
        let ratio = allowed.ratio(seen);
        if !matches!(allowed, Allowed::Between { .. } | Allowed::OrNan { .. }) {
            self.exact += 1;
        }
        let difference = (seen - allowed.expected()).abs();
        let spoiled = matches!(allowed, Allowed::OrNan { .. }) && seen.is_nan();
        if seen != allowed.expected() && !spoiled {
            self.fixed.largest =
                if difference.is_nan() { f64::INFINITY } else { self.fixed.largest.max(difference) };
            let limit = self.fixed.tolerance * (1.0 + allowed.expected().abs());
            // a NaN difference must count as outside
            self.fixed.outside += u64::from(difference.is_nan() || difference > limit);
        }
        if allowed.admits(seen) {
            if self.out_of_bound == 0 && (self.worst.is_none() || ratio > self.worst_ratio) {
                self.worst = Some((index, seen, allowed));
            }
            self.worst_ratio = self.worst_ratio.max(ratio);
            return;
        }
        if self.out_of_bound == 0 || ratio > self.worst_ratio || seen.is_nan() && !self.worst_is_nan() {
            self.worst = Some((index, seen, allowed));
            self.worst_ratio = ratio;
        }
        self.out_of_bound += 1;
        if self.broken.len() < BROKEN_KEPT {
            self.broken.push(index);
        }
    }

    /// Compares a whole tensor, element by element.
    ///
    /// # Panics
    /// When the two differ in length: shapes are checked before values.
    pub fn all(tensor: &str, seen: &[f64], allowed: &[Allowed]) -> Self {
        assert_eq!(seen.len(), allowed.len(), "shape of {tensor} is checked before its values");
        let mut comparison = Self::new(tensor);
        for (index, (seen, allowed)) in seen.iter().zip(allowed).enumerate() {
            comparison.element(index, *seen, *allowed);
        }
        comparison
    }

    /// Compares integers that must be equal.
    pub fn integers(tensor: &str, seen: &[i64], expected: &[i64]) -> Self {
        assert_eq!(seen.len(), expected.len(), "shape of {tensor} is checked before its values");
        let mut comparison = Self::new(tensor);
        for (index, (seen, expected)) in seen.iter().zip(expected).enumerate() {
            comparison.element(index, *seen as f64, Allowed::Exactly(*expected as f64));
        }
        comparison
    }

    /// Whether every element is allowed.
    pub fn holds(&self) -> bool {
        self.out_of_bound == 0
    }

    /// Flat indices of elements out of bound (the first 65,536 of them).
    pub fn broken(&self) -> &[usize] {
        &self.broken
    }

    /// Flat index of the worst element; `None` where nothing was compared.
    pub fn worst_index(&self) -> Option<usize> {
        self.worst.map(|(index, ..)| index)
    }

    /// What the usual fixed rule would have said.
    pub fn fixed_rule(&self) -> FixedRule {
        self.fixed
    }

    /// Figures.
    pub fn measured(&self) -> Measured {
        Measured { compared: self.compared, worst_ratio: self.worst_ratio, exact: self.exact, figures: None }
    }

    /// The finding: holds, or a failure at `stage` whose worst element is placed by `place`.
    pub fn finding(&self, headline: &str, stage: Stage, place: impl Fn(usize) -> String) -> Finding {
        if self.holds() {
            return Finding::Holds(self.measured());
        }
        Finding::Broken(Box::new(self.failure(headline, stage, place)))
    }

    /// The failure that this comparison shows.
    pub fn failure(&self, headline: &str, stage: Stage, place: impl Fn(usize) -> String) -> Failure {
        let worst = self.worst.map(|(index, seen, allowed)| Worst {
            tensor: self.tensor.clone(),
            place: place(index),
            seen: number(seen),
            expected: number(allowed.expected()),
            allowed: allowed.words(),
            ratio: Some(self.worst_ratio).filter(|r| r.is_finite()),
        });
        Failure {
            headline: headline.to_owned(),
            worst,
            out_of_bound: self.out_of_bound,
            compared: self.compared,
            stage: Some(stage),
            notes: Vec::new(),
        }
    }

    fn worst_is_nan(&self) -> bool {
        self.worst.is_some_and(|(_, seen, _)| seen.is_nan())
    }
}

/// A number as text that survives JSON: integers plain, others with all their digits.
pub fn number(value: f64) -> String {
    if value.is_finite() && value == value.trunc() && value.abs() < 1e15 {
        format!("{value}")
    } else {
        format!("{value:e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn between(expected: f64, bound: f64) -> Allowed {
        Allowed::near(expected, bound)
    }

    #[test]
    fn nan_never_passes_whatever_is_expected() {
        for allowed in [Allowed::Exactly(0.0), Allowed::NegativeInfinity, between(1.0, 1e9)] {
            assert!(!allowed.admits(f64::NAN), "{allowed:?}");
            assert!(allowed.ratio(f64::NAN).is_infinite());
        }
        let nan_bound = Allowed::Between { expected: 1.0, low: f64::NAN, high: f64::NAN };
        assert!(!nan_bound.admits(1.0), "a bound that is NaN admits nothing");
    }

    #[test]
    fn minus_infinity_is_a_class_of_its_own() {
        assert!(Allowed::near(f64::NEG_INFINITY, 1.0).admits(f64::NEG_INFINITY));
        assert!(!Allowed::near(f64::NEG_INFINITY, 1.0).admits(-1e308));
        assert!(!between(-5.0, 1e9).admits(f64::NEG_INFINITY));
    }

    #[test]
    fn an_infinite_output_never_lies_within_a_finite_bound() {
        assert!(!between(0.0, 1.0).admits(f64::INFINITY));
        assert!(!Allowed::Exactly(0.0).admits(f64::INFINITY));
    }

    #[test]
    fn no_share_of_elements_is_forgiven() {
        let mut seen = vec![1.0; 10_000];
        seen[7_777] = 1.1;
        let comparison = Comparison::all("out", &seen, &vec![between(1.0, 0.05); 10_000]);
        let Finding::Broken(failure) = comparison.finding("off", Stage::Output, |i| format!("element {i}"))
        else {
            panic!("one bad element of ten thousand must fail")
        };
        assert_eq!((failure.out_of_bound, failure.compared), (1, 10_000));
        assert_eq!(failure.worst.unwrap().place, "element 7777");
    }

    #[test]
    fn the_worst_element_is_the_one_that_misses_its_own_bound_by_most() {
        let comparison = Comparison::all("out", &[1.5, 100.4], &[between(1.0, 0.1), between(100.0, 1.0)]);
        let failure = comparison.failure("off", Stage::Output, |i| i.to_string());
        let worst = failure.worst.unwrap();
        assert_eq!(worst.place, "0");
        assert!((worst.ratio.unwrap() - 5.0).abs() < 1e-9);
    }

    #[test]
    fn a_passing_comparison_still_reports_how_close_it_came() {
        let comparison = Comparison::all("out", &[1.09, 2.0], &[between(1.0, 0.1), between(2.0, 0.1)]);
        assert!(comparison.holds());
        assert!((comparison.measured().worst_ratio - 0.9).abs() < 1e-9);
    }

    #[test]
    fn undefined_elements_are_not_counted_as_compared() {
        let comparison =
            Comparison::all("partial", &[f64::NAN, 0.0], &[Allowed::Undefined, Allowed::Exactly(0.0)]);
        assert!(comparison.holds());
        assert_eq!(comparison.measured().compared, 1);
    }

    #[test]
    fn another_way_of_computing_widens_an_interval_and_nothing_else() {
        assert_eq!(
            between(0.0, 1.0).or(between(-2.0, 0.5)),
            Allowed::Between { expected: 0.0, low: -2.5, high: 1.0 }
        );
        assert_eq!(Allowed::NegativeInfinity.or(between(0.0, 1.0)), Allowed::NegativeInfinity);
    }

    #[test]
    fn a_nan_is_reported_rather_than_a_large_error() {
        let comparison = Comparison::all("out", &[1e30, f64::NAN], &[between(0.0, 1.0); 2]);
        assert_eq!(comparison.failure("x", Stage::Output, |i| i.to_string()).worst.unwrap().seen, "NaN");
        assert_eq!(comparison.fixed_rule().outside, 2);
    }
}
