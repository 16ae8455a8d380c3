//! Where acceptance counts come from: Prometheus metrics, vLLM's and ATOM's log lines, per-request histograms.

use std::sync::LazyLock;

use regex::Regex;

use super::AcceptanceCounts;
use crate::samples::Answer;
use crate::server_metrics::{self, Sample};

/// Texts that give away a mode in which the server accepts drafts by decree: such a run says nothing about accuracy.
const FORCED_MODES: [&str; 7] = [
    "forced_acceptance",
    "forced-acceptance",
    "synthetic_acceptance",
    "synthetic-acceptance",
    "\"rejection_sample_method\":\"synthetic\"",
    "rejection_sample_method=synthetic",
    "simulate_acc",
];

/// The counters of vLLM's metrics, added up over engines; `None` without speculative decoding.
///
/// Names: `vllm:spec_decode_num_drafts`, `…_num_draft_tokens`, `…_num_accepted_tokens` and
/// `…_num_accepted_tokens_per_pos{position}`, each with `_total`.
pub fn from_metrics(text: &str) -> Option<AcceptanceCounts> {
    let samples = server_metrics::parse(text);
    let total = |name: &str| {
        let (plain, suffixed) = (format!("vllm:{name}"), format!("vllm:{name}_total"));
        server_metrics::sum(&samples, &[&plain, &suffixed]).map(|value| value as u64)
    };
    let steps = total("spec_decode_num_drafts")?;
    let mut per_position = Vec::new();
    for sample in samples.iter().filter(|sample| is_per_position(sample)) {
        let position: usize = sample.labels.get("position")?.parse().ok()?;
        if per_position.len() <= position {
            per_position.resize(position + 1, 0);
        }
        per_position[position] += sample.value as u64;
    }
    Some(AcceptanceCounts {
        steps,
        drafted: total("spec_decode_num_draft_tokens")?,
        accepted: total("spec_decode_num_accepted_tokens")?,
        accepted_per_position: per_position,
        rounding_tokens: 0,
    })
}

/// Counts out of a server's log: the sum of vLLM's windows, or ATOM's running totals from the first window of the
/// text to its last.
///
/// Both round: per-position counts are accurate to the printed digits times the steps. `None` when the log has no
/// such lines. What a server does after its last full window is missing, which vLLM's metrics would have.
pub fn from_log(text: &str) -> Option<AcceptanceCounts> {
    let mut windows: Option<AcceptanceCounts> = None;
    let mut first_window: Option<AcceptanceCounts> = None;
    let mut totals: Option<(AcceptanceCounts, AcceptanceCounts)> = None;
    for line in text.lines() {
        if let Some(window) = vllm_window(line) {
            windows.get_or_insert_default().add(&window);
        } else if let Some((counts, is_interval)) = atom_line(line) {
            if is_interval {
                first_window.get_or_insert(counts);
            } else {
                let first = totals.take().map_or_else(|| counts.clone(), |(first, _)| first);
                totals = Some((first, counts));
            }
        }
    }
    windows.or_else(|| {
        let (first, last) = totals?;
        let before = first.since(&first_window.unwrap_or_default()).unwrap_or_default();
        last.since(&before)
    })
}

/// Counts and per-request histograms out of the answers, when every answered request carries them.
pub fn from_answers(answers: &[Answer]) -> Option<(AcceptanceCounts, Vec<Vec<u64>>)> {
    let mut counts = AcceptanceCounts::default();
    let mut histograms = Vec::new();
    for answer in answers.iter().filter(|answer| answer.error.is_none()) {
        let acceptance = answer.acceptance.as_ref()?;
        let mut own = AcceptanceCounts::from_histogram(&acceptance.acceptance_histogram);
        own.drafted = acceptance.num_draft_tokens.unwrap_or(own.drafted);
        counts.add(&own);
        histograms.push(acceptance.acceptance_histogram.clone());
    }
    (counts.steps > 0).then_some((counts, histograms))
}

/// The forced-acceptance mode that a server's flags or log mention, if any.
pub fn forced_mode(text: &str) -> Option<&'static str> {
    let text: String = text.to_lowercase().chars().filter(|character| *character != ' ').collect();
    FORCED_MODES.into_iter().find(|mode| text.contains(mode))
}

fn is_per_position(sample: &Sample) -> bool {
    sample.name.strip_suffix("_total").unwrap_or(&sample.name)
        == "vllm:spec_decode_num_accepted_tokens_per_pos"
}

/// A line `SpecDecoding metrics: … Accepted: N tokens, Drafted: N tokens, Per-position acceptance rate: r, r, …`.
fn vllm_window(line: &str) -> Option<AcceptanceCounts> {
    static PATTERN: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(
            r"SpecDecoding metrics:.*Accepted: (\d+) tokens, Drafted: (\d+) tokens, Per-position acceptance rate: ([0-9., ]+?),? Avg",
        )
        .expect("a fixed pattern is valid")
    });
    let found = PATTERN.captures(line)?;
    let accepted = found[1].parse().ok()?;
    let drafted: u64 = found[2].parse().ok()?;
    let rates: Vec<f64> = found[3].split(',').map(|rate| rate.trim().parse().ok()).collect::<Option<_>>()?;
    let steps = drafted / rates.len() as u64;
    Some(AcceptanceCounts {
        steps,
        drafted,
        accepted,
        accepted_per_position: rates.iter().map(|rate| (rate * steps as f64).round() as u64).collect(),
        rounding_tokens: (0.0005 * (steps * rates.len() as u64) as f64).ceil() as u64 + rates.len() as u64,
    })
}

/// A line `[MTP Stats …] … Accepted/Total Draft tokens: a/d, … distribution: {0: '6.10%', …}`; true for one of an
/// interval instead of the whole time.
fn atom_line(line: &str) -> Option<(AcceptanceCounts, bool)> {
    static PATTERN: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\[MTP Stats( Interval)?\s*\].*Draft tokens: (\d+)/(\d+),.*distribution: \{(.*)\}")
            .expect("a fixed pattern is valid")
    });
    let found = PATTERN.captures(line)?;
    let accepted = found[2].parse().ok()?;
    let drafted: u64 = found[3].parse().ok()?;
    let shares: Vec<f64> = found[4]
        .split(',')
        .map(|entry| {
            let (_, share) = entry.split_once(':')?;
            share.trim().trim_matches('\'').strip_suffix('%')?.parse().ok()
        })
        .collect::<Option<_>>()?;
    let positions = shares.len().checked_sub(1).filter(|positions| *positions > 0)?;
    let steps = drafted / positions as u64;
    let at_least = |position: usize| {
        let share: f64 = shares[position + 1..].iter().sum();
        (share / 100.0 * steps as f64).round() as u64
    };
    let counts = AcceptanceCounts {
        steps,
        drafted,
        accepted,
        accepted_per_position: (0..positions).map(at_least).collect(),
        rounding_tokens: (0.00005 * (steps * (positions * shares.len()) as u64) as f64).ceil() as u64
            + positions as u64,
    };
    Some((counts, found.get(1).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = "\
# TYPE vllm:spec_decode_num_drafts counter\n\
vllm:spec_decode_num_drafts_total{engine=\"0\",model_name=\"m\"} 600.0\n\
vllm:spec_decode_num_drafts_total{engine=\"1\",model_name=\"m\"} 400.0\n\
vllm:spec_decode_num_drafts_created{engine=\"0\",model_name=\"m\"} 1.7e+09\n\
vllm:spec_decode_num_draft_tokens_total{engine=\"0\",model_name=\"m\"} 2000.0\n\
vllm:spec_decode_num_accepted_tokens_total{engine=\"0\",model_name=\"m\"} 1741.0\n\
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",model_name=\"m\",position=\"0\"} 939.0\n\
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",model_name=\"m\",position=\"1\"} 802.0\n";

    #[test]
    fn vllms_counters_are_added_over_engines() {
        let counts = from_metrics(METRICS).unwrap();
        assert_eq!(counts, AcceptanceCounts::from_histogram(&[61, 137, 802]));
        assert_eq!(from_metrics("vllm:num_requests_running 1\n"), None);
    }

    #[test]
    fn vllms_log_windows_are_summed() {
        let line = "INFO 11-29 15:00:02 [metrics.py:99] SpecDecoding metrics: Mean acceptance length: 2.74, Accepted \
                    throughput: 174.10 tokens/s, Drafted throughput: 200.00 tokens/s, Accepted: 1741 tokens, Drafted: \
                    2000 tokens, Per-position acceptance rate: 0.939, 0.802, Avg Draft acceptance rate: 87.0%";
        let counts = from_log(&format!("{line}\nother\n{line}\n")).unwrap();
        assert_eq!((counts.steps, counts.accepted), (2000, 3482));
        assert_eq!(counts.accepted_per_position, [1878, 1604]);
        assert!(counts.broken_identities(None).is_empty());
    }

    #[test]
    fn atoms_running_totals_are_taken_from_the_first_window_of_the_text() {
        let line = |label: &str, accepted: u64, drafted: u64| {
            format!(
                "[MTP Stats{label}] Average toks/fwd: 2.74, Accepted/Total Draft tokens: {accepted}/{drafted}, \
                 Acceptance rate: 87.05%, Accepted tokens distribution: {{0: '6.10%', 1: '13.70%', 2: '80.20%'}}"
            )
        };
        // the server had done 4000 steps before; the text begins with its fifth window of 1000
        let log = [
            line(" Interval", 1741, 2000),
            line("         ", 8705, 10_000),
            line(" Interval", 1741, 2000),
            line("         ", 10_446, 12_000),
        ];
        let counts = from_log(&log.join("\n")).unwrap();
        assert_eq!((counts.steps, counts.drafted, counts.accepted), (2000, 4000, 3482));
        assert_eq!(counts.histogram(), Some(vec![122, 274, 1604]));
        assert!(counts.broken_identities(None).is_empty());
        assert_eq!(from_log("nothing of the kind"), None);
    }

    #[test]
    fn modes_that_force_acceptance_are_recognised_in_flags_of_both_engines() {
        assert!(forced_mode("--speculative-config '{\"rejection_sample_method\": \"synthetic\"}'").is_some());
        assert!(forced_mode("--forced-acceptance-length 2.6").is_some());
        assert_eq!(forced_mode("--speculative-config '{\"rejection_sample_method\": \"block\"}'"), None);
    }
}
