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
