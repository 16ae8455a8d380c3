//! `gsm8k gate`: the checks of a CI job on one run: accuracy, acceptance, the server's log, cut and empty answers.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use serde::Serialize;

use crate::compare::{self, Comparison, Rule};
use crate::dialect::Filter;
use crate::outcome::{Error, Outcome};
use crate::output::{Format, print};
use crate::report::RunReport;
use crate::runlog::RunLog;
use crate::score::Score;
use crate::statistics::binomial;
use crate::statistics::design::{CountGate, significantly_low};

/// Gates a run: against a baseline run, a reference accuracy or a band.
#[derive(Debug, Clone, Args)]
pub struct GateArgs {
    /// The run's folder.
    pub run: PathBuf,
    /// A run of the healthy server over the same prompts; the comparison is paired.
    #[arg(long, conflicts_with_all = ["reference", "band"])]
    pub baseline: Option<PathBuf>,
    /// Two runs of the healthy server, to know its churn.
    #[arg(long, num_args = 2, value_names = ["A1", "A2"], requires = "baseline")]
    pub aa: Option<Vec<PathBuf>>,
    /// The accuracy of the healthy server as a number, taken as exact.
    #[arg(long, conflicts_with = "band")]
    pub reference: Option<f64>,
    /// Fails below LOW; above HIGH the band does not describe this server and the gate is inconclusive.
    #[arg(long, value_name = "LOW,HIGH")]
    pub band: Option<Band>,
    /// Fails when fewer draft tokens per drafted one are accepted, as a share of 1.
    #[arg(long)]
    pub min_acceptance_rate: Option<f64>,
    /// Fails when 1 + accepted per step is lower.
    #[arg(long)]
    pub min_acceptance_length: Option<f64>,
    /// Fails when a larger share of answers was cut by max_tokens.
    #[arg(long)]
    pub max_length_share: Option<f64>,
    /// Fails when no answer is found in a larger share of completions.
    #[arg(long)]
    pub max_invalid_share: Option<f64>,
    /// The rule by which a comparison decides.
    #[command(flatten)]
    pub rule: Rule,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// A range of accuracies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Band {
    /// Lowest accuracy that passes.
    pub low: f64,
    /// Highest accuracy that the band describes.
    pub high: f64,
}

impl FromStr for Band {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let ends = text.split_once(',').and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
        match ends {
            Some((low, high)) if 0.0 <= low && low <= high && high <= 1.0 => Ok(Self { low, high }),
            _ => Err(format!(
                "'{text}' is no band: expected LOW,HIGH with 0 ≤ LOW ≤ HIGH ≤ 1, e.g. 0.9538,0.9591"
            )),
        }
    }
}

/// One check of a gate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What is checked.
    pub name: &'static str,
    /// How it ended.
    #[serde(serialize_with = "by_name")]
    pub outcome: Outcome,
    /// The figures.
    pub detail: String,
}

/// All checks of a gate.
#[derive(Debug, Clone, Serialize)]
pub struct GateResult {
    /// The checks, in order.
    pub checks: Vec<Check>,
    /// The paired comparison, when there was a baseline.
    pub comparison: Option<Comparison>,
}

impl GateResult {
    /// The worst of the checks.
    pub fn outcome(&self) -> Outcome {
        Outcome::worst(self.checks.iter().map(|check| check.outcome))
    }
}

/// Runs the command.
///
/// # Errors
/// See [`execute`].
pub fn run(args: &GateArgs) -> Result<Outcome, Error> {
    let result = execute(args)?;
    print(args.format, &result, &result);
    Ok(result.outcome())
}

/// Reads the run and applies every check that was asked for, and those that always apply.
///
/// # Errors
/// [`Error::Usage`] when no accuracy rule is given or the run was not made by `gsm8k run`; what
/// [`compare::execute`] returns for a baseline.
pub fn execute(args: &GateArgs) -> Result<GateResult, Error> {
    let log = RunLog::load(&args.run)?;
    let report = log.report.as_ref().ok_or_else(|| {
        Error::Usage(format!("{} is no run of `gsm8k run`: the gate needs its run.json", args.run.display()))
    })?;
    if args.baseline.is_none() && args.reference.is_none() && args.band.is_none() {
        return Err(Error::Usage("the gate needs --baseline, --reference or --band".to_owned()));
    }
    let mut checks = standing_checks(report);
    checks.extend(share_checks(args, report));
    checks.extend(acceptance_checks(args, report));
    let mut comparison = None;
    if report.is_complete() {
        let filter = args.rule.filter.unwrap_or(report.manifest.plan.dialect.filters()[0]);
        let score = log
            .score(filter)
            .ok_or_else(|| Error::Usage(format!("{} has no score under {filter}", args.run.display())))?;
        if let Some(reference) = args.reference {
            checks.push(against_reference(score, filter, reference, &args.rule)?);
        }
        if let Some(band) = args.band {
            checks.push(against_band(score, filter, band));
        }
        comparison = baseline(args)?;
        if let Some(comparison) = &comparison {
            checks.extend(checks_of(comparison));
        }
    }
    Ok(GateResult { checks, comparison })
}

fn check(name: &'static str, holds: bool, detail: String) -> Check {
    Check { name, outcome: if holds { Outcome::Passed } else { Outcome::Failed }, detail }
}

/// The checks that no option switches off.
fn standing_checks(report: &RunReport) -> Vec<Check> {
    let mut checks = vec![Check {
        name: "complete",
        outcome: report.outcome(),
        detail: format!(
            "{} of {} questions answered, {} failed, {} not sent",
            report.answered,
            report.manifest.plan.questions,
            report.failed_total(),
            report.not_sent
        ),
    }];
    if let Some(scan) = &report.server_log {
        let findings: Vec<String> =
            scan.counts.iter().map(|(finding, count)| format!("{finding}: {count}")).collect();
        let detail = if findings.is_empty() { "no findings".to_owned() } else { findings.join(", ") };
        checks.push(check("server-log", scan.total() == 0, detail));
    }
    if let Some(mode) = &report.forced_acceptance {
        checks.push(check("forced-acceptance", false, format!("drafts were accepted by decree ({mode})")));
    }
    if let Some(acceptance) = &report.acceptance {
        let broken = &acceptance.broken_identities;
        let detail = if broken.is_empty() { "all hold".to_owned() } else { broken.join("; ") };
        checks.push(check("acceptance-identities", broken.is_empty(), detail));
    }
    checks
}

fn share_checks(args: &GateArgs, report: &RunReport) -> Vec<Check> {
    let mut checks = Vec::new();
    let answered = report.answered.max(1) as f64;
    if let Some(most) = args.max_length_share {
        let share = report.finished_by_length as f64 / answered;
        checks.push(check(
            "length-share",
            share <= most,
            format!("{share:.4} cut by max_tokens, at most {most}"),
        ));
    }
    if let Some(most) = args.max_invalid_share {
        for (filter, count) in &report.invalid {
            let share = *count as f64 / answered;
            let detail = format!("{filter}: no answer in {share:.4}, at most {most}");
            checks.push(check("invalid-share", share <= most, detail));
        }
    }
    checks
}

fn acceptance_checks(args: &GateArgs, report: &RunReport) -> Vec<Check> {
    let limits = [
        ("acceptance-rate", args.min_acceptance_rate, report.acceptance.as_ref().map(|a| a.rate)),
        (
            "acceptance-length",
            args.min_acceptance_length,
            report.acceptance.as_ref().map(|a| a.acceptance_length),
        ),
    ];
    let judge = |(name, least, seen): (&'static str, Option<f64>, Option<f64>)| {
        let least = least?;
        Some(match seen {
            Some(seen) => check(name, seen >= least, format!("{seen:.4}, at least {least}")),
            // a gate that was asked for and had nothing to look at must not pass
            None => check(name, false, format!("no acceptance was reported, at least {least} was asked for")),
        })
    };
    limits.into_iter().filter_map(judge).collect()
}

/// Worse, not worse or inconclusive against a number: exact binomial test and Clopper–Pearson limit.
fn against_reference(score: Score, filter: Filter, reference: f64, rule: &Rule) -> Result<Check, Error> {
    let margin = rule.margin_points / 100.0;
    if !(margin..=1.0).contains(&reference) {
        return Err(Error::Usage(format!("--reference {reference} must lie between the margin and 1")));
    }
    let low = significantly_low(score.total, reference, rule.alpha);
    let limit = binomial::lower_limit(score.correct, score.total, rule.alpha);
    let (outcome, words) = if low.is_some_and(|low| score.correct <= low) {
        (Outcome::Failed, "worse beyond chance")
    } else if limit > reference - margin {
        (Outcome::Passed, "not worse by the margin or more")
    } else {
        (Outcome::Inconclusive, "neither worse beyond chance nor shown to be within the margin")
    };
    let detail = format!(
        "{filter} {score} against {reference}: {words} (fails at {} or fewer right; accuracy at least {limit:.4}; α = {}, \
         margin {} points)",
        low.map_or("no count".to_owned(), |low| low.to_string()),
        rule.alpha,
        rule.margin_points
    );
    Ok(Check { name: "accuracy", outcome, detail })
}

fn against_band(score: Score, filter: Filter, band: Band) -> Check {
    let gate = CountGate::at_threshold(band.low, score.total);
    let healthy = 0.5 * (band.low + band.high);
    let outcome = if score.correct < gate.least_passing {
        Outcome::Failed
    } else if score.mean() > band.high {
        Outcome::Inconclusive
    } else {
        Outcome::Passed
    };
    let words = match outcome {
        Outcome::Failed => "below the band",
        Outcome::Inconclusive => "above the band, which therefore does not describe this server",
        _ => "within the band",
    };
    let detail = format!(
        "{filter} {score}: {words} [{}, {}]. What this band can do: false alarms {:.1} % at {healthy:.4}; it fails 9 times \
         in 10 only below {:.4}, so {:.1} % of requests may return garbage unnoticed",
        band.low,
        band.high,
        100.0 * gate.failure_probability(healthy),
        gate.accuracy_caught(0.9),
        100.0 * gate.garbage_share(healthy, 0.9)
    );
    Check { name: "accuracy", outcome, detail }
}

fn baseline(args: &GateArgs) -> Result<Option<Comparison>, Error> {
    let Some(baseline) = &args.baseline else { return Ok(None) };
    compare::execute(&compare::CompareArgs {
        a: baseline.clone(),
        b: args.run.clone(),
        pair: Vec::new(),
        aa: args.aa.clone(),
        rule: args.rule.clone(),
        format: args.format,
    })
    .map(Some)
}

fn checks_of(comparison: &Comparison) -> Vec<Check> {
    let deciding = comparison.deciding();
    let mut checks = vec![Check {
        name: "accuracy",
        outcome: comparison.verdict.outcome(),
        detail: format!(
            "{}: {} against the baseline ({} only there, {} only here, p = {:.4})",
            comparison.filter, comparison.verdict, deciding.only_a, deciding.only_b, comparison.p_value
        ),
    }];
    if let Some(acceptance) = comparison.acceptance {
        checks.push(Check {
            name: "acceptance",
            outcome: acceptance.verdict.outcome(),
            detail: format!("{}: {:+.4} accepted tokens per step lost", acceptance.verdict, acceptance.drop),
        });
    }
    checks
}

fn by_name<S: serde::Serializer>(outcome: &Outcome, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(outcome.name())
}

impl fmt::Display for GateResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(comparison) = &self.comparison {
            write!(f, "{comparison}")?;
        }
        for check in &self.checks {
            writeln!(f, "{:<17} {:<22} {}", check.outcome, check.name, check.detail)?;
        }
        writeln!(f, "GATE: {}", self.outcome())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N: u64 = 1319;

    fn reference(correct: u64) -> Outcome {
        let score = Score { correct, total: N };
        against_reference(score, Filter::StrictMatch, 0.955, &Rule::default()).unwrap().outcome
    }

    #[test]
    fn a_reference_number_has_three_endings() {
        assert_eq!(reference(1260), Outcome::Passed);
        assert_eq!(reference(1250), Outcome::Inconclusive);
        assert_eq!(reference(1235), Outcome::Failed);
        let low = significantly_low(N, 0.955, 0.01).unwrap();
        assert_eq!((reference(low), reference(low + 1)), (Outcome::Failed, Outcome::Inconclusive));
        assert!(
            against_reference(Score { correct: 1, total: 2 }, Filter::LastInt, 1.5, &Rule::default())
                .is_err()
        );
    }

    #[test]
    fn a_band_fails_below_doubts_above_and_says_what_it_lets_pass() {
        let band: Band = "0.9538,0.9591".parse().unwrap();
        let at = |correct| against_band(Score { correct, total: N }, Filter::FlexibleExtract, band);
        assert_eq!(at(1256).outcome, Outcome::Failed); // 0.9522, accepted in public against this very band
        assert_eq!(at(1260).outcome, Outcome::Passed);
        assert_eq!(at(1270).outcome, Outcome::Inconclusive);
        assert!(at(1260).detail.contains("garbage unnoticed"), "{}", at(1260).detail);
        assert!("0.96,0.95".parse::<Band>().is_err() && "0.9".parse::<Band>().is_err());
    }
}
