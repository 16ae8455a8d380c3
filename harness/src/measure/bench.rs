//! A session of one rank on which single rows are decoded: what a row sees is written as it is given.

use shardcheck_engine::{
    Answer, Attention, CommBackend, Configuration, Engine, LaneOrder, Mask, Operation, Session, Tensor,
    Tensors,
};
use shardcheck_formats::{Dtype, bf16_from_f32, bf16_to_f32};

/// Elements that make a score.
pub(super) const SCORE_DIM: usize = 64;
/// Elements of a value.
pub(super) const VALUE_DIM: usize = 64;
/// Block size in tokens.
pub(super) const BLOCK_TOKENS: usize = 16;
/// Query heads: equal ones, of which the first is read.
const HEADS: usize = 4;

/// A query row and the tokens that it sees.
pub(super) struct Row {
    /// `[SCORE_DIM]`.
    pub query: Vec<f32>,
    /// `[tokens][SCORE_DIM]`.
    pub keys: Vec<Vec<f32>>,
    /// `[tokens][VALUE_DIM]`.
    pub values: Vec<Vec<f32>>,
}

impl Row {
    /// Query, keys and values as the engine holds them.
    pub fn stored(&self) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let flat = |rows: &[Vec<f32>]| rows.iter().flatten().copied().map(stored).collect();
        (self.query.iter().copied().map(stored).collect(), flat(&self.keys), flat(&self.values))
    }
}

/// A value rounded to bf16.
pub(super) fn stored(value: f32) -> f32 {
    bf16_to_f32(bf16_from_f32(value))
}

/// Outputs `[rows][VALUE_DIM]` and LSEs `[rows]`.
pub(super) type Decoded = (Vec<Vec<f64>>, Vec<f64>);

/// Decodes each row in a request of its own, as grouped-query attention or, where that is unsupported, as latent attention whose
/// query has nothing for the latent part.
///
/// # Errors
/// Why the engine does neither.
pub(super) fn decode(engine: &dyn Engine, rows: &[Row]) -> Result<Decoded, String> {
    let grouped = Attention::Gqa { kv_heads: 1, head_dim: SCORE_DIM, v_head_dim: VALUE_DIM };
    let latent =
        Attention::Mla { kv_lora_rank: VALUE_DIM, qk_rope_head_dim: SCORE_DIM, v_head_dim: VALUE_DIM };
    let first = decode_as(engine, grouped, rows);
    first.or_else(|why| decode_as(engine, latent, rows).map_err(|other| format!("{why}; {other}")))
}

fn decode_as(engine: &dyn Engine, attention: Attention, rows: &[Row]) -> Result<Decoded, String> {
    let pages = |row: &Row| row.keys.len().div_ceil(BLOCK_TOKENS);
    let width = rows.iter().map(pages).max().unwrap_or(1);
    let configuration = configuration(attention, Dtype::Bf16, 1.0, rows.iter().map(pages).sum());
    let mut session = open(engine, &configuration)?;
    let (mut table, mut next) = (Vec::new(), 0i32);
    for row in rows {
        let used = pages(row) as i32;
        table.extend((0..width as i32).map(|page| if page < used { next + page } else { i32::MAX }));
        next += used;
    }
    let table = Tensor::from_i32(&[rows.len(), width], &table);
    step(session.as_mut(), &Operation::WriteKv, tokens(attention, rows, &table))?;
    let padding = if attention.is_mla() { VALUE_DIM } else { 0 };
    let query: Vec<f32> = rows
        .iter()
        .flat_map(|row| {
            let head = [vec![0.0; padding], row.query.clone()].concat();
            std::iter::repeat_n(head, HEADS).flatten().collect::<Vec<_>>()
        })
        .collect();
    let lens: Vec<i32> = rows.iter().map(|row| row.keys.len() as i32).collect();
    let starts: Vec<i32> = (0..=rows.len() as i32).collect();
    let shape = [rows.len(), HEADS, attention.qk_dim()];
    let inputs = Tensors::new()
        .with("query", Tensor::from_f32(Dtype::Bf16, &shape, &query))
        .with("seq_lens", Tensor::from_i32(&[rows.len()], &lens))
        .with("query_start_loc", Tensor::from_i32(&[rows.len() + 1], &starts))
        .with("block_table", table);
    let outputs = step(session.as_mut(), &Operation::Attend { mask: Mask::Causal }, inputs)?;
    let read = |name: &str, elements: usize| {
        let tensor = outputs.get(name).map_err(|error| error.to_string())?;
        if tensor.len() != elements {
            return Err(format!("{name} has shape {:?}", tensor.shape()));
        }
        Ok(tensor.to_f64())
    };
    let out = read("out", rows.len() * HEADS * VALUE_DIM)?;
    let lse = read("lse", rows.len() * HEADS)?;
    let outs = out.chunks_exact(HEADS * VALUE_DIM).map(|row| row[..VALUE_DIM].to_vec()).collect();
    Ok((outs, lse.chunks_exact(HEADS).map(|row| row[0]).collect()))
}

/// Codes of `values`, written as one token's key and read back.
///
/// # Errors
/// Why the engine does not do that.
pub(super) fn written(
    engine: &dyn Engine,
    dtype: Dtype,
    scale: f32,
    values: &[f32],
) -> Result<Vec<u64>, String> {
    let attention = Attention::Gqa { kv_heads: 1, head_dim: SCORE_DIM, v_head_dim: VALUE_DIM };
    let latent =
        Attention::Mla { kv_lora_rank: VALUE_DIM, qk_rope_head_dim: SCORE_DIM, v_head_dim: VALUE_DIM };
    let first = written_as(engine, attention, dtype, scale, values);
    first.or_else(|why| {
        written_as(engine, latent, dtype, scale, values).map_err(|other| format!("{why}; {other}"))
    })
}

fn written_as(
    engine: &dyn Engine,
    attention: Attention,
    dtype: Dtype,
    scale: f32,
    values: &[f32],
) -> Result<Vec<u64>, String> {
    let mut session = open(engine, &configuration(attention, dtype, scale, 1))?;
    let mut key = values.to_vec();
    key.resize(SCORE_DIM, 0.0);
    let row = if attention.is_mla() {
        Row { query: Vec::new(), keys: vec![vec![0.0; SCORE_DIM]], values: vec![key] }
    } else {
        Row { query: Vec::new(), keys: vec![key], values: vec![vec![0.0; VALUE_DIM]] }
    };
    let table = Tensor::from_i32(&[1, 1], &[0]);
    step(session.as_mut(), &Operation::WriteKv, tokens(attention, &[row], &table))?;
    let outputs = step(session.as_mut(), &Operation::ReadCache, Tensors::new())?;
    let cache = outputs.get("key_cache").map_err(|error| error.to_string())?;
    if cache.dtype() != dtype || cache.len() < values.len() {
        return Err(format!("the cache is {} {:?}", cache.dtype(), cache.shape()));
    }
    Ok(cache.to_codes()[..values.len()].to_vec())
}

/// Inputs of a write of all tokens of all rows.
fn tokens(attention: Attention, rows: &[Row], table: &Tensor) -> Tensors {
    let (mut key, mut value, mut positions, mut requests) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (request, row) in rows.iter().enumerate() {
        for (position, (score, held)) in row.keys.iter().zip(&row.values).enumerate() {
            if attention.is_mla() {
                key.extend_from_slice(held);
            } else {
                value.extend_from_slice(held);
            }
            key.extend_from_slice(score);
            positions.push(position as i64);
            requests.push(request as i32);
        }
    }
    let count = positions.len();
    let mut inputs = Tensors::new()
        .with("key", Tensor::from_f32(Dtype::Bf16, &[count, 1, attention.qk_dim()], &key))
        .with("positions", Tensor::from_i64(&[count], &positions))
        .with("requests", Tensor::from_i32(&[count], &requests))
        .with("block_table", table.clone());
    if !attention.is_mla() {
        inputs.insert("value", Tensor::from_f32(Dtype::Bf16, &[count, 1, VALUE_DIM], &value));
    }
    inputs
}

fn configuration(attention: Attention, kv_dtype: Dtype, kv_scale: f32, blocks: usize) -> Configuration {
    Configuration {
        attention,
        tp: 1,
        dcp: 1,
        heads_per_rank: HEADS,
        interleave: 1,
        block_size: BLOCK_TOKENS,
        blocks: blocks.max(1),
        dtype: Dtype::Bf16,
        kv_dtype,
        kv_scale,
        softmax_scale: 1.0,
        comm_backend: CommBackend::AgRs,
        lane_order: LaneOrder::LoHi,
        query_replication: false,
        project_before_merge: false,
        kernel_head_widths: Vec::new(),
        second_group: None,
    }
}

fn open(engine: &dyn Engine, configuration: &Configuration) -> Result<Box<dyn Session>, String> {
    match engine.open(configuration).map_err(|error| error.to_string())? {
        Answer::Done(session) => Ok(session),
        Answer::Unsupported(why) => Err(why),
    }
}

fn step(session: &mut dyn Session, operation: &Operation, mut inputs: Tensors) -> Result<Tensors, String> {
    match session.step(operation, &mut inputs).map_err(|error| error.to_string())? {
        Answer::Done(reply) => Ok(reply.outputs),
        Answer::Unsupported(why) => Err(why),
    }
}
