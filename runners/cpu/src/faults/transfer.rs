//! Faults of a transfer: caches of a session of another layout that are found or placed wrongly.

use super::{Fault, FaultClass};
use crate::grid::Grid;

const KILLERS: &[&str] = &["sequence.transfer"];

const fn fault(
    name: &'static str,
    title: &'static str,
    bugs: &'static [&'static str],
    apply: fn(&mut crate::policies::Policies),
) -> Fault {
    Fault { name, title, class: FaultClass::LayoutIndex, bugs, killed_by: KILLERS, apply }
}

pub(super) const FAULTS: &[Fault] = &[
    fault(
        "transfer-ranks-in-reverse",
        "the caches of a source are taken from its last rank to its first",
        &["vllm-ascend#16492", "ATOM#1994"],
        |p| p.transfer.part = |rank, ranks| ranks - 1 - rank,
    ),
    fault(
        "transfer-ignores-interleave",
        "the caches of a source are read as if its tokens were dealt one by one",
        &["vllm#49962", "ATOM#1994"],
        |p| p.transfer.source = |source, _| Grid { interleave: 1, ..source },
    ),
    fault(
        "transfer-interleave-of-the-destination",
        "the caches of a source are read with the interleave size of the session that takes them",
        &["vllm#49962"],
        |p| {
            p.transfer.source = |source, own| match source.block % own.interleave {
                0 => Grid { interleave: own.interleave, ..source },
                _ => Grid { interleave: source.block, ..source },
            }
        },
    ),
    fault(
        "transfer-world-of-the-destination",
        "the caches of a source are dealt over as many ranks as the session has that takes them",
        &["sglang#33309", "vllm-ascend#16492"],
        |p| {
            p.transfer.source = |source, own| Grid { world: own.world, ..source };
            p.transfer.part = |rank, ranks| rank % ranks;
        },
    ),
    fault(
        "transfer-loses-the-tail",
        "the last, incomplete block of a source is not taken over",
        &["vllm#49962", "sglang#33309"],
        |p| p.transfer.taken = |tokens, source, _| tokens - tokens % (source.block * source.world),
    ),
    Fault {
        name: "transfer-fills-the-last-block",
        title: "whole blocks of a source are taken over, and what lies behind the last token with them",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#12840"],
        killed_by: KILLERS,
        apply: |p| {
            p.transfer.taken = |tokens, source, own| {
                let whole = |grid: &Grid| tokens.next_multiple_of(grid.block * grid.world);
                whole(source).min(whole(own))
            }
        },
    },
    fault(
        "transfer-through-the-table-of-the-source",
        "tokens are placed by the source's block table, where its blocks exist in the session that takes them",
        &["vllm#49962", "vllm-ascend#4221"],
        |p| {
            p.transfer.entries = |own, source, blocks| {
                let exists = |block: &i64| (0..blocks as i64).contains(block);
                let mut entries = own.to_vec();
                let held = entries.iter_mut().zip(source).filter(|(own, other)| exists(own) && exists(other));
                held.for_each(|(own, other)| *own = *other);
                entries
            }
        },
    ),
    fault(
        "transfer-blocks-in-table-order",
        "the blocks of a source are placed one by one in ascending order, whatever the block table says",
        &["sglang#29760"],
        |p| {
            p.transfer.entries = |own, _, blocks| {
                let held = own.iter().filter(|block| (0..blocks as i64).contains(block)).count();
                let mut entries = own.to_vec();
                entries[..held].sort_unstable();
                entries
            }
        },
    ),
];

#[cfg(test)]
mod tests {
    use super::super::faulty::with;
    use super::*;
    use crate::transfer::TransferPolicies;

    const SOURCE: Grid = Grid { world: 3, interleave: 2, block: 4 };
    const OWN: Grid = Grid { world: 2, interleave: 4, block: 8 };

    fn read_by(name: &str) -> Grid {
        (with(name).transfer.source)(SOURCE, OWN)
    }

    #[test]
    fn a_source_is_read_by_the_layout_that_the_title_names() {
        assert_eq!((TransferPolicies::HEALTHY.source)(SOURCE, OWN), SOURCE);
        assert_eq!(read_by("transfer-ignores-interleave"), Grid { interleave: 1, ..SOURCE });
        assert_eq!(read_by("transfer-interleave-of-the-destination"), Grid { interleave: 4, ..SOURCE });
        let coarse = Grid { interleave: 8, ..OWN };
        let fitted = (with("transfer-interleave-of-the-destination").transfer.source)(SOURCE, coarse);
        assert_eq!(fitted.interleave, 4, "a run is no longer than a block");
        assert_eq!(read_by("transfer-world-of-the-destination"), Grid { world: 2, ..SOURCE });
        let part = |name: &str| [0, 1, 2].map(|rank| (with(name).transfer.part)(rank, 3));
        assert_eq!(part("transfer-ranks-in-reverse"), [2, 1, 0]);
        assert_eq!((with("transfer-world-of-the-destination").transfer.part)(4, 3), 1);
    }

    #[test]
    fn the_last_block_is_lost_or_filled() {
        let taken = |name: &str, tokens: usize| (with(name).transfer.taken)(tokens, &SOURCE, &OWN);
        assert_eq!([0, 11, 12, 13, 24].map(|len| taken("transfer-loses-the-tail", len)), [0, 0, 12, 12, 24]);
        // virtual blocks of 12 and of 16 tokens
        let filled = [0, 11, 12, 13, 17].map(|len| taken("transfer-fills-the-last-block", len));
        assert_eq!(filled, [0, 12, 12, 16, 24]);
    }

    #[test]
    fn tokens_are_placed_by_the_entries_that_the_title_names() {
        let own = [7, 2, 5, -7];
        let source = with("transfer-through-the-table-of-the-source").transfer.entries;
        assert_eq!(source(&own, &[5, 9, 3, 1], 9), [5, 2, 3, -7], "block 9 is none of the session's");
        let sorted = with("transfer-blocks-in-table-order").transfer.entries;
        assert_eq!(sorted(&own, &[5, 9, 3], 9), [2, 5, 7, -7]);
    }
}
