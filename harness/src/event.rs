//! Events of a run: one JSON object a line, written as they happen, so that a killed run still reads.

use serde::{Deserialize, Serialize};
use shardcheck_cases::Case;

use crate::claims::{Claims, EntryVerdict, Expected};
use crate::diagnose::Diagnosis;
use crate::finding::Finding;
use crate::status::Status;

/// Version of events.jsonl and results.json. Readers refuse a version that they do not know.
pub const RESULTS_SCHEMA_VERSION: u32 = 1;

/// Finding of one property on one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Property id.
    pub property: String,
    /// What was found.
    pub finding: Finding,
    /// The entry of the claims that expects it to fail, where one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<Expected>,
}

impl Check {
    /// A finding of a property.
    pub fn new(property: impl Into<String>, finding: Finding) -> Self {
        Self { property: property.into(), finding, expected: None }
    }

    /// Its verdict: that of the finding, or that this failure is expected.
    pub fn status(&self) -> Status {
        if self.expected.is_some() { Status::ExpectedFail } else { self.finding.status() }
    }
}

/// What a case reached, for the line against vacuity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coverage {
    /// Query rows.
    pub rows: u64,
    /// Query rows with a causal edge inside their request: some key exists that they must not see.
    pub masked_rows: u64,
    /// (request, rank) pairs.
    pub shards: u64,
    /// (request, rank) pairs that hold no token.
    pub empty_shards: u64,
    /// Whether the case runs at the head count of a published model.
    pub real_heads: bool,
}

impl Coverage {
    /// Sum of two.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            rows: self.rows + other.rows,
            masked_rows: self.masked_rows + other.masked_rows,
            shards: self.shards + other.shards,
            empty_shards: self.empty_shards + other.empty_shards,
            real_heads: self.real_heads || other.real_heads,
        }
    }
}

/// Verdict of one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    /// Case id.
    pub id: String,
    /// Worst verdict of its properties; Unsupported only when no property was judged.
    pub status: Status,
    /// Properties judged, in order.
    pub checks: Vec<Check>,
    /// Seconds that it took.
    pub elapsed_s: f64,
    /// What it reached.
    pub coverage: Coverage,
    /// Why it was skipped, when it was.
    pub reason: Option<String>,
}

impl CaseResult {
    /// Verdict of a case out of the findings of its properties.
    pub fn status_of(checks: &[Check]) -> Status {
        let judged = checks.iter().map(Check::status).filter(|s| *s != Status::Unsupported);
        judged.max().unwrap_or(Status::Unsupported)
    }

    /// The checks that did not hold, save those that are expected not to.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.status().is_failure())
    }
}

/// What is known of a run before it starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunHeader {
    /// Version of this format.
    pub schema_version: u32,
    /// Version of the program.
    pub tool_version: String,
    /// Run id: UTC time and a short hash.
    pub run_id: String,
    /// Suite name, or `cases` for given case files.
    pub suite: String,
    /// Seed of the suite.
    pub seed: u64,
    /// Engine as it was given on the command line.
    pub engine: String,
    /// Fault that was injected, if any.
    pub fault: Option<String>,
    /// Seconds that ranks might wait for each other, where it was said on the command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// The engine's profile.
    pub profile: serde_json::Value,
    /// Selection options in force, to resume with.
    pub selection: serde_json::Value,
    /// Claims that the run is judged by, if any: the entries for this version of the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claims: Option<Claims>,
    /// Number of selected cases.
    pub selected: usize,
    /// Operating system, architecture, cores.
    pub machine: String,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum Event {
    /// First line of a run.
    RunStarted(Box<RunHeader>),
    /// A case was judged or skipped.
    CaseJudged(CaseResult),
    /// A case failed; the value that reproduces it.
    CaseFailed {
        /// Case id.
        id: String,
        /// The whole case.
        case: Box<Case>,
    },
    /// Failed cases were diagnosed together: which known faults explain them.
    Diagnosed(Box<Diagnosis>),
    /// A fault was tried.
    MutantTried {
        /// Fault name.
        fault: String,
        /// `killed`, `killed_by_other`, `survived`, `not_applicable`, `error`.
        state: String,
        /// Property that killed it.
        property: Option<String>,
        /// Case that killed it.
        case: Option<String>,
        /// Cases tried.
        tried: usize,
    },
    /// An entry of the claims, judged by the whole run.
    ClaimJudged(EntryVerdict),
    /// Last line of a run that was not killed.
    RunFinished {
        /// Counts by verdict.
        counts: std::collections::BTreeMap<String, usize>,
        /// Seconds of the whole run.
        elapsed_s: f64,
        /// Exit code.
        exit_code: u8,
    },
}
