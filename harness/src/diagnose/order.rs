//! The order in which faults are tried: likely ones first, since a budget may not suffice for all.

use std::collections::HashMap;
use std::sync::LazyLock;

use shardcheck_cpu::{Fault, faults};

use super::Evidence;
use super::stages::agrees;
use crate::properties;

/// What a class that goes with the first stage that diverges is worth beside the properties.
const STAGE: f64 = 0.25;

/// The known faults, those that the failed properties point at first: the more of what failed a fault names, and the less of what
/// held, the likelier it is. A fault that names no property of a case at all is one of another operation.
pub(super) fn likely_first(telling: &[&Evidence]) -> Vec<&'static Fault> {
    let judged: Vec<Vec<&str>> = telling
        .iter()
        .map(|evidence| properties::of(&evidence.case).map(|property| property.id).collect())
        .collect();
    let likeness = |fault: &Fault| -> f64 {
        let cases = telling.iter().zip(&judged);
        cases.map(|(evidence, judged)| of_case(fault, evidence, judged)).sum()
    };
    let mut order: Vec<(f64, &'static Fault)> =
        faults().iter().map(|fault| (likeness(fault), fault)).collect();
    // stable: equals stay in the order of the registry
    order.sort_by(|a, b| b.0.total_cmp(&a.0));
    order.into_iter().map(|(_, fault)| fault).collect()
}

/// Whether the fault names a property that was judged on any of the cases.
pub(super) fn names_any_of(fault: &Fault, telling: &[&Evidence]) -> bool {
    let of_case = |evidence: &&Evidence| {
        properties::of(&evidence.case).any(|property| fault.killed_by.contains(&property.id))
    };
    telling.iter().any(of_case)
}

/// Weighted share of what failed or could have in what failed and is named, and a bonus for the stage.
fn of_case(fault: &Fault, evidence: &Evidence, judged: &[&str]) -> f64 {
    let failed = |id: &str| evidence.properties.iter().any(|failed| failed == id);
    let could: Vec<&str> = fault.killed_by.iter().copied().filter(|id| judged.contains(id)).collect();
    if could.is_empty() {
        return -1.0;
    }
    let named: f64 = could.iter().filter(|id| failed(id)).map(|id| weight(id)).sum();
    let held: f64 = could.iter().filter(|id| !failed(id)).map(|id| weight(id)).sum();
    let all: f64 = evidence.properties.iter().map(|id| weight(id)).sum();
    let stage = evidence.stage.is_some_and(|stage| agrees(fault.class, stage));
    named / (all + held).max(f64::MIN_POSITIVE) + if stage { STAGE } else { 0.0 }
}

/// What a property says of the cause: the fewer faults name it, the more (the logarithm of one over their share).
fn weight(property: &str) -> f64 {
    static NAMED: LazyLock<HashMap<&'static str, usize>> = LazyLock::new(|| {
        let mut named = HashMap::new();
        faults().iter().flat_map(|fault| fault.killed_by).for_each(|id| *named.entry(*id).or_default() += 1);
        named
    });
    let named = NAMED.get(property).copied().unwrap_or(0);
    ((faults().len() + 1) as f64 / (named + 1) as f64).ln()
}
