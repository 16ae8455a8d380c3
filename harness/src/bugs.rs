//! The catalogue of public bugs: what went wrong in each, which faults model it, and what it still waits for.
//!
//! The text lies in `bugs.toml`. Which faults belong to a bug is said by the faults alone, so that the two cannot disagree.

use std::sync::LazyLock;

use serde::Deserialize;
use shardcheck_cpu::{Fault, faults};

/// What must exist before the rest of a bug can be expressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Later {
    /// Attention whose queries are sharded over ranks as well (PCP).
    PrefillSharding,
    /// Experts whose activations are quantised.
    QuantisedExperts,
    /// Recurrent and convolution states.
    RecurrentState,
    /// Sequences of steps over the state of one session.
    Sequences,
}

impl Later {
    /// All of them, in a stable order.
    pub const ALL: [Self; 4] =
        [Self::PrefillSharding, Self::QuantisedExperts, Self::RecurrentState, Self::Sequences];

    /// Name as it stands in the catalogue.
    pub fn name(self) -> &'static str {
        match self {
            Self::PrefillSharding => "prefill-sharding",
            Self::QuantisedExperts => "quantised-experts",
            Self::RecurrentState => "recurrent-state",
            Self::Sequences => "sequences",
        }
    }
}

/// A public bug.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bug {
    /// Public references, such as `vllm#28840`; the first is its id.
    pub refs: Vec<String>,
    /// Kind of mistake.
    pub class: String,
    /// What was wrong, in one clause.
    pub mechanism: String,
    /// What the rest of it waits for.
    pub later: Option<Later>,
    /// What is missing, or why it can't be expressed.
    pub note: Option<String>,
}

impl Bug {
    /// The reference that stands for the bug.
    pub fn id(&self) -> &str {
        &self.refs[0]
    }

    /// Faults that name one of its references.
    pub fn faults(&self) -> Vec<&'static Fault> {
        let names = |fault: &&Fault| fault.bugs.iter().any(|bug| self.refs.iter().any(|known| known == bug));
        faults().iter().filter(names).collect()
    }

    /// For each of its faults the property that is to see it first, each once.
    pub fn properties(&self) -> Vec<&'static str> {
        let mut properties: Vec<&'static str> = Vec::new();
        for id in self.faults().iter().filter_map(|fault| fault.killed_by.first()) {
            if !properties.contains(id) {
                properties.push(id);
            }
        }
        properties
    }
}

/// All bugs, by class.
///
/// # Panics
/// When the catalogue does not read: it is part of the program.
pub fn bugs() -> &'static [Bug] {
    #[derive(Deserialize)]
    struct Catalogue {
        bug: Vec<Bug>,
    }
    static BUGS: LazyLock<Vec<Bug>> = LazyLock::new(|| {
        toml::from_str::<Catalogue>(include_str!("bugs.toml")).unwrap_or_else(|error| panic!("{error}")).bug
    });
    &BUGS
}

/// The bug with that reference.
pub fn bug(reference: &str) -> Option<&'static Bug> {
    bugs().iter().find(|bug| bug.refs.iter().any(|known| known == reference))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use shardcheck_cpu::FaultClass;

    use super::*;

    #[test]
    fn every_reference_stands_once_and_names_a_project_and_a_thread() {
        let mut seen = BTreeSet::new();
        for reference in bugs().iter().flat_map(|bug| &bug.refs) {
            assert!(seen.insert(reference), "{reference} twice");
            assert!(reference.contains('#') || reference.contains('@'), "{reference}");
        }
        assert!(bugs().len() >= 108, "{}", bugs().len());
    }

    #[test]
    fn every_bug_says_what_was_wrong_in_a_class_that_exists() {
        let known: Vec<&str> = FaultClass::ALL
            .iter()
            .map(|class| class.name())
            .chain(["top-k-select", "moe-route", "e2e-only"])
            .collect();
        for bug in bugs() {
            assert!(bug.mechanism.len() > 20 && !bug.mechanism.ends_with('.'), "{}", bug.id());
            assert!(known.contains(&bug.class.as_str()), "{}: {}", bug.id(), bug.class);
        }
    }

    #[test]
    fn a_bug_has_a_fault_or_the_reason_why_it_has_none() {
        for bug in bugs() {
            assert!(!bug.faults().is_empty() || bug.note.is_some(), "{} has neither", bug.id());
            assert!(bug.later.is_none() || bug.note.is_some(), "{} does not say what is missing", bug.id());
        }
    }

    #[test]
    fn every_bug_that_a_fault_names_is_in_the_catalogue() {
        for fault in faults() {
            for reference in fault.bugs {
                assert!(bug(reference).is_some(), "{} names {reference}", fault.name);
            }
        }
    }

    #[test]
    fn every_name_of_what_is_missing_is_used_and_reads_back() {
        for later in Later::ALL {
            assert!(bugs().iter().any(|bug| bug.later == Some(later)), "{}", later.name());
            let quoted = format!("\"{}\"", later.name());
            assert_eq!(serde_json::from_str::<Later>(&quoted).unwrap(), later);
        }
    }
}
