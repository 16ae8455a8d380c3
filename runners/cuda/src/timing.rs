//! One decode step that stays on the device, to be timed.

use std::sync::Arc;

use shardcheck_engine::{Configuration, EngineError};

use crate::attend::{Bucket, Kernel, Question, Step};
use crate::batch::Batch;
use crate::caches::Caches;
use crate::layout::row_metadata;
use crate::queue::Queue;
use crate::shape::Shape;

/// A decode step over caches of random numbers: one row a request, blocks in a shuffled order.
pub struct Decode {
    queue: Arc<Queue>,
    step: Step,
    caches: Caches,
    segments: usize,
}

impl Decode {
    /// Fills caches and query. `lens`: tokens of each request, all of which fit into the blocks.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(
        queue: &Arc<Queue>,
        configuration: Configuration,
        lens: &[usize],
    ) -> Result<Self, EngineError> {
        queue.device.enter()?;
        let shape = Shape::of(&configuration);
        let caches = Caches::unwritten(queue, &configuration, &shape)?;
        let mut random = 0x9E37_79B9_7F4A_7C15u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        // bf16 numbers between 1/4 and 2 of either sign; as eight-bit codes they are in the same range
        let mut words = |count: usize| -> Vec<u8> {
            let word = |bits: u64| (0x3E80 + (bits as u16 & 0x017F)) | (bits as u16 & 0x8000);
            (0..count.div_ceil(4))
                .flat_map(|_| {
                    let bits = next();
                    [bits, bits >> 16, bits >> 32, bits >> 48].map(word)
                })
                .take(count)
                .flat_map(u16::to_le_bytes)
                .collect()
        };
        let piece = words(8 << 20);
        let mut at = 0;
        while at < caches.keys.bytes() {
            let take = piece.len().min(caches.keys.bytes() - at);
            queue.write_at(&caches.keys, at, &piece[..take])?;
            at += take;
        }
        let query = words(lens.len() * configuration.total_heads() * configuration.attention.qk_dim());
        let question = Question { batch: batch_of(&configuration, lens), causal: true, query, w_uv: None };
        let kernel = Kernel::of(queue, &configuration, &shape);
        let (longest, total) = question.tokens(&shape);
        let segments = kernel.segments(queue, &shape, lens.len(), longest, total);
        let bucket = Bucket {
            rows: lens.len(),
            requests: lens.len(),
            entries: question.batch.table.len(),
            segments,
            projects: false,
        };
        let step = Step::allocate(queue, &configuration, &shape, bucket)?;
        question.ask(queue, &step)?;
        step.enqueue(queue, &caches)?;
        row_metadata(queue, &shape, &step.metadata, lens.len(), step.row_lens(), step.row_requests())?;
        queue.wait()?;
        Ok(Self { queue: Arc::clone(queue), step, caches, segments })
    }

    /// Milliseconds of the attention kernel and the merge of its segments, run after run.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time_ms(&self, repeats: usize) -> Result<Vec<f32>, EngineError> {
        self.queue.device.enter()?;
        self.queue.time_ms(repeats, || self.step.local_attention(&self.queue, &self.caches))
    }

    /// Segments that a row's tokens are split into.
    pub fn segments(&self) -> usize {
        self.segments
    }
}

fn batch_of(configuration: &Configuration, lens: &[usize]) -> Batch {
    let tokens = configuration.virtual_block_tokens();
    let width = lens.iter().map(|len| len.div_ceil(tokens)).max().unwrap_or(0);
    let (mut table, mut taken) = (Vec::new(), 0usize);
    // an odd multiplier walks all blocks where their number is a power of two, and many of them otherwise
    for len in lens {
        for entry in 0..width {
            let used = entry < len.div_ceil(tokens);
            table.push((taken * 5 % configuration.blocks.max(1)) as i32);
            taken += usize::from(used);
        }
    }
    Batch {
        lens: lens.iter().map(|len| *len as i32).collect(),
        starts: (0..=lens.len() as i32).collect(),
        table,
        width,
        rows: lens.len(),
    }
}
