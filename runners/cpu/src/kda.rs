//! Kimi delta attention: what a session keeps in its slots, and a step over them, rank by rank.
//!
//! Formulas: FLA `ops/kda/naive.py`, `gate.py`, transformers `modeling_kimi_linear.py`. All in 32 bits. A rank has its own heads whole; no
//! exchange takes place. Behind each step a slot has the states behind the last rows too, so that rejected ones can be taken back.

mod batch;
mod head;

use std::collections::BTreeMap;
use std::ops::Range;

use shardcheck_engine::{EngineError, KdaGate, KdaPlan, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use batch::Batch;
use head::{HeadRow, run};

/// Output of a head: `(core, weight, gate, ε)`.
pub type Norm = fn(&[f32], &[f32], &[f32], f32) -> Vec<f32>;

/// How a step is done.
#[derive(Clone, Copy, PartialEq)]
pub struct KdaPolicies {
    /// Slot that a request goes on from: `(the one that it reads, the one that it writes)`.
    pub source: fn(Option<usize>, usize) -> Option<usize>,
    /// Rows behind which a state, and a window, goes on: `(rows that count, rows of the step)`.
    pub kept: [fn(usize, usize) -> usize; 2],
    /// Whether a request reads what an earlier one of its step wrote.
    pub sees_writes: bool,
    /// Whether a request without rows leaves its states in the slot that it writes.
    pub moves_empty: bool,
    /// Rows of each request, given their starts.
    pub segments: fn(&[usize]) -> Vec<Range<usize>>,
    /// Tap of the convolution for a token: `(its age, oldest first, taps)`.
    pub tap: fn(usize, usize) -> usize,
    /// An input of the window that a step begins with.
    pub carried: fn(f32) -> f32,
    /// Behind the convolution.
    pub activation: fn(f32) -> f32,
    /// What a query head, and a key head, is divided by, given its sum of squares.
    pub length: [fn(f32) -> f32; 2],
    /// Scale of queries of a width.
    pub scale: fn(usize) -> f32,
    /// Query and key head of a value head: `(value head, value heads, heads)`.
    pub group: fn(usize, usize, usize) -> usize,
    /// Log of a decay: `(gate, A, a, bias)`.
    pub log_decay: fn(KdaGate, f32, f32, f32) -> f32,
    /// Share of an update, given its logit.
    pub share: fn(f32) -> f32,
    /// Whether the state decays before it is updated.
    pub decays_first: bool,
    /// Whether the state is read before it is updated.
    pub reads_first: bool,
    /// What is new: `(value, what the state has for the key)`.
    pub news: fn(f32, f32) -> f32,
    /// An element of a state as it is stored.
    pub stored: fn(f32) -> f32,
    /// Place of an element of a stored state: `(row, column, K, V)`.
    pub place: fn(usize, usize, usize, usize) -> usize,
    /// Running sum by which the state before a chunk is decayed at its row.
    pub entry: fn(&[f32], usize) -> f32,
    /// Decay between two rows of a chunk, given their running sums.
    pub within: fn(f32, f32) -> f32,
    /// What a head comes out as.
    pub norm: Norm,
    /// Whether a rank takes a row into its states: `(rank of decode context parallelism, their number, row of the request)`.
    pub takes: fn(usize, usize, usize) -> bool,
    /// First head of a rank: `(rank, heads of a rank)`.
    pub first_head: fn(usize, usize) -> usize,
}

impl KdaPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        source: |read, _| read,
        kept: [|accepted, _| accepted; 2],
        sees_writes: false,
        moves_empty: true,
        segments: |starts| starts.windows(2).map(|pair| pair[0]..pair[1]).collect(),
        tap: |age, _| age,
        carried: |x| x,
        activation: |x| x * sigmoid(x),
        length: [length; 2],
        scale: |width| 1.0 / (width as f32).sqrt(),
        group: |head, value_heads, heads| head / (value_heads / heads),
        log_decay,
        share: sigmoid,
        decays_first: true,
        reads_first: false,
        news: |value, known| value - known,
        stored: |x| x,
        place: |row, column, _, width| row * width + column,
        entry: |sums, row| sums[row],
        within: |later, earlier| (later - earlier).exp(),
        norm: gated_norm,
        takes: |_, _, _| true,
        first_head: |rank, own| rank * own,
    };
}

/// σ.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Length of a head, given its sum of squares.
pub fn length(squares: f32) -> f32 {
    (squares + 1e-6).sqrt()
}

/// Log of a decay.
pub fn log_decay(gate: KdaGate, a_log: f32, a: f32, bias: f32) -> f32 {
    let sum = a + bias;
    match gate {
        KdaGate::LowerBound => KdaGate::LOWER_BOUND * sigmoid(a_log.exp() * sum),
        KdaGate::Softplus => -a_log.exp() * softplus(sum),
    }
}

/// `ln(1 + exp x)`.
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// `core / √(mean core² + ε)`.
pub fn normed(core: &[f32], epsilon: f32) -> Vec<f32> {
    let mean = core.iter().map(|x| x * x).sum::<f32>() / core.len() as f32;
    let length = (mean + epsilon).sqrt();
    core.iter().map(|x| x / length).collect()
}

fn gated_norm(core: &[f32], weight: &[f32], gate: &[f32], epsilon: f32) -> Vec<f32> {
    let gates = weight.iter().zip(gate).map(|(weight, gate)| weight * sigmoid(*gate));
    normed(core, epsilon).iter().zip(gates).map(|(x, open)| x * open).collect()
}

/// States of a request on one rank.
#[derive(Debug, Clone)]
struct States {
    /// Last inputs of each channel, a token after the other, oldest first.
    window: Vec<Vec<f32>>,
    /// `[K, V]` of each own value head.
    heads: Vec<Vec<f32>>,
}

/// What a slot holds on one rank.
#[derive(Debug, Clone)]
struct Slot {
    /// Rows of the step that wrote it.
    rows: usize,
    /// States behind its last rows, those behind all of them last.
    behind: Vec<States>,
}

impl Slot {
    fn last(&self) -> &States {
        &self.behind[self.behind.len() - 1]
    }

    /// States behind so many of its rows, or the nearest that there are.
    fn after(&self, rows: usize) -> &States {
        let back = self.rows.saturating_sub(rows).min(self.behind.len() - 1);
        &self.behind[self.behind.len() - 1 - back]
    }
}

/// Slots of every rank.
#[derive(Debug, Clone, Default)]
pub struct KdaMemory {
    ranks: Vec<BTreeMap<usize, Slot>>,
}

fn crash(text: String) -> EngineError {
    EngineError::Crash { text }
}

/// Elements of the outputs, rank after rank.
#[derive(Default)]
struct Outputs {
    out: Vec<f32>,
    core: Vec<f32>,
    state: Vec<f32>,
    window: Vec<f32>,
}

impl KdaMemory {
    /// The slots of this memory, for the same rows, with what those of another one hold.
    pub fn with_states_of(&self, other: &Self) -> Self {
        let of_slot = |own: &Slot, other: &Slot| {
            let last = other.behind.len() - 1;
            let behind = |back: usize| other.behind[last - back.min(last)].clone();
            Slot { rows: own.rows, behind: (0..own.behind.len()).rev().map(behind).collect() }
        };
        let of_rank = |(own, other): (&BTreeMap<usize, Slot>, &BTreeMap<usize, Slot>)| {
            let slot = |(number, own): (&usize, &Slot)| {
                (*number, other.get(number).map_or_else(|| own.clone(), |other| of_slot(own, other)))
            };
            own.iter().map(slot).collect()
        };
        Self { ranks: self.ranks.iter().zip(&other.ranks).map(of_rank).collect() }
    }

    /// The same slots with zeros in them.
    pub fn emptied(mut self) -> Self {
        let states = self.ranks.iter_mut().flat_map(BTreeMap::values_mut).flat_map(|slot| &mut slot.behind);
        let values = states.flat_map(|states| states.window.iter_mut().chain(&mut states.heads));
        values.for_each(|values| values.fill(0.0));
        self
    }

    /// Leaves in one slot what another one holds.
    pub fn copy(&mut self, from: usize, to: usize) {
        for slots in &mut self.ranks {
            if let Some(slot) = slots.get(&from).cloned() {
                slots.insert(to, slot);
            }
        }
    }

    /// Performs a step on `tp` ranks, each `dcp` of which share a sequence elsewhere.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit; a crash for slots, starts or counts that can't be.
    pub fn step(
        &mut self,
        inputs: &Tensors,
        plan: KdaPlan,
        (tp, dcp): (usize, usize),
        policies: &KdaPolicies,
    ) -> Result<Reply, EngineError> {
        let batch = Batch::read(inputs, plan, tp)?;
        self.ranks.resize(tp, BTreeMap::new());
        let mut outputs = Outputs::default();
        for (rank, slots) in self.ranks.iter_mut().enumerate() {
            let worker = Worker { batch: &batch, plan, rank, member: (rank % dcp, dcp), policies };
            worker.step(slots, &mut outputs)?;
        }
        let (rows, count) = (batch.rows(), batch.requests.len());
        let (own, shape) = (batch.value_heads / tp, [batch.key_dim, batch.value_dim]);
        let floats = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values);
        let outputs = Tensors::new()
            .with("out", Tensor::from_f32(Dtype::Bf16, &[tp, rows, own, shape[1]], &outputs.out))
            .with("core", floats(&[tp, rows, own, shape[1]], &outputs.core))
            .with("state", floats(&[tp, count, own, shape[0], shape[1]], &outputs.state))
            .with(
                "window",
                Tensor::from_f32(
                    Dtype::Bf16,
                    &[tp, count, batch.channels() / tp, batch.taps - 1],
                    &outputs.window,
                ),
            );
        Ok(Reply { outputs, collectives: vec![0; tp], ..Reply::default() })
    }
}

/// One rank in a step.
struct Worker<'a> {
    batch: &'a Batch,
    plan: KdaPlan,
    rank: usize,
    /// Its place among the ranks of decode context parallelism, and their number.
    member: (usize, usize),
    policies: &'a KdaPolicies,
}

impl Worker<'_> {
    fn step(&self, slots: &mut BTreeMap<usize, Slot>, outputs: &mut Outputs) -> Result<(), EngineError> {
        let before = slots.clone();
        let (own, width) = (self.batch.value_heads / self.batch.tp, self.batch.value_dim);
        let first = outputs.out.len();
        outputs.out.resize(first + self.batch.rows() * own * width, 0.0);
        outputs.core.resize(outputs.out.len(), 0.0);
        let segments = (self.policies.segments)(&self.batch.starts);
        for (request, rows) in self.batch.requests.iter().zip(segments) {
            let known = if self.policies.sees_writes { &*slots } else { &before };
            let start = self.start(known, request)?;
            let base = first + rows.start * own * width;
            let slot = self.run(start, rows, &mut outputs.out[base..], &mut outputs.core[base..]);
            if slot.rows > 0 || self.policies.moves_empty {
                slots.insert(request.write, slot);
            }
            let zero = Slot { rows: 0, behind: vec![self.zero()] };
            self.report(slots.get(&request.write).unwrap_or(&zero).last(), outputs);
        }
        Ok(())
    }

    fn zero(&self) -> States {
        let size = self.batch.key_dim * self.batch.value_dim;
        States {
            window: vec![vec![0.0; self.batch.channels() / self.batch.tp]; self.batch.taps - 1],
            heads: vec![vec![0.0; size]; self.batch.value_heads / self.batch.tp],
        }
    }

    /// States that a request begins a step with.
    fn start(&self, slots: &BTreeMap<usize, Slot>, request: &batch::Request) -> Result<States, EngineError> {
        if let Some(read) = request.read {
            let slot = slots.get(&read).ok_or_else(|| crash(format!("slot {read} holds nothing")))?;
            let rejected = slot.rows.checked_sub(request.accepted);
            if rejected.is_none_or(|rejected| rejected > self.plan.drafts) {
                let (rows, drafts) = (slot.rows, self.plan.drafts);
                return Err(crash(format!(
                    "{} of {rows} rows count; at most {drafts} can be taken back",
                    request.accepted
                )));
            }
        }
        let source = (self.policies.source)(request.read, request.write);
        let Some(slot) = source.and_then(|source| slots.get(&source)) else { return Ok(self.zero()) };
        let [state, window] = self.policies.kept.map(|kept| slot.after(kept(request.accepted, slot.rows)));
        let (depth, width) = (self.batch.key_dim, self.batch.value_dim);
        let placed = |head: &Vec<f32>| -> Vec<f32> {
            let element = |at: usize| head[(self.policies.place)(at / width, at % width, depth, width)];
            (0..head.len()).map(element).collect()
        };
        let carried = |token: &Vec<f32>| token.iter().map(|x| (self.policies.carried)(*x)).collect();
        Ok(States {
            window: window.window.iter().map(carried).collect(),
            heads: state.heads.iter().map(placed).collect(),
        })
    }

    /// Runs a request's rows; `out` and `core` begin at its first one.
    fn run(&self, start: States, rows: Range<usize>, out: &mut [f32], core: &mut [f32]) -> Slot {
        let Batch { key_dim, value_dim, heads, value_heads, tp, .. } = *self.batch;
        let (own_heads, own) = (heads / tp, value_heads / tp);
        let [first_key, first_value] =
            [own_heads, own].map(|count| (self.policies.first_head)(self.rank, count));
        let (mixed, windows) = self.convolve(start.window, rows.clone(), first_key, first_value);
        let kept = rows.len() - rows.len().min(self.plan.drafts)..rows.len() + 1;
        let mut behind: Vec<States> =
            kept.clone().map(|after| States { window: windows[after].clone(), heads: Vec::new() }).collect();
        for head in 0..own {
            let prepared: Vec<HeadRow> = rows
                .clone()
                .enumerate()
                .map(|(place, row)| self.head_row(&mixed[place], row, (head, first_value + head), place))
                .collect();
            let (cores, states) =
                run(&start.heads[head], &prepared, value_dim, self.plan.chunk, kept.start, self.policies);
            for (place, (row, seen)) in rows.clone().zip(&cores).enumerate() {
                let at = (place * own + head) * value_dim;
                core[at..at + value_dim].copy_from_slice(seen);
                let gate = &self.batch.output_gate[(row * value_heads + first_value + head) * value_dim..]
                    [..value_dim];
                let normed = (self.policies.norm)(seen, &self.batch.norm_weight, gate, KdaPlan::EPSILON);
                out[at..at + value_dim].copy_from_slice(&normed);
            }
            behind.iter_mut().zip(states).for_each(|(states, head)| states.heads.push(head));
        }
        debug_assert!(
            behind.iter().all(|states| states.heads.iter().all(|s| s.len() == key_dim * value_dim))
        );
        Slot { rows: rows.len(), behind }
    }

    /// Outputs of the convolution for each row, and the window behind no, one, … all rows.
    fn convolve(
        &self,
        mut window: Vec<Vec<f32>>,
        rows: Range<usize>,
        first_key: usize,
        first_value: usize,
    ) -> (Vec<Vec<f32>>, Vec<Vec<Vec<f32>>>) {
        let taps = self.batch.taps;
        let weights = self.batch.channel_weights(first_key, first_value);
        let (mut mixed, mut windows) = (Vec::new(), vec![window.clone()]);
        for row in rows {
            window.push(self.batch.channel_inputs(row, first_key, first_value));
            let channel = |channel: usize| {
                let sum: f32 = (0..taps)
                    .map(|age| {
                        weights[channel * taps + (self.policies.tap)(age, taps)] * window[age][channel]
                    })
                    .sum();
                (self.policies.activation)(sum)
            };
            mixed.push((0..window[0].len()).map(channel).collect());
            window.remove(0);
            windows.push(window.clone());
        }
        (mixed, windows)
    }

    /// A row of a value head by its number on the rank and among all.
    fn head_row(&self, mixed: &[f32], row: usize, (own, head): (usize, usize), place: usize) -> HeadRow {
        let Batch { key_dim, value_dim, heads, value_heads, tp, .. } = *self.batch;
        let group = (self.policies.group)(own, value_heads / tp, heads / tp);
        let unit = |first: usize, length: fn(f32) -> f32, scale: f32| -> Vec<f32> {
            let x = &mixed[first + group * key_dim..][..key_dim];
            let length = length(x.iter().map(|x| x * x).sum());
            x.iter().map(|x| x / length * scale).collect()
        };
        let [of_query, of_key] = self.policies.length;
        let keys = heads / tp * key_dim;
        let takes = (self.policies.takes)(self.member.0, self.member.1, place);
        let decay = |channel: usize| {
            let at = head * key_dim + channel;
            let a = self.batch.gate[row * value_heads * key_dim + at];
            (self.policies.log_decay)(self.plan.gate, self.batch.a_log[head], a, self.batch.dt_bias[at])
        };
        HeadRow {
            query: unit(0, of_query, (self.policies.scale)(key_dim)),
            key: unit(keys, of_key, 1.0),
            value: mixed[2 * keys + own * value_dim..][..value_dim].to_vec(),
            decay: (0..key_dim).map(|channel| if takes { decay(channel) } else { 0.0 }).collect(),
            share: if takes { (self.policies.share)(self.batch.beta[row * value_heads + head]) } else { 0.0 },
        }
    }

    fn report(&self, states: &States, outputs: &mut Outputs) {
        outputs.state.extend(states.heads.iter().flatten());
        let channels = self.batch.channels() / self.batch.tp;
        let channel = |channel: usize| states.window.iter().map(move |token| token[channel]);
        outputs.window.extend((0..channels).flat_map(channel));
    }
}
