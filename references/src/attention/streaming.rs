//! The fast form of attention: never more than a tile of scores, all cores, the same bits on any number of them.
//!
//! Tokens are cut into chunks whose bounds depend on the problem alone. Each chunk is attended to by itself
//! (`running`), on whatever thread, and the results are joined in the order of tokens. It must agree with
//! [`super::plain`], which says what is meant.

use super::kernel::{LANES, MAX_TOKENS, STEP, WIDTH, products};
use super::plain::{Attention, Element, Problem};
use super::running::{Block, Centre, Running, run, spread};
use crate::layout::Layout;
use crate::merge::{Partial, merge_sink};
use crate::moments::{Centred, MAX_POWER, Part, State, Underivable, total, weigh};
use crate::split::Split;
use crate::visibility::Visible;
use rayon::prelude::*;
use std::ops::Range;

/// Most query vectors of a block.
const MAX_VECTORS: usize = 128;
/// Fewest tokens of a chunk, unless the list is shorter.
const MIN_CHUNK_TOKENS: usize = 4096;
/// Most chunks of a list.
const MAX_CHUNKS: usize = 16;

/// Attention of every row over its visible tokens; agrees with [`super::plain::attend`] to 1e-12.
///
/// # Panics
/// The shapes do not fit.
pub fn attend<T: Element>(problem: &Problem<T>, visible: &[Visible]) -> Attention {
    let single = Layout::single();
    let mut parts = attend_parts(&Problem { sink: None, ..*problem }, Split::Ranks(&single), visible);
    let mut all = parts.remove(0);
    if let Some(sink) = problem.sink {
        all = merge_sink(&all, &sink.repeat(visible.len()));
    }
    Attention { out: all.out, lse: all.lse }
}

/// `[parts]`: what each part contributes, without the sink, which belongs to none.
///
/// # Panics
/// The shapes do not fit.
pub fn attend_parts<T: Element>(problem: &Problem<T>, split: Split, visible: &[Visible]) -> Vec<Partial> {
    let states = visible.len() * problem.heads;
    let mut partials = vec![Partial::empty(states, problem.v_dim); split.parts()];
    for group in groups(problem, split, visible) {
        for (block, by_part) in group.run(problem, false) {
            for (partial, running) in partials.iter_mut().zip(by_part) {
                for (vector, (row, head)) in block.states.iter().enumerate() {
                    let state = row * problem.heads + head;
                    if running.max[vector] == f64::NEG_INFINITY {
                        continue;
                    }
                    let sum = running.sum[vector];
                    partial.lse[state] = running.max[vector] + sum.ln();
                    let out = &mut partial.out[state * problem.v_dim..(state + 1) * problem.v_dim];
                    for (to, from) in out.iter_mut().zip(&running.out[vector * running.width..]) {
                        *to = from / sum;
                    }
                }
            }
        }
    }
    partials
}

/// `[rows, heads]`: the moments of every state, with the second pass if `centred`.
pub(crate) fn measure<T: Element>(
    problem: &Problem<T>,
    split: Split,
    visible: &[Visible],
    centred: bool,
) -> Result<Vec<State>, Underivable> {
    let mut states: Vec<Option<State>> = vec![None; visible.len() * problem.heads];
    for group in groups(problem, split, visible) {
        for (block, by_part) in group.run(problem, true) {
            let seen = group.seen(&block);
            let sums = group.sums_of_abs(problem, &block);
            let mut measured: Vec<State> = (0..block.states.len())
                .into_par_iter()
                .map(|vector| {
                    let counts: Vec<usize> = seen.iter().map(|seen| seen[vector].len()).collect();
                    let row = block.states[vector].0 - block.states[0].0;
                    state(problem, &block, &by_part, vector, &counts, &sums[row])
                })
                .collect::<Result<_, _>>()?;
            if centred {
                group.centre(problem, &block, &mut measured);
            }
            for (measured, (row, head)) in measured.into_iter().zip(&block.states) {
                states[row * problem.heads + head] = Some(measured);
            }
        }
    }
    Ok(states.into_iter().map(|state| state.expect("every state is in one block")).collect())
}

/// Projects the values of `tokens` of a KV head by `weights`, `[problem's v_dim][v_dim]`, into the rows of
/// `value`, `[tokens of the problem][v_dim]`.
pub(crate) fn project_values<T: Element>(
    problem: &Problem<T>,
    kv_head: usize,
    tokens: &[usize],
    weights: &[f32],
    v_dim: usize,
    value: &mut [f64],
) {
    let (latent, width) = (problem.v_dim, v_dim.next_multiple_of(LANES));
    let mut columns = vec![0.0; latent * width];
    for (c, row) in weights.chunks_exact(v_dim).enumerate() {
        for (v, weight) in row.iter().enumerate() {
            columns[(v / LANES * latent + c) * LANES + v % LANES] = f64::from(*weight);
        }
    }
    for tokens in tokens.chunks(MAX_TOKENS) {
        let rows = tokens.len().next_multiple_of(STEP);
        let (mut latents, mut projected) = (vec![0.0; rows * latent], vec![0.0; rows * width]);
        for (to, &token) in latents.chunks_exact_mut(latent).zip(tokens) {
            for (to, from) in to.iter_mut().zip(problem.value_at(token, kv_head)) {
                *to = (*from).into();
            }
        }
        products(&latents, &columns, latent, &mut projected);
        for (row, &token) in tokens.iter().enumerate() {
            for (v, to) in value[token * v_dim..(token + 1) * v_dim].iter_mut().enumerate() {
                *to = projected[(v / LANES * rows + row) * LANES + v % LANES];
            }
        }
    }
}

/// Rows that are attended to together, and the tokens that any of them sees.
struct Group {
    rows: Range<usize>,
    /// `[parts]`: positions, ascending.
    positions: Vec<Vec<usize>>,
    /// `[parts][rows]`: which of them a row sees; always consecutive ones.
    seen: Vec<Vec<Range<usize>>>,
    /// KV head and states of each block.
    blocks: Vec<(usize, Vec<(usize, usize)>)>,
}

/// Cuts the rows into groups: rows that see consecutive tokens go together up to a block of vectors, rows that
/// see any other set by themselves.
fn groups<T: Element>(problem: &Problem<T>, split: Split, visible: &[Visible]) -> Vec<Group> {
    problem.check();
    problem.check_visible(visible);
    let shared = problem.heads / problem.kv_heads;
    let most_rows = (MAX_VECTORS / shared).max(1);
    let mut groups = Vec::new();
    let mut first = 0;
    while first < visible.len() {
        let consecutive = |row: &usize| !matches!(visible[*row], Visible::Set(_));
        let taken = (first..visible.len()).take(most_rows).take_while(consecutive).count().max(1);
        groups.push(group(problem, split, visible, first..first + taken));
        first += taken;
    }
    groups
}

fn group<T: Element>(problem: &Problem<T>, split: Split, visible: &[Visible], rows: Range<usize>) -> Group {
    let span = |seen: &Visible| match seen {
        Visible::Range { start, end } if start < end => *start..*end,
        Visible::Range { .. } => 0..0,
        other => 0..other.end(),
    };
    let positions = match &visible[rows.start] {
        set @ Visible::Set(_) => split.positions(set),
        _ => {
            let spans = || visible[rows.clone()].iter().map(span).filter(|span| !span.is_empty());
            let start = spans().map(|span| span.start).min().unwrap_or(0);
            let end = spans().map(|span| span.end).max().unwrap_or(0);
            split.positions(&Visible::Range { start, end })
        }
    };
    let seen = positions
        .iter()
        .map(|positions| {
            rows.clone()
                .map(|row| {
                    let span = span(&visible[row]);
                    let index = |bound: usize| positions.partition_point(|&position| position < bound);
                    index(span.start)..index(span.end)
                })
                .collect()
        })
        .collect();
    let shared = problem.heads / problem.kv_heads;
    let mut blocks = Vec::new();
    for kv_head in 0..problem.kv_heads {
        let heads = kv_head * shared..(kv_head + 1) * shared;
        let states: Vec<(usize, usize)> =
            rows.clone().flat_map(|row| heads.clone().map(move |head| (row, head))).collect();
        blocks.extend(states.chunks(MAX_VECTORS).map(|states| (kv_head, states.to_vec())));
    }
    Group { rows, positions, seen, blocks }
}

impl Group {
    /// `[parts][vectors of the block]`: which of the part's positions each vector sees.
    fn seen(&self, block: &Block) -> Vec<Vec<Range<usize>>> {
        let of_part = |seen: &Vec<Range<usize>>| {
            block.states.iter().map(|(row, _)| seen[row - self.rows.start].clone()).collect()
        };
        self.seen.iter().map(of_part).collect()
    }

    /// Attends to every part in chunks, in parallel: for each block, `[parts]`.
    fn run<T: Element>(&self, problem: &Problem<T>, with_moments: bool) -> Vec<(Block, Vec<Running>)> {
        let blocks: Vec<Block> = self
            .blocks
            .par_iter()
            .map(|(kv_head, states)| Block::new(problem, *kv_head, states.clone()))
            .collect();
        let seen: Vec<_> = blocks.iter().map(|block| self.seen(block)).collect();
        let mut work = Vec::new();
        for block in 0..blocks.len() {
            for (part, positions) in self.positions.iter().enumerate() {
                work.extend(chunks(positions.len()).map(|tokens| (block, part, tokens)));
            }
        }
        let done: Vec<Running> = work
            .par_iter()
            .map(|(block, part, tokens)| {
                let (positions, seen) = (&self.positions[*part], &seen[*block][*part]);
                run(problem, &blocks[*block], positions, tokens.clone(), seen, with_moments)
            })
            .collect();
        let mut joined: Vec<Vec<Option<Running>>> =
            blocks.iter().map(|_| vec![None; self.positions.len()]).collect();
        for ((block, part, _), running) in work.into_iter().zip(done) {
            match &mut joined[block][part] {
                Some(before) => before.join(&running),
                none => *none = Some(running),
            }
        }
        let or_empty = |block: &Block, running: Option<Running>| {
            running.unwrap_or_else(|| Running::new(block, problem.v_dim, with_moments))
        };
        blocks
            .into_iter()
            .zip(joined)
            .map(|(block, parts)| {
                let parts = parts.into_iter().map(|running| or_empty(&block, running)).collect();
                (block, parts)
            })
            .collect()
    }

    /// `[rows of the block][parts][v_dim]`: `Σ |v|` over the tokens that the row sees.
    fn sums_of_abs<T: Element>(&self, problem: &Problem<T>, block: &Block) -> Vec<Vec<Vec<f64>>> {
        let rows = block.states[0].0..block.states[block.states.len() - 1].0 + 1;
        let of_part = |row: usize, part: usize| {
            let mut sums = vec![0.0; problem.v_dim];
            for &position in &self.positions[part][self.seen[part][row - self.rows.start].clone()] {
                for (sum, v) in sums.iter_mut().zip(problem.value_at(position, block.kv_head)) {
                    let v: f64 = (*v).into();
                    *sum += v.abs();
                }
            }
            sums
        };
        rows.into_par_iter()
            .map(|row| (0..self.positions.len()).map(|part| of_part(row, part)).collect())
            .collect()
    }

    /// Takes the second pass for the states of a block.
    fn centre<T: Element>(&self, problem: &Problem<T>, block: &Block, measured: &mut [State]) {
        let width = problem.v_dim.next_multiple_of(WIDTH);
        let mut centre = Centre { lse: vec![0.0; block.vectors()], out: vec![0.0; measured.len() * width] };
        for (vector, state) in measured.iter().enumerate() {
            centre.lse[vector] = state.lse;
            centre.out[vector * width..][..problem.v_dim].copy_from_slice(&state.out);
        }
        let seen = self.seen(block);
        let work: Vec<(usize, Range<usize>)> = (0..self.positions.len())
            .flat_map(|part| chunks(self.positions[part].len()).map(move |tokens| (part, tokens)))
            .collect();
        let spreads: Vec<Vec<f64>> = work
            .par_iter()
            .map(|(part, tokens)| {
                spread(problem, block, &self.positions[*part], tokens.clone(), &seen[*part], &centre)
            })
            .collect();
        for (vector, state) in measured.iter_mut().enumerate() {
            let all =
                (0..problem.v_dim).map(|d| spreads.iter().map(|spread| spread[vector * width + d]).sum());
            state.centred = Some(Centred::of(state, all.collect()));
        }
    }
}

/// Bounds of the chunks of a list of `tokens` tokens.
fn chunks(tokens: usize) -> impl Iterator<Item = Range<usize>> {
    let length = tokens.div_ceil(MAX_CHUNKS).max(MIN_CHUNK_TOKENS);
    (0..tokens).step_by(length).map(move |start| start..tokens.min(start + length))
}

/// Assembles one state.
fn state<T: Element>(
    problem: &Problem<T>,
    block: &Block,
    by_part: &[Running],
    vector: usize,
    counts: &[usize],
    sums_of_abs: &[Vec<f64>],
) -> Result<State, Underivable> {
    let (row, head) = block.states[vector];
    let sink = problem.sink.map(|sink| sink[head]);
    let mut parts = Vec::with_capacity(by_part.len());
    let (mut largest, mut smallest) = sink.map_or((f64::NEG_INFINITY, f64::INFINITY), |logit| (logit, logit));
    for (index, running) in by_part.iter().enumerate() {
        let part = part(problem, block, running, vector, counts[index]);
        let finite = part.powers.iter().flatten().chain(&part.square).all(|x| x.is_finite());
        if !finite
            || (counts[index] > 0 && !part.lse.is_finite())
            || sink.is_some_and(|logit| !logit.is_finite())
        {
            return Err(Underivable::NonFinite { row, head });
        }
        if let (Some(moments), true) = (&running.moments, counts[index] > 0) {
            largest = largest.max(running.max[vector]);
            smallest = smallest.min(moments.min[vector]);
        }
        parts.push(part);
    }
    for (part, sums) in parts.iter_mut().zip(sums_of_abs) {
        part.sum_abs.copy_from_slice(sums);
    }
    let lse = weigh::<super::plain::Platform>(&mut parts, sink);
    Ok(State {
        tokens: counts.iter().sum(),
        lse,
        max_abs_score: if largest >= smallest { largest.abs().max(smallest.abs()) } else { 0.0 },
        score_range: (largest - smallest).max(0.0),
        sink: sink.map(|logit| (logit, (logit - lse).exp())),
        out: total(&parts, problem.v_dim, |part, d| part.weight * part.out[d]),
        centred: None,
        parts,
    })
}

fn part<T: Element>(
    problem: &Problem<T>,
    block: &Block,
    running: &Running,
    vector: usize,
    count: usize,
) -> Part {
    let mut part = Part::empty(problem.v_dim);
    let Some(moments) = running.moments.as_ref().filter(|_| count > 0) else {
        return part;
    };
    let (vectors, sum) = (block.vectors(), running.sum[vector]);
    let normalised = |from: &[f64]| -> Vec<f64> {
        from[vector * running.width..][..problem.v_dim].iter().map(|x| x / sum).collect()
    };
    let (peak_position, peak_size) = moments.peak[vector];
    let mut index = 0;
    for i in 0..=MAX_POWER {
        for j in 0..=MAX_POWER - i {
            part.powers[i][j] = moments.powers[index * vectors + vector] / sum;
            index += 1;
        }
    }
    part.tokens = count;
    part.lse = running.max[vector] + sum.ln();
    part.peak = 1.0 / sum;
    part.peak_a = peak_size;
    part.rival_a = (moments.rival[vector] >= 0.0).then_some(moments.rival[vector]);
    part.max_a = moments.max_size[vector];
    part.out = normalised(&running.out);
    part.abs = normalised(&moments.abs);
    part.square = normalised(&moments.square);
    for (to, from) in part.peak_value.iter_mut().zip(problem.value_at(peak_position, block.kv_head)) {
        *to = (*from).into();
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plain::{self, Values};
    use shardcheck_formats::recipe::Counter;

    #[test]
    fn the_fast_form_is_the_definition_for_every_kind_of_view() {
        let mut random = Counter::new(17, 0);
        let (heads, kv_heads, qk_dim, v_dim, tokens) = (6, 2, 5, 11, 130);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
        let (query, key) = (draw(4 * heads * qk_dim), draw(tokens * kv_heads * qk_dim));
        let (value, sink) = (draw(tokens * kv_heads * v_dim), [0.5, -2.0, 1.0, 3.0, 0.0, 6.0]);
        let mut problem =
            Problem::new(heads, kv_heads, qk_dim, v_dim, 0.8, &query, &key, Values::Separate(&value));
        (problem.sink, problem.softcap) = (Some(sink.as_slice()), Some(2.0));
        let range = |start, end| Visible::Range { start, end };
        let views = [
            Visible::causal(tokens, 4),
            vec![range(60, 70), range(7, 7), range(9, 2), Visible::Prefix(0)],
            vec![Visible::Prefix(3), Visible::set(vec![1, 2, 129]).unwrap(), range(100, 130), range(3, 90)],
        ];
        let layout = Layout::new(3, 2, 2).unwrap();
        for visible in views {
            let (fast, defined) = (attend(&problem, &visible), plain::attend(&problem, &visible));
            for (fast, defined) in
                fast.out.iter().chain(&fast.lse).zip(defined.out.iter().chain(&defined.lse))
            {
                assert!(fast == defined || (fast - defined).abs() < 1e-12, "{fast} {defined}");
            }
            for (rank, fast) in attend_parts(&problem, Split::Ranks(&layout), &visible).iter().enumerate() {
                let defined = plain::attend_rank(&problem, &visible, &layout, rank);
                for (fast, defined) in
                    fast.out.iter().chain(&fast.lse).zip(defined.out.iter().chain(&defined.lse))
                {
                    assert!(
                        fast == defined || (fast - defined).abs() < 1e-12,
                        "rank {rank}: {fast} {defined}"
                    );
                }
            }
        }
    }

    #[test]
    fn chunks_cover_a_list_and_depend_on_its_length_alone() {
        for tokens in [0, 1, 4095, 4096, 4097, 65_536, 1_000_003] {
            let bounds: Vec<_> = chunks(tokens).collect();
            assert!(bounds.len() <= MAX_CHUNKS);
            assert_eq!(bounds.iter().map(Range::len).sum::<usize>(), tokens);
            assert!(bounds.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
