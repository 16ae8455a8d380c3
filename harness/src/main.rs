//! The program: one verb, one exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    let code = shardcheck::cli::main().code();
    shardcheck_cuda::end_after_abort(code);
    ExitCode::from(code)
}
