//! Tests of the diagnosis.

use std::collections::BTreeSet;
use std::time::Duration;

use rayon::prelude::*;
use shardcheck_cases::{Body, Case, Family, SuiteName, suite};
use shardcheck_cpu::hostile::{Hostility, hostile};
use shardcheck_cpu::{CpuEngine, Fault, fault, faults};
use shardcheck_engine::{Answer, Engine};

use super::budget::Budget;
use super::evidence::is_asked;
use super::replay::play;
use super::{Diagnosis, Disguise, Evidence, Trial, blind, diagnose, diagnose_with};
use crate::boundary::{Tampered, boundary_fault};
use crate::guard::Guarded;
use crate::recording::{Answered, Recorder, Recording};
use crate::run::judge_case;
use crate::status::Status;

const LONG: Duration = Duration::from_secs(600);

fn evidence(case: &Case, engine: &dyn Engine) -> Option<Evidence> {
    let recorder = Recorder::new(engine);
    let result = judge_case(case, &recorder, &|_| true);
    Evidence::of(case, &result, recorder.recording())
}

fn diagnosis_of(name: &str, ids: &[&str]) -> Diagnosis {
    let engine = CpuEngine::with_fault(fault(name).unwrap());
    let evidence: Vec<Evidence> =
        ids.iter().filter_map(|id| evidence(&id.parse().unwrap(), &engine)).collect();
    diagnose(&evidence, LONG).unwrap()
}

#[test]
fn the_fault_that_the_engine_has_comes_first_with_every_bit() {
    let found = diagnosis_of(
        "local-causal-trim",
        &["verify/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+3_5+2.seq/gaussian/7"],
    );
    assert_eq!(found.candidates[0].fault, "local-causal-trim", "{found:?}");
    assert!(found.candidates[0].exact && found.candidates[0].beside == 0);
    assert!(found.ruled_out > faults().len() * 9 / 10, "{found:?}");
    assert_eq!(found.fitting + found.ruled_out + found.untried, faults().len());
}

#[test]
fn several_failed_cases_rule_out_what_one_leaves_open() {
    let ids = [
        "decode/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/1+1.seq/gaussian/7",
        "decode/tiny-mla/tp4.dcp4.h2.s2.b4.n8.bf16.ag_rs/7+1.seq/gaussian/7",
    ];
    let one = diagnosis_of("length-of-full-round", &ids[..1]);
    let both = diagnosis_of("length-of-full-round", &ids);
    assert_eq!(both.cases.len(), 2);
    assert_eq!(both.candidates[0].explains, 2);
    let with = |found: &Diagnosis| {
        let first = &found.candidates[0];
        first.fault == "length-of-full-round"
            || first.same_effect.contains(&"length-of-full-round".to_owned())
    };
    assert!(with(&one) && with(&both), "{one:?}\n{both:?}");
    assert!(both.candidates[0].same_effect.len() <= one.candidates[0].same_effect.len());
}

#[test]
fn a_case_that_passes_is_never_diagnosed() {
    let healthy = shardcheck_cpu::engine();
    for case in suite(SuiteName::EngineSmoke, 1) {
        assert!(evidence(&case, &healthy).is_none(), "{}", case.id());
    }
    // a fault that changes nothing on a case leaves it passing
    let dead = CpuEngine::with_fault(fault("scale-ignored-on-read").unwrap());
    let case = "decode/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+1.seq/gaussian/7".parse().unwrap();
    assert!(evidence(&case, &dead).is_none());
    assert!(diagnose(&[], LONG).is_none());
}

#[test]
fn none_fits_where_the_engine_is_wrong_in_a_way_that_is_not_known() {
    // two faults at once
    let averaged = CpuEngine::with_fault(fault("ranks-averaged").unwrap());
    let engine = Tampered::new(&averaged, boundary_fault("output-heads-exchanged").unwrap());
    let case = "decode/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+1_3+1.seq/gaussian/7".parse().unwrap();
    let found = diagnose(&[evidence(&case, &engine).unwrap()], LONG).unwrap();
    let names: Vec<_> = found.candidates.iter().map(|c| c.fault.as_str()).collect();
    assert_eq!((names.as_slice(), found.fitting), (&[][..], 0), "{found:?}");
    assert!(found.lines()[0].starts_with("no known fault fits"), "{:?}", found.lines());
}

#[test]
fn an_engine_that_ends_gets_no_fault_but_the_sentence_that_it_ended() {
    let case: Case =
        "decode/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+1_3+1.seq/gaussian/7".parse().unwrap();
    let engine = Guarded::new(hostile(Hostility::Panics), LONG);
    let found = diagnose(&[evidence(&case, &engine).unwrap()], LONG).unwrap();
    assert_eq!((found.candidates.len(), found.ended), (0, 1), "{found:?}");
    let lines = found.lines();
    assert!(
        lines.len() == 1 && lines[0].starts_with("none: the engine ended in the failed case"),
        "{lines:?}"
    );
}

#[test]
fn a_fault_that_ends_the_embedded_engine_explains_its_end() {
    let cases = suite(SuiteName::EngineSmoke, 1);
    let ends = |fault: &&'static Fault| {
        let engine = CpuEngine::with_fault(fault);
        let of = |case: &Case| {
            let recorder = Recorder::new(&engine);
            let result = judge_case(case, &recorder, &|property| property.id.ends_with(".output"));
            (result.status == Status::Crash).then(|| case.clone())
        };
        cases
            .iter()
            .filter(|case| case.family == Family::Decode)
            .take(12)
            .find_map(of)
            .map(|case| (*fault, case))
    };
    let (fault, case) = faults().iter().find_map(|fault| ends(&fault)).expect("a fault that ends the engine");
    let own = blind(fault, std::slice::from_ref(&case), Disguise::None);
    assert_eq!(own.place, Some(1), "{}: {:?}", fault.name, own.diagnosis);
    assert!(own.diagnosis.unwrap().ended > 0);
}

#[test]
fn time_that_is_up_is_told_and_faults_that_were_not_tried_are_not_ruled_out() {
    let engine = CpuEngine::with_fault(fault("local-causal-trim").unwrap());
    let case = "verify/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+3.seq/gaussian/7".parse().unwrap();
    let evidence = [evidence(&case, &engine).unwrap()];
    let found = diagnose(&evidence, Duration::ZERO).unwrap();
    // what no question asks is ruled out without being tried
    let asked = faults().iter().filter(|fault| evidence[0].concerns(fault)).count();
    assert_eq!((found.untried, found.ruled_out), (asked, faults().len() - asked));
    let lines = found.lines();
    assert!(lines[0].starts_with(&format!("undecided: {asked} known faults were not tried")), "{lines:?}");
    assert!(0 < found.likely_untried && found.likely_untried < asked, "{found:?}");
    assert!(lines[1].contains("name a property that was judged here"), "{lines:?}");
    assert!(lines[1].contains(&format!("--budget-s {}`", found.needed_s)), "{lines:?}");
}

#[test]
fn the_seconds_that_are_said_to_suffice_are_twice_what_all_take_at_the_pace_so_far() {
    let seconds = |spent: u64, tried, left| super::needed(Duration::from_secs(spent), tried, left);
    assert_eq!(seconds(5, 100, 0), 0);
    // 50 ms each, 200 of them, twice
    assert_eq!(seconds(5, 100, 100), 20);
    assert_eq!(seconds(5, 80, 520), 80);
    // nothing was tried: no pace is known, and no less than a budget is said
    assert_eq!(seconds(0, 0, 600), 10);
}

/// Of each family the smallest case of the gate; of stacks one of each kind.
fn one_of_each_kind() -> Vec<Case> {
    let mut cases = suite(SuiteName::Gate, 1);
    cases.sort_by_key(crate::shrink::work);
    let mut kinds = BTreeSet::new();
    let kind = |case: &Case| match &case.body {
        Body::Stack(stack) => (
            case.family,
            stack.wiring.is_some(),
            stack.pcp.is_some(),
            stack.pattern.is_some() || stack.mixture.is_some(),
        ),
        _ => (case.family, false, false, false),
    };
    cases.retain(|case| kinds.insert(kind(case)));
    cases
}

#[test]
fn a_fault_that_no_question_asks_gives_the_answers_of_the_healthy_engine() {
    let healthy = shardcheck_cpu::engine();
    let cases = one_of_each_kind();
    assert!(cases.len() > Family::ALL.len(), "{}", cases.len());
    let skipped: usize = cases
        .par_iter()
        .map(|case| {
            let recorder = Recorder::new(&healthy);
            judge_case(case, &recorder, &|_| true);
            let recording = recorder.recording();
            let unasked = faults().iter().filter(|fault| !is_asked(&recording, fault));
            unasked
                .inspect(|fault| same_answers(&CpuEngine::with_fault(fault), &recording, fault.name, case))
                .count()
        })
        .sum();
    assert!(skipped > cases.len() * faults().len() / 3, "{skipped}");
}

fn same_answers(engine: &CpuEngine, recording: &Recording, name: &str, case: &Case) {
    for record in &recording.sessions {
        let played = play(engine, record);
        for (step, (answer, _)) in record.steps.iter().zip(&played.steps) {
            assert!(*answer == step.answer, "{name} on {}: {:?}", case.id(), step.operation);
        }
        assert_eq!(played.steps.len(), record.steps.len(), "{name} on {}", case.id());
    }
    for record in &recording.validations {
        let answer = engine.validate(record.rules, &record.settings);
        let Ok(Answer::Done(answer)) = answer else { continue };
        assert!(Answered::Done(answer) == record.answer, "{name} on {}", case.id());
    }
}

#[test]
fn a_hang_is_explained_by_faults_that_make_ranks_wait_and_by_no_other() {
    let engine = CpuEngine::with_fault(fault("one-rank-skips-the-query-gather").unwrap())
        .with_timeout(Duration::from_millis(300));
    let case = "decode/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/3+1.seq/gaussian/7".parse().unwrap();
    let recorder = Recorder::new(&engine);
    let result = judge_case(&case, &recorder, &|property| property.id == "decode.output");
    let evidence = Evidence::of(&case, &result, recorder.recording()).unwrap();
    let found = diagnose(&[evidence], LONG).unwrap();
    // several ranks wait, and which of them is told first depends on the moment
    let named = |candidate: &super::Candidate| candidate.fault == "one-rank-skips-the-query-gather";
    assert!(found.candidates.iter().any(named), "{found:?}");
    assert!(found.candidates.iter().all(|candidate| candidate.class == "hang"));
}

#[test]
fn an_engine_of_another_arithmetic_that_returns_outputs_alone_is_diagnosed_too() {
    let cases = suite(SuiteName::EngineSmoke, 1);
    for name in ["row-misses-itself", "lse-base-2-as-natural", "exchange-swaps-two-ranks"] {
        let trial = blind(fault(name).unwrap(), &cases, Disguise::Foreign);
        assert_eq!(trial.place, Some(1), "{name}: {:?}", trial.diagnosis);
        // what an exchange brings to the wrong rank has the same bits by any arithmetic
        let exact = trial.diagnosis.unwrap().candidates[0].exact;
        assert!(!exact || name == "exchange-swaps-two-ranks", "{name}");
    }
}

#[test]
fn faults_run_blind_are_named() {
    let cases = suite(SuiteName::EngineSmoke, 1);
    let tried: Vec<_> = faults().iter().step_by(5).collect();
    let trials: Vec<Trial> = tried
        .iter()
        .map(|fault| blind(fault, &cases, Disguise::None))
        .filter(|trial| trial.diagnosis.is_some())
        .collect();
    let named: Vec<Option<usize>> = trials.iter().map(|trial| trial.place).collect();
    let first = named.iter().filter(|place| **place == Some(1)).count();
    for trial in trials.iter().filter(|trial| trial.place == Some(1)) {
        let candidate = &trial.diagnosis.as_ref().unwrap().candidates[0];
        let class = candidate.class.as_str();
        assert!(candidate.stage_agrees, "{}: {class} is not known to show there", trial.fault.name);
    }
    assert!(named.len() > 15, "only {} faults fail a case of the smoke suite", named.len());
    assert!(first * 10 >= named.len() * 9, "{first} of {} first", named.len());
}

#[test]
fn a_right_fault_is_not_doubted_for_the_stage_that_it_shows_at() {
    let doubted = |candidate: &super::Candidate, exact: bool| {
        let candidates = vec![super::Candidate { exact, stage_agrees: false, ..candidate.clone() }];
        let told = Diagnosis { candidates, cases: vec!["verify/a".to_owned()], ..Diagnosis::default() };
        told.lines().iter().any(|line| line.contains("seldom shows at"))
    };
    let found = diagnosis_of(
        "local-causal-trim",
        &["verify/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+3_5+2.seq/gaussian/7"],
    );
    assert!(!doubted(&found.candidates[0], true), "every bit is the same");
    assert!(doubted(&found.candidates[0], false));
}

#[test]
fn a_budget_is_spent_on_the_likeliest_faults_first_on_any_number_of_threads() {
    let engine = CpuEngine::with_fault(fault("committed-prefix-rows").unwrap());
    let case = "verify/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+3.seq/gaussian/7".parse().unwrap();
    let evidence = [evidence(&case, &engine).unwrap()];
    let order = super::likely_first(&[&evidence[0]]);
    let order: Vec<_> = order.into_iter().filter(|fault| evidence[0].concerns(fault)).collect();
    let place = order.iter().position(|fault| fault.name == "committed-prefix-rows").unwrap();
    for threads in [1, 4] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let within =
            |tries: usize| pool.install(|| diagnose_with(&evidence, &Budget::of_tries(tries))).unwrap();
        assert_eq!(within(place).untried, order.len() - place, "{threads} threads");
        let found = within(place + 1);
        assert_eq!(found.candidates[0].fault, "committed-prefix-rows", "{threads} threads: {found:?}");
    }
}

#[test]
fn a_fault_that_does_not_explain_the_smallest_case_costs_no_more_than_that_where_another_explains_all() {
    let engine = CpuEngine::with_fault(fault("local-causal-trim").unwrap());
    let ids = ["6+3_5+2", "9+3_5+2_40+4", "60+4_70+4"];
    let id = |batch| format!("verify/tiny-mla/tp2.dcp2.h2.s1.b4.n64.bf16.ag_rs/{batch}.seq/gaussian/7");
    let all: Vec<Evidence> =
        ids.iter().filter_map(|batch| evidence(&id(batch).parse().unwrap(), &engine)).collect();
    // one try a fault; what explains the first case is tried on the others for nothing
    let found = diagnose_with(&all, &Budget::of_tries(faults().len())).unwrap();
    assert_eq!((found.cases.len(), found.untried), (3, 0), "{found:?}");
    assert_eq!((found.candidates[0].fault.as_str(), found.candidates[0].explains), ("local-causal-trim", 3));
}

#[test]
fn faults_that_name_what_failed_are_tried_before_the_others() {
    let engine = CpuEngine::with_fault(fault("committed-prefix-rows").unwrap());
    let case = "verify/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+3.seq/gaussian/7".parse().unwrap();
    let evidence = evidence(&case, &engine).unwrap();
    let order = super::likely_first(&[&evidence]);
    assert_eq!(order.len(), faults().len());
    let place = order.iter().position(|fault| fault.name == "committed-prefix-rows").unwrap();
    assert!(place < 20, "tried as number {place}");
}
