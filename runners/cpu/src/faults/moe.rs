//! Faults of a layer of experts: tokens, experts, padding and sums on the wrong rank, twice, or not at all.

use shardcheck_engine::{MoeExchange, SharedExpert};

use super::{Fault, FaultClass};
use crate::experts::{MoePolicies, slice_rows};

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
];
