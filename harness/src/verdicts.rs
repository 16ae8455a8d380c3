//! What the properties of a case say of an engine, for the tests of areas.

use std::collections::BTreeMap;

use shardcheck_cases::Case;
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
