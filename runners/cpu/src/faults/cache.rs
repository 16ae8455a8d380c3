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

#[cfg(test)]
mod tests {
    use shardcheck_formats::{bf16_from_f32, bf16_to_f32};

    use super::super::faulty::{format, with};
    use super::*;

    /// Codes of values in a format, one head's row, as a fault writes them.
    fn written(name: &str, values: &[f32], format: &KvFormat) -> Vec<u64> {
        let size = format.dtype.size_bytes();
        let mut codes = vec![0; values.len() * size];
        (with(name).cache.encode)(values, format, &mut codes);
        codes
            .chunks_exact(size)
            .map(|code| code.iter().rev().fold(0, |word, b| word << 8 | u64::from(*b)))
            .collect()
    }

    /// Values of a row of four codes as a fault reads them.
    fn read(name: &str, codes: &[u64; 4], format: &KvFormat) -> [f32; 4] {
        let mut values = [f32::NAN; 4];
        let bytes: Vec<u8> =
            codes.iter().flat_map(|code| code.to_le_bytes()[..format.dtype.size_bytes()].to_vec()).collect();
        (with(name).cache.decode)(&bytes, format, &mut values);
        values
    }

    #[test]
    fn the_wrong_ranks_write() {
        let pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 2)];
        let writes = |name: &str| pairs.map(|(owner, member)| (with(name).cache.writes)(owner, member));
        assert_eq!(writes("written-by-every-rank"), [true; 6]);
        assert_eq!(writes("written-by-the-next-rank"), [false, true, true, false, true, false]);
        assert_eq!(
            [-1, 0, 3].map(with("padding-row-written").cache.written_request),
            [Some(0), Some(0), Some(3)]
        );
        assert_eq!(with("write-spills-over").cache.overwritten_rows, 1);
    }

    #[test]
    fn blocks_are_walked_from_the_first() {
        let seen = with("blocks-taken-as-contiguous").cache.seen_entries;
        assert_eq!(seen(&[5, 2, 9]), [5, 6, 7]);
        assert_eq!(seen(&[]), Vec::<i64>::new());
    }

    #[test]
    fn the_two_formats_of_e4m3_are_mistaken_for_each_other_and_no_other_is() {
        let (own, other) = (format(Dtype::E4m3fn, 0.5), format(Dtype::E4m3fnuz, 0.5));
        // 1.0, −2.0, 0.5, 0.0 in e4m3fn; half as much in e4m3fnuz
        let codes = [0x38, 0xC0, 0x30, 0];
        assert_eq!(read("fnuz-read-as-fn", &codes, &other), [0.5, -1.0, 0.25, 0.0]);
        assert_eq!(read("fnuz-read-as-fn", &codes, &own), [0.5, -1.0, 0.25, 0.0]);
        assert_eq!(read("fn-read-as-fnuz", &codes, &own), [0.25, -0.5, 0.125, 0.0]);
        assert_eq!(read("fn-read-as-fnuz", &codes, &other), [0.25, -0.5, 0.125, 0.0]);
        let values = [0.5, -1.0, 0.25, 0.0];
        assert_eq!(written("written-as-the-other-e4m3", &values, &other), codes);
        assert_eq!(written("written-as-the-other-e4m3", &values, &own), [0x40, 0xC8, 0x38, 0]);
        assert_eq!(written("written-as-the-other-e4m3", &[2.0], &format(Dtype::E5m2, 2.0)), [0x3C]);
    }

    #[test]
    fn the_scale_is_left_out_or_applied_again() {
        let narrow = format(Dtype::E4m3fn, 0.5);
        let codes = [0x38, 0xC0, 0x30, 0];
        assert_eq!(read("scale-ignored-on-read", &codes, &narrow), [1.0, -2.0, 0.5, 0.0]);
        assert_eq!(read("scale-applied-twice", &codes, &narrow), [0.25, -0.5, 0.125, 0.0]);
        assert_eq!(read("rope-part-unscaled", &codes, &narrow), [0.5, -1.0, 0.5, 0.0]);
        let wide = codes.map(|code| u64::from(bf16_from_f32(decode_f32(Dtype::E4m3fn, code))));
        assert_eq!(read("rope-part-unscaled", &wide, &format(Dtype::Bf16, 0.5)), [0.5, -1.0, 0.5, 0.0]);
        assert_eq!(written("scale-ignored-on-write", &[1.0, -2.0, 0.5, 0.0], &narrow), codes);
    }

    #[test]
    fn what_is_too_large_becomes_nan() {
        let codes = written("cast-overflows-to-nan", &[1.0, 1e6, -1e6], &format(Dtype::E4m3fn, 0.5));
        assert_eq!(codes[0], 0x40);
        assert!(codes[1..].iter().all(|code| decode_f32(Dtype::E4m3fn, *code).is_nan()), "{codes:x?}");
    }

    #[test]
    fn a_cast_that_truncates_gives_the_largest_code_that_is_no_larger() {
        for (dtype, scale) in [(Dtype::E4m3fn, 0.5f32), (Dtype::E5m2, 4.0), (Dtype::Bf16, 1.0)] {
            let format = format(dtype, scale);
            // exact ones, ones that are rounded up and ones that are rounded down, of either sign
            let scaled: Vec<f32> =
                (1..400).flat_map(|n| [n as f32 / 37.0, n as f32 / -37.0, n as f32 / 8.0]).collect();
            let values: Vec<f32> = scaled.iter().map(|value| value * scale).collect();
            for ((value, scaled), code) in
                values.iter().zip(&scaled).zip(written("cast-truncates", &values, &format))
            {
                let magnitude = |code: u64| decode_f32(dtype, code).abs();
                let held = magnitude(code) <= scaled.abs() && magnitude(code + 1) > scaled.abs();
                assert!(held && decode_f32(dtype, code) * scaled >= 0.0, "{value} in {dtype} as {code:#x}");
            }
        }
        assert_eq!(bf16_to_f32(written("cast-truncates", &[1.0], &format(Dtype::Bf16, 1.0))[0] as u16), 1.0);
    }

    #[test]
    fn the_value_is_read_from_the_last_columns() {
        let column = with("value-from-the-last-columns").cache.value_column;
        let of = |key_dim, value_dim| column(&KvFormat { key_dim, value_dim, ..format(Dtype::Bf16, 1.0) });
        assert_eq!([of(24, 16), of(5, 4), of(9, 3)], [8, 1, 6]);
    }
}
