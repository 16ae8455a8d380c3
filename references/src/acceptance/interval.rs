//! Probabilities as intervals that cover every order and place of 32-bit rounding.
//!
//! Counted for a row of logits l at temperature T, u = 2⁻²⁴: `z = l/T` is one division, or a product with a rounded reciprocal
//! (2u·|z|); `z − m` one subtraction (u·|z − m|, and the errors of both sides); `exp` within 4 ulp, and within its argument's
//! rounding where it is a power of two (2u·|z − m| + 8u); a sum of V terms in any order V·u; a division or a logarithm and a
//! subtraction 4u·(1 + |ln p|). The error of the sum is the mean of the terms' errors by their weight.

/// Half a unit in the last place of 32-bit numbers.
pub const U: f64 = 1.0 / 16_777_216.0;

/// Below the smallest normal 32-bit number a result may be flushed to zero.
const SMALLEST: f64 = f32::MIN_POSITIVE as f64;

/// A number that an engine may have anywhere between two ends, none of them negative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// Exactly one.
    pub const ONE: Self = Self { low: 1.0, high: 1.0 };
    /// Exactly zero.
    pub const ZERO: Self = Self { low: 0.0, high: 0.0 };

    /// A number that is given.
    pub fn point(value: f64) -> Self {
        Self { low: value, high: value }
    }

    /// The product of two non-negative numbers.
    pub fn times(self, other: Self) -> Self {
        Self { low: self.low * other.low, high: self.high * other.high }
    }

    /// The quotient; anything over zero may be anything, but zero over it is zero.
    pub fn over(self, other: Self) -> Self {
        let high = if self.high == 0.0 {
            0.0
        } else if other.low == 0.0 {
            f64::INFINITY
        } else {
            self.high / other.low
        };
        Self { low: if other.high == 0.0 { self.low } else { self.low / other.high }, high }
    }

    /// The difference with the rounding of both sides and of itself; may be negative.
    pub fn minus(self, other: Self) -> Self {
        let slack = 4.0 * U * (self.high + other.high);
        // two zeros, and a side that surely is none
        if other.high == 0.0 {
            return self;
        }
        if self.high == 0.0 {
            return Self { low: -other.high, high: -other.low };
        }
        Self { low: self.low - other.high - slack, high: self.high - other.low + slack }
    }

    /// Cut off at zero.
    pub fn at_least_zero(self) -> Self {
        Self { low: self.low.max(0.0), high: self.high.max(0.0) }
    }

    /// Cut off at one.
    pub fn at_most_one(self) -> Self {
        Self { low: self.low.min(1.0), high: self.high.min(1.0) }
    }

    /// One minus a probability.
    pub fn complement(self) -> Self {
        if self == Self::ZERO {
            return Self::ONE;
        }
        Self { low: 1.0 - self.high - U, high: 1.0 - self.low + U }.at_least_zero().at_most_one()
    }

    /// A sum in any order.
    pub fn sum(terms: &[Self]) -> Self {
        let (low, high) = terms.iter().fold((0.0, 0.0), |(low, high), t| (low + t.low, high + t.high));
        let slack = terms.len() as f64 * U;
        Self { low: low * (1.0 - slack), high: high * (1.0 + slack) }
    }

    /// Widened by what is rounded where a result is a product or a quotient of `factors`, or a sum of their logarithms.
    pub fn rounded(self, factors: &[Self]) -> Self {
        let size = |factor: &Self| {
            let ends = [factor.low, factor.high].map(|end| if end > 0.0 { end.ln().abs() } else { 0.0 });
            ends[0].max(ends[1])
        };
        let relative = 4.0 * U * (1.0 + factors.iter().map(size).sum::<f64>());
        Self { low: self.low * (1.0 - relative), high: self.high * (1.0 + relative) }
    }
}

/// The law of a row of logits at a temperature above zero. A logit of −∞ is a probability of exactly 0.
pub fn law_of_row(logits: &[f32], temperature: f32) -> Vec<Interval> {
    let scaled: Vec<f64> = logits.iter().map(|logit| f64::from(*logit) / f64::from(temperature)).collect();
    let largest = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let error = |z: f64| U * (2.0 * z.abs() + 2.0 * largest.abs() + 3.0 * (z - largest).abs() + 8.0);
    let terms: Vec<f64> = scaled.iter().map(|z| (z - largest).exp()).collect();
    let sum: f64 = terms.iter().sum();
    let of_sum: f64 = scaled
        .iter()
        .zip(&terms)
        .filter(|(_, term)| **term > 0.0)
        .map(|(z, term)| term / sum * error(*z).exp_m1())
        .sum::<f64>()
        + logits.len() as f64 * U;
    let probability = |(z, term): (&f64, &f64)| {
        if *z == f64::NEG_INFINITY {
            return Interval::ZERO;
        }
        let (value, surprise) = (term / sum, largest - z + sum.ln());
        let relative = error(*z) + of_sum + 4.0 * U * (1.0 + surprise.abs());
        Interval {
            low: (value * (-relative).exp() - SMALLEST).max(0.0),
            high: value * relative.exp() + SMALLEST,
        }
    };
    scaled.iter().zip(&terms).map(probability).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(low: f64, high: f64) -> Interval {
        Interval { low, high }
    }

    /// Asserts a relative width in units of u.
    fn wide(seen: f64, around: f64, units: f64) {
        let found = (seen / around - 1.0) / U;
        assert!((found - units).abs() < 1e-4, "{seen} is {found} u off {around}, not {units}");
    }

    #[test]
    fn products_quotients_and_differences_take_the_ends_that_lie_furthest_apart() {
        assert_eq!(U, 2f64.powi(-24));
        let (a, b) = (of(0.25, 0.5), of(2.0, 8.0));
        assert_eq!(Interval::point(0.25), of(0.25, 0.25));
        assert_eq!(a.times(b), of(0.5, 4.0));
        assert_eq!(a.over(b), of(0.031_25, 0.25));
        let c = of(0.125, 0.25);
        assert_eq!(a.minus(c), of(-3.0 * U, 0.375 + 3.0 * U));
        assert_eq!(of(-1.0, 0.5).at_least_zero(), of(0.0, 0.5));
        assert_eq!(of(-2.0, -1.0).at_least_zero(), Interval::ZERO);
        assert_eq!(of(0.5, 2.0).at_most_one(), of(0.5, 1.0));
        assert_eq!(of(2.0, 3.0).at_most_one(), Interval::ONE);
    }

    #[test]
    fn a_zero_is_exact_in_a_difference_and_a_complement_and_over_one_there_may_be_anything() {
        let (a, zero) = (of(0.25, 0.5), Interval::ZERO);
        assert_eq!((a.minus(zero), zero.minus(a), zero.minus(zero)), (a, of(-0.5, -0.25), zero));
        assert_eq!((zero.over(a), zero.over(zero)), (zero, zero));
        assert_eq!((a.over(zero), a.over(of(0.0, 2.0))), (of(0.25, f64::INFINITY), of(0.125, f64::INFINITY)));
        assert_eq!((zero.complement(), a.complement()), (Interval::ONE, of(0.5 - U, 0.75 + U)));
        assert_eq!(
            (Interval::ONE.complement(), of(0.0, U).complement()),
            (of(0.0, U), of(1.0 - 2.0 * U, 1.0))
        );
    }

    #[test]
    fn sums_widen_by_their_terms_and_products_by_the_logarithms_of_their_factors() {
        let sum = Interval::sum(&[of(0.25, 0.5), of(0.5, 1.0), of(0.25, 0.5)]);
        assert_eq!(sum, of(1.0 - 3.0 * U, 2.0 * (1.0 + 3.0 * U)));
        let product = of(0.5, 2.0);
        for (factors, units) in [
            (&[][..], 4.0),
            (&[Interval::ZERO], 4.0),
            (&[of(0.25, 0.5)], 4.0 * (1.0 + 4f64.ln())),
            (&[of(0.25, 0.5), of(0.0, 8.0)], 4.0 * (1.0 + 4f64.ln() + 8f64.ln())),
        ] {
            let seen = product.rounded(factors);
            wide(seen.low, 0.5, -units);
            wide(seen.high, 2.0, units);
        }
    }

    #[test]
    fn a_law_is_as_wide_as_its_divisions_differences_exponentials_sum_and_logarithm_are_counted() {
        // z is 2 and 0: errors of 2·2 + 2·2 + 8 and of 2·2 + 3·2 + 8 units
        let (law, rest) = (law_of_row(&[1.0, 0.0], 0.5), (-2f64).exp());
        let sum = 1.0 + rest;
        let of_sum = (16.0 + rest * 18.0) / sum + 2.0;
        for (token, value, own, surprise) in
            [(0, 1.0 / sum, 16.0, sum.ln()), (1, rest / sum, 18.0, 2.0 + sum.ln())]
        {
            let units = own + of_sum + 4.0 * (1.0 + surprise);
            wide(law[token].low, value, -units);
            wide(law[token].high, value, units);
        }
    }

    #[test]
    fn a_logit_of_minus_infinity_has_no_part_in_a_law_and_what_is_tiny_may_be_flushed() {
        let with = law_of_row(&[0.0, f32::NEG_INFINITY, 0.0], 1.0);
        assert_eq!(with[1], Interval::ZERO);
        // errors of 8 units each, a sum of three, a surprise of ln 2
        wide(with[0].high, 0.5, 8.0 + 8.0 + 3.0 + 4.0 * (1.0 + 2f64.ln()));
        let smallest = f64::from(f32::MIN_POSITIVE);
        let tiny = law_of_row(&[0.0, -100.0, -85.0], 1.0);
        assert_eq!(tiny[1].low, 0.0);
        assert!(tiny[1].high > smallest && tiny[1].high < 1.0001 * smallest, "{:?}", tiny[1]);
        for (seen, wanted) in
            [(tiny[2].low, (-85f64).exp() - smallest), (tiny[2].high, (-85f64).exp() + smallest)]
        {
            assert!((seen / wanted - 1.0).abs() < 1e-3, "{seen} {wanted}");
        }
    }
}
