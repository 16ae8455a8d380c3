//! A small run with one of everything, which the tests of the reports share.

use shardcheck_cases::Case;

use crate::claims::{EntryKind, EntryVerdict};
use crate::diagnose::{Candidate, Diagnosis};
use crate::event::{CaseResult, Check, Coverage, Event, RESULTS_SCHEMA_VERSION, RunHeader};
use crate::finding::{Failure, Figures, Finding, Measured, Stage, Worst};
use crate::record::{RunRecord, count_statuses};
use crate::select::Selection;
use crate::status::{Exit, Status};

pub fn header() -> RunHeader {
    RunHeader {
        schema_version: RESULTS_SCHEMA_VERSION,
        tool_version: "0.1.0".into(),
        run_id: String::new(),
        suite: "gate".into(),
        seed: 7,
        engine: "cpu".into(),
        fault: None,
        timeout_s: None,
        profile: serde_json::json!({"engine": "cpu", "version": "0.1.0"}),
        selection: serde_json::to_value(Selection::default()).unwrap(),
        claims: None,
        selected: 7,
        machine: "linux x86_64, 2 cores".into(),
    }
}

/// Id of a case with padding, an empty request and an fp8 cache.
pub const CASE_ID: &str =
    "verify/tiny-mla/tp8.dcp4.h2.s4.b16.n8.e4m3fn.a2a.hi_lo.qrep/100+4_0+0_29+3.pad1.shuf/cold/7";

pub fn case() -> Case {
    CASE_ID.parse().unwrap()
}

pub fn failure() -> Failure {
    Failure {
        headline: "the merged output misses its bound".into(),
        worst: Some(Worst {
            tensor: "out".into(),
            place: "rank 1, request 0 row 2 (position 258), head 5, dim 17".into(),
            seen: "1.25".into(),
            expected: "1.0".into(),
            allowed: "[0.99, 1.01]".into(),
            ratio: Some(25.0),
        }),
        out_of_bound: 12,
        compared: 4096,
        stage: Some(Stage::Merge),
        notes: vec!["rows 2 and 3 attended token 259, which they must not see".into()],
    }
}

fn result(id: &str, checks: Vec<Check>) -> CaseResult {
    CaseResult {
        id: id.into(),
        status: CaseResult::status_of(&checks),
        checks,
        elapsed_s: 0.25,
        coverage: Coverage { rows: 8, masked_rows: 6, shards: 12, empty_shards: 4, real_heads: false },
        reason: None,
    }
}

fn check(property: &str, finding: Finding) -> Check {
    Check::new(property, finding)
}

pub fn passed(id: &str, worst_ratio: f64) -> CaseResult {
    let figures = Figures {
        chi_square: Some(0.97),
        top_score: Some(3.25),
        probable_ratio: Some(0.5),
        lse_difference: Some(1e-6),
        excluded_states: 2,
    };
    let measured = Measured { compared: 1000, worst_ratio, exact: 10, figures: Some(figures) };
    result(id, vec![check("attention.bound", Finding::Holds(measured))])
}

pub fn failed(id: &str, failure: Failure) -> CaseResult {
    let holds = Finding::Holds(Measured { compared: 100, worst_ratio: 0.5, exact: 0, figures: None });
    let broken = Finding::Broken(Box::new(failure));
    result(id, vec![check("layout.exact", holds), check("attention.bound", broken)])
}

pub fn skipped(id: &str) -> CaseResult {
    let reason = Some("belongs to another partition".into());
    CaseResult { status: Status::Skipped, reason, ..result(id, vec![]) }
}

/// One of everything: pass, fail twice, crash, unsupported, skipped, inconclusive, three faults, and an entry of the claims.
pub fn events(header: &RunHeader) -> Vec<Event> {
    let crash = Finding::Engine { status: Status::Crash, text: "engine crashed: index out of range".into() };
    let mut real =
        passed("decode/deepseek-r1/tp8.dcp8.h16.s64.b64.n12.bf16.a2a.lo_hi/4095+1.shuf/gaussian/7", 0.75);
    real.coverage.real_heads = true;
    let results = vec![
        real,
        failed(CASE_ID, failure()),
        failed("verify/<script>alert('1')</script>&\"quoted\"", failure()),
        result(
            "write/tiny-mla/tp2.dcp2.h2.s4.b8.n6.bf16.ag_rs/0+12.seq/gaussian/7",
            vec![check("write.exact", crash)],
        ),
        result(
            "draft/tiny-mla/tp2.dcp2.h2.s4.b8.n6.bf16.ag_rs/12+4.seq/gaussian/7",
            vec![check("attention.bound", Finding::Unsupported("no draft route".into()))],
        ),
        skipped("context/tiny-mla/tp2.dcp2.h2.s4.b8.n6.bf16.ag_rs.lat/12+4.seq.c16/gaussian/7"),
        result(
            "merge_states/w2.t4.h2.d16.bf16.ag_rs/random/contiguous/7",
            vec![check("merge.bound", Finding::Inconclusive("both took the same path".into()))],
        ),
    ];
    let counts = count_statuses(results.iter().map(|r| r.status));
    let mut events = vec![Event::RunStarted(Box::new(header.clone()))];
    for result in results {
        let id = result.id.clone();
        let failed = result.status == Status::Fail;
        events.push(Event::CaseJudged(result));
        if failed {
            events.push(Event::CaseFailed { id, case: Box::new(case()) });
        }
    }
    events.push(Event::Diagnosed(Box::new(diagnosis())));
    for (fault, state, property) in [
        ("drop-last-rank", "killed", Some("attention.bound")),
        ("swap-lanes", "survived", None),
        ("no-a2a", "not_applicable", None),
    ] {
        events.push(Event::MutantTried {
            fault: fault.into(),
            state: state.into(),
            property: property.map(str::to_owned),
            case: property.map(|_| {
                "decode/deepseek-r1/tp8.dcp8.h16.s64.b64.n12.bf16.a2a.lo_hi/4095+1.shuf/gaussian/7".to_owned()
            }),
            tried: 3,
        });
    }
    events.push(Event::ClaimJudged(EntryVerdict {
        entry: "nan-leaks".into(),
        kind: EntryKind::Finding,
        status: Status::UnexpectedPass,
        matching: 2,
        judged: 1,
        shown: 0,
        text: "0 of 1 judged cases show nan-leaks".into(),
        reference: "vllm#38416".into(),
        cases: vec![CASE_ID.into()],
    }));
    events.push(Event::RunFinished { counts, elapsed_s: 12.5, exit_code: Exit::Failed.code() });
    events
}

pub fn diagnosis() -> Diagnosis {
    Diagnosis {
        cases: vec![CASE_ID.into()],
        candidates: vec![Candidate {
            fault: "row-sees-its-successor".into(),
            title: "the causal edge of a verify row is one position late".into(),
            class: "causal-bound".into(),
            bugs: vec!["flash-attention#93".into()],
            same_effect: vec!["no-mask-between-rows".into()],
            explains: 1,
            exact: false,
            beside: 0,
            stage_agrees: true,
            distance: 0.25,
        }],
        fitting: 2,
        ruled_out: 120,
        untried: 0,
        likely_untried: 0,
        needed_s: 0,
        ended: 0,
        tell_apart: Some(CASE_ID.into()),
        elapsed_s: 1.5,
    }
}

pub fn record() -> RunRecord {
    let header = RunHeader { run_id: "20260810T123456Z-1a2b3c4d".into(), ..header() };
    let mut record = RunRecord::new(header.clone());
    events(&header).iter().for_each(|event| record.absorb(event));
    record
}
