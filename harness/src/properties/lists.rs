//! Lists of the slots of selected tokens as an engine answered them, held to what a rank owns and to their declared form.

use std::collections::HashSet;

use shardcheck_engine::SlotList;

use crate::laboratory::Halt;

/// Lists of all ranks.
pub(super) struct Lists {
    rows: usize,
    top_k: usize,
    /// `[ranks, rows]`.
    counts: Vec<i64>,
    /// `[ranks, rows + 1]`.
    indptr: Vec<i64>,
    /// `[ranks, rows · k]`.
    slots: Vec<i64>,
}

impl Lists {
    /// Reads the lists of a batch of `rows` rows of at most `top_k` tokens; `read` gives an i32 tensor of a name and a shape.
    ///
    /// # Errors
    /// What `read` says.
    pub fn read(
        ranks: usize,
        (rows, top_k): (usize, usize),
        read: impl Fn(&str, &[usize]) -> Result<Vec<i64>, Halt>,
    ) -> Result<Self, Halt> {
        Ok(Self {
            rows,
            top_k,
            counts: read("counts", &[ranks, rows])?,
            indptr: read("indptr", &[ranks, rows + 1])?,
            slots: read("slots", &[ranks, rows * top_k])?,
        })
    }

    /// Numbers that were read.
    pub fn len(&self) -> usize {
        self.counts.len() + self.indptr.len() + self.slots.len()
    }

    fn count(&self, rank: usize, row: usize) -> i64 {
        self.counts[rank * self.rows + row]
    }

    /// The entries that are counted of a rank's list of a row.
    fn entries(&self, rank: usize, row: usize) -> Result<&[i64], String> {
        let size = self.rows * self.top_k;
        let entries = || {
            let first = usize::try_from(self.indptr[rank * (self.rows + 1) + row]).ok()?;
            let end = first.checked_add(usize::try_from(self.count(rank, row)).ok()?)?;
            self.slots[rank * size..(rank + 1) * size].get(first..end)
        };
        entries().ok_or_else(|| "counts more entries than its list has".to_owned())
    }

    /// Whether a rank counts the tokens of a row that it owns, each once; gives how much was compared.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn count_holds(&self, rank: usize, row: usize, own: usize) -> Result<usize, String> {
        if self.count(rank, row) != own as i64 {
            return Err(format!("counts {} tokens where it owns {own}", self.count(rank, row)));
        }
        // who lists a token that it does not own?
        let listed = self.entries(rank, row)?;
        if listed.len() != listed.iter().collect::<HashSet<_>>().len() {
            return Err("lists a token twice".to_owned());
        }
        Ok(1 + listed.len())
    }

    /// Whether a rank lists the slots of its own tokens of a row, given as `(position, slot)`, and no other.
    ///
    /// # Errors
    /// As [`Self::count_holds`].
    pub fn slots_hold(&self, rank: usize, row: usize, own: &[(usize, i64)]) -> Result<usize, String> {
        let listed: HashSet<i64> = self.entries(rank, row)?.iter().copied().collect();
        if let Some((position, slot)) = own.iter().find(|(_, slot)| !listed.contains(slot)) {
            return Err(format!("position {position} lies in slot {slot}, which is not listed"));
        }
        match listed.iter().find(|slot| !own.iter().any(|(_, known)| known == *slot)) {
            Some(slot) => Err(format!("slot {slot} is listed, where none of its tokens lies")),
            None => Ok(1 + own.len()),
        }
    }

    /// Whether the lists of a rank have their form; `place` names a row.
    ///
    /// # Errors
    /// As [`Self::count_holds`], with the row.
    pub fn form_holds(
        &self,
        rank: usize,
        form: SlotList,
        place: impl Fn(usize) -> String,
    ) -> Result<(), String> {
        let top_k = self.top_k as i64;
        let slots = &self.slots[rank * self.rows * self.top_k..(rank + 1) * self.rows * self.top_k];
        let mut first = 0;
        for row in 0..=self.rows {
            let seen = self.indptr[rank * (self.rows + 1) + row];
            if seen != first {
                return Err(format!("the list of row {row} begins at {seen}, not at {first}"));
            }
            if row == self.rows {
                break;
            }
            let count = self.count(rank, row);
            let fail = |why: String| Err(format!("{}: {why}", place(row)));
            if !(0..=top_k).contains(&count) {
                return fail(format!("counts {count} tokens of {top_k}"));
            }
            let entries = match form {
                SlotList::Padded => top_k,
                SlotList::Packed => count,
                SlotList::PackedDummy => count.max(1),
            };
            let own = &slots[first as usize..(first + entries) as usize];
            let (own, behind) = own.split_at(count as usize);
            if own.iter().any(|slot| *slot < 0) {
                return fail("has a hole among the entries that it counts".to_owned());
            }
            let fill = if form == SlotList::PackedDummy { 0 } else { -1 };
            if let Some(slot) = behind.iter().find(|slot| **slot != fill) {
                return fail(format!("has {slot} where {fill} stands for no token"));
            }
            first += entries;
        }
        match slots[first as usize..].iter().find(|slot| **slot != -1) {
            Some(slot) => Err(format!("{slot} stands behind the last row")),
            None => Ok(()),
        }
    }
}
