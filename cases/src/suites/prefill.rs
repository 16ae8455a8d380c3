//! The part of a suite that is about prefill context parallelism: a covering array over splits, ranks, batches and lengths.

use serde::Deserialize;
use shardcheck_engine::{PcpDecodes, PcpStrategy};

use super::Collector;
use crate::covering::covering;
use crate::{Case, PcpCase, PcpRequest};

/// A length of the first prompt, at the edges of a split over P ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum Length {
    #[serde(rename = "0")]
    Zero,
    #[serde(rename = "1")]
    One,
    #[serde(rename = "p-1")]
    BelowRanks,
    #[serde(rename = "p")]
    Ranks,
    #[serde(rename = "p+1")]
    AboveRanks,
    #[serde(rename = "2p-1")]
    BelowChunks,
    #[serde(rename = "2p")]
    Chunks,
    #[serde(rename = "2p+1")]
    AboveChunks,
    #[serde(rename = "4p-1")]
    BelowTwoRounds,
    #[serde(rename = "4p+1")]
    AboveTwoRounds,
    #[serde(rename = "6p+p/2")]
    HalfRound,
    #[serde(rename = "127")]
    Prime,
}

impl Length {
    fn rows(self, world: usize) -> usize {
        match self {
            Self::Zero => 0,
            Self::One => 1,
            Self::BelowRanks => world - 1,
            Self::Ranks => world,
            Self::AboveRanks => world + 1,
            Self::BelowChunks => 2 * world - 1,
            Self::Chunks => 2 * world,
            Self::AboveChunks => 2 * world + 1,
            Self::BelowTwoRounds => 4 * world - 1,
            Self::AboveTwoRounds => 4 * world + 1,
            Self::HalfRound => 6 * world + world / 2,
            Self::Prime => 127,
        }
    }
}

/// Who stands beside the first prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Batch {
    /// Nobody.
    One,
    /// Prompts of other lengths.
    Ragged,
    /// Decodes before, between and behind.
    Mixed,
    /// Decodes of several rows, as target verification has them.
    Verifying,
    /// Decodes alone.
    Decodes,
    /// Requests that have no row in this step.
    Idle,
}

impl Batch {
    fn requests(self, world: usize, first: PcpRequest) -> Vec<PcpRequest> {
        let prompt =
            |context_tokens, query_tokens| PcpRequest { context_tokens, query_tokens, is_prefilling: true };
        let decode =
            |context_tokens, query_tokens| PcpRequest { context_tokens, query_tokens, is_prefilling: false };
        match self {
            Self::One => vec![first],
            Self::Ragged => {
                vec![prompt(0, 2 * world + 1), first, prompt(5, 4 * world - 1), prompt(world, 2 * world)]
            }
            Self::Mixed => {
                vec![decode(7, 1), first, decode(20, 1), decode(11, 1), prompt(3, 1), decode(2 * world, 1)]
            }
            Self::Verifying => vec![decode(7, 3), first, decode(20, 1), prompt(3, 1), decode(2 * world, 2)],
            Self::Decodes => (0..=world).map(|at| decode(9 + at, 1)).collect(),
            Self::Idle => vec![prompt(0, 0), first, decode(4, 0), prompt(6, 3 * world)],
        }
    }
}

/// A covering array of cases of prefill context parallelism.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PcpPart {
    strength: usize,
    count: usize,
    /// Strategy and what decodes do.
    splits: Vec<(PcpStrategy, PcpDecodes)>,
    worlds: Vec<usize>,
    batches: Vec<Batch>,
    lengths: Vec<Length>,
    /// Tokens of the first prompt that were computed before.
    contexts: Vec<usize>,
    /// Rows of a graph beyond those of the fullest rank.
    extra_rows: Vec<usize>,
}

impl PcpPart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        let levels = [
            self.splits.len(),
            self.worlds.len(),
            self.batches.len(),
            self.lengths.len(),
            self.contexts.len(),
            self.extra_rows.len(),
        ];
        // what zigzag refuses: decodes, and prompts that are shorter than its blocks are many
        let allow = |row: &[Option<usize>]| {
            let zigzag = row[0].is_some_and(|index| self.splits[index].0 == PcpStrategy::Zigzag);
            let with_decodes = |index| {
                matches!(self.batches[index], Batch::Mixed | Batch::Verifying | Batch::Decodes | Batch::Idle)
            };
            let is_short =
                |world: usize, index: usize| (1..2 * world).contains(&self.lengths[index].rows(world));
            let short = match (row[1], row[3]) {
                (Some(world), Some(length)) => is_short(self.worlds[world], length),
                (None, Some(length)) => self.worlds.iter().all(|world| is_short(*world, length)),
                _ => false,
            };
            !(zigzag && (row[2].is_some_and(with_decodes) || short))
        };
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &allow, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::pcp(self.case(row))).collect()
        });
    }

    fn case(&self, row: &[usize]) -> PcpCase {
        let ((strategy, decodes), world) = (self.splits[row[0]], self.worlds[row[1]]);
        let first = PcpRequest {
            context_tokens: self.contexts[row[4]],
            query_tokens: self.lengths[row[3]].rows(world),
            is_prefilling: true,
        };
        let requests = self.batches[row[2]].requests(world, first);
        PcpCase { world, strategy, decodes, extra_rows: self.extra_rows[row[5]], requests }
    }
}
