//! The kill matrix: for each fault what became of it, and which of the properties that it names noticed it.
//!
//! It stores states, never a score: what a share of killed faults would mean depends on which faults somebody thought of.
//! What is wrong with a matrix is said one by one, as [`Shortcoming`]s.

mod table;

use std::fmt;
use std::time::Duration;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use shardcheck_cases::Case;
use shardcheck_cpu::{CpuEngine, Fault, FaultClass, engine};

use crate::finding::Finding;
use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::mutants::in_own_order;
use crate::properties::{self, Property};
use crate::quiet::Quiet;
use crate::status::Status;

pub use table::{lines, markdown};

/// Version of the JSON of a matrix. It rises when a field changes its meaning or goes.
pub const MATRIX_SCHEMA_VERSION: u32 = 1;

/// What became of a fault, or of a property that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KillState {
    /// A property that the fault names failed.
    Killed,
    /// Only a property that the fault does not name failed.
    KilledByOther,
    /// No property failed on any case tried.
    Survived,
    /// Nothing that was selected can show it.
    NotApplicable,
    /// The engine did not answer in time, where that is not what the fault is about.
    Timeout,
    /// The harness could not judge.
    Error,
}

impl KillState {
    /// All states, in a stable order.
    pub const ALL: [Self; 6] =
        [Self::Killed, Self::KilledByOther, Self::Survived, Self::NotApplicable, Self::Timeout, Self::Error];

    /// Name as it stands in a matrix.
    pub fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::KilledByOther => "killed-by-other",
            Self::Survived => "survived",
            Self::NotApplicable => "not-applicable",
            Self::Timeout => "timeout",
            Self::Error => "error",
        }
    }

    /// What it means, in one sentence.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Killed => "a property that the fault names failed",
            Self::KilledByOther => "only a property that the fault does not name failed",
            Self::Survived => "no property failed on any case tried",
            Self::NotApplicable => {
                "no case of the suite can show it, or the engine derives what it tampers with"
            }
            Self::Timeout => "the engine did not answer in time, where that is not what the fault is about",
            Self::Error => "the harness could not judge",
        }
    }
}

/// One property that a fault names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// The property.
    pub property: String,
    /// What became of it.
    pub state: KillState,
    /// First case on which it failed.
    pub case: Option<String>,
    /// Cases on which it was judged.
    pub tried: usize,
}

/// One fault.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The fault.
    pub fault: String,
    /// Its class.
    pub class: String,
    /// What became of it.
    pub state: KillState,
    /// The property that saw it first.
    pub property: Option<String>,
    /// The case on which that was.
    pub case: Option<String>,
    /// Cases tried.
    pub tried: usize,
    /// Of a fault that survived: whether any answer of the engine differs from those without the fault.
    pub changed: Option<bool>,
    /// Why it does not apply, or what went wrong.
    pub reason: Option<String>,
    /// The properties that it names, in its own order; empty where the first that fails suffices.
    pub cells: Vec<Cell>,
}

impl Row {
    /// A fault that nothing has seen yet.
    pub fn new(fault: &str, class: &str) -> Self {
        Self {
            fault: fault.to_owned(),
            class: class.to_owned(),
            state: KillState::Survived,
            property: None,
            case: None,
            tried: 0,
            changed: None,
            reason: None,
            cells: Vec::new(),
        }
    }

    /// The same, seen by a property that it names on a case.
    #[must_use]
    pub fn killed(mut self, property: &str, case: String) -> Self {
        (self.state, self.property, self.case) = (KillState::Killed, Some(property.to_owned()), Some(case));
        self
    }

    /// The same, found to have nothing to act on.
    #[must_use]
    pub fn not_applicable(mut self, reason: impl Into<String>) -> Self {
        (self.state, self.reason) = (KillState::NotApplicable, Some(reason.into()));
        self
    }
}

/// A kill matrix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// [`MATRIX_SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Suite that the cases come from.
    pub suite: String,
    /// Its seed.
    pub seed: u64,
    /// Engine that the faults were tried on.
    pub engine: String,
    /// Cases of the suite.
    pub cases: usize,
    /// The faults.
    pub rows: Vec<Row>,
    /// Properties that a case of the suite is judged on and that killed no fault.
    pub idle_properties: Vec<String>,
}

/// Something that a matrix shows to be wrong. Each fails the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shortcoming {
    /// A fault that nothing saw, although it changes what the engine answers.
    Survived {
        /// The fault.
        fault: String,
        /// Cases tried.
        tried: usize,
    },
    /// A fault that changes nothing.
    Dead {
        /// The fault.
        fault: String,
        /// Cases tried.
        tried: usize,
    },
    /// A fault that only properties saw which it does not name.
    ByOther {
        /// The fault.
        fault: String,
        /// The property that saw it.
        property: String,
    },
    /// A property that a fault names and that does not notice it.
    Unnoticed {
        /// The fault.
        fault: String,
        /// The property.
        property: String,
        /// Cases on which it was judged.
        tried: usize,
    },
    /// A property that kills no fault.
    Idle {
        /// The property.
        property: String,
    },
    /// A fault that could not be tried to an end.
    Undecided {
        /// The fault.
        fault: String,
        /// Timeout or error.
        state: KillState,
        /// What happened.
        reason: String,
    },
}

impl fmt::Display for Shortcoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Survived { fault, tried } => {
                write!(f, "{fault} survived: no property failed on {tried} cases, although answers differ")
            }
            Self::Dead { fault, tried } => {
                write!(
                    f,
                    "{fault} shows nothing: it changed no answer on {tried} cases; try a larger suite, and mend or remove it if it is dead there as well"
                )
            }
            Self::ByOther { fault, property } => {
                write!(f, "{fault} was seen by {property} alone, which it does not name")
            }
            Self::Unnoticed { fault, property, tried } => {
                write!(f, "{fault} names {property}, which held on all {tried} cases tried")
            }
            Self::Idle { property } => {
                write!(f, "{property} killed no fault: it has never been seen to fail")
            }
            Self::Undecided { fault, state, reason } => write!(f, "{fault}: {}: {reason}", state.name()),
        }
    }
}

impl Matrix {
    /// Everything that is wrong with it, fault by fault, then idle properties.
    pub fn shortcomings(&self) -> Vec<Shortcoming> {
        let mut found = Vec::new();
        for row in &self.rows {
            let (fault, tried) = (row.fault.clone(), row.tried);
            match row.state {
                KillState::Survived if row.changed == Some(false) => {
                    found.push(Shortcoming::Dead { fault, tried });
                }
                KillState::Survived => found.push(Shortcoming::Survived { fault, tried }),
                KillState::KilledByOther => {
                    let property = row.property.clone().unwrap_or_default();
                    found.push(Shortcoming::ByOther { fault, property });
                }
                KillState::Timeout | KillState::Error => {
                    let reason = row.reason.clone().unwrap_or_default();
                    found.push(Shortcoming::Undecided { fault, state: row.state, reason });
                }
                KillState::Killed => {
                    let unnoticed = row.cells.iter().filter(|cell| cell.state == KillState::Survived);
                    found.extend(unnoticed.map(|cell| Shortcoming::Unnoticed {
                        fault: fault.clone(),
                        property: cell.property.clone(),
                        tried: cell.tried,
                    }));
                }
                KillState::NotApplicable => {}
            }
        }
        let idle = self.idle_properties.iter();
        found.extend(idle.map(|property| Shortcoming::Idle { property: property.clone() }));
        found
    }
}

/// Most cases on which a fault is tried until one of its properties fails.
const CASES_A_FAULT: usize = 1500;
/// Most cases on which one property is judged once another has killed the fault.
const CASES_A_CELL: usize = 300;
/// Cases on which a fault that its own properties do not see is tried by all others, and compared with the healthy engine.
const CASES_FOR_OTHERS: usize = 60;
/// How long ranks wait for each other where a fault makes them wait for ever.
const HANG_TIMEOUT: Duration = Duration::from_millis(300);

/// Tries every fault on every property that it names, on the small cases of a suite, in parallel. `whole` says that no
/// fault was left out, so that a property without a killing fault can be told; `done` hears of each fault as it is tried.
pub fn matrix(
    (suite, seed): (&str, u64),
    faults: &[&'static Fault],
    cases: &[Case],
    whole: bool,
    done: &(dyn Fn(&Row) + Sync),
) -> Matrix {
    let _quiet = Quiet::new();
    let row = |fault: &&'static Fault| {
        let row = try_fault(fault, cases);
        done(&row);
        row
    };
    let rows: Vec<Row> = faults.par_iter().map(row).collect();
    let kills = |property: &Property| {
        let killed = |cell: &Cell| cell.property == property.id && cell.state == KillState::Killed;
        rows.iter().any(|row| row.cells.iter().any(killed))
    };
    let idle =
        |property: &&Property| whole && cases.iter().any(|case| property.is_for(case)) && !kills(property);
    let idle_properties = properties::all().filter(idle).map(|property| property.id.to_owned()).collect();
    Matrix {
        schema_version: MATRIX_SCHEMA_VERSION,
        suite: suite.to_owned(),
        seed,
        engine: "cpu".to_owned(),
        cases: cases.len(),
        rows,
        idle_properties,
    }
}

fn try_fault(fault: &'static Fault, cases: &[Case]) -> Row {
    let mut faulty = CpuEngine::with_fault(fault);
    if fault.class == FaultClass::Hang {
        faulty = faulty.with_timeout(HANG_TIMEOUT);
    }
    let mut row = Row::new(fault.name, fault.class.name());
    row.cells = fault.killed_by.iter().map(|id| undecided(id)).collect();
    let mut order = in_own_order(fault.name, cases, &|property| fault.killed_by.contains(&property.id));
    order.truncate(CASES_A_FAULT);
    if order.is_empty() {
        row.cells.iter_mut().for_each(|cell| cell.state = KillState::NotApplicable);
        return row.not_applicable("no case of the suite is judged on a property that it names");
    }
    for case in &order {
        if row.cells.iter().all(|cell| !open(cell, &row)) {
            break;
        }
        try_case(fault, &faulty, case, &mut row);
    }
    for cell in row.cells.iter_mut().filter(|cell| cell.tried == 0) {
        cell.state = KillState::NotApplicable;
    }
    if row.state == KillState::Survived {
        look_further(&faulty, &order[..order.len().min(CASES_FOR_OTHERS)], &mut row);
    }
    row
}

fn undecided(property: &str) -> Cell {
    Cell { property: property.to_owned(), state: KillState::Survived, case: None, tried: 0 }
}

/// Whether a cell is worth another case.
fn open(cell: &Cell, row: &Row) -> bool {
    let most = if row.state == KillState::Killed { CASES_A_CELL } else { CASES_A_FAULT };
    cell.state == KillState::Survived && cell.tried < most
}

/// Judges the undecided properties of a fault on one case.
fn try_case(fault: &Fault, faulty: &CpuEngine, case: &Case, row: &mut Row) {
    let for_case: Vec<&Property> = properties::of(case).collect();
    let due = |cell: &Cell| for_case.iter().copied().find(|property| property.id == cell.property);
    if !row.cells.iter().any(|cell| open(cell, row) && due(cell).is_some()) {
        return;
    }
    let Ok(material) = Material::of(case, shardcheck_engine::Engine::profile(faulty)) else { return };
    let laboratory = Laboratory::new(case, faulty, &material);
    row.tried += 1;
    for index in 0..row.cells.len() {
        let Some(property) = due(&row.cells[index]).filter(|_| open(&row.cells[index], row)) else {
            continue;
        };
        let finding = property.judge(&laboratory);
        row.cells[index].tried += 1;
        let state = match finding.status() {
            Status::HarnessError => KillState::Error,
            Status::Timeout if fault.class != FaultClass::Hang => KillState::Timeout,
            status if status.is_failure() => KillState::Killed,
            _ => continue,
        };
        (row.cells[index].state, row.cells[index].case) = (state, Some(case.id()));
        // the first that is killed stands for the fault; what is undecided yields to it
        if row.state != KillState::Killed {
            (row.state, row.property, row.case) = (state, Some(property.id.to_owned()), Some(case.id()));
            row.reason = reason(&finding);
        }
    }
}

fn reason(finding: &Finding) -> Option<String> {
    match finding {
        Finding::Engine { status: Status::Timeout | Status::HarnessError, text } => Some(text.clone()),
        _ => None,
    }
}

/// What other properties say to a fault that its own do not see, and whether it changes anything at all.
fn look_further(faulty: &CpuEngine, cases: &[&Case], row: &mut Row) {
    let healthy = engine();
    let mut changed = false;
    for case in cases {
        let Ok(material) = Material::of(case, shardcheck_engine::Engine::profile(faulty)) else { continue };
        let (ill, well) =
            (Laboratory::new(case, faulty, &material), Laboratory::new(case, &healthy, &material));
        for property in properties::of(case) {
            let finding = property.judge(&ill);
            if finding.status().is_failure() {
                row.state = KillState::KilledByOther;
                (row.property, row.case) = (Some(property.id.to_owned()), Some(case.id()));
                return;
            }
            // a finding measures what an answer is, so that it tells apart what a single step may not
            changed = changed || finding != property.judge(&well);
        }
        changed = changed || ill.answers() != well.answers();
    }
    row.changed = Some(changed);
}

#[cfg(test)]
mod tests;
