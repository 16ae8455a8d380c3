//! The axes of attention cases: closed lists of values, what contradicts what, and the case that a choice makes.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{CommBackend, Configuration, LaneOrder, vocabulary};
use shardcheck_formats::Dtype;

use crate::{AttentionCase, Family, Model, Placement, Probe, Request, Workload, default_blocks};

vocabulary! {
    /// Interleave size S.
    Interleave ("interleave") {
        /// S = 1: tokens go round the ranks one by one.
        One = "1",
        /// S = 2.
        Two = "2",
        /// S = 4.
        Four = "4",
        /// S = 16.
        Sixteen = "16",
        /// S = B: whole blocks go round the ranks.
        Block = "block",
    }
}

vocabulary! {
    /// Context length of the first request, at the edges of the layout.
    Length ("length") {
        /// No context.
        Zero = "0",
        /// One token.
        One = "1",
        /// W − 1: with S = 1 the last rank is empty.
        BelowWorld = "w-1",
        /// W.
        World = "w",
        /// W + 1.
        AboveWorld = "w+1",
        /// S·W − 1.
        BelowRun = "s*w-1",
        /// S·W.
        Run = "s*w",
        /// S·W + 1.
        AboveRun = "s*w+1",
        /// B·W − 1: one short of a virtual block.
        BelowBlock = "b*w-1",
        /// B·W.
        Block = "b*w",
        /// B·W + 1.
        AboveBlock = "b*w+1",
        /// 2·B·W.
        TwoBlocks = "2*b*w",
        /// 97, which no size divides.
        Prime = "97",
        /// 509, likewise.
        LongPrime = "509",
    }
}

impl Length {
    /// Tokens of the context.
    pub fn tokens(self, dcp: usize, interleave: usize, block_size: usize) -> usize {
        let (run, block) = (interleave * dcp, block_size * dcp);
        match self {
            Self::Zero => 0,
            Self::One => 1,
            Self::BelowWorld => dcp - 1,
            Self::World => dcp,
            Self::AboveWorld => dcp + 1,
            Self::BelowRun => run - 1,
            Self::Run => run,
            Self::AboveRun => run + 1,
            Self::BelowBlock => block - 1,
            Self::Block => block,
            Self::AboveBlock => block + 1,
            Self::TwoBlocks => 2 * block,
            Self::Prime => 97,
            Self::LongPrime => 509,
        }
    }
}

vocabulary! {
    /// Requests of a batch, around the one whose context length is an axis of its own.
    Batch ("batch shape") {
        /// That request alone.
        Single = "single",
        /// Ragged lengths and rows, a request of length zero in the middle.
        Ragged = "ragged",
        /// Seven more requests of a few tokens.
        ManyShort = "many-short",
        /// A request of one token in front, and one that is longer behind.
        LongShort = "long-short",
    }
}

vocabulary! {
    /// Collectives of the merge, with the lane order where it matters.
    Exchange ("exchange") {
        /// All-gather of the LSE, reduce-scatter of the output.
        AgRs = "ag_rs",
        /// All-to-all, high half first.
        A2aHiLo = "a2a.hi_lo",
        /// All-to-all, low half first.
        A2aLoHi = "a2a.lo_hi",
    }
}

impl Exchange {
    /// The two settings of a configuration.
    pub fn settings(self) -> (CommBackend, LaneOrder) {
        match self {
            Self::AgRs => (CommBackend::AgRs, LaneOrder::HiLo),
            Self::A2aHiLo => (CommBackend::A2a, LaneOrder::HiLo),
            Self::A2aLoHi => (CommBackend::A2a, LaneOrder::LoHi),
        }
    }
}

vocabulary! {
    /// Where the up-projection stands.
    Projection ("projection") {
        /// There is none: the output has the width of a value (GQA, and MLA with latent output).
        None = "none",
        /// After the merge.
        After = "after",
        /// Before it.
        Before = "before",
    }
}

vocabulary! {
    /// Workspace of a context gather.
    Budget ("chunk budget") {
        /// One token: as many chunks as there can be.
        Least = "1",
        /// One virtual block for each request.
        Block = "block",
        /// Two virtual blocks for each request and a token, which no block fills.
        TwoBlocks = "2*block+1",
        /// More than there is: one chunk.
        All = "all",
    }
}

impl Budget {
    /// Tokens over all ranks and requests.
    pub fn tokens(self, virtual_block_tokens: usize, requests: usize) -> usize {
        match self {
            Self::Least => 1,
            Self::Block => virtual_block_tokens * requests,
            Self::TwoBlocks => 2 * virtual_block_tokens * requests + 1,
            Self::All => 1 << 20,
        }
    }
}

/// Cache format with its scale and the type of activations, spelt as in case ids: `bf16`, `f16`, `e4m3fn@0.02`,
/// `e4m3fn@0.02.f16`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cache {
    /// Element type.
    pub dtype: Dtype,
    /// Scale; 1 for 16-bit formats.
    pub scale: f32,
    /// Element type of activations: f16 under an f16 cache and where it is said, bf16 elsewhere.
    pub activations: Dtype,
}

impl FromStr for Cache {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (cache, half) = match text.strip_suffix(".f16") {
            Some(cache) => (cache, true),
            None => (text, text == Dtype::F16.name()),
        };
        let (dtype, scale) = cache.split_once('@').unwrap_or((cache, "1"));
        Ok(Self {
            dtype: dtype.parse().map_err(|error| format!("{error}"))?,
            activations: if half { Dtype::F16 } else { Dtype::Bf16 },
            scale: scale.parse().map_err(|_| format!("cache scale {scale:?} is not a number"))?,
        })
    }
}

/// Values of every axis, and the limits that a choice must keep.
#[derive(Debug, Clone)]
pub struct Axes {
    /// What is asked.
    pub family: Family,
    /// Models.
    pub models: Vec<&'static Model>,
    /// Decode-context-parallel sizes W.
    pub dcp: Vec<usize>,
    /// Groups of a session: tp / dcp.
    pub groups: Vec<usize>,
    /// Query heads of a rank; 0 stands for the model's own heads divided by tp.
    pub heads: Vec<usize>,
    /// Block sizes B.
    pub blocks: Vec<usize>,
    /// Interleave sizes S.
    pub interleaves: Vec<Interleave>,
    /// Context length of the first request.
    pub lengths: Vec<Length>,
    /// Batch shapes.
    pub batches: Vec<Batch>,
    /// New rows of the first request, q.
    pub rows: Vec<usize>,
    /// Cache formats.
    pub caches: Vec<Cache>,
    /// Collectives.
    pub exchanges: Vec<Exchange>,
    /// Query replication.
    pub replications: Vec<bool>,
    /// Where the up-projection stands.
    pub projections: Vec<Projection>,
    /// Kernel head widths.
    pub widths: Vec<Vec<usize>>,
    /// Block placements.
    pub placements: Vec<Placement>,
    /// Graph-padding rows.
    pub paddings: Vec<usize>,
    /// Probes.
    pub probes: Vec<Probe>,
    /// Chunk budgets (context).
    pub budgets: Vec<Budget>,
    /// Limits.
    pub limits: Limits,
}

/// Limits of a choice.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Most ranks.
    pub ranks: usize,
    /// Most query heads of all ranks.
    pub heads: usize,
    /// Most tokens of a request's context.
    pub context_tokens: usize,
    /// Most requests · heads a rank · W: for engines that take seconds a call.
    pub slices: usize,
}

/// Positions of the axes in a row of value indices; constrained ones first.
const MODEL: usize = 0;
const DCP: usize = 1;
const GROUPS: usize = 2;
const HEADS: usize = 3;
const BLOCK: usize = 4;
const INTERLEAVE: usize = 5;
const LENGTH: usize = 6;
const BATCH: usize = 7;
const ROWS: usize = 8;
const CACHE: usize = 9;
const PROBE: usize = 10;
const EXCHANGE: usize = 11;
const REPLICATION: usize = 12;
const PROJECTION: usize = 13;
const WIDTHS: usize = 14;
const PLACEMENT: usize = 15;
const PADDING: usize = 16;
const BUDGET: usize = 17;

impl Axes {
    /// Number of values of each axis.
    pub fn levels(&self) -> Vec<usize> {
        vec![
            self.models.len(),
            self.dcp.len(),
            self.groups.len(),
            self.heads.len(),
            self.blocks.len(),
            self.interleaves.len(),
            self.lengths.len(),
            self.batches.len(),
            self.rows.len(),
            self.caches.len(),
            self.probes.len(),
            self.exchanges.len(),
            self.replications.len(),
            self.projections.len(),
            self.widths.len(),
            self.placements.len(),
            self.paddings.len(),
            self.budgets.len(),
        ]
    }

    /// Whether a partial choice contradicts nothing so far; see [`crate::covering::Constraint`].
    pub fn allow(&self, row: &[Option<usize>]) -> bool {
        self.allow_sizes(row) && self.allow_length(row) && self.allow_options(row)
    }

    fn allow_sizes(&self, row: &[Option<usize>]) -> bool {
        let dcp = row[DCP].map(|i| self.dcp[i]);
        let block = row[BLOCK].map(|i| self.blocks[i]);
        if let (Some(dcp), Some(groups)) = (dcp, row[GROUPS].map(|i| self.groups[i])) {
            let tp = dcp * groups;
            let heads = row[HEADS].map(|i| self.heads[i]);
            let model = row[MODEL].map(|i| self.models[i]);
            let of_model = model.filter(|_| heads == Some(0));
            let too_many = heads.is_some_and(|heads| heads * tp > self.limits.heads);
            if tp > self.limits.ranks
                || too_many
                || of_model.is_some_and(|m| !m.total_heads.is_multiple_of(tp))
            {
                return false;
            }
        }
        if let (Some(block), Some(interleave)) = (block, row[INTERLEAVE].map(|i| self.interleaves[i])) {
            let interleave = tokens_of(interleave, block);
            if interleave > block || !block.is_multiple_of(interleave) {
                return false;
            }
        }
        let batch = row[BATCH].map(|i| self.batches[i]);
        if let (Some(dcp), Some(heads), Some(batch)) = (dcp, row[HEADS].map(|i| self.heads[i]), batch) {
            return requests_of(batch) * heads * dcp <= self.limits.slices;
        }
        true
    }

    fn allow_length(&self, row: &[Option<usize>]) -> bool {
        let sizes = (row[DCP], row[BLOCK], row[INTERLEAVE], row[LENGTH]);
        let (Some(dcp), Some(block), Some(interleave), Some(length)) = sizes else { return true };
        let (dcp, block) = (self.dcp[dcp], self.blocks[block]);
        let interleave = tokens_of(self.interleaves[interleave], block);
        self.lengths[length].tokens(dcp, interleave, block) <= self.limits.context_tokens
    }

    fn allow_options(&self, row: &[Option<usize>]) -> bool {
        let model = row[MODEL].map(|i| self.models[i]);
        let projection = row[PROJECTION].map(|i| self.projections[i]);
        if let Some(model) = model {
            let mla = model.attention(model.total_heads).is_mla();
            let replicated = row[REPLICATION].is_some_and(|i| self.replications[i]);
            // both features belong to the projections of MLA
            if !mla && (replicated || projection.is_some_and(|p| p != Projection::None)) {
                return false;
            }
        }
        if self.family == Family::Context && projection.is_some_and(|p| p != Projection::None) {
            return false;
        }
        let probe = row[PROBE].map(|i| self.probes[i]);
        if let (Some(Probe::TokenCode), Some(cache)) = (probe, row[CACHE].map(|i| self.caches[i])) {
            // signs are exact under powers of two alone
            return cache.scale.to_bits().trailing_zeros() >= 23;
        }
        true
    }

    /// The case of a full choice.
    pub fn case(&self, row: &[usize]) -> AttentionCase {
        let model = self.models[row[MODEL]];
        let dcp = self.dcp[row[DCP]];
        let tp = dcp * self.groups[row[GROUPS]];
        let heads_per_rank = match self.heads[row[HEADS]] {
            0 => model.total_heads / tp,
            heads => heads,
        };
        let block_size = self.blocks[row[BLOCK]];
        let interleave = tokens_of(self.interleaves[row[INTERLEAVE]], block_size);
        let (comm_backend, lane_order) = self.exchanges[row[EXCHANGE]].settings();
        let cache = self.caches[row[CACHE]];
        let attention = model.attention(heads_per_rank * dcp);
        let projection = self.projections[row[PROJECTION]];
        let workload = self.workload(row, dcp, interleave, block_size);
        let configuration = Configuration {
            attention,
            tp,
            dcp,
            heads_per_rank,
            interleave,
            block_size,
            blocks: default_blocks(&workload, block_size * dcp),
            dtype: cache.activations,
            kv_dtype: cache.dtype,
            kv_scale: cache.scale,
            softmax_scale: model.softmax_scale,
            comm_backend,
            lane_order,
            query_replication: self.replications[row[REPLICATION]],
            project_before_merge: projection == Projection::Before,
            kernel_head_widths: self.widths[row[WIDTHS]].clone(),
            second_group: None,
        };
        AttentionCase {
            model: model.name.clone(),
            configuration,
            workload,
            probe: self.probes[row[PROBE]],
            latent_output: attention.is_mla() && projection == Projection::None,
            selected: None,
        }
    }

    fn workload(&self, row: &[usize], dcp: usize, interleave: usize, block_size: usize) -> Workload {
        let context = self.lengths[row[LENGTH]].tokens(dcp, interleave, block_size);
        let rows = self.rows[row[ROWS]];
        let batch = self.batches[row[BATCH]];
        let requests = requests(batch, context, rows, dcp);
        let budget = match self.family {
            Family::Context => self.budgets[row[BUDGET]].tokens(block_size * dcp, requests.len()),
            _ => 0,
        };
        Workload {
            requests,
            padded_rows: self.paddings[row[PADDING]],
            placement: self.placements[row[PLACEMENT]],
            chunk_budget_tokens: budget,
        }
    }
}

fn tokens_of(interleave: Interleave, block_size: usize) -> usize {
    match interleave {
        Interleave::One => 1,
        Interleave::Two => 2,
        Interleave::Four => 4,
        Interleave::Sixteen => 16,
        Interleave::Block => block_size,
    }
}

fn requests_of(batch: Batch) -> usize {
    match batch {
        Batch::Single => 1,
        Batch::Ragged => 4,
        Batch::ManyShort => 8,
        Batch::LongShort => 3,
    }
}

/// The batch around a request of `context` tokens and `rows` new ones.
fn requests(batch: Batch, context: usize, rows: usize, dcp: usize) -> Vec<Request> {
    let request = |context_tokens, query_tokens| Request { context_tokens, query_tokens };
    let fewer = rows.saturating_sub(1).max(1);
    let requests = match batch {
        Batch::Single => vec![request(context, rows)],
        Batch::Ragged => {
            vec![request(3 * dcp + 2, fewer), request(0, 0), request(context, rows), request(dcp / 2, rows)]
        }
        Batch::ManyShort => {
            let short =
                (0..7).map(|index| request(index * (dcp + 1) / 3, if index % 3 == 2 { fewer } else { rows }));
            std::iter::once(request(context, rows)).chain(short).collect()
        }
        Batch::LongShort => {
            vec![request(0, fewer), request(context, rows), request(context + 2 * dcp + 5, rows)]
        }
    };
    debug_assert_eq!(requests.len(), requests_of(batch));
    requests
}
