//! What a design can see: smallest detectable drops, runs needed for an all-clear, and what a threshold lets pass.

use super::binomial::{self, LogFactorials, bisect, bisect_between};
use super::{mcnemar, normal};

/// How an accuracy is compared with what it should be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Design {
    /// Two runs over different questions, or over the same ones without pairing them.
    Unpaired,
    /// One run against a number that is taken as exact.
    Constant,
    /// Two runs over the same questions, paired; `churn` is the share of questions that differ between two runs
    /// of the same quality.
    Paired {
        /// Share of questions, in `0..1`.
        churn: f64,
    },
}

/// A test's error probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Errors {
    /// Probability of an alarm without a fault, one-sided.
    pub alpha: f64,
    /// Probability of an alarm when the drop is as large as stated.
    pub power: f64,
}

impl Errors {
    /// The errors used throughout unless others are asked for: α = 0.01 one-sided, power 0.9.
    pub const USUAL: Errors = Errors { alpha: 0.01, power: 0.9 };
}

/// The smallest drop of accuracy, in `0..1`, that `design` finds with the given errors.
///
/// Unpaired and constant: the normal approximation for proportions. Paired: the power of the exact McNemar test.
pub fn smallest_drop(design: Design, questions: u64, accuracy: f64, errors: Errors) -> f64 {
    let n = questions as f64;
    let z_alpha = normal::upper_quantile(errors.alpha);
    let z_beta = normal::upper_quantile(1.0 - errors.power);
    let variance = |p: f64| p * (1.0 - p);
    match design {
        Design::Unpaired => bisect_between(0.0, accuracy, |drop| {
            let low = accuracy - drop;
            let pooled = (2.0 * variance(0.5 * (accuracy + low)) / n).sqrt();
            let apart = ((variance(accuracy) + variance(low)) / n).sqrt();
            drop < z_alpha * pooled + z_beta * apart
        }),
        Design::Constant => bisect_between(0.0, accuracy, |drop| {
            let healthy = (variance(accuracy) / n).sqrt();
            drop < z_alpha * healthy + z_beta * (variance(accuracy - drop) / n).sqrt()
        }),
        Design::Paired { churn } => {
            let table = LogFactorials::up_to(questions);
            let most = (1.0 - churn).max(0.0);
            bisect_between(0.0, most, |drop| {
                mcnemar::power_with(&table, questions, churn, drop, errors.alpha) < errors.power
            })
        }
    }
}

/// The number of pairs needed to show that a drop is smaller than `margin` when there is none.
///
/// Normal approximation: `(z_α + z_β)² · churn / margin²`, rounded up.
pub fn pairs_for_all_clear(churn: f64, margin: f64, errors: Errors) -> u64 {
    let z = normal::upper_quantile(errors.alpha) + normal::upper_quantile(1.0 - errors.power);
    (z * z * churn / (margin * margin)).ceil() as u64
}

/// A gate that fails when fewer than a fixed number of answers is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountGate {
    /// Questions asked.
    pub questions: u64,
    /// The smallest number of right answers that passes.
    pub least_passing: u64,
}

impl CountGate {
    /// The gate `accuracy ≥ threshold` over `questions` questions.
    pub fn at_threshold(threshold: f64, questions: u64) -> Self {
        // 0.94·1319 = 1239.86: 1240 is the first count that passes; an exact product must not be lifted by rounding
        let least_passing = (threshold * questions as f64 - 1e-9).ceil().max(0.0) as u64;
        Self { questions, least_passing }
    }

    /// The probability that the gate fails at a true accuracy.
    pub fn failure_probability(self, accuracy: f64) -> f64 {
        if self.least_passing == 0 {
            return 0.0;
        }
        let table = LogFactorials::up_to(self.questions);
        table.at_most(self.questions, self.least_passing - 1, accuracy)
    }

    /// The true accuracy below which the gate fails with at least the given probability.
    pub fn accuracy_caught(self, probability: f64) -> f64 {
        bisect(|accuracy| self.failure_probability(accuracy) > probability)
    }

    /// The share of requests that may return pure garbage before the gate fails with the given probability,
    /// when the other requests score as a healthy server does.
    pub fn garbage_share(self, healthy: f64, probability: f64) -> f64 {
        (1.0 - self.accuracy_caught(probability) / healthy).max(0.0)
    }
}

/// The largest count of right answers out of `questions` that is significantly below `accuracy`.
///
/// `None` when no count is. Exact binomial test, one-sided.
pub fn significantly_low(questions: u64, accuracy: f64, alpha: f64) -> Option<u64> {
    let table = LogFactorials::up_to(questions);
    let mut tail = 0.0;
    let mut largest = None;
    for count in 0..=questions {
        tail += table.probability(questions, count, accuracy);
        if tail > alpha {
            break;
        }
        largest = Some(count);
    }
    largest
}

/// The smallest true difference between two means that is found, given the standard error of each.
pub fn smallest_difference(stderr: f64, errors: Errors) -> f64 {
    let z = normal::upper_quantile(errors.alpha) + normal::upper_quantile(1.0 - errors.power);
    z * std::f64::consts::SQRT_2 * stderr
}

/// The drop of accuracy when each decode step breaks a token with probability `per_step` and a broken token
/// spoils the answer with probability `harm`: `accuracy·(1 − exp(−steps·per_step·harm))`.
pub fn drop_of_rare_fault(accuracy: f64, steps_per_answer: f64, per_step: f64, harm: f64) -> f64 {
    accuracy * -(-steps_per_answer * per_step * harm).exp_m1()
}

/// The two-sided exact confidence interval of a share, error probability `alpha` on each side.
pub fn share_limits(hits: u64, total: u64, alpha: f64) -> (f64, f64) {
    (binomial::lower_limit(hits, total, alpha), binomial::upper_limit(hits, total, alpha))
}
