//! Faults of positions: pages of another size, owners the other way round, rotary phases, caches that were handed over.

use super::{Fault, FaultClass};
use crate::cache::{KvFormat, WrittenToken};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "owner-rotated-forward",
        title: "position 0 belongs to the second rank, and the last rank's runs to the first",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#6344"],
        killed_by: &["layout.slots", "write.single-writer"],
        apply: |p| p.layout.owner = |position, grid| (position / grid.interleave + 1) % grid.world,
    },
    Fault {
        name: "owners-in-reverse",
        title: "runs are dealt from the last rank to the first",
        class: FaultClass::LayoutIndex,
        bugs: &["ATOM#1994", "vllm-ascend#16492"],
        killed_by: &["layout.slots", "write.single-writer"],
        apply: |p| p.layout.owner = |position, grid| grid.world - 1 - position / grid.interleave % grid.world,
    },
    Fault {
        name: "page-of-a-smaller-group",
        title: "pages are looked up in units of half a block, as a cache group of smaller blocks would",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#55600"],
        killed_by: &["decode.partial-lse", "decode.output", "verify.output"],
        apply: |p| {
            p.layout.page = |local, _, grid| {
                let half = (grid.block / 2).max(1);
                (local / half, local % half)
            }
        },
    },
    Fault {
        name: "pages-counted-from-one",
        title: "every local token is looked up one block-table entry late",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#20531", "vllm#55600"],
        killed_by: &["decode.partial-lse", "decode.output", "verify.output", "attend.given-cache"],
        apply: |p| p.layout.page = |local, _, grid| (local / grid.block + 1, local % grid.block),
    },
    Fault {
        name: "context-page-of-a-smaller-group",
        title: "rows of a cached context are looked up in units of half a block",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#55600", "vllm#49962"],
        killed_by: &["context.gather", "context.output"],
        apply: |p| {
            p.context.page = |local, grid| {
                let half = (grid.block / 2).max(1);
                (local / half, local % half)
            }
        },
    },
    Fault {
        name: "blocks-of-one-rank",
        title: "a request's blocks are counted for B tokens each, so that it is given W times as many",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#29094", "vllm#45340", "sglang#35298"],
        killed_by: &["layout.blocks"],
        apply: |p| p.layout.blocks_needed = |len, grid| len.div_ceil(grid.block),
    },
    Fault {
        name: "hash-unit-of-two-blocks",
        title: "prefixes are hashed in units of two virtual blocks, so that a hit of one is never found",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#26296", "vllm#45340"],
        killed_by: &["layout.units"],
        apply: |p| p.layout.hash_unit = |grid| 2 * grid.block * grid.world,
    },
    Fault {
        name: "some-tokens-written-by-nobody",
        title: "ranks of odd number do not store what they own, as if another axis held it",
        class: FaultClass::LayoutIndex,
        bugs: &["tpu-inference#3344"],
        killed_by: &["write.single-writer", "write.round-trip"],
        apply: |p| p.cache.writes = |owner, member| owner == member && member % 2 == 0,
    },
    Fault {
        name: "written-by-the-previous-rank",
        title: "a token is stored by the rank before its owner, the first rank's by nobody",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#33309"],
        killed_by: &["write.single-writer", "write.round-trip"],
        apply: |p| p.cache.writes = |owner, member| owner == member + 1,
    },
    Fault {
        name: "rotary-phase-of-the-local-index",
        title: "the rotary part of a key is turned by the token's index on its rank instead of its position",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#32098", "sglang#28463"],
        killed_by: &["write.round-trip", "decode.output", "verify.output"],
        apply: |p| {
            p.cache.turn = |key, format, token| {
                turn(key, format, token.local as f64 - token.position as f64);
            }
        },
    },
    Fault {
        name: "rotary-phase-of-the-row",
        title: "the rotary part of a key is turned by the token's row in the batch instead of its position",
        class: FaultClass::LayoutIndex,
        bugs: &["TransformerEngine#2077"],
        killed_by: &["write.round-trip", "decode.output", "verify.output"],
        apply: |p| p.cache.turn = by_row,
    },
    Fault {
        name: "given-cache-of-the-next-rank",
        title: "of caches that are handed over, every rank takes the part of the rank behind it",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#16492", "ATOM#1994"],
        killed_by: &["attend.given-cache"],
        apply: |p| p.cache.given_part = |rank, ranks| (rank + 1) % ranks,
    },
    Fault {
        name: "given-cache-of-the-first-rank",
        title: "of caches that are handed over, every rank takes the first part, as if they were replicated",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#35298", "sglang#33309"],
        killed_by: &["attend.given-cache"],
        apply: |p| p.cache.given_part = |_, _| 0,
    },
    Fault {
        name: "given-cache-cut-in-half",
        title: "of caches that are handed over, only the first half of the blocks arrives",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#49962", "sglang#33309", "ATOM#1994"],
        killed_by: &["attend.given-cache"],
        apply: |p| p.cache.given_blocks = |blocks| blocks.div_ceil(2),
    },
];

fn by_row(key: &mut [f32], format: &KvFormat, token: &WrittenToken) {
    turn(key, format, token.row as f64 - token.position as f64);
}

/// Turns pairs of the rotary part, or of the whole key where there is none apart, by `positions` (RoPE, base 10 000).
fn turn(key: &mut [f32], format: &KvFormat, positions: f64) {
    let first = if format.rope_start < key.len() { format.rope_start } else { 0 };
    let part = &mut key[first..];
    let width = part.len() as f64;
    for (index, pair) in part.chunks_exact_mut(2).enumerate() {
        let angle = positions * 10_000f64.powf(-2.0 * index as f64 / width);
        let (sin, cos) = angle.sin_cos();
        let (x, y) = (f64::from(pair[0]), f64::from(pair[1]));
        (pair[0], pair[1]) = ((x * cos - y * sin) as f32, (x * sin + y * cos) as f32);
    }
}
