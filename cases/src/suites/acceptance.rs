//! The part of a suite that is about accepting drafted tokens: a covering array, and cases by hand.

use serde::Deserialize;
use shardcheck_engine::AcceptanceMethod;

use super::Collector;
use crate::covering::covering;
use crate::{AcceptanceCase, AcceptancePattern, Case, DraftRequest};

/// Drafts of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Batch {
    /// One request with one draft.
    One,
    /// Nobody has a draft.
    None,
    /// Different numbers of drafts, none among them.
    Ragged,
    /// Many drafts.
    Deep,
    /// Drafts that are none, first, between and last.
    Holes,
}

impl Batch {
    fn requests(self) -> Vec<DraftRequest> {
        let plain = |drafts: usize| DraftRequest { drafts, none_at: None };
        let hole = |drafts: usize, index: usize| DraftRequest { drafts, none_at: Some(index) };
        match self {
            Self::One => vec![plain(1)],
            Self::None => vec![plain(0); 3],
            Self::Ragged => [3, 0, 5, 1, 1, 4, 2, 0, 5, 3, 2, 4].map(plain).to_vec(),
            Self::Deep => vec![plain(9), plain(8), plain(9), plain(9)],
            Self::Holes => {
                vec![
                    hole(3, 0),
                    plain(3),
                    hole(3, 1),
                    hole(4, 2),
                    hole(1, 0),
                    hole(4, 3),
                    plain(0),
                    hole(4, 1),
                ]
            }
        }
    }
}

/// A covering array of cases of accepting drafts, and cases by hand.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AcceptancePart {
    strength: usize,
    count: usize,
    /// Method, and whether drafts come without a law.
    samplers: Vec<(AcceptanceMethod, bool)>,
    ranks: Vec<usize>,
    vocabularies: Vec<usize>,
    patterns: Vec<AcceptancePattern>,
    batches: Vec<Batch>,
    /// Cases by hand: ids up to the seed.
    written: Vec<String>,
}

impl AcceptancePart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        for written in &self.written {
            let id = format!("{written}/0");
            suite.add(id.parse().unwrap_or_else(|error| panic!("a suite has drafts by hand: {error}")));
        }
        let levels = [
            self.samplers.len(),
            self.ranks.len(),
            self.vocabularies.len(),
            self.patterns.len(),
            self.batches.len(),
        ];
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &|_| true, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::acceptance(self.case(row), 0)).collect()
        });
    }

    fn case(&self, row: &[usize]) -> AcceptanceCase {
        let (method, one_hot) = self.samplers[row[0]];
        AcceptanceCase {
            method,
            ranks: self.ranks[row[1]],
            vocabulary: self.vocabularies[row[2]],
            one_hot,
            pattern: self.patterns[row[3]],
            requests: self.batches[row[4]].requests(),
        }
    }
}
