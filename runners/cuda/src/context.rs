//! Attention of new tokens over a cached context: gathered from all ranks chunk by chunk, then merged with the new tokens' own causal
//! attention. States stay f32 from the kernel to the last merge; the output is rounded once.

use std::ops::Range;
use std::sync::Arc;

use shardcheck_engine::{Configuration, EffectivePath, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{Batch, DeviceBatch, contiguous, query_rows};
use crate::caches::{Caches, check};
use crate::exchange::{Backend, Route, Wire};
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::shape::{Shape, dense_block_heads};
use crate::states::{MERGE_CHUNK, MERGE_SUFFIX, enqueue_merge, whole};
use crate::team::{Absence, Seat, Team};

/// Local rows per request and the windows that cover them, one a chunk and at least one: contexts padded to whole blocks, chunks of whole
/// blocks, as many as the budget holds over all ranks and requests (ATOM `_build_mla_chunk_meta_dcp`).
struct ChunkPlan {
    padded: Vec<usize>,
    windows: Vec<Range<usize>>,
}

impl ChunkPlan {
    fn of(cached: &[i32], budget_tokens: usize, shape: &Shape) -> Self {
        let (block, world) = (shape.block as usize, shape.world as usize);
        let padded: Vec<usize> =
            cached.iter().map(|len| (*len as usize).div_ceil(block * world) * block).collect();
        let readers = cached.iter().filter(|len| **len > 0).count() * world;
        let rows = (budget_tokens / readers.max(1) / block * block).max(block);
        let chunks = padded.iter().copied().max().unwrap_or(0).div_ceil(rows).max(1);
        Self { padded, windows: (0..chunks).map(|chunk| chunk * rows..(chunk + 1) * rows).collect() }
    }
}

/// Rows of `0..len` in a window.
fn clip(len: usize, window: &Range<usize>) -> usize {
    len.min(window.end).saturating_sub(window.start)
}

/// Running sums from 0 on.
fn starts_of(counts: &[usize]) -> Vec<i32> {
    let mut total = 0;
    std::iter::once(0)
        .chain(counts.iter().map(|count| {
            total += *count as i32;
            total
        }))
        .collect()
}

/// One rank's tokens of every request: `[n, W]`.
fn held(batch: &Batch, shape: &Shape) -> Vec<usize> {
    let (interleave, world) = (shape.interleave as usize, shape.world as usize);
    let local = |len: usize, member: usize| {
        let round = interleave * world;
        len / round * interleave + (len % round).saturating_sub(member * interleave).min(interleave)
    };
    batch.lens.iter().flat_map(|len| (0..world).map(move |member| local(*len as usize, member))).collect()
}

/// What all chunks of a step share.
struct Walk<'a> {
    team: &'a Team,
    configuration: &'a Configuration,
    batch: &'a Batch,
    seats: Vec<SeatWalk<'a>>,
}

/// The same on one device.
struct SeatWalk<'a> {
    queue: &'a Arc<Queue>,
    shape: &'a Shape,
    configuration: &'a Configuration,
    batch: &'a Batch,
    metadata: DeviceBatch,
    caches: &'a Caches,
    query: Buffer,
    new_keys: Buffer,
    new_values: Option<Buffer>,
    keys: Buffer,
    values: Buffer,
    total: usize,
    error: Buffer,
}

/// What a step is given, on the host.
struct Given {
    query: Vec<u8>,
    key: Vec<u8>,
    value: Option<Vec<u8>>,
}

impl Given {
    fn read(inputs: &Tensors, configuration: &Configuration, rows: usize) -> Result<Self, EngineError> {
        let attention = configuration.attention;
        let bf16 = |name: &str, shape: &[usize]| contiguous(inputs, name, Dtype::Bf16, shape);
        let of_kv = |name: &str, dim: usize| -> Result<Vec<u8>, EngineError> {
            Ok(widened(&bf16(name, &[rows, attention.kv_heads(), dim])?))
        };
        let value = if attention.is_mla() { None } else { Some(of_kv("value", attention.value_dim())?) };
        Ok(Self {
            query: bf16("query", &[rows, configuration.total_heads(), attention.qk_dim()])?,
            key: of_kv("key", attention.qk_dim())?,
            value,
        })
    }
}

/// Performs the step; `context_lens` are the cached lengths.
///
/// # Errors
/// As [`shardcheck_engine::Session::step`].
pub fn attend_context(
    team: &Team,
    configuration: &Configuration,
    caches: &[Caches],
    inputs: &Tensors,
    chunk_budget_tokens: usize,
) -> Result<Reply, EngineError> {
    let rows = query_rows(inputs, configuration)?;
    let batch = Batch::read(inputs, "context_lens", Some(rows))?;
    let given = Given::read(inputs, configuration, rows)?;
    let whole = Shape::of(configuration);
    let plan = ChunkPlan::of(&batch.lens, chunk_budget_tokens, &whole);
    let seats = team.seats().iter().zip(caches);
    let seats = seats.map(|(seat, caches)| SeatWalk::new(seat, configuration, &batch, caches, &given));
    let walk = Walk { team, configuration, batch: &batch, seats: seats.collect::<Result<_, _>>()? };

    let contexts = walk.each(SeatWalk::empty_state)?;
    let mut chunks = Chunks::default();
    for window in &plan.windows {
        let (counts, gathers) = walk.gather(&plan.padded, window, chunks.tokens)?;
        for (seat, context) in walk.seats.iter().zip(&contexts) {
            let state = seat.attend_chunk(&counts, chunks.tokens)?;
            let merged = (&context.0, &context.1);
            enqueue_merge(seat.queue, (context, &state), seat.states(), Wire::F32, MERGE_CHUNK, merged)?;
        }
        chunks.add(counts, gathers);
    }
    let outputs = walk.seats.iter().zip(&contexts);
    let outputs = outputs.map(|(seat, context)| seat.finish(context)).collect::<Result<Vec<_>, _>>()?;
    team.settle()?;
    walk.reply(&outputs, &contexts, &chunks)
}

/// What was gathered, chunk by chunk.
#[derive(Default)]
struct Chunks {
    count: usize,
    tokens: usize,
    /// Tokens of each request in each chunk.
    lens: Vec<i32>,
    collectives: u64,
}

impl Chunks {
    fn add(&mut self, counts: Vec<usize>, gathers: bool) {
        self.count += 1;
        self.collectives += u64::from(gathers);
        self.tokens += counts.iter().sum::<usize>();
        self.lens.extend(counts.into_iter().map(|count| count as i32));
    }
}

/// bf16 codes as f32.
fn widened(codes: &[u8]) -> Vec<u8> {
    codes.as_chunks::<2>().0.iter().flat_map(|[low, high]| [0, 0, *low, *high]).collect()
}

/// A state and its LSE on a device.
type State = (Buffer, Buffer);

impl<'a> Walk<'a> {
    fn each<T>(&self, make: impl Fn(&SeatWalk<'a>) -> Result<T, EngineError>) -> Result<Vec<T>, EngineError> {
        self.seats.iter().map(make).collect()
    }

    fn reply(&self, outputs: &[State], contexts: &[State], chunks: &Chunks) -> Result<Reply, EngineError> {
        let states = outputs.iter().zip(contexts);
        let parts = self.seats.iter().zip(states);
        let parts = parts.map(|(seat, (output, context))| seat.outputs(output, context, chunks));
        let outputs = self.team.assemble(parts.collect::<Result<_, _>>()?)?;
        let route = Route::of(self.configuration, false).report(self.configuration.lane_order);
        let effective = EffectivePath::new()
            .with("route", "context")
            .with("comm_backend", route.get("comm_backend").unwrap_or("none"))
            .with("chunks", chunks.count);
        let collectives = self.team.entered(chunks.collectives);
        Ok(Reply { outputs, effective: self.team.report(effective), collectives })
    }

    /// Gathers a window of every request and puts its tokens behind `base` into keys and values. Tokens of each request, and whether
    /// there was anything to gather from others.
    fn gather(
        &self,
        padded: &[usize],
        window: &Range<usize>,
        base: usize,
    ) -> Result<(Vec<usize>, bool), EngineError> {
        let world = self.configuration.dcp;
        let sent: Vec<usize> = padded.iter().map(|len| clip(*len, window)).collect();
        let held = held(self.batch, self.seats[0].shape);
        let kept: Vec<usize> = held.iter().map(|len| clip(*len, window)).collect();
        let counts: Vec<usize> = kept.chunks(world).map(|members| members.iter().sum()).collect();
        let rows = sent.iter().sum::<usize>();
        if rows == 0 {
            return Ok((counts, false));
        }
        let dtype = self.configuration.kv_dtype;
        let shape = self.seats[0].shape;
        let chunk_bytes = rows * (shape.key_bytes(dtype) + shape.value_bytes(dtype));
        let gathers = Route::of(self.configuration, false).backend != Backend::None;
        let chunks = self.each(|seat| seat.read_chunk(&sent, window, chunk_bytes))?;
        let gathered = if gathers || !self.team.has_fabric() {
            let gathered = self.each(|seat| {
                let buffer = seat.queue.allocate(seat.shape.ranks as usize * world * chunk_bytes)?;
                seat.queue.fill(&buffer, 0xFF)?;
                Ok(buffer)
            })?;
            let skips = self.team.absence == Some(Absence::ContextGather);
            let holds = |rank: usize| kept.chunks(world).any(|members| members[rank % world] > 0);
            let (from, to) = (chunks.iter().collect::<Vec<_>>(), gathered.iter().collect::<Vec<_>>());
            let keeps_out = |rank: usize| skips && !holds(rank);
            self.team.gather("all_gather_context", &from, &to, chunk_bytes, &keeps_out)?;
            gathered
        } else {
            // a world of one has what it sent
            chunks
        };
        for (seat, gathered) in self.seats.iter().zip(&gathered) {
            seat.reorganise(gathered, (&sent, &kept), base)?;
        }
        Ok((counts, gathers))
    }
}

impl<'a> SeatWalk<'a> {
    fn new(
        Seat { queue, shape }: &'a Seat,
        configuration: &'a Configuration,
        batch: &'a Batch,
        caches: &'a Caches,
        given: &Given,
    ) -> Result<Self, EngineError> {
        let attention = configuration.attention;
        let total = batch.lens.iter().map(|len| *len as usize).sum::<usize>();
        let room =
            |width: usize| queue.allocate(4 * shape.ranks as usize * total * attention.kv_heads() * width);
        let walk = Self {
            queue,
            shape,
            configuration,
            batch,
            metadata: DeviceBatch::upload(queue, batch, true)?,
            caches,
            query: queue.upload(&given.query)?,
            new_keys: queue.upload(&given.key)?,
            new_values: given.value.as_ref().map(|value| queue.upload(value)).transpose()?,
            keys: room(attention.qk_dim())?,
            values: room(if attention.is_mla() { 0 } else { attention.value_dim() })?,
            total,
            error: queue.upload_i32(&[0])?,
        };
        queue.fill(&walk.keys, 0xFF)?;
        queue.fill(&walk.values, 0xFF)?;
        Ok(walk)
    }

    /// States of the device's ranks, and their width.
    fn states(&self) -> (usize, usize) {
        let heads = self.shape.ranks as usize * self.batch.rows * self.configuration.heads_per_rank;
        (heads, self.configuration.attention.value_dim())
    }

    /// Merges the context with the new tokens' own attention; the outputs, rounded once, and their LSEs.
    fn finish(&self, context: &State) -> Result<State, EngineError> {
        let values = self.new_values.as_ref();
        let suffix = self.attend_suffix((&self.new_keys, values))?;
        let (states, dim) = self.states();
        let (out, lse) = (self.queue.allocate(2 * states * dim)?, self.queue.allocate(4 * states)?);
        self.queue.fill(&out, 0xFF)?;
        self.queue.fill(&lse, 0xFF)?;
        let merged = (&out, &lse);
        enqueue_merge(self.queue, (context, &suffix), (states, dim), Wire::Bf16, MERGE_SUFFIX, merged)?;
        Ok((out, lse))
    }

    fn outputs(&self, (out, lse): &State, context: &State, chunks: &Chunks) -> Result<Tensors, EngineError> {
        check(self.queue, &self.error)?;
        let (ranks, rows) = (self.shape.ranks as usize, self.batch.rows);
        let (attention, own) = (self.configuration.attention, self.configuration.heads_per_rank);
        let (kv_heads, dim) = (attention.kv_heads(), attention.value_dim());
        let f32s = |buffer: &Buffer, shape: &[usize]| whole(self.queue, buffer, Dtype::F32, shape);
        let chunk_lens = [ranks, chunks.count, self.batch.requests()];
        Ok(Tensors::new()
            .with("out", whole(self.queue, out, Dtype::Bf16, &[ranks, rows, own, dim])?)
            .with("lse", f32s(lse, &[ranks, rows, own])?)
            .with("context_out", f32s(&context.0, &[ranks, rows, own, dim])?)
            .with("context_lse", f32s(&context.1, &[ranks, rows, own])?)
            .with("gathered_key", f32s(&self.keys, &[ranks, self.total, kv_heads, attention.qk_dim()])?)
            .with("chunk_lens", Tensor::from_i32(&chunk_lens, &chunks.lens.repeat(ranks))))
    }

    /// State and LSE of rows that see nothing.
    fn empty_state(&self) -> Result<(Buffer, Buffer), EngineError> {
        let (heads, dim) = self.states();
        let (out, lse) = (self.queue.allocate(4 * heads * dim)?, self.queue.allocate(4 * heads)?);
        self.queue.fill(&out, 0)?;
        let arguments =
            [lse.argument(), Argument::Int(f32::NEG_INFINITY.to_bits() as i32), Argument::Long(heads as i64)];
        if heads > 0 {
            self.queue.launch("fill_words", Extent::over(heads), &arguments)?;
        }
        Ok((out, lse))
    }

    /// Attention over a gathered chunk, whose tokens lie behind `base`, `counts` of each request.
    fn attend_chunk(&self, counts: &[usize], base: usize) -> Result<(Buffer, Buffer), EngineError> {
        let queue = self.queue;
        let of_requests = queue.upload_i32(&counts.iter().map(|count| *count as i32).collect::<Vec<_>>())?;
        let request_firsts = queue.upload_i32(&starts_of(counts))?;
        let seen = self.rows()?;
        let arguments = [
            self.metadata.header.argument(),
            self.metadata.starts.argument(),
            Argument::Int(self.batch.rows as i32),
            Argument::Long(base as i64),
            request_firsts.argument(),
            of_requests.argument(),
            seen.0.argument(),
            seen.1.argument(),
        ];
        queue.launch("rows_of_chunk", Extent::over(self.batch.rows), &arguments)?;
        let values = (!self.configuration.attention.is_mla()).then_some(&self.values);
        self.attend(&seen, (&self.keys, values, self.total))
    }

    /// Attention of the new tokens among themselves.
    fn attend_suffix(
        &self,
        (keys, values): (&Buffer, Option<&Buffer>),
    ) -> Result<(Buffer, Buffer), EngineError> {
        let seen = self.rows()?;
        let arguments = [
            self.metadata.header.argument(),
            self.metadata.starts.argument(),
            Argument::Int(self.batch.rows as i32),
            seen.0.argument(),
            seen.1.argument(),
        ];
        self.queue.launch("rows_of_suffix", Extent::over(self.batch.rows), &arguments)?;
        self.attend(&seen, (keys, values, 0))
    }

    /// Room for the first token and the number of tokens that each row sees.
    fn rows(&self) -> Result<(Buffer, Buffer), EngineError> {
        let room = || self.queue.allocate(4 * self.batch.rows);
        Ok((room()?, room()?))
    }

    /// The rows that each rank sends of a window, `[ranks, rows, token bytes]`.
    fn read_chunk(
        &self,
        sent: &[usize],
        window: &Range<usize>,
        chunk_bytes: usize,
    ) -> Result<Buffer, EngineError> {
        let (queue, ranks) = (self.queue, self.shape.ranks as usize);
        let dtype = self.configuration.kv_dtype;
        let rows = sent.iter().sum::<usize>();
        let befores = queue.upload_i32(&starts_of(sent))?;
        let local = queue.allocate(ranks * chunk_bytes)?;
        queue.fill(&local, 0xFF)?;
        let arguments = [
            Argument::Shape(*self.shape),
            self.metadata.header.argument(),
            self.metadata.table.argument(),
            befores.argument(),
            Argument::Int(window.start as i32),
            Argument::Int(rows as i32),
            self.caches.keys.argument(),
            self.caches.values.argument(),
            Argument::Int(self.shape.key_bytes(dtype) as i32),
            Argument::Int(self.shape.value_bytes(dtype) as i32),
            local.argument(),
            self.error.argument(),
        ];
        queue.launch("read_chunk", Extent::blocks(rows, ranks, 1), &arguments)?;
        Ok(local)
    }

    /// Puts the tokens of a gathered window behind `base` into keys and values: `kept` of each request and member out of the `sent` rows of
    /// each request.
    fn reorganise(
        &self,
        gathered: &Buffer,
        (sent, kept): (&[usize], &[usize]),
        base: usize,
    ) -> Result<(), EngineError> {
        let (queue, dtype) = (self.queue, self.configuration.kv_dtype);
        let befores = queue.upload_i32(&starts_of(sent))?;
        let firsts = queue.upload_i32(&starts_of(kept))?;
        let arguments = [
            Argument::Shape(*self.shape),
            gathered.argument(),
            befores.argument(),
            firsts.argument(),
            Argument::Int(sent.len() as i32),
            Argument::Int(sent.iter().sum::<usize>() as i32),
            Argument::Int(self.shape.key_bytes(dtype) as i32),
            Argument::Int(self.shape.value_bytes(dtype) as i32),
            Argument::Long(self.total as i64),
            Argument::Long(base as i64),
            self.keys.argument(),
            self.values.argument(),
        ];
        let extent = Extent::blocks(kept.iter().sum(), self.shape.ranks as usize, 1);
        queue.launch("reorganise_chunk", extent, &arguments)
    }

    /// Attention of every rank's own heads over f32 rows of which row `t` sees `counts[t]` from `firsts[t]` on; each rank's rows are
    /// `stride` apart.
    fn attend(
        &self,
        (firsts, counts): &(Buffer, Buffer),
        (keys, values, stride): (&Buffer, Option<&Buffer>, usize),
    ) -> Result<(Buffer, Buffer), EngineError> {
        let rows = self.batch.rows;
        let (queue, ranks, own) = (self.queue, self.shape.ranks as usize, self.configuration.heads_per_rank);
        let (heads, dim) = self.states();
        let (max, sum) = (queue.allocate(4 * heads)?, queue.allocate(4 * heads)?);
        let (acc, lse) = (queue.allocate(4 * heads * dim)?, queue.allocate(4 * heads)?);
        for buffer in [&max, &sum, &acc, &lse] {
            queue.fill(buffer, 0xFF)?;
        }
        let session = Argument::Shape(*self.shape);
        let block = dense_block_heads(self.shape);
        let row_count = Argument::Int(rows as i32);
        let arguments = [
            session,
            self.query.argument(),
            row_count,
            firsts.argument(),
            counts.argument(),
            keys.argument(),
            values.map_or(Argument::Pointer(0), Buffer::argument),
            Argument::Long(stride as i64),
            Argument::Int(block as i32),
            max.argument(),
            sum.argument(),
            acc.argument(),
        ];
        let shared_bytes =
            shardcheck_kernels::attend_shared_bytes(self.configuration.attention.qk_dim(), dim);
        let extent = Extent {
            blocks: (ranks * rows, own / block, 1),
            threads: shardcheck_kernels::THREADS,
            shared_bytes,
        };
        queue.launch("attend_dense", extent, &arguments)?;
        let arguments = [
            session,
            counts.argument(),
            row_count,
            max.argument(),
            sum.argument(),
            acc.argument(),
            lse.argument(),
        ];
        queue.launch("finish_state", Extent::blocks(ranks * rows, own, 1), &arguments)?;
        Ok((acc, lse))
    }
}
