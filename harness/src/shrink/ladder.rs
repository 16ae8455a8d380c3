//! Small cases from below: a descent can end where every single step leads uphill, an enumeration can't.

use shardcheck_cases::{AttentionCase, Body, Case, Family, Probe, Request};

use super::moves::refit;
use super::size::{Size, key};

/// Most tokens (in the measure) of an enumerated case.
const MOST_TOKENS: usize = 16;
/// Most cases that are enumerated.
const MOST_CASES: usize = 4000;

/// Cases smaller than `case`, smallest first, that differ from it in batch, W, heads, S, B and probe.
pub(crate) fn below(case: &Case) -> Vec<Case> {
    let Body::Attention(attention) = &case.body else { return Vec::new() };
    let own = Size::of(case);
    let mut found = Vec::new();
    for requests in batches(case.family, own.tokens.min(MOST_TOKENS)) {
        for (dcp, interleave, block_size) in layouts(attention) {
            for heads in heads(attention) {
                for probe in probes(attention) {
                    let mut smaller = attention.clone();
                    smaller.workload.requests.clone_from(&requests);
                    let groups = smaller.configuration.tp / smaller.configuration.dcp;
                    smaller.configuration.dcp = dcp;
                    smaller.configuration.tp = dcp * groups;
                    smaller.configuration.interleave = interleave;
                    smaller.configuration.block_size = block_size;
                    smaller.configuration.heads_per_rank = heads;
                    smaller.probe = probe;
                    if smaller.workload.chunk_budget_tokens > 0 {
                        // as many chunks as there can be, or one
                        let many = smaller.workload.chunk_budget_tokens < 1 << 20;
                        smaller.workload.chunk_budget_tokens = if many { 1 } else { 1 << 20 };
                    }
                    refit(&mut smaller);
                    found.push(Case { body: Body::Attention(smaller), ..case.clone() });
                }
            }
        }
    }
    found.retain(|smaller| Size::of(smaller) < own && smaller.check().is_ok());
    found.sort_by_cached_key(key);
    found.dedup();
    found.truncate(MOST_CASES);
    found
}

/// Batches of one request, and of two or three where lengths and rows differ, of at most `most` tokens in the measure.
fn batches(family: Family, most: usize) -> Vec<Vec<Request>> {
    let one = |limit: usize| {
        let mut requests = Vec::new();
        let rows = match family {
            Family::Decode => 1..=1,
            Family::Layout | Family::Write => 0..=3,
            _ => 1..=4,
        };
        for query_tokens in rows {
            for context_tokens in 0..=limit {
                let request = Request { context_tokens, query_tokens };
                if request.seq_len() + query_tokens <= limit && request.seq_len() > 0 {
                    requests.push(request);
                }
            }
        }
        requests
    };
    let mut found: Vec<Vec<Request>> = one(most).into_iter().map(|request| vec![request]).collect();
    let empty = Request { context_tokens: 0, query_tokens: 0 };
    for first in one(6.min(most)) {
        found.push(vec![first, empty]);
        found.push(vec![empty, first]);
        for second in one(6.min(most)) {
            found.push(vec![first, second]);
        }
    }
    found
}

/// (W, S, B) up to those of the case, small ones alone.
fn layouts(case: &AttentionCase) -> Vec<(usize, usize, usize)> {
    let configuration = &case.configuration;
    let mut found = Vec::new();
    for dcp in 1..=configuration.dcp.min(4) {
        for interleave in 1..=configuration.interleave.min(2) {
            for blocks in 1..=2 {
                if interleave * blocks <= configuration.block_size {
                    found.push((dcp, interleave, interleave * blocks));
                }
            }
        }
    }
    found.push((configuration.dcp, configuration.interleave, configuration.block_size));
    found
}

fn heads(case: &AttentionCase) -> Vec<usize> {
    let mut heads = vec![1, 2, case.configuration.heads_per_rank];
    heads.retain(|heads| *heads <= case.configuration.heads_per_rank);
    heads.dedup();
    heads
}

fn probes(case: &AttentionCase) -> Vec<Probe> {
    let mut probes = vec![Probe::Gaussian, case.probe];
    probes.dedup();
    probes
}
