//! Faults of the gates: settings that are taken, refused or switched off wrongly.

use shardcheck_engine::RuleSetName;

use super::{Fault, FaultClass};
use crate::rules::{Outcome, Rule, rules};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "straddled-blocks-accepted",
        title: "an interleave size that does not divide the block size is accepted",
        class: FaultClass::ConfigGate,
        bugs: &["vllm-ascend#14876"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["interleave-fits-block"]),
    },
    Fault {
        name: "indivisible-group-accepted",
        title: "a decode-context-parallel size that does not divide the tensor-parallel size is accepted",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#52075"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["dcp-divides-tp"]),
    },
    Fault {
        name: "drafts-on-gfx942-accepted",
        title: "speculative decode with sharded caches is accepted on hardware whose kernel ignores the mask",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#28751"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["drafts-need-gfx950"]),
    },
    Fault {
        name: "interleaved-drafts-accepted",
        title: "speculative decode is accepted with interleave sizes that its kernel does not know",
        class: FaultClass::ConfigGate,
        bugs: &["sglang#33926"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["interleave-without-drafts"]),
    },
    Fault {
        name: "unknown-backend-accepted",
        title: "an exchange that does not exist is accepted and fails at the first decode",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#52075"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["known-comm-backend"]),
    },
    Fault {
        name: "pcp-limits-forgotten",
        title: "features that prefill context parallelism does not support are accepted with it",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#26574"],
        killed_by: &["rules.reject"],
        apply: |p| {
            p.gates.rules =
                |set| without(set, &["pcp-limits", "pcp-without-dp-attention", "pcp-needs-runner-v2"])
        },
    },
    Fault {
        name: "sharded-transfer-accepted",
        title: "KV transfer of interleaved caches is accepted without block interleave",
        class: FaultClass::ConfigGate,
        bugs: &["vllm-ascend#14876", "sglang#33309"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["kv-transfer-needs-block-interleave"]),
    },
    Fault {
        name: "odd-worlds-refused",
        title: "group sizes that are no power of two are refused everywhere",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#28751"],
        killed_by: &["rules.accept"],
        apply: |p| p.gates.rules = |set| with(set, ODD_WORLDS_REFUSED),
    },
    Fault {
        name: "default-exchange-refused-without-a-group",
        title: "the default all-to-all is refused where there is no group to exchange in",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#28751"],
        killed_by: &["rules.accept"],
        apply: |p| p.gates.rules = |set| with(set, A2A_REFUSED_WITHOUT_A_GROUP),
    },
    Fault {
        name: "drafts-refused-everywhere",
        title: "speculative decode is refused with every sharded cache",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#28751", "vllm#25049"],
        killed_by: &["rules.accept", "rules.disable"],
        apply: |p| p.gates.rules = |set| with(set, DRAFTS_REFUSED),
    },
    Fault {
        name: "query-replication-kept-under-drafts",
        title: "query replication stays on where speculative decode cannot use it",
        class: FaultClass::ConfigGate,
        bugs: &["local-inference-lab/vllm#72"],
        killed_by: &["rules.disable"],
        apply: |p| p.gates.rules = |set| without(set, &["query-replication-without-drafts"]),
    },
    Fault {
        name: "mxfp4-kept",
        title: "query replication and project-before-merge stay on with mxfp4 weights",
        class: FaultClass::ConfigGate,
        bugs: &["local-inference-lab/vllm#72"],
        killed_by: &["rules.disable"],
        apply: |p| {
            p.gates.rules =
                |set| without(set, &["query-replication-without-mxfp4", "project-before-merge-without-mxfp4"])
        },
    },
    Fault {
        name: "mxfp4-gate-nested-under-interleave",
        title: "features are switched off for mxfp4 only where the interleave size is above one",
        class: FaultClass::ConfigGate,
        bugs: &["ATOM#1772"],
        killed_by: &["rules.disable"],
        apply: |p| p.gates.rules = nested_under_interleave,
    },
    Fault {
        name: "overlap-kept-without-merge",
        title: "two-batch overlap is refused or kept where it should be switched off",
        class: FaultClass::ConfigGate,
        bugs: &["ATOM#1208"],
        killed_by: &["rules.disable"],
        apply: |p| p.gates.rules = |set| without(set, &["tbo-under-pcp"]),
    },
];

/// The rules of a set but those of these names.
pub(super) fn without(set: RuleSetName, ids: &[&str]) -> Vec<Rule> {
    rules(set).into_iter().filter(|rule| !ids.contains(&rule.id)).collect()
}

/// The rules of a set behind another one.
fn with(set: RuleSetName, first: Rule) -> Vec<Rule> {
    std::iter::once(first).chain(rules(set)).collect()
}

const ODD_WORLDS_REFUSED: Rule = Rule {
    id: "odd-worlds",
    judge: |f| match f.dcp.max(1).count_ones() {
        1 => Outcome::Pass,
        _ => Outcome::Reject(format!("{} ranks are no power of two", f.dcp)),
    },
};

const A2A_REFUSED_WITHOUT_A_GROUP: Rule = Rule {
    id: "a2a-without-a-group",
    judge: |f| {
        if f.dcp <= 1 && f.comm_backend == "a2a" {
            return Outcome::Reject("a2a needs a group".to_owned());
        }
        Outcome::Pass
    },
};

const DRAFTS_REFUSED: Rule = Rule {
    id: "drafts",
    judge: |f| {
        if f.dcp > 1 && f.speculative {
            return Outcome::Reject("drafts are not supported".to_owned());
        }
        Outcome::Pass
    },
};

fn nested_under_interleave(set: RuleSetName) -> Vec<Rule> {
    let nested = |mut rule: Rule| {
        if rule.id == "query-replication-without-mxfp4" {
            rule.judge = |f| {
                if f.interleave > 1 { judge_of("query-replication-without-mxfp4", f) } else { Outcome::Pass }
            };
        }
        rule
    };
    rules(set).into_iter().map(nested).collect()
}

/// What ATOM's rule of that name says.
fn judge_of(id: &str, facts: &mut crate::rules::Facts) -> Outcome {
    let rule = rules(RuleSetName::Atom).into_iter().find(|rule| rule.id == id);
    rule.map_or(Outcome::Pass, |rule| (rule.judge)(facts))
}

#[cfg(test)]
mod tests {
    use shardcheck_engine::Settings;

    use super::super::faulty;
    use super::*;
    use crate::rules::Facts;

    fn ids(rules: &[Rule]) -> Vec<&'static str> {
        rules.iter().map(|rule| rule.id).collect()
    }

    /// What a rule of a fault says of settings.
    fn judged(rule: &Rule, set: RuleSetName, settings: &Settings) -> Outcome {
        (rule.judge)(&mut Facts::read(set, settings).unwrap())
    }

    #[test]
    fn the_rules_that_are_named_are_forgotten_and_no_other_is() {
        for (name, forgotten) in [
            ("straddled-blocks-accepted", &["interleave-fits-block"][..]),
            ("indivisible-group-accepted", &["dcp-divides-tp"]),
            ("drafts-on-gfx942-accepted", &["drafts-need-gfx950"]),
            ("interleaved-drafts-accepted", &["interleave-without-drafts"]),
            ("unknown-backend-accepted", &["known-comm-backend"]),
            ("pcp-limits-forgotten", &["pcp-limits", "pcp-without-dp-attention", "pcp-needs-runner-v2"]),
            ("sharded-transfer-accepted", &["kv-transfer-needs-block-interleave"]),
            ("query-replication-kept-under-drafts", &["query-replication-without-drafts"]),
            ("mxfp4-kept", &["query-replication-without-mxfp4", "project-before-merge-without-mxfp4"]),
            ("overlap-kept-without-merge", &["tbo-under-pcp"]),
            ("unreplicated-kv-heads-accepted", &["gqa-kv-replication"]),
            ("draft-left-out-of-the-gate", &["gqa-kv-replication-of-draft"]),
            ("attention-without-lse-accepted", &["dcp-needs-decode-lse"]),
            ("runner-without-groups-accepted", &["dcp-needs-runner-v1", "runner-v2-pcp-or-dcp"]),
            ("dynamic-speculation-accepted", &["dcp-without-dynamic-speculation"]),
            ("replicated-indexer-of-a-part-accepted", &["replicated-indexer"]),
            ("sparse-interleave-kept", &["sparse-forces-block-interleave"]),
            ("sparse-offload-accepted", &["sparse-offload-without-sharding"]),
        ] {
            let mut found = 0;
            for set in RuleSetName::ALL {
                let kept = ids(&(faulty::with(name).gates.rules)(set));
                let all = ids(&rules(set));
                let expected: Vec<_> = all.iter().copied().filter(|id| !forgotten.contains(id)).collect();
                assert_eq!(kept, expected, "{name} in {set}");
                found += all.len() - expected.len();
            }
            assert!(found >= forgotten.len(), "{name} forgets rules that exist");
        }
    }

    #[test]
    fn a_rule_that_refuses_too_much_stands_before_all_others() {
        let sized = |dcp: i64| {
            Settings::new().with("tensor_parallel_size", dcp).with("decode_context_parallel_size", dcp)
        };
        let backend = |dcp: i64, name: &str| sized(dcp).with("dcp_comm_backend", name);
        let drafts = |dcp: i64| sized(dcp).with("speculative_tokens", 2);
        let cases = [
            (
                "odd-worlds-refused",
                vec![(sized(3), true), (sized(4), false), (sized(1), false), (sized(6), true)],
            ),
            (
                "default-exchange-refused-without-a-group",
                vec![(backend(1, "a2a"), true), (backend(1, "ag_rs"), false), (backend(2, "a2a"), false)],
            ),
            (
                "drafts-refused-everywhere",
                vec![(drafts(2), true), (drafts(1), false), (sized(2), false), (sized(1), false)],
            ),
        ];
        for (name, cases) in cases {
            for set in RuleSetName::ALL {
                let changed = (faulty::with(name).gates.rules)(set);
                assert_eq!(ids(&changed)[1..], ids(&rules(set)), "{name} in {set}");
                for (settings, refused) in &cases {
                    let outcome = judged(&changed[0], set, settings);
                    assert_eq!(
                        matches!(outcome, Outcome::Reject(_)),
                        *refused,
                        "{name}: {settings:?} in {set}"
                    );
                }
            }
        }
    }

    #[test]
    fn mxfp4_is_looked_at_under_an_interleave_size_above_one_alone() {
        let set = RuleSetName::Atom;
        let changed = (faulty::with("mxfp4-gate-nested-under-interleave").gates.rules)(set);
        assert_eq!(ids(&changed), ids(&rules(set)));
        for interleave in [1, 2, 4] {
            let settings = Settings::new()
                .with("tensor_parallel_size", 8)
                .with("decode_context_parallel_size", 8)
                .with("cp_kv_cache_interleave_size", interleave)
                .with("mxfp4", true);
            for (changed, rule) in changed.iter().zip(rules(set)) {
                let skipped = rule.id == "query-replication-without-mxfp4" && interleave == 1;
                let expected = if skipped { Outcome::Pass } else { judged(&rule, set, &settings) };
                assert_eq!(judged(changed, set, &settings), expected, "{} at {interleave}", rule.id);
            }
        }
        let named = rules(set).into_iter().find(|rule| rule.id == "query-replication-without-mxfp4").unwrap();
        let mxfp4 = Settings::new()
            .with("tensor_parallel_size", 8)
            .with("decode_context_parallel_size", 8)
            .with("mxfp4", true);
        assert!(matches!(judged(&named, set, &mxfp4), Outcome::Disable(..)), "the rule has something to say");
    }
}
