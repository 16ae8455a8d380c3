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
        killed_by: &["decode.partial-lse", "decode.lse", "verify.lse", "context.lse", "probe.pairing"],
        apply: |p| p.kernel.score_scale = |c| 1.0 / (c.attention.value_dim() as f32).sqrt(),
    },
    Fault {
        name: "score-scale-twice",
        title: "the score scale is applied to the query and again to the product",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765"],
        killed_by: &["decode.partial-lse", "decode.lse", "verify.lse", "context.lse", "probe.pairing"],
        apply: |p| p.kernel.score_scale = |c| c.softmax_scale * c.softmax_scale,
    },
    Fault {
        name: "softmax-without-maximum",
        title: "scores are exponentiated as they are, without subtracting their maximum",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &[
            "decode.output",
            "decode.lse",
            "verify.output",
            "decode.partial-lse",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| p.kernel.shift = |_| 0.0,
    },
    Fault {
        name: "no-rescale-between-tiles",
        title: "what was summed under an old maximum is not rescaled to the new one",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &[
            "decode.partial-lse",
            "decode.output",
            "verify.partial-lse",
            "context.output",
            "probe.pairing",
        ],
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
        killed_by: &[
            "decode.partial-lse",
            "decode.lse",
            "decode.output",
            "lse.unit",
            "verify.lse",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| p.kernel.lse = |shift, sum| (shift + sum.ln()) * std::f32::consts::LOG2_E,
    },
    Fault {
        name: "lse-carried-in-bf16",
        title: "the LSE is rounded to bf16 between kernel and merge",
        class: FaultClass::LseMath,
        bugs: &["sglang#25090"],
        killed_by: &[
            "decode.partial-lse",
            "decode.lse",
            "verify.lse",
            "lse.unit",
            "statistics.residual",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| p.kernel.lse = |shift, sum| round_bf16(shift + sum.ln()),
    },
    Fault {
        name: "lse-without-maximum",
        title: "the LSE is the logarithm of the normaliser alone",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &[
            "decode.partial-lse",
            "decode.lse",
            "verify.lse",
            "context.lse",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.kernel.lse = |_, sum| sum.ln(),
    },
    Fault {
        name: "lse-is-the-maximum",
        title: "the kernel returns its running maximum where the LSE is asked for",
        class: FaultClass::LseMath,
        bugs: &["aiter#3267"],
        killed_by: &[
            "decode.partial-lse",
            "decode.lse",
            "verify.lse",
            "lse.unit",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
            "selected.lse",
        ],
        apply: |p| p.kernel.lse = |shift, _| shift,
    },
    Fault {
        name: "empty-shard-lse-zero",
        title: "a rank without tokens returns zeros with an LSE of 0 and takes part in the merge",
        class: FaultClass::EmptyShard,
        bugs: &["vllm#38416"],
        killed_by: &[
            "decode.partial-lse",
            "decode.lse",
            "decode.output",
            "attend.padding",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| p.kernel.empty = EmptyRow { value: 0.0, lse: 0.0 },
    },
    Fault {
        name: "empty-lse-finite",
        title: "an empty row has a large negative LSE instead of −∞",
        class: FaultClass::EmptyShard,
        bugs: &["flashinfer#3251"],
        killed_by: &["decode.partial-lse", "attend.padding", "probe.tokens", "probe.pairing"],
        apply: |p| p.kernel.empty = EmptyRow { value: 0.0, lse: -1e30 },
    },
    Fault {
        name: "empty-lse-untouched",
        title: "an empty row leaves whatever finite LSE the buffer held",
        class: FaultClass::EmptyShard,
        bugs: &["flashinfer#4975", "flashinfer#3779"],
        killed_by: &[
            "decode.partial-lse",
            "decode.lse",
            "attend.padding",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.kernel.empty = EmptyRow { value: f32::NAN, lse: 1.0 },
    },
];

#[cfg(test)]
mod tests {
    use super::super::faulty::{configuration, with};
    use super::*;

    #[test]
    fn scores_have_the_scale_that_the_title_names() {
        let scale = |name: &str| (with(name).kernel.score_scale)(&configuration());
        assert_eq!(scale("score-scale-of-latent-width"), 0.25);
        assert_eq!(scale("score-scale-twice"), 0.3f32 * 0.3);
        assert_eq!((with("softmax-without-maximum").kernel.shift)(7.0), 0.0);
        assert_eq!((with("no-rescale-between-tiles").kernel.rescale)(1.0, 3.0), 1.0);
        assert_eq!((with("rescale-in-base-2").kernel.rescale)(1.0, 3.0), 0.25);
    }

    #[test]
    fn the_lse_is_what_the_title_says() {
        let lse = |name: &str| (with(name).kernel.lse)(2.3, 8.0);
        let natural = 2.3 + 8f32.ln();
        assert!((lse("lse-base-2-as-natural") - natural / std::f32::consts::LN_2).abs() < 1e-5);
        assert_eq!(lse("lse-carried-in-bf16"), round_bf16(natural));
        assert_eq!(lse("lse-without-maximum"), 8f32.ln());
        assert_eq!(lse("lse-is-the-maximum"), 2.3);
    }

    #[test]
    fn an_empty_row_is_what_the_title_says() {
        let empty = |name: &str| (with(name).kernel.empty.value, with(name).kernel.empty.lse);
        assert_eq!(empty("empty-shard-lse-zero"), (0.0, 0.0));
        assert_eq!(empty("empty-lse-finite"), (0.0, -1e30));
        let (value, lse) = empty("empty-lse-untouched");
        assert!(value.is_nan() && lse == 1.0);
    }
}
