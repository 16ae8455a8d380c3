//! Faults so small that every element stays within its bound: only the output as a whole shows them.

use shardcheck_formats::round_bf16;

use super::{Fault, FaultClass};
use crate::cache::decode_with;
use crate::merge;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "weights-short-of-one",
        title: "the merge weights add up to 0.996 instead of 1",
        class: FaultClass::LseMath,
        bugs: &["flashinfer@6cbaf6e"],
        killed_by: &[
            "statistics.residual",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let merged = merge::combine(lses, weights);
                weights.iter_mut().for_each(|weight| *weight *= 0.996);
                merged
            }
        },
    },
    Fault {
        name: "first-rank-weighs-too-much",
        title: "the first rank is weighed as if its LSE were larger by 0.02",
        class: FaultClass::LseMath,
        bugs: &["sglang#25090"],
        killed_by: &["statistics.residual", "probe.tokens", "probe.pairing", "probe.rank-lse"],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let mut shifted = lses.to_vec();
                shifted.iter_mut().take(1).for_each(|lse| *lse += 0.02);
                merge::combine(&shifted, weights);
                merge::combine(lses, &mut vec![0.0; lses.len()])
            }
        },
    },
    Fault {
        name: "weights-from-bf16-lses",
        title: "merge weights are computed from LSEs in bf16, the merged LSE from whole ones",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#25090"],
        killed_by: &[
            "statistics.residual",
            "merge.output",
            "decode.output",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let rounded: Vec<f32> = lses.iter().map(|lse| round_bf16(*lse)).collect();
                merge::combine(&rounded, weights);
                merge::combine(lses, &mut vec![0.0; lses.len()])
            }
        },
    },
    Fault {
        name: "scale-rounded-to-bf16",
        title: "the cache scale is rounded to bf16 on read",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#49435", "sglang#34765"],
        killed_by: &["statistics.residual", "decode.partial-lse", "decode.lse", "verify.lse"],
        apply: |p| {
            p.cache.decode =
                |codes, format, values| decode_with(codes, format.dtype, round_bf16(format.scale), values)
        },
    },
];

#[cfg(test)]
mod tests {
    use shardcheck_formats::Dtype;

    use super::super::faulty::{format, with};
    use super::*;

    #[test]
    fn the_weights_are_off_by_as_much_as_the_title_says() {
        const LSES: [f32; 3] = [0.3, 1.7, f32::NEG_INFINITY];
        let merged = |combine: fn(&[f32], &mut [f32]) -> f32, lses: &[f32]| {
            let mut weights = [f32::NAN; 3];
            let lse = combine(lses, &mut weights);
            (weights, lse)
        };
        let (healthy, lse) = merged(merge::combine, &LSES);
        let (short, unchanged) = merged(with("weights-short-of-one").merge.combine, &LSES);
        assert_eq!((short, unchanged), (healthy.map(|weight| weight * 0.996), lse));
        let (first, _) = merged(merge::combine, &[0.32, 1.7, f32::NEG_INFINITY]);
        assert_eq!(merged(with("first-rank-weighs-too-much").merge.combine, &LSES), (first, lse));
        let (rounded, _) = merged(merge::combine, &LSES.map(round_bf16));
        assert_eq!(merged(with("weights-from-bf16-lses").merge.combine, &LSES), (rounded, lse));
        assert_ne!(rounded, healthy);
    }

    #[test]
    fn the_scale_is_rounded_to_bf16() {
        let mut value = [f32::NAN];
        (with("scale-rounded-to-bf16").cache.decode)(&[0x38], &format(Dtype::E4m3fn, 0.03), &mut value);
        assert_eq!(value, [round_bf16(0.03)]);
    }
}
