//! Properties of attention under prefill context parallelism on the embedded engine and on its faults.

use shardcheck_cases::{Body, Case, Family, SuiteName};
use shardcheck_engine::{Engine, PcpDecodes, PcpStrategy};
use shardcheck_formats::Dtype;

use super::PrefillMaterial;
use crate::judge::Allowed;
use crate::verdicts::{cases_of, faults_are_seen, passes_the_gate};

fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
    cases_of(Family::AttendPcp, name, seed)
}

fn body(case: &Case) -> &shardcheck_cases::AttendPcpCase {
    let Body::AttendPcp(body) = &case.body else { panic!("{}", case.id()) };
    body
}

#[test]
fn the_embedded_engine_attends_rightly_on_every_case_of_the_gate() {
    passes_the_gate(Family::AttendPcp, 30);
}

#[test]
fn every_fault_of_shared_rows_fails_every_property_that_it_names_on_the_gate() {
    faults_are_seen(Family::AttendPcp, "prefill.", 22);
}

#[test]
fn the_gate_has_every_split_idle_ranks_prefixes_decodes_and_sharded_caches() {
    let cases = cases(SuiteName::Gate, 1);
    let any = |what: &str, holds: &dyn Fn(&shardcheck_cases::AttendPcpCase) -> bool| {
        assert!(cases.iter().any(|case| holds(body(case))), "no case has {what}");
    };
    for strategy in PcpStrategy::ALL {
        any(strategy.name(), &|case| case.batch.strategy == strategy && case.batch.world > 1);
    }
    for decodes in PcpDecodes::ALL {
        let decode = |case: &shardcheck_cases::AttendPcpCase| {
            case.batch.requests.iter().any(|request| !request.is_prefilling && request.query_tokens > 0)
        };
        any(decodes.name(), &|case| case.batch.decodes == decodes && decode(case));
    }
    let engine = shardcheck_cpu::engine();
    let material = |case: &Case| PrefillMaterial::new(body(case), case.seed, engine.profile()).unwrap();
    let idle = |case: &Case| {
        let sharing = material(case).sharing;
        (0..sharing.world).any(|rank| sharing.rows_of(rank).is_empty())
    };
    assert!(cases.iter().any(idle), "no rank is idle");
    any("a hit prefix whose extension does not divide", &|case| {
        let parts = 2 * case.batch.world;
        case.batch.requests.iter().any(|r| {
            r.is_prefilling && r.context_tokens > 0 && r.query_tokens > parts && r.query_tokens % parts != 0
        })
    });
    any("three ranks", &|case| case.batch.world == 3);
    any("a cache that lies over ranks", &|case| case.configuration.dcp > 1);
    any("queries of eight bits", &|case| case.query_dtype == Dtype::E4m3fn);
    any("rows of a graph", &|case| case.batch.extra_rows > 0);
}

#[test]
fn queries_of_eight_bits_are_judged_behind_their_cast() {
    let engine = shardcheck_cpu::engine();
    let of = |query: &str| {
        let id = format!(
            "attend_pcp/head_tail.p2.replicated/3+5/tiny-mla/tp1.dcp1.h2.s1.b8.bf16.ag_rs/seq.{query}/gaussian/7"
        );
        let case: Case = id.parse().unwrap();
        PrefillMaterial::new(body(&case), 7, engine.profile()).unwrap()
    };
    let (given, cast) = (of("bf16"), of("e4m3fn@0.0625"));
    assert_eq!(given.inputs.get("query").unwrap(), cast.inputs.get("query").unwrap());
    let (ours, theirs) = (given.attention.expected().unwrap(), cast.attention.expected().unwrap());
    let apart = |(a, b): (&Allowed, &Allowed)| match (a, b) {
        (Allowed::Between { high, .. }, Allowed::Between { low, .. }) => high < low,
        _ => false,
    };
    assert!(ours.out.iter().zip(&theirs.out).any(apart), "no bound of one excludes what the other allows");
}

#[test]
fn the_oracle_knows_no_ranks() {
    let engine = shardcheck_cpu::engine();
    let case: Case =
        "attend_pcp/zigzag.p3.replicated/5+13_0+7/tiny-gqa/tp1.dcp1.h2.s1.b8.bf16.ag_rs/shuf.bf16/gaussian/3"
            .parse()
            .unwrap();
    let material = PrefillMaterial::new(body(&case), 3, engine.profile()).unwrap();
    let alone = material.variant(|case| case.batch.world = 1).unwrap();
    assert_eq!(material.attention.expected().unwrap().out, alone.attention.expected().unwrap().out);
    assert_eq!(alone.sharing.padded, 20);
}
