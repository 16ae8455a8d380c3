//! The merge of partials on the device: the kernels before and after an exchange, and the exchange itself.

use shardcheck_engine::{CommBackend, Configuration, EffectivePath, EngineError, LaneOrder, LseBase};
use shardcheck_formats::Dtype;

use crate::queue::{Argument, Buffer, Extent};
use crate::shape::Shape;
use crate::team::{Absence, Seat, Team};

/// Element type on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// bf16, the LSE in two lanes.
    Bf16,
    /// f16, likewise.
    F16,
    /// f32, the LSE in one.
    F32,
}

impl Wire {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The wire of given outputs of a type, if there is one.
    pub fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::Bf16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => Some(Self::F32),
            _ => None,
        }
    }

    /// As an argument of a kernel: `WireType` of the kernels.
    pub fn argument(self) -> Argument {
        Argument::Int(match self {
            Self::F32 => 0,
            Self::Bf16 => 1,
            Self::F16 => 2,
        })
    }

    fn lanes(self) -> usize {
        if self == Self::F32 { 1 } else { 2 }
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
    /// Base of the LSEs.
    pub lse_base: LseBase,
}

/// What a merge needs beside its inputs and outputs, on every device.
pub struct MergeBuffers {
    shape: MergeShape,
    backend: Backend,
    seats: Vec<SeatBuffers>,
}

/// The same on one device.
struct SeatBuffers {
    sent: Buffer,
    received: Buffer,
    gathered_lse: Buffer,
    merged_lse: Buffer,
}

/// An output and its LSE on one device.
pub type State<'a> = (&'a Buffer, &'a Buffer);

impl MergeBuffers {
    /// Room for a merge.
    ///
    /// # Errors
    /// What the driver says.
    pub fn allocate(team: &Team, shape: MergeShape, backend: Backend) -> Result<Self, EngineError> {
        let seats = team.each(|Seat { queue, shape: session }| {
            let (ranks, world) = (session.ranks as usize, session.world as usize);
            let heads = ranks * shape.rows * shape.heads;
            let lanes = if backend == Backend::A2a { shape.wire.lanes() } else { 0 };
            let exchanged =
                if backend == Backend::None { 0 } else { heads * (shape.dim + lanes) * shape.wire.bytes() };
            let lses = if backend == Backend::AgRs { 4 * heads } else { 0 };
            Ok(SeatBuffers {
                sent: queue.allocate(exchanged)?,
                received: queue.allocate(exchanged)?,
                gathered_lse: queue.allocate(lses * world)?,
                merged_lse: queue.allocate(lses)?,
            })
        })?;
        Ok(Self { shape, backend, seats })
    }

    /// Enqueues the merge of each device's `partial [ranks, T, heads, D]` with `lse [ranks, T, heads]` into `out [ranks, T, H, D]` of the
    /// wire's type and `out_lse [ranks, T, H]`.
    ///
    /// # Errors
    /// What the driver or the collectives say.
    pub fn enqueue(&self, team: &Team, from: &[State<'_>], to: &[State<'_>]) -> Result<(), EngineError> {
        for ((Seat { queue, .. }, buffers), (out, out_lse)) in team.seats().iter().zip(&self.seats).zip(to) {
            let SeatBuffers { sent, received, gathered_lse, merged_lse } = buffers;
            for buffer in [sent, received, gathered_lse, merged_lse, out, out_lse] {
                queue.fill(buffer, 0xFF)?;
            }
        }
        match self.backend {
            Backend::None => {
                for ((seat, given), (out, out_lse)) in team.seats().iter().zip(from).zip(to) {
                    let targets = [out.argument(), out_lse.argument()];
                    let heads = self.shape.heads;
                    let arguments = [&Self::given(seat, given)[..], &self.extents(heads), &targets].concat();
                    seat.queue.launch("scrub_empty", self.blocks(seat, heads), &arguments)?;
                }
                Ok(())
            }
            Backend::A2a => self.all_to_all(team, from, to),
            Backend::AgRs => self.gather_and_scatter(team, from, to),
        }
    }

    fn all_to_all(&self, team: &Team, from: &[State<'_>], to: &[State<'_>]) -> Result<(), EngineError> {
        let MergeShape { rows, heads, dim, wire, .. } = self.shape;
        for ((seat, buffers), given) in team.seats().iter().zip(&self.seats).zip(from) {
            let arguments =
                [&Self::given(seat, given)[..], &self.extents(heads), &[buffers.sent.argument()]].concat();
            seat.queue.launch("pack_partials", self.blocks(seat, heads), &arguments)?;
        }
        let own = heads / team.first().shape.world as usize;
        let words = rows * own * (dim + wire.lanes()) * wire.bytes() / 2;
        team.all_to_all("all_to_all_partials", &self.all(|b| &b.sent), &self.all(|b| &b.received), words)?;
        for ((seat, buffers), (out, out_lse)) in team.seats().iter().zip(&self.seats).zip(to) {
            let arguments = [
                &[Argument::Shape(seat.shape), buffers.received.argument()][..],
                &self.extents(own),
                &[self.base(), out.argument(), out_lse.argument()],
            ]
            .concat();
            seat.queue.launch("sum_partials", self.blocks(seat, own), &arguments)?;
        }
        Ok(())
    }

    fn gather_and_scatter(
        &self,
        team: &Team,
        from: &[State<'_>],
        to: &[State<'_>],
    ) -> Result<(), EngineError> {
        let MergeShape { rows, heads, dim, wire, .. } = self.shape;
        let world = team.first().shape.world as usize;
        let own = heads / world;
        let lses: Vec<&Buffer> = from.iter().map(|(_, lse)| *lse).collect();
        let skips = team.absence == Some(Absence::LseGather);
        let keeps_out = |rank: usize| skips && rank % world == world - 1;
        let gathered = self.all(|buffers| &buffers.gathered_lse);
        team.gather("all_gather_lse", &lses, &gathered, 4 * rows * heads, &keeps_out)?;
        for ((seat, buffers), (partial, _)) in team.seats().iter().zip(&self.seats).zip(from) {
            let given = [Argument::Shape(seat.shape), partial.argument(), buffers.gathered_lse.argument()];
            let targets = [self.base(), buffers.sent.argument(), buffers.merged_lse.argument()];
            let arguments = [&given[..], &self.extents(heads), &targets].concat();
            seat.queue.launch("correct_partials", self.blocks(seat, heads), &arguments)?;
        }
        let (sent, received) = (self.all(|b| &b.sent), self.all(|b| &b.received));
        let parts = team.reduce_scatter("reduce_scatter_output", &sent, &received, rows * own * dim, wire)?;
        for ((seat, buffers), (out, out_lse)) in team.seats().iter().zip(&self.seats).zip(to) {
            let given = [
                Argument::Shape(seat.shape),
                buffers.received.argument(),
                Argument::Int(parts as i32),
                buffers.merged_lse.argument(),
            ];
            let targets = [out.argument(), out_lse.argument()];
            let arguments = [&given[..], &self.extents(own), &targets].concat();
            seat.queue.launch("reduce_partials", self.blocks(seat, own), &arguments)?;
        }
        Ok(())
    }

    fn all(&self, which: impl Fn(&SeatBuffers) -> &Buffer) -> Vec<&Buffer> {
        self.seats.iter().map(which).collect()
    }

    fn given(seat: &Seat, (partial, lse): &State<'_>) -> [Argument; 3] {
        [Argument::Shape(seat.shape), partial.argument(), lse.argument()]
    }

    fn extents(&self, heads: usize) -> [Argument; 4] {
        let MergeShape { rows, dim, wire, .. } = self.shape;
        let [rows, heads, dim] = [rows, heads, dim].map(|extent| Argument::Int(extent as i32));
        [rows, heads, dim, wire.argument()]
    }

    fn base(&self) -> Argument {
        Argument::Int(i32::from(self.shape.lse_base == LseBase::Two))
    }

    fn blocks(&self, Seat { shape, .. }: &Seat, heads: usize) -> Extent {
        let Shape { ranks, .. } = shape;
        Extent::blocks(*ranks as usize * self.shape.rows, heads, 1)
    }
}
