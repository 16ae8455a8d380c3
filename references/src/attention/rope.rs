//! Rotary position embedding: which dimensions turn together, by what angle, and where the result is written.
//!
//! Angles are formed in float64. Engines form them in float32, which moves attention outputs by 1e-3 at positions
//! around 1e5: feed the oracle the engine's own rotated queries and keys, or its cosines and sines.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// How the dimensions of a rotated vector are paired, and in which order they come out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pairing {
    /// Dimension `i` turns with `i + dim/2` (GPT-NeoX, Llama `rotate_half`).
    HalfSplit,
    /// Dimension `2i` turns with `2i + 1` and both stay in place (GPT-J; vLLM for DeepSeek checkpoints).
    Interleaved,
    /// Dimension `2i` turns with `2i + 1`, and the result is written as all firsts, then all seconds
    /// (transformers for DeepSeek checkpoints). Scores equal those of [`Pairing::Interleaved`]; cached keys do
    /// not.
    InterleavedToHalfSplit,
}

/// A name that is no pairing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown rotary pairing `{0}`: use half_split, interleaved or interleaved_to_half_split")]
pub struct UnknownPairing(pub String);

impl Pairing {
    /// Every pairing.
    pub const ALL: [Self; 3] = [Self::HalfSplit, Self::Interleaved, Self::InterleavedToHalfSplit];

    /// The name used in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HalfSplit => "half_split",
            Self::Interleaved => "interleaved",
            Self::InterleavedToHalfSplit => "interleaved_to_half_split",
        }
    }

    /// Where pair `i` of `half` is read from and written to: `((first, second), (first, second))`.
    fn places(self, i: usize, half: usize) -> ((usize, usize), (usize, usize)) {
        let (split, pair) = ((i, i + half), (2 * i, 2 * i + 1));
        match self {
            Self::HalfSplit => (split, split),
            Self::Interleaved => (pair, pair),
            Self::InterleavedToHalfSplit => (pair, split),
        }
    }
}

impl fmt::Display for Pairing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Pairing {
    type Err = UnknownPairing;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|pairing| pairing.name() == text)
            .ok_or_else(|| UnknownPairing(text.to_owned()))
    }
}

/// Context extension by YaRN (Peng et al. 2023) with the DeepSeek-V3 rule for the softmax scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// How many times longer the context becomes.
    pub factor: f64,
    /// Coefficient of the attention temperature in cos and sin.
    pub mscale: f64,
    /// Coefficient of the attention temperature in the softmax scale; 0 leaves the scale alone.
    pub mscale_all_dim: f64,
    /// Turns over the original context above which a frequency is kept.
    pub beta_fast: f64,
    /// Turns over the original context below which a frequency is divided by the factor.
    pub beta_slow: f64,
    /// Original context length in tokens.
    pub original_max_position: f64,
}

impl Yarn {
    /// What cos *and* sin are multiplied by, so that both query and cached key carry it:
    /// `m(mscale)/m(mscale_all_dim)`.
    pub fn rotation_factor(&self) -> f64 {
        self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
    }

    /// What the softmax scale is multiplied by: `m(mscale_all_dim)²`, 1 if that is zero.
    pub fn scale_factor(&self) -> f64 {
        if self.mscale_all_dim == 0.0 { 1.0 } else { self.temperature(self.mscale_all_dim).powi(2) }
    }

    /// `m(a) = 0.1·a·ln f + 1`, 1 for a factor of at most 1.
    fn temperature(&self, coefficient: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * coefficient * self.factor.ln() + 1.0 }
    }

    /// The pair that makes `turns` turns over the original context.
    fn pair_of(&self, turns: f64, dim: usize, theta: f64) -> f64 {
        dim as f64 * (self.original_max_position / (turns * 2.0 * std::f64::consts::PI)).ln()
            / (2.0 * theta.ln())
    }
}

/// A rotary embedding of `dim` dimensions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Rotated dimensions, even.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Pairing and order.
    pub pairing: Pairing,
    /// Context extension.
    pub yarn: Option<Yarn>,
}

impl Rope {
    /// `[dim / 2]`: radians per position of each pair: `theta^(−2i/dim)`, under YaRN blended with the same
    /// divided by the factor.
    pub fn frequencies(&self) -> Vec<f64> {
        let base = |i: usize| self.theta.powf(-2.0 * i as f64 / self.dim as f64);
        let Some(yarn) = self.yarn else {
            return (0..self.dim / 2).map(base).collect();
        };
        let low = yarn.pair_of(yarn.beta_fast, self.dim, self.theta).floor().max(0.0);
        let mut high = yarn.pair_of(yarn.beta_slow, self.dim, self.theta).ceil().min(self.dim as f64 - 1.0);
        if low == high {
            high += 0.001;
        }
        (0..self.dim / 2)
            .map(|i| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                base(i) / yarn.factor * ramp + base(i) * (1.0 - ramp)
            })
            .collect()
    }

    /// Rotates one vector of `dim` numbers that stands at `position`.
    ///
    /// # Panics
    /// The vector has another length.
    pub fn rotate(&self, vector: &[f64], position: usize) -> Vec<f64> {
        let factor = self.yarn.map_or(1.0, |yarn| yarn.rotation_factor());
        let angles: Vec<f64> = self.frequencies().into_iter().map(|f| f * position as f64).collect();
        let cos: Vec<f64> = angles.iter().map(|angle| angle.cos() * factor).collect();
        let sin: Vec<f64> = angles.iter().map(|angle| angle.sin() * factor).collect();
        rotate_by(vector, &cos, &sin, self.pairing)
    }
}

/// Rotates one vector by given cosines and sines, one per pair.
///
/// # Panics
/// The lengths do not fit.
pub fn rotate_by(vector: &[f64], cos: &[f64], sin: &[f64], pairing: Pairing) -> Vec<f64> {
    let half = vector.len() / 2;
    assert!(
        vector.len() == 2 * half && cos.len() == half && sin.len() == half,
        "one cosine and sine per pair"
    );
    let mut rotated = vec![0.0; vector.len()];
    for i in 0..half {
        let ((from_a, from_b), (to_a, to_b)) = pairing.places(i, half);
        let (a, b) = (vector[from_a], vector[from_b]);
        rotated[to_a] = a * cos[i] - b * sin[i];
        rotated[to_b] = b * cos[i] + a * sin[i];
    }
    rotated
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(pairing: Pairing) -> Rope {
        Rope { dim: 8, theta: 10_000.0, pairing, yarn: None }
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    const QUERY: [f64; 8] = [0.3, -1.0, 2.0, 0.5, -0.7, 1.1, 0.2, -0.4];
    const KEY: [f64; 8] = [1.3, 0.4, -2.0, 0.9, 0.1, -1.6, 0.8, 0.6];

    #[test]
    fn position_zero_turns_nothing() {
        assert_eq!(rope(Pairing::HalfSplit).rotate(&QUERY, 0), QUERY);
        assert_eq!(rope(Pairing::Interleaved).rotate(&QUERY, 0), QUERY);
        let split = rope(Pairing::InterleavedToHalfSplit).rotate(&QUERY, 0);
        assert_eq!(split, [0.3, 2.0, -0.7, 0.2, -1.0, 0.5, 1.1, -0.4]);
    }

    #[test]
    fn a_score_depends_on_the_distance_alone() {
        for pairing in Pairing::ALL {
            let rope = rope(pairing);
            let score = |q: usize, k: usize| dot(&rope.rotate(&QUERY, q), &rope.rotate(&KEY, k));
            approx::assert_abs_diff_eq!(score(9, 4), score(105, 100), epsilon = 1e-12);
            assert!((score(9, 4) - score(9, 5)).abs() > 1e-3);
        }
    }

    #[test]
    fn the_order_of_the_result_does_not_change_scores() {
        let score = |pairing| dot(&rope(pairing).rotate(&QUERY, 17), &rope(pairing).rotate(&KEY, 5));
        let (kept, split) = (score(Pairing::Interleaved), score(Pairing::InterleavedToHalfSplit));
        approx::assert_abs_diff_eq!(kept, split, epsilon = 1e-14);
        assert!((kept - score(Pairing::HalfSplit)).abs() > 1e-3);
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_stretches_slow_ones() {
        let yarn = Yarn {
            factor: 40.0,
            mscale: 1.0,
            mscale_all_dim: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 4096.0,
        };
        let plain = Rope { dim: 64, theta: 10_000.0, pairing: Pairing::Interleaved, yarn: None };
        let stretched = Rope { yarn: Some(yarn), ..plain };
        let (before, after) = (plain.frequencies(), stretched.frequencies());
        assert_eq!(before[0], after[0]);
        approx::assert_relative_eq!(after[31], before[31] / 40.0, max_relative = 1e-15);
        assert_eq!(yarn.rotation_factor(), 1.0);
        approx::assert_relative_eq!(
            yarn.scale_factor(),
            (0.1 * 40f64.ln() + 1.0).powi(2),
            max_relative = 1e-15
        );
        assert_eq!(Yarn { mscale_all_dim: 0.0, ..yarn }.scale_factor(), 1.0);
        assert_eq!(Yarn { factor: 1.0, ..yarn }.scale_factor(), 1.0);
    }

    #[test]
    fn the_pair_of_a_number_of_turns_makes_that_many_over_the_original_context() {
        let yarn = Yarn {
            factor: 8.0,
            mscale: 0.5,
            mscale_all_dim: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 2048.0,
        };
        let (dim, theta) = (64, 50_000f64);
        for turns in [1.0, 7.0, 32.0] {
            let pair = yarn.pair_of(turns, dim, theta);
            let radians_per_position = theta.powf(-2.0 * pair / dim as f64);
            let made = radians_per_position * yarn.original_max_position / (2.0 * std::f64::consts::PI);
            approx::assert_relative_eq!(made, turns, max_relative = 1e-12);
        }
        // between the two pairs the divisor falls along a straight line from 1 to the factor
        let (low, high) = (yarn.pair_of(32.0, dim, theta).floor(), yarn.pair_of(1.0, dim, theta).ceil());
        let plain = Rope { dim, theta, pairing: Pairing::HalfSplit, yarn: None };
        let stretched = Rope { yarn: Some(yarn), ..plain };
        for (i, (before, after)) in plain.frequencies().iter().zip(stretched.frequencies()).enumerate() {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            approx::assert_relative_eq!(after / before, 1.0 - ramp * 7.0 / 8.0, max_relative = 1e-12);
        }
        assert!(low > 2.0 && high < 30.0, "{low} {high}");
        let m = |coefficient: f64| 0.1 * coefficient * 8f64.ln() + 1.0;
        approx::assert_relative_eq!(yarn.rotation_factor(), m(0.5) / m(1.0), max_relative = 1e-14);
        let turned = stretched.rotate(&[1.0; 64], 3);
        let length = turned.iter().map(|x| x * x).sum::<f64>().sqrt();
        approx::assert_relative_eq!(length, 8.0 * yarn.rotation_factor(), max_relative = 1e-12);
    }

    #[test]
    fn pairings_are_known_by_name() {
        for pairing in Pairing::ALL {
            assert_eq!(pairing.name().parse(), Ok(pairing));
        }
        assert!("gptj".parse::<Pairing>().unwrap_err().to_string().contains("half_split"));
    }
}
