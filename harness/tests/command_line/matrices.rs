//! Kill matrices from the command line: of the embedded engine's faults, and of those at a boundary.

use shardcheck::matrix::{KillState, Matrix};

use crate::program::Program;

#[test]
fn a_matrix_in_json_reads_back_and_passes_where_every_named_property_sees_its_fault() {
    let program = Program::new();
    let outcome = program.expect(
        0,
        &[
            "mutants",
            "matrix",
            "--suite",
            "engine-smoke",
            "--fault",
            "written-by-every-rank",
            "--format",
            "json",
            "--output",
            "matrix.json",
        ],
    );
    let matrices: Vec<Matrix> = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!(matrices[0].rows[0].state, KillState::Killed);
    assert!(matrices[0].rows[0].cells.iter().all(|cell| cell.case.is_some()), "{matrices:?}");
    let written = std::fs::read_to_string(program.path("matrix.json")).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Matrix>>(&written).unwrap(), matrices);
}

#[test]
fn faults_at_the_boundary_are_listed_and_killed_by_name() {
    let program = Program::new();
    let list = program.expect(0, &["mutants", "list", "--boundary"]).out;
    assert!(list.lines().count() >= 40 && list.contains("output-all-zero"), "{list}");
    let run = ["mutants", "run", "--boundary", "--engine", "cpu", "--suite", "engine-smoke"];
    let named = [&run[..], &["--fault", "output-all-zero", "--fault", "lse-in-base-2"]].concat();
    let outcome = program.expect(0, &named).out;
    assert!(outcome.contains("states: killed 2, killed-by-other 0, survived 0"), "{outcome}");
    let table = program.expect(0, &[&named[..], &["--format", "markdown"]].concat()).out;
    assert!(table.contains("| `output-all-zero` | boundary | killed |"), "{table}");
}

#[test]
fn a_fault_at_the_boundary_that_is_misspelt_is_a_usage_error_with_a_hint() {
    let program = Program::new();
    let outcome = program.expect(2, &["mutants", "run", "--boundary", "--fault", "output-all-zeros"]);
    assert!(outcome.err.contains("did you mean \"output-all-zero\"?"), "{}", outcome.err);
}

#[test]
fn a_fault_that_is_asked_for_in_the_wrong_place_is_sent_to_its_own() {
    let program = Program::new();
    for verb in [&["run"][..], &["mutants", "run"], &["mutants", "matrix"], &["mutants", "diagnose"]] {
        let outcome = program.expect(2, &[verb, &["--fault", "lse-in-base-2"]].concat());
        assert!(outcome.err.contains("mutants run --boundary --fault lse-in-base-2"), "{}", outcome.err);
    }
    let outcome = program.expect(2, &["mutants", "run", "--boundary", "--fault", "written-by-every-rank"]);
    assert!(outcome.err.contains("mutants run --fault written-by-every-rank"), "{}", outcome.err);
}

#[test]
fn where_nothing_can_be_tampered_with_nothing_is_shown() {
    let program = Program::new();
    let run = ["mutants", "run", "--boundary", "--suite", "engine-smoke", "--fault", "slot-mapping-shifted"];
    let outcome = program.expect(7, &run);
    assert!(outcome.out.contains("not-applicable 1"), "{}", outcome.out);
    let why = "nothing is shown: no fault could be tried (";
    assert!(
        outcome.err.contains(why) && outcome.err.contains("slots"),
        "the exit code is explained: {}",
        outcome.err
    );
}
