//! Faults of weights and lanes: how LSEs become weights, and how they travel.

use shardcheck_engine::LaneOrder;
use shardcheck_formats::{bf16_from_f32, bf16_to_f32};

use super::{Fault, FaultClass};
use crate::lanes;
use crate::merge;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "ranks-averaged",
        title: "the partials of ranks that hold something are averaged without their LSEs",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840"],
        killed_by: &[
            "decode.output",
            "verify.output",
            "merge.output",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.combine = average,
    },
    Fault {
        name: "weights-not-normalised",
        title: "partials are weighed by exp(lse − maximum) and the sum is not divided",
        class: FaultClass::LseMath,
        bugs: &["flashinfer@6cbaf6e"],
        killed_by: &[
            "decode.output",
            "verify.output",
            "merge.output",
            "merge.fold",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.combine = unnormalised,
    },
    Fault {
        name: "merged-lse-is-the-maximum",
        title: "the merged LSE is the largest one instead of their log-sum-exp",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58"],
        killed_by: &["decode.lse", "verify.lse", "merge.lse", "lse.unit", "probe.tokens", "probe.pairing"],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                merge::combine(lses, weights);
                lses.iter().copied().fold(f32::NEG_INFINITY, f32::max)
            }
        },
    },
    Fault {
        name: "merged-lse-of-the-first-rank",
        title: "the merged LSE is that of the first rank",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58"],
        killed_by: &[
            "decode.lse",
            "verify.lse",
            "merge.lse",
            "merge.permutation",
            "probe.tokens",
            "probe.pairing",
        ],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                merge::combine(lses, weights);
                lses[0]
            }
        },
    },
    Fault {
        name: "merge-in-base-2",
        title: "natural LSEs are merged with exp2 and log2",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840", "vllm#47079"],
        killed_by: &[
            "decode.output",
            "decode.lse",
            "merge.output",
            "merge.lse",
            "lse.unit",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.combine = merge::combine_base_2,
    },
    Fault {
        name: "base-2-taken-as-natural",
        title: "LSEs that are given in base 2 are merged as natural ones",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840"],
        killed_by: &["merge.base-2"],
        apply: |p| p.merge.combine_base_2 = merge::combine,
    },
    Fault {
        name: "merge-without-maximum",
        title: "LSEs are exponentiated as they are: large ones overflow",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &["merge.shift", "decode.output", "probe.pairing", "probe.needle"],
        apply: |p| p.merge.combine = unshifted,
    },
    Fault {
        name: "n-way-merge-counts-two",
        title: "the denominator of an N-way merge holds the first two states only",
        class: FaultClass::LseMath,
        bugs: &["flashinfer@6cbaf6e"],
        killed_by: &[
            "merge.output",
            "merge.lse",
            "merge.permutation",
            "merge.fold",
            "decode.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.combine = denominator_of_two,
    },
    Fault {
        name: "largest-rank-takes-all",
        title: "the rank with the largest LSE is taken alone",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840"],
        killed_by: &[
            "decode.output",
            "merge.output",
            "merge.fold",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let merged = merge::combine(lses, weights);
                let largest = weights.iter().copied().fold(0.0, f32::max);
                let first = weights.iter().position(|w| *w == largest && largest > 0.0);
                weights.iter_mut().enumerate().for_each(|(r, w)| *w = f32::from(u8::from(Some(r) == first)));
                merged
            }
        },
    },
    Fault {
        name: "small-weights-dropped",
        title: "weights below 1/1024 are taken as zero",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#3838"],
        killed_by: &["merge.output", "merge.fold"],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let merged = merge::combine(lses, weights);
                weights.iter_mut().filter(|w| **w < 1.0 / 1024.0).for_each(|w| *w = 0.0);
                merged
            }
        },
    },
    Fault {
        name: "nan-partial-not-scrubbed",
        title: "a partial of weight zero is multiplied instead of dropped: NaN · 0 is NaN",
        class: FaultClass::EmptyShard,
        bugs: &["flashinfer#4975", "ATOM#1832"],
        killed_by: &[
            "decode.output",
            "attend.padding",
            "merge.output",
            "merge.neutral",
            "merge.all-empty",
            "selected.output",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.weigh = |weight, row| row.iter_mut().for_each(|value| *value *= weight),
    },
    Fault {
        name: "partials-summed-unweighted",
        title: "partials are scrubbed where their weight is zero, and otherwise added as they are",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840"],
        killed_by: &[
            "decode.output",
            "verify.output",
            "merge.output",
            "states.output",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.merge.weigh = |weight, row| {
                if weight == 0.0 {
                    row.fill(0.0)
                }
            }
        },
    },
    Fault {
        name: "nan-lse-not-sanitised",
        title: "an LSE of NaN or +∞ enters the merge as it is",
        class: FaultClass::EmptyShard,
        bugs: &["ATOM#1832"],
        killed_by: &["merge.output", "merge.lse"],
        apply: |p| p.merge.sanitise = |lse| lse,
    },
    Fault {
        name: "lanes-swapped-by-the-sender",
        title: "the sender packs the halves of the LSE in the other order than the receiver reads them",
        class: FaultClass::LseMath,
        bugs: &[],
        killed_by: &[
            "pack.lanes",
            "pack.round-trip",
            "decode.lse",
            "merge.lse",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.lanes.pack = |bits, order| lanes::pack(bits, other(order)),
    },
    Fault {
        name: "unpack-ignores-lane-order",
        title: "the receiver reads the high half first whatever order was agreed on",
        class: FaultClass::LseMath,
        bugs: &[],
        killed_by: &[
            "pack.round-trip",
            "equal.lanes",
            "decode.lse",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.lanes.unpack = |pair, _| lanes::unpack(pair, LaneOrder::HiLo),
    },
    Fault {
        name: "low-lane-dropped",
        title: "only the high half of the LSE travels",
        class: FaultClass::LseMath,
        bugs: &["sglang#25090"],
        killed_by: &[
            "pack.round-trip",
            "pack.lanes",
            "decode.lse",
            "merge.lse",
            "probe.tokens",
            "probe.pairing",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.lanes.pack = |bits, order| lanes::pack(bits & 0xFFFF_0000, order),
    },
    Fault {
        name: "lanes-through-a-float",
        title: "the halves pass through a bf16 operation, which quiets those that are NaNs",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["pack.round-trip", "pack.lanes"],
        apply: |p| {
            p.merge.lanes.pack =
                |bits, order| lanes::pack(bits, order).map(|lane| bf16_from_f32(bf16_to_f32(lane)))
        },
    },
    Fault {
        name: "lanes-as-two-values",
        title: "the LSE travels as the sum of two bf16 values instead of two halves",
        class: FaultClass::LseMath,
        bugs: &["sglang#25090"],
        killed_by: &["merge.shift", "pack.lanes", "probe.tokens", "probe.pairing", "probe.rank-lse"],
        apply: |p| {
            p.merge.lanes.pack = |bits, order| {
                let value = f32::from_bits(bits);
                let high = bf16_from_f32(value);
                let low = bf16_from_f32(value - bf16_to_f32(high));
                lanes::pack(u32::from(high) << 16 | u32::from(low), order)
            }
        },
    },
];

fn other(order: LaneOrder) -> LaneOrder {
    match order {
        LaneOrder::HiLo => LaneOrder::LoHi,
        LaneOrder::LoHi => LaneOrder::HiLo,
    }
}

fn average(lses: &[f32], weights: &mut [f32]) -> f32 {
    let merged = merge::combine(lses, weights);
    let held = weights.iter().filter(|weight| **weight > 0.0).count() as f32;
    weights.iter_mut().filter(|weight| **weight > 0.0).for_each(|weight| *weight = 1.0 / held);
    merged
}

fn unnormalised(lses: &[f32], weights: &mut [f32]) -> f32 {
    let merged = merge::combine(lses, weights);
    let max = lses.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let held = weights.iter_mut().zip(lses).filter(|(weight, _)| **weight > 0.0);
    held.for_each(|(weight, lse)| *weight = (lse - max).exp());
    merged
}

fn unshifted(lses: &[f32], weights: &mut [f32]) -> f32 {
    let sum: f32 = lses.iter().map(|lse| lse.exp()).sum();
    if sum == 0.0 {
        weights.fill(0.0);
        return f32::NEG_INFINITY;
    }
    weights.iter_mut().zip(lses).for_each(|(weight, lse)| *weight = lse.exp() / sum);
    sum.ln()
}

fn denominator_of_two(lses: &[f32], weights: &mut [f32]) -> f32 {
    let merged = merge::combine(&lses[..lses.len().min(2)], &mut weights[..lses.len().min(2)]);
    if merged == f32::NEG_INFINITY {
        return merge::combine(lses, weights);
    }
    weights.iter_mut().zip(lses).for_each(|(weight, lse)| *weight = (lse - merged).exp());
    merged
}

#[cfg(test)]
mod tests {
    use super::super::faulty::with;
    use super::*;

    const LSES: [f32; 3] = [0.5, f32::NEG_INFINITY, 2.0];

    fn merged(merge: fn(&[f32], &mut [f32]) -> f32) -> (Vec<f32>, f32) {
        let mut weights = vec![f32::NAN; 3];
        let lse = merge(&LSES, &mut weights);
        (weights, lse)
    }

    fn assert_near(seen: (Vec<f32>, f32), weights: [f32; 3], lse: f32) {
        let near = |a: f32, b: f32| (a - b).abs() < 1e-6;
        assert!(seen.0.iter().zip(weights).all(|(a, b)| near(*a, b)) && near(seen.1, lse), "{seen:?}");
    }

    #[test]
    fn each_wrong_merge_is_wrong_as_its_title_says() {
        let natural = (0.5f32.exp() + 2f32.exp()).ln();
        assert_near(merged(average), [0.5, 0.0, 0.5], natural);
        assert_near(merged(unnormalised), [(-1.5f32).exp(), 0.0, 1.0], natural);
        let binary = (0.5f32.exp2() + 2f32.exp2()).log2();
        assert_near(
            merged(merge::combine_base_2),
            [(0.5 - binary).exp2(), 0.0, (2.0 - binary).exp2()],
            binary,
        );
        assert_near(merged(unshifted), [(0.5 - natural).exp(), 0.0, (2.0 - natural).exp()], natural);
    }

    /// Merged LSE and weights that a fault gives to three ranks, the second of them empty.
    fn merged_by(name: &str) -> (Vec<f32>, f32) {
        merged(with(name).merge.combine)
    }

    #[test]
    fn the_merge_of_a_fault_is_the_one_that_its_title_names() {
        let (healthy, natural) = merged(merge::combine);
        let healthy = [healthy[0], healthy[1], healthy[2]];
        assert_near(merged_by("ranks-averaged"), [0.5, 0.0, 0.5], natural);
        assert_near(merged_by("weights-not-normalised"), [(-1.5f32).exp(), 0.0, 1.0], natural);
        assert_near(merged_by("merged-lse-is-the-maximum"), healthy, 2.0);
        assert_near(merged_by("merged-lse-of-the-first-rank"), healthy, 0.5);
        assert_near(merged_by("largest-rank-takes-all"), [0.0, 0.0, 1.0], natural);
        assert_near(merged_by("n-way-merge-counts-two"), [1.0, 0.0, 1.5f32.exp()], 0.5);
    }

    #[test]
    fn ranks_that_are_all_empty_stay_empty_where_the_title_names_none_of_them() {
        for name in [
            "merge-in-base-2",
            "merge-without-maximum",
            "largest-rank-takes-all",
            "n-way-merge-counts-two",
            "weights-not-normalised",
            "ranks-averaged",
        ] {
            let mut weights = [f32::NAN; 3];
            let lse = (with(name).merge.combine)(&[f32::NEG_INFINITY; 3], &mut weights);
            assert_eq!((lse, weights), (f32::NEG_INFINITY, [0.0; 3]), "{name}");
        }
        // the first two states alone hold nothing: the third is taken as published
        let (mut weights, lses) = ([f32::NAN; 3], [f32::NEG_INFINITY, f32::NEG_INFINITY, 2.0]);
        assert_eq!((denominator_of_two(&lses, &mut weights), weights), (2.0, [0.0, 0.0, 1.0]));
    }

    #[test]
    fn of_two_largest_ranks_the_first_takes_all() {
        let mut weights = [f32::NAN; 3];
        let lse = (with("largest-rank-takes-all").merge.combine)(&[1.0, 3.0, 3.0], &mut weights);
        assert_eq!(weights, [0.0, 1.0, 0.0]);
        assert!((lse - (1f32.exp() + 2.0 * 3f32.exp()).ln()).abs() < 1e-6);
    }

    #[test]
    fn weights_below_a_1024th_vanish_and_others_stay() {
        let combine = with("small-weights-dropped").merge.combine;
        let (mut weights, mut healthy) = ([f32::NAN; 3], [0.0; 3]);
        // e^-7 is a 1097th, e^-6 a 403rd
        let lse = combine(&[0.0, -7.0, -6.0], &mut weights);
        assert_eq!(lse, merge::combine(&[0.0, -7.0, -6.0], &mut healthy));
        assert_eq!(weights, [healthy[0], 0.0, healthy[2]]);
        // two of 1024 equal ranks: a weight of just a 1024th is not below it
        let mut equal = vec![f32::NAN; 1024];
        combine(&[0.0; 1024], &mut equal);
        let exact = equal.iter().filter(|weight| **weight == 1.0 / 1024.0).count();
        let mut unchanged = vec![0.0; 1024];
        merge::combine(&[0.0; 1024], &mut unchanged);
        assert_eq!(exact, unchanged.iter().filter(|weight| **weight == 1.0 / 1024.0).count());
    }

    #[test]
    fn partials_are_weighed_as_the_titles_say() {
        let weighed = |name: &str, weight: f32| {
            let mut row = [2.0, f32::NAN];
            (with(name).merge.weigh)(weight, &mut row);
            row.map(f32::to_bits)
        };
        let [first, second] = weighed("nan-partial-not-scrubbed", 0.0).map(f32::from_bits);
        assert!(first == 0.0 && second.is_nan(), "NaN · 0 is NaN");
        assert_eq!(weighed("nan-partial-not-scrubbed", 0.25)[0], 0.5f32.to_bits());
        assert_eq!(weighed("partials-summed-unweighted", 0.0), [0, 0]);
        assert_eq!(weighed("partials-summed-unweighted", 0.25), [2f32, f32::NAN].map(f32::to_bits));
        let sanitise = with("nan-lse-not-sanitised").merge.sanitise;
        assert!(sanitise(f32::NAN).is_nan() && sanitise(f32::INFINITY) == f32::INFINITY);
    }

    #[test]
    fn lanes_are_packed_as_the_titles_say() {
        // 3.1415927 and a low half that is a signalling NaN of the 16-bit type
        for bits in [0x4049_0FDB, 0xC049_7F81u32] {
            let (high, low) = ((bits >> 16) as u16, bits as u16);
            let packed = |name: &str| LaneOrder::ALL.map(|order| (with(name).merge.lanes.pack)(bits, order));
            assert_eq!(packed("lanes-swapped-by-the-sender"), [[low, high], [high, low]]);
            assert_eq!(packed("low-lane-dropped"), [[high, 0], [0, high]]);
            let quiet = |lane: u16| bf16_from_f32(bf16_to_f32(lane));
            assert_eq!(
                packed("lanes-through-a-float"),
                [[quiet(high), quiet(low)], [quiet(low), quiet(high)]]
            );
            let rest = bf16_from_f32(f32::from_bits(bits) - bf16_to_f32(bf16_from_f32(f32::from_bits(bits))));
            let whole = bf16_from_f32(f32::from_bits(bits));
            assert_eq!(packed("lanes-as-two-values"), [[whole, rest], [rest, whole]]);
            let unpack = with("unpack-ignores-lane-order").merge.lanes.unpack;
            assert_eq!(LaneOrder::ALL.map(|order| unpack([high, low], order)), [bits; 2]);
        }
    }
}
