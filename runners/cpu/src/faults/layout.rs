//! Faults of the layout: positions, slots, blocks and units computed wrongly.

use super::{Fault, FaultClass};
use crate::grid::Grid;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "length-of-full-round",
        title: "every rank counts a run too many where the length is a whole number of rounds (rank ≤ (L−1) mod W)",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#27518"],
        killed_by: &[
            "layout.partition",
            "layout.local-lengths",
            "layout.row-sum",
            "decode.row-lengths",
            "decode.partial-lse",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.local_len = length_of_full_round,
    },
    Fault {
        name: "length-rounded-up-on-every-rank",
        title: "every rank counts ceil(L / W) tokens, as only the first ones hold",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#27518"],
        killed_by: &[
            "layout.partition",
            "layout.local-lengths",
            "layout.row-sum",
            "decode.row-lengths",
            "decode.partial-lse",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.local_len = |len, _, grid| len.div_ceil(grid.round_tokens()) * grid.interleave,
    },
    Fault {
        name: "length-without-the-last-round",
        title: "no rank counts its tokens of the last, incomplete round",
        class: FaultClass::LayoutIndex,
        bugs: &["TransformerEngine#1012"],
        killed_by: &[
            "layout.partition",
            "layout.local-lengths",
            "layout.row-sum",
            "decode.row-lengths",
            "decode.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.local_len = |len, _, grid| len / grid.round_tokens() * grid.interleave,
    },
    Fault {
        name: "length-off-by-the-rank",
        title: "a rank's share is ceil((L − r) / W) with r counted from one",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#27518"],
        killed_by: &[
            "layout.partition",
            "layout.local-lengths",
            "layout.row-sum",
            "decode.row-lengths",
            "decode.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.local_len = |len, member, grid| {
                let rest = len % grid.round_tokens();
                let own = rest.saturating_sub((member + 1) * grid.interleave).min(grid.interleave);
                len / grid.round_tokens() * grid.interleave + own
            }
        },
    },
    Fault {
        name: "length-ignores-interleave",
        title: "local lengths are those of token interleave whatever S is",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#14876"],
        killed_by: &[
            "equal.world",
            "layout.local-lengths",
            "decode.row-lengths",
            "verify.row-lengths",
            "equal.interleave",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.local_len =
                |len, member, grid| (len + grid.world - 1).saturating_sub(member) / grid.world
        },
    },
    Fault {
        name: "owner-by-block",
        title: "a position belongs to a rank by its block, not by its interleave run",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#14876"],
        killed_by: &[
            "layout.slots",
            "write.round-trip",
            "decode.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.owner = |position, grid| position / grid.block % grid.world,
    },
    Fault {
        name: "owner-rotated",
        title: "position 0 belongs to the last rank instead of the first",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#6344"],
        killed_by: &[
            "layout.slots",
            "write.single-writer",
            "decode.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.owner = |position, grid| (position / grid.interleave + grid.world - 1) % grid.world
        },
    },
    Fault {
        name: "local-index-of-token-interleave",
        title: "the local index is p / W also where runs are longer than a token",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#5767"],
        killed_by: &[
            "layout.slots",
            "layout.slot-bijection",
            "write.round-trip",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.local_index = |position, grid| position / grid.world,
    },
    Fault {
        name: "local-index-without-offset",
        title: "all tokens of an interleave run get the local index of its first",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#29094"],
        killed_by: &[
            "layout.slots",
            "layout.slot-bijection",
            "write.round-trip",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.local_index = |position, grid| position / grid.round_tokens() * grid.interleave,
    },
    Fault {
        name: "local-index-is-global",
        title: "a slot is computed from the global position instead of the local index",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#29760", "sglang#20531"],
        killed_by: &[
            "layout.slots",
            "layout.slot-bijection",
            "write.round-trip",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.local_index = |position, _| position,
    },
    Fault {
        name: "slot-by-physical-block",
        title: "a block-table entry is taken to hold B positions instead of B·W",
        class: FaultClass::LayoutIndex,
        bugs: &["ATOM#1994", "vllm#41549"],
        killed_by: &["layout.slots", "write.round-trip"],
        apply: |p| p.layout.table_entry = |position, grid| position / grid.block,
    },
    Fault {
        name: "block-ids-shifted",
        title: "block ids are counted from one: writer and reader agree, nobody else does",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#55600"],
        killed_by: &["layout.slots", "write.round-trip", "write.untouched", "attend.given-cache"],
        apply: |p| p.layout.block_id = |id, blocks| if id + 1 == blocks as i64 { 0 } else { id + 1 },
    },
    Fault {
        name: "block-table-trimmed",
        title: "the kernel's block table is cut to the local length over B·W entries",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#50493", "vllm-ascend#9724"],
        killed_by: &[
            "decode.partial-lse",
            "verify.partial-lse",
            "decode.output",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.layout.page = |local, count, grid| {
                let last = count.saturating_sub(1) / (grid.block * grid.world);
                ((local / grid.block).min(last), local % grid.block)
            }
        },
    },
    Fault {
        name: "page-of-virtual-block",
        title: "the kernel walks local tokens with the virtual block as its page size",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#29760"],
        killed_by: &[
            "layout.read-slots",
            "decode.partial-lse",
            "verify.partial-lse",
            "decode.output",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.layout.page = |local, _, grid| (local / (grid.block * grid.world), local % grid.block),
    },
    Fault {
        name: "virtual-block-of-one-rank",
        title: "a virtual block is counted as B tokens",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#41549", "vllm#49962"],
        killed_by: &["layout.units"],
        apply: |p| p.layout.virtual_block = |grid| grid.block,
    },
    Fault {
        name: "hash-unit-of-one-rank",
        title: "prefixes are hashed in units of B tokens while blocks hold B·W",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#26296"],
        killed_by: &["layout.units"],
        apply: |p| p.layout.hash_unit = |grid| grid.block,
    },
    Fault {
        name: "sub-page-of-any-size",
        title: "a sub-page is min(128, B), power of two or not",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#29760"],
        killed_by: &["layout.units"],
        apply: |p| p.layout.sub_page = |grid| grid.block.min(128),
    },
    Fault {
        name: "sub-page-halved",
        title: "sub-pages are half as large as the kernel's pages",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#20531"],
        killed_by: &["layout.units", "layout.sub-pages"],
        apply: |p| {
            p.layout.sub_page = |grid| {
                let page = grid.block & grid.block.wrapping_neg();
                (page.min(128) / 2).max(1)
            }
        },
    },
    Fault {
        name: "sub-page-ids-unscaled",
        title: "sub-page ids count on from the block id instead of its first page",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#29760"],
        killed_by: &["layout.sub-pages"],
        apply: |p| {
            p.layout.sub_page_id =
                |block, part, parts| if parts > 1 { block + part as i32 } else { block + 1 }
        },
    },
    Fault {
        name: "blocks-rounded-down",
        title: "a request gets no block for its last, incomplete virtual block",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#29094"],
        killed_by: &["layout.blocks"],
        apply: |p| p.layout.blocks_needed = |len, grid| len / (grid.block * grid.world),
    },
    Fault {
        name: "blocks-by-average-share",
        title: "blocks are counted for L / W tokens rounded down, not for the longest rank",
        class: FaultClass::LayoutIndex,
        bugs: &["TransformerEngine#1012"],
        killed_by: &["layout.blocks"],
        apply: |p| p.layout.blocks_needed = |len, grid| (len / grid.world).div_ceil(grid.block),
    },
];

/// vLLM's former form, in runs: full rounds, and a run more for ranks up to that of the last token.
fn length_of_full_round(len: usize, member: usize, grid: &Grid) -> usize {
    let Some(last) = len.checked_sub(1) else { return 0 };
    let rest = last % grid.round_tokens() + 1;
    let own = rest.saturating_sub(member * grid.interleave).min(grid.interleave);
    len / grid.round_tokens() * grid.interleave + own
}

#[cfg(test)]
mod tests {
    use super::super::faulty::{grids, with};
    use crate::grid::{Grid, LayoutPolicies};

    const HEALTHY: LayoutPolicies = LayoutPolicies::HEALTHY;

    /// Positions up to several rounds of each layout, in each of which `seen` is what `titled` makes of the published value.
    fn at_every_position(
        name: &str,
        seen: fn(&LayoutPolicies, usize, &Grid) -> usize,
        titled: fn(usize, &Grid) -> usize,
    ) {
        let layout = with(name).layout;
        for grid in grids() {
            for position in 0..60 {
                assert_eq!(
                    seen(&layout, position, &grid),
                    titled(position, &grid),
                    "{name}: {position} in {grid:?}"
                );
            }
        }
    }

    fn at_every_length(name: &str, titled: fn(usize, usize, &Grid) -> usize) {
        let local_len = with(name).layout.local_len;
        for grid in grids() {
            for (len, member) in (0..60).flat_map(|len| (0..grid.world).map(move |member| (len, member))) {
                let (seen, titled) = (local_len(len, member, &grid), titled(len, member, &grid));
                assert_eq!(seen, titled, "{name}: {len} on {member} in {grid:?}");
            }
        }
    }

    #[test]
    fn wrong_lengths_are_the_published_ones_of_another_length_or_rank() {
        let len = HEALTHY.local_len;
        assert_eq!(len(37, 1, &grids()[2]), 12, "the published value that the titles are measured by");
        at_every_length("length-of-full-round", |l, r, g| {
            let whole = l > 0 && l % g.round_tokens() == 0;
            (HEALTHY.local_len)(l, r, g) + if whole { g.interleave } else { 0 }
        });
        at_every_length("length-rounded-up-on-every-rank", |l, _, g| {
            (HEALTHY.local_len)(l.next_multiple_of(g.round_tokens()), 0, g)
        });
        at_every_length("length-without-the-last-round", |l, r, g| {
            (HEALTHY.local_len)(l - l % g.round_tokens(), r, g)
        });
        at_every_length("length-off-by-the-rank", |l, r, g| match r + 1 == g.world {
            true => (HEALTHY.local_len)(l - l % g.round_tokens(), r, g),
            false => (HEALTHY.local_len)(l, r + 1, g),
        });
        at_every_length("length-ignores-interleave", |l, r, g| {
            (HEALTHY.local_len)(l, r, &Grid { interleave: 1, ..*g })
        });
    }

    #[test]
    fn wrong_owners_and_indices_are_the_published_ones_of_another_layout() {
        at_every_position(
            "owner-by-block",
            |l, p, g| (l.owner)(p, g),
            |p, g| (HEALTHY.owner)(p, &Grid { interleave: g.block, ..*g }),
        );
        at_every_position(
            "owner-rotated",
            |l, p, g| (l.owner)(p, g),
            |p, g| {
                // position 0 belongs to the last rank, the run behind it to the first
                (HEALTHY.owner)(p, g).checked_sub(1).unwrap_or(g.world - 1)
            },
        );
        at_every_position(
            "local-index-of-token-interleave",
            |l, p, g| (l.local_index)(p, g),
            |p, g| (HEALTHY.local_index)(p, &Grid { interleave: 1, ..*g }),
        );
        at_every_position(
            "local-index-without-offset",
            |l, p, g| (l.local_index)(p, g),
            |p, g| (HEALTHY.local_index)(p - p % g.interleave, g),
        );
        at_every_position("local-index-is-global", |l, p, g| (l.local_index)(p, g), |p, _| p);
        at_every_position(
            "slot-by-physical-block",
            |l, p, g| (l.table_entry)(p, g),
            |p, g| (HEALTHY.table_entry)(p, &Grid { world: 1, ..*g }),
        );
    }

    #[test]
    fn wrong_pages_keep_the_offset_and_miss_the_entry() {
        let (trimmed, of_virtual) =
            (with("block-table-trimmed").layout.page, with("page-of-virtual-block").layout.page);
        for grid in grids() {
            let virtual_block = grid.block * grid.world;
            for count in 1..60_usize {
                let entries = count.div_ceil(virtual_block);
                for local in 0..count {
                    let (entry, offset) = (HEALTHY.page)(local, count, &grid);
                    assert_eq!(
                        trimmed(local, count, &grid),
                        (entry.min(entries - 1), offset),
                        "{local} of {count}"
                    );
                    let (entry, _) = (HEALTHY.page)(local, count, &Grid { block: virtual_block, ..grid });
                    assert_eq!(of_virtual(local, count, &grid), (entry, offset), "{local} of {count}");
                }
            }
        }
    }

    #[test]
    fn block_ids_that_are_shifted_stay_within_the_cache() {
        let block_id = with("block-ids-shifted").layout.block_id;
        assert_eq!([0, 1, 2, 3].map(|id| block_id(id, 4)), [1, 2, 3, 0]);
    }

    #[test]
    fn wrong_units_are_those_that_their_titles_name() {
        let grid = |block| Grid { world: 3, interleave: 1, block };
        assert_eq!((with("virtual-block-of-one-rank").layout.virtual_block)(&grid(8)), 8);
        assert_eq!((with("hash-unit-of-one-rank").layout.hash_unit)(&grid(8)), 8);
        let any = with("sub-page-of-any-size").layout.sub_page;
        assert_eq!([1, 12, 96, 256].map(|block| any(&grid(block))), [1, 12, 96, 128]);
        let halved = with("sub-page-halved").layout.sub_page;
        assert_eq!([1, 12, 96, 256, 1536].map(|block| halved(&grid(block))), [1, 2, 16, 64, 64]);
        let unscaled = with("sub-page-ids-unscaled").layout.sub_page_id;
        assert_eq!(
            [unscaled(7, 0, 2), unscaled(7, 1, 2), unscaled(7, 3, 4)],
            [7, 8, 10],
            "counted on from the block"
        );
        assert_eq!(unscaled(7, 0, 1), 8, "where a block is one page, it is the page behind it");
    }

    #[test]
    fn wrong_numbers_of_blocks_leave_out_what_their_titles_say() {
        at_every_position(
            "blocks-rounded-down",
            |l, len, g| (l.blocks_needed)(len, g),
            |len, g| (HEALTHY.blocks_needed)(len - len % (g.block * g.world), g),
        );
        at_every_position(
            "blocks-by-average-share",
            |l, len, g| (l.blocks_needed)(len, g),
            |len, g| {
                let share = len / g.world;
                (HEALTHY.blocks_needed)(share, &Grid { world: 1, ..*g })
            },
        );
    }
}
