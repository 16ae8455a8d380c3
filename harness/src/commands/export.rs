//! `export`: a suite's questions as files.

use std::path::PathBuf;

use shardcheck_engine::Profile;

use crate::cli::CommandError;
use crate::commands::CaseArgs;
use crate::export::{default_profile, export};
use crate::status::Exit;

/// Options of `export`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder to write into: new or empty
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// Profile of what will compute, as JSON: contract and conventions that its outputs are judged by. An honest default when not given
    #[arg(long, alias = "engine-profile", value_name = "FILE")]
    profile: Option<PathBuf>,

    #[command(flatten)]
    cases: CaseArgs,
}

/// Runs `export`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let profile = match &args.profile {
        None => default_profile(),
        Some(path) => {
            let named = |error: &dyn std::fmt::Display| {
                CommandError::Usage(format!("the profile {} does not read: {error}", path.display()))
            };
            let text = std::fs::read_to_string(path).map_err(|error| named(&error))?;
            serde_json::from_str::<Profile>(&text).map_err(|error| named(&error))?
        }
    };
    profile.check().map_err(CommandError::usage)?;
    let (cases, _) = args.cases.selected()?;
    let manifest = export(&args.folder, &cases, &args.cases.source(), args.cases.seed, &profile)
        .map_err(CommandError::usage)?;
    for left_out in &manifest.left_out {
        eprintln!("left out {}: {}", left_out.id, left_out.reason);
    }
    eprintln!(
        "exported {} cases to {}; once outputs lie beside the inputs, `shardcheck judge {}` decides",
        manifest.cases.len(),
        args.folder.display(),
        args.folder.display()
    );
    if manifest.cases.is_empty() {
        return Err(CommandError::NothingSelected("files can ask none of the selected cases".to_owned()));
    }
    Ok(Exit::Passed)
}
