//! Cases of selecting tokens over the ranks of prefill context parallelism: a shared batch, and an indexer whose keys every rank gathers.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{IndexPlan, Operation, SelectionMode, Selector, SlotList, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::PcpCase;
use crate::check::elements;
use crate::tokens::Tokens;
use crate::{
    Body, Case, CaseError, Family, IndexPattern, Placement, Request, SelectCase, Workload, default_blocks,
};

/// Most elements of what all ranks return of their rows.
const MAX_RETURNED: usize = 1 << 26;

/// Selection of tokens for the rows of one batch over P ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectPcpCase {
    /// The batch, and how it is shared out.
    pub batch: PcpCase,
    /// Tokens k of a row.
    pub top_k: usize,
    /// Heads I of the indexer.
    pub index_heads: usize,
    /// Width D of a head.
    pub index_dim: usize,
    /// How values are drawn.
    pub pattern: IndexPattern,
}

impl SelectPcpCase {
    /// The step, for `padded_rows` rows of a rank at least.
    pub fn operation(&self, padded_rows: usize) -> Operation {
        let PcpCase { world, strategy, decodes, .. } = self.batch;
        Operation::SelectPcp { plan: IndexPlan { world, strategy, decodes, padded_rows, top_k: self.top_k } }
    }

    /// Inputs of the step.
    pub fn tensors(&self, seed: u64) -> Tensors {
        let drawn = self.on_one_rank().tensors(seed);
        let find = |name: &str| drawn.find(name).expect("a selection draws it");
        let (table, cache) = (find("block_table"), find("index_cache").to_codes());
        let (blocks, width) = (table.to_i64(), table.shape()[1]);
        let (mut new, mut context) = (Vec::new(), Vec::new());
        for (number, request) in self.batch.requests.iter().enumerate() {
            for position in 0..request.context_tokens + request.query_tokens {
                let slot = blocks[number * width + position] as usize;
                let to = if position < request.context_tokens { &mut context } else { &mut new };
                to.extend_from_slice(&cache[slot * self.index_dim..(slot + 1) * self.index_dim]);
            }
        }
        let keys = |codes: &[u64]| {
            Tensor::from_codes(Dtype::Bf16, &[codes.len() / self.index_dim, self.index_dim], codes)
        };
        self.batch
            .tensors()
            .with("index_query", find("index_query").clone())
            .with("index_weights", find("index_weights").clone())
            .with("index_key", keys(&new))
            .with("index_context", keys(&context))
    }

    /// The same rows on one rank, their keys in blocks of one token.
    fn on_one_rank(&self) -> SelectCase {
        let request = |r: &super::PcpRequest| Request {
            context_tokens: r.context_tokens,
            query_tokens: r.query_tokens,
        };
        let workload = Workload {
            requests: self.batch.requests.iter().map(request).collect(),
            padded_rows: 0,
            placement: Placement::Sequential,
            chunk_budget_tokens: 0,
        };
        SelectCase {
            selector: Selector { top_k: self.top_k, mode: SelectionMode::Exact, list: SlotList::Padded },
            index_heads: self.index_heads,
            index_dim: self.index_dim,
            index_dtype: Dtype::Bf16,
            tp: 1,
            dcp: 1,
            interleave: 1,
            block_size: 1,
            blocks: default_blocks(&workload, 1),
            workload,
            pattern: self.pattern,
        }
    }

    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        self.batch.check()?;
        if self.batch.overlap {
            return fail("groups that overlap are asked of pcp alone".to_owned());
        }
        if self.pattern == IndexPattern::OneRank {
            return fail("no rank has keys of its own here: one_rank means nothing".to_owned());
        }
        self.on_one_rank().check()?;
        let longest =
            self.batch.requests.iter().map(|r| r.context_tokens + r.query_tokens).max().unwrap_or(0);
        let rows = self.batch.rows() + self.batch.extra_rows;
        let extents = [self.batch.world, rows, longest.max(self.top_k)];
        if elements(&extents) > MAX_RETURNED {
            return fail(format!("scores and selections of shape {extents:?} have more than 2^26 elements"));
        }
        Ok(())
    }

    /// Four parts of an id, such as `zigzag.p2.replicated/0+11_3+5/k4.i2.d8/random`.
    pub(crate) fn spell(&self) -> String {
        let (k, heads, dim) = (self.top_k, self.index_heads, self.index_dim);
        format!("{}/k{k}.i{heads}.d{dim}/{}", self.batch.spell(), self.pattern)
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read((split, batch): (&str, &str), indexer: &str, pattern: &str) -> Result<Self, String> {
        let mut tokens = Tokens::split(indexer);
        let (top_k, index_heads) = (tokens.need_number("k")?, tokens.need_number("i")?);
        let index_dim = tokens.need_number("d")?;
        tokens.finish()?;
        let (batch, pattern) = (PcpCase::read(split, batch)?, pattern.parse()?);
        Ok(Self { batch, top_k, index_heads, index_dim, pattern })
    }
}

impl Case {
    /// A case of selecting tokens for a shared batch of the current schema version.
    pub fn select_pcp(body: SelectPcpCase, seed: u64) -> Self {
        Self::of(Family::SelectPcp, Body::SelectPcp(body), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_and_the_json_read_back() {
        for id in [
            "select_pcp/head_tail.p4.owned/0+11_3+5x2_7+1d/k4.i2.d8/random/7",
            "select_pcp/round_robin.p3.split.pad2/5+1/k1.i1.d2/newest/0",
        ] {
            Case::read_back(id).configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        let first = "select_pcp/head_tail.p4.owned/0+11_7+1d/k4.i2.d8/random/7";
        for (part, other, reason) in [
            ("p4", "p0", "world is 0"),
            ("head_tail.p4.owned/0+11_7+1d", "round_robin.p4.split.overlap/0+11", "of pcp alone"),
            ("0+11_7+1d", "5+0", "query rows"),
            ("k4", "k0", "k is 0"),
            ("i2", "i0", "i is 0"),
            ("d8", "d1", "d is 1"),
            ("random", "one_rank", "means nothing"),
            ("random", "gaussian", "pattern of the indexer"),
            ("/random", "", "parts between slashes"),
            ("0+11_7+1d", "900000+60000", "products"),
        ] {
            let id = first.replacen(part, other, 1);
            let error = id.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{id}: {error}");
        }
    }

    #[test]
    fn keys_are_those_of_the_rows_and_of_what_was_computed_before_them() {
        let case: Case = "select_pcp/head_tail.p2.owned/3+4_0+0_5+1d/k4.i2.d8/random/7".parse().unwrap();
        let Body::SelectPcp(body) = &case.body else { panic!("a case of another family") };
        let inputs = body.tensors(7);
        assert_eq!(inputs.get("index_key").unwrap().shape(), [5, 8]);
        assert_eq!(inputs.get("index_context").unwrap().shape(), [8, 8]);
        for name in ["index_key", "index_context"] {
            assert!(inputs.get(name).unwrap().to_f32().iter().all(|value| value.is_finite()), "{name}");
        }
    }
}
