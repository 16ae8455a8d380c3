//! The walk over a cached context: how much of each request every rank reads in each chunk, and how the gathered rows
//! are put back into requests.
//!
//! Native walk of ATOM (`_build_mla_chunk_meta_dcp`, `_dcp_compute_prefill_context`, `reorg_kvcache`): all ranks read the
//! same number of rows, padding included, so that one all-gather serves all; the padding is dropped afterwards. The
//! tokens of a request come out rank-major, not in their own order, which context attention doesn't mind: it has no mask.

use std::ops::Range;

use crate::grid::Grid;

/// Local rows per request and the windows that cover them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkPlan {
    /// Local rows of each request on every rank, padding included.
    pub padded: Vec<usize>,
    /// Windows of local rows, one per chunk. At least one.
    pub windows: Vec<Range<usize>>,
}

impl ChunkPlan {
    /// Rows of a request that every rank sends in a chunk.
    pub fn sent(&self, request: usize, chunk: usize) -> usize {
        clip(self.padded[request], &self.windows[chunk])
    }
}

/// Where a row of a request lies in a gathered chunk.
#[derive(Debug, Clone, Copy)]
pub struct GatheredRow {
    /// Member that sent it.
    pub member: usize,
    /// Rows of earlier requests that each member sent.
    pub before: usize,
    /// Row among those of its request.
    pub row: usize,
    /// Rows that each member sent.
    pub sent: usize,
    /// Members.
    pub world: usize,
}

/// Weights of two states and the LSE of their merge.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateWeights {
    /// Weight of the first state.
    pub prefix: f32,
    /// Weight of the second state.
    pub suffix: f32,
    /// Merged LSE.
    pub lse: f32,
}

/// How a context is read, ordered and merged.
#[derive(Clone, Copy, PartialEq)]
pub struct ContextPolicies {
    /// The walk: `(cached tokens, budget in tokens, grid)`.
    pub plan: fn(&[usize], usize, &Grid) -> ChunkPlan,
    /// Rows of a member's window that hold a token: `(member's tokens, rows sent, window)`.
    pub kept: fn(usize, usize, &Range<usize>) -> usize,
    /// Block-table entry and row in the block of a local row.
    pub page: fn(usize, &Grid) -> (usize, usize),
    /// Whether a rank enters the gather of a chunk in which it holds that many tokens.
    pub enters_gather: fn(usize) -> bool,
    /// Row of the gathered buffer.
    pub source: fn(&GatheredRow) -> usize,
    /// Context tokens that a row sees: `(tokens of the chunk, row, rows of the request)`.
    pub visible: fn(usize, usize, usize) -> usize,
    /// New tokens that a row sees: `(row, rows of the request)`.
    pub visible_new: fn(usize, usize) -> usize,
    /// Merge of a chunk (second) into the chunks before (first), by LSE.
    pub merge_chunk: fn(f32, f32) -> StateWeights,
    /// Merge of the new tokens (second) with the context (first), by LSE.
    pub merge_suffix: fn(f32, f32) -> StateWeights,
}

impl ContextPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        plan,
        kept: |tokens, _, window| clip(tokens, window),
        page: |local, grid| (local / grid.block, local % grid.block),
        enters_gather: |_| true,
        source: |at| at.member * at.sent + at.before + at.row,
        visible: |tokens, _, _| tokens,
        visible_new: |row, _| row + 1,
        merge_chunk: merge_two,
        merge_suffix: merge_two,
    };
}

/// Two-state merge: weights `exp(lse − g)`, `g = log(exp a + exp b)`; +∞ and NaN count as empty; two empty states
/// give nothing (FlashInfer `merge_state`, vLLM and ATOM `merge_attn_states`).
pub fn merge_two(prefix: f32, suffix: f32) -> StateWeights {
    let mut weights = [0.0; 2];
    let lses = [crate::merge::sanitise(prefix), crate::merge::sanitise(suffix)];
    let lse = crate::merge::combine(&lses, &mut weights);
    StateWeights { prefix: weights[0], suffix: weights[1], lse }
}

/// Rows of `0..len` in a window.
pub fn clip(len: usize, window: &Range<usize>) -> usize {
    len.min(window.end).saturating_sub(window.start)
}

/// Contexts padded to whole blocks; chunks of whole blocks, as many as the budget holds over all ranks and requests.
pub fn plan(cached: &[usize], budget_tokens: usize, grid: &Grid) -> ChunkPlan {
    let block = grid.block;
    let padded: Vec<usize> = cached.iter().map(|len| len.div_ceil(block * grid.world) * block).collect();
    let readers = cached.iter().filter(|len| **len > 0).count() * grid.world;
    let rows = (budget_tokens / readers.max(1) / block * block).max(block);
    let chunks = padded.iter().copied().max().unwrap_or(0).div_ceil(rows).max(1);
    ChunkPlan { padded, windows: (0..chunks).map(|chunk| chunk * rows..(chunk + 1) * rows).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walk_covers_every_local_row_once_within_the_budget() {
        for (world, block) in [(1, 4), (2, 4), (3, 2), (8, 16)] {
            let grid = Grid { world, interleave: 1, block };
            for budget in [0, 1, 24, 64, 1000] {
                let cached = [0, 1, 37, 130];
                let plan = plan(&cached, budget, &grid);
                for (request, len) in cached.iter().enumerate() {
                    let sent: usize = (0..plan.windows.len()).map(|chunk| plan.sent(request, chunk)).sum();
                    assert_eq!(sent, plan.padded[request]);
                    assert!(sent * world >= *len && sent.is_multiple_of(block));
                }
                let rows = plan.windows[0].len();
                assert!(rows == block || rows * 3 * world <= budget, "{rows} rows for {budget} tokens");
            }
        }
    }

    #[test]
    fn no_context_is_one_chunk_that_nobody_sends_anything_in() {
        let plan = plan(&[0, 0], 64, &Grid { world: 2, interleave: 1, block: 4 });
        assert_eq!((plan.windows.len(), plan.sent(0, 0)), (1, 0));
    }

    #[test]
    fn an_empty_state_is_neutral_and_two_of_them_give_nothing() {
        let empty = f32::NEG_INFINITY;
        assert_eq!(merge_two(1.5, empty), StateWeights { prefix: 1.0, suffix: 0.0, lse: 1.5 });
        assert_eq!(merge_two(f32::INFINITY, 1.5), StateWeights { prefix: 0.0, suffix: 1.0, lse: 1.5 });
        assert_eq!(merge_two(empty, empty), StateWeights { prefix: 0.0, suffix: 0.0, lse: empty });
    }

    #[test]
    fn the_weights_of_two_states_are_those_of_the_worked_example() {
        let merged = merge_two(0.0, 1.0);
        assert!((merged.prefix - 0.268_941_4).abs() < 1e-6 && (merged.suffix - 0.731_058_6).abs() < 1e-6);
        assert!((merged.lse - 1.313_261_7).abs() < 1e-6);
    }
}
