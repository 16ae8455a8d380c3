//! A Llama model: its sizes and weights from a GGUF file, and its forward pass over a batch of sequence spans.

use std::ops::Range;

use rayon::prelude::*;
use thiserror::Error;

use crate::attention::{Attention, AttentionError, AttentionShape};
use crate::gguf::{Gguf, GgufError};
use crate::kernels::{LANES, Simd, swiglu};
use crate::linear::Linear;
use crate::tokenizer::TokenId;

/// Why a file is no model for this crate.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The file is damaged or something is missing.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Another architecture than Llama.
    #[error("the model's architecture is \"{0}\"; this server runs \"llama\"")]
    Architecture(String),
    /// Sizes that do not fit together, or a variant of Llama that is not here.
    #[error("the model is not supported: {0}")]
    Unsupported(String),
}

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Elements of the residual stream.
    pub width: usize,
    /// Elements of the feed-forward's inside.
    pub feed_forward: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context_tokens: usize,
    /// Layers and heads.
    pub attention: AttentionShape,
    /// Base of the rotary frequencies.
    pub rope_base: f64,
    /// ε of RMSNorm.
    pub norm_epsilon: f32,
}

struct Layer {
    attention_norm: Vec<f32>,
    qkv: Linear,
    attention_output: Linear,
    feed_forward_norm: Vec<f32>,
    gate_up: Linear,
    down: Linear,
}

/// A model, ready to run.
pub struct Model {
    config: ModelConfig,
    simd: Simd,
    embedding: Linear,
    layers: Vec<Layer>,
    output_norm: Vec<f32>,
    /// `None`: tied to the embedding.
    output: Option<Linear>,
    /// Rotary frequency of each pair, radians per token.
    frequencies: Vec<f64>,
}

/// Consecutive tokens of one sequence in a batch.
pub struct Span<'a> {
    /// Tokens, the first at `first_position`.
    pub tokens: &'a [TokenId],
    /// Position of the first token; what lies before must be in the cache.
    pub first_position: usize,
    /// Virtual blocks of the sequence.
    pub block_table: &'a [u32],
    /// Which of the span's tokens need logits.
    pub logits: Range<usize>,
}

impl ModelConfig {
    /// Reads the sizes from metadata `llama.*`.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let architecture = gguf.text("general.architecture")?;
        if architecture != "llama" {
            return Err(ModelError::Architecture(architecture.to_string()));
        }
        let width = gguf.count("llama.embedding_length")?;
        let query_heads = gguf.count("llama.attention.head_count")?;
        let kv_heads = match gguf.get("llama.attention.head_count_kv") {
            Some(_) => gguf.count("llama.attention.head_count_kv")?,
            None => query_heads,
        };
        let divides = |whole: usize, part: usize| part > 0 && whole > 0 && whole.is_multiple_of(part);
        if !divides(width, query_heads) || !divides(query_heads, kv_heads) {
            let message = format!("width {width}, {query_heads} heads and {kv_heads} KV heads do not divide");
            return Err(ModelError::Unsupported(message));
        }
        let head_dim = width / query_heads;
        let rotated = match gguf.get("llama.rope.dimension_count") {
            Some(_) => gguf.count("llama.rope.dimension_count")?,
            None => head_dim,
        };
        if rotated != head_dim {
            return Err(ModelError::Unsupported(format!(
                "RoPE on {rotated} of {head_dim} elements of a head"
            )));
        }
        if gguf.get("llama.rope.scaling.type").is_some() || gguf.has_tensor("rope_freqs.weight") {
            return Err(ModelError::Unsupported("scaled RoPE".to_string()));
        }
        let feed_forward = gguf.count("llama.feed_forward_length")?;
        if [width, feed_forward, head_dim].iter().any(|n| *n == 0 || !n.is_multiple_of(LANES)) {
            let message =
                format!("width {width}, feed-forward {feed_forward} or head {head_dim} is no multiple of 8");
            return Err(ModelError::Unsupported(message));
        }
        Ok(Self {
            vocabulary: gguf.texts("tokenizer.ggml.tokens")?.len(),
            width,
            feed_forward,
            context_tokens: gguf.count("llama.context_length")?,
            attention: AttentionShape {
                layers: gguf.count("llama.block_count")?,
                query_heads,
                kv_heads,
                head_dim,
            },
            rope_base: gguf.number("llama.rope.freq_base")?,
            norm_epsilon: gguf.number("llama.attention.layer_norm_rms_epsilon")? as f32,
        })
    }
}

impl Model {
    /// Reads a model. Weights stay mapped and encoded.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn from_gguf(gguf: &Gguf, simd: Simd) -> Result<Self, ModelError> {
        let config = ModelConfig::from_gguf(gguf)?;
        let width = config.width;
        let linear = |inputs, names: &[(&str, usize)], prefix: &str| {
            let names: Vec<_> =
                names.iter().map(|(n, outputs)| (format!("{prefix}{n}.weight"), *outputs)).collect();
            Linear::from_gguf(gguf, inputs, &names)
        };
        let norm = |name: String| -> Result<Vec<f32>, GgufError> {
            let tensor = gguf.tensor(&name, &[width])?;
            let mut out = vec![0.0; width];
            tensor.encoding.decode(&tensor.bytes, &mut out);
            Ok(out)
        };
        let (q, kv) = (config.attention.query_elements(), config.attention.kv_elements());
        let mut layers = Vec::new();
        for index in 0..config.attention.layers {
            let prefix = format!("blk.{index}.");
            let feed_forward = config.feed_forward;
            layers.push(Layer {
                attention_norm: norm(format!("{prefix}attn_norm.weight"))?,
                qkv: linear(width, &[("attn_q", q), ("attn_k", kv), ("attn_v", kv)], &prefix)?,
                attention_output: linear(q, &[("attn_output", width)], &prefix)?,
                feed_forward_norm: norm(format!("{prefix}ffn_norm.weight"))?,
                gate_up: linear(width, &[("ffn_gate", feed_forward), ("ffn_up", feed_forward)], &prefix)?,
                down: linear(feed_forward, &[("ffn_down", width)], &prefix)?,
            });
        }
        let output = gguf.has_tensor("output.weight");
        let output = output.then(|| linear(width, &[("output", config.vocabulary)], "")).transpose()?;
        let pairs = config.attention.head_dim / 2;
        let frequency = |i: usize| config.rope_base.powf(-(i as f64) / pairs as f64);
        Ok(Self {
            simd,
            embedding: linear(width, &[("token_embd", config.vocabulary)], "")?,
            layers,
            output_norm: norm("output_norm.weight".to_string())?,
            output,
            frequencies: (0..pairs).map(frequency).collect(),
            config,
        })
    }

    /// Sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Runs a batch of spans, stores their keys and values, and returns the logits that the spans ask for, span after
    /// span: f32 `[rows, vocabulary]`. A row's logits have the same bits whatever else is in the batch.
    ///
    /// # Errors
    /// [`AttentionError`] when the attention fails; what it holds is lost then.
    ///
    /// # Panics
    /// If a token is outside the vocabulary, or a span asks for logits of tokens that it does not have.
    pub fn forward(
        &self,
        attention: &mut dyn Attention,
        batch: &[Span<'_>],
    ) -> Result<Vec<f32>, AttentionError> {
        let width = self.config.width;
        let tokens: Vec<TokenId> = batch.iter().flat_map(|span| span.tokens).copied().collect();
        let mut residual = vec![0.0; tokens.len() * width];
        residual.par_chunks_mut(width).zip(&tokens).for_each(|(row, token)| {
            self.embedding.decode_row(*token as usize, row);
        });
        let rotations = self.rotations(batch);
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = self.norm(&residual, &layer.attention_norm);
            let attended = self.attend(attention, index, layer, batch, &normed, &rotations)?;
            add(&mut residual, &layer.attention_output.apply(self.simd, &attended));
            let normed = self.norm(&residual, &layer.feed_forward_norm);
            let inside = self.gated(layer.gate_up.apply(self.simd, &normed));
            add(&mut residual, &layer.down.apply(self.simd, &inside));
        }
        let mut wanted = Vec::new();
        let mut first = 0;
        for span in batch {
            assert!(span.logits.end <= span.tokens.len(), "logits of tokens outside the span");
            wanted.extend_from_slice(
                &residual[(first + span.logits.start) * width..(first + span.logits.end) * width],
            );
            first += span.tokens.len();
        }
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let normed = self.norm(&wanted, &self.output_norm);
        Ok(self.output.as_ref().unwrap_or(&self.embedding).apply(self.simd, &normed))
    }

    /// Projects, rotates, stores and attends one layer; returns `[rows, query elements]`.
    fn attend(
        &self,
        attention: &mut dyn Attention,
        index: usize,
        layer: &Layer,
        batch: &[Span<'_>],
        normed: &[f32],
        rotations: &[(f32, f32)],
    ) -> Result<Vec<f32>, AttentionError> {
        let (q, kv) = (self.config.attention.query_elements(), self.config.attention.kv_elements());
        let projected = layer.qkv.apply(self.simd, normed);
        let rows = projected.len() / (q + 2 * kv);
        let (mut queries, mut keys) = (Vec::with_capacity(rows * q), Vec::with_capacity(rows * kv));
        let mut values = Vec::with_capacity(rows * kv);
        for row in projected.chunks_exact(q + 2 * kv) {
            queries.extend_from_slice(&row[..q]);
            keys.extend_from_slice(&row[q..q + kv]);
            values.extend_from_slice(&row[q + kv..]);
        }
        self.rotate(&mut queries, q, rotations);
        self.rotate(&mut keys, kv, rotations);
        let mut out = vec![0.0; rows * q];
        let mut first = 0;
        for span in batch {
            let end = first + span.tokens.len();
            let (kv_range, q_range) = (first * kv..end * kv, first * q..end * q);
            let table = span.block_table;
            attention.store(index, table, span.first_position, &keys[kv_range.clone()], &values[kv_range])?;
            let total = span.first_position + span.tokens.len();
            attention.attend(index, table, total, &queries[q_range.clone()], &mut out[q_range])?;
            first = end;
        }
        Ok(out)
    }

    /// Cosine and sine of every row's angles: `[rows, head_dim / 2]`.
    fn rotations(&self, batch: &[Span<'_>]) -> Vec<(f32, f32)> {
        let positions = batch.iter().flat_map(|span| (span.first_position..).take(span.tokens.len()));
        let angles = positions.flat_map(|position| self.frequencies.iter().map(move |f| position as f64 * f));
        angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).collect()
    }

    /// RoPE in ggml's NORM order: elements 2i and 2i + 1 of a head are one pair (the converter to GGUF has permuted
    /// Q and K of Llama accordingly).
    fn rotate(&self, vectors: &mut [f32], row_elements: usize, rotations: &[(f32, f32)]) {
        let pairs = self.frequencies.len();
        let rows = vectors.par_chunks_mut(row_elements).zip(rotations.par_chunks(pairs));
        rows.for_each(|(row, rotations)| {
            for head in row.chunks_exact_mut(2 * pairs) {
                for (pair, (cosine, sine)) in head.chunks_exact_mut(2).zip(rotations) {
                    let (x, y) = (pair[0], pair[1]);
                    pair[0] = x * cosine - y * sine;
                    pair[1] = x * sine + y * cosine;
                }
            }
        });
    }

    /// RMSNorm: x / √(mean(x²) + ε) · weight, the mean in f64.
    fn norm(&self, rows: &[f32], weight: &[f32]) -> Vec<f32> {
        let mut out = rows.to_vec();
        out.par_chunks_mut(weight.len()).for_each(|row| {
            let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let mean = (squares / row.len() as f64) as f32;
            let scale = 1.0 / (mean + self.config.norm_epsilon).sqrt();
            for (x, w) in row.iter_mut().zip(weight) {
                *x = *x * scale * w;
            }
        });
        out
    }

    /// SwiGLU of rows that hold the gate and then the up projection.
    fn gated(&self, mut rows: Vec<f32>) -> Vec<f32> {
        let inside = self.config.feed_forward;
        let mut out = vec![0.0; rows.len() / 2];
        rows.par_chunks_mut(2 * inside).zip(out.par_chunks_mut(inside)).for_each(|(row, out)| {
            let (gate, up) = row.split_at_mut(inside);
            swiglu(self.simd, gate, up);
            out.copy_from_slice(gate);
        });
        out
    }
}

fn add(sum: &mut [f32], addend: &[f32]) {
    for (s, a) in sum.iter_mut().zip(addend) {
        *s += a;
    }
}
