//! A run that is killed in the middle of things, by the operating system, and continued.

mod support;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use shardcheck_gsm8k::dialect::Filter;
use support::bench::{Bench, QUESTIONS, assert_each_question_once, right_answer};
use support::hostile_server::HostileServer;

/// The example program, which cargo builds together with the tests.
fn program() -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    let program = deps.parent().unwrap().parent().unwrap().join("examples/gsm8k");
    assert!(program.exists(), "build the example first: cargo build -p shardcheck-gsm8k --example gsm8k");
    program
}

fn command(bench: &Bench, url: &str) -> Command {
    let args = bench.args(url);
    let mut command = Command::new(program());
    command
        .args(["gsm8k", "run", "--model", "m", "--num-fewshot", "2", "--concurrency", "4", "--base-url", url])
        .arg("--data")
        .arg(&args.data)
        .arg("--out")
        .arg(bench.out())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[test]
fn a_killed_run_keeps_its_answers_and_asks_only_the_rest() {
    let bench = Bench::new();
    let server = HostileServer::start(|request| {
        std::thread::sleep(Duration::from_millis(60));
        right_answer(request)
    });
    let mut child = command(&bench, &server.url()).spawn().unwrap();
    let log = bench.out().join("samples.jsonl");
    let rows = || std::fs::read_to_string(&log).map_or(0, |text| text.lines().count());
    let patience = Instant::now();
    while rows() < 40 && patience.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = rows() / 2;
    assert!((20..QUESTIONS).contains(&kept), "{kept} questions were answered when the run was killed");
    let served = server.served();

    let output = command(&bench, &server.url()).arg("--resume").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(&format!("{QUESTIONS}/{QUESTIONS}")) && text.contains("in 2 sessions"), "{text}");
    assert_each_question_once(&bench.out());
    // at most the four requests that were in flight when the process died are asked twice
    let asked_again = server.served() - served;
    assert!(
        asked_again >= QUESTIONS - served && asked_again <= QUESTIONS - kept,
        "{served} {kept} {asked_again}"
    );
}

#[test]
fn exit_codes_tell_an_unfinished_run_from_a_wrong_command() {
    let bench = Bench::new();
    let server = HostileServer::start(right_answer);
    let code = |extra: &[&str], url: &str| command(&bench, url).args(extra).output().unwrap().status.code();
    assert_eq!(code(&[], "http://127.0.0.1:9"), Some(5));
    assert_eq!(code(&["--limit", "0"], &server.url()), Some(4));
    assert_eq!(code(&["--attempts", "0"], &server.url()), Some(2));
    assert_eq!(code(&["--no-such-flag"], &server.url()), Some(2));
    assert_eq!(code(&[], &server.url()), Some(0));
    let results = std::fs::read_to_string(bench.out().join("results.json")).unwrap();
    let results: serde_json::Value = serde_json::from_str(&results).unwrap();
    assert_eq!(results["results"]["gsm8k"][format!("exact_match,{}", Filter::StrictMatch)], 1.0);
}
