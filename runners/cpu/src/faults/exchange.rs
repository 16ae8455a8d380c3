//! Faults of the exchange: the wrong data, in the wrong order, or not by all ranks.

use std::sync::atomic::{AtomicUsize, Ordering};

use shardcheck_engine::Tensor;

use super::{Fault, FaultClass};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "exchange-swaps-two-ranks",
        title: "the all-to-all sends the heads of the first two ranks to each other",
        class: FaultClass::CollectiveOrder,
        bugs: &["vllm#32705"],
        killed_by: &[
            "identity.rows",
            "decode.output",
            "verify.output",
            "merge.output",
            "merge.tags",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| {
            p.merge.sent_block = |member, world| match member {
                0 if world > 1 => 1,
                1 => 0,
                other => other,
            }
        },
    },
    Fault {
        name: "reduce-scatter-by-the-next-rank",
        title: "the reduce-scatter gives every rank the heads of the rank behind it",
        class: FaultClass::CollectiveOrder,
        bugs: &["sglang#20360"],
        killed_by: &[
            "identity.rows",
            "decode.output",
            "verify.output",
            "merge.output",
            "merge.tags",
            "equal.backend",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| p.merge.scattered_block = |member, world| (member + 1) % world,
    },
    Fault {
        name: "reduce-scatter-averages",
        title: "the reduce-scatter averages over ranks instead of adding",
        class: FaultClass::CollectiveOrder,
        bugs: &["ATOM#1764"],
        killed_by: &[
            "decode.output",
            "verify.output",
            "merge.output",
            "equal.backend",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.reduced = |world| 1.0 / world as f32,
    },
    Fault {
        name: "reduce-scatter-in-changing-order",
        title: "the reduce-scatter adds ranks in an order that changes from call to call",
        class: FaultClass::CollectiveOrder,
        bugs: &["ROCm/TransformerEngine#708", "TransformerEngine#3331"],
        killed_by: &["equal.repeat", "equal.placement"],
        apply: |p| p.merge.reduce_order = changing_order,
    },
    Fault {
        name: "reduce-scatter-leaves-out-a-rank",
        title: "the reduce-scatter never adds the last rank",
        class: FaultClass::CollectiveOrder,
        bugs: &["sglang#20360"],
        killed_by: &[
            "decode.output",
            "verify.output",
            "merge.output",
            "equal.backend",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.reduce_order = |_, world| (0..world.max(2) - 1).collect(),
    },
    Fault {
        name: "lse-gathered-in-reverse",
        title: "gathered LSEs are read from the last rank to the first, so that each rank takes another's weight",
        class: FaultClass::CollectiveOrder,
        bugs: &["TransformerEngine#1624"],
        killed_by: &[
            "decode.output",
            "verify.output",
            "merge.output",
            "equal.backend",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.merge.lse_order = |world| (0..world).rev().collect(),
    },
    Fault {
        name: "one-rank-skips-the-lse-gather",
        title: "the last rank of a group goes on to the reduce-scatter without the gather of LSEs",
        class: FaultClass::Hang,
        bugs: &["vllm-ascend#12036", "TensorRT-LLM#10312"],
        killed_by: &["attend.collectives", "decode.output", "merge.output", "equal.backend"],
        apply: |p| p.merge.enters_lse_gather = |member, world| member + 1 != world,
    },
    Fault {
        name: "strided-state-read-as-contiguous",
        title: "given states are read as if they lay row-major, whatever their strides",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#26509"],
        killed_by: &["merge.views", "merge.output", "states.output"],
        apply: |p| p.merge.read = ignore_strides,
    },
    Fault {
        name: "gathered-context-token-major",
        title: "the gathered context is read with the rank as its fastest axis",
        class: FaultClass::CollectiveOrder,
        bugs: &["sglang#32098"],
        killed_by: &["context.gather", "context.output", "context.state"],
        apply: |p| p.context.source = |at| (at.before + at.row) * at.world + at.member,
    },
    Fault {
        name: "rank-without-context-skips-the-gather",
        title: "a rank that holds no token of a chunk does not enter its gather",
        class: FaultClass::Hang,
        bugs: &["vllm-ascend#5837", "TensorRT-LLM#15383"],
        killed_by: &["context.output", "context.gather", "context.lse"],
        apply: |p| p.context.enters_gather = |held| held > 0,
    },
];

/// Ascending and descending in turn.
fn changing_order(member: usize, world: usize) -> Vec<usize> {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let ascending = (0..world).collect();
    // one rank alone counts, so that the order of threads decides nothing
    if member == 0 && CALLS.fetch_add(1, Ordering::Relaxed) % 2 == 1 {
        return (0..world).rev().collect();
    }
    ascending
}

fn ignore_strides(tensor: &Tensor) -> Vec<f32> {
    let needed = tensor.len() * tensor.dtype().size_bytes();
    let flat = Tensor::new(tensor.dtype(), tensor.shape().to_vec(), tensor.bytes()[..needed].to_vec());
    flat.map_or_else(|_| tensor.to_f32(), |flat| flat.to_f32())
}

#[cfg(test)]
mod tests {
    use shardcheck_formats::Dtype;

    use super::super::faulty::with;
    use super::*;
    use crate::chunks::GatheredRow;

    #[test]
    fn blocks_go_to_the_member_that_the_title_names() {
        let sent = |name: &str, world: usize| -> Vec<usize> {
            (0..world).map(|member| (with(name).merge.sent_block)(member, world)).collect()
        };
        assert_eq!(sent("exchange-swaps-two-ranks", 1), [0], "nobody to swap with");
        assert_eq!(sent("exchange-swaps-two-ranks", 4), [1, 0, 2, 3]);
        let scattered = with("reduce-scatter-by-the-next-rank").merge.scattered_block;
        assert_eq!([0, 1, 2].map(|member| scattered(member, 3)), [1, 2, 0]);
    }

    #[test]
    fn the_reduction_counts_the_ranks_that_the_title_names() {
        assert_eq!((with("reduce-scatter-averages").merge.reduced)(4), 0.25);
        let order = with("reduce-scatter-leaves-out-a-rank").merge.reduce_order;
        assert_eq!([1, 2, 4].map(|world| order(0, world)), [vec![0], vec![0], vec![0, 1, 2]]);
        assert_eq!((with("lse-gathered-in-reverse").merge.lse_order)(3), [2, 1, 0]);
        let enters = with("one-rank-skips-the-lse-gather").merge.enters_lse_gather;
        assert_eq!([0, 1, 2].map(|member| enters(member, 3)), [true, true, false]);
    }

    #[test]
    fn the_first_rank_alone_changes_its_order_from_call_to_call() {
        let order = with("reduce-scatter-in-changing-order").merge.reduce_order;
        let mut calls: Vec<Vec<usize>> = (0..4).map(|_| order(0, 3)).collect();
        assert_eq!(calls[0], calls[2], "every second call is alike");
        assert_eq!(calls[1], calls[3]);
        calls.sort();
        assert_eq!(calls, [[0, 1, 2], [0, 1, 2], [2, 1, 0], [2, 1, 0]]);
        assert!((0..4).all(|_| order(1, 3) == [0, 1, 2]));
    }

    #[test]
    fn a_gathered_context_is_read_with_the_rank_as_its_fastest_axis() {
        let at = GatheredRow { member: 2, before: 4, row: 3, sent: 10, world: 3 };
        assert_eq!((with("gathered-context-token-major").context.source)(&at), 23);
        let enters = with("rank-without-context-skips-the-gather").context.enters_gather;
        assert_eq!([0, 1, 9].map(enters), [false, true, true]);
    }

    #[test]
    fn strides_are_ignored() {
        let bytes = Tensor::from_f32(Dtype::F32, &[6], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).bytes().to_vec();
        let swapped = Tensor::view(Dtype::F32, vec![3, 2], vec![1, 3], bytes).unwrap();
        assert_eq!(swapped.to_f32(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(ignore_strides(&swapped), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    }
}
