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
