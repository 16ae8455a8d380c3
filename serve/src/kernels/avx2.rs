//! The inner loops with AVX2 and FMA: eight lanes, one fused rounding per step.

use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_and_si128, _mm_cvtss_f32, _mm_loadu_si128, _mm_set1_epi8, _mm_srli_epi16,
    _mm_srli_si128, _mm_storeu_ps, _mm256_add_ps, _mm256_castps256_ps128, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_hadd_ps, _mm256_loadu_ps,
    _mm256_mul_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};

use super::exponential;
use super::{LANES, PANEL_ROWS};
use crate::encoding::{Encoding, q4_1_scales};

/// See [`super::decode`].
#[target_feature(enable = "avx2,fma")]
pub fn decode(encoding: Encoding, bytes: &[u8], out: &mut [f32]) {
    match encoding {
        // By hand, since the compiler makes gathers over several blocks of it.
        Encoding::Q4_1 => decode_q4_1(bytes, out),
        Encoding::Q8_0 | Encoding::F32 => encoding.decode(bytes, out),
    }
}

#[target_feature(enable = "avx2,fma")]
fn decode_q4_1(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), Encoding::Q4_1.row_bytes(out.len()), "bytes do not match the elements asked for");
    let nibble = _mm_set1_epi8(15);
    for (values, block) in out.chunks_exact_mut(32).zip(bytes.chunks_exact(20)) {
        let (scale, minimum) = q4_1_scales(block);
        let (scale, minimum) = (_mm256_set1_ps(scale), _mm256_set1_ps(minimum));
        // SAFETY: a block is 20 bytes long, and its codes are the last 16.
        let codes = unsafe { _mm_loadu_si128(block.as_ptr().add(4).cast()) };
        let low = _mm_and_si128(codes, nibble);
        let high = _mm_and_si128(_mm_srli_epi16::<4>(codes), nibble);
        let eights = [low, _mm_srli_si128::<8>(low), high, _mm_srli_si128::<8>(high)];
        for (values, eight) in values.chunks_exact_mut(LANES).zip(eights) {
            let product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight)), scale);
            // SAFETY: the chunk has room for eight.
            unsafe { _mm256_storeu_ps(values.as_mut_ptr(), _mm256_add_ps(product, minimum)) };
        }
    }
}

/// See [`super::exponentials`].
#[target_feature(enable = "avx2,fma")]
pub fn exponentials(maximum: f32, values: &mut [f32]) -> f32 {
    exponential::exponentials(maximum, values)
}

/// See [`super::swiglu`].
#[target_feature(enable = "avx2,fma")]
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    exponential::swiglu(gate, up);
}

/// See [`super::panel_product`]. Tiles of rows × columns are chosen so that at least six and at most twelve sums run
/// at once: enough to hide the latency of FMA, few enough for sixteen registers.
#[target_feature(enable = "avx2,fma")]
pub fn panel_product(inputs: usize, panel: &[f32], rows: &[f32], out: &mut [f32]) {
    let row_count = rows.len() / inputs;
    if panel.len() / inputs != PANEL_ROWS {
        for row in 0..row_count {
            columns::<1, 1>(inputs, panel, rows, row, row_count, out);
        }
        return;
    }
    let mut row = 0;
    while row + 4 <= row_count {
        columns::<4, 3>(inputs, panel, rows, row, row_count, out);
        row += 4;
    }
    match row_count - row {
        0 => {}
        1 => columns::<1, 6>(inputs, panel, rows, row, row_count, out),
        2 => columns::<2, 6>(inputs, panel, rows, row, row_count, out),
        _ => columns::<3, 4>(inputs, panel, rows, row, row_count, out),
    }
}

/// All columns of a panel, C at a time, for the rows `row .. row + R`.
#[target_feature(enable = "avx2,fma")]
fn columns<const R: usize, const C: usize>(
    inputs: usize,
    panel: &[f32],
    rows: &[f32],
    row: usize,
    row_count: usize,
    out: &mut [f32],
) {
    let x = &rows[row * inputs..(row + R) * inputs];
    for (tile, weights) in panel.chunks_exact(C * inputs).enumerate() {
        let sums = tile_product::<R, C>(inputs, weights, x);
        for c in 0..C {
            for r in 0..R {
                out[(tile * C + c) * row_count + row + r] = sum_lanes(sums[r][c]);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn tile_product<const R: usize, const C: usize>(
    inputs: usize,
    weights: &[f32],
    x: &[f32],
) -> [[__m256; C]; R] {
    assert!(weights.len() == C * inputs && x.len() == R * inputs && inputs.is_multiple_of(LANES));
    let mut sums = [[_mm256_setzero_ps(); C]; R];
    for at in (0..inputs).step_by(LANES) {
        let mut w = [_mm256_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: c < C and at + 8 <= inputs, and `weights` is C * inputs long (asserted above).
            w[c] = unsafe { _mm256_loadu_ps(weights.as_ptr().add(c * inputs + at)) };
        }
        for r in 0..R {
            // SAFETY: r < R and at + 8 <= inputs, and `x` is R * inputs long (asserted above).
            let v = unsafe { _mm256_loadu_ps(x.as_ptr().add(r * inputs + at)) };
            for c in 0..C {
                sums[r][c] = _mm256_fmadd_ps(v, w[c], sums[r][c]);
            }
        }
    }
    sums
}

/// See [`super::scores`]. Four keys at a time; a last group that is not full repeats its last key.
#[target_feature(enable = "avx2,fma")]
pub fn scores(query: &[f32], keys: &[f32], out: &mut [f32]) {
    let (dim, count) = (query.len(), out.len());
    assert!(dim.is_multiple_of(LANES) && keys.len() == count * dim);
    for first in (0..count).step_by(4) {
        let mut sums = [_mm256_setzero_ps(); 4];
        for at in (0..dim).step_by(LANES) {
            // SAFETY: at + 8 <= dim = query.len().
            let q = unsafe { _mm256_loadu_ps(query.as_ptr().add(at)) };
            for j in 0..4 {
                let key = (first + j).min(count - 1);
                // SAFETY: key < count and at + 8 <= dim, and `keys` is count * dim long (asserted above).
                let k = unsafe { _mm256_loadu_ps(keys.as_ptr().add(key * dim + at)) };
                sums[j] = _mm256_fmadd_ps(q, k, sums[j]);
            }
        }
        let pairs = (_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
        let halves = _mm256_hadd_ps(pairs.0, pairs.1);
        let four = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
        let mut scores = [0.0; 4];
        // SAFETY: `scores` has room for four.
        unsafe { _mm_storeu_ps(scores.as_mut_ptr(), four) };
        let group = (count - first).min(4);
        out[first..first + group].copy_from_slice(&scores[..group]);
    }
}

/// See [`super::add_weighted`].
#[target_feature(enable = "avx2,fma")]
pub fn add_weighted(weights: &[f32], values: &[f32], sum: &mut [f32]) {
    let dim = sum.len();
    let mut at = 0;
    while at + 8 * LANES <= dim {
        weighted_columns::<8>(weights, values, at, sum);
        at += 8 * LANES;
    }
    while at < dim {
        weighted_columns::<1>(weights, values, at, sum);
        at += LANES;
    }
}

/// The columns `at .. at + 8·V` of a weighted sum, held in V registers.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn weighted_columns<const V: usize>(weights: &[f32], values: &[f32], at: usize, sum: &mut [f32]) {
    let dim = sum.len();
    assert!(at + V * LANES <= dim && values.len() == weights.len() * dim);
    let mut sums = [_mm256_setzero_ps(); V];
    for v in 0..V {
        // SAFETY: at + 8·V <= sum.len() (asserted above).
        sums[v] = unsafe { _mm256_loadu_ps(sum.as_ptr().add(at + v * LANES)) };
    }
    for (j, weight) in weights.iter().enumerate() {
        let weight = _mm256_set1_ps(*weight);
        for v in 0..V {
            // SAFETY: j < weights.len() and at + 8·V <= dim, and `values` is weights.len() * dim long (asserted above).
            let value = unsafe { _mm256_loadu_ps(values.as_ptr().add(j * dim + at + v * LANES)) };
            sums[v] = _mm256_fmadd_ps(weight, value, sums[v]);
        }
    }
    for v in 0..V {
        // SAFETY: at + 8·V <= sum.len() (asserted above).
        unsafe { _mm256_storeu_ps(sum.as_mut_ptr().add(at + v * LANES), sums[v]) };
    }
}

/// The tree of [`exponential::sum_lanes`].
#[target_feature(enable = "avx2,fma")]
#[inline]
fn sum_lanes(lanes: __m256) -> f32 {
    let pairs = _mm256_hadd_ps(lanes, lanes);
    let halves = _mm256_hadd_ps(pairs, pairs);
    _mm_cvtss_f32(_mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves)))
}
