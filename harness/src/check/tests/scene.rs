//! A paged, sharded attention call and a small engine of its own that answers it, rightly or with one slip.

use shardcheck_engine::{Mask, Tensor, Tensors};
use shardcheck_formats::{Dtype, round};

use crate::check::{Header, Report, Subject, check, pack};

/// A stream of numbers that repeats.
pub(in crate::check) struct Random(pub(in crate::check) u64);

impl Random {
    pub(in crate::check) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Nearly normal, of variance 1.
    pub(in crate::check) fn number(&mut self) -> f32 {
        let sum: f64 = (0..6).map(|_| self.word() as f64 / (1u64 << 31) as f64 - 0.5).sum();
        (sum * 2f64.sqrt()) as f32
    }
}

/// What the slots hold that no token lies in.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::check) enum Unused {
    Nan,
    Numbers,
}

/// A call to be answered.
#[derive(Clone)]
pub(in crate::check) struct Scene {
    pub(in crate::check) header: Header,
    pub(in crate::check) block: usize,
    pub(in crate::check) heads: usize,
    pub(in crate::check) kv_heads: usize,
    pub(in crate::check) qk_dim: usize,
    pub(in crate::check) v_dim: usize,
    /// Tokens and rows of each request.
    pub(in crate::check) requests: Vec<(usize, usize)>,
    pub(in crate::check) cache: Dtype,
    pub(in crate::check) unused: Unused,
    pub(in crate::check) seed: u64,
}

/// How the engine joins partials.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::check) enum Join {
    Right,
    Missing(usize),
    Twice(usize),
    Alone(usize),
    InBase(f64),
    Average,
    Sum,
}

/// Tokens that a row attends to: `(request whose table is used, position)`.
pub(in crate::check) type Seen = dyn Fn(usize, usize) -> Vec<(usize, usize)>;

/// What the engine does otherwise than right.
pub(in crate::check) struct Slip {
    pub(in crate::check) seen: Option<Box<Seen>>,
    pub(in crate::check) join: Join,
    /// Factors on scores and values.
    pub(in crate::check) factors: (f64, f64),
    pub(in crate::check) kv_head: Option<fn(usize, usize, usize) -> usize>,
}

impl Slip {
    pub(in crate::check) fn none() -> Self {
        Self { seen: None, join: Join::Right, factors: (1.0, 1.0), kv_head: None }
    }

    pub(in crate::check) fn seeing(seen: impl Fn(usize, usize) -> Vec<(usize, usize)> + 'static) -> Self {
        Self { seen: Some(Box::new(seen)), ..Self::none() }
    }

    pub(in crate::check) fn joining(join: Join) -> Self {
        Self { join, ..Self::none() }
    }

    pub(in crate::check) fn scaling(scores: f64, values: f64) -> Self {
        Self { factors: (scores, values), ..Self::none() }
    }
}

/// The inputs of a call.
pub(in crate::check) struct Inputs {
    pub(in crate::check) tensors: Tensors,
    query: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    table: Vec<i32>,
    width: usize,
    blocks: usize,
}

/// What the engine answered: `[T, H, Dv]` and `[T, H]`, natural.
#[derive(Clone)]
pub(in crate::check) struct Answer {
    pub(in crate::check) out: Vec<f32>,
    pub(in crate::check) lse: Vec<f32>,
}

impl Scene {
    /// MLA with a latent of 24 and 8 more for positions, per rank.
    pub(in crate::check) fn latent(world: usize, interleave: usize, requests: &[(usize, usize)]) -> Self {
        let mut header = Header::new(Subject::Verify);
        (header.world, header.interleave) = (world, interleave);
        header.softmax_scale = Some(f64::from(1.0f32 / 32f32.sqrt()));
        header.kv_lora_rank = Some(24);
        Self {
            header,
            block: 8,
            heads: 4,
            kv_heads: 1,
            qk_dim: 32,
            v_dim: 24,
            requests: requests.to_vec(),
            cache: Dtype::Bf16,
            unused: Unused::Nan,
            seed: 7,
        }
    }

    /// GQA with four heads on two.
    pub(in crate::check) fn grouped(world: usize, interleave: usize, requests: &[(usize, usize)]) -> Self {
        let mut scene = Self::latent(world, interleave, requests);
        scene.header.kv_lora_rank = None;
        (scene.kv_heads, scene.v_dim) = (2, 16);
        scene
    }

    pub(in crate::check) fn is_latent(&self) -> bool {
        self.header.kv_lora_rank.is_some()
    }

    fn rows(&self) -> usize {
        self.requests.iter().map(|(_, rows)| rows).sum()
    }

    pub(in crate::check) fn inputs(&self) -> Inputs {
        let mut random = Random(self.seed);
        let (world, span) = (self.header.world, self.header.world * self.block);
        // one entry more than any request needs, so that there is a token to see too much
        let width = self.requests.iter().map(|(len, _)| len / span + 1).max().unwrap_or(1);
        let blocks = self.requests.len() * width + 3;
        let mut free: Vec<i32> = (0..blocks as i32).collect();
        for index in (1..free.len()).rev() {
            free.swap(index, random.word() as usize % (index + 1));
        }
        let table: Vec<i32> = free.into_iter().take(self.requests.len() * width).collect();
        let filler = |random: &mut Random| match self.unused {
            Unused::Nan => f32::NAN,
            Unused::Numbers => random.number(),
        };
        let slots = world * blocks * self.block * self.kv_heads;
        let mut keys: Vec<f32> = (0..slots * self.qk_dim).map(|_| filler(&mut random)).collect();
        // a latent is key and value at once
        let value_slots = if self.is_latent() { 0 } else { slots };
        let mut values: Vec<f32> = (0..value_slots * self.v_dim).map(|_| filler(&mut random)).collect();
        for (request, (len, _)) in self.requests.iter().enumerate() {
            for position in 0..*len {
                for head in 0..self.kv_heads {
                    let at = self.slot(&table[request * width..], position, blocks, head);
                    let mut fill = |into: &mut [f32], dim: usize, by: f64| {
                        into[at * dim..(at + 1) * dim]
                            .iter_mut()
                            .for_each(|x| *x = (f64::from(random.number()) * 1.3 / by) as f32);
                    };
                    fill(&mut keys, self.qk_dim, self.header.k_scale);
                    if !self.is_latent() {
                        fill(&mut values, self.v_dim, self.header.v_scale);
                    }
                }
            }
        }
        let query: Vec<f32> =
            (0..self.rows() * self.heads * self.qk_dim).map(|_| random.number() * 1.5).collect();
        self.packed(query, keys, values, (table, width, blocks))
    }

    fn packed(
        &self,
        query: Vec<f32>,
        keys: Vec<f32>,
        values: Vec<f32>,
        (table, width, blocks): (Vec<i32>, usize, usize),
    ) -> Inputs {
        let world = self.header.world;
        let q = Tensor::from_f32(Dtype::Bf16, &[self.rows(), self.heads, self.qk_dim], &query);
        let axes = |dim: usize| {
            let mut axes = vec![blocks, self.block];
            if world > 1 {
                axes.insert(0, world);
            }
            if !self.is_latent() {
                axes.push(self.kv_heads);
            }
            axes.push(dim);
            axes
        };
        let key = Tensor::from_f32(self.cache, &axes(self.qk_dim), &keys);
        let value_axes = if self.is_latent() { vec![0] } else { axes(self.v_dim) };
        let value = Tensor::from_f32(self.cache, &value_axes, &values);
        let lens: Vec<i32> = self.requests.iter().map(|(len, _)| *len as i32).collect();
        let mut starts = vec![0];
        self.requests.iter().for_each(|(_, rows)| starts.push(starts.last().unwrap() + *rows as i32));
        let scaled = |tensor: &Tensor, scale: f64| -> Vec<f32> {
            tensor.to_f32().into_iter().map(|x| (f64::from(x) * scale) as f32).collect()
        };
        let held = (scaled(&key, self.header.k_scale), scaled(&value, self.header.v_scale));
        let mut tensors = Tensors::new()
            .with("q", q.clone())
            .with("block_table", Tensor::from_i32(&[self.requests.len(), width], &table))
            .with("seq_lens", Tensor::from_i32(&[lens.len()], &lens))
            .with("query_start_loc", Tensor::from_i32(&[starts.len()], &starts));
        if self.is_latent() {
            tensors.insert("kv_cache", key);
        } else {
            tensors.insert("key_cache", key);
            tensors.insert("value_cache", value);
        }
        Inputs { tensors, query: q.to_f32(), keys: held.0, values: held.1, table, width, blocks }
    }

    /// Row of the flat caches `[world, blocks, block, kv_heads]` where a position lies.
    fn slot(&self, table: &[i32], position: usize, blocks: usize, head: usize) -> usize {
        let (world, run) = (self.header.world, self.header.interleave);
        let owner = position / run % world;
        let local = position / (run * world) * run + position % run;
        let block = table[position / (self.block * world)] as usize;
        ((owner * blocks + block) * self.block + local % self.block) * self.kv_heads + head
    }

    /// Keys of some positions of request 0, of its only head.
    pub(in crate::check) fn keys_of(&self, inputs: &Inputs, positions: &[usize]) -> Vec<f32> {
        let slot = |position: &usize| self.slot(&inputs.table, *position, inputs.blocks, 0);
        positions
            .iter()
            .map(slot)
            .flat_map(|slot| inputs.keys[slot * self.qk_dim..][..self.qk_dim].to_vec())
            .collect()
    }

    /// The engine: each rank attends to its own tokens with weights in bf16, partials travel in bf16, the merge is in f32.
    pub(in crate::check) fn answer(&self, inputs: &Inputs, slip: &Slip) -> Answer {
        let mut answer = Answer { out: Vec::new(), lse: Vec::new() };
        let mut token = 0;
        for (request, (len, rows)) in self.requests.iter().enumerate() {
            for row in 0..*rows {
                let end = match self.header.mask {
                    Mask::Causal => (len + 1 + row).saturating_sub(*rows),
                    Mask::Bidirectional => *len,
                };
                let seen = match &slip.seen {
                    Some(seen) => seen(request, row),
                    None => (0..end).map(|position| (request, position)).collect(),
                };
                for head in 0..self.heads {
                    let (out, lse) = self.state(inputs, slip, &seen, (token, head));
                    answer.out.extend(out);
                    answer.lse.push(lse);
                }
                token += 1;
            }
        }
        answer
    }

    fn state(
        &self,
        inputs: &Inputs,
        slip: &Slip,
        seen: &[(usize, usize)],
        (token, head): (usize, usize),
    ) -> (Vec<f32>, f32) {
        let bf16 = |x: f64| round(Dtype::Bf16, x);
        let turns = slip.kv_head.unwrap_or(|head, heads, kv_heads| head / (heads / kv_heads));
        let kv_head = turns(head, self.heads, self.kv_heads);
        let query = &inputs.query[(token * self.heads + head) * self.qk_dim..][..self.qk_dim];
        let scale = self.header.softmax_scale.unwrap() * slip.factors.0;
        let mut partials = Vec::new();
        for rank in 0..self.header.world {
            let own = seen.iter().filter(|(_, p)| p / self.header.interleave % self.header.world == rank);
            let slots: Vec<usize> = own
                .map(|(request, position)| {
                    self.slot(&inputs.table[request * inputs.width..], *position, inputs.blocks, kv_head)
                })
                .collect();
            let score = |slot: &usize| -> f64 {
                let key = &inputs.keys[slot * self.qk_dim..][..self.qk_dim];
                scale * query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()
            };
            let scores: Vec<f64> = slots.iter().map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            let value = |slot: usize, d: usize| match self.is_latent() {
                true => inputs.keys[slot * self.qk_dim + d],
                false => inputs.values[slot * self.v_dim + d],
            };
            let out: Vec<f64> = (0..self.v_dim)
                .map(|d| {
                    let terms = slots.iter().zip(&scores);
                    let sum_of: f64 =
                        terms.map(|(slot, s)| bf16((s - largest).exp()) * f64::from(value(*slot, d))).sum();
                    if slots.is_empty() { f64::NAN } else { bf16(sum_of / sum * slip.factors.1) }
                })
                .collect();
            let lse =
                if slots.is_empty() { f64::NEG_INFINITY } else { f64::from((largest + sum.ln()) as f32) };
            partials.push((out, lse));
        }
        joined(&partials, slip.join, self.v_dim)
    }

    /// The report on an answer.
    pub(in crate::check) fn judged(&self, inputs: &Inputs, answer: &Answer) -> Report {
        let shape = [self.rows(), self.heads, self.v_dim];
        let tensors = inputs
            .tensors
            .clone()
            .with("out", Tensor::from_f32(Dtype::Bf16, &shape, &answer.out))
            .with("lse", Tensor::from_f32(Dtype::F32, &shape[..2], &answer.lse));
        check(&pack(&self.header, &tensors).unwrap()).unwrap()
    }

    /// The report on what the engine answers with a slip.
    pub(in crate::check) fn report(&self, slip: &Slip) -> Report {
        let inputs = self.inputs();
        self.judged(&inputs, &self.answer(&inputs, slip))
    }
}

fn joined(partials: &[(Vec<f64>, f64)], join: Join, v_dim: usize) -> (Vec<f32>, f32) {
    let weight = |rank: usize, lse: f64| match join {
        Join::Missing(missing) if rank == missing => f64::NEG_INFINITY,
        Join::Alone(alone) if rank != alone => f64::NEG_INFINITY,
        Join::Twice(twice) if rank == twice => lse + 2f64.ln(),
        Join::InBase(factor) => lse * factor,
        Join::Average | Join::Sum if lse.is_finite() => 0.0,
        _ => lse,
    };
    let lses: Vec<f64> = partials.iter().enumerate().map(|(rank, (_, lse))| weight(rank, *lse)).collect();
    let largest = lses.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return (vec![0.0; v_dim], f32::NEG_INFINITY);
    }
    let sum: f64 = lses.iter().map(|lse| (lse - largest).exp()).sum();
    let total = if join == Join::Sum { 1.0 } else { sum };
    let mut out = vec![0.0f32; v_dim];
    for ((partial, _), lse) in partials.iter().zip(&lses).filter(|(_, lse)| lse.is_finite()) {
        let weight = ((lse - largest).exp() / total) as f32;
        out.iter_mut().zip(partial).for_each(|(to, value)| *to += weight * *value as f32);
    }
    (out, (largest + sum.ln()) as f32)
}
