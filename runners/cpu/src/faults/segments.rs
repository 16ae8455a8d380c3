//! Faults of the merge of kernel segments.

use super::{Fault, FaultClass};
use crate::states::SegmentPolicies;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "all-segments-read",
        title: "segments that no tile was given to are read as well",
        class: FaultClass::EmptyShard,
        bugs: &["flashinfer#353"],
        killed_by: &["segments.output", "segments.lse"],
        apply: |p| p.segments.active = |_, segments, _| segments,
    },
    Fault {
        name: "last-segment-dropped",
        title: "the segment that holds the last, incomplete tiles is not read",
        class: FaultClass::LayoutIndex,
        bugs: &["flashinfer#58"],
        killed_by: &["segments.output", "segments.lse"],
        apply: |p| {
            p.segments.active = |tokens, segments, tile_tokens| {
                let tiles = tokens.div_ceil((segments * tile_tokens).max(1)).max(1);
                (tokens / (tiles * tile_tokens).max(1)).max(usize::from(tokens > 0))
            }
        },
    },
    Fault {
        name: "segment-lse-in-base-2",
        title: "the LSE of merged segments is returned in base 2",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#4485", "vllm#47079"],
        killed_by: &["segments.lse"],
        apply: |p| {
            p.segments.combine = |maxima, sums, weights| {
                (SegmentPolicies::HEALTHY.combine)(maxima, sums, weights) * std::f32::consts::LOG2_E
            }
        },
    },
    Fault {
        name: "segment-lse-of-the-first",
        title: "the LSE of the first segment is returned in place of the merged one",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58"],
        killed_by: &["segments.lse"],
        apply: |p| {
            p.segments.combine = |maxima, sums, weights| {
                let merged = (SegmentPolicies::HEALTHY.combine)(maxima, sums, weights);
                match (maxima.first(), sums.first()) {
                    (Some(max), Some(sum)) => (max + sum.log2()) * std::f32::consts::LN_2,
                    _ => merged,
                }
            }
        },
    },
    Fault {
        name: "segments-in-natural-base",
        title: "base-2 maxima of segments are rescaled with the natural exponential",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840"],
        killed_by: &["segments.output", "segments.lse"],
        apply: |p| p.segments.combine = natural,
    },
    Fault {
        name: "segments-not-normalised",
        title: "accumulators of segments are added without dividing by their sums",
        class: FaultClass::LseMath,
        bugs: &["flashinfer@6cbaf6e"],
        killed_by: &["segments.output"],
        apply: |p| {
            p.segments.combine = |maxima, sums, weights| {
                let merged = (SegmentPolicies::HEALTHY.combine)(maxima, sums, weights);
                let max = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let rescaled = weights.iter_mut().zip(maxima).filter(|(weight, _)| **weight > 0.0);
                rescaled.for_each(|(weight, m)| *weight = (m - max).exp2());
                merged
            }
        },
    },
];

fn natural(maxima: &[f32], sums: &[f32], weights: &mut [f32]) -> f32 {
    let base_2: Vec<f32> = maxima.iter().map(|max| max * std::f32::consts::LOG2_E).collect();
    (SegmentPolicies::HEALTHY.combine)(&base_2, sums, weights)
}
