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
        killed_by: &["layout.read-slots", "decode.partial-lse", "decode.output", "verify.output"],
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
        killed_by: &[
            "layout.read-slots",
            "decode.partial-lse",
            "decode.output",
            "verify.output",
            "attend.given-cache",
        ],
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

#[cfg(test)]
mod tests {
    use shardcheck_formats::Dtype;

    use super::super::faulty::{format, grids, with};
    use super::*;
    use crate::grid::{Grid, LayoutPolicies};

    const HEALTHY: LayoutPolicies = LayoutPolicies::HEALTHY;

    #[test]
    fn owners_are_rotated_or_reversed() {
        let (forward, reverse) = (with("owner-rotated-forward").layout, with("owners-in-reverse").layout);
        for grid in grids() {
            for position in 0..60 {
                let owner = (HEALTHY.owner)(position, &grid);
                let next = if owner + 1 == grid.world { 0 } else { owner + 1 };
                assert_eq!((forward.owner)(position, &grid), next, "{position} in {grid:?}");
                assert_eq!(
                    (reverse.owner)(position, &grid) + owner,
                    grid.world - 1,
                    "{position} in {grid:?}"
                );
            }
        }
    }

    #[test]
    fn pages_are_half_as_large_or_one_entry_late() {
        let (half, late) =
            (with("page-of-a-smaller-group").layout.page, with("pages-counted-from-one").layout.page);
        let context = with("context-page-of-a-smaller-group").context.page;
        for grid in grids().into_iter().chain([Grid { world: 2, interleave: 1, block: 1 }]) {
            let smaller = Grid { block: (grid.block / 2).max(1), ..grid };
            for local in 0..40 {
                let expected = (HEALTHY.page)(local, 40, &smaller);
                assert_eq!(half(local, 40, &grid), expected, "{local} in {grid:?}");
                assert_eq!(context(local, &grid), expected, "{local} in {grid:?}");
                let (entry, offset) = (HEALTHY.page)(local, 40, &grid);
                assert_eq!(late(local, 40, &grid), (entry + 1, offset), "{local} in {grid:?}");
            }
        }
    }

    #[test]
    fn units_and_blocks_are_those_of_one_rank_or_of_two_blocks() {
        let (blocks, unit) = (with("blocks-of-one-rank").layout, with("hash-unit-of-two-blocks").layout);
        for grid in grids() {
            assert_eq!((unit.hash_unit)(&grid), (HEALTHY.hash_unit)(&grid) + (HEALTHY.virtual_block)(&grid));
            for len in 0..60 {
                let alone = Grid { world: 1, ..grid };
                assert_eq!((blocks.blocks_needed)(len, &grid), (HEALTHY.blocks_needed)(len, &alone));
            }
        }
    }

    #[test]
    fn the_wrong_ranks_write() {
        let pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (2, 2), (3, 3)];
        let writes = |name: &str| pairs.map(|(owner, member)| (with(name).cache.writes)(owner, member));
        assert_eq!(writes("some-tokens-written-by-nobody"), [true, false, false, false, false, true, false]);
        assert_eq!(writes("written-by-the-previous-rank"), [false, false, true, false, true, false, false]);
    }

    #[test]
    fn given_caches_are_taken_from_the_wrong_rank_or_by_half() {
        let part = |name: &str| [0, 1, 2].map(|rank| (with(name).cache.given_part)(rank, 3));
        assert_eq!(part("given-cache-of-the-next-rank"), [1, 2, 0]);
        assert_eq!(part("given-cache-of-the-first-rank"), [0, 0, 0]);
        assert_eq!([1, 4, 5].map(with("given-cache-cut-in-half").cache.given_blocks), [1, 2, 3]);
    }

    /// The key (1, 0, 0, 1) turned back by the angles of `name` for a token: in complex pairs, its phase at position 0.
    fn turned(name: &str, format: &KvFormat, token: WrittenToken) -> [f32; 4] {
        let mut key = [1.0, 0.0, 0.0, 1.0];
        (with(name).cache.turn)(&mut key, format, &token);
        key
    }

    #[test]
    fn the_rotary_phase_is_that_of_the_index_that_the_title_names() {
        let token = WrittenToken { position: 9, local: 4, row: 7 };
        // the key came with the phase of its position, so that −5 and −2 positions are left to turn
        for (name, positions) in
            [("rotary-phase-of-the-local-index", -5f32), ("rotary-phase-of-the-row", -2.0)]
        {
            let near = |seen: [f32; 4], expected: [f32; 4]| {
                let off = seen.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 1e-6, "{name}: {seen:?} {expected:?}");
            };
            // the rotary part is the last two columns: one pair, turned by the angle of the first frequency, 1
            let (sin, cos) = positions.sin_cos();
            let rotary = format(Dtype::Bf16, 1.0);
            near(turned(name, &rotary, token), [1.0, 0.0, -sin, cos]);
            // where there is none apart, both pairs turn: the second by a hundredth (10 000^(−2/4))
            let (slow_sin, slow_cos) = (positions / 100.0).sin_cos();
            let whole = KvFormat { rope_start: 4, ..rotary };
            near(turned(name, &whole, token), [cos, sin, -slow_sin, slow_cos]);
        }
    }
}
