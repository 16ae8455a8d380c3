//! `adapter`: the embedded engine behind a socket, for whoever supervises adapters.

use std::path::PathBuf;

use shardcheck_process::{AdapterError, Misbehaviour, Strike, answer_for};

use crate::cli::CommandError;
use crate::engines::find_fault;
use crate::status::Exit;

/// Options of `adapter`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Inject a known fault into the embedded engine
    #[arg(long, value_name = "NAME")]
    fault: Option<String>,

    /// Misbehave once, in the first reply with an output, to see that whoever supervises gives the right verdict
    #[arg(long, value_name = "HOW", requires = "mark")]
    misbehave: Option<Misbehaviour>,

    /// File that says that it has been done: a process that is started anew finds it and behaves
    #[arg(long, value_name = "FILE")]
    mark: Option<PathBuf>,
}

/// Runs `adapter`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let engine = match &args.fault {
        None => shardcheck_cpu::engine(),
        Some(name) => shardcheck_cpu::CpuEngine::with_fault(find_fault(name)?),
    };
    let strike = args.misbehave.zip(args.mark.clone()).map(|(kind, mark)| Strike { kind, mark });
    match answer_for(&engine, strike) {
        Ok(()) => Ok(Exit::Passed),
        Err(error @ AdapterError::NotStarted(_)) => Err(CommandError::usage(error)),
        Err(error) => Err(CommandError::internal(error)),
    }
}
