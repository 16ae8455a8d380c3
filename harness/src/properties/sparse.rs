//! Laws of selecting tokens: what they score, which of them a row has, and in which slots each rank finds its own.

use std::collections::HashSet;

use shardcheck_cases::{Body, Case, Family};
use shardcheck_engine::SelectionMode;
use shardcheck_formats::Dtype;
use shardcheck_references::sparse::admits;

use super::lists::Lists;
use super::{Property, always, broken};
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed, Run};
use crate::selecting::SelectMaterial;

const SELECT: &[Family] = &[Family::SelectSparse];
const SETS: &str = "derived: each score lies in the interval of its 32-bit arithmetic; a set is right if some scores within them make it the best";

/// Most scores of a case that each request is also tried by itself on, and whose scores an engine is asked to return.
const SMALL: usize = 1 << 18;

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "sparse.scores",
        statement: "a token's score is Σ w·relu(q·k) over the heads of the indexer, times the scale of its key",
        source: "DeepSeek-V3.2 indexer; aiter `fp8_mqa_logits`; transformers DeepseekV32Indexer",
        bugs: &["ATOM#1502"],
        tolerance: "certified bound of dot products, weights and sums in 32 bits",
        families: SELECT,
        applies: is_small,
        check: scores,
    },
    Property {
        id: "sparse.visible",
        statement: "a row selects different tokens that it sees: k of them, or all where they are fewer; padding selects none",
        source: "the bound is the row's: positions below L − q + 1 + t",
        bugs: &["ATOM#1859", "vllm#46076"],
        tolerance: "exact: integers",
        families: SELECT,
        applies: always,
        check: visible,
    },
    Property {
        id: "sparse.choice",
        statement: "a row's tokens are the k of the largest scores over all ranks, under union the k best of each rank; where scores are as near as their rounding any of them is right",
        source: "DeepSeek-V3.2 top-k; vLLM `merge_dcp_topk_global`; ATOM `merge_dcp_topk`",
        bugs: &["vllm#53684", "ATOM#1502"],
        tolerance: SETS,
        families: SELECT,
        applies: always,
        check: choice,
    },
    Property {
        id: "sparse.ranks",
        statement: "all ranks select the same tokens for a row, ties included",
        source: "each rank attends to its part of one selection; parts of two selections are none",
        bugs: &[],
        tolerance: "exact: integers",
        families: SELECT,
        applies: |case| select_case(case).is_some_and(|case| case.selector.mode == SelectionMode::Exact),
        check: ranks,
    },
    Property {
        id: "sparse.partition",
        statement: "the ranks of a group share a row's tokens out by owner: each token is counted and listed on one rank",
        source: "ATOM `test_dcp_sparse_filter`: kept sets are disjoint, their union is the selection",
        bugs: &["ATOM#1832", "vllm#46514"],
        tolerance: "exact: integers",
        families: SELECT,
        applies: always,
        check: partition,
    },
    Property {
        id: "sparse.slots",
        statement: "an entry of a rank's list is the slot in which the rank keeps a token of the row, and no token of its own is left out",
        source: "ATOM and vLLM: slot = block·B + local index mod B, in blocks of B·W tokens",
        bugs: &["vllm#46514"],
        tolerance: "exact: integers",
        families: SELECT,
        applies: always,
        check: slots,
    },
    Property {
        id: "sparse.lists",
        statement: "lists have the declared form: k entries a row with −1 behind, or packed with as many as are counted, an empty row having none or one of slot 0",
        source: "FlashMLA sparse: −1 fill; ATOM: cumsum(count) in decode, cumsum(max(count, 1)) in prefill",
        bugs: &["ATOM#1832"],
        tolerance: "exact: integers",
        families: SELECT,
        applies: always,
        check: lists,
    },
    Property {
        id: "sparse.alone",
        statement: "a request by itself selects tokens that its rows may have in a batch",
        source: "an indexer works row by row",
        bugs: &[],
        tolerance: SETS,
        families: SELECT,
        applies: |case| {
            is_small(case) && select_case(case).is_some_and(|case| case.workload.requests.len() > 1)
        },
        check: alone,
    },
];

fn select_case(case: &Case) -> Option<&shardcheck_cases::SelectCase> {
    match &case.body {
        Body::SelectSparse(select) => Some(select),
        _ => None,
    }
}

fn is_small(case: &Case) -> bool {
    select_case(case).is_some_and(|case| case.scores() <= SMALL)
}

/// What an engine answered, `[ranks, rows, …]`.
struct Answer {
    rows: usize,
    top_k: usize,
    topk: Vec<i64>,
    lists: Lists,
}

impl Answer {
    fn of(material: &SelectMaterial, observed: &Observed, rows: usize) -> Result<Self, Halt> {
        let (ranks, top_k) = (material.ranks(), material.top_k());
        let whole = |name: &str, shape: &[usize]| -> Result<Vec<i64>, Halt> {
            Ok(observed.output(name, Dtype::I32, shape)?.to_i64())
        };
        Ok(Self {
            rows,
            top_k,
            topk: whole("topk", &[ranks, rows, top_k])?,
            lists: Lists::read(ranks, (rows, top_k), whole)?,
        })
    }

    fn base(laboratory: &Laboratory) -> Result<Self, Halt> {
        let material = laboratory.selecting();
        Self::of(material, laboratory.observed()?, material.rows())
    }

    /// Tokens that a rank selects for a row of the answer, which is row `of` of the batch.
    fn tokens(
        &self,
        material: &SelectMaterial,
        rank: usize,
        row: usize,
        of: usize,
    ) -> Result<Vec<usize>, String> {
        let own = &self.topk[(rank * self.rows + row) * self.top_k..][..self.top_k];
        let end = own.iter().position(|position| *position == -1).unwrap_or(self.top_k);
        let (own, behind) = own.split_at(end);
        if let Some(position) = behind.iter().find(|position| **position != -1) {
            return Err(format!("has {position} behind a −1"));
        }
        let candidates = material.candidates(of, rank);
        let mut seen = HashSet::new();
        for position in own {
            let token = usize::try_from(*position).ok();
            let token = token.filter(|token| candidates.binary_search(token).is_ok());
            if token.is_none() {
                return Err(format!("selects position {position}, which it does not see"));
            }
            if !seen.insert(*position) {
                return Err(format!("selects position {position} twice"));
            }
        }
        let wanted = self.top_k.min(candidates.len());
        if own.len() != wanted {
            return Err(format!("selects {} tokens where it must select {wanted}", own.len()));
        }
        Ok(own.iter().map(|position| *position as usize).collect())
    }
}

/// Judges each row on each rank; a row that selects what it can't is judged by `sparse.visible` alone.
fn each(
    laboratory: &Laboratory,
    stage: Stage,
    judge: impl Fn(&Answer, usize, usize, &[usize]) -> Result<usize, String>,
) -> Result<Finding, Halt> {
    let (material, answer) = (laboratory.selecting(), Answer::base(laboratory)?);
    let mut compared = 0;
    for rank in 0..material.ranks() {
        for row in 0..material.rows() {
            let Ok(tokens) = answer.tokens(material, rank, row, row) else { continue };
            compared += judge(&answer, rank, row, &tokens)
                .map_err(|why| broken(format!("rank {rank}, {}: {why}", material.place(row)), stage))?;
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

fn scores(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.selecting();
    let local = material.width() * material.case.block_size;
    let shape = [material.ranks(), material.rows(), local];
    let seen = laboratory.observed()?.observable("index_scores", Dtype::F32, &shape)?.to_f64();
    let mut comparison = Comparison::new("index_scores");
    for rank in 0..material.ranks() {
        for row in 0..material.rows() {
            let scores = material.scores(row);
            let member = material.member(rank);
            for index in 0..material.layout.local_len(material.bound(row), member) {
                let score = scores[material.layout.global_position(index, member)];
                let flat = (rank * material.rows() + row) * local + index;
                comparison.element(flat, seen[flat], Allowed::near(score.value, score.error));
            }
        }
    }
    let headline = "a token's score is not the sum over the heads of the indexer";
    Ok(comparison.finding(headline, Stage::Selection, |flat| {
        let (row, index) = (flat / local, flat % local);
        let (rank, row) = (row / material.rows(), row % material.rows());
        let position = material.layout.global_position(index, material.member(rank));
        format!("rank {rank}, {}, position {position}", material.place(row))
    }))
}

fn visible(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, answer) = (laboratory.selecting(), Answer::base(laboratory)?);
    for rank in 0..material.ranks() {
        for row in 0..material.rows() {
            answer.tokens(material, rank, row, row).map_err(|why| {
                broken(format!("rank {rank}, {} {why}", material.place(row)), Stage::RowBound)
            })?;
        }
    }
    Ok(Finding::Holds(Measured::exact(answer.topk.len())))
}

/// Why a set of tokens is not the best, in words.
fn refusal(material: &SelectMaterial, rank: usize, row: usize, tokens: &[usize]) -> Result<usize, String> {
    let scores = material.scores(row);
    admits(&scores, &material.candidates(row, rank), tokens).map_err(|refusal| {
        let words = |token: usize| format!("{token} ({:e})", scores[token].value);
        let (missing, instead) = (words(refusal.missing), words(refusal.instead));
        format!("position {missing} is missing where {instead} is selected")
    })?;
    Ok(tokens.len().max(1))
}

fn choice(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.selecting();
    each(laboratory, Stage::Selection, |_, rank, row, tokens| refusal(material, rank, row, tokens))
}

fn ranks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, answer) = (laboratory.selecting(), Answer::base(laboratory)?);
    let set = |rank: usize, row: usize| {
        let mut own = answer.topk[(rank * answer.rows + row) * answer.top_k..][..answer.top_k].to_vec();
        own.sort_unstable();
        own
    };
    for row in 0..material.rows() {
        let first = set(0, row);
        for rank in 1..material.ranks() {
            let own = set(rank, row);
            let other = own.iter().zip(&first).find(|(own, first)| own != first);
            if let Some((own, first)) = other {
                let place = material.place(row);
                let headline =
                    format!("{place}: rank {rank} selects position {own} where rank 0 selects {first}");
                return Err(broken(headline, Stage::Exchange));
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(answer.topk.len())))
}

fn partition(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.selecting();
    each(laboratory, Stage::Layout, |answer, rank, row, tokens| {
        let member = material.member(rank);
        let own = tokens.iter().filter(|token| material.layout.owner(**token) == member).count();
        answer.lists.count_holds(rank, row, own)
    })
}

fn slots(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.selecting();
    each(laboratory, Stage::Layout, |answer, rank, row, tokens| {
        let with_slot = |token: &usize| material.slot(row, *token, rank).map(|slot| (*token, slot));
        answer.lists.slots_hold(rank, row, &tokens.iter().filter_map(with_slot).collect::<Vec<_>>())
    })
}

fn lists(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, answer) = (laboratory.selecting(), Answer::base(laboratory)?);
    for rank in 0..material.ranks() {
        let holds = answer.lists.form_holds(rank, material.case.selector.list, |row| material.place(row));
        holds.map_err(|why| broken(format!("rank {rank}, {why}"), Stage::Layout))?;
    }
    Ok(Finding::Holds(Measured::exact(answer.lists.len())))
}

fn alone(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.selecting();
    let mut run = Run::open(&laboratory.engine, &material.configuration)?;
    let mut compared = 0;
    for request in 0..material.case.workload.requests.len() {
        let (inputs, rows) = material.alone(request);
        if rows.is_empty() {
            continue;
        }
        let answer = Answer::of(material, &run.step(&material.operation, &inputs)?, rows.len())?;
        for rank in 0..material.ranks() {
            for (row, of) in rows.iter().enumerate() {
                let tokens = answer.tokens(material, rank, row, *of);
                compared +=
                    tokens.and_then(|tokens| refusal(material, rank, *of, &tokens)).map_err(|why| {
                        let place = material.place(*of);
                        broken(
                            format!("rank {rank}, {place}, its request by itself: {why}"),
                            Stage::Selection,
                        )
                    })?;
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}
