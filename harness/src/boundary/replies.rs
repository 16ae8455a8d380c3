//! Faults of what an engine's answer goes through on its way back: ranks, rows and heads exchanged, values of another
//! unit or format, answers that are missing or old.

use shardcheck_engine::{EffectivePath, Operation, Reply, Tensor};
use shardcheck_formats::Dtype;

use super::tensors::{counted, exchanged, mapped, rolled};
use super::{BoundaryFault, Tamper, returned};

const OUTPUTS: &[&str] = &[
    "decode.output",
    "verify.output",
    "draft.output",
    "context.output",
    "merge.output",
    "states.output",
    "segments.output",
];
const LSES: &[&str] = &[
    "decode.lse",
    "verify.lse",
    "draft.lse",
    "context.lse",
    "merge.lse",
    "states.lse",
    "segments.lse",
    "lse.unit",
];

pub(super) const FAULTS: &[BoundaryFault] = &[
    BoundaryFault {
        name: "outputs-of-ranks-exchanged",
        title: "the outputs of the first two ranks come back exchanged",
        touches: "out",
        killed_by: OUTPUTS,
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| exchanged(out, 0, 0, 1))),
    },
    BoundaryFault {
        name: "output-rows-exchanged",
        title: "the first two rows of every rank's output come back exchanged",
        touches: "out",
        killed_by: OUTPUTS,
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| exchanged(out, 1, 0, 1))),
    },
    BoundaryFault {
        name: "output-heads-exchanged",
        title: "the first two heads of every output come back exchanged",
        touches: "out",
        killed_by: OUTPUTS,
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| exchanged(out, 2, 0, 1))),
    },
    BoundaryFault {
        name: "output-of-another-dtype",
        title: "outputs come back as fp16",
        touches: "out",
        killed_by: OUTPUTS,
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "out", |out| Tensor::from_f32(Dtype::F16, out.shape(), &out.to_f32()));
        }),
    },
    BoundaryFault {
        name: "output-all-zero",
        title: "outputs come back as zeros",
        touches: "out",
        killed_by: OUTPUTS,
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "out", |out| Tensor::from_codes(out.dtype(), out.shape(), &vec![0; out.len()]));
        }),
    },
    BoundaryFault {
        name: "output-missing",
        title: "the output is missing from the answer",
        touches: "out",
        killed_by: OUTPUTS,
        tamper: Tamper::Reply(|_, reply, _| drop(reply.outputs.remove("out"))),
    },
    BoundaryFault {
        name: "reply-dropped",
        title: "every answer comes back empty",
        touches: "all tensors of an answer",
        killed_by: OUTPUTS,
        tamper: Tamper::Reply(|_, reply, _| *reply = Reply::default()),
    },
    BoundaryFault {
        name: "reply-of-the-step-before",
        title: "an attention step is answered with what the attention step before it was",
        touches: "all tensors of an answer",
        killed_by: &["sequence.output", "sequence.metadata"],
        tamper: Tamper::Reply(|place, reply, before| {
            let attends =
                matches!(place.operation, Operation::Attend { .. } | Operation::AttendContext { .. });
            if let Some(before) = before.filter(|_| attends) {
                *reply = before.clone();
            }
        }),
    },
    BoundaryFault {
        name: "lse-in-base-2",
        title: "merged LSEs come back in base 2",
        touches: "lse",
        killed_by: LSES,
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "lse", |lse| mapped(lse, |x| x * std::f32::consts::LOG2_E));
        }),
    },
    BoundaryFault {
        name: "lse-rows-shifted",
        title: "merged LSEs come back one row late",
        touches: "lse",
        killed_by: LSES,
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "lse", |lse| rolled(lse, 1))),
    },
    BoundaryFault {
        name: "empty-lse-as-zero",
        title: "an LSE of −∞ comes back as zero",
        touches: "lse",
        killed_by: &["attend.padding", "decode.lse", "verify.lse", "merge.lse", "states.lse"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "lse", |lse| mapped(lse, |x| if x == f32::NEG_INFINITY { 0.0 } else { x }));
        }),
    },
    BoundaryFault {
        name: "partial-lse-of-ranks-exchanged",
        title: "the LSEs of partials come back one rank late",
        touches: "partial_lse",
        killed_by: &["decode.partial-lse", "verify.partial-lse", "draft.partial-lse"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "partial_lse", |lse| rolled(lse, 0))),
    },
    BoundaryFault {
        name: "row-lengths-one-more",
        title: "every row is reported to have seen one token more",
        touches: "row_lens",
        killed_by: &["decode.row-lengths", "verify.row-lengths", "layout.row-lengths"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "row_lens", |lens| counted(lens, |at, all| all[at] + 1));
        }),
    },
    BoundaryFault {
        name: "gathered-heads-shifted",
        title: "the gathered query comes back one head late",
        touches: "gathered_query",
        killed_by: &["decode.query", "verify.query"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "gathered_query", |query| rolled(query, 2))),
    },
    BoundaryFault {
        name: "slots-shifted",
        title: "derived slots come back one token late",
        touches: "slots",
        killed_by: &["layout.slots", "layout.slot-bijection", "write.single-writer"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "slots", |slots| rolled(slots, 1))),
    },
    BoundaryFault {
        name: "local-lengths-of-ranks-exchanged",
        title: "local lengths come back one rank late",
        touches: "local_lens",
        killed_by: &["layout.local-lengths"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "local_lens", |lens| rolled(lens, 0))),
    },
    BoundaryFault {
        name: "caches-of-ranks-exchanged",
        title: "caches come back one rank late",
        touches: "key_cache",
        killed_by: &["write.round-trip"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "key_cache", |cache| rolled(cache, 0))),
    },
    BoundaryFault {
        name: "gathered-context-shifted",
        title: "the gathered context comes back one token late",
        touches: "gathered_key",
        killed_by: &["context.gather"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "gathered_key", |keys| rolled(keys, 1))),
    },
    BoundaryFault {
        name: "collectives-of-one-rank-more",
        title: "the last rank is reported to have entered one collective more",
        touches: "collectives",
        killed_by: &["attend.collectives"],
        tamper: Tamper::Reply(|_, reply, _| {
            if let Some(last) = reply.collectives.last_mut() {
                *last += 1;
            }
        }),
    },
    BoundaryFault {
        name: "effective-path-of-another-route",
        title: "another route is reported to have taken effect",
        touches: "effective path",
        killed_by: &["dispatch.path"],
        tamper: Tamper::Reply(|_, reply, _| {
            if reply.effective.get("route").is_some() {
                reply.effective =
                    std::mem::replace(&mut reply.effective, EffectivePath::new()).with("route", "elsewhere");
            }
        }),
    },
    BoundaryFault {
        name: "lanes-exchanged",
        title: "the two lanes of packed LSEs come back in the other order",
        touches: "lanes",
        killed_by: &["pack.lanes"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "lanes", |lanes| exchanged(lanes, 2, 0, 1))),
    },
];
