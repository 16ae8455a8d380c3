//! For one fault of each kind, the stage that is named is the one that the fault spoils.

use super::*;
use shardcheck_cases::{Case, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, fault};
use shardcheck_engine::LseBase;

use crate::finding::{Failure, Finding};
use crate::properties::{self, Property};
use crate::run::{has_real_heads, judge_case};

/// The failure of `property` on the first case of the gate on which `fault_name` breaks it.
fn failure(fault_name: &str, property_id: &str) -> (String, Failure) {
    let engine = CpuEngine::with_fault(fault(fault_name).unwrap_or_else(|| panic!("no fault {fault_name}")));
    let property = properties::find(property_id).unwrap_or_else(|| panic!("no property {property_id}"));
    let only = |other: &Property| other.id == property_id;
    suite(SuiteName::Gate, 1)
        .iter()
        .filter(|case| property.is_for(case) && !has_real_heads(case))
        .find_map(|case| match judge_case(case, &engine, &only).checks.pop()?.finding {
            Finding::Broken(failure) => Some((case.id(), *failure)),
            _ => None,
        })
        .unwrap_or_else(|| panic!("{fault_name} does not break {property_id}"))
}

#[test]
fn the_first_stage_that_diverges_is_the_one_that_the_fault_spoils() {
    for (fault, property, stage) in [
        ("owner-rotated", "layout.slots", Stage::Layout),
        ("length-of-full-round", "decode.output", Stage::RowBound),
        ("committed-prefix-rows", "verify.output", Stage::RowBound),
        ("draft-block-causal", "draft.output", Stage::RowBound),
        ("written-by-the-next-rank", "decode.output", Stage::Write),
        ("scale-ignored-on-write", "decode.output", Stage::Write),
        ("gathered-query-not-transposed", "decode.output", Stage::Query),
        ("query-gathered-in-reverse", "verify.output", Stage::Query),
        ("last-chunk-skipped", "context.output", Stage::Gather),
        ("reorg-forgets-earlier-requests", "context.output", Stage::Gather),
        ("score-scale-of-latent-width", "decode.output", Stage::Partial),
        ("lse-base-2-as-natural", "decode.output", Stage::Partial),
        ("scale-ignored-on-read", "verify.output", Stage::Partial),
        ("query-replication-claimed", "dispatch.observed", Stage::Exchange),
        ("weights-not-normalised", "decode.output", Stage::Merge),
        ("ranks-averaged", "verify.output", Stage::Merge),
        ("suffix-merged-twice", "context.output", Stage::Merge),
        ("padding-output-unwritten", "attend.padding", Stage::Output),
        ("query-replication-silently-off", "dispatch.path", Stage::Configuration),
    ] {
        let (id, failure) = failure(fault, property);
        assert_eq!(failure.stage, Some(stage), "{fault} seen by {property} on {id}: {failure:?}");
    }
}

#[test]
fn a_failed_output_lists_its_rows_and_what_a_fixed_tolerance_would_have_said() {
    let (_, failure) = failure("committed-prefix-rows", "verify.output");
    let [rows, rule] = &failure.notes[..2] else { panic!("{:?}", failure.notes) };
    assert!(rows.starts_with("rows concerned: request "), "{rows}");
    assert!(rule.contains("atol = rtol = 3e-2") && rule.contains("largest difference"), "{rule}");
    let worst = failure.worst.unwrap();
    assert!(
        rows.contains(
            &worst.place[worst.place.find("request").unwrap()..worst.place.find(", head").unwrap()]
        )
    );
}

#[test]
fn many_rows_are_counted_and_not_listed_all() {
    let case: Case =
        "verify/tiny-mla/tp2.dcp2.h2.s2.b8.n20.bf16.ag_rs/12+4x4.seq/gaussian/7".parse().unwrap();
    let Ok(crate::material::Material::Attention(material)) =
        crate::material::Material::of(&case, shardcheck_engine::Engine::profile(&shardcheck_cpu::engine()))
    else {
        panic!("an attention case")
    };
    let seen = vec![1.0; 2 * 16 * 3];
    let comparison = Comparison::all("out", &seen, &vec![Allowed::Exactly(0.0); seen.len()]);
    let lines = notes(&material, &comparison, 3);
    assert_eq!(lines[0].matches("request").count(), 8);
    assert!(lines[0].ends_with("and 8 more"), "{}", lines[0]);
    assert!(
        lines[1].contains("96 of 96 elements outside (100.00 %); largest difference 1.0000"),
        "{}",
        lines[1]
    );
}

#[test]
fn a_healthy_engine_diverges_nowhere() {
    let case: Case =
        "verify/tiny-mla/tp4.dcp2.h2.s2.b8.n14.e4m3fn@0.5.ag_rs/12+3_0+0_7+2.pad2.shuf/gaussian/7"
            .parse()
            .unwrap();
    let engine = shardcheck_cpu::engine();
    let material = crate::material::Material::of(&case, shardcheck_engine::Engine::profile(&engine)).unwrap();
    let laboratory = Laboratory::new(&case, &engine, &material);
    for last in [Stage::Merge, Stage::Output] {
        assert_eq!(stage_of(&laboratory, last), last);
    }
    let (material, observed) = (laboratory.attention(), laboratory.observed().unwrap());
    for comparison in [
        row_lengths(material, observed),
        gathered_query(material, observed),
        partial_lse(material, observed),
        partial_output(material, observed),
    ] {
        let comparison = comparison.unwrap();
        assert!(comparison.holds() && comparison.measured().compared > 0);
    }
}

#[test]
fn a_partial_lse_in_base_2_is_compared_as_a_natural_one() {
    let case: Case = "decode/tiny-mla/tp2.dcp2.h2.s2.b8.n6.bf16.ag_rs/12+1.seq/gaussian/7".parse().unwrap();
    let engine = shardcheck_cpu::engine();
    let mut profile = shardcheck_engine::Engine::profile(&engine).clone();
    let natural = crate::material::Material::of(&case, &profile).unwrap();
    let decode = profile.operations.get_mut(&shardcheck_engine::OperationKind::Decode).unwrap();
    decode.conventions.lse_base = LseBase::Two;
    let base_2 = crate::material::Material::of(&case, &profile).unwrap();
    let laboratory = Laboratory::new(&case, &engine, &natural);
    let observed = laboratory.observed().unwrap();
    let e = natural_partial_lse(laboratory.attention(), observed).unwrap();
    let other = Laboratory::new(&case, &engine, &base_2);
    let two = natural_partial_lse(other.attention(), observed).unwrap();
    assert!(e.iter().zip(&two).all(|(e, two)| (e * std::f64::consts::LN_2 - two).abs() < 1e-12));
    assert!(
        !partial_lse(other.attention(), observed).unwrap().holds(),
        "an engine that declares the wrong base"
    );
}
