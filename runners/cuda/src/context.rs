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
    queue: &'a Arc<Queue>,
    configuration: &'a Configuration,
    shape: &'a Shape,
    batch: &'a Batch,
    metadata: DeviceBatch,
    caches: &'a Caches,
    query: Buffer,
    keys: Buffer,
    values: Buffer,
    total: usize,
    error: Buffer,
}

/// Performs the step; `context_lens` are the cached lengths.
///
/// # Errors
/// As [`shardcheck_engine::Session::step`].
pub fn attend_context(
    queue: &Arc<Queue>,
    configuration: &Configuration,
    shape: &Shape,
    caches: &Caches,
    inputs: &Tensors,
    chunk_budget_tokens: usize,
) -> Result<Reply, EngineError> {
    let rows = query_rows(inputs, configuration)?;
    let batch = Batch::read(inputs, "context_lens", Some(rows))?;
    let attention = configuration.attention;
    let (ranks, own, dim) = (configuration.tp, configuration.heads_per_rank, attention.value_dim());
    let bf16 = |name: &str, shape: &[usize]| contiguous(inputs, name, Dtype::Bf16, shape);
    let query = bf16("query", &[rows, configuration.total_heads(), attention.qk_dim()])?;
    let new_keys = widened(queue, &bf16("key", &[rows, attention.kv_heads(), attention.qk_dim()])?)?;
    let new_values = if attention.is_mla() {
        None
    } else {
        Some(widened(queue, &bf16("value", &[rows, attention.kv_heads(), dim])?)?)
    };
    let plan = ChunkPlan::of(&batch.lens, chunk_budget_tokens, shape);
    let total = batch.lens.iter().map(|len| *len as usize).sum::<usize>();
    let room = |width: usize| queue.allocate(4 * ranks * total * attention.kv_heads() * width);
    let walk = Walk {
        queue,
        configuration,
        shape,
        batch: &batch,
        metadata: DeviceBatch::upload(queue, &batch, true)?,
        caches,
        query: queue.upload(&query)?,
        keys: room(attention.qk_dim())?,
        values: if attention.is_mla() { queue.allocate(0)? } else { room(dim)? },
        total,
        error: queue.upload_i32(&[0])?,
    };
    queue.fill(&walk.keys, 0xFF)?;
    queue.fill(&walk.values, 0xFF)?;

    let context = walk.empty_state()?;
    let states = (ranks * rows * own, dim);
    let mut chunks = Chunks::default();
    for window in &plan.windows {
        let (counts, gathers) = walk.gather(&plan.padded, window, chunks.tokens)?;
        let state = walk.attend_chunk(&counts, chunks.tokens)?;
        let merged = (&context.0, &context.1);
        enqueue_merge(queue, (&context, &state), states, Wire::Single, MERGE_CHUNK, merged)?;
        chunks.add(counts, gathers);
    }
    let suffix = walk.attend_suffix((&new_keys, new_values.as_ref()))?;
    let (out, lse) = (queue.allocate(2 * ranks * rows * own * dim)?, queue.allocate(4 * ranks * rows * own)?);
    queue.fill(&out, 0xFF)?;
    queue.fill(&lse, 0xFF)?;
    enqueue_merge(queue, (&context, &suffix), states, Wire::Half, MERGE_SUFFIX, (&out, &lse))?;
    check(queue, &walk.error)?;
    walk.reply((&out, &lse), &context, &chunks)
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

/// bf16 values as f32 on the device.
fn widened(queue: &Arc<Queue>, codes: &[u8]) -> Result<Buffer, EngineError> {
    let bytes: Vec<u8> =
        codes.as_chunks::<2>().0.iter().flat_map(|[low, high]| [0, 0, *low, *high]).collect();
    queue.upload(&bytes)
}

impl Walk<'_> {
    fn reply(
        &self,
        (out, lse): (&Buffer, &Buffer),
        context: &(Buffer, Buffer),
        chunks: &Chunks,
    ) -> Result<Reply, EngineError> {
        let (ranks, rows, own) = (self.configuration.tp, self.batch.rows, self.configuration.heads_per_rank);
        let attention = self.configuration.attention;
        let (kv_heads, dim) = (attention.kv_heads(), attention.value_dim());
        let f32s = |buffer: &Buffer, shape: &[usize]| whole(self.queue, buffer, Dtype::F32, shape);
        let chunk_lens = [ranks, chunks.count, self.batch.requests()];
        let outputs = Tensors::new()
            .with("out", whole(self.queue, out, Dtype::Bf16, &[ranks, rows, own, dim])?)
            .with("lse", f32s(lse, &[ranks, rows, own])?)
            .with("context_out", f32s(&context.0, &[ranks, rows, own, dim])?)
            .with("context_lse", f32s(&context.1, &[ranks, rows, own])?)
            .with("gathered_key", f32s(&self.keys, &[ranks, self.total, kv_heads, attention.qk_dim()])?)
            .with("chunk_lens", Tensor::from_i32(&chunk_lens, &chunks.lens.repeat(ranks)));
        let route = Route::of(self.configuration, false).report(self.configuration.lane_order);
        let effective = EffectivePath::new()
            .with("route", "context")
            .with("comm_backend", route.get("comm_backend").unwrap_or("none"))
            .with("chunks", chunks.count);
        Ok(Reply { outputs, effective, collectives: vec![chunks.collectives; ranks] })
    }

    /// State and LSE of rows that see nothing.
    fn empty_state(&self) -> Result<(Buffer, Buffer), EngineError> {
        let heads = self.configuration.tp * self.batch.rows * self.configuration.heads_per_rank;
        let dim = self.configuration.attention.value_dim();
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

    /// Gathers a window of every request and puts its tokens behind `base` into keys and values. Tokens of each request, and whether
    /// there was anything to gather from others.
    fn gather(
        &self,
        padded: &[usize],
        window: &Range<usize>,
        base: usize,
    ) -> Result<(Vec<usize>, bool), EngineError> {
        let (queue, world, ranks) = (self.queue, self.configuration.dcp, self.configuration.tp);
        let sent: Vec<usize> = padded.iter().map(|len| clip(*len, window)).collect();
        let kept: Vec<usize> = held(self.batch, self.shape).iter().map(|len| clip(*len, window)).collect();
        let rows = sent.iter().sum::<usize>();
        let counts: Vec<usize> = kept.chunks(world).map(|members| members.iter().sum()).collect();
        if rows == 0 {
            return Ok((counts, false));
        }
        let dtype = self.configuration.kv_dtype;
        let (key_bytes, value_bytes) = (self.shape.key_bytes(dtype), self.shape.value_bytes(dtype));
        let befores = queue.upload_i32(&starts_of(&sent))?;
        let chunk_bytes = rows * (key_bytes + value_bytes);
        // an odd number of bytes a rank would not be whole words of the exchange
        let local = queue.allocate(ranks * chunk_bytes)?;
        queue.fill(&local, 0xFF)?;
        let session = Argument::Shape(*self.shape);
        let arguments = [
            session,
            self.metadata.header.argument(),
            self.metadata.table.argument(),
            befores.argument(),
            Argument::Int(window.start as i32),
            Argument::Int(rows as i32),
            self.caches.keys.argument(),
            self.caches.values.argument(),
            Argument::Int(key_bytes as i32),
            Argument::Int(value_bytes as i32),
            local.argument(),
            self.error.argument(),
        ];
        queue.launch("read_chunk", Extent::blocks(rows, ranks, 1), &arguments)?;
        let gathers = Route::of(self.configuration, false).backend != Backend::None;
        let gathered = queue.allocate(ranks * world * chunk_bytes)?;
        let arguments = [session, local.argument(), Argument::Long(chunk_bytes as i64), gathered.argument()];
        queue.launch("gather_bytes", Extent::over(ranks * world * chunk_bytes), &arguments)?;
        let firsts = queue.upload_i32(&starts_of(&kept))?;
        let arguments = [
            session,
            gathered.argument(),
            befores.argument(),
            firsts.argument(),
            Argument::Int(padded.len() as i32),
            Argument::Int(rows as i32),
            Argument::Int(key_bytes as i32),
            Argument::Int(value_bytes as i32),
            Argument::Long(self.total as i64),
            Argument::Long(base as i64),
            self.keys.argument(),
            self.values.argument(),
        ];
        let tokens = counts.iter().sum::<usize>();
        queue.launch("reorganise_chunk", Extent::blocks(tokens, ranks, 1), &arguments)?;
        Ok((counts, gathers))
    }

    /// Attention of every rank's own heads over f32 rows of which row `t` sees `counts[t]` from `firsts[t]` on; each rank's rows are
    /// `stride` apart.
    fn attend(
        &self,
        (firsts, counts): &(Buffer, Buffer),
        (keys, values, stride): (&Buffer, Option<&Buffer>, usize),
    ) -> Result<(Buffer, Buffer), EngineError> {
        let rows = self.batch.rows;
        let (queue, ranks, own) = (self.queue, self.configuration.tp, self.configuration.heads_per_rank);
        let heads = ranks * rows * own;
        let dim = self.configuration.attention.value_dim();
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
