//! Cases as text: ids, JSON, and the error that each mistake gives.

use proptest::prelude::*;
use serde_json::{Value, json};
use shardcheck_cases::{Case, CaseError, Family, MAX_REQUESTS, MergeCase, SuiteName, default_blocks, suite};
use shardcheck_engine::{Mask, Operation, OperationKind};

const VERIFY: &str = "verify/tiny-mla/tp4.dcp4.h2.s2.b8.n12.e4m3fn@0.02.a2a.lo_hi.qrep.pbm.k16+32/12+3_0+0_7+3.pad2.shuf/newest-dominant/7";

fn value() -> Value {
    serde_json::from_str(&VERIFY.parse::<Case>().unwrap().to_json()).unwrap()
}

fn read(value: &Value) -> Result<Case, CaseError> {
    Case::from_json(&value.to_string())
}

/// The text of the out-of-range error that a change to the verify case gives.
fn out_of_range(change: impl Fn(&mut Value)) -> String {
    let mut value = value();
    change(&mut value);
    match read(&value) {
        Err(CaseError::OutOfRange(reason)) => reason,
        other => panic!("{other:?} should be out of range"),
    }
}

#[test]
fn an_id_says_everything_and_reads_back() {
    let case: Case = VERIFY.parse().unwrap();
    assert_eq!(case.id(), VERIFY);
    let configuration = case.configuration().unwrap();
    assert_eq!((configuration.tp, configuration.dcp, configuration.blocks), (4, 4, 12));
    assert_eq!((configuration.kv_scale, configuration.kernel_head_widths.as_slice()), (0.02, &[16, 32][..]));
    assert!(configuration.query_replication && configuration.project_before_merge);
    assert_eq!(case.operation(), Some(Operation::Attend { mask: Mask::Causal }));
    assert_eq!(case.seed, 7);
}

#[test]
fn equal_requests_are_counted_and_an_id_that_repeats_them_is_refused_with_the_right_one() {
    let repeated = "decode/tiny-gqa/tp1.dcp1.h2.s1.b4.bf16.ag_rs/3+1_3+1_3+1_0+1.seq/gaussian/1";
    let Err(CaseError::Spelling { right, .. }) = repeated.parse::<Case>() else { panic!("it is taken") };
    assert!(right.contains("/3+1x3_0+1.seq/"), "{right}");
    assert_eq!(right.parse::<Case>().unwrap().id(), right);
}

#[test]
fn a_number_has_one_spelling_and_tokens_have_one_order() {
    for (from, to) in [
        ("tp4", "tp04"),
        ("tp4", "tp+4"),
        ("tp4.dcp4", "dcp4.tp4"),
        ("@0.02", "@2e-2"),
        ("/7", "/007"),
        ("n12", "n012"),
    ] {
        let other = VERIFY.replacen(from, to, 1);
        match other.parse::<Case>() {
            Err(error @ CaseError::Spelling { .. }) => assert!(error.to_string().contains(VERIFY), "{error}"),
            read => panic!("{other}: {read:?}"),
        }
    }
    // the one thing that may be left out: two virtual blocks that are needed, two that stay free, and the null block
    let without = VERIFY.replacen(".n12", "", 1).parse::<Case>().unwrap();
    assert_eq!(without.configuration().unwrap().blocks, 5);
}

#[test]
fn without_a_number_of_blocks_there_are_enough_and_some_to_spare() {
    let case: Case = "decode/tiny-gqa/tp2.dcp2.h2.s1.b4.bf16.ag_rs/15+1_16+1.seq/gaussian/1".parse().unwrap();
    // 2 + 3 virtual blocks of 8 tokens, the null block, two that stay free
    assert_eq!(case.configuration().unwrap().blocks, 8);
    let Some(inputs) = case.inputs() else { panic!("an attention case has inputs") };
    assert_eq!(default_blocks(&inputs.case.workload, 8), 8);
}

#[test]
fn a_custom_model_spells_its_shape_and_its_scale() {
    let id = "verify/custom/mla512+64v128.sm0.041666668.tp2.dcp2.h48.s1.b128.n5.e4m3fn@0.02.a2a.lo_hi.lat/256+3.seq/gaussian/1";
    let case: Case = id.parse().unwrap();
    assert_eq!(case.id(), id);
    assert_eq!(case.configuration().unwrap().softmax_scale, 1.0 / 24.0);
    let shapeless = id.replace("mla512+64v128.", "");
    assert!(shapeless.parse::<Case>().unwrap_err().to_string().contains("needs its shape"));
}

#[test]
fn a_model_whose_shape_was_changed_still_has_an_id_of_its_own() {
    let mut value = value();
    value["body"]["attention"]["configuration"]["attention"]["v_head_dim"] = json!(20);
    value["body"]["attention"]["configuration"]["softmax_scale"] = json!(0.125);
    let case = read(&value).unwrap();
    assert!(case.id().contains("mla16+8v20.sm0.125."), "{}", case.id());
    assert_eq!(case.id().parse::<Case>().unwrap(), case);
}

#[test]
fn merge_ids_read_back_and_open_sessions_of_their_own_size() {
    let id = "merge_partials/w3.t4.h2.d16.bf16.a2a.hi_lo/some_empty/sliced/7";
    let case: Case = id.parse().unwrap();
    assert_eq!(case.id(), id);
    let configuration = case.configuration().unwrap();
    configuration.check().unwrap();
    assert_eq!((configuration.tp, configuration.dcp, configuration.gathered_heads()), (3, 3, 6));
    let states: Case = "merge_states/w2.t4.h3.d8.f32.a2a.hi_lo/random/contiguous/7".parse().unwrap();
    let configuration = states.configuration().unwrap();
    configuration.check().unwrap();
    assert_eq!((configuration.tp, configuration.total_heads()), (1, 3));
    let segments: Case = "merge_segments/w4.t4.h3.d8.f32.a2a.hi_lo/random/contiguous/7".parse().unwrap();
    assert_eq!(segments.operation(), Some(Operation::MergeSegments { tile_tokens: MergeCase::TILE_TOKENS }));
}

#[test]
fn rule_ids_are_found_by_name() {
    let case: Case = "rules/atom/the_string_false_is_true".parse().unwrap();
    assert_eq!(case.id(), "rules/atom/the_string_false_is_true");
    assert!(case.operation().is_none() && case.configuration().is_none());
    let error = "rules/atom/no_such_rule".parse::<Case>().unwrap_err().to_string();
    assert!(error.contains("no_such_rule"), "{error}");
}

#[test]
fn every_family_names_the_operation_that_it_is_about() {
    let operations: Vec<OperationKind> = Family::ALL.into_iter().filter_map(Family::operation).collect();
    // sequences are of several, rules of none
    assert_eq!(operations.len(), Family::ALL.len() - 2);
    for family in Family::ALL {
        assert!(!(family.is_attention() && family.is_merge()));
        let has_step = family.is_attention()
            || family.is_merge()
            || matches!(
                family,
                Family::Pcp
                    | Family::AttendPcp
                    | Family::SelectPcp
                    | Family::CompressPcp
                    | Family::Acceptance
                    | Family::SelectSparse
                    | Family::IndexLayers
                    | Family::Kda
                    | Family::Stack
                    | Family::Route
                    | Family::Moe
            );
        assert_eq!(family.operation().is_some(), has_step);
        assert_eq!(family.name().parse::<Family>().unwrap(), family);
    }
}

#[test]
fn a_sequence_comes_back_from_its_id_and_from_its_json() {
    let id = "sequence/tiny-mla/tp3.dcp3.h1.s2.b4.n5.bf16.a2a.hi_lo.lat/rejected/p0+9.c12_v0+4.pad4_r0-3_v0+2.pad2/7";
    let case: Case = id.parse().unwrap();
    assert_eq!(case.id(), id);
    assert_eq!(Case::from_json(&case.to_json()).unwrap(), case);
    assert!(case.operation().is_none() && case.configuration().is_some());
    // as many blocks as the steps need at once, and the null block
    let least: Case = id.replace(".n5", "").parse().unwrap();
    assert_eq!(least.configuration().unwrap().blocks, 3);
}

#[test]
fn a_sequence_that_cannot_be_taken_is_refused_with_its_step() {
    let id = |steps: &str| format!("sequence/tiny-mla/tp2.dcp2.h1.s1.b4.n3.bf16.ag_rs.lat/x/{steps}/7");
    for (steps, expected) in [
        ("v0+4_r0-5", "step 2"),
        ("v0+40", "none is free"),
        ("v0+8_h1=0x1_r0-3_v0+1", "shared block"),
        ("d0+2", "decode has one row"),
        ("d0+0", "query rows"),
        ("f0", "no request 0"),
        ("q0+1", "is no step"),
        ("i0+20000.w3.s1.b8", "16384 tokens in all"),
    ] {
        let error = id(steps).parse::<Case>().unwrap_err().to_string();
        assert!(error.contains(expected), "{steps}: {error}");
    }
    let error = id("v0+4").replace("/x/", "/X y/").parse::<Case>().unwrap_err().to_string();
    assert!(error.contains("a-z"), "{error}");
}

#[test]
fn each_mistake_in_an_id_is_named() {
    for (id, expected) in [
        ("verifie/x", "unknown family"),
        ("verify/tiny-mla/tp4", "6"),
        (&VERIFY.replace("tiny-mla", "tiny-nla"), "unknown model"),
        (&VERIFY.replace("newest-dominant", "newest"), "forbidden-poison"),
        (&VERIFY.replace("tp4.", ""), "\"tp\""),
        (&VERIFY.replace(".a2a.lo_hi", ""), "exchange"),
        (&VERIFY.replace(".lo_hi", ""), "lane order"),
        (&VERIFY.replace("e4m3fn@0.02", "e4m4"), "cache format"),
        (&VERIFY.replace(".qrep", ".qrep.qrep"), "\"qrep\""),
        (&VERIFY.replace(".pbm", ".pdm"), "\"pdm\""),
        (&VERIFY.replace("12+3", "12-3"), "CONTEXT+ROWS"),
        (&VERIFY.replace(".shuf", ""), "placement"),
        (&VERIFY.replace("/7", "/-7"), "seed"),
        (&VERIFY.replace("12+3", "99999999999+3"), "longer than"),
        (&VERIFY.replace("12+3", "12+3x5000"), "requests alike"),
        ("merge_states/w2.t4.h3.d8.f32.a2a.hi_lo/rando/contiguous/7", "unknown merge pattern"),
        ("merge_states/w2.t4.h3.d8.f32.a2a.hi_lo/random/strided/7", "unknown view"),
        ("rules/atomic/x", "unknown rule set"),
    ] {
        let error = id.parse::<Case>().unwrap_err();
        assert!(matches!(error, CaseError::Id { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error} should contain {expected}");
    }
}

#[test]
fn what_is_no_case_is_malformed() {
    for text in
        ["", "{", "[]", "{}", "7", "\"verify\"", "{\"schema_version\": \"1\"}", "{\"schema_version\": 1}"]
    {
        assert!(matches!(Case::from_json(text), Err(CaseError::Malformed(_))), "{text}");
    }
    let mut missing = value();
    missing["body"]["attention"]["workload"].as_object_mut().unwrap().remove("requests");
    assert!(matches!(read(&missing), Err(CaseError::Malformed(text)) if text.contains("requests")));
    let mut wrong_type = value();
    wrong_type["body"]["attention"]["configuration"]["tp"] = json!("four");
    assert!(matches!(read(&wrong_type), Err(CaseError::Malformed(_))));
    let mut negative = value();
    negative["body"]["attention"]["workload"]["requests"][0]["context_tokens"] = json!(-1);
    assert!(matches!(read(&negative), Err(CaseError::Malformed(_))));
}

#[test]
fn another_schema_version_is_refused_by_number() {
    let mut value = value();
    value["schema_version"] = json!(2);
    // also when nothing else can be understood
    value["body"] = json!("something new");
    assert_eq!(read(&value), Err(CaseError::Version { found: 2 }));
}

#[test]
fn an_unknown_name_is_told_from_a_malformed_case_and_names_the_valid_ones() {
    for (path, name, expected) in [
        ("/body/attention/probe", "gausian", "gaussian"),
        ("/family", "verification", "verify"),
        ("/body/attention/configuration/kv_dtype", "fp8", "e4m3fn"),
        ("/body/attention/configuration/comm_backend", "nccl", "ag_rs"),
        ("/body/attention/configuration/lane_order", "hilo", "hi_lo"),
        ("/body/attention/configuration/attention/kind", "mqa", "gqa"),
        ("/body/attention/workload/placement", "random", "shuffled"),
        ("/body/attention/model", "deepseek-r9", "deepseek-r1"),
    ] {
        let mut value = value();
        *value.pointer_mut(path).unwrap() = json!(name);
        match read(&value) {
            Err(CaseError::UnknownValue(text)) => {
                assert!(text.contains(name) && text.contains(expected), "{text}")
            }
            other => panic!("{path}: {other:?}"),
        }
    }
}

#[test]
fn an_unknown_field_is_refused_so_that_a_typo_cannot_be_ignored() {
    for path in ["", "/body/attention", "/body/attention/workload", "/body/attention/configuration"] {
        let mut value = value();
        value.pointer_mut(path).unwrap()["interleaved"] = json!(1);
        assert!(
            matches!(read(&value), Err(CaseError::Malformed(text)) if text.contains("interleaved")),
            "{path}"
        );
    }
}

#[test]
fn an_interleave_above_the_block_and_one_that_does_not_divide_it_are_out_of_range() {
    let set = |interleave: usize| {
        move |value: &mut Value| value["body"]["attention"]["configuration"]["interleave"] = json!(interleave)
    };
    assert!(out_of_range(set(16)).contains("larger than the block size"));
    assert!(out_of_range(set(3)).contains("not a multiple of interleave"));
    assert!(out_of_range(set(0)).contains("interleave is 0"));
}

#[test]
fn every_contradiction_between_parts_is_out_of_range() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 17] = [
        (|v| v["body"]["attention"]["configuration"]["dcp"] = json!(3), "does not divide tp"),
        (|v| v["body"]["attention"]["configuration"]["blocks"] = json!(2), "2 blocks for 2 needed ones"),
        (|v| v["body"]["attention"]["configuration"]["kv_dtype"] = json!("bf16"), "kv_scale 1"),
        (|v| v["body"]["attention"]["latent_output"] = json!(true), "project-before-merge"),
        (|v| v["body"]["attention"]["workload"]["requests"] = json!([]), "0 requests"),
        (|v| v["family"] = json!("decode"), "one row a request"),
        (|v| v["family"] = json!("merge_states"), "does not go with an attention body"),
        (|v| v["family"] = json!("rules"), "does not go with an attention body"),
        (|v| v["family"] = json!("context"), "chunk budget"),
        (|v| v["body"]["attention"]["configuration"]["tp"] = json!(1024), "1024 ranks"),
        (
            |v| v["body"]["attention"]["configuration"]["kernel_head_widths"] = json!([0]),
            "kernel head widths",
        ),
        (|v| v["body"]["attention"]["configuration"]["softmax_scale"] = json!(0.0), "softmax_scale"),
        (|v| v["body"]["attention"]["configuration"]["attention"]["v_head_dim"] = json!(0), "between 1 and"),
        (
            |v| v["body"]["attention"]["configuration"]["attention"]["kv_lora_rank"] = json!(u64::MAX),
            "between 1 and",
        ),
        (|v| v["body"]["attention"]["workload"]["padded_rows"] = json!(1_000_000), "query rows"),
        (
            |v| v["body"]["attention"]["workload"]["requests"][0]["context_tokens"] = json!(1 << 21),
            "tokens in all requests",
        ),
        (
            |v| v["body"]["attention"]["workload"]["requests"][0]["query_tokens"] = json!(u64::MAX),
            "tokens in all requests",
        ),
    ];
    for (change, expected) in cases {
        let reason = out_of_range(change);
        assert!(reason.contains(expected), "{reason} should contain {expected}");
    }
}

#[test]
fn too_many_requests_are_out_of_range() {
    let reason = out_of_range(|value| {
        let request = json!({"context_tokens": 0, "query_tokens": 0});
        value["body"]["attention"]["workload"]["requests"] = Value::Array(vec![request; MAX_REQUESTS + 1]);
    });
    assert!(reason.contains("4097 requests"), "{reason}");
}

#[test]
fn a_cache_that_no_machine_holds_is_out_of_range() {
    let reason = out_of_range(|value| value["body"]["attention"]["configuration"]["blocks"] = json!(1 << 24));
    assert!(reason.contains("the cache of shape"), "{reason}");
}

#[test]
fn shared_rows_that_no_machine_can_judge_are_out_of_range() {
    let id = "attend_pcp/round_robin.p4.split/0+9_37+8/tiny-mla/tp2.dcp2.h65536.s4.b8.n10.bf16.ag_rs/shuf.e4m3fn@0.25/hot/1";
    match id.parse::<Case>() {
        Err(CaseError::OutOfRange(reason)) => assert!(reason.contains("2^26"), "{reason}"),
        other => panic!("{other:?}"),
    }
    let smaller = id.replace("h65536", "h64");
    assert_eq!(smaller.parse::<Case>().unwrap().id(), smaller);
}

#[test]
fn merges_that_make_no_sense_are_out_of_range() {
    for (id, expected) in [
        ("merge_states/w3.t4.h3.d8.f32.a2a.hi_lo/random/contiguous/7", "merges 2 states"),
        ("merge_states/w2.t4.h3.d8.f32.a2a.hi_lo/nan_halves/contiguous/7", "does not go with"),
        ("merge_segments/w3.t4.h3.d8.bf16.a2a.hi_lo/random/contiguous/7", "segments are f32"),
        ("merge_segments/w3.t4.h3.d8.f32.a2a.hi_lo/random/sliced/7", "contiguous"),
        ("merge_partials/w3.t4.h3.d8.e5m2.a2a.hi_lo/random/sliced/7", "f32, bf16 or f16"),
        ("merge_partials/w3.t4.h3.d8.bf16.a2a.hi_lo/extremes/sliced/7", "are those of f16"),
        ("merge_partials/w0.t4.h3.d8.bf16.a2a.hi_lo/random/sliced/7", "world is 0"),
        ("merge_partials/w256.t65536.h4096.d4096.bf16.a2a.hi_lo/random/sliced/7", "2^31"),
    ] {
        match id.parse::<Case>() {
            Err(CaseError::OutOfRange(reason)) => assert!(reason.contains(expected), "{reason}"),
            other => panic!("{id}: {other:?}"),
        }
    }
}

#[test]
fn every_error_says_what_to_do() {
    let errors = [
        CaseError::Malformed("x".to_owned()),
        CaseError::Version { found: 9 },
        CaseError::Id { id: "x".to_owned(), reason: "y".to_owned() },
    ];
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("shardcheck") || text.contains("export it again"), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Ids and JSON come from users and files.
    #[test]
    fn a_mangled_id_is_an_error_or_a_case_that_reads_back_and_never_a_panic(
        pick in 0usize..2000, at in 0usize..200, replacement in "[a-z0-9./+_x@-]{0,4}", remove in 0usize..4,
    ) {
        let cases = suite(SuiteName::MustPass, 1);
        let mut id = cases[pick % cases.len()].id();
        let start = at % id.len();
        let end = (start + remove).min(id.len());
        id.replace_range(start..end, &replacement);
        if let Ok(case) = id.parse::<Case>() {
            prop_assert_eq!(case.id().parse::<Case>().unwrap(), case.clone());
            prop_assert_eq!(Case::from_json(&case.to_json()).unwrap(), case);
        }
    }
}
