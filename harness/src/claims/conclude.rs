//! What a whole run says about each entry of the claims.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardcheck_cases::Case;

use super::{Claims, KnownFinding, SupportClaim};
use crate::event::CaseResult;
use crate::finding::Finding;
use crate::properties;
use crate::record::RunRecord;
use crate::status::Status;

/// Cases that a verdict lists.
const LISTED: usize = 5;

/// What an entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// Something must fail.
    Finding,
    /// Something must be judged.
    Claim,
}

impl EntryKind {
    /// Both, in a stable order.
    pub const ALL: [Self; 2] = [Self::Finding, Self::Claim];

    /// Name as it stands in a file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Finding => "finding",
            Self::Claim => "claim",
        }
    }
}

/// Verdict of a whole run on one entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryVerdict {
    /// Name of the entry.
    pub entry: String,
    /// What it says.
    pub kind: EntryKind,
    /// `expected_fail` or `unexpected_pass` for a finding, `pass` or `fail` for a claim, `unsupported` for a finding of which nothing was judged.
    pub status: Status,
    /// Cases of the selection that the entry is about.
    pub matching: usize,
    /// Those of them in which something that it names was judged.
    pub judged: usize,
    /// Those of them that show a finding.
    pub shown: usize,
    /// What that means.
    pub text: String,
    /// Public reference of a finding.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reference: String,
    /// First cases that pass although the finding is expected, or of which nothing was judged although it is claimed.
    pub cases: Vec<String>,
}

/// Cases that an entry is about.
#[derive(Default)]
struct Matching<'a> {
    cases: usize,
    judged: usize,
    shown: usize,
    /// Judged and not shown, for a finding; not judged, for a claim.
    others: Vec<&'a str>,
    /// Why nothing was judged, with the number of cases.
    reasons: BTreeMap<&'a str, usize>,
}

impl Claims {
    /// Verdicts on all entries that the selected cases have something to do with. `selects` says whether a property of a case is judged in this run.
    /// For a run that was cut short, ask nothing: what was not judged may still show what is expected.
    pub fn conclude(
        &self,
        cases: &[Case],
        selects: &dyn Fn(&str, &Case, &str) -> bool,
        record: &RunRecord,
    ) -> Vec<EntryVerdict> {
        let judged: Vec<(&Case, &CaseResult)> =
            cases.iter().filter_map(|case| Some((case, record.find(&case.id())?))).collect();
        let findings = self.findings.iter().filter_map(|entry| {
            let about = |id: &str, case: &Case, property: &str| {
                entry.is_about(id, case, property) && selects(id, case, property)
            };
            let mut matching = Matching::default();
            judged.iter().for_each(|(case, result)| matching.add(case, result, &about, Some(entry)));
            (matching.cases > 0).then(|| self.of_finding(entry, matching))
        });
        let supports = self.supports.iter().filter_map(|entry| {
            let about = |id: &str, case: &Case, property: &str| {
                entry.is_about(id, case, property) && selects(id, case, property)
            };
            let mut matching = Matching::default();
            judged.iter().for_each(|(case, result)| matching.add(case, result, &about, None));
            (matching.cases > 0).then(|| self.of_claim(entry, matching))
        });
        findings.chain(supports).collect()
    }

    fn of_finding(&self, entry: &KnownFinding, matching: Matching<'_>) -> EntryVerdict {
        let Matching { cases, judged, shown, .. } = matching;
        let what = format!("{} ({})", entry.id, entry.reason);
        let status = match (judged, shown) {
            (few, 0) if few < entry.at_least => Status::Unsupported,
            (_, 0) => Status::UnexpectedPass,
            _ if entry.every && shown < judged => Status::UnexpectedPass,
            _ => Status::ExpectedFail,
        };
        let text = match status {
            Status::Unsupported if judged == 0 => format!("nothing was judged that could show {what}"),
            Status::Unsupported => {
                format!(
                    "not decided: {judged} judged cases do not show {what}, and by its at_least it takes {} to say that it is gone",
                    entry.at_least
                )
            }
            Status::ExpectedFail => format!("{shown} of {judged} judged cases show {what}"),
            _ => format!(
                "{shown} of {judged} judged cases show {what}, which {} must: if {} {} has it no longer, end the versions \
                 of that entry ({}) before it",
                if entry.every { "every one" } else { "at least one" },
                self.engine,
                self.version,
                entry.versions
            ),
        };
        EntryVerdict {
            entry: entry.id.clone(),
            kind: EntryKind::Finding,
            status,
            matching: cases,
            judged,
            shown,
            text,
            reference: entry.reference.clone(),
            cases: if status == Status::UnexpectedPass { matching.listed() } else { Vec::new() },
        }
    }

    fn of_claim(&self, entry: &SupportClaim, matching: Matching<'_>) -> EntryVerdict {
        let needed = entry.at_least.min(matching.cases);
        let Matching { cases, judged, .. } = matching;
        let status = if judged < needed { Status::Fail } else { Status::Pass };
        let mut text = format!(
            "{} claims {}: {judged} of {cases} matching cases were judged, {needed} must be",
            self.engine, entry.id
        );
        if status == Status::Fail {
            let mut reasons: Vec<_> = matching.reasons.iter().collect();
            reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            let reasons: Vec<_> =
                reasons.iter().take(3).map(|(reason, count)| format!("{count} × {reason}")).collect();
            text += &format!("; {}", reasons.join(", "));
        }
        EntryVerdict {
            entry: entry.id.clone(),
            kind: EntryKind::Claim,
            status,
            matching: cases,
            judged,
            shown: 0,
            text,
            reference: String::new(),
            cases: if status == Status::Fail { matching.listed() } else { Vec::new() },
        }
    }
}

impl<'a> Matching<'a> {
    /// Takes a case in, where a property that is judged on it is one that the entry is about.
    fn add(
        &mut self,
        case: &Case,
        result: &'a CaseResult,
        about: &dyn Fn(&str, &Case, &str) -> bool,
        finding: Option<&KnownFinding>,
    ) {
        let id = result.id.as_str();
        if !properties::of(case).any(|property| about(id, case, property.id)) {
            return;
        }
        self.cases += 1;
        // a whole case that could not be judged has checks of other names, which no entry is about
        let checks = || result.checks.iter().filter(|check| about(id, case, &check.property));
        let judged = checks().any(|check| check.finding.status().is_judged());
        let shown = finding.is_some_and(|entry| checks().any(|check| entry.covers(id, case, check)));
        self.judged += usize::from(judged);
        self.shown += usize::from(shown);
        if !judged {
            let reason = result.checks.iter().find_map(|check| match &check.finding {
                Finding::Unsupported(why) | Finding::Inconclusive(why) => Some(why.as_str()),
                _ => None,
            });
            let reason = reason.or(result.reason.as_deref()).unwrap_or("no reason given");
            *self.reasons.entry(reason).or_insert(0) += 1;
        }
        if judged == finding.is_some() && !shown {
            self.others.push(id);
        }
    }

    fn listed(&self) -> Vec<String> {
        self.others.iter().take(LISTED).map(|id| (*id).to_owned()).collect()
    }
}
