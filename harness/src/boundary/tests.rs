//! Faults at the boundary are seen on the embedded engine, and only where there is something to tamper with.

use std::collections::BTreeSet;

use shardcheck_cases::{Family, SuiteName, suite};

use super::*;

#[test]
fn every_fault_has_a_name_of_its_own_a_title_and_properties_that_exist() {
    let mut names = BTreeSet::new();
    for fault in boundary_faults() {
        assert!(names.insert(fault.name), "{} twice", fault.name);
        assert!(fault.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
        assert!(fault.title.len() > 20 && !fault.title.ends_with('.'), "{}", fault.name);
        assert!(!fault.killed_by.is_empty(), "{}", fault.name);
        for id in fault.killed_by {
            assert!(properties::find(id).is_some(), "{} names {id}, which no property has", fault.name);
        }
        assert_eq!(boundary_fault(fault.name).map(|found| found.title), Some(fault.title));
    }
    assert!(names.len() >= 40, "{}", names.len());
}

#[test]
fn there_is_a_fault_at_the_boundary_for_every_family_that_a_session_answers() {
    for family in Family::ALL.into_iter().filter(|family| *family != Family::Rules) {
        let seen_on =
            |id: &&str| properties::find(id).is_some_and(|property| property.families.contains(&family));
        assert!(boundary_faults().any(|fault| fault.killed_by.iter().any(seen_on)), "{family}");
    }
}

#[test]
fn every_fault_is_killed_on_the_embedded_engine_in_the_gate_except_for_what_it_derives_itself() {
    let engine = shardcheck_cpu::engine();
    let faults: Vec<_> = boundary_faults().collect();
    let trials = try_boundary(&faults, &engine, &suite(SuiteName::Gate, 1), &|_| {});
    let alive: Vec<_> = trials.iter().filter(|trial| trial.state != KillState::Killed).collect();
    let names: Vec<_> = alive.iter().map(|trial| trial.fault.as_str()).collect();
    assert_eq!(names, ["slot-mapping-shifted"], "{alive:#?}");
    assert_eq!(alive[0].state, KillState::NotApplicable);
    assert!(alive[0].reason.as_ref().unwrap().contains("slots does not pass the boundary"));
}

#[test]
fn a_step_is_answered_for_tampered_inputs_and_they_come_back_as_they_were_given() {
    let case: Case =
        "verify/tiny-mla/tp2.dcp2.h2.s2.b8.n8.bf16.ag_rs/12+3_7+2.seq/gaussian/7".parse().unwrap();
    let engine = shardcheck_cpu::engine();
    let material = Material::of(&case, engine.profile()).unwrap();
    let tampered = Tampered::new(&engine, boundary_fault("query-heads-exchanged").unwrap());
    let bench = Laboratory::new(&case, &tampered, &material);
    let honest = Laboratory::new(&case, &engine, &material);
    assert_eq!(bench.observed().unwrap().changed_inputs, Vec::<String>::new());
    assert_ne!(bench.observed().unwrap().reply.outputs, honest.observed().unwrap().reply.outputs);
    assert_eq!(tampered.touched(), 1, "the write has no query");
}

#[test]
fn what_an_engine_changes_in_its_inputs_is_passed_on() {
    let case: Case = "merge_states/w2.t4.h2.d16.bf16.ag_rs/random/contiguous/7".parse().unwrap();
    let engine = shardcheck_cpu::hostile::hostile(shardcheck_cpu::hostile::Hostility::ChangesInput);
    let material = Material::of(&case, engine.profile()).unwrap();
    let tampered = Tampered::new(engine.as_ref(), boundary_fault("given-lses-in-base-2").unwrap());
    let bench = Laboratory::new(&case, &tampered, &material);
    let changed = &bench.observed().unwrap().changed_inputs;
    assert_eq!(*changed, ["prefix_lse", "prefix_out", "suffix_lse", "suffix_out"]);
}

#[test]
fn an_engine_that_fails_without_the_fault_proves_nothing() {
    let engine = shardcheck_cpu::CpuEngine::with_fault(shardcheck_cpu::fault("ranks-averaged").unwrap());
    let fault = boundary_fault("given-partials-of-ranks-exchanged").unwrap();
    let cases: Vec<Case> = suite(SuiteName::EngineSmoke, 1)
        .into_iter()
        .filter(|case| case.family == Family::MergePartials)
        .collect();
    let healthy = shardcheck_cpu::engine();
    assert_eq!(try_one(fault, &healthy, &cases).state, KillState::Killed);
    let trial = try_one(fault, &engine, &cases);
    // where it is killed all the same, the witness is a case on which the engine is right
    if let Some(id) = &trial.case {
        let case: Case = id.parse().unwrap();
        let material = Material::of(&case, engine.profile()).unwrap();
        let property = properties::find(trial.property.as_deref().unwrap()).unwrap();
        assert!(!property.judge(&Laboratory::new(&case, &engine, &material)).status().is_failure());
    } else {
        assert_ne!(trial.state, KillState::Killed);
    }
}

#[test]
fn the_step_before_answers_only_where_there_was_one() {
    let fault = boundary_fault("reply-of-the-step-before").unwrap();
    let healthy = shardcheck_cpu::engine();
    let trial = try_one(fault, &healthy, &suite(SuiteName::EngineSmoke, 1));
    assert!(trial.property.as_deref().is_some_and(|property| property.starts_with("sequence.")), "{trial:?}");
}
