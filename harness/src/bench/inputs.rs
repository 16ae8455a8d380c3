//! Input distributions that stress a bound from different sides.

use std::fmt;
use std::str::FromStr;

use shardcheck_formats::{Counter, Distribution, Dtype, Recipe, round_bf16};
use shardcheck_references::attention::plain::{Problem, Values};

/// How queries, keys and values of a measurement are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// Independent and normal.
    Gauss,
    /// Heavy tails: a few scores and values are far larger than the rest.
    Heavy,
    /// One token takes most of the weight.
    Sink,
    /// Scores of deviation six.
    LargeLogits,
    /// All values equal.
    ConstantValue,
    /// Values of mean one.
    MeanValue,
    /// Values that cancel in pairs of equal keys.
    CancellingValue,
    /// Three keys that repeat.
    RepeatedKey,
    /// Scores that rise by a ramp, so that the running maximum moves with every tile.
    Ramp,
    /// Scores within one cell of the probabilities' format.
    Narrow,
    /// Queries whose halves cancel over a common part of the keys.
    CancellingQuery,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Gauss,
        Self::Heavy,
        Self::Sink,
        Self::LargeLogits,
        Self::ConstantValue,
        Self::MeanValue,
        Self::CancellingValue,
        Self::RepeatedKey,
        Self::Ramp,
        Self::Narrow,
        Self::CancellingQuery,
    ];

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gauss => "gauss",
            Self::Heavy => "heavy",
            Self::Sink => "sink",
            Self::LargeLogits => "large-logits",
            Self::ConstantValue => "constant-value",
            Self::MeanValue => "mean-value",
            Self::CancellingValue => "cancelling-value",
            Self::RepeatedKey => "repeated-key",
            Self::Ramp => "ramp",
            Self::Narrow => "narrow",
            Self::CancellingQuery => "cancelling-query",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Family {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|family| family.name() == text).ok_or_else(|| {
            format!("unknown distribution {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// Sizes of an attention call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Query rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Width of a key.
    pub qk_dim: usize,
    /// Width of a value.
    pub v_dim: usize,
    /// Whether the value is the start of the key (MLA).
    pub latent: bool,
    /// Tokens.
    pub tokens: usize,
}

/// Tensors of an attention call.
#[derive(Debug, Clone)]
pub struct Tensors {
    /// Their sizes.
    pub shape: Shape,
    /// `[rows, heads, qk_dim]`.
    pub query: Vec<f32>,
    /// `[tokens, kv_heads, qk_dim]`.
    pub key: Vec<f32>,
    /// `[tokens, kv_heads, v_dim]`; empty where the value is the start of the key.
    pub value: Vec<f32>,
    /// `[heads]`: sink logits.
    pub sink: Option<Vec<f64>>,
    /// Soft cap of the scores.
    pub softcap: Option<f64>,
}

/// What a cache holds: an element type and the scale that its codes are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheFormat {
    /// Element type.
    pub dtype: Dtype,
    /// Factor of a code.
    pub scale: f32,
}

impl CacheFormat {
    /// bf16.
    pub const BF16: Self = Self { dtype: Dtype::Bf16, scale: 1.0 };
}

impl Tensors {
    /// Draws tensors of a family. Equal arguments give equal bits.
    pub fn drawn(family: Family, shape: Shape, cache: CacheFormat, seed: u64) -> Self {
        let Shape { rows, heads, kv_heads, qk_dim, v_dim, tokens, .. } = shape;
        let distribution =
            if family == Family::Heavy { Distribution::HeavyTail } else { Distribution::Gaussian };
        let value_width = if shape.latent { 0 } else { tokens * kv_heads * v_dim };
        let mut tensors = Self {
            shape,
            query: drawn(seed, 0, distribution, rows * heads * qk_dim),
            key: drawn(seed, 1, distribution, tokens * kv_heads * qk_dim),
            value: drawn(seed, 2, distribution, value_width),
            sink: None,
            softcap: None,
        };
        tensors.shape_by(family, seed);
        tensors.query.iter_mut().for_each(|q| *q = round_bf16(*q));
        for tensor in [&mut tensors.key, &mut tensors.value] {
            tensor.iter_mut().for_each(|x| *x = cache.held(*x));
        }
        tensors
    }

    /// The call.
    pub fn problem(&self) -> Problem<'_> {
        let Shape { heads, kv_heads, qk_dim, v_dim, latent, .. } = self.shape;
        let values = if latent { Values::KeyPrefix } else { Values::Separate(&self.value) };
        let scale = (qk_dim as f64).powf(-0.5);
        let mut problem = Problem::new(heads, kv_heads, qk_dim, v_dim, scale, &self.query, &self.key, values);
        (problem.sink, problem.softcap) = (self.sink.as_deref(), self.softcap);
        problem
    }

    fn shape_by(&mut self, family: Family, seed: u64) {
        let Shape { kv_heads, qk_dim, v_dim, tokens, .. } = self.shape;
        let row = kv_heads * qk_dim;
        let mut random = Counter::new(seed, 9);
        match family {
            Family::Gauss | Family::Heavy => {}
            Family::Sink => {
                let token = random.below(tokens as u64) as usize;
                self.align(token, 8.0);
            }
            Family::LargeLogits => self.query.iter_mut().for_each(|q| *q *= 6.0),
            Family::ConstantValue => self.each_value(|_| 1.5),
            Family::MeanValue => self.each_value(|v| 1.0 + 0.3 * v),
            Family::CancellingValue => {
                for token in (1..tokens).step_by(2) {
                    self.key.copy_within((token - 1) * row..token * row, token * row);
                }
                let width = if self.shape.latent { qk_dim } else { v_dim };
                let first = if self.shape.latent { v_dim } else { 0 };
                let values = if self.shape.latent { &mut self.key } else { &mut self.value };
                for (index, vector) in values.chunks_exact_mut(width).enumerate() {
                    let sign = if index / kv_heads % 2 == 0 { 1.0 } else { -1.0 };
                    let end = if first > 0 { first } else { width };
                    vector[..end].iter_mut().for_each(|v| *v = sign * (1.0 + 0.01 * v.abs().fract()));
                }
            }
            Family::RepeatedKey => {
                for token in 3..tokens {
                    self.key.copy_within(token % 3 * row..(token % 3 + 1) * row, token * row);
                }
            }
            Family::Ramp => {
                for token in 0..tokens {
                    let height = 12.0 * token as f32 / tokens as f32;
                    self.align(token, height);
                }
            }
            Family::Narrow => {
                let end = if self.shape.latent { v_dim } else { 0 };
                let keys = self.key.chunks_exact_mut(qk_dim);
                keys.for_each(|key| key[end..].iter_mut().for_each(|k| *k *= 0.003));
                if self.shape.latent {
                    let queries = self.query.chunks_exact_mut(qk_dim);
                    queries.for_each(|query| query[..v_dim].iter_mut().for_each(|q| *q *= 0.003));
                }
            }
            Family::CancellingQuery => {
                for query in self.query.chunks_exact_mut(qk_dim) {
                    for i in 0..qk_dim / 2 {
                        query[i + qk_dim / 2] = -query[i];
                    }
                }
                self.key.iter_mut().for_each(|k| *k += 8.0);
            }
        }
    }

    /// Adds `score` to every query's score of a token, by the last element of query and key.
    fn align(&mut self, token: usize, score: f32) {
        let Shape { kv_heads, qk_dim, .. } = self.shape;
        let last = qk_dim - 1;
        self.query.chunks_exact_mut(qk_dim).for_each(|query| query[last] = 4.0);
        for key in self.key[token * kv_heads * qk_dim..][..kv_heads * qk_dim].chunks_exact_mut(qk_dim) {
            key[last] = score * (qk_dim as f32).sqrt() / 4.0;
        }
    }

    fn each_value(&mut self, change: impl Fn(f32) -> f32) {
        let Shape { qk_dim, v_dim, .. } = self.shape;
        if self.shape.latent {
            let keys = self.key.chunks_exact_mut(qk_dim);
            keys.for_each(|key| key[..v_dim].iter_mut().for_each(|v| *v = change(*v)));
        } else {
            self.value.iter_mut().for_each(|v| *v = change(*v));
        }
    }
}

impl CacheFormat {
    /// A value as the cache holds it.
    pub fn held(self, x: f32) -> f32 {
        super::simulation::round_to(self.dtype, x / self.scale) * self.scale
    }
}

fn drawn(seed: u64, stream: u32, distribution: Distribution, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    let recipe =
        Recipe { seed, stream, distribution, dtype: Dtype::F32, shape: vec![count.max(1)], exponent: 0 };
    recipe.fill(0, &mut values);
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_references::attention::plain::{Platform, score};

    const SHAPE: Shape =
        Shape { rows: 2, heads: 4, kv_heads: 2, qk_dim: 32, v_dim: 16, latent: false, tokens: 12 };
    const LATENT: Shape = Shape { kv_heads: 1, qk_dim: 24, latent: true, ..SHAPE };

    #[test]
    fn every_family_is_drawn_for_both_kinds_of_cache_and_is_finite() {
        for family in Family::ALL {
            for shape in [SHAPE, LATENT] {
                for cache in [CacheFormat::BF16, CacheFormat { dtype: Dtype::E4m3fn, scale: 0.5 }] {
                    let tensors = Tensors::drawn(family, shape, cache, 3);
                    let problem = tensors.problem();
                    problem.check();
                    assert!(
                        tensors
                            .key
                            .iter()
                            .chain(&tensors.value)
                            .all(|x| x.is_finite() && cache.held(*x) == *x)
                    );
                    assert_eq!(problem.tokens(), shape.tokens, "{family}");
                }
            }
            assert_eq!(family.name().parse(), Ok(family));
        }
        assert!("flat".parse::<Family>().is_err());
    }

    #[test]
    fn families_do_what_their_names_say() {
        let scores = |family: Family| -> Vec<f64> {
            let tensors = Tensors::drawn(family, SHAPE, CacheFormat::BF16, 4);
            (0..12).map(|token| score::<Platform, f32>(&tensors.problem(), 1, 3, token)).collect()
        };
        let spread = |s: &[f64]| {
            s.iter().copied().fold(f64::MIN, f64::max) - s.iter().copied().fold(f64::MAX, f64::min)
        };
        assert!(spread(&scores(Family::Narrow)) < 0.05);
        assert!(spread(&scores(Family::LargeLogits)) > 6.0);
        let repeated = scores(Family::RepeatedKey);
        assert!(repeated[3] == repeated[0] && repeated[11] == repeated[2] && repeated[1] != repeated[2]);
        let paired = scores(Family::CancellingValue);
        assert!((0..6).all(|pair| paired[2 * pair] == paired[2 * pair + 1]));
        let ramp = scores(Family::Ramp);
        assert!(ramp[11] - ramp[0] > 6.0);
        let sink = scores(Family::Sink);
        assert!(sink.iter().filter(|s| **s > 5.0).count() == 1, "{sink:?}");
    }
}
