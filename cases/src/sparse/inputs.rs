//! How queries, keys and weights of an indexer are drawn, and where the keys lie.
//!
//! Most patterns steer by the last element: each query head holds there a fixed number, and a key as many steps as make its score.

use shardcheck_engine::{Tensor, Tensors};
use shardcheck_formats::{Counter, Dtype};

use super::{IndexPattern, SelectCase};
use crate::inputs::blocks::{block_table, place};
use crate::stream::Stream;

/// What the last element of a query holds where keys are steered by it.
const STEER: f32 = 4.0;
/// Noise of the other elements of such a query.
const NOISE: f32 = 0.25;
/// Most steps of a key: whole numbers up to 256 are exact in bf16.
const MAX_STEPS: usize = 240;
/// Tokens before the first row that are steered, too.
const STEERED_CONTEXT: usize = 8;
/// Steps of a key of the rank that owns the best tokens.
const WINNING_STEPS: f32 = 16.0;

/// Inputs of a case.
pub(super) fn draw(case: &SelectCase, seed: u64) -> Tensors {
    let stream = |stream: Stream| stream.counter(seed);
    let configuration = case.configuration();
    let (table, width) = block_table(&case.workload, &configuration, &mut stream(Stream::IndexPlacement));
    let (count, rows) = (case.workload.requests.len(), case.workload.total_rows());
    let (heads, dim) = (case.index_heads, case.index_dim);
    let mut drawn = stream(Stream::IndexQuery);
    let query: Vec<f32> =
        (0..rows * heads * dim).map(|at| query_element(&mut drawn, case, at % dim)).collect();
    let mut drawn = stream(Stream::IndexWeights);
    let weights: Vec<f32> = (0..rows * heads).map(|_| weight(&mut drawn, case)).collect();
    let lens: Vec<i32> = case.workload.requests.iter().map(|request| request.seq_len() as i32).collect();
    let mut tensors = Tensors::new()
        .with("seq_lens", Tensor::from_i32(&[count], &lens))
        .with("query_start_loc", Tensor::from_i32(&[count + 1], &case.workload.query_start_loc()))
        .with("block_table", Tensor::from_i32(&[count, width], &table))
        .with("index_query", Tensor::from_f32(case.index_dtype, &[rows, heads, dim], &query))
        .with("index_weights", Tensor::from_f32(Dtype::F32, &[rows, heads], &weights));
    let (cache, scales) = caches(case, seed, &table, width);
    let slots = [case.tp, case.blocks, case.block_size];
    let shape = [slots[0], slots[1], slots[2], dim];
    tensors.insert("index_cache", Tensor::from_f32(case.index_dtype, &shape, &cache));
    if case.index_dtype == Dtype::E4m3fn {
        tensors.insert("index_scale", Tensor::from_f32(Dtype::F32, &slots, &scales));
    }
    tensors
}

/// Keys in their slots, and the scale of each; NaN where no token lies.
fn caches(case: &SelectCase, seed: u64, table: &[i32], width: usize) -> (Vec<f32>, Vec<f32>) {
    let configuration = case.configuration();
    let (dim, per_rank) = (case.index_dim, case.blocks * case.block_size);
    let mut cache = vec![f32::NAN; case.tp * per_rank * dim];
    let mut scales = vec![f32::NAN; case.tp * per_rank];
    let winner = Stream::IndexRank.counter(seed).below(case.dcp as u64) as usize;
    let (mut drawn, mut of_scale) = (Stream::IndexKey.counter(seed), Stream::IndexScale.counter(seed));
    let mut key = vec![0.0; dim];
    for (number, request) in case.workload.requests.iter().enumerate() {
        let len = request.seq_len();
        let virtual_block = case.block_size * case.dcp;
        // what was rejected before lies behind the end, in blocks that the request has
        let stale = case.pattern == IndexPattern::Newest;
        let end = if stale { len.next_multiple_of(virtual_block) } else { len };
        for position in 0..end {
            let at = place(&configuration, position);
            let before_rows = (request.context_tokens).saturating_sub(STEERED_CONTEXT);
            let steps = match case.pattern {
                IndexPattern::Newest => (position + 1).saturating_sub(before_rows).min(MAX_STEPS) as f32,
                IndexPattern::OneRank if at.owner == winner => WINNING_STEPS,
                _ => 0.0,
            };
            fill_key(&mut drawn, case, steps, &mut key);
            let scale = key_scale(&mut of_scale, case.pattern);
            let slot = table[number * width + at.entry] as usize * case.block_size + at.offset;
            for rank in (at.owner..case.tp).step_by(case.dcp) {
                let slot = rank * per_rank + slot;
                cache[slot * dim..(slot + 1) * dim].copy_from_slice(&key);
                scales[slot] = scale;
            }
        }
    }
    (cache, scales)
}

fn is_steered(pattern: IndexPattern) -> bool {
    matches!(pattern, IndexPattern::Newest | IndexPattern::OneRank)
}

/// A small whole number.
fn whole(gaussian: f32) -> f32 {
    gaussian.round().clamp(-2.0, 2.0)
}

fn query_element(drawn: &mut Counter, case: &SelectCase, element: usize) -> f32 {
    let gaussian = drawn.gaussian() as f32;
    match case.pattern {
        IndexPattern::Random => gaussian,
        IndexPattern::Ties => whole(gaussian),
        IndexPattern::Zeros | IndexPattern::Negative => gaussian.abs(),
        _ if element + 1 == case.index_dim => STEER,
        _ => NOISE * gaussian,
    }
}

fn weight(drawn: &mut Counter, case: &SelectCase) -> f32 {
    let gaussian = drawn.gaussian() as f32;
    let size = (case.index_heads as f32).sqrt().recip();
    match case.pattern {
        IndexPattern::Random => size * gaussian,
        // zero among them: a head may count for nothing
        IndexPattern::Ties => (2.0 * gaussian).round() / 4.0,
        IndexPattern::Negative => -size * (0.1 + gaussian.abs()),
        IndexPattern::Zeros | IndexPattern::Newest | IndexPattern::OneRank => size * (0.5 + gaussian.abs()),
    }
}

fn fill_key(drawn: &mut Counter, case: &SelectCase, steps: f32, key: &mut [f32]) {
    let away = case.pattern == IndexPattern::Zeros && drawn.below(8) != 0;
    for value in key.iter_mut() {
        let gaussian = drawn.gaussian() as f32;
        *value = match case.pattern {
            IndexPattern::Ties => whole(gaussian),
            IndexPattern::Zeros if away => -gaussian.abs(),
            IndexPattern::Zeros | IndexPattern::Negative => gaussian.abs(),
            _ => gaussian,
        };
    }
    if is_steered(case.pattern) {
        key[case.index_dim - 1] = steps;
    }
}

/// Scale of an 8-bit key. Where ties or order are made on purpose, all have the same.
fn key_scale(drawn: &mut Counter, pattern: IndexPattern) -> f32 {
    let gaussian = drawn.gaussian() as f32;
    match pattern {
        IndexPattern::Random | IndexPattern::Zeros | IndexPattern::Negative => 0.1 * gaussian.exp(),
        _ => 0.5,
    }
}
