//! Cases of selecting the tokens that rows attend to: a batch whose indexer keys lie interleaved over ranks.

mod inputs;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{Configuration, Operation, SelectionMode, Selector, SlotList, Tensors, vocabulary};
use shardcheck_formats::Dtype;

use crate::check::{check_workload, elements};
use crate::id::{read_virtual_block, read_workload, spell_workload};
use crate::pcp::nothing;
use crate::tokens::Tokens;
use crate::{Body, Case, CaseError, Family, MAX_ELEMENTS, MAX_RANKS, Workload, default_blocks};

/// Formats of an indexer's queries and keys.
const FORMATS: [Dtype; 2] = [Dtype::Bf16, Dtype::E4m3fn];
/// Most tokens of a row.
pub(crate) const MAX_TOP_K: usize = 1 << 14;
/// Most heads of an indexer, and widest one.
const MAX_HEADS: usize = 256;
const MAX_DIM: usize = 1024;
/// Most products of a case, over all rows, tokens and heads.
const MAX_PRODUCTS: usize = 1 << 34;

vocabulary! {
    /// How queries, keys and weights are drawn.
    IndexPattern ("pattern of the indexer") {
        /// Independent; weights of both signs.
        Random = "random",
        /// Small whole numbers: many scores are equal, bit for bit.
        Ties = "ties",
        /// Most keys point away from every query: relu makes their scores 0.
        Zeros = "zeros",
        /// Every score is below 0, so that a 0 that stands for nothing wins.
        Negative = "negative",
        /// Scores rise towards the end of the request and behind it: a bound that is off by a token shows.
        Newest = "newest",
        /// Tokens of one rank have the largest scores: the others own nothing.
        OneRank = "one_rank",
    }
}

/// Selection of tokens for the rows of a batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectCase {
    /// How tokens are selected and listed.
    pub selector: Selector,
    /// Heads I of the indexer.
    pub index_heads: usize,
    /// Width D of a head.
    pub index_dim: usize,
    /// Format of queries and keys: bf16, or e4m3fn with a scale for each key.
    pub index_dtype: Dtype,
    /// Ranks of the session; a multiple of `dcp`.
    pub tp: usize,
    /// Ranks W that a request's keys lie on.
    pub dcp: usize,
    /// Interleave size S in tokens.
    pub interleave: usize,
    /// Physical block size B in tokens.
    pub block_size: usize,
    /// Physical blocks of each rank.
    pub blocks: usize,
    /// The batch.
    pub workload: Workload,
    /// How values are drawn.
    pub pattern: IndexPattern,
}

impl SelectCase {
    /// What a session for the case is opened with. Its own caches are not asked for.
    pub fn configuration(&self) -> Configuration {
        Configuration {
            tp: self.tp,
            dcp: self.dcp,
            interleave: self.interleave,
            block_size: self.block_size,
            blocks: self.blocks,
            ..nothing()
        }
    }

    /// The step.
    pub fn operation(&self) -> Operation {
        Operation::SelectSparse { selector: self.selector }
    }

    /// Inputs of the step.
    pub fn tensors(&self, seed: u64) -> Tensors {
        inputs::draw(self, seed)
    }

    /// Scores of all rows for all tokens of their requests.
    pub fn scores(&self) -> usize {
        let of_request = |r: &crate::Request| r.query_tokens.saturating_mul(r.seq_len());
        self.workload.requests.iter().fold(0, |sum: usize, request| sum.saturating_add(of_request(request)))
    }

    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        for (name, value, most) in [
            ("k", self.selector.top_k, MAX_TOP_K),
            ("i", self.index_heads, MAX_HEADS),
            ("tp", self.tp, MAX_RANKS),
        ] {
            if value == 0 || value > most {
                return fail(format!("{name} is {value}; it must be between 1 and {most}"));
            }
        }
        if self.index_dim < 2 || self.index_dim > MAX_DIM {
            return fail(format!("d is {}; it must be between 2 and {MAX_DIM}", self.index_dim));
        }
        if !FORMATS.contains(&self.index_dtype) {
            return fail(format!("an indexer of {}; it is bf16 or e4m3fn", self.index_dtype));
        }
        self.configuration().check().map_err(|error| CaseError::OutOfRange(error.reason))?;
        check_workload(Family::SelectSparse, &self.workload)?;
        if self.workload.chunk_budget_tokens > 0 {
            return fail("a selection has no chunk budget".to_owned());
        }
        let block = self.block_size * self.dcp;
        let needed: usize = self.workload.requests.iter().map(|r| r.seq_len().div_ceil(block)).sum();
        if self.blocks <= needed {
            let blocks = self.blocks;
            return fail(format!("{blocks} blocks for {needed} needed ones and the null block 0"));
        }
        for (what, most, extents) in [
            ("cache", MAX_ELEMENTS, [self.tp, self.blocks, self.block_size, self.index_dim]),
            ("list", MAX_ELEMENTS, [self.tp, self.workload.total_rows(), self.selector.top_k, 1]),
            ("products", MAX_PRODUCTS, [self.scores(), self.index_heads, self.index_dim, 1]),
        ] {
            if elements(&extents) > most {
                return fail(format!("{what} of {extents:?} are more than {most}"));
            }
        }
        Ok(())
    }

    /// Four parts of an id, such as `exact.padded.k8.i4.d16.bf16/tp4.dcp2.s2.b8.n12/12+3_0+1.pad2.shuf/random`.
    pub(crate) fn spell(&self) -> String {
        let Selector { top_k, mode, list } = self.selector;
        let (heads, dim, dtype) = (self.index_heads, self.index_dim, self.index_dtype);
        let layout = format!(
            "tp{}.dcp{}.s{}.b{}.n{}",
            self.tp, self.dcp, self.interleave, self.block_size, self.blocks
        );
        let workload = spell_workload(&self.workload);
        format!("{mode}.{list}.k{top_k}.i{heads}.d{dim}.{dtype}/{layout}/{workload}/{}", self.pattern)
    }

    /// Reads what [`Self::spell`] wrote; without `n`, there are [`default_blocks`].
    pub(crate) fn read(selector: &str, layout: &str, workload: &str, pattern: &str) -> Result<Self, String> {
        let workload = read_workload(workload)?;
        let mut tokens = Tokens::split(selector);
        let (mode, list) = (
            tokens.need("mode", &SelectionMode::ALL, SelectionMode::name)?,
            tokens.need("list", &SlotList::ALL, SlotList::name)?,
        );
        let index_dtype = tokens.need("format", &FORMATS, |dtype| dtype.name())?;
        let selector = Selector { top_k: tokens.need_number("k")?, mode, list };
        let (index_heads, index_dim) = (tokens.need_number("i")?, tokens.need_number("d")?);
        tokens.finish()?;
        let mut tokens = Tokens::split(layout);
        let (tp, dcp) = (tokens.need_number("tp")?, tokens.need_number("dcp")?);
        let (interleave, block_size) = (tokens.need_number("s")?, tokens.need_number("b")?);
        let virtual_block = read_virtual_block(dcp, block_size)?;
        let blocks = tokens.take_number("n").unwrap_or_else(|| default_blocks(&workload, virtual_block));
        tokens.finish()?;
        let pattern = pattern.parse()?;
        Ok(Self {
            selector,
            index_heads,
            index_dim,
            index_dtype,
            tp,
            dcp,
            interleave,
            block_size,
            blocks,
            workload,
            pattern,
        })
    }
}

impl Case {
    /// A case of selecting tokens of the current schema version.
    pub fn select_sparse(body: SelectCase, seed: u64) -> Self {
        Self::of(Family::SelectSparse, Body::SelectSparse(body), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_and_the_json_read_back() {
        for id in [
            "select_sparse/exact.padded.k8.i4.d16.bf16/tp4.dcp2.s2.b8.n12/12+3_0+1.pad2.shuf/random/7",
            "select_sparse/union.packed.k2.i1.d2.e4m3fn/tp3.dcp3.s1.b4.n9/0+0_9+1x2.desc/ties/0",
            "select_sparse/exact.packed_dummy.k2048.i2.d8.bf16/tp8.dcp8.s4.b4.n700/7700+4.seq/newest/1",
        ] {
            Case::read_back(id).configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        let first = "select_sparse/exact.padded.k8.i4.d16.bf16/tp4.dcp2.s2.b8.n12/12+3.seq/random/7";
        for (part, other, reason) in [
            ("k8", "k0", "k is 0"),
            ("i4", "i0", "i is 0"),
            ("d16", "d1", "d is 1"),
            ("bf16", "f32", "format"),
            ("exact", "most", "mode"),
            ("padded", "ragged", "list"),
            ("dcp2", "dcp3", "does not divide"),
            ("s2", "s3", "not a multiple"),
            ("b8", "b0", "b is 0; it must be between 1 and"),
            ("n12", "n1", "needed ones"),
            ("12+3", "0+0", "query rows"),
            (".seq", ".seq.c4", "chunk budget"),
            ("12+3", "2000000+4096", "products"),
            ("random", "gaussian", "pattern of the indexer"),
            ("/random", "", "parts between slashes"),
        ] {
            let id = first.replace(part, other);
            let id = if reason == "products" { id.replace(".n12", "") } else { id };
            let error = id.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{id}: {error}");
        }
    }

    #[test]
    fn a_case_without_blocks_gets_what_its_requests_need() {
        let id = "select_sparse/exact.padded.k8.i4.d16.bf16/tp4.dcp2.s2.b8/12+3_30+1.seq/random/7";
        let Body::SelectSparse(case) = id.parse::<Case>().unwrap().body else { panic!("another family") };
        assert_eq!(case.blocks, 1 + 3 + 2);
    }
}
