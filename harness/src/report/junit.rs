//! JUnit XML, as continuous integration reads it: every judged or skipped case is a test case, every fault tried is one too.

use std::path::PathBuf;
use std::time::Duration;

use quick_junit::{NonSuccessKind, Property, Report, TestCase, TestCaseStatus, TestSuite};
use shardcheck_cases::Case;

use crate::claims::EntryVerdict;
use crate::event::{CaseResult, Event};
use crate::record::{KILLED, MutantRecord, RunRecord};
use crate::report::block::Block;
use crate::report::{Glossary, ReportError, Reporter};
use crate::run_directory::write_atomically;
use crate::select::Axis;
use crate::status::Status;
use crate::summary::{expected_reasons, family_of, undecided_reason};

/// Name of the suite that holds the faults that were tried.
pub const FAULTS_SUITE: &str = "faults";

/// Name of the suite that holds the entries of the claims.
pub const CLAIMS_SUITE: &str = "claims";

/// Writes a JUnit file when the run ends.
pub struct JunitReporter {
    path: PathBuf,
    glossary: Glossary,
    record: Option<RunRecord>,
}

impl JunitReporter {
    /// Writes to `path`.
    pub fn new(path: PathBuf, glossary: Glossary) -> Self {
        Self { path, glossary, record: None }
    }
}

impl Reporter for JunitReporter {
    fn event(&mut self, event: &Event) -> Result<(), ReportError> {
        RunRecord::follow(&mut self.record, event);
        let (Event::RunFinished { .. }, Some(record)) = (event, &self.record) else { return Ok(()) };
        let text = render(record, &self.glossary)
            .map_err(|reason| ReportError::Layout { path: self.path.clone(), reason })?;
        Ok(write_atomically(&self.path, &text)?)
    }
}

/// The JUnit document of a run.
///
/// # Errors
/// What the XML writer says; that is a bug.
pub fn render(record: &RunRecord, glossary: &Glossary) -> Result<String, String> {
    let header = &record.header;
    let mut report = Report::new("shardcheck");
    let mut suite = TestSuite::new(header.suite.as_str());
    let fault = header.fault.clone().unwrap_or_else(|| "none".to_owned());
    let seed = header.seed.to_string();
    for (name, value) in [
        ("run_id", &header.run_id),
        ("tool_version", &header.tool_version),
        ("seed", &seed),
        ("engine", &header.engine),
        ("fault", &fault),
        ("machine", &header.machine),
    ] {
        suite.add_property(Property::new(name, value));
    }
    for result in &record.cases {
        suite.add_test_case(case_entry(result, record, glossary));
    }
    report.add_test_suite(suite);
    if !record.mutants.is_empty() {
        let mut faults = TestSuite::new(FAULTS_SUITE);
        faults.add_test_cases(record.mutants.iter().map(fault_entry));
        report.add_test_suite(faults);
    }
    if !record.claims.is_empty() {
        let mut claims = TestSuite::new(CLAIMS_SUITE);
        claims.add_test_cases(record.claims.iter().map(claim_entry));
        report.add_test_suite(claims);
    }
    if let Some(finished) = record.finished {
        report.set_time(duration(finished.elapsed_s));
    }
    report.to_string().map_err(|error| error.to_string())
}

fn case_entry(result: &CaseResult, record: &RunRecord, glossary: &Glossary) -> TestCase {
    let mut entry = TestCase::new(result.id.as_str(), case_status(result, record, glossary));
    entry.set_classname(family_of(&result.id));
    entry.set_time(duration(result.elapsed_s));
    entry.set_assertions(result.checks.iter().filter(|check| check.status().is_judged()).count());
    entry.add_property(Property::new("status", result.status.name()));
    for reason in expected_reasons(result) {
        entry.add_property(Property::new("expected", reason));
    }
    entry.add_property(Property::new("engine", record.header.engine.as_str()));
    let parsed = record.failed.get(&result.id).cloned().or_else(|| result.id.parse::<Case>().ok());
    match parsed {
        Some(case) => {
            entry.add_properties(
                Axis::values_of(&case).into_iter().map(|(name, value)| Property::new(name, value)),
            );
        }
        None => {
            entry.add_property(Property::new("seed", record.header.seed.to_string()));
        }
    }
    entry
}

fn case_status(result: &CaseResult, record: &RunRecord, glossary: &Glossary) -> TestCaseStatus {
    let mut status = match result.status {
        Status::Pass | Status::Warn | Status::ExpectedFail => return TestCaseStatus::success(),
        Status::Skipped | Status::Unsupported | Status::Inconclusive => TestCaseStatus::skipped(),
        Status::Fail | Status::UnexpectedPass => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Status::Crash | Status::Timeout | Status::DeviceLost | Status::HarnessError => {
            TestCaseStatus::non_success(NonSuccessKind::Error)
        }
    };
    status.set_type(result.status.name());
    match undecided_reason(result) {
        Some(reason) => {
            status.set_message(format!("{}: {reason}", result.status));
        }
        None => {
            let block = Block::of(result, Some((&record.header).into()), glossary);
            let found = block.lines.iter().find(|line| matches!(line.label, "found" | "engine"));
            status.set_message(found.map_or(result.status.name(), |line| line.text.as_str()));
            status.set_description(block.to_string());
        }
    }
    status
}

fn fault_entry(mutant: &MutantRecord) -> TestCase {
    let tried = format!("{} cases tried", mutant.tried);
    let mut status = match mutant.state.as_str() {
        KILLED => TestCaseStatus::success(),
        "not_applicable" => TestCaseStatus::skipped(),
        _ => TestCaseStatus::non_success(NonSuccessKind::Failure),
    };
    if mutant.state != KILLED {
        status.set_type(mutant.state.as_str());
        status.set_message(format!("{}: {tried}", mutant.state));
    }
    let mut entry = TestCase::new(mutant.fault.as_str(), status);
    entry.set_classname(FAULTS_SUITE);
    for (name, value) in [("property", &mutant.property), ("case", &mutant.case)] {
        if let Some(value) = value {
            entry.add_property(Property::new(name, value.as_str()));
        }
    }
    entry
}

fn claim_entry(verdict: &EntryVerdict) -> TestCase {
    let mut status = match verdict.status {
        Status::Pass | Status::ExpectedFail => TestCaseStatus::success(),
        status if status.is_failure() => TestCaseStatus::non_success(NonSuccessKind::Failure),
        _ => TestCaseStatus::skipped(),
    };
    if !matches!(verdict.status, Status::Pass | Status::ExpectedFail) {
        status.set_type(verdict.status.name());
        status.set_message(verdict.text.as_str());
    }
    let mut entry = TestCase::new(verdict.entry.as_str(), status);
    entry.set_classname(CLAIMS_SUITE);
    entry.add_property(Property::new("status", verdict.status.name()));
    entry.add_property(Property::new("kind", verdict.kind.name()));
    if !verdict.reference.is_empty() {
        entry.add_property(Property::new("reference", verdict.reference.as_str()));
    }
    entry
}

/// Seconds as a duration; what no clock can have measured counts as none.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    fn read_back() -> Report {
        let text = render(&sample::record(), &Glossary::default()).unwrap();
        Report::deserialize_from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn kind_and_message(status: &TestCaseStatus) -> (String, String) {
        let text =
            |value: &Option<quick_junit::XmlString>| value.as_ref().map_or("", |v| v.as_str()).to_owned();
        match status {
            TestCaseStatus::Success { .. } => ("success".into(), String::new()),
            TestCaseStatus::NonSuccess { kind, message, ty, .. } => {
                (format!("{kind:?} {}", text(ty)), text(message))
            }
            TestCaseStatus::Skipped { message, ty, .. } => (format!("skipped {}", text(ty)), text(message)),
        }
    }

    #[test]
    fn every_case_is_a_test_case_with_its_family_and_a_verdict_that_ci_understands() {
        let report = read_back();
        let suite = &report.test_suites[0];
        let entries: Vec<(String, String, String)> = suite
            .test_cases
            .iter()
            .map(|case| {
                let class = case.classname.as_ref().unwrap().as_str().to_owned();
                let (kind, message) = kind_and_message(&case.status);
                (class, kind, message)
            })
            .collect();
        let expected = [
            ("decode", "success", ""),
            ("verify", "Failure fail", "the merged output misses its bound"),
            ("verify", "Failure fail", "the merged output misses its bound"),
            ("write", "Error crash", "crash: engine crashed: index out of range"),
            ("draft", "skipped unsupported", "unsupported: no draft route"),
            ("context", "skipped skipped", "skipped: belongs to another partition"),
            ("merge_states", "skipped inconclusive", "inconclusive: both took the same path"),
        ];
        let expected: Vec<_> =
            expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())).into_iter().collect();
        assert_eq!(entries, expected);
        assert_eq!((suite.tests, suite.failures, suite.errors, suite.skipped), (7, 2, 1, 3));
    }

    #[test]
    fn a_failure_carries_its_block_and_a_hostile_id_survives_the_xml() {
        let report = read_back();
        let hostile = &report.test_suites[0].test_cases[2];
        assert_eq!(hostile.name.as_str(), "verify/<script>alert('1')</script>&\"quoted\"");
        let TestCaseStatus::NonSuccess { description, .. } = &hostile.status else { panic!("it failed") };
        let text = description.as_ref().unwrap().as_str();
        assert!(text.contains("rank 1, request 0 row 2 (position 258)"), "{text}");
        assert!(text.contains("shardcheck replay"), "{text}");
    }

    #[test]
    fn cases_carry_their_axes_and_suites_their_run() {
        let report = read_back();
        let suite = &report.test_suites[0];
        let properties = |list: &[Property]| -> Vec<(String, String)> {
            list.iter().map(|p| (p.name.as_str().to_owned(), p.value.as_str().to_owned())).collect()
        };
        let of_suite = properties(&suite.properties);
        for (name, value) in [("seed", "7"), ("engine", "cpu"), ("fault", "none")] {
            assert!(of_suite.contains(&(name.into(), value.into())), "{of_suite:?}");
        }
        let of_case = properties(&suite.test_cases[1].properties);
        for (name, value) in
            [("world", "4"), ("kv", "e4m3fn"), ("probe", "cold"), ("seed", "7"), ("status", "fail")]
        {
            assert!(of_case.contains(&(name.into(), value.into())), "{of_case:?}");
        }
        assert_eq!(suite.test_cases[1].time, Some(Duration::from_millis(250)));
    }

    #[test]
    fn a_fault_that_survives_is_a_failure_and_one_that_does_not_apply_is_skipped() {
        let report = read_back();
        let faults = &report.test_suites[1];
        let kinds: Vec<_> = faults.test_cases.iter().map(|case| kind_and_message(&case.status)).collect();
        assert_eq!(kinds[0].0, "success");
        assert_eq!(kinds[1], ("Failure survived".into(), "survived: 3 cases tried".into()));
        assert_eq!(kinds[2].0, "skipped not_applicable");
    }

    #[test]
    fn the_file_is_written_once_the_run_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("junit.xml");
        let mut reporter = JunitReporter::new(path.clone(), Glossary::default());
        let events = sample::events(&sample::header());
        let (last, rest) = events.split_last().unwrap();
        rest.iter().for_each(|event| reporter.event(event).unwrap());
        assert!(!path.exists());
        reporter.event(last).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(Report::deserialize_from_str(&text).unwrap().tests, 11);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent/junit.xml");
        let mut reporter = JunitReporter::new(path, Glossary::default());
        let outcome: Result<Vec<()>, _> =
            sample::events(&sample::header()).iter().map(|event| reporter.event(event)).collect();
        assert!(outcome.unwrap_err().to_string().contains("absent/junit.xml"));
    }
}
