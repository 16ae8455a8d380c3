//! What the HTML page shows, laid out but not yet written.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use shardcheck_cases::Family;

use super::case_anchor;
use super::histogram::Histogram;
use crate::claims::EntryVerdict;
use crate::event::{CaseResult, RunHeader};
use crate::finding::Finding;
use crate::record::{MutantRecord, RunRecord};
use crate::report::Glossary;
use crate::report::block::{Block, short};
use crate::run_directory::claims_in_words;
use crate::select::Selection;
use crate::status::{Exit, Status};
use crate::summary::{Summary, expected_reasons, family_of, ratio, undecided_reason};
use crate::tally::{TableRow, table_of};

/// Cases listed as slowest.
const SLOWEST: usize = 10;

/// The page.
#[derive(Debug, Serialize)]
pub struct Page {
    run_id: String,
    verdict: Verdict,
    environment: Vec<(String, String)>,
    profile: String,
    vacuity: String,
    counts: Vec<Count>,
    families: Vec<String>,
    grid: Vec<GridRow>,
    histograms: Vec<FamilyHistogram>,
    failures: Vec<FailureEntry>,
    cases: Vec<CaseRow>,
    mutants: Vec<MutantRow>,
    claims: Vec<EntryVerdict>,
    table: Vec<TableRow>,
    slowest: Vec<CaseRow>,
}

#[derive(Debug, Serialize)]
struct Verdict {
    class: &'static str,
    text: String,
}

#[derive(Debug, Serialize)]
struct Count {
    status: &'static str,
    count: usize,
    meaning: &'static str,
}

#[derive(Debug, Serialize)]
struct GridRow {
    property: String,
    sentence: String,
    cells: Vec<Option<Cell>>,
}

/// One property on one family.
#[derive(Debug, Clone, Default, Serialize)]
struct Cell {
    /// Checks by verdict.
    held: usize,
    failed: usize,
    /// Failed as the claims say they must.
    expected: usize,
    undecided: usize,
    /// Verdict that the cell is coloured by.
    class: &'static str,
    /// How close the worst check came to its bound, 0 to 1.
    heat: f64,
    worst: String,
    #[serde(skip)]
    worst_ratio: Option<f64>,
}

#[derive(Debug, Serialize)]
struct FamilyHistogram {
    family: String,
    histogram: Histogram,
    /// Failed checks without a finite ratio, which no bar can show.
    unmeasured: usize,
}

#[derive(Debug, Serialize)]
struct FailureEntry {
    id: String,
    anchor: String,
    status: &'static str,
    block: String,
}

#[derive(Debug, Clone, Serialize)]
struct CaseRow {
    id: String,
    anchor: String,
    status: &'static str,
    ratio: String,
    milliseconds: String,
    reason: String,
    failed: bool,
}

#[derive(Debug, Serialize)]
struct MutantRow {
    fault: String,
    state: String,
    property: String,
    case: String,
    anchor: String,
    tried: usize,
}

impl Page {
    /// Lays the page of a run out.
    pub fn of(record: &RunRecord, glossary: &Glossary) -> Self {
        let summary = Summary::of(record);
        let failed = record.cases.iter().filter(|result| result.status.is_failure());
        let mut slowest: Vec<&CaseResult> = record.cases.iter().collect();
        slowest.sort_by(|a, b| b.elapsed_s.total_cmp(&a.elapsed_s));
        let mut families: Vec<String> = summary.families.keys().cloned().collect();
        families.sort_by_key(|name| bring_up_place(name));
        Self {
            run_id: record.header.run_id.clone(),
            verdict: verdict(record),
            environment: environment(&record.header, record),
            profile: serde_json::to_string_pretty(&record.header.profile).unwrap_or_default(),
            vacuity: summary.vacuity_line(),
            counts: Status::ALL
                .into_iter()
                .filter(|status| summary.count(*status) > 0)
                .map(|s| Count { status: s.name(), count: summary.count(s), meaning: s.meaning() })
                .collect(),
            grid: grid(record, &families, glossary),
            histograms: histograms(record),
            families,
            failures: failed
                .map(|result| FailureEntry {
                    id: result.id.clone(),
                    anchor: case_anchor(&result.id),
                    status: result.status.name(),
                    block: Block::of(result, Some((&record.header).into()), glossary).to_string(),
                })
                .collect(),
            cases: record.cases.iter().map(case_row).collect(),
            mutants: record.mutants.iter().map(mutant_row).collect(),
            claims: record.claims.clone(),
            table: table_of(&record.cases),
            slowest: slowest.into_iter().take(SLOWEST).map(case_row).collect(),
        }
    }
}

/// Place of a family in the order in which an engine is brought up; unknown ones last.
fn bring_up_place(family: &str) -> usize {
    Family::ALL.into_iter().position(|known| known.name() == family).unwrap_or(Family::ALL.len())
}

fn verdict(record: &RunRecord) -> Verdict {
    let exit = match record.finished {
        Some(finished) => Exit::ALL.into_iter().find(|exit| exit.code() == finished.exit_code),
        None => None,
    };
    match exit {
        Some(exit) => Verdict {
            class: match exit {
                Exit::Passed => "pass",
                Exit::Inconclusive | Exit::RerunOutstanding => "inconclusive",
                _ => "fail",
            },
            text: format!("exit code {}: {}", exit.code(), exit.meaning()),
        },
        None => {
            let so_far = Exit::of(record.cases.iter().map(|case| case.status));
            let class =
                if so_far == Exit::Failed || so_far == Exit::Internal { "fail" } else { "inconclusive" };
            let text = format!("the run did not come to its end; so far: {}", so_far.meaning());
            Verdict { class, text }
        }
    }
}

fn environment(header: &RunHeader, record: &RunRecord) -> Vec<(String, String)> {
    let mut rows = vec![
        ("suite", header.suite.clone()),
        ("seed", header.seed.to_string()),
        ("engine", header.engine.clone()),
        ("fault", header.fault.clone().unwrap_or_else(|| "none".to_owned())),
        ("shardcheck", header.tool_version.clone()),
        ("machine", header.machine.clone()),
        ("selection", Selection::in_words(&header.selection)),
        ("claims", claims_in_words(header)),
        ("selected", format!("{} cases", header.selected)),
        ("format", format!("schema version {}", header.schema_version)),
    ];
    if let Some(finished) = record.finished {
        rows.push(("elapsed", format!("{:.1} s", finished.elapsed_s)));
    }
    rows.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn grid(record: &RunRecord, families: &[String], glossary: &Glossary) -> Vec<GridRow> {
    let mut cells: BTreeMap<(&str, &str), Cell> = BTreeMap::new();
    for result in &record.cases {
        for check in &result.checks {
            let cell = cells.entry((&check.property, family_of(&result.id))).or_default();
            let status = check.status();
            match status {
                Status::ExpectedFail => cell.expected += 1,
                _ if status.is_failure() => cell.failed += 1,
                _ if status.is_judged() => cell.held += 1,
                _ => cell.undecided += 1,
            }
            if let Some(ratio) = ratio(check) {
                cell.worst_ratio = Some(cell.worst_ratio.map_or(ratio, |worst| worst.max(ratio)));
            }
        }
    }
    for cell in cells.values_mut() {
        cell.class = match cell {
            Cell { failed: 1.., .. } => "fail",
            Cell { held: 0, expected: 1.., .. } => "expected",
            Cell { held: 0, .. } => "undecided",
            _ => "pass",
        };
        cell.heat = cell.worst_ratio.map_or(0.0, |ratio| ratio.clamp(0.0, 1.0));
        cell.worst = cell.worst_ratio.map_or("exact".to_owned(), short);
    }
    let properties: BTreeSet<&str> = cells.keys().map(|(property, _)| *property).collect();
    properties
        .into_iter()
        .map(|property| GridRow {
            property: property.to_owned(),
            sentence: glossary.sentence(property).unwrap_or_default().to_owned(),
            cells: families.iter().map(|family| cells.get(&(property, family.as_str())).cloned()).collect(),
        })
        .collect()
}

fn histograms(record: &RunRecord) -> Vec<FamilyHistogram> {
    let mut by_family: BTreeMap<(usize, &str), (Vec<f64>, usize)> = BTreeMap::new();
    for result in &record.cases {
        let family = family_of(&result.id);
        let entry = by_family.entry((bring_up_place(family), family)).or_default();
        for check in &result.checks {
            match ratio(check) {
                Some(ratio) => entry.0.push(ratio),
                None => entry.1 += usize::from(matches!(check.finding, Finding::Broken(_))),
            }
        }
    }
    by_family
        .into_iter()
        .filter_map(|((_, family), (ratios, unmeasured))| {
            let histogram = Histogram::of(&ratios)?;
            Some(FamilyHistogram { family: family.to_owned(), histogram, unmeasured })
        })
        .collect()
}

fn case_row(result: &CaseResult) -> CaseRow {
    let worst = result.checks.iter().filter_map(ratio).max_by(f64::total_cmp);
    CaseRow {
        id: result.id.clone(),
        anchor: case_anchor(&result.id),
        status: result.status.name(),
        ratio: worst.map_or(String::new(), short),
        milliseconds: format!("{:.1}", result.elapsed_s * 1e3),
        reason: expected_reasons(result)
            .into_iter()
            .chain(undecided_reason(result))
            .collect::<Vec<_>>()
            .join("; "),
        failed: result.status.is_failure(),
    }
}

fn mutant_row(mutant: &MutantRecord) -> MutantRow {
    MutantRow {
        fault: mutant.fault.clone(),
        state: mutant.state.clone(),
        property: mutant.property.clone().unwrap_or_default(),
        case: mutant.case.clone().unwrap_or_default(),
        anchor: mutant.case.as_deref().map(case_anchor).unwrap_or_default(),
        tried: mutant.tried,
    }
}
