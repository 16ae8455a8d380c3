//! What a run comes to: verdicts, largest error ratios, and the line against vacuity.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::event::{CaseResult, Check, Coverage};
use crate::finding::Finding;
use crate::record::{KILLED, RunRecord};
use crate::status::Status;

/// Figures of the cases of one family.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct FamilySummary {
    /// Cases with a verdict, skipped ones included.
    pub cases: usize,
    /// Cases that failed.
    pub failed: usize,
    /// Elements compared.
    pub compared: u64,
    /// Largest |error| over its bound; `None` where nothing was measured.
    pub worst_ratio: Option<f64>,
    /// Case that reached it.
    pub worst_case: Option<String>,
    /// Seconds of its cases.
    pub elapsed_s: f64,
}

/// Figures of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Number of cases by verdict.
    pub counts: BTreeMap<Status, usize>,
    /// Figures by family, by name.
    pub families: BTreeMap<String, FamilySummary>,
    /// What the judged cases reached. A case about which nothing was decided reaches nothing.
    pub coverage: Coverage,
    /// Judged cases at the head count of a published model.
    pub real_head_cases: usize,
    /// Elements compared.
    pub compared: u64,
    /// Elements of these for which equality was asked.
    pub exact: u64,
    /// Why cases were skipped, unsupported, inconclusive or expected to fail, with their number.
    pub reasons: BTreeMap<Status, BTreeMap<String, usize>>,
    /// Faults tried: those that apply.
    pub faults_tried: usize,
    /// Faults killed by the property that names them.
    pub faults_killed: usize,
}

impl Summary {
    /// Figures of a run that was read back.
    pub fn of(record: &RunRecord) -> Self {
        let mut summary = Self::default();
        record.cases.iter().for_each(|result| summary.add(result));
        record.mutants.iter().for_each(|mutant| summary.add_fault(&mutant.state));
        summary
    }

    /// Takes a verdict in.
    pub fn add(&mut self, result: &CaseResult) {
        *self.counts.entry(result.status).or_insert(0) += 1;
        let family = self.families.entry(family_of(&result.id).to_owned()).or_default();
        family.cases += 1;
        family.failed += usize::from(result.status.is_failure());
        family.elapsed_s += result.elapsed_s;
        for check in &result.checks {
            let (compared, exact) = elements(check);
            family.compared += compared;
            self.compared += compared;
            self.exact += exact;
            if let Some(ratio) = ratio(check).filter(|r| family.worst_ratio.is_none_or(|worst| *r > worst)) {
                family.worst_ratio = Some(ratio);
                family.worst_case = Some(result.id.clone());
            }
        }
        if result.status.is_judged() {
            self.coverage = self.coverage.and(result.coverage);
            self.real_head_cases += usize::from(result.coverage.real_heads);
        }
        if result.status == Status::ExpectedFail {
            for reason in expected_reasons(result) {
                *self.reasons.entry(result.status).or_default().entry(reason).or_insert(0) += 1;
            }
        }
        if let Some(reason) = undecided_reason(result) {
            *self.reasons.entry(result.status).or_default().entry(reason).or_insert(0) += 1;
        }
    }

    /// Takes the state of a fault in. A fault that does not apply to the engine was not tried.
    pub fn add_fault(&mut self, state: &str) {
        if state != "not_applicable" {
            self.faults_tried += 1;
            self.faults_killed += usize::from(state == KILLED);
        }
    }

    /// Cases with a verdict.
    pub fn total(&self) -> usize {
        self.counts.values().sum()
    }

    /// Cases that failed.
    pub fn failed(&self) -> usize {
        self.count_where(Status::is_failure)
    }

    /// Cases for which something was decided.
    pub fn judged(&self) -> usize {
        self.count_where(Status::is_judged)
    }

    /// Cases with this verdict.
    pub fn count(&self, status: Status) -> usize {
        self.counts.get(&status).copied().unwrap_or(0)
    }

    /// `3 pass, 1 fail`: verdicts that occurred, best first.
    pub fn verdicts(&self) -> String {
        let parts: Vec<String> =
            self.counts.iter().map(|(status, count)| format!("{count} {status}")).collect();
        if parts.is_empty() { "no case".to_owned() } else { parts.join(", ") }
    }

    /// The line against vacuity: what was really reached. A skipped case was not tried.
    pub fn vacuity_line(&self) -> String {
        let skipped = self.count(Status::Skipped);
        format!(
            "cases: tried {}, judged {}, unsupported {}, skipped {skipped}, inconclusive {}; rows: {} of which {} masked; \
             shards: {} of which {} empty; real head counts: {} cases; elements compared: {}; faults: {} tried, {} killed",
            self.total() - skipped,
            self.judged(),
            self.count(Status::Unsupported),
            self.count(Status::Inconclusive),
            self.coverage.rows,
            self.coverage.masked_rows,
            self.coverage.shards,
            self.coverage.empty_shards,
            self.real_head_cases,
            self.compared,
            self.faults_tried,
            self.faults_killed,
        )
    }

    fn count_where(&self, wanted: fn(Status) -> bool) -> usize {
        self.counts.iter().filter(|(status, _)| wanted(**status)).map(|(_, count)| count).sum()
    }
}

/// Family of a case by its id: what stands before the first slash.
pub fn family_of(id: &str) -> &str {
    id.split('/').next().unwrap_or(id)
}

/// Largest |error| over its bound that a check measured.
pub fn ratio(check: &Check) -> Option<f64> {
    match &check.finding {
        Finding::Holds(measured) => (measured.compared > measured.exact).then_some(measured.worst_ratio),
        Finding::Broken(failure) => failure.worst.as_ref()?.ratio,
        _ => None,
    }
}

/// Why nothing was decided about a case; `None` where something was.
pub fn undecided_reason(result: &CaseResult) -> Option<String> {
    if result.status.is_judged() {
        return None;
    }
    let said = result.checks.iter().filter(|check| check.status() == result.status);
    let mut reasons: Vec<&str> = said
        .filter_map(|check| match &check.finding {
            Finding::Inconclusive(reason) | Finding::Unsupported(reason) => Some(reason.as_str()),
            _ => None,
        })
        .chain(result.reason.as_deref())
        .collect();
    reasons.dedup();
    Some(if reasons.is_empty() { "no reason given".to_owned() } else { reasons.join("; ") })
}

/// Why the failures of a case are expected, each entry of the claims once; empty where none is.
pub fn expected_reasons(result: &CaseResult) -> Vec<String> {
    let mut reasons: Vec<String> = Vec::new();
    for expected in result.checks.iter().filter_map(|check| check.expected.as_ref()) {
        let reason = format!("{}: {} ({})", expected.entry, expected.reason, expected.reference);
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    reasons
}

fn elements(check: &Check) -> (u64, u64) {
    match &check.finding {
        Finding::Holds(measured) => (measured.compared, measured.exact),
        Finding::Broken(failure) => (failure.compared, 0),
        _ => (0, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    fn sample_summary() -> Summary {
        Summary::of(&sample::record())
    }

    #[test]
    fn the_line_against_vacuity_counts_only_what_was_reached() {
        assert_eq!(
            sample_summary().vacuity_line(),
            "cases: tried 6, judged 4, unsupported 1, skipped 1, inconclusive 1; rows: 32 of which 24 masked; \
             shards: 48 of which 16 empty; real head counts: 1 cases; elements compared: 9392; faults: 2 tried, 1 killed"
        );
    }

    #[test]
    fn a_run_that_decides_nothing_shows_zeros() {
        let mut summary = Summary::default();
        summary.add(&sample::skipped("decode/a"));
        let line = summary.vacuity_line();
        assert!(line.starts_with("cases: tried 0, judged 0, unsupported 0, skipped 1"), "{line}");
        assert!(line.contains("rows: 0 of which 0 masked"), "{line}");
    }

    #[test]
    fn the_largest_ratio_of_a_family_is_kept_with_its_case() {
        let mut summary = Summary::default();
        for (id, ratio) in [("decode/a", 0.25), ("decode/b", 0.75), ("decode/c", 0.5), ("verify/a", 0.125)] {
            summary.add(&sample::passed(id, ratio));
        }
        let decode = &summary.families["decode"];
        assert_eq!((decode.worst_ratio, decode.worst_case.as_deref()), (Some(0.75), Some("decode/b")));
        assert_eq!((decode.cases, summary.families["verify"].worst_ratio), (3, Some(0.125)));
    }

    #[test]
    fn where_only_equality_was_asked_there_is_no_ratio() {
        let exact = Check::new("p", Finding::Holds(crate::finding::Measured::exact(5)));
        assert_eq!(ratio(&exact), None);
    }

    #[test]
    fn reasons_are_grouped_so_that_one_cause_is_one_line() {
        let mut summary = sample_summary();
        summary.add(&sample::skipped("context/other"));
        assert_eq!(
            summary.reasons[&Status::Skipped],
            [("belongs to another partition".to_owned(), 2)].into()
        );
        assert_eq!(summary.reasons[&Status::Unsupported], [("no draft route".to_owned(), 1)].into());
        assert!(!summary.reasons.contains_key(&Status::Fail));
    }
}
