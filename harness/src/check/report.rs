//! What a check found: a value for machines, and the text of it for people.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::finding::{Failure, Stage};
use crate::judge::Comparison;
use crate::status::{Exit, Status};

use super::{SCHEMA_VERSION, Subject};

/// What a fixed tolerance would have said.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FixedTolerance {
    /// `atol = rtol`.
    pub tolerance: f64,
    /// Elements outside.
    pub outside: u64,
    /// Largest |seen − expected|; infinite where one is not a number (`null` in JSON).
    #[serde(deserialize_with = "infinite_if_null")]
    pub largest_difference: f64,
}

/// A known slip that gives what was seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Its name.
    pub hypothesis: String,
    /// Which one, where there are several: a rank, a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub which: Option<String>,
    /// Where it happens.
    pub stage: Stage,
    /// In words.
    pub sentence: String,
    /// Failed states (row and head) that it reproduces, of those looked at.
    pub explains: usize,
    /// Requests that these belong to.
    pub requests: Vec<usize>,
}

/// Why the answer is what it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// States with an element out of bound.
    pub failed_states: usize,
    /// How many of them were looked at.
    pub looked_at: usize,
    /// Known slips that reproduce them; the first explains most.
    pub explanations: Vec<Explanation>,
    /// Single tokens or blocks that explain rows by themselves.
    pub tokens: Vec<String>,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this value.
    pub schema_version: u32,
    /// What was checked.
    pub check: Subject,
    /// `pass`, `fail` or `inconclusive`.
    pub status: Status,
    /// Elements compared.
    pub compared: u64,
    /// Largest |error| over its bound; above 1 where something failed.
    pub worst_ratio: f64,
    /// A failure for each tensor that fails.
    pub failures: Vec<Failure>,
    /// First stage that goes wrong, where it can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<Stage>,
    /// What fixed tolerances would have said of all tensors together.
    pub fixed_tolerances: Vec<FixedTolerance>,
    /// Why, where something failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<Diagnosis>,
    /// What was not looked at, though nothing depends on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What could not be decided, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inconclusive: Vec<String>,
}

impl Report {
    /// A report without any finding.
    pub(super) fn new(check: Subject) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            check,
            status: Status::Pass,
            compared: 0,
            worst_ratio: 0.0,
            failures: Vec::new(),
            stage: None,
            fixed_tolerances: Vec::new(),
            diagnosis: None,
            notes: Vec::new(),
            inconclusive: Vec::new(),
        }
    }

    /// Adds what was compared of one tensor.
    pub(super) fn add(&mut self, comparison: &Comparison, fixed: &[FixedTolerance]) {
        let measured = comparison.measured();
        self.compared += measured.compared;
        // infinity is no JSON
        self.worst_ratio = self.worst_ratio.max(measured.worst_ratio.min(f64::MAX));
        for (index, fixed) in fixed.iter().enumerate() {
            match self.fixed_tolerances.get_mut(index) {
                None => self.fixed_tolerances.push(*fixed),
                Some(sum) => {
                    sum.outside += fixed.outside;
                    sum.largest_difference = sum.largest_difference.max(fixed.largest_difference);
                }
            }
        }
    }

    /// Settles the status: a failure counts more than what could not be decided.
    pub(super) fn settled(mut self) -> Self {
        if self.compared == 0 && self.inconclusive.is_empty() {
            self.inconclusive.push("nothing was compared: no row was given, or none is judged".to_owned());
        }
        self.status = if !self.failures.is_empty() {
            Status::Fail
        } else if !self.inconclusive.is_empty() {
            Status::Inconclusive
        } else {
            Status::Pass
        };
        let found = self.diagnosis.as_ref().and_then(|diagnosis| diagnosis.explanations.first());
        self.stage = found.map(|first| first.stage).or_else(|| self.failures.first().and_then(|f| f.stage));
        self
    }

    /// The exit code that says the same.
    pub fn exit(&self) -> Exit {
        match self.status {
            Status::Pass => Exit::Passed,
            Status::Inconclusive => Exit::Inconclusive,
            _ => Exit::Failed,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { check, compared, .. } = self;
        match self.status {
            Status::Pass => {
                writeln!(
                    f,
                    "{check} passes: {compared} values, the largest error is {:.2} of its bound",
                    self.worst_ratio
                )?;
            }
            Status::Inconclusive => writeln!(f, "{check} can't be decided")?,
            _ => writeln!(f, "{check} fails")?,
        }
        for failure in &self.failures {
            let Failure { headline, worst, .. } = failure;
            writeln!(f, "  fails      {headline}")?;
            if let Some(worst) = worst {
                writeln!(f, "  worst      {}: {}", worst.tensor, worst.place)?;
                let times =
                    worst.ratio.map(|ratio| format!(": {ratio:.1} times its bound")).unwrap_or_default();
                writeln!(
                    f,
                    "  seen       {}, expected {}, allowed {}{times}",
                    worst.seen, worst.expected, worst.allowed
                )?;
            }
            for note in &failure.notes {
                writeln!(f, "  {note}")?;
            }
        }
        if !self.failures.is_empty() {
            for fixed in &self.fixed_tolerances {
                writeln!(f, "  tolerance  {fixed}")?;
            }
        }
        if let Some(stage) = self.stage.filter(|_| self.status == Status::Fail) {
            writeln!(f, "  stage      {stage}")?;
        }
        if let Some(diagnosis) = &self.diagnosis {
            write!(f, "{diagnosis}")?;
        }
        for note in &self.notes {
            writeln!(f, "  note       {note}")?;
        }
        for why in &self.inconclusive {
            writeln!(f, "  undecided  {why}")?;
        }
        Ok(())
    }
}

impl fmt::Display for FixedTolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.outside == 0 {
            "would have passed this".to_owned()
        } else {
            format!("would have flagged {} values", self.outside)
        };
        write!(
            f,
            "assert_close(atol=rtol={:e}) {verdict} (largest difference {:.2e})",
            self.tolerance, self.largest_difference
        )
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for found in &self.explanations {
            let requests = found.requests.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            let scope =
                if found.requests.is_empty() { String::new() } else { format!(" (requests {requests})") };
            writeln!(f, "  diagnosis  {} [{}]: {}", found.hypothesis, found.stage, found.sentence)?;
            writeln!(
                f,
                "             reproduces {} of {} failed rows and heads that were looked at, of {}{scope}",
                found.explains, self.looked_at, self.failed_states
            )?;
        }
        for line in &self.tokens {
            writeln!(f, "  tokens     {line}")?;
        }
        if self.explanations.is_empty() && self.tokens.is_empty() {
            writeln!(
                f,
                "  diagnosis  no known explanation fits ({} failed rows and heads looked at)",
                self.looked_at
            )?;
        }
        Ok(())
    }
}

fn infinite_if_null<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
}
