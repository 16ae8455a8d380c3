//! `shrink`: the smallest case that still fails in the same way.

use std::path::{Path, PathBuf};

use crate::cli::CommandError;
use crate::commands::diagnose::budget;
use crate::commands::naming::{self, Named};
use crate::commands::print;
use crate::engines::EngineArgs;
use crate::report::block::{Origin, replay_command};
use crate::run_directory::case_folder_name;
use crate::shrink::{Keep, Shrunk, Size, failing_property, shrink, work};
use crate::status::Exit;

/// Seconds that ranks may wait for each other in one of many tries.
const SHRINK_TIMEOUT_S: f64 = 2.0;

/// Options of `shrink`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Case id, case file, folder of a stored case, or a run: `latest`, a run id or a path (the smallest of its failed cases)
    #[arg(value_name = "ID|FILE|RUN")]
    what: String,

    #[command(flatten)]
    engine: EngineArgs,

    /// Inject a known fault into the embedded engine; that of its run when a stored case is shrunk
    #[arg(long, value_name = "NAME")]
    fault: Option<String>,

    /// Property that must go on failing; the first one that fails on the case when not given
    #[arg(long, value_name = "ID", conflicts_with = "any_property")]
    property: Option<String>,

    /// Be content with any failure, of whatever property
    #[arg(long)]
    any_property: bool,

    /// Seconds after which the smallest case so far is taken
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS")]
    budget_s: f64,

    /// Seconds that ranks may wait for each other, in each of many tries
    #[arg(long, default_value_t = SHRINK_TIMEOUT_S, value_name = "SECONDS")]
    timeout_s: f64,

    /// Folder that run folders lie in
    #[arg(long, default_value = "runs", value_name = "DIR")]
    runs: PathBuf,

    /// Case file to write; a name made of the id in the current folder when not given
    #[arg(long, short = 'o', value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs `shrink`.
///
/// # Errors
/// [`CommandError`]; nothing selected when the case passes.
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let budget = budget(args.budget_s)?;
    let named = Named::any(&args.what, &args.runs)?;
    let smallest = named.cases.iter().min_by_key(|case| (work(case), case.id()));
    let case = smallest.ok_or_else(|| CommandError::NothingSelected("no case failed".to_owned()))?;
    if named.cases.len() > 1 {
        eprintln!("the smallest of {} failed cases", named.cases.len());
    }
    let (engine, chosen, fault) = named.open(&args.engine, args.fault.as_deref(), args.timeout_s)?;
    let keep = match &args.property {
        Some(id) => {
            let keep = Keep::Property(naming::property(id)?.id);
            if !keep.is_met_by(case, &*engine) {
                return Err(CommandError::NothingSelected(format!(
                    "{id} does not fail on {}: there is nothing to shrink",
                    case.id()
                )));
            }
            keep
        }
        None => {
            let property = failing_property(case, &*engine).ok_or_else(|| {
                CommandError::NothingSelected(format!("{} passes: there is nothing to shrink", case.id()))
            })?;
            if args.any_property { Keep::AnyFailure } else { Keep::Property(property) }
        }
    };
    let before = Size::of(case);
    eprintln!("{before}  {}", case.id());
    let shrunk = shrink(case, &*engine, keep, budget, &mut |smaller, tried| {
        eprintln!("{}  {} ({tried} tried)", Size::of(smaller), smaller.id());
    });
    let path =
        args.output.clone().unwrap_or_else(|| format!("{}.json", case_folder_name(&shrunk.case.id())).into());
    std::fs::write(&path, shrunk.case.to_json() + "\n")
        .map_err(|error| CommandError::Usage(format!("failed to write {}: {error}", path.display())))?;
    // the shrunk case was judged with this wait, and may be a hang
    let timeout_s = (args.timeout_s != SHRINK_TIMEOUT_S).then_some(args.timeout_s);
    let origin = Origin { engine: chosen.name(), fault: fault.as_deref(), timeout_s };
    print(text(origin, keep, before, &shrunk, &path))?;
    Ok(Exit::Passed)
}

fn text(origin: Origin<'_>, keep: Keep, before: Size, shrunk: &Shrunk, path: &Path) -> String {
    let id = shrunk.case.id();
    let replay = replay_command(&id, Some(origin));
    let kept = match keep {
        Keep::Property(property) => property,
        Keep::AnyFailure => "any failure",
    };
    let end = if shrunk.finished { "nothing smaller was found" } else { "the time was up" };
    format!(
        "{id}\n      property  {kept}\n        before  {before}\n         after  {}\n         tried  {} cases in {:.1} s: {end}\n          file  {}\n     reproduce  {replay}\n",
        Size::of(&shrunk.case),
        shrunk.tried,
        shrunk.elapsed_s,
        path.display()
    )
}
