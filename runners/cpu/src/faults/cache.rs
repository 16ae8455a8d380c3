//! Faults of the cache: what is written, by whom, and how codes are read.

use shardcheck_formats::{Dtype, Overflow, decode_f32, encode_f32};

use super::{Fault, FaultClass};
use crate::cache::{KvFormat, decode_with, encode_with};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "written-by-every-rank",
        title: "every rank writes every token, as if the cache were replicated",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm#48392", "tpu-inference#3344"],
        killed_by: &[
            "write.single-writer",
            "write.round-trip",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.cache.writes = |_, _| true,
    },
    Fault {
        name: "written-by-the-next-rank",
        title: "a token is stored by the rank behind its owner",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#33309"],
        killed_by: &[
            "write.single-writer",
            "write.round-trip",
            "decode.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.cache.writes = |owner, member| if member == 0 { owner > 0 } else { owner + 1 == member },
    },
    Fault {
        name: "write-spills-over",
        title: "a write also fills the slot behind its own",
        class: FaultClass::LayoutIndex,
        bugs: &["vllm-ascend#7549"],
        killed_by: &["write.untouched"],
        apply: |p| p.cache.overwritten_rows = 1,
    },
    Fault {
        name: "padding-row-written",
        title: "graph-padding rows are written into the first request",
        class: FaultClass::Padding,
        bugs: &["vllm-ascend#12840", "ATOM#1229"],
        killed_by: &[
            "write.single-writer",
            "write.round-trip",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.cache.written_request = |request| Some(request.max(0) as usize),
    },
    Fault {
        name: "blocks-taken-as-contiguous",
        title: "the reader walks on from the first block instead of reading the block table",
        class: FaultClass::LayoutIndex,
        bugs: &["sglang#29760", "vllm-ascend#4221"],
        killed_by: &[
            "decode.output",
            "verify.output",
            "decode.partial-lse",
            "equal.placement",
            "attend.given-cache",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.cache.seen_entries = |entries| {
                let first = entries.first().copied().unwrap_or(0);
                (first..first + entries.len() as i64).collect()
            }
        },
    },
    Fault {
        name: "fnuz-read-as-fn",
        title: "e4m3fnuz codes are read as e4m3fn: values come out doubled",
        class: FaultClass::DtypeScale,
        bugs: &["ATOM#1772"],
        killed_by: &[
            "decode.output",
            "decode.partial-lse",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.cache.decode = |codes, format, values| {
                let dtype = if format.dtype == Dtype::E4m3fnuz { Dtype::E4m3fn } else { format.dtype };
                decode_with(codes, dtype, format.scale, values);
            }
        },
    },
    Fault {
        name: "fn-read-as-fnuz",
        title: "e4m3fn codes are read as e4m3fnuz: values come out halved",
        class: FaultClass::DtypeScale,
        bugs: &["ATOM#1772"],
        killed_by: &[
            "decode.output",
            "decode.partial-lse",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.cache.decode = |codes, format, values| {
                let dtype = if format.dtype == Dtype::E4m3fn { Dtype::E4m3fnuz } else { format.dtype };
                decode_with(codes, dtype, format.scale, values);
            }
        },
    },
    Fault {
        name: "written-as-the-other-e4m3",
        title: "an e4m3fnuz cache is written in e4m3fn codes and the other way round",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#45562"],
        killed_by: &[
            "write.round-trip",
            "decode.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.cache.encode = |values, format, codes| {
                let dtype = match format.dtype {
                    Dtype::E4m3fn => Dtype::E4m3fnuz,
                    Dtype::E4m3fnuz => Dtype::E4m3fn,
                    other => other,
                };
                encode_with(values, dtype, 1.0 / format.scale, Overflow::Saturate, codes);
            }
        },
    },
    Fault {
        name: "scale-ignored-on-read",
        title: "codes are used as they are, without the cache scale",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765"],
        killed_by: &[
            "decode.output",
            "decode.partial-lse",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.cache.decode = |codes, format, values| decode_with(codes, format.dtype, 1.0, values),
    },
    Fault {
        name: "scale-ignored-on-write",
        title: "values are cast into the cache without the cache scale",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#45562"],
        killed_by: &[
            "write.round-trip",
            "decode.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.cache.encode =
                |values, format, codes| encode_with(values, format.dtype, 1.0, Overflow::Saturate, codes)
        },
    },
    Fault {
        name: "scale-applied-twice",
        title: "the cache scale is applied by the reader and again by the kernel",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765"],
        killed_by: &[
            "decode.output",
            "decode.partial-lse",
            "verify.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.cache.decode = |codes, format, values| {
                decode_with(codes, format.dtype, format.scale * format.scale, values);
            }
        },
    },
    Fault {
        name: "rope-part-unscaled",
        title: "the rotary part of the key is read without the cache scale",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765", "TransformerEngine#1896"],
        killed_by: &["decode.partial-lse", "decode.output", "verify.output", "probe.pairing"],
        apply: |p| p.cache.decode = rope_part_unscaled,
    },
    Fault {
        name: "cast-overflows-to-nan",
        title: "values beyond the cache format become NaN instead of its largest number",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#49435"],
        killed_by: &["write.overflow"],
        apply: |p| {
            p.cache.encode = |values, format, codes| {
                encode_with(values, format.dtype, 1.0 / format.scale, Overflow::NonFinite, codes);
            }
        },
    },
    Fault {
        name: "cast-truncates",
        title: "values are cut to the cache format instead of rounded to nearest",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#49435"],
        killed_by: &["write.round-trip", "probe.needle"],
        apply: |p| p.cache.encode = truncate,
    },
    Fault {
        name: "value-from-the-last-columns",
        title: "the value is read from the end of the latent row, rotary part included",
        class: FaultClass::HeadLayout,
        bugs: &["TransformerEngine#1896"],
        killed_by: &[
            "draft.partial-output",
            "decode.partial-output",
            "verify.partial-output",
            "decode.output",
            "context.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.cache.value_column = |format| format.key_dim - format.value_dim,
    },
];

fn rope_part_unscaled(codes: &[u8], format: &KvFormat, values: &mut [f32]) {
    let split = format.rope_start.min(values.len());
    let (latent, rope) = values.split_at_mut(split);
    let (latent_codes, rope_codes) = codes.split_at(split * format.dtype.size_bytes());
    decode_with(latent_codes, format.dtype, format.scale, latent);
    decode_with(rope_codes, format.dtype, 1.0, rope);
}

/// Towards zero: one code down where rounding went up.
fn truncate(values: &[f32], format: &KvFormat, codes: &mut [u8]) {
    let (dtype, inverse) = (format.dtype, 1.0 / format.scale);
    for (value, code) in values.iter().zip(codes.chunks_exact_mut(dtype.size_bytes())) {
        let scaled = value * inverse;
        let rounded = encode_f32(dtype, scaled, Overflow::Saturate);
        let went_up = decode_f32(dtype, rounded).abs() > scaled.abs();
        let word = (rounded - u64::from(went_up)).to_le_bytes();
        code.copy_from_slice(&word[..code.len()]);
    }
}
