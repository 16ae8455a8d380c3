//! Faults of the causal edge, of draft blocks, and of the rows of a batch.

use super::{Fault, FaultClass};
use crate::grid::{LayoutPolicies, RowRef, Sight};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "committed-prefix-rows",
        title: "every row of a verify step sees only what was committed before it",
        class: FaultClass::CausalBound,
        bugs: &["vllm#51705"],
        killed_by: &[
            "verify.row-lengths",
            "verify.partial-lse",
            "verify.lse",
            "verify.output",
            "layout.row-lengths",
            "layout.row-sum",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.row_len =
                |layout, sight| local(layout, sight, sight.seq_len.saturating_sub(sight.query_len))
        },
    },
    Fault {
        name: "local-causal-trim",
        title: "the draft offset is subtracted from the local length: len(L, r) − q + 1 + t",
        class: FaultClass::CausalBound,
        bugs: &["vllm#47181", "vllm#46076"],
        killed_by: &[
            "verify.row-lengths",
            "layout.row-lengths",
            "verify.partial-lse",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.row_len = |layout, sight| {
                (local(layout, sight, sight.seq_len) + 1 + sight.row).saturating_sub(sight.query_len)
            }
        },
    },
    Fault {
        name: "no-mask-between-rows",
        title: "every row of a verify step sees the whole request, its own successors included",
        class: FaultClass::CausalBound,
        bugs: &["flash-attention#93", "vllm-ascend#6491"],
        killed_by: &[
            "verify.row-lengths",
            "layout.row-lengths",
            "verify.lse",
            "verify.output",
            "equal.future",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.row_len = |layout, sight| local(layout, sight, sight.seq_len),
    },
    Fault {
        name: "row-sees-its-successor",
        title: "the causal edge of a verify row is one position late",
        class: FaultClass::CausalBound,
        bugs: &["flash-attention#93"],
        killed_by: &[
            "verify.row-lengths",
            "layout.row-lengths",
            "verify.lse",
            "verify.output",
            "equal.future",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.row_len = |layout, sight| local(layout, sight, (edge(sight) + 1).min(sight.seq_len))
        },
    },
    Fault {
        name: "row-misses-itself",
        title: "the causal edge is one position early: a row does not see its own token",
        class: FaultClass::CausalBound,
        bugs: &["vllm#47181"],
        killed_by: &[
            "decode.row-lengths",
            "decode.output",
            "verify.row-lengths",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.row_len = |layout, sight| local(layout, sight, edge(sight).saturating_sub(1)),
    },
    Fault {
        name: "rows-in-reverse",
        title: "the causal edges of a request are given to its rows in reverse order",
        class: FaultClass::CausalBound,
        bugs: &["vllm-ascend#6491"],
        killed_by: &[
            "verify.row-lengths",
            "layout.row-lengths",
            "verify.output",
            "equal.future",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.row_len = |layout, sight| {
                let row = sight.query_len - 1 - sight.row;
                local(layout, sight, edge(&Sight { row, ..*sight }))
            }
        },
    },
    Fault {
        name: "edge-on-rank-zero",
        title: "every rank uses the causal edges of rank 0",
        class: FaultClass::CausalBound,
        bugs: &["vllm#46076"],
        killed_by: &[
            "verify.row-lengths",
            "layout.row-lengths",
            "layout.row-sum",
            "decode.row-lengths",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.row_len = |layout, sight| (layout.local_len)(edge(sight), 0, &sight.grid),
    },
    Fault {
        name: "draft-block-causal",
        title: "a draft block is masked causally although its rows are filled in one pass",
        class: FaultClass::SpecDecode,
        bugs: &["sglang#33926"],
        killed_by: &[
            "draft.row-lengths",
            "layout.draft-lengths",
            "draft.lse",
            "draft.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.draft_len = |layout, sight| local(layout, sight, edge(sight)),
    },
    Fault {
        name: "draft-block-unseen",
        title: "draft rows see the context and not the block itself",
        class: FaultClass::SpecDecode,
        bugs: &["vllm-ascend#15600"],
        killed_by: &[
            "draft.row-lengths",
            "layout.draft-lengths",
            "draft.lse",
            "draft.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.draft_len =
                |layout, sight| local(layout, sight, sight.seq_len.saturating_sub(sight.query_len))
        },
    },
    Fault {
        name: "draft-length-of-rank-zero",
        title: "draft rows take the local length of rank 0 on every rank",
        class: FaultClass::SpecDecode,
        bugs: &["sglang#33926", "ATOM#1746"],
        killed_by: &[
            "draft.row-lengths",
            "layout.draft-lengths",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.draft_len = |layout, sight| (layout.local_len)(sight.seq_len, 0, &sight.grid),
    },
    Fault {
        name: "draft-misses-the-last-token",
        title: "draft rows do not see the last token of the block",
        class: FaultClass::SpecDecode,
        bugs: &["sglang#39799"],
        killed_by: &[
            "draft.partial-lse",
            "draft.row-lengths",
            "layout.draft-lengths",
            "draft.lse",
            "draft.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.draft_len = |layout, sight| local(layout, sight, sight.seq_len.saturating_sub(1)),
    },
    Fault {
        name: "uniform-query-length",
        title: "every request is taken to have rows / requests rows",
        class: FaultClass::SpecDecode,
        bugs: &["vllm-ascend#8547", "vllm-ascend#7079"],
        killed_by: &[
            "verify.row-lengths",
            "verify.output",
            "attend.padding",
            "equal.padding",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.rows = uniform_rows,
    },
    Fault {
        name: "empty-request-shifts-rows",
        title: "requests without rows are left out of the numbering, so that later rows read another request",
        class: FaultClass::EmptyShard,
        bugs: &["flashinfer#353", "flashinfer#363", "vllm-ascend#11807"],
        killed_by: &[
            "decode.row-lengths",
            "decode.output",
            "equal.batch",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.rows = rows_without_empty_requests,
    },
    Fault {
        name: "padding-rows-attend",
        title: "graph-padding rows attend as if they were the last row of the batch",
        class: FaultClass::Padding,
        bugs: &["vllm-ascend#7012", "vllm-ascend#12840"],
        killed_by: &["attend.padding", "decode.row-lengths", "probe.tokens", "probe.pairing", "probe.needle"],
        apply: |p| {
            p.layout.rows = |starts, count| {
                let mut rows = (LayoutPolicies::HEALTHY.rows)(starts, count);
                let last = rows.iter().rev().flatten().next().copied();
                rows.iter_mut().filter(|row| row.is_none()).for_each(|row| *row = last);
                rows
            }
        },
    },
];

fn edge(sight: &Sight) -> usize {
    (sight.seq_len + 1 + sight.row).saturating_sub(sight.query_len)
}

fn local(layout: &LayoutPolicies, sight: &Sight, len: usize) -> usize {
    (layout.local_len)(len, sight.member, &sight.grid)
}

fn uniform_rows(starts: &[i32], count: usize) -> Vec<Option<RowRef>> {
    let requests = starts.len().saturating_sub(1).max(1);
    let query_len = (count / requests).max(1);
    let row = |index: usize| RowRef { request: index / query_len, row: index % query_len, query_len };
    (0..count).map(|index| Some(row(index)).filter(|row| row.request < requests)).collect()
}

fn rows_without_empty_requests(starts: &[i32], count: usize) -> Vec<Option<RowRef>> {
    let mut numbers = Vec::new();
    let mut rows = (LayoutPolicies::HEALTHY.rows)(starts, count);
    for row in rows.iter_mut().flatten() {
        if !numbers.contains(&row.request) {
            numbers.push(row.request);
        }
        row.request = numbers.len() - 1;
    }
    rows
}
