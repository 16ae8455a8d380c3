//! A score: how many answers of how many are right, with the mean and standard error that lm-eval prints.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Right answers out of all answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Score {
    /// Answers that count as right.
    pub correct: u64,
    /// All answers.
    pub total: u64,
}

impl Score {
    /// The score of a list of verdicts.
    pub fn of(verdicts: impl IntoIterator<Item = bool>) -> Self {
        let mut score = Self { correct: 0, total: 0 };
        for right in verdicts {
            score.total += 1;
            score.correct += u64::from(right);
        }
        score
    }

    /// The share of right answers in `0..=1`; NaN without any answer (lm-eval `mean`).
    pub fn mean(self) -> f64 {
        self.correct as f64 / self.total as f64
    }

    /// The standard error of the mean as lm-eval defines it: sample deviation over √n, `√(p(1−p)/(n−1))`.
    ///
    /// NaN with fewer than two answers. It measures which questions were drawn, not how the server varies;
    /// two runs over the same questions must not be compared by it.
    pub fn stderr(self) -> f64 {
        if self.total < 2 {
            return f64::NAN;
        }
        let p = self.mean();
        (p * (1.0 - p) / (self.total - 1) as f64).sqrt()
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.10} ± {:.10} ({}/{})", self.mean(), self.stderr(), self.correct, self.total)
    }
}

/// All counts of right answers whose mean, rounded to `digits` decimals, is the printed figure.
///
/// One element says that the figure is a possible score of `total` questions and which; none, that it is not.
pub fn counts_printed_as(mean: &str, total: u64) -> Vec<u64> {
    let digits = mean.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    (0..=total).filter(|correct| format!("{:.digits$}", *correct as f64 / total as f64) == mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closed_form_equals_the_sample_deviation() {
        let verdicts: Vec<bool> = (0..37).map(|index| index % 5 != 0).collect();
        let score = Score::of(verdicts.iter().copied());
        let mean = score.mean();
        let squares: f64 = verdicts.iter().map(|right| (f64::from(u8::from(*right)) - mean).powi(2)).sum();
        let expected = (squares / 36.0).sqrt() / 37f64.sqrt();
        assert!((score.stderr() - expected).abs() < 1e-15);
    }

    #[test]
    fn nothing_and_one_answer_have_no_error_bar() {
        assert!(Score::of([]).mean().is_nan());
        assert!(Score::of([true]).stderr().is_nan());
    }

    #[test]
    fn a_printed_mean_gives_its_count_back() {
        assert_eq!(counts_printed_as("0.9553", 1319), [1260]);
        assert_eq!(counts_printed_as("0.95535", 1319), Vec::<u64>::new());
        assert_eq!(counts_printed_as("0.50", 1000).len(), 9);
    }
}
