//! Properties of Kimi delta attention on the embedded engine and on its faults.

use std::collections::{BTreeMap, BTreeSet};

use shardcheck_cases::{Body, Case, Family, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, faults};
use shardcheck_engine::Engine;

use super::KdaMaterial;
use crate::material::Material;
use crate::verdicts::findings;

fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
    suite(name, seed).into_iter().filter(|case| case.family == Family::Kda).collect()
}

#[test]
fn the_embedded_engine_is_right_on_every_session_of_the_gate() {
    let engine = shardcheck_cpu::engine();
    for seed in [1, 2] {
        let cases = cases(SuiteName::Gate, seed);
        assert!(cases.len() >= 20, "{}", cases.len());
        for case in &cases {
            let material = Material::of(case, engine.profile()).unwrap();
            let (failed, compared) = findings(&engine, case, &material);
            assert!(failed.is_empty() && compared > 0, "{}: {failed:?}", case.id());
        }
    }
}

#[test]
fn every_fault_of_kda_fails_every_property_that_it_names_on_the_gate() {
    let engine = shardcheck_cpu::engine();
    let faults = || faults().iter().filter(|fault| fault.killed_by[0].starts_with("kda."));
    let mut seen: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let done = |failed: &BTreeSet<&str>, named: &[&str]| named.iter().all(|id| failed.contains(id));
    for case in cases(SuiteName::Gate, 1) {
        let material = Material::of(&case, engine.profile()).unwrap();
        for fault in faults() {
            let failed = seen.entry(fault.name).or_default();
            if !done(failed, fault.killed_by) {
                failed.extend(findings(&CpuEngine::with_fault(fault), &case, &material).0.into_keys());
            }
        }
    }
    let unseen: Vec<String> = faults()
        .filter(|fault| !done(&seen[fault.name], fault.killed_by))
        .map(|fault| format!("{}: {:?}, where {:?} name it", fault.name, seen[fault.name], fault.killed_by))
        .collect();
    let tried = faults().count();
    assert!(unseen.is_empty(), "{}", unseen.join("\n"));
    assert!(tried >= 30, "{tried}");
}

fn material(id: &str) -> KdaMaterial {
    let case: Case = id.parse().unwrap();
    let Body::Kda(body) = &case.body else { panic!("another body") };
    KdaMaterial::new(body, case.seed, shardcheck_cpu::engine().profile()).unwrap()
}

#[test]
fn histories_leave_rejected_rows_out_and_split_steps_read_what_was_there_before() {
    let material =
        material("kda/softplus.h2.hv2.k4.v4.t4/tp1.dcp1.c1.d2/3.n0_3.0_2.0-2w1+1.0+1.n2_1.n1/slow/1");
    let histories = material.histories();
    assert_eq!(histories[2][0].rows, [0, 1, 2, 3, 6, 7]);
    assert!(histories[2][0].is_forked && histories[2][0].is_rolled_back && !histories[2][0].is_recycled);
    assert_eq!(histories[2][1].rows, [0, 1, 2, 3, 4, 5, 8]);
    assert!(histories[3][0].is_recycled && histories[3][0].rows == [10]);
    let steps =
        self::material("kda/softplus.h2.hv2.k4.v4.t4/tp1.dcp1.c1.d0/2.n0+0.n1_2.0w1+1.1w0/slow/1").split();
    let slots: Vec<Vec<(Option<usize>, usize)>> =
        steps.iter().map(|step| step.requests.iter().map(|r| (r.read, r.write)).collect()).collect();
    assert_eq!(slots[2], [(Some(0), 1), (Some(1), 0)]);
    assert_eq!(slots[3], [(Some(1), 1)]);
    assert_eq!(steps.iter().map(|step| step.accepted.clone()).collect::<Vec<_>>()[2], [1, 0]);
}
