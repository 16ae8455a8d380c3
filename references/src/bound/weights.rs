//! Relative errors of softmax weights: how wrong a score may be, and what that makes of `e^s`.

use super::{U32, gamma};
use crate::moments::{Part, State};
use shardcheck_formats::contract::Contract;

/// `α_i = by_size·a_i + by_score·|s_i| + constant`, a bound on the absolute error of the exponent of token `i` —
/// so that its weight carries the factor `e^±α_i`, a relative error of at most `expm1(α_i)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ExponentError {
    by_size: f64,
    by_score: f64,
    constant: f64,
}

impl ExponentError {
    /// The error `δ_i` that a part commits by itself:
    ///
    /// ```text
    /// γ(dk, u_acc)·a_i                       the product of query and key
    /// u(5|s_i| + max|s|)                     scale and log2(e) constants and products, subtraction of the maximum
    /// u(2·kexp + 2)(1 + n/tile_min + parts)  exp of the token and of every rescale of the running maximum
    /// u·min(110, max s − min s)              exponents of the rescales, which telescope to the range; beyond 110
    ///                                        binary32 holds nothing
    /// u·cap(2·kexp + 6) with a soft cap      tanh by way of exp, the products around it
    /// ```
    pub(super) fn of_state(contract: &Contract, qk_dim: usize, softcap: Option<f64>, state: &State) -> Self {
        let rescales = 1.0 + state.tokens as f64 / contract.tile_min as f64 + state.parts.len() as f64;
        let by_softcap = softcap.map_or(0.0, |cap| cap * (2.0 * contract.kexp + 6.0));
        Self {
            by_size: gamma(qk_dim, contract.u_acc),
            by_score: 5.0 * U32,
            constant: U32 * state.max_abs_score
                + U32 * (2.0 * contract.kexp + 2.0) * rescales
                + U32 * state.score_range.min(110.0)
                + U32 * by_softcap,
        }
    }

    /// Adds the error `η` of merge weights, common to the tokens of a part.
    pub(super) fn with_merge(self, eta: f64) -> Self {
        Self { constant: self.constant + eta, ..self }
    }

    /// `α` of one token.
    pub(super) fn at(&self, size: f64, score: f64) -> f64 {
        self.by_size * size + self.by_score * score + self.constant
    }

    /// How much larger the `α` of a token of size `size` may be than that of one of size `than`, when their
    /// scores differ by at most `gap`.
    pub(super) fn excess(&self, size: f64, than: f64, gap: f64) -> f64 {
        self.by_size * (size - than).max(0.0) + self.by_score * gap
    }

    /// `Σ p·α^power` over a part's own softmax.
    fn moment(&self, part: &Part, power: usize) -> f64 {
        let mut sum = 0.0;
        for i in 0..=power {
            for j in 0..=power - i {
                let k = power - i - j;
                let ways = factorial(power) / (factorial(i) * factorial(j) * factorial(k));
                sum += ways
                    * self.by_size.powi(i as i32)
                    * self.by_score.powi(j as i32)
                    * self.constant.powi(k as i32)
                    * part.powers[i][j];
            }
        }
        sum
    }

    /// `Σ p·w` with `w = expm1(α)`, over a part's own softmax: the series to the third power, and the rest
    /// bounded by `α⁴/24·e^max α`.
    pub(super) fn mean(&self, part: &Part, max_abs_score: f64) -> f64 {
        let largest = self.at(part.max_a, max_abs_score);
        self.moment(part, 1)
            + self.moment(part, 2) / 2.0
            + self.moment(part, 3) / 6.0
            + self.moment(part, 4) / 24.0 * largest.exp()
    }

    /// `Σ p·w²`: `expm1(α)² = α² + α³ + 7/12·α⁴ + …`, the rest bounded by `7/12·α⁴·e^(2·max α)`.
    pub(super) fn mean_square(&self, part: &Part, max_abs_score: f64) -> f64 {
        let largest = self.at(part.max_a, max_abs_score);
        self.moment(part, 2)
            + self.moment(part, 3)
            + self.moment(part, 4) * 7.0 / 12.0 * (2.0 * largest).exp()
    }
}

/// `η`, the error of a merge weight's exponent: LSEs rounded to binary32, log, exp and subtraction in the merge, and
/// whatever the LSE loses on its way. Zero where nothing is merged.
pub(crate) fn merge_weight_error(contract: &Contract, parts: usize, largest_lse: f64) -> f64 {
    if parts <= 1 {
        return 0.0;
    }
    U32 * (6.0 * largest_lse + 4.0 * contract.kexp + 4.0) + contract.lse_rel * largest_lse
}

fn factorial(n: usize) -> f64 {
    (1..=n).product::<usize>() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moments::add_powers;

    #[test]
    fn moments_give_the_weight_error_that_the_tokens_give() {
        let tokens = [(0.5, 3.0, 0.5), (0.3, 40.0, 2.0), (0.2, 0.1, 7.0)];
        let mut part = Part::empty(0);
        for (p, a, s) in tokens {
            add_powers(&mut part.powers, p, a, s);
        }
        part.max_a = 40.0;
        for scale in [1e-6, 1e-4, 1e-2] {
            let error = ExponentError { by_size: scale, by_score: scale / 7.0, constant: scale * 3.0 };
            let w = |a: f64, s: f64| error.at(a, s).exp_m1();
            let mean: f64 = tokens.iter().map(|(p, a, s)| p * w(*a, *s)).sum();
            let square: f64 = tokens.iter().map(|(p, a, s)| p * w(*a, *s).powi(2)).sum();
            let (mean_bound, square_bound) = (error.mean(&part, 7.0), error.mean_square(&part, 7.0));
            let slack = 1e-14 + scale * scale * 40.0 * 40.0 * 10.0;
            assert!(
                mean_bound >= mean * (1.0 - 1e-14) && mean_bound <= mean * (1.0 + slack),
                "{mean_bound} {mean}"
            );
            assert!(square_bound >= square * (1.0 - 1e-14) && square_bound <= square * (1.0 + slack));
        }
    }

    #[test]
    fn a_state_that_is_not_merged_has_no_merge_weight_error() {
        let contract = Contract::bf16_default(shardcheck_formats::contract::Merge::A2a);
        assert_eq!(merge_weight_error(&contract, 1, 9.0), 0.0);
        assert!(merge_weight_error(&contract, 2, 9.0) > 0.0);
    }
}
