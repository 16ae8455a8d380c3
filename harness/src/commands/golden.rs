//! `golden`: vectors for programs that load files.

use std::path::PathBuf;

use crate::cli::CommandError;
use crate::commands::print;
use crate::golden;
use crate::status::Exit;

/// Options of `golden`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: GoldenVerb,
}

#[derive(Debug, clap::Subcommand)]
enum GoldenVerb {
    /// Write the vectors into a folder
    Generate {
        /// Folder
        #[arg(default_value = "golden", value_name = "DIR")]
        folder: PathBuf,
    },
    /// Check a folder against its manifest and against vectors made anew on this machine
    Verify {
        /// Folder
        #[arg(default_value = "golden", value_name = "DIR")]
        folder: PathBuf,
    },
}

/// Runs `golden`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    match &args.verb {
        GoldenVerb::Generate { folder } => {
            let manifest = golden::generate(folder).map_err(CommandError::usage)?;
            let bytes: u64 = manifest.files.values().map(|file| file.bytes).sum();
            let count = manifest.files.len() + 1;
            print(format!("wrote {count} files, {bytes} bytes, to {}\n", folder.display()))?;
            Ok(Exit::Passed)
        }
        GoldenVerb::Verify { folder } => {
            let differences = golden::verify(folder).map_err(CommandError::usage)?;
            for difference in &differences {
                let path = folder.join(&difference.file);
                print(format!("fail {}: {}\n", path.display(), difference.what))?;
            }
            if differences.is_empty() {
                print(format!("pass {}: every byte is what this machine makes\n", folder.display()))?;
                return Ok(Exit::Passed);
            }
            print(format!(
                "restore the files, or write them anew with `shardcheck golden generate {}`\n",
                folder.display()
            ))?;
            Ok(Exit::Failed)
        }
    }
}
