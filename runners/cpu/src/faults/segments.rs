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

#[cfg(test)]
mod tests {
    use super::super::faulty::with;
    use super::*;

    fn near(seen: &[f32], expected: &[f32]) {
        let close = seen.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(seen.len() == expected.len() && close, "{seen:?} {expected:?}");
    }

    /// Weights and LSE of three segments with maxima 1, −∞ and 3 in base 2, of which the second holds nothing.
    fn combined(combine: fn(&[f32], &[f32], &mut [f32]) -> f32) -> (Vec<f32>, f32) {
        let mut weights = vec![f32::NAN; 3];
        let lse = combine(&[1.0, f32::NEG_INFINITY, 3.0], &[1.5, 0.0, 2.0], &mut weights);
        (weights, lse)
    }

    #[test]
    fn as_many_segments_are_read_as_the_title_says() {
        assert_eq!((with("all-segments-read").segments.active)(10, 4, 64), 4);
        let dropped = with("last-segment-dropped").segments.active;
        let active = SegmentPolicies::HEALTHY.active;
        // 4 segments of tiles of 64 tokens: whole segments alone, and one at least where there is anything
        for (tokens, whole, read) in
            [(0, 0, 0), (1, 1, 1), (64, 1, 1), (65, 2, 1), (130, 3, 2), (256, 4, 4), (300, 3, 2), (400, 4, 3)]
        {
            assert_eq!((active(tokens, 4, 64), dropped(tokens, 4, 64)), (whole, read), "{tokens} tokens");
        }
    }

    #[test]
    fn the_lse_of_segments_is_the_one_that_the_title_names() {
        let (healthy, natural) = combined(SegmentPolicies::HEALTHY.combine);
        // 1.5·2 + 2·8
        assert!((natural - 19f32.ln()).abs() < 1e-6);
        for (name, lse) in [("segment-lse-in-base-2", 19f32.log2()), ("segment-lse-of-the-first", 3f32.ln())]
        {
            let (weights, seen) = combined(with(name).segments.combine);
            assert_eq!(weights, healthy, "{name}");
            near(&[seen], &[lse]);
        }
    }

    #[test]
    fn the_weights_of_segments_are_those_that_the_title_names() {
        let (_, natural) = combined(SegmentPolicies::HEALTHY.combine);
        let (weights, lse) = combined(with("segments-not-normalised").segments.combine);
        assert_eq!((weights, lse), (vec![0.25, 0.0, 1.0], natural));
        let mut nothing = [f32::NAN; 2];
        let empty =
            (with("segments-not-normalised").segments.combine)(&[0.0, 0.0], &[0.0, 0.0], &mut nothing);
        assert_eq!((empty, nothing), (f32::NEG_INFINITY, [0.0, 0.0]), "what holds nothing has no weight");
        let (weights, lse) = combined(with("segments-in-natural-base").segments.combine);
        let sum = 1.5 * 1f32.exp() + 2.0 * 3f32.exp();
        near(&weights, &[1f32.exp() / sum, 0.0, 3f32.exp() / sum]);
        near(&[lse], &[sum.ln()]);
    }
}
