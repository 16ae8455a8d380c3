//! Faults of attention over selected tokens: which tokens a row attends to on a rank.

use shardcheck_engine::SlotList;

use super::{Fault, FaultClass};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "selected-rows-share-the-first-list",
        title: "all rows of a request attend to the tokens that were selected for its first one",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["selected.partial-lse", "selected.output", "selected.flat"],
        apply: |p| p.selected.row = |_, first, _| first,
    },
    Fault {
        name: "selected-left-out-for-a-short-request",
        title: "the selection is left out for a whole batch whose first request has no more than k tokens",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["selected.partial-lse", "selected.output", "selected.others"],
        apply: |p| p.selected.dense = |lens, k| lens.first().is_some_and(|len| *len <= k),
    },
    Fault {
        name: "selected-held-to-the-local-length",
        title: "a selected position counts where it is below the tokens of its rank, not of the row",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["selected.lists", "selected.output", "selected.partial-lse"],
        apply: |p| p.selected.takes = |position, seen| position < seen,
    },
    Fault {
        name: "selected-full-list-loses-its-last",
        title: "of a list of k tokens the last one is not attended to",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["selected.output", "selected.partial-lse", "selected.order"],
        apply: |p| p.selected.attended = |row| row.count.min(row.top_k.saturating_sub(1)),
    },
    Fault {
        name: "selected-list-masked-causally",
        title: "the mask of several rows is put over the list, so that an early row leaves out its last entries",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["selected.output", "selected.partial-lse", "selected.flat"],
        apply: |p| p.selected.attended = |row| row.count.saturating_sub(row.rows_behind),
    },
    Fault {
        name: "selected-blocks-of-the-row",
        title: "the block table is indexed by the row, which is the request only where each has one",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["selected.lists", "selected.output"],
        apply: |p| p.selected.request = |_, row, requests| row.min(requests - 1),
    },
    Fault {
        name: "selected-lists-at-strides-of-k",
        title: "the list of a row is looked for at entry k·t, where lists are packed",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["selected.output", "selected.partial-lse"],
        apply: |p| p.selected.first = |row, _, k| row * k,
    },
    Fault {
        name: "selected-dummy-is-attended-to",
        title: "a rank that owns nothing of a row attends to the entry that stands there for the kernel's plan",
        class: FaultClass::EmptyShard,
        bugs: &["ATOM#1832"],
        killed_by: &["selected.partial-lse"],
        apply: |p| {
            p.selected.attended =
                |row| if row.list == SlotList::PackedDummy { row.entries } else { row.count }
        },
    },
    Fault {
        name: "selected-empty-row-keeps-the-one-before",
        title: "a row without tokens on a rank is skipped, so that its partial is that of the last row that has some",
        class: FaultClass::EmptyShard,
        bugs: &[],
        killed_by: &["selected.partial-lse", "selected.output"],
        apply: |p| {
            p.selected.row = |row, _, counts| (0..=row).rev().find(|other| counts[*other] > 0).unwrap_or(row)
        },
    },
    Fault {
        name: "selected-fill-is-slot-zero",
        title: "all k entries of a row are attended to, and −1 stands for slot 0",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["selected.partial-lse", "selected.partial-output"],
        apply: |p| {
            p.selected.attended = |row| if row.list == SlotList::Padded { row.entries } else { row.count };
            p.selected.slot = |entry| entry.max(0);
        },
    },
    Fault {
        name: "selected-plan-of-the-first-full-layer",
        title: "the plan that the first layer with a selection of its own made is never made again",
        class: FaultClass::StaleMetadata,
        bugs: &["ATOM#1362"],
        killed_by: &["selected.shared"],
        apply: |p| {
            p.selected.renewed = |plans, own| {
                let first = plans.first.clone().filter(|first| first.selection.is_like(&own.selection));
                first.unwrap_or(own)
            }
        },
    },
    Fault {
        name: "selected-plan-with-counts-of-the-layer-before",
        title: "a layer with a selection of its own renews the slots, and its plan keeps the counts of the one before",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["selected.shared"],
        apply: |p| {
            p.selected.renewed = |plans, mut own| {
                let before = plans.last.clone().filter(|last| last.selection.is_like(&own.selection));
                for (lists, before) in own.lists.iter_mut().zip(before.map_or(Vec::new(), |last| last.lists))
                {
                    (lists.counts, lists.indptr) = (before.counts, before.indptr);
                }
                own
            }
        },
    },
    Fault {
        name: "selected-shared-layer-keeps-to-the-first",
        title: "layers that share a selection take that of the first layer that had one, not of the last before them",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["selected.shared"],
        apply: |p| p.selected.shared = |plans| plans.first.as_ref(),
    },
    Fault {
        name: "selected-scale-ignored",
        title: "tokens that are gathered by a list are read without the scale of the cache",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765"],
        killed_by: &["selected.output", "selected.partial-lse", "selected.partial-output"],
        apply: |p| p.selected.scale = |_| 1.0,
    },
];
