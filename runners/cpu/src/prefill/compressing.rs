//! Compression of tokens that lie on the ranks of prefill context parallelism: each rank gathers values and gates of all rows, brings them
//! behind what is held of each request, and pools the blocks that are full.
//!
//! Formulas: DeepSeek-V4 `Compressor` (`overlap_transform`, `kv_state`, `score_state`, `ape`); ATOM's prefill under PCP gathers its inputs.

use std::ops::Range;

use shardcheck_engine::{CompressPlan, EffectivePath, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::attention::{GatherRows, gather, push_row};
use super::{PrefillPolicies, Shared, Shares, Split};
use crate::communicator::{Link, Ranks, Stop, run_ranks};

/// One token's part of a column of an entry.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Part {
    /// Gate and bias.
    pub score: f32,
    /// What is pooled.
    pub value: f32,
    /// Rank whose row it was; `None` for what was held before.
    pub rank: Option<usize>,
}

/// How blocks are made and pooled.
#[derive(Clone, Copy, PartialEq)]
pub struct CompressPolicies {
    /// Brings values and gates of each rank together.
    pub gather: GatherRows,
    /// Gathered place of each row of the batch, given the right ones.
    pub places: fn(Vec<i64>, &Shares) -> Vec<i64>,
    /// Position at which the first block of a step begins to count, given the tokens that were computed before.
    pub origin: fn(usize) -> usize,
    /// Blocks that the new tokens fill: `(tokens before, tokens behind, m)`.
    pub filled: fn(usize, usize, usize) -> Range<usize>,
    /// Request whose last tokens stand before the first block of a request.
    pub before: fn(usize) -> Option<usize>,
    /// Score and value of a token that is not there.
    pub absent: Option<(f32, f32)>,
    /// Halves of the columns that the block before and the block itself are pooled by, where blocks overlap.
    pub halves: [usize; 2],
    /// Place in its block whose bias a token gets: `(position, tokens computed before, m)`.
    pub bias_place: fn(usize, usize, usize) -> usize,
    /// A column of an entry.
    pub pool: fn(&[Part]) -> f32,
    /// Entries that a row sees: `(its position, its place among the rows of its request on the rank, m)`.
    pub visible: fn(usize, usize, usize) -> usize,
    /// First position that is held: `(tokens, m, whether blocks overlap)`.
    pub first_held: fn(usize, usize, bool) -> usize,
}

impl CompressPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        gather: |link, own| gather(link, "all_gather_pcp_compress", own),
        places: |places, _| places,
        origin: |_| 0,
        filled: |before, behind, ratio| before / ratio..behind / ratio,
        before: |_| None,
        absent: None,
        halves: [0, 1],
        bias_place: |position, _, ratio| position % ratio,
        pool,
        visible: |position, _, ratio| (position + 1) / ratio,
        first_held,
    };
}

/// Σ softmax(score)·value, the largest score taken out of the exponents.
pub fn pool(parts: &[Part]) -> f32 {
    let most = parts.iter().map(|part| part.score).fold(f32::NEG_INFINITY, f32::max);
    let (mut total, mut sum) = (0.0, 0.0);
    for part in parts {
        let weight = (part.score - most).exp();
        total += weight;
        sum += weight * part.value;
    }
    sum / total
}

/// The block that is not full, and the one before it where blocks overlap.
pub fn first_held(tokens: usize, ratio: usize, overlap: bool) -> usize {
    let full = tokens / ratio;
    if overlap && full > 0 { (full - 1) * ratio } else { full * ratio }
}

/// A token with its columns.
#[derive(Clone)]
struct Token {
    /// Values, then gates.
    columns: Vec<f32>,
    rank: Option<usize>,
}

/// What is there of a request, from the first held token on.
struct Line {
    first: usize,
    computed: usize,
    tokens: Vec<Token>,
}

impl Line {
    fn len(&self) -> usize {
        self.first + self.tokens.len()
    }

    fn at(&self, position: usize) -> Option<&Token> {
        position.checked_sub(self.first).and_then(|index| self.tokens.get(index))
    }
}

struct Step<'a> {
    plan: CompressPlan,
    shared: Shared,
    shares: Shares,
    columns: usize,
    /// Values and gates of each new row.
    new: Vec<f32>,
    bias: Vec<f32>,
    held: Vec<Vec<Token>>,
    policies: (&'a PrefillPolicies, &'a CompressPolicies),
}

#[derive(Default)]
struct Compressed {
    rows: Vec<i64>,
    entry_lens: Vec<i32>,
    starts: Vec<i32>,
    entries: Vec<f32>,
    state: [Vec<f32>; 2],
}

/// Performs the step on all ranks of the plan, each on a thread of its own.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; a crash for blocks of no tokens.
pub fn compress_pcp(
    inputs: &Tensors,
    plan: CompressPlan,
    ranks: Ranks,
    policies: (&PrefillPolicies, &CompressPolicies),
) -> Result<Reply, EngineError> {
    let CompressPlan { world, strategy, decodes, padded_rows, ratio, overlap } = plan;
    let split = Split { world, strategy, decodes, padded_rows, overlap: false };
    let shared = Shared::of(inputs, split, policies.0)?;
    let (rows, columns) = (shared.batch.rows(), inputs.get("kv")?.shape().last().copied().unwrap_or(0));
    let halves = 1 + usize::from(overlap);
    if ratio == 0 || columns == 0 || columns % halves != 0 {
        let text = format!("blocks of {ratio} tokens with {columns} columns");
        return Err(EngineError::Crash { text });
    }
    // the state is what was held, whatever a fault holds of it afterwards
    let held: Vec<usize> =
        shared.batch.computed.iter().map(|tokens| tokens - first_held(*tokens, ratio, overlap)).collect();
    let read = |name: &str, rows: usize| -> Result<Vec<f32>, EngineError> {
        Ok(inputs.get(name)?.expect(name, Dtype::F32, &[rows, columns])?.to_f32())
    };
    let beside = |values: &[f32], gates: &[f32]| -> Vec<f32> {
        let rows = values.chunks_exact(columns).zip(gates.chunks_exact(columns));
        rows.flat_map(|(value, gate)| [value, gate].concat()).collect()
    };
    let total = held.iter().sum();
    let state = beside(&read("state_kv", total)?, &read("state_gate", total)?);
    let mut state = state.chunks_exact(2 * columns).map(|row| Token { columns: row.to_vec(), rank: None });
    let step = Step {
        plan,
        shares: shared.shares(),
        shared,
        columns,
        new: beside(&read("kv", rows)?, &read("gate", rows)?),
        bias: read("gate_bias", ratio)?,
        held: held.into_iter().map(|count| state.by_ref().take(count).collect()).collect(),
        policies,
    };
    let run = run_ranks(Ranks { count: world, world, ..ranks }, |link| step.run_rank(link))?;
    let floats = |part: fn(&Compressed) -> &Vec<f32>, width: usize| {
        let all: Vec<f32> = run.results.iter().flat_map(part).copied().collect();
        Tensor::from_f32(Dtype::F32, &[world, all.len() / world / width, width], &all)
    };
    let padded = step.shared.padded;
    let own_rows: Vec<i64> = run.results.iter().flat_map(|rank| rank.rows.iter().copied()).collect();
    let lens: Vec<i32> = run.results.iter().flat_map(|rank| rank.entry_lens.iter().copied()).collect();
    let starts: Vec<i32> = run.results.iter().flat_map(|rank| rank.starts.iter().copied()).collect();
    let outputs = Tensors::new()
        .with("entry_start_loc", Tensor::from_i32(&[world, starts.len() / world], &starts))
        .with("entries", floats(|rank| &rank.entries, columns / halves))
        .with("rows", Tensor::from_i64(&[world, padded], &own_rows))
        .with("entry_lens", Tensor::from_i32(&[world, padded], &lens))
        .with("new_state_kv", floats(|rank| &rank.state[0], columns))
        .with("new_state_gate", floats(|rank| &rank.state[1], columns));
    let effective = EffectivePath::new()
        .with("route", "compress_pcp")
        .with("strategy", strategy.name())
        .with("pcp", world)
        .with("ratio", ratio);
    Ok(Reply { outputs, effective, collectives: run.collectives })
}

impl Step<'_> {
    fn run_rank(&self, link: &Link<'_>) -> Result<Compressed, Stop> {
        let policies = self.policies.1;
        let lines = self.gather_lines(link)?;
        let mut made = Compressed { starts: vec![0], ..Compressed::default() };
        let mut count = 0;
        for (request, line) in lines.iter().enumerate() {
            let origin = (policies.origin)(line.computed);
            let (before, behind) = (line.computed - origin, line.len() - origin);
            for block in (policies.filled)(before, behind, self.plan.ratio) {
                made.entries.extend(self.entry(&lines, request, origin + block * self.plan.ratio));
                count += 1;
            }
            made.starts.push(count);
            let kept = (policies.first_held)(line.len(), self.plan.ratio, self.plan.overlap);
            for token in (kept..line.len()).filter_map(|position| line.at(position)) {
                let (values, gates) = token.columns.split_at(self.columns);
                made.state[0].extend_from_slice(values);
                made.state[1].extend_from_slice(gates);
            }
        }
        self.place_rows(link.rank, &mut made);
        Ok(made)
    }

    /// What is there of each request: what was held, then the new rows in the order of positions.
    fn gather_lines(&self, link: &Link<'_>) -> Result<Vec<Line>, Stop> {
        let (prefill, policies) = self.policies;
        let width = 2 * self.columns;
        let mut own = Vec::new();
        for local in self.shared.run_by(link.rank) {
            push_row(&mut own, &self.new, local.row as i64, width);
        }
        // nobody may read what stands in padding
        own.resize(self.shared.padded * width, f32::NAN);
        let gathered = (policies.gather)(link, own)?;
        let places = (policies.places)((prefill.restore)(&self.shares), &self.shares);
        let batch = &self.shared.batch;
        let line = |(request, computed): (usize, &usize)| {
            let mut tokens = self.held[request].clone();
            for place in &places[batch.starts[request]..batch.starts[request + 1]] {
                let mut columns = Vec::new();
                push_row(&mut columns, &gathered, *place, width);
                let rank = usize::try_from(*place).ok().map(|place| place / self.shared.padded.max(1));
                tokens.push(Token { columns, rank });
            }
            Line { first: computed - self.held[request].len(), computed: *computed, tokens }
        };
        Ok(batch.computed.iter().enumerate().map(line).collect())
    }

    /// The entry of the block of a request that begins at a position.
    fn entry(&self, lines: &[Line], request: usize, start: usize) -> Vec<f32> {
        let (policies, line, ratio) = (self.policies.1, &lines[request], self.plan.ratio);
        let dim = self.columns / (1 + usize::from(self.plan.overlap));
        let mut slots: Vec<(usize, usize, Option<&Token>)> = Vec::new();
        if self.plan.overlap {
            for back in (1..=ratio).rev() {
                let first = policies.halves[0] * dim;
                match start.checked_sub(back) {
                    Some(position) => slots.push((position, first, line.at(position))),
                    None => {
                        let other = (policies.before)(request).map(|other| &lines[other]);
                        let token =
                            other.and_then(|other| other.at(other.len().checked_sub(back - start)?));
                        slots.push((ratio - back % ratio, first, token));
                    }
                }
            }
        }
        let first = if self.plan.overlap { policies.halves[1] * dim } else { 0 };
        slots.extend((start..start + ratio).map(|position| (position, first, line.at(position))));
        let column = |column: usize| {
            let part = |(position, first, token): &(usize, usize, Option<&Token>)| {
                let at = first + column;
                let Some(token) = token else {
                    return policies.absent.map(|(score, value)| Part { score, value, rank: None });
                };
                let place = (policies.bias_place)(*position, line.computed, ratio);
                let score = token.columns[self.columns + at] + self.bias[place * self.columns + at];
                Some(Part { score, value: token.columns[at], rank: token.rank })
            };
            (policies.pool)(&slots.iter().filter_map(part).collect::<Vec<_>>())
        };
        (0..dim).map(column).collect()
    }

    /// The rows of a rank, and how many entries each sees.
    fn place_rows(&self, rank: usize, made: &mut Compressed) {
        let (prefill, policies) = self.policies;
        let batch = &self.shared.batch;
        let mut on_rank = vec![0; batch.computed.len()];
        for local in self.shared.run_by(rank) {
            let request = batch.request_of(local.row);
            let position = batch.computed[request] + local.row - batch.starts[request];
            made.rows.push(local.row as i64);
            made.entry_lens.push((policies.visible)(position, on_rank[request], self.plan.ratio) as i32);
            on_rank[request] += 1;
        }
        made.rows.resize(self.shared.padded, prefill.padding);
        made.entry_lens.resize(self.shared.padded, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(score: f32, value: f32) -> Part {
        Part { score, value, rank: None }
    }

    #[test]
    fn gates_that_are_alike_make_a_mean_and_one_that_is_far_above_takes_all() {
        assert_eq!(pool(&[part(2.0, 1.0), part(2.0, 5.0)]), 3.0);
        assert_eq!(pool(&[part(-200.0, 1.0), part(200.0, 5.0)]), 5.0);
        // no exponent overflows
        assert_eq!(pool(&[part(1000.0, 1.0), part(1000.0, 3.0)]), 2.0);
    }

    #[test]
    fn what_is_held_is_the_open_block_and_the_full_one_before_it_where_blocks_overlap() {
        assert_eq!([0, 3, 4, 7, 8].map(|tokens| first_held(tokens, 4, true)), [0, 0, 0, 0, 4]);
        assert_eq!([0, 3, 4, 7, 8].map(|tokens| first_held(tokens, 4, false)), [0, 0, 4, 4, 8]);
    }
}
