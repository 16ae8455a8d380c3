//! The plan by which a cached context is gathered from all ranks, chunk by chunk, for prefill.
//!
//! Every rank reads the same number of local rows per request and chunk (padded, so that one all-gather
//! serves all), the gathered buffer is rank-major, and a reorganisation drops the padding. The result holds
//! each context token of a request once, by rank and ascending within a rank, *not* in global order: that
//! is enough because context attention is not masked and keys carry their rotation.
//! Sources: ATOM `_build_mla_chunk_meta_dcp`, `_dcp_compute_prefill_context`, `dcp_reorg_row_indices`;
//! the same walk with another padding in vLLM and vLLM-Ascend.

use crate::layout::Layout;
use std::ops::Range;

/// One chunk of a [`ChunkPlan`]. Rows are local cache rows; requests and ranks are indices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// The window of local rows that this chunk covers, before clipping to each request.
    pub window: Range<usize>,
    /// `[requests]`: rows that *every* rank sends for a request, padding included.
    pub padded: Vec<usize>,
    /// `[requests][world]`: rows of them that hold a context token.
    pub real: Vec<Vec<usize>>,
    /// `[requests]`: global positions in the order in which the gathered context holds them.
    pub gather_order: Vec<Vec<usize>>,
    /// Source row in the rank-major gathered buffer (`world · Σ padded` rows) of each kept row.
    pub reorg: Vec<usize>,
}

impl Chunk {
    /// Rows of the gathered buffer, padding included.
    pub fn gathered_rows(&self, world: usize) -> usize {
        world * self.padded.iter().sum::<usize>()
    }

    /// Context tokens of `request` in this chunk.
    pub fn tokens(&self, request: usize) -> usize {
        self.real[request].iter().sum()
    }

    /// The cache rows that every rank reads for `request`: `bt[p / B]·B + p mod B` over its part of the
    /// window. Padding rows lie in allocated blocks, but hold nothing that was written.
    ///
    /// # Panics
    /// The table does not reach the last row.
    pub fn local_slots(&self, layout: &Layout, request: usize, block_table: &[i32]) -> Vec<i64> {
        (self.window.start..self.window.start + self.padded[request])
            .map(|row| {
                i64::from(block_table[row / layout.block()]) * layout.block() as i64
                    + (row % layout.block()) as i64
            })
            .collect()
    }
}

/// How the contexts of a batch are walked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkPlan {
    /// Local rows per request and chunk.
    pub chunk_rows: usize,
    /// `[requests]`: local rows per request over all chunks, padding included.
    pub padded: Vec<usize>,
    /// The chunks in the order in which they run. At least one, even without any context.
    pub chunks: Vec<Chunk>,
}

impl ChunkPlan {
    /// ATOM's walk: lengths are padded to whole blocks, and the chunk is a whole number of blocks.
    ///
    /// `cached` is `[requests]` context tokens; `budget_rows` is the size of the gather buffer in rows over
    /// all ranks and requests with context.
    pub fn block_padded(layout: &Layout, cached: &[usize], budget_rows: usize) -> Self {
        let (block, world) = (layout.block(), layout.world());
        let with_context = cached.iter().filter(|&&len| len > 0).count();
        let padded = cached.iter().map(|len| layout.blocks_needed(*len) * block).collect();
        let chunk_rows = (budget_rows / (with_context * world).max(1) / block * block).max(block);
        Self::walk(layout, cached, padded, chunk_rows)
    }

    /// The walk of vLLM, vLLM-Ascend and ATOM's vLLM plugin: lengths and chunk are padded to whole
    /// interleave runs.
    ///
    /// `max_chunk_tokens` is the most global context tokens of a request in one chunk, a multiple of the
    /// world size there; it is rounded up to whole rounds of dealing here, as those engines do.
    pub fn run_padded(layout: &Layout, cached: &[usize], max_chunk_tokens: usize) -> Self {
        let (run, round) = (layout.interleave(), layout.interleave() * layout.world());
        let padded = cached.iter().map(|len| len.div_ceil(round) * run).collect();
        let chunk_rows = (max_chunk_tokens.div_ceil(round) * run).max(run);
        Self::walk(layout, cached, padded, chunk_rows)
    }

    /// Requests of the batch.
    pub fn requests(&self) -> usize {
        self.padded.len()
    }

    fn walk(layout: &Layout, cached: &[usize], padded: Vec<usize>, chunk_rows: usize) -> Self {
        let longest = padded.iter().copied().max().unwrap_or(0);
        let chunks = (0..longest.div_ceil(chunk_rows).max(1))
            .map(|index| chunk(layout, cached, &padded, index * chunk_rows..(index + 1) * chunk_rows))
            .collect();
        Self { chunk_rows, padded, chunks }
    }
}

/// Rows of `0..len` that lie in `window`.
fn clip(len: usize, window: &Range<usize>) -> usize {
    len.min(window.end).saturating_sub(window.start)
}

fn chunk(layout: &Layout, cached: &[usize], padded: &[usize], window: Range<usize>) -> Chunk {
    let world = layout.world();
    let sent: Vec<usize> = padded.iter().map(|&rows| clip(rows, &window)).collect();
    let real: Vec<Vec<usize>> = cached
        .iter()
        .map(|&len| (0..world).map(|rank| clip(layout.local_len(len, rank), &window)).collect())
        .collect();
    let rows_per_rank: usize = sent.iter().sum();
    let (mut gather_order, mut reorg, mut before) = (Vec::new(), Vec::new(), 0);
    for (request, held) in real.iter().enumerate() {
        let mut order = Vec::new();
        for (rank, &rows) in held.iter().enumerate() {
            order.extend((window.start..window.start + rows).map(|row| layout.global_position(row, rank)));
            let source = rank * rows_per_rank + before;
            reorg.extend(source..source + rows);
        }
        gather_order.push(order);
        before += sent[request];
    }
    Chunk { window, padded: sent, real, gather_order, reorg }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plans(layout: &Layout, cached: &[usize]) -> Vec<ChunkPlan> {
        [1, 7, 24, 64, 1000]
            .into_iter()
            .flat_map(|size| {
                [ChunkPlan::block_padded(layout, cached, size), ChunkPlan::run_padded(layout, cached, size)]
            })
            .collect()
    }

    fn layouts() -> Vec<Layout> {
        [(1, 1, 4), (2, 1, 4), (2, 2, 4), (3, 4, 8), (4, 16, 16), (8, 1, 1)]
            .into_iter()
            .map(|(world, interleave, block)| Layout::new(world, interleave, block).unwrap())
            .collect()
    }

    const BATCHES: [&[usize]; 5] = [&[], &[0], &[1, 0, 37], &[5, 64, 3, 0, 130], &[2, 2]];

    #[test]
    fn every_context_token_is_gathered_once() {
        for layout in layouts() {
            for cached in BATCHES {
                for plan in plans(&layout, cached) {
                    assert_eq!(plan.requests(), cached.len());
                    for (request, &len) in cached.iter().enumerate() {
                        let mut seen: Vec<usize> = plan
                            .chunks
                            .iter()
                            .flat_map(|chunk| chunk.gather_order[request].clone())
                            .collect();
                        seen.sort_unstable();
                        assert_eq!(seen, (0..len).collect::<Vec<_>>(), "{layout:?} {cached:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_gathered_chunk_is_by_rank_and_ascending_within_a_rank() {
        for layout in layouts() {
            for plan in plans(&layout, &[37, 130]) {
                for chunk in &plan.chunks {
                    for order in &chunk.gather_order {
                        let keys: Vec<_> = order.iter().map(|&pos| (layout.owner(pos), pos)).collect();
                        assert!(keys.is_sorted(), "{layout:?}: {keys:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_row_map_picks_the_real_rows_out_of_the_gathered_buffer() {
        for layout in layouts() {
            for cached in BATCHES {
                for plan in plans(&layout, cached) {
                    for chunk in &plan.chunks {
                        // what each rank sends, with padding marked, laid out as the all-gather leaves it
                        let mut buffer = Vec::new();
                        for rank in 0..layout.world() {
                            for (request, &len) in cached.iter().enumerate() {
                                let rows = chunk.window.start..chunk.window.start + chunk.padded[request];
                                buffer.extend(rows.map(|row| {
                                    (row < layout.local_len(len, rank))
                                        .then(|| (request, layout.global_position(row, rank)))
                                }));
                            }
                        }
                        assert_eq!(buffer.len(), chunk.gathered_rows(layout.world()));
                        let kept: Vec<_> = chunk.reorg.iter().map(|&row| buffer[row].unwrap()).collect();
                        let expected: Vec<_> = chunk
                            .gather_order
                            .iter()
                            .enumerate()
                            .flat_map(|(request, order)| order.iter().map(move |&pos| (request, pos)))
                            .collect();
                        assert_eq!(kept, expected, "{layout:?} {cached:?}");
                        assert_eq!(kept.len(), (0..cached.len()).map(|request| chunk.tokens(request)).sum());
                    }
                }
            }
        }
    }

    #[test]
    fn padding_is_the_same_on_every_rank_and_never_shorter_than_the_longest() {
        for layout in layouts() {
            for plan in plans(&layout, &[1, 37, 130]) {
                for chunk in &plan.chunks {
                    for (padded, real) in chunk.padded.iter().zip(&chunk.real) {
                        assert!(real.iter().all(|rows| rows <= padded));
                    }
                }
            }
        }
    }

    #[test]
    fn without_context_there_is_one_empty_chunk_so_that_collectives_still_run() {
        let layout = Layout::new(2, 1, 4).unwrap();
        for plan in plans(&layout, &[0, 0]) {
            assert_eq!(plan.chunks.len(), 1);
            assert_eq!(plan.chunks[0].gathered_rows(2), 0);
            assert!(plan.chunks[0].reorg.is_empty());
        }
    }

    #[test]
    fn a_worked_walk_in_blocks() {
        // W=2, S=1, B=4: 37 tokens fill 5 virtual blocks, 5 tokens one; 2 requests share 32 rows
        let layout = Layout::new(2, 1, 4).unwrap();
        let plan = ChunkPlan::block_padded(&layout, &[37, 5], 32);
        assert_eq!((plan.chunk_rows, plan.padded.clone(), plan.chunks.len()), (8, vec![20, 4], 3));
        assert_eq!(plan.chunks[0].real, [[8, 8], [3, 2]]);
        assert_eq!(plan.chunks[2].real, [[3, 2], [0, 0]]);
        assert_eq!(plan.chunks[2].padded, [4, 0]);
        assert_eq!(plan.chunks[2].gather_order[0], [32, 34, 36, 33, 35]);
        assert_eq!(plan.chunks[2].reorg, [0, 1, 2, 4, 5]);
        assert_eq!(plan.chunks[2].local_slots(&layout, 0, &[9, 8, 7, 6, 5]), [20, 21, 22, 23]);
    }

    #[test]
    fn a_worked_walk_in_runs() {
        let layout = Layout::new(2, 2, 4).unwrap();
        let plan = ChunkPlan::run_padded(&layout, &[7], 4);
        assert_eq!((plan.chunk_rows, plan.padded.clone(), plan.chunks.len()), (2, vec![4], 2));
        assert_eq!(plan.chunks[0].gather_order[0], [0, 1, 2, 3]);
        assert_eq!(plan.chunks[1].gather_order[0], [4, 5, 6]);
        assert_eq!(plan.chunks[1].reorg, [0, 1, 2]);
    }
}
