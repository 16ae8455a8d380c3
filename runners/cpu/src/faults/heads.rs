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
    use super::*;

    #[test]
    fn repeated_heads_stand_beside_each_other_up_to_the_width() {
        assert_eq!(repeat_each_head(&[1.0, 2.0, 3.0, 4.0], 2, 3), [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]);
    }
}
