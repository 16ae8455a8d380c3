//! Moments of the softmax weights: what a certified bound needs to know of the data, for any rounding contract.
//!
//! A bound depends on the contract that an engine declares, so it cannot be stored beside an expected value. The
//! sums below can: they are taken once, over tokens `i` with probability `p_i`, score `s_i`, value `v_i` and
//! `a_i = |scale|·‖q‖·‖k_i‖`, the size of the products that a score is summed from.

use crate::attention::plain::{Element, Functions, Problem, score};
use crate::attention::streaming;
use crate::split::Split;
use crate::visibility::Visible;
use shardcheck_formats::contract::Contract;
use thiserror::Error;

/// Highest total power of `a` and `|s|` that [`Part::powers`] holds.
pub const MAX_POWER: usize = 4;
/// How close to a part's largest score another one counts as a rival for the running maximum.
pub const RIVAL_GAP: f64 = 1.0 / 16.0;

/// Why no bound can be stated: such a case is inconclusive, never passed.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum Underivable {
    /// A visible key or value, or the query, is NaN or infinite.
    #[error("row {row}, head {head}: a visible input is NaN or infinite; a bound needs finite inputs")]
    NonFinite {
        /// Query row.
        row: usize,
        /// Query head.
        head: usize,
    },
    /// The relative error that the contract allows on the softmax weights reaches 1.
    #[error(
        "row {row}, head {head}: the contract allows softmax weights to be wrong by a factor of 1 + {weight_error:.3}; \
         lower u_acc, kexp or lse_rel, or use smaller scores"
    )]
    WeightError {
        /// Query row.
        row: usize,
        /// Query head.
        head: usize,
        /// Mean relative error of the weights.
        weight_error: f64,
    },
    /// The addition chain is so long that its rounding error has no bound.
    #[error(
        "{additions} additions at unit roundoff {unit_roundoff:e} have no error bound; declare the depth of the sum"
    )]
    TooDeep {
        /// Length of the chain.
        additions: usize,
        /// Unit roundoff of an addition.
        unit_roundoff: f64,
    },
    /// An intermediate format may overflow.
    #[error("row {row}, head {head}: a partial output may exceed the largest value of its format")]
    Overflow {
        /// Query row.
        row: usize,
        /// Query head.
        head: usize,
    },
}

/// The tokens of one part (a rank or a chunk) in one state. Every sum runs over the part's own softmax (`Σ p = 1`
/// within the part); [`Part::weight`] turns sums of parts into sums of the row.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Visible tokens.
    pub tokens: usize,
    /// Natural log-sum-exp over the part's own tokens; −inf without any.
    pub lse: f64,
    /// `g`, the part's share of the row's softmax: `e^(lse − row's lse)`.
    pub weight: f64,
    /// Largest `p`.
    pub peak: f64,
    /// `a` of that token.
    pub peak_a: f64,
    /// Largest `a` among *other* tokens whose score is within [`RIVAL_GAP`] of the largest; `None` without any.
    pub rival_a: Option<f64>,
    /// Largest `a`.
    pub max_a: f64,
    /// `powers[i][j] = Σ p·a^i·|s|^j` for `i + j ≤ 4`, zero elsewhere.
    pub powers: [[f64; MAX_POWER + 1]; MAX_POWER + 1],
    /// `[v_dim]`: the part's own attention output `o_r = Σ p·v`; zero without tokens.
    pub out: Vec<f64>,
    /// `[v_dim]`: `Σ p·|v|`.
    pub abs: Vec<f64>,
    /// `[v_dim]`: `Σ p·v²`.
    pub square: Vec<f64>,
    /// `[v_dim]`: `Σ |v|`, without weights.
    pub sum_abs: Vec<f64>,
    /// `[v_dim]`: the value of the token with the largest `p`; zero without tokens.
    pub peak_value: Vec<f64>,
    /// What the probable bound needs; only [`Moments::collect_with`] takes it.
    pub statistics: Option<Statistics>,
}

/// Second moments of a part's rounding errors, if these are independent. The token with the largest `p` is left
/// out of the sums.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    /// `[v_dim]`: `Σ p²·v²`.
    pub square: Vec<f64>,
    /// `[v_dim]`: `Σ (Σ p·|v|)²`, the inner sum over tokens of equal score, whose errors are equal too.
    pub class_square: Vec<f64>,
    /// `Σ p²`.
    pub weight_square: f64,
    /// Distinct scores, rounded to 1e−9, over tokens.
    pub distinct: f64,
    /// Standard deviation of the scores under `p`.
    pub score_deviation: f64,
}

impl Part {
    /// A part without tokens.
    pub fn empty(v_dim: usize) -> Self {
        Self {
            tokens: 0,
            lse: f64::NEG_INFINITY,
            weight: 0.0,
            peak: 0.0,
            peak_a: 0.0,
            rival_a: None,
            max_a: 0.0,
            powers: [[0.0; MAX_POWER + 1]; MAX_POWER + 1],
            out: vec![0.0; v_dim],
            abs: vec![0.0; v_dim],
            square: vec![0.0; v_dim],
            sum_abs: vec![0.0; v_dim],
            peak_value: vec![0.0; v_dim],
            statistics: None,
        }
    }
}

/// One state: a query row and head.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Visible tokens, over all parts.
    pub tokens: usize,
    /// Natural log-sum-exp, a sink included.
    pub lse: f64,
    /// Largest `|s|`, a sink included.
    pub max_abs_score: f64,
    /// Largest less smallest score, a sink included.
    pub score_range: f64,
    /// The sink's logit and its probability.
    pub sink: Option<(f64, f64)>,
    /// `[v_dim]`: the attention output.
    pub out: Vec<f64>,
    /// Sums about the output: a second pass over the values, which only a normaliser of rounded probabilities
    /// needs.
    pub centred: Option<Centred>,
    /// `[parts]`.
    pub parts: Vec<Part>,
}

/// Sums about the output, `[v_dim]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Centred {
    /// `Σ p·|v − out|` over all tokens, `p` being the row's.
    pub all: Vec<f64>,
    /// The same over the largest token of each part: `Σ weight·peak·|peak_value − out|`.
    pub peaks: Vec<f64>,
}

impl Centred {
    /// From `Σ p·|v − out|`, `[v_dim]`.
    pub(crate) fn of(state: &State, all: Vec<f64>) -> Self {
        let peaks = total(&state.parts, state.out.len(), |part, d| {
            part.weight * part.peak * (part.peak_value[d] - state.out[d]).abs()
        });
        Self { all, peaks }
    }
}

/// How often the values are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passes {
    /// Once: all that a contract without a rounded normaliser needs; with one, a wider bound stands in.
    One,
    /// Twice, the second time for [`State::centred`].
    Two,
}

impl Passes {
    /// What the tightest bound under `contract` needs.
    pub fn needed_by(contract: &Contract) -> Self {
        if contract.l_rounded { Self::Two } else { Self::One }
    }
}

/// The moments of a whole problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    /// Query rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Length of a key.
    pub qk_dim: usize,
    /// Length of a value.
    pub v_dim: usize,
    /// Soft cap of the scores.
    pub softcap: Option<f64>,
    /// Number of parts.
    pub parts: usize,
    /// `[rows, heads]`.
    pub states: Vec<State>,
}

impl Moments {
    /// Takes the moments of every state, by the fast kernels on all cores; agrees with [`Self::collect_with`] to
    /// 1e-12, except that more tokens may count as rivals.
    ///
    /// # Errors
    /// [`Underivable::NonFinite`].
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn collect<T: Element>(
        problem: &Problem<T>,
        split: Split,
        visible: &[Visible],
        passes: Passes,
    ) -> Result<Self, Underivable> {
        let states = streaming::measure(problem, split, visible, passes == Passes::Two)?;
        Ok(Self::of_states(problem, split.parts(), states))
    }

    /// The definition of the moments, both passes, with elementary functions of choice; every sum runs in the
    /// order of positions.
    ///
    /// # Errors
    /// [`Underivable::NonFinite`].
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn collect_with<F: Functions, T: Element>(
        problem: &Problem<T>,
        split: Split,
        visible: &[Visible],
    ) -> Result<Self, Underivable> {
        problem.check();
        problem.check_visible(visible);
        let norms = KeyNorms::of(problem, visible);
        let mut states = Vec::with_capacity(visible.len() * problem.heads);
        for (row, seen) in visible.iter().enumerate() {
            let positions = split.positions(seen);
            for head in 0..problem.heads {
                states.push(state::<F, T>(problem, &norms, &positions, row, head)?);
            }
        }
        Ok(Self::of_states(problem, split.parts(), states))
    }

    pub(crate) fn of_states<T: Element>(problem: &Problem<T>, parts: usize, states: Vec<State>) -> Self {
        Self {
            rows: problem.rows(),
            heads: problem.heads,
            qk_dim: problem.qk_dim,
            v_dim: problem.v_dim,
            softcap: problem.softcap,
            parts,
            states,
        }
    }
}

/// Euclidean lengths of the keys, `[tokens, kv_heads]`, up to the last visible token.
pub(crate) struct KeyNorms {
    norms: Vec<f64>,
    kv_heads: usize,
}

impl KeyNorms {
    pub(crate) fn of<T: Element>(problem: &Problem<T>, visible: &[Visible]) -> Self {
        let end = visible.iter().map(Visible::end).max().unwrap_or(0);
        let norms = problem.key[..end * problem.kv_heads * problem.qk_dim]
            .chunks_exact(problem.qk_dim)
            .map(length::<T>);
        Self { norms: norms.collect(), kv_heads: problem.kv_heads }
    }

    pub(crate) fn at(&self, token: usize, kv_head: usize) -> f64 {
        self.norms[token * self.kv_heads + kv_head]
    }
}

/// Euclidean length, by eight sums side by side.
pub(crate) fn length<T: Element>(vector: &[T]) -> f64 {
    let (chunks, rest) = vector.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            let x: f64 = (*x).into();
            *sum += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        let x: f64 = (*x).into();
        *sum += x * x;
    }
    sums.iter().sum::<f64>().sqrt()
}

/// Score and size of one token.
struct Scored {
    position: usize,
    score: f64,
    size: f64,
}

fn state<F: Functions, T: Element>(
    problem: &Problem<T>,
    norms: &KeyNorms,
    positions: &[Vec<usize>],
    row: usize,
    head: usize,
) -> Result<State, Underivable> {
    let kv_head = problem.kv_head(head);
    let query_size = problem.scale.abs() * length(problem.query_at(row, head));
    let scored: Vec<Vec<Scored>> = positions
        .iter()
        .map(|part| {
            part.iter()
                .map(|&position| Scored {
                    position,
                    score: score::<F, T>(problem, row, head, position),
                    size: query_size * norms.at(position, kv_head),
                })
                .collect()
        })
        .collect();
    let sink = problem.sink.map(|sink| sink[head]);
    let all = || scored.iter().flatten().map(|token| token.score).chain(sink);
    if scored.iter().flatten().any(|token| !(token.score.is_finite() && token.size.is_finite()))
        || sink.is_some_and(|logit| !logit.is_finite())
    {
        return Err(Underivable::NonFinite { row, head });
    }
    let mut parts = Vec::with_capacity(scored.len());
    for tokens in &scored {
        parts.push(part::<F, T>(problem, kv_head, tokens));
    }
    if parts.iter().any(|part| part.square.iter().any(|x| !x.is_finite())) {
        return Err(Underivable::NonFinite { row, head });
    }
    let lse = weigh::<F>(&mut parts, sink);
    let mut state = State {
        tokens: scored.iter().map(Vec::len).sum(),
        lse,
        max_abs_score: all().map(f64::abs).fold(0.0, f64::max),
        score_range: (all().fold(f64::NEG_INFINITY, f64::max) - all().fold(f64::INFINITY, f64::min)).max(0.0),
        sink: sink.map(|logit| (logit, F::exp(logit - lse))),
        out: total(&parts, problem.v_dim, |part, d| part.weight * part.out[d]),
        centred: None,
        parts,
    };
    let all = spread::<F, T>(problem, kv_head, &scored, &state);
    state.centred = Some(Centred::of(&state, all));
    Ok(state)
}

/// Gives each part its weight, a sink taking its share; returns the row's LSE.
pub(crate) fn weigh<F: Functions>(parts: &mut [Part], sink: Option<f64>) -> f64 {
    let all = || parts.iter().map(|part| part.lse).chain(sink);
    let largest = all().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return largest;
    }
    let sum: f64 = all().map(|lse| F::exp(lse - largest)).sum();
    for part in parts {
        part.weight = F::exp(part.lse - largest) / sum;
    }
    largest + F::ln(sum)
}

/// `Σ_parts f(part, d)` for each dimension.
pub(crate) fn total(parts: &[Part], v_dim: usize, f: impl Fn(&Part, usize) -> f64) -> Vec<f64> {
    (0..v_dim).map(|d| parts.iter().map(|part| f(part, d)).sum()).collect()
}

fn part<F: Functions, T: Element>(problem: &Problem<T>, kv_head: usize, tokens: &[Scored]) -> Part {
    let mut part = Part::empty(problem.v_dim);
    let Some(mut peak) = tokens.first() else {
        return part;
    };
    for token in tokens {
        if token.score > peak.score {
            peak = token;
        }
    }
    let sum: f64 = tokens.iter().map(|token| F::exp(token.score - peak.score)).sum();
    for token in tokens {
        let p = F::exp(token.score - peak.score) / sum;
        add_powers(&mut part.powers, p, token.size, token.score.abs());
        part.max_a = part.max_a.max(token.size);
        for (d, v) in problem.value_at(token.position, kv_head).iter().enumerate() {
            let v: f64 = (*v).into();
            part.out[d] += p * v;
            part.abs[d] += p * v.abs();
            part.square[d] += p * v * v;
            part.sum_abs[d] += v.abs();
        }
    }
    part.tokens = tokens.len();
    part.lse = peak.score + F::ln(sum);
    part.peak = 1.0 / sum;
    part.peak_a = peak.size;
    part.rival_a = tokens
        .iter()
        .filter(|token| token.position != peak.position && token.score >= peak.score - RIVAL_GAP)
        .map(|token| token.size)
        .reduce(f64::max);
    for (to, from) in part.peak_value.iter_mut().zip(problem.value_at(peak.position, kv_head)) {
        *to = (*from).into();
    }
    part.statistics = Some(statistics::<F, T>(problem, kv_head, tokens, peak));
    part
}

fn statistics<F: Functions, T: Element>(
    problem: &Problem<T>,
    kv_head: usize,
    tokens: &[Scored],
    peak: &Scored,
) -> Statistics {
    let sum: f64 = tokens.iter().map(|token| F::exp(token.score - peak.score)).sum();
    let p = |token: &Scored| F::exp(token.score - peak.score) / sum;
    let class = |token: &Scored| (token.score * 1e9).round();
    let mut ordered: Vec<&Scored> = tokens.iter().collect();
    ordered.sort_by(|a, b| class(a).total_cmp(&class(b)));
    let none = || vec![0.0; problem.v_dim];
    let (mut square, mut class_square, mut weight_square, mut classes) = (none(), none(), 0.0, 0);
    for members in ordered.chunk_by(|a, b| class(a) == class(b)) {
        let mut inner = none();
        for token in members.iter().filter(|token| token.position != peak.position) {
            weight_square += p(token) * p(token);
            for (d, v) in problem.value_at(token.position, kv_head).iter().enumerate() {
                let term = p(token) * Into::<f64>::into(*v).abs();
                square[d] += term * term;
                inner[d] += term;
            }
        }
        class_square.iter_mut().zip(inner).for_each(|(to, inner)| *to += inner * inner);
        classes += 1;
    }
    let mean: f64 = tokens.iter().map(|token| p(token) * token.score).sum();
    let variance: f64 = tokens.iter().map(|token| p(token) * (token.score - mean).powi(2)).sum();
    Statistics {
        square,
        class_square,
        weight_square,
        distinct: f64::from(classes) / tokens.len() as f64,
        score_deviation: variance.sqrt(),
    }
}

/// Adds `p·a^i·s^j` to every power.
pub(crate) fn add_powers(powers: &mut [[f64; MAX_POWER + 1]; MAX_POWER + 1], p: f64, a: f64, s: f64) {
    let mut by_a = p;
    for (i, row) in powers.iter_mut().enumerate() {
        let mut term = by_a;
        for power in &mut row[..=MAX_POWER - i] {
            *power += term;
            term *= s;
        }
        by_a *= a;
    }
}

/// `Σ p·|v − out|` over all tokens.
fn spread<F: Functions, T: Element>(
    problem: &Problem<T>,
    kv_head: usize,
    scored: &[Vec<Scored>],
    state: &State,
) -> Vec<f64> {
    let mut all = vec![0.0; problem.v_dim];
    for token in scored.iter().flatten() {
        let p = F::exp(token.score - state.lse);
        for ((sum, v), out) in all.iter_mut().zip(problem.value_at(token.position, kv_head)).zip(&state.out) {
            *sum += p * (Into::<f64>::into(*v) - out).abs();
        }
    }
    all
}

#[cfg(test)]
mod tests;
