//! Known-bad releases as regression: the embedded engine with a fault is one, and a claims file knows it.

use serde_json::Value;
use shardcheck::status::Status;

use crate::program::Program;

const FAULT: &str = "nan-partial-not-scrubbed";
const MERGES: [&str; 5] = ["run", "--suite", "engine-smoke", "-E", "family(merge_partials) & not dtype(f16)"];

const KNOWN: &str = r#"
schema_version = 1
engine = "cpu"

[[finding]]
id = "nan-leaks"
properties = ["merge.*", "identity.rows"]
cases = "family(merge_partials)"
versions = ">=0.1, <1"
seen = "nan"
reason = "the NaN of an empty partial comes through a weight of zero"
reference = "vllm#38416"

[[claim]]
id = "merges"
families = ["merge_partials"]
versions = "*"
"#;

fn with_claims(text: &str) -> Program {
    let program = Program::new();
    program.write("claims.toml", text);
    program
}

fn merges(more: &[&'static str]) -> Vec<&'static str> {
    MERGES.into_iter().chain(more.iter().copied()).collect()
}

fn read(program: &Program, file: &str) -> String {
    std::fs::read_to_string(program.latest().join(file)).unwrap()
}

#[test]
fn a_known_bad_engine_with_its_claims_ends_with_zero_and_every_report_says_why() {
    let program = with_claims(KNOWN);
    let run = merges(&["--fault", FAULT, "--claims", "claims.toml", "--table", "--status-level", "warn"]);
    let out = program.expect(0, &run).out;
    for part in [
        "expected_fail merge_partials/",
        "nan-leaks: the NaN of an empty partial comes through a weight of zero (vllm#38416)",
        "claims      expected_fail: 8 of 8 judged cases show nan-leaks",
        "family          properties",
    ] {
        assert!(out.contains(part), "{part:?} is not in\n{out}");
    }
    let results: Value = serde_json::from_str(&read(&program, "results.json")).unwrap();
    assert_eq!(results["counts"]["expected_fail"], 8);
    assert_eq!(results["claims"][0]["status"], "expected_fail");
    assert_eq!(results["header"]["claims"]["findings"][0]["id"], "nan-leaks");
    let merge = results["table"].as_array().unwrap().iter().find(|row| row["area"] == "merge").unwrap();
    assert!(merge["expected_fail"].as_u64().unwrap() > 7 && merge["fail"] == 0, "{merge}");
    let junit = read(&program, "junit.xml");
    assert!(
        junit.contains("<testsuite name=\"claims\" tests=\"2\"") && junit.contains("failures=\"0\""),
        "{junit}"
    );
    assert!(junit.contains("name=\"expected\" value=\"nan-leaks"), "{junit}");
    let html = read(&program, "report.html");
    assert!(html.contains("fail as expected") && html.contains("id=\"claims\""));
    let again = program.expect(0, &["judge"]);
    assert!(again.err.contains("on 0 stored failures"), "{}", again.err);
}

#[test]
fn a_fixed_engine_with_the_claims_of_the_broken_one_fails_and_names_the_entry_everywhere() {
    let program = with_claims(KNOWN);
    let run = merges(&["--claims", "claims.toml"]);
    let mut command = program.command(&run);
    let output = command.env("GITHUB_ACTIONS", "true").output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{out}");
    assert!(out.contains("claims      unexpected_pass: 0 of 8 judged cases show nan-leaks"), "{out}");
    assert!(out.contains("::error title=claims%3A unexpected_pass nan-leaks::0 of 8"), "{out}");
    let record = program.record();
    assert!(record.cases.iter().all(|case| case.status == Status::Pass));
    assert_eq!(record.claims[0].status, Status::UnexpectedPass);
    assert!(read(&program, "junit.xml").contains("type=\"unexpected_pass\""));
    let again = program.expect(1, &["judge"]);
    assert!(again.err.contains("unexpected_pass nan-leaks"), "{}", again.err);
}

#[test]
fn one_finding_more_than_the_claims_know_fails_and_judge_marks_the_rest_again() {
    let program = with_claims(&KNOWN.replace("\"merge.*\", \"identity.rows\"", "\"merge.neutral\""));
    program.expect(1, &merges(&["--fault", FAULT, "--claims", "claims.toml", "--no-diagnose"]));
    let record = program.record();
    let counts = record.counts();
    assert!(counts["fail"] > 0 && counts["expected_fail"] > 0, "{counts:?}");
    assert_eq!(record.failed.len(), counts["fail"]);
    let again = program.expect(1, &["judge"]);
    assert!(again.err.contains("0 of them otherwise than before"), "{}", again.err);
}

#[test]
fn without_claims_every_failure_counts() {
    let program = with_claims(KNOWN);
    program.expect(1, &merges(&["--fault", FAULT, "--no-diagnose"]));
    let bare = program.record().header.run_id;
    program.expect(1, &merges(&["--fault", FAULT, "--no-diagnose", "--no-claims"]));
    assert_eq!(program.record().counts()["fail"], 8);
    program.expect(0, &merges(&["--fault", FAULT, "--claims", "claims.toml"]));
    let fixed = program.record().header.run_id;
    let diff = program.expect(0, &["diff", &bare, &fixed]).out;
    assert!(diff.contains("claims: none, then cpu 0.1.0") && diff.contains("fail → expected_fail"), "{diff}");
    program.expect(1, &merges(&["--claims", "claims.toml"]));
    let diff = program.expect(1, &["diff", &fixed]).out;
    assert!(diff.contains("claims newly failing: nan-leaks: expected_fail, then unexpected_pass"), "{diff}");
    let diff = program.expect(0, &["diff", "latest", &fixed]).out;
    assert!(diff.contains("claims fixed: nan-leaks: unexpected_pass, then expected_fail"), "{diff}");
}

#[test]
fn a_resumed_run_concludes_over_everything_and_refuses_other_claims() {
    let program = with_claims(KNOWN);
    program.expect(0, &merges(&["--fault", FAULT, "--claims", "claims.toml"]));
    let path = program.latest().join("events.jsonl");
    let events = std::fs::read_to_string(&path).unwrap();
    // as if it had been killed after three cases
    let kept: String = events.lines().take(3).map(|line| format!("{line}\n")).collect();
    std::fs::write(&path, kept).unwrap();
    let resume = merges(&["--fault", FAULT, "--claims", "claims.toml", "--resume"]);
    program.expect(0, &resume);
    let record = program.record();
    assert_eq!((record.cases.len(), record.claims[0].judged, record.claims[0].shown), (8, 8, 8));
    program.write("claims.toml", KNOWN.replace("\"nan\"", "\"inf\""));
    let error = program.expect(2, &resume).err;
    assert!(error.contains("claims was cpu 0.1.0"), "{error}");
}

#[test]
fn claims_that_do_not_fit_are_refused_before_anything_runs() {
    let program = with_claims(&KNOWN.replace("\"cpu\"", "\"vllm\""));
    let error = program.expect(2, &merges(&["--claims", "claims.toml"])).err;
    assert!(error.contains("about the engine \"vllm\"") && error.contains("--no-claims"), "{error}");
    let error = program.expect(2, &merges(&["--claims", "absent.toml"])).err;
    assert!(error.contains("absent.toml"), "{error}");
    program.expect(2, &merges(&["--claims", "claims.toml", "--no-claims"]));
    assert!(!program.path("runs").exists());
}
