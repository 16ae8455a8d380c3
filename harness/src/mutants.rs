//! Negative controls: engines with one fault each, and which property kills which.
//!
//! A fault is killed when a property that it names fails on it. A property that does not name it may see it too, but a
//! harness that cannot say *what* is wrong has not done its work, so that counts as `killed_by_other`, not as killed.

use std::convert::Infallible;
use std::time::Duration;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use shardcheck_cases::Case;
use shardcheck_cpu::{CpuEngine, Fault};
use shardcheck_engine::Engine;

use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::properties;
use crate::quiet::Quiet;
use crate::run::has_real_heads;

/// What became of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MutantState {
    /// A property that the fault names failed.
    Killed,
    /// Only a property that the fault does not name failed.
    KilledByOther,
    /// No property failed on any case tried.
    Survived,
    /// No case that was selected can show it.
    NotApplicable,
}

impl MutantState {
    /// All states, in a stable order.
    pub const ALL: [Self; 4] = [Self::Killed, Self::KilledByOther, Self::Survived, Self::NotApplicable];

    /// Name as it stands in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::KilledByOther => "killed_by_other",
            Self::Survived => "survived",
            Self::NotApplicable => "not_applicable",
        }
    }
}

/// A fault and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mutant {
    /// Fault name.
    pub fault: String,
    /// State.
    pub state: MutantState,
    /// Property that killed it.
    pub property: Option<String>,
    /// Case that killed it: the witness.
    pub case: Option<String>,
    /// Cases tried.
    pub tried: usize,
}

/// Most cases on which a fault is tried by the properties that it names.
const MOST_CASES: usize = 1500;
/// Cases on which a fault that survived those is tried by every property.
const CASES_FOR_OTHERS: usize = 60;

/// Longest time in which all ranks of a fault wait for each other. The clock stands still while any of them computes, so that a busy
/// machine makes no hang; a fault that hangs is waited for once a trial, which is most of what trying all faults takes.
const PATIENCE: Duration = Duration::from_secs(1);

fn engine_with(fault: &'static Fault) -> CpuEngine {
    CpuEngine::with_fault(fault).with_timeout(PATIENCE)
}

/// Tries every fault on the small cases of a suite, in parallel; the outcome does not depend on the number of threads.
pub fn try_all(faults: &[&'static Fault], cases: &[Case], done: &(dyn Fn(&Mutant) + Sync)) -> Vec<Mutant> {
    let embedded = |fault| -> Result<Box<dyn Engine>, Infallible> { Ok(Box::new(engine_with(fault))) };
    match try_all_on(&embedded, faults, cases, done) {
        Ok(mutants) => mutants,
        Err(never) => match never {},
    }
}

/// As [`try_all`], on engines that `faulty` makes, one with each fault.
///
/// # Errors
/// What `faulty` says.
pub fn try_all_on<E: Send>(
    faulty: &(dyn Fn(&'static Fault) -> Result<Box<dyn Engine>, E> + Sync),
    faults: &[&'static Fault],
    cases: &[Case],
    done: &(dyn Fn(&Mutant) + Sync),
) -> Result<Vec<Mutant>, E> {
    let _quiet = Quiet::new();
    faults
        .par_iter()
        .map(|fault| {
            let mutant = try_one_on(&*faulty(fault)?, fault, cases);
            done(&mutant);
            Ok(mutant)
        })
        .collect()
}

/// Tries one fault.
pub fn try_one(fault: &'static Fault, cases: &[Case]) -> Mutant {
    try_one_on(&engine_with(fault), fault, cases)
}

/// Tries one fault, which `engine` has.
fn try_one_on(engine: &dyn Engine, fault: &'static Fault, cases: &[Case]) -> Mutant {
    let named = |property: &properties::Property| fault.killed_by.contains(&property.id);
    let mut order = in_own_order(fault.name, cases, &named);
    if order.is_empty() {
        return mutant(fault, MutantState::NotApplicable, None, 0);
    }
    order.truncate(MOST_CASES);
    for (index, case) in order.iter().enumerate() {
        if let Some(property) = first_failure(case, engine, &named) {
            return mutant(fault, MutantState::Killed, Some((property, case)), index + 1);
        }
    }
    for case in order.iter().take(CASES_FOR_OTHERS) {
        if let Some(property) = first_failure(case, engine, &|_| true) {
            return mutant(fault, MutantState::KilledByOther, Some((property, case)), order.len());
        }
    }
    mutant(fault, MutantState::Survived, None, order.len())
}

/// Properties that killed none of the faults that name them: such a check has never been seen to fail, so it proves nothing.
///
/// Each property is tried on the faults that name it, one after the other, until it fails by itself on one of them.
pub fn toothless(cases: &[Case]) -> Vec<&'static str> {
    let properties: Vec<_> = properties::all().collect();
    properties
        .into_par_iter()
        .filter(|property| !has_teeth(property, cases))
        .map(|property| property.id)
        .collect()
}

/// Faults and cases on which a property is tried before it counts as toothless.
const FAULTS_A_PROPERTY: usize = 8;
const CASES_A_PROPERTY: usize = 250;

fn has_teeth(property: &'static properties::Property, cases: &[Case]) -> bool {
    let named = shardcheck_cpu::faults().iter().filter(|fault| fault.killed_by.contains(&property.id));
    named.take(FAULTS_A_PROPERTY).any(|fault| {
        let engine = engine_with(fault);
        in_own_order(fault.name, cases, &|candidate| candidate.id == property.id)
            .into_iter()
            .take(CASES_A_PROPERTY)
            .any(|case| first_failure(case, &engine, &|candidate| candidate.id == property.id).is_some())
    })
}

/// Small cases on which one of the chosen properties is judged, in an order of the fault's own: neighbours in a suite are
/// alike, so they are not tried in a row.
pub(crate) fn in_own_order<'a>(
    name: &str,
    cases: &'a [Case],
    chosen: &dyn Fn(&properties::Property) -> bool,
) -> Vec<&'a Case> {
    let mut order: Vec<&Case> =
        cases.iter().filter(|case| !has_real_heads(case) && properties::of(case).any(chosen)).collect();
    order.sort_by_cached_key(|case| *blake3::hash(format!("{name} {}", case.id()).as_bytes()).as_bytes());
    order
}

/// The first of the chosen properties that fails on the case.
fn first_failure(
    case: &Case,
    engine: &dyn Engine,
    chosen: &dyn Fn(&properties::Property) -> bool,
) -> Option<&'static str> {
    let material = Material::of(case, engine.profile()).ok()?;
    let laboratory = Laboratory::new(case, engine, &material);
    properties::of(case)
        .filter(|property| chosen(property))
        .find(|property| property.judge(&laboratory).status().is_failure())
        .map(|property| property.id)
}

fn mutant(fault: &Fault, state: MutantState, by: Option<(&'static str, &Case)>, tried: usize) -> Mutant {
    Mutant {
        fault: fault.name.to_owned(),
        state,
        property: by.map(|(property, _)| property.to_owned()),
        case: by.map(|(_, case)| case.id()),
        tried,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_cases::{Family, SuiteName, suite};
    use shardcheck_cpu::{fault, faults};

    fn smoke() -> Vec<Case> {
        suite(SuiteName::EngineSmoke, 1)
    }

    /// The causal fault, made to name other properties.
    fn renamed(killed_by: &'static [&'static str]) -> &'static Fault {
        let known = fault("committed-prefix-rows").unwrap();
        Box::leak(Box::new(Fault { killed_by, ..*known }))
    }

    #[test]
    fn the_outcome_does_not_depend_on_threads_or_on_the_order_of_the_cases() {
        let chosen: Vec<&'static Fault> = faults().iter().step_by(9).collect();
        let mut cases = smoke();
        let mut outcomes = Vec::new();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            outcomes.push(pool.install(|| try_all(&chosen, &cases, &|_| {})));
            cases.reverse();
        }
        assert_eq!(outcomes[0], outcomes[1]);
        let names: Vec<&str> = outcomes[0].iter().map(|mutant| mutant.fault.as_str()).collect();
        assert_eq!(names, chosen.iter().map(|fault| fault.name).collect::<Vec<_>>());
        assert!(outcomes[0].iter().any(|mutant| mutant.state == MutantState::Killed));
    }

    #[test]
    fn a_killed_fault_has_a_property_that_it_names_and_a_witness() {
        let fault = fault("committed-prefix-rows").unwrap();
        let mutant = try_one(fault, &smoke());
        assert_eq!(mutant.state, MutantState::Killed);
        assert!(fault.killed_by.contains(&mutant.property.unwrap().as_str()));
        let witness: Case = mutant.case.unwrap().parse().unwrap();
        assert!(smoke().contains(&witness));
        assert!((1..=smoke().len()).contains(&mutant.tried));
    }

    #[test]
    fn a_failure_of_a_property_that_is_not_named_is_no_kill() {
        let mutant = try_one(renamed(&["equal.repeat"]), &smoke());
        assert_eq!(mutant.state, MutantState::KilledByOther);
        assert_ne!(mutant.property.as_deref(), Some("equal.repeat"));
    }

    #[test]
    fn a_fault_that_no_case_shows_survives() {
        let mut writes = smoke();
        writes.retain(|case| case.family == Family::Write);
        let mutant = try_one(renamed(&["write.untouched"]), &writes);
        assert_eq!((mutant.state, mutant.property), (MutantState::Survived, None));
    }

    #[test]
    fn a_fault_without_a_case_for_its_properties_does_not_apply() {
        let mut writes = smoke();
        writes.retain(|case| case.family == Family::Write);
        let mutant = try_one(fault("committed-prefix-rows").unwrap(), &writes);
        assert_eq!((mutant.state, mutant.tried), (MutantState::NotApplicable, 0));
    }

    #[test]
    fn every_fault_is_reported_once_as_it_is_tried() {
        let chosen: Vec<&'static Fault> = faults().iter().take(3).collect();
        let told = std::sync::Mutex::new(Vec::new());
        let returned = try_all(&chosen, &smoke(), &|mutant| told.lock().unwrap().push(mutant.clone()));
        let mut told = told.into_inner().unwrap();
        told.sort_by_key(|mutant| chosen.iter().position(|fault| fault.name == mutant.fault));
        assert_eq!(told, returned);
    }

    #[test]
    fn every_property_has_been_seen_to_fail_by_itself_on_a_fault_that_names_it() {
        assert_eq!(toothless(&suite(SuiteName::Gate, 1)), Vec::<&str>::new());
    }

    #[test]
    fn a_property_without_a_case_that_shows_its_faults_is_toothless() {
        let mut writes = smoke();
        writes.retain(|case| case.family == Family::Write);
        let idle = toothless(&writes);
        assert!(idle.contains(&"verify.output") && !idle.contains(&"write.round-trip"), "{idle:?}");
    }

    #[test]
    fn states_are_written_as_they_are_named() {
        for state in MutantState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
    }
}
