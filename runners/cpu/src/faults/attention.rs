//! Faults of the local kernel: scores, running maximum, empty rows.

use shardcheck_formats::round_bf16;

use super::{Fault, FaultClass};
use crate::kernel::EmptyRow;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "score-scale-of-latent-width",
        title: "scores are scaled by 1/√(latent width) instead of the model's scale",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#45562"],
        killed_by: &["decode.partial-lse", "decode.lse", "verify.lse", "context.lse"],
        apply: |p| p.kernel.score_scale = |c| 1.0 / (c.attention.value_dim() as f32).sqrt(),
    },
    Fault {
        name: "score-scale-twice",
        title: "the score scale is applied to the query and again to the product",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765"],
        killed_by: &["decode.partial-lse", "decode.lse", "verify.lse", "context.lse"],
        apply: |p| p.kernel.score_scale = |c| c.softmax_scale * c.softmax_scale,
    },
    Fault {
        name: "softmax-without-maximum",
        title: "scores are exponentiated as they are, without subtracting their maximum",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &["decode.output", "decode.lse", "verify.output", "decode.partial-lse"],
        apply: |p| p.kernel.shift = |_| 0.0,
    },
    Fault {
        name: "no-rescale-between-tiles",
        title: "what was summed under an old maximum is not rescaled to the new one",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &["decode.partial-lse", "decode.output", "verify.partial-lse", "context.output"],
        apply: |p| p.kernel.rescale = |_, _| 1.0,
    },
    Fault {
        name: "rescale-in-base-2",
        title: "tiles are rescaled by 2 to the difference of natural maxima",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &["decode.partial-lse", "decode.output", "verify.partial-lse", "context.output"],
        apply: |p| p.kernel.rescale = |old, new| (old - new).exp2(),
    },
    Fault {
        name: "lse-base-2-as-natural",
        title: "the kernel returns base-2 LSEs and the merge takes them for natural ones",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840", "vllm#47079", "flashinfer#4485"],
        killed_by: &["decode.partial-lse", "decode.lse", "decode.output", "lse.unit", "verify.lse"],
        apply: |p| p.kernel.lse = |shift, sum| (shift + sum.ln()) * std::f32::consts::LOG2_E,
    },
    Fault {
        name: "lse-carried-in-bf16",
        title: "the LSE is rounded to bf16 between kernel and merge",
        class: FaultClass::LseMath,
        bugs: &["sglang#25090"],
        killed_by: &["decode.partial-lse", "decode.lse", "verify.lse", "lse.unit", "statistics.residual"],
        apply: |p| p.kernel.lse = |shift, sum| round_bf16(shift + sum.ln()),
    },
    Fault {
        name: "lse-without-maximum",
        title: "the LSE is the logarithm of the normaliser alone",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &["decode.partial-lse", "decode.lse", "verify.lse", "context.lse"],
        apply: |p| p.kernel.lse = |_, sum| sum.ln(),
    },
    Fault {
        name: "lse-is-the-maximum",
        title: "the kernel returns its running maximum where the LSE is asked for",
        class: FaultClass::LseMath,
        bugs: &["aiter#3267"],
        killed_by: &["decode.partial-lse", "decode.lse", "verify.lse", "lse.unit"],
        apply: |p| p.kernel.lse = |shift, _| shift,
    },
    Fault {
        name: "empty-shard-lse-zero",
        title: "a rank without tokens returns zeros with an LSE of 0 and takes part in the merge",
        class: FaultClass::EmptyShard,
        bugs: &["vllm#38416"],
        killed_by: &["decode.partial-lse", "decode.lse", "decode.output", "attend.padding"],
        apply: |p| p.kernel.empty = EmptyRow { value: 0.0, lse: 0.0 },
    },
    Fault {
        name: "empty-lse-finite",
        title: "an empty row has a large negative LSE instead of −∞",
        class: FaultClass::EmptyShard,
        bugs: &["flashinfer#3251"],
        killed_by: &["decode.partial-lse", "attend.padding"],
        apply: |p| p.kernel.empty = EmptyRow { value: 0.0, lse: -1e30 },
    },
    Fault {
        name: "empty-lse-untouched",
        title: "an empty row leaves whatever finite LSE the buffer held",
        class: FaultClass::EmptyShard,
        bugs: &["flashinfer#4975", "flashinfer#3779"],
        killed_by: &["decode.partial-lse", "decode.lse", "attend.padding"],
        apply: |p| p.kernel.empty = EmptyRow { value: f32::NAN, lse: 1.0 },
    },
];
