//! Recurrent layers of a stack: a step of Kimi delta attention between two norms, over states of the layer's own.
//!
//! Order: transformers `KimiDecoderLayer`, `KimiLinearDeltaAttention`; heads over ranks: vLLM `KimiDeltaAttention`, whose output projection
//! is row-parallel.

use shardcheck_engine::{EngineError, KdaPlan, Tensor, Tensors};
use shardcheck_formats::{Dtype, round_bf16};

use super::lanes::Gathered;
use super::weights::part;
use super::worker::{Part, Worker, dot};
use super::{Passage, StackMemory, Step};
use crate::communicator::Stop;
use crate::kda::{KdaMemory, KdaPolicies};
use crate::policies::TableUse;

/// What a stack with recurrent layers decides.
#[derive(Clone, Copy, PartialEq)]
pub struct RecurrentPolicies {
    /// How a recurrent layer works, given its number and how any of them does.
    pub kda: fn(usize, KdaPolicies) -> KdaPolicies,
    /// Recurrent layer whose states, as they are now, a layer goes on from: `(its number, recurrent layers)`.
    pub states: fn(usize, usize) -> usize,
    /// Whether a request leaves its states in the slot that it reads too: `(read slot, write slot)`.
    pub shares: fn(i64, i64) -> bool,
    /// Recurrent layer whose weights a layer uses: by its number.
    pub weights: fn(usize) -> usize,
    /// Whether its products read the stream and not its normed rows, where every rank has all of them.
    pub reads_stream: bool,
    /// Rows of the step that enter states: `(rows of requests, all rows)`.
    pub rows: fn(usize, usize) -> usize,
    /// Latent layer into whose cache a recurrent one writes its rows, given how many stand before it.
    pub keys: fn(usize) -> Option<usize>,
    /// Number by which a latent layer finds its cache: `(use, layer, number among latent ones)`.
    pub cache: fn(TableUse, usize, usize) -> usize,
}

impl RecurrentPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        kda: |_, policies| policies,
        states: |number, _| number,
        shares: |_, _| false,
        weights: |number| number,
        reads_stream: false,
        rows: |real, _| real,
        keys: |_| None,
        cache: |_, _, number| number,
    };
}

/// Sizes of the recurrent layers.
#[derive(Debug, Clone, Copy)]
pub struct RecurrentSizes {
    heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    taps: usize,
}

/// Weights of one recurrent layer.
pub struct RecurrentWeights {
    /// Sizes.
    pub sizes: RecurrentSizes,
    /// Queries, keys, values, decays, shares and output gates: `[heads, width · h]` each.
    projections: [Vec<f32>; 6],
    /// Convolution, decays and norm, as a step of such a layer is given them.
    given: Tensors,
    /// `[h, HV·V]`.
    output: Vec<f32>,
}

impl RecurrentWeights {
    /// Weights of all recurrent layers of a plan.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit each other; a crash for heads that ranks do not share.
    pub fn read(
        inputs: &Tensors,
        layers: usize,
        (hidden, tp): (usize, usize),
    ) -> Result<Vec<Self>, EngineError> {
        if layers == 0 {
            return Ok(Vec::new());
        }
        let crash = |text: String| EngineError::Crash { text };
        let axes = |name: &str| -> Result<Vec<usize>, EngineError> { Ok(inputs.get(name)?.shape().to_vec()) };
        let (query, value, convolution) = (axes("kda_query")?, axes("kda_value")?, axes("kda_convolution")?);
        let (&[_, heads, key_dim, _], &[_, value_heads, value_dim, _], &[_, channels, taps]) =
            (&query[..], &value[..], &convolution[..])
        else {
            return Err(crash("kda_query and kda_value have four axes, kda_convolution three".to_owned()));
        };
        if heads == 0 || !heads.is_multiple_of(tp) || !value_heads.is_multiple_of(heads) {
            return Err(crash(format!("{tp} ranks do not share {heads} heads or {value_heads} value heads")));
        }
        let sizes = RecurrentSizes { heads, value_heads, key_dim, value_dim, taps };
        let read = |name: &str, dtype: Dtype, shape: &[usize]| -> Result<Vec<f32>, EngineError> {
            let shape: Vec<usize> = std::iter::once(layers).chain(shape.iter().copied()).collect();
            Ok(inputs.get(name)?.expect(name, dtype, &shape)?.to_f32())
        };
        let projections = [
            read("kda_query", Dtype::Bf16, &[heads, key_dim, hidden])?,
            read("kda_key", Dtype::Bf16, &[heads, key_dim, hidden])?,
            read("kda_value", Dtype::Bf16, &[value_heads, value_dim, hidden])?,
            read("kda_gate", Dtype::Bf16, &[value_heads, key_dim, hidden])?,
            read("kda_beta", Dtype::Bf16, &[value_heads, hidden])?,
            read("kda_output_gate", Dtype::Bf16, &[value_heads, value_dim, hidden])?,
        ];
        let keys = heads * key_dim;
        let taps_of = read("kda_convolution", Dtype::F32, &[2 * keys + value_heads * value_dim, taps])?;
        let a_log = read("kda_a_log", Dtype::F32, &[value_heads])?;
        let bias = read("kda_bias", Dtype::F32, &[value_heads, key_dim])?;
        let norm = read("kda_norm", Dtype::F32, &[value_dim])?;
        let output = read("kda_output", Dtype::Bf16, &[hidden, value_heads * value_dim])?;
        let layer = |layer: usize| {
            let of = |all: &[f32]| part(all, layers, layer);
            let own = of(&taps_of);
            debug_assert_eq!(own.len(), channels * taps);
            let single = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values);
            let (queries, rest) = own.split_at(keys * taps);
            let (keys, values) = rest.split_at(keys * taps);
            let given = Tensors::new()
                .with("conv_query", single(&[heads, key_dim, taps], queries))
                .with("conv_key", single(&[heads, key_dim, taps], keys))
                .with("conv_value", single(&[value_heads, value_dim, taps], values))
                .with("a_log", single(&[value_heads], &of(&a_log)))
                .with("dt_bias", single(&[value_heads, key_dim], &of(&bias)))
                .with("norm_weight", single(&[value_dim], &of(&norm)));
            let projections = projections.each_ref().map(|all| of(all));
            Self { sizes, projections, given, output: of(&output) }
        };
        Ok((0..layers).map(layer).collect())
    }
}

/// What one rank projects of all rows: channels `[T, C]`, and gates `[T, HV / P · (K + 1 + V)]`.
struct Projected {
    channels: Vec<f32>,
    gates: Vec<f32>,
}

impl Worker<'_> {
    fn project_recurrent(&self, stream: &[f32], normed: &[f32], weights: &RecurrentWeights) -> Projected {
        let hidden = self.weights.sizes.hidden;
        let reads_stream = self.policies.recurrent.reads_stream && stream.len() == normed.len();
        let rows = if reads_stream { stream } else { normed };
        let ranks = self.link.world;
        let own = |matrix: &[f32], x: &[f32]| -> Vec<f32> {
            let size = matrix.len() / ranks;
            matrix[self.link.member * size..][..size].chunks_exact(hidden).map(|w| dot(w, x)).collect()
        };
        let mut projected = Projected { channels: Vec::new(), gates: Vec::new() };
        for x in rows.chunks_exact(hidden) {
            let (channels, gates) = weights.projections.split_at(3);
            channels.iter().for_each(|matrix| projected.channels.extend(own(matrix, x)));
            gates.iter().for_each(|matrix| projected.gates.extend(own(matrix, x)));
        }
        projected.channels.iter_mut().for_each(|value| *value = round_bf16(*value));
        projected
    }

    /// What a recurrent layer adds to the stream, given the output of the own value heads `[T, HV / P, V]`.
    fn recurrent_update(
        &self,
        stream: &[f32],
        out: &[f32],
        weights: &RecurrentWeights,
    ) -> Result<Vec<f32>, Stop> {
        let all = weights.sizes.value_heads * weights.sizes.value_dim;
        let own = all / self.link.world;
        let row = |x: &[f32]| -> Vec<f32> {
            let columns = |row: &[f32]| dot(&row[self.link.member * own..][..own], x);
            weights.output.chunks_exact(all).map(columns).collect()
        };
        self.update(Part::Recurrent, stream, out.chunks_exact(own).flat_map(row).collect())
    }
}

impl Step<'_> {
    /// What a recurrent layer adds to the stream of each rank.
    pub(super) fn recurrent(
        &self,
        layer: usize,
        normed: &[Vec<f32>],
        passage: &mut Passage,
        memory: &mut StackMemory,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let crash = |text: String| EngineError::Crash { text };
        let number = self.plan.number(layer);
        let plan =
            self.plan.recurrent.ok_or_else(|| crash(format!("layer {layer} is recurrent without a plan")))?;
        let weights = &self.weights.recurrent[(self.scene.policies.stack.recurrent.weights)(number)];
        let projected = passage.all(self, |worker, stream| {
            Ok(worker.project_recurrent(stream, &normed[worker.link.rank], weights))
        })?;
        let whole = self.gather_recurrent(&projected, passage)?;
        let (pcp, tp) = (self.lanes.all.len(), self.scene.configuration.tp);
        let mut outs = Vec::new();
        for lane in 0..pcp {
            let members = &whole[lane * tp..(lane + 1) * tp];
            let (out, [state, window]) =
                self.recurrent_step(number, lane, (plan, weights), members, &mut memory.states[lane])?;
            for rank in 0..tp {
                let seen = &mut passage.seen[lane * tp + rank];
                seen.kda_state.extend(part(&state, tp, rank));
                seen.kda_window.extend(part(&window, tp, rank));
                // rows of padding come out as zeros
                let width = weights.sizes.value_heads / tp * weights.sizes.value_dim;
                let mut own = part(&out, tp, rank);
                own.resize(self.rows.tokens.len() * width, 0.0);
                outs.push(self.local(lane * tp + rank, &own));
            }
        }
        self.write_rows(layer - number, &whole, memory)?;
        for ((seen, own), out) in passage.seen.iter_mut().zip(projected).zip(&outs) {
            seen.kda_channels.extend(own.channels);
            seen.kda_gates.extend(own.gates);
            seen.kda_out.extend(out);
        }
        passage.all(self, |worker, stream| worker.recurrent_update(stream, &outs[worker.link.rank], weights))
    }

    /// What is projected of the rows of the whole batch, on every rank.
    fn gather_recurrent(
        &self,
        projected: &[Projected],
        passage: &mut Passage,
    ) -> Result<Vec<Projected>, EngineError> {
        let mut gather = |of: fn(&Projected) -> &Vec<f32>| {
            self.gathered(Gathered::States, projected.iter().map(|own| of(own).clone()).collect(), passage)
        };
        let (channels, gates) = (gather(|own| &own.channels)?, gather(|own| &own.gates)?);
        Ok(channels.into_iter().zip(gates).map(|(channels, gates)| Projected { channels, gates }).collect())
    }

    /// A step of a recurrent layer on one rank of prefill context parallelism, over all rows: outputs of all its ranks, and their states and windows.
    fn recurrent_step(
        &self,
        number: usize,
        lane: usize,
        (plan, weights): (KdaPlan, &RecurrentWeights),
        projected: &[Projected],
        memory: &mut [KdaMemory],
    ) -> Result<(Vec<f32>, [Vec<f32>; 2]), EngineError> {
        let policies = &self.scene.policies.stack.recurrent;
        let inputs = self.recurrent_inputs(projected, weights)?;
        let configuration = self.scene.configuration;
        let source = (policies.states)(number, self.weights.recurrent.len());
        let mut states = memory[number].with_states_of(&memory[source]);
        let kda = (policies.kda)(number, self.scene.policies.kda);
        let reply = states.step(&inputs, plan, (configuration.tp, configuration.dcp), &kda)?;
        let slots = |name: &str| -> Result<Vec<i64>, EngineError> { Ok(inputs.get(name)?.to_i64()) };
        for (read, write) in slots("read_slots")?.into_iter().zip(slots("write_slots")?) {
            if (policies.shares)(read, write) {
                states.copy(write as usize, read as usize);
            }
        }
        let keeps = self.scene.policies.stack.lanes.keeps;
        let is_kept = keeps(lane, self.lanes.all.len(), !self.lanes.is_whole());
        memory[number] = if is_kept { states } else { states.emptied() };
        let outputs = |name: &str| -> Result<Vec<f32>, EngineError> { Ok(reply.outputs.get(name)?.to_f32()) };
        Ok((outputs("out")?, [outputs("state")?, outputs("window")?]))
    }

    /// A step of Kimi delta attention of what all ranks have projected.
    fn recurrent_inputs(
        &self,
        projected: &[Projected],
        weights: &RecurrentWeights,
    ) -> Result<Tensors, EngineError> {
        let RecurrentSizes { heads, value_heads, key_dim, value_dim, .. } = weights.sizes;
        let ranks = projected.len();
        let (keys, values) = (heads / ranks * key_dim, value_heads / ranks * value_dim);
        let (decays, shares) = (value_heads / ranks * key_dim, value_heads / ranks);
        let batch = self.scene.batch;
        let mut starts: Vec<i32> = batch.starts.clone();
        let real = starts.last().map_or(0, |rows| *rows as usize);
        let rows = (self.scene.policies.stack.recurrent.rows)(real, self.rows.tokens.len());
        if let Some(last) = starts.last_mut() {
            *last = rows as i32;
        }
        // columns of a row of each rank, one rank's behind the other's
        let gather = |of: fn(&Projected) -> &Vec<f32>, first: usize, width: usize| -> Vec<f32> {
            let mut all = Vec::new();
            for row in 0..rows {
                for own in projected {
                    let size = of(own).len() / self.rows.tokens.len();
                    all.extend_from_slice(&of(own)[row * size + first..][..width]);
                }
            }
            all
        };
        let channels = |first: usize, count: usize, heads: usize, dim: usize| {
            Tensor::from_f32(Dtype::Bf16, &[rows, heads, dim], &gather(|own| &own.channels, first, count))
        };
        let gates = |first: usize, count: usize, shape: &[usize]| {
            Tensor::from_f32(Dtype::F32, shape, &gather(|own| &own.gates, first, count))
        };
        let mut inputs = Tensors::new()
            .with("query_start_loc", Tensor::from_i32(&[starts.len()], &starts))
            .with("query", channels(0, keys, heads, key_dim))
            .with("key", channels(keys, keys, heads, key_dim))
            .with("value", channels(2 * keys, values, value_heads, value_dim))
            .with("gate", gates(0, decays, &[rows, value_heads, key_dim]))
            .with("beta", gates(decays, shares, &[rows, value_heads]))
            .with("output_gate", gates(decays + shares, values, &[rows, value_heads, value_dim]));
        for name in ["read_slots", "write_slots", "accepted"] {
            inputs.insert(name, self.inputs.get(name)?.clone());
        }
        weights.given.iter().for_each(|(name, tensor)| inputs.insert(name, tensor.clone()));
        Ok(inputs)
    }

    /// Writes a recurrent layer's rows as keys, where it does; `before` latent layers stand before it.
    fn write_rows(
        &self,
        before: usize,
        projected: &[Projected],
        memory: &mut StackMemory,
    ) -> Result<(), EngineError> {
        let Some(target) = (self.scene.policies.stack.recurrent.keys)(before) else { return Ok(()) };
        let (rows, width) = (self.rows.tokens.len(), self.weights.sizes.key_dim);
        let keys: Vec<Vec<f32>> = projected
            .iter()
            .map(|own| {
                let row = |row: &[f32]| {
                    let mut key = row.to_vec();
                    key.resize(width, 0.0);
                    key
                };
                own.channels.chunks_exact(own.channels.len() / rows.max(1)).flat_map(row).collect()
            })
            .collect();
        let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
        self.write(target, &keys, memory)
    }
}

/// Shapes behind the axis of ranks of what recurrent layers show, by name: of `layers` of them over so many ranks
/// of tensor parallelism, a rank's rows and the step's requests.
pub(super) fn shapes(
    sizes: RecurrentSizes,
    layers: usize,
    ranks: usize,
    (rows, requests): (usize, usize),
) -> [(&'static str, Dtype, Vec<usize>); 5] {
    let RecurrentSizes { heads, value_heads, key_dim, value_dim, taps } = sizes;
    let own = value_heads / ranks;
    let channels = (2 * heads * key_dim + value_heads * value_dim) / ranks;
    [
        ("kda_channels", Dtype::Bf16, vec![layers, rows, channels]),
        ("kda_gates", Dtype::F32, vec![layers, rows, own * (key_dim + 1 + value_dim)]),
        ("kda_out", Dtype::Bf16, vec![layers, rows, own, value_dim]),
        ("kda_state", Dtype::F32, vec![layers, requests, own, key_dim, value_dim]),
        ("kda_window", Dtype::Bf16, vec![layers, requests, channels, taps - 1]),
    ]
}
