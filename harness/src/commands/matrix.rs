//! `mutants matrix` and `mutants run --boundary`: what became of every fault, and what is wrong with that.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use shardcheck_cases::{Case, SuiteName, suite};
use shardcheck_engine::Engine;

use super::mutants::{Format, baseline, chosen};
use crate::boundary::{BoundaryFault, boundary_fault, boundary_faults, try_boundary};
use crate::cli::CommandError;
use crate::matrix::{KillState, MATRIX_SCHEMA_VERSION, Matrix, lines, markdown, matrix};
use crate::nearest::nearest;
use crate::progress::Progress;
use crate::status::Exit;

/// Options of `mutants matrix`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Suites to try the faults on, side by side: gate, nightly, engine-smoke
    #[arg(long = "suite", default_value = "gate", value_delimiter = ',', value_name = "NAME")]
    suites: Vec<SuiteName>,

    /// Seed of the suites
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// Try these faults only
    #[arg(long = "fault", value_name = "NAME")]
    faults: Vec<String>,

    /// What to print
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT")]
    format: Format,

    /// Write the matrices as JSON as well
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs `mutants matrix`: the engine without a fault first, then every fault on every property that it names.
///
/// # Errors
/// [`CommandError`]; a baseline that fails is one.
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let chosen = chosen(&args.faults)?;
    let healthy = shardcheck_cpu::engine();
    let mut matrices = Vec::new();
    for name in &args.suites {
        let cases = suite(*name, args.seed);
        baseline(&cases, &healthy)?;
        let progress = Progress::new(chosen.len(), "faults");
        let whole = args.faults.is_empty();
        matrices.push(matrix((name.name(), args.seed), &chosen, &cases, whole, &|_| progress.step()));
    }
    finish(&matrices, args.format, args.output.as_deref())
}

/// The faults at the boundary of those names; all of them where none is named.
///
/// # Errors
/// A name that no fault has.
pub fn chosen_at_the_boundary(names: &[String]) -> Result<Vec<&'static BoundaryFault>, CommandError> {
    if names.is_empty() {
        return Ok(boundary_faults().collect());
    }
    names.iter().map(|name| find_boundary_fault(name)).collect()
}

/// Tries faults at the boundary of an engine.
///
/// # Errors
/// [`CommandError`].
pub fn boundary(
    engine: &dyn Engine,
    (suite, seed, cases): (&str, u64, &[Case]),
    chosen: &[&'static BoundaryFault],
    format: Format,
    output: Option<&Path>,
) -> Result<Exit, CommandError> {
    let progress = Progress::new(chosen.len(), "faults");
    let rows = try_boundary(chosen, engine, cases, &|_| progress.step());
    drop(progress);
    let matrix = Matrix {
        schema_version: MATRIX_SCHEMA_VERSION,
        suite: suite.to_owned(),
        seed,
        engine: engine.profile().engine.clone(),
        cases: cases.len(),
        rows,
        idle_properties: Vec::new(),
    };
    finish(&[matrix], format, output)
}

fn find_boundary_fault(name: &str) -> Result<&'static BoundaryFault, CommandError> {
    boundary_fault(name).ok_or_else(|| {
        if shardcheck_cpu::fault(name).is_some() {
            return CommandError::Usage(format!(
                "{name} is a fault in the embedded engine, not at a boundary: `shardcheck mutants run --fault {name}` tries it"
            ));
        }
        let hint = nearest(name, boundary_faults().map(|fault| fault.name));
        let hint = hint.map_or_else(String::new, |name| format!("; did you mean {name:?}?"));
        CommandError::Usage(format!(
            "unknown fault at the boundary {name:?}{hint}; `shardcheck mutants list --boundary` lists them"
        ))
    })
}

/// Prints and writes matrices; what is wrong with one of them fails the run.
fn finish(matrices: &[Matrix], format: Format, output: Option<&Path>) -> Result<Exit, CommandError> {
    let json = || serde_json::to_string_pretty(matrices).map_err(CommandError::internal);
    let text = match format {
        Format::Text => lines(matrices),
        Format::Markdown => markdown(matrices) + "\n",
        Format::Json => json()? + "\n",
    };
    super::print(text)?;
    if let Some(path) = output {
        std::fs::write(path, json()? + "\n")
            .map_err(|error| CommandError::Usage(format!("failed to write {}: {error}", path.display())))?;
    }
    let mut wrong = 0;
    for matrix in matrices {
        for shortcoming in matrix.shortcomings() {
            wrong += 1;
            if format != Format::Text {
                // the other formats are read by programs, or hold it already
                let _ = writeln!(std::io::stderr(), "{}: {shortcoming}", matrix.suite);
            }
        }
    }
    let rows = || matrices.iter().flat_map(|matrix| &matrix.rows);
    let killed = rows().any(|row| row.state == KillState::Killed);
    if wrong == 0 && !killed {
        let reasons: BTreeSet<&str> = rows().filter_map(|row| row.reason.as_deref()).collect();
        let reasons: Vec<&str> = reasons.into_iter().collect();
        eprintln!(
            "nothing is shown: no fault could be tried ({}); choose others or another suite",
            reasons.join("; ")
        );
    }
    // where nothing was killed at all, nothing was shown
    Ok(if wrong == 0 && killed { Exit::Passed } else { Exit::MutantsSurvived })
}
