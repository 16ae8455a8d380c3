//! Evidence out of a run's folder: which of its stored failures say most for the time that they cost.

use std::path::Path;
use std::time::Duration;

use super::Evidence;
use super::budget::Budget;
use crate::event::CaseResult;
use crate::record::RunRecord;
use crate::run_directory::case_folder_name;
use crate::store::{self, StoreError};

/// Stored failures that a diagnosis rests on.
pub const MOST_CASES: usize = 6;

/// Evidence of the failures of a run: small cases first, and one of each kind of failure before a second of any. When
/// `within` is used up (processor time of each thread), what is there must do.
///
/// # Errors
/// [`StoreError`] when a stored case can't be read.
pub fn evidence_of(
    run: &Path,
    record: &RunRecord,
    most: usize,
    within: Duration,
) -> Result<Vec<Evidence>, StoreError> {
    let budget = Budget::of(within);
    let mut failed: Vec<&CaseResult> = record
        .cases
        .iter()
        .filter(|result| result.status.is_failure() && record.failed.contains_key(&result.id))
        .collect();
    let cost = |result: &CaseResult| record.failed.get(&result.id).map_or(usize::MAX, crate::shrink::work);
    failed.sort_by_cached_key(|result| (cost(result), result.id.clone()));
    let mut chosen: Vec<&CaseResult> = Vec::new();
    let mut kinds: Vec<String> = Vec::new();
    for round in 1..=most {
        for result in &failed {
            let kind = kind_of(result);
            let seen = kinds.iter().filter(|known| **known == kind).count();
            if seen + 1 == round && !chosen.iter().any(|known| known.id == result.id) && chosen.len() < most {
                kinds.push(kind);
                chosen.push(result);
            }
        }
    }
    let mut evidence = Vec::new();
    for result in chosen {
        if !evidence.is_empty() && budget.is_up() {
            break;
        }
        let folder = run.join("cases").join(case_folder_name(&result.id));
        let (case, recording) = store::read(&folder)?;
        evidence.extend(Evidence::of(&case, result, recording));
    }
    Ok(evidence)
}

fn kind_of(result: &CaseResult) -> String {
    let family = result.id.split('/').next().unwrap_or_default();
    let property = result.failures().next().map_or("", |check| check.property.as_str());
    format!("{family} {property}")
}
