//! Kill matrices as people read them: lines of a terminal, and Markdown with suites side by side.

use std::collections::BTreeSet;

use super::{KillState, Matrix, Row};

/// One line a fault, one block a suite, then how often each state stands there, and what is wrong.
pub fn lines(matrices: &[Matrix]) -> String {
    let mut text = String::new();
    for matrix in matrices {
        text += &format!(
            "suite {} (seed {}, {} cases), {} faults on {}\n",
            matrix.suite,
            matrix.seed,
            matrix.cases,
            matrix.rows.len(),
            matrix.engine
        );
        for row in &matrix.rows {
            text += &format!(
                "{:<38} {:<15} {:<26} {}\n",
                row.fault,
                row.state.name(),
                row.property.as_deref().unwrap_or("-"),
                row.case.as_deref().or(row.reason.as_deref()).unwrap_or("-")
            );
        }
        text += &format!("states: {}\n", states(matrix));
        for shortcoming in matrix.shortcomings() {
            text += &format!("wrong: {shortcoming}\n");
        }
    }
    text
}

/// How often each state stands in a matrix, all states named.
fn states(matrix: &Matrix) -> String {
    let count = |state: KillState| matrix.rows.iter().filter(|row| row.state == state).count();
    let parts: Vec<_> =
        KillState::ALL.iter().map(|state| format!("{} {}", state.name(), count(*state))).collect();
    parts.join(", ")
}

/// A table with a row a fault and, for each suite, its state and the properties that killed it.
pub fn markdown(matrices: &[Matrix]) -> String {
    let mut text = "| fault | class |".to_owned();
    matrices.iter().for_each(|matrix| text += &format!(" {} | seen by |", matrix.suite));
    text += "\n|---|---|";
    matrices.iter().for_each(|_| text += "---|---|");
    text.push('\n');
    let mut seen = BTreeSet::new();
    for row in matrices.iter().flat_map(|matrix| &matrix.rows).filter(|row| seen.insert(&row.fault)) {
        text += &format!("| `{}` | {} |", row.fault, row.class);
        for matrix in matrices {
            match matrix.rows.iter().find(|other| other.fault == row.fault) {
                Some(row) => text += &format!(" {} | {} |", row.state.name(), killers(row)),
                None => text += " - | - |",
            }
        }
        text.push('\n');
    }
    for matrix in matrices {
        for shortcoming in matrix.shortcomings() {
            text += &format!("\n* {}: {shortcoming}", matrix.suite);
        }
    }
    text
}

/// The properties that killed a fault; of a fault of which the first sufficed, that one.
fn killers(row: &Row) -> String {
    let cells = row.cells.iter().filter(|cell| cell.state == KillState::Killed);
    let mut names: Vec<String> = cells.map(|cell| format!("`{}`", cell.property)).collect();
    if names.is_empty() {
        names.extend(row.property.iter().map(|property| format!("`{property}`")));
    }
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}
