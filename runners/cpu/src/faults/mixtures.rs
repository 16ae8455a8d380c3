//! Faults of the mixtures of a stack: bias, table, latent space and shared expert of the wrong layer, row or rank.

use super::{Fault, FaultClass};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "stack-bias-of-the-first-mixture",
        title: "every router adds the bias of the first layer that has experts",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["stack.experts"],
        apply: |p| p.stack.mixtures.bias = |_, first| first,
    },
    Fault {
        name: "stack-table-of-the-first-mixture",
        title: "every layer that is routed by token id looks tokens up in the table of the first one",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["stack.experts"],
        apply: |p| p.stack.mixtures.table = |_, first| first,
    },
    Fault {
        name: "stack-one-layer-too-few-by-token-id",
        title: "the last layer that is to be routed by token id is routed by its scores",
        class: FaultClass::MoeRoute,
        bugs: &[],
        killed_by: &["stack.experts"],
        apply: |p| p.stack.mixtures.hashed = |mixture, hashed| mixture + 1 < hashed,
    },
    Fault {
        name: "stack-routed-by-the-token-behind",
        title: "a row is routed by the id of the token behind it, the one that it is to predict",
        class: FaultClass::MoeRoute,
        bugs: &["vllm-ascend#16834"],
        killed_by: &["stack.experts"],
        apply: |p| p.stack.mixtures.token = |tokens, row| tokens[(row + 1).min(tokens.len() - 1)],
    },
    Fault {
        name: "stack-latent-projections-of-the-first-mixture",
        title: "latent experts of every layer stand between the projections of the first one",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.latent", "stack.latent-norm", "stack.feed-forward"],
        apply: |p| p.stack.mixtures.latent = |_, first| first,
    },
    Fault {
        name: "stack-latent-experts-without-their-norm",
        title: "what latent experts give is projected up as it is",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.latent-norm"],
        apply: |p| p.stack.mixtures.norms = false,
    },
    Fault {
        name: "stack-latent-norm-before-the-sum",
        title: "each rank norms what its own experts give; parts are summed behind the up-projection alone",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.latent-experts"],
        apply: |p| p.stack.mixtures.sums = false,
    },
    Fault {
        name: "stack-up-projection-whole-on-every-rank",
        title: "every rank projects the whole latent row up before the sum over ranks: it counts once for each of them",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.feed-forward"],
        apply: |p| p.stack.mixtures.columns = |_, _, width| 0..width,
    },
    Fault {
        name: "stack-shared-expert-whole-on-every-rank",
        title: "every rank runs the whole shared expert beside latent ones before the sum over ranks",
        class: FaultClass::CollectiveOrder,
        bugs: &[],
        killed_by: &["stack.feed-forward"],
        apply: |p| p.stack.mixtures.shared = |_, _, inner| 0..inner,
    },
];
