//! The law of what an engine emits: by counting over an exact partition, and by a test of the counts of many requests.

use shardcheck_formats::Counter;
use shardcheck_references::acceptance::interval::law_of_row;
use shardcheck_references::acceptance::law::{FALSE_ALARM, gap_bound, largest_gap};

use super::{Emitted, Exactness, asks, broken, emitted};
use crate::accepting::AcceptanceMaterial;
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};

/// Stream of the tokens that continue what an engine emitted.
const CONTINUATION: u32 = 77;

pub(super) fn enumeration(laboratory: &Laboratory) -> Result<Finding, Halt> {
    asks(laboratory, Exactness::Given)?;
    let material = laboratory.accepting();
    let Some(table) = &material.inputs.enumeration else {
        return Err(Halt::Inconclusive("the case enumerates nothing".to_owned()));
    };
    let groups = table.weights.iter().map(|(group, _)| group + 1).max().unwrap_or(0);
    let known: Vec<bool> =
        (0..groups).map(|own| table.weights.iter().any(|(group, _)| *group == own)).collect();
    let mut comparison = Comparison::new("law of the first two tokens");
    for (rank, requests) in emitted(laboratory)?.iter().enumerate() {
        let mut laws = vec![[[0.0f64; 3]; 3]; groups];
        for (request, seen) in requests.iter().enumerate() {
            let (group, weight) = table.weights[request];
            let law = &mut laws[group];
            match two_tokens(seen) {
                Some((first, Some(second))) => law[first][second] += weight,
                // the target itself continues behind one token
                Some((first, None)) => {
                    (0..3).for_each(|second| law[first][second] += weight * table.second[first][second]);
                }
                None => {
                    return Err(broken(format!("rank {rank}, request {request} emits {:?}", seen.tokens)));
                }
            }
        }
        let bound = requests.len() as f64 * f64::EPSILON;
        for (group, law) in laws.iter().enumerate().filter(|(group, _)| known[*group]) {
            for index in 0..9 {
                let (first, second) = (index / 3, index % 3);
                let wanted = table.first[first] * table.second[first][second];
                comparison.element(
                    (rank * groups + group) * 9 + index,
                    law[first][second],
                    Allowed::near(wanted, bound),
                );
            }
        }
    }
    let headline = "what is emitted over all drafts and numbers does not have the law of the target";
    Ok(comparison.finding(headline, Stage::Output, |flat| {
        format!("rank {}, tokens {} {}", flat / 9 / groups, flat % 9 / 3, flat % 3)
    }))
}

/// The first token, and the second where there is one.
fn two_tokens(seen: &Emitted) -> Option<(usize, Option<usize>)> {
    let token = |place: usize| usize::try_from(seen.tokens[place]).ok().filter(|token| *token < 3);
    match seen.accepted {
        0 => token(0).map(|first| (first, None)),
        1 | 2 => Some((token(0)?, Some(token(1)?))),
        _ => None,
    }
}

/// Probabilities in the middle of their intervals.
fn middle(logits: &[f32], temperature: f32) -> Vec<f64> {
    law_of_row(logits, temperature).iter().map(|chance| (chance.low + chance.high) / 2.0).collect()
}

fn drawn(law: &[f64], counter: &mut Counter) -> usize {
    let mut left = counter.unit_f64();
    law.iter()
        .position(|chance| {
            left -= chance;
            left < 0.0
        })
        .unwrap_or(law.len() - 1)
}

pub(super) fn sampled(laboratory: &Laboratory) -> Result<Finding, Halt> {
    asks(laboratory, Exactness::Lossless)?;
    let material = laboratory.accepting();
    let drafts = material.inputs.drafts[0].len();
    let (count, mut worst) = (material.count() as u64, 0.0f64);
    let bound = gap_bound(count, FALSE_ALARM / drafts as f64);
    let all = emitted(laboratory)?;
    for (rank, requests) in all.iter().enumerate() {
        for row in 0..drafts {
            let gap = gap_of(material, rank, row, requests)?;
            worst = worst.max(gap / bound);
            if gap > bound {
                return Err(broken(format!(
                    "rank {rank}, place {row}: the distribution of {count} tokens is {gap:.4} off the target's, which \
                     happens to one conforming engine in 10⁹ at {bound:.4}"
                )));
            }
        }
    }
    let compared = count * (drafts * all.len()) as u64;
    Ok(Finding::Holds(Measured { compared, worst_ratio: worst, exact: 0, figures: None }))
}

/// Largest difference of the distribution of the tokens at a place from the target's there. All requests have the same rows, so a
/// place that a request did not reach is continued by the target's law.
fn gap_of(material: &AcceptanceMaterial, rank: usize, row: usize, requests: &[Emitted]) -> Result<f64, Halt> {
    let (given, vocabulary) = (material.request(0), material.case.vocabulary);
    let of = |logits: &[f32]| middle(&logits[row * vocabulary..][..vocabulary], given.temperature);
    let target = of(given.target);
    // what a drafter gives too much lies at one end: a slip towards it or away from it adds up along the order
    let mut order: Vec<usize> = (0..vocabulary).collect();
    let over = given.draft.map_or_else(|| target.iter().map(|chance| -chance).collect::<Vec<_>>(), of);
    let excess = |token: &usize| over[*token] - target[*token];
    order.sort_by(|a, b| excess(a).total_cmp(&excess(b)));
    let mut counter = Counter::new(material.seed.wrapping_add(row as u64), CONTINUATION);
    let mut counts = vec![0u64; vocabulary];
    for (request, seen) in requests.iter().enumerate() {
        let continued = drawn(&target, &mut counter);
        let reached = row as i64 <= seen.accepted;
        let token = if reached { usize::try_from(seen.tokens[row]).ok() } else { Some(continued) };
        match token.filter(|token| *token < vocabulary) {
            Some(token) => counts[token] += 1,
            None => return Err(broken(format!("rank {rank}, request {request} emits {:?}", seen.tokens))),
        }
    }
    Ok(largest_gap(&counts, &target, &order))
}
