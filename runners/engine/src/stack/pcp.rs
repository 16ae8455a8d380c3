//! How the rows of a step through a stack are shared out over ranks of prefill context parallelism.

use serde::{Deserialize, Serialize};

use crate::{PcpDecodes, PcpStrategy};

/// Ranks of prefill context parallelism, each of which is a whole group of the session's ranks with caches and states of its own.
///
/// A rank has some rows of a step and every weight; what it computes of a row needs no other row but in three places. Keys of all rows go to all
/// ranks before a layer attends, rows see what they would see in the whole batch, and caches are those of the whole batch on every rank. Inputs
/// of a recurrent layer go to all ranks likewise, since its state needs every row in order. Behind the last norm all rows
/// come together in their order, padding dropped: each rank has the logits of the whole batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackPcp {
    /// Ranks P; the session's `tp` ranks are those of one of them, and rank `p·tp + t` is its rank t.
    pub world: usize,
    /// Which rows of a prompt a rank has.
    pub strategy: PcpStrategy,
    /// What the rows of decodes do. A step without a prompt's rows is not shared out where they are on every rank, whatever the strategy.
    pub decodes: PcpDecodes,
    /// Whether experts are shared out over all P·tp ranks, rows being gathered before them and reduce-scattered behind (merge 1), or summed over
    /// P where every rank has them; else each rank of P has all experts, over its own ranks (merge 0).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub merged: bool,
}
