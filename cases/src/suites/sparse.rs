//! The part of a suite that is about selecting tokens: a covering array, and cases by hand.

use serde::Deserialize;
use shardcheck_engine::{SelectionMode, Selector, SlotList};
use shardcheck_formats::Dtype;

use super::Collector;
use crate::covering::covering;
use crate::{Case, IndexPattern, Placement, Request, SelectCase, Workload, default_blocks};

/// Ranks of the session, ranks of a group, S and B.
pub(super) type Layout = (usize, usize, usize, usize);

/// Requests of a batch, by what they have of k and W.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Batch {
    /// One row each; shorter than k, equal to it, longer, much longer, and one of one token.
    Decode,
    /// Several rows each, a request of no tokens among them, graph padding behind.
    Verify,
    /// The rows of prompts, one with a context; the first rows of a prompt see fewer tokens than k.
    Prefill,
}

impl Batch {
    pub(super) fn workload(self, k: usize, world: usize, placement: Placement) -> Workload {
        let request = |context_tokens: usize, query_tokens: usize| Request { context_tokens, query_tokens };
        let (requests, padded_rows) = match self {
            Self::Decode => (
                vec![
                    request(k.saturating_sub(2), 1),
                    request(k - 1, 1),
                    request(0, 1),
                    request(k * world + 3, 1),
                    request(3 * k + 5, 1),
                ],
                0,
            ),
            Self::Verify => (
                vec![
                    request(2 * k + 3, 4),
                    request(0, 0),
                    request(k, 2),
                    request(0, 3),
                    request(k * world, 3),
                ],
                2,
            ),
            Self::Prefill => (vec![request(0, 2 * k + 3), request(k + 2, 5)], 1),
        };
        Workload { requests, padded_rows, placement, chunk_budget_tokens: 0 }
    }
}

/// A covering array of selections, and cases by hand.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SelectPart {
    strength: usize,
    count: usize,
    modes: Vec<SelectionMode>,
    lists: Vec<SlotList>,
    top_k: Vec<usize>,
    /// Heads of the indexer and their width.
    indexers: Vec<(usize, usize)>,
    formats: Vec<Dtype>,
    layouts: Vec<Layout>,
    batches: Vec<Batch>,
    placements: Vec<Placement>,
    patterns: Vec<IndexPattern>,
    /// Cases by hand: ids up to the seed.
    written: Vec<String>,
}

impl SelectPart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        for written in &self.written {
            let id = format!("{written}/0");
            suite.add(id.parse().unwrap_or_else(|error| panic!("a suite has a selection by hand: {error}")));
        }
        let levels = [
            self.modes.len(),
            self.lists.len(),
            self.top_k.len(),
            self.indexers.len(),
            self.formats.len(),
            self.layouts.len(),
            self.batches.len(),
            self.placements.len(),
            self.patterns.len(),
        ];
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &|_| true, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::select_sparse(self.case(row), 0)).collect()
        });
    }

    fn case(&self, row: &[usize]) -> SelectCase {
        let (top_k, (index_heads, index_dim)) = (self.top_k[row[2]], self.indexers[row[3]]);
        let (tp, dcp, interleave, block_size) = self.layouts[row[5]];
        let workload = self.batches[row[6]].workload(top_k, dcp, self.placements[row[7]]);
        SelectCase {
            selector: Selector { top_k, mode: self.modes[row[0]], list: self.lists[row[1]] },
            index_heads,
            index_dim,
            index_dtype: self.formats[row[4]],
            tp,
            dcp,
            interleave,
            block_size,
            blocks: default_blocks(&workload, block_size * dcp),
            workload,
            pattern: self.patterns[row[8]],
        }
    }
}
