//! Properties of stacks on the embedded engine and on its faults.

use std::collections::{BTreeMap, BTreeSet};

use shardcheck_cases::{Case, Family, StackCase, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, fault, faults};
use shardcheck_engine::{Engine, StackPcp};

use crate::laboratory::{Observed, Watched};
use crate::material::Material;
use crate::stacking::WholeRun;
use crate::verdicts::findings;

fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
    suite(name, seed).into_iter().filter(|case| case.family == Family::Stack).collect()
}

#[test]
fn the_embedded_engine_is_right_on_every_stack_of_the_gate() {
    let engine = shardcheck_cpu::engine();
    for seed in [1, 2] {
        let cases = cases(SuiteName::Gate, seed);
        assert!(cases.len() >= 11, "{}", cases.len());
        for case in &cases {
            let material = Material::of(case, engine.profile()).unwrap();
            let (failed, compared) = findings(&engine, case, &material);
            assert!(failed.is_empty() && compared > 10_000, "{}: {compared}, {failed:#?}", case.id());
        }
    }
}

#[test]
fn rows_that_are_shared_out_give_the_bits_of_one_rank_whatever_the_strategy() {
    let engine = shardcheck_cpu::engine();
    let mut compared = 0;
    for case in cases(SuiteName::Gate, 2).into_iter().chain(cases(SuiteName::Nightly, 2)) {
        let Material::Stack(shared) = Material::of(&case, engine.profile()).unwrap() else { panic!() };
        let Some(pcp) = shared.case.pcp else { continue };
        // sums over more ranks are rounded more often
        let own = StackPcp { merged: false, ..pcp };
        let shared = shared.variant(&StackCase { pcp: Some(own), ..shared.case.clone() }).unwrap();
        let alone = shared.variant(&StackCase { pcp: None, ..shared.case.clone() }).unwrap();
        let [shared_steps, alone_steps] =
            [&shared, &alone].map(|material| material.play(&Watched::new(&engine)).unwrap());
        for (turn, (one, other)) in alone.inputs.turns.iter().zip(shared_steps.iter().zip(&alone_steps)) {
            let rows: usize = turn.turn.new_tokens.iter().sum();
            let of_rows = |observed: &Observed| {
                let logits = observed.reply.outputs.get("logits").unwrap();
                let [_, all, width] = logits.shape()[..] else { panic!("three axes") };
                let of_rank = |rank: &[f32]| rank[..rows * width].to_vec();
                logits.to_f32().chunks_exact(all * width).map(of_rank).collect::<Vec<_>>()
            };
            let (one, other) = (of_rows(one), of_rows(other));
            assert_eq!(one.len(), pcp.world * other.len());
            assert!(one.iter().all(|rank| *rank == other[0]), "{}, {}", case.id(), alone.name(turn));
            compared += rows;
        }
    }
    assert!(compared > 300, "{compared}");
}

#[test]
fn every_token_and_draft_of_a_whole_run_of_the_gate_is_decided() {
    let engine = shardcheck_cpu::engine();
    let mut drafts = 0;
    for case in cases(SuiteName::Gate, 3) {
        let Material::Stack(material) = Material::of(&case, engine.profile()).unwrap() else { panic!() };
        if material.case.wiring.is_none() {
            continue;
        }
        let mut run = WholeRun::new(&material);
        for turn in &material.inputs.turns {
            for (request, numbers) in turn.turn.tokens.iter().enumerate() {
                let mut certain = numbers.len();
                if material.case.drafts() > 0 {
                    let known = run.drafts(turn, request);
                    // behind a draft that is wrong, others may be anything
                    assert!(known.tokens[0].is_some(), "{}, request {request}: {known:?}", case.id());
                    // behind a draft that is wrong the text contradicts itself
                    certain -= turn.drafted[request] as usize - known.accepted.unwrap();
                    drafts += known.tokens.iter().flatten().count();
                }
                assert!(run.token(&numbers[..certain]).is_some(), "{}, request {request}", case.id());
            }
        }
    }
    assert!(drafts > 40, "{drafts}");
}

#[test]
fn every_fault_of_stacks_fails_every_property_that_it_names_on_the_gate() {
    let engine = shardcheck_cpu::engine();
    let faults = || faults().iter().filter(|fault| fault.killed_by[0].starts_with("stack."));
    let mut seen: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let done = |failed: &BTreeSet<&str>, named: &[&str]| named.iter().all(|id| failed.contains(id));
    for case in cases(SuiteName::Gate, 1) {
        let material = Material::of(&case, engine.profile()).unwrap();
        for fault in faults() {
            let failed = seen.entry(fault.name).or_default();
            if !done(failed, fault.killed_by) {
                let seen = findings(&CpuEngine::with_fault(fault), &case, &material).0;
                // where the engine ended, every property fails and none has seen the fault
                if !seen.contains_key("inputs.unchanged") {
                    failed.extend(seen.into_keys());
                }
            }
        }
    }
    let unseen: Vec<String> = faults()
        .filter(|fault| !done(&seen[fault.name], fault.killed_by))
        .map(|fault| format!("{}: {:?}, where {:?} name it", fault.name, seen[fault.name], fault.killed_by))
        .collect();
    let tried = faults().count();
    assert!(unseen.is_empty(), "{}", unseen.join("\n"));
    assert!(tried >= 20, "{tried}");
}

/// Properties that fail where a fault is in one stage alone, with their words.
fn failed(name: &str, id: &str) -> BTreeMap<&'static str, String> {
    let case: Case = id.parse().unwrap();
    let material = Material::of(&case, shardcheck_cpu::engine().profile()).unwrap();
    findings(&CpuEngine::with_fault(fault(name).unwrap()), &case, &material).0
}

#[test]
fn a_fault_of_one_stage_fails_that_stage_alone_and_is_located() {
    const ID: &str = "stack/l3.h16.i11.v13.whole.e5.k2.d1/tiny-mla/tp4.dcp2.h1.s1.b4.bf16.ag_rs/located/v0+6,1+2_v1+3,0+2_d0,1/3";
    for (name, property, words) in [
        ("stack-experts-of-the-first-mixture", "stack.feed-forward", "rank 0, layer 2, row 0"),
        ("stack-layer-attends-over-the-cache-before", "stack.attention", "rank 0, layer 1, row 0"),
        ("stack-attention-not-summed", "stack.attention-update", "rank 0, layer 0, row 0"),
        ("stack-feed-forward-not-summed", "stack.feed-forward", "rank 0, layer 0, row 0"),
        ("stack-residual-is-the-normed-stream", "stack.residual", "rank 0, layer 0, before its MLP, row 0"),
        ("stack-without-the-last-norm", "stack.norm", "rank 0, behind the last layer, row 0"),
        ("stack-shards-of-logits-in-reverse", "stack.logits", "rank 0, row 0"),
    ] {
        let mut failed = failed(name, ID);
        // without a sum, ranks go different ways: that they do is a failure of its own
        failed.remove("stack.ranks");
        failed.remove("stack.tokens");
        assert_eq!(failed.keys().copied().collect::<Vec<_>>(), [property], "{name}");
        let words = format!("first in step 1 (v0+6,1+2), {words} (request 0, position 0)");
        assert!(failed[property].contains(&words), "{name}: {}", failed[property]);
    }
}

#[test]
fn a_fault_of_states_is_located_by_layer_and_request_and_leaves_the_stages_around_it_right() {
    const ID: &str = "stack/l3.h16.i9.v13.whole.kkm.qh4.vh4.qd5.vd4.t3.c2.u2.softplus/tiny-mla/tp4.dcp2.h1.s1.b4.bf16.ag_rs/located/v0+6,1+2_r0-2_v0+3,1+1_d0,1/3";
    let of_states = ["stack.kda", "stack.state", "stack.window"];
    for (name, step, place) in [
        ("stack-recurrent-layers-share-their-states", "step 3 (v0+3,1+1)", "layer 0, request 0"),
        ("stack-recurrent-layer-reads-the-states-before", "step 3 (v0+3,1+1)", "layer 1, request 0"),
        ("stack-only-the-first-recurrent-layer-is-taken-back", "step 3 (v0+3,1+1)", "layer 1, request 0"),
        ("stack-states-sharded-like-the-cache", "step 1 (v0+6,1+2)", "layer 0, request 0"),
    ] {
        let failed = failed(name, ID);
        assert!(failed.keys().all(|id| of_states.contains(id)), "{name}: {:?}", failed.keys());
        let words = format!("first in {step}, rank 0, {place}, value head 0 of the rank");
        assert!(failed["stack.state"].contains(&words), "{name}: {}", failed["stack.state"]);
    }
    let mut failed = failed("stack-recurrent-output-not-summed", ID);
    // without a sum, ranks go different ways: that they do is a failure of its own
    failed.remove("stack.ranks");
    failed.remove("stack.tokens");
    assert_eq!(failed.keys().copied().collect::<Vec<_>>(), ["stack.kda-update"]);
    let words = "first in step 1 (v0+6,1+2), rank 0, layer 0, row 0 (request 0, position 0)";
    assert!(failed["stack.kda-update"].contains(words), "{}", failed["stack.kda-update"]);
}
