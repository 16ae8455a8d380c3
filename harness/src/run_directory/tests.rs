//! A run folder after every kind of end.

use std::io::Write;

use super::*;
use crate::event::{Check, Coverage};
use crate::finding::Measured;
use crate::sample;
use crate::status::Status;

fn fresh() -> (tempfile::TempDir, RunDirectory) {
    let root = tempfile::tempdir().unwrap();
    let directory = RunDirectory::create(root.path(), &sample::header()).unwrap();
    (root, directory)
}

fn append_raw(run: &Path, bytes: &[u8]) {
    let mut file = OpenOptions::new().append(true).open(run.join(EVENTS_FILE)).unwrap();
    file.write_all(bytes).unwrap();
}

#[test]
fn a_run_folder_is_named_by_time_and_hash_and_holds_its_header() {
    let (_root, directory) = fresh();
    let name = directory.path().file_name().unwrap().to_str().unwrap();
    let (time, hash) = name.split_once('-').unwrap();
    assert_eq!((time.len(), hash.len()), (16, 8), "{name}");
    assert_eq!(directory.header().run_id, name);
    assert_eq!(read_header(directory.path()).unwrap(), *directory.header());
}

#[test]
fn two_runs_of_the_same_second_get_two_folders() {
    let root = tempfile::tempdir().unwrap();
    let first = RunDirectory::create(root.path(), &sample::header()).unwrap();
    let second = RunDirectory::create(root.path(), &sample::header()).unwrap();
    assert_ne!(first.path(), second.path());
}

#[test]
fn every_kind_of_event_survives_the_way_through_the_file() {
    let (_root, mut directory) = fresh();
    let events = sample::events(directory.header());
    for event in &events {
        directory.append(event).unwrap();
    }
    let text = fs::read_to_string(directory.path().join(EVENTS_FILE)).unwrap();
    let back: Vec<Event> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(back, events);
}

#[test]
fn results_hold_the_same_numbers_as_the_events_and_read_back() {
    let (_root, mut directory) = fresh();
    for event in sample::events(&directory.header().clone()) {
        directory.append(&event).unwrap();
    }
    let written = directory.finish().unwrap();
    assert_eq!(read_results(directory.path()).unwrap(), written);
    assert_eq!(written.counts.values().sum::<usize>(), written.cases.len());
    assert_eq!(written.counts["fail"], 2);
    assert_eq!(written.exit_code, Some(1));
    let leftovers: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("tmp"))
        .collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
}

#[test]
fn a_torn_last_line_costs_that_line_only() {
    let (_root, mut directory) = fresh();
    for event in sample::events(&directory.header().clone()).iter().take(3) {
        directory.append(event).unwrap();
    }
    let before = read_events(directory.path()).unwrap();
    assert!(!before.torn);
    append_raw(directory.path(), br#"{"event":"case_judged","id":"decode/half"#);
    let record = read_events(directory.path()).unwrap();
    assert!(record.torn && record.finished.is_none());
    assert_eq!(record.cases, before.cases);
}

#[test]
fn a_torn_line_may_end_inside_a_character() {
    let (_root, directory) = fresh();
    append_raw(directory.path(), &"{\"event\":\"é".as_bytes()[..11]);
    assert!(read_events(directory.path()).unwrap().torn);
}

#[test]
fn a_broken_line_in_the_middle_is_an_error_that_names_it() {
    let (_root, mut directory) = fresh();
    directory.append(&Event::RunStarted(Box::new(directory.header().clone()))).unwrap();
    append_raw(directory.path(), b"{\"event\":\"no such event\"}\n");
    match read_events(directory.path()) {
        Err(RunDirectoryError::Malformed { line: 2, reason, .. }) => {
            assert!(reason.contains("no such event"))
        }
        other => panic!("expected a malformed line 2, got {other:?}"),
    }
}

#[test]
fn a_killed_run_resumes_with_the_ids_that_it_had_judged() {
    let (_root, mut directory) = fresh();
    let path = directory.path().to_owned();
    directory.append(&Event::CaseJudged(sample::passed("decode/a", 0.5))).unwrap();
    drop(directory);
    append_raw(&path, b"{\"event\":\"case_ju");

    let (mut directory, record) = RunDirectory::reopen(&path, &sample::header()).unwrap();
    assert!(record.torn);
    assert_eq!(record.judged_ids(), ["decode/a".to_owned()].into());
    directory.append(&Event::CaseJudged(sample::passed("decode/b", 0.5))).unwrap();
    let record = read_events(&path).unwrap();
    assert!(!record.torn, "the torn line was cut off");
    assert_eq!(record.cases.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), ["decode/a", "decode/b"]);
}

#[test]
fn results_of_an_earlier_end_do_not_outlive_a_resume() {
    let (_root, mut directory) = fresh();
    let path = directory.path().to_owned();
    directory.finish().unwrap();
    drop(directory);
    assert!(read_results(&path).is_ok());
    let (mut directory, _) = RunDirectory::reopen(&path, &sample::header()).unwrap();
    assert!(read_results(&path).unwrap_err().to_string().contains("after a kill"));
    directory.append(&Event::CaseJudged(sample::passed("decode/a", 0.5))).unwrap();
    assert_eq!(directory.finish().unwrap().cases.len(), 1);
}

#[test]
fn a_resume_that_is_killed_does_not_show_the_end_of_the_run_before_it() {
    let (_root, mut directory) = fresh();
    let end = Event::RunFinished { counts: Default::default(), elapsed_s: 1.0, exit_code: 3 };
    directory.append(&end).unwrap();
    assert_eq!(read_events(directory.path()).unwrap().finished.unwrap().exit_code, 3);
    directory.append(&Event::CaseJudged(sample::passed("decode/a", 0.5))).unwrap();
    assert_eq!(read_events(directory.path()).unwrap().finished, None);
}

#[test]
fn a_whole_last_line_that_only_lacks_its_end_is_kept_on_resume() {
    let (_root, mut directory) = fresh();
    let path = directory.path().to_owned();
    directory.append(&Event::CaseJudged(sample::passed("decode/a", 0.5))).unwrap();
    drop(directory);
    let text = fs::read_to_string(path.join(EVENTS_FILE)).unwrap();
    fs::write(path.join(EVENTS_FILE), text.trim_end()).unwrap();
    let (mut directory, record) = RunDirectory::reopen(&path, &sample::header()).unwrap();
    assert_eq!(record.cases.len(), 1);
    directory.append(&Event::CaseJudged(sample::passed("decode/b", 0.5))).unwrap();
    assert_eq!(read_events(&path).unwrap().cases.len(), 2);
}

#[test]
fn a_case_that_is_judged_again_counts_once_with_its_last_verdict() {
    let (_root, mut directory) = fresh();
    directory.append(&Event::CaseJudged(sample::failed("decode/a", sample::failure()))).unwrap();
    directory.append(&Event::CaseJudged(sample::passed("decode/a", 0.5))).unwrap();
    let record = read_events(directory.path()).unwrap();
    assert_eq!(record.counts(), [("pass".to_owned(), 1)].into());
}

#[test]
fn a_resume_with_other_options_is_refused_with_each_difference() {
    let (_root, directory) = fresh();
    let path = directory.path().to_owned();
    drop(directory);
    let selection =
        serde_json::to_value(Selection { skip: vec!["cold".into()], ..Selection::default() }).unwrap();
    let profile = serde_json::json!({"engine": "cpu", "version": "0.2.0"});
    let other =
        RunHeader { seed: 99, fault: Some("drop-rank".into()), selection, profile, ..sample::header() };
    let message = RunDirectory::reopen(&path, &other).unwrap_err().to_string();
    assert!(message.contains("seed was 7, now 99"), "{message}");
    assert!(message.contains("fault was none, now drop-rank"), "{message}");
    assert!(message.contains("selection was all cases, now id does not contain \"cold\""), "{message}");
    assert!(message.contains("engine profile was "), "{message}");
    assert!(message.contains("start a new run"), "{message}");
}

#[test]
fn a_second_writer_is_refused_with_the_pid_of_the_first_and_leaves_its_lock_alone() {
    let (_root, directory) = fresh();
    let path = directory.path().to_owned();
    let error = RunDirectory::reopen(&path, &sample::header()).unwrap_err();
    assert!(
        matches!(&error, RunDirectoryError::Locked { holder: Some(h), .. } if h.pid == std::process::id())
    );
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    assert!(path.join(LOCK_FILE).exists());
    drop(directory);
    assert!(RunDirectory::reopen(&path, &sample::header()).is_ok());
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("a-file");
    fs::write(&file, "").unwrap();
    let error = RunDirectory::create(&file.join("runs"), &sample::header()).unwrap_err();
    assert!(matches!(error, RunDirectoryError::NotWritable { .. }), "{error:?}");
    assert!(error.to_string().contains("a-file/runs") && error.to_string().contains("--runs DIR"), "{error}");
}

#[test]
fn an_unknown_schema_version_is_refused_before_anything_is_read() {
    let (_root, directory) = fresh();
    let path = directory.path().join(RUN_FILE);
    fs::write(&path, r#"{"schema_version": 99, "of": "the future"}"#).unwrap();
    let error = read_events(directory.path()).unwrap_err();
    assert!(matches!(&error, RunDirectoryError::UnknownVersion { found, .. } if found == "99"), "{error:?}");
    fs::write(&path, r#"{"suite": "gate"}"#).unwrap();
    let error = read_events(directory.path()).unwrap_err();
    assert!(
        matches!(&error, RunDirectoryError::UnknownVersion { found, .. } if found == "none"),
        "{error:?}"
    );
}

#[test]
fn a_folder_without_a_header_is_not_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let error = read_events(folder.path()).unwrap_err();
    assert!(matches!(&error, RunDirectoryError::NotARun { reason, .. } if reason.contains("run.json")));
    assert!(matches!(read_events(&folder.path().join("absent")), Err(RunDirectoryError::NotARun { .. })));
}

#[test]
fn runs_are_found_by_latest_by_id_by_prefix_and_by_path() {
    let root = tempfile::tempdir().unwrap();
    let error = resolve(root.path(), LATEST).unwrap_err();
    assert!(error.to_string().contains("holds no run yet"), "{error}");
    let first = RunDirectory::create(root.path(), &sample::header()).unwrap();
    let second = RunDirectory::create(root.path(), &sample::header()).unwrap();
    assert_eq!(resolve(root.path(), LATEST).unwrap(), second.path());
    assert_eq!(resolve(root.path(), &first.header().run_id).unwrap(), first.path());
    assert_eq!(resolve(root.path(), first.path().to_str().unwrap()).unwrap(), first.path());
    assert!(
        matches!(resolve(root.path(), "2"), Err(RunDirectoryError::Ambiguous { candidates, .. }) if candidates.len() == 2)
    );
    assert!(matches!(resolve(root.path(), "nonsense"), Err(RunDirectoryError::NotARun { .. })));
}

#[test]
fn latest_follows_the_run_that_was_resumed_last_and_may_be_a_plain_file() {
    let root = tempfile::tempdir().unwrap();
    let first = RunDirectory::create(root.path(), &sample::header()).unwrap();
    let path = first.path().to_owned();
    drop(first);
    let _second = RunDirectory::create(root.path(), &sample::header()).unwrap();
    let _again = RunDirectory::reopen(&path, &sample::header()).unwrap();
    assert_eq!(resolve(root.path(), LATEST).unwrap(), path);
    fs::remove_file(root.path().join(LATEST)).unwrap();
    fs::write(root.path().join(LATEST), path.file_name().unwrap().to_str().unwrap()).unwrap();
    assert_eq!(resolve(root.path(), LATEST).unwrap(), path);
}

#[test]
fn ids_that_look_alike_once_sanitised_get_folders_of_their_own() {
    let (_root, directory) = fresh();
    let hostile = ["a/b", "a|b", "a b", "../../etc/passwd", "..", "", &"x".repeat(500), "日本"];
    let mut folders = std::collections::HashSet::new();
    for id in hostile {
        let folder = directory.case_directory(id).unwrap();
        assert!(folder.is_dir());
        assert_eq!(folder.parent().unwrap(), directory.path().join(CASES_FOLDER), "{id}");
        assert!(folder.file_name().unwrap().len() < 120);
        assert_eq!(directory.case_directory(id).unwrap(), folder, "the same id, the same folder");
        folders.insert(folder);
    }
    assert_eq!(folders.len(), hostile.len());
}

#[test]
fn a_figure_that_json_cannot_hold_is_refused_instead_of_read_back_as_null() {
    let (_root, mut directory) = fresh();
    let finding = Finding::Holds(Measured { compared: 1, worst_ratio: f64::NAN, exact: 0, figures: None });
    let result = CaseResult {
        id: "decode/a".into(),
        status: Status::Pass,
        checks: vec![Check::new("p", finding)],
        elapsed_s: 0.0,
        coverage: Coverage::default(),
        reason: None,
    };
    let error = directory.append(&Event::CaseJudged(result)).unwrap_err();
    assert!(error.to_string().contains("worst ratio of p"), "{error}");
    assert_eq!(fs::read(directory.path().join(EVENTS_FILE)).unwrap(), b"");
}
