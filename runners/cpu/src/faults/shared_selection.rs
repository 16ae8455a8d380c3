//! Faults of stacks whose layers attend to selected tokens: the wrong selection, or none.

use shardcheck_engine::LayerKind;

use super::{Fault, FaultClass};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "stack-sharing-layer-attends-to-all",
        title: "a layer that shares a selection attends to all that its rows see",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.selection = |kind, own| own.filter(|_| kind != LayerKind::Sharing),
    },
    Fault {
        name: "stack-sharing-layer-has-the-first-selection",
        title: "a layer that shares a selection goes by the first one of the step, not by the last before it",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| {
            p.stack.selection = |kind, own| own.map(|own| if kind == LayerKind::Sharing { 0 } else { own });
        },
    },
    Fault {
        name: "stack-selecting-layers-have-the-first-selection",
        title: "every layer that has tokens of its own named goes by those of the first one",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.selection = |_, own| own.map(|_| 0),
    },
    Fault {
        name: "stack-whole-layer-goes-by-a-selection",
        title: "a layer that is to attend to all attends to the tokens of the first selection of the step",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.selection = |_, own| own.or(Some(0)),
    },
];
