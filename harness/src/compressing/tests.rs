//! Properties of compressing tokens on the embedded engine and on its faults.

use std::collections::BTreeSet;

use shardcheck_cases::{Body, Case, CompressPcpCase, Family, GatePattern, SuiteName};
use shardcheck_engine::Engine;
use shardcheck_references::pcp::Placed;

use super::CompressMaterial;
use crate::verdicts::{cases_of, faults_are_seen, passes_the_gate};

fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
    cases_of(Family::CompressPcp, name, seed)
}

fn body(case: &Case) -> &CompressPcpCase {
    let Body::CompressPcp(body) = &case.body else { panic!("{}", case.id()) };
    body
}

fn material(case: &Case) -> CompressMaterial {
    CompressMaterial::new(body(case), case.seed, shardcheck_cpu::engine().profile()).unwrap()
}

#[test]
fn the_embedded_engine_compresses_rightly_on_every_case_of_the_gate() {
    passes_the_gate(Family::CompressPcp, 30);
}

#[test]
fn every_fault_fails_every_property_of_the_compressor_that_it_names_on_the_gate() {
    faults_are_seen(Family::CompressPcp, "compress.", 14);
}

/// Values and gates with their bias of one token.
type Row = (Vec<f64>, Vec<f64>);

/// Entries of a batch as a decoder makes them, one token after the other: a block that fills up beside the last one that was full.
fn one_by_one(case: &CompressPcpCase, seed: u64) -> Vec<f64> {
    let inputs = case.tensors(seed);
    let rows = |name: &str| -> Vec<Vec<f64>> {
        inputs.get(name).unwrap().to_f64().chunks_exact(case.columns()).map(<[f64]>::to_vec).collect()
    };
    let bias = rows("gate_bias");
    let beside = |values: &str, gates: &str| rows(values).into_iter().zip(rows(gates)).collect::<Vec<Row>>();
    let (mut new, mut held) =
        (beside("kv", "gate").into_iter(), beside("state_kv", "state_gate").into_iter());
    let mut made = Vec::new();
    for request in &case.batch.requests {
        let count = case.held(request.context_tokens);
        let (mut last, mut open): (Vec<Row>, Vec<Row>) = (Vec::new(), Vec::new());
        for position in request.context_tokens - count..request.context_tokens + request.query_tokens {
            let is_new = position >= request.context_tokens;
            let (values, mut gates) = if is_new { new.next().unwrap() } else { held.next().unwrap() };
            gates.iter_mut().zip(&bias[position % case.ratio]).for_each(|(gate, bias)| *gate += bias);
            open.push((values, gates));
            if open.len() < case.ratio {
                continue;
            }
            for column in (0..case.dim).filter(|_| is_new) {
                let of = |rows: &[Row], column: usize| -> Vec<(f64, f64)> {
                    rows.iter().map(|(values, gates)| (values[column], gates[column])).collect()
                };
                let mut parts = of(&open, case.columns() - case.dim + column);
                if case.overlap {
                    parts.extend(of(&last, column));
                }
                let total: f64 = parts.iter().map(|(_, gate)| gate.exp()).sum();
                made.push(parts.iter().map(|(value, gate)| value * gate.exp() / total).sum());
            }
            last = std::mem::take(&mut open);
        }
    }
    made
}

#[test]
fn the_oracle_s_entries_are_those_of_a_decoder_that_takes_one_token_after_the_other() {
    let mut compared = 0;
    for case in cases(SuiteName::Gate, 3) {
        let material = material(&case);
        // plain exponents hold gates up to some hundreds, as far as they are drawn here
        let plain = one_by_one(body(&case), case.seed);
        let entries: Vec<_> =
            material.made().into_iter().flat_map(|(request, block)| material.entry(request, block)).collect();
        assert_eq!(plain.len(), entries.len(), "{}", case.id());
        for (plain, pooled) in plain.iter().zip(&entries) {
            assert!((plain - pooled.value).abs() < 1e-12, "{}: {plain} {pooled:?}", case.id());
            assert!(pooled.error < 1e-2, "{}: {pooled:?}", case.id());
            compared += 1;
        }
    }
    assert!(compared > 500, "{compared}");
}

#[test]
fn the_gate_has_blocks_over_several_ranks_and_steps_first_blocks_and_steps_that_fill_none() {
    let cases = cases(SuiteName::Gate, 1);
    let (mut over_ranks, mut over_steps, mut none, mut first) = (0, 0, 0, 0);
    for case in &cases {
        let material = material(case);
        let made = material.made();
        none += usize::from(made.is_empty());
        for (request, block) in made {
            let ratio = material.case.ratio;
            let of_block = |row: &&Placed| row.request == request && row.position / ratio == block;
            let owners: BTreeSet<_> =
                material.sharing.placed.iter().filter(of_block).map(|row| row.owner).collect();
            over_ranks += usize::from(owners.len() > 1);
            let computed = material.case.batch.requests[request].context_tokens;
            over_steps += usize::from(block * ratio < computed);
            first += usize::from(block == 0 && material.case.overlap && request > 0);
        }
    }
    let seen = (over_ranks, over_steps, none, first);
    assert!(over_ranks > 20 && over_steps > 10 && none > 1 && first > 3, "{seen:?}");
    for pattern in GatePattern::ALL {
        assert!(cases.iter().any(|case| body(case).pattern == pattern), "{pattern}");
    }
}
