//! Properties: what must hold of what an engine computes. One registry; one file per family.

/// A property: its id, the families that it is judged on, whether a case of them can show it; what must hold, where that comes from, bugs of
/// its kind, how the tolerance comes about, and what judges it.
macro_rules! property {
    ($id:literal, $families:expr, $applies:expr, $statement:literal, $source:literal, $bugs:expr, $tolerance:expr, $check:expr) => {
        Property {
            id: $id,
            statement: $statement,
            source: $source,
            bugs: $bugs,
            tolerance: $tolerance,
            families: $families,
            applies: $applies,
            check: $check,
        }
    };
}

mod acceptance;
mod attend;
mod compress;
mod context;
mod equal;
mod general;
mod identity;
mod index;
mod inputs;
mod kda;
mod layout;
mod lists;
mod merge;
mod moe;
mod pcp;
mod plans;
mod prefill;
mod probe;
mod route;
mod rules;
mod segments;
mod selected;
mod sequence;
mod sharing;
mod sinks;
mod sparse;
mod stack;
mod states;
mod statistics;
mod write;

#[cfg(test)]
pub(crate) use sequence::judge_turn;
use shardcheck_cases::{Case, Family};

use crate::finding::{Failure, Finding, Stage};
use crate::laboratory::{Halt, Laboratory};

pub(crate) use attend::unit_lse;
pub(crate) use inputs::UNCHANGED;

/// A property.
#[derive(Debug)]
pub struct Property {
    /// Stable id, such as `verify.output`. Ids are never reused.
    pub id: &'static str,
    /// What must hold, in one sentence.
    pub statement: &'static str,
    /// Where the statement comes from: published code, a paper, a mathematical identity.
    pub source: &'static str,
    /// Public bugs of the kind that it catches.
    pub bugs: &'static [&'static str],
    /// How the tolerance comes about.
    pub tolerance: &'static str,
    /// Families of cases that it is judged on.
    pub families: &'static [Family],
    /// Whether a case of those families can show it.
    pub applies: fn(&Case) -> bool,
    /// Judges it.
    pub check: fn(&Laboratory) -> Result<Finding, Halt>,
}

impl Property {
    /// Whether the property is judged on `case`.
    pub fn is_for(&self, case: &Case) -> bool {
        self.families.contains(&case.family) && (self.applies)(case)
    }

    /// Judges the property on a bench.
    pub fn judge(&self, laboratory: &Laboratory) -> Finding {
        (self.check)(laboratory).unwrap_or_else(Finding::from)
    }
}

/// What is told of a property that does not hold.
fn broken(headline: String, stage: Stage) -> Halt {
    Failure::because(headline).at(stage).into()
}

/// All properties, in the order in which they are judged: what localises comes before what it explains.
pub fn all() -> impl Iterator<Item = &'static Property> {
    [
        layout::PROPERTIES,
        plans::PROPERTIES,
        pcp::PROPERTIES,
        acceptance::PROPERTIES,
        sparse::PROPERTIES,
        selected::PROPERTIES,
        sinks::PROPERTIES,
        sharing::PROPERTIES,
        kda::PROPERTIES,
        write::PROPERTIES,
        attend::PROPERTIES,
        statistics::PROPERTIES,
        probe::PROPERTIES,
        context::PROPERTIES,
        prefill::PROPERTIES,
        index::PROPERTIES,
        compress::PROPERTIES,
        merge::PROPERTIES,
        states::PROPERTIES,
        segments::PROPERTIES,
        route::PROPERTIES,
        moe::PROPERTIES,
        identity::PROPERTIES,
        general::PROPERTIES,
        sequence::PROPERTIES,
        stack::PROPERTIES,
        stack::WHOLE,
        stack::RECURRENT,
        stack::LATENT,
        stack::LANES,
        stack::GATE,
        stack::RANKS,
        equal::PROPERTIES,
        inputs::PROPERTIES,
        rules::PROPERTIES,
    ]
    .into_iter()
    .flatten()
}

/// The property of that id.
pub fn find(id: &str) -> Option<&'static Property> {
    all().find(|property| property.id == id)
}

/// Properties judged on `case`.
pub fn of(case: &Case) -> impl Iterator<Item = &'static Property> {
    all().filter(move |property| property.is_for(case))
}

/// For properties that every case of their families can show.
fn always(_: &Case) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_ids_are_unique_and_name_their_area() {
        let mut ids: Vec<_> = all().map(|p| p.id).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
        assert!(ids.iter().all(|id| id.split('.').count() == 2 && !id.contains(char::is_uppercase)));
    }

    #[test]
    fn there_are_at_least_forty_properties_and_each_says_what_why_and_how_exactly() {
        assert!(all().count() >= 40, "only {}", all().count());
        for property in all() {
            assert!(property.statement.len() > 20, "{}", property.id);
            assert!(!property.source.is_empty() && !property.tolerance.is_empty(), "{}", property.id);
            assert!(!property.families.is_empty(), "{}", property.id);
        }
    }

    #[test]
    fn every_property_that_a_fault_names_exists() {
        for fault in shardcheck_cpu::faults() {
            assert!(!fault.killed_by.is_empty(), "{} names no property", fault.name);
            for id in fault.killed_by {
                assert!(find(id).is_some(), "{} names {id}, which no property has", fault.name);
            }
        }
    }

    #[test]
    fn every_property_is_named_by_a_fault_that_it_must_kill() {
        let idle: Vec<_> = all()
            .map(|property| property.id)
            .filter(|id| !shardcheck_cpu::faults().iter().any(|fault| fault.killed_by.contains(id)))
            .collect();
        assert!(idle.is_empty(), "no fault proves that these can fail: {}", idle.join(", "));
    }

    #[test]
    fn every_property_is_judged_on_a_case_of_the_gate() {
        let cases = shardcheck_cases::suite(shardcheck_cases::SuiteName::Gate, 1);
        for property in all() {
            assert!(cases.iter().any(|case| property.is_for(case)), "{}", property.id);
        }
    }

    #[test]
    fn properties_are_found_by_their_whole_id() {
        assert_eq!(find("verify.output").map(|property| property.id), Some("verify.output"));
        assert!(find("verify").is_none() && find("").is_none());
    }
}
