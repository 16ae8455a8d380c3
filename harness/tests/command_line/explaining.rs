//! What the program tells of itself: lists, explanations, and what a machine can do.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use serde_json::Value;
use shardcheck::boundary::boundary_faults;
use shardcheck::bugs::bugs;
use shardcheck::explain::Topic;
use shardcheck::properties;
use shardcheck_cases::{Case, Family, SuiteName, suite};
use shardcheck_cpu::{FaultClass, faults};

use crate::program::Program;

#[test]
fn every_property_is_explained_with_what_it_must_kill() {
    let program = Program::new();
    for property in properties::all() {
        let outcome = program.expect(0, &["explain", property.id]);
        for part in [property.statement, property.source, property.tolerance] {
            assert!(outcome.out.contains(part), "{}\n{}", property.id, outcome.out);
        }
        let killed = faults().iter().filter(|fault| fault.killed_by.contains(&property.id));
        assert!(killed.into_iter().all(|fault| outcome.out.contains(fault.name)), "{}", outcome.out);
    }
}

#[test]
fn every_fault_is_explained_with_the_command_that_injects_it() {
    let program = Program::new();
    for fault in faults() {
        let outcome = program.expect(0, &["explain", fault.name]);
        let command = format!("shardcheck run --fault {}", fault.name);
        for part in [fault.title, fault.class.name(), &command] {
            assert!(outcome.out.contains(part), "{}\n{}", fault.name, outcome.out);
        }
    }
}

#[test]
fn classes_faults_at_the_boundary_and_public_bugs_are_explained_with_what_belongs_to_them() {
    let program = Program::new();
    for class in FaultClass::ALL {
        let outcome = program.expect(0, &["explain", class.name()]);
        let members = faults().iter().filter(|fault| fault.class == class);
        assert!(members.into_iter().all(|fault| outcome.out.contains(fault.name)), "{}", outcome.out);
    }
    for fault in boundary_faults() {
        let outcome = program.expect(0, &["explain", fault.name]);
        assert!(outcome.out.contains(fault.title) && outcome.out.contains("--boundary"), "{}", outcome.out);
    }
    for bug in bugs() {
        let outcome = program.expect(0, &["explain", bug.id()]);
        assert!(bug.faults().iter().all(|fault| outcome.out.contains(fault.name)), "{}", outcome.out);
    }
}

#[test]
fn every_family_is_explained_with_its_properties_and_a_bad_id_with_its_reason() {
    let program = Program::new();
    for family in Family::ALL {
        let outcome = program.expect(0, &["explain", family.name()]);
        let properties = properties::all().filter(|property| property.families.contains(&family));
        assert!(properties.into_iter().all(|property| outcome.out.contains(property.id)), "{}", outcome.out);
    }
    let id = program.ids(&["--suite", "engine-smoke", "decode/"]).remove(0);
    let outcome = program.expect(2, &["explain", &format!("{id}9x")]);
    assert!(outcome.err.contains("seed"), "{}", outcome.err);
}

#[test]
fn every_topic_is_explained_and_listed() {
    let program = Program::new();
    let index = program.expect(0, &["explain"]).out;
    assert_eq!(program.expect(0, &["explain", "topics"]).out, index);
    for topic in Topic::ALL {
        let outcome = program.expect(0, &["explain", topic.name()]);
        assert!(outcome.out.starts_with(topic.headline()) && outcome.out.lines().count() > 3, "{topic}");
        assert!(index.contains(topic.name()), "{topic}");
    }
    let lines = |what: &str| program.expect(0, &["explain", what]).out.lines().count();
    assert_eq!(lines("properties"), properties::all().count());
    assert_eq!(lines("faults"), faults().len());
}

#[test]
fn the_exit_code_for_nothing_to_do_names_every_command_that_needs_a_failure() {
    let program = Program::new();
    let text = program.expect(0, &["explain", "exit-codes"]).out;
    let line = text.lines().find(|line| line.contains("NothingSelected")).unwrap();
    program.expect(0, &["run", "--suite", "engine-smoke", "layout/"]);
    let case = program.ids(&["--suite", "engine-smoke", "layout/"]).remove(0);
    for (verb, what) in [("replay", "latest"), ("diagnose", "latest"), ("shrink", case.as_str())] {
        let ended = program.run(&[verb, what]);
        assert!(ended.code == Some(4) && line.contains(verb), "{verb}: {:?}\n{line}", ended.code);
    }
}

#[test]
fn a_case_is_explained_by_its_properties_and_its_json() {
    let program = Program::new();
    let case = &suite(SuiteName::EngineSmoke, 1)[0];
    let outcome = program.expect(0, &["explain", &case.id()]);
    let (text, json) = outcome.out.split_once("case JSON:\n").expect("the case as JSON stands last");
    assert!(properties::of(case).all(|property| text.contains(property.id)), "{text}");
    assert_eq!(Case::from_json(json).unwrap(), *case);
}

#[test]
fn the_first_word_of_every_line_of_faults_is_a_name_that_can_be_injected() {
    let program = Program::new();
    let text = program.expect(0, &["mutants", "list"]).out;
    let first: Vec<&str> = text.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(first, faults().iter().map(|fault| fault.name).collect::<Vec<_>>());
    assert!(first.len() >= 30);
    let json = program.expect(0, &["mutants", "list", "--format", "json"]).out;
    let names: Vec<Value> =
        json.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["name"].take()).collect();
    assert_eq!(names, first);
}

#[test]
fn listed_json_holds_the_whole_case_and_its_properties() {
    let program = Program::new();
    let ids = program.ids(&["--suite", "engine-smoke"]);
    let json = program.expect(0, &["list", "--suite", "engine-smoke", "--format", "json"]).out;
    assert_eq!(json.lines().count(), ids.len());
    for (line, id) in json.lines().zip(&ids) {
        let value: Value = serde_json::from_str(line).unwrap();
        let case = Case::from_json(&value["case"].to_string()).unwrap();
        assert_eq!((value["id"].as_str(), case.id()), (Some(id.as_str()), id.clone()));
        let known: Vec<Value> = properties::of(&case).map(|property| property.id.into()).collect();
        assert_eq!(value["properties"], Value::from(known));
    }
}

#[test]
fn partitions_share_the_cases_out_without_loss_or_repetition() {
    let program = Program::new();
    let mut parts: Vec<String> = (1..=3)
        .flat_map(|part| program.ids(&["--suite", "engine-smoke", "--partition", &format!("hash:{part}/3")]))
        .collect();
    let mut all = program.ids(&["--suite", "engine-smoke"]);
    parts.sort_unstable();
    all.sort_unstable();
    assert_eq!(parts, all);
}

#[test]
fn a_reader_that_closes_the_pipe_early_is_no_error() {
    let program = Program::new();
    for arguments in
        [&["list"][..], &["list", "--format", "json"], &["explain", "operations"], &["mutants", "list"]]
    {
        let mut child =
            program.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        // the reader is dropped, and the pipe with it, once it has its line
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{arguments:?}\n{errors}");
        assert_eq!(errors, "", "{arguments:?}");
        assert!(!first.trim().is_empty(), "{arguments:?}");
    }
}

#[test]
fn nobody_reading_at_all_is_no_panic() {
    let program = Program::new();
    for arguments in [&["list"][..], &["explain", "properties"], &["doctor"], &["mutants", "list"]] {
        let mut child =
            program.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut errors = String::new();
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert_eq!((child.wait().unwrap().code(), errors.as_str()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn the_doctor_finds_the_embedded_engine_in_order() {
    let outcome = Program::new().expect(0, &["doctor"]);
    for part in ["engine cpu", "rule sets: ", "decode ", "ms a case", std::env::consts::ARCH] {
        assert!(outcome.out.contains(part), "{part}\n{}", outcome.out);
    }
}

#[test]
fn every_verb_has_help_and_the_program_a_version() {
    let program = Program::new();
    for verb in ["run", "list", "explain", "replay", "judge", "mutants", "diff", "golden", "doctor"] {
        let outcome = program.expect(0, &[verb, "--help"]);
        assert!(outcome.out.contains("Usage: shardcheck"), "{verb}");
    }
    assert_eq!(program.expect(0, &["--version"]).out, format!("shardcheck {}\n", env!("CARGO_PKG_VERSION")));
    assert!(program.expect(0, &["--help"]).out.contains("Exit codes: 0 passed"));
}
