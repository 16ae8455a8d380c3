//! Acceptance of speculative decoding: counts, the identities that they must fulfil, and their comparison.
//!
//! A broken draft leaves accuracy alone and only costs acceptance, so accuracy has to be gated together with it.

pub mod command;
pub mod interval;
pub mod sources;
pub mod summary;

use serde::{Deserialize, Serialize};

/// Whole-run counts of draft–verify steps.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AcceptanceCounts {
    /// Draft–verify steps, one per request and step.
    pub steps: u64,
    /// Draft tokens proposed.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Steps that accepted at least the draft token of each position, first position first.
    pub accepted_per_position: Vec<u64>,
    /// How far `Σ accepted_per_position` may be off, in tokens, because a log prints rounded shares; 0 for counters.
    #[serde(default)]
    pub rounding_tokens: u64,
}

/// Tokens that a run received, against which the counts can be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Emitted {
    /// Requests answered.
    pub requests: u64,
    /// Tokens generated in all answers.
    pub completion_tokens: u64,
}

impl AcceptanceCounts {
    /// Counts from a histogram of steps by accepted tokens, index 0 being steps that accepted none.
    pub fn from_histogram(histogram: &[u64]) -> Self {
        let positions = histogram.len().saturating_sub(1);
        let at_least = |position: usize| histogram[position + 1..].iter().sum();
        let steps: u64 = histogram.iter().sum();
        Self {
            steps,
            drafted: steps * positions as u64,
            accepted: histogram.iter().enumerate().map(|(count, steps)| count as u64 * steps).sum(),
            accepted_per_position: (0..positions).map(at_least).collect(),
            rounding_tokens: 0,
        }
    }

    /// Draft tokens per step, `K`: the number of positions.
    pub fn draft_length(&self) -> usize {
        self.accepted_per_position.len()
    }

    /// Steps by accepted tokens: `h_k = at_least(k) − at_least(k+1)`, with `at_least(0)` all steps.
    ///
    /// `None` when the per-position counts rise and no histogram can have made them.
    pub fn histogram(&self) -> Option<Vec<u64>> {
        let mut at_least = vec![self.steps];
        at_least.extend(&self.accepted_per_position);
        at_least.push(0);
        at_least.windows(2).map(|pair| pair[0].checked_sub(pair[1])).collect()
    }

    /// Accepted over drafted tokens, in `0..=1`.
    pub fn rate(&self) -> f64 {
        self.accepted as f64 / self.drafted as f64
    }

    /// Accepted draft tokens per step.
    pub fn mean_accepted(&self) -> f64 {
        self.accepted as f64 / self.steps as f64
    }

    /// Tokens per step including the one that verification adds: `1 + accepted/steps`.
    pub fn acceptance_length(&self) -> f64 {
        1.0 + self.mean_accepted()
    }

    /// The share of steps that accepted each position.
    pub fn rates_per_position(&self) -> Vec<f64> {
        self.accepted_per_position.iter().map(|count| *count as f64 / self.steps as f64).collect()
    }

    /// Adds the counts of another session.
    pub fn add(&mut self, other: &AcceptanceCounts) {
        self.steps += other.steps;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        let positions = self.accepted_per_position.len().max(other.accepted_per_position.len());
        self.accepted_per_position.resize(positions, 0);
        for (sum, count) in self.accepted_per_position.iter_mut().zip(&other.accepted_per_position) {
            *sum += count;
        }
        self.rounding_tokens += other.rounding_tokens;
    }

    /// These counts less those of an earlier moment; `None` when a counter ran backwards (the server restarted).
    pub fn since(&self, earlier: &AcceptanceCounts) -> Option<Self> {
        let before = |position: usize| earlier.accepted_per_position.get(position).copied().unwrap_or(0);
        Some(Self {
            steps: self.steps.checked_sub(earlier.steps)?,
            drafted: self.drafted.checked_sub(earlier.drafted)?,
            accepted: self.accepted.checked_sub(earlier.accepted)?,
            accepted_per_position: self
                .accepted_per_position
                .iter()
                .enumerate()
                .map(|(position, count)| count.checked_sub(before(position)))
                .collect::<Option<_>>()?,
            rounding_tokens: self.rounding_tokens + earlier.rounding_tokens,
        })
    }

    /// Every identity that the counts break, in words; empty when all hold.
    ///
    /// With `emitted`, the tokens received must be the first token of each request, one per step and the accepted
    /// ones, less at most `K` cut from the last step of each request. More tokens than that mean steps without a
    /// draft, which is legal and reported by [`AcceptanceCounts::undrafted_tokens`].
    pub fn broken_identities(&self, emitted: Option<Emitted>) -> Vec<String> {
        let mut broken = Vec::new();
        let positions = self.draft_length() as u64;
        let per_position: u64 = self.accepted_per_position.iter().sum();
        let mut require = |holds: bool, words: String| {
            if !holds {
                broken.push(words);
            }
        };
        require(
            per_position.abs_diff(self.accepted) <= self.rounding_tokens,
            format!("accepted = Σ accepted per position: {} against {per_position}", self.accepted),
        );
        require(
            self.drafted <= positions * self.steps,
            format!("drafted ≤ K·steps: {} against {positions}·{}", self.drafted, self.steps),
        );
        require(
            self.accepted <= self.drafted,
            format!("accepted ≤ drafted: {} against {}", self.accepted, self.drafted),
        );
        require(
            self.histogram().is_some(),
            format!(
                "accepted per position never rises: {:?} of {} steps",
                self.accepted_per_position, self.steps
            ),
        );
        if let Some(emitted) = emitted {
            let counted = self.steps + self.accepted + emitted.requests;
            let most_cut = positions * emitted.requests;
            require(
                emitted.completion_tokens + most_cut >= counted,
                format!(
                    "tokens received = steps + accepted + first tokens − cut tails: {} received, {counted} counted, \
                     at most {most_cut} cut; the counters hold requests that are not of this run",
                    emitted.completion_tokens
                ),
            );
        }
        broken
    }

    /// Tokens received beyond what the counted steps explain: each is a step without a draft.
    pub fn undrafted_tokens(&self, emitted: Emitted) -> u64 {
        emitted.completion_tokens.saturating_sub(self.steps + self.accepted + emitted.requests)
    }

    /// Steps that proposed fewer than `K` tokens made `drafted` smaller than `K·steps` by this many tokens.
    pub fn missing_drafts(&self) -> u64 {
        (self.draft_length() as u64 * self.steps).saturating_sub(self.drafted)
    }
}

/// The range of acceptance rates that a histogram printed in rounded percent can stand for.
///
/// `half_unit` is half a unit of the last printed digit, in percent (0.05 for one decimal). `None` when no shares
/// within the rounding add up to 100 %.
pub fn feasible_rates(percent: &[f64], half_unit: f64) -> Option<(f64, f64)> {
    let low: Vec<f64> = percent.iter().map(|share| (share - half_unit).max(0.0)).collect();
    let missing = 100.0 - low.iter().sum::<f64>();
    if missing < -1e-9 || missing > 2.0 * half_unit * percent.len() as f64 + 1e-9 {
        return None;
    }
    // The missing share goes to the fewest accepted tokens for the lowest rate, to the most for the highest.
    let mean = |order: &mut dyn Iterator<Item = usize>| {
        let mut shares = low.clone();
        let mut left = missing;
        for index in order {
            let given = left.min(percent[index] + half_unit - low[index]);
            shares[index] += given;
            left -= given;
        }
        shares.iter().enumerate().map(|(count, share)| count as f64 * share / 100.0).sum::<f64>()
    };
    let drafts = (percent.len() - 1) as f64;
    Some((mean(&mut (0..percent.len())) / drafts, mean(&mut (0..percent.len()).rev()) / drafts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> AcceptanceCounts {
        AcceptanceCounts::from_histogram(&[61, 137, 802])
    }

    #[test]
    fn a_histogram_and_its_counts_say_the_same() {
        let counts = counts();
        assert_eq!((counts.steps, counts.drafted, counts.accepted), (1000, 2000, 1741));
        assert_eq!(counts.accepted_per_position, [939, 802]);
        assert_eq!(counts.histogram(), Some(vec![61, 137, 802]));
        assert!((counts.acceptance_length() - 2.741).abs() < 1e-12);
        assert!((counts.rate() - 0.8705).abs() < 1e-12);
        assert_eq!(counts.rates_per_position(), [0.939, 0.802]);
        assert!(counts.broken_identities(None).is_empty());
    }

    #[test]
    fn each_broken_identity_is_named() {
        let broken = |change: fn(&mut AcceptanceCounts)| {
            let mut counts = counts();
            change(&mut counts);
            counts.broken_identities(None).join("; ")
        };
        assert!(broken(|counts| counts.accepted += 1).contains("Σ accepted per position"));
        assert!(broken(|counts| counts.drafted = 2001).contains("drafted ≤ K·steps"));
        assert!(broken(|counts| counts.drafted = 1700).contains("accepted ≤ drafted"));
        assert!(broken(|counts| counts.accepted_per_position = vec![800, 941]).contains("never rises"));
    }

    #[test]
    fn received_tokens_bound_the_counted_ones() {
        let counts = counts();
        // 10 requests: 10 first tokens + 1000 steps + 1741 accepted, each request's last step cut by up to two
        let emitted = |completion_tokens| Some(Emitted { requests: 10, completion_tokens });
        assert!(counts.broken_identities(emitted(2751)).is_empty());
        assert!(counts.broken_identities(emitted(2731)).is_empty());
        assert!(counts.broken_identities(emitted(2730))[0].contains("not of this run"));
        assert_eq!(counts.undrafted_tokens(emitted(2760).unwrap()), 9);
    }

    #[test]
    fn sessions_add_up_and_a_restarted_server_is_noticed() {
        let mut sum = counts();
        sum.add(&counts());
        assert_eq!(sum.since(&counts()), Some(counts()));
        assert_eq!(counts().since(&sum), None);
        assert_eq!(counts().since(&AcceptanceCounts::default()), Some(counts()));
    }

    #[test]
    fn the_published_histogram_allows_the_published_rate_and_not_a_neighbouring_one() {
        // ATOM's guide: {0: 6.1 %, 1: 13.7 %, 2: 80.3 %}, "87.1 %", "1.74 of 2": they add up to 100.1 %
        let (low, high) = feasible_rates(&[6.1, 13.7, 80.3], 0.05).unwrap();
        assert_eq!(format!("{:.4} {:.4}", 2.0 * low, 2.0 * high), "1.7415 1.7425");
        assert!(low < 0.8710 && 0.8710 < high);
        // 87.06 %, quoted elsewhere for the same score, is outside
        assert!(low > 0.87065);
        assert_eq!(feasible_rates(&[6.1, 13.7, 80.5], 0.05), None);
    }
}
