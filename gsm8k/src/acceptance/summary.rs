//! One acceptance figure as it is reported: counts, rates, interval, broken identities, and what weakens it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::interval::{self, AcceptanceEstimate, Basis};
use super::{AcceptanceCounts, Emitted};

/// The design effect assumed when the server gives no per-request counts: standard errors grow by √3 = 1.7.
pub const DESIGN_EFFECT: f64 = 3.0;

/// Acceptance of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceSummary {
    /// Where the counts come from, in words.
    pub source: String,
    /// The counts.
    pub counts: AcceptanceCounts,
    /// Accepted over drafted tokens.
    pub rate: f64,
    /// `1 + accepted/steps`.
    pub acceptance_length: f64,
    /// Share of steps that accepted each position.
    pub rates_per_position: Vec<f64>,
    /// Steps by accepted tokens, when the counts allow it.
    pub histogram: Option<Vec<u64>>,
    /// Accepted tokens per step with its interval.
    pub estimate: Option<AcceptanceEstimate>,
    /// Identities that do not hold; the figures must not be used then.
    pub broken_identities: Vec<String>,
    /// Tokens received that no counted step explains: steps without a draft.
    pub undrafted_tokens: Option<u64>,
}

impl AcceptanceSummary {
    /// Sums up counts. `histograms` are the per-request ones, if the server gave them; `alpha` is the error
    /// probability on each side of the interval.
    pub fn new(
        source: &str,
        counts: AcceptanceCounts,
        histograms: Option<&[Vec<u64>]>,
        emitted: Option<Emitted>,
        design_effect: f64,
        alpha: f64,
    ) -> Self {
        let estimate = histograms
            .and_then(|histograms| interval::clustered(histograms, alpha))
            .or_else(|| interval::with_design_effect(&counts, design_effect, alpha));
        Self {
            source: source.to_owned(),
            rate: counts.rate(),
            acceptance_length: counts.acceptance_length(),
            rates_per_position: counts.rates_per_position(),
            histogram: counts.histogram(),
            estimate,
            broken_identities: counts.broken_identities(emitted),
            undrafted_tokens: emitted.map(|emitted| counts.undrafted_tokens(emitted)),
            counts,
        }
    }
}

impl fmt::Display for AcceptanceSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = &self.counts;
        writeln!(
            f,
            "acceptance ({}): {} steps, {} drafted, {} accepted",
            self.source, counts.steps, counts.drafted, counts.accepted
        )?;
        writeln!(
            f,
            "  rate {:.2} %, acceptance length {:.3}, per position {}",
            100.0 * self.rate,
            self.acceptance_length,
            percents(self.rates_per_position.iter().copied())
        )?;
        if let Some(histogram) = &self.histogram {
            let shares = histogram.iter().map(|steps| *steps as f64 / counts.steps as f64);
            writeln!(f, "  steps by accepted tokens 0..{}: {}", histogram.len() - 1, percents(shares))?;
        }
        if let Some(estimate) = &self.estimate {
            let basis = match estimate.basis {
                Basis::Clustered { requests } => format!("{requests} requests resampled whole"),
                Basis::DesignEffect(effect) => {
                    format!("no per-request counts; steps taken as correlated, design effect {effect}")
                }
            };
            writeln!(
                f,
                "  accepted per step {:.4}, interval {:.4} to {:.4} ({basis})",
                estimate.mean_accepted, estimate.low, estimate.high
            )?;
        }
        if let Some(tokens) = self.undrafted_tokens.filter(|tokens| *tokens > 0) {
            writeln!(f, "  {tokens} tokens came from steps without a draft")?;
        }
        let missing = counts.missing_drafts();
        if missing > 0 {
            writeln!(f, "  {missing} draft tokens fewer than K per step were proposed")?;
        }
        for identity in &self.broken_identities {
            writeln!(f, "  BROKEN IDENTITY: {identity}")?;
        }
        Ok(())
    }
}

fn percents(shares: impl Iterator<Item = f64>) -> String {
    shares.map(|share| format!("{:.1} %", 100.0 * share)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_says_counts_rates_interval_and_what_is_wrong() {
        let mut counts = AcceptanceCounts::from_histogram(&[61, 137, 802]);
        let emitted = Some(Emitted { requests: 10, completion_tokens: 2760 });
        let text = AcceptanceSummary::new("metrics", counts.clone(), None, emitted, 3.0, 0.01).to_string();
        for part in ["1000 steps", "rate 87.05 %", "length 2.741", "6.1 %, 13.7 %, 80.2 %", "9 tokens"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("design effect 3") && !text.contains("BROKEN"), "{text}");
        counts.accepted += 1;
        let text = AcceptanceSummary::new("metrics", counts, None, None, 3.0, 0.01).to_string();
        assert!(text.contains("BROKEN IDENTITY: accepted = Σ"), "{text}");
    }
}
