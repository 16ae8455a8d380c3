//! The local attention kernel: online softmax over tiles of tokens, with the roundings of a 16-bit GPU kernel.
//!
//! Scores and sums are f32; the probabilities are rounded to the type of activations before they meet the values; the
//! normaliser sums them unrounded; the LSE is natural (FlashAttention-2's forward pass, one row and head at a time).

use shardcheck_engine::Configuration;
use shardcheck_formats::{Dtype, decode_f32, round_f32};

/// Tokens of one tile: the running maximum is updated once per tile.
pub const TILE_TOKENS: usize = 64;

/// What a row that sees no token leaves behind.
#[derive(Debug, Clone, Copy)]
pub struct EmptyRow {
    /// Every element of the output.
    pub value: f32,
    /// The LSE.
    pub lse: f32,
}

impl PartialEq for EmptyRow {
    /// By bits: NaN is what it is.
    fn eq(&self, other: &Self) -> bool {
        let bits = |row: &Self| (row.value.to_bits(), row.lse.to_bits());
        bits(self) == bits(other)
    }
}

/// How heads are laid out for the kernel and how a row is finished.
#[derive(Clone, Copy, PartialEq)]
pub struct KernelPolicies {
    /// Factor of the scores.
    pub score_scale: fn(&Configuration) -> f32,
    /// What is subtracted from the scores, given their running maximum.
    pub shift: fn(f32) -> f32,
    /// Factor of what was summed under an old maximum: `(old maximum, new maximum)`.
    pub rescale: fn(f32, f32) -> f32,
    /// Output and LSE of a row without tokens.
    pub empty: EmptyRow,
    /// The value of a query's code, given the type of activations.
    pub read_query: fn(Dtype, u16) -> f32,
    /// Rounds the probabilities of a tile to the type of activations before they meet the values.
    pub round: fn(Dtype, &mut [f32]),
    /// Rounds a row of partial outputs to the type of activations, in which it travels.
    pub store: fn(Dtype, &mut [f32]),
    /// LSE from what was subtracted and the normaliser.
    pub lse: fn(f32, f32) -> f32,
    /// Head width that the kernel runs with, out of the widths it knows.
    pub kernel_heads: fn(usize, &[usize]) -> usize,
    /// Heads of a row `[heads, dim]` padded to a width: `(row, dim, width)`.
    pub pad_heads: fn(&[f32], usize, usize) -> Vec<f32>,
    /// First head kept of the outputs: `(width, heads)`.
    pub first_kept_head: fn(usize, usize) -> usize,
    /// First head kept of the LSEs: `(width, heads)`.
    pub first_kept_lse: fn(usize, usize) -> usize,
    /// KV head that a query head reads: `(head, heads, KV heads)`.
    pub kv_head: fn(usize, usize, usize) -> usize,
    /// Tokens that a head of a row sees, of those of all rows: `(tokens by row, row, head, width)`.
    pub seen_by_head: fn(&[usize], usize, usize, usize) -> usize,
}

impl KernelPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        score_scale: |configuration| configuration.softmax_scale,
        shift: |max| max,
        rescale: |old, new| (old - new).exp(),
        empty: EmptyRow { value: f32::NAN, lse: f32::NEG_INFINITY },
        read_query: |dtype, code| decode_f32(dtype, u64::from(code)),
        round: round_all,
        store: round_all,
        lse: |max, sum| max + sum.ln(),
        kernel_heads,
        pad_heads,
        first_kept_head: |_, _| 0,
        first_kept_lse: |_, _| 0,
        kv_head: |head, heads, kv_heads| (head / (heads / kv_heads)).min(kv_heads - 1),
        seen_by_head: |row_lens, row, _, _| row_lens[row],
    };
}

/// Every value to the nearest one of a type.
pub fn round_all(dtype: Dtype, values: &mut [f32]) {
    // each arm is a loop of its own, so that nothing is decided for each value
    match dtype {
        Dtype::Bf16 => values.iter_mut().for_each(|value| *value = round_f32(Dtype::Bf16, *value)),
        Dtype::F16 => values.iter_mut().for_each(|value| *value = round_f32(Dtype::F16, *value)),
        other => values.iter_mut().for_each(|value| *value = round_f32(other, *value)),
    }
}

/// The next wider width that the kernel knows; the width itself where it knows none as wide (ATOM
/// `mla_dcp_kernel_num_heads`).
fn kernel_heads(heads: usize, widths: &[usize]) -> usize {
    widths.iter().copied().filter(|width| *width >= heads).min().unwrap_or(heads)
}

/// Padding heads are zero: repeating a head would reorder what a kernel groups.
fn pad_heads(row: &[f32], dim: usize, width: usize) -> Vec<f32> {
    let mut padded = row.to_vec();
    padded.resize(width * dim, 0.0);
    padded
}

/// Keys and values of one KV head.
#[derive(Clone, Copy)]
pub struct KvView<'a> {
    /// Keys, one row of `stride.0` a token.
    pub keys: &'a [f32],
    /// Values, one row of `stride.1` a token.
    pub values: &'a [f32],
    /// Floats from one token to the next.
    pub stride: (usize, usize),
    /// First column of key and value.
    pub column: (usize, usize),
    /// Element type of activations, which probabilities are rounded to.
    pub dtype: Dtype,
}

impl KvView<'_> {
    /// The view without the tokens before `first`.
    #[must_use]
    pub fn skip_tokens(mut self, first: usize) -> Self {
        self.column.0 += first * self.stride.0;
        self.column.1 += first * self.stride.1;
        self
    }
}

/// Buffers of the kernel, reused from row to row.
#[derive(Default)]
pub struct Scratch {
    scores: Vec<f32>,
    tile: Vec<f32>,
}

/// Attention of one row and head over the first `tokens` tokens, unrounded; returns the LSE. Nothing is done for a
/// row without tokens: `out` becomes what `policies.empty` says.
pub fn attend_row(
    query: &[f32],
    view: KvView<'_>,
    tokens: usize,
    scale: f32,
    policies: &KernelPolicies,
    scratch: &mut Scratch,
    out: &mut [f32],
) -> f32 {
    if tokens == 0 {
        out.fill(policies.empty.value);
        return policies.empty.lse;
    }
    out.fill(0.0);
    scratch.tile.resize(out.len(), 0.0);
    let (mut max, mut shift, mut sum) = (f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0f32);
    for begin in (0..tokens).step_by(TILE_TOKENS) {
        let end = tokens.min(begin + TILE_TOKENS);
        let mut tile_max = max;
        scratch.scores.clear();
        for token in begin..end {
            let at = token * view.stride.0 + view.column.0;
            let score = dot(query, &view.keys[at..at + query.len()]) * scale;
            tile_max = tile_max.max(score);
            scratch.scores.push(score);
        }
        let before = shift;
        shift = (policies.shift)(tile_max);
        let rescale = if begin == 0 { 0.0 } else { (policies.rescale)(before, shift) };
        max = tile_max;
        scratch.scores.iter_mut().for_each(|score| *score = (*score - shift).exp());
        sum = sum * rescale + sum_of(&scratch.scores);
        (policies.round)(view.dtype, &mut scratch.scores);
        scratch.tile.fill(0.0);
        add_weighted(&scratch.scores, view, begin, &mut scratch.tile);
        out.iter_mut().zip(&scratch.tile).for_each(|(total, tile)| *total = *total * rescale + tile);
    }
    let inverse = 1.0 / sum;
    out.iter_mut().for_each(|total| *total *= inverse);
    (policies.lse)(shift, sum)
}

/// Σ a·b in f32, 16 running sums.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a_chunks, a_rest) = a.as_chunks::<16>();
    let (b_chunks, b_rest) = b.as_chunks::<16>();
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..16 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    sum_of(&sums) + rest
}

/// Σ in f32, 8 running sums that are then added pairwise.
fn sum_of(values: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (chunks, rest) = values.as_chunks::<8>();
    for chunk in chunks {
        for lane in 0..8 {
            sums[lane] += chunk[lane];
        }
    }
    for (lane, value) in rest.iter().enumerate() {
        sums[lane] += value;
    }
    ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]))
}

/// `tile += Σ p·v` over the tokens from `begin`, four at a time.
fn add_weighted(weights: &[f32], view: KvView<'_>, begin: usize, tile: &mut [f32]) {
    let dim = tile.len();
    let row = |token: usize| {
        let at = (begin + token) * view.stride.1 + view.column.1;
        &view.values[at..at + dim]
    };
    let (fours, rest) = weights.as_chunks::<4>();
    for (index, p) in fours.iter().enumerate() {
        let token = 4 * index;
        let (v0, v1, v2, v3) = (row(token), row(token + 1), row(token + 2), row(token + 3));
        for d in 0..dim {
            tile[d] += (p[0] * v0[d] + p[1] * v1[d]) + (p[2] * v2[d] + p[3] * v3[d]);
        }
    }
    for (index, p) in rest.iter().enumerate() {
        let v = row(4 * fours.len() + index);
        for d in 0..dim {
            tile[d] += p * v[d];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: KernelPolicies = KernelPolicies::HEALTHY;

    fn run(query: &[f32], keys: &[f32], values: &[f32], tokens: usize, scale: f32) -> (Vec<f32>, f32) {
        let (kd, vd) = (query.len(), values.len().checked_div(tokens).unwrap_or(2));
        let view = KvView { keys, values, stride: (kd, vd), column: (0, 0), dtype: Dtype::Bf16 };
        let mut out = vec![0.0; vd];
        let lse = attend_row(query, view, tokens, scale, &KERNEL, &mut Scratch::default(), &mut out);
        (out, lse)
    }

    #[test]
    fn equal_scores_average_the_values_and_give_the_logarithm_of_the_count() {
        for tokens in [1, 3, 4, 63, 64, 65, 200] {
            let values: Vec<f32> = (0..tokens).flat_map(|t| [t as f32, 1.0]).collect();
            let (out, lse) = run(&[0.0], &vec![1.0; tokens], &values, tokens, 1.0);
            assert!((out[0] - (tokens - 1) as f32 / 2.0).abs() < 1e-3, "{tokens}: {}", out[0]);
            assert!((out[1] - 1.0).abs() < 1e-6);
            assert!((lse - (tokens as f32).ln()).abs() < 1e-6, "{tokens}: {lse}");
        }
    }

    #[test]
    fn a_later_tile_with_a_larger_maximum_takes_over() {
        let tokens = 130;
        let keys: Vec<f32> = (0..tokens).map(|t| t as f32).collect();
        let values: Vec<f32> = (0..tokens).map(|t| 129.0 - t as f32).collect();
        let (out, lse) = run(&[2.0], &keys, &values, tokens, 1.0);
        // weights fall by e^-2 a token: Σ = 1/(1 − e^-2), mean distance from the last e^-2/(1 − e^-2)
        let ratio = (-2.0f64).exp();
        assert!((f64::from(out[0]) - ratio / (1.0 - ratio)).abs() < 2e-3, "{}", out[0]);
        assert!((f64::from(lse) - (258.0 - (1.0 - ratio).ln())).abs() < 1e-3, "{lse}");
    }

    #[test]
    fn a_row_without_tokens_is_undefined_with_an_lse_of_minus_infinity() {
        let (out, lse) = run(&[1.0], &[], &[], 0, 1.0);
        assert!(out.iter().all(|v| v.is_nan()));
        assert_eq!(lse, f32::NEG_INFINITY);
    }

    #[test]
    fn strongly_negative_and_positive_scores_neither_vanish_nor_overflow() {
        for score in [-300.0, 300.0] {
            let (out, lse) = run(&[score], &[1.0, 1.0], &[1.0, 3.0], 2, 1.0);
            assert_eq!(out, [2.0]);
            assert!((lse - (score + 2f32.ln())).abs() < 1e-4);
        }
    }

    #[test]
    fn heads_are_padded_to_the_next_width_with_zeros_and_left_alone_beyond_the_widest() {
        let widths = [16, 32, 64, 128];
        for (heads, width) in [(24, 32), (48, 64), (96, 128), (128, 128), (1, 16), (129, 129)] {
            assert_eq!(kernel_heads(heads, &widths), width);
        }
        assert_eq!(kernel_heads(96, &[]), 96);
        assert_eq!(pad_heads(&[1.0, 2.0, 3.0, 4.0], 2, 3), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]);
    }

    #[test]
    fn query_heads_read_their_kv_head_in_consecutive_groups() {
        let read: Vec<usize> = (0..6).map(|head| (KERNEL.kv_head)(head, 6, 3)).collect();
        assert_eq!(read, [0, 0, 1, 1, 2, 2]);
    }
}
