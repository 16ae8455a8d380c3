//! Self-test: what verdicts rest on is corrupted on purpose, and the check that it belongs to must fail and name the place.
//!
//! Real data and the real judge: an engine that is wrong in one element on one seed of a hundred, a stored verdict that was
//! turned round, golden vectors with one bit flipped, an oracle with one wrong bound. A corruption that nobody notices
//! means that passing proves nothing.

mod canary;
mod oracle;
mod stored;

use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;

/// A corruption and what must notice it.
struct Corruption {
    name: &'static str,
    corrupts: &'static str,
    must_notice: &'static str,
    try_it: fn() -> Result<String, String>,
}

/// What became of a corruption.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Name of the corruption.
    pub name: &'static str,
    /// What was corrupted.
    pub corrupts: &'static str,
    /// The check that must notice it.
    pub must_notice: &'static str,
    /// Whether it did, and did so by name.
    pub noticed: bool,
    /// What was seen.
    pub seen: String,
    /// Seconds that it took.
    pub elapsed_s: f64,
}

const CORRUPTIONS: &[Corruption] = &[
    Corruption {
        name: "canary-output",
        corrupts: "one element of the output, just outside its interval, on one seed of a hundred",
        must_notice: "decode.output",
        try_it: canary::output,
    },
    Corruption {
        name: "canary-lse",
        corrupts: "one merged LSE, just outside its interval, on one seed of a hundred",
        must_notice: "decode.lse",
        try_it: canary::lse,
    },
    Corruption {
        name: "canary-row-length",
        corrupts: "one row length, by one token, on one seed of a hundred",
        must_notice: "decode.row-lengths",
        try_it: canary::row_length,
    },
    Corruption {
        name: "canary-query",
        corrupts: "the last bit of one gathered query element, on one seed of a hundred",
        must_notice: "decode.query",
        try_it: canary::query,
    },
    Corruption {
        name: "canary-cache",
        corrupts: "the last bit of one stored code, on one seed of a hundred",
        must_notice: "write.round-trip",
        try_it: canary::cache,
    },
    Corruption {
        name: "canary-merge",
        corrupts: "one element of a merged output, just outside its interval, on one seed of a hundred",
        must_notice: "merge.output",
        try_it: canary::merge,
    },
    Corruption {
        name: "golden-bit",
        corrupts: "one bit of each golden file",
        must_notice: "golden verify",
        try_it: stored::golden_bit,
    },
    Corruption {
        name: "golden-bit-and-manifest",
        corrupts: "one bit of each golden file, and its hash in the manifest to match",
        must_notice: "golden verify",
        try_it: stored::golden_bit_and_manifest,
    },
    Corruption {
        name: "inverted-failure",
        corrupts: "the stored verdict of a failed case: pass",
        must_notice: "judge",
        try_it: stored::failure_turned_round,
    },
    Corruption {
        name: "inverted-pass",
        corrupts: "the stored verdict of a passed case: fail",
        must_notice: "judge",
        try_it: stored::pass_turned_round,
    },
    Corruption {
        name: "stored-answer",
        corrupts: "one bit of a stored output of a passed case",
        must_notice: "judge",
        try_it: stored::answer_changed,
    },
    Corruption {
        name: "bound-too-narrow",
        corrupts: "the interval of one output element of the oracle: beside the right value",
        must_notice: "decode.output",
        try_it: oracle::too_narrow,
    },
    Corruption {
        name: "lse-bound-too-narrow",
        corrupts: "the interval of one LSE of the oracle: beside the right value",
        must_notice: "decode.lse",
        try_it: oracle::lse_too_narrow,
    },
    Corruption {
        name: "bound-too-wide",
        corrupts: "the interval of one output element of the oracle: everything",
        must_notice: "canary-output",
        try_it: oracle::too_wide,
    },
    Corruption {
        name: "bound-not-a-number",
        corrupts: "the interval of one output element of the oracle: NaN",
        must_notice: "decode.output",
        try_it: oracle::not_a_number,
    },
];

/// Tries every corruption, in parallel; outcomes in a fixed order.
pub fn run_all() -> Vec<Outcome> {
    CORRUPTIONS
        .par_iter()
        .with_max_len(1)
        .map(|corruption| {
            let started = Instant::now();
            let outcome = (corruption.try_it)();
            Outcome {
                name: corruption.name,
                corrupts: corruption.corrupts,
                must_notice: corruption.must_notice,
                noticed: outcome.is_ok(),
                seen: outcome.unwrap_or_else(|what| what),
                elapsed_s: started.elapsed().as_secs_f64(),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_corruption_is_noticed_by_the_check_that_it_belongs_to() {
        for outcome in run_all() {
            assert!(outcome.noticed, "{}: {}", outcome.name, outcome.seen);
        }
    }

    #[test]
    fn corruptions_have_names_of_their_own_and_name_checks_that_exist() {
        let mut names: Vec<&str> = CORRUPTIONS.iter().map(|corruption| corruption.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CORRUPTIONS.len());
        for corruption in CORRUPTIONS {
            let check = corruption.must_notice;
            let known = crate::properties::find(check).is_some() || names.contains(&check);
            assert!(known || ["judge", "golden verify"].contains(&check), "{check}");
        }
    }
}
