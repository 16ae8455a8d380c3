//! A run as it can be read back: its header, the last word on each case, and the faults that were tried.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};
use shardcheck_cases::Case;

use crate::claims::EntryVerdict;
use crate::diagnose::Diagnosis;
use crate::event::{CaseResult, Event, RESULTS_SCHEMA_VERSION, RunHeader};
use crate::status::Status;
use crate::tally::{TableRow, table_of};

/// State of a fault that was killed by the property that names it, as [`Event::MutantTried`] writes it.
pub const KILLED: &str = "killed";

/// A fault that was tried. Fields as in [`Event::MutantTried`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MutantRecord {
    /// Fault name.
    pub fault: String,
    /// `killed`, `killed_by_other`, `survived`, `not_applicable`, `error`.
    pub state: String,
    /// Property that killed it.
    pub property: Option<String>,
    /// Case that killed it.
    pub case: Option<String>,
    /// Cases tried.
    pub tried: usize,
}

/// The end of a run that was not killed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Finished {
    /// Seconds of the whole run.
    pub elapsed_s: f64,
    /// Exit code.
    pub exit_code: u8,
}

/// Everything that a run left in its events.
#[derive(Debug, Clone)]
pub struct RunRecord {
    /// What was known before the start.
    pub header: RunHeader,
    /// Last verdict of each case, in the order in which the cases were first judged.
    pub cases: Vec<CaseResult>,
    /// Values of the cases that failed, by id.
    pub failed: BTreeMap<String, Case>,
    /// Last state of each fault, in the order in which they were first tried.
    pub mutants: Vec<MutantRecord>,
    /// Which known faults explain the failures.
    pub diagnosis: Option<Diagnosis>,
    /// Last verdict on each entry of the claims, in the order in which they were first judged.
    pub claims: Vec<EntryVerdict>,
    /// Present when the run came to its end.
    pub finished: Option<Finished>,
    /// Whether the last line was cut off and left out: the run was killed while it wrote.
    pub torn: bool,
    places: HashMap<String, usize>,
}

impl RunRecord {
    /// A run without events.
    pub fn new(header: RunHeader) -> Self {
        Self {
            header,
            cases: Vec::new(),
            failed: BTreeMap::new(),
            mutants: Vec::new(),
            diagnosis: None,
            claims: Vec::new(),
            finished: None,
            torn: false,
            places: HashMap::new(),
        }
    }

    /// Takes one event into a record that begins with the run's first event.
    pub fn follow(record: &mut Option<Self>, event: &Event) {
        match (record.as_mut(), event) {
            (None, Event::RunStarted(header)) => *record = Some(Self::new((**header).clone())),
            (Some(record), event) => record.absorb(event),
            (None, _) => {}
        }
    }

    /// Takes one event in. A case or a fault that comes again replaces its older state.
    pub fn absorb(&mut self, event: &Event) {
        // whatever follows an end belongs to a resume, which has not come to its own end yet
        self.finished = None;
        match event {
            Event::RunStarted(_) => {}
            Event::CaseJudged(result) => match self.places.get(&result.id) {
                Some(place) => self.cases[*place] = result.clone(),
                None => {
                    self.places.insert(result.id.clone(), self.cases.len());
                    self.cases.push(result.clone());
                }
            },
            Event::CaseFailed { id, case } => {
                self.failed.insert(id.clone(), (**case).clone());
            }
            Event::Diagnosed(diagnosis) => self.diagnosis = Some((**diagnosis).clone()),
            Event::MutantTried { fault, state, property, case, tried } => {
                let record = MutantRecord {
                    fault: fault.clone(),
                    state: state.clone(),
                    property: property.clone(),
                    case: case.clone(),
                    tried: *tried,
                };
                match self.mutants.iter_mut().find(|m| m.fault == *fault) {
                    Some(known) => *known = record,
                    None => self.mutants.push(record),
                }
            }
            Event::ClaimJudged(verdict) => {
                match self.claims.iter_mut().find(|known| known.entry == verdict.entry) {
                    Some(known) => *known = verdict.clone(),
                    None => self.claims.push(verdict.clone()),
                }
            }
            Event::RunFinished { elapsed_s, exit_code, .. } => {
                self.finished = Some(Finished { elapsed_s: *elapsed_s, exit_code: *exit_code });
            }
        }
    }

    /// Verdict of a case.
    pub fn find(&self, id: &str) -> Option<&CaseResult> {
        self.places.get(id).map(|place| &self.cases[*place])
    }

    /// Ids that have a verdict and need not be run again.
    pub fn judged_ids(&self) -> HashSet<String> {
        self.places.keys().cloned().collect()
    }

    /// Number of cases by verdict name; verdicts that did not occur are absent.
    pub fn counts(&self) -> BTreeMap<String, usize> {
        count_statuses(self.cases.iter().map(|c| c.status))
    }

    /// The content of results.json.
    pub fn results(&self) -> Results {
        Results {
            schema_version: RESULTS_SCHEMA_VERSION,
            header: self.header.clone(),
            counts: self.counts(),
            elapsed_s: self.finished.map(|f| f.elapsed_s),
            exit_code: self.finished.map(|f| f.exit_code),
            cases: self.cases.clone(),
            mutants: self.mutants.clone(),
            diagnosis: self.diagnosis.clone(),
            claims: self.claims.clone(),
            table: table_of(&self.cases),
        }
    }
}

/// Number of verdicts by name; verdicts that did not occur are absent.
pub fn count_statuses(statuses: impl IntoIterator<Item = Status>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for status in statuses {
        *counts.entry(status.name().to_owned()).or_insert(0) += 1;
    }
    counts
}

/// results.json: the same numbers as events.jsonl, in one value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// [`RESULTS_SCHEMA_VERSION`] of the program that wrote it.
    pub schema_version: u32,
    /// What was known before the start.
    pub header: RunHeader,
    /// Number of cases by verdict name.
    pub counts: BTreeMap<String, usize>,
    /// Seconds of the whole run; absent when it was killed.
    pub elapsed_s: Option<f64>,
    /// Exit code; absent when the run was killed.
    pub exit_code: Option<u8>,
    /// Last verdict of each case.
    pub cases: Vec<CaseResult>,
    /// Faults that were tried.
    pub mutants: Vec<MutantRecord>,
    /// Which known faults explain the failures; absent when nothing failed or nothing was diagnosed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<Diagnosis>,
    /// Last verdict on each entry of the claims; absent without claims.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<EntryVerdict>,
    /// Checks by family and property area: what was judged, and why the rest was not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub table: Vec<TableRow>,
}
