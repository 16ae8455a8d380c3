//! The delta rule of one head, and how far 32-bit arithmetic in any published order may be from it.
//!
//! Orders: token by token, and chunks of up to C tokens, in which the updates `w_t = b_t(v_t − k_tᵀ(…))` solve a triangular system, by
//! substitution or by its inverse, over decays that are exponentials of differences of a running sum G of g.
//!
//! **Propagation.** Let `Ŝ` be the state that exact k and exact decays give to the updates ŵ that an engine computed. With
//! `ŵ_t = b_t(v_t − k_tᵀ D_t Ŝ_{t−1}) + ε_t`, a column e of `Ŝ − S` obeys `e_t = (I − b k kᵀ) D e_{t−1} + k ε_t`. Since `0 ≤ b ≤ 1` and
//! `|k| ≤ 1`, its length obeys `|e_t| ≤ max(exp g)·|e_{t−1}| + |k||ε_t|`: errors fade as the state does and never grow.
//!
//! **Local errors.** A product that an engine evaluates for a state's element is at most `H = |Ŝ₀|exp(G) + Σ(|k_s| + Δk_s)|ŵ_s|exp(G_t −
//! G_s)` over the chunk, of which `A`, without Δk, is the exact one's. Exponentials of up to two differences of G, each within
//! `4(ΣΔg + (γ(C) + 4u)|G|)` in the exponent, and 2·kexp ulp give a factor 1 + ρ for each channel; sums in any order another, 1 + γ(K + C + 6).
//! So `Δp = Σ_i (|k| + Δk)(1 + ρ)(1 + γ)H − |k|A`, and `ε = Δb|v − p| + (b + Δb)(Δv + Δp) + …`. An explicit inverse X of the system T adds,
//! to first order, `3γ(|T||X||c|)_t` for its right side c. A stored state, and `core = Ŝᵀq`, are evaluated in the same way. What is
//! below the smallest normal number may be flushed to 0.

use super::{Arithmetic, Near};
use crate::bound::{U32, gamma};

/// Smallest normal number of binary32.
const FLUSHED: f64 = f32::MIN_POSITIVE as f64;

/// What one head gets of a token.
#[derive(Debug, Clone)]
pub struct HeadToken {
    /// `[K]`, normalised and scaled.
    pub query: Vec<Near>,
    /// `[K]`, no longer than 1.
    pub key: Vec<Near>,
    /// `[V]`.
    pub value: Vec<Near>,
    /// Log of the decay, `[K]`, none above 0.
    pub decay: Vec<Near>,
    /// b, between 0 and 1.
    pub beta: Near,
}

/// State of one head.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadState {
    /// Exact, `[K, V]`.
    pub value: Vec<f64>,
    /// Bound on the length of a column's error, `[V]`: on the error of each of its elements too.
    pub error: Vec<f64>,
}

impl HeadState {
    /// Before the first token.
    pub fn zero(key_dim: usize, value_dim: usize) -> Self {
        Self { value: vec![0.0; key_dim * value_dim], error: vec![0.0; value_dim] }
    }
}

/// What comes of a token in one head.
#[derive(Debug, Clone)]
pub struct Step {
    /// `[V]`.
    pub core: Vec<Near>,
    /// State behind the token.
    pub state: HeadState,
}

/// The definition: decays the state, updates it, reads it.
pub fn step(
    state: &mut [f64],
    query: &[f64],
    key: &[f64],
    value: &[f64],
    decay: &[f64],
    beta: f64,
) -> Vec<f64> {
    let width = value.len();
    for (index, element) in state.iter_mut().enumerate() {
        *element *= decay[index / width].exp();
    }
    let read = |state: &[f64], by: &[f64], column: usize| -> f64 {
        by.iter().enumerate().map(|(row, x)| x * state[row * width + column]).sum()
    };
    let updates: Vec<f64> =
        (0..width).map(|column| beta * (value[column] - read(state, key, column))).collect();
    for (index, element) in state.iter_mut().enumerate() {
        *element += key[index / width] * updates[index % width];
    }
    (0..width).map(|column| read(state, query, column)).collect()
}

/// Magnitudes of what an engine may evaluate for each element of a state within a chunk, `[K, V]` each.
struct Reach {
    /// With exact keys.
    exact: Vec<f64>,
    /// With an engine's keys.
    seen: Vec<f64>,
    /// What was there before the chunk, decayed.
    before: Vec<f64>,
    /// Without decays: what a flushed one is a factor of.
    whole: Vec<f64>,
}

/// Rows of the triangular system of a chunk and of its inverse, exact.
#[derive(Default)]
struct System {
    /// Keys of the chunk's earlier tokens, decayed to the present one.
    keys: Vec<Vec<f64>>,
    inverse: Vec<Vec<f64>>,
    /// Right sides, in magnitude.
    sides: Vec<Vec<f64>>,
}

impl System {
    /// `(|T||X||c|)_t` for the next token, whose keys are `key` and whose right side is `side`.
    fn extend(&mut self, key: &[f64], beta: f64, side: Vec<f64>) -> Vec<f64> {
        let row: Vec<f64> =
            self.keys.iter().map(|old| beta * old.iter().zip(key).map(|(a, b)| a * b).sum::<f64>()).collect();
        let mut inverse = vec![0.0; row.len() + 1];
        let mut product = vec![0.0; row.len() + 1];
        inverse[row.len()] = 1.0;
        for (factor, earlier) in row.iter().zip(&self.inverse) {
            for (place, element) in earlier.iter().enumerate() {
                inverse[place] -= factor * element;
                product[place] += factor.abs() * element.abs();
            }
        }
        product.iter_mut().zip(&inverse).for_each(|(sum, own)| *sum += own.abs());
        self.keys.push(key.to_vec());
        self.inverse.push(inverse);
        self.sides.push(side);
        let width = self.sides[0].len();
        (0..width)
            .map(|column| product.iter().zip(&self.sides).map(|(factor, side)| factor * side[column]).sum())
            .collect()
    }
}

/// Takes a head through one chunk.
pub fn chunk(start: &HeadState, tokens: &[HeadToken], arithmetic: &Arithmetic) -> Vec<Step> {
    let Some(first) = tokens.first() else { return Vec::new() };
    let (depth, width) = (first.key.len(), first.value.len());
    let u = arithmetic.u_acc.max(U32);
    let gamma = gamma(depth + arithmetic.chunk + 6, u);
    let spread: Vec<f64> =
        (0..depth).map(|row| spread(tokens, row, arithmetic) * (1.0 + gamma) + gamma).collect();
    let known: Vec<f64> =
        start.value.iter().enumerate().map(|(at, x)| x.abs() + start.error[at % width]).collect();
    let mut reach = Reach { exact: known.clone(), seen: known.clone(), before: known.clone(), whole: known };
    let mut system = System::default();
    let mut state = start.clone();
    let mut steps = Vec::new();
    for token in tokens {
        let decays: Vec<f64> = token.decay.iter().map(|g| g.value.exp()).collect();
        for part in [&mut state.value, &mut reach.exact, &mut reach.seen, &mut reach.before] {
            part.iter_mut().enumerate().for_each(|(at, x)| *x *= decays[at / width]);
        }
        system.keys.iter_mut().flat_map(|key| key.iter_mut().zip(&decays)).for_each(|(x, d)| *x *= d);
        let head = Update { token, decays: &decays, spread: &spread, width, gamma };
        head.apply(&mut state, &mut reach, &mut system);
        let core = head.read(&state, &reach);
        steps.push(Step { core, state: state.clone() });
    }
    steps
}

/// ρ of a channel in a chunk: relative error of a product of two exponentials.
fn spread(tokens: &[HeadToken], row: usize, arithmetic: &Arithmetic) -> f64 {
    let own: f64 = tokens.iter().map(|token| token.decay[row].error).sum();
    let sum: f64 = tokens.iter().map(|token| token.decay[row].value.abs()).sum();
    let moved = 4.0 * (own + (gamma(tokens.len(), U32) + 4.0 * U32) * sum);
    moved.exp() * (1.0 + 2.0 * arithmetic.kexp * U32).powi(2) - 1.0
}

/// One token's update of a head.
struct Update<'a> {
    token: &'a HeadToken,
    decays: &'a [f64],
    /// `(1 + ρ)(1 + γ) − 1` of each channel.
    spread: &'a [f64],
    width: usize,
    gamma: f64,
}

impl Update<'_> {
    /// Bound on the error of `Σ by·S` over a column, S as evaluated from its parts.
    fn evaluated(&self, by: &[Near], reach: &Reach, column: usize) -> f64 {
        let of_row = |(row, x): (usize, &Near)| {
            let at = row * self.width + column;
            let size = x.value.abs() + x.error;
            size * (1.0 + self.spread[row]) * reach.seen[at] - x.value.abs() * reach.exact[at]
                + 2.0 * FLUSHED * size * reach.whole[at]
                + 2.0 * FLUSHED
        };
        by.iter().enumerate().map(of_row).sum()
    }

    fn apply(&self, state: &mut HeadState, reach: &mut Reach, system: &mut System) {
        let HeadToken { key, value, beta, .. } = self.token;
        let keys: Vec<f64> = key.iter().map(|k| k.value).collect();
        let length = |parts: &mut dyn Iterator<Item = f64>| parts.map(|x| x * x).sum::<f64>().sqrt();
        let (whole, faded) = (
            length(&mut keys.iter().copied()),
            length(&mut keys.iter().zip(self.decays).map(|(k, d)| k * d)),
        );
        let most = beta.value + beta.error;
        let side = |column: usize| {
            let before = key.iter().enumerate().map(|(row, k)| {
                (k.value.abs() + k.error) * (1.0 + self.spread[row]) * reach.before[row * self.width + column]
            });
            most * (value[column].value.abs() + value[column].error + before.sum::<f64>())
        };
        let inverted = system.extend(&keys, beta.value, (0..self.width).map(side).collect());
        let fades = self.decays.iter().copied().fold(0.0, f64::max);
        let mut updates = Vec::new();
        for column in 0..self.width {
            let read: f64 =
                keys.iter().enumerate().map(|(row, k)| k * state.value[row * self.width + column]).sum();
            let news = value[column].value - read;
            let about = news.abs() + faded * state.error[column];
            let moved = value[column].error + self.evaluated(key, reach, column);
            let moved = moved + U32 * (about + moved);
            let local = beta.error * about
                + most * moved
                + 2.0 * U32 * most * (about + moved)
                + 3.0 * self.gamma * inverted[column];
            let update = beta.value * news;
            let reach = update.abs() + beta.value * faded * state.error[column] + local;
            state.error[column] = fades * state.error[column] + whole * local;
            updates.push((update, reach));
        }
        for (at, element) in state.value.iter_mut().enumerate() {
            let (k, (update, most)) = (key[at / self.width], updates[at % self.width]);
            *element += k.value * update;
            reach.exact[at] += k.value.abs() * most;
            reach.seen[at] += (k.value.abs() + k.error) * most;
            reach.whole[at] += (k.value.abs() + k.error) * most;
        }
        // as if it were stored behind every token: chunks of any engine may end there
        for column in 0..self.width {
            let of_row = |row: usize| {
                let at = row * self.width + column;
                (1.0 + self.spread[row]) * reach.seen[at] - reach.exact[at]
                    + 2.0 * FLUSHED * (1.0 + reach.whole[at])
            };
            state.error[column] += length(&mut (0..self.decays.len()).map(of_row));
        }
    }

    fn read(&self, state: &HeadState, reach: &Reach) -> Vec<Near> {
        let query = &self.token.query;
        let length = query.iter().map(|q| q.value * q.value).sum::<f64>().sqrt();
        (0..self.width)
            .map(|column| {
                let of_row = |(row, q): (usize, &Near)| q.value * state.value[row * self.width + column];
                Near {
                    value: query.iter().enumerate().map(of_row).sum(),
                    error: length * state.error[column] + self.evaluated(query, reach, column),
                }
            })
            .collect()
    }
}
