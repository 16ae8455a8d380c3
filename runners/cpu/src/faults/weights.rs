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
