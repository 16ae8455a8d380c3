//! Attention of one head over keys that are not known exactly.

use shardcheck_formats::contract::Contract;
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
/// A score moves by no more than `δ`, by its inputs, its own sum, and the LSE that weighs the rank it lies on; so a weight `w` ends between
/// `w·e^{−δ} / Σ w·e^{δ}` and `w·e^{δ} / Σ w·e^{−δ}`. Since `Σ w(c − out)` is zero, the output moves by those distances times `|c − out|`, and no
/// farther than the values lie: nothing where one key has all the weight, or all keys of any weight hold the same. What numerator and
/// normaliser do not share (rounded probabilities, sums, partials that are stored and merged) is a relative error `ε` of `Σ w|c|`. Values'
/// own errors count by the largest weights that their tokens may have together.
pub fn attend(head: &Head<'_>, keys: &[&[Near]], contract: &Contract) -> Vec<Near> {
    let scores: Vec<Near> = keys.iter().map(|key| score(head, key, contract)).collect();
    let reach = scores.iter().map(|score| score.value.abs() + score.error).fold(0.0, f64::max);
    let common = weighing(keys.len(), reach, head.world, contract);
    let weights = Weights::of(&scores, common);
    let relative = relative(keys.len(), head.world, contract);
    let mixed: Vec<Near> = (0..head.latent)
        .map(|dim| {
            let value: f64 = weights.exact.iter().zip(keys).map(|(w, key)| w * key[dim].value).sum();
            let apart = || keys.iter().map(|key| (key[dim].value - value).abs());
            let moved = product(&weights.moved, apart());
            // a mean stays among what it is a mean of
            let moved = moved.min(apart().fold(0.0, f64::max));
            let limits = weights.most.iter().zip(keys).map(|(most, key)| (*most, key[dim].error));
            let own = weighed(limits.collect());
            let highest = keys.iter().map(|key| key[dim].value.abs() + key[dim].error).fold(0.0, f64::max);
            let size = (value.abs() + product(&weights.exact, apart()) + moved + own).min(highest);
            let floor = contract.p_floor * keys.len() as f64 * highest;
            Near { value, error: moved + own + relative * size + floor }
        })
        .collect();
    projected(head, &mixed, contract)
}

/// `Σ w·x`, where no weight counts for nothing however large x is.
fn product(weights: &[f64], x: impl Iterator<Item = f64>) -> f64 {
    weights.iter().zip(x).map(|(w, x)| if x > 0.0 { w * x } else { 0.0 }).sum()
}

/// Weights of keys, and what an engine's may be.
struct Weights {
    exact: Vec<f64>,
    /// How far each moves.
    moved: Vec<f64>,
    /// Each at its largest.
    most: Vec<f64>,
}

impl Weights {
    fn of(scores: &[Near], common: f64) -> Self {
        let largest = scores.iter().map(|score| score.value).fold(f64::NEG_INFINITY, f64::max);
        let exponentials: Vec<f64> = scores.iter().map(|score| (score.value - largest).exp()).collect();
        let sum: f64 = exponentials.iter().sum();
        let exact: Vec<f64> = exponentials.iter().map(|own| own / sum).collect();
        let errors = || scores.iter().map(|score| score.error + common);
        let [least, most] = [-1.0, 1.0]
            .map(|side| exact.iter().zip(errors()).map(|(w, e)| w * (side * e).exp()).sum::<f64>());
        let most_of = |(w, error): (&f64, f64)| (w * error.exp() / least).min(1.0);
        let highest: Vec<f64> = exact.iter().zip(errors()).map(most_of).collect();
        let moved = |((w, error), highest): ((&f64, f64), &f64)| {
            let lowest = w * (-error).exp() / most;
            (highest - w).max(w - lowest).max(0.0)
        };
        let moved = exact.iter().zip(errors()).zip(&highest).map(moved).collect();
        Self { exact, moved, most: highest }
    }
}

/// The most that `Σ w·r` can be, of weights that are one together and of which none is beyond its own limit; `(limit, r)` of each.
fn weighed(mut limits: Vec<(f64, f64)>) -> f64 {
    limits.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let (mut left, mut sum) = (1.0f64, 0.0);
    for (limit, error) in limits {
        let weight = left.min(limit);
        // nothing weighs what has no error, nor an error that has no weight
        if weight > 0.0 && error > 0.0 {
            sum += weight * error;
        }
        left -= weight;
    }
    sum
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
        let additions = match contract.merge.rounded_to() {
            Some(dtype) => gamma(world + 1, dtype.unit_roundoff()),
            None => gamma(world + 3, U32),
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
            let own = || {
                mixed.iter().enumerate().map(|(dim, near)| (f64::from(head.up[dim * width + column]), near))
            };
            let value: f64 = own().map(|(w, near)| w * near.value).sum();
            let passed: f64 = own().map(|(w, near)| w.abs() * near.error).sum();
            let size: f64 = own().map(|(w, near)| w.abs() * (near.value.abs() + near.error)).sum();
            Near { value, error: passed + rounding * size }
        })
        .collect()
}
