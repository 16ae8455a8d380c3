//! Queries, keys and values of a sequence, and the tensors of each of its runs.
//!
//! A key and a value belong to a token, not to a place: a token that takes the position of a rejected one, or whose request got
//! the block of another, has other content, so that reading what was there before shows.

use shardcheck_engine::Configuration;

use super::{SequenceCase, Turn};
use crate::inputs::{activation, draw::Draw};
use crate::stream::Stream;
use crate::{AttentionCase, Inputs};

/// Deviation of the scores: some tokens carry most of the weight, so that a wrong one moves the output by much.
const SCORE: f32 = 1.5;

impl Turn {
    /// Everything that the run of this turn is given.
    pub fn inputs(&self, sequence: &SequenceCase, seed: u64) -> Inputs {
        let case = self.case(sequence);
        let draw = Draw::new(seed);
        let attention = case.configuration.attention;
        let (block_table, width) = table(&self.blocks, case.configuration.blocks);
        let requests = self.requests.len();
        let value_dim = if attention.is_mla() { 0 } else { attention.value_dim() };
        let tokens = |stream: Stream, dim: usize| -> Vec<Vec<f32>> {
            let elements = attention.kv_heads() * dim;
            let of_request = |tokens: &Vec<u32>| {
                tokens
                    .iter()
                    .flat_map(|token| token_row(&case.configuration, &draw, stream, *token, elements))
                    .collect()
            };
            self.tokens.iter().map(of_request).collect()
        };
        Inputs {
            family: self.kind.family(),
            query: self.queries(&case, &draw),
            keys: tokens(Stream::Key, attention.qk_dim()),
            values: tokens(Stream::Value, value_dim),
            stale_keys: vec![Vec::new(); requests],
            stale_values: vec![Vec::new(); requests],
            w_uv: up_projection(&case, &draw),
            sinks: Vec::new(),
            selected: Vec::new(),
            block_table,
            width,
            case,
        }
    }

    fn queries(&self, case: &AttentionCase, draw: &Draw) -> Vec<f32> {
        let configuration = &case.configuration;
        let dim = configuration.attention.qk_dim();
        let elements = configuration.total_heads() * dim;
        let size = SCORE / (configuration.softmax_scale * unit(configuration) * (dim as f32).sqrt());
        let mut query = Vec::with_capacity(case.workload.total_rows() * elements);
        let mut row = vec![0.0; elements];
        for index in 0..case.workload.query_rows() {
            draw.gaussian(Stream::Query, self.step, index * elements, &mut row);
            query.extend(row.iter().map(|value| activation(configuration.dtype, value * size)));
        }
        query.resize(case.workload.total_rows() * elements, f32::NAN);
        query
    }
}

/// The block table of requests that hold `blocks`, in caches of `cache_blocks`, and its width. Entries that are not needed hold
/// ids that no cache has.
pub(super) fn table(blocks: &[Vec<i32>], cache_blocks: usize) -> (Vec<i32>, usize) {
    let width = blocks.iter().map(Vec::len).max().unwrap_or(0) + 1;
    let out_of_range = [-7, i32::MAX / 2, cache_blocks as i32 + 3];
    let mut table: Vec<i32> = (0..blocks.len() * width).map(|index| out_of_range[index % 3]).collect();
    for (row, blocks) in table.chunks_exact_mut(width).zip(blocks) {
        row[..blocks.len()].copy_from_slice(blocks);
    }
    (table, width)
}

/// Keys or values of a token, all heads.
pub(super) fn token_row(
    configuration: &Configuration,
    draw: &Draw,
    stream: Stream,
    token: u32,
    elements: usize,
) -> Vec<f32> {
    let mut row = vec![0.0; elements];
    draw.gaussian(stream, token as usize, 0, &mut row);
    let unit = unit(configuration);
    row.iter_mut().for_each(|value| *value = activation(configuration.dtype, *value * unit));
    row
}

/// Deviation of keys and values: 1, or less where the cache format ends at 8 deviations.
fn unit(configuration: &Configuration) -> f32 {
    let largest = configuration.kv_dtype.max_finite() * f64::from(configuration.kv_scale);
    (largest.min(1e6) as f32 / 8.0).min(1.0)
}

/// As [`crate::generate`] draws it for noise: a matrix that keeps the size of a value.
fn up_projection(case: &AttentionCase, draw: &Draw) -> Option<Vec<f32>> {
    let attention = case.configuration.attention;
    if !attention.is_mla() || case.latent_output {
        return None;
    }
    let (from, to) = (attention.value_dim(), attention.v_head_dim());
    let mut matrix = vec![0.0; case.configuration.total_heads() * from * to];
    draw.uniform(Stream::UpProjection, &mut matrix);
    let size = (from as f32).sqrt().recip();
    matrix.iter_mut().for_each(|value| *value = activation(case.configuration.dtype, *value * size));
    Some(matrix)
}
