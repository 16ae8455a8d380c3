//! Attention through the project's embedded multi-rank engine: real ranks, exchanges and merges under a real model.
//!
//! Every layer has a session of its own (a session is one layer's caches); tokens are appended by
//! [`Operation::WriteKv`] and attended to by [`Operation::Attend`], as the harness does it. Queries, keys, values, partial and
//! merged outputs are bf16.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use shardcheck_cpu::{CpuEngine, Fault, fault, faults};
use shardcheck_engine::{
    Answer, CommBackend, Configuration, Engine, EngineError, LaneOrder, Mask, Operation, Session, Tensor,
    TensorError, Tensors,
};
use shardcheck_formats::Dtype;
use thiserror::Error;

use super::interleave::Interleave;
use super::merge::MergeOrder;
use super::{Attention, AttentionError, AttentionPath, AttentionShape};

/// Dtypes of the KV cache that a server offers. Keys and values arrive in bf16, so the 16-bit and the 32-bit cache hold the same
/// values; the 8-bit ones are cast with scale 1.
pub const KV_DTYPES: [Dtype; 4] = [Dtype::Bf16, Dtype::F32, Dtype::E4m3fn, Dtype::E4m3fnuz];

/// Why the engine can't be used.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum EmbeddedError {
    /// Query heads that do not divide over KV heads, or none.
    #[error("{query_heads} query heads do not divide over {kv_heads} KV heads")]
    Heads {
        /// Query heads.
        query_heads: usize,
        /// KV heads.
        kv_heads: usize,
    },
    /// The engine does not run this configuration.
    #[error("the embedded engine does not run this: {0}")]
    Unsupported(String),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// How KV is sharded, kept and merged.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddedConfig {
    /// Layout of tokens over ranks.
    pub layout: Interleave,
    /// Collectives of the merge.
    pub merge: MergeOrder,
    /// Dtype of the KV cache.
    pub kv_dtype: Dtype,
    /// Injected fault.
    pub fault: Option<&'static Fault>,
    /// Tokens that the cache holds over all ranks; rounded up to whole virtual blocks.
    pub cache_tokens: usize,
}

/// The fault of that name in the embedded engine.
///
/// # Errors
/// A text that lists all names.
pub fn fault_named(name: &str) -> Result<&'static Fault, String> {
    fault(name).ok_or_else(|| {
        let names: Vec<&str> = faults().iter().map(|fault| fault.name).collect();
        format!("`{name}` is no fault of the embedded engine; it has {}", names.join(", "))
    })
}

/// The embedded engine with one session a layer.
pub struct Embedded {
    engine: Box<dyn Engine>,
    configuration: Configuration,
    shape: AttentionShape,
    /// Query heads per KV head, zero heads included.
    padded_group: usize,
    fault: Option<&'static Fault>,
    /// `[layers]`; `None` after a failure, until the layer is used again.
    sessions: Vec<Mutex<Option<Box<dyn Session>>>>,
}

impl Embedded {
    /// Empty caches for a model of `shape`, in the embedded engine with the fault of `config`.
    ///
    /// # Errors
    /// [`EmbeddedError`].
    pub fn new(shape: AttentionShape, config: EmbeddedConfig) -> Result<Self, EmbeddedError> {
        let engine = config.fault.map_or_else(shardcheck_cpu::engine, CpuEngine::with_fault);
        Self::with_engine(shape, config, Box::new(engine))
    }

    /// The same over any engine; the fault of `config` is only shown then.
    ///
    /// # Errors
    /// [`EmbeddedError`].
    pub fn with_engine(
        shape: AttentionShape,
        config: EmbeddedConfig,
        engine: Box<dyn Engine>,
    ) -> Result<Self, EmbeddedError> {
        let AttentionShape { layers, query_heads, kv_heads, head_dim } = shape;
        if kv_heads == 0 || query_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
            return Err(EmbeddedError::Heads { query_heads, kv_heads });
        }
        let layout = config.layout;
        let padded_group = padded_group(shape, layout.ranks());
        let configuration = Configuration {
            attention: shardcheck_engine::Attention::Gqa { kv_heads, head_dim, v_head_dim: head_dim },
            tp: layout.ranks(),
            dcp: layout.ranks(),
            heads_per_rank: kv_heads * padded_group / layout.ranks(),
            interleave: layout.interleave_tokens(),
            block_size: layout.block_tokens(),
            blocks: config.cache_tokens.div_ceil(layout.virtual_block_tokens()).max(1),
            dtype: Dtype::Bf16,
            kv_dtype: config.kv_dtype,
            kv_scale: 1.0,
            softmax_scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            comm_backend: match config.merge {
                MergeOrder::AgRs => CommBackend::AgRs,
                MergeOrder::A2a => CommBackend::A2a,
            },
            lane_order: LaneOrder::HiLo,
            query_replication: false,
            project_before_merge: false,
            kernel_head_widths: Vec::new(),
            second_group: None,
        };
        let open = |_| open(&*engine, &configuration).map(|session| Mutex::new(Some(session)));
        let sessions = (0..layers).map(open).collect::<Result<_, _>>()?;
        Ok(Self { engine, configuration, shape, padded_group, fault: config.fault, sessions })
    }

    /// One step of a layer's session. A session that failed must not be used again, so that it is dropped.
    fn step(
        &self,
        layer: usize,
        operation: &Operation,
        mut inputs: Tensors,
    ) -> Result<Tensors, AttentionError> {
        let mut slot = self.sessions[layer].lock().unwrap_or_else(PoisonError::into_inner);
        let mut session = match slot.take() {
            Some(session) => session,
            None => open(&*self.engine, &self.configuration).map_err(failed)?,
        };
        // An engine is a guest: its panic must not take the server along.
        let answer = catch_unwind(AssertUnwindSafe(|| session.step(operation, &mut inputs)));
        match answer {
            Ok(Ok(Answer::Done(reply))) => {
                *slot = Some(session);
                Ok(reply.outputs)
            }
            Ok(Ok(Answer::Unsupported(reason))) => Err(failed(EmbeddedError::Unsupported(reason))),
            Ok(Err(error)) => Err(failed(error)),
            Err(panic) => {
                // What a panic has left half done may panic again where it is dropped.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(session)));
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                Err(failed(format!("engine panicked: {}", text.as_deref().unwrap_or("no message"))))
            }
        }
    }

    /// Queries with zero heads behind those of every KV head: `[rows, padded heads, head_dim]`.
    fn pad(&self, queries: &[f32]) -> Vec<f32> {
        let (real, padded) = (self.shape.group(), self.padded_group);
        if real == padded {
            return queries.to_vec();
        }
        let dim = self.shape.head_dim;
        let mut out = Vec::with_capacity(queries.len() / real * padded);
        for group in queries.chunks_exact(real * dim) {
            out.extend_from_slice(group);
            out.resize(out.len() + (padded - real) * dim, 0.0);
        }
        out
    }

    /// Writes the model's heads out of `[ranks, rows, heads of a rank, head_dim]` into `[rows, query heads, head_dim]`.
    fn strip(&self, merged: &[f32], rows: usize, out: &mut [f32]) {
        let (own, dim) = (self.configuration.heads_per_rank, self.shape.head_dim);
        let heads = out.chunks_exact_mut(dim).enumerate();
        for (index, head_out) in heads {
            let (row, head) = (index / self.shape.query_heads, index % self.shape.query_heads);
            let padded = head / self.shape.group() * self.padded_group + head % self.shape.group();
            let at = ((padded / own * rows + row) * own + padded % own) * dim;
            head_out.copy_from_slice(&merged[at..at + dim]);
        }
    }
}

/// Query heads per KV head such that all heads divide over the ranks. Padding behind each group and not behind all
/// heads, because an engine finds the KV head of a query head by its group's size.
fn padded_group(shape: AttentionShape, ranks: usize) -> usize {
    (shape.group()..)
        .find(|group| (shape.kv_heads * group).is_multiple_of(ranks))
        .expect("a multiple of the ranks always fits")
}

fn open(engine: &dyn Engine, configuration: &Configuration) -> Result<Box<dyn Session>, EmbeddedError> {
    match engine.open(configuration)? {
        Answer::Done(session) => Ok(session),
        Answer::Unsupported(reason) => Err(EmbeddedError::Unsupported(reason)),
    }
}

fn failed(reason: impl ToString) -> AttentionError {
    AttentionError { text: reason.to_string() }
}

fn table_tensor(block_table: &[u32]) -> Tensor {
    let ids: Vec<i32> = block_table.iter().map(|id| *id as i32).collect();
    Tensor::from_i32(&[1, ids.len()], &ids)
}

impl Attention for Embedded {
    fn path(&self) -> AttentionPath {
        AttentionPath {
            engine: "embedded".to_string(),
            ranks: self.configuration.dcp,
            interleave_tokens: self.configuration.interleave,
            block_tokens: self.configuration.block_size,
            merge: match self.configuration.comm_backend {
                CommBackend::AgRs => MergeOrder::AgRs,
                CommBackend::A2a => MergeOrder::A2a,
            }
            .to_string(),
            dtype: Dtype::Bf16.name().to_string(),
            kv_dtype: self.configuration.kv_dtype.name().to_string(),
            fault: self.fault.map(|fault| fault.name.to_string()),
        }
    }

    fn virtual_block_tokens(&self) -> usize {
        self.configuration.virtual_block_tokens()
    }

    fn virtual_blocks(&self) -> usize {
        self.configuration.blocks
    }

    fn store(
        &mut self,
        layer: usize,
        block_table: &[u32],
        first_position: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), AttentionError> {
        let tokens = keys.len() / self.shape.kv_elements();
        let shape = [tokens, self.shape.kv_heads, self.shape.head_dim];
        let positions: Vec<i64> = (first_position as i64..).take(tokens).collect();
        let inputs = Tensors::new()
            .with("key", Tensor::from_f32(Dtype::Bf16, &shape, keys))
            .with("value", Tensor::from_f32(Dtype::Bf16, &shape, values))
            .with("positions", Tensor::from_i64(&[tokens], &positions))
            .with("requests", Tensor::from_i32(&[tokens], &vec![0; tokens]))
            .with("block_table", table_tensor(block_table));
        self.step(layer, &Operation::WriteKv, inputs).map(|_| ())
    }

    fn attend(
        &self,
        layer: usize,
        block_table: &[u32],
        total_tokens: usize,
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        assert_eq!(queries.len(), out.len(), "as many outputs as queries");
        let (rows, dim) = (queries.len() / self.shape.query_elements(), self.shape.head_dim);
        let heads = self.configuration.total_heads();
        let query = Tensor::from_f32(Dtype::Bf16, &[rows, heads, dim], &self.pad(queries));
        let inputs = Tensors::new()
            .with("query", query)
            .with("seq_lens", Tensor::from_i32(&[1], &[total_tokens as i32]))
            .with("query_start_loc", Tensor::from_i32(&[2], &[0, rows as i32]))
            .with("block_table", table_tensor(block_table));
        let outputs = self.step(layer, &Operation::Attend { mask: Mask::Causal }, inputs)?;
        let shape = [self.configuration.tp, rows, self.configuration.heads_per_rank, dim];
        let merged = outputs.get("out").and_then(|out| out.expect("out", Dtype::Bf16, &shape));
        self.strip(&merged.map_err(|error: TensorError| failed(error))?.to_f32(), rows, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::dtype::OutputDtype;
    use crate::attention::sharded::{Sharded, ShardedConfig};
    use crate::kernels::Simd;

    /// Three query heads per KV head, as SmolLM2 has them: W = 2 and W = 4 need padding heads.
    const SHAPE: AttentionShape = AttentionShape { layers: 2, query_heads: 9, kv_heads: 3, head_dim: 16 };

    fn config(ranks: usize, interleave: usize, fault: Option<&str>) -> EmbeddedConfig {
        EmbeddedConfig {
            layout: Interleave::new(ranks, interleave, 4).expect("valid layout"),
            merge: MergeOrder::A2a,
            kv_dtype: Dtype::Bf16,
            fault: fault.map(|name| fault_named(name).expect("a fault")),
            cache_tokens: 256,
        }
    }

    /// Values of bf16, so that nothing is lost on the way in.
    fn noise(count: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) as f32 * 0.618_034).sin() * 1.5;
        (0..count).map(|i| OutputDtype::Bf16.round(value(i))).collect()
    }

    /// Output of the last rows of a sequence that is stored in uneven pieces under a permuted block table.
    fn output(attention: &mut dyn Attention, tokens: usize, rows: usize) -> Result<Vec<f32>, AttentionError> {
        let table: Vec<u32> = (0..attention.virtual_blocks() as u32).rev().collect();
        let kv = SHAPE.kv_elements();
        let (keys, values) = (noise(tokens * kv, 1), noise(tokens * kv, 2));
        let mut first = 0;
        for piece in [1, 5, 2, 30, 3].into_iter().cycle() {
            let range = first * kv..(first + piece).min(tokens) * kv;
            attention.store(1, &table, first, &keys[range.clone()], &values[range])?;
            first += piece;
            if first >= tokens {
                break;
            }
        }
        let queries = noise(rows * SHAPE.query_elements(), 3);
        let mut out = vec![f32::NAN; queries.len()];
        attention.attend(1, &table, tokens, &queries, &mut out)?;
        Ok(out)
    }

    fn embedded(config: EmbeddedConfig, tokens: usize, rows: usize) -> Result<Vec<f32>, AttentionError> {
        output(&mut Embedded::new(SHAPE, config).expect("the engine runs it"), tokens, rows)
    }

    /// This crate's attention in f32, which its own tests hold against the definition.
    fn sharded(tokens: usize, rows: usize) -> Vec<f32> {
        let config = ShardedConfig {
            layout: Interleave::new(1, 1, 4).expect("valid layout"),
            merge: MergeOrder::A2a,
            dtype: OutputDtype::F32,
            fault: None,
            fault_max_rows: usize::MAX,
            cache_tokens: 256,
        };
        let mut sharded = Sharded::new(SHAPE, config, Simd::detect()).expect("valid config");
        output(&mut sharded, tokens, rows).expect("it never fails")
    }

    fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        let difference = |(a, b): (&f32, &f32)| (a - b).abs();
        a.iter().zip(b).map(difference).fold(0.0, |worst, x| if x > worst || x.is_nan() { x } else { worst })
    }

    /// Roundings to bf16 on the way to an output element, each of at most u = 2⁻⁸ of the largest value: probabilities,
    /// partial, and the merge (one for a2a; every rank's share and W − 1 sums for ag-rs).
    fn bound(merge: MergeOrder, ranks: usize) -> f32 {
        let roundings = match merge {
            MergeOrder::A2a => 3,
            MergeOrder::AgRs => 2 + ranks,
        };
        1.5 * roundings as f32 / 256.0
    }

    #[test]
    fn any_number_of_ranks_agrees_with_the_sharded_attention_within_the_roundings_to_bf16() {
        for (ranks, interleave) in [(1, 1), (2, 2), (3, 1), (3, 4), (4, 1), (4, 2), (5, 1)] {
            for merge in MergeOrder::ALL {
                for (tokens, rows) in [(1, 1), (3, 3), (16, 1), (33, 4), (100, 20)] {
                    let config = EmbeddedConfig { merge, ..config(ranks, interleave, None) };
                    let out = embedded(config, tokens, rows).expect("healthy");
                    let worst = largest_difference(&out, &sharded(tokens, rows));
                    let bound = bound(merge, ranks);
                    assert!(worst <= bound, "W{ranks} {merge} L{tokens} q{rows}: {worst} > {bound}");
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_a_step_of_its_own_and_in_a_long_one() {
        let together = embedded(config(4, 2, None), 50, 20).expect("healthy");
        let row = together.len() / 20;
        let mut attention = Embedded::new(SHAPE, config(4, 2, None)).expect("the engine runs it");
        output(&mut attention, 50, 1).expect("healthy");
        let table: Vec<u32> = (0..attention.virtual_blocks() as u32).rev().collect();
        let queries = noise(20 * row, 3);
        for at in 0..20 {
            let mut alone = vec![f32::NAN; row];
            let query = &queries[at * row..(at + 1) * row];
            attention.attend(1, &table, 31 + at, query, &mut alone).expect("healthy");
            assert_eq!(alone, together[at * row..(at + 1) * row], "row {at}");
        }
    }

    #[test]
    fn caches_of_16_and_32_bits_hold_the_same_and_an_eight_bit_one_does_not() {
        let out =
            |kv_dtype| embedded(EmbeddedConfig { kv_dtype, ..config(4, 1, None) }, 40, 3).expect("healthy");
        assert_eq!(out(Dtype::Bf16), out(Dtype::F32));
        let eight = largest_difference(&out(Dtype::E4m3fn), &out(Dtype::Bf16));
        assert!(eight > 0.01 && eight < 0.3, "{eight}");
    }

    #[test]
    fn heads_are_padded_to_the_next_group_that_divides_over_the_ranks() {
        let groups = [1, 2, 3, 4, 5, 6, 8, 12].map(|ranks| padded_group(SHAPE, ranks));
        assert_eq!(groups, [3, 4, 3, 4, 5, 4, 8, 4]);
    }

    #[test]
    fn faults_change_the_output_where_they_apply() {
        for (fault, tokens, rows) in [
            ("committed-prefix-rows", 7, 5),
            ("lse-base-2-as-natural", 40, 1),
            ("score-scale-twice", 40, 1),
            ("kv-head-by-modulo", 40, 1),
            ("weights-not-normalised", 40, 1),
        ] {
            let wrong = embedded(config(4, 2, Some(fault)), tokens, rows).expect("wrong, and yet an answer");
            let difference = largest_difference(&wrong, &sharded(tokens, rows));
            assert!(
                difference > 2.0 * bound(MergeOrder::A2a, 4) || difference.is_nan(),
                "{fault}: {difference}"
            );
        }
    }

    #[test]
    fn an_engine_that_panics_or_answers_with_another_shape_gives_its_text_and_is_opened_anew() {
        use shardcheck_cpu::hostile::{Hostility, hostile};
        for (kind, words) in [
            (Hostility::Panics, "panic"),
            (Hostility::NoOutput, "\"out\" is missing"),
            (Hostility::WrongDtype, "dtype"),
            (Hostility::WrongShape, "shape"),
        ] {
            let mut attention =
                Embedded::with_engine(SHAPE, config(2, 1, None), hostile(kind)).expect("it opens");
            for _ in 0..2 {
                let error = output(&mut attention, 9, 2).expect_err("hostile").to_string();
                assert!(error.starts_with("attention failed: ") && error.contains(words), "{kind}: {error}");
            }
        }
    }

    #[test]
    fn what_the_engine_cannot_run_is_refused_with_its_reason() {
        let too_many = Embedded::new(SHAPE, config(300, 1, None)).err().expect("more ranks than threads");
        assert!(too_many.to_string().contains("256 threads"), "{too_many}");
        let shape = AttentionShape { query_heads: 4, ..SHAPE };
        let error = Embedded::new(shape, config(1, 1, None)).err();
        assert_eq!(error, Some(EmbeddedError::Heads { query_heads: 4, kv_heads: 3 }));
        assert!(fault_named("no-such").expect_err("unknown").contains("owner-rotated"));
    }
}
