//! `gsm8k compare`: two runs over the same prompts, paired question by question, and what the pairs can say.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::acceptance::interval::{self, AcceptanceComparison};
use crate::dialect::Filter;
use crate::outcome::{Error, Outcome};
use crate::output::{Format, print};
use crate::report::unseen::TYPICAL_CHURN;
use crate::runlog::RunLog;
use crate::statistics::Verdict;
use crate::statistics::design::{Design, Errors, pairs_for_all_clear, share_limits, smallest_drop};
use crate::statistics::paired::PairCounts;

/// Compares run B with run A, question by question.
#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// The run that is taken as good, e.g. with DCP off: a run's folder or a sample log of lm-eval.
    pub a: PathBuf,
    /// The run in question, e.g. with DCP on.
    pub b: PathBuf,
    /// A further pair of runs of the same two servers; may be repeated. Pairs are pooled.
    #[arg(long, num_args = 2, value_names = ["A2", "B2"], action = clap::ArgAction::Append)]
    pub pair: Vec<PathBuf>,
    /// Two runs of server A: what changes between them without any fault.
    #[arg(long, num_args = 2, value_names = ["A1", "A2"])]
    pub aa: Option<Vec<PathBuf>>,
    /// The rule by which the comparison decides.
    #[command(flatten)]
    pub rule: Rule,
    /// How the comparison is printed.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// The rule by which a comparison decides.
#[derive(Debug, Clone, Args, Serialize)]
pub struct Rule {
    /// The filter whose score decides [default: strict-match, or last-int].
    #[arg(long, value_enum)]
    pub filter: Option<Filter>,
    /// Error probability, one-sided, of "worse" without a fault and of "not worse" with a drop of the margin.
    #[arg(long, default_value_t = Errors::USUAL.alpha)]
    pub alpha: f64,
    /// The drop, in points of 100, that B must be shown to stay below to count as not worse.
    #[arg(long, default_value_t = 2.0)]
    pub margin_points: f64,
    /// The drop in accepted draft tokens per step that B must be shown to stay below.
    #[arg(long, default_value_t = 0.03)]
    pub margin_accepted: f64,
    /// The token budget of runs whose log does not say it; lm-eval's default is 256.
    #[arg(long, default_value_t = crate::dialect::MAX_TOKENS)]
    pub assume_max_tokens: u32,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            filter: None,
            alpha: Errors::USUAL.alpha,
            margin_points: 2.0,
            margin_accepted: 0.03,
            assume_max_tokens: crate::dialect::MAX_TOKENS,
        }
    }
}

/// What two runs say about each other.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// Names of the runs, A and B alternating.
    pub runs: Vec<String>,
    /// The deciding filter.
    pub filter: Filter,
    /// Pairs by who was right, under each filter that both runs have.
    pub pairs: Vec<(Filter, PairCounts)>,
    /// Answers whose extracted text is the same, of all pairs.
    pub same_answer: u64,
    /// Completions that are the same to the letter, of all pairs.
    pub same_text: u64,
    /// Limits of the drop under the deciding filter, each with error probability α.
    pub drop_limits: (f64, f64),
    /// Exact one-sided McNemar p-value.
    pub p_value: f64,
    /// The churn that the power figures assume, and where it comes from.
    pub churn: f64,
    /// Whether the churn was measured on a pair of equal runs.
    pub churn_from_aa: bool,
    /// The pair of equal runs, if given.
    pub aa: Option<PairCounts>,
    /// The smallest drop that this comparison finds nine times in ten, as a share.
    pub detectable_drop: f64,
    /// Pairs that an all-clear at the margin takes at this churn.
    pub pairs_for_all_clear: u64,
    /// Acceptance of B against A, when both runs have it.
    pub acceptance: Option<AcceptanceComparison>,
    /// Remarks on what the comparison rests on.
    pub notes: Vec<String>,
    /// The rule applied.
    pub rule: Rule,
    /// The verdict on accuracy.
    pub verdict: Verdict,
}

/// Runs the command.
///
/// # Errors
/// See [`execute`].
pub fn run(args: &CompareArgs) -> Result<Outcome, Error> {
    let comparison = execute(args)?;
    print(args.format, &comparison, &comparison);
    Ok(comparison.outcome())
}

/// Reads the runs and compares them.
///
/// # Errors
/// [`Error::Incomparable`] with every reason why the runs must not be compared; [`Error::Usage`], [`Error::Data`],
/// [`Error::Io`].
pub fn execute(args: &CompareArgs) -> Result<Comparison, Error> {
    let mut pairs = vec![(RunLog::load(&args.a)?, RunLog::load(&args.b)?)];
    for pair in args.pair.chunks(2) {
        pairs.push((RunLog::load(&pair[0])?, RunLog::load(&pair[1])?));
    }
    let aa = match args.aa.as_deref() {
        Some([first, second]) => Some((RunLog::load(first)?, RunLog::load(second)?)),
        _ => None,
    };
    compare(&pairs, aa.as_ref(), &args.rule)
}

/// Compares the B of each pair with its A.
///
/// # Errors
/// As [`execute`], without reading.
pub fn compare(
    pairs: &[(RunLog, RunLog)],
    aa: Option<&(RunLog, RunLog)>,
    rule: &Rule,
) -> Result<Comparison, Error> {
    check_rule(rule)?;
    let mut notes = Vec::new();
    let mut reasons = repeated_runs(pairs);
    for (a, b) in pairs.iter().chain(aa) {
        reasons.extend(reasons_against(a, b, rule, &mut notes));
    }
    reasons.extend(pairs.iter().skip(1).filter_map(|(a, _)| different_prompts(&pairs[0].0, a)));
    if !reasons.is_empty() {
        return Err(Error::Incomparable(reasons));
    }
    let common: Vec<Filter> = common_filters(pairs);
    let filter = rule.filter.or(common.first().copied()).ok_or_else(no_common_filter)?;
    if !common.contains(&filter) {
        return Err(Error::Usage(format!("not every run has scores under {filter}")));
    }
    let counts: Vec<(Filter, PairCounts)> =
        common.iter().map(|filter| (*filter, count(pairs, *filter))).collect();
    let deciding = count(pairs, filter);
    let aa_counts = aa.map(|(first, second)| count_pair(first, second, filter));
    let questions = pairs[0].0.answers.len() as u64;
    // Without equal runs the discordance of this comparison stands in; a drop only makes it larger.
    let churn = aa_counts.map_or(deciding.churn(), PairCounts::churn);
    let accuracy = pairs[0].0.score(filter).map_or(0.0, |score| score.mean());
    let errors = Errors { alpha: rule.alpha, ..Errors::USUAL };
    let margin = rule.margin_points / 100.0;
    let mut verdict = deciding.verdict(rule.alpha, margin);
    if verdict == Verdict::NotWorse && accuracy <= margin {
        notes.push(format!(
            "A itself answers only {:.2} % rightly, so a drop of {} points cannot happen and its absence shows nothing",
            100.0 * accuracy,
            rule.margin_points
        ));
        verdict = Verdict::Inconclusive;
    }
    if let Some(aa) = aa_counts {
        verdict = with_equal_runs(verdict, aa, deciding, questions, rule.alpha, &mut notes);
    }
    Ok(Comparison {
        runs: pairs.iter().flat_map(|(a, b)| [a.name.clone(), b.name.clone()]).collect(),
        filter,
        same_answer: same(pairs, |a, b| {
            a.scored.get(&filter).map(|scored| &scored.extracted)
                == b.scored.get(&filter).map(|scored| &scored.extracted)
        }),
        same_text: same(pairs, |a, b| a.text == b.text),
        drop_limits: deciding.drop_limits(rule.alpha),
        p_value: deciding.p_value(),
        churn,
        churn_from_aa: aa.is_some(),
        aa: aa_counts,
        detectable_drop: smallest_drop(Design::Paired { churn }, deciding.total(), accuracy, errors),
        pairs_for_all_clear: pairs_for_all_clear(churn.max(1.0 / questions as f64), margin, errors),
        acceptance: acceptance(pairs, rule),
        notes,
        rule: rule.clone(),
        verdict,
        pairs: counts,
    })
}

impl Comparison {
    /// How a command that made this comparison ends: by accuracy and acceptance together.
    pub fn outcome(&self) -> Outcome {
        let acceptance = self.acceptance.map_or(Outcome::Passed, |acceptance| acceptance.verdict.outcome());
        Outcome::worst([self.verdict.outcome(), acceptance])
    }

    /// The pairs under the deciding filter.
    pub fn deciding(&self) -> PairCounts {
        let decides = |(filter, _): &&(Filter, PairCounts)| *filter == self.filter;
        self.pairs.iter().find(decides).map(|(_, counts)| *counts).expect("the deciding filter was counted")
    }
}

fn check_rule(rule: &Rule) -> Result<(), Error> {
    if !(rule.alpha > 0.0 && rule.alpha < 0.5) {
        return Err(Error::Usage(format!("--alpha {} must lie between 0 and 0.5", rule.alpha)));
    }
    if !(rule.margin_points > 0.0 && rule.margin_points < 100.0) {
        return Err(Error::Usage(format!(
            "--margin-points {} must lie between 0 and 100",
            rule.margin_points
        )));
    }
    Ok(())
}

fn no_common_filter() -> Error {
    Error::Incomparable(vec![
        "no filter has a score for every answer of all runs (different dialects?)".to_owned(),
    ])
}

/// Runs that stand in more than one pair: their pairs would count the same evidence twice.
fn repeated_runs(pairs: &[(RunLog, RunLog)]) -> Vec<String> {
    let mut names: Vec<&str> = pairs.iter().flat_map(|(a, b)| [a.name.as_str(), b.name.as_str()]).collect();
    names.sort_unstable();
    let repeated = names.windows(2).filter(|window| window[0] == window[1]);
    repeated.map(|window| format!("{} stands in more than one place", window[0])).collect()
}

/// Every reason why two runs must not be compared.
fn reasons_against(a: &RunLog, b: &RunLog, rule: &Rule, notes: &mut Vec<String>) -> Vec<String> {
    let mut reasons = Vec::new();
    for run in [a, b] {
        if run.failed() > 0 {
            reasons.push(format!("{}: {} requests failed; resume it first", run.name, run.failed()));
        }
        if run.not_sent() > 0 {
            reasons.push(format!(
                "{}: {} questions were never sent; resume it first",
                run.name,
                run.not_sent()
            ));
        }
        if let Some(mode) = run.report.as_ref().and_then(|report| report.forced_acceptance.as_ref()) {
            reasons.push(format!("{}: drafts were accepted by decree ({mode})", run.name));
        }
        if run.rescoring_differs() > 0 {
            notes.push(format!(
                "{}: {} recorded verdicts are not those of lm-eval's gsm8k v3; the recorded ones are used",
                run.name,
                run.rescoring_differs()
            ));
        }
        if run.settings.max_tokens.is_none() {
            notes.push(format!(
                "{}: the log does not say the token budget; taken as {}",
                run.name, rule.assume_max_tokens
            ));
        }
    }
    reasons.extend(different_prompts(a, b));
    reasons.extend(different_settings(a, b, rule));
    reasons
}

fn different_prompts(a: &RunLog, b: &RunLog) -> Option<String> {
    let missing = a.answers.keys().filter(|hash| !b.answers.contains_key(*hash)).count();
    let extra = b.answers.keys().filter(|hash| !a.answers.contains_key(*hash)).count();
    (missing + extra > 0).then(|| {
        format!(
            "{} and {} were not asked the same prompts: {missing} only in the first, {extra} only in the second",
            a.name, b.name
        )
    })
}

fn different_settings(a: &RunLog, b: &RunLog, rule: &Rule) -> Vec<String> {
    let mut reasons = Vec::new();
    let mut require = |name: &str, left: Option<String>, right: Option<String>| {
        if let (Some(left), Some(right)) = (left, right)
            && left != right
        {
            reasons.push(format!("{} and {}: {name} {left} against {right}", a.name, b.name));
        }
    };
    let budget = |run: &RunLog| Some(run.settings.max_tokens.unwrap_or(rule.assume_max_tokens).to_string());
    let show = |value: &Option<Vec<String>>| value.as_ref().map(|texts| format!("{texts:?}"));
    let text = |value: Option<f64>| value.map(|value| value.to_string());
    let seed = |value: Option<u64>| value.map(|value| value.to_string());
    require("max_tokens", budget(a), budget(b));
    require("stop", show(&a.settings.stop), show(&b.settings.stop));
    require("temperature", text(a.settings.temperature), text(b.settings.temperature));
    require("request seed", seed(a.settings.request_seed), seed(b.settings.request_seed));
    reasons
}

fn common_filters(pairs: &[(RunLog, RunLog)]) -> Vec<Filter> {
    let has =
        |filter: &Filter| pairs.iter().all(|(a, b)| a.score(*filter).is_some() && b.score(*filter).is_some());
    Filter::ALL.into_iter().filter(has).collect()
}

fn count(pairs: &[(RunLog, RunLog)], filter: Filter) -> PairCounts {
    let mut counts = PairCounts::default();
    for (a, b) in pairs {
        let pair = count_pair(a, b, filter);
        counts.both_right += pair.both_right;
        counts.only_a += pair.only_a;
        counts.only_b += pair.only_b;
        counts.both_wrong += pair.both_wrong;
    }
    counts
}

fn count_pair(a: &RunLog, b: &RunLog, filter: Filter) -> PairCounts {
    let mut counts = PairCounts::default();
    for (hash, answer) in &a.answers {
        let other = &b.answers[hash];
        if let (Some(left), Some(right)) = (answer.is_correct(filter), other.is_correct(filter)) {
            counts.add(left, right);
        }
    }
    counts
}

fn same(
    pairs: &[(RunLog, RunLog)],
    is_same: impl Fn(&crate::samples::Answer, &crate::samples::Answer) -> bool,
) -> u64 {
    let count = |(a, b): &(RunLog, RunLog)| {
        a.answers.iter().filter(|(hash, answer)| is_same(answer, &b.answers[*hash])).count() as u64
    };
    pairs.iter().map(count).sum()
}

/// What a pair of equal runs adds: a server that differs from itself is no yardstick, and a B that changes more
/// answers than A does by itself deserves a remark.
fn with_equal_runs(
    verdict: Verdict,
    aa: PairCounts,
    ab: PairCounts,
    questions: u64,
    alpha: f64,
    notes: &mut Vec<String>,
) -> Verdict {
    let swapped = PairCounts { only_a: aa.only_b, only_b: aa.only_a, ..aa };
    if 2.0 * aa.p_value().min(swapped.p_value()) <= alpha {
        notes.push(
            "the two runs of server A differ from each other significantly: no yardstick, no verdict"
                .to_owned(),
        );
        return Verdict::Inconclusive;
    }
    let (_, high) = share_limits(aa.discordant(), aa.total(), alpha);
    if ab.churn() > high {
        notes.push(format!(
            "A and B differ on {:.1} % of the pairs, two runs of A on {:.1} % (at most {:.1} %): B changes answers, even \
             where it does not lose them",
            100.0 * ab.churn(),
            100.0 * aa.churn(),
            100.0 * high
        ));
    }
    if aa.total() < questions {
        notes.push(format!("the churn comes from {} questions only", aa.total()));
    }
    verdict
}

fn acceptance(pairs: &[(RunLog, RunLog)], rule: &Rule) -> Option<AcceptanceComparison> {
    let [(a, b)] = pairs else { return None };
    let estimate = |run: &RunLog| {
        let acceptance = run.report.as_ref()?.acceptance.as_ref()?;
        acceptance.estimate.filter(|_| acceptance.broken_identities.is_empty())
    };
    Some(interval::compare(&estimate(a)?, &estimate(b)?, rule.margin_accepted, rule.alpha))
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for pair in self.runs.chunks(2) {
            writeln!(f, "A: {}\nB: {}", pair[0], pair[1])?;
        }
        for (filter, counts) in &self.pairs {
            writeln!(
                f,
                "{filter}: {} pairs: {} right in both, {} only in A, {} only in B, {} in neither; agreement {:.2} %, A \
                 minus B {:+.2} points",
                counts.total(),
                counts.both_right,
                counts.only_a,
                counts.only_b,
                counts.both_wrong,
                100.0 * counts.agreement(),
                100.0 * counts.drop()
            )?;
        }
        let total = self.deciding().total() as f64;
        let share = |count: u64| 100.0 * count as f64 / total;
        writeln!(
            f,
            "same extracted answer {:.1} %, same text {:.1} %",
            share(self.same_answer),
            share(self.same_text)
        )?;
        let (low, high) = self.drop_limits;
        writeln!(
            f,
            "decided by {}: p = {:.4} (exact McNemar, one-sided), drop between {:+.2} and {:+.2} points (each limit wrong \
             with probability {})",
            self.filter,
            self.p_value,
            100.0 * low,
            100.0 * high,
            self.rule.alpha
        )?;
        self.write_power(f)?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        if let Some(acceptance) = &self.acceptance {
            writeln!(
                f,
                "acceptance: {}: drop {:+.4} accepted tokens per step, at most {:+.4} (margin {}){}",
                acceptance.verdict,
                acceptance.drop,
                acceptance.drop_high,
                self.rule.margin_accepted,
                if acceptance.surprisingly_high {
                    "; B accepts more than A, which a fault can cause too"
                } else {
                    ""
                }
            )?;
        }
        self.write_verdict(f)
    }
}

impl Comparison {
    fn write_power(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.aa {
            Some(aa) => {
                format!("measured on two runs of A, {} of {} pairs differ", aa.discordant(), aa.total())
            }
            None => format!(
                "of this comparison itself, for want of --aa; {:.0} % is usual",
                100.0 * TYPICAL_CHURN
            ),
        };
        writeln!(
            f,
            "churn {:.2} % ({source}); smallest drop that this comparison finds 9 times in 10: {:.2} points",
            100.0 * self.churn,
            100.0 * self.detectable_drop
        )
    }

    fn write_verdict(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let margin = self.rule.margin_points;
        match self.verdict {
            Verdict::Worse => writeln!(f, "VERDICT: worse: B loses answers that A gives, beyond chance"),
            Verdict::NotWorse => writeln!(f, "VERDICT: not worse by {margin} points or more"),
            Verdict::Inconclusive => {
                let questions = (self.deciding().total() / (self.runs.len() as u64 / 2)).max(1);
                writeln!(
                    f,
                    "VERDICT: inconclusive: neither worse beyond chance nor shown to lose less than {margin} points; at \
                     this churn that takes about {} pairs, i.e. {} runs of each server",
                    self.pairs_for_all_clear,
                    self.pairs_for_all_clear.div_ceil(questions)
                )
            }
        }
    }
}
