//! Faults of stacks with recurrent layers: states, slots and caches of the wrong layer, request or rank.

use super::{Fault, FaultClass};
use crate::policies::TableUse;
use crate::stack::Part;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "stack-recurrent-layers-share-their-states",
        title: "all recurrent layers go on from the states that the one before left, the first from those of the last: there is one state for all",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["stack.state", "stack.kda", "stack.window"],
        apply: |p| p.stack.recurrent.states = |number, layers| (number + layers - 1) % layers,
    },
    Fault {
        name: "stack-recurrent-layer-reads-the-states-before",
        title: "a recurrent layer goes on from the states that the one before it has just left",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["stack.state", "stack.kda"],
        apply: |p| p.stack.recurrent.states = |number, _| number.saturating_sub(1),
    },
    Fault {
        name: "stack-rejected-rows-stay-in-states",
        title: "keys of rejected rows are overwritten, the states behind them are not taken back in any layer",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.state", "stack.kda"],
        apply: |p| {
            p.stack.recurrent.kda = |_, mut kda| {
                kda.kept = [|_, rows| rows; 2];
                kda
            };
        },
    },
    Fault {
        name: "stack-only-the-first-recurrent-layer-is-taken-back",
        title: "the first recurrent layer uses up the counts of accepted rows: those behind it go on behind all rows",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.state", "stack.kda"],
        apply: |p| {
            p.stack.recurrent.kda = |number, mut kda| {
                if number > 0 {
                    kda.kept = [|_, rows| rows; 2];
                }
                kda
            };
        },
    },
    Fault {
        name: "stack-accepted-rows-counted-down-by-layers",
        title: "counts of accepted rows that layers share are counted down by the first recurrent one, as if a draft step followed",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.state", "stack.kda"],
        apply: |p| {
            p.stack.recurrent.kda = |number, mut kda| {
                if number > 0 {
                    kda.kept = [|accepted, _| accepted.saturating_sub(1); 2];
                }
                kda
            };
        },
    },
    Fault {
        name: "stack-windows-are-not-taken-back",
        title: "states are taken back behind rejected rows, windows of the convolution are not",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.window", "stack.kda"],
        apply: |p| {
            p.stack.recurrent.kda = |_, mut kda| {
                kda.kept = [|accepted, _| accepted, |_, rows| rows];
                kda
            };
        },
    },
    Fault {
        name: "stack-recycled-slot-is-not-zeroed",
        title: "a new request goes on from what a freed or evicted one left in its slot, in every recurrent layer",
        class: FaultClass::StaleMetadata,
        bugs: &["ATOM#1936"],
        killed_by: &["stack.state", "stack.kda", "stack.window"],
        apply: |p| {
            p.stack.recurrent.kda = |_, mut kda| {
                kda.source = |read, write| Some(read.unwrap_or(write));
                kda
            };
        },
    },
    Fault {
        name: "stack-prefix-hit-starts-from-zeros",
        title: "a request that begins with a shared prefix has its keys, and states of zeros",
        class: FaultClass::StaleMetadata,
        bugs: &["ATOM#1936"],
        killed_by: &["stack.state", "stack.kda"],
        apply: |p| {
            p.stack.recurrent.kda = |_, mut kda| {
                kda.source = |read, write| read.filter(|read| *read == write);
                kda
            };
        },
    },
    Fault {
        name: "stack-fork-shares-the-state",
        title: "a request that begins with a shared prefix shares the state behind it as it shares the blocks: what it adds, the other one has too",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["stack.state", "stack.kda"],
        apply: |p| p.stack.recurrent.shares = |read, write| read >= 0 && read != write,
    },
    Fault {
        name: "stack-states-sharded-like-the-cache",
        title: "a rank takes into its states the rows whose keys it owns alone, by its rank of decode context parallelism",
        class: FaultClass::HeadLayout,
        bugs: &[],
        killed_by: &["stack.state", "stack.kda"],
        apply: |p| {
            p.stack.recurrent.kda = |_, mut kda| {
                kda.takes = |member, dcp, row| row % dcp == member;
                kda
            };
        },
    },
    Fault {
        name: "stack-padding-enters-the-state",
        title: "rows of graph padding are counted to the last request by recurrent layers",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["stack.state", "stack.window"],
        apply: |p| p.stack.recurrent.rows = |_, all| all,
    },
    Fault {
        name: "stack-recurrent-layer-writes-keys",
        title: "a recurrent layer writes its rows by the step's slots, into the cache of the latent layer before it",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| p.stack.recurrent.keys = |before| before.checked_sub(1),
    },
    Fault {
        name: "stack-recurrent-layers-shift-the-caches",
        title: "a latent layer writes to the cache of its number among all layers and attends over that of its number among latent ones",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.attention"],
        apply: |p| {
            p.stack.recurrent.cache = |to, layer, number| if to == TableUse::Write { layer } else { number };
        },
    },
    Fault {
        name: "stack-recurrent-weights-of-the-first",
        title: "every recurrent layer uses the weights of the first one",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.kda-input", "stack.kda-update"],
        apply: |p| p.stack.recurrent.weights = |_| 0,
    },
    Fault {
        name: "stack-recurrent-layer-reads-the-stream",
        title: "a recurrent layer projects the stream before the norm",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.kda-input"],
        apply: |p| p.stack.recurrent.reads_stream = true,
    },
    Fault {
        name: "stack-recurrent-output-not-summed",
        title: "what ranks' value heads add is not summed over ranks: attention's sum is left out where there is no attention",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.kda-update"],
        apply: |p| p.stack.summed = |part| part != Part::Recurrent,
    },
];
