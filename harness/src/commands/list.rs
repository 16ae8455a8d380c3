//! `list`: the cases of a selection.

use shardcheck_cases::Case;

use crate::cli::CommandError;
use crate::commands::{CaseArgs, print_lines};
use crate::properties;
use crate::status::Exit;

/// Options of `list`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    cases: CaseArgs,

    /// What to print: one id a line, or JSON with the whole case and its properties
    #[arg(long, value_enum, default_value = "ids", value_name = "FORMAT")]
    format: Format,
}

/// What `list` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// One id a line.
    Ids,
    /// One JSON object a line.
    Json,
}

/// Runs `list`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let (cases, selection) = args.cases.selected()?;
    let line = |case: &Case| {
        let id = case.id();
        match args.format {
            Format::Ids => id,
            Format::Json => {
                let properties: Vec<_> = properties::of(case)
                    .filter(|property| selection.matches_property(&id, case, property.id))
                    .map(|property| property.id)
                    .collect();
                serde_json::json!({ "id": id, "properties": properties, "case": case }).to_string()
            }
        }
    };
    print_lines(cases.iter().map(line))?;
    Ok(Exit::Passed)
}
