//! A small whole transformer: every layer's attention is that of a single step, over a cache of the layer's own; what stands between two
//! attentions is computed rank by rank, with its sums and gathers.
//!
//! Order of a layer, residual stream and norms: vLLM `DeepseekV2DecoderLayer`; vocabulary over ranks: vLLM `VocabParallelEmbedding`,
//! `ParallelLMHead`; the stream over ranks: sequence parallelism of vLLM and TensorCast.

mod draft;
mod lanes;
mod mixture;
mod recurrent;
mod selected;
mod weights;
mod worker;

use std::ops::Range;

use shardcheck_engine::{Configuration, EngineError, Reply, StackPlan, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::attend::attend;
use crate::batch::Batch;
use crate::cache::{KvFormat, RankCache};
use crate::communicator::{Link, Ranks, Stop, run_ranks};
use crate::derive::failed;
use crate::grid::Grids;
use crate::kda::KdaMemory;
use crate::memory::{Memory, Metadata, WriteMap};
use crate::policies::{Policies, TableUse};
use crate::write::WriteBatch;

use draft::Target;
use lanes::Lanes;
use weights::{FeedForward, Sizes, Weights};
use worker::{Rows, Worker};

pub use draft::DraftPolicies;
pub use lanes::{Gathered, LanePolicies};
pub use mixture::MixturePolicies;
pub use recurrent::RecurrentPolicies;
pub use selected::SelectionPolicy;
pub use worker::{Part, largest};

/// What a stack decides.
#[derive(Clone, Copy, PartialEq)]
pub struct StackPolicies {
    /// Entries of the vocabulary that a rank has: `(rank, ranks, vocabulary)`.
    pub entries: fn(usize, usize, usize) -> Range<usize>,
    /// Entry that a rank embeds a token of another rank by, given its own entries; none for zeros.
    pub foreign: fn(usize, &Range<usize>) -> Option<usize>,
    /// Layer whose cache a layer uses, by its number among those with latent attention: `(use, layer)`.
    pub cache: fn(TableUse, usize) -> usize,
    /// Recurrent layers.
    pub recurrent: RecurrentPolicies,
    /// Selection that a layer goes by: `(what it is, its own)`.
    pub selection: SelectionPolicy,
    /// Length that a request has in a layer: `(layer, length, rows)`.
    pub length: fn(usize, usize, usize) -> usize,
    /// Whether a layer writes its keys before it attends.
    pub writes_first: bool,
    /// Position of a row: `(length of the request, its rows, row)`.
    pub position: fn(usize, usize, usize) -> usize,
    /// Norm whose weights are used at a place: `(place, places)`.
    pub norm: fn(usize, usize) -> usize,
    /// Whether there is a norm behind the last layer.
    pub normed_last: bool,
    /// What enters the sum over ranks: `(the rank's part, the stream)`.
    pub entering: fn(f32, f32) -> f32,
    /// Whether the parts of ranks are summed.
    pub summed: fn(Part) -> bool,
    /// The stream behind an update: `(stream, stream behind the norm, update)`.
    pub joined: fn(f32, f32, f32) -> f32,
    /// What passes the gate of attention: `(what attention gave, logit)`.
    pub gate: fn(f32, f32) -> f32,
    /// First head whose gates a rank uses: `(rank, heads)`.
    pub gate_head: fn(usize, usize) -> usize,
    /// Latent layer whose gates a layer uses, by its number.
    pub gate_of: fn(usize) -> usize,
    /// First head whose columns of the output projection a rank uses: `(rank, rank of decode context parallelism, heads)`.
    pub output_head: fn(usize, usize, usize) -> usize,
    /// Inner elements of the MLP on a rank: `(rank, ranks, inner width)`.
    pub part: fn(usize, usize, usize) -> Range<usize>,
    /// Layer whose router, and whose experts, a layer uses: `(layer, first one that has experts)`.
    pub mixture: [fn(usize, usize) -> usize; 2],
    /// What else a layer of experts decides.
    pub mixtures: MixturePolicies,
    /// Row by whose logits a row is routed: `(row, rows)`.
    pub routed_by: fn(usize, usize) -> usize,
    /// Whether a router reads the stream and not its normed rows, where every rank has all of them.
    pub router_reads_stream: bool,
    /// First row of the stream on a rank, where it is sharded: `(rank, rows of a rank)`.
    pub first_row: fn(usize, usize) -> usize,
    /// Order in which gathered rows of the ranks stand.
    pub row_order: fn(usize) -> Vec<usize>,
    /// Order in which gathered shards of the logits stand.
    pub shard_order: fn(usize) -> Vec<usize>,
    /// Token of the logits, given the rank's own entries.
    pub greedy: fn(&[f32], &Range<usize>) -> usize,
    /// What a draft head decides.
    pub draft: DraftPolicies,
    /// Ranks of prefill context parallelism.
    pub lanes: LanePolicies,
}

impl StackPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        entries,
        foreign: |_, _| None,
        cache: |_, layer| layer,
        recurrent: RecurrentPolicies::HEALTHY,
        selection: |_, own| own,
        length: |_, length, _| length,
        writes_first: true,
        position: |length, rows, row| (length + row).saturating_sub(rows),
        norm: |place, _| place,
        normed_last: true,
        entering: |part, _| part,
        summed: |_| true,
        joined: |stream, _, update| stream + update,
        gate: |attention, logit| attention / (1.0 + (-logit).exp()),
        gate_head: |rank, heads| rank * heads,
        gate_of: |number| number,
        output_head: |rank, _, heads| rank * heads,
        part: |rank, ranks, inner| rank * inner / ranks..(rank + 1) * inner / ranks,
        mixture: [|layer, _| layer; 2],
        mixtures: MixturePolicies::HEALTHY,
        routed_by: |row, _| row,
        router_reads_stream: false,
        first_row: |rank, each| rank * each,
        row_order: |ranks| (0..ranks).collect(),
        shard_order: |ranks| (0..ranks).collect(),
        greedy: |logits, _| largest(logits),
        draft: DraftPolicies::HEALTHY,
        lanes: LanePolicies::HEALTHY,
    };
}

/// Equal parts, rounded up; the last ones may be short or empty.
pub fn entries(rank: usize, ranks: usize, vocabulary: usize) -> Range<usize> {
    let each = vocabulary.div_ceil(ranks);
    (rank * each).min(vocabulary)..((rank + 1) * each).min(vocabulary)
}

/// What a session keeps of a stack: caches of each layer, what a rank may keep of earlier steps of it, and states of recurrent layers.
#[derive(Default)]
pub struct StackMemory {
    layers: Vec<LayerMemory>,
    /// By rank of prefill context parallelism and recurrent layer.
    states: Vec<Vec<KdaMemory>>,
}

#[derive(Clone)]
struct LayerMemory {
    caches: Vec<RankCache>,
    memories: Vec<Memory>,
}

/// The session that a step runs in.
pub struct Scene<'a> {
    /// What it was opened with.
    pub configuration: &'a Configuration,
    /// Its layouts.
    pub grids: Grids,
    /// The batch as the step brings it.
    pub batch: &'a Batch,
    /// The metadata that each rank attends with, in all layers.
    pub metadata: &'a [Metadata],
    /// The ranks, in groups of decode context parallelism.
    pub ranks: Ranks,
    /// Decisions.
    pub policies: &'a Policies,
}

/// What was seen of one rank.
#[derive(Clone, Default)]
struct Seen {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    restored: Vec<f32>,
    update: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    attention: Vec<f32>,
    gated: Vec<f32>,
    router_logits: Vec<f32>,
    topk_ids: Vec<i32>,
    latent: Vec<f32>,
    latent_sum: Vec<f32>,
    latent_normed: Vec<f32>,
    kda_channels: Vec<f32>,
    kda_gates: Vec<f32>,
    kda_out: Vec<f32>,
    kda_state: Vec<f32>,
    kda_window: Vec<f32>,
    logits: Vec<f32>,
    tokens: Vec<i32>,
}

impl StackMemory {
    /// Makes room for the layers of a plan on so many ranks, what earlier steps left kept.
    ///
    /// # Errors
    /// A crash for a session whose ranks were others before.
    fn remember(
        &mut self,
        configuration: &Configuration,
        plan: &StackPlan,
        ranks: usize,
    ) -> Result<(), EngineError> {
        if let Some(known) =
            self.layers.first().map(|layer| layer.caches.len()).filter(|known| *known != ranks)
        {
            let text = format!("{ranks} ranks run a stack whose caches {known} ranks have");
            return Err(EngineError::Crash { text });
        }
        let fresh = || LayerMemory {
            caches: vec![RankCache::unwritten(configuration); ranks],
            memories: vec![Memory::default(); ranks],
        };
        let layers = plan.layers + plan.heads_of_drafts();
        self.layers.resize_with(layers.max(self.layers.len()), fresh);
        self.states.resize_with(ranks / configuration.tp, Vec::new);
        self.states.iter_mut().for_each(|states| {
            states.resize_with(plan.layers.max(states.len()), KdaMemory::default);
        });
        Ok(())
    }
}

/// Runs the rows of a step through all layers.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; a crash for tokens, positions or blocks that do not exist.
pub fn forward(
    scene: &Scene<'_>,
    inputs: &Tensors,
    plan: StackPlan,
    memory: &mut StackMemory,
) -> Result<Reply, EngineError> {
    let gating = (scene.policies.moe.gating)(plan.activation);
    let weights = Weights::read(inputs, &plan, scene.configuration, gating)?;
    let rows = rows(scene, inputs, &weights.sizes)?;
    let lanes = Lanes::of(scene, plan.pcp, &rows, inputs)?;
    let ranks = scene.configuration.tp * lanes.all.len();
    memory.remember(scene.configuration, &plan, ranks)?;
    let step = Step { scene, plan, weights: &weights, rows: &rows, lanes, inputs };
    let mut passage =
        Passage { streams: Vec::new(), seen: vec![Seen::default(); ranks], collectives: vec![0; ranks] };
    passage.streams = passage.all(&step, |worker, _| worker.embed())?;
    for layer in 0..plan.layers {
        step.layer(layer, &mut passage, memory)?;
    }
    let last = passage.all(&step, |worker, stream| worker.normed(stream, plan.places() - 1))?;
    for ((seen, normed), stream) in passage.seen.iter_mut().zip(&last).zip(&passage.streams) {
        seen.hidden.extend(stream);
        seen.normed.extend(normed);
    }
    let restored = step.gathered(Gathered::Last, last, &mut passage)?;
    let last = passage.all(&step, |worker, _| worker.logits(&restored[worker.link.rank]))?;
    for ((seen, (logits, tokens)), restored) in passage.seen.iter_mut().zip(last).zip(&restored) {
        seen.logits = logits;
        seen.tokens = tokens;
        if plan.pcp.is_some() {
            seen.restored.clone_from(restored);
        }
    }
    if plan.drafts == 0 {
        return Ok(step.reply(passage));
    }
    let tokens = passage.seen[0].tokens.clone();
    let target = Target { tokens: &tokens, normed: &restored };
    let drafts = draft::propose(&step, inputs, &target, memory, &mut passage.collectives)?;
    let mut reply = step.reply(passage);
    drafts.iter().for_each(|(name, tensor)| reply.outputs.insert(name, tensor.clone()));
    Ok(reply)
}

/// Tokens and positions of the rows.
fn rows(scene: &Scene<'_>, inputs: &Tensors, sizes: &Sizes) -> Result<Rows, EngineError> {
    let crash = |text: String| EngineError::Crash { text };
    let (batch, count) = (scene.batch, scene.batch.rows);
    let tokens = inputs.get("token_ids")?.expect("token_ids", Dtype::I32, &[count])?.to_i64();
    let known = |token: &i64| usize::try_from(*token).ok().filter(|token| *token < sizes.vocabulary);
    let tokens: Option<Vec<usize>> = tokens.iter().map(known).collect();
    let tokens = tokens
        .ok_or_else(|| crash(format!("a token is not among the {} of the vocabulary", sizes.vocabulary)))?;
    let position = |row: &Option<crate::grid::RowRef>| match row {
        Some(row) => (scene.policies.stack.position)(batch.seq_lens[row.request], row.query_len, row.row),
        None => 0,
    };
    let positions: Vec<usize> = batch.row_refs(&scene.policies.layout).iter().map(position).collect();
    let places = (0..count).map(|row| (row < batch.real_rows()).then_some(row)).collect();
    match positions.iter().find(|position| **position >= sizes.positions) {
        Some(position) => {
            Err(crash(format!("position {position} is beyond the {} of the rotary table", sizes.positions)))
        }
        None => Ok(Rows { tokens, positions, places }),
    }
}

/// What all ranks of a step have in common.
struct Step<'a> {
    scene: &'a Scene<'a>,
    plan: StackPlan,
    weights: &'a Weights,
    /// Rows of the whole batch.
    rows: &'a Rows,
    /// What each rank of prefill context parallelism has of them.
    lanes: Lanes,
    inputs: &'a Tensors,
}

/// Where a step stands between two phases.
struct Passage {
    streams: Vec<Vec<f32>>,
    seen: Vec<Seen>,
    collectives: Vec<u64>,
}

impl Passage {
    /// Runs a phase on all ranks at once, each over its stream.
    fn all<R: Send>(
        &mut self,
        step: &Step<'_>,
        phase: impl Fn(&Worker<'_>, &[f32]) -> Result<R, Stop> + Sync,
    ) -> Result<Vec<R>, EngineError> {
        let tp = step.scene.ranks.count;
        let ranks = Ranks { count: tp * step.lanes.all.len(), world: tp, ..step.scene.ranks };
        let streams = &self.streams;
        let run = run_ranks(ranks, |link: &Link<'_>| {
            let worker = Worker {
                plan: step.plan,
                weights: step.weights,
                rows: &step.lanes.all[link.group()].rows,
                link,
                dcp: step.scene.configuration.dcp,
                policies: &step.scene.policies.stack,
            };
            phase(&worker, streams.get(link.rank).map_or(&[], Vec::as_slice))
        })?;
        self.count(&run.collectives);
        Ok(run.results)
    }

    fn count(&mut self, collectives: &[u64]) {
        self.collectives.iter_mut().zip(collectives).for_each(|(sum, count)| *sum += count);
    }
}

impl Step<'_> {
    /// Place of the norm before a layer's attention; the next one is that before its MLP.
    fn place(&self, layer: usize) -> usize {
        if layer < self.plan.layers { 2 * layer } else { self.plan.places() + 2 }
    }

    /// Number of the cache that one layer uses, by the number of its own.
    fn cache(&self, to: TableUse, number: usize) -> usize {
        let stack = &self.scene.policies.stack;
        let targets = self.plan.attending().len();
        if number < targets { (stack.cache)(to, number) } else { (stack.draft.cache)(number, targets - 1) }
    }

    fn layer(
        &self,
        layer: usize,
        passage: &mut Passage,
        memory: &mut StackMemory,
    ) -> Result<(), EngineError> {
        let before = passage.all(self, |worker, stream| worker.normed(stream, self.place(layer)))?;
        let updates = match self.plan.kind(layer).attends() {
            true => self.latent(layer, &before, passage, memory)?,
            false => self.recurrent(layer, &before, passage, memory)?,
        };
        let behind = passage.all(self, |worker, stream| {
            let rank = worker.link.rank;
            let middle = worker.joined(stream, &before[rank], &updates[rank]);
            let normed = worker.normed(&middle, self.place(layer) + 1)?;
            Ok((middle, normed))
        })?;
        for (rank, (middle, normed)) in behind.iter().enumerate() {
            let seen = &mut passage.seen[rank];
            seen.hidden.extend(passage.streams[rank].iter().chain(middle));
            seen.normed.extend(before[rank].iter().chain(normed));
            seen.update.extend(&updates[rank]);
            passage.streams[rank].clone_from(middle);
        }
        let normed: Vec<Vec<f32>> = behind.into_iter().map(|(_, normed)| normed).collect();
        let updates = match &self.weights.feed_forward[layer] {
            FeedForward::Mlp(_) => passage.all(self, |worker, stream| {
                worker.feed_forward_update(stream, &normed[worker.link.rank], layer)
            })?,
            FeedForward::Experts(_) => self.mixture(layer, &normed, passage)?,
        };
        passage.streams = passage.all(self, |worker, stream| {
            let rank = worker.link.rank;
            Ok(worker.joined(stream, &normed[rank], &updates[rank]))
        })?;
        passage.seen.iter_mut().zip(&updates).for_each(|(seen, update)| seen.update.extend(update));
        Ok(())
    }

    /// What a layer with latent attention adds to the stream of each rank, given all rows behind its norm.
    fn latent(
        &self,
        layer: usize,
        normed: &[Vec<f32>],
        passage: &mut Passage,
        memory: &mut StackMemory,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let stack = &self.scene.policies.stack;
        let number = self.plan.number(layer);
        let [writes, attends] =
            [TableUse::Write, TableUse::Attend].map(|to| (stack.recurrent.cache)(to, layer, number));
        let projected =
            passage.all(self, |worker, _| Ok(worker.project(&normed[worker.link.rank], number)))?;
        let keys = projected.iter().map(|(_, key)| key.clone()).collect();
        let keys = self.gathered(Gathered::Keys, keys, passage)?;
        let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
        let queries: Vec<&[f32]> = projected.iter().map(|(query, _)| query.as_slice()).collect();
        if stack.writes_first {
            self.write(writes, &keys, memory)?;
        }
        let attended = self.attend((layer, number, attends), &queries, memory, passage)?;
        if !stack.writes_first {
            self.write(writes, &keys, memory)?;
        }
        let size = attended.len() / passage.streams.len();
        let of_rank = |rank: usize| &attended[rank * size..(rank + 1) * size];
        for (rank, (query, key)) in projected.iter().enumerate() {
            let seen = &mut passage.seen[rank];
            seen.query.extend(query);
            seen.key.extend(key);
            seen.attention.extend(of_rank(rank));
        }
        if !self.plan.output_gate {
            return passage.all(self, |worker, stream| {
                worker.attention_update(stream, of_rank(worker.link.rank), number)
            });
        }
        let gated = passage.all(self, |worker, _| {
            Ok(worker.gated(&normed[worker.link.rank], of_rank(worker.link.rank), number))
        })?;
        passage.seen.iter_mut().zip(&gated).for_each(|(seen, gated)| seen.gated.extend(gated));
        passage.all(self, |worker, stream| worker.attention_update(stream, &gated[worker.link.rank], number))
    }

    /// Writes the keys of the new rows of the whole batch that each rank owns into the cache of a latent layer.
    fn write(&self, layer: usize, keys: &[&[f32]], memory: &mut StackMemory) -> Result<(), EngineError> {
        let Scene { batch, policies, grids, .. } = self.scene;
        let refs = batch.row_refs(&policies.layout);
        let position = |row: &Option<crate::grid::RowRef>| {
            row.map_or(0, |row| (batch.seq_lens[row.request] + row.row) as i64 - row.query_len as i64)
        };
        let map = WriteMap {
            positions: refs.iter().map(position).collect(),
            requests: refs.iter().map(|row| row.map_or(-1, |row| row.request as i64)).collect(),
            table: batch.table.clone(),
        };
        let target = self.cache(TableUse::Write, layer);
        let LayerMemory { caches, memories } = &mut memory.layers[target];
        for (rank, (cache, memory)) in caches.iter_mut().zip(memories).enumerate() {
            let format = KvFormat::of(self.scene.configuration);
            let grid = grids.slots;
            let batch = WriteBatch { key: keys[rank].to_vec(), value: Vec::new(), grid, format, policies };
            let map = (policies.session.recall_write)(memory, map.clone());
            batch.write_rank(&map, rank % grid.world, cache, memory).map_err(failed)?;
        }
        Ok(())
    }

    /// What attention gives to the heads of all ranks, `[ranks, T, H, Vo]`, in a layer, by its number among those that attend
    /// and that of its cache.
    fn attend(
        &self,
        (layer, number, cache): (usize, usize, usize),
        queries: &[&[f32]],
        memory: &StackMemory,
        passage: &mut Passage,
    ) -> Result<Vec<f32>, EngineError> {
        let Scene { configuration, grids, policies, ranks, .. } = *self.scene;
        let Sizes { heads, all_heads, key_dim, .. } = self.weights.sizes;
        let own = heads * key_dim;
        let source = self.cache(TableUse::Attend, cache);
        let mut attended = Vec::new();
        for (index, lane) in self.lanes.all.iter().enumerate() {
            let members = index * ranks.count..(index + 1) * ranks.count;
            let count = lane.rows.tokens.len();
            let queries = &queries[members.clone()];
            let row = |row: usize| queries.iter().flat_map(move |query| &query[row * own..(row + 1) * own]);
            let query: Vec<f32> = (0..count).flat_map(row).copied().collect();
            let inputs = Tensors::new()
                .with("query", Tensor::from_f32(Dtype::Bf16, &[count, all_heads, key_dim], &query))
                .with("w_uv", self.weights.latent[number].up_projection.clone());
            let metadata: Vec<Metadata> =
                lane.metadata.iter().map(|own| self.in_layer(number, own)).collect();
            let caches = &memory.layers[source].caches[members.clone()];
            let plan = self.selection(layer, lane, &metadata)?;
            let given = (&inputs, plan.as_ref(), None);
            let reply = attend((configuration, grids), caches, given, &metadata, ranks, policies)?;
            let counted = passage.collectives[members].iter_mut().zip(&reply.collectives);
            counted.for_each(|(sum, count)| *sum += count);
            attended.extend(reply.outputs.get("out")?.to_f32());
        }
        Ok(attended)
    }

    fn in_layer(&self, layer: usize, metadata: &Metadata) -> Metadata {
        let mut own = metadata.clone();
        let starts = own.batch.starts.clone();
        for (request, length) in own.batch.seq_lens.iter_mut().enumerate() {
            let rows = (starts[request + 1] - starts[request]) as usize;
            *length = (self.scene.policies.stack.length)(layer, *length, rows);
        }
        own
    }

    fn reply(&self, passage: Passage) -> Reply {
        let Passage { seen, collectives, .. } = passage;
        let (ranks, tp, plan) = (seen.len(), self.scene.configuration.tp, self.plan);
        let (all, rows) = (self.rows.tokens.len(), self.lanes.all[0].rows.tokens.len());
        let Sizes { hidden, vocabulary, heads, key_dim, up_dim, .. } = self.weights.sizes;
        let (layers, own) = (plan.attending().len(), plan.stream_rows(rows, tp));
        let join = |dtype: Dtype, shape: &[usize], part: fn(&Seen) -> &Vec<f32>| {
            let values: Vec<f32> = seen.iter().flat_map(|seen| part(seen).iter().copied()).collect();
            let shape: Vec<usize> = std::iter::once(ranks).chain(shape.iter().copied()).collect();
            Tensor::from_f32(dtype, &shape, &values)
        };
        let half = Dtype::Bf16;
        let tokens: Vec<i32> = seen.iter().flat_map(|seen| seen.tokens.iter().copied()).collect();
        let mut outputs = Tensors::new()
            .with("logits", join(Dtype::F32, &[all, vocabulary], |seen| &seen.logits))
            .with("tokens", Tensor::from_i32(&[ranks, all], &tokens))
            .with("hidden", join(half, &[plan.places(), own, hidden], |seen| &seen.hidden))
            .with("normed", join(half, &[plan.places(), rows, hidden], |seen| &seen.normed))
            .with("update", join(half, &[2 * plan.layers, own, hidden], |seen| &seen.update))
            .with("query", join(half, &[layers, rows, heads, key_dim], |seen| &seen.query))
            .with("key", join(half, &[layers, rows, key_dim], |seen| &seen.key))
            .with("attention", join(half, &[layers, rows, heads, up_dim], |seen| &seen.attention));
        if plan.output_gate {
            outputs.insert("gated", join(half, &[layers, rows, heads, up_dim], |seen| &seen.gated));
        }
        if plan.pcp.is_some() {
            outputs.insert("rows", self.lanes.tensor());
            outputs.insert("restored", join(half, &[all, hidden], |seen| &seen.restored));
        }
        if let Some(recurrent) = self.weights.recurrent.first() {
            let count = (rows, self.scene.batch.seq_lens.len());
            let parts: [fn(&Seen) -> &Vec<f32>; 5] = [
                |seen| &seen.kda_channels,
                |seen| &seen.kda_gates,
                |seen| &seen.kda_out,
                |seen| &seen.kda_state,
                |seen| &seen.kda_window,
            ];
            let shapes = recurrent::shapes(recurrent.sizes, self.weights.recurrent.len(), tp, count);
            for ((name, dtype, shape), part) in shapes.iter().zip(parts) {
                outputs.insert(name, join(*dtype, shape, part));
            }
        }
        let Some(mixture) = plan.experts.filter(|_| plan.mixtures() > 0) else {
            return Reply { outputs, collectives, ..Reply::default() };
        };
        let (each, top_k) = (plan.mixtures() * rows, mixture.router.top_k);
        let experts = seen[0].router_logits.len().checked_div(each).unwrap_or(0);
        if mixture.latent {
            let width = seen[0].latent.len().checked_div(each).unwrap_or(0);
            let shape = [plan.mixtures(), rows, width];
            outputs.insert("latent", join(half, &shape, |seen| &seen.latent));
            outputs.insert("latent_sum", join(half, &shape, |seen| &seen.latent_sum));
            outputs.insert("latent_normed", join(half, &shape, |seen| &seen.latent_normed));
        }
        let ids: Vec<i32> = seen.iter().flat_map(|seen| seen.topk_ids.iter().copied()).collect();
        let outputs = outputs
            .with(
                "router_logits",
                join(Dtype::F32, &[plan.mixtures(), rows, experts], |seen| &seen.router_logits),
            )
            .with("topk_ids", Tensor::from_i32(&[ranks, plan.mixtures(), rows, top_k], &ids));
        Reply { outputs, collectives, ..Reply::default() }
    }
}
