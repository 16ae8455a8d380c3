//! Material of a stack: its steps, what an engine showed of each stage, and what the oracle allows the next one.
//!
//! Every stage is judged by what the engine itself showed of the stage before it: a bound is that of one stage, however deep the stack, and
//! a stage that is wrong does not make those behind it fail.

mod keys;
mod lanes;
mod mixtures;
mod states;
mod whole;

use std::collections::BTreeMap;
use std::sync::Mutex;

use shardcheck_cases::{StackCase, StackInputs, StackTurn, generate_stack};
use shardcheck_engine::{
    Configuration, Operation, OperationKind, Profile, StackPlan, StreamLayout, Tensor, Tensors,
};
use shardcheck_formats::{Contract, Dtype};
use shardcheck_references::bound::interval;
use shardcheck_references::kda::Near;
use shardcheck_references::layout::Layout;
use shardcheck_references::moe::{Gating, Mlp};
use shardcheck_references::stack;

use crate::event::Coverage;
use crate::judge::Allowed;
use crate::laboratory::{Halt, Observed, Run, Watched};
use crate::layer::gating;
use crate::material::AttentionMaterial;

pub use keys::KeyStore;
use lanes::Lanes;
pub use lanes::shown_rows;
pub use states::{Played, Recurrence, StateStore};
use whole::WholeRows;
pub use whole::{Drafts, WholeRun};

/// Material of one case of a stack.
pub struct StackMaterial {
    /// The case.
    pub case: StackCase,
    /// Weights, tokens and runs.
    pub inputs: StackInputs,
    /// The published layout of the session's caches.
    pub layout: Layout,
    /// Layers that attend over a cache, in order.
    pub latent: Vec<usize>,
    /// Recurrent layers, in order.
    pub recurrent: Vec<usize>,
    /// What these are.
    pub recurrence: Option<Recurrence>,
    /// Weights by name, with the size of their first axis.
    weights: BTreeMap<String, (usize, Vec<f32>)>,
    contract: Contract,
    profile: Profile,
    seed: u64,
    /// What the oracle of whole runs has computed.
    whole: Mutex<WholeRows>,
}

/// What an engine showed of a run, as numbers of 32 bits, which all of them are.
pub struct Shown<'a> {
    material: &'a StackMaterial,
    observed: &'a Observed,
    /// Rows of each rank.
    pub lanes: Lanes,
    /// Rows T of the step, padding included.
    pub rows: usize,
    /// Those of them that are not padding.
    pub real_rows: usize,
    /// Requests.
    requests: usize,
}

impl StackMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// That its contract is missing, or why the steps can't be taken.
    pub fn new(case: &StackCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let contract =
            profile.operation(OperationKind::Forward).and_then(|operation| operation.contract.as_ref());
        let contract = contract.ok_or("the engine declares no contract for forward")?.clone();
        let Configuration { dcp, interleave, block_size, .. } = *case.configuration();
        let layout = Layout::new(dcp, interleave, block_size).map_err(|error| error.to_string())?;
        let inputs = generate_stack(case, seed)?;
        let read = |(name, tensor): (&str, &Tensor)| (name.to_owned(), (tensor.shape()[0], tensor.to_f32()));
        let weights: BTreeMap<String, (usize, Vec<f32>)> = inputs.weights.iter().map(read).collect();
        let (latent, recurrent) = (case.plan().attending(), case.plan().recurrences());
        let weight = |name: &str, number: usize| part(&weights, name, Some(number));
        let recurrence = Recurrence::new(case, recurrent.len(), weight, profile)?;
        let (case, profile, whole) = (case.clone(), profile.clone(), Mutex::default());
        Ok(Self {
            case,
            inputs,
            layout,
            latent,
            recurrent,
            recurrence,
            weights,
            contract,
            profile,
            seed,
            whole,
        })
    }

    /// That of another case for the same engine.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when there is none.
    pub fn variant(&self, case: &StackCase) -> Result<Self, Halt> {
        Self::new(case, self.seed, &self.profile).map_err(Halt::Inconclusive)
    }

    /// What an engine shows of every run, in a session of its own.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do one or fails.
    pub fn play(&self, engine: &Watched<'_>) -> Result<Vec<Observed>, Halt> {
        let mut run = Run::open(engine, self.configuration())?;
        self.inputs.turns.iter().map(|turn| run.step(&self.operation(), &self.tensors(turn))).collect()
    }

    /// What the session reaches.
    pub fn coverage(&self) -> Coverage {
        let mut all = Coverage::default();
        let world = self.layout.world();
        for turn in &self.inputs.turns {
            all.rows += turn.turn.new_tokens.iter().sum::<usize>() as u64;
            all.masked_rows +=
                turn.turn.new_tokens.iter().map(|new| new.saturating_sub(1)).sum::<usize>() as u64;
            all.shards += (world * turn.turn.tokens.len()) as u64;
            let empty = |rank: usize| {
                turn.turn
                    .tokens
                    .iter()
                    .filter(|tokens| self.layout.local_len(tokens.len(), rank) == 0)
                    .count()
            };
            all.empty_shards += (0..world).map(empty).sum::<usize>() as u64;
        }
        all
    }

    /// How gates and up-projections go together.
    pub fn gating(&self) -> Gating {
        gating(self.case.plan().activation)
    }

    /// What a session of the case is opened with.
    pub fn configuration(&self) -> &Configuration {
        self.case.configuration()
    }

    /// Each step.
    pub fn operation(&self) -> Operation {
        self.case.operation()
    }

    /// Tensors of a run.
    pub fn tensors(&self, turn: &StackTurn) -> Tensors {
        self.inputs.tensors(&self.case, turn)
    }

    /// Ranks of tensor parallelism.
    pub fn ranks(&self) -> usize {
        self.configuration().tp
    }

    /// Heads of all ranks.
    pub fn heads(&self) -> usize {
        self.configuration().total_heads()
    }

    /// Element type of what lies between stages.
    pub fn dtype(&self) -> Dtype {
        self.contract.output
    }

    /// A run in words: the number of its step and the step as it stands in the id.
    pub fn name(&self, turn: &StackTurn) -> String {
        let step = turn.turn.step;
        format!("step {} ({})", step + 1, self.inputs.session.steps[step])
    }

    /// A row in words: its request and position.
    pub fn row_name(&self, turn: &StackTurn, row: usize) -> String {
        match place(turn, row) {
            Some((index, position)) => {
                format!("row {row} (request {}, position {position})", turn.turn.requests[index])
            }
            None => format!("row {row} (padding)"),
        }
    }

    /// A weight, or that of one of equal parts of its first axis.
    pub fn weight(&self, name: &str, part: Option<usize>) -> &[f32] {
        self::part(&self.weights, name, part)
    }

    /// Products of weights `[outputs, h]` and a row.
    pub fn project(&self, weights: &[f32], x: &[f32]) -> Vec<Near> {
        stack::project(weights, x, &self.contract)
    }

    /// Products that may be stored in the contract's partial format before they are 32 bits wide.
    pub fn wide(&self, weights: &[f32], x: &[f32]) -> Vec<Near> {
        stack::logits(weights, x, &self.contract)
    }

    /// Values of one stage before their last rounding, as they may be seen; anything where its inputs were no numbers, since the stage
    /// before was judged for that.
    pub fn stored(&self, near: &[Near]) -> Vec<Allowed> {
        near.iter()
            .map(|near| {
                if !near.value.is_finite() || !near.error.is_finite() {
                    return Allowed::Undefined;
                }
                let (low, high) = interval(near.value, near.error, self.contract.output);
                Allowed::Between { expected: near.value, low, high }
            })
            .collect()
    }

    /// Rows of the stream behind the norm of a place.
    pub fn normed(&self, stream: &[f32], place: usize) -> Vec<Near> {
        let weight = self.weight("norm_weight", Some(place));
        stack::norm(stream, weight, f64::from(StackPlan::EPSILON), &self.contract)
    }

    /// A query or key of a row at a position, given its weights.
    pub fn projected(&self, weights: &[f32], normed: &[f32], position: usize) -> Vec<Near> {
        let width = self.case.rotary();
        let table = self.weight("rotary", Some(position));
        let (cos, sin) = table.split_at(width / 2);
        stack::turned(&stack::project(weights, normed, &self.contract), cos, sin, &self.contract)
    }

    /// What attention gave to one head of a row behind the gate of a layer, by its number among those that attend, and the head's among all.
    pub fn gated(&self, (layer, head): (usize, usize), normed: &[f32], attention: &[f32]) -> Vec<Near> {
        let size = attention.len() * normed.len();
        let weights = &self.weight("w_output_gate", Some(layer))[head * size..(head + 1) * size];
        stack::gated(weights, normed, attention, &self.contract)
    }

    /// What attention adds to the stream of a row, given what it gave to all heads.
    pub fn attention_update(&self, weights: &[f32], attention: &[f32]) -> Vec<Near> {
        stack::summed(weights, attention, self.ranks(), &self.contract)
    }

    /// What an MLP adds to the stream of a row, given its weights: gate, up and down.
    pub fn feed_forward_update(&self, [gate, up, down]: [&[f32]; 3], normed: &[f32]) -> Vec<Near> {
        stack::feed_forward(
            &Mlp { gate: Some(gate), up, down, gating: self.gating() },
            normed,
            self.ranks(),
            &self.contract,
        )
    }

    /// Logits of the experts of a layer, by its number among those that have some.
    pub fn router_logits(&self, mixture: usize, normed: &[f32]) -> Vec<Allowed> {
        let near = stack::project(self.weight("w_router", Some(mixture)), normed, &self.contract);
        near.into_iter().map(number).collect()
    }

    /// Logits of a row.
    pub fn logits(&self, head: &[f32], normed: &[f32]) -> Vec<Allowed> {
        let near = stack::logits(head, normed, &self.contract);
        near.into_iter().map(number).collect()
    }

    /// What attention of a layer may give to the heads of all ranks, `[T, Hall, Vo]`, by the caches of one group; `None` where what it
    /// attends to is no number.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when no bound can be derived.
    pub fn attended(
        &self,
        turn: &StackTurn,
        layer: usize,
        query: Vec<f32>,
        keys: Vec<Vec<f32>>,
    ) -> Result<Option<Vec<Allowed>>, Halt> {
        let mut inputs = turn.inputs.clone();
        let real = turn.turn.new_tokens.iter().sum::<usize>()
            * self.heads()
            * self.configuration().attention.qk_dim();
        if !query[..real].iter().chain(keys.iter().flatten()).all(|value| value.is_finite()) {
            return Ok(None);
        }
        inputs.query = query;
        inputs.keys = keys;
        inputs.w_uv = Some(self.weight("w_uv", Some(layer)).to_vec());
        let selection = self.case.plan().selection(self.latent[layer]);
        inputs.selected = selection.map_or(Vec::new(), |number| turn.selected[number].clone());
        let case = turn.turn.case(&self.inputs.session);
        let material =
            AttentionMaterial::over(turn.turn.kind.family(), case, self.seed, &self.profile, inputs)
                .map_err(Halt::Inconclusive)?;
        Ok(Some(material.expected()?.out.clone()))
    }
}

/// A weight by its name, or that of one of equal parts of its first axis.
fn part<'w>(weights: &'w BTreeMap<String, (usize, Vec<f32>)>, name: &str, part: Option<usize>) -> &'w [f32] {
    let Some((parts, values)) = weights.get(name) else { return &[] };
    let Some(part) = part else { return values };
    let size = values.len() / (*parts).max(1);
    &values[part * size..(part + 1) * size]
}

/// A value of 32 bits within its bound; anything where its inputs were no numbers.
pub fn number(near: Near) -> Allowed {
    match near.value.is_finite() && near.error.is_finite() {
        true => Allowed::near(near.value, near.error),
        false => Allowed::Undefined,
    }
}

/// Index of the request of a row in its batch, and its position; `None` for padding.
pub fn place(turn: &StackTurn, row: usize) -> Option<(usize, usize)> {
    let mut first = 0;
    for (index, (tokens, new)) in turn.turn.tokens.iter().zip(&turn.turn.new_tokens).enumerate() {
        if row < first + new {
            return Some((index, tokens.len() - new + row - first));
        }
        first += new;
    }
    None
}

impl<'a> Shown<'a> {
    /// What was seen of a run.
    pub fn of(material: &'a StackMaterial, turn: &StackTurn, observed: &'a Observed) -> Self {
        let real_rows = turn.turn.new_tokens.iter().sum();
        let requests = turn.turn.requests.len();
        let lanes = Lanes::of(material, turn, observed);
        Self { material, observed, lanes, rows: real_rows + turn.turn.padded_rows, real_rows, requests }
    }

    /// Rows of the stream on a rank.
    pub fn stream_rows(&self) -> usize {
        self.material.case.plan().stream_rows(self.lanes.count(), self.material.ranks())
    }

    /// Rank and place of the stream's row there, of a row of a rank: its own where it has all rows.
    pub fn stream_place(&self, rank: usize, row: usize) -> (usize, usize) {
        match self.material.case.stream {
            StreamLayout::Whole => (rank, row),
            StreamLayout::Sharded => {
                let (each, tp) = (self.stream_rows().max(1), self.material.ranks());
                (rank / tp * tp + row / each, row % each)
            }
        }
    }

    /// Row of a rank that a place of the stream on it is, among those of its rank of prefill context parallelism.
    pub fn local_row(&self, rank: usize, place: usize) -> usize {
        match self.material.case.stream {
            StreamLayout::Whole => place,
            StreamLayout::Sharded => rank % self.material.ranks() * self.stream_rows() + place,
        }
    }

    /// Row of the step that a place of the stream on a rank is; `None` behind the last one that is not padding.
    pub fn stream_row(&self, rank: usize, place: usize) -> Option<usize> {
        self.lanes.row(rank, self.local_row(rank, place))
    }

    /// Shape of an observable behind its axis of ranks.
    fn shape(&self, name: &str) -> Vec<usize> {
        let (case, plan) = (&self.material.case, self.material.case.plan());
        let configuration = self.material.configuration();
        let (heads, attention) = (configuration.heads_per_rank, configuration.attention);
        match name {
            "hidden" => vec![plan.places(), self.stream_rows(), case.hidden],
            "normed" => vec![plan.places(), self.lanes.count(), case.hidden],
            "update" => vec![2 * case.layers, self.stream_rows(), case.hidden],
            "query" => vec![self.material.latent.len(), self.lanes.count(), heads, attention.qk_dim()],
            "key" => vec![self.material.latent.len(), self.lanes.count(), attention.qk_dim()],
            "attention" | "gated" => {
                vec![self.material.latent.len(), self.lanes.count(), heads, attention.v_head_dim()]
            }
            "tokens" => vec![self.rows],
            "restored" => vec![self.rows, case.hidden],
            name if name.starts_with("latent") => {
                vec![plan.mixtures(), self.lanes.count(), case.mixture.map_or(0, |own| own.latent)]
            }
            name if name.starts_with("kda_") => self.recurrent_shape(name),
            "router_logits" => {
                vec![plan.mixtures(), self.lanes.count(), case.mixture.map_or(0, |own| own.experts)]
            }
            "topk_ids" => vec![plan.mixtures(), self.lanes.count(), case.mixture.map_or(0, |own| own.top_k)],
            _ => vec![self.rows, case.vocabulary],
        }
    }

    /// Shape of what recurrent layers show behind the axis of ranks.
    fn recurrent_shape(&self, name: &str) -> Vec<usize> {
        let Some(own) = self.material.recurrence.as_ref().map(|own| own.sizes) else { return Vec::new() };
        let (layers, ranks) = (self.material.recurrent.len(), self.material.ranks());
        let (heads, channels) = (own.value_heads / ranks, own.channels() / ranks);
        match name {
            "kda_channels" => vec![layers, self.lanes.count(), channels],
            "kda_gates" => vec![layers, self.lanes.count(), heads * (own.key_dim + 1 + own.value_dim)],
            "kda_out" => vec![layers, self.lanes.count(), heads, own.value_dim],
            "kda_state" => vec![layers, self.requests, heads, own.key_dim, own.value_dim],
            _ => vec![layers, self.requests, channels, own.taps - 1],
        }
    }

    /// A tensor by name, dtype and shape checked.
    ///
    /// # Errors
    /// [`Halt::Unsupported`] where it is an observable that the engine does not return, [`Halt::Broken`] where it is something else.
    pub fn tensor(&self, name: &str) -> Result<View, Halt> {
        let own = self.shape(name);
        let shape: Vec<usize> =
            std::iter::once(self.material.all_ranks()).chain(own.iter().copied()).collect();
        let tensor: &Tensor = match name {
            "logits" => self.observed.output(name, Dtype::F32, &shape)?,
            "tokens" => self.observed.output(name, Dtype::I32, &shape)?,
            "router_logits" | "kda_gates" | "kda_state" => {
                self.observed.observable(name, Dtype::F32, &shape)?
            }
            "kda_window" => self.observed.observable(name, Dtype::Bf16, &shape)?,
            "kda_out" => {
                let of_kda = self.material.recurrence.as_ref().map(|own| own.contract.output);
                self.observed.observable(name, of_kda.unwrap_or(self.material.dtype()), &shape)?
            }
            "topk_ids" => self.observed.observable(name, Dtype::I32, &shape)?,
            _ => self.observed.observable(name, self.material.dtype(), &shape)?,
        };
        let width = if own.len() > 1 { own[own.len() - 1] } else { 1 };
        Ok(View { values: tensor.to_f64().into_iter().map(|value| value as f32).collect(), shape, width })
    }
}

/// A tensor of an engine, row-major.
pub struct View {
    /// Values.
    pub values: Vec<f32>,
    /// Shape, ranks first.
    pub shape: Vec<usize>,
    width: usize,
}

impl View {
    /// A row along the last axis, by the indices before it.
    pub fn row(&self, at: &[usize]) -> &[f32] {
        let flat = at.iter().zip(&self.shape).fold(0, |flat, (index, size)| flat * size + index);
        &self.values[flat * self.width..(flat + 1) * self.width]
    }
}

#[cfg(test)]
mod tests;
