//! Every property has teeth: some fault that names it is noticed by that property alone.

use rayon::prelude::*;
use shardcheck::laboratory::Laboratory;
use shardcheck::material::Material;
use shardcheck::properties::{self, Property};
use shardcheck::run::has_real_heads;
use shardcheck_cases::{Case, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, Fault, faults};
use shardcheck_engine::Engine;

/// Cases on which a fault is tried for each property that it names.
const CASES_PER_FAULT: usize = 200;

/// Whether `property` fails on one of the first cases, the engine having this fault.
fn notices(property: &Property, fault: &'static Fault, cases: &[Case]) -> bool {
    let engine = CpuEngine::with_fault(fault);
    let cases = cases.iter().filter(|case| property.is_for(case) && !has_real_heads(case));
    cases.take(CASES_PER_FAULT).any(|case| {
        let material = Material::of(case, engine.profile()).expect("the embedded engine declares everything");
        property.judge(&Laboratory::new(case, &engine, &material)).status().is_failure()
    })
}

#[test]
fn every_property_notices_a_fault_that_names_it() {
    let mut cases = suite(SuiteName::Gate, 1);
    // neighbours in the suite are alike
    cases.sort_by_cached_key(|case| *blake3::hash(case.id().as_bytes()).as_bytes());
    let all: Vec<&Property> = properties::all().collect();
    let toothless: Vec<&str> = all
        .into_par_iter()
        .filter(|property| {
            let mut named = faults().iter().filter(|fault| fault.killed_by.contains(&property.id));
            !named.any(|fault| notices(property, fault, &cases))
        })
        .map(|property| property.id)
        .collect();
    assert!(toothless.is_empty(), "nothing shows that these can fail: {}", toothless.join(", "));
}
