//! Properties of accepting drafts on the embedded engine, on its faults, and on engines that declare themselves.

use std::collections::BTreeSet;

use shardcheck_cases::{Case, Family, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, faults};
use shardcheck_engine::Engine;

use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::properties;
use crate::status::Status;

fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
    suite(name, seed).into_iter().filter(|case| case.family == Family::Acceptance).collect()
}

/// Statuses of the properties of the case.
fn judged(engine: &dyn Engine, case: &Case) -> Vec<(&'static str, Status)> {
    let material = Material::of(case, engine.profile()).unwrap();
    let laboratory = Laboratory::new(case, engine, &material);
    properties::of(case).map(|property| (property.id, property.judge(&laboratory).status())).collect()
}

fn failures(engine: &dyn Engine, case: &Case) -> Vec<&'static str> {
    judged(engine, case).into_iter().filter(|(_, status)| status.is_failure()).map(|(id, _)| id).collect()
}

#[test]
fn the_embedded_engine_accepts_every_batch_of_the_gate_rightly() {
    let engine = shardcheck_cpu::engine();
    for seed in [1, 2] {
        let cases = cases(SuiteName::Gate, seed);
        assert!(cases.len() >= 38, "{}", cases.len());
        for case in &cases {
            let wrong: Vec<_> =
                judged(&engine, case).into_iter().filter(|(_, status)| *status != Status::Pass).collect();
            assert!(wrong.is_empty(), "{}: {wrong:?}", case.id());
        }
    }
}

#[test]
fn every_fault_of_acceptance_fails_every_property_that_it_names_on_the_gate() {
    let cases = cases(SuiteName::Gate, 1);
    let (mut tried, mut unseen) = (0, Vec::new());
    for fault in faults().iter().filter(|fault| fault.killed_by[0].starts_with("acceptance.")) {
        let engine = CpuEngine::with_fault(fault);
        let failed: BTreeSet<&str> = cases.iter().flat_map(|case| failures(&engine, case)).collect();
        let left: Vec<&str> = fault.killed_by.iter().copied().filter(|id| !failed.contains(id)).collect();
        if !left.is_empty() {
            unseen.push(format!("{} is not seen by {}, but by {failed:?}", fault.name, left.join(", ")));
        }
        tried += 1;
    }
    assert!(unseen.is_empty(), "{}", unseen.join("\n"));
    assert!(tried >= 25, "{tried}");
}

#[test]
fn few_outcomes_are_left_open_but_where_laws_are_equal_or_numbers_at_their_edges() {
    let (mut open, mut all) = (0, 0);
    for case in cases(SuiteName::Gate, 1) {
        let shardcheck_cases::Body::Acceptance(body) = &case.body else { panic!("a case of another family") };
        use shardcheck_cases::AcceptancePattern::{Edges, Equal};
        if matches!(body.pattern, Equal | Edges) {
            continue;
        }
        let material = super::AcceptanceMaterial::new(body, case.seed);
        all += material.count();
        open +=
            material.outcomes().iter().filter(|found| found.len() > 1 || found[0].tokens.len() > 1).count();
    }
    assert!(all > 5000 && open * 500 < all, "{open} of {all} are open");
}
