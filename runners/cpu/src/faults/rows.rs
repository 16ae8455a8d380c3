//! Faults of rows: which request a row belongs to, and how much of it the row sees on a rank.

use super::{Fault, FaultClass};
use crate::grid::{LayoutPolicies, RowRef, Sight};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "row-walks-the-global-length",
        title: "a rank's kernel walks the global length of a row over its own pages",
        class: FaultClass::CausalBound,
        bugs: &["sglang#29760", "sglang#20531", "vllm#28990"],
        killed_by: &["decode.row-lengths", "verify.row-lengths", "layout.row-lengths", "decode.output"],
        apply: |p| p.layout.row_len = |_, sight| edge(sight),
    },
    Fault {
        name: "draft-walks-the-global-length",
        title: "draft rows take the length of an unsharded cache although theirs is sharded",
        class: FaultClass::SpecDecode,
        bugs: &["local-inference-lab/vllm#72", "sglang#33926"],
        killed_by: &["draft.row-lengths", "layout.draft-lengths", "draft.output"],
        apply: |p| p.layout.draft_len = |_, sight| sight.seq_len,
    },
    Fault {
        name: "draft-length-of-the-last-rank",
        title: "draft rows take the local length of the last rank on every rank",
        class: FaultClass::SpecDecode,
        bugs: &["ATOM#1746", "sglang#39799"],
        killed_by: &["draft.row-lengths", "layout.draft-lengths", "draft.output"],
        apply: |p| {
            p.layout.draft_len =
                |layout, sight| (layout.local_len)(sight.seq_len, sight.grid.world - 1, &sight.grid)
        },
    },
    Fault {
        name: "draft-block-counted-twice",
        title: "a draft block's length is counted on to the length that holds it already",
        class: FaultClass::SpecDecode,
        bugs: &["vllm-ascend#15600", "ATOM#1746"],
        killed_by: &["draft.row-lengths", "layout.draft-lengths"],
        apply: |p| p.layout.draft_len = |layout, sight| local(layout, sight, sight.seq_len + sight.query_len),
    },
    Fault {
        name: "edge-on-the-last-rank",
        title: "every rank uses the causal edges of the last rank",
        class: FaultClass::CausalBound,
        bugs: &["vllm#46076"],
        killed_by: &["verify.row-lengths", "layout.row-lengths", "decode.row-lengths", "verify.output"],
        apply: |p| {
            p.layout.row_len =
                |layout, sight| (layout.local_len)(edge(sight), sight.grid.world - 1, &sight.grid)
        },
    },
    Fault {
        name: "local-causal-trim-at-the-front",
        title: "a row's successors on its rank are counted as if every rank held them all, rounded per rank",
        class: FaultClass::CausalBound,
        bugs: &["vllm#47181", "vllm#46076"],
        killed_by: &["verify.row-lengths", "layout.row-lengths", "verify.output"],
        apply: |p| {
            p.layout.row_len = |layout, sight| {
                let hidden = sight.query_len - 1 - sight.row;
                local(layout, sight, sight.seq_len).saturating_sub(hidden.div_ceil(sight.grid.world))
            }
        },
    },
    Fault {
        name: "first-row-sees-all",
        title: "the first row of a verify step runs as a decode of the whole length, the others by their edges",
        class: FaultClass::CausalBound,
        bugs: &["flash-attention#93", "vllm-ascend#6491"],
        killed_by: &["verify.row-lengths", "layout.row-lengths", "verify.output", "equal.future"],
        apply: |p| {
            p.layout.row_len = |layout, sight| {
                let len = if sight.row == 0 { sight.seq_len } else { edge(sight) };
                local(layout, sight, len)
            }
        },
    },
    Fault {
        name: "requests-numbered-by-tokens",
        title: "requests are looked up by the number of tokens before them, which is right for one row each",
        class: FaultClass::SpecDecode,
        bugs: &["vllm-ascend#7079", "ATOM#1859"],
        killed_by: &["verify.row-lengths", "verify.output"],
        apply: |p| {
            p.layout.rows = |starts, count| {
                let last = starts.len().saturating_sub(2);
                renumbered(starts, count, |row, first| RowRef { request: first.min(last), ..row })
            }
        },
    },
    Fault {
        name: "mixed-batch-shifts-single-rows",
        title: "where a batch mixes requests of one row and of several, those of one row read the request behind",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#6344", "vllm-ascend#10580"],
        killed_by: &["verify.row-lengths", "verify.output"],
        apply: |p| p.layout.rows = mixed_batch,
    },
    Fault {
        name: "all-rows-of-the-first-request",
        title: "every row of a batch reads the first request",
        class: FaultClass::LayoutIndex,
        bugs: &["TensorRT-LLM#9597"],
        killed_by: &["equal.batch", "decode.row-lengths", "decode.output"],
        apply: |p| {
            p.layout.rows = |starts, count| renumbered(starts, count, |row, _| RowRef { request: 0, ..row })
        },
    },
    Fault {
        name: "folded-heads-keep-the-rows",
        title: "heads are folded into rows, and the folded half takes the length of the row before",
        class: FaultClass::HeadLayout,
        bugs: &["aiter#4964", "ATOM#1930"],
        killed_by: &["verify.partial-lse", "verify.partial-output", "verify.output"],
        apply: |p| {
            p.kernel.seen_by_head = |row_lens, row, head, width| {
                let folded = if 2 * head >= width && row > 0 { row_lens[row - 1] } else { row_lens[row] };
                folded.min(row_lens[row])
            }
        },
    },
    Fault {
        name: "short-suffix-taken-for-decode",
        title: "a chunk of few new tokens is taken for a decode: they see what is cached and not themselves",
        class: FaultClass::SpecDecode,
        bugs: &["vllm-ascend#10580", "vllm-ascend#5939", "vllm#54300"],
        killed_by: &["context.output", "context.lse"],
        apply: |p| p.context.visible_new = |row, rows| if rows <= 3 { 0 } else { row + 1 },
    },
    Fault {
        name: "long-suffix-unmasked",
        title: "chunks of more than two new tokens take a path without a mask",
        class: FaultClass::CausalBound,
        bugs: &["vllm#54300", "sglang#27276"],
        killed_by: &["context.output", "context.lse"],
        apply: |p| p.context.visible_new = |row, rows| if rows > 2 { rows } else { row + 1 },
    },
    Fault {
        name: "suffix-sees-its-successor",
        title: "the causal edge among new tokens is one position late",
        class: FaultClass::CausalBound,
        bugs: &["flash-attention#93"],
        killed_by: &["context.output", "context.lse"],
        apply: |p| p.context.visible_new = |row, rows| (row + 2).min(rows),
    },
];

fn edge(sight: &Sight) -> usize {
    (sight.seq_len + 1 + sight.row).saturating_sub(sight.query_len)
}

fn local(layout: &LayoutPolicies, sight: &Sight, len: usize) -> usize {
    (layout.local_len)(len, sight.member, &sight.grid)
}

/// The healthy rows, each changed by its own value and the first row of its request.
fn renumbered(starts: &[i32], count: usize, change: impl Fn(RowRef, usize) -> RowRef) -> Vec<Option<RowRef>> {
    let rows = (LayoutPolicies::HEALTHY.rows)(starts, count);
    rows.into_iter().map(|row| row.map(|row| change(row, starts[row.request].max(0) as usize))).collect()
}

fn mixed_batch(starts: &[i32], count: usize) -> Vec<Option<RowRef>> {
    let mut rows = (LayoutPolicies::HEALTHY.rows)(starts, count);
    let several = rows.iter().flatten().any(|row| row.query_len > 1);
    let last = starts.len().saturating_sub(2);
    for row in rows.iter_mut().flatten().filter(|row| several && row.query_len == 1) {
        row.request = if row.request < last { row.request + 1 } else { 0 };
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

    /// For every row of every request up to three rounds, on every rank: what a fault lets it see, and what `titled` says.
    fn at_every_row(name: &str, row_of: Chosen, titled: fn(&Sight) -> usize) {
        let layout = with(name).layout;
        for grid in grids() {
            for seq_len in 4..25 {
                for (query_len, row) in [(1, 0), (3, 0), (3, 1), (3, 2), (4, 1)] {
                    for member in 0..grid.world {
                        let sight = Sight { seq_len, query_len, row, member, grid };
                        assert_eq!(row_of(&layout)(&layout, &sight), titled(&sight), "{name}: {sight:?}");
                    }
                }
            }
        }
    }

    fn share(len: usize, member: usize, s: &Sight) -> usize {
        (HEALTHY.local_len)(len, member, &s.grid)
    }

    /// Tokens up to the row's own and itself.
    fn own(s: &Sight) -> usize {
        s.seq_len - (s.query_len - 1 - s.row)
    }

    #[test]
    fn rows_see_the_length_that_the_title_names() {
        let row_len: Chosen = |layout| layout.row_len;
        let draft_len: Chosen = |layout| layout.draft_len;
        at_every_row("row-walks-the-global-length", row_len, own);
        at_every_row("draft-walks-the-global-length", draft_len, |s| s.seq_len);
        at_every_row("draft-length-of-the-last-rank", draft_len, |s| share(s.seq_len, s.grid.world - 1, s));
        at_every_row("draft-block-counted-twice", draft_len, |s| share(s.seq_len + s.query_len, s.member, s));
        at_every_row("edge-on-the-last-rank", row_len, |s| share(own(s), s.grid.world - 1, s));
        at_every_row("local-causal-trim-at-the-front", row_len, |s| {
            let successors = s.seq_len - own(s);
            share(s.seq_len, s.member, s).saturating_sub(successors.div_ceil(s.grid.world))
        });
        at_every_row("first-row-sees-all", row_len, |s| {
            share(if s.row == 0 { s.seq_len } else { own(s) }, s.member, s)
        });
    }

    /// Request of each row, and nothing else of it changed.
    fn requests(name: &str, starts: &[i32], count: usize) -> Vec<Option<usize>> {
        let seen = (with(name).layout.rows)(starts, count);
        let healthy = (HEALTHY.rows)(starts, count);
        for (seen, healthy) in seen.iter().zip(&healthy) {
            let place = |row: &Option<RowRef>| row.map(|row| (row.row, row.query_len));
            assert_eq!(place(seen), place(healthy), "{name}");
        }
        assert_eq!(seen.len(), count);
        seen.into_iter().map(|row| row.map(|row| row.request)).collect()
    }

    #[test]
    fn rows_read_the_request_that_the_title_names() {
        // requests of 2, 1, 2 and 1 rows, then padding
        let (starts, count) = ([0, 2, 3, 5, 6], 7);
        let some = |requests: [usize; 6]| requests.map(Some).into_iter().chain([None]).collect::<Vec<_>>();
        assert_eq!(requests("requests-numbered-by-tokens", &starts, count), some([0, 0, 2, 3, 3, 3]));
        assert_eq!(requests("mixed-batch-shifts-single-rows", &starts, count), some([0, 0, 2, 2, 2, 0]));
        assert_eq!(
            requests("mixed-batch-shifts-single-rows", &[0, 1, 2], 2),
            [Some(0), Some(1)],
            "nothing is mixed"
        );
        assert_eq!(requests("all-rows-of-the-first-request", &starts, count), some([0; 6]));
    }

    #[test]
    fn folded_heads_see_no_more_than_the_row_before() {
        let seen = with("folded-heads-keep-the-rows").kernel.seen_by_head;
        let lens = [5, 7, 3];
        let of = |row: usize| [0, 1, 2, 3].map(|head| seen(&lens, row, head, 4));
        assert_eq!([of(0), of(1), of(2)], [[5, 5, 5, 5], [7, 7, 5, 5], [3, 3, 3, 3]]);
        assert_eq!(
            [0, 1, 2].map(|head| seen(&lens, 1, head, 3)),
            [7, 7, 5],
            "the middle of an odd width belongs to the first half"
        );
    }

    #[test]
    fn new_tokens_see_what_the_title_says() {
        let of = |name: &str, rows: usize| -> Vec<usize> {
            (0..rows).map(|row| (with(name).context.visible_new)(row, rows)).collect()
        };
        assert_eq!(of("short-suffix-taken-for-decode", 3), [0, 0, 0]);
        assert_eq!(of("short-suffix-taken-for-decode", 4), [1, 2, 3, 4]);
        assert_eq!(of("long-suffix-unmasked", 2), [1, 2]);
        assert_eq!(of("long-suffix-unmasked", 3), [3, 3, 3]);
        assert_eq!(of("suffix-sees-its-successor", 3), [2, 3, 3]);
    }
}
