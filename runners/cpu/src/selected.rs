//! Attention of new rows over selected tokens: which slots of a rank each row attends to.
//!
//! Lists are those of the selection itself (ATOM `dcp_sparse_filter`, vLLM `filter_and_convert_dcp_index`); the kernel then goes through
//! a row's entries as if they were its context (FlashMLA and aiter sparse decode), which needs no mask: a selected token is one that
//! the row sees.

use std::collections::HashSet;

use shardcheck_engine::{EngineError, SlotList, TensorError, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::Batch;
use crate::cache::{CachePolicies, KvFormat, RankCache, TokenRows};
use crate::communicator::Stop;
use crate::grid::{Grid, LayoutPolicies};
use crate::sparse::{Form, Lists, Slots, SparsePolicies};

/// The list of a row as a kernel meets it.
#[derive(Debug, Clone, Copy)]
pub struct RowList {
    /// Its entries.
    pub entries: usize,
    /// Those of them that are counted as tokens.
    pub count: usize,
    /// Most tokens k of a row.
    pub top_k: usize,
    /// How slots are listed.
    pub list: SlotList,
    /// Rows of the request behind this one: q − 1 − t.
    pub rows_behind: usize,
}

/// How rows find their tokens.
#[derive(Clone, Copy, PartialEq)]
pub struct SelectedPolicies {
    /// Whether rows attend to all that they see: `(tokens of each request, k)`.
    pub dense: fn(&[usize], usize) -> bool,
    /// Whether a selected token is listed: `(position, tokens that the row sees on the rank)`.
    pub takes: fn(usize, usize) -> bool,
    /// Request whose blocks the tokens of a row lie in: `(request, row, requests)`.
    pub request: fn(usize, usize, usize) -> usize,
    /// Row whose list a row goes through: `(row, first row of its request, counts of all rows)`.
    pub row: fn(usize, usize, &[i32]) -> usize,
    /// First entry of a row: `(row, first entries, k)`.
    pub first: fn(usize, &[i32], usize) -> usize,
    /// Entries that a row attends to.
    pub attended: fn(RowList) -> usize,
    /// Slot that an entry stands for.
    pub slot: fn(i32) -> i32,
    /// Scale by which codes are read, given that of the cache.
    pub scale: fn(f32) -> f32,
    /// What a layer with a selection of its own goes by and leaves for those that share it: `(plans before, its own)`.
    pub renewed: fn(&Plans, Plan) -> Plan,
    /// What a layer goes by that shares a selection.
    pub shared: fn(&Plans) -> Option<&Plan>,
}

/// A selection with the lists of every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The selection.
    pub selection: Selection,
    /// By rank.
    pub lists: Vec<Lists>,
}

/// What layers with a selection of their own left in a session.
#[derive(Debug, Default)]
pub struct Plans {
    /// Of the first one.
    pub first: Option<Plan>,
    /// Of the last one.
    pub last: Option<Plan>,
}

impl Plans {
    /// Keeps the plan of a layer with a selection of its own.
    pub fn keep(&mut self, plan: &Plan) {
        self.first.get_or_insert_with(|| plan.clone());
        self.last = Some(plan.clone());
    }
}

impl SelectedPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        dense: |_, _| false,
        takes: |_, _| true,
        request: |request, _, _| request,
        row: |row, _, _| row,
        first: |row, indptr, _| indptr[row] as usize,
        attended: |row| row.count,
        slot: |entry| entry,
        scale: |scale| scale,
        renewed: |_, own| own,
        shared: |plans| plans.last.as_ref(),
    };
}

/// The tokens that the rows of a step attend to.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// `[T, k]`, −1 for none.
    topk: Vec<i64>,
    form: Form,
}

/// What the lists of a rank are made by.
#[derive(Clone, Copy)]
pub struct Listing<'a> {
    /// Requests, rows and blocks.
    pub batch: &'a Batch,
    /// Sizes of the layout.
    pub grid: &'a Grid,
    /// Rank within its group.
    pub member: usize,
    /// Tokens that each row sees on the rank.
    pub row_lens: &'a [usize],
    /// How rows and blocks are found.
    pub layout: &'a LayoutPolicies,
    /// How slots are listed.
    pub sparse: &'a SparsePolicies,
    /// How rows find their tokens.
    pub selected: &'a SelectedPolicies,
}

impl Selection {
    /// Reads `topk i32 [T, k]` of a batch.
    ///
    /// # Errors
    /// [`EngineError::Input`] for another shape or dtype, and for a row that is given a token that it does not see, one twice, one behind
    /// a −1, or one where it is padding.
    pub fn read(inputs: &Tensors, batch: &Batch, list: SlotList) -> Result<Self, EngineError> {
        let tensor = inputs.get("topk")?;
        let top_k = tensor.shape().last().copied().unwrap_or(0);
        let topk = tensor.expect("topk", Dtype::I32, &[batch.rows, top_k])?.to_i64();
        let refs = batch.row_refs(&LayoutPolicies::HEALTHY);
        for (row, own) in topk.chunks_exact(top_k.max(1)).enumerate() {
            let seen = refs[row]
                .map_or(0, |of| (batch.seq_lens[of.request] + 1 + of.row).saturating_sub(of.query_len));
            check_row(own, seen).map_err(|why| {
                let (name, value) =
                    ("topk".to_owned(), format!("{why} in row {row}, which sees {seen} tokens"));
                TensorError::WrongValue { name, value }
            })?;
        }
        Ok(Self { topk, form: Form { rows: batch.rows, top_k, list } })
    }

    /// Whether lists of the other one fit a step with this one.
    pub fn is_like(&self, other: &Self) -> bool {
        self.form == other.form
    }

    /// Whether it is for so many rows, listed in that form.
    pub fn is_of(&self, rows: usize, list: SlotList) -> bool {
        (self.form.rows, self.form.list) == (rows, list)
    }

    /// Most tokens k of a row.
    pub fn top_k(&self) -> usize {
        self.form.top_k
    }

    /// Lists of a rank.
    ///
    /// # Errors
    /// A crash when a block lies outside the table or the cache.
    pub fn lists(&self, of: Listing<'_>) -> Result<Lists, Stop> {
        let slots = Slots { grid: of.grid, batch: of.batch, layout: of.layout, policies: of.sparse };
        let (refs, requests) = (of.batch.row_refs(of.layout), of.batch.table.requests());
        let mut lists = Lists::default();
        for row in 0..self.form.rows {
            let own = &self.topk[row * self.form.top_k..(row + 1) * self.form.top_k];
            let own = own.iter().filter_map(|position| usize::try_from(*position).ok());
            let seen = of.row_lens.get(row).copied().unwrap_or(0);
            let slot = |position: usize| match refs.get(row).copied().flatten() {
                Some(at) => slots.of((of.selected.request)(at.request, row, requests), position, of.member),
                None => Ok(None),
            };
            let own = own.filter(|position| (of.selected.takes)(*position, seen));
            lists.add(own.map(slot).collect::<Result<_, _>>()?, self.form, of.sparse);
        }
        Ok(lists.finished(self.form))
    }

    /// Slots that each row attends to, as a kernel finds them in its lists.
    ///
    /// # Errors
    /// A crash when an entry lies outside the list or names no slot of `slots`.
    pub fn attended(&self, lists: &Lists, slots: usize, of: Listing<'_>) -> Result<Vec<Vec<usize>>, Stop> {
        let refs = of.batch.row_refs(of.layout);
        let of_row = |row: usize| {
            let at = refs.get(row).copied().flatten();
            let (t, behind) = at.map_or((0, 0), |at| (at.row, at.query_len - 1 - at.row));
            let row = (of.selected.row)(row, row - t, &lists.counts);
            let list = RowList {
                entries: (lists.indptr[row + 1] - lists.indptr[row]) as usize,
                count: lists.counts[row].max(0) as usize,
                top_k: self.form.top_k,
                list: self.form.list,
                rows_behind: behind,
            };
            let first = (of.selected.first)(row, &lists.indptr, self.form.top_k);
            let end = first + (of.selected.attended)(list);
            let entries = lists.slots.get(first..end).ok_or_else(|| {
                let size = lists.slots.len();
                Stop::crash(format!("illegal address: entries {first} to {end} of a list of {size}"))
            })?;
            let slot = |entry: &i32| {
                let slot = (of.selected.slot)(*entry);
                usize::try_from(slot).ok().filter(|slot| *slot < slots).ok_or_else(|| {
                    Stop::crash(format!("illegal address: slot {slot} of {slots}, for row {row}"))
                })
            };
            entries.iter().map(slot).collect()
        };
        (0..self.form.rows).map(of_row).collect()
    }
}

/// Reads the tokens in those slots of a cache.
pub fn read_slots(
    cache: &RankCache,
    slots: &[usize],
    (cached, selected): (&CachePolicies, &SelectedPolicies),
    format: &KvFormat,
) -> TokenRows {
    let mut rows = TokenRows {
        keys: Vec::with_capacity(slots.len() * format.kv_heads * format.key_dim),
        values: Vec::new(),
    };
    let read = KvFormat { scale: (selected.scale)(format.scale), ..*format };
    for slot in slots {
        rows.push(cache.token(*slot, format), &read, (cached.decode, cached.decode_value));
    }
    rows
}

/// What is wrong with the tokens of a row that sees so many.
fn check_row(own: &[i64], seen: usize) -> Result<(), String> {
    let end = own.iter().position(|position| *position == -1).unwrap_or(own.len());
    let (own, behind) = own.split_at(end);
    if let Some(position) = behind.iter().find(|position| **position != -1) {
        return Err(format!("position {position} behind a −1"));
    }
    let mut known = HashSet::new();
    for position in own {
        if usize::try_from(*position).ok().is_none_or(|position| position >= seen) {
            return Err(format!("position {position}"));
        }
        if !known.insert(*position) {
            return Err(format!("position {position} twice"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_given_different_tokens_that_it_sees_and_nothing_behind_them() {
        for (own, seen) in [(&[][..], 0), (&[-1, -1][..], 0), (&[3, 0, 2, -1][..], 4), (&[0][..], 1)] {
            assert_eq!(check_row(own, seen), Ok(()), "{own:?} of {seen}");
        }
        for (own, seen, named) in [
            (&[0, -1][..], 0, "position 0"),
            (&[4, 1][..], 4, "position 4"),
            (&[-2][..], 4, "position -2"),
            (&[1, 3, 1][..], 4, "position 1 twice"),
            (&[1, -1, 2][..], 4, "position 2 behind"),
        ] {
            let error = check_row(own, seen).unwrap_err();
            assert!(error.contains(named), "{own:?} of {seen}: {error}");
        }
    }
}
