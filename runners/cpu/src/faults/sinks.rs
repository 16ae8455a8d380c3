//! Faults of sinks: counted too often or not at all, another head's, in another unit, in the wrong place.

use super::{Fault, FaultClass};
use crate::sinks::{alone, combine};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "sink-ignored",
        title: "heads attend as if they had no sink",
        class: FaultClass::LseMath,
        bugs: &[],
        killed_by: &["sinks.output", "sinks.lse", "sinks.extremes"],
        apply: |p| {
            p.sinks.combine = |by, lses, _, weights| by(lses, weights);
            p.sinks.alone = |lse, _| (1.0, lse);
        },
    },
    Fault {
        name: "sink-counted-by-every-rank",
        title: "every rank's kernel counts the sink, in its output and its LSE, and the merge adds it up once for each",
        class: FaultClass::LseMath,
        bugs: &[],
        killed_by: &["sinks.partial-lse", "sinks.partial-output", "sinks.output", "sinks.lse"],
        apply: |p| {
            p.sinks.in_partial = alone;
            p.sinks.combine = |by, lses, _, weights| by(lses, weights);
        },
    },
    Fault {
        name: "sink-in-partial-outputs-alone",
        title: "every rank's kernel divides its output by its sum with the sink, its LSE is without, and the merge knows of no sink",
        class: FaultClass::LseMath,
        bugs: &[],
        killed_by: &["sinks.partial-output", "sinks.output", "sinks.lse"],
        apply: |p| {
            p.sinks.in_partial = |lse, sink| (alone(lse, sink).0, lse);
            p.sinks.combine = |by, lses, _, weights| by(lses, weights);
        },
    },
    Fault {
        name: "sinks-of-the-own-heads",
        title: "gathered heads are given the sinks of the rank's own heads, again and again",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#29487"],
        killed_by: &["sinks.output"],
        apply: |p| {
            p.sinks.of_group = |sinks, first, own, world, member| {
                sinks[first + member * own..first + (member + 1) * own].repeat(world)
            };
        },
    },
    Fault {
        name: "sinks-of-the-first-group",
        title: "every group of ranks takes the sinks of the first group's heads",
        class: FaultClass::HeadLayout,
        bugs: &["vllm-ascend#4687"],
        killed_by: &["sinks.output", "sinks.lse"],
        apply: |p| p.sinks.of_group = |sinks, _, own, world, _| sinks[..own * world].to_vec(),
    },
    Fault {
        name: "sink-scaled-like-a-score",
        title: "the sink is multiplied by the factor of the scores",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["sinks.output", "sinks.lse", "sinks.extremes"],
        apply: |p| p.sinks.logit = |sink, scale| sink * scale,
    },
    Fault {
        name: "sink-taken-for-base-2",
        title: "the sink is taken for a logit in base 2",
        class: FaultClass::LseMath,
        bugs: &["vllm#28840"],
        killed_by: &["sinks.output", "sinks.lse", "sinks.extremes"],
        apply: |p| p.sinks.logit = |sink, _| sink * std::f32::consts::LN_2,
    },
    Fault {
        name: "sink-left-out-of-the-lse",
        title: "the output is divided with the sink, the merged LSE is without it",
        class: FaultClass::LseMath,
        bugs: &["flashinfer#58"],
        killed_by: &["sinks.lse", "sinks.extremes"],
        apply: |p| {
            p.sinks.combine = |by, lses, sink, weights| {
                let lse = by(lses, &mut vec![0.0; lses.len()]);
                combine(by, lses, sink, weights);
                lse
            };
            p.sinks.alone = |lse, sink| (alone(lse, sink).0, lse);
        },
    },
    Fault {
        name: "sink-of-the-last-rank-s-tokens",
        title: "the last rank brings the sink along, and does not where it holds no token",
        class: FaultClass::EmptyShard,
        bugs: &["vllm#38416"],
        killed_by: &["sinks.output", "sinks.lse"],
        apply: |p| {
            p.sinks.combine = |by, lses, sink, weights| match lses[lses.len() - 1] {
                f32::NEG_INFINITY => by(lses, weights),
                _ => combine(by, lses, sink, weights),
            };
        },
    },
    Fault {
        name: "sink-not-shifted-by-the-maximum",
        title: "exp of the sink is added to a sum of exponentials that were shifted by their maximum",
        class: FaultClass::LseMath,
        bugs: &[],
        killed_by: &["sinks.output", "sinks.lse", "sinks.extremes"],
        apply: |p| {
            p.sinks.combine = |by, lses, sink, weights| {
                let most = lses.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                combine(by, lses, sink + most, weights)
            };
            p.sinks.alone = |lse, sink| alone(lse, sink + lse);
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::Policies;

    fn with(name: &str) -> Policies {
        let mut policies = Policies::HEALTHY;
        (FAULTS.iter().find(|fault| fault.name == name).unwrap().apply)(&mut policies);
        policies
    }

    fn merged(name: &str, lses: &[f32], sink: f32) -> (f32, Vec<f32>) {
        let mut weights = vec![f32::NAN; lses.len()];
        let by = crate::merge::combine;
        let lse = (with(name).sinks.combine)(by, lses, sink, &mut weights);
        (lse, weights)
    }

    fn right(lses: &[f32], sink: f32) -> (f32, Vec<f32>) {
        let mut weights = vec![f32::NAN; lses.len()];
        let lse = combine(crate::merge::combine, lses, sink, &mut weights);
        (lse, weights)
    }

    #[test]
    fn wrong_counts_of_a_sink_are_wrong_as_their_titles_say() {
        let lses = [1.0, 2.0];
        assert_eq!(merged("sink-ignored", &lses, 0.5), right(&lses, f32::NEG_INFINITY));
        assert_eq!(merged("sink-not-shifted-by-the-maximum", &lses, 0.5), right(&lses, 2.5));
        let (lse, weights) = merged("sink-left-out-of-the-lse", &lses, 0.5);
        assert_eq!((lse, weights), (right(&lses, f32::NEG_INFINITY).0, right(&lses, 0.5).1));
        let last = "sink-of-the-last-rank-s-tokens";
        assert_eq!(merged(last, &lses, 0.5), right(&lses, 0.5));
        let empty = [2.0, f32::NEG_INFINITY];
        assert_eq!(merged(last, &empty, 0.5), right(&empty, f32::NEG_INFINITY));
        let partial = with("sink-in-partial-outputs-alone").sinks.in_partial;
        assert_eq!(partial(1.0, 1.0), (0.5, 1.0));
        let counted = with("sink-counted-by-every-rank").sinks.in_partial;
        assert_eq!(counted(1.0, 1.0), (0.5, 1.0 + 2f32.ln()));
        assert_eq!(merged("sink-counted-by-every-rank", &lses, 0.5), right(&lses, f32::NEG_INFINITY));
        assert_eq!(merged("sink-in-partial-outputs-alone", &lses, 0.5), right(&lses, f32::NEG_INFINITY));
    }

    #[test]
    fn wrong_sinks_are_those_of_other_heads_or_in_another_unit() {
        let sinks = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        // the second group of two ranks with two heads each, its second member
        assert_eq!((Policies::HEALTHY.sinks.of_group)(&sinks, 4, 2, 2, 1), [4.0, 5.0, 6.0, 7.0]);
        assert_eq!((with("sinks-of-the-own-heads").sinks.of_group)(&sinks, 4, 2, 2, 1), [6.0, 7.0, 6.0, 7.0]);
        assert_eq!(
            (with("sinks-of-the-first-group").sinks.of_group)(&sinks, 4, 2, 2, 1),
            [0.0, 1.0, 2.0, 3.0]
        );
        assert_eq!((with("sink-scaled-like-a-score").sinks.logit)(3.0, 0.25), 0.75);
        assert_eq!((with("sink-taken-for-base-2").sinks.logit)(2.0, 0.25), 2.0 * std::f32::consts::LN_2);
    }
}
