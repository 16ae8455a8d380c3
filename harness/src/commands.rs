//! The verbs, one file each.

pub mod adapter;
pub mod bench;
pub mod check;
pub mod diagnose;
pub mod diff;
pub mod doctor;
pub mod engines;
pub mod explain;
pub mod export;
pub mod golden;
pub mod gsm8k;
pub mod judge;
pub mod list;
pub mod matrix;
pub mod mutants;
pub mod naming;
pub mod replay;
pub mod reporting;
pub mod run;
pub mod self_test;
pub mod shrink;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use shardcheck_cases::{Case, SuiteName, suite};

use crate::cli::CommandError;
use crate::properties;
use crate::select::{SelectArgs, Selection};

/// Options that name a set of cases.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Cases")]
pub struct CaseArgs {
    /// Suite to take cases from: gate, nightly, engine-smoke, engine-device, seeds, mustpass
    #[arg(long, default_value = "gate", value_name = "NAME")]
    pub suite: SuiteName,

    /// Seed of everything that is drawn; the same seed gives the same cases
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,

    /// Take these cases instead of a suite's: files (case JSON, as in a run's `cases/*/case.json`), or ids
    #[arg(long = "case", value_name = "FILE|ID")]
    pub files: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) select: SelectArgs,
}

impl CaseArgs {
    /// All cases of the suite or the files, and the selection.
    ///
    /// # Errors
    /// Usage errors of files and selection.
    pub fn cases(&self) -> Result<(Vec<Case>, Selection), CommandError> {
        let mut cases: Vec<Case> = if self.files.is_empty() {
            suite(self.suite, self.seed)
        } else {
            self.files.iter().map(|path| named_case(path)).collect::<Result<_, _>>()?
        };
        let selection = self.select.selection().map_err(CommandError::usage)?;
        selection
            .check_properties(properties::all().map(|property| property.id))
            .map_err(CommandError::usage)?;
        let mut ids = std::collections::BTreeSet::new();
        cases.retain(|case: &Case| ids.insert(case.id()));
        selection.check_exact(ids.iter().map(String::as_str)).map_err(CommandError::usage)?;
        Ok((cases, selection))
    }

    /// The selected cases.
    ///
    /// # Errors
    /// Usage errors, and [`CommandError::NothingSelected`].
    pub fn selected(&self) -> Result<(Vec<Case>, Selection), CommandError> {
        let (mut cases, selection) = self.cases()?;
        let count = cases.len();
        cases.retain(|case| {
            let id = case.id();
            selection.matches(&id, case)
                && properties::of(case).any(|property| selection.matches_property(&id, case, property.id))
        });
        if cases.is_empty() {
            return Err(CommandError::NothingSelected(format!(
                "none of the {count} cases of {} is selected; `shardcheck list` prints ids, `shardcheck explain \
                 filter-expressions` lists what can be filtered by",
                self.source()
            )));
        }
        Ok((cases, selection))
    }

    /// Name of where the cases come from, for the run's header.
    pub fn source(&self) -> String {
        if self.files.is_empty() { self.suite.to_string() } else { "cases".to_owned() }
    }
}

/// Prints to standard output. Whoever reads a pipe may close it when it has seen enough: that is no error.
///
/// # Errors
/// [`CommandError::Usage`] when the output can't be written for another reason, such as a full disk.
pub(crate) fn print(text: impl std::fmt::Display) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    told(write!(out, "{text}").and_then(|()| out.flush()))
}

/// As [`print`], a line each, made one after the other.
///
/// # Errors
/// As there: a list that was cut off must not look whole.
pub(crate) fn print_lines(mut lines: impl Iterator<Item = String>) -> Result<(), CommandError> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    told(lines.try_for_each(|line| writeln!(out, "{line}")).and_then(|()| out.flush()))
}

fn told(outcome: std::io::Result<()>) -> Result<(), CommandError> {
    match outcome {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(CommandError::Usage(format!(
            "failed to write to standard output: {error}; what was printed is not whole"
        ))),
        _ => Ok(()),
    }
}

/// The case of a file, or of an id where there is no such file.
fn named_case(path: &std::path::Path) -> Result<Case, CommandError> {
    match path.to_str().map(str::parse::<Case>) {
        Some(Ok(case)) if !path.exists() => Ok(case),
        Some(Err(error)) if !path.exists() && path.to_str().is_some_and(naming::begins_with_a_family) => {
            Err(CommandError::usage(error))
        }
        _ => read_case(path),
    }
}

/// Reads a case file.
pub(crate) fn read_case(path: &std::path::Path) -> Result<Case, CommandError> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        CommandError::Usage(format!("failed to read the case {}: {error}", path.display()))
    })?;
    // a line of `list --format json` holds a case beside its id
    let listed = shardcheck_cases::read_json(&text).ok().and_then(|mut value| {
        (value.get("schema_version").is_none() && value.get("id").is_some())
            .then(|| value["case"].take().to_string())
    });
    Case::from_json(listed.as_ref().unwrap_or(&text))
        .map_err(|error| CommandError::Usage(format!("{}: {error}", path.display())))
}
