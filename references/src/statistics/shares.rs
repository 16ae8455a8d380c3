//! The visible tokens in the order of ranks, and how much of each state's softmax every one of them holds.

use super::model::BLOCK_TOKENS;
use super::sums::{LANES, TILE, add_weighted, dots, filled};
use crate::attention::plain::{Element, Problem};
use crate::layout::Layout;
use crate::moments::{Moments, Statistics};
use crate::visibility::Visible;
use rayon::prelude::*;
use std::ops::Range;

/// Blocks that are worked on together.
const BLOCKS_AT_ONCE: usize = 128;

/// Every token that any row sees, rank by rank, positions ascending.
pub(super) struct Tokens {
    pub(super) positions: Vec<usize>,
    /// `[ranks]`: which of them a rank holds.
    pub(super) ranks: Vec<Range<usize>>,
    /// Tokens of one block of [`BLOCK_TOKENS`] local indices, never of two ranks.
    pub(super) blocks: Vec<Range<usize>>,
    /// Runs of blocks of one rank: `(rank, blocks)`.
    work: Vec<(usize, Range<usize>)>,
}

impl Tokens {
    pub(super) fn of(layout: &Layout, visible: &[Visible]) -> Self {
        let end = visible.iter().map(Visible::end).max().unwrap_or(0);
        let mut held = vec![Vec::new(); layout.world()];
        for position in (0..end).filter(|&position| visible.iter().any(|seen| seen.contains(position))) {
            held[layout.owner(position)].push(position);
        }
        let mut tokens =
            Self { positions: Vec::new(), ranks: Vec::new(), blocks: Vec::new(), work: Vec::new() };
        for (rank, held) in held.iter().enumerate() {
            let first_block = tokens.blocks.len();
            let first = tokens.positions.len();
            for block in held.chunk_by(|a, b| block_of(layout, *a) == block_of(layout, *b)) {
                let start = tokens.positions.len();
                tokens.positions.extend(block);
                tokens.blocks.push(start..tokens.positions.len());
            }
            tokens.ranks.push(first..tokens.positions.len());
            let blocks = first_block..tokens.blocks.len();
            let runs = blocks.clone().step_by(BLOCKS_AT_ONCE);
            tokens.work.extend(runs.map(|start| (rank, start..blocks.end.min(start + BLOCKS_AT_ONCE))));
        }
        tokens
    }

    /// The rank that holds the token `index`.
    pub(super) fn rank_of(&self, index: usize) -> usize {
        self.ranks.iter().position(|range| range.contains(&index)).expect("every token lies on a rank")
    }

    /// Runs `f` over runs of blocks in parallel; what it returns comes in the order of tokens.
    pub(super) fn each_run<R: Send>(&self, f: impl Fn(usize, &[Range<usize>]) -> R + Sync) -> Vec<R> {
        self.work.par_iter().map(|(rank, blocks)| f(*rank, &self.blocks[blocks.clone()])).collect()
    }
}

fn block_of(layout: &Layout, position: usize) -> usize {
    layout.local_index(position) / BLOCK_TOKENS
}

/// Cuts a range into tiles.
pub(super) fn tiles(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(TILE).map(move |start| start..end.min(start + TILE))
}

/// Puts vectors of `width` numbers into the rows of a tile; rows without one become zero.
pub(super) fn load<'t, T: Element + 't>(
    vectors: impl Iterator<Item = &'t [T]>,
    width: usize,
    tile: &mut [f64],
) {
    tile.fill(0.0);
    for (row, vector) in tile.chunks_exact_mut(width).zip(vectors) {
        for (to, from) in row.iter_mut().zip(vector) {
            *to = (*from).into();
        }
    }
}

/// The states that read one KV head.
pub(super) struct Shares {
    pub(super) kv_head: usize,
    /// Indices `row·heads + head`.
    pub(super) states: Vec<usize>,
    /// `[states][tokens]`: softmax weight `p`, 0 where the row does not see the token.
    pub(super) weights: Vec<f64>,
    /// `[states][tokens]`: `p·t`, `t` being the derivative of the score by the logarithm of the key's scale.
    slopes: Vec<f64>,
    /// `[states]`: `Σ p·t`.
    slope_sums: Vec<f64>,
    /// `[states][ranks]`.
    parts: Vec<PartShape>,
}

/// What the scores of one rank look like in one state.
#[derive(Debug, Clone)]
struct PartShape {
    /// The token with the largest weight.
    peak: Option<usize>,
    /// `Σ p²` over the others, `p` being the part's own.
    weight_square: f64,
    /// Distinct scores over tokens.
    distinct: f64,
    /// Standard deviation of the scores under `p`.
    deviation: f64,
}

impl PartShape {
    /// No token.
    const EMPTY: Self = Self { peak: None, weight_square: 0.0, distinct: 1.0, deviation: 0.0 };
}

impl Shares {
    pub(super) fn of<T: Element>(
        problem: &Problem<T>,
        tokens: &Tokens,
        visible: &[Visible],
        moments: &Moments,
        kv_head: usize,
    ) -> Self {
        let shared = problem.heads / problem.kv_heads;
        let heads = kv_head * shared..(kv_head + 1) * shared;
        let states: Vec<usize> = (0..problem.rows())
            .flat_map(|row| heads.clone().map(move |head| row * problem.heads + head))
            .collect();
        let count = tokens.positions.len();
        let products = products(problem, tokens, kv_head, &states);
        let (mut weights, mut slopes) = (products, vec![0.0; states.len() * count]);
        let parts: Vec<Vec<PartShape>> = weights
            .par_chunks_mut(count.max(1))
            .zip(slopes.par_chunks_mut(count.max(1)))
            .zip(&states)
            .map(|((weights, slopes), state)| {
                let seen = &visible[state / problem.heads];
                weigh(problem, tokens, seen, moments.states[*state].lse, weights, slopes)
            })
            .collect();
        let slope_sums = slopes.chunks_exact(count.max(1)).map(|slopes| slopes.iter().sum()).collect();
        let mut shares = Self { kv_head, states, weights, slopes, slope_sums, parts: parts.concat() };
        shares.parts.resize(shares.states.len() * tokens.ranks.len(), PartShape::EMPTY);
        shares
    }

    /// `Σ p·t` of one state.
    pub(super) fn slope_sum(&self, place: usize) -> f64 {
        self.slope_sums.get(place).copied().unwrap_or(0.0)
    }

    /// Weights of one state.
    pub(super) fn weights_of(&self, place: usize, tokens: usize) -> &[f64] {
        &self.weights[place * tokens..(place + 1) * tokens]
    }

    /// The token with the largest weight of a rank.
    pub(super) fn peak(&self, place: usize, rank: usize) -> Option<usize> {
        self.parts[place * (self.parts.len() / self.states.len()) + rank].peak
    }

    /// Takes the second moments into `moments`, and returns `Σ p·t·v`, `[states][v_dim padded]`.
    pub(super) fn measure<T: Element>(
        &mut self,
        problem: &Problem<T>,
        tokens: &Tokens,
        moments: &mut Moments,
    ) -> Vec<f64> {
        let (width, count) = (problem.v_dim.next_multiple_of(LANES), tokens.positions.len());
        let runs = tokens.each_run(|rank, blocks| {
            let range = blocks[0].start..blocks[blocks.len() - 1].end;
            (rank, self.run_sums(problem, tokens, (rank, range), width))
        });
        let ranks = tokens.ranks.len();
        let mut squares = vec![0.0; self.states.len() * ranks * width];
        let mut slope_sums = vec![0.0; self.states.len() * width];
        for (rank, (square, slope)) in runs {
            for place in 0..self.states.len() {
                let to = &mut squares[(place * ranks + rank) * width..][..width];
                to.iter_mut().zip(&square[place * width..]).for_each(|(to, from)| *to += from);
            }
            slope_sums.iter_mut().zip(slope).for_each(|(to, from)| *to += from);
        }
        for (place, state) in self.states.iter().enumerate() {
            let weights = self.weights_of(place, count);
            for (rank, part) in moments.states[*state].parts.iter_mut().enumerate() {
                let shape = &self.parts[place * ranks + rank];
                let share = if part.weight > 0.0 { part.weight } else { 1.0 };
                let square: Vec<f64> = squares[(place * ranks + rank) * width..][..problem.v_dim]
                    .iter()
                    .map(|square| square / (share * share))
                    .collect();
                let class_square = if shape.distinct < 1.0 {
                    let held = (tokens.ranks[rank].clone(), shape.peak);
                    class_squares(problem, self.kv_head, tokens, held, weights, share)
                } else {
                    square.clone()
                };
                part.statistics = Some(Statistics {
                    square,
                    class_square,
                    weight_square: shape.weight_square,
                    distinct: shape.distinct,
                    score_deviation: shape.deviation,
                });
            }
        }
        self.slopes = Vec::new();
        slope_sums
    }

    /// `Σ p²·v²` without the rank's peak and `Σ p·t·v` over a run of tokens, `[states][width]` each.
    fn run_sums<T: Element>(
        &self,
        problem: &Problem<T>,
        tokens: &Tokens,
        (rank, range): (usize, Range<usize>),
        width: usize,
    ) -> (Vec<f64>, Vec<f64>) {
        let count = tokens.positions.len();
        let (mut squares, mut slopes) =
            (vec![0.0; self.states.len() * width], vec![0.0; self.states.len() * width]);
        let (mut rows, mut weights) = (vec![0.0; TILE * width], vec![0.0; self.states.len() * TILE]);
        for tile in tiles(range) {
            let values = tokens.positions[tile.clone()].iter().map(|&at| problem.value_at(at, self.kv_head));
            load(values, width, &mut rows);
            for (place, to) in weights.chunks_exact_mut(TILE).enumerate() {
                to.fill(0.0);
                to[..tile.len()].copy_from_slice(&self.slopes[place * count..][tile.clone()]);
            }
            add_weighted(&weights, filled(&rows, tile.len(), width), width, &mut slopes);
            rows.iter_mut().for_each(|v| *v *= *v);
            for (place, to) in weights.chunks_exact_mut(TILE).enumerate() {
                let peak = self.peak(place, rank);
                for (index, to) in tile.clone().zip(to) {
                    let p = if peak == Some(index) { 0.0 } else { self.weights[place * count + index] };
                    *to = p * p;
                }
            }
            add_weighted(&weights, filled(&rows, tile.len(), width), width, &mut squares);
        }
        (squares, slopes)
    }
}

/// `[states][tokens]`: products of query and key, unscaled.
fn products<T: Element>(problem: &Problem<T>, tokens: &Tokens, kv_head: usize, states: &[usize]) -> Vec<f64> {
    let width = problem.qk_dim.next_multiple_of(LANES);
    let mut queries = vec![0.0; states.len() * width];
    let of_state = |state: &usize| problem.query_at(state / problem.heads, state % problem.heads);
    load(states.iter().map(of_state), width, &mut queries);
    let runs = tokens.each_run(|_, blocks| {
        let range = blocks[0].start..blocks[blocks.len() - 1].end;
        let mut products = vec![0.0; states.len() * range.len()];
        let (mut rows, mut out) = (vec![0.0; TILE * width], vec![0.0; states.len() * TILE]);
        for tile in tiles(range.clone()) {
            load(
                tokens.positions[tile.clone()].iter().map(|&at| problem.key_at(at, kv_head)),
                width,
                &mut rows,
            );
            dots(filled(&rows, tile.len(), width), &queries, width, &mut out);
            for (place, out) in out.chunks_exact(TILE).enumerate() {
                let at = place * range.len() + tile.start - range.start;
                products[at..at + tile.len()].copy_from_slice(&out[..tile.len()]);
            }
        }
        (range, products)
    });
    let count = tokens.positions.len();
    let mut all = vec![0.0; states.len() * count];
    for (range, products) in runs {
        for (place, products) in products.chunks_exact(range.len()).enumerate() {
            all[place * count..][range.clone()].copy_from_slice(products);
        }
    }
    all
}

/// Turns the products of one state into weights and slopes; returns the shape of every rank's part.
fn weigh<T: Element>(
    problem: &Problem<T>,
    tokens: &Tokens,
    seen: &Visible,
    lse: f64,
    weights: &mut [f64],
    slopes: &mut [f64],
) -> Vec<PartShape> {
    let mut classes = Vec::new();
    let mut shapes = Vec::with_capacity(tokens.ranks.len());
    for range in &tokens.ranks {
        classes.clear();
        let (mut shape, mut largest) = (PartShape::EMPTY, 0.0);
        let (mut sum, mut first, mut second, mut square) = (0.0, 0.0, 0.0, 0.0);
        for index in range.clone() {
            if !seen.contains(tokens.positions[index]) {
                weights[index] = 0.0;
                continue;
            }
            let scaled = weights[index] * problem.scale;
            let (score, slope) = match problem.softcap {
                None => (scaled, scaled),
                Some(cap) => {
                    let bent = (scaled / cap).tanh();
                    (cap * bent, scaled * (1.0 - bent * bent))
                }
            };
            let p = (score - lse).exp();
            (weights[index], slopes[index]) = (p, p * slope);
            classes.push((score * 1e9).round() as i64);
            if shape.peak.is_none() || p > largest {
                (shape.peak, largest) = (Some(index), p);
            }
            sum += p;
            first += p * score;
            second += p * score * score;
            square += p * p;
        }
        let count = classes.len().max(1) as f64;
        classes.sort_unstable();
        classes.dedup();
        if !classes.is_empty() {
            shape.distinct = classes.len() as f64 / count;
        }
        if sum > 0.0 {
            shape.weight_square = ((square - largest * largest) / (sum * sum)).max(0.0);
            shape.deviation = (second / sum - (first / sum).powi(2)).max(0.0).sqrt();
        }
        shapes.push(shape);
    }
    shapes
}

/// `Σ (Σ p·|v|)²` of a rank, the inner sum over tokens of equal weight (so of equal score) but the peak, `[v_dim]`.
fn class_squares<T: Element>(
    problem: &Problem<T>,
    kv_head: usize,
    tokens: &Tokens,
    (held, peak): (Range<usize>, Option<usize>),
    weights: &[f64],
    share: f64,
) -> Vec<f64> {
    let class = |index: &usize| (weights[*index].ln() * 1e9).round();
    let mut ordered: Vec<usize> = held.filter(|&index| weights[index] > 0.0).collect();
    ordered.sort_by(|a, b| class(a).total_cmp(&class(b)));
    let mut squares = vec![0.0; problem.v_dim];
    for members in ordered.chunk_by(|a, b| class(a) == class(b)) {
        let mut inner = vec![0.0; problem.v_dim];
        for &index in members.iter().filter(|index| peak != Some(**index)) {
            for (inner, v) in inner.iter_mut().zip(problem.value_at(tokens.positions[index], kv_head)) {
                *inner += weights[index] / share * Into::<f64>::into(*v).abs();
            }
        }
        squares.iter_mut().zip(inner).for_each(|(to, inner)| *to += inner * inner);
    }
    squares
}
