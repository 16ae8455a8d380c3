//! `engines`: published engines whose own code can be judged.

use std::process::Command;

use crate::cli::CommandError;
use crate::engines::python;
use crate::status::Exit;

/// Options of `engines`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: EnginesVerb,
}

#[derive(Debug, clap::Subcommand)]
enum EnginesVerb {
    /// Bring the Python files of a release into the cache, by pip
    ///
    /// Only `.py` files are kept, as they were published; SHARDCHECK_CACHE names another cache. Needs the Python package
    /// (`pip install ./runners/python`) in `python3`, or in the interpreter that SHARDCHECK_PYTHON names.
    Fetch {
        /// Package and version, such as vllm==0.33.0 or sglang==0.5.23
        #[arg(value_name = "NAME==VERSION", required = true)]
        releases: Vec<String>,
    },
}

/// Runs `engines`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let EnginesVerb::Fetch { releases } = &args.verb;
    let python = python();
    for release in releases {
        // `NAME==VERSION` alone: what follows is handed to another program
        if release.starts_with('-') || !release.contains("==") {
            return Err(CommandError::Usage(format!(
                "{release:?} is not NAME==VERSION, such as vllm==0.33.0"
            )));
        }
        let status = Command::new(&python)
            .args(["-m", "shardcheck.fetch", release])
            .status()
            .map_err(|error| CommandError::Usage(format!("{python} can't be started: {error}")))?;
        if !status.success() {
            return Err(CommandError::Usage(format!(
                "{release} was not fetched; if {python} lacks the package, `{python} -m pip install ./runners/python` brings it"
            )));
        }
    }
    Ok(Exit::Passed)
}
