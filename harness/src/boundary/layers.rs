//! Faults of layers: experts and their routers, recurrent states, whole transformers.

use shardcheck_engine::Reply;

use super::tensors::{counted, exchanged, rolled, without_last};
use super::{BoundaryFault, Tamper, given, returned};

/// Returns a tensor as the step before it had it, where it has the same shape.
fn one_step_late(reply: &mut Reply, before: Option<&Reply>, name: &str) {
    if let Some(earlier) = before.and_then(|before| before.outputs.find(name)) {
        returned(reply, name, |own| if own.shape() == earlier.shape() { earlier } else { own }.clone());
    }
}

pub(super) const FAULTS: &[BoundaryFault] = &[
    BoundaryFault {
        name: "experts-of-the-token-before",
        title: "the experts of a token come back one token late",
        touches: "topk_ids",
        killed_by: &["route.choice"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "topk_ids", |experts| rolled(experts, 1))),
    },
    BoundaryFault {
        name: "expert-weights-exchanged",
        title: "the weights of each token's first two experts come back exchanged",
        touches: "topk_weights",
        killed_by: &["route.weights"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "topk_weights", |weights| exchanged(weights, 2, 0, 1));
        }),
    },
    BoundaryFault {
        name: "expert-outputs-of-ranks-exchanged",
        title: "outputs of a layer of experts come back one rank late",
        touches: "out",
        killed_by: &["moe.output", "moe.tags"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| rolled(out, 0))),
    },
    BoundaryFault {
        name: "expert-counts-of-ranks-exchanged",
        title: "the tokens that each rank ran through its experts are counted one rank late",
        touches: "expert_tokens",
        killed_by: &["moe.counts"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "expert_tokens", |counts| rolled(counts, 0))),
    },
    BoundaryFault {
        name: "given-experts-exchanged",
        title: "the down-projections of the first two experts are handed over exchanged",
        touches: "w_down",
        killed_by: &["moe.output", "moe.tags"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "w_down", |experts| exchanged(experts, 0, 0, 1))),
    },
    BoundaryFault {
        name: "recurrent-outputs-of-ranks-exchanged",
        title: "outputs of a recurrent layer come back one rank late",
        touches: "out",
        killed_by: &["kda.output"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| rolled(out, 0))),
    },
    BoundaryFault {
        name: "recurrent-output-without-its-last-row",
        title: "the last row of a recurrent layer comes back as zeros",
        touches: "out",
        killed_by: &["kda.output"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| without_last(out, 1))),
    },
    BoundaryFault {
        name: "states-of-the-step-before",
        title: "the states that are shown behind a step are those behind the step before it",
        touches: "state",
        killed_by: &["kda.state"],
        tamper: Tamper::Reply(|_, reply, before| one_step_late(reply, before, "state")),
    },
    BoundaryFault {
        name: "windows-of-requests-exchanged",
        title: "the windows of the first two requests come back exchanged",
        touches: "window",
        killed_by: &["kda.window"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "window", |windows| exchanged(windows, 1, 0, 1));
        }),
    },
    BoundaryFault {
        name: "recurrent-rows-exchanged",
        title: "the values of the first two rows of a recurrent layer are handed over exchanged",
        touches: "value",
        killed_by: &["kda.window", "kda.state", "kda.output"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "value", |values| exchanged(values, 0, 0, 1))),
    },
    BoundaryFault {
        name: "token-ids-shifted",
        title: "token ids are handed over one row late",
        touches: "token_ids",
        killed_by: &["stack.embedding", "stack.run"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "token_ids", |ids| rolled(ids, 0))),
    },
    BoundaryFault {
        name: "layers-exchange-their-keys",
        title: "the keys of the first two layers come back exchanged",
        touches: "key",
        killed_by: &["stack.key"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "key", |keys| exchanged(keys, 1, 0, 1))),
    },
    BoundaryFault {
        name: "stream-without-its-last-row",
        title: "the last row of the stream comes back as zeros",
        touches: "hidden",
        killed_by: &["stack.embedding", "stack.residual"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "hidden", |stream| without_last(stream, 2))),
    },
    BoundaryFault {
        name: "logits-of-tokens-exchanged",
        title: "the logits of the first two tokens of the vocabulary come back exchanged",
        touches: "logits",
        killed_by: &["stack.logits"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "logits", |logits| exchanged(logits, 2, 0, 1));
        }),
    },
    BoundaryFault {
        name: "greedy-token-one-more",
        title: "the token behind every row comes back as the one with the next id",
        touches: "tokens",
        killed_by: &["stack.tokens", "stack.run"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "tokens", |tokens| counted(tokens, |at, all| all[at] + 1));
        }),
    },
    BoundaryFault {
        name: "layer-rows-of-ranks-exchanged",
        title: "the rows that ranks of prefill context parallelism run through the layers are shown one rank late",
        touches: "rows",
        killed_by: &["stack.pcp-rows"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "rows", |rows| rolled(rows, 0))),
    },
    BoundaryFault {
        name: "padding-shown-as-a-row",
        title: "the padding of a rank of prefill context parallelism is shown as the batch's first row",
        touches: "rows",
        killed_by: &["stack.pcp-rows"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "rows", |rows| counted(rows, |at, all| all[at].max(0)));
        }),
    },
    BoundaryFault {
        name: "rows-reach-the-head-one-late",
        title: "the rows that the head gets of all ranks come one row late",
        touches: "restored",
        killed_by: &["stack.restored"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "restored", |rows| rolled(rows, 1))),
    },
    BoundaryFault {
        name: "the-last-row-does-not-reach-the-head",
        title: "the last row that the head gets of all ranks is zeros",
        touches: "restored",
        killed_by: &["stack.restored"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "restored", |rows| without_last(rows, 1))),
    },
    BoundaryFault {
        name: "gates-of-heads-exchanged",
        title: "the weights of the gates of attention's first two outputs are handed over exchanged",
        touches: "w_output_gate",
        killed_by: &["stack.gate"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "w_output_gate", |gates| exchanged(gates, 1, 0, 1))),
    },
    BoundaryFault {
        name: "gated-rows-exchanged",
        title: "what stands behind the gate of attention comes back one row late",
        touches: "gated",
        killed_by: &["stack.gate"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "gated", |rows| rolled(rows, 2))),
    },
    BoundaryFault {
        name: "layer-states-of-the-step-before",
        title: "the states that a stack shows behind a step are those behind the step before it",
        touches: "kda_state",
        killed_by: &["stack.state"],
        tamper: Tamper::Reply(|_, reply, before| one_step_late(reply, before, "kda_state")),
    },
];
