//! Attention of one head over keys that are not known exactly.

use shardcheck_formats::contract::{Contract, Merge};
use shardcheck_formats::dtype::Dtype;

use crate::bound::{U32, gamma};
use crate::kda::Near;

/// A head of a row.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// `[Dk]`.
    pub query: &'a [Near],
    /// Up-projection `[Dv, Vo]`.
    pub up: &'a [f32],
    /// Width Dv of a latent.
    pub latent: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Ranks that hold parts of the keys.
    pub world: usize,
}

/// `softmax(q·k)·c·W_uv` over all keys, c being the first elements of a key; before the last rounding.
///
/// With `δ` the most that any score moves, by its inputs, its own sum, or the LSE that weighs the rank it lies on, a weight moves by no
/// more than `e^{2δ}`. Since `Σ w(c − out)` is zero, the output then moves by `(e^{2δ} − 1)Σ w|c − out|`, and no farther than the values lie: nothing where one key has all the
/// weight, or all keys of any weight hold the same. What numerator and normaliser do not share (rounded probabilities, sums, partials
/// that are stored and merged) is a relative error `ε` of `Σ w|c|`. Values' own errors count by the largest weight that their token may have.
pub fn attend(head: &Head<'_>, keys: &[&[Near]], contract: &Contract) -> Vec<Near> {
    let scores: Vec<Near> = keys.iter().map(|key| score(head, key, contract)).collect();
    let largest = scores.iter().map(|score| score.value).fold(f64::NEG_INFINITY, f64::max);
    let reach = scores.iter().map(|score| score.value.abs() + score.error).fold(0.0, f64::max);
    let exponentials: Vec<f64> = scores.iter().map(|score| (score.value - largest).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    let weights: Vec<f64> = exponentials.iter().map(|own| own / sum).collect();
    let moved = scores.iter().map(|score| score.error).fold(0.0, f64::max)
        + weighing(keys.len(), reach, head.world, contract);
    let factor = (2.0 * moved).exp();
    let relative = relative(keys.len(), head.world, contract);
    let mixed: Vec<Near> = (0..head.latent)
        .map(|dim| {
            let value: f64 = weights.iter().zip(keys).map(|(w, key)| w * key[dim].value).sum();
            let spread: f64 =
                weights.iter().zip(keys).map(|(w, key)| w * (key[dim].value - value).abs()).sum();
            let own: f64 =
                weights.iter().zip(keys).map(|(w, key)| (w * factor).min(1.0) * key[dim].error).sum();
            let highest = keys.iter().map(|key| key[dim].value.abs() + key[dim].error).fold(0.0, f64::max);
            // a mean stays among what it is a mean of
            let values = || keys.iter().map(|key| (key[dim].value - value).abs());
            let turned = (spread * (factor - 1.0)).min(values().fold(0.0, f64::max));
            let size = (value.abs() + spread + turned + own).min(highest);
            let floor = contract.p_floor * keys.len() as f64 * highest;
            Near { value, error: turned + own + relative * size + floor }
        })
        .collect();
    projected(head, &mixed, contract)
}

/// `s·Σ qk`, in absorbed form: `γ(depth + 2, u_acc)` of the products, and what the errors of both move.
fn score(head: &Head<'_>, key: &[Near], contract: &Contract) -> Near {
    let pairs = || head.query.iter().zip(key);
    let value: f64 = pairs().map(|(q, k)| q.value * k.value).sum();
    let size: f64 = pairs().map(|(q, k)| (q.value.abs() + q.error) * (k.value.abs() + k.error)).sum();
    let moved: f64 =
        pairs().map(|(q, k)| q.value.abs() * k.error + q.error * (k.value.abs() + k.error)).sum();
    let rounding = gamma(contract.depth_for(key.len()) + 2, contract.u_acc.max(U32));
    Near { value: head.scale * value, error: head.scale.abs() * (moved + rounding * size) }
}

/// How far exp and log move the logarithm of a weight: each rescale of a running maximum, each LSE, by its own size.
fn weighing(tokens: usize, reach: f64, world: usize, contract: &Contract) -> f64 {
    let rescales = tokens / contract.tile_min.max(1) + 2;
    let exps = (2.0 * contract.kexp + 2.0) * U32 * (rescales + 2) as f64;
    let size = reach + (tokens as f64).ln() + 1.0;
    let lse = if world > 1 { contract.lse_rel + (2.0 * contract.kexp + 4.0) * U32 } else { 0.0 };
    exps + lse * size + 4.0 * U32 * size
}

/// What numerator and normaliser do not share, relative to `Σ w|c|`.
fn relative(tokens: usize, world: usize, contract: &Contract) -> f64 {
    let depth = contract.depth_for(tokens);
    let sums = gamma(depth, contract.u_acc) + gamma(depth, U32) + 3.0 * U32;
    let rounded = contract.p_dtype.map_or(0.0, Dtype::unit_roundoff);
    let merged = if world > 1 {
        let additions = match contract.merge {
            Merge::AgRsBf16 => gamma(world + 1, Dtype::Bf16.unit_roundoff()),
            Merge::A2a | Merge::AgRsF32 => gamma(world + 3, U32),
        };
        // a partial is stored once in the latent space or behind the projection
        contract.partial.unit_roundoff() + additions
    } else {
        0.0
    };
    (1.0 + sums) * (1.0 + 2.0 * rounded) * (1.0 + merged) * (1.0 + contract.partial.unit_roundoff()) - 1.0
}

fn projected(head: &Head<'_>, mixed: &[Near], contract: &Contract) -> Vec<Near> {
    let width = head.up.len() / mixed.len().max(1);
    let rounding = gamma(contract.depth_for(mixed.len()) + 1, contract.u_acc.max(U32));
    (0..width)
        .map(|column| {
            let own = || mixed.iter().enumerate().map(|(dim, near)| (f64::from(head.up[dim * width + column]), near));
            let value: f64 = own().map(|(w, near)| w * near.value).sum();
            let passed: f64 = own().map(|(w, near)| w.abs() * near.error).sum();
            let size: f64 = own().map(|(w, near)| w.abs() * (near.value.abs() + near.error)).sum();
            Near { value, error: passed + rounding * size }
        })
        .collect()
}
