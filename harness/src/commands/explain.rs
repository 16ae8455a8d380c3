//! `explain`: long text in the terminal, generated from the registries.

use shardcheck_cases::{Case, Family};
use shardcheck_cpu::{Fault, FaultClass, fault, faults};

use crate::boundary::{BoundaryFault, boundary_fault, boundary_faults};
use crate::bugs::{Bug, bug, bugs};
use crate::cli::CommandError;
use crate::commands::print;
use crate::explain::{Explainer, family_meaning};
use crate::properties::{self, Property};
use crate::status::Exit;

/// Options of `explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Property id, fault name, class of faults, public bug (such as `vllm#28840`), family, case id, or a topic
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
        "bugs" => return Ok(bugs().iter().map(|b| format!("{:<28} {}\n", b.id(), b.mechanism)).collect()),
        _ => {}
    }
    // a bug of a fork is named by owner and project
    if what.contains('/') && bug(what).is_none() {
        // what is wrong with an id is said by whoever reads it
        return what.parse().map(|case| of_case(&case)).map_err(CommandError::usage);
    }
    Explainer::new()
        .with("family", Family::ALL.map(Family::name), |name| name.parse().ok().map(of_family))
        .with("property", properties::all().map(|p| p.id), |id| properties::find(id).map(of_property))
        .with("fault", faults().iter().map(|f| f.name), |name| fault(name).map(of_fault))
        .with("fault at the boundary", boundary_faults().map(|f| f.name), |name| {
            boundary_fault(name).map(of_boundary_fault)
        })
        .with("class of faults", FaultClass::ALL.map(FaultClass::name), |name| {
            name.parse().ok().map(of_class)
        })
        .with("public bug", bugs().iter().map(Bug::id), |reference| bug(reference).map(of_bug))
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

fn of_boundary_fault(fault: &BoundaryFault) -> String {
    format!(
        "{}\n  {}\n\ntouches:    {}\nkilled by:  {}\ntry it:     shardcheck mutants run --boundary --engine ENGINE --fault {}\n",
        fault.name,
        fault.title,
        fault.touches,
        list(fault.killed_by),
        fault.name
    )
}

fn of_class(class: FaultClass) -> String {
    let members: Vec<_> = faults()
        .iter()
        .filter(|fault| fault.class == class)
        .map(|fault| format!("  {:<36} {}\n", fault.name, fault.title))
        .collect();
    format!("faults of the class {class}:\n{}", members.concat())
}

fn of_bug(bug: &Bug) -> String {
    let names: Vec<_> = bug.faults().iter().map(|fault| fault.name).collect();
    format!(
        "{}\n  {}\n\nclass:      {}\nfaults:     {}\nseen by:    {}\nmissing:    {}\n",
        bug.refs.join(", "),
        bug.mechanism,
        bug.class,
        list(&names),
        list(&bug.properties()),
        bug.note.as_deref().unwrap_or("nothing")
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
