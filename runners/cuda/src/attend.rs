//! Attention of new rows over the cached tokens of their request: decode, verification, draft block.

use std::sync::Arc;

use shardcheck_engine::{Configuration, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{Batch, DeviceBatch, bytes_of, contiguous, query_rows};
use crate::caches::{Caches, check};
use crate::exchange::{Backend, MergeBuffers, MergeShape, Route, Wire};
use crate::layout::row_metadata;
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::session::ReplayFault;
use crate::shape::{Shape, head_blocks};

/// Most bytes of the accumulators of segments.
const MAX_SEGMENT_BYTES: usize = 8 << 30;

/// Which attention kernel runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Any shape, f32 arithmetic.
    Plain,
    /// Latent attention on tensor cores, a warp's instructions.
    Latent,
    /// The same on Hopper's warpgroup instructions.
    Warpgroups,
}

impl Kernel {
    /// The kernel for a session: tensor cores where shape, cache and card allow it.
    pub fn of(queue: &Queue, configuration: &Configuration, shape: &Shape) -> Self {
        let fits = shape.shared != 0
            && shape.key_dim as usize == shardcheck_kernels::LATENT_KEY_DIM
            && shape.value_dim as usize == shardcheck_kernels::LATENT_VALUE_DIM
            && matches!(configuration.kv_dtype, Dtype::Bf16 | Dtype::E4m3fn | Dtype::E4m3fnuz | Dtype::E5m2);
        match (fits && queue.device.has_latent_kernels(), queue.device.has_warpgroups()) {
            (false, _) => Self::Plain,
            (true, false) => Self::Latent,
            (true, true) => Self::Warpgroups,
        }
    }

    /// Name in the effective path.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Latent => "mma",
            Self::Warpgroups => "wgmma",
        }
    }

    fn blocks_of_heads(self, shape: &Shape) -> usize {
        match self {
            Self::Plain => head_blocks(shape),
            Self::Latent | Self::Warpgroups => {
                (shape.width as usize).div_ceil(shardcheck_kernels::LATENT_HEADS)
            }
        }
    }

    /// Segments of a row that spread the tokens of all rows evenly over the card: `longest` is the most tokens of a row, `total` those of
    /// all rows on all ranks. No more than there is memory for.
    pub fn segments(self, queue: &Queue, shape: &Shape, rows: usize, longest: usize, total: usize) -> usize {
        let resident = match self {
            Self::Plain => 4 * queue.device.properties.multiprocessors,
            Self::Latent | Self::Warpgroups => queue.device.properties.multiprocessors,
        };
        let tokens_a_block = (total * self.blocks_of_heads(shape)).div_ceil(resident);
        let at = shape.ranks as usize * rows;
        let bytes = (at * shape.width as usize * shape.value_dim as usize * 4).max(1);
        longest
            .div_ceil(tokens_a_block.max(shardcheck_kernels::MIN_SEGMENT_TOKENS))
            .min(MAX_SEGMENT_BYTES / bytes)
            .clamp(1, shardcheck_kernels::MAX_SEGMENTS)
    }
}

/// What a captured step is fixed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Rows, padding included.
    pub rows: usize,
    /// Requests that there is room for.
    pub requests: usize,
    /// Block-table entries that there is room for.
    pub entries: usize,
    /// Segments of a row.
    pub segments: usize,
    /// Whether there is an up-projection.
    pub projects: bool,
}

/// Everything of a step that lies on the device.
pub struct Step {
    bucket: Bucket,
    shape: Shape,
    kernel: Kernel,
    route: Route,
    v_head_dim: usize,
    pub metadata: DeviceBatch,
    pub query: Buffer,
    pub w_uv: Buffer,
    own_query: Buffer,
    kernel_query: Buffer,
    row_lens: Buffer,
    row_requests: Buffer,
    max: Buffer,
    sum: Buffer,
    acc: Buffer,
    latent: Buffer,
    partial: Buffer,
    partial_lse: Buffer,
    merge: MergeBuffers,
    merged: Buffer,
    out: Buffer,
    lse: Buffer,
    error: Buffer,
}

impl Step {
    /// Room for a step.
    ///
    /// # Errors
    /// What the driver says, such as that there is no memory left.
    pub fn allocate(
        queue: &Arc<Queue>,
        configuration: &Configuration,
        shape: &Shape,
        bucket: Bucket,
    ) -> Result<Self, EngineError> {
        let kernel = Kernel::of(queue, configuration, shape);
        let route = Route::of(configuration, bucket.projects);
        let (ranks, own, heads, width) =
            (shape.ranks as usize, shape.own as usize, shape.heads as usize, shape.width as usize);
        let (key_dim, value_dim, v_head_dim) =
            (shape.key_dim as usize, shape.value_dim as usize, configuration.attention.v_head_dim());
        let at = ranks * bucket.rows;
        let weights = if bucket.projects { ranks * own * value_dim * v_head_dim * 2 } else { 0 };
        let (partial_dim, out_dim) = dims(&route, bucket.projects, value_dim, v_head_dim);
        let merge = MergeShape { rows: bucket.rows, heads, dim: partial_dim, wire: Wire::Half };
        let projects_before = bucket.projects && route.project_before_merge;
        let projects_after = bucket.projects && !route.project_before_merge;
        Ok(Self {
            bucket,
            shape: *shape,
            kernel,
            route,
            v_head_dim,
            metadata: DeviceBatch::with_room(queue, bucket.requests, bucket.entries)?,
            query: queue.allocate(bucket.rows * ranks * own * key_dim * 2)?,
            w_uv: queue.allocate(weights)?,
            own_query: queue.allocate(at * own * key_dim * 2)?,
            kernel_query: queue.allocate(at * width * key_dim * 2)?,
            row_lens: queue.allocate(4 * at)?,
            row_requests: queue.allocate(4 * bucket.rows)?,
            max: queue.allocate(4 * bucket.segments * at * width)?,
            sum: queue.allocate(4 * bucket.segments * at * width)?,
            acc: queue.allocate(4 * bucket.segments * at * width * value_dim)?,
            latent: queue.allocate(at * heads * value_dim * 2)?,
            partial: queue.allocate(if projects_before { at * heads * v_head_dim * 2 } else { 0 })?,
            partial_lse: queue.allocate(4 * at * heads)?,
            merge: MergeBuffers::allocate(queue, shape, merge, route.backend)?,
            merged: queue.allocate(if projects_after { at * own * value_dim * 2 } else { 0 })?,
            out: queue.allocate(at * own * out_dim * 2)?,
            lse: queue.allocate(4 * at * own)?,
            error: queue.allocate(4)?,
        })
    }

    /// Enqueues the whole step over what its buffers hold. Every buffer that a kernel writes is poisoned first, so that what nobody writes
    /// shows as NaN.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enqueue(&self, queue: &Arc<Queue>, caches: &Caches) -> Result<(), EngineError> {
        let rows = self.bucket.rows;
        queue.fill(&self.error, 0)?;
        for buffer in [
            &self.own_query,
            &self.kernel_query,
            &self.latent,
            &self.partial,
            &self.partial_lse,
            &self.merged,
        ] {
            queue.fill(buffer, 0xFF)?;
        }
        for buffer in [&self.out, &self.lse, &self.max, &self.sum, &self.row_lens] {
            queue.fill(buffer, 0xFF)?;
        }
        if rows == 0 {
            return Ok(());
        }
        row_metadata(queue, &self.shape, &self.metadata, rows, &self.row_lens, &self.row_requests)?;
        self.gather_query(queue)?;
        self.local_attention(queue, caches)?;
        let projects_before = self.bucket.projects && self.route.project_before_merge;
        let partial = if projects_before {
            self.project(queue, &self.latent, self.shape.heads, true, &self.partial)?;
            &self.partial
        } else {
            &self.latent
        };
        let projects_after = self.bucket.projects && !self.route.project_before_merge;
        let merged = if projects_after { &self.merged } else { &self.out };
        self.merge.enqueue(queue, &self.shape, (partial, &self.partial_lse), (merged, &self.lse))?;
        if projects_after {
            self.project(queue, &self.merged, self.shape.own, false, &self.out)?;
        }
        Ok(())
    }

    fn gather_query(&self, queue: &Arc<Queue>) -> Result<(), EngineError> {
        let Shape { ranks, own, width, key_dim, .. } = self.shape;
        let rows = Argument::Int(self.bucket.rows as i32);
        let session = Argument::Shape(self.shape);
        let elements = |heads: i32| ranks as usize * self.bucket.rows * (heads * key_dim) as usize;
        let (query, own_query, kernel_query) =
            (self.query.argument(), self.own_query.argument(), self.kernel_query.argument());
        if self.route.query_replication {
            let arguments = [session, query, rows, kernel_query];
            return queue.launch("select_group_heads", Extent::over(elements(width)), &arguments);
        }
        queue.launch("select_own_heads", Extent::over(elements(own)), &[session, query, rows, own_query])?;
        queue.launch("gather_heads", Extent::over(elements(width)), &[session, own_query, rows, kernel_query])
    }

    /// Enqueues the attention of the gathered heads and the partial that comes of it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn local_attention(&self, queue: &Arc<Queue>, caches: &Caches) -> Result<(), EngineError> {
        let (rows, segments) = (self.bucket.rows, self.bucket.segments);
        let at = self.shape.ranks as usize * rows;
        let counts = [Argument::Int(rows as i32), Argument::Int(segments as i32)];
        let statistics = [self.max.argument(), self.sum.argument(), self.acc.argument()];
        let session = Argument::Shape(self.shape);
        let arguments = [
            &[
                session,
                self.metadata.header.argument(),
                self.metadata.table.argument(),
                self.row_lens.argument(),
                self.row_requests.argument(),
            ],
            &counts[..],
            &[self.kernel_query.argument(), caches.keys.argument(), caches.values.argument()],
            &statistics,
            &[self.error.argument()],
        ]
        .concat();
        let blocks = (at, self.kernel.blocks_of_heads(&self.shape), segments);
        let (name, extent) = match self.kernel {
            Kernel::Plain => {
                let shared_bytes = shardcheck_kernels::attend_shared_bytes(
                    self.shape.key_dim as usize,
                    self.shape.value_dim as usize,
                );
                ("attend_paged", Extent { blocks, threads: shardcheck_kernels::THREADS, shared_bytes })
            }
            Kernel::Latent | Kernel::Warpgroups => (
                if self.shape.dtype == 0 { "attend_latent_bf16" } else { "attend_latent_byte" },
                Extent {
                    blocks,
                    threads: shardcheck_kernels::LATENT_THREADS,
                    shared_bytes: shardcheck_kernels::LATENT_SHARED_BYTES,
                },
            ),
        };
        queue.launch(name, extent, &arguments)?;
        // the latent kernel multiplies codes; its sums still lack the scale of the values
        let factor = if self.kernel == Kernel::Plain { 1.0 } else { self.shape.kv_scale };
        let arguments = [
            &[session, self.row_lens.argument()],
            &counts[..],
            &[Argument::Float(factor)],
            &statistics,
            &[self.latent.argument(), self.partial_lse.argument()],
        ]
        .concat();
        queue.launch("finish_segments", Extent::blocks(at, self.shape.heads as usize, 1), &arguments)
    }

    /// Lengths of rows, `[ranks, T]`.
    pub fn row_lens(&self) -> &Buffer {
        &self.row_lens
    }

    /// Requests of rows, `[T]`.
    pub fn row_requests(&self) -> &Buffer {
        &self.row_requests
    }

    fn project(
        &self,
        queue: &Arc<Queue>,
        from: &Buffer,
        heads: i32,
        of_group: bool,
        to: &Buffer,
    ) -> Result<(), EngineError> {
        let arguments = [
            Argument::Shape(self.shape),
            from.argument(),
            self.w_uv.argument(),
            Argument::Int(self.bucket.rows as i32),
            Argument::Int(heads),
            Argument::Int(self.shape.value_dim),
            Argument::Int(self.v_head_dim as i32),
            Argument::Int(i32::from(of_group)),
            to.argument(),
        ];
        let extent = Extent::blocks(self.bucket.rows, heads as usize, self.shape.ranks as usize);
        queue.launch("project_heads", extent, &arguments)
    }

    /// Reads the outputs of the first `rows` rows, once the step has run.
    ///
    /// # Errors
    /// What the driver says, and a crash for an address that was not the cache's.
    pub fn outputs(&self, queue: &Arc<Queue>, rows: usize) -> Result<Tensors, EngineError> {
        check(queue, &self.error)?;
        let Shape { ranks, own, heads, width, key_dim, value_dim, .. } = self.shape;
        let [ranks, own, heads] = [ranks, own, heads].map(|extent| extent as usize);
        let (key_dim, value_dim) = (key_dim as usize, value_dim as usize);
        let (partial_dim, out_dim) = dims(&self.route, self.bucket.projects, value_dim, self.v_head_dim);
        let before = self.bucket.projects && self.route.project_before_merge;
        let partial = if before { &self.partial } else { &self.latent };
        let read = |buffer: &Buffer, dtype: Dtype, shape: &[usize]| -> Result<Tensor, EngineError> {
            let row_bytes = shape[2..].iter().product::<usize>() * dtype.size_bytes();
            let bytes = queue.read(buffer, ranks * self.bucket.rows * row_bytes)?;
            Ok(Tensor::new(
                dtype,
                shape.to_vec(),
                first_rows(bytes, ranks, self.bucket.rows, rows, row_bytes),
            )?)
        };
        let queries = if width as usize == heads {
            read(&self.kernel_query, Dtype::Bf16, &[ranks, rows, heads, key_dim])?
        } else {
            let count = ranks * self.bucket.rows * heads * key_dim;
            let stripped = queue.allocate(2 * count)?;
            let arguments = [
                Argument::Shape(self.shape),
                self.kernel_query.argument(),
                Argument::Int(self.bucket.rows as i32),
                stripped.argument(),
            ];
            queue.launch("strip_heads", Extent::over(count), &arguments)?;
            read(&stripped, Dtype::Bf16, &[ranks, rows, heads, key_dim])?
        };
        let wide = self.widened(queue, partial, ranks * self.bucket.rows * heads * partial_dim)?;
        Ok(Tensors::new()
            .with("out", read(&self.out, Dtype::Bf16, &[ranks, rows, own, out_dim])?)
            .with("lse", read(&self.lse, Dtype::F32, &[ranks, rows, own])?)
            .with("partial_out", read(&wide, Dtype::F32, &[ranks, rows, heads, partial_dim])?)
            .with("partial_lse", read(&self.partial_lse, Dtype::F32, &[ranks, rows, heads])?)
            .with("row_lens", read(&self.row_lens, Dtype::I32, &[ranks, rows])?)
            .with("gathered_query", queries))
    }

    /// bf16 values as f32.
    fn widened(&self, queue: &Arc<Queue>, from: &Buffer, count: usize) -> Result<Buffer, EngineError> {
        let to = queue.allocate(4 * count)?;
        if count > 0 {
            let mut arguments = vec![from.argument(), Argument::Int(0), Argument::Long(count as i64)];
            arguments.extend([Argument::Int(1), Argument::Int(1), Argument::Int(1)]);
            arguments.extend([1, 0, 0, 0].map(Argument::Long));
            arguments.push(to.argument());
            queue.launch("read_strided", Extent::over(count), &arguments)?;
        }
        Ok(to)
    }

    /// Collectives that a rank enters.
    pub fn collectives(&self) -> u64 {
        let gathers = self.route.backend != Backend::None && !self.route.query_replication;
        u64::from(gathers) + self.route.merge_collectives()
    }
}

/// Width of a partial and of an output.
fn dims(route: &Route, projects: bool, value_dim: usize, v_head_dim: usize) -> (usize, usize) {
    let partial = if projects && route.project_before_merge { v_head_dim } else { value_dim };
    (partial, if projects { v_head_dim } else { value_dim })
}

/// The first `rows` of each rank's `held` rows.
fn first_rows(bytes: Vec<u8>, ranks: usize, held: usize, rows: usize, row_bytes: usize) -> Vec<u8> {
    if held == rows {
        return bytes;
    }
    (0..ranks).flat_map(|rank| bytes[rank * held * row_bytes..][..rows * row_bytes].iter().copied()).collect()
}

/// What a step is asked, checked and on the host.
pub struct Question {
    pub batch: Batch,
    pub causal: bool,
    pub query: Vec<u8>,
    pub w_uv: Option<Vec<u8>>,
}

impl Question {
    /// Reads the inputs.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit.
    pub fn read(inputs: &Tensors, configuration: &Configuration, causal: bool) -> Result<Self, EngineError> {
        let rows = query_rows(inputs, configuration)?;
        let batch = Batch::read(inputs, "seq_lens", Some(rows))?;
        let attention = configuration.attention;
        let shape = [rows, configuration.total_heads(), attention.qk_dim()];
        let query = contiguous(inputs, "query", Dtype::Bf16, &shape)?;
        let weights = [configuration.total_heads(), attention.value_dim(), attention.v_head_dim()];
        let w_uv = match inputs.find("w_uv") {
            Some(_) => Some(contiguous(inputs, "w_uv", Dtype::Bf16, &weights)?),
            None => None,
        };
        Ok(Self { batch, causal, query, w_uv })
    }

    /// Most tokens that a row sees on a rank, and those of all rows on all ranks, at most.
    pub fn tokens(&self, shape: &Shape) -> (usize, usize) {
        let round = (shape.interleave * shape.world) as usize;
        let local = |len: i32| {
            let len = len as usize;
            len / round * shape.interleave as usize + (len % round).min(shape.interleave as usize)
        };
        let lens = || self.batch.lens.iter().map(|len| local(*len));
        let rows = self.batch.starts.windows(2).map(|edge| (edge[1] - edge[0]) as usize);
        let total = rows.zip(lens()).map(|(rows, len)| rows * len).sum::<usize>();
        (lens().max().unwrap_or(0), total * shape.ranks as usize)
    }

    /// Puts the question into the buffers of a step. Rows and requests beyond those of the question are padding.
    ///
    /// # Errors
    /// What the driver says.
    pub fn ask(&self, queue: &Arc<Queue>, step: &Step) -> Result<(), EngineError> {
        self.ask_as(queue, step, None, false)
    }

    /// The same, leaving as it was what a fault leaves.
    ///
    /// # Errors
    /// What the driver says.
    pub fn ask_as(
        &self,
        queue: &Arc<Queue>,
        step: &Step,
        fault: Option<ReplayFault>,
        captured_without_mask: bool,
    ) -> Result<(), EngineError> {
        let masked = !(fault == Some(ReplayFault::Mask) && captured_without_mask);
        step.metadata.write_header(queue, &self.batch, self.causal && masked)?;
        if !matches!(fault, Some(ReplayFault::Lengths | ReplayFault::LateLengths)) {
            self.write_lengths(queue, step)?;
        }
        if fault != Some(ReplayFault::Rows) {
            queue.write(&step.metadata.starts, &bytes_of(&self.batch.starts))?;
        }
        if fault != Some(ReplayFault::Table) {
            queue.write(&step.metadata.table, &bytes_of(&self.batch.table))?;
        }
        queue.write(&step.query, &self.query)?;
        queue.write(&step.w_uv, self.w_uv.as_deref().unwrap_or_default())
    }

    /// Puts the lengths of requests into the buffers of a step.
    ///
    /// # Errors
    /// What the driver says.
    pub fn write_lengths(&self, queue: &Arc<Queue>, step: &Step) -> Result<(), EngineError> {
        queue.write(&step.metadata.lens, &bytes_of(&self.batch.lens))
    }

    /// The reply, once the step has run.
    ///
    /// # Errors
    /// As [`Step::outputs`].
    pub fn reply(
        &self,
        queue: &Arc<Queue>,
        configuration: &Configuration,
        step: &Step,
    ) -> Result<Reply, EngineError> {
        let outputs = step.outputs(queue, self.batch.rows)?;
        let route = match (self.causal, self.batch.max_query_len()) {
            (false, _) => "draft",
            (true, 0 | 1) => "decode",
            (true, _) => "verify",
        };
        let effective = step
            .route
            .report(configuration.lane_order)
            .with("route", route)
            .with("kernel_heads", step.shape.width)
            .with("kernel", step.kernel.name())
            .with("segments", step.bucket.segments);
        Ok(Reply { outputs, effective, collectives: vec![step.collectives(); configuration.tp] })
    }
}
