//! Questions and answers on disk, with a program in C++ that computes.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::program::Program;

const STATES: [&str; 4] = ["--suite", "engine-smoke", "-E", "family(merge_states) & not dtype(f16)"];

/// The compiled program of docs/files.md; `None`, said aloud, where there is no C++ compiler.
fn compiled(program: &Program, flag: &str) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runners/files/merge_states.cpp");
    let binary = program.path(if flag.is_empty() { "honest" } else { "wrong" });
    let mut command = Command::new("g++");
    command
        .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args((!flag.is_empty()).then_some(flag));
    let Ok(output) = command.arg(source).arg("-o").arg(&binary).output() else {
        eprintln!("SKIPPED: there is no g++ to compile runners/files/merge_states.cpp with");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(binary)
}

fn export(program: &Program, folder: &str) {
    program.expect(0, &[&["export", folder], &STATES[..]].concat());
}

#[test]
fn a_program_in_cpp_passes_and_the_same_with_a_bug_fails() {
    let program = Program::new();
    let Some(honest) = compiled(&program, "") else { return };
    for folder in ["questions", "others"] {
        export(&program, folder);
    }
    let run = |binary: &Path, folder: &str| {
        let output = Command::new(binary).arg(program.path(folder)).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "answered 6 cases\n");
    };
    run(&honest, "questions");
    let judged = program.expect(0, &["judge", "questions"]);
    assert_eq!(
        judged.out.lines().filter(|line| line.starts_with("pass merge_states/")).count(),
        6,
        "{}",
        judged.out
    );
    assert!(judged.err.contains("judged 6 of 6 exported cases, 0 failed"), "{}", judged.err);
    assert!(judged.out.contains("× unsupported: files answer one plain pass"), "{}", judged.out);
    let wrong = compiled(&program, "-DBUG").expect("it compiled without");
    run(&wrong, "others");
    let judged = program.expect(1, &["judge", "others"]);
    assert!(judged.out.contains("states.output: two states merge"), "{}", judged.out);
}

#[test]
fn questions_without_answers_end_with_five_and_name_the_file() {
    let program = Program::new();
    export(&program, "questions");
    let judged = program.expect(5, &["judge", "questions"]);
    assert!(judged.out.contains("no outputs yet: merge_states_"), "{}", judged.out);
    assert!(judged.out.contains("/step0/outputs.safetensors"), "{}", judged.out);
    assert!(judged.err.contains("judged 0 of 6 exported cases"), "{}", judged.err);
    let error = program.expect(2, &[&["export", "questions"], &STATES[..]].concat()).err;
    assert!(error.contains("not empty"), "{error}");
}

#[test]
fn a_profile_that_does_not_read_and_a_selection_that_files_cannot_ask_are_told() {
    let program = Program::new();
    program.write("profile.json", "{\"engine\": \"x\"}");
    let error = program.expect(2, &[&["export", "a", "--profile", "profile.json"], &STATES[..]].concat()).err;
    assert!(error.contains("profile.json does not read"), "{error}");
    let error = program.expect(4, &["export", "b", "-E", "family(rules)"]).err;
    assert!(error.contains("left out rules/") && error.contains("settings are asked"), "{error}");
}
