//! A transformer from its first stage to its last, without looking at an engine: one token at a time, all keys in one place.
//!
//! Every value carries how far a conforming engine may be from it, over any sharding, any steps and any order of sums. What is passed
//! on grows from stage to stage, so that a bound says something only where the weights let it: rows of few weights, attention whose
//! winner is far ahead of all others. Random weights lose it within a few layers, and an error is infinite then.

mod attention;

use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;

use crate::kda::Near;
use crate::moe::Mlp;
use crate::stack::{feed_forward_of, joined_of, logits_of, norm_of, project_of, summed_of, turned};

pub use attention::{Head, attend};

/// What stands behind attention in a layer.
#[derive(Debug, Clone)]
pub enum FeedForward<'a> {
    /// An MLP.
    Mlp(Mlp<'a>),
    /// Experts, of which a row has one.
    Experts {
        /// `[E, h]`.
        router: &'a [f32],
        /// Each.
        experts: Vec<Mlp<'a>>,
    },
}

/// Weights of a layer with latent attention.
#[derive(Debug, Clone)]
pub struct Layer<'a> {
    /// Norms before attention and before what stands behind it, `[h]` each.
    pub norms: [&'a [f32]; 2],
    /// `[Hall, Dk, h]`.
    pub query: &'a [f32],
    /// `[Dk, h]`.
    pub key: &'a [f32],
    /// `[Hall, Dv, Vo]`.
    pub up: &'a [f32],
    /// `[h, Hall·Vo]`.
    pub output: &'a [f32],
    /// What stands behind attention.
    pub feed_forward: FeedForward<'a>,
}

/// Sizes, and how an engine computes.
#[derive(Debug, Clone)]
pub struct Setting<'a> {
    /// Width h of the stream.
    pub hidden: usize,
    /// Heads of all ranks.
    pub heads: usize,
    /// Width Dv of a latent, the first elements of a key.
    pub latent: usize,
    /// Width Vo of a head behind the up-projection.
    pub up_dim: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// ε of every norm.
    pub epsilon: f64,
    /// Cosines and sines of each position, `[positions, P]`.
    pub rotary: &'a [f32],
    /// Rotary width P.
    pub rotary_width: usize,
    /// Ranks that add up parts of an update.
    pub ranks: usize,
    /// Ranks that add up what experts give.
    pub expert_ranks: usize,
    /// Ranks that merge partial attentions.
    pub world: usize,
    /// Element type of the cache, and its scale.
    pub cache: (Dtype, f64),
    /// How an engine rounds.
    pub contract: &'a Contract,
}

/// What a layer makes of a row.
#[derive(Debug, Clone)]
pub struct LayerRow {
    /// Key as it lies in the cache, `[Dk]`.
    pub key: Vec<Near>,
    /// Stream behind attention, and behind the layer, `[h]` each.
    pub streams: [Vec<Near>; 2],
}

impl Setting<'_> {
    fn output(&self, row: Vec<Near>) -> Vec<Near> {
        row.into_iter().map(|near| near.stored(self.contract.output)).collect()
    }

    /// A row behind a norm.
    pub fn normed(&self, stream: &[Near], weight: &[f32]) -> Vec<Near> {
        self.output(norm_of(stream, weight, self.epsilon, self.contract))
    }

    fn turned(&self, weights: &[f32], normed: &[Near], position: usize) -> Vec<Near> {
        let table = &self.rotary[position * self.rotary_width..][..self.rotary_width];
        let (cos, sin) = table.split_at(self.rotary_width / 2);
        self.output(turned(&project_of(weights, normed, self.contract), cos, sin, self.contract))
    }

    fn cached(&self, key: Vec<Near>) -> Vec<Near> {
        let (dtype, scale) = self.cache;
        let element = |near: Near| {
            let own = half_ulp(dtype, (near.value.abs() + near.error) / scale) * scale;
            Near { error: near.error + own, ..near }
        };
        if dtype == self.contract.output { key } else { key.into_iter().map(element).collect() }
    }

    /// A row through a layer; `before` are the keys of the tokens in front of it.
    pub fn layer(&self, layer: &Layer<'_>, stream: &[Near], position: usize, before: &[&[Near]]) -> LayerRow {
        let normed = self.normed(stream, layer.norms[0]);
        let key = self.cached(self.turned(layer.key, &normed, position));
        let mut keys = before.to_vec();
        keys.push(&key);
        let (width, up) = (key.len(), self.latent * self.up_dim);
        let of_head = |head: usize| {
            let query = self.turned(
                &layer.query[head * width * self.hidden..][..width * self.hidden],
                &normed,
                position,
            );
            let up = &layer.up[head * up..(head + 1) * up];
            let own = Head { query: &query, up, latent: self.latent, scale: self.scale, world: self.world };
            self.output(attend(&own, &keys, self.contract))
        };
        let attended: Vec<Near> = (0..self.heads).flat_map(of_head).collect();
        let update = summed_of(layer.output, &attended, self.ranks, self.contract);
        let middle = self.behind(stream, update);
        let normed = self.normed(&middle, layer.norms[1]);
        let update = self.feed_forward(&layer.feed_forward, &normed);
        let last = self.behind(&middle, update);
        LayerRow { key, streams: [middle, last] }
    }

    /// The stream behind an update, both stored.
    fn behind(&self, stream: &[Near], update: Vec<Near>) -> Vec<Near> {
        let update = self.output(update);
        self.output(stream.iter().zip(update).map(|(stream, update)| joined_of(*stream, update)).collect())
    }

    fn feed_forward(&self, weights: &FeedForward<'_>, normed: &[Near]) -> Vec<Near> {
        let of_mlp = |mlp: &Mlp<'_>, ranks| feed_forward_of(mlp, normed, ranks, self.contract);
        match weights {
            FeedForward::Mlp(mlp) => of_mlp(mlp, self.ranks),
            FeedForward::Experts { router, experts } => {
                match winner(router, normed, self.contract) {
                    Some(expert) => of_mlp(&experts[expert], self.expert_ranks),
                    // another expert gives anything
                    None => vec![Near { value: 0.0, error: f64::INFINITY }; normed.len()],
                }
            }
        }
    }

    /// Token of the largest logit of a row behind its last norm, where no rounding makes it another.
    pub fn token(&self, head: &[f32], normed: &[Near]) -> Option<usize> {
        winner(head, normed, self.contract)
    }

    /// Rows of a projection that is stored, such as that of a draft head's inputs.
    pub fn projected(&self, weights: &[f32], row: &[Near]) -> Vec<Near> {
        self.output(project_of(weights, row, self.contract))
    }
}

/// Row of a matrix whose product with x is the largest, where no rounding makes it another: by the differences of two rows, whose
/// products with x are off together. Each product may be stored in the contract's partial format.
pub fn winner(weights: &[f32], x: &[Near], contract: &Contract) -> Option<usize> {
    let products = logits_of(weights, x, contract);
    let best = (0..products.len()).max_by(|a, b| products[*a].value.total_cmp(&products[*b].value))?;
    let rows: Vec<&[f32]> = weights.chunks_exact(x.len().max(1)).collect();
    let moved = |row: &[f32]| -> f64 { row.iter().zip(x).map(|(w, x)| f64::from(w.abs()) * x.error).sum() };
    let is_behind = |other: usize| {
        let between = |(own, other): (&f32, &f32)| f64::from(*own) - f64::from(*other);
        let apart: f64 =
            rows[best].iter().zip(rows[other]).zip(x).map(|(w, x)| between(w).abs() * x.error).sum();
        // what is left of both errors without what x moves them by
        let own = |index: usize| products[index].error - moved(rows[index]);
        products[best].value - products[other].value > apart + own(best) + own(other)
    };
    (0..products.len()).all(|other| other == best || is_behind(other)).then_some(best)
}

#[cfg(test)]
mod tests;
