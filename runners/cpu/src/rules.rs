//! Configuration rules of the published engines: what they accept, refuse, or switch off.
//!
//! A rule set is a list of small functions in the order in which the engine checks. The first refusal ends it; a
//! feature that a rule switches off is off for the rules behind it.

mod ascend;
mod atom;
mod facts;
mod own;
mod vllm;

use shardcheck_engine::{RuleSetName, Settings, Validation};

pub use facts::{Facts, SETTING_NAMES, Setting};

/// What a rule says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing.
    Pass,
    /// The engine refuses to start.
    Reject(String),
    /// The engine switches a setting off.
    Disable(&'static str, String),
    /// The engine warns of a setting, and takes it.
    Warn(&'static str, String),
}

/// One rule.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Name, unique in its set.
    pub id: &'static str,
    /// Looks at the settings; switches off what it disables.
    pub judge: fn(&mut Facts) -> Outcome,
}

/// Which rules an engine checks.
#[derive(Clone, Copy, PartialEq)]
pub struct GatePolicies {
    /// Rules of a set, in order.
    pub rules: fn(RuleSetName) -> Vec<Rule>,
}

impl GatePolicies {
    /// As published.
    pub const HEALTHY: Self = Self { rules };
}

/// The published rules of a set.
pub fn rules(set: RuleSetName) -> Vec<Rule> {
    match set {
        RuleSetName::Own => own::RULES.to_vec(),
        RuleSetName::Atom => atom::rules(false),
        RuleSetName::AtomNext => atom::rules(true),
        RuleSetName::Vllm => vllm::RULES.to_vec(),
        RuleSetName::VllmNext => [vllm::RULES, vllm::REPLICATED_DRAFTS].concat(),
        RuleSetName::VllmAscend => ascend::RULES.to_vec(),
    }
}

/// Judges settings by rules.
///
/// # Errors
/// A setting that no rule knows, with the names that are known: a misspelt one would make any answer meaningless.
pub fn validate(set: RuleSetName, rules: &[Rule], settings: &Settings) -> Result<Validation, String> {
    if let Some(name) = settings.0.keys().find(|name| SETTING_NAMES.iter().all(|known| known.name != **name))
    {
        let known: Vec<&str> = SETTING_NAMES.iter().map(|setting| setting.name).collect();
        return Err(format!("unknown setting {name:?}; known are {}", known.join(", ")));
    }
    let mut facts = match Facts::read(set, settings) {
        Ok(facts) => facts,
        Err(reason) => return Ok(Validation::reject(reason)),
    };
    let mut validation = Validation::accept();
    for rule in rules {
        match (rule.judge)(&mut facts) {
            Outcome::Pass => {}
            Outcome::Reject(reason) => return Ok(Validation::reject(format!("{}: {reason}", rule.id))),
            Outcome::Disable(feature, reason) => validation = validation.disabling(feature, reason),
            Outcome::Warn(setting, reason) => validation = validation.warning(setting, reason),
        }
    }
    Ok(validation)
}

/// Refuses when a condition holds.
fn reject_if(condition: bool, reason: impl FnOnce() -> String) -> Outcome {
    if condition { Outcome::Reject(reason()) } else { Outcome::Pass }
}

/// The decode-context-parallel size divides the tensor-parallel size (ATOM, vLLM, vLLM-Ascend).
const DCP_DIVIDES_TP: Rule = Rule {
    id: "dcp-divides-tp",
    judge: |f| {
        reject_if(f.dcp < 1 || f.tp < 1 || f.tp % f.dcp != 0, || {
            format!("decode_context_parallel_size {} does not divide tensor_parallel_size {}", f.dcp, f.tp)
        })
    },
};

/// 1 ≤ S ≤ B and S divides B (ATOM, vLLM).
const INTERLEAVE_FITS_BLOCK: Rule = Rule {
    id: "interleave-fits-block",
    judge: |f| {
        let (s, b) = (f.interleave, f.block_size);
        reject_if(b < 1 || s < 1 || s > b || b % s != 0, || {
            format!("interleave size {s} must be at least 1, at most block_size {b}, and divide it")
        })
    },
};

/// The exchange is one that exists.
const KNOWN_BACKEND: Rule = Rule {
    id: "known-comm-backend",
    judge: |f| {
        reject_if(!["ag_rs", "a2a"].contains(&f.comm_backend.as_str()), || {
            format!("comm_backend {:?} is neither ag_rs nor a2a", f.comm_backend)
        })
    },
};

/// The all-to-all splits the gathered heads evenly (vLLM, ATOM).
const A2A_SPLITS_HEADS: Rule = Rule {
    id: "a2a-splits-heads",
    judge: |f| {
        let uneven = f.gathered_heads().is_some_and(|heads| heads % f.dcp != 0);
        reject_if(f.dcp > 1 && f.comm_backend == "a2a" && uneven, || {
            format!("a2a cannot split the gathered heads over {} ranks", f.dcp)
        })
    },
};

/// KV heads of grouped-query attention are replicated often enough to be sharded by sequence (vLLM-Ascend, vLLM).
const GQA_REPLICATION: Rule = Rule {
    id: "gqa-kv-replication",
    judge: |f| {
        let Some(kv_heads) = f.kv_heads.filter(|_| f.dcp > 1 && !f.mla) else { return Outcome::Pass };
        let groups = f.query_heads.map(|heads| heads / kv_heads.max(1));
        reject_if(kv_heads < 1 || f.tp <= kv_heads || f.dcp > f.tp / kv_heads, || {
            format!(
                "dcp {} needs tp / kv_heads of at least as much; tp is {}, kv_heads {kv_heads}",
                f.dcp, f.tp
            )
        })
        .or(|| {
            reject_if(groups.is_some_and(|group| group % f.dcp != 0), || {
                format!("query heads per KV head are not a multiple of dcp {}", f.dcp)
            })
        })
    },
};

impl Outcome {
    /// The other outcome where this one says nothing.
    fn or(self, other: impl FnOnce() -> Outcome) -> Outcome {
        if self == Outcome::Pass { other() } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_ids_are_unique_in_every_set() {
        for set in RuleSetName::ALL {
            let mut ids: Vec<_> = rules(set).iter().map(|rule| rule.id).collect();
            let count = ids.len();
            assert!(count > 0);
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), count, "{set}");
        }
    }

    #[test]
    fn a_misspelt_setting_is_named_instead_of_ignored() {
        let settings = Settings::new().with("tensor_paralel_size", 8);
        let error = validate(RuleSetName::Atom, &rules(RuleSetName::Atom), &settings).unwrap_err();
        assert!(error.contains("tensor_paralel_size") && error.contains("tensor_parallel_size"), "{error}");
    }
}
