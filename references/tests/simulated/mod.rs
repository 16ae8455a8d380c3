//! A float32 engine that keeps a rounding contract: tiles in random order, online softmax, bf16 probabilities,
//! bf16 partials, and each published merge. It exists to try to break the bound.

use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;
use shardcheck_formats::recipe::Counter;
use shardcheck_formats::single::round_bf16;
use shardcheck_references::attention::plain::Problem;
use shardcheck_references::layout::Layout;
use shardcheck_references::split::Split;
use shardcheck_references::visibility::Visible;

/// Additions that one matrix instruction makes at once.
const BLOCK: usize = 16;

/// How the simulated engine goes about what its contract leaves open.
#[derive(Debug, Clone, Copy)]
pub struct Habits {
    /// Tokens of a tile.
    pub tile: usize,
    /// Whether the accumulators truncate instead of rounding.
    pub truncate: bool,
    /// A token that rank 0 forgets, as an index among its own.
    pub forgets: Option<usize>,
}

/// What the engine returns; the layout of [`shardcheck_references::bound::Certified`].
#[derive(Default)]
pub struct Returned {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    /// `[world]`: `(out, lse)`.
    pub partials: Vec<(Vec<f64>, Vec<f64>)>,
}

/// Runs every row and head.
pub fn attend(
    problem: &Problem,
    layout: &Layout,
    visible: &[Visible],
    contract: &Contract,
    habits: Habits,
    random: &mut Counter,
) -> Returned {
    let mut returned = Returned { partials: vec![Default::default(); layout.world()], ..Returned::default() };
    for (row, seen) in visible.iter().enumerate() {
        for head in 0..problem.heads {
            let mut partials = Vec::new();
            for rank in 0..layout.world() {
                let mut positions: Vec<usize> = seen.on_rank(layout, rank).positions().collect();
                if let (0, Some(index)) = (rank, habits.forgets) {
                    positions.remove(index);
                }
                let alone = if layout.world() == 1 { *problem } else { Problem { sink: None, ..*problem } };
                let (mut out, lse) = partial(&alone, (row, head), &positions, contract, habits, random);
                if layout.world() > 1 {
                    out.iter_mut().for_each(|x| *x = round_to(contract.partial, *x));
                }
                returned.partials[rank].0.extend(out.iter().map(|x| f64::from(*x)));
                returned.partials[rank].1.push(f64::from(lse));
                partials.push((out, lse));
            }
            if let (Some(sink), 2..) = (problem.sink, layout.world()) {
                // one more exponential without a value, which belongs to no rank
                partials.push((vec![0.0; problem.v_dim], sink[head] as f32));
            }
            let (out, lse) = if layout.world() == 1 && !seen.is_empty() {
                partials.remove(0)
            } else {
                merge(contract, &partials, random)
            };
            returned.out.extend(out.iter().map(|x| f64::from(round_to(contract.output, *x))));
            returned.lse.push(f64::from(lse));
        }
    }
    returned
}

/// Attends to consecutive chunks and merges each into a running output that is stored in the partial format.
pub fn attend_chain(
    problem: &Problem,
    chunk_tokens: &[usize],
    visible: &[Visible],
    contract: &Contract,
    habits: Habits,
    random: &mut Counter,
) -> Returned {
    let split = Split::Chunks(chunk_tokens);
    let mut returned =
        Returned { partials: vec![Default::default(); chunk_tokens.len()], ..Returned::default() };
    for (row, seen) in visible.iter().enumerate() {
        let chunks = split.positions(seen);
        for head in 0..problem.heads {
            let mut running = None;
            for (chunk, positions) in chunks.iter().enumerate() {
                let (mut out, lse) = partial(problem, (row, head), positions, contract, habits, random);
                if chunks.len() > 1 {
                    out.iter_mut().for_each(|x| *x = round_to(contract.partial, *x));
                }
                returned.partials[chunk].0.extend(out.iter().map(|x| f64::from(*x)));
                returned.partials[chunk].1.push(f64::from(lse));
                running = Some(match running {
                    None => (out, lse),
                    Some(before) => {
                        let (mut out, lse) = merge_two(&before, &(out, lse), random.below(2) == 0);
                        if chunk + 1 < chunks.len() {
                            out.iter_mut().for_each(|x| *x = round_to(contract.partial, *x));
                        }
                        (out, lse)
                    }
                });
            }
            let (out, lse) = running.expect("at least one chunk");
            returned.out.extend(out.iter().map(|x| f64::from(round_to(contract.output, *x))));
            returned.lse.push(f64::from(lse));
        }
    }
    returned
}

/// Two-state merge, with weights that are normalised once more or not.
fn merge_two(a: &(Vec<f32>, f32), b: &(Vec<f32>, f32), normalise: bool) -> (Vec<f32>, f32) {
    let max = a.1.max(b.1);
    if max == f32::NEG_INFINITY {
        return (vec![0.0; a.0.len()], max);
    }
    let (p, q) = ((a.1 - max).exp(), (b.1 - max).exp());
    let lse = max + (p + q).ln();
    let (wa, wb) =
        if normalise { (p / (p + q), q / (p + q)) } else { ((a.1 - lse).exp(), (b.1 - lse).exp()) };
    let weighted = |w: f32, x: f32| if w == 0.0 { 0.0 } else { w * x };
    (a.0.iter().zip(&b.0).map(|(x, y)| weighted(wa, *x) + weighted(wb, *y)).collect(), lse)
}

/// `[heads, v_dim]` from stored `[heads, latent]` by weights `[heads, latent, v_dim]`, block by block in
/// binary32.
pub fn project(latent: &[f64], weights: &[f32], latent_dim: usize, v_dim: usize, truncate: bool) -> Vec<f32> {
    latent
        .chunks_exact(latent_dim)
        .zip(weights.chunks_exact(latent_dim * v_dim))
        .flat_map(|(latent, weights)| {
            (0..v_dim).map(move |v| {
                latent.chunks(BLOCK).enumerate().fold(0f32, |sum, (block, latent)| {
                    let products = latent
                        .iter()
                        .enumerate()
                        .map(|(i, x)| x * f64::from(weights[(block * BLOCK + i) * v_dim + v]));
                    accumulate(sum, products.sum(), truncate)
                })
            })
        })
        .collect()
}

/// `x` rounded to a format.
pub fn round_to(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::Bf16 => round_bf16(x),
        Dtype::F32 => x,
        other => shardcheck_formats::codec::round(other, f64::from(x)) as f32,
    }
}

/// `x` cut to binary32 toward zero.
fn cut(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest).abs() > x.abs() { f32::from_bits(nearest.to_bits() - 1) } else { nearest }
}

/// One step of an accumulator: the block's sum is exact inside, then rounded or cut.
fn accumulate(sum: f32, block: f64, truncate: bool) -> f32 {
    let exact = f64::from(sum) + block;
    if truncate { cut(exact) } else { exact as f32 }
}

fn partial(
    problem: &Problem,
    (row, head): (usize, usize),
    positions: &[usize],
    contract: &Contract,
    habits: Habits,
    random: &mut Counter,
) -> (Vec<f32>, f32) {
    if positions.is_empty() {
        return (vec![f32::NAN; problem.v_dim], f32::NEG_INFINITY);
    }
    let score = |token: usize| {
        let product = product(problem, row, head, token, habits.truncate);
        match problem.softcap {
            None => (problem.scale * std::f64::consts::LOG2_E) as f32 * product,
            Some(cap) => {
                let cap = cap as f32;
                (cap * (product * problem.scale as f32 / cap).tanh()) * std::f32::consts::LOG2_E
            }
        }
    };
    let mut tiles: Vec<&[usize]> = positions.chunks(habits.tile).collect();
    for i in (1..tiles.len()).rev() {
        tiles.swap(i, random.below(i as u64 + 1) as usize);
    }
    let (mut max, mut sum, mut acc) = (f32::NEG_INFINITY, 0f32, vec![0f32; problem.v_dim]);
    for tile in tiles {
        let scores: Vec<f32> = tile.iter().map(|&token| score(token)).collect();
        let new_max = scores.iter().copied().fold(max, f32::max);
        let rescale = (max - new_max).exp2();
        sum *= rescale;
        acc.iter_mut().for_each(|x| *x *= rescale);
        max = new_max;
        let exact: Vec<f32> = scores.iter().map(|s| (s - max).exp2()).collect();
        let rounded: Vec<f32> =
            exact.iter().map(|p| contract.p_dtype.map_or(*p, |dtype| round_to(dtype, *p))).collect();
        for p in if contract.l_rounded { &rounded } else { &exact } {
            sum += p;
        }
        for (tokens, weights) in tile.chunks(BLOCK).zip(rounded.chunks(BLOCK)) {
            let mut blocks = vec![0f64; problem.v_dim];
            for (&token, p) in tokens.iter().zip(weights) {
                for (block, v) in blocks.iter_mut().zip(problem.value_at(token, problem.kv_head(head))) {
                    *block += f64::from(*p) * f64::from(*v);
                }
            }
            for (x, block) in acc.iter_mut().zip(blocks) {
                *x = accumulate(*x, block, habits.truncate);
            }
        }
    }
    if let Some(sink) = problem.sink {
        let sink = sink[head] as f32 * std::f32::consts::LOG2_E;
        let rescale = (max - max.max(sink)).exp2();
        max = max.max(sink);
        sum = sum * rescale + (sink - max).exp2();
        acc.iter_mut().for_each(|x| *x *= rescale);
    }
    acc.iter_mut().for_each(|x| *x /= sum);
    (acc, (max + sum.log2()) * std::f32::consts::LN_2)
}

fn product(problem: &Problem, row: usize, head: usize, token: usize, truncate: bool) -> f32 {
    let (query, key) = (problem.query_at(row, head), problem.key_at(token, problem.kv_head(head)));
    let mut sum = 0f32;
    for (query, key) in query.chunks(BLOCK).zip(key.chunks(BLOCK)) {
        let block = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        sum = accumulate(sum, block, truncate);
    }
    sum
}

/// A merge of `[parts]` pairs of output and LSE.
pub fn merge(contract: &Contract, partials: &[(Vec<f32>, f32)], random: &mut Counter) -> (Vec<f32>, f32) {
    let max = partials.iter().map(|partial| partial.1).fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return (vec![0.0; partials[0].0.len()], max);
    }
    let lse = max + partials.iter().map(|partial| (partial.1 - max).exp()).sum::<f32>().ln();
    let weighted = |partial: &(Vec<f32>, f32), d: usize| {
        let factor = (partial.1 - lse).exp();
        if factor == 0.0 { 0.0 } else { factor * partial.0[d] }
    };
    let out = (0..partials[0].0.len())
        .map(|d| {
            let mut terms: Vec<f32> = partials.iter().map(|partial| weighted(partial, d)).collect();
            let added = |x: f32| contract.merge.rounded_to().map_or(x, |dtype| round_to(dtype, x));
            terms.iter_mut().for_each(|x| *x = added(*x));
            // any reduction tree
            while terms.len() > 1 {
                let a = terms.swap_remove(random.below(terms.len() as u64) as usize);
                let index = random.below(terms.len() as u64) as usize;
                terms[index] = added(terms[index] + a);
            }
            terms[0]
        })
        .collect();
    (out, lse)
}
