//! Runs: what goes to the terminal and what they leave behind.

use std::collections::BTreeSet;

use quick_junit::{Report, TestCaseStatus};
use serde_json::Value;
use shardcheck::run_directory::read_results;
use shardcheck::status::Status;
use shardcheck_cases::Case;

use crate::program::Program;

const SMOKE: [&str; 3] = ["run", "--suite", "engine-smoke"];
const FAULTY: [&str; 5] = ["run", "--suite", "engine-smoke", "--fault", "committed-prefix-rows"];

fn with<'a>(first: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [first, more].concat()
}

#[test]
fn a_clean_run_ends_with_zero_and_the_line_against_vacuity() {
    let program = Program::new();
    let ids = program.ids(&["--suite", "engine-smoke"]);
    let outcome = program.expect(0, &SMOKE);
    let count = ids.len();
    let last = outcome.out.trim_end().lines().last().unwrap();
    assert!(last.starts_with(&format!("cases: tried {count}, judged {count}, unsupported 0")), "{last}");
    for part in ["masked; shards: ", " empty; real head counts: ", "elements compared: ", "faults: 0 tried"] {
        assert!(last.contains(part), "{last}");
    }
    for empty in ["rows: 0 ", "of which 0 masked", "shards: 0", "of which 0 empty", "compared: 0"] {
        assert!(!last.contains(empty), "{last}");
    }
    assert_eq!(outcome.err, "");
}

#[test]
fn a_run_leaves_every_verdict_in_every_format() {
    let program = Program::new();
    let ids: BTreeSet<String> = program.ids(&["--suite", "engine-smoke"]).into_iter().collect();
    program.expect(0, &with(&SMOKE, &["--junit", "out.xml", "--html", "out.html"]));
    let record = program.record();
    let judged: Vec<String> = record.cases.iter().map(|case| case.id.clone()).collect();
    assert_eq!(judged.len(), ids.len(), "no case twice");
    assert_eq!(judged.into_iter().collect::<BTreeSet<_>>(), ids);
    assert!(record.cases.iter().all(|case| case.status == Status::Pass && !case.checks.is_empty()));
    assert_eq!(record.finished.unwrap().exit_code, 0);
    assert!(!record.torn);
    let results = read_results(&program.latest()).unwrap();
    assert_eq!(results, record.results());
    for path in ["out.xml", "runs/latest/junit.xml"] {
        let text = std::fs::read_to_string(program.path(path)).unwrap();
        let report = Report::deserialize_from_str(&text).unwrap();
        let names: BTreeSet<String> = report
            .test_suites
            .iter()
            .flat_map(|suite| &suite.test_cases)
            .map(|case| case.name.as_str().to_owned())
            .collect();
        assert_eq!(names, ids, "{path}");
        assert_eq!((report.tests, report.failures, report.errors), (ids.len(), 0, 0));
    }
    for path in ["out.html", "runs/latest/report.html"] {
        let text = std::fs::read_to_string(program.path(path)).unwrap();
        // the page spells slashes of text as HTML entities
        let text = text.replace("&#x2f;", "/");
        assert!(text.starts_with("<!") && ids.iter().all(|id| text.contains(id)), "{path}");
    }
}

#[test]
fn json_lines_stand_alone_on_standard_output() {
    let program = Program::new();
    let outcome = program.expect(1, &with(&FAULTY, &["--message-format", "json"]));
    let events: Vec<Value> = outcome.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events[0]["event"], "run_started");
    assert_eq!(events[0]["fault"], "committed-prefix-rows");
    assert_eq!(events.last().unwrap()["event"], "run_finished");
    assert_eq!(events.last().unwrap()["exit_code"], 1);
    let stored = std::fs::read_to_string(program.latest().join("events.jsonl")).unwrap();
    let written: Vec<&str> = outcome.out.lines().skip(1).collect();
    assert_eq!(written, stored.lines().collect::<Vec<_>>(), "the same lines as in the run folder");
    assert!(outcome.err.trim_end().lines().last().unwrap().starts_with("cases: tried "), "{}", outcome.err);
}

#[test]
fn a_fault_of_the_causal_bound_is_found_named_and_placed() {
    let program = Program::new();
    let outcome = program.expect(1, &with(&FAULTY, &["verify/"]));
    for part in [
        "property  verify.output: ",
        "first stage  row bound: the first stage that diverges",
        "rows concerned: request ",
        "a fixed tolerance of atol = rtol = 3e-2 would have put ",
        "largest difference ",
        "reproduce  shardcheck replay 'verify/",
        "--fault 'committed-prefix-rows'",
        "exit code 1: something failed",
    ] {
        assert!(outcome.out.contains(part), "{part}\n{}", outcome.out);
    }
    let record = program.record();
    let output = record.cases.iter().flat_map(|case| case.failures()).find(|c| c.property == "verify.output");
    let shardcheck::finding::Finding::Broken(failure) = &output.unwrap().finding else { panic!("a failure") };
    assert!(failure.out_of_bound > 0 && failure.worst.is_some());
}

#[test]
fn a_failed_case_has_a_folder_and_a_failure_in_junit() {
    let program = Program::new();
    program.expect(1, &FAULTY);
    let record = program.record();
    assert!(!record.failed.is_empty() && record.failed.len() < record.cases.len());
    let failing = record.cases.iter().filter(|case| case.status == Status::Fail).count();
    assert_eq!(record.failed.len(), failing);
    for (id, case) in &record.failed {
        let name = shardcheck::run_directory::case_folder_name(id);
        let folder = program.latest().join("cases").join(name);
        let stored = std::fs::read_to_string(folder.join("case.json")).unwrap();
        assert_eq!(Case::from_json(&stored).unwrap(), *case);
        for file in ["findings.json", "recording.json", "tensors.safetensors"] {
            assert!(folder.join(file).is_file(), "{id}: {file}");
        }
    }
    let text = std::fs::read_to_string(program.latest().join("junit.xml")).unwrap();
    let report = Report::deserialize_from_str(&text).unwrap();
    let cases = report.test_suites.iter().flat_map(|suite| &suite.test_cases);
    let bad: BTreeSet<&str> = cases
        .filter(|case| matches!(case.status, TestCaseStatus::NonSuccess { .. }))
        .map(|case| case.name.as_str())
        .collect();
    assert_eq!(bad, record.failed.keys().map(String::as_str).collect::<BTreeSet<_>>());
}

#[test]
fn fail_fast_ends_with_the_first_failure() {
    let program = Program::new();
    program.expect(1, &with(&FAULTY, &["--fail-fast", "--jobs", "1"]));
    let record = program.record();
    let failing = record.cases.iter().filter(|case| case.status.is_failure()).count();
    assert_eq!(failing, 1);
    assert!(record.cases.last().unwrap().status.is_failure());
    assert!(record.cases.len() < program.ids(&["--suite", "engine-smoke"]).len());
    assert_eq!(record.finished.unwrap().exit_code, 1);
}

#[test]
fn the_number_of_jobs_changes_no_verdict() {
    let program = Program::new();
    let mut findings = Vec::new();
    for jobs in ["1", "4"] {
        program.expect(1, &with(&FAULTY, &["--jobs", jobs]));
        let record = program.record();
        let mut cases: Vec<_> = record.cases.into_iter().map(|case| (case.id, case.checks)).collect();
        cases.sort_by(|a, b| a.0.cmp(&b.0));
        findings.push(cases);
    }
    assert_eq!(findings[0], findings[1]);
}

#[test]
fn only_the_properties_that_an_expression_names_are_judged() {
    let program = Program::new();
    program.expect(0, &with(&SMOKE, &["-E", "family(verify) & prop(verify.output | verify.lse)"]));
    for case in program.record().cases {
        let judged: Vec<_> = case.checks.iter().map(|check| check.property.as_str()).collect();
        assert_eq!(judged, ["verify.lse", "verify.output"], "{}", case.id);
    }
}

#[test]
fn a_case_file_and_an_id_run_the_same_case() {
    let program = Program::new();
    let id = &program.ids(&["--suite", "engine-smoke", "-E", "family(verify) & world(>=2)"])[0];
    program.write("case.json", id.parse::<Case>().unwrap().to_json());
    program.expect(0, &["run", "--case", "case.json"]);
    let from_file = program.record().cases;
    program.expect(0, &["run", "--suite", "engine-smoke", "--exact", id]);
    let from_suite = program.record().cases;
    assert_eq!((from_file.len(), from_suite.len()), (1, 1));
    assert_eq!((&from_file[0].id, &from_file[0].checks), (id, &from_suite[0].checks));
}

#[test]
fn status_levels_give_passing_cases_a_line() {
    let program = Program::new();
    let ids = program.ids(&["--suite", "engine-smoke", "layout/"]);
    let outcome = program.expect(0, &with(&SMOKE, &["layout/", "--status-level", "pass"]));
    assert!(ids.iter().all(|id| outcome.out.contains(&format!("pass {id}\n"))), "{}", outcome.out);
    let quiet = program.expect(0, &with(&SMOKE, &["layout/"]));
    assert!(ids.iter().all(|id| !quiet.out.contains(&format!("pass {id}\n"))), "{}", quiet.out);
}
