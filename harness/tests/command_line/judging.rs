//! Verdicts taken up again: judge, replay, diff and mutants.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use shardcheck::event::CaseResult;
use shardcheck_cases::Case;

use crate::program::{Outcome, Program, only_case_folder};

const FAULT: &str = "committed-prefix-rows";

/// A run of one verify case with the fault.
fn one_failure() -> (Program, String) {
    let program = Program::new();
    let selection = ["--suite", "engine-smoke", "-E", "family(verify) & world(2) & kv(bf16)"];
    let id = program.ids(&selection)[0].clone();
    program.expect(1, &["run", "--suite", "engine-smoke", "--exact", &id, "--fault", FAULT]);
    (program, id)
}

fn results(outcome: &Outcome) -> Vec<CaseResult> {
    outcome.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn judge_decides_the_same_without_the_engine() {
    let program = Program::new();
    program.expect(1, &["run", "--suite", "engine-smoke", "--fault", FAULT]);
    let record = program.record();
    let outcome = program.expect(1, &["judge", "--json"]);
    let again = results(&outcome);
    assert_eq!(again.len(), record.failed.len());
    for result in again {
        let before = record.find(&result.id).unwrap();
        assert_eq!((result.status, &result.checks), (before.status, &before.checks), "{}", result.id);
    }
    let count = record.failed.len();
    let words = format!("decided again on {count} stored failures");
    assert!(outcome.err.contains(&words) && outcome.err.contains("0 of them otherwise"), "{}", outcome.err);
    let run_id = program.record().header.run_id;
    let text = program.expect(1, &["judge", &run_id]).out;
    assert!(text.contains("row bound: the first stage that diverges"), "{text}");
}

#[test]
fn judge_needs_nothing_but_events_and_case_folders() {
    let (program, id) = one_failure();
    for file in ["results.json", "junit.xml", "report.html"] {
        std::fs::remove_file(program.latest().join(file)).unwrap();
    }
    let before = program.record().find(&id).unwrap().checks.clone();
    let again = results(&program.expect(1, &["judge", "latest", "--json"]));
    assert_eq!(again[0].checks, before);
}

#[test]
fn judge_of_a_clean_run_has_nothing_to_decide() {
    let program = Program::new();
    program.expect(0, &["run", "--suite", "engine-smoke", "layout/"]);
    let outcome = program.expect(0, &["judge"]);
    assert!(outcome.err.contains("on 0 stored failures"), "{}", outcome.err);
}

/// Spoils one file of the stored case and returns what `judge` says.
#[track_caller]
fn judge_with(spoil: impl Fn(&Path)) -> String {
    let (program, _) = one_failure();
    spoil(&only_case_folder(&program.latest()));
    let outcome = program.expect(2, &["judge"]);
    assert!(outcome.err.starts_with("error: "), "{}", outcome.err);
    outcome.err
}

fn rewrite(path: &Path, change: impl Fn(&mut Value)) {
    let mut value: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

#[test]
fn a_damaged_recording_is_named_and_never_judged() {
    let cut = judge_with(|folder| {
        let path = folder.join("tensors.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    });
    assert!(cut.contains("tensors.safetensors is damaged") && cut.contains("shardcheck replay"), "{cut}");
    let text = judge_with(|folder| std::fs::write(folder.join("recording.json"), "{").unwrap());
    assert!(text.contains("recording.json is damaged"), "{text}");
    let case = judge_with(|folder| std::fs::write(folder.join("case.json"), "{}").unwrap());
    assert!(case.contains("case.json is damaged"), "{case}");
    let gone = judge_with(|folder| std::fs::remove_file(folder.join("recording.json")).unwrap());
    assert!(gone.contains("recording.json"), "{gone}");
    let names = judge_with(|folder| {
        rewrite(&folder.join("recording.json"), |value| value["names"] = Value::Array(vec![]));
    });
    assert!(names.contains("recording.json is damaged"), "{names}");
}

#[test]
fn a_recording_of_another_version_is_refused() {
    let text = judge_with(|folder| {
        rewrite(&folder.join("recording.json"), |value| value["recording"]["schema_version"] = 99.into());
    });
    assert!(text.contains("schema version 99") && text.contains("reads 1"), "{text}");
}

#[test]
fn a_recording_that_lacks_a_step_is_a_crash_that_says_so() {
    let (program, _) = one_failure();
    rewrite(&only_case_folder(&program.latest()).join("recording.json"), |value| {
        value["recording"]["sessions"] = Value::Array(vec![]);
        value["names"] = Value::Array(vec![]);
    });
    let outcome = program.expect(1, &["judge"]);
    assert!(
        outcome.out.contains("crash: ") && outcome.out.contains("is not in the recording"),
        "{}",
        outcome.out
    );
    assert!(outcome.err.contains("1 of them otherwise than before"), "{}", outcome.err);
}

#[test]
fn replay_takes_an_id_a_file_a_stored_case_or_a_run() {
    let (program, id) = one_failure();
    program.write("case.json", id.parse::<Case>().unwrap().to_json());
    let folder = only_case_folder(&program.latest());
    let stored = program.record().find(&id).unwrap().checks.clone();
    let run_id = program.record().header.run_id;
    for what in [id.as_str(), "case.json", folder.to_str().unwrap(), "latest", &run_id] {
        // a run and what is stored in it are replayed as they were, with the fault; a case by itself is a case for any engine
        let of_run = what != id && what != "case.json";
        let plain = results(&program.expect(i32::from(of_run), &["replay", what, "--json"]));
        assert_eq!((plain.len(), plain[0].id.as_str()), (1, id.as_str()), "{what}");
        let faulty = results(&program.expect(1, &["replay", what, "--fault", FAULT, "--json"]));
        assert_eq!(faulty[0].checks, stored, "{what}");
    }
    let text = program.expect(0, &["replay", &id]).out;
    assert!(text.starts_with(&format!("pass {id}\n")) && text.contains("verify.output "), "{text}");
    let text = program.expect(1, &["replay", &id, "--fault", FAULT]).out;
    assert!(text.contains("rows concerned: ") && text.contains("row bound"), "{text}");
}

#[test]
fn replay_of_one_property_judges_that_one() {
    let (program, id) = one_failure();
    let arguments = ["replay", &id, "--property", "verify.lse", "--json"];
    let only = results(&program.expect(0, &arguments));
    assert_eq!(
        only[0].checks.iter().map(|check| check.property.as_str()).collect::<Vec<_>>(),
        ["verify.lse"]
    );
}

#[test]
fn replay_of_a_run_without_failures_has_nothing_to_do() {
    let program = Program::new();
    program.expect(0, &["run", "--suite", "engine-smoke", "layout/"]);
    let outcome = program.expect(4, &["replay", "latest"]);
    assert!(outcome.err.contains("no case of") && outcome.err.contains("failed"), "{}", outcome.err);
}

#[test]
fn diff_tells_what_newly_fails_and_what_was_fixed() {
    let program = Program::new();
    let arguments = ["run", "--suite", "engine-smoke", "-E", "family(verify | layout)"];
    program.expect(0, &arguments);
    let healthy = program.record();
    program.expect(1, &[&arguments[..], &["--fault", FAULT]].concat());
    let faulty = program.record();
    let (a, b) = (healthy.header.run_id.as_str(), faulty.header.run_id.as_str());
    let worse: Value = serde_json::from_str(&program.expect(1, &["diff", a, b, "--json"]).out).unwrap();
    let newly: BTreeSet<&str> =
        worse["newly_failing"].as_array().unwrap().iter().map(|case| case["id"].as_str().unwrap()).collect();
    assert_eq!(newly, faulty.failed.keys().map(String::as_str).collect());
    let better = program.expect(0, &["diff", b, a]).out;
    assert!(better.contains(&format!("{} fixed", faulty.failed.len())), "{better}");
    let same = program.expect(0, &["diff", a, a]).out;
    assert!(same.contains("0 newly failing, 0 fixed, 0 still failing"), "{same}");
    assert_eq!(program.expect(1, &["diff", a]).out, program.expect(1, &["diff", a, "latest"]).out);
}

#[test]
fn a_fault_is_killed_by_a_property_that_names_it_and_by_nothing_less() {
    let program = Program::new();
    let smoke = ["mutants", "run", "--suite", "engine-smoke", "--fault", FAULT];
    let text = program.expect(0, &smoke).out;
    let words: Vec<&str> = text.split_whitespace().collect();
    let fault = shardcheck_cpu::fault(FAULT).unwrap();
    assert_eq!(words[..2], [FAULT, "killed"], "{text}");
    assert!(fault.killed_by.contains(&words[2]) && words[3].parse::<Case>().is_ok(), "{text}");
    let json = program.expect(0, &[&smoke[..], &["--format", "json", "--output", "kills.json"]].concat()).out;
    let value: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["mutants"][0]["state"], "killed");
    assert_eq!(value["killed_by_property"][words[2]], Value::from(vec![FAULT]));
    let written = std::fs::read_to_string(program.path("kills.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&written).unwrap(), value);
    let table = program.expect(0, &[&smoke[..], &["--format", "markdown"]].concat()).out;
    assert!(table.starts_with("| fault | state |") && table.contains("| killed |"), "{table}");
}

#[test]
fn a_fault_that_no_selected_case_can_show_was_not_killed() {
    let program = Program::new();
    let outcome = program
        .expect(7, &["mutants", "run", "--suite", "engine-smoke", "--fault", FAULT, "-E", "family(write)"]);
    assert!(outcome.out.contains("not_applicable"), "{}", outcome.out);
    assert!(outcome.err.contains("0 of 1 faults killed"), "{}", outcome.err);
    let why =
        format!("nothing is shown of {FAULT}: no selected case is judged on a property that the fault names");
    assert!(outcome.err.contains(&why), "the exit code is explained: {}", outcome.err);
}
