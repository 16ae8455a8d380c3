//! Faults of batches whose rows ranks share, and of what is decided for a row before it attends: splits, selections, compressed
//! entries, accepted drafts.

use shardcheck_engine::{Operation, Tensor};

use super::tensors::{counted, counted_rows, exchanged, rolled, without_last, zeros};
use super::{BoundaryFault, Tamper, given, returned};

pub(super) const FAULTS: &[BoundaryFault] = &[
    BoundaryFault {
        name: "shared-rows-of-ranks-exchanged",
        title: "the rows that each rank takes of a batch come back one rank late",
        touches: "rows",
        killed_by: &["pcp.partition", "pcp.balance"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "rows", |rows| rolled(rows, 0))),
    },
    BoundaryFault {
        name: "shared-positions-shifted",
        title: "the positions of local rows come back one row late",
        touches: "positions",
        killed_by: &["pcp.positions"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "positions", |positions| rolled(positions, 1));
        }),
    },
    BoundaryFault {
        name: "shared-order-shifted",
        title: "the places from which a batch is put together again come back one row late",
        touches: "restore",
        killed_by: &["pcp.restore"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "restore", |places| rolled(places, 1))),
    },
    BoundaryFault {
        name: "shared-rows-written-by-nobody",
        title: "no rank is said to write the KV of any gathered row",
        touches: "kv_writer",
        killed_by: &["pcp.writer"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "kv_writer", zeros)),
    },
    BoundaryFault {
        name: "shared-output-rows-exchanged",
        title: "the first two rows of a shared batch's output come back exchanged",
        touches: "out",
        killed_by: &["prefill.output"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| exchanged(out, 1, 0, 1))),
    },
    BoundaryFault {
        name: "shared-output-without-its-last-row",
        title: "the last row of a shared batch's output comes back as zeros",
        touches: "out",
        killed_by: &["prefill.output"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| without_last(out, 1))),
    },
    BoundaryFault {
        name: "local-outputs-of-ranks-exchanged",
        title: "what each rank computed for its own rows of a shared batch comes back one rank late",
        touches: "local_out",
        killed_by: &["prefill.local"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "local_out", |out| rolled(out, 0))),
    },
    BoundaryFault {
        name: "gathered-keys-shifted",
        title: "the keys that the ranks of a shared batch gathered come back one token late",
        touches: "gathered_key",
        killed_by: &["prefill.gather", "index.gather"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "gathered_key", |keys| rolled(keys, 1))),
    },
    BoundaryFault {
        name: "shared-selection-of-the-row-before",
        title: "selections of a shared batch come back one row late",
        touches: "topk",
        killed_by: &["index.output"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "topk", |topk| rolled(topk, 1))),
    },
    BoundaryFault {
        name: "shared-scores-of-the-row-before",
        title: "scores of local rows come back one row late",
        touches: "index_scores",
        killed_by: &["index.scores"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "index_scores", |scores| rolled(scores, 1))),
    },
    BoundaryFault {
        name: "entries-one-late",
        title: "compressed entries come back one entry late",
        touches: "entries",
        killed_by: &["compress.entries"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "entries", |entries| rolled(entries, 1))),
    },
    BoundaryFault {
        name: "open-block-forgotten",
        title: "what is held of blocks that are not full comes back as zeros",
        touches: "new_state_kv",
        killed_by: &["compress.state"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "new_state_kv", zeros)),
    },
    BoundaryFault {
        name: "held-tokens-shifted",
        title: "what is held of open blocks is handed over one token late",
        touches: "state_kv",
        killed_by: &["compress.entries", "compress.state"],
        tamper: Tamper::Inputs(|_, inputs| given(inputs, "state_kv", |held| rolled(held, 0))),
    },
    BoundaryFault {
        name: "selection-one-token-early",
        title: "every selected token comes back as the one before it",
        touches: "topk",
        killed_by: &["sparse.choice", "sparse.visible"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "topk", |topk| counted(topk, |at, all| (all[at] - 1).max(-1)));
        }),
    },
    BoundaryFault {
        name: "selected-slots-of-ranks-exchanged",
        title: "the slots that each rank lists of selected tokens come back one rank late",
        touches: "slots",
        killed_by: &["sparse.slots", "sparse.partition"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "slots", |slots| rolled(slots, 0))),
    },
    BoundaryFault {
        name: "selected-tokens-counted-once-more",
        title: "every rank is said to own one more of a row's selected tokens",
        touches: "counts",
        killed_by: &["sparse.lists", "sparse.partition", "selected.lists"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "counts", |counts| counted(counts, |at, all| all[at] + 1));
        }),
    },
    BoundaryFault {
        name: "selection-without-its-first-token",
        title: "each row's selection is handed over without the token that stands first in it",
        touches: "topk",
        killed_by: &["selected.output", "selected.lists"],
        tamper: Tamper::Inputs(|place, inputs| {
            if matches!(place.operation, Operation::AttendSelected { .. }) {
                given(inputs, "topk", without_first);
            }
        }),
    },
    BoundaryFault {
        name: "selected-outputs-of-ranks-exchanged",
        title: "outputs of rows over selected tokens come back one rank late",
        touches: "out",
        killed_by: &["selected.output"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "out", |out| rolled(out, 0))),
    },
    BoundaryFault {
        name: "layers-share-one-layer-late",
        title: "the layer by whose selection each layer attends comes back one layer late",
        touches: "source",
        killed_by: &["sharing.source"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "source", |source| rolled(source, 1))),
    },
    BoundaryFault {
        name: "no-layer-selects",
        title: "no layer is said to compute a selection of its own",
        touches: "computes",
        killed_by: &["sharing.layers"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "computes", zeros)),
    },
    BoundaryFault {
        name: "emitted-tokens-shifted",
        title: "the tokens that a request emits come back one place late",
        touches: "tokens",
        killed_by: &["acceptance.identities", "acceptance.greedy", "acceptance.token"],
        tamper: Tamper::Reply(|_, reply, _| returned(reply, "tokens", |tokens| rolled(tokens, 2))),
    },
    BoundaryFault {
        name: "one-draft-more-accepted",
        title: "every request is said to have accepted one draft more",
        touches: "accepted",
        killed_by: &["acceptance.identities", "acceptance.decision"],
        tamper: Tamper::Reply(|_, reply, _| {
            returned(reply, "accepted", |accepted| counted(accepted, |at, all| all[at] + 1));
        }),
    },
    BoundaryFault {
        name: "drafts-of-another-request",
        title: "the drafts of the first two requests are handed over exchanged",
        touches: "draft_tokens",
        killed_by: &["acceptance.greedy", "acceptance.decision", "acceptance.token"],
        tamper: Tamper::Inputs(|_, inputs| {
            given(inputs, "draft_tokens", |drafts| exchanged(drafts, 0, 0, 1));
        }),
    },
];

/// Each row's list without its first entry, −1 behind.
fn without_first(lists: &Tensor) -> Tensor {
    counted_rows(lists, |row| row.iter().skip(1).copied().chain([-1]).collect())
}
