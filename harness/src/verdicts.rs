//! What the properties of a case say of an engine, for the tests of areas.

use std::collections::{BTreeMap, BTreeSet};

use shardcheck_cases::{Case, Family, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, faults};
use shardcheck_engine::Engine;

use crate::finding::Finding;
use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::properties;
use crate::status::Status;

/// Statuses of the properties of the case.
pub fn judged(engine: &dyn Engine, case: &Case) -> Vec<(&'static str, Status)> {
    let material = Material::of(case, engine.profile()).unwrap();
    let laboratory = Laboratory::new(case, engine, &material);
    properties::of(case).map(|property| (property.id, property.judge(&laboratory).status())).collect()
}

/// Properties that fail on the case.
pub fn failures(engine: &dyn Engine, case: &Case) -> Vec<&'static str> {
    judged(engine, case).into_iter().filter(|(_, status)| status.is_failure()).map(|(id, _)| id).collect()
}

/// Properties that fail on the case with what they say, and the elements that those which hold have compared; none says nothing.
pub fn findings(
    engine: &dyn Engine,
    case: &Case,
    material: &Material,
) -> (BTreeMap<&'static str, String>, u64) {
    let laboratory = Laboratory::new(case, engine, material);
    let (mut failed, mut compared) = (BTreeMap::new(), 0);
    for property in properties::of(case) {
        match property.judge(&laboratory) {
            Finding::Holds(measured) => compared += measured.compared,
            finding if finding.status().is_failure() => {
                failed.insert(property.id, format!("{finding:?}"));
            }
            other => panic!("{} says nothing of {}: {other:?}", property.id, case.id()),
        }
    }
    (failed, compared)
}

/// Cases of a suite that are of one family.
pub fn cases_of(family: Family, name: SuiteName, seed: u64) -> Vec<Case> {
    suite(name, seed).into_iter().filter(|case| case.family == family).collect()
}

/// That the embedded engine passes every property of every case of a family in the gate, by two seeds, each of at least so many cases.
pub fn passes_the_gate(family: Family, least: usize) {
    let engine = shardcheck_cpu::engine();
    for seed in [1, 2] {
        let cases = cases_of(family, SuiteName::Gate, seed);
        assert!(cases.len() >= least, "{}", cases.len());
        for case in &cases {
            let wrong: Vec<_> =
                judged(&engine, case).into_iter().filter(|(_, status)| *status != Status::Pass).collect();
            assert!(wrong.is_empty(), "{}: {wrong:?}", case.id());
        }
    }
}

/// That each fault fails, on some case of a family in the gate, each property of an area that it names; at least so many name some.
pub fn faults_are_seen(family: Family, area: &str, least: usize) {
    let cases = cases_of(family, SuiteName::Gate, 1);
    let (mut tried, mut unseen) = (0, Vec::new());
    for fault in faults() {
        let named: Vec<&str> = fault.killed_by.iter().copied().filter(|id| id.starts_with(area)).collect();
        if named.is_empty() {
            continue;
        }
        let engine = CpuEngine::with_fault(fault);
        let mut failed = BTreeSet::new();
        for case in &cases {
            if !named.iter().all(|id| failed.contains(id)) {
                failed.extend(failures(&engine, case));
            }
        }
        let left: Vec<&str> = named.into_iter().filter(|id| !failed.contains(id)).collect();
        if !left.is_empty() {
            unseen.push(format!("{} is not seen by {left:?}, but by {failed:?}", fault.name));
        }
        tried += 1;
    }
    assert!(unseen.is_empty(), "{}", unseen.join("\n"));
    assert!(tried >= least, "{tried}");
}
