//! What one rank computes between two attentions: embedding, norms, projections, updates of the stream, logits.

use std::ops::Range;

use shardcheck_engine::{StackPlan, StreamLayout};
use shardcheck_formats::round_bf16;

use super::StackPolicies;
use super::weights::{FeedForward, Weights};
use crate::communicator::{Link, Stop};
use crate::kda::normed;

/// Rows of a step, or those of a rank of prefill context parallelism, as every layer has them.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// Token of each row.
    pub tokens: Vec<usize>,
    /// Position of each row; 0 for padding.
    pub positions: Vec<usize>,
    /// Row of the batch that each row is; none for padding.
    pub places: Vec<Option<usize>>,
}

/// One rank.
pub struct Worker<'a> {
    /// Plan of the stack.
    pub plan: StackPlan,
    /// Weights of all ranks.
    pub weights: &'a Weights,
    /// The rank's rows of the step.
    pub rows: &'a Rows,
    /// The rank's end of the mailbox; a group is all ranks, or all of one rank of prefill context parallelism.
    pub link: &'a Link<'a>,
    /// Ranks W of decode context parallelism.
    pub dcp: usize,
    /// Decisions.
    pub policies: &'a StackPolicies,
}

/// Which of the two updates of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Attention.
    Attention,
    /// A recurrent layer's, in place of attention's.
    Recurrent,
    /// The MLP.
    FeedForward,
}

/// Sum of products.
pub fn dot(weights: &[f32], x: &[f32]) -> f32 {
    weights.iter().zip(x).map(|(w, x)| w * x).sum()
}

fn rounded(mut values: Vec<f32>) -> Vec<f32> {
    values.iter_mut().for_each(|value| *value = round_bf16(*value));
    values
}

impl Worker<'_> {
    fn count(&self) -> usize {
        self.rows.tokens.len()
    }

    fn ranks(&self) -> usize {
        self.link.world
    }

    fn members(&self) -> Vec<usize> {
        (0..self.ranks()).collect()
    }

    /// Rows of the step that lie on this rank between layers.
    fn own_rows(&self) -> Range<usize> {
        let each = self.plan.stream_rows(self.count(), self.ranks());
        match self.plan.stream {
            StreamLayout::Whole => 0..each,
            StreamLayout::Sharded => {
                let first = (self.policies.first_row)(self.link.member, each);
                first..first + each
            }
        }
    }

    /// Own rows of all; zeros for those behind the last one.
    pub fn scattered(&self, all: &[f32]) -> Vec<f32> {
        let hidden = self.weights.sizes.hidden;
        self.own_rows()
            .flat_map(|row| match all.get(row * hidden..(row + 1) * hidden) {
                Some(values) => values.to_vec(),
                None => vec![0.0; hidden],
            })
            .collect()
    }

    /// Embeds the tokens: each rank those of its part of the vocabulary, zeros for all others, then their sum.
    pub fn embed(&self) -> Result<Vec<f32>, Stop> {
        let (sizes, policies) = (&self.weights.sizes, self.policies);
        let own = (policies.entries)(self.link.member, self.ranks(), sizes.vocabulary);
        let mut all = Vec::new();
        for token in &self.rows.tokens {
            let known = if own.contains(token) { Some(*token) } else { (policies.foreign)(*token, &own) };
            match known {
                Some(entry) => {
                    all.extend_from_slice(&self.weights.embedding[entry * sizes.hidden..][..sizes.hidden])
                }
                None => all.resize(all.len() + sizes.hidden, 0.0),
            }
        }
        if self.ranks() > 1 {
            all = self
                .link
                .sum_in_bf16("sum_embedding", all, &self.members(), |_, parts| (0..parts).collect())?;
        }
        Ok(self.scattered(&all))
    }

    /// All rows of the stream behind the norm of a place.
    pub fn normed(&self, stream: &[f32], place: usize) -> Result<Vec<f32>, Stop> {
        let (hidden, policies) = (self.weights.sizes.hidden, self.policies);
        let own = if place + 1 < self.plan.places() || policies.normed_last {
            let at = (policies.norm)(place, self.plan.places()) * hidden;
            let weight = &self.weights.norm[at..at + hidden];
            let row = |x: &[f32]| -> Vec<f32> {
                let unit = normed(x, StackPlan::EPSILON);
                unit.iter().zip(weight).map(|(x, w)| round_bf16(x * w)).collect()
            };
            stream.chunks_exact(hidden).flat_map(row).collect()
        } else {
            stream.to_vec()
        };
        if self.plan.stream == StreamLayout::Whole || self.ranks() == 1 {
            return Ok(own);
        }
        let order = (policies.row_order)(self.ranks());
        let mut all = self.link.all_gather("gather_rows", own, &order)?;
        all.truncate(self.count() * hidden);
        Ok(all)
    }

    /// What a draft head's layer is given: the embedding of the rows' tokens and given streams, each normed, projected together. The
    /// first of the head's norms is that of a place.
    pub fn draft_rows(&self, streams: &[f32], first: usize) -> Result<Vec<f32>, Stop> {
        let hidden = self.weights.sizes.hidden;
        let tokens = self.normed(&self.embed()?, first)?;
        let streams = self.normed(streams, first + 1)?;
        let row = |(token, stream): (&[f32], &[f32])| -> Vec<f32> {
            let both = [token, stream].concat();
            self.weights
                .draft
                .chunks_exact(2 * hidden)
                .map(|weights| round_bf16(dot(weights, &both)))
                .collect()
        };
        Ok(tokens.chunks_exact(hidden).zip(streams.chunks_exact(hidden)).flat_map(row).collect())
    }

    /// Queries of the own heads `[T, H, Dk]` and keys `[T, Dk]`, turned to the rows' positions.
    pub fn project(&self, normed: &[f32], layer: usize) -> (Vec<f32>, Vec<f32>) {
        let (sizes, weights) = (&self.weights.sizes, &self.weights.latent[layer]);
        let (mut query, mut key) = (Vec::new(), Vec::new());
        for (row, x) in normed.chunks_exact(sizes.hidden).enumerate() {
            let turned = |matrix: &[f32]| {
                let mut vector: Vec<f32> =
                    matrix.chunks_exact(sizes.hidden).map(|weights| round_bf16(dot(weights, x))).collect();
                self.turn(&mut vector, self.rows.positions[row]);
                vector
            };
            let head = sizes.key_dim * sizes.hidden;
            let first = self.link.member * sizes.heads;
            for number in first..first + sizes.heads {
                query.extend(turned(&weights.query[number * head..(number + 1) * head]));
            }
            key.extend(turned(&weights.key));
        }
        (query, key)
    }

    fn turn(&self, vector: &mut [f32], position: usize) {
        let sizes = &self.weights.sizes;
        let half = sizes.rotary / 2;
        let (cos, sin) = self.weights.rotary[position * sizes.rotary..][..sizes.rotary].split_at(half);
        let (first, second) = vector[sizes.key_dim - sizes.rotary..].split_at_mut(half);
        for (index, (a, b)) in first.iter_mut().zip(second).enumerate() {
            let (x, y) = (*a, *b);
            *a = round_bf16(x * cos[index] - y * sin[index]);
            *b = round_bf16(y * cos[index] + x * sin[index]);
        }
    }

    /// What attention gave to the own heads `[T, H, Vo]` behind the gate of a layer, given all rows behind its norm; as it was where there is none.
    pub fn gated(&self, normed: &[f32], attention: &[f32], layer: usize) -> Vec<f32> {
        let sizes = &self.weights.sizes;
        let weights = &self.weights.latent[(self.policies.gate_of)(layer)].gate;
        if weights.is_empty() || self.weights.latent[layer].gate.is_empty() {
            return attention.to_vec();
        }
        let own = sizes.heads * sizes.up_dim;
        let first = (self.policies.gate_head)(self.link.member, sizes.heads) * sizes.up_dim * sizes.hidden;
        let row = |(x, attention): (&[f32], &[f32])| -> Vec<f32> {
            let gates = weights[first..][..own * sizes.hidden].chunks_exact(sizes.hidden);
            let element = |(weights, attention): (&[f32], &f32)| {
                round_bf16((self.policies.gate)(*attention, dot(weights, x)))
            };
            gates.zip(attention).map(element).collect()
        };
        normed.chunks_exact(sizes.hidden).zip(attention.chunks_exact(own)).flat_map(row).collect()
    }

    /// What attention adds to the stream, given what it gave to the own heads `[T, H, Vo]`.
    pub fn attention_update(
        &self,
        stream: &[f32],
        attention: &[f32],
        layer: usize,
    ) -> Result<Vec<f32>, Stop> {
        let sizes = &self.weights.sizes;
        let own = sizes.heads * sizes.up_dim;
        let first = (self.policies.output_head)(self.link.member, self.link.member % self.dcp, sizes.heads);
        let columns = first * sizes.up_dim..first * sizes.up_dim + own;
        let row = |x: &[f32]| -> Vec<f32> {
            let matrix = self.weights.latent[layer].output.chunks_exact(sizes.all_heads * sizes.up_dim);
            matrix.map(|weights| dot(&weights[columns.clone()], x)).collect()
        };
        let part = attention.chunks_exact(own).flat_map(row).collect();
        self.update(Part::Attention, stream, part)
    }

    /// What the MLP adds to the stream, given all rows behind its norm.
    pub fn feed_forward_update(
        &self,
        stream: &[f32],
        normed: &[f32],
        layer: usize,
    ) -> Result<Vec<f32>, Stop> {
        let hidden = self.weights.sizes.hidden;
        let mut part = vec![0.0; normed.len()];
        let FeedForward::Mlp(mlp) = &self.weights.feed_forward[layer] else {
            return Err(Stop::crash(format!("layer {layer} has no MLP")));
        };
        let inner = (self.policies.part)(self.link.member, self.ranks(), mlp.inner);
        for (x, sum) in normed.chunks_exact(hidden).zip(part.chunks_exact_mut(hidden)) {
            mlp.add(x, inner.clone(), 1.0, sum);
        }
        self.update(Part::FeedForward, stream, part)
    }

    /// Logits of the experts of all rows, `[T, E]`, given the rows and, where the stream is whole, the stream.
    pub fn router_logits(&self, stream: &[f32], normed: &[f32], router: &[f32]) -> Vec<f32> {
        let hidden = self.weights.sizes.hidden;
        let reads_stream = self.policies.router_reads_stream && stream.len() == normed.len();
        let rows = if reads_stream { stream } else { normed };
        let row = |x: &[f32]| -> Vec<f32> { router.chunks_exact(hidden).map(|w| dot(w, x)).collect() };
        rows.chunks_exact(hidden).flat_map(row).collect()
    }

    /// Own rows of the sum of all ranks' parts.
    pub fn update(&self, kind: Part, stream: &[f32], mut part: Vec<f32>) -> Result<Vec<f32>, Stop> {
        let first = self.own_rows().start * self.weights.sizes.hidden;
        let own = part.iter_mut().skip(first).zip(stream);
        own.for_each(|(part, stream)| *part = (self.policies.entering)(*part, *stream));
        let mut sum = rounded(part);
        if self.ranks() > 1 && (self.policies.summed)(kind) {
            let order = |_, parts| (0..parts).collect();
            sum = self.link.sum_in_bf16("sum_update", sum, &self.members(), order)?;
        }
        Ok(self.scattered(&sum))
    }

    /// The stream behind an update; `normed` are all rows of it behind the norm.
    pub fn joined(&self, stream: &[f32], normed: &[f32], update: &[f32]) -> Vec<f32> {
        let normed = self.scattered(normed);
        let element =
            |index: usize| round_bf16((self.policies.joined)(stream[index], normed[index], update[index]));
        (0..stream.len()).map(element).collect()
    }

    /// Logits of all rows over the whole vocabulary, and the token of each.
    pub fn logits(&self, normed: &[f32]) -> Result<(Vec<f32>, Vec<i32>), Stop> {
        let (sizes, policies, ranks) = (&self.weights.sizes, self.policies, self.ranks());
        let own = (policies.entries)(self.link.member, ranks, sizes.vocabulary);
        let entries = &self.weights.head[own.start * sizes.hidden..own.end * sizes.hidden];
        let row = |x: &[f32]| -> Vec<f32> {
            entries.chunks_exact(sizes.hidden).map(|weights| dot(weights, x)).collect()
        };
        let part: Vec<Vec<f32>> = normed.chunks_exact(sizes.hidden).map(row).collect();
        let shards = self.link.exchange("gather_logits", part)?;
        let (mut logits, mut tokens) = (Vec::new(), Vec::new());
        for row in 0..normed.len() / sizes.hidden {
            let shard = |rank: &usize| shards[*rank].get(row).cloned().unwrap_or_default();
            let mut all: Vec<f32> = (policies.shard_order)(ranks).iter().flat_map(shard).collect();
            all.resize(sizes.vocabulary, 0.0);
            tokens.push((policies.greedy)(&all, &own) as i32);
            logits.extend(all);
        }
        Ok((logits, tokens))
    }
}

/// Index of the largest value, the lowest of equal ones.
pub fn largest(values: &[f32]) -> usize {
    values.iter().enumerate().fold(0, |best, (index, value)| if *value > values[best] { index } else { best })
}
