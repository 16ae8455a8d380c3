//! A matrix says of each fault what became of it, and fails for each thing that is wrong with it.

use shardcheck_cases::{Family, SuiteName, suite};
use shardcheck_cpu::{Policies, fault};

use super::*;

fn smoke() -> Vec<Case> {
    suite(SuiteName::EngineSmoke, 1)
}

/// A known fault under another name, with other properties.
fn renamed(killed_by: &'static [&'static str], apply: Option<fn(&mut Policies)>) -> &'static Fault {
    let known = fault("committed-prefix-rows").unwrap();
    Box::leak(Box::new(Fault {
        name: "made-for-this-test",
        killed_by,
        apply: apply.unwrap_or(known.apply),
        ..*known
    }))
}

fn of(fault: &'static Fault, cases: &[Case]) -> Matrix {
    matrix(("engine-smoke", 1), &[fault], cases, false, &|_| {})
}

#[test]
fn every_property_that_a_fault_names_has_a_cell_with_a_witness_or_none() {
    let fault = fault("committed-prefix-rows").unwrap();
    let matrix = of(fault, &smoke());
    let row = &matrix.rows[0];
    assert_eq!(row.state, KillState::Killed);
    let named: Vec<_> = row.cells.iter().map(|cell| cell.property.as_str()).collect();
    assert_eq!(named, fault.killed_by);
    for cell in &row.cells {
        assert_eq!(cell.case.is_some(), cell.state == KillState::Killed, "{cell:?}");
        assert!(cell.tried > 0 || cell.state == KillState::NotApplicable, "{cell:?}");
    }
    assert!(row.cells.iter().filter(|cell| cell.state == KillState::Killed).count() >= 3, "{row:?}");
}

#[test]
fn every_fault_is_told_once_as_it_is_tried() {
    let chosen = ["committed-prefix-rows", "written-by-every-rank"].map(|name| fault(name).unwrap());
    let told = std::sync::Mutex::new(Vec::new());
    let done = |row: &Row| told.lock().unwrap().push(row.clone());
    let matrix = matrix(("engine-smoke", 1), &chosen, &smoke(), false, &done);
    let mut told = told.into_inner().unwrap();
    told.sort_by_key(|row| chosen.iter().position(|fault| fault.name == row.fault));
    assert_eq!(told, matrix.rows);
}

#[test]
fn a_property_that_does_not_notice_the_fault_that_names_it_is_wrong() {
    let matrix = of(renamed(&["verify.row-lengths", "verify.query"], None), &smoke());
    assert_eq!(matrix.rows[0].state, KillState::Killed);
    let [Shortcoming::Unnoticed { property, tried, .. }] = &matrix.shortcomings()[..] else {
        panic!("{:?}", matrix.shortcomings())
    };
    assert_eq!(property, "verify.query");
    assert!(matrix.shortcomings()[0].to_string().contains(&format!("held on all {tried} cases")));
}

#[test]
fn a_fault_that_others_alone_see_is_wrong() {
    let matrix = of(renamed(&["equal.repeat"], None), &smoke());
    assert!(matches!(&matrix.shortcomings()[..], [Shortcoming::ByOther { .. }]), "{matrix:?}");
}

#[test]
fn a_fault_that_changes_nothing_is_dead_and_one_that_changes_something_unseen_survives() {
    let matrix = of(renamed(&["verify.output"], Some(|_| {})), &smoke());
    let [dead @ Shortcoming::Dead { .. }] = &matrix.shortcomings()[..] else { panic!("{matrix:?}") };
    assert!(dead.to_string().contains("shows nothing: it changed no answer"), "{dead}");
    // within every bound, and still another answer
    let slight: fn(&mut Policies) = |p| p.merge.reduce_order = |_, world| (0..world).rev().collect();
    let cases: Vec<Case> = smoke().into_iter().filter(|case| case.family == Family::Decode).collect();
    let matrix = of(renamed(&["decode.query"], Some(slight)), &cases);
    let survived = matches!(matrix.rows[0].state, KillState::Survived | KillState::KilledByOther);
    assert!(survived && matrix.rows[0].changed != Some(false), "{matrix:?}");
}

#[test]
fn a_fault_without_a_case_does_not_apply_and_is_not_wrong() {
    let mut writes = smoke();
    writes.retain(|case| case.family == Family::Write);
    let matrix = of(fault("committed-prefix-rows").unwrap(), &writes);
    assert_eq!(matrix.rows[0].state, KillState::NotApplicable);
    assert_eq!(matrix.shortcomings(), []);
}

#[test]
fn a_property_without_a_killing_fault_is_named_where_no_fault_was_left_out() {
    let mut writes = smoke();
    writes.retain(|case| case.family == Family::Write);
    let chosen = [fault("written-by-every-rank").unwrap()];
    let idle = matrix(("writes", 1), &chosen, &writes, true, &|_| {}).idle_properties;
    assert!(idle.contains(&"write.overflow".to_owned()) && !idle.contains(&"write.single-writer".to_owned()));
    assert!(!idle.iter().any(|property| property.starts_with("verify.")), "no case is judged on those");
    assert!(matrix(("writes", 1), &chosen, &writes, false, &|_| {}).idle_properties.is_empty());
}

#[test]
fn a_matrix_survives_a_round_trip_and_refuses_what_it_does_not_know() {
    let matrix = of(fault("committed-prefix-rows").unwrap(), &smoke());
    let text = serde_json::to_string_pretty(&matrix).unwrap();
    assert_eq!(serde_json::from_str::<Matrix>(&text).unwrap(), matrix);
    let mut value = serde_json::to_value(&matrix).unwrap();
    assert_eq!(value["schema_version"], MATRIX_SCHEMA_VERSION);
    value["score"] = 1.into();
    assert!(serde_json::from_value::<Matrix>(value).is_err(), "there is no score");
}

#[test]
fn suites_stand_side_by_side() {
    let gate = of(fault("committed-prefix-rows").unwrap(), &smoke());
    let mut nightly = gate.clone();
    nightly.suite = "nightly".to_owned();
    nightly.rows[0].state = KillState::Survived;
    let table = markdown(&[gate.clone(), nightly.clone()]);
    let line = table.lines().find(|line| line.starts_with("| `committed-prefix-rows`")).unwrap();
    assert_eq!(line.matches('|').count(), 7);
    assert!(line.contains("| killed |") && line.contains("| survived |"), "{line}");
    assert!(table.lines().next().unwrap().contains("| engine-smoke | seen by | nightly | seen by |"));
    let text = lines(&[gate, nightly]);
    assert!(text.contains("states: killed 0, killed-by-other 0, survived 1"), "{text}");
    assert!(text.contains("wrong: committed-prefix-rows survived"), "{text}");
}

#[test]
fn states_are_written_as_they_are_named() {
    for state in KillState::ALL {
        assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        assert!(!state.meaning().is_empty());
    }
}
