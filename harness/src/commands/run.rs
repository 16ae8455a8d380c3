//! `run`: judge the cases of a suite on an engine.

use std::path::PathBuf;
use std::time::Duration;

use shardcheck_cases::{Case, SuiteName};

use crate::claims::Claims;
use crate::cli::CommandError;
use crate::commands::CaseArgs;
use crate::commands::reporting::{Feed, ReportArgs, reporters};
use crate::engines::{self, EngineArgs};
use crate::event::{RESULTS_SCHEMA_VERSION, RunHeader};
use crate::execute::{Plan, execute};
use crate::record::RunRecord;
use crate::run_directory::{RunDirectory, resolve};
use crate::select::Selection;
use crate::status::Exit;

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    cases: CaseArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// Inject a known fault into the embedded engine: the run must fail then
    #[arg(long, value_name = "NAME")]
    fault: Option<String>,

    /// Cases judged at the same time; the number of cores when not given, 1 for an engine behind a command: each job starts the
    /// command once
    #[arg(long, short = 'j', value_name = "N")]
    jobs: Option<usize>,

    /// End the run with the first failure
    #[arg(long)]
    fail_fast: bool,

    /// Leave out the known faults that a whole gate tries after its cases
    #[arg(long)]
    no_mutants: bool,

    /// Do not say which known fault explains the failures
    #[arg(long)]
    no_diagnose: bool,

    /// Leave out the corruptions that a whole gate tries before its cases (`shardcheck self-test`)
    #[arg(long)]
    no_self_test: bool,

    /// Seconds that ranks may wait for each other; a step that never returns is given up after four times as long
    #[arg(long, default_value_t = TIMEOUT_S, value_name = "SECONDS")]
    timeout_s: f64,

    /// Take up a run that was killed or cut short: `latest`, a run id or a path. Nothing is judged twice
    #[arg(long, value_name = "RUN", num_args = 0..=1, default_missing_value = "latest")]
    resume: Option<String>,

    /// Folder that run folders are made in
    #[arg(long, default_value = "runs", value_name = "DIR")]
    runs: PathBuf,

    /// Hold failures against this claims file (docs/claims.md); the one that the program has for the engine when not given
    #[arg(long, value_name = "FILE", conflicts_with = "no_claims")]
    claims: Option<PathBuf>,

    /// Hold failures against no claims: every one fails the run
    #[arg(long)]
    no_claims: bool,

    #[command(flatten)]
    report: ReportArgs,
}

/// Seconds that ranks may wait for each other where nothing else is said.
pub(super) const TIMEOUT_S: f64 = 30.0;

/// Processor time of each thread that the diagnosis of a run's failures may take.
const DIAGNOSIS: Duration = Duration::from_secs(5);

/// Runs `run`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    args.report.check()?;
    // a mistyped selection is told at once: an engine may take a minute to start
    let (cases, selection) = args.cases.selected()?;
    let engine = engines::open(&args.engine, args.fault.as_deref(), args.timeout_s)?;
    let jobs = match args.jobs {
        Some(0) => return Err(CommandError::Usage("--jobs takes at least 1".to_owned())),
        Some(jobs) => jobs,
        // a process of its own for every job is what a user may not have devices for
        None if !args.engine.is_in_process() => 1,
        None => cores(),
    };
    let profile = serde_json::to_value(engine.profile()).map_err(CommandError::internal)?;
    let claims = if args.no_claims {
        None
    } else {
        Claims::of(engine.profile(), args.claims.as_deref()).map_err(CommandError::usage)?
    };
    let header = header(args, &selection, cases.len(), profile, claims.clone())?;
    let (mut directory, before) = folder(args, &header)?;
    shardcheck_process::say_at_interrupt(format!(
        "interrupted: what was judged until now is in {}; the same command with --resume goes on",
        directory.path().display()
    ));
    if let Some(log) = &engine.log {
        log.keep_in(&directory.path().join("engine.log")).map_err(CommandError::internal)?;
    }
    let judged = before.as_ref().map(RunRecord::judged_ids).unwrap_or_default();
    let remaining: Vec<Case> = cases.iter().filter(|case| !judged.contains(&case.id())).cloned().collect();
    if is_whole_gate(args, &selection) && !args.no_self_test {
        super::self_test::conclude(&crate::self_test::run_all())?;
    }
    let mutant_cases = if wants_mutants(args, &selection) { cases.as_slice() } else { &[] };
    let plan = Plan {
        cases: &remaining,
        selection: &selection,
        engine: &*engine,
        is_faulty: args.fault.is_some(),
        jobs,
        fail_fast: args.fail_fast,
        diagnosis: (!args.no_diagnose).then(|| (DIAGNOSIS, args.jobs.unwrap_or_else(cores))),
        mutant_cases,
        claims: claims.as_ref().map(|claims| (claims, cases.as_slice())),
        before: before.map(|record| record.cases).unwrap_or_default(),
    };
    let mut feed = Feed::new(reporters(&args.report, &directory, !args.engine.is_embedded()));
    let outcome =
        execute(&plan, &mut directory, &mut |event| feed.event(event)).map_err(CommandError::internal)?;
    match feed.finish() {
        // a report that could not be written does not hide a failure
        Err(error) if outcome.exit != Exit::Passed => eprintln!("error: {error}"),
        report => report?,
    }
    // not to standard output: it may be read by a machine
    match (&args.fault, outcome.exit) {
        (Some(fault), Exit::MutantsSurvived) => {
            eprintln!("nothing failed although {fault} was injected: no case that was judged shows it");
        }
        (_, Exit::Inconclusive) => {
            eprintln!("nothing could be decided for at least one case: the last lines say why; exit code 3");
        }
        _ => {}
    }
    Ok(outcome.exit)
}

/// A whole gate of the healthy embedded engine also tries the known faults.
fn wants_mutants(args: &Args, selection: &Selection) -> bool {
    is_whole_gate(args, selection) && !args.no_mutants
}

/// Whether every case of the gate is judged on the healthy embedded engine.
fn is_whole_gate(args: &Args, selection: &Selection) -> bool {
    args.cases.suite == SuiteName::Gate
        && args.cases.files.is_empty()
        && args.engine.is_embedded()
        && args.fault.is_none()
        && selection.is_everything()
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

fn folder(args: &Args, header: &RunHeader) -> Result<(RunDirectory, Option<RunRecord>), CommandError> {
    match &args.resume {
        None => Ok((RunDirectory::create(&args.runs, header).map_err(CommandError::usage)?, None)),
        Some(name) => {
            let path = resolve(&args.runs, name).map_err(CommandError::usage)?;
            let (directory, record) = RunDirectory::reopen(&path, header).map_err(CommandError::usage)?;
            Ok((directory, Some(record)))
        }
    }
}

fn header(
    args: &Args,
    selection: &Selection,
    selected: usize,
    profile: serde_json::Value,
    claims: Option<Claims>,
) -> Result<RunHeader, CommandError> {
    Ok(RunHeader {
        schema_version: RESULTS_SCHEMA_VERSION,
        tool_version: env!("CARGO_PKG_VERSION").to_owned(),
        run_id: String::new(),
        suite: args.cases.source(),
        seed: args.cases.seed,
        engine: args.engine.name().to_owned(),
        fault: args.fault.clone(),
        timeout_s: (args.timeout_s != TIMEOUT_S).then_some(args.timeout_s),
        profile,
        selection: serde_json::to_value(selection).map_err(CommandError::internal)?,
        claims,
        selected,
        machine: machine(),
    })
}

/// Operating system, architecture and cores.
pub(crate) fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{} {}, {cores} cores", std::env::consts::OS, std::env::consts::ARCH)
}
