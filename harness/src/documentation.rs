//! Keeps the pages in `docs/` equal to the vocabularies that they describe.
//!
//! `SHARDCHECK_BLESS=1 cargo test -p shardcheck documentation` writes the generated parts anew.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::event::{Event, RESULTS_SCHEMA_VERSION};
use crate::explain;
use crate::sample;
use crate::select::Expression;

const BLESS: &str = "SHARDCHECK_BLESS";
const END: &str = "<!-- end generated -->";

fn page_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name)
}

fn page(name: &str) -> String {
    fs::read_to_string(page_path(name)).unwrap_or_else(|error| panic!("docs/{name}: {error}"))
}

/// The page with one generated part replaced.
fn with_part(page: &str, part: &str, content: &str) -> String {
    let start_mark = format!("<!-- generated: {part} -->\n");
    let start =
        page.find(&start_mark).unwrap_or_else(|| panic!("{start_mark:?} is missing")) + start_mark.len();
    let end = start + page[start..].find(END).unwrap_or_else(|| panic!("{part} is not closed"));
    format!("{}{}{}", &page[..start], content, &page[end..])
}

/// Compares the generated parts of a page, or writes them when asked to.
fn check(name: &str, parts: &[(&str, String)]) {
    let found = page(name);
    let expected = parts.iter().fold(found.clone(), |text, (part, content)| with_part(&text, part, content));
    if found == expected {
        return;
    }
    if std::env::var_os(BLESS).is_some_and(|value| value == "1") {
        fs::write(page_path(name), expected).unwrap();
        return;
    }
    let line = found.lines().zip(expected.lines()).position(|(a, b)| a != b).unwrap_or(0);
    panic!(
        "docs/{name} is stale at line {}:\n  found     {:?}\n  expected  {:?}\n`{BLESS}=1 cargo test -p shardcheck documentation` \
         writes it anew",
        line + 1,
        found.lines().nth(line).unwrap_or_default(),
        expected.lines().nth(line).unwrap_or_default()
    );
}

fn event_lines() -> Vec<String> {
    let mut kinds = Vec::new();
    let mut lines = Vec::new();
    for event in sample::events(&sample::header()) {
        let value = serde_json::to_value(&event).unwrap();
        let last = value["checks"].as_array().and_then(|checks| checks.last());
        let kind = match (&event, last) {
            (Event::RunStarted(_) | Event::CaseFailed { .. }, _) => continue,
            (_, Some(check)) => check["finding"].as_object().unwrap().keys().next().unwrap().clone(),
            _ => value["event"].as_str().unwrap().to_owned(),
        };
        if !kinds.contains(&kind) {
            kinds.push(kind);
            lines.push(serde_json::to_string(&event).unwrap());
        }
    }
    lines
}

#[test]
fn the_page_on_verdicts_and_exit_codes_holds_what_the_enums_say() {
    check(
        "exit-codes.md",
        &[
            ("statuses", explain::statuses().to_markdown()),
            ("exit-codes", explain::exit_codes().to_markdown()),
        ],
    );
}

#[test]
fn the_page_on_selection_lists_every_axis() {
    let error = Expression::parse("family(verify) & probe(cld)").unwrap_err();
    check(
        "selection.md",
        &[
            ("expression-examples", explain::expression_examples().to_markdown()),
            ("expression-error", format!("```text\n{error}\n```\n")),
            ("axes", explain::axes().to_markdown()),
        ],
    );
}

#[test]
fn the_page_on_results_shows_events_as_they_are_written() {
    check(
        "results.md",
        &[
            ("events", format!("```json\n{}\n```\n", event_lines().join("\n"))),
            ("junit-mapping", explain::junit_mapping().to_markdown()),
        ],
    );
}

#[test]
fn the_page_on_results_names_every_field_and_the_version() {
    fn names(value: &Value, into: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                for (name, value) in map {
                    into.push(name.clone());
                    // the case has a page of its own, the profile is the engine's, and counts are keyed by verdict
                    if !["case", "profile", "counts"].contains(&name.as_str()) {
                        names(value, into);
                    }
                }
            }
            Value::Array(list) => list.iter().for_each(|value| names(value, into)),
            _ => {}
        }
    }
    let text = page("results.md");
    let mut fields = Vec::new();
    for event in sample::events(&sample::header()) {
        names(&serde_json::to_value(&event).unwrap(), &mut fields);
    }
    names(&serde_json::to_value(sample::record().results()).unwrap(), &mut fields);
    fields.sort_unstable();
    fields.dedup();
    assert!(fields.len() > 40, "{fields:?}");
    for field in fields {
        assert!(text.contains(&format!("`{field}`")), "`{field}` is not in docs/results.md");
    }
    for event in sample::events(&sample::header()) {
        let kind = serde_json::to_value(&event).unwrap()["event"].as_str().unwrap().to_owned();
        assert!(text.contains(&format!("| `{kind}` |")), "{kind} has no row in docs/results.md");
    }
    let version = format!("<!-- version -->{RESULTS_SCHEMA_VERSION}<!-- end version -->");
    assert!(text.contains(&version), "docs/results.md must say {version}");
}

#[test]
fn every_example_expression_of_the_pages_parses() {
    // fenced blocks show an expression that does not parse; a table escapes its bars
    let text: String = page("selection.md").split("```").step_by(2).collect();
    let text = text.replace("\\|", "|");
    let mut parsed = 0;
    for atom in text.split('`').skip(1).step_by(2).filter(|code| code.contains('(') && code.ends_with(')')) {
        if let Some(name) = atom.strip_suffix("(…)") {
            assert!(crate::select::Axis::find(name).is_some(), "{atom}");
            continue;
        }
        Expression::parse(atom).unwrap_or_else(|error| panic!("{error}"));
        parsed += 1;
    }
    assert!(parsed >= 8, "{parsed}");
}

#[test]
fn the_page_on_files_shows_the_program_as_it_is() {
    let source = fs::read_to_string(page_path("../runners/files/merge_states.cpp")).unwrap();
    assert!(
        page("files.md").contains(&format!("```cpp\n{source}```\n")),
        "docs/files.md lists another program"
    );
}

#[test]
fn links_between_the_pages_lead_somewhere() {
    for name in [
        "claims.md",
        "diagnosis.md",
        "exit-codes.md",
        "files.md",
        "results.md",
        "scripts.md",
        "selection.md",
        "shrink.md",
    ] {
        // a listing is full of brackets
        let text: String = page(name).split("```").step_by(2).collect();
        for link in text.split("](").skip(1).map(|rest| rest[..rest.find(')').unwrap()].to_owned()) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = page(file);
            let heading = format!("# {anchor}").to_lowercase();
            assert!(
                target.to_lowercase().contains(&heading) || anchor.is_empty(),
                "{name}: {link} leads nowhere"
            );
        }
    }
}

/// Text in a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn property_table() -> String {
    let mut table = String::from(
        "| property | statement | source | tolerance | faults that it must kill |\n|---|---|---|---|---|\n",
    );
    for property in crate::properties::all() {
        let faults = shardcheck_cpu::faults().iter().filter(|fault| fault.killed_by.contains(&property.id));
        let faults: Vec<_> = faults.map(|fault| format!("`{}`", fault.name)).collect();
        table += &format!(
            "| `{}` | {} | {} | {} | {} |\n",
            property.id,
            cell(property.statement),
            cell(property.source),
            cell(property.tolerance),
            faults.join(", ")
        );
    }
    table
}

fn fault_table() -> String {
    let mut table = String::from(
        "| fault | class | what is wrong | public bugs of that kind | killed by |\n|---|---|---|---|---|\n",
    );
    for fault in shardcheck_cpu::faults() {
        let killers: Vec<_> = fault.killed_by.iter().map(|id| format!("`{id}`")).collect();
        table += &format!(
            "| `{}` | {} | {} | {} | {} |\n",
            fault.name,
            fault.class.name(),
            cell(fault.title),
            fault.bugs.join(", "),
            killers.join(", ")
        );
    }
    table
}

/// What something waits for, and why, in a table cell.
fn missing(later: Option<crate::bugs::Later>, why: Option<&str>) -> String {
    let why = why.unwrap_or_default();
    later.map_or(why.to_owned(), |later| format!("{}: {why}", later.name()))
}

fn bug_table() -> String {
    let mut table = String::from(
        "| bug | class | what was wrong | faults that model it | seen by | what is missing |\n|---|---|---|---|---|---|\n",
    );
    for bug in crate::bugs::bugs() {
        let faults: Vec<_> = bug.faults().iter().map(|fault| format!("`{}`", fault.name)).collect();
        let properties: Vec<_> = bug.properties().iter().map(|id| format!("`{id}`")).collect();
        let missing = missing(bug.later, bug.note.as_deref());
        table += &format!(
            "| {} | {} | {} | {} | {} | {} |\n",
            bug.refs.join(", "),
            bug.class,
            cell(&bug.mechanism),
            faults.join(", "),
            properties.join(", "),
            cell(&missing)
        );
    }
    table
}

fn bug_counts() -> String {
    let all = crate::bugs::bugs();
    let count = |which: fn(&&crate::bugs::Bug) -> bool| all.iter().filter(which).count();
    format!(
        "Of {} bugs, {} are modelled by a fault, {} of them in part; {} have none, each for the reason that stands with it.\n",
        all.len(),
        count(|bug| !bug.faults().is_empty()),
        count(|bug| !bug.faults().is_empty() && bug.note.is_some()),
        count(|bug| bug.faults().is_empty())
    )
}

fn boundary_table() -> String {
    let mut table = String::from("| fault | tampers with | what is wrong | killed by |\n|---|---|---|---|\n");
    for fault in crate::boundary::boundary_faults() {
        let killers: Vec<_> = fault.killed_by.iter().map(|id| format!("`{id}`")).collect();
        table += &format!(
            "| `{}` | {} | {} | {} |\n",
            fault.name,
            fault.touches,
            cell(fault.title),
            killers.join(", ")
        );
    }
    table
}

fn coverage_table() -> String {
    use crate::coverage::{Document, Statement, statements};
    let row = |statement: &Statement| {
        let properties = statement.properties.iter().map(|id| format!("`{id}`"));
        let checked: Vec<_> = properties.chain(statement.elsewhere.clone()).collect();
        let missing = missing(statement.waits_for, statement.why.as_deref());
        let (section, says) = (cell(&statement.section), cell(&statement.says));
        format!("| {section} | {says} | {} | {} |\n", checked.join(", "), cell(&missing))
    };
    let part = |document: Document| {
        let rows: String = statements().iter().filter(|s| s.document == document).map(row).collect();
        format!(
            "\n## {}\n\n| section | it says | checked by | what is missing, or why it is not |\n|---|---|---|---|\n{rows}",
            document.title()
        )
    };
    Document::ALL.map(part).concat()
}

fn coverage_counts() -> String {
    let all = crate::coverage::statements();
    let checked = all.iter().filter(|s| !s.properties.is_empty() || s.elsewhere.is_some());
    let waiting = all.iter().filter(|s| s.waits_for.is_some()).count();
    format!(
        "Of {} statements, {} are checked; {waiting} wait for a part of the program, whole or in part.\n",
        all.len(),
        checked.count()
    )
}

#[test]
fn the_page_on_coverage_lists_every_statement_of_the_documents() {
    check("coverage.md", &[("counts", coverage_counts()), ("coverage", coverage_table())]);
}

#[test]
fn the_page_on_bugs_joins_the_catalogue_with_the_faults() {
    check("bugs.md", &[("counts", bug_counts()), ("bugs", bug_table())]);
}

#[test]
fn the_page_on_the_kill_matrix_names_every_state_every_field_and_the_version() {
    use crate::matrix::{KillState, MATRIX_SCHEMA_VERSION, Matrix, Row};
    let states: String = KillState::ALL
        .iter()
        .map(|state| format!("| `{}` | {} |\n", state.name(), state.meaning()))
        .collect();
    let states = format!("| state | meaning |\n|---|---|\n{states}");
    check("kill-matrix.md", &[("states", states), ("boundary", boundary_table())]);
    let mut row = Row::new("fault", "class");
    row.cells = vec![crate::matrix::Cell {
        property: "verify.output".to_owned(),
        state: KillState::Survived,
        case: None,
        tried: 0,
    }];
    let matrix = Matrix {
        schema_version: MATRIX_SCHEMA_VERSION,
        suite: "gate".to_owned(),
        seed: 1,
        engine: "cpu".to_owned(),
        cases: 0,
        rows: vec![row],
        idle_properties: Vec::new(),
    };
    let text = page("kill-matrix.md");
    let value = serde_json::to_value(&matrix).unwrap();
    let objects = [&value, &value["rows"][0], &value["rows"][0]["cells"][0]];
    for field in objects.iter().flat_map(|object| object.as_object().unwrap().keys()) {
        assert!(text.contains(&format!("| `{field}` |")), "`{field}` has no row in docs/kill-matrix.md");
    }
    let version = format!("<!-- version -->{MATRIX_SCHEMA_VERSION}<!-- end version -->");
    assert!(text.contains(&version), "docs/kill-matrix.md must say {version}");
}

#[test]
fn the_page_on_properties_lists_the_registry() {
    check("properties.md", &[("properties", property_table())]);
}

fn smallest_case_table() -> String {
    let mut table = String::from("| bug | smallest case | compared |\n|---|---|---|\n");
    for bug in crate::shrink::SMALLEST_CASES {
        let names = ["tokens", "W", "heads", "S", "B", "dims"];
        let stated =
            names.iter().zip(bug.stated).filter_map(|(name, part)| Some(format!("{name} {}", part?)));
        let stated: Vec<_> = stated.collect();
        let stated = if stated.is_empty() { "nothing is stated".to_owned() } else { stated.join(", ") };
        table += &format!("| {} | {} | {stated} |\n", bug.ids.join(", "), cell(bug.words));
    }
    table
}

#[test]
fn the_page_on_shrinking_lists_the_smallest_cases() {
    check("shrink.md", &[("smallest cases", smallest_case_table())]);
}

#[test]
fn the_page_on_faults_lists_the_registry() {
    check("faults.md", &[("faults", fault_table())]);
}

#[test]
fn every_property_is_named_by_a_fault_and_every_name_is_a_property() {
    let unproved: Vec<_> = crate::properties::all()
        .filter(|property| {
            !shardcheck_cpu::faults().iter().any(|fault| fault.killed_by.contains(&property.id))
        })
        .map(|property| property.id)
        .collect();
    assert!(unproved.is_empty(), "no fault names {unproved:?}");
    for fault in shardcheck_cpu::faults() {
        for id in fault.killed_by {
            assert!(crate::properties::find(id).is_some(), "{} names {id}, which is no property", fault.name);
        }
    }
}
