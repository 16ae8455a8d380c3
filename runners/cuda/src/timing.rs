//! One decode step that stays on the device, and one merge of ranks over joined devices, to be timed.

use std::sync::Arc;

use shardcheck_engine::{Configuration, EngineError, LseBase};

use crate::attend::{Bucket, Kernel, Step};
use crate::batch::Batch;
use crate::caches::Caches;
use crate::engine::CudaEngine;
use crate::exchange::{MergeBuffers, MergeShape, Route, Wire};
use crate::question::Question;
use crate::queue::{Buffer, Queue};
use crate::shape::Shape;
use crate::team::{Seat, Team};

/// A decode step over caches of random numbers: one row a request, blocks in a shuffled order.
pub struct Decode {
    queue: Arc<Queue>,
    step: Step,
    caches: Vec<Caches>,
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
        let shape = Shape::of(&configuration);
        let team = Team::new(vec![Arc::clone(queue)], &configuration, None, None);
        let caches = team.each(|seat| Caches::unwritten(seat, &configuration))?;
        let mut words = Words(0x9E37_79B9_7F4A_7C15);
        let piece = words.take(8 << 20);
        let mut at = 0;
        let keys = &caches[0].keys;
        while at < keys.bytes() {
            let take = piece.len().min(keys.bytes() - at);
            queue.write_at(keys, at, &piece[..take])?;
            at += take;
        }
        let query = words.take(lens.len() * configuration.total_heads() * configuration.attention.qk_dim());
        let question = Question {
            batch: batch_of(&configuration, lens),
            causal: true,
            query,
            w_uv: None,
            selection: None,
        };
        let kernel = Kernel::of(queue, &configuration, &shape);
        let (longest, total) = question.tokens(&shape);
        let segments = kernel.segments(queue, &shape, lens.len(), longest, total);
        let bucket = Bucket {
            rows: lens.len(),
            requests: lens.len(),
            entries: question.batch.table.len(),
            segments,
            projects: false,
            listing: None,
        };
        let step = Step::allocate(&team, &configuration, bucket)?;
        question.ask(&team, &step)?;
        step.enqueue(&team, &caches, false)?;
        queue.wait()?;
        Ok(Self { queue: Arc::clone(queue), step, caches, segments })
    }

    /// Milliseconds of the attention kernel and the merge of its segments, run after run.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time_ms(&self, repeats: usize) -> Result<Vec<f32>, EngineError> {
        let part = &self.step.parts()[0];
        self.queue.time_ms(repeats, || part.local_attention(&self.queue, &self.caches[0]))
    }

    /// Segments that a row's tokens are split into.
    pub fn segments(&self) -> usize {
        self.segments
    }
}

/// bf16 numbers between 1/4 and 2 of either sign, as bytes; as eight-bit codes they are in the same range, as f32 numbers nearly so.
struct Words(u64);

impl Words {
    fn take(&mut self, count: usize) -> Vec<u8> {
        let word = |bits: u64| (0x3E80 + (bits as u16 & 0x017F)) | (bits as u16 & 0x8000);
        let mut next = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            [self.0, self.0 >> 16, self.0 >> 32, self.0 >> 48].map(word)
        };
        (0..count.div_ceil(4)).flat_map(|_| next()).take(count).flat_map(u16::to_le_bytes).collect()
    }
}

/// A merge of given partials over joined devices.
pub struct Exchange {
    team: Team,
    shape: MergeShape,
    buffers: MergeBuffers,
    /// Partials, LSEs, outputs and their LSEs of each device.
    states: Vec<[Buffer; 4]>,
}

impl Exchange {
    /// Random partials of `rows` rows of all ranks of `configuration` on the engine's devices.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(engine: &CudaEngine, configuration: &Configuration, rows: usize) -> Result<Self, EngineError> {
        let devices = engine.devices().iter().take(configuration.tp);
        let queues = devices.map(|device| Queue::new(Arc::clone(device))).collect::<Result<_, _>>()?;
        let team = Team::new(queues, configuration, engine.fabric().cloned(), None);
        let (heads, dim) = (configuration.gathered_heads(), configuration.attention.value_dim());
        let shape = MergeShape { rows, heads, dim, wire: Wire::Bf16, lse_base: LseBase::E };
        let own = heads / configuration.dcp;
        let states = team.each(|Seat { queue, shape }| {
            let at = shape.ranks as usize * rows;
            let mut words = Words(0x9E37_79B9_7F4A_7C15 ^ shape.first as u64);
            let partial = queue.upload(&words.take(at * heads * dim))?;
            let lse = queue.upload(&words.take(2 * at * heads))?;
            Ok([partial, lse, queue.allocate(2 * at * own * dim)?, queue.allocate(4 * at * own)?])
        })?;
        let route = Route::of(configuration, false);
        let buffers = MergeBuffers::allocate(&team, shape, route.backend)?;
        Ok(Self { team, shape, buffers, states })
    }

    /// Bytes of what one rank holds before the merge, the LSEs left out.
    pub fn rank_bytes(&self) -> usize {
        self.shape.rows * self.shape.heads * self.shape.dim * 2
    }

    /// Milliseconds of the whole merge, run after run, as the first device sees it.
    ///
    /// # Errors
    /// What the driver or the collectives say.
    pub fn merge_ms(&self, repeats: usize) -> Result<Vec<f32>, EngineError> {
        let from: Vec<_> = self.states.iter().map(|[partial, lse, _, _]| (partial, lse)).collect();
        let to: Vec<_> = self.states.iter().map(|[_, _, out, lse]| (out, lse)).collect();
        self.time_ms(repeats, || self.buffers.enqueue(&self.team, &from, &to))
    }

    /// Milliseconds of the library's own all-gather, in which every device gives `bytes`.
    ///
    /// # Errors
    /// What the driver or the collectives say.
    pub fn all_gather_ms(&self, bytes: usize, repeats: usize) -> Result<Vec<f32>, EngineError> {
        let devices = self.team.seats().len();
        let buffers = self.team.each(|Seat { queue, shape }| {
            let mut words = Words(0x9E37_79B9_7F4A_7C15 ^ shape.first as u64);
            Ok((queue.upload(&words.take(bytes / 2))?, queue.allocate(devices * bytes)?))
        })?;
        self.time_ms(repeats, || self.team.all_gather_alone(&buffers, bytes))
    }

    fn time_ms(
        &self,
        repeats: usize,
        enqueue: impl Fn() -> Result<(), EngineError>,
    ) -> Result<Vec<f32>, EngineError> {
        let mut times = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            self.team.begin();
            for Seat { queue, .. } in self.team.seats() {
                queue.wait()?;
            }
            times.extend(self.team.first().queue.time_ms(1, &enqueue)?);
            self.team.settle()?;
        }
        Ok(times)
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
