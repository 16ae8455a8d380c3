//! Selected tokens of a step: what the host checks of them, and the lists that kernels make of them on each device.

use std::collections::HashSet;
use std::sync::Arc;

use shardcheck_engine::{EngineError, SlotList, Tensor, TensorError, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{Batch, crash};
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::shape::Shape;

/// `Listing` of the kernels, field by field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct ListingShape {
    pub rows: i32,
    pub top_k: i32,
    pub form: i32,
}

/// The tokens that the rows of a step attend to, checked and on the host.
#[derive(Clone)]
pub struct Selection {
    /// `[T, k]`, −1 for none.
    pub topk: Vec<i32>,
    pub shape: ListingShape,
}

impl Selection {
    /// Reads `topk i32 [T, k]` of a batch.
    ///
    /// # Errors
    /// [`EngineError::Input`] for another shape or dtype, and for a row whose tokens are not different ones that it sees with −1 behind.
    pub fn read(inputs: &Tensors, batch: &Batch, list: SlotList) -> Result<Self, EngineError> {
        let tensor = inputs.get("topk")?;
        let top_k = tensor.shape().last().copied().unwrap_or(0);
        let topk: Vec<i32> = tensor
            .expect("topk", Dtype::I32, &[batch.rows, top_k])?
            .to_i64()
            .into_iter()
            .map(|position| position as i32)
            .collect();
        let mut seen = vec![0; batch.rows];
        for (request, edge) in batch.starts.windows(2).enumerate() {
            for row in edge[0]..edge[1] {
                seen[row as usize] = batch.lens[request] + 1 + row - edge[1];
            }
        }
        for (row, own) in topk.chunks_exact(top_k.max(1)).enumerate() {
            let count = own.iter().take_while(|position| **position >= 0).count();
            let (own, behind) = own.split_at(count);
            let different = own.iter().collect::<HashSet<_>>().len() == count;
            let visible = own.iter().all(|position| *position < seen[row]);
            if !(different && visible && behind.iter().all(|position| *position == -1)) {
                let value = format!("no set of tokens that row {row} sees, which are {}", seen[row]);
                return Err(TensorError::WrongValue { name: "topk".to_owned(), value }.into());
            }
        }
        let form = form_of(list);
        let shape = ListingShape { rows: batch.rows as i32, top_k: top_k as i32, form };
        Ok(Self { topk, shape })
    }

    /// The same for a layer that shares it, which has to have as many rows.
    ///
    /// # Errors
    /// A crash where it has not.
    pub fn of_rows(self, rows: usize) -> Result<Self, EngineError> {
        if self.shape.rows as usize == rows {
            return Ok(self);
        }
        Err(crash(format!("no layer before has a selection for {rows} rows")))
    }
}

fn form_of(list: SlotList) -> i32 {
    match list {
        SlotList::Padded => 0,
        SlotList::Packed => 1,
        SlotList::PackedDummy => 2,
    }
}

/// Selected tokens and the lists of the ranks that one device plays.
pub struct ListedPart {
    shape: ListingShape,
    pub topk: Buffer,
    entries: Buffer,
    counts: Buffer,
    indptr: Buffer,
    slots: Buffer,
    /// Entries that each row attends to on each rank.
    pub lens: Buffer,
}

impl ListedPart {
    /// Room for the lists of so many ranks.
    ///
    /// # Errors
    /// What the driver says.
    pub fn allocate(queue: &Arc<Queue>, shape: ListingShape, ranks: i32) -> Result<Self, EngineError> {
        let (rows, top_k, ranks) = (shape.rows as usize, shape.top_k as usize, ranks as usize);
        let words = |count: usize| queue.allocate(4 * count);
        Ok(Self {
            shape,
            topk: words(rows * top_k)?,
            entries: words(ranks * rows)?,
            counts: words(ranks * rows)?,
            indptr: words(ranks * (rows + 1))?,
            slots: words(ranks * rows * top_k)?,
            lens: words(ranks * rows)?,
        })
    }

    /// Fills what kernels write with −1.
    ///
    /// # Errors
    /// What the driver says.
    pub fn poison(&self, queue: &Queue) -> Result<(), EngineError> {
        [&self.entries, &self.counts, &self.indptr, &self.slots, &self.lens]
            .into_iter()
            .try_for_each(|buffer| queue.fill(buffer, 0xFF))
    }

    /// The first arguments of every kernel of lists.
    pub fn session(&self, shape: Shape) -> [Argument; 2] {
        [Argument::Shape(shape), Argument::Listing(self.shape)]
    }

    /// Counts, first entries and slots.
    pub fn lists(&self) -> [Argument; 3] {
        [self.counts.argument(), self.indptr.argument(), self.slots.argument()]
    }

    /// Enqueues the lists, given header, table and starts of the batch, and the lengths and requests of rows with the error word.
    ///
    /// # Errors
    /// What the driver says.
    pub fn make(
        &self,
        queue: &Arc<Queue>,
        shape: Shape,
        [header, table, starts]: [&Buffer; 3],
        [row_lens, row_requests, error]: [&Buffer; 3],
    ) -> Result<(), EngineError> {
        let at = shape.ranks as usize * self.shape.rows as usize;
        let launch = |kernel: &str, elements: usize, buffers: &[&Buffer]| {
            let buffers: Vec<Argument> = buffers.iter().map(|buffer| buffer.argument()).collect();
            queue.launch(kernel, Extent::over(elements), &[&self.session(shape)[..], &buffers].concat())
        };
        let Self { topk, entries, counts, indptr, slots, lens, .. } = self;
        launch("list_counts", at, &[topk, row_lens, counts, entries])?;
        launch("list_starts", shape.ranks as usize, &[entries, indptr])?;
        launch("list_slots", at, &[header, table, row_requests, topk, row_lens, indptr, slots, error])?;
        launch("list_lens", at, &[header, starts, counts, indptr, lens])
    }

    /// The outputs of a step with its lists, once it has run.
    ///
    /// # Errors
    /// What the driver says.
    pub fn with_lists(&self, queue: &Queue, shape: Shape, outputs: Tensors) -> Result<Tensors, EngineError> {
        let (ranks, rows) = (shape.ranks as usize, self.shape.rows as usize);
        let read = |buffer: &Buffer, width: usize| -> Result<Tensor, EngineError> {
            Ok(Tensor::new(Dtype::I32, vec![ranks, width], queue.read(buffer, 4 * ranks * width)?)?)
        };
        Ok(outputs
            .with("counts", read(&self.counts, rows)?)
            .with("indptr", read(&self.indptr, rows + 1)?)
            .with("slots", read(&self.slots, rows * self.shape.top_k as usize)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listing_is_as_long_as_the_three_words_of_the_kernels() {
        assert_eq!(size_of::<ListingShape>(), 3 * 4);
    }

    #[test]
    fn a_row_is_given_a_set_of_tokens_that_it_sees() {
        let batch =
            Batch { lens: vec![3, 0, 5], starts: vec![0, 2, 2, 3], table: Vec::new(), width: 0, rows: 4 };
        let read = |topk: [i32; 8]| {
            let inputs = Tensors::new().with("topk", Tensor::from_i32(&[4, 2], &topk));
            Selection::read(&inputs, &batch, SlotList::Packed)
        };
        // rows see 2, 3 and 5 tokens, padding none
        assert_eq!(read([1, 0, 2, -1, 4, 0, -1, -1]).unwrap().topk.len(), 8);
        for wrong in [
            [2, 0, 2, -1, 4, 0, -1, -1],
            [1, 1, 2, -1, 4, 0, -1, -1],
            [1, 0, -1, 2, 4, 0, -1, -1],
            [1, 0, 2, -2, 4, 0, -1, -1],
            [1, 0, 2, -1, 4, 0, 0, -1],
        ] {
            let error = read(wrong).err().unwrap();
            assert!(
                matches!(error, EngineError::Input(TensorError::WrongValue { .. })),
                "{wrong:?}: {error}"
            );
        }
    }
}
