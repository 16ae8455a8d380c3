//! Diagnosis: which known fault, put into the embedded engine alone, gives the wrong answers that were seen.
//!
//! A failed case is stored with every question that its engine was asked and every answer. The same questions are put to the
//! embedded engine with one fault at a time. A fault is a candidate when it reproduces the wrong outputs: to the last bit, or
//! each element within the width of its certified interval, which is how far two conforming engines may lie apart. Faults that
//! change nothing on a case reproduce nothing that is wrong, so they are never candidates; a case that passes has no
//! wrong answer, so nothing is ever said of one.

mod blind;
mod budget;
mod comparison;
mod evidence;
mod fit;
mod order;
mod replay;
mod residue;
mod stages;
mod stored;
mod tell_apart;
mod widths;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use shardcheck_cpu::{Fault, faults};

pub use blind::{Disguise, Trial, blind};
use budget::Budget;
pub use evidence::Evidence;
use fit::{Fit, fits_of, group};
use order::{likely_first, names_any_of};
pub use stored::{MOST_CASES, evidence_of};

use crate::quiet::Quiet;

/// Most candidates that a diagnosis keeps.
const MOST_CANDIDATES: usize = 5;
/// How long a case that tells candidates apart is looked for.
const MOST_TIME_BETWEEN: Duration = Duration::from_secs(2);

/// A known fault that explains what was seen, with those that do the same on these cases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Fault name.
    pub fault: String,
    /// What is wrong, in one line.
    pub title: String,
    /// Kind of mistake.
    pub class: String,
    /// Public bugs of this kind.
    pub bugs: Vec<String>,
    /// Other faults whose answers on all these cases are the same to the last bit: they cannot be told apart here.
    pub same_effect: Vec<String>,
    /// Cases that it explains.
    pub explains: usize,
    /// Whether every answer of these cases comes out to the last bit.
    pub exact: bool,
    /// Parts of answers beside the wrong ones in which it differs from what was seen.
    pub beside: usize,
    /// Whether the kind of mistake goes with the first stage that diverges.
    pub stage_agrees: bool,
    /// Mean square of |seen − mutant| over the width of each wrong element: 0 for equal bits.
    pub distance: f64,
}

/// What is known of the cause of some failed cases of one run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Failed cases that it rests on, by id.
    pub cases: Vec<String>,
    /// Best explanations, best first. Empty: no known fault fits, as far as they were tried.
    pub candidates: Vec<Candidate>,
    /// Faults that explain at least one case.
    pub fitting: usize,
    /// Faults that explain none of these cases; where another explains them all, those that do not explain the smallest.
    pub ruled_out: usize,
    /// Faults that the time did not suffice for.
    pub untried: usize,
    /// Those of them that name a property which was judged on these cases.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub likely_untried: usize,
    /// Seconds that would have sufficed for all, by what those that were tried took; 0 where all were tried.
    #[serde(default, skip_serializing_if = "is_zero_u64")]
    pub needed_s: u64,
    /// Cases in which the engine ended (a crash, a lost device) instead of answering.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ended: usize,
    /// A case that would tell the first candidates apart, by id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tell_apart: Option<String>,
    /// Seconds that it took.
    pub elapsed_s: f64,
}

/// Diagnoses failed cases of one run together: a fault must explain them all to come first.
///
/// `within` is processor time of each thread; the outcome depends on it only when it is used up. No evidence, no diagnosis.
pub fn diagnose(evidence: &[Evidence], within: Duration) -> Option<Diagnosis> {
    diagnose_with(evidence, &Budget::of(within))
}

fn diagnose_with(evidence: &[Evidence], budget: &Budget) -> Option<Diagnosis> {
    let _quiet = Quiet::new();
    let mut telling: Vec<&Evidence> = evidence.iter().filter(|evidence| evidence.is_telling()).collect();
    // small cases rule out as much as large ones, in less time
    telling.sort_by_key(|evidence| crate::shrink::work(&evidence.case));
    if telling.is_empty() {
        return None;
    }
    let fits = fits_of(likely_first(&telling), &telling, budget);
    let is_whole = fits.iter().any(Fit::explains_all);
    let left: Vec<&Fit> = fits.iter().filter(|fit| !fit.is_decided(is_whole)).collect();
    let untried = left.len();
    let likely_untried = left.iter().filter(|fit| names_any_of(fit.fault, &telling)).count();
    let tried = fits.iter().filter(|fit| fit.is_tried(&telling)).count();
    let needed_s = needed(budget.spent(), tried, left.len());
    let fits: Vec<Fit> = fits.into_iter().filter(|fit| fit.explains() > 0).collect();
    let fitting = fits.len();
    let groups = group(fits, &telling);
    let tell_apart = groups.first().filter(|_| !budget.is_up()).and_then(|group| {
        let tied: Vec<&'static Fault> = group.iter().map(|fit| fit.fault).collect();
        tell_apart::case_between(&tied, &telling[0].case, MOST_TIME_BETWEEN)
    });
    Some(Diagnosis {
        cases: telling.iter().map(|evidence| evidence.id.clone()).collect(),
        candidates: groups.iter().take(MOST_CANDIDATES).map(|group| candidate(group, &telling)).collect(),
        fitting,
        ruled_out: faults().len() - fitting - untried,
        untried,
        likely_untried,
        needed_s,
        ended: telling.iter().filter(|evidence| evidence.ended()).count(),
        tell_apart,
        elapsed_s: budget.elapsed().as_secs_f64(),
    })
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

fn is_zero_u64(count: &u64) -> bool {
    *count == 0
}

/// Seconds for each thread that suffice for `left` faults behind `tried` ones that took `spent`: twice what they took each, rounded up to tens,
/// since what is left is tried in the same time at most and a machine has slower moments.
fn needed(spent: Duration, tried: usize, left: usize) -> u64 {
    if left == 0 {
        return 0;
    }
    let each = spent.as_secs_f64() / tried.max(1) as f64;
    let seconds = 2.0 * each * (tried + left) as f64;
    (seconds / 10.0).ceil().max(1.0) as u64 * 10
}

fn candidate(group: &[Fit], evidence: &[&Evidence]) -> Candidate {
    let best = &group[0];
    Candidate {
        fault: best.fault.name.to_owned(),
        title: best.fault.title.to_owned(),
        class: best.fault.class.name().to_owned(),
        bugs: best.fault.bugs.iter().map(|bug| (*bug).to_owned()).collect(),
        same_effect: group[1..].iter().map(|fit| fit.fault.name.to_owned()).collect(),
        explains: best.explains(),
        exact: best.is_exact(),
        beside: best.beside(),
        stage_agrees: best.stage_agrees(evidence),
        distance: best.distance(),
    }
}

impl Diagnosis {
    /// What it says, a line each.
    pub fn lines(&self) -> Vec<String> {
        let cases = self.cases.len();
        let mut lines = Vec::new();
        for candidate in &self.candidates {
            let bugs = if candidate.bugs.is_empty() {
                String::new()
            } else {
                format!("; as {}", candidate.bugs.join(", "))
            };
            lines.push(format!("{} ({}): {}{bugs}", candidate.fault, candidate.class, candidate.title));
            let how = match (candidate.exact, candidate.beside) {
                (true, _) => "every answer to the last bit".to_owned(),
                (false, 0) => "every wrong output within its bound, and nothing else".to_owned(),
                (false, beside) => {
                    format!("every wrong output within its bound; {beside} other answers differ")
                }
            };
            // where every bit is the same, nothing speaks against it
            let stage = if candidate.stage_agrees || candidate.exact {
                ""
            } else {
                "; first diverges at a stage that its class seldom shows at, so look at the answers first"
            };
            lines.push(format!("  explains {} of {cases} failed cases: {how}{stage}", candidate.explains));
            if !candidate.same_effect.is_empty() {
                lines.push(format!(
                    "  cannot be told apart on these cases: {}",
                    candidate.same_effect.join(", ")
                ));
            }
        }
        if self.candidates.is_empty() && self.ended > 0 && self.ended == cases {
            let which =
                if cases == 1 { "the failed case".to_owned() } else { format!("all {cases} failed cases") };
            return vec![format!(
                "none: the engine ended in {which}, and no known fault ends in the same words; what it would have answered is not known"
            )];
        }
        if self.candidates.is_empty() && self.untried == 0 {
            lines.push("no known fault fits: none of them gives the wrong answers that were seen".to_owned());
        } else if self.candidates.is_empty() {
            lines.push(format!(
                "undecided: {} known faults were not tried, and none of the others fits",
                self.untried
            ));
        }
        if self.fitting > self.candidates.len() {
            lines.push(format!("{} known faults fit at least one of the cases", self.fitting));
        }
        if let Some(id) = &self.tell_apart {
            lines.push(format!("to tell the first ones apart: shardcheck replay '{id}'"));
        }
        let untried = if self.untried > 0 {
            format!(
                ", {} not tried, or not on all cases, for want of time (of these, {} name a property that was judged here); for a run, `shardcheck diagnose RUN --budget-s {}` tries all",
                self.untried,
                if self.likely_untried == 0 { "none".to_owned() } else { self.likely_untried.to_string() },
                self.needed_s
            )
        } else {
            String::new()
        };
        lines.push(format!("{} known faults ruled out{untried} ({:.1} s)", self.ruled_out, self.elapsed_s));
        lines
    }
}

#[cfg(test)]
mod tests;
