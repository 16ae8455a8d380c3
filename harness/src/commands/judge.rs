//! `judge`: decide again on the stored failures of a run, without the engine.

use std::path::{Path, PathBuf};

use crate::cli::CommandError;
use crate::commands::print;
use crate::commands::reporting::full_text;
use crate::export::{MANIFEST_FILE, decide};
use crate::progress::Progress;
use crate::recording::Recorded;
use crate::run::{contradicts, judge_case};
use crate::run_directory::{read_events, resolve};
use crate::status::Exit;
use crate::store;
use crate::summary::undecided_reason;
use crate::tally::{Columns, table_of};

/// Options of `judge`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run: `latest`, a run id or a path; or a folder that `export` wrote
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
    let exported = Path::new(&args.run);
    if exported.join(MANIFEST_FILE).is_file() {
        return judge_files(exported, args.json);
    }
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
        let mut result = judge_case(&case, &engine, &|_| true);
        if let Some(claims) = &record.header.claims {
            claims.mark(&case, &mut result);
        }
        changed += usize::from(contradicts(record.find(id), &result));
        let text = if args.json {
            serde_json::to_string(&result).map_err(CommandError::internal)? + "\n"
        } else {
            full_text(&result, Some((&record.header).into()))
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
    // an entry is judged by all cases, most of which are not stored: its verdict stands
    for verdict in record.claims.iter().filter(|verdict| verdict.status.is_failure()) {
        eprintln!("{} {}: {}", verdict.status, verdict.entry, verdict.text);
    }
    statuses.extend(record.claims.iter().map(|verdict| verdict.status));
    Ok(Exit::of(statuses))
}

/// Decides on the answers in an exported folder: failures in full, everything else in a line.
fn judge_files(folder: &Path, json: bool) -> Result<Exit, CommandError> {
    let decided = decide(folder).map_err(CommandError::usage)?;
    for result in &decided.results {
        let text = if json {
            serde_json::to_string(result).map_err(CommandError::internal)? + "\n"
        } else if result.status.is_failure() {
            full_text(result, None)
        } else {
            let reason = undecided_reason(result).map_or(String::new(), |reason| format!(": {reason}"));
            format!("{} {}{reason}\n", result.status, result.id)
        };
        print(text)?;
    }
    if !json && decided.outstanding < decided.results.len() {
        print(Columns(&table_of(&decided.results)))?;
    }
    let (judged, failed) = decided.results.iter().fold((0, 0), |(judged, failed), result| {
        (judged + usize::from(result.status.is_judged()), failed + usize::from(result.status.is_failure()))
    });
    eprintln!(
        "judged {judged} of {} exported cases, {failed} failed, {} have no outputs yet",
        decided.results.len(),
        decided.outstanding
    );
    Ok(decided.exit())
}
