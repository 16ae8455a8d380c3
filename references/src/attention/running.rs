//! Softmax attention of a block of query vectors over a list of tokens, a tile at a time, with running maxima.

use super::kernel::{
    LANES, MAX_TOKENS, POWERS, STEP, WIDTH, add_powers, add_spread, add_values, products, raise, weigh,
};
use super::plain::{Element, Problem};
use crate::moments::{RIVAL_GAP, length};
use std::ops::Range;

/// Tokens of a tile.
const TILE: usize = MAX_TOKENS;

/// Query vectors that read the same KV head, packed for the kernels.
pub(super) struct Block {
    /// The KV head.
    pub(super) kv_head: usize,
    /// `(row, head)` of each vector.
    pub(super) states: Vec<(usize, usize)>,
    /// Panels of eight vectors over the dimensions; vectors beyond the states are zero.
    queries: Vec<f64>,
    /// `[vectors]`: `|scale|·‖q‖`.
    query_size: Vec<f64>,
}

impl Block {
    pub(super) fn new<T: Element>(problem: &Problem<T>, kv_head: usize, states: Vec<(usize, usize)>) -> Self {
        let vectors = states.len().next_multiple_of(LANES);
        let (mut queries, mut query_size) = (vec![0.0; vectors * problem.qk_dim], vec![0.0; vectors]);
        for (vector, (row, head)) in states.iter().enumerate() {
            let query = problem.query_at(*row, *head);
            query_size[vector] = problem.scale.abs() * length(query);
            for (d, q) in query.iter().enumerate() {
                queries[(vector / LANES * problem.qk_dim + d) * LANES + vector % LANES] = (*q).into();
            }
        }
        Self { kv_head, states, queries, query_size }
    }

    /// Vectors, padding included.
    pub(super) fn vectors(&self) -> usize {
        self.query_size.len()
    }
}

/// What is kept of the tokens seen so far; sums are relative to the running maximum.
#[derive(Debug, Clone)]
pub(super) struct Running {
    /// Length of a value, padded.
    pub(super) width: usize,
    /// `[vectors]`: largest score; −inf before the first visible token.
    pub(super) max: Vec<f64>,
    /// `[vectors]`: `Σ e^(s − max)`.
    pub(super) sum: Vec<f64>,
    /// `[states][width]`: `Σ e^(s − max)·v`.
    pub(super) out: Vec<f64>,
    /// What a bound needs beside.
    pub(super) moments: Option<RunningMoments>,
}

/// Further sums; see [`crate::moments::Part`].
#[derive(Debug, Clone)]
pub(super) struct RunningMoments {
    /// `[POWERS][vectors]`.
    pub(super) powers: Vec<f64>,
    /// `[states][width]`: `Σ e^(s − max)·|v|`.
    pub(super) abs: Vec<f64>,
    /// `[states][width]`: `Σ e^(s − max)·v²`.
    pub(super) square: Vec<f64>,
    /// `[vectors]`: smallest score.
    pub(super) min: Vec<f64>,
    /// `[vectors]`: largest size of a token.
    pub(super) max_size: Vec<f64>,
    /// `[vectors]`: position and size of the token with the largest score.
    pub(super) peak: Vec<(usize, f64)>,
    /// `[vectors]`: largest size of a rival; negative without any. Tokens that were rivals of an earlier, smaller
    /// maximum may be counted too: the bound gets no tighter by it, and stays a bound.
    pub(super) rival: Vec<f64>,
}

impl Running {
    pub(super) fn new(block: &Block, v_dim: usize, with_moments: bool) -> Self {
        let (vectors, states) = (block.vectors(), block.states.len());
        let width = v_dim.next_multiple_of(WIDTH);
        let moments = with_moments.then(|| RunningMoments {
            powers: vec![0.0; POWERS * vectors],
            abs: vec![0.0; states * width],
            square: vec![0.0; states * width],
            min: vec![f64::INFINITY; vectors],
            max_size: vec![0.0; vectors],
            peak: vec![(0, 0.0); vectors],
            rival: vec![-1.0; vectors],
        });
        Self {
            width,
            max: vec![f64::NEG_INFINITY; vectors],
            sum: vec![0.0; vectors],
            out: vec![0.0; states * width],
            moments,
        }
    }

    /// Adds what another list of tokens left. Both took moments, or neither.
    pub(super) fn join(&mut self, other: &Self) {
        for vector in 0..self.max.len() {
            if other.max[vector] == f64::NEG_INFINITY {
                continue;
            }
            let max = self.max[vector].max(other.max[vector]);
            let (own, others) = ((self.max[vector] - max).exp(), (other.max[vector] - max).exp());
            if let (Some(moments), Some(others)) = (&mut self.moments, &other.moments) {
                moments.join_peak(others, vector, other.max[vector] - self.max[vector]);
            }
            self.each_sum(vector, Some(other), |to, from| *to = *to * own + from * others);
            self.max[vector] = max;
        }
    }

    /// Applies `f` to every sum of a vector, beside the same sum of `other` (zero without one).
    fn each_sum(&mut self, vector: usize, other: Option<&Self>, f: impl Fn(&mut f64, f64)) {
        let vectors = self.max.len();
        let row = vector * self.width..(vector + 1) * self.width;
        let each = |to: &mut [f64], from: Option<&[f64]>| match from {
            Some(from) => to.iter_mut().zip(from).for_each(|(to, from)| f(to, *from)),
            None => to.iter_mut().for_each(|to| f(to, 0.0)),
        };
        f(&mut self.sum[vector], other.map_or(0.0, |other| other.sum[vector]));
        if row.end <= self.out.len() {
            each(&mut self.out[row.clone()], other.map(|other| &other.out[row.clone()]));
        }
        if let Some(moments) = &mut self.moments {
            let others = other.and_then(|other| other.moments.as_ref());
            for index in (0..POWERS).map(|power| power * vectors + vector) {
                f(&mut moments.powers[index], others.map_or(0.0, |others| others.powers[index]));
            }
            if row.end <= moments.abs.len() {
                each(&mut moments.abs[row.clone()], others.map(|others| &others.abs[row.clone()]));
                each(&mut moments.square[row.clone()], others.map(|others| &others.square[row.clone()]));
            }
        }
    }
}

impl RunningMoments {
    /// Takes the peak and the rivals of another list, whose maximum is `ahead` above this one's.
    fn join_peak(&mut self, other: &Self, vector: usize, ahead: f64) {
        self.min[vector] = self.min[vector].min(other.min[vector]);
        self.max_size[vector] = self.max_size[vector].max(other.max_size[vector]);
        let (own, others) = (self.rival[vector], other.rival[vector]);
        self.rival[vector] = if ahead > RIVAL_GAP {
            others
        } else if ahead < -RIVAL_GAP {
            own
        } else {
            let loser = if ahead > 0.0 { self.peak[vector].1 } else { other.peak[vector].1 };
            own.max(others).max(loser)
        };
        if ahead > 0.0 {
            self.peak[vector] = other.peak[vector];
        }
    }

    /// Notes the scores of a tile before they become weights; −inf is masked.
    fn note(&mut self, max: &[f64], tile: &Tile, positions: &[usize], query_size: &[f64]) {
        for (vector, (max, query_size)) in max.iter().zip(query_size).enumerate() {
            let mut max = *max;
            for ((score, position), key_size) in tile.scores_of(vector).zip(positions).zip(&tile.key_size) {
                if score == f64::NEG_INFINITY {
                    continue;
                }
                let size = key_size * query_size;
                self.min[vector] = self.min[vector].min(score);
                self.max_size[vector] = self.max_size[vector].max(size);
                if score > max {
                    let near = score - max <= RIVAL_GAP;
                    self.rival[vector] =
                        if near { self.rival[vector].max(self.peak[vector].1) } else { -1.0 };
                    self.peak[vector] = (*position, size);
                    max = score;
                } else if score >= max - RIVAL_GAP {
                    self.rival[vector] = self.rival[vector].max(size);
                }
            }
        }
    }
}

/// Buffers of one tile. Rows beyond the last token weigh nothing.
struct Tile {
    /// Tokens, rounded up to whole steps.
    rows: usize,
    /// `[rows][qk_dim]`.
    keys: Vec<f64>,
    /// Whether sizes of keys are wanted.
    sized: bool,
    /// `[rows]`: `‖k‖`.
    key_size: Vec<f64>,
    /// Panels over the rows.
    values: Vec<f64>,
    /// Panels of what is made of the values.
    derived: Vec<f64>,
    /// Panels of vectors over the rows.
    scores: Vec<f64>,
    /// As the scores.
    weights: Vec<f64>,
}

impl Tile {
    fn new(sized: bool) -> Self {
        let empty = Vec::new;
        Self {
            rows: 0,
            sized,
            keys: empty(),
            key_size: empty(),
            values: empty(),
            derived: empty(),
            scores: empty(),
            weights: empty(),
        }
    }

    /// The scores of one vector, token by token.
    fn scores_of(&self, vector: usize) -> impl Iterator<Item = f64> {
        let panel = &self.scores[vector / LANES * self.rows * LANES..][..self.rows * LANES];
        panel.iter().skip(vector % LANES).step_by(LANES).copied()
    }

    /// Widens the tokens at `positions`, whose indices begin at `first`, and scores them; masked scores are −inf.
    fn load<T: Element>(
        &mut self,
        problem: &Problem<T>,
        block: &Block,
        positions: &[usize],
        first: usize,
        seen: &[Range<usize>],
    ) {
        self.rows = positions.len().next_multiple_of(STEP);
        self.keys.resize(self.rows * problem.qk_dim, 0.0);
        self.key_size.resize(self.rows, 0.0);
        self.values.resize(self.rows * problem.v_dim.next_multiple_of(WIDTH), 0.0);
        self.scores.resize(self.rows * block.vectors(), 0.0);
        let mut poisoned = Vec::new();
        for (token, &position) in positions.iter().enumerate() {
            let key = problem.key_at(position, block.kv_head);
            for (to, from) in self.keys[token * problem.qk_dim..].iter_mut().zip(key) {
                *to = (*from).into();
            }
            if self.sized {
                self.key_size[token] = length(key);
            }
            if !self.load_value(problem.value_at(position, block.kv_head), token) {
                poisoned.push(token);
            }
        }
        products(&self.keys, &block.queries, problem.qk_dim, &mut self.scores);
        self.scores.iter_mut().for_each(|score| *score *= problem.scale);
        if let Some(cap) = problem.softcap {
            self.scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
        for token in poisoned {
            self.score_all(token, f64::NAN);
        }
        for token in positions.len()..self.rows {
            self.score_all(token, f64::NEG_INFINITY);
        }
        let last = first + positions.len();
        for (vector, seen) in
            seen.iter().enumerate().filter(|(_, seen)| seen.start > first || seen.end < last)
        {
            for token in (0..positions.len()).filter(|token| !seen.contains(&(first + token))) {
                self.scores[(vector / LANES * self.rows + token) * LANES + vector % LANES] =
                    f64::NEG_INFINITY;
            }
        }
    }

    /// Widens a value into the panels; whether it is finite. One that isn't is left zero: the rows that see the
    /// token get a NaN by its score, and the others must not be touched by it.
    fn load_value<T: Element>(&mut self, value: &[T], token: usize) -> bool {
        let mut not_a_number = 0.0;
        for (panel, columns) in value.chunks(WIDTH).enumerate() {
            let start = (panel * self.rows + token) * WIDTH;
            for (to, from) in self.values[start..start + WIDTH].iter_mut().zip(columns) {
                *to = (*from).into();
                not_a_number += *to * 0.0;
            }
        }
        if not_a_number == 0.0 {
            return true;
        }
        for panel in 0..value.len().div_ceil(WIDTH) {
            self.values[(panel * self.rows + token) * WIDTH..][..WIDTH].fill(0.0);
        }
        false
    }

    /// Gives a token the same score for every vector.
    fn score_all(&mut self, token: usize, score: f64) {
        for panel in self.scores.chunks_exact_mut(self.rows * LANES) {
            panel[token * LANES..][..LANES].fill(score);
        }
    }

    /// Makes weights of the scores, adding them to `sum`. A maximum of −inf, of a vector that has seen nothing,
    /// is not subtracted.
    fn weigh(&mut self, max: &[f64], sum: &mut [f64]) {
        let max: Vec<f64> =
            max.iter().map(|max| if *max == f64::NEG_INFINITY { 0.0 } else { *max }).collect();
        self.weights.resize(self.scores.len(), 0.0);
        weigh(&self.scores, self.rows, &max, sum, &mut self.weights);
    }

    /// Adds `Σ weight·f(value)` to `out`.
    fn add_derived(&mut self, f: impl Fn(f64) -> f64, width: usize, out: &mut [f64]) {
        self.derived.clear();
        self.derived.extend(self.values.iter().map(|v| f(*v)));
        add_values(&self.weights, &self.derived, self.rows, width, out);
    }
}

/// Attends to the tokens `positions[tokens]`, of which vector `i` sees those whose index lies in `seen[i]`.
pub(super) fn run<T: Element>(
    problem: &Problem<T>,
    block: &Block,
    positions: &[usize],
    tokens: Range<usize>,
    seen: &[Range<usize>],
    with_moments: bool,
) -> Running {
    let mut running = Running::new(block, problem.v_dim, with_moments);
    let mut tile = Tile::new(with_moments);
    for first in tokens.clone().step_by(TILE) {
        let positions = &positions[first..tokens.end.min(first + TILE)];
        tile.load(problem, block, positions, first, seen);
        running.take(block, &mut tile, positions);
    }
    running
}

impl Running {
    /// Adds a scored tile.
    fn take(&mut self, block: &Block, tile: &mut Tile, positions: &[usize]) {
        if let Some(moments) = &mut self.moments {
            moments.note(&self.max, tile, positions, &block.query_size);
        }
        self.raise(tile);
        tile.weigh(&self.max, &mut self.sum);
        add_values(&tile.weights, &tile.values, tile.rows, self.width, &mut self.out);
        if let Some(moments) = &mut self.moments {
            let Tile { weights, scores, key_size, .. } = &*tile;
            add_powers(weights, scores, key_size, &block.query_size, &mut moments.powers);
            tile.add_derived(f64::abs, self.width, &mut moments.abs);
            tile.add_derived(|v| v * v, self.width, &mut moments.square);
        }
    }

    /// Raises the running maxima to those of a tile, and scales the sums down with them.
    fn raise(&mut self, tile: &Tile) {
        let mut raised = self.max.clone();
        raise(&tile.scores, tile.rows, &mut raised);
        for (vector, raised) in raised.into_iter().enumerate() {
            let before = std::mem::replace(&mut self.max[vector], raised);
            if raised > before && before != f64::NEG_INFINITY {
                let factor = (before - raised).exp();
                self.each_sum(vector, None, |sum, _| *sum *= factor);
            }
        }
    }
}

/// `Σ p·|v − out|` over the tokens `positions[tokens]`, `[states][v_dim padded]`, `p = e^(s − lse)`; a second
/// pass.
pub(super) fn spread<T: Element>(
    problem: &Problem<T>,
    block: &Block,
    positions: &[usize],
    tokens: Range<usize>,
    seen: &[Range<usize>],
    centre: &Centre,
) -> Vec<f64> {
    let width = problem.v_dim.next_multiple_of(WIDTH);
    let mut spread = vec![0.0; block.states.len() * width];
    let mut tile = Tile::new(false);
    let mut unused = vec![0.0; block.vectors()];
    for first in tokens.clone().step_by(TILE) {
        let positions = &positions[first..tokens.end.min(first + TILE)];
        tile.load(problem, block, positions, first, seen);
        tile.weigh(&centre.lse, &mut unused);
        for (vector, spread) in spread.chunks_exact_mut(width).enumerate() {
            let centre = &centre.out[vector * width..(vector + 1) * width];
            let panel = &tile.weights[vector / LANES * tile.rows * LANES..][..tile.rows * LANES];
            add_spread(panel, vector % LANES, &tile.values, centre, spread);
        }
    }
    spread
}

/// What the second pass is taken about.
pub(super) struct Centre {
    /// `[vectors]`: the row's LSE; for vectors beyond the states any number.
    pub(super) lse: Vec<f64>,
    /// `[states][width]`: the row's output.
    pub(super) out: Vec<f64>,
}
