//! Faults of scales and formats: of values, of rotary and latent parts, of gathered contexts.

use shardcheck_formats::{Dtype, Overflow, encode_f32};

use super::{Fault, FaultClass};
use crate::cache::{KvFormat, decode_with, encode_with};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "value-unscaled",
        title: "values with a cache of their own are read without its scale, keys with it",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765"],
        killed_by: &["decode.partial-output", "decode.output", "verify.output"],
        apply: |p| {
            p.cache.decode_value = |codes, format, values| decode_with(codes, format.dtype, 1.0, values)
        },
    },
    Fault {
        name: "value-read-as-the-other-e4m3",
        title: "the codes of values are read as the other e4m3, those of keys as what they are",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#45562"],
        killed_by: &["decode.partial-output", "decode.output", "verify.output"],
        apply: |p| {
            p.cache.decode_value = |codes, format, values| {
                decode_with(codes, other_e4m3(format.dtype), format.scale, values);
            }
        },
    },
    Fault {
        name: "latent-part-unscaled",
        title: "the latent part of the key is read without the cache scale",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765"],
        killed_by: &["decode.partial-lse", "decode.output", "verify.output"],
        apply: |p| p.cache.decode = latent_part_unscaled,
    },
    Fault {
        name: "scale-inverted",
        title: "codes are divided by the cache scale where they are to be multiplied",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765"],
        killed_by: &["decode.output", "decode.partial-lse", "verify.output"],
        apply: |p| {
            p.cache.decode =
                |codes, format, values| decode_with(codes, format.dtype, 1.0 / format.scale, values)
        },
    },
    Fault {
        name: "scale-inverted-on-write",
        title: "values are multiplied by the cache scale before the cast instead of divided by it",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#34765", "vllm#49435"],
        killed_by: &["write.round-trip", "decode.output"],
        apply: |p| {
            p.cache.encode = |values, format, codes| {
                encode_with(values, format.dtype, format.scale, Overflow::Saturate, codes);
            }
        },
    },
    Fault {
        name: "scale-rounded-to-a-power-of-two",
        title: "the reader holds the cache scale as a power of two (E8M0), the writer as it is",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#49435"],
        killed_by: &["decode.partial-lse", "decode.output", "verify.output"],
        apply: |p| {
            p.cache.decode = |codes, format, values| {
                decode_with(codes, format.dtype, power_of_two(format.scale), values);
            }
        },
    },
    Fault {
        name: "scale-rounded-on-write",
        title: "the writer holds the cache scale as a power of two (E8M0), the reader as it is",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#49435"],
        killed_by: &["write.round-trip", "decode.output"],
        apply: |p| {
            p.cache.encode = |values, format, codes| {
                let scale = power_of_two(format.scale);
                encode_with(values, format.dtype, 1.0 / scale, Overflow::Saturate, codes);
            }
        },
    },
    Fault {
        name: "subnormals-flushed",
        title: "values below the smallest normal number of the cache format are written as zero",
        class: FaultClass::DtypeScale,
        bugs: &["vllm#45562", "vllm#49435"],
        killed_by: &["write.round-trip"],
        apply: |p| p.cache.encode = flush,
    },
    Fault {
        name: "context-read-as-the-other-e4m3",
        title: "codes of a gathered context are read as the other e4m3",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#29161", "local-inference-lab/vllm#14"],
        killed_by: &["context.gather", "context.output"],
        apply: |p| {
            p.cache.decode_context = |codes, format, values| {
                decode_with(codes, other_e4m3(format.dtype), format.scale, values);
            }
        },
    },
    Fault {
        name: "context-scaled-twice",
        title: "a gathered context is dequantised by the gather and again by the kernel",
        class: FaultClass::DtypeScale,
        bugs: &["sglang#29161", "sglang#31514"],
        killed_by: &["context.gather", "context.output"],
        apply: |p| {
            p.cache.decode_context = |codes, format, values| {
                decode_with(codes, format.dtype, format.scale * format.scale, values);
            }
        },
    },
    Fault {
        name: "score-scale-left-out",
        title: "scores are not scaled at all",
        class: FaultClass::DtypeScale,
        bugs: &["vllm-ascend#3850"],
        killed_by: &["decode.partial-lse", "decode.lse", "verify.lse", "context.lse"],
        apply: |p| p.kernel.score_scale = |_| 1.0,
    },
];

fn other_e4m3(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::E4m3fn => Dtype::E4m3fnuz,
        Dtype::E4m3fnuz => Dtype::E4m3fn,
        other => other,
    }
}

/// The next power of two from above, as an E8M0 scale holds it.
fn power_of_two(scale: f32) -> f32 {
    scale.log2().ceil().exp2()
}

fn latent_part_unscaled(codes: &[u8], format: &KvFormat, values: &mut [f32]) {
    let split = format.rope_start.min(values.len());
    let (latent, rope) = values.split_at_mut(split);
    let (latent_codes, rope_codes) = codes.split_at(split * format.dtype.size_bytes());
    decode_with(latent_codes, format.dtype, 1.0, latent);
    decode_with(rope_codes, format.dtype, format.scale, rope);
}

/// Eight-bit values below the smallest normal number become zero.
fn flush(values: &[f32], format: &KvFormat, codes: &mut [u8]) {
    let smallest = match format.dtype {
        Dtype::E4m3fn => 2f32.powi(-6),
        Dtype::E4m3fnuz => 2f32.powi(-7),
        Dtype::E5m2 => 2f32.powi(-14),
        _ => 0.0,
    };
    for (value, code) in values.iter().zip(codes.chunks_exact_mut(format.dtype.size_bytes())) {
        let scaled = value * (1.0 / format.scale);
        let kept = if scaled.abs() < smallest { 0.0 } else { scaled };
        let word = encode_f32(format.dtype, kept, Overflow::Saturate).to_le_bytes();
        code.copy_from_slice(&word[..code.len()]);
    }
}
