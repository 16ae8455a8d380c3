//! Compression of tokens (DeepSeek-V4 `Compressor`): blocks of consecutive tokens of a request, each pooled into one entry by gates.
//!
//! Block j of a request is its positions jm … (j + 1)m − 1. In each column, its entry is Σ softmax(gate + bias)·kv over the block's tokens,
//! the bias being that of a token's place in its block. Where blocks overlap, a token has two halves of columns: the entry of its own
//! block takes the second, that of the block behind it the first, and both halves share one softmax; the first block has nothing before it.
//! An entry exists from its block's last token on. (`inference/model.py` of DeepSeek-V4-Pro: `overlap_transform`, `kv_state`,
//! `score_state`, `ape`; ATOM `deepseek_v4.py`; norm, rotation and cast behind it are left out.)

use shardcheck_formats::Contract;

use crate::bound::{TINY32, U32, gamma};
use crate::exp::exp;

/// What blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Tokens m of a block.
    pub ratio: usize,
    /// Whether an entry pools the block before its own as well.
    pub overlap: bool,
    /// Columns d of an entry; a token has twice as many where blocks overlap.
    pub dim: usize,
}

/// One token: its values and gates, `[C]` each.
#[derive(Debug, Clone, Copy)]
pub struct Token<'a> {
    /// What is pooled.
    pub kv: &'a [f32],
    /// Gates without the bias.
    pub gate: &'a [f32],
}

/// An exact element of an entry, and how far an engine's may be from it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pooled {
    /// Σ softmax(gate + bias)·kv.
    pub value: f64,
    /// Absolute bound on the error.
    pub error: f64,
}

impl Blocks {
    /// Columns C of a token.
    pub fn columns(&self) -> usize {
        self.dim * (1 + usize::from(self.overlap))
    }

    /// Entries that the row at a position sees: those of blocks that end at it or before.
    pub fn visible_entries(&self, position: usize) -> usize {
        (position + 1) / self.ratio
    }

    /// Blocks whose last token is among the new ones behind `computed` tokens.
    pub fn completed(&self, computed: usize, new: usize) -> std::ops::Range<usize> {
        computed / self.ratio..(computed + new) / self.ratio
    }

    /// First position that is needed for entries that are still to come behind `len` tokens.
    pub fn first_held(&self, len: usize) -> usize {
        (len / self.ratio).saturating_sub(usize::from(self.overlap)) * self.ratio
    }

    /// Positions that an entry pools, each with the first of its columns.
    pub fn pooled(&self, block: usize) -> Vec<(usize, usize)> {
        let own = block * self.ratio..(block + 1) * self.ratio;
        if !self.overlap {
            return own.map(|position| (position, 0)).collect();
        }
        let before = own.start.saturating_sub(self.ratio)..own.start;
        before.map(|position| (position, 0)).chain(own.map(|position| (position, self.dim))).collect()
    }

    /// The entry of a block, given the token at a position and the bias `[m, C]`.
    pub fn entry<'a>(
        &self,
        block: usize,
        token: impl Fn(usize) -> Token<'a>,
        bias: &[f32],
        contract: &Contract,
    ) -> Vec<Pooled> {
        let tokens: Vec<(usize, usize, Token<'a>)> = self
            .pooled(block)
            .into_iter()
            .map(|(position, first)| (position, first, token(position)))
            .collect();
        let column = |column: usize| {
            let parts: Vec<(f64, f64)> = tokens
                .iter()
                .map(|(position, first, token)| {
                    let bias = bias[position % self.ratio * self.columns() + first + column];
                    let gate = token.gate[first + column];
                    (f64::from(gate) + f64::from(bias), f64::from(token.kv[first + column]))
                })
                .collect();
            pool(&parts, contract)
        };
        (0..self.dim).map(column).collect()
    }
}

/// Σ softmax(s)·v of `(s, v)`, and a bound for an engine that works in 32 bits.
///
/// The exponent of part i carries at most
///
/// ```text
/// u(6|s_i| + max|s| + min(110, max s − min s))   gate + bias, constants and products of exp2, subtraction of the maximum, rescales
/// u(2·kexp + 2)(2 + n/tile_min)                  exp of the part, and of every rescale of a running maximum
/// ```
///
/// so that its weight is off by the factor 1 ± η_i, η_i = expm1 of it. Then |Δo| ≤ Σ w_i·η_i·|v_i − o| / (1 − Σ w_i·η_i), and products, sums
/// and the division add (γ(h, u_acc) + γ(h, u) + 4u)·Σ w_i·|v_i| for chains of h additions; weights below the smallest normal number may
/// be flushed, and the format of outputs rounds once.
pub fn pool(parts: &[(f64, f64)], contract: &Contract) -> Pooled {
    let (count, scores) = (parts.len(), || parts.iter().map(|(score, _)| *score));
    let (most, least) = (scores().fold(f64::NEG_INFINITY, f64::max), scores().fold(f64::INFINITY, f64::min));
    let largest = most.abs().max(least.abs());
    let weights: Vec<f64> = scores().map(|score| exp(score - most)).collect();
    let total: f64 = weights.iter().sum();
    let weighed = |of: &dyn Fn(usize) -> f64| -> f64 {
        weights.iter().enumerate().map(|(i, weight)| weight / total * of(i)).sum()
    };
    let value = weighed(&|i| parts[i].1);
    let common = U32 * (largest + (most - least).min(110.0))
        + U32 * (2.0 * contract.kexp + 2.0) * (2.0 + count as f64 / contract.tile_min as f64);
    let eta = |i: usize| (6.0 * U32 * parts[i].0.abs() + common).exp_m1();
    let moved = weighed(&eta);
    if moved >= 0.5 {
        return Pooled { value, error: f64::INFINITY };
    }
    let size = weighed(&|i| (1.0 + eta(i)) * parts[i].1.abs()) / (1.0 - moved);
    let depth = contract.depth_for(count);
    let sums = gamma(depth, contract.u_acc) + gamma(depth, U32) + 4.0 * U32;
    let widest = parts.iter().map(|(_, value)| value.abs()).fold(0.0, f64::max);
    let mut error = weighed(&|i| eta(i) * (parts[i].1 - value).abs()) / (1.0 - moved)
        + sums * size
        + TINY32 * (count as f64 + 1.0) * (1.0 + 2.0 * widest)
        // what 64 bits lose here
        + 1e-15 * (count + 8) as f64 * size;
    error += contract.output.unit_roundoff() * (value.abs() + error) + TINY32;
    Pooled { value, error }
}

#[cfg(test)]
mod tests {
    use shardcheck_formats::recipe::Counter;
    use shardcheck_formats::{Depth, Dtype, Merge};

    use super::*;

    fn contract() -> Contract {
        Contract { u_acc: U32, depth: Depth::Any, output: Dtype::F32, ..Contract::bf16_default(Merge::A2a) }
    }

    /// The published transform, done as it is published: rows of both halves laid out, the first block's missing ones at −∞.
    fn by_transform(blocks: Blocks, kv: &[Vec<f32>], gate: &[Vec<f32>], bias: &[f32]) -> Vec<Vec<f64>> {
        let (m, d, columns) = (blocks.ratio, blocks.dim, blocks.columns());
        let slots = if blocks.overlap { 2 * m } else { m };
        let mut entries = Vec::new();
        for block in 0..kv.len() / m {
            let mut values = vec![vec![0.0; d]; slots];
            let mut scores = vec![vec![f64::NEG_INFINITY; d]; slots];
            for place in 0..m {
                let at = block * m + place;
                let biased =
                    |at: usize, c: usize| f64::from(gate[at][c]) + f64::from(bias[at % m * columns + c]);
                for c in 0..d {
                    let (own, column) = if blocks.overlap { (m + place, d + c) } else { (place, c) };
                    values[own][c] = f64::from(kv[at][column]);
                    scores[own][c] = biased(at, column);
                    if blocks.overlap && block > 0 {
                        values[place][c] = f64::from(kv[at - m][c]);
                        scores[place][c] = biased(at - m, c);
                    }
                }
            }
            let entry = (0..d).map(|c| {
                let total: f64 = scores.iter().map(|row| row[c].exp()).sum();
                (0..slots).map(|slot| scores[slot][c].exp() / total * values[slot][c]).sum()
            });
            entries.push(entry.collect());
        }
        entries
    }

    fn drawn(seed: u64, rows: usize, columns: usize) -> Vec<Vec<f32>> {
        let mut counter = Counter::new(seed, 9);
        (0..rows).map(|_| (0..columns).map(|_| counter.gaussian() as f32).collect()).collect()
    }

    #[test]
    fn an_entry_is_what_the_published_transform_gives() {
        for (ratio, overlap, dim, len) in
            [(4, true, 3, 17), (4, false, 2, 16), (1, true, 2, 5), (3, true, 1, 11), (5, false, 4, 4)]
        {
            let blocks = Blocks { ratio, overlap, dim };
            let (kv, gate) = (drawn(1, len, blocks.columns()), drawn(2, len, blocks.columns()));
            let bias = drawn(3, ratio, blocks.columns()).concat();
            let wanted = by_transform(blocks, &kv, &gate, &bias);
            assert_eq!(wanted.len(), blocks.completed(0, len).len());
            for (block, wanted) in wanted.iter().enumerate() {
                let token = |position: usize| Token { kv: &kv[position], gate: &gate[position] };
                let entry = blocks.entry(block, token, &bias, &contract());
                for (pooled, wanted) in entry.iter().zip(wanted) {
                    assert!((pooled.value - wanted).abs() < 1e-13, "{blocks:?} {block}");
                }
            }
        }
    }

    /// Arithmetic in 32 bits, in an order of its own: a running maximum, one part after the other.
    fn in_single(parts: &[(f64, f64)]) -> f32 {
        let (mut most, mut total, mut sum) = (f32::NEG_INFINITY, 0f32, 0f32);
        for (score, value) in parts {
            let (score, value) = (*score as f32, *value as f32);
            let higher = most.max(score);
            let (old, new) = ((most - higher).exp(), (score - higher).exp());
            (total, sum, most) = (total * old + new, sum * old + new * value, higher);
        }
        sum / total
    }

    #[test]
    fn arithmetic_in_32_bits_stays_within_the_bound_and_an_unlike_one_does_not() {
        let mut counter = Counter::new(5, 1);
        for (count, spread) in [(4, 1.0), (8, 1.0), (128, 1.0), (8, 40.0), (256, 60.0), (8, 0.0)] {
            for _ in 0..200 {
                // scores that 32 bits hold, as a sum of them is one rounding away
                let single = |x: f64| f64::from(x as f32);
                let parts: Vec<(f64, f64)> = (0..count)
                    .map(|_| (single(spread * counter.gaussian()), single(counter.gaussian())))
                    .collect();
                // a running maximum that moves at every part is one tile a part
                let conforming = Contract { tile_min: 1, ..contract() };
                let pooled = pool(&parts, &conforming);
                let seen = f64::from(in_single(&parts));
                assert!((seen - pooled.value).abs() <= pooled.error, "{count} {spread}: {seen} {pooled:?}");
                assert!(pooled.error < 2e-3, "{count} {spread}: {}", pooled.error);
            }
        }
        let parts = [(0.0, 1.0), (0.5, -2.0), (1.0, 0.25)];
        let pooled = pool(&parts, &contract());
        let without_last = pool(&parts[..2], &contract());
        assert!((pooled.value - without_last.value).abs() > 1e3 * pooled.error);
    }

    #[test]
    fn blocks_end_where_their_last_token_is() {
        let blocks = Blocks { ratio: 4, overlap: true, dim: 1 };
        assert_eq!([0, 2, 3, 4, 7, 8].map(|position| blocks.visible_entries(position)), [0, 0, 1, 1, 2, 2]);
        assert_eq!(blocks.completed(3, 1), 0..1);
        assert_eq!(blocks.completed(4, 3), 1..1);
        assert_eq!(blocks.completed(5, 8), 1..3);
        assert_eq!([0, 3, 4, 7, 8, 9].map(|len| blocks.first_held(len)), [0, 0, 0, 0, 4, 4]);
        assert_eq!(blocks.pooled(0), [(0, 1), (1, 1), (2, 1), (3, 1)]);
        assert_eq!(blocks.pooled(1)[0], (0, 0));
        // every position from the first held one on is all that later entries need
        for overlap in [false, true] {
            let blocks = Blocks { overlap, ..blocks };
            for len in 0..30 {
                let next = len / 4;
                let needed = blocks.pooled(next).iter().map(|(position, _)| *position).min().unwrap();
                assert_eq!(blocks.first_held(len), needed, "{len}");
            }
        }
    }

    #[test]
    fn a_gate_that_can_not_be_bounded_says_so() {
        let pooled = pool(&[(1e9, 1.0), (1e9, 2.0)], &contract());
        assert_eq!(pooled.error, f64::INFINITY);
    }
}
