//! Faults of a cached context: chunks, gather, two-state merges.

use super::{Fault, FaultClass};
use crate::cache::decode_with;
use crate::chunks::{StateWeights, merge_two, plan};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "last-chunk-skipped",
        title: "the last chunk of a context that takes several is never gathered",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#5767"],
        killed_by: &["context.chunks", "context.gather", "context.output"],
        apply: |p| {
            p.context.plan = |cached, budget, grid| {
                let mut plan = plan(cached, budget, grid);
                if plan.windows.len() > 1 {
                    plan.windows.pop();
                }
                plan
            }
        },
    },
    Fault {
        name: "chunks-overlap",
        title: "every chunk but the first begins with the last row of the one before",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#10580"],
        killed_by: &["context.chunks", "context.gather", "context.output"],
        apply: |p| {
            p.context.plan = |cached, budget, grid| {
                let mut plan = plan(cached, budget, grid);
                plan.windows.iter_mut().skip(1).for_each(|window| window.start -= 1);
                plan
            }
        },
    },
    Fault {
        name: "context-rounded-down",
        title: "a context is cut to whole virtual blocks instead of padded to them",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#5767", "vllm#41549"],
        killed_by: &["context.chunks", "context.gather", "context.output"],
        apply: |p| {
            p.context.plan = |cached, budget, grid| {
                let mut plan = plan(cached, budget, grid);
                plan.padded = cached.iter().map(|len| len / (grid.block * grid.world) * grid.block).collect();
                plan
            };
        },
    },
    Fault {
        name: "chunk-padding-kept",
        title: "the padding rows of a gathered chunk are attended",
        class: FaultClass::Padding,
        bugs: &["vllm-ascend#5837", "local-inference-lab/vllm#14"],
        killed_by: &["context.chunks", "context.gather", "context.output"],
        apply: |p| p.context.kept = |_, sent, _| sent,
    },
    Fault {
        name: "context-page-of-virtual-block",
        title: "local context rows are looked up with the virtual block as page size",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#29760"],
        killed_by: &["identity.rows", "context.gather", "context.output", "context.state"],
        apply: |p| p.context.page = |local, grid| (local / (grid.block * grid.world), local % grid.block),
    },
    Fault {
        name: "reorg-forgets-earlier-requests",
        title: "the rows of every request are taken from the start of each rank's part of the gather",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#32098"],
        killed_by: &["context.gather", "context.output", "identity.rows"],
        apply: |p| p.context.source = |at| at.member * at.sent + at.row,
    },
    Fault {
        name: "context-masked-in-gather-order",
        title: "the gathered context, which lies rank by rank, is masked causally as if it lay in order",
        class: FaultClass::CausalBound,
        bugs: &["sglang#27276", "sglang#36297"],
        killed_by: &["context.state", "context.output", "context.lse"],
        apply: |p| p.context.visible = |tokens, row, query_len| tokens.saturating_sub(query_len - 1 - row),
    },
    Fault {
        name: "suffix-not-causal",
        title: "new tokens see each other without a mask",
        class: FaultClass::CausalBound,
        bugs: &["flash-attention#93"],
        killed_by: &["context.output", "context.lse"],
        apply: |p| p.context.visible_new = |_, query_len| query_len,
    },
    Fault {
        name: "suffix-misses-itself",
        title: "a new token does not see itself",
        class: FaultClass::CausalBound,
        bugs: &["vllm#47181"],
        killed_by: &["context.output", "context.lse"],
        apply: |p| p.context.visible_new = |row, _| row,
    },
    Fault {
        name: "context-unscaled",
        title: "a gathered context is dequantised without the cache scale",
        class: FaultClass::DtypeScale,
        bugs: &["local-inference-lab/vllm#14", "sglang#31514"],
        killed_by: &["context.gather", "context.state", "context.output"],
        apply: |p| {
            p.cache.decode_context = |codes, format, values| decode_with(codes, format.dtype, 1.0, values)
        },
    },
    Fault {
        name: "chunk-replaces-earlier-chunks",
        title: "the state of each chunk overwrites that of the chunks before",
        class: FaultClass::LseMath,
        bugs: &["sglang#35045"],
        killed_by: &["context.state", "context.output", "context.lse"],
        apply: |p| p.context.merge_chunk = |_, suffix| only_second(suffix),
    },
    Fault {
        name: "chunk-merge-in-base-2",
        title: "natural LSEs of chunks are merged with exp2 and log2",
        class: FaultClass::LseMath,
        bugs: &["sglang#35045"],
        killed_by: &["context.state", "context.output", "context.lse"],
        apply: |p| p.context.merge_chunk = merge_in_base_2,
    },
    Fault {
        name: "suffix-merge-in-base-2",
        title: "context and new tokens are merged with exp2 and log2",
        class: FaultClass::LseMath,
        bugs: &["sglang#35045"],
        killed_by: &["merge.fold", "context.output", "context.lse", "states.output", "states.lse"],
        apply: |p| p.context.merge_suffix = merge_in_base_2,
    },
    Fault {
        name: "suffix-merged-twice",
        title: "the state of the new tokens enters the merge twice",
        class: FaultClass::LseMath,
        bugs: &["flashinfer@6cbaf6e"],
        killed_by: &["states.output", "states.lse", "states.neutral", "states.commute", "context.lse"],
        apply: |p| {
            p.context.merge_suffix = |prefix, suffix| {
                let mut merged = merge_two(prefix, suffix + std::f32::consts::LN_2);
                // a suffix that is empty stays empty
                if suffix == f32::NEG_INFINITY {
                    merged = merge_two(prefix, suffix);
                }
                merged
            }
        },
    },
    Fault {
        name: "prefix-dropped",
        title: "the cached context does not enter the final merge where there are new tokens",
        class: FaultClass::LseMath,
        bugs: &["vllm#54300"],
        killed_by: &["context.output", "context.lse", "states.output", "states.commute"],
        apply: |p| {
            p.context.merge_suffix = |prefix, suffix| {
                if suffix.is_finite() { only_second(suffix) } else { merge_two(prefix, suffix) }
            }
        },
    },
    Fault {
        name: "two-empty-states-give-nan",
        title: "two empty states are merged with −∞ − (−∞)",
        class: FaultClass::EmptyShard,
        bugs: &["vllm#28181"],
        killed_by: &["states.all-empty", "states.output", "context.output"],
        apply: |p| p.context.merge_suffix = unguarded,
    },
    Fault {
        name: "infinite-lse-of-a-state-kept",
        title: "a state with an LSE of +∞, which means empty, takes all the weight",
        class: FaultClass::EmptyShard,
        bugs: &["vllm#28181"],
        killed_by: &["states.output", "states.lse"],
        apply: |p| {
            p.context.merge_suffix = |prefix, suffix| {
                if prefix == f32::INFINITY {
                    return StateWeights { prefix: 1.0, suffix: 0.0, lse: prefix };
                }
                if suffix == f32::INFINITY { only_second(suffix) } else { merge_two(prefix, suffix) }
            }
        },
    },
    Fault {
        name: "nan-lse-of-a-state-taken-for-zero",
        title: "a state with an LSE of NaN enters the merge with an LSE of 0, as a clean-up of tensors makes of it",
        class: FaultClass::EmptyShard,
        bugs: &[],
        killed_by: &["states.nan-lse", "states.output", "states.lse"],
        apply: |p| {
            p.context.merge_suffix = |prefix, suffix| {
                let number = |lse: f32| if lse.is_nan() { 0.0 } else { lse };
                merge_two(number(prefix), number(suffix))
            }
        },
    },
    Fault {
        name: "state-lse-of-the-prefix",
        title: "the merged state keeps the LSE of its prefix",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58"],
        killed_by: &["states.lse", "states.commute", "context.lse"],
        apply: |p| {
            p.context.merge_suffix =
                |prefix, suffix| StateWeights { lse: prefix, ..merge_two(prefix, suffix) }
        },
    },
];

fn only_second(suffix: f32) -> StateWeights {
    let held = suffix != f32::NEG_INFINITY;
    StateWeights { prefix: 0.0, suffix: f32::from(u8::from(held)), lse: suffix }
}

fn merge_in_base_2(prefix: f32, suffix: f32) -> StateWeights {
    let natural = |lse: f32| lse * std::f32::consts::LN_2;
    let merged = merge_two(natural(prefix), natural(suffix));
    StateWeights { lse: merged.lse * std::f32::consts::LOG2_E, ..merged }
}

fn unguarded(prefix: f32, suffix: f32) -> StateWeights {
    let max = prefix.max(suffix);
    let merged = max + ((prefix - max).exp() + (suffix - max).exp()).ln();
    StateWeights { prefix: (prefix - merged).exp(), suffix: (suffix - merged).exp(), lse: merged }
}

#[cfg(test)]
mod tests {
    use super::super::faulty::{grids, with};
    use super::*;
    use crate::chunks::{ChunkPlan, GatheredRow};
    use crate::grid::Grid;

    const EMPTY: f32 = f32::NEG_INFINITY;

    #[test]
    fn wrong_plans_leave_out_or_repeat_what_their_titles_say() {
        // several windows, one window, and none of whole virtual blocks
        for (cached, budget) in [([70, 5, 0], 24), ([70, 5, 0], 1000), ([3, 2, 0], 1)] {
            for grid in grids() {
                let healthy = plan(&cached, budget, &grid);
                let planned = |name: &str| (with(name).context.plan)(&cached, budget, &grid);
                let several = healthy.windows.len() > 1;
                let kept = healthy.windows.len() - usize::from(several);
                let first = ChunkPlan { windows: healthy.windows[..kept].to_vec(), ..healthy.clone() };
                assert_eq!(planned("last-chunk-skipped"), first);
                let early =
                    |(index, w): (usize, &std::ops::Range<usize>)| w.start - usize::from(index > 0)..w.end;
                let windows = healthy.windows.iter().enumerate().map(early).collect();
                assert_eq!(planned("chunks-overlap"), ChunkPlan { windows, ..healthy.clone() });
                let whole = |len: usize| len - len % (grid.block * grid.world);
                let padded = cached.iter().map(|len| whole(*len) / grid.world).collect();
                assert_eq!(planned("context-rounded-down"), ChunkPlan { padded, ..healthy });
            }
        }
    }

    #[test]
    fn rows_are_kept_found_and_seen_as_the_titles_say() {
        assert_eq!((with("chunk-padding-kept").context.kept)(3, 8, &(0..8)), 8);
        let page = with("context-page-of-virtual-block").context.page;
        let grid = Grid { world: 3, interleave: 1, block: 4 };
        assert_eq!(
            [0, 5, 11, 12, 30].map(|local| page(local, &grid)),
            [(0, 0), (0, 1), (0, 3), (1, 0), (2, 2)]
        );
        let source = with("reorg-forgets-earlier-requests").context.source;
        let at = GatheredRow { member: 2, before: 4, row: 3, sent: 10, world: 3 };
        assert_eq!(source(&at), 23, "two members of ten rows each, then the third row");
        let masked = with("context-masked-in-gather-order").context.visible;
        assert_eq!([0, 1, 2].map(|row| masked(9, row, 3)), [7, 8, 9]);
        assert_eq!([0, 1].map(|row| masked(1, row, 3)), [0, 0]);
        let new = |name: &str| [0, 1, 2].map(|row| (with(name).context.visible_new)(row, 3));
        assert_eq!(new("suffix-not-causal"), [3, 3, 3]);
        assert_eq!(new("suffix-misses-itself"), [0, 1, 2]);
    }

    #[test]
    fn one_of_two_states_is_lost_or_counted_as_the_titles_say() {
        let chunk = with("chunk-replaces-earlier-chunks").context.merge_chunk;
        assert_eq!(chunk(1.0, 2.0), StateWeights { prefix: 0.0, suffix: 1.0, lse: 2.0 });
        assert_eq!(chunk(1.0, EMPTY), StateWeights { prefix: 0.0, suffix: 0.0, lse: EMPTY });
        assert_eq!((with("chunk-merge-in-base-2").context.merge_chunk)(1.0, 3.0), merge_in_base_2(1.0, 3.0));
        let suffix = |name: &str, a: f32, b: f32| (with(name).context.merge_suffix)(a, b);
        assert_eq!(suffix("suffix-merge-in-base-2", 1.0, 3.0), merge_in_base_2(1.0, 3.0));
        // twice the suffix is a suffix that is larger by log 2
        let twice = suffix("suffix-merged-twice", 1.0, 0.5);
        assert!((twice.lse - (1f32.exp() + 2.0 * 0.5f32.exp()).ln()).abs() < 1e-6, "{twice:?}");
        assert!(
            (twice.prefix - (1.0 - twice.lse).exp()).abs() < 1e-6
                && (twice.prefix + twice.suffix - 1.0).abs() < 1e-6
        );
        assert_eq!(suffix("suffix-merged-twice", 1.0, EMPTY), merge_two(1.0, EMPTY));
        assert_eq!(suffix("prefix-dropped", 1.0, 3.0), StateWeights { prefix: 0.0, suffix: 1.0, lse: 3.0 });
        assert_eq!(suffix("prefix-dropped", 1.0, EMPTY), merge_two(1.0, EMPTY));
        let prefix = suffix("state-lse-of-the-prefix", 1.0, 3.0);
        assert_eq!(prefix, StateWeights { lse: 1.0, ..merge_two(1.0, 3.0) });
    }

    #[test]
    fn a_state_of_infinite_lse_takes_all_the_weight() {
        let infinite = f32::INFINITY;
        let merge = with("infinite-lse-of-a-state-kept").context.merge_suffix;
        assert_eq!(merge(infinite, 1.0), StateWeights { prefix: 1.0, suffix: 0.0, lse: infinite });
        assert_eq!(merge(1.0, infinite), StateWeights { prefix: 0.0, suffix: 1.0, lse: infinite });
        assert_eq!(merge(1.0, 3.0), merge_two(1.0, 3.0));
    }

    #[test]
    fn a_state_of_nan_lse_weighs_as_one_of_lse_zero() {
        let merge = with("nan-lse-of-a-state-taken-for-zero").context.merge_suffix;
        assert_eq!(merge(f32::NAN, 1.0), merge_two(0.0, 1.0));
        assert_eq!(merge(1.0, f32::NAN), merge_two(1.0, 0.0));
        assert_eq!(merge(1.0, 3.0), merge_two(1.0, 3.0));
    }

    #[test]
    fn wrong_merges_of_two_states_are_wrong_as_their_titles_say() {
        let near = |a: f32, b: f32| assert!((a - b).abs() < 1e-6, "{a} {b}");
        let binary = merge_in_base_2(1.0, 3.0);
        near(binary.lse, (1f32.exp2() + 3f32.exp2()).log2());
        near(binary.prefix, (1.0 - binary.lse).exp2());
        near(binary.suffix, (3.0 - binary.lse).exp2());
        let plain = unguarded(1.0, 3.0);
        near(plain.lse, (1f32.exp() + 3f32.exp()).ln());
        near(plain.prefix, (1.0 - plain.lse).exp());
        near(plain.suffix, (3.0 - plain.lse).exp());
        let nothing = unguarded(f32::NEG_INFINITY, f32::NEG_INFINITY);
        assert!(nothing.lse.is_nan(), "nothing guards two states that hold nothing");
        let second = only_second(2.0);
        assert_eq!((second.prefix, second.suffix, second.lse), (0.0, 1.0, 2.0));
    }
}
