//! Faults of what a kernel is told beside lengths: the mask of a verification over a rank's tokens, and the list of slots to read.

use super::{Fault, FaultClass};
use crate::grid::{Sight, row_sees};

const MASK: &[&str] = &["layout.row-mask"];
const LIST: &[&str] = &["layout.read-slots"];

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "mask-ignores-interleave",
        title: "the mask of a verification is that of single tokens in turn, whatever S is",
        class: FaultClass::CausalBound,
        bugs: &["vllm-ascend#14876"],
        killed_by: MASK,
        apply: |p| {
            p.layout.row_sees = |sight, local, held| {
                let mut single = *sight;
                single.grid.interleave = 1;
                row_sees(&single, local, held)
            }
        },
    },
    Fault {
        name: "mask-open-without-tokens",
        title: "a row that must not see any token of a rank sees all of them: its part of the mask stays empty",
        class: FaultClass::EmptyShard,
        bugs: &["vllm-ascend#6491"],
        killed_by: MASK,
        apply: |p| p.layout.row_sees = open_without_tokens,
    },
    Fault {
        name: "mask-inverted",
        title: "the mask of a verification leaves a row what it must not see",
        class: FaultClass::CausalBound,
        bugs: &["vllm#47181"],
        killed_by: MASK,
        apply: |p| p.layout.row_sees = |sight, local, held| !row_sees(sight, local, held),
    },
    Fault {
        name: "mask-without-the-row-itself",
        title: "the mask of a verification leaves out the row's own token",
        class: FaultClass::CausalBound,
        bugs: &["vllm-ascend#6491"],
        killed_by: MASK,
        apply: |p| p.layout.row_sees = |sight, local, held| row_sees(&shifted(sight, 1, 0), local, held),
    },
    Fault {
        name: "mask-one-token-further",
        title: "the mask of a verification leaves a row the token behind its own",
        class: FaultClass::CausalBound,
        bugs: &["vllm#47181"],
        killed_by: MASK,
        apply: |p| p.layout.row_sees = |sight, local, held| row_sees(&shifted(sight, 0, 1), local, held),
    },
    Fault {
        name: "list-of-the-whole-request",
        title: "every row is told to read all of the rank's tokens of its request",
        class: FaultClass::CausalBound,
        bugs: &["vllm#47181"],
        killed_by: LIST,
        apply: |p| p.layout.listed = |_, held, _| (0..held).collect(),
    },
    Fault {
        name: "list-in-whole-pages",
        title: "a row is told to read its last page to the end",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#9724"],
        killed_by: LIST,
        apply: |p| p.layout.listed = |seen, _, grid| (0..seen.next_multiple_of(grid.block)).collect(),
    },
    Fault {
        name: "list-without-the-last-page",
        title: "a row is not told to read a page that is not full",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#50493"],
        killed_by: LIST,
        apply: |p| p.layout.listed = |seen, _, grid| (0..seen / grid.block * grid.block).collect(),
    },
    Fault {
        name: "list-backwards",
        title: "a row is told to read the rank's tokens from the last one on",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#20531"],
        killed_by: LIST,
        apply: |p| p.layout.listed = |seen, _, _| (0..seen).rev().collect(),
    },
];

/// The row as if it stood `back` tokens earlier or `on` later.
fn shifted(sight: &Sight, back: usize, on: usize) -> Sight {
    Sight { query_len: sight.query_len + back, row: sight.row + on, ..*sight }
}

fn open_without_tokens(sight: &Sight, local: usize, held: usize) -> bool {
    // a rank's first token is the first that a row can see of it
    row_sees(sight, local, held) || !row_sees(sight, 0, held)
}

#[cfg(test)]
mod tests {
    use crate::faults::fault;
    use crate::grid::{Grid, LayoutPolicies, Sight};
    use crate::policies::Policies;

    fn with(name: &str) -> LayoutPolicies {
        let mut policies = Policies::HEALTHY;
        (fault(name).expect("the fault is known").apply)(&mut policies);
        policies.layout
    }

    /// Positions of a rank's tokens that a row of four behind five tokens sees, two ranks, runs of two.
    fn seen(layout: &LayoutPolicies, row: usize, member: usize) -> Vec<usize> {
        let grid = Grid { world: 2, interleave: 2, block: 4 };
        let held: Vec<usize> = (0..9).filter(|position| position / 2 % 2 == member).collect();
        let sight = Sight { seq_len: 9, query_len: 4, row, member, grid };
        let seen = |local: &usize| (layout.row_sees)(&sight, *local, held.len());
        (0..held.len()).filter(seen).map(|local| held[local]).collect()
    }

    #[test]
    fn the_healthy_mask_ends_at_the_row_and_each_wrong_one_is_what_its_title_names() {
        for (name, by_row) in [
            (None, [vec![2, 3], vec![2, 3, 6], vec![2, 3, 6, 7], vec![2, 3, 6, 7]]),
            (Some("mask-inverted"), [vec![6, 7], vec![7], vec![], vec![]]),
            (Some("mask-without-the-row-itself"), [vec![2, 3], vec![2, 3], vec![2, 3, 6], vec![2, 3, 6, 7]]),
            (
                Some("mask-one-token-further"),
                [vec![2, 3, 6], vec![2, 3, 6, 7], vec![2, 3, 6, 7], vec![2, 3, 6, 7]],
            ),
            // positions 1, 3, 5 and 7 would be the rank's: three, three, four, four of them
            (
                Some("mask-ignores-interleave"),
                [vec![2, 3, 6], vec![2, 3, 6], vec![2, 3, 6, 7], vec![2, 3, 6, 7]],
            ),
        ] {
            let layout = name.map_or(LayoutPolicies::HEALTHY, with);
            for (row, expected) in by_row.into_iter().enumerate() {
                assert_eq!(seen(&layout, row, 1), expected, "{name:?}, row {row}");
            }
        }
    }

    #[test]
    fn the_open_mask_differs_only_where_a_row_sees_nothing_of_a_rank() {
        let open = with("mask-open-without-tokens");
        let grid = Grid { world: 3, interleave: 1, block: 4 };
        let sees = |layout: &LayoutPolicies, row, member, local| {
            (layout.row_sees)(&Sight { seq_len: 3, query_len: 2, row, member, grid }, local, 1)
        };
        assert!(sees(&open, 0, 2, 0) && !sees(&LayoutPolicies::HEALTHY, 0, 2, 0));
        for (row, member) in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)] {
            assert!(sees(&open, row, member, 0) && sees(&LayoutPolicies::HEALTHY, row, member, 0));
        }
    }

    #[test]
    fn each_wrong_list_is_what_its_title_names() {
        let grid = Grid { world: 2, interleave: 1, block: 4 };
        let of = |name: &str| (with(name).listed)(6, 9, &grid);
        assert_eq!(of("list-of-the-whole-request"), (0..9).collect::<Vec<_>>());
        assert_eq!(of("list-in-whole-pages"), (0..8).collect::<Vec<_>>());
        assert_eq!(of("list-without-the-last-page"), (0..4).collect::<Vec<_>>());
        assert_eq!(of("list-backwards"), [5, 4, 3, 2, 1, 0]);
    }
}
