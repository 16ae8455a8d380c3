//! Engines that misbehave: each gets the verdict that it deserves, and none ever passes.

use std::sync::Arc;
use std::time::Duration;

use shardcheck::event::CaseResult;
use shardcheck::finding::Finding;
use shardcheck::guard::Guarded;
use shardcheck::recording::{Recorded, Recorder};
use shardcheck::run::judge_case;
use shardcheck::status::Status;
use shardcheck_cases::Case;
use shardcheck_cpu::hostile::{Hostility, hostile};
use shardcheck_cpu::{CpuEngine, fault};
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, OperationKind, Profile, RuleSetName, Session, Settings,
    Validation,
};

const DECODE: &str =
    "decode/tiny-mla/tp4.dcp4.h2.s2.b8.n8.bf16.a2a.hi_lo.qrep/12+1_0+1_7+1.pad2.shuf/gaussian/7";
const VERIFY: &str =
    "verify/tiny-mla/tp4.dcp2.h2.s2.b8.n12.e4m3fn@0.5.ag_rs.qrep/12+3_0+0_7+2.pad2.shuf/cold/7";
const CONTEXT: &str =
    "context/tiny-mla/tp2.dcp2.h2.s4.b8.n10.bf16.ag_rs.qrep.lat/12+4_0+3_30+2.shuf.c16/gaussian/7";
const MERGE: &str = "merge_partials/w3.t4.h2.d16.bf16.a2a.hi_lo/some_empty/sliced/7";
const ATTENTION: [&str; 3] = [DECODE, VERIFY, CONTEXT];
/// Far longer than a step of these cases takes.
const PATIENT: Duration = Duration::from_secs(120);
const IMPATIENT: Duration = Duration::from_millis(200);

fn judge(id: &str, engine: impl Into<Arc<dyn Engine>>, limit: Duration) -> CaseResult {
    let case: Case = id.parse().unwrap_or_else(|error| panic!("{error}"));
    judge_case(&case, &Guarded::new(engine, limit), &|_| true)
}

fn judge_hostile(id: &str, kind: Hostility) -> CaseResult {
    judge(id, hostile(kind), if kind == Hostility::Hangs { IMPATIENT } else { PATIENT })
}

/// Findings of the properties that did not hold, by id.
fn broken(result: &CaseResult) -> Vec<(&str, &Finding)> {
    result.failures().map(|check| (check.property.as_str(), &check.finding)).collect()
}

fn finding<'a>(result: &'a CaseResult, property: &str) -> &'a Finding {
    let check = result.checks.iter().find(|check| check.property == property);
    &check.unwrap_or_else(|| panic!("{property} is not judged on {}", result.id)).finding
}

/// Headline of a property that does not hold.
fn headline<'a>(result: &'a CaseResult, property: &str) -> &'a str {
    match finding(result, property) {
        Finding::Broken(failure) => &failure.headline,
        other => panic!("{property}: {other:?}"),
    }
}

/// The property that compares the output with global attention.
fn output_of(id: &str) -> String {
    format!("{}.output", id.split('/').next().unwrap())
}

#[test]
fn the_healthy_engine_passes_behind_the_guard() {
    for id in ATTENTION.into_iter().chain([MERGE]) {
        let result = judge(id, Box::new(shardcheck_cpu::engine()) as Box<dyn Engine>, PATIENT);
        assert_eq!(result.status, Status::Pass, "{id}: {:?}", result.checks);
    }
}

#[test]
fn no_hostile_engine_ever_passes() {
    for kind in Hostility::ALL {
        for id in ATTENTION {
            if kind == Hostility::ClaimsReplication && id == CONTEXT {
                continue; // the queries of a context step are given to every rank, so there is nothing to claim
            }
            let result = judge_hostile(id, kind);
            let expected = match kind {
                Hostility::Panics => Status::Crash,
                Hostility::Hangs => Status::Timeout,
                _ => Status::Fail,
            };
            assert_eq!(result.status, expected, "{kind} on {id}: {:?}", broken(&result));
        }
    }
}

#[test]
fn zeros_and_nan_fail_the_comparison_with_global_attention() {
    for (kind, seen) in [(Hostility::ZeroOutput, "0"), (Hostility::NanOutput, "NaN")] {
        for id in ATTENTION {
            let result = judge_hostile(id, kind);
            let Finding::Broken(failure) = finding(&result, &output_of(id)) else { panic!("{kind} on {id}") };
            assert_eq!(failure.worst.as_ref().unwrap().seen, seen, "{kind} on {id}");
            assert!(failure.out_of_bound > 0 && failure.out_of_bound <= failure.compared);
        }
    }
}

#[test]
fn every_judged_element_of_a_nan_output_is_out_of_bound() {
    let result = judge_hostile(DECODE, Hostility::NanOutput);
    let Finding::Broken(failure) = finding(&result, "decode.output") else { panic!("it fails") };
    assert_eq!(failure.out_of_bound, failure.compared);
}

#[test]
fn a_wrong_shape_a_wrong_dtype_and_a_missing_output_are_named() {
    for id in ATTENTION {
        let property = output_of(id);
        let shape = judge_hostile(id, Hostility::WrongShape);
        assert!(headline(&shape, &property).contains("shape"), "{}", headline(&shape, &property));
        let dtype = judge_hostile(id, Hostility::WrongDtype);
        assert!(headline(&dtype, &property).contains("bf16"), "{}", headline(&dtype, &property));
        let none = judge_hostile(id, Hostility::NoOutput);
        assert!(headline(&none, &property).contains("out"), "{}", headline(&none, &property));
    }
}

#[test]
fn changed_inputs_fail_a_property_of_their_own_that_lists_them() {
    for id in ATTENTION {
        let result = judge_hostile(id, Hostility::ChangesInput);
        let text = headline(&result, "inputs.unchanged");
        assert!(text.contains("block_table") && text.contains("query"), "{text}");
        assert!(matches!(finding(&result, &output_of(id)), Finding::Holds(_)), "the output itself is right");
    }
}

#[test]
fn replication_that_is_claimed_but_not_run_shows_in_the_collectives() {
    for id in [DECODE, VERIFY] {
        let result = judge_hostile(id, Hostility::ClaimsReplication);
        assert!(
            matches!(finding(&result, "dispatch.path"), Finding::Holds(_)),
            "the claim itself is consistent"
        );
        let text = headline(&result, "dispatch.observed");
        assert!(text.contains("the queries were gathered"), "{text}");
    }
}

#[test]
fn a_panic_is_told_in_its_own_words() {
    let result = judge_hostile(VERIFY, Hostility::Panics);
    let Finding::Engine { status: Status::Crash, text } = finding(&result, "verify.output") else {
        panic!("{:?}", result.checks)
    };
    assert!(text.contains("hostile engine: a deliberate panic"), "{text}");
}

#[test]
fn a_panic_without_a_guard_is_no_end_of_the_run_either() {
    let case: Case = DECODE.parse().unwrap();
    let result = judge_case(&case, hostile(Hostility::Panics).as_ref(), &|_| true);
    assert_eq!(result.status, Status::HarnessError);
    assert!(
        matches!(&result.checks[0].finding, Finding::Engine { text, .. } if text.contains("deliberate panic"))
    );
}

#[test]
fn a_step_that_never_returns_is_given_up_with_the_time_waited() {
    let case: Case = DECODE.parse().unwrap();
    // long enough for the healthy steps before it, on a slow machine too
    let engine = Guarded::new(hostile(Hostility::Hangs), Duration::from_secs(3));
    let result = judge_case(&case, &engine, &|property| property.id == "decode.output");
    let Finding::Engine { status: Status::Timeout, text } = finding(&result, "decode.output") else {
        panic!("{:?}", result.checks)
    };
    assert!(text.contains("timed out after 3 s") && text.contains("Attend"), "{text}");
}

#[test]
fn ranks_that_wait_for_one_that_went_away_are_told_by_name() {
    for (name, id) in [
        ("one-rank-skips-the-query-gather", VERIFY.replace(".qrep", "")),
        ("one-rank-skips-the-lse-gather", VERIFY.to_owned()),
    ] {
        let engine = CpuEngine::with_fault(fault(name).unwrap()).with_timeout(IMPATIENT);
        let result = judge(&id, Box::new(engine) as Box<dyn Engine>, PATIENT);
        assert_eq!(result.status, Status::Timeout, "{name}: {:?}", broken(&result));
        let Finding::Engine { status: Status::Timeout, text } = finding(&result, "verify.output") else {
            panic!("{name}: {:?}", result.checks)
        };
        let rank = text.split("rank ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        assert!(rank.parse::<usize>().is_ok_and(|rank| rank < 4), "{text}");
        assert!(text.contains("waits in "), "{text}");
    }
}

#[test]
fn a_hostile_merge_is_no_better() {
    for (kind, expected) in [
        (Hostility::ZeroOutput, Status::Fail),
        (Hostility::NanOutput, Status::Fail),
        (Hostility::WrongShape, Status::Fail),
        (Hostility::ChangesInput, Status::Fail),
        (Hostility::Panics, Status::Crash),
        (Hostility::Hangs, Status::Timeout),
    ] {
        assert_eq!(judge_hostile(MERGE, kind).status, expected, "{kind}");
    }
}

#[test]
fn what_a_hostile_engine_answered_can_be_judged_again_without_it() {
    for kind in [Hostility::NanOutput, Hostility::ChangesInput, Hostility::WrongDtype, Hostility::Panics] {
        let case: Case = VERIFY.parse().unwrap();
        let engine = Guarded::new(hostile(kind), PATIENT);
        let recorder = Recorder::new(&engine);
        let first = judge_case(&case, &recorder, &|_| true);
        let again = judge_case(&case, &Recorded::new(recorder.recording()).unwrap(), &|_| true);
        assert_eq!((again.status, again.checks), (first.status, first.checks), "{kind}");
    }
}

/// The healthy engine with another profile, or with a configuration changed on its way in.
struct Changed {
    healthy: CpuEngine,
    profile: Profile,
    change: fn(&mut Configuration),
}

fn changed(profile: impl Fn(&mut Profile), change: fn(&mut Configuration)) -> Box<dyn Engine> {
    let healthy = shardcheck_cpu::engine();
    let mut changed = healthy.profile().clone();
    profile(&mut changed);
    Box::new(Changed { healthy, profile: changed, change })
}

impl Engine for Changed {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        self.healthy.validate(rules, settings)
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        let mut configuration = configuration.clone();
        (self.change)(&mut configuration);
        self.healthy.open(&configuration)
    }
}

#[test]
fn a_comparison_of_two_runs_that_took_the_same_path_is_inconclusive() {
    let never_replicates = changed(|_| {}, |c| c.query_replication = false);
    let case: Case = DECODE.parse().unwrap();
    let only = |property: &shardcheck::properties::Property| property.id == "equal.query-replication";
    let result = judge_case(&case, never_replicates.as_ref(), &only);
    assert_eq!(result.status, Status::Inconclusive);
    let Finding::Inconclusive(why) = finding(&result, "equal.query-replication") else {
        panic!("{result:?}")
    };
    assert!(why.contains("took the same path") && why.contains("query_replication"), "{why}");
    let whole = judge_case(&case, never_replicates.as_ref(), &|_| true);
    assert_eq!(whole.status, Status::Fail, "and what was asked for is not what ran");
}

#[test]
fn a_contract_that_would_let_anything_pass_is_refused_before_anything_is_compared() {
    let loose = |profile: &mut Profile| {
        let decode = profile.operations.get_mut(&OperationKind::Decode).unwrap();
        decode.contract.as_mut().unwrap().u_acc = 0.5;
    };
    let engine = changed(loose, |_| {});
    assert!(engine.profile().check().unwrap_err().contains("u_acc"));
    let result = judge(DECODE, engine, PATIENT);
    assert_eq!((result.status, result.checks.len()), (Status::Inconclusive, 1));
    let Finding::Inconclusive(why) = &result.checks[0].finding else { panic!("{result:?}") };
    assert!(why.contains("contract of decode") && why.contains("u_acc"), "{why}");
}

#[test]
fn an_operation_that_is_not_declared_is_not_judged() {
    let engine = changed(|profile| drop(profile.operations.remove(&OperationKind::Decode)), |_| {});
    let result = judge(DECODE, engine, PATIENT);
    assert_eq!(result.status, Status::Unsupported, "{result:?}");
    let [check] = &result.checks[..] else { panic!("{result:?}") };
    let Finding::Unsupported(why) = &check.finding else { panic!("{result:?}") };
    assert!(why.contains("does not declare decode"), "{why}");
}

#[test]
fn an_operation_without_a_contract_has_no_bound_to_be_judged_by() {
    let without = |profile: &mut Profile| {
        profile.operations.get_mut(&OperationKind::Decode).unwrap().contract = None;
    };
    let result = judge(DECODE, changed(without, |_| {}), PATIENT);
    let Finding::Inconclusive(why) = finding(&result, "decode.output") else { panic!("{result:?}") };
    assert!(why.contains("no rounding contract"), "{why}");
    assert_eq!(result.status, Status::Inconclusive);
}
