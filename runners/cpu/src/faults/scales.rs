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

#[cfg(test)]
mod tests {
    use shardcheck_formats::decode_f32;

    use super::super::faulty::{configuration, format, with};
    use super::*;
    use crate::cache::{CachePolicies, DecodeRow};

    /// 1.0, −2.0, 0.5, 0.0 in e4m3fn; half as much in e4m3fnuz.
    const CODES: [u8; 4] = [0x38, 0xC0, 0x30, 0];

    fn read(name: &str, by: fn(&CachePolicies) -> DecodeRow, dtype: Dtype) -> [f32; 4] {
        let mut values = [f32::NAN; 4];
        by(&with(name).cache)(&CODES, &format(dtype, 0.5), &mut values);
        values
    }

    fn written(name: &str, values: &[f32; 4], dtype: Dtype, scale: f32) -> [u8; 4] {
        let mut codes = [0; 4];
        (with(name).cache.encode)(values, &format(dtype, scale), &mut codes);
        codes
    }

    #[test]
    fn values_are_read_with_the_scale_and_format_that_the_title_names() {
        let value: fn(&CachePolicies) -> DecodeRow = |cache| cache.decode_value;
        let key: fn(&CachePolicies) -> DecodeRow = |cache| cache.decode;
        let context: fn(&CachePolicies) -> DecodeRow = |cache| cache.decode_context;
        let own = Dtype::E4m3fn;
        assert_eq!(read("value-unscaled", value, own), [1.0, -2.0, 0.5, 0.0]);
        assert_eq!(read("value-unscaled", key, own), [0.5, -1.0, 0.25, 0.0], "keys with it");
        assert_eq!(read("value-read-as-the-other-e4m3", value, own), [0.25, -0.5, 0.125, 0.0]);
        assert_eq!(read("value-read-as-the-other-e4m3", value, Dtype::E4m3fnuz), [0.5, -1.0, 0.25, 0.0]);
        assert_eq!(read("context-read-as-the-other-e4m3", context, own), [0.25, -0.5, 0.125, 0.0]);
        assert_eq!(read("context-scaled-twice", context, own), [0.25, -0.5, 0.125, 0.0]);
        assert_eq!(read("latent-part-unscaled", key, own), [1.0, -2.0, 0.25, 0.0]);
        assert_eq!(read("scale-inverted", key, own), [2.0, -4.0, 1.0, 0.0]);
        assert_eq!(other_e4m3(Dtype::E5m2), Dtype::E5m2);
    }

    #[test]
    fn the_latent_part_of_a_wide_cache_is_half_its_codes() {
        let codes = [0x3F80u16, 0xC000, 0x3F80, 0xC000].map(u16::to_le_bytes).concat();
        let mut values = [f32::NAN; 4];
        latent_part_unscaled(&codes, &format(Dtype::Bf16, 0.5), &mut values);
        assert_eq!(values, [1.0, -2.0, 0.5, -1.0]);
    }

    #[test]
    fn the_scale_is_inverted_or_rounded_to_the_power_of_two_above() {
        let values = [2.0, -4.0, 1.0, 0.0];
        assert_eq!(written("scale-inverted-on-write", &values, Dtype::E4m3fn, 0.5), CODES);
        assert_eq!([0.25, 0.3, 0.5, 1.0, 5.0].map(power_of_two), [0.25, 0.5, 0.5, 1.0, 8.0]);
        let rounded = written("scale-rounded-on-write", &[0.5, -1.0, 0.25, 0.0], Dtype::E4m3fn, 0.3);
        assert_eq!(rounded, CODES, "0.3 is held as 0.5");
        let mut read = [f32::NAN; 4];
        (with("scale-rounded-to-a-power-of-two").cache.decode)(
            &CODES,
            &format(Dtype::E4m3fn, 0.3),
            &mut read,
        );
        assert_eq!(read, [0.5, -1.0, 0.25, 0.0]);
        assert_eq!((with("score-scale-left-out").kernel.score_scale)(&configuration()), 1.0);
    }

    #[test]
    fn what_is_below_the_smallest_normal_number_is_flushed_and_that_number_is_not() {
        for (dtype, smallest) in
            [(Dtype::E4m3fn, 2f32.powi(-6)), (Dtype::E4m3fnuz, 2f32.powi(-7)), (Dtype::E5m2, 2f32.powi(-14))]
        {
            for scale in [1.0, 4.0, 0.25] {
                let values =
                    [smallest, -smallest, 0.75 * smallest, 8.0 * smallest].map(|value| value * scale);
                let kept = written("subnormals-flushed", &values, dtype, scale);
                let read = kept.map(|code| decode_f32(dtype, u64::from(code)));
                assert_eq!(read, [smallest, -smallest, 0.0, 8.0 * smallest], "{dtype} at {scale}");
            }
        }
        // a 16-bit cache has no such numbers within reach
        let mut codes = [0; 2];
        (with("subnormals-flushed").cache.encode)(&[2f32.powi(-20)], &format(Dtype::Bf16, 1.0), &mut codes);
        assert_eq!(decode_f32(Dtype::Bf16, u64::from(u16::from_le_bytes(codes))), 2f32.powi(-20));
    }
}
