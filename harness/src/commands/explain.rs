//! `explain`: long text in the terminal, generated from the registries.

use shardcheck_cases::{Case, Family};
use shardcheck_cpu::{Fault, fault, faults};

use crate::cli::CommandError;
use crate::commands::print;
use crate::explain::{Explainer, family_meaning};
use crate::properties::{self, Property};
use crate::status::Exit;

/// Options of `explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Property id, fault name, family, case id, or a topic
    #[arg(default_value = "topics", value_name = "WHAT")]
    what: String,
}

/// Runs `explain`.
///
/// # Errors
/// [`CommandError::Usage`] when there is nothing of that name.
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    print(text(&args.what)?.trim_end().to_owned() + "\n")?;
    Ok(Exit::Passed)
}

fn text(what: &str) -> Result<String, CommandError> {
    match what {
        "properties" => {
            return Ok(properties::all().map(|p| format!("{:<28} {}\n", p.id, p.statement)).collect());
        }
        "faults" => return Ok(faults().iter().map(|f| format!("{:<36} {}\n", f.name, f.title)).collect()),
        _ => {}
    }
    if what.contains('/') {
        // what is wrong with an id is said by whoever reads it
        return what.parse().map(|case| of_case(&case)).map_err(CommandError::usage);
    }
    Explainer::new()
        .with("family", Family::ALL.map(Family::name), |name| name.parse().ok().map(of_family))
        .with("property", properties::all().map(|p| p.id), |id| properties::find(id).map(of_property))
        .with("fault", faults().iter().map(|f| f.name), |name| fault(name).map(of_fault))
        .explain(what)
        .map_err(CommandError::usage)
}

fn of_property(property: &Property) -> String {
    let killed: Vec<_> =
        faults().iter().filter(|f| f.killed_by.contains(&property.id)).map(|f| f.name).collect();
    let families: Vec<_> = property.families.iter().map(|family| family.name()).collect();
    format!(
        "{}\n  {}\n\nsource:     {}\ntolerance:  {}\nfamilies:   {}\nbugs:       {}\nfaults that it must kill: {}\n",
        property.id,
        property.statement,
        property.source,
        property.tolerance,
        families.join(", "),
        list(property.bugs),
        list(&killed)
    )
}

fn of_family(family: Family) -> String {
    let properties: Vec<_> = properties::all()
        .filter(|property| property.families.contains(&family))
        .map(|property| format!("  {:<28} {}\n", property.id, property.statement))
        .collect();
    let operation = family.operation().map_or("none of its own".to_owned(), |kind| kind.to_string());
    format!(
        "{}\n\noperation:  {operation}\ntry it:     shardcheck run -E 'family({family})'\nproperties:\n{}",
        family_meaning(family),
        properties.concat()
    )
}

fn of_fault(fault: &Fault) -> String {
    format!(
        "{}\n  {}\n\nclass:      {}\nbugs:       {}\nkilled by:  {}\ntry it:     shardcheck run --fault {}\n",
        fault.name,
        fault.title,
        fault.class.name(),
        list(fault.bugs),
        list(fault.killed_by),
        fault.name
    )
}

fn of_case(case: &Case) -> String {
    let properties: Vec<_> =
        properties::of(case).map(|p| format!("  {:<28} {}\n", p.id, p.statement)).collect();
    format!(
        "{}\n\nproperties judged on it:\n{}\ncase JSON:\n{}\n",
        case.id(),
        properties.concat(),
        case.to_json()
    )
}

fn list(names: &[&str]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
