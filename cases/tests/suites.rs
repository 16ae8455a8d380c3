//! Suites: round trips of every case, sizes, and what must be in them.

use std::collections::HashSet;

use shardcheck_cases::{Body, CUSTOM_MODEL, Case, Family, MergePattern, Model, Probe, SuiteName, suite};
use shardcheck_engine::RuleSetName;

fn attention(case: &Case) -> Option<&shardcheck_cases::AttentionCase> {
    match &case.body {
        Body::Attention(body) => Some(body),
        _ => None,
    }
}

fn is_real(case: &Case) -> bool {
    attention(case)
        .is_some_and(|body| body.model == CUSTOM_MODEL || !Model::find(&body.model).unwrap().is_tiny())
}

#[test]
fn every_case_of_every_suite_is_valid_and_comes_back_from_its_id() {
    for name in SuiteName::ALL {
        for case in suite(name, 1) {
            case.check().unwrap_or_else(|error| panic!("{name} {}: {error}", case.id()));
            let id = case.id();
            let back: Case = id.parse().unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(back, case, "{id}");
            assert_eq!(back.id(), id);
        }
    }
}

#[test]
fn every_case_of_the_gate_survives_json() {
    for case in suite(SuiteName::Gate, 2).iter().chain(&suite(SuiteName::Seeds, 2)) {
        assert_eq!(Case::from_json(&case.to_json()).as_ref(), Ok(case), "{}", case.id());
    }
}

#[test]
fn no_two_cases_of_a_suite_have_the_same_id() {
    for name in SuiteName::ALL {
        let cases = suite(name, 1);
        let ids: HashSet<String> = cases.iter().map(Case::id).collect();
        assert_eq!(ids.len(), cases.len(), "{name}");
    }
}

#[test]
fn the_same_seed_gives_the_same_cases_and_another_seed_others() {
    for name in SuiteName::ALL {
        assert_eq!(suite(name, 7), suite(name, 7), "{name}");
        assert_ne!(suite(name, 7), suite(name, 8), "{name}");
    }
}

#[test]
fn the_gate_keeps_its_size_for_every_seed() {
    for seed in [0, 1, 2, 99, u64::MAX] {
        let cases = suite(SuiteName::Gate, seed);
        assert!((2200..=3000).contains(&cases.len()), "seed {seed}: {} cases", cases.len());
        let real = cases.iter().filter(|case| is_real(case)).count();
        assert!((30..=60).contains(&real), "seed {seed}: {real} real");
    }
}

#[test]
fn families_of_the_gate_have_their_shares() {
    let cases = suite(SuiteName::Gate, 1);
    for (family, least) in [
        (Family::Layout, 280),
        (Family::Pcp, 90),
        (Family::AttendPcp, 36),
        (Family::SelectPcp, 36),
        (Family::CompressPcp, 40),
        (Family::Acceptance, 45),
        (Family::SelectSparse, 45),
        (Family::AttendSelected, 18),
        (Family::AttendSinks, 24),
        (Family::IndexLayers, 60),
        (Family::Kda, 20),
        (Family::Write, 140),
        (Family::PackLse, 20),
        (Family::MergeStates, 90),
        (Family::MergeSegments, 60),
        (Family::MergePartials, 200),
        (Family::Decode, 350),
        (Family::Verify, 350),
        (Family::Draft, 110),
        (Family::Context, 240),
        (Family::Route, 40),
        (Family::Moe, 48),
        (Family::Sequence, 70),
        (Family::Stack, 11),
        (Family::Rules, 120),
    ] {
        let count = cases.iter().filter(|case| case.family == family).count();
        assert!(count >= least, "{family}: {count}");
    }
}

#[test]
fn tiny_cases_of_the_gate_are_tiny() {
    for case in suite(SuiteName::Gate, 1).iter().filter(|case| !is_real(case)) {
        let Some(body) = attention(case) else { continue };
        if matches!(case.family, Family::Layout | Family::Write) {
            continue;
        }
        let configuration = &body.configuration;
        assert!(configuration.total_heads() <= 16, "{}", case.id());
        assert!(configuration.attention.qk_dim() <= 32 && configuration.attention.v_head_dim() <= 32);
        let longest = body.workload.requests.iter().map(|request| request.seq_len()).max().unwrap();
        assert!(longest <= 190, "{}: {longest} tokens", case.id());
    }
}

#[test]
fn real_cases_of_the_gate_are_short() {
    for case in suite(SuiteName::Gate, 1).iter().filter(|case| is_real(case)) {
        let body = attention(case).unwrap();
        let longest = body.workload.requests.iter().map(|request| request.seq_len()).max().unwrap();
        assert!(longest <= 300, "{}: {longest} tokens", case.id());
    }
}

#[test]
fn every_probe_meets_every_attention_family_in_the_gate() {
    let cases = suite(SuiteName::Gate, 1);
    for family in [Family::Decode, Family::Verify, Family::Draft, Family::Context] {
        for probe in Probe::ALL {
            let tiny = cases.iter().filter(|case| case.family == family && !is_real(case));
            let count = tiny.filter(|case| attention(case).unwrap().probe == probe).count();
            assert!(count >= 3, "{family} {probe}: {count}");
        }
    }
}

#[test]
fn every_world_size_meets_every_attention_family_in_the_gate() {
    let cases = suite(SuiteName::Gate, 1);
    for family in
        [Family::Layout, Family::Write, Family::Decode, Family::Verify, Family::Draft, Family::Context]
    {
        for dcp in [1, 2, 3, 4, 5, 6, 8, 16] {
            let found = cases.iter().filter(|case| case.family == family);
            assert!(
                found.clone().any(|case| attention(case).unwrap().configuration.dcp == dcp),
                "{family} W={dcp}"
            );
        }
    }
}

#[test]
fn every_merge_pattern_and_every_rule_set_is_in_the_gate() {
    let cases = suite(SuiteName::Gate, 1);
    for pattern in MergePattern::ALL {
        assert!(cases.iter().any(|case| matches!(&case.body, Body::Merge(body) if body.pattern == pattern)));
    }
    for set in RuleSetName::ALL {
        assert!(
            cases.iter().any(|case| matches!(&case.body, Body::Rules(body) if body.rules == set)),
            "{set}"
        );
    }
}

#[test]
fn the_gate_has_the_edges_of_the_layout() {
    let cases = suite(SuiteName::Gate, 1);
    let bodies = || cases.iter().filter_map(attention);
    let has = |what: &str, edge: &dyn Fn(&shardcheck_cases::AttentionCase) -> bool| {
        assert!(bodies().any(edge), "no case: {what}");
    };
    has("an empty shard", &|b| {
        let c = &b.configuration;
        b.workload.requests.iter().any(|r| r.seq_len() > 0 && r.seq_len() < c.dcp * c.interleave)
    });
    has("a request of length zero between two others", &|b| {
        let lens: Vec<usize> = b.workload.requests.iter().map(|r| r.seq_len()).collect();
        lens.windows(3).any(|w| w[0] > 0 && w[1] == 0 && w[2] > 0)
    });
    has("a length that is a multiple of W", &|b| {
        b.configuration.dcp > 1
            && b.workload.requests.iter().any(|r| r.seq_len() > 0 && r.seq_len() % b.configuration.dcp == 0)
    });
    has("a whole virtual block", &|b| {
        let block = b.configuration.virtual_block_tokens();
        b.configuration.dcp > 1 && b.workload.requests.iter().any(|r| r.seq_len() == block)
    });
    has("S = B above 1 over several ranks", &|b| {
        b.configuration.dcp > 1 && b.configuration.interleave == b.configuration.block_size
    });
    has("rows of different number in one batch", &|b| {
        let rows: HashSet<usize> =
            b.workload.requests.iter().map(|r| r.query_tokens).filter(|rows| *rows > 0).collect();
        rows.len() > 1
    });
    has("several groups of a world size that is no power of two", &|b| {
        b.configuration.tp > b.configuration.dcp && !b.configuration.dcp.is_power_of_two()
    });
    has("gathered heads that a kernel pads", &|b| {
        let widths = &b.configuration.kernel_head_widths;
        !widths.is_empty() && !widths.contains(&b.configuration.gathered_heads())
    });
}

#[test]
fn no_eight_bit_suite_case_knows_the_scale_one_alone() {
    let cases = suite(SuiteName::Gate, 1);
    for dtype in ["e4m3fn", "e4m3fnuz", "e5m2"] {
        let scales: HashSet<String> = cases
            .iter()
            .filter_map(attention)
            .filter(|body| body.configuration.kv_dtype.name() == dtype)
            .map(|body| body.configuration.kv_scale.to_string())
            .collect();
        assert!(scales.len() >= 2 && scales.iter().any(|scale| scale != "1"), "{dtype}: {scales:?}");
    }
}

#[test]
fn the_nightly_suite_is_a_few_gates_with_longer_contexts_and_more_real_shapes() {
    let (gate, nightly) = (suite(SuiteName::Gate, 1), suite(SuiteName::Nightly, 1));
    assert!(nightly.len() > 2 * gate.len() && nightly.len() < 5 * gate.len(), "{}", nightly.len());
    let longest = |cases: &[Case]| {
        let decode = cases.iter().filter(|case| case.family == Family::Decode).filter_map(attention);
        decode.flat_map(|body| &body.workload.requests).map(|request| request.seq_len()).max()
    };
    assert!(longest(&nightly) > longest(&gate));
    let real = nightly.iter().filter(|case| is_real(case)).count();
    assert!((120..=200).contains(&real), "{real}");
}

#[test]
fn the_smoke_suite_is_small_in_cases_and_in_heads() {
    for seed in [1, 2, 3] {
        let cases = suite(SuiteName::EngineSmoke, seed);
        assert!((40..=144).contains(&cases.len()), "{} cases", cases.len());
        for body in cases.iter().filter_map(attention) {
            let (c, requests) = (&body.configuration, body.workload.requests.len());
            assert!(requests * c.heads_per_rank * c.dcp <= 64 && c.tp == c.dcp);
        }
        for family in
            [Family::Layout, Family::Write, Family::Decode, Family::Verify, Family::Draft, Family::Context]
        {
            assert!(cases.iter().any(|case| case.family == family), "{family}");
        }
    }
}

#[test]
fn the_seed_suite_has_the_reported_configurations() {
    let cases = suite(SuiteName::Seeds, 1);
    assert!((40..=80).contains(&cases.len()), "{}", cases.len());
    assert!(cases.iter().all(is_real));
    let has =
        |what: &str, wanted: &dyn Fn(&Case) -> bool| assert!(cases.iter().any(wanted), "no case: {what}");
    for dcp in [2, 4, 8] {
        for rows in 1..=4 {
            for eight_bit in [false, true] {
                has(&format!("DeepSeek-R1 dcp {dcp} with {rows} rows, 8 bit {eight_bit}"), &|case| {
                    let body = attention(case).unwrap();
                    let c = &body.configuration;
                    body.model == "deepseek-r1"
                        && (c.tp, c.dcp, c.heads_per_rank, c.kv_dtype.is_fp8()) == (8, dcp, 16, eight_bit)
                        && body.workload.max_query_tokens() == rows
                        && case.family == if rows == 1 { Family::Decode } else { Family::Verify }
                });
            }
        }
    }
    for (family, rows) in [(Family::Draft, 2), (Family::Draft, 4), (Family::Verify, 3), (Family::Verify, 5)] {
        has(&format!("Kimi-K3 {family} of {rows} rows"), &|case| {
            let body = attention(case).unwrap();
            let rows_match = body.workload.max_query_tokens() == rows;
            body.model == "kimi-k3"
                && case.family == family
                && rows_match
                && body.configuration.heads_per_rank == 12
        });
    }
    for tp in [4, 8] {
        has("GLM-5.2 with one group", &|case| {
            let body = attention(case).unwrap();
            body.model == "glm-5.2" && (body.configuration.tp, body.configuration.dcp) == (tp, tp)
        });
    }
    for gathered in [64, 96] {
        for probe in [Probe::Gaussian, Probe::NewestDominant, Probe::ForbiddenPoison] {
            has("the causal-reference test of vLLM #51705", &|case| {
                let body = attention(case).unwrap();
                let c = &body.configuration;
                c.gathered_heads() == gathered
                    && (c.dcp, c.block_size, c.kv_scale) == (2, 128, 0.02)
                    && body.workload.requests[0].seq_len() == 259
                    && body.workload.max_query_tokens() == 3
                    && body.probe == probe
                    && (f64::from(c.softmax_scale) - 576f64.powf(-0.5)).abs() < 1e-8
                    && body.latent_output
            });
        }
    }
}

#[test]
fn interleave_sixteen_is_tried_with_every_combination_of_features_and_exchange() {
    let cases = suite(SuiteName::Seeds, 1);
    let combinations: HashSet<(bool, bool, &str)> = cases
        .iter()
        .filter_map(attention)
        .filter(|body| body.configuration.interleave == 16 && body.model == "deepseek-r1")
        .map(|body| {
            let c = &body.configuration;
            (c.query_replication, c.project_before_merge, c.comm_backend.name())
        })
        .collect();
    assert_eq!(combinations.len(), 8);
}

#[test]
fn the_ladder_climbs_from_the_layout_to_whole_attention() {
    let cases = suite(SuiteName::MustPass, 1);
    let mut families: Vec<Family> = cases.iter().map(|case| case.family).collect();
    families.dedup();
    let order: Vec<Family> = Family::ALL.into_iter().filter(|family| *family != Family::Rules).collect();
    assert_eq!(families, order);
    assert!(cases.len() < 700, "{}", cases.len());
}

#[test]
fn suites_are_ordered_by_family_and_keep_equal_configurations_together() {
    for name in SuiteName::ALL {
        let cases = suite(name, 1);
        let place = |case: &Case| Family::ALL.iter().position(|family| *family == case.family);
        assert!(cases.windows(2).all(|pair| place(&pair[0]) <= place(&pair[1])), "{name}");
        // what a kernel is compiled for changes seldom: each value of W comes in one run within a model
        let keys: Vec<_> = cases
            .iter()
            .filter_map(|case| {
                attention(case).map(|body| (case.family, body.model.clone(), body.configuration.dcp))
            })
            .collect();
        let runs = 1 + keys.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert_eq!(runs, keys.iter().collect::<HashSet<_>>().len(), "{name}");
    }
}
