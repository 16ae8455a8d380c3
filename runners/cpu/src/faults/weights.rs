//! Faults of weights: the mirror images of wrong merges, of ranks, of chunks, and of kernel segments.

use super::{Fault, FaultClass};
use crate::chunks::{StateWeights, merge_two, plan};
use crate::kernel::EmptyRow;
use crate::lanes;
use crate::merge;
use crate::states::SegmentPolicies;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "merged-lse-of-the-last-rank",
        title: "the merged LSE is that of the last rank",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58"],
        killed_by: &["decode.lse", "verify.lse", "merge.lse", "merge.permutation"],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                merge::combine(lses, weights);
                lses.last().copied().unwrap_or(f32::NEG_INFINITY)
            }
        },
    },
    Fault {
        name: "merge-leaves-out-the-last-rank",
        title: "the last rank never takes part in the merge",
        class: FaultClass::LseMath,
        bugs: &["flashinfer@6cbaf6e", "sglang#20360"],
        killed_by: &["decode.output", "decode.lse", "merge.output", "merge.lse"],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let kept = lses.len().max(2) - 1;
                weights.fill(0.0);
                merge::combine(&lses[..kept.min(lses.len())], &mut weights[..kept.min(lses.len())])
            }
        },
    },
    Fault {
        name: "weights-squared",
        title: "weights are raised to the second power, as LSEs in the wrong unit do, and normalised",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840", "vllm#47079"],
        killed_by: &["decode.output", "verify.output", "merge.output"],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let doubled: Vec<f32> = lses.iter().map(|lse| 2.0 * lse).collect();
                merge::combine(&doubled, weights);
                merge::combine(lses, &mut vec![0.0; lses.len()])
            }
        },
    },
    Fault {
        name: "natural-lse-as-base-2",
        title: "natural LSEs of ranks are converted from base 2 although they are natural already",
        class: FaultClass::LseMath,
        bugs: &["vllm#47079", "flashinfer#4485"],
        killed_by: &["decode.lse", "decode.output", "merge.lse", "merge.output"],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let converted: Vec<f32> = lses.iter().map(|lse| lse * std::f32::consts::LN_2).collect();
                merge::combine(&converted, weights)
            }
        },
    },
    Fault {
        name: "high-lane-dropped",
        title: "only the low half of the LSE travels",
        class: FaultClass::LseMath,
        bugs: &["sglang#25090"],
        killed_by: &["pack.round-trip", "pack.lanes", "decode.lse", "merge.lse"],
        apply: |p| p.merge.lanes.pack = |bits, order| lanes::pack(bits & 0xFFFF, order),
    },
    Fault {
        name: "empty-lse-plus-infinity",
        title: "a row without tokens has an LSE of +∞, as the inverse of an empty sum",
        class: FaultClass::EmptyShard,
        bugs: &["flashinfer#3251"],
        killed_by: &["decode.partial-lse", "verify.partial-lse"],
        apply: |p| p.kernel.empty = EmptyRow { value: f32::NAN, lse: f32::INFINITY },
    },
    Fault {
        name: "empty-shard-lse-of-a-token",
        title: "a rank without tokens takes part in the merge as if it held one of score 0 and value 1",
        class: FaultClass::EmptyShard,
        bugs: &["vllm#38416", "flashinfer#353"],
        killed_by: &["decode.partial-lse", "decode.lse", "decode.output", "attend.padding"],
        apply: |p| p.kernel.empty = EmptyRow { value: 1.0, lse: 0.0 },
    },
    Fault {
        name: "later-chunks-dropped",
        title: "the state of the first chunk is kept and those behind it are never merged",
        class: FaultClass::LseMath,
        bugs: &["sglang#35045", "vllm-ascend#5767"],
        killed_by: &["context.state", "context.output", "context.lse"],
        apply: |p| {
            p.context.merge_chunk =
                |before, chunk| if before.is_finite() { only_first(before) } else { merge_two(before, chunk) }
        },
    },
    Fault {
        name: "suffix-dropped",
        title: "new tokens do not enter the final merge where there is a cached context",
        class: FaultClass::LseMath,
        bugs: &["vllm#54300", "sglang#33309"],
        killed_by: &["context.output", "context.lse", "states.output", "states.commute"],
        apply: |p| {
            p.context.merge_suffix = |prefix, suffix| {
                if prefix.is_finite() { only_first(prefix) } else { merge_two(prefix, suffix) }
            }
        },
    },
    Fault {
        name: "states-averaged",
        title: "context and new tokens are averaged without their LSEs",
        class: FaultClass::LseMath,
        bugs: &["sglang#35045"],
        killed_by: &["context.output", "states.output"],
        apply: |p| {
            p.context.merge_suffix = |prefix, suffix| {
                let merged = merge_two(prefix, suffix);
                if merged.prefix > 0.0 && merged.suffix > 0.0 {
                    return StateWeights { prefix: 0.5, suffix: 0.5, ..merged };
                }
                merged
            }
        },
    },
    Fault {
        name: "state-lse-of-the-suffix",
        title: "the merged state keeps the LSE of its suffix",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58"],
        killed_by: &["states.lse", "states.commute", "context.lse"],
        apply: |p| {
            p.context.merge_suffix =
                |prefix, suffix| StateWeights { lse: suffix, ..merge_two(prefix, suffix) }
        },
    },
    Fault {
        name: "chunks-leave-a-gap",
        title: "every chunk but the first begins one row late",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#5767"],
        killed_by: &["context.chunks", "context.gather", "context.output"],
        apply: |p| {
            p.context.plan = |cached, budget, grid| {
                let mut plan = plan(cached, budget, grid);
                plan.windows.iter_mut().skip(1).for_each(|window| window.start += 1);
                plan
            }
        },
    },
    Fault {
        name: "first-chunk-skipped",
        title: "the first chunk of a context that takes several is never gathered",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#5767"],
        killed_by: &["context.chunks", "context.gather", "context.output"],
        apply: |p| {
            p.context.plan = |cached, budget, grid| {
                let mut plan = plan(cached, budget, grid);
                if plan.windows.len() > 1 {
                    plan.windows.remove(0);
                }
                plan
            }
        },
    },
    Fault {
        name: "segment-lse-of-the-last",
        title: "the LSE of the last segment is returned in place of the merged one",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58"],
        killed_by: &["segments.lse"],
        apply: |p| {
            p.segments.combine = |maxima, sums, weights| {
                let merged = (SegmentPolicies::HEALTHY.combine)(maxima, sums, weights);
                match (maxima.last(), sums.last()) {
                    (Some(max), Some(sum)) => (max + sum.log2()) * std::f32::consts::LN_2,
                    _ => merged,
                }
            }
        },
    },
    Fault {
        name: "one-segment-read",
        title: "only the first segment of a split kernel is read",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58", "vllm#35082"],
        killed_by: &["segments.output", "segments.lse"],
        apply: |p| p.segments.active = |tokens, _, _| usize::from(tokens > 0),
    },
];

fn only_first(prefix: f32) -> StateWeights {
    StateWeights { prefix: 1.0, suffix: 0.0, lse: prefix }
}

#[cfg(test)]
mod tests {
    use shardcheck_engine::LaneOrder;

    use super::super::faulty::{grids, with};
    use super::*;
    use crate::chunks::ChunkPlan;

    const LSES: [f32; 3] = [0.5, 1.0, 2.0];
    const EMPTY: f32 = f32::NEG_INFINITY;

    fn merged(combine: fn(&[f32], &mut [f32]) -> f32, lses: &[f32]) -> (Vec<f32>, f32) {
        let mut weights = vec![f32::NAN; lses.len()];
        let lse = combine(lses, &mut weights);
        (weights, lse)
    }

    #[test]
    fn the_merge_of_a_fault_is_the_one_that_its_title_names() {
        let by = |name: &str| merged(with(name).merge.combine, &LSES);
        let (healthy, lse) = merged(merge::combine, &LSES);
        assert_eq!(by("merged-lse-of-the-last-rank"), (healthy, 2.0));
        let (two, lse_of_two) = merged(merge::combine, &LSES[..2]);
        assert_eq!(by("merge-leaves-out-the-last-rank"), ([two, vec![0.0]].concat(), lse_of_two));
        let alone = merged(with("merge-leaves-out-the-last-rank").merge.combine, &LSES[..1]);
        assert_eq!(alone, (vec![1.0], 0.5), "a rank by itself is the first one");
        let (squared, _) = merged(merge::combine, &[1.0, 2.0, 4.0]);
        assert_eq!(by("weights-squared"), (squared, lse));
        assert_eq!(by("natural-lse-as-base-2"), merged(merge::combine, &LSES.map(|lse| lse * 2f32.ln())));
    }

    #[test]
    fn lanes_and_empty_rows_are_what_the_titles_say() {
        let pack = with("high-lane-dropped").merge.lanes.pack;
        assert_eq!(LaneOrder::ALL.map(|order| pack(0xC049_0FDB, order)), [[0, 0x0FDB], [0x0FDB, 0]]);
        let infinite = with("empty-lse-plus-infinity").kernel.empty;
        assert!(infinite.value.is_nan() && infinite.lse == f32::INFINITY);
        let token = with("empty-shard-lse-of-a-token").kernel.empty;
        assert_eq!((token.value, token.lse), (1.0, 0.0));
    }

    #[test]
    fn one_of_two_states_is_lost_or_weighed_as_the_titles_say() {
        let first = StateWeights { prefix: 1.0, suffix: 0.0, lse: 1.0 };
        for merge in
            [with("later-chunks-dropped").context.merge_chunk, with("suffix-dropped").context.merge_suffix]
        {
            assert_eq!(merge(1.0, 3.0), first);
            assert_eq!(merge(EMPTY, 3.0), merge_two(EMPTY, 3.0));
        }
        let averaged = with("states-averaged").context.merge_suffix;
        let healthy = merge_two(1.0, 3.0);
        assert_eq!(averaged(1.0, 3.0), StateWeights { prefix: 0.5, suffix: 0.5, lse: healthy.lse });
        for (prefix, suffix) in [(EMPTY, 3.0), (1.0, EMPTY), (EMPTY, EMPTY)] {
            assert_eq!(averaged(prefix, suffix), merge_two(prefix, suffix));
        }
        let lse = (with("state-lse-of-the-suffix").context.merge_suffix)(1.0, 3.0);
        assert_eq!(lse, StateWeights { lse: 3.0, ..healthy });
    }

    #[test]
    fn wrong_plans_leave_out_what_their_titles_say() {
        for (cached, budget) in [([70, 5, 0], 24), ([70, 5, 0], 1000)] {
            for grid in grids() {
                let healthy = plan(&cached, budget, &grid);
                let planned = |name: &str| (with(name).context.plan)(&cached, budget, &grid);
                let late =
                    |(index, w): (usize, &std::ops::Range<usize>)| w.start + usize::from(index > 0)..w.end;
                let windows = healthy.windows.iter().enumerate().map(late).collect();
                assert_eq!(planned("chunks-leave-a-gap"), ChunkPlan { windows, ..healthy.clone() });
                let skipped = usize::from(healthy.windows.len() > 1);
                let windows = healthy.windows[skipped..].to_vec();
                assert_eq!(planned("first-chunk-skipped"), ChunkPlan { windows, ..healthy });
            }
        }
    }

    #[test]
    fn the_last_segment_gives_the_lse_and_the_first_alone_is_read() {
        let combine = with("segment-lse-of-the-last").segments.combine;
        let (mut weights, mut healthy) = ([f32::NAN; 2], [0.0; 2]);
        let lse = combine(&[1.0, 3.0], &[1.5, 2.0], &mut weights);
        (SegmentPolicies::HEALTHY.combine)(&[1.0, 3.0], &[1.5, 2.0], &mut healthy);
        assert!((lse - 16f32.ln()).abs() < 1e-6 && weights == healthy, "{lse}");
        assert_eq!(
            [0, 1, 300].map(|tokens| (with("one-segment-read").segments.active)(tokens, 4, 64)),
            [0, 1, 1]
        );
    }
}
