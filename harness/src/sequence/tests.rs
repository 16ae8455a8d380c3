//! Sequences on the healthy engine, on engines that remember, and what single steps see of those.

use std::time::Duration;

use proptest::prelude::*;
use shardcheck_cases::{Body, Case, Family, Probe, Step, SuiteName, generate_sequence, suite};
use shardcheck_cpu::{CpuEngine, Fault, FaultClass, engine, fault, faults};
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, OperationKind, Profile, RuleSetName, Session, Settings,
    Validation,
};
use shardcheck_formats::Counter;

use super::*;
use crate::finding::{Finding, Stage};
use crate::laboratory::{Laboratory, Watched};
use crate::material::Material;
use crate::mutants::{MutantState, try_all};
use crate::properties;
use crate::run::judge_case;
use crate::status::Status;

const REJECTED: &str =
    "sequence/tiny-mla/tp3.dcp3.h1.s2.b4.bf16.a2a.hi_lo.lat/rejected/v0+5,1+4_v0+4,1+2.pad2_r0-3_v0+2.pad6/7";
const REUSED: &str =
    "sequence/tiny-gqa/tp3.dcp3.h1.s1.b4.e4m3fn@0.5.ag_rs/reused/p0+13,1+5.c25_f0_v1+9_d1.pad3/7";
const FORK: &str =
    "sequence/tiny-mla/tp2.dcp2.h1.s2.b4.bf16.ag_rs.lat/fork/p0+21.c9_d0_h1=0x2_v1+3_d0,1.pad2_v1+4,0+4/7";
const SHRINKING: &str = "sequence/tiny-gqa/tp3.dcp3.h2.s1.b4.bf16.ag_rs/shrinking/v0+5,1+13,2+2_d0,1,2.pad1_f1_d0,2.pad2_f0_d2.pad3/7";

/// The finding of one property on an engine with a fault, or none.
fn found(id: &str, property: &str, engine: &CpuEngine) -> Finding {
    let case: Case = id.parse().unwrap_or_else(|error| panic!("{error}"));
    let material = Material::of(&case, engine.profile()).unwrap();
    let laboratory = Laboratory::new(&case, engine, &material);
    properties::find(property).unwrap().judge(&laboratory)
}

fn with(name: &str) -> CpuEngine {
    CpuEngine::with_fault(fault(name).unwrap_or_else(|| panic!("no fault {name}")))
}

fn failure(id: &str, property: &str, name: &str) -> crate::finding::Failure {
    match found(id, property, &with(name)) {
        Finding::Broken(failure) => *failure,
        other => panic!("{name} on {property}: {other:?}"),
    }
}

#[test]
fn the_healthy_engine_holds_every_property_of_the_sequences_of_the_gate() {
    let cases = suite(SuiteName::Gate, 1);
    let sequences: Vec<&Case> = cases.iter().filter(|case| case.family == Family::Sequence).collect();
    assert!(sequences.len() >= 70, "{}", sequences.len());
    for case in sequences {
        let result = judge_case(case, &engine(), &|_| true);
        assert_eq!(result.status, Status::Pass, "{}: {:?}", case.id(), result.checks);
        let imports = case.id().contains("/transfer");
        assert_eq!(result.checks.len(), if imports { 7 } else { 6 });
        assert!(result.coverage.rows > 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn the_healthy_engine_holds_every_property_of_any_drawn_sequence(seed in any::<u64>()) {
        let case = Case::sequence(generate_sequence(8, &mut Counter::new(seed, 1)), seed);
        let result = judge_case(&case, &engine(), &|_| true);
        prop_assert_eq!(result.status, Status::Pass, "{}: {:?}", case.id(), result.checks);
    }
}

#[test]
fn a_failure_names_its_step_and_the_batch_of_the_step() {
    let failure = failure(REJECTED, "sequence.metadata", "lengths-before-the-rejection");
    assert!(failure.headline.starts_with("step 4 (v0+2.pad6):"), "{}", failure.headline);
    assert_eq!(failure.stage, Some(Stage::RowBound));
    assert!(failure.notes.iter().any(|note| note.contains("0 (8 tokens, 2 new)")), "{:?}", failure.notes);
}

#[test]
fn a_rejected_token_that_stays_in_its_slot_is_seen_in_the_cache_and_in_the_output() {
    let stored = failure(REJECTED, "sequence.writers", "rejected-token-kept");
    assert!(stored.worst.unwrap().place.contains("position 6 of request 0"));
    let output = failure(REJECTED, "sequence.output", "rejected-token-kept");
    assert_eq!(output.stage, Some(Stage::Write));
}

#[test]
fn the_content_of_a_freed_block_is_seen_in_the_request_that_got_it() {
    let failure = failure(REUSED, "sequence.writers", "freed-block-keeps-its-content");
    assert!(failure.headline.starts_with("step 3 (v1+9)"), "{}", failure.headline);
}

#[test]
fn a_fork_that_writes_into_shared_blocks_is_told_whose_token_it_overwrote() {
    let failure = failure(FORK, "sequence.untouched", "fork-writes-into-the-blocks-of-its-source");
    assert!(failure.headline.contains("which held position 16 of request 0"), "{}", failure.headline);
}

#[test]
fn padding_rows_that_a_larger_step_left_are_seen_in_metadata_cache_and_output() {
    for (property, name) in [
        ("sequence.metadata", "padding-dealt-as-in-a-larger-step"),
        ("sequence.output", "padding-dealt-as-in-a-larger-step"),
        ("sequence.untouched", "padding-written-as-in-a-larger-step"),
    ] {
        failure(SHRINKING, property, name);
    }
}

#[test]
fn one_rank_with_old_lengths_is_named() {
    let failure = failure(SHRINKING, "sequence.metadata", "last-rank-replays-the-first-lengths");
    assert!(failure.worst.unwrap().place.starts_with("rank 2"));
}

#[test]
fn a_stall_names_the_step_and_the_rank_that_waits() {
    let id = "sequence/tiny-gqa/tp3.dcp3.h1.s1.b4.bf16.ag_rs/stall/v0+2_d0_v0+3/7";
    let engine =
        with("one-rank-keeps-out-of-the-gather-of-a-larger-step").with_timeout(Duration::from_millis(50));
    let Finding::Engine { status, text } = found(id, "sequence.collectives", &engine) else {
        panic!("it stalls")
    };
    assert_eq!(status, Status::Timeout);
    assert!(text.contains("step 3 (v0+3)") && text.contains("rank ") && text.contains("waits in"), "{text}");
}

#[test]
fn a_session_that_ends_early_is_judged_as_far_as_it_came() {
    let case: Case = REJECTED.parse().unwrap();
    let Body::Sequence(body) = &case.body else { panic!("a sequence") };
    let engine = engine();
    let material = SequenceMaterial::new(body, case.seed, engine.profile()).unwrap();
    let runs = body.steps.iter().filter(|step| matches!(step, Step::Run { .. })).count();
    assert_eq!(material.turns.len(), runs);
    let play = Play::of(&Watched::new(&engine), &material).unwrap();
    assert_eq!((play.seen.len(), play.halt.is_none()), (runs, true));
    assert!(play.caches_before(0).is_some() && play.caches_before(1).is_some());
}

/// Small single-step cases of every family that has a cache, several probes each.
fn single_steps() -> Vec<Case> {
    let mut cases = Vec::new();
    for family in
        [Family::Layout, Family::Write, Family::Decode, Family::Verify, Family::Draft, Family::Context]
    {
        for probe in [Probe::Gaussian, Probe::TokenCode, Probe::ForbiddenPoison] {
            let fits = |case: &&Case| {
                case.family == family
                    && matches!(&case.body, Body::Attention(body) if body.probe == probe
                        && body.configuration.dcp == 3 && body.workload.total_tokens() < 300)
            };
            cases.extend(suite(SuiteName::Gate, 1).iter().find(fits).cloned());
        }
    }
    cases
}

#[test]
fn single_step_properties_see_nothing_of_a_fault_that_remembers() {
    let stale: Vec<&Fault> =
        faults().iter().filter(|fault| fault.class == FaultClass::StaleMetadata).collect();
    assert!(stale.len() >= 20, "{}", stale.len());
    let cases = single_steps();
    assert!(cases.len() >= 12, "{}", cases.len());
    for case in &cases {
        let material = Material::of(case, engine().profile()).unwrap();
        for fault in &stale {
            let engine = CpuEngine::with_fault(fault);
            let laboratory = Laboratory::new(case, &engine, &material);
            for property in properties::of(case) {
                let status = property.judge(&laboratory).status();
                assert!(!status.is_failure(), "{} sees {} on {}", property.id, fault.name, case.id());
            }
        }
    }
}

#[test]
fn every_fault_that_remembers_is_killed_by_a_session_of_the_gate() {
    let stale: Vec<&Fault> =
        faults().iter().filter(|fault| fault.class == FaultClass::StaleMetadata).collect();
    let mut sequences = suite(SuiteName::Gate, 1);
    // cases of Kimi delta attention, of stacks and of compressors are several steps as well, and so are layers that share a selection
    let several = [
        Family::Sequence,
        Family::Kda,
        Family::Stack,
        Family::AttendSelected,
        Family::CompressPcp,
        Family::IndexLayers,
    ];
    sequences.retain(|case| several.contains(&case.family));
    let survivors: Vec<_> = try_all(&stale, &sequences, &|_| {})
        .into_iter()
        .filter(|mutant| mutant.state != MutantState::Killed)
        .collect();
    assert!(survivors.is_empty(), "{survivors:?}");
}

#[test]
fn every_fault_of_a_transfer_is_killed_by_the_transfer_itself() {
    let wrong: Vec<&Fault> = faults().iter().filter(|fault| fault.name.starts_with("transfer-")).collect();
    assert!(wrong.len() >= 6, "{}", wrong.len());
    for fault in wrong {
        let sequences = suite(SuiteName::Gate, 1);
        let killed = sequences.iter().filter(|case| case.id().contains("/transfer")).any(|case| {
            let found = found(&case.id(), "sequence.transfer", &CpuEngine::with_fault(fault));
            matches!(found, Finding::Broken(_))
        });
        assert!(killed, "{}", fault.name);
    }
}

const TRANSFER: &str =
    "sequence/tiny-mla/tp3.dcp3.h1.s1.b4.bf16.a2a.hi_lo.lat/transfer/v0+3_i1+21,2+5.w4.s2.b8_d0,1,2/7";

#[test]
fn a_token_that_a_transfer_loses_is_named_with_its_place() {
    let lost = failure(TRANSFER, "sequence.transfer", "transfer-loses-the-tail");
    assert!(lost.headline.contains("step 2 (i1+21,2+5.w4.s2.b8)"), "{}", lost.headline);
    assert!(lost.worst.unwrap().place.contains("position 0 of request 1"));
    let filled = failure(TRANSFER, "sequence.transfer", "transfer-fills-the-last-block");
    assert!(filled.headline.contains("no token of the source belongs there"), "{}", filled.headline);
}

const GROUPS: &str = "sequence/tiny-mla/tp3.dcp3.h1.s1.b4.bf16.a2a.hi_lo.lat~gqa2x16v12.tp3.dcp1.h2.s1.b6.bf16.ag_rs/groups/v0+13,1+5_d0,1/7";

#[test]
fn a_failure_in_the_second_kv_group_says_so_and_the_first_is_right() {
    let failure = failure(GROUPS, "sequence.group-metadata", "second-group-lengths-of-the-first");
    assert!(
        failure.headline.starts_with("step 1 (v0+13,1+5) in the second KV group:"),
        "{}",
        failure.headline
    );
    let alone = GROUPS.replace("~gqa2x16v12.tp3.dcp1.h2.s1.b6.bf16.ag_rs", "");
    for fault in faults()
        .iter()
        .filter(|fault| fault.name.contains("second-group") || fault.name.contains("the-second"))
    {
        let found = found(&alone, "sequence.output", &CpuEngine::with_fault(fault));
        assert!(matches!(found, Finding::Holds(_)), "{} shows with one group", fault.name);
    }
}

/// The embedded engine with another profile, which it answers no more and no less for.
struct Declaring(CpuEngine, Profile);

impl Declaring {
    fn without(kind: OperationKind) -> Self {
        let mut profile = engine().profile().clone();
        profile.operations.remove(&kind).expect("the engine declares it");
        Self(engine(), profile)
    }
}

impl Engine for Declaring {
    fn profile(&self) -> &Profile {
        &self.1
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        self.0.validate(rules, settings)
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        assert!(self.1.second_group || configuration.second_group.is_none(), "the engine was asked");
        self.0.open(configuration)
    }
}

#[test]
fn an_engine_that_declares_one_kv_group_is_not_asked_for_two() {
    let profile = Profile { second_group: false, ..engine().profile().clone() };
    let case: Case = GROUPS.parse().unwrap();
    let result = judge_case(&case, &Declaring(engine(), profile), &|_| true);
    assert_eq!(result.status, Status::Unsupported, "{:?}", result.checks);
}

/// What becomes of the outputs of a sequence on an engine that does not declare `missing`.
fn output_without(id: &str, missing: OperationKind) -> Finding {
    let case: Case = id.parse().unwrap_or_else(|error| panic!("{error}"));
    let result = judge_case(&case, &Declaring::without(missing), &|_| true);
    assert!(
        !result.checks.iter().any(|check| matches!(check.finding, Finding::Inconclusive(_))),
        "{:?}",
        result.checks
    );
    let output = result.checks.into_iter().find(|check| check.property == "sequence.output");
    output.unwrap_or_else(|| panic!("{id} has outputs")).finding
}

#[test]
fn a_step_that_the_engine_does_not_declare_is_unsupported_and_not_undecided() {
    let Finding::Unsupported(why) = output_without(REJECTED, OperationKind::Verify) else {
        panic!("judged");
    };
    assert!(why.contains("does not declare verify"), "{why}");
}

#[test]
fn a_verification_of_one_row_a_request_is_judged_as_the_decode_that_the_engine_is_asked_for() {
    const ONE_ROW: &str =
        "sequence/tiny-mla/tp3.dcp3.h1.s2.b4.bf16.a2a.hi_lo.lat/rejected/v0+1,1+1_d0,1_v0+1.pad2/7";
    assert!(matches!(output_without(ONE_ROW, OperationKind::Verify), Finding::Holds(_)));
    let Finding::Unsupported(why) = output_without(ONE_ROW, OperationKind::Decode) else { panic!("judged") };
    assert!(why.contains("does not declare decode"), "{why}");
}

#[test]
fn every_fault_that_remembers_names_properties_of_sessions_alone() {
    for fault in faults().iter().filter(|fault| fault.class == FaultClass::StaleMetadata) {
        let of_sessions = |id: &&str| {
            ["sequence.", "kda.", "stack.", "compress.", "sharing."].iter().any(|of| id.starts_with(of))
                || *id == "selected.shared"
        };
        assert!(fault.killed_by.iter().all(of_sessions), "{}", fault.name);
    }
}
