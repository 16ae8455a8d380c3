//! The parts of a suite that are about prefill context parallelism: covering arrays over splits, ranks, batches and lengths, and over what
//! attends in them.

use serde::Deserialize;
use shardcheck_engine::{PcpDecodes, PcpStrategy};

use super::Collector;
use crate::covering::covering;
use crate::{AttendPcpCase, Case, Family, PcpCase, PcpRequest, Probe};

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
    /// Cases by hand.
    #[serde(default)]
    written: Vec<String>,
}

impl PcpPart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        for id in &self.written {
            suite.add(id.parse().unwrap_or_else(|error| panic!("a suite has a batch by hand: {error}")));
        }
        suite.fill(self.count, |round| {
            let allow = |row: &[Option<usize>]| self.allows(row);
            let rows = covering(&self.levels(), self.strength, &allow, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::pcp(self.case(row))).collect()
        });
    }

    fn levels(&self) -> [usize; 6] {
        [
            self.splits.len(),
            self.worlds.len(),
            self.batches.len(),
            self.lengths.len(),
            self.contexts.len(),
            self.extra_rows.len(),
        ]
    }

    fn allows(&self, row: &[Option<usize>]) -> bool {
        // what zigzag refuses: decodes, and prompts that are shorter than its blocks are many
        let zigzag = row[0].is_some_and(|index| self.splits[index].0 == PcpStrategy::Zigzag);
        let with_decodes = |index: usize| {
            matches!(self.batches[index], Batch::Mixed | Batch::Verifying | Batch::Decodes | Batch::Idle)
        };
        let is_short = |world: usize, index: usize| (1..2 * world).contains(&self.lengths[index].rows(world));
        let short = match (row[1], row[3]) {
            (Some(world), Some(length)) => is_short(self.worlds[world], length),
            (None, Some(length)) => self.worlds.iter().all(|world| is_short(*world, length)),
            _ => false,
        };
        !(zigzag && (row[2].is_some_and(with_decodes) || short))
    }

    fn case(&self, row: &[usize]) -> PcpCase {
        let ((strategy, decodes), world) = (self.splits[row[0]], self.worlds[row[1]]);
        let first = PcpRequest {
            context_tokens: self.contexts[row[4]],
            query_tokens: self.lengths[row[3]].rows(world),
            is_prefilling: true,
        };
        let requests = self.batches[row[2]].requests(world, first);
        let extra_rows = self.extra_rows[row[5]];
        PcpCase { world, strategy, decodes, extra_rows, overlap: false, requests }
    }
}

/// A covering array of cases that attend under prefill context parallelism, and cases by hand.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AttendPcpPart {
    /// Model and configuration, as an id has them.
    layouts: Vec<(String, String)>,
    /// Placement of blocks and format of queries, as an id has them.
    queries: Vec<String>,
    probes: Vec<Probe>,
    /// Cases by hand: ids up to the seed.
    #[serde(default)]
    written: Vec<String>,
    /// The batches; its strength and count are those of the whole array.
    batch: PcpPart,
}

impl AttendPcpPart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        for written in &self.written {
            let id = format!("{written}/0");
            suite.add(id.parse().unwrap_or_else(|error| panic!("a suite has shared rows by hand: {error}")));
        }
        let mut levels = self.batch.levels().to_vec();
        levels.extend([self.layouts.len(), self.queries.len(), self.probes.len()]);
        // a batch without rows has nothing that attends
        let idle = |row: &[Option<usize>]| match (row[2], row[3]) {
            (Some(batch), Some(length)) => {
                self.batch.batches[batch] == Batch::One && self.batch.lengths[length] == Length::Zero
            }
            _ => false,
        };
        let allow = |row: &[Option<usize>]| self.batch.allows(row) && !idle(row);
        suite.fill(self.batch.count, |round| {
            let rows = covering(&levels, self.batch.strength, &allow, seed.wrapping_add(round << 32));
            // a length of P − 1 may be none
            rows.iter()
                .map(|row| self.case(row))
                .filter(|case| case.batch.rows() > 0)
                .map(|case| Case::attend_pcp(case, 0))
                .collect()
        });
    }

    fn case(&self, row: &[usize]) -> AttendPcpCase {
        let batch = self.batch.case(row).spell();
        let (split, requests) = batch.split_once('/').expect("a batch is spelt in two parts");
        let (model, configuration) = &self.layouts[row[6]];
        let probe = self.probes[row[8]].name();
        AttendPcpCase::read((split, requests), (model, configuration), &self.queries[row[7]], probe)
            .unwrap_or_else(|error| panic!("a suite has shared rows that do not read: {error}"))
    }
}

/// A covering array of cases that do something else for the rows of a shared batch, and cases by hand.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SharedPart {
    /// What is done: `select_pcp` or `compress_pcp`.
    family: Family,
    /// Its sizes and its patterns, as an id has them.
    sizes: Vec<String>,
    patterns: Vec<String>,
    /// Cases by hand: ids up to the seed.
    written: Vec<String>,
    /// The batches; its strength and count are those of the whole array.
    batch: PcpPart,
}

impl SharedPart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        let read = |id: &str| -> Case {
            let id = format!("{id}/0");
            id.parse().unwrap_or_else(|error| panic!("a suite has shared rows that do not read: {error}"))
        };
        for written in &self.written {
            suite.add(read(written));
        }
        let mut levels = self.batch.levels().to_vec();
        levels.extend([self.sizes.len(), self.patterns.len()]);
        let allow = |row: &[Option<usize>]| self.batch.allows(row);
        suite.fill(self.batch.count, |round| {
            let rows = covering(&levels, self.batch.strength, &allow, seed.wrapping_add(round << 32));
            let of_row = |row: &Vec<usize>| {
                let batch = self.batch.case(row);
                let (sizes, pattern) = (&self.sizes[row[6]], &self.patterns[row[7]]);
                // a batch without rows has nothing to do
                (batch.rows() > 0)
                    .then(|| read(&format!("{}/{}/{sizes}/{pattern}", self.family, batch.spell())))
            };
            rows.iter().filter_map(of_row).collect()
        });
    }
}
