//! `mutants`: the known faults, and which property kills which.

mod trials;

use std::collections::BTreeMap;
use std::path::PathBuf;

use shardcheck_cases::Case;
use shardcheck_cpu::{Fault, faults};
use shardcheck_engine::Engine;

use crate::boundary::{BoundaryFault, boundary_faults};
use crate::cli::CommandError;
use crate::commands::CaseArgs;
use crate::engines::{self, EngineArgs};
use crate::mutants::{Mutant, MutantState, toothless, try_all, try_all_on};
use crate::progress::Progress;
use crate::properties;
use crate::run::judge_case;
use crate::status::Exit;

/// Options of `mutants`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: MutantsVerb,
}

#[derive(Debug, clap::Subcommand)]
enum MutantsVerb {
    /// Print the faults: name, class, title
    List {
        /// What to print
        #[arg(long, value_enum, default_value = "text", value_name = "FORMAT")]
        format: Format,

        /// Print the faults at the boundary of an engine instead
        #[arg(long)]
        boundary: bool,

        /// Print the faults that this engine has: `cpu`, `cuda` or `cuda:graphs`
        #[arg(long, value_name = "ENGINE")]
        engine: Option<String>,

        /// Those that it has with joined devices (`all`, or numbers)
        #[arg(long, value_name = "DEVICES")]
        devices: Option<String>,
    },
    /// Let each fault fail some cases and see whether the diagnosis names it
    ///
    /// Each fault is put into the engine, fails a few cases, and is diagnosed from the recorded answers alone. It counts as named when
    /// it comes first, or together with faults whose answers on all these cases are the same to the last bit.
    Diagnose(Box<trials::DiagnoseArgs>),
    /// Shrink a case that each fault fails, and compare with the smallest case of the public bug
    ///
    /// A case that a property of the fault fails on is shrunk, and its size is held against the smallest case that is known for each
    /// public bug of the fault's kind.
    Shrink(Box<trials::ShrinkArgs>),
    /// Try every fault on every property that it names, suite beside suite; anything wrong with the matrix fails
    Matrix(super::matrix::Args),
    /// Try faults on the cases of a suite; every one must be killed by a property that names it
    Run(Box<RunArgs>),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    #[command(flatten)]
    cases: CaseArgs,

    /// Try these faults only
    #[arg(long = "fault", value_name = "NAME")]
    faults: Vec<String>,

    /// What to print
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT")]
    format: Format,

    /// Write the kill matrix as JSON as well
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Skip the check that the engine without a fault passes
    #[arg(long)]
    no_baseline: bool,

    /// Tamper with what passes the boundary of the engine instead of replacing a part of it
    #[arg(long)]
    boundary: bool,

    #[command(flatten)]
    engine: EngineArgs,

    /// Seconds that ranks may wait for each other
    #[arg(long, default_value_t = 5.0, value_name = "S")]
    timeout_s: f64,
}

/// How faults and matrices are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Lines for people: the name is the first word.
    Text,
    /// JSON.
    Json,
    /// A Markdown table.
    Markdown,
}

/// Runs `mutants`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    match &args.verb {
        MutantsVerb::List { boundary: true, format, .. } => list_boundary(*format),
        MutantsVerb::List { format, engine, devices, .. } => {
            let args = EngineArgs::named(engine.clone());
            list(*format, &EngineArgs { devices: devices.clone(), ..args })
        }
        MutantsVerb::Matrix(args) => super::matrix::run(args),
        MutantsVerb::Run(args) if args.boundary => boundary(args),
        MutantsVerb::Run(args) => kill(args),
        MutantsVerb::Diagnose(args) => trials::diagnose(args),
        MutantsVerb::Shrink(args) => trials::shrink(args),
    }
}

fn list(format: Format, engine: &EngineArgs) -> Result<Exit, CommandError> {
    engine.check()?;
    if !engine.is_in_process() {
        // an empty list would look like an engine that nothing can be put into
        return Err(engines::EngineChoiceError::NoFaults { engine: engine.name().to_owned() }.into());
    }
    let line = |fault: &Fault| match format {
        Format::Text => format!("{:<36} {:<17} {}", fault.name, fault.class.name(), fault.title),
        Format::Json => serde_json::json!({
            "name": fault.name, "class": fault.class.name(), "title": fault.title,
            "bugs": fault.bugs, "killed_by": fault.killed_by,
        })
        .to_string(),
        Format::Markdown => {
            let (class, bugs) = (fault.class.name(), fault.bugs.join(", "));
            format!("| {} | {class} | {} | {bugs} |", fault.name, fault.title)
        }
    };
    super::print_lines(faults().iter().filter(|fault| engine.has_fault(fault.name)).map(line))?;
    Ok(Exit::Passed)
}

/// The faults of those names; all of them for none.
pub(super) fn chosen(names: &[String]) -> Result<Vec<&'static Fault>, CommandError> {
    if names.is_empty() {
        return Ok(faults().iter().collect());
    }
    names.iter().map(|name| Ok(engines::find_fault(name)?)).collect()
}

fn list_boundary(format: Format) -> Result<Exit, CommandError> {
    let line = |fault: &BoundaryFault| match format {
        Format::Text => format!("{:<36} {:<36} {}\n", fault.name, fault.touches, fault.title),
        Format::Json => serde_json::json!({
            "name": fault.name, "touches": fault.touches, "title": fault.title, "killed_by": fault.killed_by,
        })
        .to_string()
            + "\n",
        Format::Markdown => format!("| {} | {} | {} |\n", fault.name, fault.touches, fault.title),
    };
    super::print(boundary_faults().map(line).collect::<String>())?;
    Ok(Exit::Passed)
}

fn boundary(args: &RunArgs) -> Result<Exit, CommandError> {
    let engine = engines::open(&args.engine, None, args.timeout_s)?;
    let chosen = super::matrix::chosen_at_the_boundary(&args.faults)?;
    let (cases, _) = args.cases.selected()?;
    if !args.no_baseline {
        baseline(&cases, &*engine)?;
    }
    let (source, seed) = (args.cases.source(), args.cases.seed);
    super::matrix::boundary(&*engine, (&source, seed, &cases), &chosen, args.format, args.output.as_deref())
}

fn kill(args: &RunArgs) -> Result<Exit, CommandError> {
    let (cases, selection) = args.cases.selected()?;
    let mut chosen = chosen(&args.faults)?;
    let native = args.engine.is_cuda();
    if native && args.faults.is_empty() {
        chosen.retain(|fault| args.engine.has_fault(fault.name));
    } else if !native && !args.engine.is_embedded() {
        return Err(engines::EngineChoiceError::NoFaults { engine: args.engine.name().to_owned() }.into());
    }
    if !args.no_baseline {
        baseline(&cases, &*engines::open(&args.engine, None, args.timeout_s)?)?;
    }
    let progress = Progress::new(chosen.len(), "faults");
    let mutants = if native {
        let faulty = |fault: &'static Fault| {
            engines::open(&args.engine, Some(fault.name), args.timeout_s)
                .map(engines::OpenEngine::into_engine)
        };
        try_all_on(&faulty, &chosen, &cases, &|_| progress.step())?
    } else {
        try_all(&chosen, &cases, &|_| progress.step())
    };
    drop(progress);
    print(&mutants, args.format)?;
    if let Some(path) = &args.output {
        let text = serde_json::to_string_pretty(&document(&mutants)).map_err(CommandError::internal)?;
        std::fs::write(path, text + "\n")
            .map_err(|error| CommandError::Usage(format!("failed to write {}: {error}", path.display())))?;
    }
    let killed = mutants.iter().filter(|mutant| mutant.state == MutantState::Killed).count();
    eprintln!("{killed} of {} faults killed by a property that names them", mutants.len());
    let untried = mutants.iter().filter(|mutant| mutant.state == MutantState::NotApplicable);
    let untried: Vec<&str> = untried.map(|mutant| mutant.fault.as_str()).collect();
    if !untried.is_empty() {
        eprintln!("{}", untried_text(&untried));
    }
    // with faults or cases left out, a property may lack the fault that it kills through no fault of its own
    let whole = args.faults.is_empty() && selection.is_everything() && !native;
    let toothless = if whole { toothless(&cases) } else { Vec::new() };
    if !toothless.is_empty() {
        eprintln!("properties that killed none of the faults that name them: {}", toothless.join(", "));
    }
    let all = killed == mutants.len() && toothless.is_empty();
    Ok(if all { Exit::Passed } else { Exit::MutantsSurvived })
}

/// Why faults that no case was tried on count as not killed, and what to do.
fn untried_text(faults: &[&str]) -> String {
    format!(
        "nothing is shown of {}: no selected case is judged on a property that the fault names; `shardcheck explain FAULT` \
         lists those, select cases of their families",
        faults.join(", ")
    )
}

/// A fault proves nothing where the healthy engine fails as well.
pub(super) fn baseline(cases: &[Case], engine: &dyn Engine) -> Result<(), CommandError> {
    use rayon::prelude::*;
    let progress = Progress::new(cases.len(), "cases without a fault");
    let failed = cases.par_iter().find_map_first(|case| {
        let result = judge_case(case, engine, &|_| true);
        progress.step();
        result.status.is_failure().then_some(result)
    });
    match failed {
        None => Ok(()),
        Some(result) => Err(CommandError::BaselineFailed(format!(
            "the engine fails without any fault on {} ({}): mend that first, `shardcheck replay '{}'` shows it",
            result.id,
            result.failures().map(|check| check.property.as_str()).collect::<Vec<_>>().join(", "),
            result.id
        ))),
    }
}

/// The kill matrix: states by fault, never a score, and the faults that each property killed.
fn document(mutants: &[Mutant]) -> serde_json::Value {
    let mut by_property: BTreeMap<&str, Vec<&str>> = properties::all().map(|p| (p.id, Vec::new())).collect();
    for mutant in mutants {
        if let Some(property) = &mutant.property {
            by_property.entry(property).or_default().push(&mutant.fault);
        }
    }
    serde_json::json!({ "schema_version": 1, "mutants": mutants, "killed_by_property": by_property })
}

fn print(mutants: &[Mutant], format: Format) -> Result<(), CommandError> {
    if format == Format::Json {
        let text = serde_json::to_string_pretty(&document(mutants)).map_err(CommandError::internal)?;
        return super::print(text + "\n");
    }
    let head = "| fault | state | property | witness |\n|---|---|---|---|".to_owned();
    let line = |mutant: &Mutant| {
        let property = mutant.property.as_deref().unwrap_or("-");
        let case = mutant.case.as_deref().unwrap_or("-");
        let (fault, state) = (&mutant.fault, mutant.state.name());
        match format {
            Format::Markdown => format!("| {fault} | {state} | {property} | `{case}` |"),
            _ => format!("{fault:<36} {state:<15} {property:<26} {case} (try {})", mutant.tried),
        }
    };
    let head = (format == Format::Markdown).then_some(head);
    super::print_lines(head.into_iter().chain(mutants.iter().map(line)))
}
