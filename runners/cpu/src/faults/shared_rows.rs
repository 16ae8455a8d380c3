//! Faults of attention under prefill context parallelism: keys gathered in the wrong order, rows that see too much or too little, outputs
//! that come back to the wrong rows.

use shardcheck_formats::{Dtype, Overflow, decode_f32, encode_f32, round_f32};

use super::{Fault, FaultClass};
use crate::prefill::Shares;
use crate::prefill::attention::Call;

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "pcp-keys-rank-major",
        title: "gathered keys and values are used as they arrive, rank after rank, without being brought into order",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["prefill.gather", "prefill.local", "prefill.output", "prefill.lse", "prefill.world"],
        apply: |p| p.pcp.key_places = |_, shares| rank_major(shares),
    },
    Fault {
        name: "pcp-keys-with-padding",
        title: "the padding of earlier ranks is not taken out of the gathered keys, so that later ones stand behind their places",
        class: FaultClass::Padding,
        bugs: &["vllm-ascend#7012"],
        killed_by: &["prefill.gather", "prefill.padding"],
        apply: |p| p.pcp.key_places = |places, shares| behind_padding(&places, shares),
    },
    Fault {
        name: "pcp-keys-of-own-rows",
        title: "a rank takes its own keys and values for those of every rank: there is no gather",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["prefill.gather", "prefill.ranks", "prefill.output"],
        apply: |p| p.pcp.gather = |link, own| Ok(own.repeat(link.world)),
    },
    Fault {
        name: "pcp-keys-sent-in-eight-bits",
        title: "keys and values travel as e4m3fn and a rank keeps its own in bf16, so that ranks attend over different ones",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["prefill.gather", "prefill.ranks"],
        apply: |p| {
            p.pcp.gather = |link, own| {
                let cast = |value: &f32| cast_to(*value, Dtype::E4m3fn, Dtype::E4m3fn, 1.0);
                let mut all: Vec<f32> = own.iter().map(cast).collect();
                if link.world > 1 {
                    let members: Vec<usize> = (0..link.world).collect();
                    all = link.all_gather("all_gather_pcp_kv", all, &members)?;
                }
                let first = link.rank * own.len();
                all[first..first + own.len()].copy_from_slice(&own);
                Ok(all)
            }
        },
    },
    Fault {
        name: "pcp-context-interleave-ignored",
        title: "a cached context that lies over ranks in runs of S tokens is brought into order as if S were 1",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["prefill.gather"],
        apply: |p| p.pcp.context_position = |local, member, grid| local * grid.world + member,
    },
    Fault {
        name: "pcp-rows-taken-for-neighbours",
        title: "a row sees as many tokens as its place on the rank says, as if the rank had the first rows of the request",
        class: FaultClass::CausalBound,
        bugs: &["sglang#27276", "sglang#36297"],
        killed_by: &["prefill.bounds", "prefill.local", "prefill.output", "prefill.world"],
        apply: |p| {
            p.pcp.call_lens = |calls| {
                let own = |call: &Call| {
                    let first = calls.iter().find(|other| other.request == call.request).unwrap_or(call);
                    call.computed + call.local - first.local + call.rows
                };
                calls.iter().map(own).collect()
            }
        },
    },
    Fault {
        name: "pcp-prefix-left-out",
        title: "the KV length of a call counts the new rows alone: a cached prefix is left out",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["prefill.bounds", "prefill.output", "prefill.lse"],
        apply: |p| p.pcp.call_lens = |calls| calls.iter().map(|call| call.first + call.rows).collect(),
    },
    Fault {
        name: "pcp-keys-of-the-prefix-skipped",
        title: "a prompt behind a cached prefix attends to its new tokens alone",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["prefill.local", "prefill.output", "prefill.lse"],
        apply: |p| p.pcp.first_key = |call| call.computed,
    },
    Fault {
        name: "pcp-one-length-for-both-chunks",
        title: "both calls of a rank for a request have the KV length of the later one: the earlier chunk sees its future",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["prefill.bounds", "prefill.output", "prefill.future"],
        apply: |p| {
            p.pcp.call_lens = |calls| {
                let last = |call: &Call| {
                    let of_request = calls.iter().filter(|other| other.request == call.request);
                    of_request.map(Call::end).max().unwrap_or(call.end())
                };
                calls.iter().map(last).collect()
            }
        },
    },
    Fault {
        name: "pcp-mask-aligned-at-the-start",
        title: "the causal mask of a call begins at its first key instead of ending at its last: row i sees i + 1 tokens",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["prefill.bounds", "prefill.output", "prefill.world"],
        apply: |p| p.pcp.bound = |len, row, _| (row + 1).min(len),
    },
    Fault {
        name: "pcp-chunk-without-a-mask",
        title: "the rows of a chunk all see the whole KV length of their call",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["prefill.bounds", "prefill.local", "prefill.output", "prefill.future"],
        apply: |p| p.pcp.bound = |len, _, _| len,
    },
    Fault {
        name: "pcp-calls-read-the-request-before",
        title: "a call reads the keys of the request before its own: starts of keys lag by one",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["prefill.local", "prefill.output"],
        apply: |p| p.pcp.keys_of = |call| call.request.saturating_sub(1),
    },
    Fault {
        name: "pcp-decodes-on-rank-0-alone",
        title: "a decode that every rank has is attended for on rank 0 alone; elsewhere its output is never written",
        class: FaultClass::EmptyShard,
        bugs: &[],
        killed_by: &["prefill.copies", "prefill.local"],
        apply: |p| p.pcp.attends = |rank| rank == 0,
    },
    Fault {
        name: "pcp-copies-rounded-otherwise",
        title: "copies of a row on other ranks than 0 are truncated to bf16 instead of rounded",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["prefill.copies"],
        apply: |p| {
            p.pcp.stored = |rank, dtype, value| {
                if rank == 0 {
                    round_f32(dtype, value)
                } else {
                    f32::from_bits(value.to_bits() & 0xFFFF_0000)
                }
            }
        },
    },
    Fault {
        name: "pcp-outputs-rank-major",
        title: "gathered outputs are returned as they arrive, rank after rank, padding cut off behind the last row",
        class: FaultClass::CollectiveOrder,
        bugs: &["sglang#20360"],
        killed_by: &["prefill.output", "prefill.lse", "prefill.world"],
        apply: |p| p.pcp.out_places = |_, shares, _| (0..shares.rows as i64).collect(),
    },
    Fault {
        name: "pcp-outputs-with-padding",
        title: "the padding of earlier ranks is not taken out of the gathered outputs",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["prefill.output", "prefill.padding"],
        apply: |p| p.pcp.out_places = |places, shares, _| behind_padding(&places, shares),
    },
    Fault {
        name: "pcp-padding-lands-on-row-0",
        title: "outputs are scattered back with padding rows as row 0, which the last of them overwrites",
        class: FaultClass::Padding,
        bugs: &[],
        killed_by: &["prefill.output", "prefill.padding"],
        apply: |p| {
            p.pcp.out_places = |mut places, shares, _| {
                let last = shares.gathered.iter().rposition(Option::is_none);
                if let (Some(first), Some(last)) = (places.first_mut(), last) {
                    *first = last as i64;
                }
                places
            }
        },
    },
    Fault {
        name: "pcp-rank-keeps-its-own-order",
        title: "ranks other than 0 bring outputs back rotated by a row",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["prefill.ranks", "prefill.output"],
        apply: |p| {
            p.pcp.out_places = |mut places, _, rank| {
                if rank > 0 {
                    places.rotate_left(1);
                }
                places
            }
        },
    },
    Fault {
        name: "pcp-query-scale-forgotten",
        title: "queries of eight bits meet the keys without their scale",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["prefill.query", "prefill.output", "prefill.lse"],
        apply: |p| p.pcp.query = |value, dtype, scale| cast_to(value, dtype, dtype, scale) / scale,
    },
    Fault {
        name: "pcp-query-of-another-encoding",
        title: "queries are cast to e4m3fnuz and read as e4m3fn: all of them double, and some are no number",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["prefill.query", "prefill.output"],
        apply: |p| {
            p.pcp.query = |value, dtype, scale| {
                let stored = if dtype == Dtype::E4m3fn { Dtype::E4m3fnuz } else { dtype };
                cast_to(value, stored, dtype, scale)
            }
        },
    },
    Fault {
        name: "pcp-query-not-cast",
        title: "queries that are to be of eight bits stay in bf16",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["prefill.query"],
        apply: |p| p.pcp.query = |value, _, _| value,
    },
];

/// Places in the order of arrival: rank after rank, padding left out.
pub(super) fn rank_major(shares: &Shares) -> Vec<i64> {
    let filled = shares.gathered.iter().enumerate().filter(|(_, row)| row.is_some());
    let mut places: Vec<i64> = filled.map(|(place, _)| place as i64).collect();
    places.truncate(shares.rows);
    places
}

/// Places as if ranks had no padding, used on rows that have it.
pub(super) fn behind_padding(places: &[i64], shares: &Shares) -> Vec<i64> {
    let padded = shares.padded.max(1);
    let before: Vec<usize> =
        (0..shares.counts.len()).map(|rank| shares.counts[..rank].iter().sum()).collect();
    let place = |place: &i64| match usize::try_from(*place) {
        Ok(place) => (before[place / padded] + place % padded) as i64,
        Err(_) => -1,
    };
    places.iter().map(place).collect()
}

fn cast_to(value: f32, stored: Dtype, read: Dtype, scale: f32) -> f32 {
    let code = encode_f32(stored, value / scale, Overflow::Saturate);
    decode_f32(read, code) * scale
}
