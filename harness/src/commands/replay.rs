//! `replay`: one case again, with everything that was found.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shardcheck_cases::Case;
use shardcheck_engine::Profile;

use crate::cli::CommandError;
use crate::commands::naming::{self, Named};
use crate::commands::print;
use crate::commands::reporting::full_text;
use crate::commands::run::TIMEOUT_S;
use crate::diagnose::{Evidence, MOST_CASES, diagnose};
use crate::emit::{Asked, Call, LSE_UNIT, Telling, script};
use crate::engines::EngineArgs;
use crate::event::CaseResult;
use crate::finding::Finding;
use crate::recording::{Recorder, Recording};
use crate::report::block::Origin;
use crate::run::judge_case;
use crate::run_directory::{CASES_FOLDER, case_folder_name, resolve};
use crate::status::Exit;
use crate::store;

/// Options of `replay`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Case id, case file, folder of a stored case, or a run (all its failed cases)
    #[arg(value_name = "ID|FILE|RUN")]
    what: String,

    #[command(flatten)]
    engine: EngineArgs,

    /// Inject a known fault; that of the run when a run is replayed
    #[arg(long, value_name = "NAME")]
    fault: Option<String>,

    /// Judge this property only; a script asks what `lse.unit` asks, or the case's own step
    #[arg(long, value_name = "ID")]
    property: Vec<String>,

    /// Seconds that ranks may wait for each other; a step that never returns is given up after four times as long
    #[arg(long, default_value_t = TIMEOUT_S, value_name = "SECONDS")]
    timeout_s: f64,

    /// Folder that run folders lie in
    #[arg(long, default_value = "runs", value_name = "DIR")]
    runs: PathBuf,

    /// Do not say which known fault explains the failures
    #[arg(long)]
    no_diagnose: bool,

    /// Write the case as a Python script for whoever mends the engine, and judge nothing: inputs, a plain numpy reference, what is
    /// allowed of each element, and the engine's own call where it names a file of calls, else a marked place for one. Holds what was
    /// seen, where that was recorded
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    emit_python: Option<PathBuf>,

    /// Calls of the engine's own functions for the script (docs/scripts.md); those that the engine names when not given
    #[arg(long, value_name = "FILE", requires = "emit_python")]
    call: Option<PathBuf>,

    /// Print the result as JSON, without a diagnosis (`shardcheck diagnose --json` has it for a run)
    #[arg(long)]
    json: bool,
}

/// Processor time of each thread that a diagnosis may take.
const DIAGNOSIS: Duration = Duration::from_secs(5);

/// Runs `replay`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    args.property.iter().try_for_each(|id| naming::property(id).map(|_| ()))?;
    if let Some(file) = &args.emit_python {
        return emit(args, file);
    }
    let named = Named::any(&args.what, &args.runs)?;
    let (engine, chosen, fault) = named.open(&args.engine, args.fault.as_deref(), args.timeout_s)?;
    let only = |property: &crate::properties::Property| {
        args.property.is_empty() || args.property.iter().any(|id| id == property.id)
    };
    let mut statuses = Vec::new();
    let mut evidence = Vec::new();
    for case in &named.cases {
        let recorder = Recorder::new(&*engine);
        let result = judge_case(case, &recorder, &only);
        if !args.no_diagnose && !args.json && evidence.len() < MOST_CASES {
            evidence.extend(Evidence::of(case, &result, recorder.recording()));
        }
        if args.json {
            print(serde_json::to_string(&result).map_err(CommandError::internal)? + "\n")?;
        } else {
            let timeout_s = (args.timeout_s != TIMEOUT_S).then_some(args.timeout_s);
            let origin = Origin { engine: chosen.name(), fault: fault.as_deref(), timeout_s };
            print(full_text(&result, Some(origin)))?;
        }
        statuses.push(result.status);
    }
    if let Some(diagnosis) = diagnose(&evidence, DIAGNOSIS) {
        let lines = diagnosis.lines();
        print(lines.iter().map(|line| format!("     diagnosis  {line}\n")).collect::<String>())?;
    }
    let exit = Exit::of_judged(&statuses);
    if exit == Exit::Inconclusive {
        eprintln!("nothing could be decided; exit code 3");
    }
    Ok(exit)
}

/// Writes the script of a case: with what was recorded of it, or with what the engine answers now when a fault or an engine is named.
fn emit(args: &Args, file: &Path) -> Result<Exit, CommandError> {
    let named = Named::any(&args.what, &args.runs)?;
    let case = &named.cases[0];
    if named.cases.len() > 1 {
        eprintln!("the first of {} failed cases: {}", named.cases.len(), case.id());
    }
    let asked = match args.property.as_slice() {
        [] => Asked::Step,
        [id] if id == LSE_UNIT => Asked::EqualLogits,
        others => {
            return Err(CommandError::Usage(format!(
                "no script asks for {}: without --property it asks for the step of a case, by --property {LSE_UNIT} for that step with queries of zeros",
                others.join(", ")
            )));
        }
    };
    // before anything is judged, or said of it
    crate::emit::refuse(case, asked).map_err(CommandError::usage)?;
    let recording = match stored(args, case)? {
        Some(recording) => recording,
        None => {
            let (engine, chosen, _) = named.open(&args.engine, args.fault.as_deref(), args.timeout_s)?;
            let recorder = Recorder::new(&*engine);
            let result = judge_case(case, &recorder, &|property| asked.is_judged_by(property));
            eprintln!("holds what {} answers now: {}{}", chosen.name(), result.status, why_not(&result));
            recorder.recording()
        }
    };
    let archive = file.with_extension("npz");
    let archive_name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let call = calls(args, &recording.profile)?;
    let telling =
        Telling { asked, recording: Some(&recording), archive_name: &archive_name, call: call.as_ref() };
    let script = script(case, &recording.profile, &telling).map_err(CommandError::usage)?;
    if let Some(why) = script.without_call {
        // a file that was asked for must do; one that the engine names is more than was asked for
        match args.call {
            Some(_) => return Err(CommandError::usage(why)),
            None => eprintln!("{why}"),
        }
    }
    let put = |path: &Path, bytes: &[u8]| {
        std::fs::write(path, bytes)
            .map_err(|error| CommandError::Usage(format!("failed to write {}: {error}", path.display())))
    };
    put(file, script.text.as_bytes())?;
    if let Some(bytes) = &script.archive {
        put(&archive, bytes)?;
        eprintln!("arrays lie in {}: keep it beside the script", archive.display());
    }
    let what_to_do = match script.is_called {
        true => "run it with the folder of the unpacked release, by a python3 that has what its calls import",
        false => "put a call into its `engine`, and run it with python3 and numpy",
    };
    eprintln!("wrote {}: {what_to_do}; --self tries the reference, --seen what was recorded", file.display());
    Ok(Exit::Passed)
}

/// The first reason for the status where the engine did not answer, or nothing could be decided of what it did.
fn why_not(result: &CaseResult) -> String {
    let mut reasons = result.checks.iter().filter(|check| check.status() == result.status);
    let reason = reasons.find_map(|check| match &check.finding {
        Finding::Engine { text, .. } | Finding::Unsupported(text) | Finding::Inconclusive(text) => {
            text.lines().next()
        }
        _ => None,
    });
    reason.map_or_else(String::new, |reason| format!(": {reason}"))
}

/// The calls that are given, else those that the engine names; none where their file is not on this machine.
fn calls(args: &Args, profile: &Profile) -> Result<Option<Call>, CommandError> {
    if let Some(path) = &args.call {
        return Call::read(path).map(Some).map_err(CommandError::usage);
    }
    if profile.call_file.is_empty() {
        return Ok(None);
    }
    Ok(Call::read(Path::new(&profile.call_file)).map_err(|why| eprintln!("{why}")).ok())
}

/// What was recorded of the case, in its own folder or in that of the run.
fn stored(args: &Args, case: &Case) -> Result<Option<Recording>, CommandError> {
    let path = Path::new(&args.what);
    let folder = if path.join("recording.json").is_file() {
        path.to_owned()
    } else {
        let Ok(run) = resolve(&args.runs, &args.what) else { return Ok(None) };
        run.join(CASES_FOLDER).join(case_folder_name(&case.id()))
    };
    let (_, recording) = store::read(&folder).map_err(CommandError::usage)?;
    Ok(Some(recording))
}
