//! A batch to run on an engine, and what dense attention in f64 gives for it.

#![allow(dead_code)]

use shardcheck_cpu::{CpuEngine, engine};
use shardcheck_engine::{
    Answer, Attention, CommBackend, Configuration, Engine, EngineError, LaneOrder, Mask, Operation, Reply,
    Session, Tensor, Tensors,
};
use shardcheck_formats::{Dtype, Overflow, decode_f32, encode_f32, round_bf16, round_f32};

/// Uniform bf16 values in ±1, a fixed function of the seed.
pub fn uniform(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    next();
    (0..count).map(|_| round_bf16((next() >> 40) as f32 / (1 << 23) as f32 - 1.0)).collect()
}

/// A configuration and a batch with its data.
#[derive(Clone)]
pub struct Scene {
    pub configuration: Configuration,
    /// `(cached tokens, new rows)` of each request.
    pub requests: Vec<(usize, usize)>,
    pub padded_rows: usize,
    pub mask: Mask,
    /// Whether there is an up-projection.
    pub projects: bool,
    /// Factor of the keys: sharpens the softmax.
    pub sharpness: f32,
    /// Added to all scores through a constant column.
    pub shift: f32,
    /// Whether new tokens are attended as given, not as the cache holds them (context steps).
    pub new_tokens_given: bool,
    pub seed: u64,
}

impl Scene {
    /// MLA, tp = dcp = `world`, two heads a rank, S = 1, B = 4, decode of four requests, one of them empty.
    pub fn small(world: usize) -> Self {
        let configuration = Configuration {
            attention: Attention::Mla { kv_lora_rank: 16, qk_rope_head_dim: 8, v_head_dim: 4 },
            tp: world,
            dcp: world,
            heads_per_rank: 2,
            interleave: 1,
            block_size: 4,
            blocks: 64,
            dtype: Dtype::Bf16,
            kv_dtype: Dtype::Bf16,
            kv_scale: 1.0,
            softmax_scale: 0.25,
            comm_backend: CommBackend::A2a,
            lane_order: LaneOrder::HiLo,
            query_replication: false,
            project_before_merge: false,
            kernel_head_widths: vec![],
            second_group: None,
        };
        Self {
            configuration,
            requests: vec![(12, 1), (36, 1), (0, 0), (2, 1)],
            padded_rows: 2,
            mask: Mask::Causal,
            projects: false,
            sharpness: 4.0,
            shift: 0.0,
            new_tokens_given: false,
            seed: 1,
        }
    }

    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Activations and cache of f16; anything else leaves the scene in bf16.
    pub fn in_16_bits(&mut self, dtype: Dtype) {
        if dtype == Dtype::F16 {
            (self.configuration.dtype, self.configuration.kv_dtype) = (Dtype::F16, Dtype::F16);
        }
    }

    pub fn lens(&self) -> Vec<usize> {
        self.requests.iter().map(|(cached, rows)| cached + rows).collect()
    }

    pub fn rows(&self) -> usize {
        self.requests.iter().map(|(_, rows)| rows).sum::<usize>() + self.padded_rows
    }

    pub fn starts(&self) -> Vec<i32> {
        let mut starts = vec![0];
        self.requests.iter().for_each(|(_, rows)| starts.push(starts[starts.len() - 1] + *rows as i32));
        starts
    }

    /// Needed blocks from the middle of the pool, in an order that is not sorted; 9999 where nothing is needed.
    pub fn block_table(&self) -> (Vec<i32>, usize) {
        let virtual_block = self.configuration.virtual_block_tokens();
        let width = self.lens().iter().map(|len| len.div_ceil(virtual_block)).max().unwrap_or(0) + 1;
        let mut table = vec![9999; self.requests.len() * width];
        let mut next = 0;
        for (request, len) in self.lens().iter().enumerate() {
            for entry in 0..len.div_ceil(virtual_block) {
                table[request * width + entry] = (next * 7 + 5) % self.configuration.blocks as i32;
                next += 1;
            }
        }
        assert!(next <= self.configuration.blocks as i32, "too few blocks");
        (table, width)
    }

    /// Keys `[tokens, K, Dk]` of all requests, one behind the other.
    pub fn keys(&self) -> Vec<f32> {
        let attention = self.configuration.attention;
        let count = self.lens().iter().sum::<usize>() * attention.kv_heads() * attention.qk_dim();
        let mut keys: Vec<f32> =
            uniform(self.seed, count).iter().map(|k| round_bf16(k * self.sharpness)).collect();
        if self.shift != 0.0 {
            // the query's last column is 1, see `query`
            keys.chunks_exact_mut(attention.qk_dim())
                .for_each(|key| key[attention.qk_dim() - 1] = self.shift);
        }
        keys
    }

    pub fn values(&self) -> Vec<f32> {
        let attention = self.configuration.attention;
        uniform(
            self.seed + 1,
            self.lens().iter().sum::<usize>() * attention.kv_heads() * attention.value_dim(),
        )
    }

    pub fn query(&self) -> Vec<f32> {
        let (heads, dim) = (self.configuration.total_heads(), self.configuration.attention.qk_dim());
        let mut query = uniform(self.seed + 2, self.rows() * heads * dim);
        if self.configuration.dtype == Dtype::F16 {
            // values that bf16 does not hold
            query.iter_mut().for_each(|q| *q = round_f32(Dtype::F16, *q * 1.001));
        }
        if self.shift != 0.0 {
            query.chunks_exact_mut(dim).for_each(|q| q[dim - 1] = 1.0);
        }
        let padding = query.len() - self.padded_rows * heads * dim;
        query[padding..].fill(f32::NAN);
        query
    }

    pub fn w_uv(&self) -> Vec<f32> {
        let attention = self.configuration.attention;
        uniform(
            self.seed + 3,
            self.configuration.total_heads() * attention.value_dim() * attention.v_head_dim(),
        )
    }

    pub fn metadata(&self) -> Tensors {
        let (table, width) = self.block_table();
        let requests = self.requests.len();
        let lens: Vec<i32> = self.lens().iter().map(|len| *len as i32).collect();
        Tensors::new()
            .with("seq_lens", Tensor::from_i32(&[requests], &lens))
            .with("query_start_loc", Tensor::from_i32(&[requests + 1], &self.starts()))
            .with("block_table", Tensor::from_i32(&[requests, width], &table))
    }

    pub fn write_inputs(&self) -> Tensors {
        let attention = self.configuration.attention;
        let (heads, dim, value_dim) = (attention.kv_heads(), attention.qk_dim(), attention.value_dim());
        let (table, width) = self.block_table();
        let (mut positions, mut requests) = (Vec::new(), Vec::new());
        for (request, len) in self.lens().iter().enumerate() {
            positions.extend(0..*len as i64);
            requests.extend(vec![request as i32; *len]);
        }
        // two rows of graph padding, which nobody may write
        let pad = |values: &mut Vec<f32>, dim: usize| values.extend(vec![f32::NAN; 2 * heads * dim]);
        positions.extend([0, 1]);
        requests.extend([-1, -1]);
        let (mut keys, mut values) = (self.keys(), self.values());
        pad(&mut keys, dim);
        pad(&mut values, value_dim);
        let n = positions.len();
        let mut inputs = Tensors::new()
            .with("key", Tensor::from_f32(self.configuration.dtype, &[n, heads, dim], &keys))
            .with("positions", Tensor::from_i64(&[n], &positions))
            .with("requests", Tensor::from_i32(&[n], &requests))
            .with("block_table", Tensor::from_i32(&[self.requests.len(), width], &table));
        if !attention.is_mla() {
            inputs
                .insert("value", Tensor::from_f32(self.configuration.dtype, &[n, heads, value_dim], &values));
        }
        inputs
    }

    /// Of the tensors of all tokens, `[tokens, width]`, those of the cached or of the new ones.
    fn part(&self, values: &[f32], width: usize, new: bool) -> Vec<f32> {
        let (mut part, mut first) = (Vec::new(), 0);
        for (cached, rows) in &self.requests {
            let tokens = if new { first + cached..first + cached + rows } else { first..first + cached };
            part.extend_from_slice(&values[tokens.start * width..tokens.end * width]);
            first += cached + rows;
        }
        part
    }

    /// Writes of the cached tokens alone.
    pub fn write_context_inputs(&self) -> Tensors {
        let attention = self.configuration.attention;
        let heads = attention.kv_heads();
        let (table, width) = self.block_table();
        let (mut positions, mut requests) = (Vec::new(), Vec::new());
        for (request, (cached, _)) in self.requests.iter().enumerate() {
            positions.extend(0..*cached as i64);
            requests.extend(vec![request as i32; *cached]);
        }
        let n = positions.len();
        let tensor = |values: &[f32], dim: usize| {
            Tensor::from_f32(
                self.configuration.dtype,
                &[n, heads, dim],
                &self.part(values, heads * dim, false),
            )
        };
        let mut inputs = Tensors::new()
            .with("key", tensor(&self.keys(), attention.qk_dim()))
            .with("positions", Tensor::from_i64(&[n], &positions))
            .with("requests", Tensor::from_i32(&[n], &requests))
            .with("block_table", Tensor::from_i32(&[self.requests.len(), width], &table));
        if !attention.is_mla() {
            inputs.insert("value", tensor(&self.values(), attention.value_dim()));
        }
        inputs
    }

    /// A step over the cached tokens with the new ones given; graph padding holds NaN.
    pub fn context_inputs(&self) -> Tensors {
        let (total, attention) = (self.configuration.total_heads(), self.configuration.attention);
        let (rows, heads, requests) = (self.rows(), attention.kv_heads(), self.requests.len());
        let lens: Vec<i32> = self.requests.iter().map(|(cached, _)| *cached as i32).collect();
        let tensor = |values: &[f32], dim: usize| {
            let mut part = self.part(values, heads * dim, true);
            part.resize(rows * heads * dim, f32::NAN);
            Tensor::from_f32(self.configuration.dtype, &[rows, heads, dim], &part)
        };
        let shape = [rows, total, attention.qk_dim()];
        let mut inputs = self.metadata();
        inputs.remove("seq_lens");
        inputs.insert("context_lens", Tensor::from_i32(&[requests], &lens));
        inputs.insert("query", Tensor::from_f32(self.configuration.dtype, &shape, &self.query()));
        inputs.insert("key", tensor(&self.keys(), attention.qk_dim()));
        if !attention.is_mla() {
            inputs.insert("value", tensor(&self.values(), attention.value_dim()));
        }
        inputs
    }

    pub fn attend_inputs(&self) -> Tensors {
        let (heads, attention) = (self.configuration.total_heads(), self.configuration.attention);
        let shape = [self.rows(), heads, attention.qk_dim()];
        let mut inputs =
            self.metadata().with("query", Tensor::from_f32(self.configuration.dtype, &shape, &self.query()));
        if self.projects {
            let shape = [heads, attention.value_dim(), attention.v_head_dim()];
            inputs.insert("w_uv", Tensor::from_f32(self.configuration.dtype, &shape, &self.w_uv()));
        }
        inputs
    }

    pub fn open(&self, engine: &CpuEngine) -> Box<dyn Session> {
        match engine.open(&self.configuration).unwrap() {
            Answer::Done(session) => session,
            Answer::Unsupported(reason) => panic!("{reason}"),
        }
    }

    /// Writes the cache and attends.
    pub fn run_on(&self, engine: &CpuEngine) -> Result<Reply, EngineError> {
        let mut session = self.open(engine);
        step(session.as_mut(), &Operation::WriteKv, &mut self.write_inputs())?;
        step(session.as_mut(), &Operation::Attend { mask: self.mask }, &mut self.attend_inputs())
    }

    pub fn run(&self) -> Reply {
        self.run_on(&engine()).unwrap()
    }

    /// The value that a cache gives back for a written one.
    pub fn cached(&self, value: f32) -> f64 {
        let (dtype, scale) = (self.configuration.kv_dtype, self.configuration.kv_scale);
        f64::from(decode_f32(dtype, encode_f32(dtype, value * (1.0 / scale), Overflow::Saturate)))
            * f64::from(scale)
    }

    /// Dense attention in f64: output and LSE of `[rows, heads of all ranks]`, `None` where a row sees nothing.
    pub fn dense(&self) -> Vec<Option<(Vec<f64>, f64)>> {
        let (configuration, attention) = (&self.configuration, self.configuration.attention);
        let (heads, dim, kv_heads) = (configuration.total_heads(), attention.qk_dim(), attention.kv_heads());
        let (keys, values, query, w_uv) = (self.keys(), self.values(), self.query(), self.w_uv());
        let value_dim = attention.value_dim();
        let mut dense = Vec::new();
        let mut first = 0;
        for (cached, rows) in &self.requests {
            let given = |token: usize| self.new_tokens_given && token >= *cached;
            let held = |token: usize, v: f32| if given(token) { f64::from(v) } else { self.cached(v) };
            for row in 0..*rows {
                let visible = if self.mask == Mask::Causal { cached + row + 1 } else { cached + rows };
                for head in 0..heads {
                    let kv_head =
                        head % configuration.gathered_heads() / (configuration.gathered_heads() / kv_heads);
                    let q = &query[(dense.len() / heads * heads + head) * dim..][..dim];
                    let key = |token: usize| &keys[((first + token) * kv_heads + kv_head) * dim..][..dim];
                    let scores: Vec<f64> = (0..visible)
                        .map(|token| {
                            let products =
                                q.iter().zip(key(token)).map(|(q, k)| f64::from(*q) * held(token, *k));
                            products.sum::<f64>() * f64::from(configuration.softmax_scale)
                        })
                        .collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    let mut out = vec![0.0; value_dim];
                    for (token, score) in scores.iter().enumerate() {
                        let value = if attention.is_mla() {
                            &key(token)[..value_dim]
                        } else {
                            &values[((first + token) * kv_heads + kv_head) * value_dim..][..value_dim]
                        };
                        let p = (score - max).exp() / sum;
                        out.iter_mut().zip(value).for_each(|(o, v)| *o += p * held(token, *v));
                    }
                    if self.projects {
                        let to = attention.v_head_dim();
                        let weights = &w_uv[head * value_dim * to..][..value_dim * to];
                        out = (0..to)
                            .map(|v| (0..value_dim).map(|d| out[d] * f64::from(weights[d * to + v])).sum())
                            .collect();
                    }
                    dense.push(Some((out, max + sum.ln())));
                }
            }
            first += cached + rows;
        }
        dense.resize(self.rows() * heads, None);
        dense
    }

    /// Largest distance of a reply from dense attention: `(output, LSE)`; infinite where a NaN or a wrong empty row is.
    pub fn distance(&self, reply: &Reply) -> (f64, f64) {
        let (out, lse) = (reply.outputs.get("out").unwrap(), reply.outputs.get("lse").unwrap());
        let (heads, own, rows) =
            (self.configuration.total_heads(), self.configuration.heads_per_rank, self.rows());
        let dim = out.shape()[3];
        assert_eq!(out.shape(), [self.configuration.tp, rows, own, dim]);
        assert_eq!(lse.shape(), [self.configuration.tp, rows, own]);
        let (out, lse) = (out.to_f64(), lse.to_f64());
        let mut worst = (0.0f64, 0.0f64);
        let larger = |worst: f64, found: f64| if found.is_nan() { f64::INFINITY } else { worst.max(found) };
        for (index, expected) in self.dense().iter().enumerate() {
            let (row, head) = (index / heads, index % heads);
            let at = (head / own * rows + row) * own + head % own;
            let found = &out[at * dim..(at + 1) * dim];
            match expected {
                Some((value, log)) => {
                    value.iter().zip(found).for_each(|(v, f)| worst.0 = larger(worst.0, (v - f).abs()));
                    worst.1 = larger(worst.1, (log - lse[at]).abs());
                }
                None => {
                    found.iter().for_each(|f| worst.0 = if *f == 0.0 { worst.0 } else { f64::INFINITY });
                    worst.1 = if lse[at] == f64::NEG_INFINITY { worst.1 } else { f64::INFINITY };
                }
            }
        }
        worst
    }

    /// Asserts that the healthy engine gives dense attention, within bf16 rounding of values below 4.
    pub fn assert_dense(&self) -> Reply {
        let reply = self.run();
        let (out, lse) = self.distance(&reply);
        assert!(out < 0.03 && lse < 1e-4, "output off by {out}, LSE by {lse}");
        reply
    }
}

/// One step that must be supported.
pub fn step(
    session: &mut dyn Session,
    operation: &Operation,
    inputs: &mut Tensors,
) -> Result<Reply, EngineError> {
    match session.step(operation, inputs)? {
        Answer::Done(reply) => Ok(reply),
        Answer::Unsupported(reason) => panic!("{reason}"),
    }
}
