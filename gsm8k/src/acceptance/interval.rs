//! How sure an acceptance figure is: intervals that respect that steps of one request resemble each other.

use serde::{Deserialize, Serialize};

use super::AcceptanceCounts;
use crate::mersenne::PythonRandom;
use crate::statistics::{Verdict, normal};

/// Resamples of a bootstrap.
const RESAMPLES: usize = 2000;
/// The seed of every bootstrap: the same data give the same interval.
const BOOTSTRAP_SEED: u64 = 1234;

/// What an interval rests on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// A bootstrap over whole requests.
    Clustered {
        /// Number of requests.
        requests: usize,
    },
    /// Independent steps, with the variance multiplied by an assumed design effect.
    DesignEffect(f64),
}

/// Accepted draft tokens per step with its uncertainty.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceEstimate {
    /// Accepted draft tokens per step.
    pub mean_accepted: f64,
    /// Its standard error.
    pub stderr: f64,
    /// One-sided lower limit.
    pub low: f64,
    /// One-sided upper limit.
    pub high: f64,
    /// What the interval rests on.
    pub basis: Basis,
}

/// Mean accepted tokens per step, by resampling whole requests.
///
/// `histograms` holds the steps of each request by accepted tokens; `alpha` is the error probability on each side.
pub fn clustered(histograms: &[Vec<u64>], alpha: f64) -> Option<AcceptanceEstimate> {
    let requests: Vec<(f64, f64)> = histograms
        .iter()
        .map(|histogram| {
            let counts = AcceptanceCounts::from_histogram(histogram);
            (counts.accepted as f64, counts.steps as f64)
        })
        .collect();
    let ratio = |sums: (f64, f64)| sums.0 / sums.1;
    let add = |sums: (f64, f64), request: &(f64, f64)| (sums.0 + request.0, sums.1 + request.1);
    let mean_accepted = ratio(requests.iter().fold((0.0, 0.0), add));
    if requests.len() < 2 || !mean_accepted.is_finite() {
        return None;
    }
    let mut random = PythonRandom::new(BOOTSTRAP_SEED);
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let drawn = (0..requests.len()).map(|_| &requests[random.below(requests.len())]);
            ratio(drawn.fold((0.0, 0.0), add))
        })
        .filter(|mean| mean.is_finite())
        .collect();
    means.sort_by(f64::total_cmp);
    let center = means.iter().sum::<f64>() / means.len() as f64;
    let variance = means.iter().map(|mean| (mean - center).powi(2)).sum::<f64>() / (means.len() - 1) as f64;
    let at = |share: f64| means[((means.len() - 1) as f64 * share).round() as usize];
    Some(AcceptanceEstimate {
        mean_accepted,
        stderr: variance.sqrt(),
        low: at(alpha),
        high: at(1.0 - alpha),
        basis: Basis::Clustered { requests: requests.len() },
    })
}

/// Mean accepted tokens per step out of whole-run counts, as if `design_effect` steps carried the information of
/// one. `None` without steps or with counts that no histogram can have made.
pub fn with_design_effect(
    counts: &AcceptanceCounts,
    design_effect: f64,
    alpha: f64,
) -> Option<AcceptanceEstimate> {
    let histogram = counts.histogram()?;
    let steps = counts.steps as f64;
    if counts.steps < 2 {
        return None;
    }
    let mean = counts.mean_accepted();
    let squares = histogram.iter().enumerate().map(|(count, n)| (count as f64 - mean).powi(2) * *n as f64);
    let stderr = (squares.sum::<f64>() / (steps - 1.0) / steps * design_effect).sqrt();
    let reach = normal::upper_quantile(alpha) * stderr;
    Some(AcceptanceEstimate {
        mean_accepted: mean,
        stderr,
        low: mean - reach,
        high: mean + reach,
        basis: Basis::DesignEffect(design_effect),
    })
}

/// The comparison of two acceptance figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceComparison {
    /// Accepted tokens per step of A less those of B.
    pub drop: f64,
    /// One-sided upper limit of the drop.
    pub drop_high: f64,
    /// Worse, not worse by the margin, or inconclusive.
    pub verdict: Verdict,
    /// Whether B accepts significantly more than A, which a like-for-like comparison should not show either.
    pub surprisingly_high: bool,
}

/// Whether B accepts fewer tokens per step than A. `margin` is in tokens per step.
pub fn compare(
    a: &AcceptanceEstimate,
    b: &AcceptanceEstimate,
    margin: f64,
    alpha: f64,
) -> AcceptanceComparison {
    let drop = a.mean_accepted - b.mean_accepted;
    let stderr = a.stderr.hypot(b.stderr);
    let drop_high = drop + normal::upper_quantile(alpha) * stderr;
    let verdict = if drop > normal::upper_quantile(alpha) * stderr {
        Verdict::Worse
    } else if drop_high < margin {
        Verdict::NotWorse
    } else {
        Verdict::Inconclusive
    };
    let surprisingly_high = -drop > normal::upper_quantile(0.5 * alpha) * stderr;
    AcceptanceComparison { drop, drop_high, verdict, surprisingly_high }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of 40 steps that accept two tokens with probability `base` ± `spread` of their own.
    fn requests(count: usize, base: f64, spread: f64, seed: u64) -> Vec<Vec<u64>> {
        let mut random = PythonRandom::new(seed);
        (0..count)
            .map(|_| {
                let own = base + spread * (2.0 * random.uniform() - 1.0);
                let mut histogram = vec![0; 3];
                for _ in 0..40 {
                    histogram[if random.uniform() < own { 2 } else { 0 }] += 1;
                }
                histogram
            })
            .collect()
    }

    fn pooled(histograms: &[Vec<u64>]) -> AcceptanceCounts {
        let mut counts = AcceptanceCounts::default();
        for histogram in histograms {
            counts.add(&AcceptanceCounts::from_histogram(histogram));
        }
        counts
    }

    #[test]
    fn without_clusters_both_intervals_agree() {
        let histograms = requests(600, 0.8, 0.0, 5);
        let clustered = clustered(&histograms, 0.01).unwrap();
        let plain = with_design_effect(&pooled(&histograms), 1.0, 0.01).unwrap();
        assert!((clustered.mean_accepted - plain.mean_accepted).abs() < 1e-12);
        assert!((clustered.stderr / plain.stderr - 1.0).abs() < 0.12, "{clustered:?} {plain:?}");
        assert!((clustered.low - plain.low).abs() < 2e-3 && (clustered.high - plain.high).abs() < 2e-3);
    }

    #[test]
    fn clusters_widen_the_interval_that_ignores_them() {
        let histograms = requests(600, 0.75, 0.25, 6);
        let clustered = clustered(&histograms, 0.01).unwrap();
        let plain = with_design_effect(&pooled(&histograms), 1.0, 0.01).unwrap();
        assert!(clustered.stderr > 1.5 * plain.stderr, "{clustered:?} {plain:?}");
        assert_eq!(clustered.basis, Basis::Clustered { requests: 600 });
    }

    #[test]
    fn a_lower_acceptance_is_worse_and_an_equal_one_is_not() {
        let healthy = clustered(&requests(1300, 0.85, 0.1, 7), 0.01).unwrap();
        let same = clustered(&requests(1300, 0.85, 0.1, 8), 0.01).unwrap();
        let broken = clustered(&requests(1300, 0.83, 0.1, 9), 0.01).unwrap();
        assert_eq!(compare(&healthy, &broken, 0.03, 0.01).verdict, Verdict::Worse);
        assert_eq!(compare(&healthy, &same, 0.05, 0.01).verdict, Verdict::NotWorse);
        assert_eq!(compare(&healthy, &same, 0.001, 0.01).verdict, Verdict::Inconclusive);
        assert!(compare(&broken, &healthy, 0.03, 0.01).surprisingly_high);
    }

    #[test]
    fn the_interval_holds_the_truth_as_often_as_promised() {
        // two-sided error 2 %: of 200 repetitions 4 should miss, 12 or more would be a one-in-a-thousand event
        let misses = (0..200)
            .filter(|seed| {
                let estimate = clustered(&requests(150, 0.7, 0.2, 100 + seed), 0.01).unwrap();
                estimate.low > 1.4 || estimate.high < 1.4
            })
            .count();
        assert!(misses < 12, "{misses} of 200");
    }

    #[test]
    fn too_little_data_gives_no_interval() {
        assert_eq!(clustered(&[vec![1, 2]], 0.01), None);
        assert_eq!(with_design_effect(&AcceptanceCounts::default(), 3.0, 0.01), None);
    }
}
