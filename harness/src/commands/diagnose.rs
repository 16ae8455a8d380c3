//! `diagnose`: which known fault explains the stored failures of a run.

use std::path::PathBuf;
use std::time::Duration;

use crate::cli::CommandError;
use crate::commands::print;
use crate::diagnose::{MOST_CASES, diagnose, evidence_of};
use crate::run_directory::{read_events, resolve};
use crate::status::Exit;

/// Options of `diagnose`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run: `latest`, a run id or a path
    #[arg(default_value = "latest", value_name = "RUN")]
    run: String,

    /// Folder that run folders lie in
    #[arg(long, default_value = "runs", value_name = "DIR")]
    runs: PathBuf,

    /// Failed cases that must be explained together
    #[arg(long, default_value_t = MOST_CASES, value_name = "N")]
    cases: usize,

    /// Seconds after which no further fault is tried
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS")]
    budget_s: f64,

    /// Print the diagnosis as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `diagnose`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let budget = budget(args.budget_s)?;
    let run = resolve(&args.runs, &args.run).map_err(CommandError::usage)?;
    let record = read_events(&run).map_err(CommandError::usage)?;
    if record.failed.is_empty() {
        return Err(CommandError::NothingSelected(format!(
            "no case of {} failed: there is nothing to diagnose",
            run.display()
        )));
    }
    let evidence = evidence_of(&run, &record, args.cases.max(1), budget).map_err(CommandError::usage)?;
    let Some(diagnosis) = diagnose(&evidence, budget) else {
        print(
            "the healthy embedded engine gives the same answers: nothing that was seen needs a fault to explain it\n",
        )?;
        return Ok(Exit::Passed);
    };
    if args.json {
        print(serde_json::to_string_pretty(&diagnosis).map_err(CommandError::internal)? + "\n")?;
    } else {
        print(diagnosis.lines().join("\n") + "\n")?;
    }
    Ok(Exit::Passed)
}

/// Seconds as they are given on the command line.
pub(super) fn budget(seconds: f64) -> Result<Duration, CommandError> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| CommandError::Usage(format!("--budget-s {seconds} is not a number of seconds")))
}
