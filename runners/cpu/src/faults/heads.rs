//! Faults of heads: chosen, gathered, padded, stripped or placed wrongly.

use super::{Fault, FaultClass};
use crate::communicator::{Link, Stop};
use crate::query::{HeadShape, QueryPolicies, rows_of_members};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "query-not-gathered",
        title: "a rank's kernel runs its own heads in place of those of its peers",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#29487", "vllm-ascend#4687"],
        killed_by: &[
            "decode.query",
            "verify.query",
            "selected.query",
            "decode.output",
            "equal.query-replication",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| p.query.gather = |link, own, shape| Ok(repeated(&own, link.world, shape)),
    },
    Fault {
        name: "gathered-query-not-transposed",
        title: "gathered queries are read as [T, W·H] while they lie as [W, T, H]",
        class: FaultClass::HeadLayout,
        bugs: &["vllm-ascend#4687"],
        killed_by: &[
            "decode.query",
            "verify.query",
            "verify.output",
            "equal.query-replication",
            "probe.tokens",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| {
            p.query.gather = |link, own, _| {
                let members: Vec<usize> = (0..link.world).collect();
                if link.world == 1 { Ok(own) } else { link.all_gather("all_gather_query", own, &members) }
            }
        },
    },
    Fault {
        name: "query-gathered-in-reverse",
        title: "the heads of a group are laid out from the last rank to the first",
        class: FaultClass::CollectiveOrder,
        bugs: &["vllm#29487"],
        killed_by: &[
            "decode.query",
            "verify.query",
            "decode.output",
            "equal.query-replication",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| {
            p.query.gather = |link, own, shape| {
                if link.world == 1 {
                    return Ok(own);
                }
                let members: Vec<usize> = (0..link.world).rev().collect();
                let gathered = link.all_gather("all_gather_query", own, &members)?;
                Ok(rows_of_members(&gathered, link.world, shape))
            }
        },
    },
    Fault {
        name: "one-rank-skips-the-query-gather",
        title: "the last rank of a group does not enter the gather of queries: its peers wait for ever",
        class: FaultClass::Hang,
        bugs: &["vllm-ascend#12036", "TensorRT-LLM#10312"],
        killed_by: &["attend.collectives", "decode.output", "verify.output"],
        apply: |p| p.query.gather = skip_on_the_last_rank,
    },
    Fault {
        name: "own-heads-by-place-in-group",
        title: "a rank's heads are counted within its group, so that every group takes those of the first",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#29487"],
        killed_by: &["decode.query", "verify.query", "decode.output", "probe.pairing", "probe.needle"],
        apply: |p| p.query.first_own_head = |_, member, own| member * own,
    },
    Fault {
        name: "replicated-heads-of-the-previous-rank",
        title: "the row view of a replicated query projection starts one rank's heads early",
        class: FaultClass::HeadLayout,
        bugs: &["vllm-ascend#4687"],
        killed_by: &[
            "decode.query",
            "verify.query",
            "decode.output",
            "equal.query-replication",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| {
            p.query.first_group_head = |group, world, own| {
                // nothing lies before the first group
                if group == 0 { 0 } else { (group * world - 1) * own }
            }
        },
    },
    Fault {
        name: "up-projection-of-own-heads",
        title: "project-before-merge applies the rank's own up-projection to every head of the group",
        class: FaultClass::HeadLayout,
        bugs: &["vllm-ascend#3850"],
        killed_by: &["decode.output", "verify.output", "decode.partial-output", "equal.project-before-merge"],
        apply: |p| p.query.projected_head = |first, head, own, member| first + member * own + head % own,
    },
    Fault {
        name: "head-pad-by-repeat",
        title: "heads are padded to the kernel's width by repeating each, and the first ones are kept",
        class: FaultClass::HeadLayout,
        bugs: &["aiter#4964", "ATOM#1930"],
        killed_by: &[
            "decode.partial-lse",
            "decode.partial-output",
            "decode.output",
            "verify.output",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| p.kernel.pad_heads = repeat_each_head,
    },
    Fault {
        name: "output-stripped-from-the-end",
        title: "the heads of a padded output are kept from the end",
        class: FaultClass::HeadLayout,
        bugs: &["ATOM#1968", "vllm#47779"],
        killed_by: &[
            "decode.partial-output",
            "decode.output",
            "verify.output",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| p.kernel.first_kept_head = |width, heads| width - heads,
    },
    Fault {
        name: "lse-stripped-from-the-end",
        title: "outputs are stripped of padding heads and their LSEs are kept from the other end",
        class: FaultClass::HeadLayout,
        bugs: &["aiter#3267", "ATOM#2060"],
        killed_by: &[
            "decode.partial-lse",
            "decode.lse",
            "verify.lse",
            "probe.pairing",
            "probe.needle",
            "probe.rank-lse",
        ],
        apply: |p| p.kernel.first_kept_lse = |width, heads| width - heads,
    },
    Fault {
        name: "kernel-runs-unpadded",
        title: "gathered heads are not padded to a width that the kernel knows",
        class: FaultClass::HeadLayout,
        bugs: &["vllm-ascend#14126"],
        killed_by: &["dispatch.path"],
        apply: |p| p.kernel.kernel_heads = |heads, _| heads,
    },
    Fault {
        name: "kernel-width-too-wide",
        title: "the widest kernel is taken although a narrower one fits",
        class: FaultClass::ConfigGate,
        bugs: &["ATOM#1968"],
        killed_by: &["dispatch.path"],
        apply: |p| {
            p.kernel.kernel_heads =
                |heads, widths| widths.iter().copied().filter(|w| *w >= heads).max().unwrap_or(heads)
        },
    },
    Fault {
        name: "kv-head-by-modulo",
        title: "query heads are dealt to KV heads in turn instead of in consecutive groups",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#46952"],
        killed_by: &["decode.partial-output", "decode.output", "verify.output"],
        apply: |p| p.kernel.kv_head = |head, _, kv_heads| head % kv_heads,
    },
    Fault {
        name: "heads-swapped-after-the-merge",
        title: "a rank's merged heads come out in reverse order",
        class: FaultClass::HeadLayout,
        bugs: &["vllm#26509"],
        killed_by: &[
            "identity.rows",
            "decode.output",
            "verify.output",
            "merge.output",
            "merge.tags",
            "probe.pairing",
            "probe.needle",
        ],
        apply: |p| p.merge.head_place = |head, heads| heads - 1 - head,
    },
];

/// A rank's own heads in the place of all heads of the group.
fn repeated(own: &[u16], world: usize, shape: HeadShape) -> Vec<u16> {
    own.chunks_exact(shape.own * shape.dim).flat_map(|row| row.repeat(world)).collect()
}

fn skip_on_the_last_rank(link: &Link<'_>, own: Vec<u16>, shape: HeadShape) -> Result<Vec<u16>, Stop> {
    if link.world > 1 && link.member + 1 == link.world {
        return Ok(repeated(&own, link.world, shape));
    }
    (QueryPolicies::HEALTHY.gather)(link, own, shape)
}

fn repeat_each_head(row: &[f32], dim: usize, width: usize) -> Vec<f32> {
    let heads = row.len() / dim;
    let times = width.div_ceil(heads);
    let mut padded: Vec<f32> = row.chunks_exact(dim).flat_map(|head| head.repeat(times)).collect();
    padded.truncate(width * dim);
    padded
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shardcheck_engine::EngineError;

    use super::super::faulty::with;
    use super::*;
    use crate::communicator::{Ranks, run_ranks};
    use crate::query::select_heads;

    // two rows of two groups of two ranks, of two heads each and width one: head h of row t is 10·t + h
    const SHAPE: HeadShape = HeadShape { rows: 2, own: 2, total: 8, dim: 1 };

    /// The heads that a fault gives to each of `count` ranks in groups of `world`.
    fn gathered(name: &str, count: usize, world: usize) -> Result<Vec<Vec<u16>>, EngineError> {
        let query: Vec<u16> = (0..2).flat_map(|row| (0..8).map(move |head| 10 * row + head)).collect();
        let gather = with(name).query.gather;
        let ranks = Ranks { count, world, timeout: Duration::from_millis(50) };
        let run =
            run_ranks(ranks, |link| gather(link, select_heads(&query, SHAPE, link.rank * 2, 2), SHAPE))?;
        Ok(run.results)
    }

    #[test]
    fn queries_are_gathered_as_the_titles_say() {
        let of = |name: &str, rank: usize| gathered(name, 4, 2).unwrap()[rank].clone();
        assert_eq!(of("query-not-gathered", 1), [2, 3, 2, 3, 12, 13, 12, 13]);
        assert_eq!(of("gathered-query-not-transposed", 0), [0, 1, 10, 11, 2, 3, 12, 13]);
        assert_eq!(of("query-gathered-in-reverse", 2), [6, 7, 4, 5, 16, 17, 14, 15]);
        for name in ["query-not-gathered", "gathered-query-not-transposed", "query-gathered-in-reverse"] {
            assert_eq!(
                gathered(name, 2, 1).unwrap()[1],
                [2, 3, 12, 13],
                "{name}: a world of one has its own"
            );
        }
    }

    #[test]
    fn the_last_rank_of_a_group_alone_keeps_out_of_the_gather() {
        let name = "one-rank-skips-the-query-gather";
        assert_eq!(gathered(name, 2, 1).unwrap()[1], [2, 3, 12, 13], "a world of one has nobody to wait for");
        match gathered(name, 2, 2) {
            Err(EngineError::Timeout { .. }) => {}
            other => panic!("the peers wait: {other:?}"),
        }
        // what the last rank goes on with, and which ranks go in
        let gather = with(name).query.gather;
        let ranks = Ranks { count: 2, world: 2, timeout: Duration::from_millis(50) };
        let last = std::sync::Mutex::new(None);
        let run = run_ranks(ranks, |link| {
            let seen = gather(link, vec![4, 5, 14, 15], SHAPE);
            if link.member == 1 {
                *last.lock().unwrap() = seen.as_ref().ok().cloned();
            }
            seen
        });
        assert!(run.is_err());
        assert_eq!(last.into_inner().unwrap().unwrap(), [4, 5, 4, 5, 14, 15, 14, 15]);
    }

    #[test]
    fn heads_are_counted_from_where_the_title_says() {
        let own = with("own-heads-by-place-in-group").query.first_own_head;
        assert_eq!([(0, 0), (1, 1), (2, 0), (3, 1)].map(|(rank, member)| own(rank, member, 3)), [0, 3, 0, 3]);
        let replicated = with("replicated-heads-of-the-previous-rank").query.first_group_head;
        // the second group of three ranks of four heads begins at head 12, one rank's heads early at 8
        assert_eq!([replicated(0, 3, 4), replicated(1, 3, 4), replicated(2, 3, 4)], [0, 8, 20]);
        let projected = with("up-projection-of-own-heads").query.projected_head;
        let of_the_second = [0, 1, 2, 3, 4, 5].map(|head| projected(12, head, 2, 1));
        assert_eq!(of_the_second, [14, 15, 14, 15, 14, 15]);
    }

    #[test]
    fn heads_are_padded_stripped_and_placed_as_the_titles_say() {
        assert_eq!((with("output-stripped-from-the-end").kernel.first_kept_head)(16, 12), 4);
        assert_eq!((with("lse-stripped-from-the-end").kernel.first_kept_lse)(16, 12), 4);
        assert_eq!((with("kernel-runs-unpadded").kernel.kernel_heads)(24, &[16, 32, 64]), 24);
        let widest = with("kernel-width-too-wide").kernel.kernel_heads;
        assert_eq!([24, 64, 65].map(|heads| widest(heads, &[16, 32, 64])), [64, 64, 65]);
        let kv_head = with("kv-head-by-modulo").kernel.kv_head;
        assert_eq!([0, 1, 2, 3, 4, 5].map(|head| kv_head(head, 6, 3)), [0, 1, 2, 0, 1, 2]);
        let place = with("heads-swapped-after-the-merge").merge.head_place;
        assert_eq!([0, 1, 2].map(|head| place(head, 3)), [2, 1, 0]);
    }

    #[test]
    fn repeated_heads_stand_beside_each_other_up_to_the_width() {
        assert_eq!(repeat_each_head(&[1.0, 2.0, 3.0, 4.0], 2, 3), [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]);
    }
}
