//! Lists of the slots of selected tokens: what a rank owns of each row, and where it lies.

use shardcheck_engine::SlotList;

use super::SparsePolicies;
use crate::batch::Batch;
use crate::communicator::Stop;
use crate::grid::{Grid, LayoutPolicies};

/// How lists are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// Rows T of the batch.
    pub rows: usize,
    /// Most tokens k of a row.
    pub top_k: usize,
    /// How slots are listed.
    pub list: SlotList,
}

/// Lists of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Lists {
    /// Tokens of each row that the rank owns.
    pub counts: Vec<i32>,
    /// First entry of each row, then the end of the last.
    pub indptr: Vec<i32>,
    /// Slots, one row behind the other.
    pub slots: Vec<i32>,
}

impl Default for Lists {
    fn default() -> Self {
        Self { counts: Vec::new(), indptr: vec![0], slots: Vec::new() }
    }
}

impl Lists {
    /// Adds a row, given the slot of each of its tokens that the rank owns and `None` for those of others.
    pub fn add(&mut self, tokens: Vec<Option<i32>>, form: Form, policies: &SparsePolicies) {
        let own = tokens.iter().flatten().count();
        let mut list = (policies.list)(tokens);
        list.resize((policies.entries)(list.len(), form.top_k, form.list), (policies.empty_entry)(form.list));
        self.counts.push((policies.count)(own) as i32);
        self.slots.extend(list);
        // a list beyond the tensor is cut, as a kernel with a bound of its own would
        self.slots.truncate(form.rows * form.top_k);
        self.indptr.push(self.slots.len() as i32);
    }

    /// Fills the tensor of slots up behind the last row.
    #[must_use]
    pub fn finished(mut self, form: Form) -> Self {
        self.slots.resize(form.rows * form.top_k, -1);
        self
    }
}

/// Where the tokens of a request lie.
#[derive(Clone, Copy)]
pub struct Slots<'a> {
    /// Sizes of the layout.
    pub grid: &'a Grid,
    /// Requests and their blocks.
    pub batch: &'a Batch,
    /// How ids of blocks are read.
    pub layout: &'a LayoutPolicies,
    /// How slots are computed.
    pub policies: &'a SparsePolicies,
}

impl Slots<'_> {
    /// Slot of a position of a request on the rank that is `member` of its group; `None` where another one owns it.
    ///
    /// # Errors
    /// A crash when the block lies outside the table or the cache.
    pub fn of(&self, request: usize, position: usize, member: usize) -> Result<Option<i32>, Stop> {
        let (grid, policies) = (self.grid, self.policies);
        if !(policies.owns)(position, member, grid) {
            return Ok(None);
        }
        let block = self.batch.table.block(request, (policies.entry)(position, grid), self.layout)?;
        Ok(Some((block * grid.block + (policies.offset)(position, grid)) as i32))
    }
}
