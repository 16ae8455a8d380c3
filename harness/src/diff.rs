//! Two runs compared: what newly fails, what was fixed, and what drifted.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::event::{CaseResult, RESULTS_SCHEMA_VERSION, RunHeader};
use crate::record::RunRecord;
use crate::report::block::{printable, replay_command, short};
use crate::run_directory::{claims_in_words, short_hash};
use crate::select::Selection;
use crate::status::{Exit, Status};
use crate::summary::{family_of, ratio};

/// Cases that the text lists of a kind; the JSON lists all.
const LISTED: usize = 20;
/// Factor from which a drift of ratios or times is told in the text.
const TOLD_FACTOR: f64 = 1.1;

/// A case whose verdict is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Case id.
    pub id: String,
    /// Verdict in the first run; absent when it has none.
    pub before: Option<Status>,
    /// Verdict in the second run; absent when it has none.
    pub after: Option<Status>,
}

/// Figures of a property or family over the cases that both runs judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Drift {
    /// Property id or family name.
    pub name: String,
    /// Figure of the first run: largest |error| over its bound, or seconds.
    pub before: f64,
    /// Figure of the second run.
    pub after: f64,
}

impl Drift {
    /// Second over first; `None` where the first is zero.
    pub fn factor(&self) -> Option<f64> {
        (self.before > 0.0).then(|| self.after / self.before)
    }

    fn is_told(&self) -> bool {
        match self.factor() {
            Some(factor) => !(1.0 / TOLD_FACTOR..=TOLD_FACTOR).contains(&factor),
            None => self.after > 0.0,
        }
    }
}

/// Difference between two runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Diff {
    /// Version of this format: the one of results.
    pub schema_version: u32,
    /// Id of the first run.
    pub before: String,
    /// Id of the second run.
    pub after: String,
    /// What is not alike in the headers: `seed: 1, then 2`.
    pub headers: Vec<String>,
    /// Cases that fail in the second run and did not in the first, those without a verdict there included.
    pub newly_failing: Vec<Change>,
    /// Cases that failed and now hold.
    pub fixed: Vec<Change>,
    /// Cases that fail in both.
    pub still_failing: Vec<Change>,
    /// Cases that were judged and no longer are: skipped, unsupported or inconclusive.
    pub no_longer_judged: Vec<Change>,
    /// Cases that only the first run has.
    pub only_before: Vec<Change>,
    /// Cases that only the second run has.
    pub only_after: Vec<Change>,
    /// Entries of the claims that fail in the second run and did not in the first: `entry: expected_fail, then unexpected_pass`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims_newly_failing: Vec<String>,
    /// Entries of the claims that failed and no longer do, those that are gone included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims_fixed: Vec<String>,
    /// Largest |error| over its bound by property, over the cases that both runs have.
    pub ratios: Vec<Drift>,
    /// Seconds by family, over the cases that both runs have.
    pub times_s: Vec<Drift>,
    /// Command that reproduces the first case that newly fails.
    pub reproduce: Option<String>,
}

impl Diff {
    /// Compares two runs.
    pub fn between(before: &RunRecord, after: &RunRecord) -> Self {
        let ids: BTreeSet<&str> =
            before.cases.iter().chain(&after.cases).map(|case| case.id.as_str()).collect();
        let changes: Vec<Change> = ids
            .into_iter()
            .map(|id| Change {
                id: id.to_owned(),
                before: before.find(id).map(|case| case.status),
                after: after.find(id).map(|case| case.status),
            })
            .collect();
        let fails = |status: Option<Status>| status.is_some_and(Status::is_failure);
        let judged = |status: Option<Status>| status.is_some_and(Status::is_judged);
        let take = |wanted: &dyn Fn(&Change) -> bool| -> Vec<Change> {
            changes.iter().filter(|change| wanted(change)).cloned().collect()
        };
        let newly_failing = take(&|c| fails(c.after) && !fails(c.before));
        let shared: Vec<(&CaseResult, &CaseResult)> =
            before.cases.iter().filter_map(|case| Some((case, after.find(&case.id)?))).collect();
        Self {
            schema_version: RESULTS_SCHEMA_VERSION,
            before: before.header.run_id.clone(),
            after: after.header.run_id.clone(),
            headers: header_differences(&before.header, &after.header),
            reproduce: newly_failing
                .first()
                .map(|change| replay_command(&change.id, Some((&after.header).into()))),
            claims_newly_failing: claims(after, before, |after, before| (before, after)),
            claims_fixed: claims(before, after, |before, after| (before, after)),
            newly_failing,
            fixed: take(&|c| fails(c.before) && judged(c.after) && !fails(c.after)),
            still_failing: take(&|c| fails(c.before) && fails(c.after)),
            no_longer_judged: take(&|c| judged(c.before) && c.after.is_some() && !judged(c.after)),
            only_before: take(&|c| c.after.is_none()),
            only_after: take(&|c| c.before.is_none()),
            ratios: drifts(&shared, ratios_of, f64::max),
            times_s: drifts(&shared, time_of, |a, b| a + b),
        }
    }

    /// Exit code: Failed when something newly fails, Inconclusive when something is no longer judged, or failed and is not there any more:
    /// nothing shows that it is mended.
    pub fn exit(&self) -> Exit {
        let is_gone = |change: &Change| change.before.is_some_and(Status::is_failure);
        if !self.newly_failing.is_empty() || !self.claims_newly_failing.is_empty() {
            Exit::Failed
        } else if !self.no_longer_judged.is_empty() || self.only_before.iter().any(is_gone) {
            Exit::Inconclusive
        } else {
            Exit::Passed
        }
    }
}

impl fmt::Display for Diff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} → {}", printable(&self.before), printable(&self.after))?;
        for line in &self.headers {
            writeln!(f, "  differs in {}", printable(line))?;
        }
        for (title, changes) in [
            ("newly failing", &self.newly_failing),
            ("fixed", &self.fixed),
            ("still failing", &self.still_failing),
            ("no longer judged", &self.no_longer_judged),
            ("only in the first run", &self.only_before),
            ("only in the second run", &self.only_after),
        ] {
            write_changes(f, title, changes)?;
        }
        for (title, lines) in
            [("claims newly failing", &self.claims_newly_failing), ("claims fixed", &self.claims_fixed)]
        {
            lines.iter().try_for_each(|line| writeln!(f, "{title}: {}", printable(line)))?;
        }
        write_drifts(f, "largest |error| over its bound, by property", &self.ratios, short)?;
        write_drifts(f, "seconds, by family", &self.times_s, |seconds| format!("{seconds:.2} s"))?;
        if let Some(command) = &self.reproduce {
            writeln!(f, "reproduce the first that newly fails: {}", printable(command))?;
        }
        writeln!(
            f,
            "{} newly failing, {} fixed, {} still failing, {} no longer judged, {} only in the first, {} only in the second",
            self.newly_failing.len(),
            self.fixed.len(),
            self.still_failing.len(),
            self.no_longer_judged.len(),
            self.only_before.len(),
            self.only_after.len()
        )
    }
}

fn write_changes(f: &mut fmt::Formatter<'_>, title: &str, changes: &[Change]) -> fmt::Result {
    if changes.is_empty() {
        return Ok(());
    }
    writeln!(f, "{title} ({})", changes.len())?;
    let name = |status: Option<Status>| status.map_or("no verdict", Status::name);
    for change in changes.iter().take(LISTED) {
        writeln!(f, "  {} → {}  {}", name(change.before), name(change.after), printable(&change.id))?;
    }
    if changes.len() > LISTED {
        writeln!(f, "  and {} more", changes.len() - LISTED)?;
    }
    Ok(())
}

fn write_drifts(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    drifts: &[Drift],
    figure: impl Fn(f64) -> String,
) -> fmt::Result {
    let told: Vec<&Drift> = drifts.iter().filter(|drift| drift.is_told()).collect();
    if told.is_empty() {
        return Ok(());
    }
    writeln!(f, "{title}")?;
    for drift in told {
        let factor = drift.factor().map_or("from zero".to_owned(), |factor| format!("×{factor:.2}"));
        let (before, after) = (figure(drift.before), figure(drift.after));
        writeln!(f, "  {:<28} {before} → {after}  {factor}", printable(&drift.name))?;
    }
    Ok(())
}

fn header_differences(before: &RunHeader, after: &RunHeader) -> Vec<String> {
    let fault = |header: &RunHeader| header.fault.clone().unwrap_or_else(|| "none".to_owned());
    [
        ("suite", before.suite.clone(), after.suite.clone()),
        ("seed", before.seed.to_string(), after.seed.to_string()),
        ("engine", before.engine.clone(), after.engine.clone()),
        ("fault", fault(before), fault(after)),
        ("tool version", before.tool_version.clone(), after.tool_version.clone()),
        ("machine", before.machine.clone(), after.machine.clone()),
        ("selection", Selection::in_words(&before.selection), Selection::in_words(&after.selection)),
        ("engine profile", short_hash(&before.profile), short_hash(&after.profile)),
        ("claims", claims_in_words(before), claims_in_words(after)),
    ]
    .into_iter()
    .filter(|(_, before, after)| before != after)
    .map(|(what, before, after)| format!("{what}: {before}, then {after}"))
    .collect()
}

/// Verdicts of one entry of the claims in the order in which they are told.
type Order = fn(Option<Status>, Option<Status>) -> (Option<Status>, Option<Status>);

/// Entries that fail in `here` and not in `there`.
fn claims(here: &RunRecord, there: &RunRecord, order: Order) -> Vec<String> {
    let name = |status: Option<Status>| status.map_or("no verdict", Status::name);
    here.claims
        .iter()
        .filter(|verdict| verdict.status.is_failure())
        .filter_map(|verdict| {
            let other =
                there.claims.iter().find(|known| known.entry == verdict.entry).map(|known| known.status);
            let (before, after) = order(Some(verdict.status), other);
            let fails = other.is_some_and(Status::is_failure);
            (!fails).then(|| format!("{}: {}, then {}", verdict.entry, name(before), name(after)))
        })
        .collect()
}

/// Named figures of one case.
type Figures = fn(&CaseResult) -> Vec<(String, f64)>;

fn ratios_of(case: &CaseResult) -> Vec<(String, f64)> {
    case.checks.iter().filter_map(|check| Some((check.property.clone(), ratio(check)?))).collect()
}

fn time_of(case: &CaseResult) -> Vec<(String, f64)> {
    vec![(family_of(&case.id).to_owned(), case.elapsed_s)]
}

/// Figures of shared cases, put together by name; only names that both runs measured.
fn drifts(shared: &[(&CaseResult, &CaseResult)], figures: Figures, join: fn(f64, f64) -> f64) -> Vec<Drift> {
    let gather = |cases: &mut dyn Iterator<Item = &CaseResult>| {
        let mut by_name: BTreeMap<String, f64> = BTreeMap::new();
        for (name, figure) in cases.flat_map(figures) {
            by_name.entry(name).and_modify(|known| *known = join(*known, figure)).or_insert(figure);
        }
        by_name
    };
    let before = gather(&mut shared.iter().map(|(case, _)| *case));
    let after = gather(&mut shared.iter().map(|(_, case)| *case));
    before
        .into_iter()
        .filter_map(|(name, before)| after.get(&name).map(|after| Drift { name, before, after: *after }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;
    use crate::sample;

    fn record(results: Vec<CaseResult>) -> RunRecord {
        let mut record = RunRecord::new(sample::header());
        results.into_iter().for_each(|result| record.absorb(&Event::CaseJudged(result)));
        record
    }

    fn ids(changes: &[Change]) -> Vec<&str> {
        changes.iter().map(|change| change.id.as_str()).collect()
    }

    fn example() -> Diff {
        let broken = |id: &str| sample::failed(id, sample::failure());
        let before = record(vec![
            sample::passed("decode/good", 0.25),
            sample::passed("decode/breaks", 0.25),
            broken("decode/fixed"),
            broken("decode/still"),
            sample::passed("decode/fades", 0.25),
            sample::passed("decode/gone", 0.25),
        ]);
        let mut slow = sample::passed("decode/good", 0.5);
        slow.elapsed_s = 1.0;
        let after = record(vec![
            slow,
            broken("decode/breaks"),
            sample::passed("decode/fixed", 0.125),
            broken("decode/still"),
            sample::skipped("decode/fades"),
            broken("decode/new-and-broken"),
            sample::passed("decode/new", 0.25),
        ]);
        Diff::between(&before, &after)
    }

    #[test]
    fn every_case_lands_where_it_belongs() {
        let diff = example();
        assert_eq!(ids(&diff.newly_failing), ["decode/breaks", "decode/new-and-broken"]);
        assert_eq!(ids(&diff.fixed), ["decode/fixed"]);
        assert_eq!(ids(&diff.still_failing), ["decode/still"]);
        assert_eq!(ids(&diff.no_longer_judged), ["decode/fades"]);
        assert_eq!(ids(&diff.only_before), ["decode/gone"]);
        assert_eq!(ids(&diff.only_after), ["decode/new", "decode/new-and-broken"]);
        assert_eq!(diff.exit(), Exit::Failed);
    }

    #[test]
    fn a_run_against_itself_differs_in_nothing() {
        let record = sample::record();
        let diff = Diff::between(&record, &record);
        assert_eq!(diff.exit(), Exit::Passed);
        assert!(diff.headers.is_empty() && diff.fixed.is_empty() && diff.only_after.is_empty());
        assert_eq!(diff.still_failing.len(), 3);
        assert!(diff.ratios.iter().chain(&diff.times_s).all(|drift| drift.factor() == Some(1.0)));
    }

    #[test]
    fn coverage_that_fades_is_not_a_pass() {
        let before = record(vec![sample::passed("decode/a", 0.25)]);
        let after = record(vec![sample::skipped("decode/a")]);
        assert_eq!(Diff::between(&before, &after).exit(), Exit::Inconclusive);
        assert_eq!(Diff::between(&after, &before).exit(), Exit::Passed);
    }

    #[test]
    fn a_failure_that_is_gone_is_not_shown_to_be_mended() {
        let of = |case: CaseResult| record(vec![case, sample::passed("decode/b", 0.25)]);
        let after = record(vec![sample::passed("decode/b", 0.25)]);
        let failed = of(sample::failed("decode/a", sample::failure()));
        assert_eq!(Diff::between(&failed, &after).exit(), Exit::Inconclusive);
        assert_eq!(Diff::between(&of(sample::passed("decode/a", 0.5)), &after).exit(), Exit::Passed);
    }

    #[test]
    fn a_failure_that_is_only_skipped_now_is_not_fixed() {
        let before = record(vec![sample::failed("decode/a", sample::failure())]);
        let after = record(vec![sample::skipped("decode/a")]);
        let diff = Diff::between(&before, &after);
        assert!(diff.fixed.is_empty());
        assert_eq!(ids(&diff.no_longer_judged), ["decode/a"]);
    }

    #[test]
    fn drifts_compare_the_cases_that_both_runs_have() {
        let before = record(vec![sample::passed("decode/a", 0.25), sample::passed("decode/gone", 0.9)]);
        let mut slow = sample::passed("decode/a", 0.5);
        slow.elapsed_s = 1.0;
        let after = record(vec![slow, sample::passed("decode/new", 0.99)]);
        let diff = Diff::between(&before, &after);
        assert_eq!(diff.ratios, [Drift { name: "attention.bound".into(), before: 0.25, after: 0.5 }]);
        assert_eq!(diff.times_s, [Drift { name: "decode".into(), before: 0.25, after: 1.0 }]);
        let text = diff.to_string();
        assert!(text.contains("0.250 → 0.500  ×2.00") && text.contains("0.25 s → 1.00 s  ×4.00"), "{text}");
    }

    #[test]
    fn the_text_tells_each_kind_and_the_command() {
        let text = example().to_string();
        assert!(text.contains("newly failing (2)\n  pass → fail  decode/breaks\n"), "{text}");
        assert!(text.contains("  no verdict → fail  decode/new-and-broken\n"), "{text}");
        assert!(text.contains("shardcheck replay 'decode/breaks'"), "{text}");
        assert!(text.ends_with(
            "2 newly failing, 1 fixed, 1 still failing, 1 no longer judged, 1 only in the first, 2 only in the second\n"
        ));
    }

    #[test]
    fn other_seeds_and_engines_are_told_because_they_may_be_the_reason() {
        let before = record(vec![]);
        let mut after = record(vec![]);
        after.header.seed = 8;
        after.header.profile = serde_json::json!({"engine": "cpu", "version": "0.2.0"});
        let headers = Diff::between(&before, &after).headers;
        assert_eq!(headers.len(), 2, "{headers:?}");
        assert_eq!(headers[0], "seed: 7, then 8");
        assert!(headers[1].starts_with("engine profile: "), "{headers:?}");
    }

    #[test]
    fn the_json_of_a_difference_reads_back() {
        let diff = example();
        let text = serde_json::to_string(&diff).unwrap();
        assert_eq!(serde_json::from_str::<Diff>(&text).unwrap(), diff);
    }
}
