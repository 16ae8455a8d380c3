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

#[cfg(test)]
mod tests {
    use super::super::faulty::{grids, with};
    use super::*;

    const HEALTHY: LayoutPolicies = LayoutPolicies::HEALTHY;

    /// The policy that a fault replaces, among those of the layout.
    type Chosen = fn(&LayoutPolicies) -> fn(&LayoutPolicies, &Sight) -> usize;

    /// For every row of every request up to three rounds, on every rank: what a fault lets it see, and what `titled` says,
    /// which is a length and the rank whose share of it is seen.
    fn at_every_row(name: &str, row_of: Chosen, titled: fn(&Sight) -> (usize, usize)) {
        let layout = with(name).layout;
        for grid in grids() {
            for seq_len in 0..25 {
                for (query_len, row) in [(1, 0), (3, 0), (3, 1), (3, 2), (4, 1)] {
                    for member in 0..grid.world {
                        let sight = Sight { seq_len, query_len, row, member, grid };
                        let (len, of) = titled(&sight);
                        let share = (HEALTHY.local_len)(len, of, &grid);
                        assert_eq!(row_of(&layout)(&layout, &sight), share, "{name}: {sight:?}");
                    }
                }
            }
        }
    }

    /// Tokens up to the row's own and itself, of the request as long as it is.
    fn up_to(s: &Sight, row: usize) -> usize {
        (s.seq_len + row + 1).saturating_sub(s.query_len)
    }

    #[test]
    fn causal_rows_see_the_share_of_the_length_that_the_title_names() {
        let row_len: Chosen = |layout| layout.row_len;
        at_every_row("committed-prefix-rows", row_len, |s| (s.seq_len.saturating_sub(s.query_len), s.member));
        at_every_row("no-mask-between-rows", row_len, |s| (s.seq_len, s.member));
        at_every_row("row-sees-its-successor", row_len, |s| (s.seq_len.min(up_to(s, s.row) + 1), s.member));
        at_every_row("row-misses-itself", row_len, |s| (up_to(s, s.row).saturating_sub(1), s.member));
        at_every_row("rows-in-reverse", row_len, |s| (up_to(s, s.query_len - 1 - s.row), s.member));
        at_every_row("edge-on-rank-zero", row_len, |s| (up_to(s, s.row), 0));
    }

    #[test]
    fn draft_rows_see_the_share_of_the_length_that_the_title_names() {
        let draft_len: Chosen = |layout| layout.draft_len;
        at_every_row("draft-block-causal", draft_len, |s| (up_to(s, s.row), s.member));
        at_every_row("draft-block-unseen", draft_len, |s| (s.seq_len.saturating_sub(s.query_len), s.member));
        at_every_row("draft-length-of-rank-zero", draft_len, |s| (s.seq_len, 0));
        at_every_row("draft-misses-the-last-token", draft_len, |s| (s.seq_len.saturating_sub(1), s.member));
    }

    #[test]
    fn a_trim_on_the_rank_takes_the_hidden_rows_from_its_share() {
        let layout = with("local-causal-trim").layout;
        for grid in grids() {
            for (seq_len, row, member) in
                (4..25).flat_map(|len| (0..4).map(move |row| (len, row, row % grid.world)))
            {
                let sight = Sight { seq_len, query_len: 4, row, member, grid };
                let share = (HEALTHY.local_len)(seq_len, member, &grid);
                assert_eq!((layout.row_len)(&layout, &sight), share.saturating_sub(3 - row), "{sight:?}");
            }
        }
    }

    /// `(request, row, rows of the request)` of each row, `None` for padding.
    fn dealt(name: &str, starts: &[i32], count: usize) -> Vec<Option<(usize, usize, usize)>> {
        let rows = (with(name).layout.rows)(starts, count);
        rows.into_iter().map(|row| row.map(|row| (row.request, row.row, row.query_len))).collect()
    }

    #[test]
    fn rows_are_dealt_as_the_title_says() {
        let row = |request, row, query_len| Some((request, row, query_len));
        // requests of 3, 0 and 1 rows, and three rows of padding: 7 rows of 3 requests are taken for 2 each
        let starts = [0, 3, 3, 4];
        assert_eq!(
            dealt("uniform-query-length", &starts, 7),
            [row(0, 0, 2), row(0, 1, 2), row(1, 0, 2), row(1, 1, 2), row(2, 0, 2), row(2, 1, 2), None]
        );
        let real = [row(0, 0, 3), row(0, 1, 3), row(0, 2, 3), row(1, 0, 1)];
        assert_eq!(dealt("empty-request-shifts-rows", &starts, 4), real);
        assert_eq!(
            dealt("empty-request-shifts-rows", &[0, 0, 0, 1, 3], 3),
            [row(0, 0, 1), row(1, 0, 2), row(1, 1, 2)]
        );
        let last = row(2, 0, 1);
        let padded = [row(0, 0, 3), row(0, 1, 3), row(0, 2, 3), last, last, last];
        assert_eq!(dealt("padding-rows-attend", &starts, 6), padded);
    }
}
