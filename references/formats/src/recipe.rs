//! Recipes: tensors that are made where they are used, equal bit for bit in any language.
//!
//! A value depends on the recipe and its own index alone, so tiles can be made in any order, on any device, and a
//! case of gigabytes travels as a line of JSON. Only 64-bit wrapping integer arithmetic, one exact conversion to
//! floating point and one rounding are involved. The algorithm, whole:
//!
//! ```text
//! mix(x):  x ^= x >> 30; x *= 0xBF58476D1CE4E5B9        SplitMix64's finaliser (Steele, Lea and Flood 2014),
//!          x ^= x >> 27; x *= 0x94D049BB133111EB        in Stafford's variant 13; all modulo 2^64
//!          return x ^ (x >> 31)
//! key  = mix(mix(seed + G) ^ stream)                     G = 0x9E3779B97F4A7C15, once a tensor
//! word(seed, stream, index) = mix(key + G · (index + 1))
//!
//! uniform     w = word(index); k = 2 · (w >> 41) + 1 − 2^23;              value = k · 2^−23
//! gaussian    s = sum of the twelve 16-bit fields of word(3·index), word(3·index + 1), word(3·index + 2);
//!             k = s − 393210;                                             value = k · 2^−16
//! heavy_tail  s of word(4·index) … word(4·index + 2) as for gaussian; t = min(5, ⌊(trailing zero bits of
//!             word(4·index + 3)) / 2⌋); k = (s − 393210) · 2^t;           value = k · 2^−16
//! sign        k = 1 − 2 · (word(index) >> 63);                            value = k
//! constant    k = 1;                                                      value = k
//! zero        k = 0;                                                      value = k
//!
//! element = value · 2^exponent, rounded to the dtype: floats to nearest even, saturating; integers likewise
//! ```
//!
//! |k| < 2^24 and |exponent| ≤ 100, so `value · 2^exponent` is exact in f32 and the rounding to the dtype is the only
//! one. Index is the row-major position in the tensor. Multiplications of an index wrap modulo 2^64.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::codec::Overflow;
use crate::dtype::Dtype;
use crate::single::{decode_f32, encode_f32, round_bf16};

/// The odd constant of SplitMix64's Weyl sequence, 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
/// Half of the largest sum of twelve 16-bit fields: the centre of the Gaussian.
const GAUSSIAN_CENTRE: i32 = 6 * 65_535;
/// Largest doubling of a heavy-tailed value, as a power of two.
const HEAVY_TAIL_MAX_DOUBLINGS: u32 = 5;

/// How the values of a recipe are distributed, before its scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Odd multiples of 2^−23 between −1 and 1, all equally likely: mean 0, variance 1/3.
    Uniform,
    /// The sum of twelve uniform 16-bit integers (Irwin–Hall), centred: mean 0, variance 1 − 2^−32, at most 6 in
    /// magnitude, step 2^−16.
    Gaussian,
    /// A Gaussian times 2^t with P(t ≥ j) = 4^−j up to t = 5: mean 0, variance 4.75, at most 192 in magnitude.
    HeavyTail,
    /// −1 or 1, equally likely.
    Sign,
    /// Always 1 (times the scale 2^exponent).
    Constant,
    /// Always 0.
    Zero,
}

/// A name that is no distribution.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown distribution `{found}`: use one of uniform, gaussian, heavy_tail, sign, constant, zero")]
pub struct UnknownDistribution {
    /// The text that was given.
    pub found: String,
}

impl Distribution {
    /// Every distribution.
    pub const ALL: [Distribution; 6] = [
        Distribution::Uniform,
        Distribution::Gaussian,
        Distribution::HeavyTail,
        Distribution::Sign,
        Distribution::Constant,
        Distribution::Zero,
    ];

    /// The name used in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Distribution::Uniform => "uniform",
            Distribution::Gaussian => "gaussian",
            Distribution::HeavyTail => "heavy_tail",
            Distribution::Sign => "sign",
            Distribution::Constant => "constant",
            Distribution::Zero => "zero",
        }
    }

    /// Power of two that the integer k of this distribution is multiplied by.
    const fn step_exponent(self) -> i32 {
        match self {
            Distribution::Uniform => -23,
            Distribution::Gaussian | Distribution::HeavyTail => -16,
            Distribution::Sign | Distribution::Constant | Distribution::Zero => 0,
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Distribution {
    type Err = UnknownDistribution;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Distribution::ALL
            .into_iter()
            .find(|distribution| distribution.name() == text)
            .ok_or_else(|| UnknownDistribution { found: text.to_owned() })
    }
}

/// A tensor by its rule. Two recipes that differ in `seed` or `stream` are independent of each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Seed of the case.
    pub seed: u64,
    /// Which tensor of the case; different streams of one seed are independent.
    pub stream: u32,
    /// Distribution before the scale.
    pub distribution: Distribution,
    /// Type of an element; every value is exactly one of its values.
    pub dtype: Dtype,
    /// Extents, row-major, the last one contiguous.
    pub shape: Vec<usize>,
    /// The scale is 2^exponent, within ±[`Recipe::MAX_EXPONENT`]. Without rounding it changes no digit.
    pub exponent: i32,
}

/// Why a recipe cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecipeError {
    /// The scale is too large or too small for its products to be exact in f32.
    #[error(
        "recipe exponent {exponent} is outside ±{}: choose a scale within 2^±{}",
        Recipe::MAX_EXPONENT,
        Recipe::MAX_EXPONENT
    )]
    Exponent {
        /// The exponent that was given.
        exponent: i32,
    },
    /// The number of elements doesn't fit in 60 bits.
    #[error("recipe shape {shape:?} has more than 2^60 elements: choose smaller extents")]
    Shape {
        /// The shape that was given.
        shape: Vec<usize>,
    },
}

impl Recipe {
    /// Largest magnitude of `exponent`.
    pub const MAX_EXPONENT: i32 = 100;

    /// Checks what the other methods take for granted; call it on a recipe that was read from outside.
    ///
    /// # Errors
    /// An exponent outside ±[`Recipe::MAX_EXPONENT`], or more than 2^60 elements.
    pub fn check(&self) -> Result<(), RecipeError> {
        if self.exponent.unsigned_abs() > Self::MAX_EXPONENT.unsigned_abs() {
            return Err(RecipeError::Exponent { exponent: self.exponent });
        }
        match self.checked_len() {
            Some(_) => Ok(()),
            None => Err(RecipeError::Shape { shape: self.shape.clone() }),
        }
    }

    /// Number of elements; 1 for an empty shape.
    ///
    /// # Panics
    /// If it exceeds 2^60, which [`Recipe::check`] refuses.
    pub fn len(&self) -> u64 {
        self.checked_len().unwrap_or_else(|| panic!("shape {:?} has more than 2^60 elements", self.shape))
    }

    /// Whether an extent is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at a row-major index. Exact in every dtype but `I64` and `I32`, whose saturated values round to f32
    /// ([`Recipe::bits`] has them whole).
    ///
    /// # Panics
    /// As [`Recipe::fill`].
    pub fn value(&self, index: u64) -> f32 {
        let mut out = [0.0];
        self.fill(index, &mut out);
        out[0]
    }

    /// The code of the element at a row-major index, in the low bits as [`encode`](crate::encode) gives it.
    ///
    /// # Panics
    /// As [`Recipe::fill`].
    pub fn bits(&self, index: u64) -> u64 {
        let mut out = [0.0];
        self.fill_unrounded(index, &mut out);
        encode_f32(self.dtype, out[0], Overflow::Saturate)
    }

    /// The elements `start .. start + out.len()` in row-major order.
    ///
    /// # Panics
    /// If that range passes the end of the tensor, or where [`Recipe::check`] has an error.
    pub fn fill(&self, start: u64, out: &mut [f32]) {
        self.fill_unrounded(start, out);
        round_all(self.dtype, out);
    }

    /// The elements `start .. start + count` as little-endian bytes of the dtype, `count · size_bytes` of them.
    ///
    /// # Panics
    /// As [`Recipe::fill`].
    pub fn bytes(&self, start: u64, count: usize) -> Vec<u8> {
        let mut values = vec![0.0; count];
        self.fill_unrounded(start, &mut values);
        let size = self.dtype.size_bytes();
        let mut bytes = Vec::with_capacity(count * size);
        for value in values {
            let code = encode_f32(self.dtype, value, Overflow::Saturate);
            bytes.extend_from_slice(&code.to_le_bytes()[..size]);
        }
        bytes
    }

    fn checked_len(&self) -> Option<u64> {
        // a zero anywhere makes the product 0 whatever the other extents are
        if self.shape.contains(&0) {
            return Some(0);
        }
        let extents = self.shape.iter().map(|&extent| extent as u64);
        extents.into_iter().try_fold(1u64, u64::checked_mul).filter(|&len| len <= 1 << 60)
    }

    /// k · 2^(step + exponent) for a range of elements, before the rounding to the dtype.
    fn fill_unrounded(&self, start: u64, out: &mut [f32]) {
        let end = start.checked_add(out.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.len()),
            "elements {start}+{} pass the end of a tensor of {:?}",
            out.len(),
            self.shape
        );
        assert!(self.exponent.abs() <= Self::MAX_EXPONENT, "exponent {} was not checked", self.exponent);
        let scale = power_of_two(self.exponent + self.distribution.step_exponent());
        let key = stream_key(self.seed, self.stream);
        match self.distribution {
            Distribution::Uniform => {
                fill_with(start, out, |index| scale * uniform(word_at(key, index)) as f32)
            }
            Distribution::Gaussian => fill_with(start, out, |index| scale * gaussian(key, index, 3) as f32),
            Distribution::HeavyTail => fill_with(start, out, |index| scale * heavy_tail(key, index) as f32),
            Distribution::Sign => fill_with(start, out, |index| scale * sign(word_at(key, index)) as f32),
            Distribution::Constant => out.fill(scale),
            Distribution::Zero => out.fill(0.0),
        }
    }
}

/// The pseudo-random word number `index` of a stream: SplitMix64 from a hashed key (see the module's text).
#[inline]
pub fn word(seed: u64, stream: u32, index: u64) -> u64 {
    word_at(stream_key(seed, stream), index)
}

/// A sequential reader of the words of one stream, for callers that draw decisions rather than tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counter {
    key: u64,
    next: u64,
}

impl Counter {
    /// A reader at word 0 of the stream.
    pub fn new(seed: u64, stream: u32) -> Counter {
        Counter { key: stream_key(seed, stream), next: 0 }
    }

    /// The next word: the n-th call returns `word(seed, stream, n)`, counted from 0.
    pub fn next_u64(&mut self) -> u64 {
        let word = word_at(self.key, self.next);
        self.next = self.next.wrapping_add(1);
        word
    }

    /// An integer below `n`, from the high half of a 64 × 64-bit product (Lemire 2019, without the rejection): no
    /// value is off 1/n by more than 2^−64.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "there is no integer below 0");
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// A multiple of 2^−53 in [0, 1).
    pub fn unit_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A value of [`Distribution::Gaussian`], from the next three words.
    pub fn gaussian(&mut self) -> f64 {
        let words = [self.next_u64(), self.next_u64(), self.next_u64()];
        f64::from(centred_sum(words)) / 65_536.0
    }
}

fn stream_key(seed: u64, stream: u32) -> u64 {
    mix(mix(seed.wrapping_add(GOLDEN)) ^ u64::from(stream))
}

#[inline(always)]
fn word_at(key: u64, index: u64) -> u64 {
    mix(key.wrapping_add(GOLDEN.wrapping_mul(index.wrapping_add(1))))
}

#[inline(always)]
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[inline(always)]
fn uniform(word: u64) -> i32 {
    2 * (word >> 41) as i32 + 1 - (1 << 23)
}

#[inline(always)]
fn sign(word: u64) -> i32 {
    1 - 2 * (word >> 63) as i32
}

/// The Gaussian's k from the first three of the `stride` words that belong to `index`.
#[inline(always)]
fn gaussian(key: u64, index: u64, stride: u64) -> i32 {
    let first = index.wrapping_mul(stride);
    centred_sum([0, 1, 2].map(|offset| word_at(key, first.wrapping_add(offset))))
}

#[inline(always)]
fn heavy_tail(key: u64, index: u64) -> i32 {
    let fourth = word_at(key, index.wrapping_mul(4).wrapping_add(3));
    gaussian(key, index, 4) << (fourth.trailing_zeros() / 2).min(HEAVY_TAIL_MAX_DOUBLINGS)
}

/// Sum of the twelve 16-bit fields of three words, less its centre.
#[inline(always)]
fn centred_sum(words: [u64; 3]) -> i32 {
    // two fields at a time: 32 bits apart, six of 16 bits cannot reach each other
    const EVEN_FIELDS: u64 = 0x0000_FFFF_0000_FFFF;
    let pairs: u64 = words.iter().map(|word| (word & EVEN_FIELDS) + ((word >> 16) & EVEN_FIELDS)).sum();
    ((pairs & 0xFFFF_FFFF) + (pairs >> 32)) as i32 - GAUSSIAN_CENTRE
}

#[inline(always)]
fn fill_with(start: u64, out: &mut [f32], element: impl Fn(u64) -> f32) {
    for (offset, slot) in out.iter_mut().enumerate() {
        *slot = element(start + offset as u64);
    }
}

/// Rounds in place. Nothing here can pass the largest f32 or bf16, so those need no overflow policy.
fn round_all(dtype: Dtype, values: &mut [f32]) {
    match dtype {
        Dtype::F64 | Dtype::F32 => {}
        Dtype::Bf16 => values.iter_mut().for_each(|value| *value = round_bf16(*value)),
        _ => {
            for value in values {
                *value = decode_f32(dtype, encode_f32(dtype, *value, Overflow::Saturate));
            }
        }
    }
}

/// 2^exponent for exponents of normal f32 numbers.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_distribution_reads_back_by_name() {
        for distribution in Distribution::ALL {
            assert_eq!(distribution.to_string().parse(), Ok(distribution));
            assert_eq!(serde_json::to_string(&distribution).unwrap(), format!("\"{distribution}\""));
        }
        assert!("normal".parse::<Distribution>().unwrap_err().to_string().contains("gaussian"));
    }

    #[test]
    fn the_sum_of_fields_is_the_sum_of_twelve_16_bit_integers() {
        assert_eq!(centred_sum([0; 3]), -GAUSSIAN_CENTRE);
        assert_eq!(centred_sum([u64::MAX; 3]), GAUSSIAN_CENTRE);
        let mut counter = Counter::new(5, 0);
        for _ in 0..1000 {
            let words = [counter.next_u64(), counter.next_u64(), counter.next_u64()];
            let plain: i64 =
                words.iter().flat_map(|w| (0..4).map(move |i| ((w >> (16 * i)) & 0xFFFF) as i64)).sum();
            assert_eq!(i64::from(centred_sum(words)), plain - i64::from(GAUSSIAN_CENTRE));
        }
    }
}
