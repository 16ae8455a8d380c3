//! The exponential and what is made of it, in plain arithmetic that a compiler turns into vectors.
//!
//! No FMA on purpose: the bits are the same under every instruction set.

use super::LANES;

/// exp(x) for x ≤ 88. Below −87 the result is 0; NaN stays NaN.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; the Taylor series of exp(r) up to r⁷/7! leaves 6 · 10⁻⁹.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// 1.5 · 2²³: adding it leaves an integer in the low bits of the sum.
    const ROUNDER: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4; // 355/512, so that n · LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x < -87.0 { -87.0 } else { x };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut series = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = series * r + coefficient;
    }
    let exponent = shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127);
    let result = series * f32::from_bits(exponent << 23);
    if x < -87.0 { 0.0 } else { result }
}

/// See [`super::exponentials`].
#[inline(always)]
pub fn exponentials(maximum: f32, values: &mut [f32]) -> f32 {
    let mut sums = [0.0; LANES];
    for chunk in values.chunks_exact_mut(LANES) {
        for lane in 0..LANES {
            chunk[lane] = exp(chunk[lane] - maximum);
            sums[lane] += chunk[lane];
        }
    }
    sum_lanes(sums)
}

/// See [`super::swiglu`].
#[inline(always)]
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        // exp(−g) would overflow past 88; there the quotient is 0 to within f32 anyway.
        let negated = if -*g > 88.0 { 88.0 } else { -*g };
        *g = *g / (1.0 + exp(negated)) * u;
    }
}

/// Sum of the lanes as a tree: neighbours, then pairs, then halves.
#[inline(always)]
pub fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let half = |at: usize| (lanes[at] + lanes[at + 1]) + (lanes[at + 2] + lanes[at + 3]);
    half(0) + half(4)
}
