//! What a rank may keep of earlier steps. The healthy engine keeps nothing: every step brings its metadata.

use std::collections::{BTreeMap, HashMap};

use crate::batch::{Batch, BlockTable};

/// Which kind of step metadata belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// Derivation of the layout alone.
    Layout,
    /// Attention of new rows over cached tokens.
    Attend,
    /// Attention of new tokens over a gathered context.
    Context,
}

/// The metadata that a rank runs a step with.
#[derive(Debug, Clone, PartialEq)]
pub struct Metadata {
    /// Kind of step.
    pub kind: StepKind,
    /// Requests, rows and block table.
    pub batch: Batch,
    /// Whether rows are masked.
    pub causal: bool,
    /// Rank within its group.
    pub member: usize,
    /// Ranks of the group W.
    pub world: usize,
    /// Whether the rank enters the gather of the queries.
    pub enters_gather: bool,
}

/// The slot mapping of a write before it becomes slots.
#[derive(Debug, Clone, PartialEq)]
pub struct WriteMap {
    /// Position of each token.
    pub positions: Vec<i64>,
    /// Request of each token, −1 for graph padding.
    pub requests: Vec<i64>,
    /// Where the blocks lie.
    pub table: BlockTable,
}

/// Whose token lies in a slot: `(first block of its request, position)`.
pub type Origin = (i64, usize);

/// What a rank keeps.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    /// Metadata of the first step.
    pub first: Option<Metadata>,
    /// Metadata of the step before.
    pub last: Option<Metadata>,
    /// Metadata of the first step with a number of rows.
    pub by_rows: BTreeMap<usize, Metadata>,
    /// Block-table rows by their first block.
    pub tables: HashMap<i64, Vec<i64>>,
    /// The write of this step, which the attention that follows makes the last one.
    pub pending_write: Option<WriteMap>,
    /// The last write that attention followed.
    pub last_write: Option<WriteMap>,
    /// Whose token was written last into each slot.
    pub origins: HashMap<usize, Origin>,
}
