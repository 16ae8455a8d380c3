//! `diff`: two runs compared.

use std::path::PathBuf;

use crate::cli::CommandError;
use crate::commands::print;
use crate::diff::Diff;
use crate::run_directory::{read_events, resolve};
use crate::status::Exit;

/// Options of `diff`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run before: `latest`, a run id or a path
    #[arg(value_name = "A")]
    before: String,

    /// Run after
    #[arg(default_value = "latest", value_name = "B")]
    after: String,

    /// Folder that run folders lie in
    #[arg(long, default_value = "runs", value_name = "DIR")]
    runs: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `diff`.
///
/// # Errors
/// [`CommandError::Usage`] when a run can't be read.
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let read = |name: &str| {
        let path = resolve(&args.runs, name).map_err(CommandError::usage)?;
        read_events(&path).map_err(CommandError::usage)
    };
    let diff = Diff::between(&read(&args.before)?, &read(&args.after)?);
    if args.json {
        print(serde_json::to_string_pretty(&diff).map_err(CommandError::internal)? + "\n")?;
    } else {
        print(&diff)?;
    }
    Ok(diff.exit())
}
