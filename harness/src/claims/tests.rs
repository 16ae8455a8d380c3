//! Claims on what the embedded engine and its faults show.

use shardcheck_cases::{SuiteName, suite};
use shardcheck_cpu::{CpuEngine, fault};
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, RuleSetName, Session, Settings, Validation,
};

use super::*;
use crate::event::Event;
use crate::execute::{Outcome, Plan, execute};
use crate::record::RunRecord;
use crate::run_directory::{RunDirectory, read_events};
use crate::sample;
use crate::select::Selection;
use crate::status::Exit;

const HEAD: &str = "schema_version = 1\nengine = \"cpu\"\n";

fn finding(id: &str, properties: &str, more: &str) -> String {
    format!(
        "[[finding]]\nid = \"{id}\"\nproperties = {properties}\nversions = \"*\"\nreason = \"NaN times zero\"\n\
         reference = \"vllm#38416\"\n{more}\n"
    )
}

fn claims(body: &str) -> Claims {
    let file = ClaimsFile::parse(&format!("{HEAD}{body}"), "test").unwrap_or_else(|error| panic!("{error}"));
    file.resolve(shardcheck_cpu::engine().profile(), "test").unwrap_or_else(|error| panic!("{error}"))
}

fn cases(family: Family) -> Vec<Case> {
    suite(SuiteName::EngineSmoke, 1).into_iter().filter(|case| case.family == family).collect()
}

/// A whole run in a folder of its own.
fn run(engine: &dyn Engine, claims: &Claims, cases: &[Case], fail_fast: bool) -> (Outcome, RunRecord) {
    let folder = tempfile::tempdir().unwrap();
    let header = crate::event::RunHeader { claims: Some(claims.clone()), ..sample::header() };
    let mut directory = RunDirectory::create(folder.path(), &header).unwrap();
    let selection = Selection::default();
    let plan = Plan {
        cases,
        selection: &selection,
        engine,
        is_faulty: false,
        jobs: 1,
        fail_fast,
        diagnosis: None,
        mutant_cases: &[],
        claims: Some((claims, cases)),
        before: Vec::new(),
    };
    let mut shown = Vec::new();
    let outcome = execute(&plan, &mut directory, &mut |event| shown.push(event.clone())).unwrap();
    let record = read_events(directory.path()).unwrap();
    let told = shown.iter().filter(|event| matches!(event, Event::ClaimJudged(_))).count();
    assert_eq!(told, record.claims.len(), "what is shown is on disk");
    (outcome, record)
}

fn faulty() -> CpuEngine {
    CpuEngine::with_fault(fault("nan-partial-not-scrubbed").expect("the fault is known"))
}

/// An engine that opens no session.
struct Refusing(CpuEngine);

impl Engine for Refusing {
    fn profile(&self) -> &Profile {
        self.0.profile()
    }

    fn validate(&self, _: RuleSetName, _: &Settings) -> Result<Answer<Validation>, EngineError> {
        Ok(Answer::Unsupported("no rules".to_owned()))
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        Ok(Answer::Unsupported(format!("no {} ranks", configuration.dcp)))
    }
}

#[test]
fn a_known_bad_release_passes_with_its_finding_and_every_failing_check_bears_the_entry() {
    let claims = claims(&finding("leak", "[\"merge.*\", \"identity.rows\"]", "seen = \"nan\"\nevery = true"));
    let (outcome, record) = run(&faulty(), &claims, &cases(Family::MergePartials), false);
    assert_eq!((outcome.exit, outcome.cut_short), (Exit::Passed, false));
    assert!(
        record.cases.iter().all(|case| case.status == Status::ExpectedFail && case.failures().count() == 0)
    );
    let failing = record
        .cases
        .iter()
        .flat_map(|case| &case.checks)
        .filter(|check| check.finding.status() == Status::Fail);
    assert!(failing.clone().count() >= record.cases.len());
    for check in failing {
        let expected = check.expected.as_ref().expect("covered");
        assert_eq!((expected.entry.as_str(), expected.reference.as_str()), ("leak", "vllm#38416"));
    }
    assert!(record.failed.is_empty(), "what is expected is not stored as a failure");
    assert_eq!((record.claims[0].status, record.claims[0].shown), (Status::ExpectedFail, record.cases.len()));
}

#[test]
fn a_finding_that_no_longer_shows_fails_the_run_and_names_the_entry_and_the_cases() {
    let claims = claims(&finding("leak", "[\"merge.*\"]", ""));
    let cases = cases(Family::MergePartials);
    let (outcome, record) = run(&shardcheck_cpu::engine(), &claims, &cases, false);
    assert_eq!(outcome.exit, Exit::Failed);
    assert!(record.cases.iter().all(|case| case.status == Status::Pass));
    let verdict = &record.claims[0];
    assert_eq!((verdict.status, verdict.judged, verdict.shown), (Status::UnexpectedPass, cases.len(), 0));
    assert!(verdict.text.contains("leak") && verdict.cases.len() == 5, "{verdict:?}");
}

#[test]
fn a_finding_that_some_inputs_hide_is_gone_only_when_as_many_cases_as_it_says_do_not_show_it() {
    let cases = cases(Family::MergePartials);
    for (at_least, status, exit) in [
        (cases.len(), Status::UnexpectedPass, Exit::Failed),
        (cases.len() + 1, Status::Unsupported, Exit::Passed),
    ] {
        let claims =
            claims(&finding("leak", "[\"merge.*\", \"identity.rows\"]", &format!("at_least = {at_least}")));
        let (outcome, record) = run(&shardcheck_cpu::engine(), &claims, &cases, false);
        assert_eq!((outcome.exit, record.claims[0].status), (exit, status), "{at_least}");
        // one that shows it is enough
        let (outcome, record) = run(&faulty(), &claims, &cases, false);
        assert_eq!(
            (outcome.exit, record.claims[0].status),
            (Exit::Passed, Status::ExpectedFail),
            "{at_least}"
        );
    }
}

#[test]
fn one_failing_check_that_no_entry_covers_fails_its_case_and_the_run() {
    let claims = claims(&finding("leak", "[\"merge.neutral\"]", ""));
    let (outcome, record) = run(&faulty(), &claims, &cases(Family::MergePartials), false);
    assert_eq!(outcome.exit, Exit::Failed);
    let mixed: Vec<_> = record.cases.iter().filter(|case| case.status == Status::Fail).collect();
    assert!(!mixed.is_empty() && mixed.len() < record.cases.len());
    for case in mixed {
        assert!(case.checks.iter().any(|check| check.status() == Status::ExpectedFail), "{}", case.id);
        assert!(case.failures().all(|check| check.property != "merge.neutral"), "{}", case.id);
    }
}

#[test]
fn other_wrong_values_than_those_that_are_known_are_not_covered() {
    let claims = claims(&finding("leak", "[\"merge.*\", \"identity.rows\"]", "seen = \"inf\""));
    let (outcome, record) = run(&faulty(), &claims, &cases(Family::MergePartials), false);
    assert_eq!(outcome.exit, Exit::Failed);
    assert!(record.cases.iter().all(|case| case.status == Status::Fail));
    assert_eq!(record.claims[0].status, Status::UnexpectedPass, "it shows something, but not this");
}

#[test]
fn with_every_one_case_that_passes_is_enough_and_without_it_one_that_fails() {
    // only merges with empty states show it in their own output
    for (more, status, exit) in
        [("every = true", Status::UnexpectedPass, Exit::Failed), ("", Status::ExpectedFail, Exit::Failed)]
    {
        let claims = claims(&finding("leak", "[\"merge.output\"]", more));
        let (outcome, record) = run(&faulty(), &claims, &cases(Family::MergePartials), false);
        assert_eq!((outcome.exit, record.claims[0].status), (exit, status), "{more}");
        assert!(record.claims[0].shown > 0 && record.claims[0].shown < record.claims[0].judged);
    }
}

#[test]
fn an_entry_is_not_asked_where_nothing_matches_or_the_run_was_cut_short() {
    let claims = claims(&finding("leak", "[\"merge.*\"]", ""));
    let (outcome, record) = run(&shardcheck_cpu::engine(), &claims, &cases(Family::MergeStates), false);
    assert_eq!((outcome.exit, record.claims.len()), (Exit::Passed, 0));
    let narrow = claims_of_states();
    let all: Vec<Case> = [cases(Family::MergePartials), cases(Family::MergeStates)].concat();
    let (outcome, record) = run(&faulty(), &narrow, &all, true);
    assert!(outcome.cut_short && record.claims.is_empty());
    assert_eq!(outcome.exit, Exit::Failed);
}

fn claims_of_states() -> Claims {
    claims(&finding("never", "[\"states.output\"]", "seen = \"never\""))
}

#[test]
fn an_engine_that_supports_nothing_of_what_it_claims_fails() {
    let body = "[[claim]]\nid = \"merges\"\nfamilies = [\"merge_partials\"]\nversions = \"*\"\n\
                [[claim]]\nid = \"decodes\"\nproperties = [\"decode.output\"]\nversions = \"*\"\n";
    let claims = claims(body);
    let cases = cases(Family::MergePartials);
    let (outcome, record) = run(&Refusing(shardcheck_cpu::engine()), &claims, &cases, false);
    assert_eq!(outcome.exit, Exit::Failed);
    assert!(record.cases.iter().all(|case| case.status == Status::Unsupported));
    assert_eq!(record.claims.len(), 1, "no decode was selected");
    let verdict = &record.claims[0];
    assert_eq!((verdict.kind, verdict.status, verdict.judged), (EntryKind::Claim, Status::Fail, 0));
    assert!(verdict.text.contains("merges") && verdict.text.contains("× no 2 ranks"), "{}", verdict.text);
    let (outcome, _) = run(&shardcheck_cpu::engine(), &claims, &cases, false);
    assert_eq!(outcome.exit, Exit::Passed);
}

#[test]
fn a_finding_of_which_nothing_could_be_judged_is_neither_seen_nor_gone_and_such_a_run_is_no_pass() {
    let claims = claims(&finding("leak", "[\"merge.*\"]", ""));
    let (outcome, record) = run(&Refusing(faulty()), &claims, &cases(Family::MergePartials), false);
    assert_eq!((outcome.exit, record.claims[0].status), (Exit::Inconclusive, Status::Unsupported));
}

#[test]
fn a_claim_asks_for_as_many_cases_as_it_says_or_for_all_of_a_smaller_selection() {
    let body =
        "[[claim]]\nid = \"merges\"\nfamilies = [\"merge_partials\"]\nversions = \"*\"\nat_least = 7\n";
    let (claims, mut cases) = (claims(body), cases(Family::MergePartials));
    cases.truncate(7);
    assert_eq!(cases.len(), 7);
    let record = |judged: usize| {
        let mut record = RunRecord::new(sample::header());
        for (index, case) in cases.iter().enumerate() {
            let finding = match index < judged {
                true => Finding::Holds(crate::finding::Measured::exact(1)),
                false => Finding::Unsupported("not today".to_owned()),
            };
            let checks = vec![Check::new("merge.output", finding)];
            let result = CaseResult {
                id: case.id(),
                status: CaseResult::status_of(&checks),
                checks,
                ..sample::skipped("")
            };
            record.absorb(&Event::CaseJudged(result));
        }
        record
    };
    let status =
        |cases: &[Case], judged: usize| claims.conclude(cases, &|_, _, _| true, &record(judged))[0].status;
    assert_eq!((status(&cases, 7), status(&cases, 6)), (Status::Pass, Status::Fail));
    assert_eq!((status(&cases[..2], 2), status(&cases[..2], 1)), (Status::Pass, Status::Fail));
}

#[test]
fn the_embedded_files_read_and_survive_a_round_trip() {
    for (engine, text) in EMBEDDED {
        let file = ClaimsFile::parse(text, engine).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(file.engine, engine);
        assert!(!file.findings.is_empty() && !file.supports.is_empty());
        let again = toml::to_string(&file).unwrap();
        assert_eq!(ClaimsFile::parse(&again, "again").unwrap(), file);
        let profile =
            Profile { engine: engine.to_owned(), version: "0.24.0+cpu".to_owned(), ..Profile::default() };
        let claims = file.resolve(&profile, engine).unwrap();
        let json = serde_json::to_string(&claims).unwrap();
        assert_eq!(serde_json::from_str::<Claims>(&json).unwrap(), claims);
    }
}

#[test]
fn every_embedded_entry_is_about_a_case_that_the_gate_or_the_suite_of_devices_has() {
    let cases = [suite(SuiteName::Gate, 1), suite(SuiteName::EngineDevice, 1)].concat();
    for (engine, text) in EMBEDDED {
        let file = ClaimsFile::parse(text, engine).unwrap();
        let matches = |about: &dyn Fn(&str, &Case, &str) -> bool| {
            cases.iter().any(|case| properties::of(case).any(|property| about(&case.id(), case, property.id)))
        };
        for entry in &file.findings {
            assert!(matches(&|id, case, property| entry.is_about(id, case, property)), "{}", entry.id);
        }
        for entry in &file.supports {
            assert!(matches(&|id, case, property| entry.is_about(id, case, property)), "{}", entry.id);
        }
    }
}

#[test]
fn the_version_under_test_decides_which_entries_hold() {
    let ids = |version: &str| -> Vec<String> {
        let profile = Profile { engine: "vllm".into(), version: version.into(), ..Profile::default() };
        let claims = Claims::of(&profile, None).unwrap().expect("the program holds claims for vllm");
        claims.findings.into_iter().map(|entry| entry.id).collect()
    };
    let first = ids("0.11.0");
    assert!(first.iter().any(|id| id == "all-ranks-empty-lse-nan"), "{first:?}");
    assert!(first.iter().all(|id| !id.starts_with("a2a")), "{first:?}");
    assert!(ids("0.25.1").iter().all(|id| !id.starts_with("ag-rs")));
    assert_eq!(ids("0.33.0"), ["states-nan-partial", "lse-in-16-bits"]);
    assert!(Claims::of(&Profile { engine: "cpu".into(), ..Profile::default() }, None).unwrap().is_none());
}

#[test]
fn what_does_not_read_is_named() {
    let known = finding("a", "[\"merge.output\"]", "");
    for (text, part) in [
        ("schema_version = 2\nengine = \"cpu\"\n".to_owned(), "schema version 2"),
        (format!("{HEAD}{known}{known}"), "stands twice: each"),
        (format!("{HEAD}{}", finding(" ", "[\"merge.output\"]", "")), "an empty id"),
        (format!("{HEAD}{}", finding("a", "[\"merge.outptu\"]", "")), "did you mean \"merge.output\""),
        (format!("{HEAD}{}", finding("a", "[]", "")), "names no properties"),
        (format!("{HEAD}{}", finding("a", "[\"merge.output\"]", "cases = \"world(\"")), "world("),
        (format!("{HEAD}{}", finding("a", "[\"merge.output\"]", "ever = true")), "ever"),
        (format!("{HEAD}{}", known.replace("\"*\"", "\"<\"")), "not a range of versions"),
        (format!("{HEAD}[[claim]]\nid = \"c\"\nversions = \"*\"\n"), "names neither families nor properties"),
    ] {
        let error = ClaimsFile::parse(&text, "x.toml").unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("x.toml"), "{error} should contain {part}");
    }
    let other = ClaimsFile::parse("schema_version = 1\nengine = \"vllm\"\n", "x.toml").unwrap();
    let error = other.resolve(shardcheck_cpu::engine().profile(), "x.toml").unwrap_err();
    assert!(error.to_string().contains("\"cpu\""), "{error}");
    let unnamed = Profile { engine: "vllm".into(), version: "main".into(), ..Profile::default() };
    assert!(Claims::of(&unnamed, None).unwrap_err().to_string().contains("--no-claims"));
}
