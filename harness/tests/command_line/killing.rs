//! Runs that are killed: what was judged stays readable, and nothing is judged twice.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::process::{Child, Stdio};
use std::time::Duration;

use shardcheck::event::Event;
use shardcheck::run_directory::{EVENTS_FILE, RESULTS_FILE, read_events, read_results};

use crate::program::Program;

const SELECTION: [&str; 2] = ["-E", "family(decode | merge_partials)"];

/// Ids of judged cases with the number of their verdicts, by the whole lines of the events.
fn verdicts(events: &[u8]) -> BTreeMap<String, usize> {
    let whole = events.iter().rposition(|byte| *byte == b'\n').map_or(0, |place| place + 1);
    let mut verdicts = BTreeMap::new();
    for line in events[..whole].split_inclusive(|byte| *byte == b'\n') {
        match serde_json::from_slice::<Event>(line).expect("every whole line reads") {
            Event::CaseJudged(result) => *verdicts.entry(result.id).or_insert(0) += 1,
            Event::RunFinished { .. } => {}
            other => panic!("a healthy run has no such event: {other:?}"),
        }
    }
    verdicts
}

/// Waits until the run that `child` performs has judged `count` cases.
fn wait_for(program: &Program, child: &mut Child, count: usize) {
    loop {
        let path = program.path("runs/latest").join(EVENTS_FILE);
        let lines = std::fs::read(path).map_or(0, |bytes| bytes.iter().filter(|b| **b == b'\n').count());
        if lines >= count {
            return;
        }
        if let Some(status) = child.try_wait().unwrap() {
            let mut errors = String::new();
            child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
            panic!("the run ended ({status}) after {lines} verdicts\n{errors}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_killed_run_is_readable_and_resumes_where_it_stopped() {
    let program = Program::new();
    let selected: BTreeSet<String> = program.ids(&SELECTION).into_iter().collect();
    let run = [&["run", "--jobs", "1", "--no-progress"], &SELECTION[..]].concat();
    let mut child = program
        .command(&run)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    wait_for(&program, &mut child, 50);
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), None, "it was killed: {status}");

    let folder = program.latest();
    let before = verdicts(&std::fs::read(folder.join(EVENTS_FILE)).unwrap());
    assert!((50..selected.len()).contains(&before.len()), "{} of {}", before.len(), selected.len());
    let record = read_events(&folder).unwrap();
    assert_eq!(record.judged_ids().into_iter().collect::<BTreeSet<_>>(), before.keys().cloned().collect());
    assert!(record.finished.is_none() && !folder.join(RESULTS_FILE).exists());

    let other = program.expect(2, &["run", "--resume", "latest", "-E", "family(decode)"]);
    assert!(other.err.contains("can't be resumed") && other.err.contains("selection was"), "{}", other.err);
    assert_eq!(
        verdicts(&std::fs::read(folder.join(EVENTS_FILE)).unwrap()),
        before,
        "a refusal writes nothing"
    );

    let outcome = program.expect(0, &[&["run", "--resume", "latest"], &SELECTION[..]].concat());
    assert_eq!(program.latest(), folder, "no second folder");
    let after = verdicts(&std::fs::read(folder.join(EVENTS_FILE)).unwrap());
    assert_eq!(after.keys().cloned().collect::<BTreeSet<_>>(), selected);
    assert!(after.values().all(|count| *count == 1), "nothing is judged twice");
    let results = read_results(&folder).unwrap();
    assert_eq!((results.cases.len(), results.exit_code), (selected.len(), Some(0)));
    let count = selected.len();
    let last = outcome.out.trim_end().lines().last().unwrap();
    assert!(last.starts_with(&format!("cases: tried {count}, judged {count}")), "{last}");

    program.expect(0, &[&["run", "--resume", "latest"], &SELECTION[..]].concat());
    let again = verdicts(&std::fs::read(folder.join(EVENTS_FILE)).unwrap());
    assert_eq!(again, after, "a finished run has nothing left to judge");
}

#[test]
fn a_line_that_a_kill_cut_off_is_left_out_and_its_case_judged_again() {
    let program = Program::new();
    let run = ["run", "--suite", "engine-smoke", "layout/"];
    program.expect(0, &run);
    let folder = program.latest();
    let path = folder.join(EVENTS_FILE);
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    // the run ended while it wrote its third verdict
    std::fs::write(&path, format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..lines[2].len() / 2]))
        .unwrap();
    std::fs::remove_file(folder.join(RESULTS_FILE)).unwrap();
    let record = read_events(&folder).unwrap();
    assert!(record.torn && record.cases.len() == 2);
    program.expect(0, &[&run[..], &["--resume"]].concat());
    let after = verdicts(&std::fs::read(&path).unwrap());
    assert_eq!(after.into_keys().collect::<Vec<_>>(), {
        let mut ids = program.ids(&run[1..]);
        ids.sort_unstable();
        ids
    });
    assert!(read_results(&folder).is_ok());
}

#[test]
fn two_programs_do_not_write_one_run() {
    let program = Program::new();
    let run = [&["run", "--jobs", "1", "--no-progress"], &SELECTION[..]].concat();
    let mut child = program
        .command(&run)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    wait_for(&program, &mut child, 1);
    let outcome = program.expect(2, &[&["run", "--resume", "latest"], &SELECTION[..]].concat());
    assert!(outcome.err.contains("is in use by process"), "{}", outcome.err);
    child.kill().unwrap();
    child.wait().unwrap();
}
