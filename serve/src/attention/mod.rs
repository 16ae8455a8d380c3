//! Attention as the model sees it: something that keeps keys and values and computes output for query rows.
//!
//! The model never sees ranks, blocks of ranks, partials or merges; an engine that implements [`Attention`] decides
//! them. [`sharded`] is this crate's own implementation, [`embedded`] lends the project's multi-rank engine.

pub mod dtype;
pub mod embedded;
pub mod fault;
pub mod interleave;
pub mod merge;
pub mod sharded;

use thiserror::Error;

/// What an engine said when it failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("attention failed: {text}")]
pub struct AttentionError {
    /// The engine's own words.
    pub text: String,
}

/// Extents that a model gives to its attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Layers, each with its own keys and values.
    pub layers: usize,
    /// Query heads per token.
    pub query_heads: usize,
    /// Key and value heads per token; query head h reads KV head h / (query heads / KV heads).
    pub kv_heads: usize,
    /// Elements of a head of Q, K and V.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Elements of one token's queries.
    pub fn query_elements(self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Elements of one token's keys (and of its values).
    pub fn kv_elements(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Query heads that share a KV head.
    pub fn group(self) -> usize {
        self.query_heads / self.kv_heads
    }
}

/// What really computes attention, for provenance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionPath {
    /// Who computes, e.g. `sharded`.
    pub engine: String,
    /// DCP ranks W.
    pub ranks: usize,
    /// Interleave S in tokens.
    pub interleave_tokens: usize,
    /// Physical block B in tokens of one rank.
    pub block_tokens: usize,
    /// Merge order, e.g. `a2a`.
    pub merge: String,
    /// Dtype of partial and merged outputs, e.g. `f32`.
    pub dtype: String,
    /// Dtype of the KV cache, e.g. `bf16`.
    pub kv_dtype: String,
    /// The injected fault, if any.
    pub fault: Option<String>,
}

/// A paged KV cache with the attention over it.
///
/// The cache is addressed by virtual blocks. Entry i of a sequence's block table names the virtual block that holds its
/// tokens `i·V .. (i+1)·V`, V = [`Self::virtual_block_tokens`]; with W ranks of blocks of B tokens V = B·W (the block
/// table of vLLM and ATOM under DCP: the same id on every rank). Ids are `0 .. virtual_blocks()`; a block may be in
/// several tables, where sequences share a prefix.
///
/// Keys arrive rotated (RoPE applied); the scale of the scores is 1/√head_dim.
///
/// After an error, nothing that was stored counts any more: the caller gives up every sequence under way and forgets
/// every prefix. The implementation must take new sequences then, or go on failing.
pub trait Attention: Send + Sync {
    /// What computes.
    fn path(&self) -> AttentionPath;

    /// Tokens of a virtual block, V.
    fn virtual_block_tokens(&self) -> usize;

    /// Number of virtual blocks in the cache.
    fn virtual_blocks(&self) -> usize;

    /// Stores keys and values of the consecutive tokens from `first_position` on, for one layer.
    ///
    /// `keys` and `values`: f32, `[tokens, kv_heads, head_dim]`. What was there before is overwritten. Several calls
    /// for one position come only with another layer, or to replace a rejected draft token.
    ///
    /// # Errors
    /// [`AttentionError`] when the engine fails.
    fn store(
        &mut self,
        layer: usize,
        block_table: &[u32],
        first_position: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), AttentionError>;

    /// Causal attention of the last `rows` tokens of a sequence of `total_tokens`, whose keys are all stored.
    ///
    /// `queries` and `out`: f32, `[rows, query_heads, head_dim]`; rows = `queries.len()` / query elements. Row t attends
    /// to the positions `0 .. total_tokens − rows + 1 + t`.
    ///
    /// # Errors
    /// [`AttentionError`] when the engine fails; `out` is undefined then.
    fn attend(
        &self,
        layer: usize,
        block_table: &[u32],
        total_tokens: usize,
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<(), AttentionError>;
}
