//! `check`: one call of a user's own function, from a file.

use std::io::Read;
use std::path::PathBuf;

use crate::check::{Report, check};
use crate::cli::CommandError;
use crate::commands::print;
use crate::status::Exit;

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Safetensors file with the call's tensors and, in its metadata, what they are; `-` reads standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Print the report as JSON, with its text in the field `text`
    #[arg(long)]
    json: bool,
}

/// Runs `check`.
///
/// # Errors
/// [`CommandError::Usage`] when the file can't be read or does not fit what it says of itself.
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let report = report(args)?;
    if args.json {
        let mut value = serde_json::to_value(&report).map_err(CommandError::internal)?;
        value["text"] = report.to_string().into();
        print(format!("{value}\n"))?;
    } else {
        print(&report)?;
    }
    Ok(report.exit())
}

fn report(args: &Args) -> Result<Report, CommandError> {
    let image = if args.file.as_os_str() == "-" {
        let mut image = Vec::new();
        std::io::stdin()
            .lock()
            .read_to_end(&mut image)
            .map_err(|error| CommandError::Usage(format!("failed to read standard input: {error}")))?;
        image
    } else {
        std::fs::read(&args.file).map_err(|error| {
            CommandError::Usage(format!("failed to read the call {}: {error}", args.file.display()))
        })?
    };
    check(&image).map_err(CommandError::usage)
}
