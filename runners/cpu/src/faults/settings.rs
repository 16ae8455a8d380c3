//! Faults of settings: rules of an engine that are forgotten one at a time, so that what they refuse is taken.

use shardcheck_engine::RuleSetName;

use super::gates::without;
use super::{Fault, FaultClass};
use crate::rules::{Outcome, Rule, rules};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "gathered-heads-without-a-warning",
        title: "more gathered heads than any kernel has are taken without a word",
        class: FaultClass::ConfigGate,
        bugs: &[],
        killed_by: &["rules.warn"],
        apply: |p| p.gates.rules = |set| without(set, &["gathered-heads-fit-a-kernel"]),
    },
    Fault {
        name: "gathered-heads-refused",
        title: "more gathered heads than any kernel has are refused, although the folded kernel would take them",
        class: FaultClass::ConfigGate,
        bugs: &[],
        killed_by: &["rules.warn"],
        apply: |p| p.gates.rules = refusing_what_is_warned_of,
    },
    Fault {
        name: "quantised-draft-replicated",
        title: "a draft's cache of eight bits is accepted where its heads must be replicated",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#48392"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["replicated-draft-unquantised"]),
    },
    Fault {
        name: "any-draft-replicated",
        title: "drafts that don't project the heads of the whole group are accepted, on any runner",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#48392"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["replicated-draft-model", "replicated-draft-runner"]),
    },
    Fault {
        name: "draft-replicated-in-part",
        title: "a draft whose heads are on some ranks of the group already is accepted as if none had them",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#48392"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["replicated-draft-whole"]),
    },
    Fault {
        name: "replicated-draft-keeps-its-slots",
        title: "the rows of a draft block keep their slots in a cache whose heads are replicated",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#48392"],
        killed_by: &["rules.disable"],
        apply: |p| p.gates.rules = |set| without(set, &["replicated-draft-query-slots"]),
    },
    Fault {
        name: "unreplicated-kv-heads-accepted",
        title: "a group whose ranks would hold different KV heads is accepted",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#52075"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["gqa-kv-replication"]),
    },
    Fault {
        name: "draft-left-out-of-the-gate",
        title: "the draft model is not looked at when the target's settings are checked",
        class: FaultClass::ConfigGate,
        bugs: &["local-inference-lab/vllm#72", "sglang#39799"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["gqa-kv-replication-of-draft"]),
    },
    Fault {
        name: "attention-without-lse-accepted",
        title: "attention that returns no LSE of decode is accepted for a group that merges by it",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#52075", "vllm#47079"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["dcp-needs-decode-lse"]),
    },
    Fault {
        name: "runner-without-groups-accepted",
        title: "a runner that knows no sharded decode is accepted with it",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#26574", "vllm#52075"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["dcp-needs-runner-v1", "runner-v2-pcp-or-dcp"]),
    },
    Fault {
        name: "dynamic-speculation-accepted",
        title: "draft lengths that change from step to step are accepted with sharded caches",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#52075"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["dcp-without-dynamic-speculation"]),
    },
    Fault {
        name: "replicated-indexer-of-a-part-accepted",
        title: "an indexer that is replicated over a part of the ranks is accepted",
        class: FaultClass::ConfigGate,
        bugs: &["vllm-ascend#14876"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["replicated-indexer"]),
    },
    Fault {
        name: "sparse-interleave-kept",
        title: "sparse attention keeps an interleave size that is not the block size",
        class: FaultClass::ConfigGate,
        bugs: &["vllm-ascend#14876"],
        killed_by: &["rules.disable"],
        apply: |p| p.gates.rules = |set| without(set, &["sparse-forces-block-interleave"]),
    },
    Fault {
        name: "sparse-offload-accepted",
        title: "offload of sparse caches is accepted with sharded ones",
        class: FaultClass::ConfigGate,
        bugs: &["vllm#52075"],
        killed_by: &["rules.reject"],
        apply: |p| p.gates.rules = |set| without(set, &["sparse-offload-without-sharding"]),
    },
];

fn refusing_what_is_warned_of(set: RuleSetName) -> Vec<Rule> {
    let mut changed = rules(set);
    for rule in changed.iter_mut().filter(|rule| rule.id == "gathered-heads-fit-a-kernel") {
        rule.judge = |f| match f.gathered_heads() {
            Some(heads) if heads > 128 => Outcome::Reject(format!("{heads} gathered heads")),
            _ => Outcome::Pass,
        };
    }
    changed
}
