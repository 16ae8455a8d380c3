//! The table of a run: checks by family and property area, with the reasons of what was not judged or is expected to fail.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use shardcheck_cases::Family;

use crate::event::{CaseResult, Check};
use crate::finding::Finding;
use crate::status::Status;
use crate::summary::family_of;

/// Distinct reasons that a row keeps of a verdict; the rest is counted.
const REASONS_PER_STATUS: usize = 8;

/// Checks of one family in one property area.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableRow {
    /// Family of the cases: what the engine was asked.
    pub family: String,
    /// Area of the properties: what stands before the dot of their ids.
    pub area: String,
    /// Checks that hold.
    pub pass: usize,
    /// Checks that fail, engine failures included.
    pub fail: usize,
    /// Checks that fail as the claims say they must.
    pub expected_fail: usize,
    /// Checks that the engine does not support.
    pub unsupported: usize,
    /// Checks about which nothing could be decided.
    pub inconclusive: usize,
    /// Distinct reasons of everything but passes, the most frequent first.
    pub reasons: Vec<Reason>,
}

/// Why checks have their verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// Verdict of the checks.
    pub status: Status,
    /// Why, in words.
    pub text: String,
    /// Number of checks.
    pub count: usize,
}

/// Number of checks by verdict and reason.
type Reasons = BTreeMap<(Status, String), usize>;

/// The table of a run, families in the order in which an engine is brought up.
pub fn table_of(cases: &[CaseResult]) -> Vec<TableRow> {
    let mut rows: BTreeMap<(usize, &str, &str), (TableRow, Reasons)> = BTreeMap::new();
    for result in cases {
        let family = family_of(&result.id);
        let place = Family::ALL.into_iter().position(|known| known.name() == family);
        for check in &result.checks {
            let area = check.property.split('.').next().unwrap_or_default();
            let (row, reasons) = rows.entry((place.unwrap_or(usize::MAX), family, area)).or_default();
            row.count(check.status());
            if let Some(reason) = reason_of(check) {
                *reasons.entry((check.status(), reason)).or_insert(0) += 1;
            }
        }
    }
    rows.into_iter()
        .map(|((_, family, area), (row, reasons))| TableRow {
            family: family.to_owned(),
            area: area.to_owned(),
            reasons: most_frequent(reasons),
            ..row
        })
        .collect()
}

impl TableRow {
    fn count(&mut self, status: Status) {
        match status {
            Status::Pass | Status::Warn => self.pass += 1,
            Status::ExpectedFail => self.expected_fail += 1,
            Status::Unsupported | Status::Skipped => self.unsupported += 1,
            Status::Inconclusive => self.inconclusive += 1,
            _ => self.fail += 1,
        }
    }
}

/// The table in columns, reasons below their row.
pub struct Columns<'a>(pub &'a [TableRow]);

impl fmt::Display for Columns<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  {:<16}{:<12}{:>6}{:>6}{:>10}{:>13}{:>14}",
            "family", "properties", "pass", "fail", "expected", "unsupported", "inconclusive"
        )?;
        for row in self.0 {
            writeln!(
                f,
                "  {:<16}{:<12}{:>6}{:>6}{:>10}{:>13}{:>14}",
                row.family,
                row.area,
                row.pass,
                row.fail,
                row.expected_fail,
                row.unsupported,
                row.inconclusive
            )?;
            for reason in &row.reasons {
                let text = crate::report::block::printable(&reason.text);
                writeln!(f, "      {} × {}: {text}", reason.count, reason.status)?;
            }
        }
        Ok(())
    }
}

fn reason_of(check: &Check) -> Option<String> {
    if let Some(expected) = &check.expected {
        return Some(format!("{}: {} ({})", expected.entry, expected.reason, expected.reference));
    }
    match &check.finding {
        Finding::Holds(_) => None,
        Finding::Broken(failure) => Some(failure.headline.clone()),
        Finding::Inconclusive(why) | Finding::Unsupported(why) => Some(why.clone()),
        Finding::Engine { text, .. } => Some(text.lines().next().unwrap_or_default().to_owned()),
    }
}

fn most_frequent(reasons: Reasons) -> Vec<Reason> {
    let mut list: Vec<Reason> =
        reasons.into_iter().map(|((status, text), count)| Reason { status, text, count }).collect();
    list.sort_by_key(|reason| (std::cmp::Reverse(reason.status), std::cmp::Reverse(reason.count)));
    let mut kept: Vec<Reason> = Vec::new();
    for status in Status::ALL.into_iter().rev() {
        let of: Vec<_> = list.iter().filter(|reason| reason.status == status).collect();
        kept.extend(of.iter().take(REASONS_PER_STATUS).map(|reason| (*reason).clone()));
        let rest = &of[of.len().min(REASONS_PER_STATUS)..];
        if !rest.is_empty() {
            let count = rest.iter().map(|reason| reason.count).sum();
            kept.push(Reason { status, text: format!("{} other reasons", rest.len()), count });
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn checks_are_counted_by_family_and_area_in_the_order_of_bring_up() {
        let table = table_of(&sample::record().cases);
        let keys: Vec<_> = table.iter().map(|row| (row.family.as_str(), row.area.as_str())).collect();
        assert_eq!(
            keys,
            [
                ("write", "write"),
                ("merge_states", "merge"),
                ("decode", "attention"),
                ("verify", "attention"),
                ("verify", "layout"),
                ("draft", "attention")
            ]
        );
        let verify = &table[3];
        assert_eq!((verify.pass, verify.fail, verify.unsupported), (0, 2, 0));
        assert_eq!((table[0].fail, table[5].unsupported, table[1].inconclusive), (1, 1, 1));
    }

    #[test]
    fn equal_reasons_are_one_line_and_many_distinct_ones_are_cut() {
        let mut cases: Vec<_> = (0..12)
            .map(|index| {
                let mut case = sample::passed(&format!("draft/{index}"), 0.5);
                let why = format!("no route of kind {}", index.min(10));
                case.checks[0].finding = Finding::Unsupported(why);
                case
            })
            .collect();
        cases.push(sample::passed("draft/fine", 0.5));
        let table = table_of(&cases);
        assert_eq!((table[0].pass, table[0].unsupported), (1, 12));
        assert_eq!(table[0].reasons.len(), REASONS_PER_STATUS + 1);
        assert_eq!(
            (table[0].reasons[0].count, table[0].reasons[0].text.as_str()),
            (2, "no route of kind 10")
        );
        let text = Columns(&table).to_string();
        assert!(
            text.contains("2 × unsupported: no route of kind 10\n") && text.contains("3 other reasons"),
            "{text}"
        );
    }
}
