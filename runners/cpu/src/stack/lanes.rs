//! Ranks of prefill context parallelism in a stack: which rows each has, and how rows come together where a layer needs all of them.
//!
//! Rows of a rank, gather and order behind it: ATOM `pcp_utils`, vLLM `PCPManager`, SGLang `--cp-strategy`, as for a batch by itself.

use shardcheck_engine::{EngineError, PcpDecodes, StackPcp, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::worker::Rows;
use super::{Passage, Scene, Step};
use crate::batch::Batch;
use crate::communicator::{Ranks, run_ranks};
use crate::memory::{Metadata, StepKind};
use crate::prefill::{self, Local, Shared, Shares, Split};

/// What rows of all ranks come together for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gathered {
    /// Keys of a layer that attends.
    Keys,
    /// Inputs of a recurrent layer.
    States,
    /// Rows behind the last norm.
    Last,
}

/// What a stack over ranks of prefill context parallelism decides.
#[derive(Clone, Copy, PartialEq)]
pub struct LanePolicies {
    /// Whether a request's rows are shared out as a prompt's: `(it prefills, rows)`.
    pub is_prompt: fn(bool, usize) -> bool,
    /// Position of a row: `(as the batch has it, place among the rank's)`.
    pub position: fn(usize, usize) -> usize,
    /// Tokens that a row sees: `(in the whole batch, place in its chunk)`.
    pub visible: fn(usize, usize) -> usize,
    /// Place of every row of the batch among those of all ranks, one rank's behind the other's, for each of [`Gathered`].
    pub restore: [fn(&Shares) -> Vec<i64>; 3],
    /// Whether rows of other ranks come to a rank at all: `(what for, rank)`.
    pub comes: fn(Gathered, usize) -> bool,
    /// Whether the states of recurrent layers are left on a rank, and not zeros: `(rank, ranks, whether rows are shared out)`.
    pub keeps: fn(usize, usize, bool) -> bool,
}

impl LanePolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        is_prompt: |prefills, _| prefills,
        position: |position, _| position,
        visible: |visible, _| visible,
        restore: [prefill::restore; 3],
        comes: |_, _| true,
        keeps: |_, _, _| true,
    };
}

/// What one rank of prefill context parallelism runs.
pub struct Lane {
    /// Its rows as a batch: the step's own, or each row a request of its own, which sees what it sees in the whole batch.
    pub batch: Batch,
    /// The metadata that its ranks attend with.
    pub metadata: Vec<Metadata>,
    /// Its rows.
    pub rows: Rows,
}

/// What all ranks of prefill context parallelism run; without them one rank has the whole batch.
pub struct Lanes {
    /// By rank.
    pub all: Vec<Lane>,
    /// How rows are shared out, where they are.
    shares: Option<Shares>,
}

impl Lanes {
    /// So many ranks that have all rows each.
    pub fn whole(ranks: usize, batch: &Batch, metadata: &[Metadata], rows: &Rows) -> Self {
        let lane = |_| Lane { batch: batch.clone(), metadata: metadata.to_vec(), rows: rows.clone() };
        Self { all: (0..ranks).map(lane).collect(), shares: None }
    }

    /// The ranks of a step.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit; a crash for no ranks, or too many.
    pub fn of(
        scene: &Scene<'_>,
        pcp: Option<StackPcp>,
        rows: &Rows,
        inputs: &Tensors,
    ) -> Result<Self, EngineError> {
        let (batch, world) = (scene.batch, pcp.map_or(1, |pcp| pcp.world));
        let whole = || Self::whole(world, batch, scene.metadata, rows);
        let Some(pcp) = pcp else { return Ok(whole()) };
        let own = &scene.policies.stack.lanes;
        let count = batch.seq_lens.len();
        let prefills = inputs.get("is_prefilling")?.expect("is_prefilling", Dtype::U8, &[count])?.to_i64();
        let new = |request: usize| (batch.starts[request + 1] - batch.starts[request]) as usize;
        let is_prompt = |request: usize| (own.is_prompt)(prefills[request] != 0, new(request));
        let prompts: Vec<u64> = (0..count).map(|request| u64::from(is_prompt(request))).collect();
        if pcp.decodes == PcpDecodes::Replicated && prompts.iter().all(|prompt| *prompt == 0) {
            return Ok(whole());
        }
        let contexts: Vec<i32> =
            (0..count).map(|request| (batch.seq_lens[request] - new(request)) as i32).collect();
        let given = Tensors::new()
            .with("query_start_loc", Tensor::from_i32(&[count + 1], &batch.starts))
            .with("context_lens", Tensor::from_i32(&[count], &contexts))
            .with("is_prefilling", Tensor::from_codes(Dtype::U8, &[count], &prompts));
        let StackPcp { world, strategy, decodes, .. } = pcp;
        let split = Split { world, strategy, decodes, padded_rows: 0, overlap: false };
        let shared = Shared::of(&given, split, &scene.policies.prefill)?;
        let lane = |rank: usize| Lane::of(scene, &shared, rank, rows);
        Ok(Self { all: (0..world).map(lane).collect(), shares: Some(shared.shares()) })
    }

    /// Whether every rank has all rows.
    pub fn is_whole(&self) -> bool {
        self.shares.is_none()
    }

    /// Row of the batch that each row of every rank is, −1 for padding: `i64 [P, R]`.
    pub fn tensor(&self) -> Tensor {
        let row = |row: &Option<usize>| row.map_or(-1, |row| row as i64);
        let rows: Vec<i64> = self.all.iter().flat_map(|lane| lane.rows.places.iter().map(row)).collect();
        Tensor::from_i64(&[self.all.len(), rows.len() / self.all.len().max(1)], &rows)
    }
}

impl Lane {
    fn of(scene: &Scene<'_>, shared: &Shared, rank: usize, rows: &Rows) -> Self {
        let (batch, own) = (scene.batch, &scene.policies.stack.lanes);
        let locals = shared.run_by(rank);
        // graph padding stands behind the rows of every rank
        let count = shared.padded + batch.rows - batch.real_rows();
        let request = |local: &Local| shared.batch.request_of(local.row);
        let visible = |local: &Local| {
            let request = request(local);
            let behind = batch.starts[request + 1] as usize - 1 - local.row;
            batch.seq_lens[request] - behind
        };
        let table = batch.table.of_rows(&locals.iter().map(request).collect::<Vec<_>>());
        let part = Batch {
            seq_lens: locals.iter().map(visible).collect(),
            starts: (0..=locals.len() as i32).collect(),
            rows: count,
            table,
        };
        let seen = |local: &Local| (own.visible)(visible(local), local.in_chunk);
        let attended = Batch { seq_lens: locals.iter().map(seen).collect(), ..part.clone() };
        let mut lane = Rows::default();
        for (place, local) in locals.iter().enumerate() {
            lane.tokens.push(rows.tokens[local.row]);
            lane.positions.push((own.position)(rows.positions[local.row], place));
            lane.places.push(Some(local.row));
        }
        lane.tokens.resize(count, 0);
        lane.positions.resize(count, 0);
        lane.places.resize(count, None);
        let of_rank =
            |seen: &Metadata| Metadata { kind: StepKind::Attend, batch: attended.clone(), ..seen.clone() };
        Self { metadata: scene.metadata.iter().map(of_rank).collect(), batch: part, rows: lane }
    }
}

impl Step<'_> {
    /// Rows of the whole batch on every rank, given those of each; graph padding is zeros.
    pub(super) fn gathered(
        &self,
        what: Gathered,
        parts: Vec<Vec<f32>>,
        passage: &mut Passage,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let (Some(shares), own) = (&self.lanes.shares, &self.scene.policies.stack.lanes) else {
            return Ok(parts);
        };
        let (pcp, tp) = (self.lanes.all.len(), self.scene.configuration.tp);
        let ranks = Ranks { count: pcp * tp, world: pcp, ..self.scene.ranks };
        let order: Vec<usize> = (0..pcp).collect();
        let places = own.restore[what as usize](shares);
        let local = self.lanes.all[0].rows.tokens.len();
        // peers have the same rank of tensor parallelism
        let place = |rank: usize| rank % pcp * tp + rank / pcp;
        let run = run_ranks(ranks, |link| {
            let part = &parts[place(link.rank)];
            let width = part.len() / local.max(1);
            // rows of graph padding stay where they are
            let mut all = link.all_gather("gather_pcp", part[..shares.padded * width].to_vec(), &order)?;
            for other in (0..pcp).filter(|other| *other != link.member) {
                if !(own.comes)(what, link.member) {
                    all[other * shares.padded * width..][..shares.padded * width].fill(0.0);
                }
            }
            let row = |place: &i64| {
                usize::try_from(*place).ok().and_then(|at| all.get(at * width..(at + 1) * width))
            };
            let mut whole: Vec<f32> = Vec::with_capacity(self.rows.tokens.len() * width);
            for place in &places {
                match row(place) {
                    Some(values) => whole.extend(values),
                    None => whole.resize(whole.len() + width, 0.0),
                }
            }
            whole.resize(self.rows.tokens.len() * width, 0.0);
            Ok(whole)
        })?;
        let mut whole = vec![Vec::new(); pcp * tp];
        for (rank, (rows, count)) in run.results.into_iter().zip(run.collectives).enumerate() {
            whole[place(rank)] = rows;
            passage.collectives[place(rank)] += count;
        }
        Ok(whole)
    }

    /// A rank's own rows of the whole batch's; zeros for padding.
    pub(super) fn local(&self, rank: usize, whole: &[f32]) -> Vec<f32> {
        let width = whole.len() / self.rows.tokens.len().max(1);
        let lane = &self.lanes.all[rank / self.scene.configuration.tp];
        let row =
            |place: &Option<usize>| match place.and_then(|row| whole.get(row * width..(row + 1) * width)) {
                Some(values) => values.to_vec(),
                None => vec![0.0; width],
            };
        lane.rows.places.iter().flat_map(row).collect()
    }
}
