//! Selection of tokens for shared rows: what each rank gathers, what its rows see, score and select, and what comes back.

use std::collections::HashSet;

use shardcheck_cases::{Body, Case, Family};
use shardcheck_formats::Dtype;
use shardcheck_references::sparse::admits;

use super::{Property, always, broken, pcp};
use crate::finding::{Finding, Measured, Stage};
use crate::indexing::IndexMaterial;
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};

const SELECT: &[Family] = &[Family::SelectPcp];
const EXACT: &str = "exact: integers";
const SETS: &str = "derived: each score lies in the interval of its 32-bit arithmetic; a set is right if some scores within them make it the best";

pub(super) const PROPERTIES: &[Property] = &[
    property!(
        "index.rows",
        SELECT,
        always,
        "each rank selects for the rows that the split gives to it, chunks in one piece, padding behind them",
        "as `pcp.partition`, `pcp.padding` and `pcp.order`",
        &[],
        EXACT,
        rows
    ),
    property!(
        "index.bounds",
        SELECT,
        always,
        "a local row is scored for all positions of its request up to its own, the cached ones included, and padding for none",
        "SGLang: key lengths of a chunk from its end in the sequence; ATOM: windows before the split",
        &["vllm-ascend#10827"],
        EXACT,
        bounds
    ),
    property!(
        "index.gather",
        SELECT,
        always,
        "on every rank, the indexer's keys are those of all positions of each request in their order, and no padding",
        "SGLang `cp_all_gather_rerange_output`; ATOM gather, transpose, cut",
        &[],
        "exact: bits",
        gathered
    ),
    property!(
        "index.scores",
        SELECT,
        always,
        "a local row's score for a token is that of its own query and weights by the token's key, whoever has the token",
        "DeepSeek-V3.2 indexer, row by row",
        &[],
        "certified bound of dot products, weights and sums in 32 bits",
        scores
    ),
    property!(
        "index.choice",
        SELECT,
        always,
        "a local row selects different tokens that it sees, k of them or all, and no others score higher, as on one rank",
        "DeepSeek-V3.2 top-k: no rank has a part in it",
        &["vllm-ascend#10827"],
        SETS,
        choice
    ),
    property!(
        "index.padding",
        SELECT,
        always,
        "a row of padding selects nothing",
        "ATOM: padding rows are of zero length",
        &[],
        EXACT,
        padding
    ),
    property!(
        "index.output",
        SELECT,
        always,
        "what comes back on every rank is, row by row in the batch's order, a selection that the row may have",
        "the last gather, order restored",
        &[],
        SETS,
        output
    ),
    property!(
        "index.ranks",
        SELECT,
        has_ranks,
        "all ranks have the same selection for a row",
        "what was gathered is one thing",
        &[],
        EXACT,
        ranks
    ),
];

fn has_ranks(case: &Case) -> bool {
    matches!(&case.body, Body::SelectPcp(case) if case.batch.world > 1)
}

fn rows(laboratory: &Laboratory) -> Result<Finding, Halt> {
    pcp::placed_rows(laboratory)
}

fn bounds(laboratory: &Laboratory) -> Result<Finding, Halt> {
    pcp::must_show(laboratory, "rows")?;
    pcp::must_show(laboratory, "row_lens")?;
    pcp::bounds(laboratory)
}

fn gathered(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.indexing();
    let wanted = material.keys.concat();
    let dim = material.case.index_dim;
    let shape = [material.sharing.world, wanted.len() / dim, dim];
    let seen = laboratory.observed()?.observable("gathered_key", Dtype::F32, &shape)?.to_f32();
    for (flat, value) in seen.iter().enumerate() {
        let (rank, at) = (flat / wanted.len(), flat % wanted.len());
        if *value != wanted[at] {
            let mut token = at / dim;
            let own = |keys: &Vec<f32>| keys.len() / dim;
            let request = material.keys.iter().position(|keys| {
                let here = token < own(keys);
                token -= if here { 0 } else { own(keys) };
                here
            });
            let headline = format!(
                "rank {rank} has another key for request {}, position {token}: element {} is {value}, not {}",
                request.unwrap_or(0),
                at % dim,
                wanted[at]
            );
            return Err(broken(headline, Stage::Gather));
        }
    }
    Ok(Finding::Holds(Measured::exact(seen.len())))
}

fn local_place(material: &IndexMaterial, width: usize, place: usize, row: usize) -> String {
    format!("rank {}, place {}, {}", place / width, place % width, material.sharing.row_place(row as i64))
}

fn scores(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, (rows, width)) = (laboratory.indexing(), pcp::local_rows(laboratory)?);
    let longest = material.longest();
    let shape = [material.sharing.world, width, longest];
    let seen = laboratory.observed()?.observable("index_scores", Dtype::F32, &shape)?.to_f64();
    let mut comparison = Comparison::new("index_scores");
    for (place, row) in &rows {
        for (position, score) in material.scores(*row).iter().enumerate() {
            let flat = place * longest + position;
            comparison.element(flat, seen[flat], Allowed::near(score.value, score.error));
        }
    }
    let headline = "a token's score is not that of the row's own heads by the token's key";
    Ok(comparison.finding(headline, Stage::Selection, |flat| {
        let place = flat / longest;
        let row = rows.iter().find(|(other, _)| *other == place).map_or(0, |(_, row)| *row);
        format!("{}, position {}", local_place(material, width, place, row), flat % longest)
    }))
}

/// Why a row may not have what it selects; what it may have counts its tokens.
fn refusal(material: &IndexMaterial, row: usize, selected: &[i64]) -> Result<usize, String> {
    let scores = material.scores(row);
    let end = selected.iter().position(|position| *position == -1).unwrap_or(selected.len());
    let (own, behind) = selected.split_at(end);
    if let Some(position) = behind.iter().find(|position| **position != -1) {
        return Err(format!("has {position} behind a −1"));
    }
    let (mut tokens, mut known) = (Vec::new(), HashSet::new());
    for position in own {
        let token = usize::try_from(*position).ok().filter(|token| *token < scores.len());
        let Some(token) = token.filter(|token| known.insert(*token)) else {
            return Err(format!("selects position {position}, which it does not see or has already"));
        };
        tokens.push(token);
    }
    let wanted = material.case.top_k.min(scores.len());
    if tokens.len() != wanted {
        return Err(format!("selects {} tokens where it must select {wanted}", tokens.len()));
    }
    let candidates: Vec<usize> = (0..scores.len()).collect();
    admits(scores, &candidates, &tokens).map_err(|refusal| {
        let words = |token: usize| format!("{token} ({:e})", scores[token].value);
        let (missing, instead) = (words(refusal.missing), words(refusal.instead));
        format!("position {missing} is missing where {instead} is selected")
    })?;
    Ok(tokens.len().max(1))
}

fn local_selection(laboratory: &Laboratory, width: usize) -> Result<Vec<i64>, Halt> {
    let material = laboratory.indexing();
    let shape = [material.sharing.world, width, material.case.top_k];
    Ok(laboratory.observed()?.observable("local_topk", Dtype::I32, &shape)?.to_i64())
}

fn choice(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, (rows, width)) = (laboratory.indexing(), pcp::local_rows(laboratory)?);
    let (seen, k) = (local_selection(laboratory, width)?, material.case.top_k);
    let mut compared = 0;
    for (place, row) in &rows {
        compared += refusal(material, *row, &seen[place * k..(place + 1) * k]).map_err(|why| {
            broken(format!("{} {why}", local_place(material, width, *place, *row)), Stage::Selection)
        })?;
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

fn padding(laboratory: &Laboratory) -> Result<Finding, Halt> {
    pcp::must_show(laboratory, "rows")?;
    let rows = pcp::rows(laboratory)?;
    let width = rows.first().map_or(0, Vec::len);
    let (seen, k) = (local_selection(laboratory, width)?, laboratory.indexing().case.top_k);
    for (place, _) in rows.concat().iter().enumerate().filter(|(_, row)| **row == -1) {
        if let Some(position) = seen[place * k..(place + 1) * k].iter().find(|position| **position != -1) {
            let (rank, place) = (place / width, place % width);
            let headline =
                format!("rank {rank}, place {place}, which is padding, selects position {position}");
            return Err(broken(headline, Stage::Selection));
        }
    }
    Ok(Finding::Holds(Measured::exact(seen.len().max(1))))
}

fn restored(laboratory: &Laboratory) -> Result<Vec<i64>, Halt> {
    let material = laboratory.indexing();
    let shape = [material.sharing.world, material.sharing.placed.len(), material.case.top_k];
    Ok(laboratory.observed()?.output("topk", Dtype::I32, &shape)?.to_i64())
}

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, seen) = (laboratory.indexing(), restored(laboratory)?);
    let (count, mut compared) = (material.sharing.placed.len(), 0);
    for (flat, selected) in seen.chunks_exact(material.case.top_k).enumerate() {
        let (rank, row) = (flat / count, flat % count);
        compared += refusal(material, row, selected).map_err(|why| {
            let row = material.sharing.row_place(row as i64);
            broken(format!("rank {rank}, {row} {why}"), Stage::Output)
        })?;
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

fn ranks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, seen) = (laboratory.indexing(), restored(laboratory)?);
    let count = material.sharing.placed.len();
    let sets: Vec<Vec<i64>> = seen
        .chunks_exact(material.case.top_k)
        .map(|selected| {
            let mut own = selected.to_vec();
            own.sort_unstable();
            own
        })
        .collect();
    if let Some(flat) = (0..sets.len()).find(|flat| sets[*flat] != sets[flat % count]) {
        let (rank, row) = (flat / count, material.sharing.row_place((flat % count) as i64));
        return Err(broken(
            format!("rank {rank} has another selection for {row} than rank 0"),
            Stage::Exchange,
        ));
    }
    Ok(Finding::Holds(Measured::exact(seen.len())))
}
