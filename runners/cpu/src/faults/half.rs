//! Faults of f16: what is right in bf16, and wrong in a format with more digits, an end at 65504 and subnormals that are in use.

use shardcheck_formats::{Dtype, decode_f32, round_bf16};

use super::{Fault, FaultClass};
use crate::cache::decode_with;
use crate::kernel::round_all;
use crate::merge::Wire;

/// What some engines clamp f16 to, 65504 − 1000.
const CLAMP: f32 = 64_504.0;
/// The smallest normal number of f16, 2^−14.
const LEAST_NORMAL: f32 = 1.0 / 16384.0;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "f16-travels-as-bf16",
        title: "partial outputs of f16 are carried between ranks in bf16",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["merge.output", "merge.neutral", "merge.tags"],
        apply: |p| {
            p.merge.carried = |wire, value| match wire {
                Wire::F16 => round_bf16(value),
                other => other.round(value),
            }
        },
    },
    Fault {
        name: "f16-sums-in-f16",
        title: "partials of f16 that came by an all-to-all are weighed and added in f16 instead of f32",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["merge.output", "merge.fold", "merge.permutation"],
        apply: |p| {
            p.merge.added = |wire, sum, value| match wire {
                Wire::F16 => wire.round(sum + wire.round(value)),
                _ => sum + value,
            }
        },
    },
    Fault {
        name: "f16-subnormals-flushed",
        title: "merged outputs of f16 below 2^-14 are flushed to zero",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["merge.output", "merge.neutral", "states.output", "states.neutral"],
        apply: |p| p.merge.stored = |wire, value| flushed(wire, wire.round(value)),
    },
    Fault {
        name: "f16-clamped-short-of-its-end",
        title: "merged outputs of f16 are clamped to 64504, its largest number less 1000, against infinities",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["merge.neutral", "states.neutral"],
        apply: |p| {
            p.merge.stored = |wire, value| match wire {
                Wire::F16 => wire.round(value.clamp(-CLAMP, CLAMP)),
                other => other.round(value),
            }
        },
    },
    Fault {
        name: "f16-sum-before-division",
        title: "a merge of f16 stores the sum of two outputs in f16 before it is halved, where it overflows",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["merge.output", "states.output"],
        apply: |p| {
            p.merge.stored = |wire, value| match wire {
                Wire::F16 => wire.round(wire.round(2.0 * value) / 2.0),
                other => other.round(value),
            }
        },
    },
    Fault {
        name: "f16-query-cast-to-bf16",
        title: "queries of f16 pass through bf16 on their way to the kernel",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["decode.output", "decode.partial-lse", "verify.partial-lse", "context.output"],
        apply: |p| {
            p.kernel.read_query = |dtype, code| {
                let value = decode_f32(dtype, u64::from(code));
                if dtype == Dtype::F16 { round_bf16(value) } else { value }
            }
        },
    },
    Fault {
        name: "f16-probabilities-in-bf16",
        title: "probabilities are rounded to bf16 whatever the type of activations",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["decode.output", "decode.partial-output", "verify.output", "context.output"],
        apply: |p| p.kernel.round = |_, values| round_all(Dtype::Bf16, values),
    },
    Fault {
        name: "f16-partial-stored-in-bf16",
        title: "the kernel stores partial outputs of f16 in bf16",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["decode.output", "decode.partial-output", "verify.partial-output"],
        apply: |p| {
            p.kernel.store = |dtype, values| {
                round_all(Dtype::Bf16, values);
                round_all(dtype, values);
            }
        },
    },
    Fault {
        name: "f16-cache-read-as-bf16",
        title: "codes of an f16 cache are read as bf16",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["attend.given-cache", "decode.output", "decode.partial-lse", "verify.output"],
        apply: |p| {
            p.cache.decode = |codes, format, values| match format.dtype {
                Dtype::F16 => decode_with(codes, Dtype::Bf16, format.scale, values),
                other => decode_with(codes, other, format.scale, values),
            }
        },
    },
];

/// Zero of the same sign for a subnormal of f16.
fn flushed(wire: Wire, value: f32) -> f32 {
    if wire == Wire::F16 && value.abs() < LEAST_NORMAL { 0.0f32.copysign(value) } else { value }
}

#[cfg(test)]
mod tests {
    use super::super::faulty::{format, with};
    use super::*;
    use crate::policies::Policies;

    /// A value that f16 holds and bf16 does not, and one that only f16's subnormals hold.
    const FINE: f32 = 1.0 + 1.0 / 1024.0;
    const TINY: f32 = 3.0 / (1u32 << 24) as f32;

    #[test]
    fn merges_of_f16_go_wrong_as_the_titles_say_and_those_of_bf16_stay() {
        let healthy = Policies::HEALTHY.merge;
        let carried = with("f16-travels-as-bf16").merge.carried;
        assert_eq!((carried(Wire::F16, FINE), (healthy.carried)(Wire::F16, FINE)), (1.0, FINE));
        let added = with("f16-sums-in-f16").merge.added;
        let fine = f32::EPSILON;
        assert_eq!((added(Wire::F16, 1.0, fine), (healthy.added)(Wire::F16, 1.0, fine)), (1.0, 1.0 + fine));
        let stored = |name: &str| with(name).merge.stored;
        assert_eq!((healthy.stored)(Wire::F16, TINY), TINY);
        assert_eq!(stored("f16-subnormals-flushed")(Wire::F16, -TINY).to_bits(), (-0.0f32).to_bits());
        assert_eq!(stored("f16-subnormals-flushed")(Wire::F16, LEAST_NORMAL), LEAST_NORMAL);
        assert_eq!(stored("f16-clamped-short-of-its-end")(Wire::F16, -65_504.0), -64_512.0);
        assert_eq!(stored("f16-sum-before-division")(Wire::F16, 60_000.0), f32::INFINITY);
        assert_eq!(stored("f16-sum-before-division")(Wire::F16, 30_000.0), 30_000.0);
        for wire in [Wire::Bf16, Wire::F32] {
            for value in [FINE, TINY, 60_000.0] {
                assert_eq!(carried(wire, value), wire.round(value));
                assert_eq!(added(wire, value, fine), value + fine);
                for name in
                    ["f16-subnormals-flushed", "f16-clamped-short-of-its-end", "f16-sum-before-division"]
                {
                    assert_eq!(stored(name)(wire, value), wire.round(value), "{name}");
                }
            }
        }
    }

    #[test]
    fn kernels_of_f16_read_and_round_as_the_titles_say() {
        let code = |dtype| {
            shardcheck_formats::encode_f32(dtype, FINE, shardcheck_formats::Overflow::NonFinite) as u16
        };
        let read = with("f16-query-cast-to-bf16").kernel.read_query;
        assert_eq!(read(Dtype::F16, code(Dtype::F16)), 1.0);
        assert_eq!(read(Dtype::Bf16, code(Dtype::Bf16)), 1.0);
        for (name, in_f16) in [("f16-probabilities-in-bf16", 1.0), ("f16-partial-stored-in-bf16", 1.0)] {
            let kernel = with(name).kernel;
            let policy = if name.contains("stored") { kernel.store } else { kernel.round };
            let mut values = [FINE];
            policy(Dtype::F16, &mut values);
            assert_eq!(values, [in_f16], "{name}");
        }
        let mut value = [0.0];
        (with("f16-cache-read-as-bf16").cache.decode)(
            &0x3C00u16.to_le_bytes(),
            &format(Dtype::F16, 1.0),
            &mut value,
        );
        assert_eq!(value, [decode_f32(Dtype::Bf16, 0x3C00)]);
        (with("f16-cache-read-as-bf16").cache.decode)(&[0x38], &format(Dtype::E4m3fn, 1.0), &mut value);
        assert_eq!(value, [1.0]);
    }
}
