//! Softmax attention of a block of query vectors over a list of tokens, a tile at a time, with running maxima.

use super::kernel::{LANES, POWERS, STEP, WIDTH, add_powers, add_spread, add_values, products, weigh};
use super::plain::{Element, Problem};
use crate::moments::{RIVAL_GAP, length};
use std::ops::Range;

/// Tokens of a tile.
const TILE: usize = 8 * STEP;

/// Query vectors that read the same KV head, packed for the kernels.
pub(super) struct Block {
    /// The KV head.
    pub(super) kv_head: usize,
    /// `(row, head)` of each vector.
    pub(super) states: Vec<(usize, usize)>,
    /// `[vectors / 8][qk_dim][8]`; vectors beyond the states are zero.
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

    /// Notes the scores of a tile, `[tokens][vectors]`, before they become weights; −inf is masked.
    fn note(
        &mut self,
        max: &[f64],
        scores: &[f64],
        positions: &[usize],
        key_size: &[f64],
        query_size: &[f64],
    ) {
        let mut max = max.to_vec();
        for ((row, position), key_size) in scores.chunks_exact(max.len()).zip(positions).zip(key_size) {
            for (vector, score) in row.iter().enumerate() {
                if *score == f64::NEG_INFINITY {
                    continue;
                }
                let size = key_size * query_size[vector];
                self.min[vector] = self.min[vector].min(*score);
                self.max_size[vector] = self.max_size[vector].max(size);
                if *score > max[vector] {
                    let near = score - max[vector] <= RIVAL_GAP;
                    self.rival[vector] =
                        if near { self.rival[vector].max(self.peak[vector].1) } else { -1.0 };
                    self.peak[vector] = (*position, size);
                    max[vector] = *score;
                } else if *score >= max[vector] - RIVAL_GAP {
                    self.rival[vector] = self.rival[vector].max(size);
                }
            }
        }
    }
}

/// Buffers of one tile.
struct Tile {
    keys: Vec<f64>,
    key_size: Vec<f64>,
    values: Vec<f64>,
    derived: Vec<f64>,
    scores: Vec<f64>,
    weights: Vec<f64>,
}

impl Tile {
    fn new<T: Element>(problem: &Problem<T>, block: &Block, width: usize) -> Self {
        Self {
            keys: vec![0.0; TILE * problem.qk_dim],
            key_size: vec![0.0; TILE],
            values: vec![0.0; TILE * width],
            derived: vec![0.0; TILE * width],
            scores: vec![0.0; TILE * block.vectors()],
            weights: vec![0.0; TILE * block.vectors()],
        }
    }

    /// Widens the tokens at `positions` and scores them; masked scores are −inf. Returns the number of scored rows,
    /// padding included.
    fn load<T: Element>(
        &mut self,
        problem: &Problem<T>,
        block: &Block,
        positions: &[usize],
        first: usize,
        seen: &[Range<usize>],
    ) -> usize {
        let (rows, vectors) = (positions.len().next_multiple_of(STEP), block.vectors());
        let width = self.values.len() / TILE;
        for (token, &position) in positions.iter().enumerate() {
            let key = problem.key_at(position, block.kv_head);
            widen(key, &mut self.keys[token * problem.qk_dim..][..problem.qk_dim]);
            self.key_size[token] = length(key);
            let value = problem.value_at(position, block.kv_head);
            widen(value, &mut self.values[token * width..][..problem.v_dim]);
        }
        let scores = &mut self.scores[..rows * vectors];
        products(&self.keys[..rows * problem.qk_dim], &block.queries, problem.qk_dim, vectors, scores);
        scores.iter_mut().for_each(|score| *score *= problem.scale);
        if let Some(cap) = problem.softcap {
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
        scores[positions.len() * vectors..].fill(f64::NEG_INFINITY);
        for (vector, seen) in seen.iter().enumerate() {
            for token in (0..positions.len()).filter(|token| !seen.contains(&(first + token))) {
                scores[token * vectors + vector] = f64::NEG_INFINITY;
            }
        }
        rows
    }
}

fn widen<T: Element>(from: &[T], to: &mut [f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = (*from).into();
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
    let mut tile = Tile::new(problem, block, running.width);
    for first in tokens.clone().step_by(TILE) {
        let positions = &positions[first..tokens.end.min(first + TILE)];
        let rows = tile.load(problem, block, positions, first, seen);
        running.take(block, &mut tile, positions, rows);
    }
    running
}

impl Running {
    /// Adds a scored tile.
    fn take(&mut self, block: &Block, tile: &mut Tile, positions: &[usize], rows: usize) {
        let (vectors, width, count) = (block.vectors(), self.width, positions.len());
        let scores = &tile.scores[..rows * vectors];
        if let Some(moments) = &mut self.moments {
            let sizes = &tile.key_size[..count];
            moments.note(&self.max, &scores[..count * vectors], positions, sizes, &block.query_size);
        }
        self.raise(scores);
        // a vector that has seen nothing yet has no maximum to subtract
        let max: Vec<f64> =
            self.max.iter().map(|max| if *max == f64::NEG_INFINITY { 0.0 } else { *max }).collect();
        let weights = &mut tile.weights[..rows * vectors];
        weights.copy_from_slice(scores);
        weigh(weights, &max, &mut self.sum);
        let weights = &weights[..count * vectors];
        let values = &tile.values[..count * width];
        add_values(weights, vectors, values, width, &mut self.out);
        if let Some(moments) = &mut self.moments {
            let sizes = &tile.key_size[..count];
            add_powers(weights, &scores[..count * vectors], sizes, &block.query_size, &mut moments.powers);
            let derived = &mut tile.derived[..count * width];
            derived.iter_mut().zip(values).for_each(|(to, v)| *to = v.abs());
            add_values(weights, vectors, derived, width, &mut moments.abs);
            derived.iter_mut().zip(values).for_each(|(to, v)| *to = v * v);
            add_values(weights, vectors, derived, width, &mut moments.square);
        }
    }

    /// Raises the running maxima to those of a tile, and scales the sums down with them.
    fn raise(&mut self, scores: &[f64]) {
        let mut raised = self.max.clone();
        for row in scores.chunks_exact(raised.len()) {
            for (max, score) in raised.iter_mut().zip(row) {
                *max = max.max(*score);
            }
        }
        for vector in 0..raised.len() {
            if raised[vector] > self.max[vector] {
                let factor = (self.max[vector] - raised[vector]).exp();
                if factor != 1.0 && self.max[vector] != f64::NEG_INFINITY {
                    self.each_sum(vector, None, |sum, _| *sum *= factor);
                }
                self.max[vector] = raised[vector];
            }
        }
    }
}

/// `Σ p·|v − out|` over the tokens `positions[tokens]`, `[states][v_dim padded]`, `p = e^(s − lse)`; a second pass.
pub(super) fn spread<T: Element>(
    problem: &Problem<T>,
    block: &Block,
    positions: &[usize],
    tokens: Range<usize>,
    seen: &[Range<usize>],
    centre: &Centre,
) -> Vec<f64> {
    let (width, vectors) = (problem.v_dim.next_multiple_of(WIDTH), block.vectors());
    let mut spread = vec![0.0; block.states.len() * width];
    let mut tile = Tile::new(problem, block, width);
    let lse: Vec<f64> =
        centre.lse.iter().map(|lse| if *lse == f64::NEG_INFINITY { 0.0 } else { *lse }).collect();
    let mut unused = vec![0.0; vectors];
    for first in tokens.clone().step_by(TILE) {
        let positions = &positions[first..tokens.end.min(first + TILE)];
        let rows = tile.load(problem, block, positions, first, seen);
        let weights = &mut tile.weights[..rows * vectors];
        weights.copy_from_slice(&tile.scores[..rows * vectors]);
        weigh(weights, &lse, &mut unused);
        let (weights, values) =
            (&weights[..positions.len() * vectors], &tile.values[..positions.len() * width]);
        for (vector, spread) in spread.chunks_exact_mut(width).enumerate() {
            let centre = &centre.out[vector * width..(vector + 1) * width];
            add_spread(&weights[vector..], vectors, values, centre, spread);
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
