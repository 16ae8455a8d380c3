//! Faults of what the harness hands over: tables, lengths, rows, heads, scales, formats, LSEs.

use shardcheck_engine::{Configuration, Operation, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::tensors::{counted, exchanged, mapped, reinterpreted, rolled};
use super::{BoundaryFault, Tamper, given};

/// Properties of attention that see a wrong input first.
const OUTPUTS: &[&str] = &["decode.output", "verify.output", "draft.output", "context.output"];
const LENGTHS: &[&str] = &[
    "layout.local-lengths",
    "decode.row-lengths",
    "verify.row-lengths",
    "context.chunks",
    "decode.output",
    "context.output",
];
const TABLES: &[&str] =
    &["layout.slots", "decode.output", "verify.output", "context.gather", "context.output"];
const WRITES: &[&str] = &["write.round-trip", "write.single-writer", "write.untouched"];

pub(super) const FAULTS: &[BoundaryFault] = &[
    BoundaryFault {
        name: "block-table-of-another-request",
        title: "a step that reads is given the block tables of the first two requests exchanged",
        touches: "block_table",
        killed_by: TABLES,
        tamper: Tamper::Inputs(|place, inputs| {
            reading(place, inputs, "block_table", |table| exchanged(table, 0, 0, 1));
        }),
    },
    BoundaryFault {
        name: "block-table-entries-exchanged",
        title: "a step that reads is given each request's first two blocks in the other order",
        touches: "block_table",
        killed_by: TABLES,
        tamper: Tamper::Inputs(|place, inputs| {
            reading(place, inputs, "block_table", |table| exchanged(table, 1, 0, 1));
        }),
    },
    BoundaryFault {
        name: "block-table-entry-repeated",
        title: "a step that reads is given each request's first block in the place of its second",
        touches: "block_table",
        killed_by: TABLES,
        tamper: Tamper::Inputs(|place, inputs| {
            reading(place, inputs, "block_table", |table| {
                let width = table.shape().last().copied().unwrap_or(1).max(1);
                counted(table, |at, all| if at % width == 1 { all[at - 1] } else { all[at] })
            });
        }),
    },
    BoundaryFault {
        name: "block-table-of-the-write-shifted",
        title: "a write is given every block id one too high",
        touches: "block_table",
        killed_by: WRITES,
        tamper: Tamper::Inputs(|place, inputs| {
            if *place.operation == Operation::WriteKv {
                let blocks = place.configuration.blocks as i64;
                let next = |id: i64| if (0..blocks).contains(&id) { (id + 1) % blocks } else { id };
                given(inputs, "block_table", |table| counted(table, |at, all| next(all[at])));
            }
        }),
    },
    BoundaryFault {
        name: "length-one-more",
        title: "every request is said to be one token longer than it is",
        touches: "seq_lens, context_lens",
        killed_by: LENGTHS,
        tamper: Tamper::Inputs(|_, inputs| lengths(inputs, |at, all| all[at] + 1)),
    },
    BoundaryFault {
        name: "length-one-less",
        title: "every request is said to be one token shorter than it is",
        touches: "seq_lens, context_lens",
        killed_by: LENGTHS,
        tamper: Tamper::Inputs(|_, inputs| lengths(inputs, |at, all| (all[at] - 1).max(0))),
    },
    BoundaryFault {
        name: "lengths-exchanged",
        title: "lengths are handed over one request late",
        touches: "seq_lens, context_lens",
        killed_by: LENGTHS,
        tamper: Tamper::Inputs(|_, inputs| {
            lengths(inputs, |at, all| all[(at + all.len() - 1) % all.len()]);
        }),
    },
    BoundaryFault {
        name: "row-starts-shifted",
        title: "the first row of every request but the first is handed over one row late",
        touches: "query_start_loc",
        killed_by: &["verify.row-lengths", "decode.row-lengths", "verify.output", "decode.output"],
        tamper: Tamper::Inputs(|_, inputs| {
            given(inputs, "query_start_loc", |starts| {
                counted(starts, |at, all| {
                    let last = all.last().copied().unwrap_or(0);
                    if at == 0 { all[at] } else { (all[at] + 1).min(last) }
                })
            });
        }),
    },
    BoundaryFault {
        name: "query-rows-exchanged",
        title: "the first two query rows are handed over in the other order",
        touches: "query",
        killed_by: &["decode.query", "verify.query", "decode.output", "verify.output", "context.output"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "query", |query| exchanged(query, 0, 0, 1))),
    },
    BoundaryFault {
        name: "query-heads-exchanged",
        title: "the first two query heads are handed over in the other order",
        touches: "query",
        killed_by: &["decode.query", "verify.query", "decode.output", "verify.output", "context.output"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "query", |query| exchanged(query, 1, 0, 1))),
    },
    BoundaryFault {
        name: "query-of-another-dtype",
        title: "queries are handed over as fp16 codes under the name of bf16",
        touches: "query",
        killed_by: &["decode.query", "verify.query", "decode.output", "verify.output", "context.output"],
        tamper: Tamper::Inputs(|_, inputs| {
            given(inputs, "query", |query| reinterpreted(query, Dtype::F16));
        }),
    },
    BoundaryFault {
        name: "up-projection-heads-exchanged",
        title: "the up-projections of the first two heads are handed over in the other order",
        touches: "w_uv",
        killed_by: OUTPUTS,
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "w_uv", |weights| exchanged(weights, 0, 0, 1))),
    },
    BoundaryFault {
        name: "written-rows-exchanged",
        title: "the keys of the first two written tokens are handed over in the other order",
        touches: "key",
        killed_by: WRITES,
        tamper: Tamper::Inputs(|place, inputs| {
            if *place.operation == Operation::WriteKv {
                given(inputs, "key", |key| exchanged(key, 0, 0, 1));
            }
        }),
    },
    BoundaryFault {
        name: "written-positions-shifted",
        title: "every written token is handed over with the position behind its own",
        touches: "positions",
        killed_by: WRITES,
        tamper: Tamper::Inputs(|_, inputs| {
            given(inputs, "positions", |positions| counted(positions, |at, all| all[at] + 1));
        }),
    },
    BoundaryFault {
        name: "slot-mapping-shifted",
        title: "the slot mapping is handed over one slot late",
        touches: "slots",
        killed_by: WRITES,
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "slots", |slots| rolled(slots, 0))),
    },
    BoundaryFault {
        name: "given-caches-of-ranks-exchanged",
        title: "given caches are handed over one rank late",
        touches: "key_cache",
        killed_by: &["attend.given-cache"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "key_cache", |cache| rolled(cache, 0))),
    },
    BoundaryFault {
        name: "cache-scale-doubled",
        title: "the session is opened with twice the cache scale",
        touches: "kv_scale",
        killed_by: &["write.round-trip", "attend.given-cache"],
        tamper: Tamper::Configuration(|configuration| {
            // a 16-bit cache has no scale
            if configuration.kv_dtype.size_bytes() == 1 {
                configuration.kv_scale *= 2.0;
            }
        }),
    },
    BoundaryFault {
        name: "cache-of-another-dtype",
        title: "the session is opened with another fp8 format",
        touches: "kv_dtype",
        killed_by: &["write.round-trip", "attend.given-cache"],
        tamper: Tamper::Configuration(|configuration| {
            configuration.kv_dtype = match configuration.kv_dtype {
                Dtype::E4m3fn => Dtype::E4m3fnuz,
                Dtype::E4m3fnuz => Dtype::E4m3fn,
                Dtype::E5m2 => Dtype::E4m3fn,
                other => other,
            };
        }),
    },
    BoundaryFault {
        name: "score-scale-doubled",
        title: "the session is opened with twice the score scale",
        touches: "softmax_scale",
        killed_by: &["decode.lse", "decode.partial-lse", "verify.lse", "context.lse"],
        tamper: Tamper::Configuration(|configuration| configuration.softmax_scale *= 2.0),
    },
    BoundaryFault {
        name: "interleave-of-another-size",
        title: "the session is opened with another interleave size",
        touches: "interleave",
        killed_by: &["layout.partition", "layout.slots", "write.single-writer", "write.round-trip"],
        tamper: Tamper::Configuration(other_interleave),
    },
    BoundaryFault {
        name: "given-lses-in-base-2",
        title: "the LSEs of partials and states are handed over in base 2",
        touches: "partial_lse, prefix_lse, suffix_lse",
        killed_by: &["merge.lse", "merge.output", "states.lse", "states.output"],
        tamper: Tamper::Inputs(|_, inputs| {
            for name in ["partial_lse", "prefix_lse", "suffix_lse"] {
                given(inputs, name, |lse| mapped(lse, |x| x * std::f32::consts::LOG2_E));
            }
        }),
    },
    BoundaryFault {
        name: "given-lses-of-another-row",
        title: "the LSEs of partials are handed over one row late",
        touches: "partial_lse",
        killed_by: &["merge.lse", "merge.output"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "partial_lse", |lse| rolled(lse, 1))),
    },
    BoundaryFault {
        name: "given-partials-of-ranks-exchanged",
        title: "the partial outputs of the first two ranks are exchanged and their LSEs are not",
        touches: "partial_out",
        killed_by: &["merge.output", "merge.tags"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "partial_out", |out| exchanged(out, 0, 0, 1))),
    },
    BoundaryFault {
        name: "state-lses-exchanged",
        title: "the LSEs of prefix and suffix are exchanged and their outputs are not",
        touches: "prefix_lse, suffix_lse",
        killed_by: &["states.output"],
        tamper: Tamper::Inputs(|_, inputs| {
            if let (Some(prefix), Some(suffix)) = (inputs.remove("prefix_lse"), inputs.remove("suffix_lse")) {
                inputs.insert("prefix_lse", suffix);
                inputs.insert("suffix_lse", prefix);
            }
        }),
    },
    BoundaryFault {
        name: "segment-maxima-in-natural-base",
        title: "the base-2 maxima of kernel segments are handed over as natural ones",
        touches: "segment_max",
        killed_by: &["segments.output", "segments.lse"],
        tamper: Tamper::Inputs(|_, inputs| {
            given(inputs, "segment_max", |maxima| mapped(maxima, |x| x * std::f32::consts::LN_2));
        }),
    },
];

fn other_interleave(configuration: &mut Configuration) {
    configuration.interleave = match configuration.interleave {
        1 if configuration.block_size.is_multiple_of(2) => 2,
        _ => 1,
    };
}

/// Changes a tensor of a step that reads the caches: what a write placed elsewhere, a read finds there.
fn reading(place: &super::Place, inputs: &mut Tensors, name: &str, with: impl FnOnce(&Tensor) -> Tensor) {
    if *place.operation != Operation::WriteKv {
        given(inputs, name, with);
    }
}

fn lengths(inputs: &mut Tensors, with: fn(usize, &[i64]) -> i64) {
    for name in ["seq_lens", "context_lens"] {
        given(inputs, name, |lens| counted(lens, with));
    }
}
