//! Faults of a router: scores, the choice among them, and weights.

use shardcheck_engine::{Renormalise, Scoring};

use super::{Fault, FaultClass};
use crate::router::{largest, renormalise, scores};

/// Rows below which a kernel of the field went wrong.
const SMALL_BATCH: usize = 16;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "router-bias-in-weights",
        title: "an expert weighs what it was chosen by, bias and all",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.weights", "moe.output"],
        apply: |p| p.moe.router.weight = |_, choice| choice,
    },
    Fault {
        name: "router-bias-ignored",
        title: "experts are chosen by their scores alone although there is a bias",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice", "route.alone", "moe.routing"],
        apply: |p| p.moe.router.choice = |score, _| score,
    },
    Fault {
        name: "router-masked-groups-are-zero",
        title: "the experts of other groups get 0.0 where −∞ is asked for, which wins over choices that are negative",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice"],
        apply: |p| p.moe.router.fill = |_| 0.0,
    },
    Fault {
        name: "router-masked-groups-are-infinite",
        title: "the experts of other groups get −∞ where 0.0 is asked for",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice"],
        apply: |p| p.moe.router.fill = |_| f32::NEG_INFINITY,
    },
    Fault {
        name: "router-masked-groups-chosen",
        title: "the experts of groups that are not kept are not masked at all",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice", "moe.routing"],
        apply: |p| p.moe.router.kept = |_| usize::MAX,
    },
    Fault {
        name: "router-one-group-too-few",
        title: "one group fewer is kept, and masked experts fill up",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice"],
        apply: |p| p.moe.router.kept = |asked| asked.saturating_sub(1).max(1),
    },
    Fault {
        name: "router-biased-group-by-its-best",
        title: "a biased group is kept by its largest choice, not by its two largest",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice"],
        apply: |p| {
            p.moe.router.group = |choices, _| choices.iter().copied().fold(f32::NEG_INFINITY, f32::max)
        },
    },
    Fault {
        name: "router-group-by-its-two-best",
        title: "a group without bias is kept by its two largest choices, not by its largest",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice"],
        apply: |p| p.moe.router.group = |choices, _| largest(choices, 2).iter().map(|at| choices[*at]).sum(),
    },
    Fault {
        name: "router-runner-up-chosen",
        title: "the last of the experts is the one behind the best k",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice", "route.alone", "moe.routing"],
        apply: |p| {
            p.moe.router.largest = |values, count| {
                let mut order = largest(values, count + 1);
                if order.len() > count {
                    order.swap_remove(count - 1);
                }
                order
            };
        },
    },
    Fault {
        name: "router-tie-chosen-twice",
        title: "each round looks for the value of the best expert that is left: of equal ones the first is taken again",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.distinct"],
        apply: |p| {
            p.moe.router.largest = |values, count| {
                let first = |value: f32| values.iter().position(|other| *other == value).unwrap_or(0);
                largest(values, count).iter().map(|at| first(values[*at])).collect()
            };
        },
    },
    Fault {
        name: "router-small-batch-reads-one-row",
        title: "a batch of fewer than 16 rows is routed by the logits of its row in front",
        class: FaultClass::MoeRoute,
        bugs: &["aiter#4041"],
        killed_by: &["route.choice", "moe.output"],
        apply: |p| {
            p.moe.router.row = |row, rows| if rows < SMALL_BATCH { row.saturating_sub(1) } else { row };
        },
    },
    Fault {
        name: "router-sigmoid-for-softmax",
        title: "scores are those of the logistic function whatever is asked for",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.weights"],
        apply: |p| p.moe.router.scores = |_, logits| scores(Scoring::Sigmoid, logits),
    },
    Fault {
        name: "router-softmax-without-maximum",
        title: "the exponentials of a softmax are not shifted by the largest logit, and overflow",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice"],
        apply: |p| {
            p.moe.router.scores = |scoring, logits| {
                if scoring == Scoring::Sigmoid {
                    return scores(scoring, logits);
                }
                let exps: Vec<f32> = logits.iter().map(|logit| logit.exp()).collect();
                let sum: f32 = exps.iter().sum();
                exps.iter().map(|exp| exp / sum).collect()
            };
        },
    },
    Fault {
        name: "router-not-renormalised",
        title: "weights are never divided by their sum",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.weights", "moe.output"],
        apply: |p| p.moe.router.renormalise = |_, _| {},
    },
    Fault {
        name: "router-always-renormalised",
        title: "weights are divided by their sum although that is not asked for",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.weights"],
        apply: |p| {
            p.moe.router.renormalise = |weights, how| {
                renormalise(weights, if how == Renormalise::Raw { Renormalise::Sum } else { how })
            };
        },
    },
    Fault {
        name: "router-tiny-left-out",
        title: "1e-20 is not added to the sum of the weights, which may be as small",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.weights"],
        apply: |p| {
            p.moe.router.renormalise = |weights, how| {
                renormalise(weights, if how == Renormalise::SumAndTiny { Renormalise::Sum } else { how });
            };
        },
    },
    Fault {
        name: "router-tiny-always-added",
        title: "1e-20 is added to the sum of the weights although the engine that is modelled adds nothing",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.weights"],
        apply: |p| {
            p.moe.router.renormalise = |weights, how| {
                renormalise(weights, if how == Renormalise::Sum { Renormalise::SumAndTiny } else { how });
            };
        },
    },
    Fault {
        name: "router-scaled-before-renormalised",
        title: "weights are scaled before they are divided by their sum, which takes the scale out again",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.weights", "moe.output"],
        apply: |p| {
            p.moe.router.scale = |weights, scale, how| {
                if how == Renormalise::Raw {
                    weights.iter_mut().for_each(|weight| *weight *= scale);
                }
            };
        },
    },
    Fault {
        name: "router-table-by-row",
        title: "the experts of a table are those of the row's number, not of its token id",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["route.choice", "route.alone", "moe.routing"],
        apply: |p| p.moe.router.table_row = |_, row| row,
    },
];

#[cfg(test)]
mod tests {
    use shardcheck_engine::MaskedFill;

    use super::super::faulty;
    use super::*;
    use crate::router::RouterPolicies;

    fn with(name: &str) -> RouterPolicies {
        faulty::with(name).moe.router
    }

    const HEALTHY: RouterPolicies = RouterPolicies::HEALTHY;

    fn near(seen: &[f32], wanted: &[f32]) {
        let close = seen.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(seen.len() == wanted.len() && close, "{seen:?} {wanted:?}");
    }

    #[test]
    fn experts_weigh_and_are_chosen_by_what_the_titles_name() {
        assert_eq!(((HEALTHY.weight)(0.5, 2.0), (HEALTHY.choice)(0.5, 1.5)), (0.5, 2.0));
        assert_eq!((with("router-bias-in-weights").weight)(0.5, 2.0), 2.0);
        assert_eq!((with("router-bias-ignored").choice)(0.5, 1.5), 0.5);
    }

    #[test]
    fn groups_are_kept_and_filled_as_the_titles_say() {
        let fills = |policies: RouterPolicies| {
            [MaskedFill::Zero, MaskedFill::NegativeInfinity].map(|fill| (policies.fill)(fill))
        };
        assert_eq!(fills(HEALTHY), [0.0, f32::NEG_INFINITY]);
        assert_eq!(fills(with("router-masked-groups-are-zero")), [0.0; 2]);
        assert_eq!(fills(with("router-masked-groups-are-infinite")), [f32::NEG_INFINITY; 2]);
        let kept = |policies: RouterPolicies| [1, 2, 3].map(|asked| (policies.kept)(asked));
        assert_eq!(kept(HEALTHY), [1, 2, 3]);
        assert_eq!(kept(with("router-masked-groups-chosen")), [usize::MAX; 3]);
        assert_eq!(kept(with("router-one-group-too-few")), [1, 1, 2]);
        let group = |policies: RouterPolicies| {
            [false, true].map(|biased| (policies.group)(&[-4.0, 0.5, -1.0], biased))
        };
        assert_eq!(group(HEALTHY), [0.5, -0.5]);
        assert_eq!(group(with("router-biased-group-by-its-best")), [0.5, 0.5]);
        assert_eq!(group(with("router-group-by-its-two-best")), [-0.5, -0.5]);
    }

    #[test]
    fn the_experts_of_a_token_are_those_that_the_titles_name() {
        let values = [0.25, 0.75, 0.5, 0.75];
        let chosen = |policies: RouterPolicies| [2, 3, 4].map(|count| (policies.largest)(&values, count));
        assert_eq!(chosen(HEALTHY), [vec![1, 3], vec![1, 3, 2], vec![1, 3, 2, 0]]);
        assert_eq!(chosen(with("router-runner-up-chosen")), [vec![1, 2], vec![1, 3, 0], vec![1, 3, 2, 0]]);
        assert_eq!(chosen(with("router-tie-chosen-twice")), [vec![1, 1], vec![1, 1, 2], vec![1, 1, 2, 0]]);
        let rows = |policies: RouterPolicies, rows| [0, 1, 14].map(|row| (policies.row)(row, rows));
        assert_eq!(rows(HEALTHY, 15), [0, 1, 14]);
        assert_eq!(rows(with("router-small-batch-reads-one-row"), 15), [0, 0, 13]);
        assert_eq!(rows(with("router-small-batch-reads-one-row"), 16), [0, 1, 14]);
        assert_eq!([3, -1].map(|id| (HEALTHY.table_row)(id, 7)), [3, usize::MAX]);
        assert_eq!((with("router-table-by-row").table_row)(3, 7), 7);
    }

    #[test]
    fn scores_are_those_that_the_titles_name() {
        let logits = [1f32.ln(), 3f32.ln()];
        let (sigmoid, softmax) = ([0.5, 0.75], [0.25, 0.75]);
        for (policies, of_sigmoid, of_softmax) in [
            (HEALTHY, sigmoid, softmax),
            (with("router-sigmoid-for-softmax"), sigmoid, sigmoid),
            (with("router-softmax-without-maximum"), sigmoid, softmax),
        ] {
            near(&(policies.scores)(Scoring::Sigmoid, &logits), &of_sigmoid);
            near(&(policies.scores)(Scoring::Softmax, &logits), &of_softmax);
        }
        let large = [100.0, 0.0];
        near(&(HEALTHY.scores)(Scoring::Softmax, &large), &[1.0, 0.0]);
        assert!((with("router-softmax-without-maximum").scores)(Scoring::Softmax, &large)[0].is_nan());
    }

    #[test]
    fn weights_are_divided_and_scaled_as_the_titles_say() {
        let ways = [Renormalise::Raw, Renormalise::Sum, Renormalise::SumAndTiny];
        let divided = |policies: RouterPolicies| {
            ways.map(|how| {
                let mut weights = [1e-20, 3e-20];
                (policies.renormalise)(&mut weights, how);
                weights[1]
            })
        };
        near(&divided(HEALTHY), &[3e-20, 0.75, 0.6]);
        assert_eq!(divided(with("router-not-renormalised")), [3e-20; 3]);
        near(&divided(with("router-always-renormalised")), &[0.75, 0.75, 0.6]);
        near(&divided(with("router-tiny-left-out")), &[3e-20, 0.75, 0.75]);
        near(&divided(with("router-tiny-always-added")), &[3e-20, 0.6, 0.6]);
        let scaled = |policies: RouterPolicies| {
            ways.map(|how| {
                let mut weights = [1.0];
                (policies.scale)(&mut weights, 2.5, how);
                weights[0]
            })
        };
        assert_eq!(scaled(HEALTHY), [2.5; 3]);
        assert_eq!(scaled(with("router-scaled-before-renormalised")), [2.5, 1.0, 1.0]);
    }
}
