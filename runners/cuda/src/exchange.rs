//! The merge of partials on the device: the kernels before and after an exchange, and the exchange itself.

use std::sync::Arc;

use shardcheck_engine::{CommBackend, Configuration, EffectivePath, EngineError, LaneOrder};

use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::shape::Shape;

/// Element type on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// bf16, the LSE in two lanes.
    Half,
    /// f32, the LSE in one.
    Single,
}

impl Wire {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Half => 2,
            Self::Single => 4,
        }
    }

    fn argument(self) -> Argument {
        Argument::Int(i32::from(self == Self::Half))
    }

    fn lanes(self) -> usize {
        if self == Self::Half { 2 } else { 1 }
    }
}

/// Collectives of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// A world of one: nothing is exchanged.
    None,
    /// All-gather and reduce-scatter.
    AgRs,
    /// All-to-all.
    A2a,
}

/// The path of a step: a world of one has no exchange, so that neither query replication nor project-before-merge means anything there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    pub backend: Backend,
    pub query_replication: bool,
    pub project_before_merge: bool,
}

impl Route {
    /// The path for a configuration; `projects` says whether there is an up-projection.
    pub fn of(configuration: &Configuration, projects: bool) -> Self {
        let grouped = configuration.dcp > 1;
        let backend = match configuration.comm_backend {
            _ if !grouped => Backend::None,
            CommBackend::AgRs => Backend::AgRs,
            CommBackend::A2a => Backend::A2a,
        };
        Self {
            backend,
            query_replication: grouped && configuration.query_replication,
            project_before_merge: grouped && projects && configuration.project_before_merge,
        }
    }

    /// The facts of the path.
    pub fn report(&self, order: LaneOrder) -> EffectivePath {
        let backend = match self.backend {
            Backend::None => "none",
            Backend::AgRs => CommBackend::AgRs.name(),
            Backend::A2a => CommBackend::A2a.name(),
        };
        let lanes = if self.backend == Backend::A2a { order.name() } else { "none" };
        EffectivePath::new()
            .with("comm_backend", backend)
            .with("lane_order", lanes)
            .with("query_replication", self.query_replication)
            .with("project_before_merge", self.project_before_merge)
    }

    /// Collectives that a rank enters in the merge.
    pub fn merge_collectives(&self) -> u64 {
        match self.backend {
            Backend::None => 0,
            Backend::A2a => 1,
            Backend::AgRs => 2,
        }
    }
}

/// Extents of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergeShape {
    pub rows: usize,
    /// Heads of a group.
    pub heads: usize,
    pub dim: usize,
    pub wire: Wire,
}

/// What a merge needs beside its inputs and outputs.
pub struct MergeBuffers {
    shape: MergeShape,
    backend: Backend,
    sent: Buffer,
    received: Buffer,
    gathered_lse: Buffer,
    merged_lse: Buffer,
}

impl MergeBuffers {
    /// Room for a merge.
    ///
    /// # Errors
    /// What the driver says.
    pub fn allocate(
        queue: &Arc<Queue>,
        session: &Shape,
        shape: MergeShape,
        backend: Backend,
    ) -> Result<Self, EngineError> {
        let (ranks, world) = (session.ranks as usize, session.world as usize);
        let heads = ranks * shape.rows * shape.heads;
        let lanes = if backend == Backend::A2a { shape.wire.lanes() } else { 0 };
        let exchanged =
            if backend == Backend::None { 0 } else { heads * (shape.dim + lanes) * shape.wire.bytes() };
        let lses = if backend == Backend::AgRs { 4 * heads } else { 0 };
        Ok(Self {
            shape,
            backend,
            sent: queue.allocate(exchanged)?,
            received: queue.allocate(exchanged)?,
            gathered_lse: queue.allocate(lses * world)?,
            merged_lse: queue.allocate(lses)?,
        })
    }

    /// Enqueues the merge of `partial [ranks, T, heads, D]` with `lse [ranks, T, heads]` into `out [ranks, T, H, D]` of the wire's
    /// type and `out_lse [ranks, T, H]`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enqueue(
        &self,
        queue: &Arc<Queue>,
        session: &Shape,
        (partial, lse): (&Buffer, &Buffer),
        (out, out_lse): (&Buffer, &Buffer),
    ) -> Result<(), EngineError> {
        let MergeShape { rows, heads, dim, wire } = self.shape;
        let (ranks, world) = (session.ranks as usize, session.world as usize);
        let own = heads / world;
        let at = ranks * rows;
        let session = Argument::Shape(*session);
        let extents = |heads: usize| {
            [
                Argument::Int(rows as i32),
                Argument::Int(heads as i32),
                Argument::Int(dim as i32),
                wire.argument(),
            ]
        };
        let given = [session, partial.argument(), lse.argument()];
        for buffer in [&self.sent, &self.received, &self.gathered_lse, &self.merged_lse, out, out_lse] {
            queue.fill(buffer, 0xFF)?;
        }
        match self.backend {
            Backend::None => {
                let targets = [out.argument(), out_lse.argument()];
                let arguments = [&given[..], &extents(heads), &targets].concat();
                queue.launch("scrub_empty", Extent::blocks(at, heads, 1), &arguments)
            }
            Backend::A2a => {
                let arguments = [&given[..], &extents(heads), &[self.sent.argument()]].concat();
                queue.launch("pack_partials", Extent::blocks(at, heads, 1), &arguments)?;
                self.exchange(
                    queue,
                    session,
                    rows * own * (dim + wire.lanes()) * wire.bytes() / 2,
                    at * world,
                )?;
                let arguments = [
                    &[session, self.received.argument()][..],
                    &extents(own),
                    &[out.argument(), out_lse.argument()],
                ]
                .concat();
                queue.launch("sum_partials", Extent::blocks(at, own, 1), &arguments)
            }
            Backend::AgRs => {
                // an f32 is two words of the exchange
                let words = 2 * rows * heads;
                let arguments =
                    [session, lse.argument(), Argument::Long(words as i64), self.gathered_lse.argument()];
                queue.launch("gather_words", Extent::over(ranks * world * words), &arguments)?;
                let from = [session, partial.argument(), self.gathered_lse.argument()];
                let targets = [self.sent.argument(), self.merged_lse.argument()];
                let arguments = [&from[..], &extents(heads), &targets].concat();
                queue.launch("correct_partials", Extent::blocks(at, heads, 1), &arguments)?;
                self.exchange(queue, session, rows * own * dim * wire.bytes() / 2, at * world)?;
                let from = [session, self.received.argument(), self.merged_lse.argument()];
                let arguments = [&from[..], &extents(own), &[out.argument(), out_lse.argument()]].concat();
                queue.launch("reduce_partials", Extent::blocks(at, own, 1), &arguments)
            }
        }
    }

    /// All-to-all of `words` 16-bit words for each pair of members.
    fn exchange(
        &self,
        queue: &Arc<Queue>,
        session: Argument,
        words: usize,
        pairs_and_rows: usize,
    ) -> Result<(), EngineError> {
        if pairs_and_rows == 0 {
            return Ok(());
        }
        let pairs = pairs_and_rows / self.shape.rows.max(1);
        let arguments =
            [session, self.sent.argument(), Argument::Long(words as i64), self.received.argument()];
        queue.launch("exchange_words", Extent::over(pairs * words), &arguments)
    }
}
