//! The native engine in host memory: a driver and a compiler of the tests take the places of the vendor's libraries, and the harness judges what
//! the kernels answer. Skipped where there is no C++ compiler.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use shardcheck::status::Status;

use crate::program::{Outcome, Program};

/// Threads of a block: several, so that a barrier that is missing shows; few, since they take turns.
const THREADS: &str = "3";
/// Families of which all kernels are played.
const PLAYED: &str = "family(route | moe | pcp | attend_selected)";

/// Builds the stand-ins into the program's folder; `None` without a compiler.
fn stand_ins(program: &Program) -> Option<PathBuf> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runners/cuda/tests/host");
    let folder = program.path("device");
    std::fs::create_dir_all(&folder).unwrap();
    let dialect = sources.join("dialect.h").canonicalize().unwrap();
    // both names of each: a machine with the vendor's libraries has them under either
    for (source, library, other) in
        [("driver.cpp", "libcuda.so.1", "libcuda.so"), ("compiler.cpp", "libnvrtc.so.13", "libnvrtc.so")]
    {
        let mut compiler = Command::new("g++");
        compiler.args(["-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]);
        compiler.arg(folder.join(library)).arg(sources.join(source)).arg("-ldl");
        compiler
            .arg(format!("-DHOST_DIALECT=\"{}\"", dialect.display()))
            .arg(format!("-DHOST_THREADS={THREADS}"));
        match compiler.output() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                eprintln!("SKIPPED: there is no g++ to play a device with");
                return None;
            }
            output => {
                let output = output.unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                std::fs::copy(folder.join(library), folder.join(other)).unwrap();
            }
        }
    }
    Some(folder)
}

/// Runs the program with the stand-ins before all other libraries.
fn play(program: &Program, folder: &Path, arguments: &[&str]) -> Outcome {
    let mut command = program.command(arguments);
    command.env("LD_LIBRARY_PATH", folder).env("SHARDCHECK_CUDA_LIB_DIR", folder).env("TMPDIR", folder);
    program.finish(command, arguments)
}

#[test]
fn merges_of_given_states_of_f16_answer_the_gate_in_host_memory() {
    let program = Program::new();
    let Some(folder) = stand_ins(&program) else { return };
    let of_f16 = "family(merge_partials | merge_states | pack_lse) & dtype(f16)";
    let outcome = play(&program, &folder, &["run", "--suite", "gate", "--engine", "cuda", "-E", of_f16]);
    assert_eq!(outcome.code, Some(0), "{}{}", outcome.out, outcome.err);
    let passed = program.record().cases.iter().filter(|case| case.status == Status::Pass).count();
    assert!(passed > 40, "{passed}");
}

#[test]
fn kernels_of_routers_of_experts_of_prefill_and_of_selected_tokens_answer_the_gate_in_host_memory() {
    let program = Program::new();
    let Some(folder) = stand_ins(&program) else { return };
    let outcome = play(&program, &folder, &["run", "--suite", "gate", "--engine", "cuda", "-E", PLAYED]);
    assert_eq!(outcome.code, Some(0), "{}{}", outcome.out, outcome.err);
    let record = program.record();
    // no kernel divides a batch into groups that overlap, and none of attention takes f16
    let left_out = |id: &str| id.contains(".overlap") || id.contains(".f16.");
    let judged = record.cases.iter().filter(|case| !left_out(&case.id));
    assert!(judged.clone().count() >= 196 && judged.clone().all(|case| case.status == Status::Pass));
}

#[test]
fn faults_of_those_kernels_are_killed_in_host_memory() {
    let program = Program::new();
    let Some(folder) = stand_ins(&program) else { return };
    let mut arguments = vec!["mutants", "run", "--engine", "cuda", "--no-baseline", "-E", PLAYED];
    for fault in [
        "router-masked-groups-are-zero",
        "moe-flat-rank-reversed",
        "moe-own-part-summed-first",
        "moe-results-taken-back-in-reverse",
        "pcp-chunk-not-clamped",
        "pcp-restore-without-padding",
        "selected-rows-share-the-first-list",
        "selected-dummy-is-attended-to",
        "selected-empty-row-keeps-the-one-before",
        "sparse-owner-without-interleave",
    ] {
        arguments.extend(["--fault", fault]);
    }
    let outcome = play(&program, &folder, &arguments);
    assert_eq!(outcome.code, Some(0), "{}{}", outcome.out, outcome.err);
}
