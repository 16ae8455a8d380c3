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
