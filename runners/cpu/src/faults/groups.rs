//! Faults of a group: whose heads a rank takes, what it sends to whom, and which LSE goes with which output.

use shardcheck_engine::Tensor;

use super::{Fault, FaultClass};
use crate::merge;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "every-group-takes-the-first",
        title: "replicated queries are those of the first group on every rank",
        class: FaultClass::CollectiveOrder,
        bugs: &["vllm#32705"],
        killed_by: &["decode.query", "verify.query", "decode.output"],
        apply: |p| p.query.first_group_head = |_, _, _| 0,
    },
    Fault {
        name: "own-heads-of-the-next-rank",
        title: "every rank but the last projects the heads of the rank behind it",
        class: FaultClass::HeadLayout,
        bugs: &["vllm-ascend#4687"],
        killed_by: &["decode.query", "verify.query", "decode.output"],
        apply: |p| {
            p.query.first_own_head =
                |rank, member, own| if member == 0 { (rank + 1) * own } else { rank * own }
        },
    },
    Fault {
        name: "heads-dealt-in-turn",
        title: "gathered heads are laid out in turn over ranks instead of rank by rank",
        class: FaultClass::HeadLayout,
        bugs: &["vllm-ascend#4687", "sglang#20360"],
        killed_by: &["decode.query", "verify.query", "decode.output", "equal.query-replication"],
        apply: |p| p.query.gather = dealt_in_turn,
    },
    Fault {
        name: "up-projection-transposed",
        title: "the up-projection of each head is read with its axes swapped",
        class: FaultClass::HeadLayout,
        bugs: &["vllm-ascend#3850"],
        killed_by: &["decode.output", "verify.output"],
        apply: |p| p.query.read_projection = transposed,
    },
    Fault {
        name: "heads-folded-in-turn",
        title: "heads are folded into two halves in turn, and the halves are laid one behind the other",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#46952"],
        killed_by: &["decode.partial-lse", "decode.partial-output", "decode.output", "verify.output"],
        apply: |p| p.kernel.pad_heads = fold_in_turn,
    },
    Fault {
        name: "one-kv-head-for-all",
        title: "every query head reads the first KV head",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#46952"],
        killed_by: &["decode.partial-output", "decode.output", "verify.output"],
        apply: |p| p.kernel.kv_head = |_, _, _| 0,
    },
    Fault {
        name: "heads-rotated-after-the-merge",
        title: "every merged head comes out in the place of the next one",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#26509", "vllm#46952"],
        killed_by: &["decode.output", "verify.output", "merge.output", "merge.tags"],
        apply: |p| p.merge.head_place = |head, heads| (head + 1) % heads,
    },
    Fault {
        name: "exchange-in-reverse",
        title: "the all-to-all sends every member the heads of its mirror image in the group",
        class: FaultClass::CollectiveOrder,
        bugs: &["vllm#32705"],
        killed_by: &["decode.output", "merge.output", "merge.tags"],
        apply: |p| p.merge.sent_block = |member, world| world - 1 - member,
    },
    Fault {
        name: "exchange-sends-the-first-block",
        title: "the all-to-all sends every member the heads of the first, as a broadcast would",
        class: FaultClass::CollectiveOrder,
        bugs: &["vllm#32705"],
        killed_by: &["decode.output", "merge.output", "merge.tags"],
        apply: |p| p.merge.sent_block = |_, _| 0,
    },
    Fault {
        name: "reduce-scatter-by-the-previous-rank",
        title: "the reduce-scatter gives every rank the heads of the rank before it",
        class: FaultClass::CollectiveOrder,
        bugs: &["sglang#20360"],
        killed_by: &["decode.output", "merge.output", "merge.tags", "equal.backend"],
        apply: |p| p.merge.scattered_block = |member, world| (member + world - 1) % world,
    },
    Fault {
        name: "reduce-scatter-keeps-its-own",
        title: "the reduction is skipped: every rank keeps its own part of the sum",
        class: FaultClass::CollectiveOrder,
        bugs: &["sglang#20360", "vllm-ascend#10557"],
        killed_by: &["decode.output", "verify.output", "merge.output", "equal.backend"],
        apply: |p| p.merge.reduce_order = |member, _| vec![member],
    },
    Fault {
        name: "reduce-scatter-scaled-by-the-world",
        title: "the sum of a reduce-scatter is multiplied by the world size, as by a second all-reduce",
        class: FaultClass::CollectiveOrder,
        bugs: &["ATOM#1764"],
        killed_by: &["decode.output", "verify.output", "merge.output", "equal.backend"],
        apply: |p| p.merge.reduced = |world| world as f32,
    },
    Fault {
        name: "lse-of-the-next-row",
        title: "each output travels with the LSE of the row behind it",
        class: FaultClass::CollectiveOrder,
        bugs: &["ATOM#1208", "TransformerEngine#1624"],
        killed_by: &["decode.output", "decode.lse", "merge.output", "merge.lse"],
        apply: |p| p.merge.lse_of = |index, rows, heads| (index + heads) % (rows * heads),
    },
    Fault {
        name: "lse-read-head-major",
        title: "LSEs that lie row by row are read head by head",
        class: FaultClass::LseMath,
        bugs: &["TransformerEngine#1624", "vllm#26509"],
        killed_by: &["verify.output", "verify.lse", "merge.output", "merge.lse"],
        apply: |p| p.merge.lse_of = |index, rows, heads| index % heads * rows + index / heads,
    },
    Fault {
        name: "output-all-zero",
        title: "every weight of the merge is zero, so that all outputs are, on every backend alike",
        class: FaultClass::LseMath,
        bugs: &["TransformerEngine#3536"],
        killed_by: &["decode.output", "verify.output", "merge.output"],
        apply: |p| {
            p.merge.combine = |lses, weights| {
                let merged = merge::combine(lses, weights);
                weights.fill(0.0);
                merged
            }
        },
    },
    Fault {
        name: "plan-divides-by-whole-blocks",
        title: "the chunk plan divides by a context's whole virtual blocks, of which a short one has none",
        class: FaultClass::EmptyShard,
        bugs: &["b12x#406", "TensorRT-LLM#15383"],
        killed_by: &["context.output", "context.chunks"],
        apply: |p| {
            p.context.plan = |cached, budget, grid| {
                let budget_a_block = |len: &usize| budget / (len / (grid.block * grid.world));
                let smallest = cached.iter().map(budget_a_block).min().unwrap_or(budget);
                crate::chunks::plan(cached, budget.max(smallest), grid)
            }
        },
    },
];

/// The gathered heads `[T, W·H, dim]` with the members as the fastest axis.
fn dealt_in_turn(
    link: &crate::communicator::Link<'_>,
    own: Vec<u16>,
    shape: crate::query::HeadShape,
) -> Result<Vec<u16>, crate::communicator::Stop> {
    let gathered = (crate::query::QueryPolicies::HEALTHY.gather)(link, own, shape)?;
    let (world, dim) = (link.world, shape.dim);
    let place = |head: usize| head % world * shape.own + head / world;
    Ok(gathered
        .chunks_exact(world * shape.own * dim)
        .flat_map(|row| (0..world * shape.own).flat_map(move |head| row[place(head) * dim..][..dim].to_vec()))
        .collect())
}

/// Each head's `[from, to]` read as if it lay `[to, from]`.
fn transposed(tensor: &Tensor) -> Vec<f32> {
    let values = tensor.to_f32();
    let &[_, from, to] = tensor.shape() else { return values };
    values
        .chunks_exact(from * to)
        .flat_map(|head| (0..from * to).map(move |index| head[index % to * from + index / to]))
        .collect()
}

/// Even heads first, then odd ones, then zeros up to the width.
fn fold_in_turn(row: &[f32], dim: usize, width: usize) -> Vec<f32> {
    let heads = row.len() / dim;
    let order = (0..heads).step_by(2).chain((1..heads).step_by(2));
    let mut folded: Vec<f32> = order.flat_map(|head| row[head * dim..][..dim].to_vec()).collect();
    folded.resize(width * dim, 0.0);
    folded
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::faulty::with;
    use super::*;
    use crate::communicator::{Ranks, run_ranks};
    use crate::grid::Grid;
    use crate::query::{HeadShape, select_heads};

    #[test]
    fn heads_of_another_group_or_rank_are_taken() {
        let group = with("every-group-takes-the-first").query.first_group_head;
        assert_eq!([0, 1, 2].map(|index| group(index, 2, 3)), [0; 3]);
        let own = with("own-heads-of-the-next-rank").query.first_own_head;
        assert_eq!([(0, 0), (1, 1), (2, 0), (3, 1)].map(|(rank, member)| own(rank, member, 3)), [3, 3, 9, 9]);
        assert_eq!([0, 1, 5].map(|head| (with("one-kv-head-for-all").kernel.kv_head)(head, 6, 3)), [0; 3]);
    }

    #[test]
    fn gathered_heads_are_dealt_in_turn_over_the_ranks() {
        // two groups of three ranks, two heads each, of width two
        let shape = HeadShape { rows: 2, own: 2, total: 12, dim: 2 };
        let query: Vec<u16> = (0..2 * 12 * 2).collect();
        let ranks = Ranks { count: 6, world: 3, timeout: Duration::from_secs(5) };
        let gather = with("heads-dealt-in-turn").query.gather;
        let gathered =
            run_ranks(ranks, |link| gather(link, select_heads(&query, shape, link.rank * 2, 2), shape))
                .unwrap();
        for (rank, seen) in gathered.results.iter().enumerate() {
            let first = rank / 3 * 6;
            // the first heads of all ranks, then the second ones
            let expected: Vec<u16> = (0..2)
                .flat_map(|row| [0, 2, 4, 1, 3, 5].map(|head| (row * 12 + first + head) * 2))
                .flat_map(|at| [at as u16, at as u16 + 1])
                .collect();
            assert_eq!(*seen, expected, "rank {rank}");
        }
    }

    #[test]
    fn heads_are_folded_in_turn_and_filled_up_with_zeros() {
        let folded = fold_in_turn(&[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5], 2, 6);
        assert_eq!(folded, [0.0, 0.5, 2.0, 2.5, 4.0, 4.5, 1.0, 1.5, 3.0, 3.5, 0.0, 0.0]);
    }

    #[test]
    fn blocks_of_heads_go_to_the_member_that_the_title_names() {
        let blocks = |of: fn(usize, usize) -> usize| [0, 1, 2].map(|member| of(member, 3));
        assert_eq!(blocks(with("heads-rotated-after-the-merge").merge.head_place), [1, 2, 0]);
        assert_eq!(blocks(with("exchange-in-reverse").merge.sent_block), [2, 1, 0]);
        assert_eq!(blocks(with("exchange-sends-the-first-block").merge.sent_block), [0, 0, 0]);
        assert_eq!(blocks(with("reduce-scatter-by-the-previous-rank").merge.scattered_block), [2, 0, 1]);
        assert_eq!((with("reduce-scatter-keeps-its-own").merge.reduce_order)(2, 3), [2]);
        assert_eq!((with("reduce-scatter-scaled-by-the-world").merge.reduced)(3), 3.0);
    }

    #[test]
    fn an_output_travels_with_the_lse_that_the_title_names() {
        // three rows of two heads
        let of = |name: &str| -> Vec<usize> { (0..6).map(|i| (with(name).merge.lse_of)(i, 3, 2)).collect() };
        assert_eq!(of("lse-of-the-next-row"), [2, 3, 4, 5, 0, 1]);
        assert_eq!(of("lse-read-head-major"), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn every_weight_is_zero_and_the_lse_as_it_was() {
        let (mut weights, mut healthy) = ([f32::NAN; 2], [0.0; 2]);
        let lse = (with("output-all-zero").merge.combine)(&[0.5, 2.0], &mut weights);
        assert_eq!((lse, weights), (merge::combine(&[0.5, 2.0], &mut healthy), [0.0; 2]));
    }

    #[test]
    fn a_plan_that_divides_by_whole_blocks_has_none_for_a_short_context() {
        let plan = with("plan-divides-by-whole-blocks").context.plan;
        let grid = Grid { world: 3, interleave: 1, block: 4 };
        // 30 tokens are two whole virtual blocks, 13 are one: the smaller share of the budget is that of the longer
        assert_eq!(plan(&[30, 13], 24, &grid), crate::chunks::plan(&[30, 13], 24, &grid));
        let short =
            std::panic::catch_unwind(|| plan(&[30, 11], 24, &Grid { world: 3, interleave: 1, block: 4 }));
        assert!(short.is_err(), "eleven tokens are no whole virtual block");
    }

    #[test]
    fn a_transposed_head_is_read_column_by_column() {
        let tensor =
            Tensor::from_f32(shardcheck_formats::Dtype::F32, &[1, 2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(transposed(&tensor), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        let two = Tensor::from_f32(
            shardcheck_formats::Dtype::F32,
            &[2, 2, 3],
            &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0],
        );
        assert_eq!(transposed(&two)[6..], [10.0, 12.0, 14.0, 11.0, 13.0, 15.0]);
    }
}
