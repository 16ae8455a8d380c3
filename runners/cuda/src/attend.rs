//! Attention of new rows over the cached tokens of their request: decode, verification, draft block.

use std::sync::Arc;

use shardcheck_engine::{Configuration, EffectivePath, EngineError, LaneOrder, LseBase, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::DeviceBatch;
use crate::caches::{Caches, check};
use crate::exchange::{Backend, MergeBuffers, MergeShape, Route, Wire};
use crate::layout::row_metadata;
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::selected::{ListedPart, ListingShape};
use crate::shape::{Shape, head_blocks};
use crate::team::{Absence, Seat, Team};

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
    /// Lists of selected tokens that rows attend to, where there are any.
    pub listing: Option<ListingShape>,
}

/// Everything of a step that lies on the devices.
pub struct Step {
    bucket: Bucket,
    kernel: Kernel,
    route: Route,
    width: i32,
    parts: Vec<Part>,
    merge: MergeBuffers,
}

/// What lies on one device.
pub struct Part {
    bucket: Bucket,
    shape: Shape,
    kernel: Kernel,
    route: Route,
    v_head_dim: usize,
    pub metadata: DeviceBatch,
    pub query: Buffer,
    pub w_uv: Buffer,
    own_query: Buffer,
    /// Queries of every member for each rank, where a collective brings them.
    member_query: Buffer,
    kernel_query: Buffer,
    row_lens: Buffer,
    row_requests: Buffer,
    pub listed: Option<ListedPart>,
    max: Buffer,
    sum: Buffer,
    acc: Buffer,
    latent: Buffer,
    partial: Buffer,
    partial_lse: Buffer,
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
    pub fn allocate(team: &Team, configuration: &Configuration, bucket: Bucket) -> Result<Self, EngineError> {
        let kernel = Kernel::of(&team.first().queue, configuration, &team.first().shape);
        let route = Route::of(configuration, bucket.projects);
        let (value_dim, v_head_dim) =
            (configuration.attention.value_dim(), configuration.attention.v_head_dim());
        let (dim, _) = dims(&route, bucket.projects, value_dim, v_head_dim);
        let heads = configuration.gathered_heads();
        let merge = MergeShape { rows: bucket.rows, heads, dim, wire: Wire::Bf16, lse_base: LseBase::E };
        let part = |seat: &Seat| Part::allocate(seat, team.has_fabric(), v_head_dim, (kernel, route, bucket));
        Ok(Self {
            bucket,
            kernel,
            route,
            width: team.first().shape.width,
            parts: team.each(part)?,
            merge: MergeBuffers::allocate(team, merge, route.backend)?,
        })
    }

    /// The facts of its path.
    pub fn report(&self, order: LaneOrder) -> EffectivePath {
        let kernel = if self.bucket.listing.is_some() { "listed" } else { self.kernel.name() };
        self.route
            .report(order)
            .with("kernel_heads", self.width)
            .with("kernel", kernel)
            .with("segments", self.bucket.segments)
    }

    /// What lies on each device.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Enqueues the whole step over what its buffers hold. Every buffer that a kernel writes is poisoned first, so that what nobody writes
    /// shows as NaN.
    ///
    /// # Errors
    /// What the driver or the collectives say.
    pub fn enqueue(&self, team: &Team, caches: &[Caches], larger: bool) -> Result<(), EngineError> {
        let queues = || team.seats().iter().map(|seat| &seat.queue);
        for (queue, part) in queues().zip(&self.parts) {
            part.poison(queue)?;
        }
        if self.bucket.rows == 0 {
            team.pass(self.collectives());
            return Ok(());
        }
        for (queue, part) in queues().zip(&self.parts) {
            let (rows, metadata) = (self.bucket.rows, &part.metadata);
            row_metadata(queue, &part.shape, metadata, rows, &part.row_lens, &part.row_requests)?;
            part.select_query(queue)?;
        }
        self.gather_query(team, larger)?;
        for ((queue, part), caches) in queues().zip(&self.parts).zip(caches) {
            part.local_attention(queue, caches)?;
            part.project_before(queue)?;
        }
        let from: Vec<_> = self.parts.iter().map(|part| (part.own_partial(), &part.partial_lse)).collect();
        let to: Vec<_> = self.parts.iter().map(|part| (part.own_merged(), &part.lse)).collect();
        self.merge.enqueue(team, &from, &to)?;
        for (queue, part) in queues().zip(&self.parts) {
            part.project_after(queue)?;
        }
        Ok(())
    }

    /// Brings every rank the queries of its group, where ranks do not have them themselves. `larger` says whether the step has more rows
    /// than the first of its session.
    fn gather_query(&self, team: &Team, larger: bool) -> Result<(), EngineError> {
        if self.route.query_replication {
            return Ok(());
        }
        let world = team.first().shape.world as usize;
        // a world of one has nobody to bring anything
        let exchanged = team.has_fabric() && world > 1;
        if exchanged {
            let from: Vec<&Buffer> = self.parts.iter().map(|part| &part.own_query).collect();
            let to: Vec<&Buffer> = self.parts.iter().map(|part| &part.member_query).collect();
            let Shape { own, key_dim, .. } = team.first().shape;
            let skips = match team.absence {
                Some(Absence::QueryGather) => true,
                Some(Absence::LargerStep) => larger,
                _ => false,
            };
            let keeps_out = |rank: usize| skips && rank % world == world - 1;
            let bytes = self.bucket.rows * (own * key_dim) as usize * 2;
            team.gather("all_gather_query", &from, &to, bytes, &keeps_out)?;
        }
        for (Seat { queue, .. }, part) in team.seats().iter().zip(&self.parts) {
            part.arrange_query(queue, exchanged)?;
        }
        Ok(())
    }

    /// Reads the outputs of the first `rows` rows, once the step has run.
    ///
    /// # Errors
    /// What the driver says, and a crash for an address that was not the cache's.
    pub fn outputs(&self, team: &Team, rows: usize) -> Result<Tensors, EngineError> {
        let parts = team.seats().iter().zip(&self.parts);
        let outputs = parts.map(|(seat, part)| part.outputs(&seat.queue, rows));
        team.assemble(outputs.collect::<Result<_, _>>()?)
    }

    /// Collectives that a rank enters.
    pub fn collectives(&self) -> u64 {
        let gathers = self.route.backend != Backend::None && !self.route.query_replication;
        u64::from(gathers) + self.route.merge_collectives()
    }
}

impl Part {
    fn allocate(
        Seat { queue, shape }: &Seat,
        exchanged: bool,
        v_head_dim: usize,
        (kernel, route, bucket): (Kernel, Route, Bucket),
    ) -> Result<Self, EngineError> {
        let [ranks, own, heads, width, world] =
            [shape.ranks, shape.own, shape.heads, shape.width, shape.world].map(|extent| extent as usize);
        let (key_dim, value_dim) = (shape.key_dim as usize, shape.value_dim as usize);
        let (at, all_heads) = (ranks * bucket.rows, shape.all as usize * own);
        let weights = if bucket.projects { all_heads * value_dim * v_head_dim * 2 } else { 0 };
        let (_, out_dim) = dims(&route, bucket.projects, value_dim, v_head_dim);
        let projects_before = bucket.projects && route.project_before_merge;
        let projects_after = bucket.projects && !route.project_before_merge;
        let own_query = at * own * key_dim * 2;
        let members = if exchanged && !route.query_replication { world } else { 0 };
        Ok(Self {
            bucket,
            shape: *shape,
            kernel,
            route,
            v_head_dim,
            metadata: DeviceBatch::with_room(queue, bucket.requests, bucket.entries)?,
            query: queue.allocate(bucket.rows * all_heads * key_dim * 2)?,
            w_uv: queue.allocate(weights)?,
            own_query: queue.allocate(own_query)?,
            member_query: queue.allocate(own_query * members)?,
            kernel_query: queue.allocate(at * width * key_dim * 2)?,
            row_lens: queue.allocate(4 * at)?,
            row_requests: queue.allocate(4 * bucket.rows)?,
            listed: bucket.listing.map(|of| ListedPart::allocate(queue, of, shape.ranks)).transpose()?,
            max: queue.allocate(4 * bucket.segments * at * width)?,
            sum: queue.allocate(4 * bucket.segments * at * width)?,
            acc: queue.allocate(4 * bucket.segments * at * width * value_dim)?,
            latent: queue.allocate(at * heads * value_dim * 2)?,
            partial: queue.allocate(if projects_before { at * heads * v_head_dim * 2 } else { 0 })?,
            partial_lse: queue.allocate(4 * at * heads)?,
            merged: queue.allocate(if projects_after { at * own * value_dim * 2 } else { 0 })?,
            out: queue.allocate(at * own * out_dim * 2)?,
            lse: queue.allocate(4 * at * own)?,
            error: queue.allocate(4)?,
        })
    }

    fn poison(&self, queue: &Arc<Queue>) -> Result<(), EngineError> {
        queue.fill(&self.error, 0)?;
        for buffer in [
            &self.own_query,
            &self.member_query,
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
        self.listed.as_ref().map_or(Ok(()), |listed| listed.poison(queue))
    }

    fn own_partial(&self) -> &Buffer {
        if self.bucket.projects && self.route.project_before_merge { &self.partial } else { &self.latent }
    }

    fn own_merged(&self) -> &Buffer {
        if self.bucket.projects && !self.route.project_before_merge { &self.merged } else { &self.out }
    }

    fn project_before(&self, queue: &Arc<Queue>) -> Result<(), EngineError> {
        if !self.bucket.projects || !self.route.project_before_merge {
            return Ok(());
        }
        self.project(queue, &self.latent, self.shape.heads, true, &self.partial)
    }

    fn project_after(&self, queue: &Arc<Queue>) -> Result<(), EngineError> {
        if !self.bucket.projects || self.route.project_before_merge {
            return Ok(());
        }
        self.project(queue, &self.merged, self.shape.own, false, &self.out)
    }

    fn elements(&self, heads: i32) -> usize {
        self.shape.ranks as usize * self.bucket.rows * (heads * self.shape.key_dim) as usize
    }

    /// Enqueues the queries that each rank makes itself: those of its group where they are replicated, else its own.
    fn select_query(&self, queue: &Arc<Queue>) -> Result<(), EngineError> {
        let Shape { own, width, .. } = self.shape;
        let (kernel, heads, target) = if self.route.query_replication {
            ("select_group_heads", width, &self.kernel_query)
        } else {
            ("select_own_heads", own, &self.own_query)
        };
        let rows = Argument::Int(self.bucket.rows as i32);
        let arguments = [Argument::Shape(self.shape), self.query.argument(), rows, target.argument()];
        queue.launch(kernel, Extent::over(self.elements(heads)), &arguments)
    }

    /// Enqueues the kernel's query out of those of the members, which a collective brought where they were `exchanged`.
    fn arrange_query(&self, queue: &Arc<Queue>, exchanged: bool) -> Result<(), EngineError> {
        let from = if exchanged { &self.member_query } else { &self.own_query };
        let arguments = [
            Argument::Shape(self.shape),
            from.argument(),
            Argument::Int(i32::from(exchanged)),
            Argument::Int(self.bucket.rows as i32),
            self.kernel_query.argument(),
        ];
        queue.launch("gather_heads", Extent::over(self.elements(self.shape.width)), &arguments)
    }

    /// Enqueues the attention of the gathered heads and the partial that comes of it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn local_attention(&self, queue: &Arc<Queue>, caches: &Caches) -> Result<(), EngineError> {
        if let Some(listed) = &self.listed {
            self.attend_listed(queue, caches, listed)?;
            return self.finish(queue, &listed.lens, 1.0);
        }
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
        self.finish(queue, &self.row_lens, factor)
    }

    /// Enqueues the partial that comes of the segments of rows of so many tokens.
    fn finish(&self, queue: &Arc<Queue>, lens: &Buffer, factor: f32) -> Result<(), EngineError> {
        let (rows, segments) = (self.bucket.rows, self.bucket.segments);
        let arguments = [
            Argument::Shape(self.shape),
            lens.argument(),
            Argument::Int(rows as i32),
            Argument::Int(segments as i32),
            Argument::Float(factor),
            self.max.argument(),
            self.sum.argument(),
            self.acc.argument(),
            self.latent.argument(),
            self.partial_lse.argument(),
        ];
        let at = self.shape.ranks as usize * rows;
        queue.launch("finish_segments", Extent::blocks(at, self.shape.heads as usize, 1), &arguments)
    }

    /// Enqueues the lists of the ranks and the attention of the gathered heads over them.
    fn attend_listed(
        &self,
        queue: &Arc<Queue>,
        caches: &Caches,
        listed: &ListedPart,
    ) -> Result<(), EngineError> {
        let batch = [&self.metadata.header, &self.metadata.table, &self.metadata.starts];
        listed.make(queue, self.shape, batch, [&self.row_lens, &self.row_requests, &self.error])?;
        let arguments = [
            &listed.session(self.shape)[..],
            &[self.metadata.header.argument(), self.metadata.starts.argument()],
            &listed.lists(),
            &[self.kernel_query.argument(), caches.keys.argument()],
            &[self.max.argument(), self.sum.argument(), self.acc.argument(), self.error.argument()],
        ]
        .concat();
        let at = self.shape.ranks as usize * self.bucket.rows;
        let extent = Extent::blocks(at, Kernel::Plain.blocks_of_heads(&self.shape), 1);
        queue.launch("list_attend", extent, &arguments)
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

    fn outputs(&self, queue: &Arc<Queue>, rows: usize) -> Result<Tensors, EngineError> {
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
        let outputs = Tensors::new()
            .with("out", read(&self.out, Dtype::Bf16, &[ranks, rows, own, out_dim])?)
            .with("lse", read(&self.lse, Dtype::F32, &[ranks, rows, own])?)
            .with("partial_out", read(&wide, Dtype::F32, &[ranks, rows, heads, partial_dim])?)
            .with("partial_lse", read(&self.partial_lse, Dtype::F32, &[ranks, rows, heads])?)
            .with("gathered_query", queries);
        match &self.listed {
            Some(listed) => listed.with_lists(queue, self.shape, outputs),
            None => Ok(outputs.with("row_lens", read(&self.row_lens, Dtype::I32, &[ranks, rows])?)),
        }
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
