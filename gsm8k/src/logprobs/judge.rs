//! The verdict on two servers' log-probabilities: fault, clean, or inconclusive, each with its figure.

use std::collections::BTreeMap;

use serde::Serialize;

use super::pattern::{self, Beginning, Pattern};
use super::probe::{Position, ProbeResult, Route};
use super::reasons;
use crate::coverage::Sharding;
use crate::outcome::Outcome;
use crate::vocabulary::named;

/// A shift beyond this many noise widths is not noise.
const OUTLIER_WIDTHS: f64 = 30.0;
/// A shift beyond this many times the largest between two measurements of A is not its churn.
pub(super) const CHURN_FACTOR: f64 = 3.0;
/// The smallest limit, in log-odds: below, log-probabilities are rounded.
pub(super) const LEAST_LIMIT: f64 = 1e-3;
/// Median of the absolute value of a normal variable, in standard deviations.
const NORMAL_MEDIAN: f64 = 0.6745;
/// The tenth percentile of the absolute value of a normal variable, in standard deviations.
const NORMAL_TENTH: f64 = 0.1257;
/// How much wider noise may be at its usual positions than at its quietest tenth.
const QUIET_FACTOR: f64 = 10.0;
/// So many positions that can show noise are enough for a route to have its own width.
const LEAST_TELLING: usize = 20;
/// A needle's token counts as recalled from this probability on.
const RECALLED: f64 = 0.3;

/// What the comparison of log-probabilities concludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogprobVerdict {
    /// B computes something else than A.
    Fault,
    /// All differences are noise, and a lost shard would have shown.
    Clean,
    /// The probes could not have shown a fault, or nearly did.
    Inconclusive,
}

impl LogprobVerdict {
    /// Every verdict.
    pub const ALL: [LogprobVerdict; 3] =
        [LogprobVerdict::Fault, LogprobVerdict::Clean, LogprobVerdict::Inconclusive];

    /// The name used in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            LogprobVerdict::Fault => "fault",
            LogprobVerdict::Clean => "clean",
            LogprobVerdict::Inconclusive => "inconclusive",
        }
    }

    /// How a command with this verdict ends.
    pub fn outcome(self) -> Outcome {
        match self {
            LogprobVerdict::Fault => Outcome::Failed,
            LogprobVerdict::Clean => Outcome::Passed,
            LogprobVerdict::Inconclusive => Outcome::Inconclusive,
        }
    }
}

named!(LogprobVerdict, "verdict on log-probabilities");

/// What is known of one route.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RouteFigures {
    /// The route.
    pub route: Route,
    /// Positions compared.
    pub positions: usize,
    /// Width of the noise in log-odds: the median absolute shift, scaled to a normal's standard deviation.
    pub noise: f64,
    /// The limit in log-odds.
    pub limit: f64,
    /// Largest absolute shift in log-odds.
    pub largest: f64,
    /// Positions beyond the limit.
    pub beyond: usize,
    /// Mean shift (positive: B is less sure of the text), in log-odds.
    pub mean: f64,
    /// The mean in standard errors, probes counted as clusters.
    pub z: f64,
    /// Positions where the best token differs.
    pub flips: usize,
    /// A's largest margin among them.
    pub largest_flip_margin: f64,
}

/// The judgement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judgement {
    /// The verdict.
    pub verdict: LogprobVerdict,
    /// The reasons, the weightiest first.
    pub reasons: Vec<String>,
    /// Remarks that decide nothing.
    pub notes: Vec<String>,
    /// Figures by route.
    pub routes: Vec<RouteFigures>,
    /// Largest absolute shift between two measurements of A, in log-odds.
    pub largest_repeated: Option<f64>,
    /// What the bad positions have in common.
    pub patterns: Vec<Pattern>,
    /// Shortest context with a bad position.
    pub shortest_bad_context: Option<u64>,
    /// Context lengths at which prompts first went beyond the limit, with the number of prompts; what follows in the
    /// same prompt may be only the consequence.
    pub onsets: BTreeMap<u64, usize>,
    /// The step at which each prompt first goes beyond the limit, if always at the same place of a period.
    pub first_step: Option<String>,
    /// Where the differences between the servers begin, if they do so at once.
    pub beginning: Option<Beginning>,
    /// The worst position.
    pub worst: Option<Position>,
    /// Share of the needles' tokens that A recalls.
    pub recalled: f64,
    /// Ranks on which no recalled needle token lies.
    pub ranks_without_needle: Vec<u64>,
}

/// What a judgement depends on beside the measurements.
#[derive(Debug, Clone, Copy)]
pub struct JudgeInput {
    /// The sharding of B.
    pub sharding: Sharding,
    /// A shift in log-odds that is a fault whatever the noise.
    pub cap: f64,
    /// The largest width of noise, in log-odds, that is legitimate between A and B, if known.
    pub max_noise: Option<f64>,
}

/// Judges the results of all probes; `lengths` gives the planned context of each.
pub fn judge(results: &[ProbeResult], lengths: &[u64], input: JudgeInput) -> Judgement {
    let positions: Vec<Position> = results.iter().flat_map(|result| result.positions.clone()).collect();
    let repeated = results.iter().flat_map(|result| &result.repeated).map(|shift| shift.abs());
    let largest_repeated = repeated.reduce(f64::max);
    let routes: Vec<RouteFigures> =
        Route::ALL.iter().filter_map(|route| figures(*route, &positions, largest_repeated, input)).collect();
    let limit = |position: &Position| {
        routes
            .iter()
            .find(|figures| figures.route == position.route)
            .map_or(input.cap, |figures| figures.limit)
    };
    let is_bad: Vec<bool> = positions.iter().map(|position| position.shift.abs() > limit(position)).collect();
    let mut bad: Vec<&Position> =
        positions.iter().zip(&is_bad).filter(|(_, bad)| **bad).map(|(position, _)| position).collect();
    bad.sort_by(|left, right| right.shift.abs().total_cmp(&left.shift.abs()));
    let faults = reasons::faults(results, lengths, &routes, &bad, input);
    let (recalled, ranks_without_needle) = recall(&positions, input.sharding);
    let doubts =
        reasons::doubts(results, &routes, &bad, recalled, &ranks_without_needle, largest_repeated, input);
    let (verdict, reasons) = if !faults.is_empty() {
        (LogprobVerdict::Fault, faults)
    } else if !doubts.is_empty() {
        (LogprobVerdict::Inconclusive, doubts)
    } else {
        (LogprobVerdict::Clean, vec![reasons::clean_words(&routes)])
    };
    Judgement {
        verdict,
        reasons,
        notes: reasons::notes(&routes, largest_repeated, input),
        largest_repeated,
        patterns: pattern::explain(&positions, &is_bad, input.sharding),
        shortest_bad_context: bad.iter().map(|position| position.context_tokens).min(),
        onsets: onsets(&bad),
        first_step: pattern::first_step(&positions, &is_bad, input.sharding),
        beginning: pattern::beginning(&positions),
        worst: bad.first().map(|position| (*position).clone()),
        recalled,
        ranks_without_needle,
        routes,
    }
}

fn figures(
    route: Route,
    positions: &[Position],
    largest_repeated: Option<f64>,
    input: JudgeInput,
) -> Option<RouteFigures> {
    let mine: Vec<&Position> = positions.iter().filter(|position| position.route == route).collect();
    let largest = mine.iter().map(|position| position.shift.abs()).reduce(f64::max)?;
    let noise = noise_width(&mine, positions);
    let churn = CHURN_FACTOR * largest_repeated.unwrap_or(0.0);
    let limit = (OUTLIER_WIDTHS * noise).clamp(LEAST_LIMIT, input.cap).max(churn);
    let (mean, z) = clustered_mean(&mine);
    let margins: Vec<f64> = mine.iter().filter_map(|position| position.flip_margin).collect();
    Some(RouteFigures {
        route,
        positions: mine.len(),
        noise,
        limit,
        largest,
        beyond: mine.iter().filter(|position| position.shift.abs() > limit).count(),
        mean,
        z,
        flips: margins.len(),
        largest_flip_margin: margins.into_iter().fold(0.0, f64::max),
    })
}

/// The width of a route's noise from its positions that can show any; from all routes when it has few of those.
fn noise_width(mine: &[&Position], all: &[Position]) -> f64 {
    let sizes = |positions: &mut dyn Iterator<Item = &Position>| {
        let mut sizes: Vec<f64> = positions
            .filter(|position| !position.is_saturated())
            .map(|position| position.shift.abs())
            .collect();
        sizes.sort_by(f64::total_cmp);
        sizes
    };
    let own = sizes(&mut mine.iter().copied());
    if own.len() >= LEAST_TELLING {
        width_of(&own)
    } else {
        width_of(&own).max(width_of(&sizes(&mut all.iter())))
    }
}

/// The width of the noise in ordered absolute shifts: from their median, unless the smallest tenth says that most of
/// them are no noise at all. A fault that spoils the cache spoils every later position of its prompt.
fn width_of(sizes: &[f64]) -> f64 {
    let at = |share: f64| sizes.get((sizes.len() as f64 * share) as usize).copied().unwrap_or(0.0);
    (at(0.5) / NORMAL_MEDIAN).min(QUIET_FACTOR * at(0.1) / NORMAL_TENTH)
}

/// The mean shift and its distance from zero in standard errors of the probes' sums.
fn clustered_mean(positions: &[&Position]) -> (f64, f64) {
    let mut sums: BTreeMap<usize, f64> = Default::default();
    for position in positions {
        // a single lost token must not drown the mean of the others
        *sums.entry(position.probe).or_default() += position.shift.clamp(-1.0, 1.0);
    }
    let (n, clusters) = (positions.len() as f64, sums.len() as f64);
    let total: f64 = sums.values().sum();
    let center = total / clusters;
    let variance: f64 = sums.values().map(|sum| (sum - center).powi(2)).sum();
    let stderr = (variance * clusters / (clusters - 1.0)).sqrt() / n;
    let mean = total / n;
    (mean, if stderr > 0.0 { mean / stderr } else { 0.0 })
}

/// The shortest context beyond the limit of each prompt, counted.
fn onsets(bad: &[&Position]) -> BTreeMap<u64, usize> {
    let mut first: BTreeMap<usize, u64> = BTreeMap::new();
    for position in bad {
        let shortest = first.entry(position.probe).or_insert(position.context_tokens);
        *shortest = position.context_tokens.min(*shortest);
    }
    let mut counts = BTreeMap::new();
    for context in first.into_values() {
        *counts.entry(context).or_default() += 1;
    }
    counts
}

/// The share of needle tokens that A recalls, and the ranks that hold none of those.
fn recall(positions: &[Position], sharding: Sharding) -> (f64, Vec<u64>) {
    let mut covered = vec![false; sharding.dcp as usize];
    let (mut tokens, mut recalled) = (0u64, 0u64);
    for position in positions {
        let Some(source) = position.source else { continue };
        tokens += 1;
        if position.logprob_a > RECALLED.ln() {
            recalled += 1;
            covered[(source / sharding.interleave % sharding.dcp) as usize] = true;
        }
    }
    let missing = (0..sharding.dcp).filter(|rank| !covered[*rank as usize]).collect();
    (recalled as f64 / tokens.max(1) as f64, missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Failure, FailureKind};
    use crate::mersenne::PythonRandom;

    const INPUT: JudgeInput = JudgeInput {
        sharding: Sharding { dcp: 2, interleave: 1, block_size: Some(16) },
        cap: 1.0,
        max_noise: None,
    };
    const LENGTHS: [u64; 8] = [40, 40, 60, 60, 80, 80, 100, 100];

    /// Probes with normal noise of the given width, changed by `change`.
    fn results(width: f64, change: impl Fn(&mut Position)) -> Vec<ProbeResult> {
        let mut random = PythonRandom::new(11);
        let mut normal = move || {
            let radius = (-2.0 * (1.0 - random.uniform()).ln()).sqrt();
            radius * (std::f64::consts::TAU * random.uniform()).cos()
        };
        LENGTHS
            .iter()
            .enumerate()
            .map(|(probe, length)| {
                let positions = (1..length + 16)
                    .map(|context_tokens| {
                        let route = if context_tokens > *length { Route::Decode } else { Route::Prefill };
                        let source = (context_tokens + 10 > *length && route == Route::Prefill)
                            .then(|| context_tokens - length / 2);
                        let mut position = Position {
                            probe,
                            route,
                            context_tokens,
                            source,
                            logprob_a: -0.5,
                            logprob_b: -0.5,
                            shift: width * normal(),
                            flip_margin: None,
                        };
                        change(&mut position);
                        position
                    })
                    .collect();
                let repeated = vec![width, -width];
                ProbeResult { positions, repeated, lost: 0, b_failed: None, first_divergence: None }
            })
            .collect()
    }

    fn verdict(results: &[ProbeResult]) -> (LogprobVerdict, String) {
        let judgement = judge(results, &LENGTHS, INPUT);
        (judgement.verdict, judgement.reasons.join("; "))
    }

    #[test]
    fn noise_of_any_width_is_clean() {
        for width in [0.0, 1e-6, 1e-3, 0.03, 0.1] {
            let (verdict, reasons) = verdict(&results(width, |_| {}));
            assert_eq!(verdict, LogprobVerdict::Clean, "{width}: {reasons}");
        }
    }

    #[test]
    fn a_shift_is_found_at_the_scale_of_the_noise() {
        let late = |size: f64| {
            move |position: &mut Position| {
                if position.context_tokens >= 100 {
                    position.shift += size;
                }
            }
        };
        for (width, size) in [(1e-6, 0.01), (1e-3, 0.1), (0.03, 1.5)] {
            let judgement = judge(&results(width, late(size)), &LENGTHS, INPUT);
            assert_eq!(judgement.verdict, LogprobVerdict::Fault, "{width} {size}");
            assert_eq!(judgement.shortest_bad_context, Some(100));
            assert!(judgement.patterns[0].words.contains("at least 100 tokens"), "{:?}", judgement.patterns);
            assert!(judgement.worst.unwrap().context_tokens >= 100);
        }
    }

    #[test]
    fn a_fault_that_spoils_all_that_follows_is_dated_to_its_beginning() {
        // four fifths of all positions are spoilt, so that the median knows no noise any more
        let judgement = judge(
            &results(1e-5, |position| {
                if position.context_tokens >= 17 {
                    position.shift += 0.3;
                }
            }),
            &LENGTHS,
            INPUT,
        );
        assert_eq!(judgement.verdict, LogprobVerdict::Fault);
        assert_eq!(judgement.shortest_bad_context, Some(17), "{:?}", judgement.routes);
        assert_eq!(judgement.onsets, BTreeMap::from([(17, LENGTHS.len())]));
        assert_eq!(judgement.beginning.unwrap().context_tokens, 17);
    }

    #[test]
    fn noise_that_no_usual_arithmetic_makes_is_a_doubt() {
        let mut wide = results(0.2, |_| {});
        wide.iter_mut().for_each(|result| result.repeated = vec![0.0]);
        wide.iter_mut()
            .flat_map(|result| &mut result.positions)
            .for_each(|p| p.shift = p.shift.clamp(-0.9, 0.9));
        let (verdict, reasons) = verdict(&wide);
        assert_eq!(verdict, LogprobVerdict::Inconclusive, "{reasons}");
        assert!(reasons.contains("16-bit"), "{reasons}");
    }

    #[test]
    fn a_small_loss_everywhere_is_systematic() {
        let (verdict, reasons) = verdict(&results(0.03, |position| position.shift += 0.02));
        assert_eq!(verdict, LogprobVerdict::Fault, "{reasons}");
        assert!(reasons.contains("less sure of the text throughout"), "{reasons}");
    }

    #[test]
    fn more_noise_than_is_legitimate_is_a_fault_and_unexplained_noise_a_remark() {
        let mut results = results(0.002, |_| {});
        results.iter_mut().for_each(|result| result.repeated = vec![0.0]);
        let judgement = judge(&results, &LENGTHS, INPUT);
        assert_eq!(judgement.verdict, LogprobVerdict::Clean);
        assert!(judgement.notes[0].contains("--max-noise decides"), "{:?}", judgement.notes);
        let strict = judge(&results, &LENGTHS, JudgeInput { max_noise: Some(1e-4), ..INPUT });
        assert_eq!(strict.verdict, LogprobVerdict::Fault);
        assert!(strict.reasons[0].contains("at most 0.0001 is legitimate"), "{:?}", strict.reasons);
        // and for whoever wants to see it again: which lengths show it
        assert!(strict.reasons[0].contains("from 40 tokens on"), "{:?}", strict.reasons);
    }

    #[test]
    fn positions_that_cannot_show_noise_do_not_lower_the_limit() {
        // most decoded tokens are certain, as in text that a model copies
        let mut results = results(0.02, |_| {});
        for result in &mut results {
            for position in result.positions.iter_mut().filter(|p| p.route == Route::Decode).skip(2) {
                (position.logprob_a, position.logprob_b, position.shift) = (-1e-6, -1e-6, 0.0);
            }
        }
        let judgement = judge(&results, &LENGTHS, INPUT);
        assert_eq!(judgement.verdict, LogprobVerdict::Clean, "{:?}", judgement.reasons);
        assert!(judgement.routes[1].limit > 0.3, "{:?}", judgement.routes);
    }

    #[test]
    fn a_noisier_length_stands_out_only_if_all_its_prompts_do() {
        let louder = |probes: std::ops::Range<usize>| {
            let results = results(0.001, move |position| {
                if probes.contains(&position.probe) {
                    position.shift *= 9.0;
                }
            });
            verdict(&results)
        };
        let (verdict, reasons) = louder(4..6);
        assert_eq!(verdict, LogprobVerdict::Fault, "{reasons}");
        assert!(reasons.contains("prompts of 80 tokens"), "{reasons}");
        assert!(!louder(4..5).1.contains("prompts of"));
    }

    #[test]
    fn a_flip_at_a_large_margin_is_a_fault_and_at_a_small_one_is_churn() {
        let flip = |margin: f64| {
            verdict(&results(0.01, move |position| {
                if position.context_tokens == 50 && position.route == Route::Prefill {
                    position.flip_margin = Some(margin);
                }
            }))
        };
        assert_eq!(flip(0.02).0, LogprobVerdict::Clean);
        let (verdict, reasons) = flip(2.5);
        assert_eq!(verdict, LogprobVerdict::Fault);
        assert!(reasons.contains("preferred it by 2.5"), "{reasons}");
    }

    #[test]
    fn a_single_outlier_just_beyond_the_limit_is_a_doubt_and_a_gross_one_a_fault() {
        let outlier = |size: f64| {
            let mut results = results(1e-3, |_| {});
            results[2].positions[30].shift = size;
            verdict(&results)
        };
        assert_eq!(outlier(0.05).0, LogprobVerdict::Inconclusive);
        assert!(outlier(0.05).1.contains("another --seed"));
        assert_eq!(outlier(3.0).0, LogprobVerdict::Fault);
    }

    #[test]
    fn what_could_not_have_been_seen_is_no_clean_result() {
        let unsure = results(0.01, |position| position.logprob_a = -4.0);
        assert!(verdict(&unsure).1.contains("no needle on rank 0, 1 was recalled"));
        let mut apart = results(0.01, |_| {});
        apart.iter_mut().for_each(|result| {
            result.lost = 15;
            result.positions.retain(|position| position.route == Route::Prefill);
        });
        let (verdict_apart, reasons) = verdict(&apart);
        assert_eq!(verdict_apart, LogprobVerdict::Inconclusive);
        assert!(reasons.contains("no decode position"), "{reasons}");
        let mut restless = results(0.01, |_| {});
        restless[0].repeated.push(0.8);
        assert!(verdict(&restless).1.contains("too noisy a yardstick"));
    }

    #[test]
    fn a_failure_of_b_alone_is_a_fault() {
        let mut crashing = results(0.01, |_| {});
        let detail = "engine dead".to_owned();
        crashing[6].b_failed =
            Some(Failure { kind: FailureKind::ServerError, status: Some(500), detail, attempts: 3 });
        let (verdict, reasons) = verdict(&crashing);
        assert_eq!(verdict, LogprobVerdict::Fault);
        assert!(reasons.contains("first at 100 tokens") && reasons.contains("engine dead"), "{reasons}");
    }

    #[test]
    fn verdicts_are_read_back_and_end_differently() {
        let codes: Vec<u8> =
            LogprobVerdict::ALL.iter().map(|verdict| verdict.outcome().exit_code()).collect();
        assert_eq!(codes, [1, 0, 3]);
        for verdict in LogprobVerdict::ALL {
            assert_eq!(verdict.name().parse::<LogprobVerdict>(), Ok(verdict));
        }
    }
}
