//! `judge`: decide again on the stored failures of a run, without the engine.

use std::path::PathBuf;

use crate::cli::CommandError;
use crate::commands::print;
use crate::commands::reporting::full_text;
use crate::progress::Progress;
use crate::recording::Recorded;
use crate::run::{contradicts, judge_case};
use crate::run_directory::{read_events, resolve};
use crate::status::Exit;
use crate::store;

/// Options of `judge`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run: `latest`, a run id or a path
    #[arg(default_value = "latest", value_name = "RUN")]
    run: String,

    /// Folder that run folders lie in
    #[arg(long, default_value = "runs", value_name = "DIR")]
    runs: PathBuf,

    /// Print each result as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `judge`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let run = resolve(&args.runs, &args.run).map_err(CommandError::usage)?;
    let record = read_events(&run).map_err(CommandError::usage)?;
    let mut statuses: Vec<_> = record
        .cases
        .iter()
        .filter(|case| !record.failed.contains_key(&case.id))
        .map(|case| case.status)
        .collect();
    let undecided = statuses.len();
    let mut changed = 0;
    let progress = Progress::new(record.failed.len(), "stored failures");
    for id in record.failed.keys() {
        let folder = run.join("cases").join(crate::run_directory::case_folder_name(id));
        let (case, recording) = store::read(&folder).map_err(CommandError::usage)?;
        let engine = Recorded::new(recording).map_err(CommandError::Usage)?;
        let result = judge_case(&case, &engine, &|_| true);
        changed += usize::from(contradicts(record.find(id), &result));
        let text = if args.json {
            serde_json::to_string(&result).map_err(CommandError::internal)? + "\n"
        } else {
            full_text(&result, Some(&record.header))
        };
        progress.beside(|| print(text))?;
        progress.step();
        statuses.push(result.status);
    }
    drop(progress);
    eprintln!(
        "decided again on {} stored failures of {}, {changed} of them otherwise than before; {undecided} other cases keep \
         their verdict",
        record.failed.len(),
        run.display()
    );
    Ok(Exit::of(statuses))
}
