//! The part of a suite that is about Kimi delta attention: a covering array, and cases by hand.

use serde::Deserialize;
use shardcheck_engine::KdaGate;

use super::Collector;
use crate::covering::covering;
use crate::{Case, KdaCase, KdaPattern};

/// A covering array of sessions of Kimi delta attention, and cases by hand.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KdaPart {
    strength: usize,
    count: usize,
    gates: Vec<KdaGate>,
    /// Heads, value heads, their widths, taps.
    sizes: Vec<[usize; 5]>,
    /// Ranks, and how many of them share a sequence elsewhere.
    ranks: Vec<[usize; 2]>,
    chunks: Vec<usize>,
    patterns: Vec<KdaPattern>,
    /// Most rows that may be rejected, and the steps as an id has them.
    sessions: Vec<(usize, String)>,
    /// Cases by hand: ids up to the seed.
    written: Vec<String>,
}

impl KdaPart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        for written in &self.written {
            let id = format!("{written}/0");
            suite.add(id.parse().unwrap_or_else(|error| panic!("a suite has KDA by hand: {error}")));
        }
        let levels = [
            self.gates.len(),
            self.sizes.len(),
            self.ranks.len(),
            self.chunks.len(),
            self.patterns.len(),
            self.sessions.len(),
        ];
        let fits = |row: &[Option<usize>]| match (row[1], row[2]) {
            (Some(size), Some(ranks)) => self.sizes[size][0].is_multiple_of(self.ranks[ranks][0]),
            _ => true,
        };
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &fits, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::kda(self.case(row), 0)).collect()
        });
    }

    fn case(&self, row: &[usize]) -> KdaCase {
        let [heads, value_heads, key_dim, value_dim, taps] = self.sizes[row[1]];
        let [tp, dcp] = self.ranks[row[2]];
        let (drafts, steps) = &self.sessions[row[5]];
        let layer =
            format!("{}.h{heads}.hv{value_heads}.k{key_dim}.v{value_dim}.t{taps}", self.gates[row[0]]);
        let ranks = format!("tp{tp}.dcp{dcp}.c{}.d{drafts}", self.chunks[row[3]]);
        KdaCase::read(&layer, &ranks, steps, self.patterns[row[4]].name())
            .unwrap_or_else(|error| panic!("a suite has steps of KDA that do not read: {error}"))
    }
}
