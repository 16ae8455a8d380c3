//! The inner loops for any processor.

use super::LANES;
use super::exponential::{self, sum_lanes};
use crate::encoding::Encoding;

/// See [`super::decode`].
pub fn decode(encoding: Encoding, bytes: &[u8], out: &mut [f32]) {
    encoding.decode(bytes, out);
}

/// See [`super::panel_product`].
pub fn panel_product(inputs: usize, panel: &[f32], rows: &[f32], out: &mut [f32]) {
    let row_count = rows.len() / inputs;
    for (column, weights) in panel.chunks_exact(inputs).enumerate() {
        for (row, x) in rows.chunks_exact(inputs).enumerate() {
            out[column * row_count + row] = dot(weights, x);
        }
    }
}

/// See [`super::scores`].
pub fn scores(query: &[f32], keys: &[f32], out: &mut [f32]) {
    for (score, key) in out.iter_mut().zip(keys.chunks_exact(query.len())) {
        *score = dot(query, key);
    }
}

/// See [`super::add_weighted`].
pub fn add_weighted(weights: &[f32], values: &[f32], sum: &mut [f32]) {
    for (weight, value) in weights.iter().zip(values.chunks_exact(sum.len())) {
        for (s, v) in sum.iter_mut().zip(value) {
            *s += weight * v;
        }
    }
}

/// See [`super::exponentials`].
pub fn exponentials(maximum: f32, values: &mut [f32]) -> f32 {
    exponential::exponentials(maximum, values)
}

/// See [`super::swiglu`].
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    exponential::swiglu(gate, up);
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    for (x, y) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
    sum_lanes(sums)
}
