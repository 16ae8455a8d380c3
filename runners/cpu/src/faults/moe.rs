//! Faults of a layer of experts: tokens, experts, padding and sums on the wrong rank, twice, or not at all.

use shardcheck_engine::{Activation, MoeExchange, SharedExpert};

use super::{Fault, FaultClass};
use crate::experts::{MoePolicies, gating, situ, slice_rows};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "moe-flat-rank-reversed",
        title: "the rank among those that share experts is tp·|tp| + pcp: some experts are on two ranks, some on none",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["moe.counts", "moe.output", "moe.tags", "moe.single"],
        apply: |p| {
            p.moe.expert_rank = |place, plan| {
                if plan.exchange == MoeExchange::Local { place.tp } else { place.tp * plan.tp + place.pcp }
            };
        },
    },
    Fault {
        name: "moe-expert-range-rounded-up",
        title: "every rank has ceil(E / G) experts from its number times floor(E / G) on: those at the edges are on two ranks",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["moe.counts", "moe.output", "moe.tags"],
        apply: |p| {
            p.moe.part = |index, parts, count| {
                let first = index * (count / parts);
                first.min(count)..(first + count.div_ceil(parts)).min(count)
            };
        },
    },
    Fault {
        name: "moe-expert-offset-forgotten",
        title: "a rank takes the weights of an expert by its place among its own: those of another expert, where it has not the first ones",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["moe.output", "moe.tags", "moe.single"],
        apply: |p| p.moe.weights_of = |expert, own| expert - own.start,
    },
    Fault {
        name: "moe-shared-expert-not-scaled",
        title: "the shared expert of every rank of dp × pcp is added whole, so that it counts as often as there are ranks",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["moe.output", "moe.tags", "moe.single"],
        apply: |p| p.moe.shared_scale = |_| 1.0,
    },
    Fault {
        name: "moe-sharded-shared-expert-scaled",
        title: "the parts of a sharded shared expert are scaled as copies of a whole one are",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["moe.output", "moe.single"],
        apply: |p| {
            p.moe.shared_scale = |plan| match (plan.shared, plan.exchange) {
                (SharedExpert::None, _) | (_, MoeExchange::Local | MoeExchange::Sliced) => 1.0,
                _ => 1.0 / (plan.dp * plan.pcp) as f32,
            };
        },
    },
    Fault {
        name: "moe-shared-expert-scaled-without-merge",
        title: "the shared expert is scaled by the ranks of dp × pcp although nothing is summed over them",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["moe.output", "moe.single"],
        apply: |p| p.moe.shared_scale = |plan| 1.0 / (plan.dp * plan.pcp) as f32,
    },
    Fault {
        name: "moe-prefill-group-not-gathered",
        title: "rows are neither gathered nor scattered over dp × pcp, whose ranks have the other experts",
        class: FaultClass::MoeRoute,
        bugs: &["vllm-ascend#4030"],
        killed_by: &["moe.counts", "moe.output", "moe.tags"],
        apply: |p| p.moe.gathers = |_| false,
    },
    Fault {
        name: "moe-tensor-parallel-sum-missing",
        title: "what ranks of tensor parallelism have of a row is not summed",
        class: FaultClass::CollectiveOrder,
        bugs: &["sglang#20360", "vllm-ascend#10557"],
        killed_by: &["moe.output", "moe.single", "moe.ranks"],
        apply: |p| p.moe.sums_tp = false,
    },
    Fault {
        name: "moe-own-part-summed-first",
        title: "every rank adds the parts beginning with its own: the sums of its peers have other bits",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["moe.ranks"],
        apply: |p| p.moe.order = |own, parts| (0..parts).map(|step| (own + step) % parts).collect(),
    },
    Fault {
        name: "moe-last-part-not-summed",
        title: "the part of the last rank is left out of the sum",
        class: FaultClass::CollectiveOrder,
        bugs: &["vllm-ascend#10557"],
        killed_by: &["moe.output", "moe.single"],
        apply: |p| p.moe.order = |_, parts| (0..parts - 1).collect(),
    },
    Fault {
        name: "moe-scatter-without-padding",
        title: "a rank's rows of the sum begin at its number times the rows that it has itself, not times those with padding",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["moe.output", "moe.tags", "moe.routing"],
        apply: |p| p.moe.scattered = |place, _, _, own| (place * own..(place + 1) * own).collect(),
    },
    Fault {
        name: "moe-scatter-in-token-order",
        title: "a rank takes every G-th row of the sum, as rows were shared out, although they were gathered rank after rank",
        class: FaultClass::CollectiveOrder,
        bugs: &["sglang#20360"],
        killed_by: &["moe.output", "moe.tags", "moe.routing"],
        apply: |p| {
            p.moe.scattered = |place, sources, _, own| (0..own).map(|row| row * sources + place).collect()
        },
    },
    Fault {
        name: "moe-decode-reduced-over-its-own-group",
        title: "the rows of a decode, the same on all ranks of pcp, are summed over the ranks that share no experts of theirs",
        class: FaultClass::CollectiveOrder,
        bugs: &["vllm-ascend#4030"],
        killed_by: &["moe.output", "moe.single"],
        apply: |p| {
            p.moe.summed = |all, own, plan| {
                if plan.exchange == MoeExchange::Redundant { vec![own] } else { all }
            };
        },
    },
    Fault {
        name: "moe-redundant-decode-counted-twice",
        title: "rows of a decode that all ranks of pcp have are gathered and summed as if each rank had rows of its own",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["moe.output", "moe.single"],
        apply: |p| {
            p.moe.summed = |all, _, plan| {
                if plan.exchange == MoeExchange::Redundant { all.repeat(plan.pcp) } else { all }
            };
        },
    },
    Fault {
        name: "moe-token-ids-not-gathered",
        title: "rows are gathered, but the token ids of the table are the rank's own over and over",
        class: FaultClass::MoeRoute,
        bugs: &["vllm-ascend#16834"],
        killed_by: &["moe.output", "moe.tags", "moe.counts"],
        apply: |p| p.moe.gathered_ids = |ids, own| ids[own].repeat(ids.len()),
    },
    Fault {
        name: "moe-token-ids-in-token-order",
        title: "token ids are gathered in the order of the batch, rows rank after rank",
        class: FaultClass::MoeRoute,
        bugs: &["ATOM#1208"],
        killed_by: &["moe.routing", "moe.output", "moe.tags"],
        apply: |p| {
            p.moe.gathered_ids = |ids, _| {
                let rows = ids.first().map_or(0, Vec::len);
                (0..rows)
                    .flat_map(|row| ids.iter().filter_map(move |of_rank| of_rank.get(row).copied()))
                    .collect()
            };
        },
    },
    Fault {
        name: "moe-padding-counted",
        title: "rows of padding count as tokens of the experts that they happen to choose",
        class: FaultClass::Padding,
        bugs: &["vllm#56079", "ATOM#1229", "ATOM#1700"],
        killed_by: &["moe.counts"],
        apply: |p| p.moe.counts_padding = true,
    },
    Fault {
        name: "moe-slice-rounded-down",
        title: "the rows of a rank are rounded down, and those of the remainder are lost",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["moe.slices", "moe.counts"],
        apply: |p| {
            p.moe.slice_rows = |tokens, group, plan| {
                let most = tokens.iter().copied().max().unwrap_or(0);
                match plan.exchange {
                    MoeExchange::Local => tokens[group] / plan.pcp,
                    MoeExchange::Gathered => most / plan.pcp,
                    MoeExchange::Redundant => most,
                    MoeExchange::Sliced => most / plan.tp,
                }
            };
        },
    },
    Fault {
        name: "moe-other-groups-ignored",
        title: "a rank pads to the rows of its own data-parallel group, not to the most of all groups",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["moe.slices", "moe.output"],
        apply: |p| p.moe.slice_rows = |tokens, group, plan| slice_rows(&tokens[group..=group], 0, plan),
    },
    Fault {
        name: "moe-single-row-doubled",
        title: "a batch of one token is padded to two rows",
        class: FaultClass::MoeRoute,
        bugs: &["ATOM#1915"],
        killed_by: &["moe.slices"],
        apply: |p| {
            p.moe.slice_rows = |tokens, group, plan| {
                let rows = slice_rows(tokens, group, plan);
                if rows == 1 { 2 } else { rows }
            };
        },
    },
    Fault {
        name: "moe-logits-sliced-by-stride",
        title: "a rank's slice has rows one behind the other, its logits those of every tp-th row",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["moe.routing", "moe.output", "moe.tags"],
        apply: |p| {
            p.moe.sliced_logits = |rank, ranks, each| (0..each).map(|row| row * ranks + rank).collect()
        },
    },
    Fault {
        name: "moe-rows-sliced-by-stride",
        title: "every tp-th row is sliced, and the slices are laid one behind the other as if they were whole",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["moe.output", "moe.tags"],
        apply: |p| p.moe.sliced = |rank, ranks, each| (0..each).map(|row| row * ranks + rank).collect(),
    },
    Fault {
        name: "moe-padding-kept-in-front",
        title: "of the gathered slices the last rows are kept, so that padding comes out for the first tokens",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["moe.output", "moe.tags", "moe.routing"],
        apply: |p| p.moe.cut = |rows, tokens| rows.saturating_sub(tokens),
    },
    Fault {
        name: "moe-results-taken-back-in-reverse",
        title: "rows that were sent to a rank come back in another order than they were sent in",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["moe.output", "moe.single"],
        apply: |p| p.moe.returned = |place, count| count - 1 - place,
    },
    Fault {
        name: "moe-changed-to-merge-zero",
        title: "experts are shared over all ranks as in merge 1, and rows stay where they are as in merge 0",
        class: FaultClass::MoeRoute,
        bugs: &["vllm-ascend#10557", "vllm-ascend#13538"],
        killed_by: &["moe.output", "moe.single", "moe.counts"],
        apply: |p| {
            p.moe.gathers =
                |plan| (MoePolicies::HEALTHY.gathers)(plan) && plan.exchange != MoeExchange::Gathered;
        },
    },
    Fault {
        name: "moe-silu-in-place-of-situ",
        title: "experts that are gated by SiTU are gated by silu, and their up-projection is not bent",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["moe.output"],
        apply: |p| p.moe.gating = |_| gating(Activation::SiluGated),
    },
    Fault {
        name: "moe-situ-bends-the-gate-alone",
        title: "SiTU's gate is bent, and its up-projection enters as it is",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["moe.output"],
        apply: |p| {
            p.moe.gating = |activation| match activation {
                Activation::SituGated => |gate, up| situ(gate) * up,
                other => gating(other),
            }
        },
    },
];

#[cfg(test)]
mod tests {
    use shardcheck_engine::{ExpertSharding, MoePlan};

    use super::super::faulty;
    use super::*;
    use crate::experts::Place;

    fn with(name: &str) -> MoePolicies {
        faulty::with(name).moe
    }

    /// Three groups of two ranks of prefill context parallelism of five of tensor parallelism.
    fn plan(exchange: MoeExchange, shared: SharedExpert) -> MoePlan {
        let (sharding, activation) = (ExpertSharding::Whole, Activation::Linear);
        MoePlan { dp: 3, pcp: 2, tp: 5, exchange, sharding, shared, activation }
    }

    fn of(exchange: MoeExchange) -> MoePlan {
        plan(exchange, SharedExpert::None)
    }

    #[test]
    fn experts_are_shared_out_as_the_titles_say() {
        let place = Place { dp: 2, pcp: 1, tp: 3 };
        let rank = |policies: MoePolicies, exchange| (policies.expert_rank)(place, &of(exchange));
        for (exchange, right, wrong) in [(MoeExchange::Local, 3, 3), (MoeExchange::Gathered, 28, 16)] {
            assert_eq!(rank(MoePolicies::HEALTHY, exchange), right);
            assert_eq!(rank(with("moe-flat-rank-reversed"), exchange), wrong);
        }
        let parts = |policies: MoePolicies, count| [0, 1, 2].map(|index| (policies.part)(index, 3, count));
        assert_eq!(parts(MoePolicies::HEALTHY, 8), [0..2, 2..5, 5..8]);
        assert_eq!(parts(with("moe-expert-range-rounded-up"), 8), [0..3, 2..5, 4..7]);
        assert_eq!(parts(with("moe-expert-range-rounded-up"), 2), [0..1, 0..1, 0..1]);
        let weights = |policies: MoePolicies| [4, 5, 6].map(|expert| (policies.weights_of)(expert, &(4..7)));
        assert_eq!(weights(MoePolicies::HEALTHY), [4, 5, 6]);
        assert_eq!(weights(with("moe-expert-offset-forgotten")), [0, 1, 2]);
    }

    #[test]
    fn a_shared_expert_is_scaled_where_the_titles_say() {
        let scales = |policies: MoePolicies| {
            SharedExpert::ALL.map(|shared| {
                MoeExchange::ALL
                    .map(|exchange| (6.0 * (policies.shared_scale)(&plan(exchange, shared))).round())
            })
        };
        let [none, replicated, sharded] =
            [SharedExpert::None, SharedExpert::Replicated, SharedExpert::Sharded]
                .map(|shared| SharedExpert::ALL.iter().position(|other| *other == shared).unwrap());
        let merged = MoeExchange::ALL.map(|exchange| {
            if [MoeExchange::Gathered, MoeExchange::Redundant].contains(&exchange) { 1.0 } else { 6.0 }
        });
        let healthy = scales(MoePolicies::HEALTHY);
        assert_eq!((healthy[none], healthy[replicated], healthy[sharded]), ([6.0; 4], merged, [6.0; 4]));
        let both = scales(with("moe-sharded-shared-expert-scaled"));
        assert_eq!((both[none], both[replicated], both[sharded]), ([6.0; 4], merged, merged));
        assert_eq!(scales(with("moe-shared-expert-not-scaled")), [[6.0; 4]; 3]);
        assert_eq!(scales(with("moe-shared-expert-scaled-without-merge")), [[1.0; 4]; 3]);
    }

    #[test]
    fn rows_are_gathered_and_summed_as_the_titles_say() {
        let gathers =
            |policies: MoePolicies| MoeExchange::ALL.map(|exchange| (policies.gathers)(&of(exchange)));
        let are = |exchanges: &[MoeExchange]| MoeExchange::ALL.map(|exchange| exchanges.contains(&exchange));
        use MoeExchange::{Gathered, Local, Redundant, Sliced};
        assert_eq!(gathers(MoePolicies::HEALTHY), are(&[Gathered, Redundant, Sliced]));
        assert_eq!(gathers(with("moe-prefill-group-not-gathered")), are(&[]));
        assert_eq!(gathers(with("moe-changed-to-merge-zero")), are(&[Redundant, Sliced]));
        assert!(MoePolicies::HEALTHY.sums_tp && !with("moe-tensor-parallel-sum-missing").sums_tp);
        let order = |policies: MoePolicies| (policies.order)(2, 4);
        assert_eq!(order(MoePolicies::HEALTHY), [0, 1, 2, 3]);
        assert_eq!(order(with("moe-own-part-summed-first")), [2, 3, 0, 1]);
        assert_eq!(order(with("moe-last-part-not-summed")), [0, 1, 2]);
        let summed = |policies: MoePolicies, exchange| (policies.summed)(vec![3, 8], 8, &of(exchange));
        for exchange in [Local, Gathered, Redundant, Sliced] {
            let is_decode = exchange == Redundant;
            assert_eq!(summed(MoePolicies::HEALTHY, exchange), [3, 8]);
            let own = summed(with("moe-decode-reduced-over-its-own-group"), exchange);
            assert_eq!(own, if is_decode { vec![8] } else { vec![3, 8] });
            let twice = summed(with("moe-redundant-decode-counted-twice"), exchange);
            assert_eq!(twice, if is_decode { vec![3, 8, 3, 8] } else { vec![3, 8] });
        }
    }

    #[test]
    fn rows_of_a_sum_and_ids_of_tokens_are_those_that_the_titles_name() {
        // the third of four ranks, with five rows each of which it has two
        let scattered = |policies: MoePolicies| (policies.scattered)(2, 4, 5, 2);
        assert_eq!(scattered(MoePolicies::HEALTHY), [10, 11]);
        assert_eq!(scattered(with("moe-scatter-without-padding")), [4, 5]);
        assert_eq!(scattered(with("moe-scatter-in-token-order")), [2, 6]);
        let ids = |policies: MoePolicies| (policies.gathered_ids)(&[vec![1, 2], vec![3, 4], vec![5, 6]], 1);
        assert_eq!(ids(MoePolicies::HEALTHY), [1, 2, 3, 4, 5, 6]);
        assert_eq!(ids(with("moe-token-ids-not-gathered")), [3, 4, 3, 4, 3, 4]);
        assert_eq!(ids(with("moe-token-ids-in-token-order")), [1, 3, 5, 2, 4, 6]);
        assert!(!MoePolicies::HEALTHY.counts_padding && with("moe-padding-counted").counts_padding);
    }

    #[test]
    fn rows_are_padded_to_what_the_titles_say() {
        use MoeExchange::{Gathered, Local, Redundant, Sliced};
        let rows = |policies: MoePolicies, tokens: [usize; 3]| {
            [Local, Gathered, Redundant, Sliced]
                .map(|exchange| (policies.slice_rows)(&tokens, 1, &of(exchange)))
        };
        assert_eq!(rows(MoePolicies::HEALTHY, [4, 7, 13]), [4, 7, 13, 3]);
        assert_eq!(rows(with("moe-slice-rounded-down"), [4, 7, 13]), [3, 6, 13, 2]);
        assert_eq!(rows(with("moe-other-groups-ignored"), [4, 7, 13]), [4, 4, 7, 2]);
        for (tokens, right, doubled) in
            [([0, 1, 1], [1; 4], [2; 4]), ([4, 7, 13], [4, 7, 13, 3], [4, 7, 13, 3])]
        {
            assert_eq!(rows(MoePolicies::HEALTHY, tokens), right);
            assert_eq!(rows(with("moe-single-row-doubled"), tokens), doubled);
        }
    }

    #[test]
    fn slices_are_cut_and_results_taken_back_as_the_titles_say() {
        let strided = [1, 4, 7, 10];
        for (name, rows, logits) in [
            ("moe-logits-sliced-by-stride", [4, 5, 6, 7], strided),
            ("moe-rows-sliced-by-stride", strided, [4, 5, 6, 7]),
        ] {
            let policies = with(name);
            assert_eq!((policies.sliced)(1, 3, 4), rows, "{name}");
            assert_eq!((policies.sliced_logits)(1, 3, 4), logits, "{name}");
        }
        let cut = |policies: MoePolicies| {
            [(12, 9), (9, 9), (3, 9)].map(|(rows, tokens)| (policies.cut)(rows, tokens))
        };
        assert_eq!(cut(MoePolicies::HEALTHY), [0; 3]);
        assert_eq!(cut(with("moe-padding-kept-in-front")), [3, 0, 0]);
        let returned = |policies: MoePolicies| [0, 1, 2].map(|place| (policies.returned)(place, 3));
        assert_eq!(returned(MoePolicies::HEALTHY), [0, 1, 2]);
        assert_eq!(returned(with("moe-results-taken-back-in-reverse")), [2, 1, 0]);
    }
}
