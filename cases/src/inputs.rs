//! Inputs of an attention case: queries, keys, values, up-projection, block table, and the tensors of each operation.

pub(crate) mod blocks;
mod code;
pub(crate) mod draw;
mod held;
mod shape;
mod tensors;

use shardcheck_formats::{Dtype, Overflow, decode_f32, encode_f32, round_bf16};

use crate::{AttentionCase, Body, Case, Family};

pub use code::TokenCode;
pub use held::{cache_code, cache_value};

use crate::stream::Stream;
use draw::Draw;
use shape::Shape;

/// Everything that is drawn for one attention case.
///
/// All values are exact in the type of activations and lie within the range of the cache format under the cache scale, except in writes of the hot
/// probe, which nobody attends to. Shapes use the words of
/// [`shardcheck_engine::Operation`], and L for the length of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// What is asked, which decides which keys a row sees.
    pub family: Family,
    /// The case that the inputs were drawn for.
    pub case: AttentionCase,
    /// Queries [T, Hall, Dk]; graph-padding rows are NaN.
    pub query: Vec<f32>,
    /// Keys of each request [L, K, Dk], before the cast to the cache format.
    pub keys: Vec<Vec<f32>>,
    /// Values of each request [L, K, Dv], before the cast; no elements for MLA, whose value is the start of the key.
    pub values: Vec<Vec<f32>>,
    /// Keys that lie behind the cached tokens of each request [stale, K, Dk], as rejected drafts leave them: nothing may read
    /// them. Empty but in the forbidden-poison probe.
    pub stale_keys: Vec<Vec<f32>>,
    /// Values that go with them [stale, K, Dv]; no elements for MLA.
    pub stale_values: Vec<Vec<f32>>,
    /// Up-projection [Hall, Dv, V]; MLA only, and only without latent output.
    pub w_uv: Option<Vec<f32>>,
    /// Sinks of the heads `[Hall]`; none but in the family attend_sinks.
    pub sinks: Vec<f32>,
    /// Positions that each row attends to, in the order in which they are given; empty where rows attend to all that they see.
    pub selected: Vec<Vec<usize>>,
    /// Block table [n, width].
    pub block_table: Vec<i32>,
    /// Entries of one row of the block table: one more than the longest request needs.
    pub width: usize,
}

/// Draws the inputs of an attention case. Equal arguments give equal bits, on any machine.
///
/// A key or value depends on the seed, its request and its position alone (and on the length where the probe says so), so that
/// other lengths, batches and configurations of the same model meet the same tokens.
///
/// # Panics
/// For a case that [`Case::check`] refuses.
pub fn generate(family: Family, case: &AttentionCase, seed: u64) -> Inputs {
    let draw = Draw::new(seed);
    let shape = Shape::new(family, case, draw.clone());
    let (block_table, width) =
        blocks::block_table(&case.workload, &case.configuration, &mut draw.placement());
    let requests = case.workload.requests.len();
    let mut inputs = Inputs {
        family,
        case: case.clone(),
        query: query(&shape, case),
        keys: Vec::with_capacity(requests),
        values: Vec::with_capacity(requests),
        stale_keys: Vec::with_capacity(requests),
        stale_values: Vec::with_capacity(requests),
        w_uv: shape.up_projection().map(|values| rounded(case.configuration.dtype, values)),
        sinks: if family == Family::AttendSinks { draw_sinks(case, seed) } else { Vec::new() },
        selected: case
            .selected
            .map(|tokens| tokens.draw(&case.workload, &case.configuration, seed))
            .unwrap_or_default(),
        block_table,
        width,
    };
    for (index, request) in case.workload.requests.iter().enumerate() {
        let (keys, values) = tokens(&shape, index, 0..request.seq_len());
        inputs.keys.push(keys);
        inputs.values.push(values);
        let cached = inputs.cached_tokens(index);
        let (keys, values) = tokens(&shape, index, cached..cached + shape.stale_tokens(index));
        // a key that is stale is not the key that stands at its position later
        let (keys, values) = shape.as_stale(keys, values);
        inputs.stale_keys.push(keys);
        inputs.stale_values.push(values);
    }
    inputs
}

/// Sinks near the LSEs of short rows; every fifth is far above all scores or far below them.
fn draw_sinks(case: &AttentionCase, seed: u64) -> Vec<f32> {
    let mut counter = Stream::Sinks.counter(seed);
    let far = |head: usize| match head % 10 {
        3 => 40.0,
        8 => -40.0,
        _ => 0.0,
    };
    let sink = |head: usize| (2.0 + 2.0 * counter.gaussian() + far(head)) as f32;
    (0..case.configuration.total_heads()).map(sink).collect()
}

impl Case {
    /// The inputs of an attention case; `None` for other bodies.
    pub fn inputs(&self) -> Option<Inputs> {
        match &self.body {
            Body::Attention(case) => Some(generate(self.family, case, self.seed)),
            _ => None,
        }
    }
}

impl Inputs {
    /// Tokens of a request that the cache holds when the operation runs: its context in the context family, which brings the
    /// new keys along, and all its tokens elsewhere.
    pub fn cached_tokens(&self, request: usize) -> usize {
        let request = &self.case.workload.requests[request];
        if self.family.brings_new_keys() { request.context_tokens } else { request.seq_len() }
    }

    /// Keys that row `row` of a request sees: all L for a draft block, else L − q + 1 + row.
    pub fn visible_tokens(&self, request: usize, row: usize) -> usize {
        let request = &self.case.workload.requests[request];
        if self.family == Family::Draft { request.seq_len() } else { request.context_tokens + row + 1 }
    }

    /// The KV head of query head `head` of the session: consecutive heads of a group share one.
    pub fn kv_head(&self, head: usize) -> usize {
        let configuration = &self.case.configuration;
        let gathered = configuration.gathered_heads();
        (head % gathered) / (gathered / configuration.attention.kv_heads())
    }

    /// The code of the token-code probe, to read an attended set back from an output.
    pub fn token_code(&self) -> TokenCode {
        TokenCode::for_case(&self.case)
    }
}

fn query(shape: &Shape, case: &AttentionCase) -> Vec<f32> {
    let elements = case.configuration.total_heads() * case.configuration.attention.qk_dim();
    let mut query = Vec::with_capacity(case.workload.total_rows() * elements);
    let mut row_values = vec![0.0; elements];
    for row in case.workload.rows() {
        match row {
            Some((request, row)) => {
                shape.query_row(request, row, &mut row_values);
                query.extend(row_values.iter().map(|value| activation(case.configuration.dtype, *value)));
            }
            None => query.extend(std::iter::repeat_n(f32::NAN, elements)),
        }
    }
    query
}

fn tokens(shape: &Shape, request: usize, positions: std::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
    let mut keys = vec![0.0; positions.len() * shape.key_elements()];
    let mut values = vec![0.0; positions.len() * shape.value_elements()];
    for (index, position) in positions.enumerate() {
        let key = &mut keys[index * shape.key_elements()..(index + 1) * shape.key_elements()];
        shape.key_row(request, position, key);
        let value = &mut values[index * shape.value_elements()..(index + 1) * shape.value_elements()];
        shape.value_row(request, position, value);
    }
    let dtype = shape.dtype();
    (rounded(dtype, keys), rounded(dtype, values))
}

fn rounded(dtype: Dtype, mut values: Vec<f32>) -> Vec<f32> {
    values.iter_mut().for_each(|value| *value = activation(dtype, *value));
    values
}

/// A drawn value as an activation: the nearest value of the type that is finite, f16 having an end where draws have none.
pub(crate) fn activation(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::Bf16 => round_bf16(value),
        dtype => decode_f32(dtype, encode_f32(dtype, value, Overflow::Saturate)),
    }
}
