//! Engines behind a command: what they do wrong becomes the verdict of that case, and the other cases are judged all the same.

use shardcheck::event::CaseResult;
use shardcheck::finding::Finding;
use shardcheck::status::Status;
use shardcheck_process::Misbehaviour;

use crate::program::{Outcome, Program};

/// Three decode cases: several steps a session, several sessions a case.
const CASES: [&str; 6] =
    ["--suite", "engine-smoke", "-E", "family(decode) & model(tiny-gqa16) & world(1)", "--jobs", "1"];

fn engine(options: &str) -> String {
    format!("exec:{} adapter {options}", env!("CARGO_BIN_EXE_shardcheck"))
}

fn struck(kind: Misbehaviour, program: &Program) -> Outcome {
    let mark = program.path("mark");
    let engine = engine(&format!("--misbehave {kind} --mark {}", mark.display()));
    // a step takes milliseconds; eight seconds are for a machine that is very busy
    program.run(&[&["run", "--engine", &engine, "--timeout-s", "2"], &CASES[..]].concat())
}

/// What the first failing check of a case says.
fn said(result: &CaseResult) -> String {
    match &result.failures().next().unwrap_or_else(|| panic!("{} does not fail", result.id)).finding {
        Finding::Engine { text, .. } => text.clone(),
        Finding::Broken(failure) => failure.headline.clone(),
        other => format!("{other:?}"),
    }
}

#[test]
fn each_misbehaviour_is_the_verdict_of_one_case_and_the_others_are_judged() {
    let expected = [
        (Misbehaviour::Exits, Status::Crash, "exit status 3"),
        (Misbehaviour::IsKilled, Status::Crash, "signal 9"),
        (Misbehaviour::Hangs, Status::Timeout, "rank 0"),
        (Misbehaviour::Trickles, Status::Timeout, "8 s"),
        (Misbehaviour::PrintsToTheSocket, Status::Crash, "standard output"),
        (Misbehaviour::CutsTheFrame, Status::Crash, "cut off"),
        (Misbehaviour::HugeHeader, Status::Crash, "2147483648"),
        (Misbehaviour::GarbledHeader, Status::Crash, "not understood"),
        (Misbehaviour::WrongId, Status::Crash, "bears number"),
        (Misbehaviour::RepliesTwice, Status::Crash, ""),
        (Misbehaviour::RepliesEarly, Status::Crash, "adapter"),
        (Misbehaviour::ReshapesAnInput, Status::Crash, "input_after.q"),
        (Misbehaviour::CannotGoOn, Status::Crash, "exit status 89"),
        (Misbehaviour::WrongDtype, Status::Fail, "dtype f64"),
        (Misbehaviour::WrongShape, Status::Fail, "shape"),
        (Misbehaviour::NanEverywhere, Status::Fail, ""),
        (Misbehaviour::LeavesUnwritten, Status::Crash, "never written"),
        (Misbehaviour::UnknownTensor, Status::Crash, "\"output\""),
        (Misbehaviour::EscapesTheFolder, Status::Crash, "plain name"),
        (Misbehaviour::LosesTheDevice, Status::DeviceLost, "fell off the bus"),
        (Misbehaviour::RefusesToClose, Status::Crash, "could not close the session before: the communicator"),
    ];
    let ids = Program::new().ids(&CASES[..4]);
    assert!(ids.len() >= 3, "{ids:?}");
    for (kind, status, words) in expected {
        let program = Program::new();
        let outcome = struck(kind, &program);
        assert_eq!(outcome.code, Some(1), "{kind}\n{}\n{}", outcome.out, outcome.err);
        let record = program.record();
        assert_eq!(record.cases.len(), ids.len(), "{kind}: every case is judged");
        let failed: Vec<&CaseResult> =
            record.cases.iter().filter(|case| case.status != Status::Pass).collect();
        let [failed] = failed[..] else { panic!("{kind}: {failed:#?}") };
        assert_eq!(failed.status, status, "{kind}: {}", said(failed));
        assert!(said(failed).contains(words), "{kind}: {}", said(failed));
        assert!(record.failed.contains_key(&failed.id), "{kind}: the failed case is stored");
    }
}

#[test]
fn a_flood_on_standard_output_harms_nobody_and_is_not_kept_whole() {
    let program = Program::new();
    let outcome = struck(Misbehaviour::Floods, &program);
    assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.out, outcome.err);
    let log = std::fs::metadata(program.latest().join("engine.log")).unwrap().len();
    assert!((1 << 20..20 << 20).contains(&log), "{log} bytes");
}

#[test]
fn a_command_that_is_no_engine_ends_with_its_own_code_and_says_why() {
    let loose = engine("--misbehave loose-contract --mark mark");
    let other = engine("--misbehave other-protocol --mark mark");
    let stranger = engine("--misbehave other-token --mark mark");
    let observable = engine("--misbehave unknown-observable --mark mark");
    let leaving = engine("--misbehave leaves-at-once --mark mark");
    for (engine, words) in [
        ("exec:sh -c 'echo no such module >&2; exit 1'", "no such module"),
        ("exec:does-not-exist-anywhere", "exit status 127"),
        ("exec:exit 89", "can't run here"),
        ("exec:python3 -I -S -m shardcheck.adapter some.engine:Engine", "pip install ./runners/python"),
        (leaving.as_str(), "exit status 4 before it said hello"),
        (loose.as_str(), "u_acc"),
        (other.as_str(), "protocol 7 to 9"),
        (stranger.as_str(), "another start's token was turned away"),
        (observable.as_str(), "\"partial_output\", known are"),
    ] {
        let outcome = Program::new().expect(10, &["run", "--engine", engine]);
        assert!(outcome.err.contains(words), "{engine}: {}", outcome.err);
    }
    let silent = ["run", "--engine", "exec:sleep 60", "--start-timeout-s", "0.3"];
    assert!(Program::new().expect(10, &silent).err.contains("no hello within 0.3 s"));
}

#[test]
fn the_embedded_engine_behind_a_socket_gets_the_verdicts_that_it_gets_without_one() {
    let smoke = ["run", "--suite", "engine-smoke", "--no-diagnose"];
    let fault = "committed-prefix-rows";
    let (direct, behind) = (Program::new(), Program::new());
    direct.expect(1, &[&smoke[..], &["--fault", fault]].concat());
    behind.expect(1, &[&smoke[..], &["--engine", &engine(&format!("--fault {fault}"))]].concat());
    let verdicts = |program: &Program| {
        let mut cases = program.record().cases;
        cases.sort_by(|a, b| a.id.cmp(&b.id));
        cases.into_iter().map(|case| (case.id, case.status, case.checks)).collect::<Vec<_>>()
    };
    assert_eq!(verdicts(&direct), verdicts(&behind));
    behind.expect(1, &["judge", "latest"]);
}

#[test]
fn an_adapter_that_nobody_started_says_how_it_is_started() {
    let outcome = Program::new().expect(2, &["adapter"]);
    assert!(outcome.err.contains("--engine exec:CMD"), "{}", outcome.err);
}

#[test]
fn a_run_that_is_interrupted_takes_its_engine_along() {
    let program = Program::new();
    let (mark, pid) = (program.path("mark"), program.path("pid"));
    let line = format!(
        "exec:sh -c 'echo $$ > {}; exec {} adapter --misbehave hangs --mark {}'",
        pid.display(),
        env!("CARGO_BIN_EXE_shardcheck"),
        mark.display()
    );
    let mut run = program
        .command(&[&["run", "--engine", &line], &CASES[..]].concat())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    while !mark.exists() {
        assert!(run.try_wait().unwrap().is_none(), "the run ended before its engine hung");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let engine: i32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    let alive = || std::path::Path::new(&format!("/proc/{engine}/exe")).read_link().is_ok();
    assert!(alive());
    let kill = std::process::Command::new("kill").args(["-INT", &run.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let ended = run.wait_with_output().unwrap();
    assert!(!ended.status.success());
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("interrupted: what was judged until now is in runs/"), "{said}");
    while alive() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // what was judged before is on disk, and the run can be taken up again
    assert!(!program.record().cases.is_empty() || program.latest().join("events.jsonl").exists());
}
