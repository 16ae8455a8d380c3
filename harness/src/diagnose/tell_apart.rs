//! A case on which faults with the same effect so far would differ.

use std::time::{Duration, Instant};

use shardcheck_cases::{Case, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, Fault};

use crate::run::{has_real_heads, judge_case};
use crate::status::Status;

/// Cases that are tried.
const MOST_CASES: usize = 120;

/// The first small case of the gate that one of `faults` fails and another does not, those of the family at hand first.
pub(crate) fn case_between(faults: &[&'static Fault], at_hand: &Case, budget: Duration) -> Option<String> {
    if faults.len() < 2 {
        return None;
    }
    let started = Instant::now();
    let mut cases = suite(SuiteName::Gate, 1);
    cases.retain(|case| !has_real_heads(case));
    // neighbours in a suite are alike
    cases.sort_by_cached_key(|case| {
        (case.family != at_hand.family, *blake3::hash(case.id().as_bytes()).as_bytes())
    });
    let hangs = |fault: &&&Fault| fault.class == shardcheck_cpu::FaultClass::Hang;
    if faults.iter().any(|fault| hangs(&fault)) {
        return None;
    }
    for case in cases.into_iter().take(MOST_CASES) {
        if started.elapsed() > budget {
            return None;
        }
        let verdicts: Vec<(Status, Option<String>)> =
            faults.iter().take(3).map(|fault| verdict(fault, &case)).collect();
        if verdicts.iter().any(|verdict| *verdict != verdicts[0]) {
            return Some(case.id());
        }
    }
    None
}

fn verdict(fault: &'static Fault, case: &Case) -> (Status, Option<String>) {
    let result = judge_case(case, &CpuEngine::with_fault(fault), &|_| true);
    (result.status, result.failures().next().map(|check| check.property.clone()))
}
