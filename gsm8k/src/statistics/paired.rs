//! The interval of a paired difference, and the verdict that follows from it and from the exact test.

use serde::Serialize;

use super::binomial::bisect_between;
use super::{Verdict, mcnemar, normal};

/// Pairs of answers to the same prompt, by who was right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PairCounts {
    /// Right in both.
    pub both_right: u64,
    /// Right in A, wrong in B: what a worse B makes more of.
    pub only_a: u64,
    /// Wrong in A, right in B.
    pub only_b: u64,
    /// Wrong in both.
    pub both_wrong: u64,
}

impl PairCounts {
    /// Adds one pair.
    pub fn add(&mut self, right_in_a: bool, right_in_b: bool) {
        *match (right_in_a, right_in_b) {
            (true, true) => &mut self.both_right,
            (true, false) => &mut self.only_a,
            (false, true) => &mut self.only_b,
            (false, false) => &mut self.both_wrong,
        } += 1;
    }

    /// All pairs.
    pub fn total(self) -> u64 {
        self.both_right + self.only_a + self.only_b + self.both_wrong
    }

    /// Pairs that were right on one side only.
    pub fn discordant(self) -> u64 {
        self.only_a + self.only_b
    }

    /// The share of pairs that were right or wrong together.
    pub fn agreement(self) -> f64 {
        (self.both_right + self.both_wrong) as f64 / self.total() as f64
    }

    /// The share of pairs that differ; between two runs of the same server this is its churn.
    pub fn churn(self) -> f64 {
        self.discordant() as f64 / self.total() as f64
    }

    /// Accuracy of A minus accuracy of B, in `-1..=1`.
    pub fn drop(self) -> f64 {
        (self.only_a as f64 - self.only_b as f64) / self.total() as f64
    }

    /// Exact one-sided McNemar p-value that B is no worse than A.
    pub fn p_value(self) -> f64 {
        mcnemar::p_value(self.only_a, self.only_b)
    }

    /// One-sided score limits of the drop at error probability `alpha` each (Tango 1998).
    ///
    /// Unlike the normal interval it keeps its width when few pairs or none are discordant.
    pub fn drop_limits(self, alpha: f64) -> (f64, f64) {
        let z = normal::upper_quantile(alpha);
        let lower = bisect_between(-1.0, self.drop(), |drop| self.score_z(drop) > z);
        let upper = bisect_between(self.drop(), 1.0, |drop| self.score_z(drop) > -z);
        (lower, upper)
    }

    /// The verdict: [`Verdict::Worse`] by the exact test, [`Verdict::NotWorse`] when the upper limit of the drop
    /// lies below `margin` (in `0..1`, accuracy), else [`Verdict::Inconclusive`].
    ///
    /// A drop can be significant and yet surely smaller than a wide margin; it is still reported as worse.
    pub fn verdict(self, alpha: f64, margin: f64) -> Verdict {
        if self.p_value() <= alpha {
            Verdict::Worse
        } else if self.score_z(margin) < -normal::upper_quantile(alpha) {
            Verdict::NotWorse
        } else {
            Verdict::Inconclusive
        }
    }

    /// Tango's score statistic for a true drop of `drop`; it falls as `drop` rises.
    fn score_z(self, drop: f64) -> f64 {
        let n = self.total() as f64;
        let (worse, better) = (self.only_a as f64, self.only_b as f64);
        // The restricted maximum-likelihood estimate of the smaller discordant probability.
        let b = (2.0 * n - worse + better) * drop - worse - better;
        let c = -better * drop * (1.0 - drop);
        let estimate = ((b * b - 8.0 * n * c).max(0.0).sqrt() - b) / (4.0 * n);
        let variance = n * (2.0 * estimate + drop * (1.0 - drop));
        let distance = worse - better - n * drop;
        if variance <= 0.0 {
            return if distance > 0.0 {
                f64::INFINITY
            } else if distance < 0.0 {
                f64::NEG_INFINITY
            } else {
                0.0
            };
        }
        distance / variance.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::binomial::LogFactorials;

    fn counts(only_a: u64, only_b: u64, total: u64) -> PairCounts {
        PairCounts { both_right: total - only_a - only_b, only_a, only_b, both_wrong: 0 }
    }

    #[test]
    fn the_restricted_estimate_maximises_the_likelihood() {
        // z = (a - b - n·drop) / √(n(2q + drop(1 - drop))) with q from a plain search instead of the closed form
        for (a, b, total, drop) in [(12u64, 5u64, 400u64, 0.03), (3, 9, 200, 0.02), (0, 4, 50, 0.05)] {
            let rest = (total - a - b) as f64;
            let likelihood = |q: f64| {
                let term = |count: f64, p: f64| if count == 0.0 { 0.0 } else { count * p.ln() };
                term(a as f64, q + drop) + term(b as f64, q) + term(rest, 1.0 - 2.0 * q - drop)
            };
            let best = (1..40_000)
                .map(|step| f64::from(step) * 1e-5)
                .max_by(|left, right| likelihood(*left).total_cmp(&likelihood(*right)))
                .unwrap();
            let n = total as f64;
            let z = (a as f64 - b as f64 - n * drop) / (n * (2.0 * best + drop * (1.0 - drop))).sqrt();
            let closed = counts(a, b, total).score_z(drop);
            assert!((z - closed).abs() < 2e-3, "{a} {b}: {z} {closed}");
        }
    }

    #[test]
    fn no_difference_at_all_still_leaves_room_for_one() {
        let (lower, upper) = counts(0, 0, 1319).drop_limits(0.01);
        let z2 = 2.326_347_874_f64.powi(2);
        let expected = z2 / (1319.0 + z2);
        assert!((upper - expected).abs() < 1e-9 && (lower + expected).abs() < 1e-9, "{lower} {upper}");
    }

    #[test]
    fn exchanging_the_runs_mirrors_the_interval() {
        let (lower, upper) = counts(19, 7, 1319).drop_limits(0.01);
        let (mirrored_lower, mirrored_upper) = counts(7, 19, 1319).drop_limits(0.01);
        assert!((lower + mirrored_upper).abs() < 1e-9 && (upper + mirrored_lower).abs() < 1e-9);
        assert!(lower < 12.0 / 1319.0 && 12.0 / 1319.0 < upper);
    }

    #[test]
    fn the_verdict_agrees_with_the_interval_it_is_read_from() {
        for (a, b) in [(0, 0), (5, 5), (12, 10), (20, 4), (4, 20), (60, 55)] {
            let pairs = counts(a, b, 1319);
            let (_, upper) = pairs.drop_limits(0.01);
            let expected = if pairs.p_value() <= 0.01 {
                Verdict::Worse
            } else if upper < 0.02 {
                Verdict::NotWorse
            } else {
                Verdict::Inconclusive
            };
            assert_eq!(pairs.verdict(0.01, 0.02), expected, "{a} {b} {upper}");
        }
    }

    #[test]
    fn an_all_clear_is_wrong_about_as_rarely_as_promised() {
        // Enumerates every outcome when the true drop equals the margin: the worst case for NotWorse.
        let (n, alpha) = (1319, 0.01);
        let table = LogFactorials::up_to(n);
        let mut worst: f64 = 0.0;
        for margin in [0.01, 0.02, 0.03] {
            for churn in [0.002, 0.01, 0.02, 0.053] {
                let (worse, better) = (0.5 * churn + margin, 0.5 * churn);
                let mut wrong = 0.0;
                for only_b in 0..150 {
                    let p_b = table.probability(n, only_b, better);
                    if p_b < 1e-12 {
                        continue;
                    }
                    for only_a in 0..150 {
                        if counts(only_a, only_b, n).score_z(margin) < -normal::upper_quantile(alpha) {
                            wrong += p_b * table.probability(n - only_b, only_a, worse / (1.0 - better));
                        }
                    }
                }
                worst = worst.max(wrong);
            }
        }
        println!("largest probability of a wrong all-clear at alpha 0.01: {worst:.5}");
        assert!(worst <= alpha, "{worst}");
    }
}
