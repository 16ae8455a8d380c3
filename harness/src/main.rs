//! The program: one verb, one exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(shardcheck::cli::main().code())
}
