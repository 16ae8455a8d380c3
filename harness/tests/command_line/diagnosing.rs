//! What a user learns of a failure: its diagnosis, its smallest case; and that the checks themselves are checked.

use serde_json::Value;
use shardcheck::diagnose::Diagnosis;
use shardcheck_cases::Case;

use crate::program::Program;

const FAULT: &str = "committed-prefix-rows";
const CASE: &str = "verify/tiny-mla/tp4.dcp2.h2.s2.b8.n12.bf16.a2a.hi_lo/12+3_7+2.pad2.shuf/gaussian/7";

#[test]
fn a_run_ends_with_the_known_fault_that_explains_its_failures() {
    let program = Program::new();
    let run = ["run", "--suite", "engine-smoke", "-E", "family(verify)", "--fault", FAULT];
    let outcome = program.expect(1, &run);
    assert!(outcome.out.contains("  diagnosis   committed-prefix-rows (causal-bound): "), "{}", outcome.out);
    assert!(outcome.out.contains("known faults ruled out"), "{}", outcome.out);
    let stored = program.record().diagnosis.unwrap();
    assert_eq!(stored.candidates[0].fault, FAULT);
    assert_eq!(stored.candidates[0].explains, stored.cases.len());
    let text = std::fs::read_to_string(program.latest().join("results.json")).unwrap();
    let results: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(results["diagnosis"]["candidates"][0]["fault"], FAULT);

    let again = program.expect(0, &["diagnose", "--json"]);
    let again: Diagnosis = serde_json::from_str(&again.out).unwrap();
    assert_eq!(
        (again.cases, again.candidates),
        (stored.cases, stored.candidates),
        "the folder says the same"
    );

    let quiet = program.expect(1, &[&run[..], &["--no-diagnose"]].concat());
    assert!(!quiet.out.contains("diagnosis"), "{}", quiet.out);
    assert!(program.record().diagnosis.is_none());
}

#[test]
fn a_run_that_passes_is_not_diagnosed() {
    let program = Program::new();
    let outcome = program.expect(0, &["run", "--suite", "engine-smoke", "-E", "family(decode)"]);
    assert!(!outcome.out.contains("diagnosis"), "{}", outcome.out);
    let nothing = program.expect(4, &["diagnose"]);
    assert!(nothing.err.contains("nothing to diagnose"), "{}", nothing.err);
}

#[test]
fn replay_names_the_fault_unless_told_not_to() {
    let program = Program::new();
    let outcome = program.expect(1, &["replay", CASE, "--fault", FAULT]);
    assert!(outcome.out.contains("     diagnosis  committed-prefix-rows"), "{}", outcome.out);
    let silent = program.expect(1, &["replay", CASE, "--fault", FAULT, "--no-diagnose"]);
    assert!(!silent.out.contains("diagnosis"), "{}", silent.out);
    let passing = program.expect(0, &["replay", CASE]);
    assert!(!passing.out.contains("diagnosis"), "{}", passing.out);
}

#[test]
fn the_failed_cases_of_a_run_are_replayed_with_the_fault_that_it_injected() {
    let program = Program::new();
    let listed =
        program.expect(0, &["list", "--suite", "engine-smoke", "-E", "family(verify)", "--format", "json"]);
    std::fs::write(program.path("listed.json"), listed.out.lines().next().unwrap()).unwrap();
    // a line of `list` is a case file, and a case that is given twice is one case
    let run = ["run", "--case", "listed.json", "--case", "listed.json", "--fault", FAULT];
    let outcome = program.expect(1, &run);
    assert!(outcome.out.contains("tried 1, judged 1"), "{}", outcome.out);
    let again = program.expect(1, &["replay", "latest"]);
    assert!(again.err.contains("with the fault of the run: committed-prefix-rows"), "{}", again.err);
}

#[test]
fn a_fault_that_no_case_shows_is_told_and_is_no_pass() {
    let program = Program::new();
    let outcome = program.expect(7, &["run", "--suite", "gate", "-E", "family(pack_lse)", "--fault", FAULT]);
    assert!(
        outcome.err.contains("nothing failed although committed-prefix-rows was injected"),
        "{}",
        outcome.err
    );
}

#[test]
fn shrink_writes_a_smaller_case_that_fails_the_same_property() {
    let program = Program::new();
    let shrink = ["shrink", CASE, "--fault", FAULT, "--property", "verify.output", "-o", "small.json"];
    let outcome = program.expect(0, &shrink);
    let id = outcome.out.lines().next().unwrap();
    let text = std::fs::read_to_string(program.path("small.json")).unwrap();
    let case = Case::from_json(&text).unwrap();
    assert_eq!(case.id(), id);
    assert!(shardcheck::shrink::Size::of(&case) < shardcheck::shrink::Size::of(&CASE.parse().unwrap()));
    assert!(outcome.out.contains(&format!("shardcheck replay '{id}' --fault '{FAULT}'")), "{}", outcome.out);
    assert!(outcome.err.lines().count() > 2, "progress is shown:\n{}", outcome.err);
    let replay = program.expect(1, &["replay", "small.json", "--fault", FAULT]);
    assert!(replay.out.contains("property  verify.output"), "{}", replay.out);
    program.expect(0, &["replay", "small.json"]);
}

#[test]
fn the_smallest_failed_case_of_a_run_is_shrunk_with_the_fault_of_the_run() {
    let program = Program::new();
    program.expect(
        1,
        &["run", "--suite", "engine-smoke", "-E", "family(verify)", "--fault", FAULT, "--runs", "kept"],
    );
    let outcome = program.expect(0, &["shrink", "latest", "--runs", "kept", "-o", "small.json"]);
    assert!(outcome.err.contains("with the fault of the run"), "{}", outcome.err);
    assert!(outcome.err.contains("the smallest of"), "{}", outcome.err);
    program.expect(1, &["replay", "small.json", "--fault", FAULT]);
    assert!(program.expect(2, &["shrink", "latest"]).err.contains("latest"));
}

#[test]
fn the_command_that_shows_a_hang_again_waits_no_longer_than_the_run_did() {
    let program = Program::new();
    let hang = ["--fault", "one-rank-skips-the-query-gather", "--timeout-s", "0.5"];
    let case = "decode/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/3+1.seq/gaussian/7";
    let run = program.expect(1, &[&["run", "--case", case, "--no-diagnose"][..], &hang].concat());
    assert!(run.out.contains("--timeout-s 0.5"), "{}", run.out);
    let replay = program.expect(1, &[&["replay", case, "--no-diagnose"][..], &hang].concat());
    assert!(replay.out.contains("--timeout-s 0.5"), "{}", replay.out);
}

#[test]
fn shrink_of_a_passing_case_or_towards_an_unknown_property_is_refused() {
    let program = Program::new();
    assert!(program.expect(4, &["shrink", CASE]).err.contains("nothing to shrink"));
    assert!(
        program.expect(2, &["shrink", CASE, "--property", "verify.outptu"]).err.contains("verify.output\"?")
    );
    let holds = ["shrink", CASE, "--fault", FAULT, "--property", "verify.query", "-o", "none.json"];
    assert!(program.expect(4, &holds).err.contains("verify.query does not fail on"));
    assert!(!program.path("none.json").exists());
    let missing = program.expect(2, &["shrink", "no/such.json"]);
    assert!(
        missing.err.contains("there is no file or folder of a case named \"no/such.json\""),
        "{}",
        missing.err
    );
}

#[test]
fn a_stored_case_knows_the_fault_of_its_run_wherever_it_is_named_from() {
    let program = Program::new();
    let listed = program.ids(&["--suite", "engine-smoke", "-E", "family(verify)"]).remove(0);
    program.expect(1, &["run", "--suite", "engine-smoke", &listed, "--fault", FAULT]);
    let folder = program.latest().join("cases").read_dir().unwrap().next().unwrap().unwrap().path();
    let file = folder.join("case.json");
    for stored in [&folder, &file] {
        let again = program.expect(1, &["replay", stored.to_str().unwrap()]);
        assert!(again.err.contains("with the fault of the run: committed-prefix-rows"), "{}", again.err);
    }
    let smaller = program.expect(0, &["shrink", folder.to_str().unwrap(), "-o", "small.json"]);
    assert!(smaller.out.contains("--fault 'committed-prefix-rows'"), "{}", smaller.out);
}

#[test]
fn the_self_test_finds_every_corruption() {
    let program = Program::new();
    let outcome = program.expect(0, &["self-test", "--json"]);
    let outcomes: Value = serde_json::from_str(&outcome.out).unwrap();
    let outcomes = outcomes.as_array().unwrap();
    assert!(outcomes.len() >= 15);
    assert!(outcomes.iter().all(|outcome| outcome["noticed"] == true), "{}", outcome.out);
    assert!(outcome.err.contains("each noticed by the check that it belongs to"), "{}", outcome.err);
}

#[test]
fn a_fault_that_is_asked_for_is_shrunk_whether_a_smallest_case_is_known_or_not() {
    let program = Program::new();
    let fault = "draft-head-accepts-every-draft";
    let arguments =
        ["mutants", "shrink", "--fault", fault, "--budget-s", "1", "-E", "family(stack) & id(~draft-head/)"];
    let ran = program.expect(0, &arguments);
    assert!(ran.out.contains(fault) && ran.out.contains("stack/"), "{}", ran.out);
}
