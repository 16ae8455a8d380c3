//! Attention over W shards of a paged KV cache: per-rank partials with their LSE, then a merge.
//!
//! One process plays all ranks. Each rank has its own cache, its own length and its own softmax; nothing but
//! partial output and LSE crosses from one to another. Scores, weights, sums and LSE are f32.

use rayon::prelude::*;
use thiserror::Error;

use super::dtype::OutputDtype;
use super::fault::{Fault, Policies};
use super::interleave::{Interleave, LayoutError};
use super::merge::{MergeOrder, merge};
use super::{Attention, AttentionError, AttentionPath, AttentionShape};
use crate::kernels::{LANES, Simd, add_weighted, exponentials, scores};

/// Why a sharded attention can't be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ShardedError {
    /// W, S and B do not fit together.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A shape that the kernels do not have.
    #[error(
        "head dimension {head_dim} must be a multiple of {LANES}, and {query_heads} query heads of {kv_heads}"
    )]
    Shape {
        /// Elements of a head.
        head_dim: usize,
        /// Query heads.
        query_heads: usize,
        /// KV heads.
        kv_heads: usize,
    },
    /// A fault of the merge or of the shards, where there is one rank.
    #[error("fault `{0}` needs at least two ranks: with one there is nothing to shard or merge")]
    FaultNeedsRanks(Fault),
}

/// How KV is sharded and merged.
#[derive(Debug, Clone, Copy)]
pub struct ShardedConfig {
    /// Layout of tokens over ranks.
    pub layout: Interleave,
    /// Merge order.
    pub merge: MergeOrder,
    /// Dtype of partial and merged outputs.
    pub dtype: OutputDtype,
    /// Injected fault.
    pub fault: Option<Fault>,
    /// The fault is in calls of at most this many query rows. 1 is an engine whose single-token decode is broken while its
    /// prefill takes another path; `usize::MAX` breaks both.
    pub fault_max_rows: usize,
    /// Tokens that the cache holds over all ranks; rounded up to whole virtual blocks.
    pub cache_tokens: usize,
}

/// Keys and values of one rank and one layer: `[kv_heads, blocks · B, head_dim]`.
struct Shard {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// Sharded attention, with its cache.
pub struct Sharded {
    shape: AttentionShape,
    config: ShardedConfig,
    /// What the fault replaces; healthy without one.
    faulty: Policies,
    simd: Simd,
    blocks: usize,
    /// `[layers · W]`
    shards: Vec<Shard>,
}

/// Query rows that are worked on together, one KV head after the other, so that its keys stay near.
const TILE_ROWS: usize = 8;

impl Sharded {
    /// An empty cache for a model of `shape`.
    ///
    /// # Errors
    /// [`ShardedError`].
    pub fn new(shape: AttentionShape, config: ShardedConfig, simd: Simd) -> Result<Self, ShardedError> {
        let AttentionShape { layers, query_heads, kv_heads, head_dim } = shape;
        let heads_fit = kv_heads > 0 && query_heads > 0 && query_heads.is_multiple_of(kv_heads);
        if !heads_fit || head_dim == 0 || !head_dim.is_multiple_of(LANES) {
            return Err(ShardedError::Shape { head_dim, query_heads, kv_heads });
        }
        let ranks = config.layout.ranks();
        if let Some(fault) = config.fault.filter(|_| ranks == 1) {
            return Err(ShardedError::FaultNeedsRanks(fault));
        }
        let blocks = config.cache_tokens.div_ceil(config.layout.virtual_block_tokens()).max(1);
        let elements = blocks * config.layout.block_tokens() * shape.kv_elements();
        // Zeroed pages are not touched before they are used, so a large cache costs nothing up front.
        let shard = || Shard { keys: vec![0.0; elements], values: vec![0.0; elements] };
        let shards = (0..layers * ranks).map(|_| shard()).collect();
        let faulty = config.fault.map_or(Policies::HEALTHY, Fault::policies);
        Ok(Self { shape, config, faulty, simd, blocks, shards })
    }

    fn shard(&self, layer: usize, rank: usize) -> &Shard {
        &self.shards[layer * self.config.layout.ranks() + rank]
    }

    /// Where the keys of a head and slot begin in a shard.
    fn offset(&self, kv_head: usize, slot: usize) -> usize {
        let slots = self.blocks * self.config.layout.block_tokens();
        (kv_head * slots + slot) * self.shape.head_dim
    }

    /// Output of the query heads of one KV head, for one row that sees `visible` tokens: `[group, head_dim]`.
    fn group(
        &self,
        place: Place<'_>,
        visible: usize,
        queries: &[f32],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let dim = self.shape.head_dim;
        let ranks = self.config.layout.ranks();
        let scale = 1.0 / (dim as f32).sqrt();
        scratch.partials.resize(ranks * dim, 0.0);
        scratch.lse.resize(ranks, 0.0);
        for (query, result) in queries.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
            scratch.query.clear();
            scratch.query.extend(query.iter().map(|q| q * scale));
            for rank in 0..ranks {
                self.partial(place, rank, visible, scratch);
            }
            merge(self.config.merge, self.config.dtype, &scratch.partials, &scratch.lse, result);
        }
    }

    /// Partial output and LSE of one rank, into the scratch.
    fn partial(&self, place: Place<'_>, rank: usize, visible: usize, scratch: &mut Scratch) {
        let Scratch { query, weights, partials, lse } = scratch;
        let dim = self.shape.head_dim;
        let layout = self.config.layout;
        let partial = &mut partials[rank * dim..(rank + 1) * dim];
        partial.fill(0.0);
        let tokens = (place.policies.local_tokens)(layout, visible, rank);
        if tokens == 0 {
            lse[rank] = place.policies.empty_lse;
            return;
        }
        let shard = self.shard(place.layer, rank);
        // Where the rank's n-th block lies, and which of its tokens are there.
        let blocks = (0..tokens.div_ceil(layout.block_tokens())).map(|column| {
            let first = column * layout.block_tokens();
            let block = place.block_table[(place.policies.block_column)(column)] as usize;
            let start = self.offset(place.kv_head, block * layout.block_tokens());
            let range = first..(first + layout.block_tokens()).min(tokens);
            (start..start + range.len() * dim, range)
        });
        weights.clear();
        weights.resize(tokens.next_multiple_of(LANES), f32::NEG_INFINITY);
        for (elements, range) in blocks.clone() {
            scores(self.simd, query, &shard.keys[elements], &mut weights[range]);
        }
        let maximum = weights[..tokens].iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum = exponentials(self.simd, maximum, weights);
        for (elements, range) in blocks {
            add_weighted(self.simd, &weights[range], &shard.values[elements], partial);
        }
        for value in partial {
            *value = self.config.dtype.round(*value / sum);
        }
        lse[rank] = (place.policies.reported_lse)(layout, rank, maximum + sum.ln());
    }
}

/// Which keys a row reads, and how.
#[derive(Clone, Copy)]
struct Place<'a> {
    policies: &'a Policies,
    layer: usize,
    kv_head: usize,
    block_table: &'a [u32],
}

#[derive(Default)]
struct Scratch {
    query: Vec<f32>,
    weights: Vec<f32>,
    partials: Vec<f32>,
    lse: Vec<f32>,
}

impl Attention for Sharded {
    fn path(&self) -> AttentionPath {
        AttentionPath {
            engine: "sharded".to_string(),
            ranks: self.config.layout.ranks(),
            interleave_tokens: self.config.layout.interleave_tokens(),
            block_tokens: self.config.layout.block_tokens(),
            merge: self.config.merge.name().to_string(),
            dtype: self.config.dtype.name().to_string(),
            kv_dtype: "f32".to_string(),
            fault: self.config.fault.map(|fault| match self.config.fault_max_rows {
                usize::MAX => fault.name().to_string(),
                rows => format!("{fault} in calls of up to {rows} rows"),
            }),
        }
    }

    fn virtual_block_tokens(&self) -> usize {
        self.config.layout.virtual_block_tokens()
    }

    fn virtual_blocks(&self) -> usize {
        self.blocks
    }

    fn store(
        &mut self,
        layer: usize,
        block_table: &[u32],
        first_position: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), AttentionError> {
        assert_eq!(keys.len(), values.len(), "as many keys as values");
        let (layout, dim) = (self.config.layout, self.shape.head_dim);
        let tokens =
            keys.chunks_exact(self.shape.kv_elements()).zip(values.chunks_exact(self.shape.kv_elements()));
        for (position, (key, value)) in (first_position..).zip(tokens) {
            let block = block_table[position / layout.virtual_block_tokens()] as usize;
            let slot = block * layout.block_tokens() + layout.local_index(position) % layout.block_tokens();
            let shard = layer * layout.ranks() + layout.owner(position);
            for kv_head in 0..self.shape.kv_heads {
                let (from, to) = (kv_head * dim, self.offset(kv_head, slot));
                self.shards[shard].keys[to..to + dim].copy_from_slice(&key[from..from + dim]);
                self.shards[shard].values[to..to + dim].copy_from_slice(&value[from..from + dim]);
            }
        }
        Ok(())
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
        let row_elements = self.shape.query_elements();
        let group_elements = self.shape.group() * self.shape.head_dim;
        let rows = queries.len() / row_elements;
        assert!(rows <= total_tokens, "{rows} rows of a sequence of {total_tokens} tokens");
        let policies = if rows <= self.config.fault_max_rows { &self.faulty } else { &Policies::HEALTHY };
        let visible = |row| (policies.visible_tokens)(total_tokens, rows, row);
        let place = |kv_head| Place { policies, layer, kv_head, block_table };
        if rows < TILE_ROWS {
            // Few rows: parallel over (row, KV head), each a consecutive piece of the output.
            out.par_chunks_mut(group_elements).enumerate().for_each_init(
                Scratch::default,
                |scratch, (at, out)| {
                    let (row, kv_head) = (at / self.shape.kv_heads, at % self.shape.kv_heads);
                    let query = &queries[at * group_elements..(at + 1) * group_elements];
                    self.group(place(kv_head), visible(row), query, out, scratch);
                },
            );
            return Ok(());
        }
        let tiles = out.par_chunks_mut(TILE_ROWS * row_elements).enumerate();
        tiles.for_each_init(Scratch::default, |scratch, (tile, out)| {
            for kv_head in 0..self.shape.kv_heads {
                for (offset, out) in out.chunks_exact_mut(row_elements).enumerate() {
                    let row = tile * TILE_ROWS + offset;
                    let start = kv_head * group_elements;
                    let query = &queries[row * row_elements + start..][..group_elements];
                    self.group(
                        place(kv_head),
                        visible(row),
                        query,
                        &mut out[start..start + group_elements],
                        scratch,
                    );
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape { layers: 2, query_heads: 4, kv_heads: 2, head_dim: 8 };

    fn config(ranks: usize, interleave: usize, block: usize) -> ShardedConfig {
        ShardedConfig {
            layout: Interleave::new(ranks, interleave, block).expect("valid layout"),
            merge: MergeOrder::A2a,
            dtype: OutputDtype::F32,
            fault: None,
            fault_max_rows: usize::MAX,
            cache_tokens: 256,
        }
    }

    fn noise(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) as f32 * 0.618_034).sin() * 1.5).collect()
    }

    /// A sequence in a cache whose block table is a permutation, stored in uneven pieces, and its last rows' output.
    fn output(config: ShardedConfig, tokens: usize, rows: usize) -> Vec<f32> {
        let mut attention = Sharded::new(SHAPE, config, Simd::detect()).expect("valid config");
        let table: Vec<u32> = (0..attention.virtual_blocks() as u32).rev().collect();
        let kv = SHAPE.kv_elements();
        let (keys, values) = (noise(tokens * kv, 1), noise(tokens * kv, 2));
        let mut first = 0;
        for piece in [1, 5, 2, 30, 3].into_iter().cycle() {
            let range = first * kv..(first + piece).min(tokens) * kv;
            attention.store(1, &table, first, &keys[range.clone()], &values[range]).expect("it never fails");
            first += piece;
            if first >= tokens {
                break;
            }
        }
        let queries = noise(rows * SHAPE.query_elements(), 3);
        let mut out = vec![f32::NAN; queries.len()];
        attention.attend(1, &table, tokens, &queries, &mut out).expect("it never fails");
        out
    }

    /// Softmax attention by its definition, in f64, over contiguous keys.
    fn definition(tokens: usize, rows: usize) -> Vec<f64> {
        let (kv, dim) = (SHAPE.kv_elements(), SHAPE.head_dim);
        let (keys, values) = (noise(tokens * kv, 1), noise(tokens * kv, 2));
        let queries = noise(rows * SHAPE.query_elements(), 3);
        let mut out = Vec::new();
        for (row, head) in (0..rows).flat_map(|row| (0..SHAPE.query_heads).map(move |head| (row, head))) {
            let visible = tokens - rows + 1 + row;
            let at = |position: usize| position * kv + head / SHAPE.group() * dim;
            let query = &queries[(row * SHAPE.query_heads + head) * dim..][..dim];
            let dot =
                |p| query.iter().zip(&keys[at(p)..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let weights: Vec<f64> = (0..visible).map(|p| (dot(p) / (dim as f64).sqrt()).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..dim).map(|d| {
                (0..visible).map(|p| weights[p] / total * f64::from(values[at(p) + d])).sum::<f64>()
            }));
        }
        out
    }

    fn largest_difference(seen: &[f32], exact: &[f64]) -> f64 {
        assert_eq!(seen.len(), exact.len());
        let difference = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs();
        seen.iter()
            .zip(exact)
            .map(difference)
            .fold(0.0, |worst, x| if x > worst || x.is_nan() { x } else { worst })
    }

    #[test]
    fn every_layout_and_merge_gives_attention_by_its_definition() {
        for (ranks, interleave, block) in [(1, 1, 4), (2, 1, 4), (2, 4, 4), (3, 2, 8), (4, 4, 8), (8, 1, 2)] {
            for merge in MergeOrder::ALL {
                for (tokens, rows) in [(1, 1), (2, 2), (3, 1), (16, 1), (33, 4), (64, 20), (100, 9)] {
                    let config = ShardedConfig { merge, ..config(ranks, interleave, block) };
                    let worst = largest_difference(&output(config, tokens, rows), &definition(tokens, rows));
                    assert!(
                        worst < 2e-6,
                        "W{ranks} S{interleave} B{block} {merge} L{tokens} q{rows}: {worst}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_a_step_of_its_own_and_in_a_long_one() {
        let tokens = 50;
        let mut attention = Sharded::new(SHAPE, config(4, 2, 4), Simd::detect()).expect("valid config");
        let table: Vec<u32> = (0..attention.virtual_blocks() as u32).collect();
        let kv = SHAPE.kv_elements();
        attention
            .store(0, &table, 0, &noise(tokens * kv, 1), &noise(tokens * kv, 2))
            .expect("it never fails");
        let queries = noise(tokens * SHAPE.query_elements(), 3);
        let mut together = vec![0.0; queries.len()];
        attention.attend(0, &table, tokens, &queries, &mut together).expect("it never fails");
        for row in 0..tokens {
            let range = row * SHAPE.query_elements()..(row + 1) * SHAPE.query_elements();
            let mut alone = vec![0.0; range.len()];
            attention
                .attend(0, &table, row + 1, &queries[range.clone()], &mut alone)
                .expect("it never fails");
            assert_eq!(alone, together[range], "row {row}");
        }
    }

    #[test]
    fn bf16_outputs_stay_within_their_roundings() {
        for merge in MergeOrder::ALL {
            let config = ShardedConfig { merge, dtype: OutputDtype::Bf16, ..config(4, 1, 4) };
            let out = output(config, 70, 3);
            assert!(out.iter().all(|x| OutputDtype::Bf16.round(*x) == *x), "outputs are bf16 values");
            let worst = largest_difference(&out, &definition(70, 3));
            assert!(worst > 1e-5 && worst < 0.03, "{merge}: {worst}");
        }
    }

    /// Whether a fault changes the output at this length and number of rows, with W = 4, S = 2, B = 4.
    fn changes(fault: Fault, tokens: usize, rows: usize) -> bool {
        let healthy = config(4, 2, 4);
        let faulty = ShardedConfig { fault: Some(fault), cache_tokens: 512, ..healthy };
        let exact: Vec<f64> = output(ShardedConfig { cache_tokens: 512, ..healthy }, tokens, rows)
            .into_iter()
            .map(f64::from)
            .collect();
        largest_difference(&output(faulty, tokens, rows), &exact) > 1e-4
    }

    #[test]
    fn each_fault_shows_where_it_says_and_nowhere_else() {
        for tokens in [1, 5, 6, 7, 8, 9, 16, 31, 32, 40] {
            assert_eq!(changes(Fault::EmptyShardLseZero, tokens, 1), tokens < 7, "empty shard, {tokens}");
            assert_eq!(
                changes(Fault::DropLastTokenOnBoundary, tokens, 1),
                tokens % 8 == 0,
                "boundary, {tokens}"
            );
            assert!(!changes(Fault::BlockTableClamped, tokens, 1), "clamped table, {tokens}");
            assert!(!changes(Fault::RowsShareLength, tokens, 1), "one row, {tokens}");
        }
        assert!(!changes(Fault::BlockTableClamped, 256, 1) && changes(Fault::BlockTableClamped, 300, 1));
        assert!(changes(Fault::RowsShareLength, 40, 3));
        for fault in [Fault::LseBase2, Fault::LseMixedBase, Fault::RankLseOffset, Fault::RankLeftOut] {
            assert!(changes(fault, 40, 2), "{fault}");
        }
    }

    #[test]
    fn a_fault_of_single_rows_leaves_longer_calls_alone() {
        let healthy = config(4, 2, 4);
        let faulty = ShardedConfig { fault: Some(Fault::RankLseOffset), fault_max_rows: 2, ..healthy };
        for rows in 1..=9 {
            let changed = output(faulty, 40, rows) != output(healthy, 40, rows);
            assert_eq!(changed, rows <= 2, "{rows} rows");
        }
    }

    #[test]
    fn a_fault_of_the_merge_is_refused_where_nothing_is_merged() {
        for fault in Fault::ALL {
            let config = ShardedConfig { fault: Some(fault), ..config(1, 1, 4) };
            let error = Sharded::new(SHAPE, config, Simd::detect()).err();
            assert_eq!(error, Some(ShardedError::FaultNeedsRanks(fault)));
        }
    }

    #[test]
    fn heads_that_do_not_divide_are_refused() {
        for (query_heads, kv_heads, head_dim) in [(3, 2, 8), (4, 0, 8), (4, 2, 12)] {
            let shape = AttentionShape { layers: 1, query_heads, kv_heads, head_dim };
            let error = Sharded::new(shape, config(1, 1, 4), Simd::detect()).err();
            assert_eq!(error, Some(ShardedError::Shape { head_dim, query_heads, kv_heads }));
        }
    }
}
