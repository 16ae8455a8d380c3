//! Faults of selecting tokens: scores, the choice among ranks, and the lists of what a rank owns.

use shardcheck_engine::{SelectionMode, SlotList};
use shardcheck_formats::round_bf16;

use super::{Fault, FaultClass};
use crate::grid::{Grid, LayoutPolicies, Sight};
use crate::sparse::{Candidate, best, position};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "indexer-without-relu",
        title: "a head adds its weighted product also where that is negative",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.scores", "sparse.choice", "sparse.alone"],
        apply: |p| p.sparse.head = |dot, weight| weight * dot,
    },
    Fault {
        name: "indexer-relu-of-weighted",
        title: "relu is taken of the weighted product, so that a head of negative weight counts for nothing",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.scores", "sparse.choice", "sparse.alone"],
        apply: |p| p.sparse.head = |dot, weight| (weight * dot).max(0.0),
    },
    Fault {
        name: "indexer-heads-unweighted",
        title: "all heads of the indexer weigh the same",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.scores", "sparse.choice", "sparse.alone"],
        apply: |p| p.sparse.head = |dot, _| dot.max(0.0),
    },
    Fault {
        name: "indexer-query-rotary-pairs",
        title: "the rotary half of an index query lies in interleaved pairs, that of the keys in halves",
        class: FaultClass::TopKSelect,
        bugs: &["ATOM#1502"],
        killed_by: &["sparse.scores", "sparse.choice", "sparse.alone"],
        apply: |p| p.sparse.element = interleaved,
    },
    Fault {
        name: "indexer-key-scale-ignored",
        title: "keys of eight bits are scored without their own scales",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["sparse.scores", "sparse.choice", "sparse.alone"],
        apply: |p| p.sparse.key_scale = |_| 1.0,
    },
    Fault {
        name: "indexer-key-scale-squared",
        title: "the scale of a key is multiplied in twice",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["sparse.scores", "sparse.choice"],
        apply: |p| p.sparse.key_scale = |scale| scale * scale,
    },
    Fault {
        name: "indexer-keys-in-one-run",
        title: "local keys are read as if a request's blocks lay one behind the other from its first one",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["sparse.scores", "sparse.choice"],
        apply: |p| p.sparse.page = |local, grid| (0, local % grid.block),
    },
    Fault {
        name: "topk-bound-of-the-request",
        title: "every row of a request selects among all of its tokens, those behind the row included",
        class: FaultClass::TopKSelect,
        bugs: &["ATOM#1859"],
        killed_by: &["sparse.visible"],
        apply: |p| {
            p.sparse.row_len = |layout, sight| (layout.local_len)(sight.seq_len, sight.member, &sight.grid)
        },
    },
    Fault {
        name: "topk-bound-trimmed-locally",
        title: "a row's offset is subtracted from the rank's length: len(L, r) − q + 1 + t",
        class: FaultClass::TopKSelect,
        bugs: &["vllm#46076"],
        killed_by: &["sparse.visible", "sparse.choice"],
        apply: |p| {
            p.sparse.row_len = |layout, sight| {
                let local = (layout.local_len)(sight.seq_len, sight.member, &sight.grid);
                (local + 1 + sight.row).saturating_sub(sight.query_len)
            }
        },
    },
    Fault {
        name: "topk-own-token-not-seen",
        title: "a row selects among the tokens before its own, which it does not see",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.visible", "sparse.choice", "sparse.alone"],
        apply: |p| p.sparse.row_len = without_own,
    },
    Fault {
        name: "topk-one-less",
        title: "one token less than k is selected",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.visible"],
        apply: |p| p.sparse.kept = |k, _| k - 1,
    },
    Fault {
        name: "topk-of-smallest",
        title: "the tokens of the smallest scores are selected",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.choice", "sparse.alone"],
        apply: |p| {
            p.sparse.best =
                |scores, count| best(&scores.iter().map(|score| -score).collect::<Vec<_>>(), count)
        },
    },
    Fault {
        name: "topk-of-magnitudes",
        title: "tokens are selected by the magnitude of their scores",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.choice", "sparse.alone"],
        apply: |p| {
            p.sparse.best =
                |scores, count| best(&scores.iter().map(|score| score.abs()).collect::<Vec<_>>(), count)
        },
    },
    Fault {
        name: "topk-of-newest",
        title: "the newest k tokens are selected, as a window would",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.choice", "sparse.alone"],
        apply: |p| {
            p.sparse.best = |scores, count| (0..scores.len()).rev().take(count).collect();
        },
    },
    Fault {
        name: "topk-share-of-each-rank",
        title: "each rank gives the best k / W of its tokens, where the best k of all may lie on one",
        class: FaultClass::TopKSelect,
        bugs: &["vllm#53684"],
        killed_by: &["sparse.choice"],
        apply: |p| p.sparse.candidates = |k, world| k.div_ceil(world),
    },
    Fault {
        name: "topk-local-for-global",
        title: "a rank's own best k are taken for the best k of all",
        class: FaultClass::TopKSelect,
        bugs: &["vllm#53684", "vllm#45426"],
        killed_by: &["sparse.ranks", "sparse.choice", "sparse.visible"],
        apply: |p| p.sparse.sources = |own, _, _| vec![own],
    },
    Fault {
        name: "topk-last-rank-left-out",
        title: "the candidates of the last rank are gathered and not looked at",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["sparse.choice", "sparse.visible"],
        apply: |p| {
            p.sparse.sources = |own, world, mode| match mode {
                SelectionMode::Exact => (0..(world - 1).max(1)).collect(),
                SelectionMode::Union => vec![own],
            }
        },
    },
    Fault {
        name: "topk-own-candidates-first",
        title: "a rank puts its own candidates before those of others, so that each breaks ties in its own way",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["sparse.ranks"],
        apply: |p| {
            p.sparse.sources = |own, world, mode| match mode {
                SelectionMode::Exact => (0..world).map(|step| (own + step) % world).collect(),
                SelectionMode::Union => vec![own],
            }
        },
    },
    Fault {
        name: "topk-scores-travel-in-bf16",
        title: "candidates are chosen from again by scores of 16 bits",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["sparse.choice"],
        apply: |p| p.sparse.wire = round_bf16,
    },
    Fault {
        name: "topk-filler-of-zero",
        title: "a rank with fewer tokens than candidates fills up with a score of 0, which wins over negative ones",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["sparse.visible"],
        apply: |p| p.sparse.filler = Candidate { score: 0.0, position: -1 },
    },
    Fault {
        name: "topk-filler-is-token-zero",
        title: "a rank with fewer tokens than candidates fills up with token 0",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["sparse.visible"],
        apply: |p| p.sparse.filler = Candidate { score: f32::NEG_INFINITY, position: 0 },
    },
    Fault {
        name: "topk-padding-selects",
        title: "rows of graph padding select what the last request's row does",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["sparse.visible"],
        apply: |p| p.sparse.row = |row, rows| rows.checked_sub(1).map(|last| row.min(last)),
    },
    Fault {
        name: "topk-local-indices-travel",
        title: "candidates travel with their index on the rank instead of their position",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["sparse.visible", "sparse.choice"],
        apply: |p| p.sparse.position = |local, _, _| local,
    },
    Fault {
        name: "topk-positions-without-interleave",
        title: "a candidate's position is j·W + r, whatever the interleave size",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["sparse.visible", "sparse.choice"],
        apply: |p| {
            p.sparse.position =
                |local, member, grid| position(local, member, &Grid { interleave: 1, ..*grid })
        },
    },
    Fault {
        name: "sparse-list-not-filtered",
        title: "a rank lists the tokens of the whole selection, those of other ranks included",
        class: FaultClass::TopKSelect,
        bugs: &["vllm#46514", "vllm#54541"],
        killed_by: &["sparse.partition", "sparse.slots", "selected.lists"],
        apply: |p| p.sparse.owns = |_, _, _| true,
    },
    Fault {
        name: "sparse-owner-without-interleave",
        title: "a rank lists the positions p with p mod W = r, whatever the interleave size",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["sparse.partition", "sparse.slots", "selected.lists"],
        apply: |p| p.sparse.owns = |position, member, grid| position % grid.world == member,
    },
    Fault {
        name: "sparse-entry-of-physical-blocks",
        title: "the block of a selected token is entry p / B of its table, which is in units of B·W",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["sparse.slots", "selected.lists"],
        apply: |p| p.sparse.entry = |position, grid| position / grid.block,
    },
    Fault {
        name: "sparse-offset-is-global",
        title: "the slot within its block is taken from the position, not from its index on the rank",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["sparse.slots", "selected.lists"],
        apply: |p| p.sparse.offset = |position, grid| position % grid.block,
    },
    Fault {
        name: "sparse-offset-without-interleave",
        title: "local slots are computed for tokens that are dealt one by one",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["sparse.slots", "selected.lists"],
        apply: |p| p.sparse.offset = |position, grid| position / grid.world % grid.block,
    },
    Fault {
        name: "sparse-list-with-holes",
        title: "a rank leaves −1 in its list where a token belongs to another rank",
        class: FaultClass::TopKSelect,
        bugs: &[],
        killed_by: &["sparse.lists", "sparse.slots"],
        apply: |p| {
            p.sparse.list = |tokens| tokens.into_iter().map(|slot| slot.unwrap_or(-1)).collect();
        },
    },
    Fault {
        name: "sparse-empty-row-is-counted",
        title: "a rank without a token of a row counts one",
        class: FaultClass::EmptyShard,
        bugs: &["ATOM#1832"],
        killed_by: &["sparse.partition", "selected.lists"],
        apply: |p| p.sparse.count = |tokens| tokens.max(1),
    },
    Fault {
        name: "sparse-empty-row-without-dummy",
        title: "a row without tokens has no entry where it is to have one for the kernel's plan",
        class: FaultClass::EmptyShard,
        bugs: &["ATOM#1832"],
        killed_by: &["sparse.lists", "selected.lists"],
        apply: |p| p.sparse.entries = |tokens, k, list| if list == SlotList::Padded { k } else { tokens },
    },
    Fault {
        name: "sparse-empty-row-has-dummy",
        title: "a row without tokens has an entry of slot −1 where lists are packed",
        class: FaultClass::EmptyShard,
        bugs: &[],
        killed_by: &["sparse.lists", "selected.lists"],
        apply: |p| {
            p.sparse.entries = |tokens, k, list| if list == SlotList::Padded { k } else { tokens.max(1) }
        },
    },
    Fault {
        name: "sparse-padding-is-slot-zero",
        title: "entries behind a row's last token hold slot 0, where they are to hold −1",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["sparse.lists", "selected.lists"],
        apply: |p| p.sparse.empty_entry = |_| 0,
    },
];

/// Element of a query of pairs that meets the element of a key of halves; the second half of a head is not rotated.
fn interleaved(element: usize, width: usize) -> usize {
    let rotary = width / 2 / 2 * 2;
    if element >= rotary { element } else { element % (rotary / 2) * 2 + element / (rotary / 2) }
}

fn without_own(layout: &LayoutPolicies, sight: &Sight) -> usize {
    let edge = (sight.seq_len + sight.row).saturating_sub(sight.query_len);
    (layout.local_len)(edge, sight.member, &sight.grid)
}

#[cfg(test)]
mod tests {
    use super::super::faulty::{grids, with};
    use super::*;

    #[test]
    fn a_query_of_pairs_is_a_permutation_of_its_rotary_half_and_the_identity_behind_it() {
        for width in [2, 8, 12, 16] {
            let mut seen: Vec<usize> = (0..width).map(|element| interleaved(element, width)).collect();
            assert!((width / 2..width).all(|element| seen[element] == element));
            assert_eq!(width >= 8, (0..width / 2).any(|element| seen[element] != element), "{width}");
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..width));
        }
        assert_eq!([0, 1, 2, 3].map(|element| interleaved(element, 8)), [0, 2, 1, 3]);
    }

    #[test]
    fn a_row_that_does_not_see_its_own_token_sees_one_less_on_the_rank_that_owns_it() {
        let (healthy, faulty) = (with("indexer-heads-unweighted"), with("topk-own-token-not-seen"));
        for grid in grids() {
            for (seq_len, query_len, row) in [(1, 1, 0), (9, 3, 0), (9, 3, 2), (40, 1, 0)] {
                let lens = |policies: &crate::policies::Policies| -> usize {
                    (0..grid.world)
                        .map(|member| {
                            let sight = Sight { seq_len, query_len, row, member, grid };
                            (policies.sparse.row_len)(&policies.layout, &sight)
                        })
                        .sum()
                };
                assert_eq!(lens(&healthy), lens(&faulty) + 1, "{grid:?} {seq_len} {query_len} {row}");
            }
        }
    }
}
