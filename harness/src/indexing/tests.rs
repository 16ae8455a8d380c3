//! Properties of selecting tokens for shared rows on the embedded engine and on its faults.

use shardcheck_cases::{Body, Case, Family, SelectPcpCase, SuiteName};
use shardcheck_engine::Engine;
use shardcheck_references::sparse::certain;

use super::IndexMaterial;
use crate::verdicts::{cases_of, faults_are_seen, passes_the_gate};

fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
    cases_of(Family::SelectPcp, name, seed)
}

fn body(case: &Case) -> &SelectPcpCase {
    let Body::SelectPcp(body) = &case.body else { panic!("{}", case.id()) };
    body
}

#[test]
fn the_embedded_engine_selects_rightly_on_every_case_of_the_gate() {
    passes_the_gate(Family::SelectPcp, 30);
}

#[test]
fn every_fault_fails_every_property_of_an_indexer_of_shared_rows_that_it_names_on_the_gate() {
    faults_are_seen(Family::SelectPcp, "index.", 11);
}

/// Scores of a row in 64 bits, by its own sum over positions that are looked up one by one.
fn scored(case: &SelectPcpCase, seed: u64, row: usize) -> Vec<f64> {
    let inputs = case.tensors(seed);
    let values = |name: &str| inputs.get(name).unwrap().to_f64();
    let (query, weights) = (values("index_query"), values("index_weights"));
    let (new, context) = (values("index_key"), values("index_context"));
    let (heads, dim) = (case.index_heads, case.index_dim);
    let (mut first_row, mut first_context) = (0, 0);
    for request in &case.batch.requests {
        if row < first_row + request.query_tokens {
            let score = |position: usize| -> f64 {
                let key = |d: usize| match position.checked_sub(request.context_tokens) {
                    Some(own) => new[(first_row + own) * dim + d],
                    None => context[(first_context + position) * dim + d],
                };
                let head = |head: usize| {
                    let q = |d: usize| query[(row * heads + head) * dim + d];
                    let dot: f64 = (0..dim).map(|d| q(d) * key(d)).sum();
                    weights[row * heads + head] * dot.max(0.0)
                };
                (0..heads).map(head).sum()
            };
            return (0..=request.context_tokens + row - first_row).map(score).collect();
        }
        first_row += request.query_tokens;
        first_context += request.context_tokens;
    }
    panic!("row {row} is behind the batch")
}

#[test]
fn the_oracle_s_scores_are_those_of_a_sum_that_looks_every_key_up() {
    let profile = shardcheck_cpu::engine().profile().clone();
    let mut bounded = 0;
    for case in &cases(SuiteName::Gate, 3) {
        let material = IndexMaterial::new(body(case), case.seed, &profile).unwrap();
        for row in 0..material.sharing.placed.len() {
            let (plain, scores) = (scored(body(case), case.seed, row), material.scores(row));
            assert_eq!(plain.len(), scores.len(), "{} row {row}", case.id());
            for (plain, score) in plain.iter().zip(scores) {
                assert!(
                    (plain - score.value).abs() <= 1e-12 * (1.0 + plain.abs()),
                    "{} row {row}",
                    case.id()
                );
            }
            let all: Vec<usize> = (0..scores.len()).collect();
            bounded += certain(scores, &all, material.case.top_k).len();
        }
    }
    assert!(bounded > 500, "the intervals leave {bounded} tokens certain");
}

#[test]
fn the_gate_has_idle_ranks_prefixes_graphs_decodes_and_rows_that_see_fewer_tokens_than_k() {
    let cases = cases(SuiteName::Gate, 1);
    let profile = shardcheck_cpu::engine().profile().clone();
    let (mut idle, mut few, mut many) = (false, false, false);
    for case in &cases {
        let material = IndexMaterial::new(body(case), case.seed, &profile).unwrap();
        let sharing = &material.sharing;
        idle |= (0..sharing.world).any(|rank| sharing.rows_of(rank).is_empty());
        few |= sharing.placed.iter().any(|row| row.visible_tokens() < material.case.top_k);
        many |= sharing.placed.iter().any(|row| row.visible_tokens() > 3 * material.case.top_k);
    }
    assert!(idle && few && many);
    let any = |holds: fn(&SelectPcpCase) -> bool| cases.iter().any(|case| holds(body(case)));
    assert!(any(|case| case.batch.extra_rows > 0 && case.batch.world > 1));
    assert!(any(|case| case.batch.requests.iter().any(|r| !r.is_prefilling && r.query_tokens > 0)));
    assert!(any(|case| case.batch.world == 3 && case.batch.requests.iter().any(|r| r.context_tokens > 0)));
}
