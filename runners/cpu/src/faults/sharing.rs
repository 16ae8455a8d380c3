//! Faults of layers that share a selection: which layers compute one, whose they attend by, and when their plans are made anew.

use shardcheck_engine::SharingRule;

use super::{Fault, FaultClass};
use crate::sharing::before;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "sharing-begins-at-the-first-layer",
        title: "the period counts from the first layer, whatever the offset",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sharing.layers", "sharing.source"],
        apply: |p| p.sharing.before = |_, _| 0,
    },
    Fault {
        name: "sharing-offset-counted-from-zero",
        title: "an offset that counts from one is read as if it counted from zero: the period begins a layer late",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sharing.layers", "sharing.source"],
        apply: |p| {
            p.sharing.before =
                |rule, offset| offset.map_or_else(|| before(rule, None), |offset| offset as i64)
        },
    },
    Fault {
        name: "sharing-of-drafts",
        title: "a draft layer behind the model's own counts on in the period and takes the target's selection",
        class: FaultClass::SpecDecode,
        bugs: &["ATOM#1362"],
        killed_by: &["sharing.layers", "sharing.source"],
        apply: |p| p.sharing.drafts = |by_rule| by_rule,
    },
    Fault {
        name: "sharing-waits-to-be-asked-for",
        title: "a period above 1 does nothing unless selections are asked to be kept",
        class: FaultClass::ConfigGate,
        bugs: &[],
        killed_by: &["sharing.layers", "sharing.source"],
        apply: |p| p.sharing.kept = |asked, _| asked,
    },
    Fault {
        name: "sharing-without-being-asked-for",
        title: "a list of layers is followed although selections are not kept",
        class: FaultClass::ConfigGate,
        bugs: &[],
        killed_by: &["sharing.layers", "sharing.source"],
        apply: |p| p.sharing.kept = |_, _| true,
    },
    Fault {
        name: "sharing-pattern-before-types",
        title: "a pattern goes before the types of the layers, which contradict it",
        class: FaultClass::ConfigGate,
        bugs: &[],
        killed_by: &["sharing.layers"],
        apply: |p| p.sharing.types = |rule| (rule == SharingRule::Atom, false),
    },
    Fault {
        name: "sharing-pattern-again-from-the-start",
        title: "a pattern that is too short begins again behind its last layer",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sharing.layers", "sharing.source"],
        apply: |p| p.sharing.listed = |layer, list| !list.is_empty() && list[layer % list.len()],
    },
    Fault {
        name: "sharing-by-the-last-entry",
        title: "layers behind the end of a list are what its last entry says",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sharing.layers"],
        apply: |p| p.sharing.listed = |layer, list| list.get(layer).or(list.last()).copied().unwrap_or(false),
    },
    Fault {
        name: "sharing-with-the-neighbour",
        title: "a layer that shares looks for a selection in the layer before it, which has none where it shares too",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["sharing.source"],
        apply: |p| p.sharing.source = |layer, _| layer - 1,
    },
    Fault {
        name: "sharing-with-the-first",
        title: "every layer that shares attends by the selection of the first layer",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["sharing.source"],
        apply: |p| p.sharing.source = |_, computing| computing[0],
    },
    Fault {
        name: "sharing-plan-made-once",
        title: "row pointers and work plan are made for the first layer alone: later selections are read by stale ones",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["sharing.metadata"],
        apply: |p| p.sharing.rebuilds = |layer, _| layer == 0,
    },
    Fault {
        name: "sharing-plan-made-for-every-layer",
        title: "row pointers and work plan are made anew for layers that share, from lists that they have not",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["sharing.metadata"],
        apply: |p| p.sharing.rebuilds = |_, _| true,
    },
];

#[cfg(test)]
mod tests {
    use super::super::faulty::with;
    use super::*;

    #[test]
    fn offsets_are_what_the_titles_say() {
        let offset = |name: &str, rule, given| (with(name).sharing.before)(rule, given);
        assert_eq!(offset("sharing-begins-at-the-first-layer", SharingRule::Vllm, Some(3)), 0);
        let late = "sharing-offset-counted-from-zero";
        assert_eq!(offset(late, SharingRule::Vllm, Some(3)), 3);
        assert_eq!(offset(late, SharingRule::Vllm, None), 1);
        assert_eq!(offset(late, SharingRule::Atom, Some(3)), 3, "which counts from zero anyway");
    }

    #[test]
    fn lists_that_are_too_short_go_on_as_the_titles_say() {
        let list = [false, true];
        let read = |name: &str| (0..4).map(|l| (with(name).sharing.listed)(l, &list)).collect::<Vec<_>>();
        assert_eq!(read("sharing-pattern-again-from-the-start"), [false, true, false, true]);
        assert_eq!(read("sharing-by-the-last-entry"), [false, true, true, true]);
        assert!(!(with("sharing-by-the-last-entry").sharing.listed)(0, &[]));
    }
}
