//! Diagnosis: which known fault, put into the embedded engine alone, gives the wrong answers that were seen.
//!
//! A failed case is stored with every question that its engine was asked and every answer. The same questions are put to the
//! embedded engine with one fault at a time. A fault is a candidate when it reproduces the wrong outputs: to the last bit, or
//! each element within the width of its certified interval, which is how far two conforming engines may lie apart. Faults that
//! change nothing on a case reproduce nothing that is wrong, so they are never candidates; a case that passes has no
//! wrong answer, so nothing is ever said of one.

mod blind;
mod comparison;
mod evidence;
mod replay;
mod residue;
mod stored;
mod tell_apart;
mod widths;

use std::time::{Duration, Instant};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use shardcheck_cpu::{Fault, FaultClass, faults};

pub use blind::{Disguise, Trial, blind};
pub use evidence::Evidence;
use evidence::Reproduction;
pub use stored::{MOST_CASES, evidence_of};

use crate::finding::Stage;
use crate::quiet::Quiet;

/// Most candidates that a diagnosis keeps.
const MOST_CANDIDATES: usize = 5;

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
    /// Faults that were tried on every case that concerns them and explain none.
    pub ruled_out: usize,
    /// Faults that the time did not suffice for.
    pub untried: usize,
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
/// The outcome depends on `budget` only when it is used up. No evidence, no diagnosis.
pub fn diagnose(evidence: &[Evidence], budget: Duration) -> Option<Diagnosis> {
    let started = Instant::now();
    let _quiet = Quiet::new();
    let mut telling: Vec<&Evidence> = evidence.iter().filter(|evidence| evidence.is_telling()).collect();
    // small cases rule out as much as large ones, in less time
    telling.sort_by_key(|evidence| crate::shrink::work(&evidence.case));
    if telling.is_empty() {
        return None;
    }
    let outcomes: Vec<Option<Fit>> = likely_first(&telling)
        .par_iter()
        .with_max_len(1)
        .map(|fault| (started.elapsed() < budget).then(|| fit(fault, &telling)))
        .collect();
    let untried = outcomes.iter().filter(|outcome| outcome.is_none()).count();
    let fits: Vec<Fit> = outcomes.into_iter().flatten().filter(|fit| fit.explains() > 0).collect();
    let fitting = fits.len();
    let mut groups = group(fits);
    groups.sort_by(|a, b| {
        a[0].rank(&telling).partial_cmp(&b[0].rank(&telling)).unwrap_or(std::cmp::Ordering::Equal)
    });
    let mut tell_apart = None;
    if started.elapsed() < budget {
        let left = budget - started.elapsed();
        tell_apart = groups.first().and_then(|group| {
            let tied: Vec<&'static Fault> = group.iter().map(|fit| fit.fault).collect();
            tell_apart::case_between(&tied, &telling[0].case, left.min(Duration::from_secs(2)))
        });
    }
    Some(Diagnosis {
        cases: telling.iter().map(|evidence| evidence.id.clone()).collect(),
        candidates: groups.iter().take(MOST_CANDIDATES).map(|group| candidate(group, &telling)).collect(),
        fitting,
        ruled_out: faults().len() - fitting - untried,
        untried,
        ended: telling.iter().filter(|evidence| evidence.ended()).count(),
        tell_apart,
        elapsed_s: started.elapsed().as_secs_f64(),
    })
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// The known faults, those that the failed properties point at first, since the time may not suffice for all: the more of what
/// failed a fault names, and the less that did not, the likelier it is.
fn likely_first(telling: &[&Evidence]) -> Vec<&'static Fault> {
    let likeness = |fault: &Fault| -> f64 {
        let of_case = |evidence: &&Evidence| {
            let named =
                evidence.properties.iter().filter(|id| fault.killed_by.contains(&id.as_str())).count();
            let either = fault.killed_by.len() + evidence.properties.len() - named;
            let stage = evidence.stage.is_some_and(|stage| agrees(fault.class, stage));
            named as f64 / either.max(1) as f64 + if stage { 0.25 } else { 0.0 }
        };
        telling.iter().map(of_case).sum()
    };
    let mut order: Vec<(f64, &'static Fault)> =
        faults().iter().map(|fault| (likeness(fault), fault)).collect();
    // stable: equals stay in the order of the registry
    order.sort_by(|a, b| b.0.total_cmp(&a.0));
    order.into_iter().map(|(_, fault)| fault).collect()
}

/// How one fault does on each case.
struct Fit {
    fault: &'static Fault,
    cases: Vec<Option<Reproduction>>,
}

fn fit(fault: &'static Fault, evidence: &[&Evidence]) -> Fit {
    Fit { fault, cases: evidence.iter().map(|evidence| evidence.try_fault(fault)).collect() }
}

impl Fit {
    fn explains(&self) -> usize {
        self.cases.iter().flatten().count()
    }

    fn is_exact(&self) -> bool {
        self.cases.iter().flatten().all(|reproduction| reproduction.exact)
    }

    fn beside(&self) -> usize {
        self.cases.iter().flatten().map(|reproduction| reproduction.beside).sum()
    }

    fn distance(&self) -> f64 {
        let distances: Vec<f64> = self.cases.iter().flatten().map(|r| r.distance).collect();
        distances.iter().sum::<f64>() / distances.len().max(1) as f64
    }

    fn stage_agrees(&self, evidence: &[&Evidence]) -> bool {
        let explained = evidence.iter().zip(&self.cases).filter(|(_, case)| case.is_some());
        explained.filter_map(|(evidence, _)| evidence.stage).all(|stage| agrees(self.fault.class, stage))
    }

    /// Whether a failed property is one that the fault names, on all cases.
    fn is_named(&self, evidence: &[&Evidence]) -> bool {
        let explained = evidence.iter().zip(&self.cases).filter(|(_, case)| case.is_some());
        let named = |evidence: &Evidence| {
            evidence.properties.iter().any(|property| self.fault.killed_by.contains(&property.as_str()))
        };
        explained.into_iter().all(|(evidence, _)| named(evidence))
    }

    /// Smaller is better: cases left unexplained, then bits, parts beside the wrong ones, properties, stage, distance, order of
    /// the list of faults.
    fn rank(&self, evidence: &[&Evidence]) -> (usize, bool, usize, bool, bool, f64, usize) {
        let place = faults().iter().position(|fault| fault.name == self.fault.name).unwrap_or(usize::MAX);
        (
            evidence.len() - self.explains(),
            !self.is_exact(),
            self.beside(),
            !self.is_named(evidence),
            !self.stage_agrees(evidence),
            self.distance(),
            place,
        )
    }

    fn effects(&self) -> Vec<Option<[u8; 32]>> {
        self.cases.iter().map(|case| case.as_ref().map(|reproduction| reproduction.effect)).collect()
    }
}

/// Faults that answer the same on every case, together.
fn group(fits: Vec<Fit>) -> Vec<Vec<Fit>> {
    let mut groups: Vec<Vec<Fit>> = Vec::new();
    for fit in fits {
        match groups.iter_mut().find(|group| group[0].effects() == fit.effects()) {
            Some(group) => group.push(fit),
            None => groups.push(vec![fit]),
        }
    }
    groups
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

/// Whether a mistake of a class can first show at a stage.
fn agrees(class: FaultClass, stage: Stage) -> bool {
    use FaultClass as C;
    use Stage as S;
    let stages: &[Stage] = match class {
        C::LayoutIndex => &[S::Layout, S::Selection, S::RowBound, S::Write, S::Gather, S::Partial],
        C::CausalBound | C::SpecDecode => &[S::Layout, S::RowBound, S::Gather, S::Partial, S::Merge],
        C::LseMath => &[S::Partial, S::Exchange, S::Merge, S::Output],
        C::EmptyShard => &[S::Layout, S::RowBound, S::Partial, S::Merge, S::Output],
        C::DtypeScale => &[S::Selection, S::Write, S::Gather, S::Partial, S::Exchange, S::Merge],
        C::HeadLayout => &[S::Query, S::Partial, S::Merge, S::Output, S::Configuration],
        C::CollectiveOrder => {
            &[S::Routing, S::Selection, S::RowBound, S::Query, S::Gather, S::Exchange, S::Merge, S::Output]
        }
        C::Padding => {
            &[S::Layout, S::Routing, S::RowBound, S::Write, S::Gather, S::Exchange, S::Merge, S::Output]
        }
        C::ConfigGate => &[S::Configuration, S::Exchange],
        C::TopKSelect => &[S::Layout, S::Selection, S::RowBound, S::Exchange],
        C::MoeRoute => &[S::Routing, S::Exchange, S::Merge],
        C::StaleMetadata => &[S::RowBound, S::Partial, S::Output],
        C::Hang => &S::ALL,
    };
    stages.contains(&stage)
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
            let stage = if candidate.stage_agrees {
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
                "undecided: only {} known faults were tried and none of them fits",
                self.ruled_out + self.fitting
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
                ", {} not tried for want of time: `shardcheck diagnose` takes a run and a longer --budget-s",
                self.untried
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
