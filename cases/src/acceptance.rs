//! Cases of accepting drafted tokens: batches of requests with ragged drafts, over a vocabulary that is sharded over ranks.

mod inputs;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{AcceptanceMethod, CommBackend, Configuration, LaneOrder, Operation, vocabulary};
use shardcheck_formats::Dtype;

pub use inputs::{AcceptanceInputs, Enumeration, generate_acceptance};

use crate::tokens::{keyed, number};
use crate::{Body, Case, CaseError, Family, MAX_RANKS, MAX_REQUESTS, MergeCase, MergePattern, StateView};

/// Most drafts of a request.
const MAX_DRAFTS: usize = 64;
/// Most logits of the target in a case.
const MAX_LOGITS: usize = 1 << 22;
/// Least requests of a law that is judged by counts.
const LEAST_SAMPLED: usize = 256;

vocabulary! {
    /// How logits and numbers are drawn.
    AcceptancePattern ("pattern") {
        /// Gaussian logits, the drafter's near the target's; temperatures 0 and around 1.
        Gaussian = "gaussian",
        /// The drafter's logits are the target's, bit for bit.
        Equal = "equal",
        /// Half of the probabilities are exactly 0, some are 1; tokens that can't be have much noise.
        Zeros = "zeros",
        /// Numbers at the edges: 0, just below 1, and close to the thresholds.
        Edges = "edges",
        /// Few distinct logits: argmax ties in every row, most requests greedy.
        Ties = "ties",
        /// All drafts and an exact partition of all numbers over three tokens: the law of what is emitted is a count.
        Enumerated = "enumerated",
        /// Many requests with the same rows: the law of what is emitted is tested by its distribution function.
        Sampled = "sampled",
    }
}

/// Drafts of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftRequest {
    /// Drafts k; 0 is legal.
    pub drafts: usize,
    /// Index of a draft that is none (−1), where there is one.
    pub none_at: Option<usize>,
}

/// Acceptance of the drafts of one batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AcceptanceCase {
    /// How drafts are accepted.
    pub method: AcceptanceMethod,
    /// Ranks that the vocabulary is sharded over.
    pub ranks: usize,
    /// Tokens V.
    pub vocabulary: usize,
    /// Whether drafts come without a law; not for the greedy method, which needs none.
    pub one_hot: bool,
    /// How logits and numbers are drawn.
    pub pattern: AcceptancePattern,
    /// The batch; empty where the pattern makes it.
    pub requests: Vec<DraftRequest>,
}

impl AcceptanceCase {
    /// Target rows of the requests that are given.
    pub fn rows(&self) -> usize {
        self.requests.iter().map(|request| request.drafts + 1).sum()
    }

    /// What a session for the case is opened with: one rank of nothing, since the ranks of the vocabulary are the operation's own.
    pub fn configuration(&self) -> Configuration {
        let merge = MergeCase {
            world: 1,
            rows: 1,
            heads_per_rank: 1,
            dim: 8,
            dtype: Dtype::F32,
            comm_backend: CommBackend::AgRs,
            lane_order: LaneOrder::HiLo,
            pattern: MergePattern::Random,
            view: StateView::Contiguous,
        };
        merge.configuration(Family::MergeStates)
    }

    /// The step.
    pub fn operation(&self) -> Operation {
        Operation::AcceptDrafts { method: self.method, ranks: self.ranks }
    }

    /// Checks sizes, and that method, pattern and batch go together.
    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        if self.ranks == 0 || self.ranks > MAX_RANKS {
            return fail(format!("ranks is {}; it must be between 1 and {MAX_RANKS}", self.ranks));
        }
        if self.vocabulary == 0 {
            return fail("there is no token".to_owned());
        }
        let greedy = self.method == AcceptanceMethod::Greedy;
        if greedy && self.one_hot {
            return fail("the greedy method takes no law of drafts: leave out onehot".to_owned());
        }
        let enumerated = self.pattern == AcceptancePattern::Enumerated;
        if greedy && (enumerated || self.pattern == AcceptancePattern::Sampled) {
            return fail("the greedy method has no law to test".to_owned());
        }
        if enumerated {
            let whole = self.vocabulary == 3 && self.requests.is_empty();
            return if whole {
                Ok(())
            } else {
                fail("an enumeration has three tokens and all requests".to_owned())
            };
        }
        if self.requests.is_empty() || self.requests.len() > MAX_REQUESTS {
            return fail(format!("{} requests; there may be 1 to {MAX_REQUESTS}", self.requests.len()));
        }
        for request in &self.requests {
            if request.drafts > MAX_DRAFTS || request.none_at.is_some_and(|index| index >= request.drafts) {
                return fail(format!(
                    "a request has more than {MAX_DRAFTS} drafts, or none behind its last one"
                ));
            }
        }
        let logits = self.rows().checked_mul(self.vocabulary);
        if logits.is_none_or(|logits| logits > MAX_LOGITS) {
            return fail(format!("more than {MAX_LOGITS} logits"));
        }
        let first = self.requests[0];
        let alike = first.drafts > 0 && first.none_at.is_none() && self.requests.iter().all(|r| *r == first);
        if self.pattern == AcceptancePattern::Sampled && (!alike || self.requests.len() < LEAST_SAMPLED) {
            return fail(format!(
                "a sampled law has at least {LEAST_SAMPLED} requests, all with the same drafts"
            ));
        }
        Ok(())
    }

    /// Three parts of an id: the sampler, the batch and the pattern, such as `block.r2.v17.onehot/3_0_5-2x4/gaussian`.
    pub(crate) fn spell(&self) -> String {
        let one_hot = if self.one_hot { ".onehot" } else { "" };
        let sampler = format!("{}.r{}.v{}{one_hot}", self.method, self.ranks, self.vocabulary);
        let alike = self.requests.chunk_by(|a, b| a == b);
        let batch = alike.map(|group| {
            let none = group[0].none_at.map_or(String::new(), |index| format!("-{index}"));
            let count = if group.len() > 1 { format!("x{}", group.len()) } else { String::new() };
            format!("{}{none}{count}", group[0].drafts)
        });
        let batch =
            if self.requests.is_empty() { "all".to_owned() } else { batch.collect::<Vec<_>>().join("_") };
        format!("{sampler}/{batch}/{}", self.pattern.name())
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read(sampler: &str, batch: &str, pattern: &str) -> Result<Self, String> {
        let parts: Vec<&str> = sampler.split('.').collect();
        let (method, ranks, vocabulary, one_hot) = match parts[..] {
            [method, ranks, vocabulary] => (method, ranks, vocabulary, false),
            [method, ranks, vocabulary, "onehot"] => (method, ranks, vocabulary, true),
            _ => return Err(format!("{sampler:?} is not METHOD.rRANKS.vTOKENS, such as block.r2.v17")),
        };
        let pattern = pattern.parse()?;
        let mut case = Self {
            method: method.parse()?,
            ranks: keyed("r", ranks)?,
            vocabulary: keyed("v", vocabulary)?,
            one_hot,
            pattern,
            requests: Vec::new(),
        };
        for entry in batch.split('_').filter(|entry| *entry != "all") {
            let (one, count) = match entry.split_once('x') {
                None => (entry, 1),
                Some((one, count)) => (one, number("number of requests", count)?),
            };
            if count == 0 || case.requests.len().saturating_add(count) > MAX_REQUESTS {
                return Err(format!("there may be 1 to {MAX_REQUESTS} requests"));
            }
            let (drafts, none_at) = match one.split_once('-') {
                None => (keyed("", one)?, None),
                Some((drafts, index)) => (keyed("", drafts)?, Some(keyed("", index)?)),
            };
            case.requests.extend(std::iter::repeat_n(DraftRequest { drafts, none_at }, count));
        }
        Ok(case)
    }
}

impl Case {
    /// A case of accepting drafts of the current schema version.
    pub fn acceptance(body: AcceptanceCase, seed: u64) -> Self {
        Self::of(Family::Acceptance, Body::Acceptance(body), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(id: &str) -> Result<Case, CaseError> {
        id.parse()
    }

    #[test]
    fn an_id_and_the_json_read_back() {
        for id in [
            "acceptance/block.r2.v17.onehot/3_0_5-2x4/gaussian/7",
            "acceptance/greedy.r3.v5/0_1-0_2/ties/1",
            "acceptance/standard.r1.v3/all/enumerated/0",
            "acceptance/block.r2.v64/3x512/sampled/9",
        ] {
            let case = case(id).unwrap();
            assert_eq!(case.id(), id);
            assert_eq!(Case::from_json(&case.to_json()).unwrap(), case);
            case.configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        for (id, reason) in [
            ("acceptance/greedy.r2.v5.onehot/1/ties/0", "no law of drafts"),
            ("acceptance/greedy.r2.v3/all/enumerated/0", "no law to test"),
            ("acceptance/block.r2.v4/all/enumerated/0", "three tokens"),
            ("acceptance/block.r2.v3/2/enumerated/0", "three tokens"),
            ("acceptance/block.r0.v3/2/gaussian/0", "ranks is 0"),
            ("acceptance/block.r1.v0/2/gaussian/0", "no token"),
            ("acceptance/block.r1.v8/2-2/gaussian/0", "behind its last one"),
            ("acceptance/block.r1.v8/65/gaussian/0", "more than 64 drafts"),
            ("acceptance/block.r1.v8/2x256_3/sampled/0", "all with the same drafts"),
            ("acceptance/block.r1.v8/2x12/sampled/0", "at least 256"),
            ("acceptance/block.r1.v9999999999/2/gaussian/0", "logits"),
            ("acceptance/block.r1.v8/all/gaussian/0", "0 requests"),
            ("acceptance/block.r1.v8/2/uniform/0", "unknown pattern"),
            ("acceptance/block.r1/2/gaussian/0", "METHOD.rRANKS.vTOKENS"),
            ("acceptance/block.r1.v8/2/gaussian", "parts between slashes"),
        ] {
            let error = case(id).unwrap_err().to_string();
            assert!(error.contains(reason), "{id}: {error}");
        }
    }
}
