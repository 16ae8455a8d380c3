//! `gsm8k acceptance`: acceptance figures out of metrics, logs or runs, checked, and gated against a baseline.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::interval::{self, AcceptanceComparison};
use super::sources;
use super::summary::{AcceptanceSummary, DESIGN_EFFECT};
use crate::outcome::{Error, Outcome};
use crate::output::{Format, print};
use crate::report::RunReport;
use crate::statistics::design::Errors;

/// Sums up acceptance of speculative decoding and gates it.
#[derive(Debug, Clone, Args)]
pub struct AcceptanceArgs {
    /// A run's folder, a copy of the server's /metrics, or its log.
    pub source: PathBuf,
    /// The copy of /metrics from before, whose counts are taken off.
    #[arg(long)]
    pub before: Option<PathBuf>,
    /// The same of the healthy server.
    #[arg(long)]
    pub baseline: Option<PathBuf>,
    /// The baseline's copy of /metrics from before.
    #[arg(long, requires = "baseline")]
    pub baseline_before: Option<PathBuf>,
    /// Fails when a smaller share of drafted tokens is accepted.
    #[arg(long)]
    pub min_rate: Option<f64>,
    /// Fails when 1 + accepted per step is lower.
    #[arg(long)]
    pub min_length: Option<f64>,
    /// The drop in accepted tokens per step that must be shown not to be there.
    #[arg(long, default_value_t = 0.03)]
    pub margin_accepted: f64,
    /// Error probability, one-sided.
    #[arg(long, default_value_t = Errors::USUAL.alpha)]
    pub alpha: f64,
    /// How many correlated steps carry the information of one, when there are no per-request counts.
    #[arg(long, default_value_t = DESIGN_EFFECT)]
    pub design_effect: f64,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// What the command found.
#[derive(Debug, Clone, Serialize)]
pub struct AcceptanceResult {
    /// The figures in question.
    pub acceptance: AcceptanceSummary,
    /// The baseline's.
    pub baseline: Option<AcceptanceSummary>,
    /// Their comparison.
    pub comparison: Option<AcceptanceComparison>,
    /// What failed, in words.
    pub failures: Vec<String>,
}

impl AcceptanceResult {
    /// Failed limits and identities first, then the comparison.
    pub fn outcome(&self) -> Outcome {
        let limits = if self.failures.is_empty() { Outcome::Passed } else { Outcome::Failed };
        Outcome::worst([limits, self.comparison.map_or(Outcome::Passed, |c| c.verdict.outcome())])
    }
}

/// Runs the command.
///
/// # Errors
/// See [`execute`].
pub fn run(args: &AcceptanceArgs) -> Result<Outcome, Error> {
    let result = execute(args)?;
    print(args.format, &result, &result);
    Ok(result.outcome())
}

/// Reads, checks and compares without printing.
///
/// # Errors
/// [`Error::Data`] when a source holds no acceptance figures or ran backwards, [`Error::Usage`], [`Error::Io`].
pub fn execute(args: &AcceptanceArgs) -> Result<AcceptanceResult, Error> {
    if !(args.alpha > 0.0 && args.alpha < 0.5 && args.design_effect >= 1.0) {
        return Err(Error::Usage(
            "--alpha must lie between 0 and 0.5, --design-effect must be at least 1".to_owned(),
        ));
    }
    let acceptance = summary(&args.source, args.before.as_deref(), args)?;
    let baseline = args
        .baseline
        .as_deref()
        .map(|baseline| summary(baseline, args.baseline_before.as_deref(), args))
        .transpose()?;
    let comparison = baseline.as_ref().and_then(|baseline| {
        let (a, b) = (baseline.estimate?, acceptance.estimate?);
        Some(interval::compare(&a, &b, args.margin_accepted, args.alpha))
    });
    let mut failures = acceptance.broken_identities.clone();
    let limits = [
        ("rate", acceptance.rate, args.min_rate),
        ("acceptance length", acceptance.acceptance_length, args.min_length),
    ];
    for (name, seen, least) in limits {
        if let Some(least) = least.filter(|least| seen < *least) {
            failures.push(format!("{name} {seen:.4} is below {least}"));
        }
    }
    Ok(AcceptanceResult { acceptance, baseline, comparison, failures })
}

fn summary(source: &Path, before: Option<&Path>, args: &AcceptanceArgs) -> Result<AcceptanceSummary, Error> {
    let nothing = |path: &Path| {
        Error::Data(format!(
            "{} holds no acceptance figures: expected a run's folder, vLLM's /metrics with spec_decode counters, or a log \
             with 'SpecDecoding metrics' (vLLM) or '[MTP Stats' (ATOM) lines",
            path.display()
        ))
    };
    if source.join("run.json").is_file() {
        return RunReport::load(source)?.0.acceptance.ok_or_else(|| nothing(source));
    }
    let read = |path: &Path| std::fs::read_to_string(path).map_err(|why| Error::io("read", path, why));
    let text = read(source)?;
    let (counts, name) = match sources::from_metrics(&text) {
        Some(counts) => (counts, "metrics"),
        None => (sources::from_log(&text).ok_or_else(|| nothing(source))?, "log, rounded by it"),
    };
    let counts = match before {
        None => counts,
        Some(path) => {
            let earlier = sources::from_metrics(&read(path)?).ok_or_else(|| nothing(path))?;
            counts.since(&earlier).ok_or_else(|| {
                Error::Data(format!(
                    "{} counts more than {}: the server was restarted",
                    path.display(),
                    source.display()
                ))
            })?
        }
    };
    Ok(AcceptanceSummary::new(name, counts, None, None, args.design_effect, args.alpha))
}

impl fmt::Display for AcceptanceResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.acceptance)?;
        if let Some(baseline) = &self.baseline {
            write!(f, "baseline: {baseline}")?;
        }
        if let Some(comparison) = &self.comparison {
            writeln!(
                f,
                "VERDICT: {}: {:+.4} accepted tokens per step lost, at most {:+.4}{}",
                comparison.verdict,
                comparison.drop,
                comparison.drop_high,
                if comparison.surprisingly_high {
                    "; more than the baseline, which needs a reason as well"
                } else {
                    ""
                }
            )?;
        }
        for failure in &self.failures {
            writeln!(f, "FAILED: {failure}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Verdict;

    fn metrics(histogram: &[u64]) -> String {
        let counts = super::super::AcceptanceCounts::from_histogram(histogram);
        let mut text = format!(
            "vllm:spec_decode_num_drafts_total 1{0}\nvllm:spec_decode_num_drafts_total {1}\n",
            "0", // a second engine with ten steps
            counts.steps - 10
        );
        text += &format!("vllm:spec_decode_num_draft_tokens_total {}\n", counts.drafted);
        text += &format!("vllm:spec_decode_num_accepted_tokens_total {}\n", counts.accepted);
        for (position, count) in counts.accepted_per_position.iter().enumerate() {
            text += &format!(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total{{position=\"{position}\"}} {count}\n"
            );
        }
        text
    }

    fn args(folder: &Path, source: &str) -> AcceptanceArgs {
        AcceptanceArgs {
            source: folder.join(source),
            before: None,
            baseline: None,
            baseline_before: None,
            min_rate: None,
            min_length: None,
            margin_accepted: 0.03,
            alpha: 0.01,
            design_effect: 3.0,
            format: Format::Text,
        }
    }

    #[test]
    fn a_worse_draft_fails_beside_the_baseline_and_an_equal_one_passes() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
        write("healthy", metrics(&[3660, 8220, 48_120]));
        write("same", metrics(&[3650, 8230, 48_120]));
        write("worse", metrics(&[5660, 8220, 46_120]));
        write("earlier", metrics(&[610, 1370, 8020]));
        let against = |source: &str| {
            let mut args = args(folder.path(), source);
            args.baseline = Some(folder.path().join("healthy"));
            execute(&args).unwrap()
        };
        assert_eq!(against("same").comparison.unwrap().verdict, Verdict::NotWorse);
        assert_eq!(against("worse").outcome(), Outcome::Failed);
        let mut since = args(folder.path(), "healthy");
        since.before = Some(folder.path().join("earlier"));
        assert_eq!(execute(&since).unwrap().acceptance.counts.steps, 50_000);
        (since.before, since.source) = (Some(folder.path().join("healthy")), folder.path().join("earlier"));
        assert!(execute(&since).unwrap_err().to_string().contains("restarted"));
    }

    #[test]
    fn limits_are_checked_and_a_source_without_figures_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("m"), metrics(&[61, 137, 802])).unwrap();
        let mut limited = args(folder.path(), "m");
        (limited.min_rate, limited.min_length) = (Some(0.88), Some(2.7));
        let result = execute(&limited).unwrap();
        assert_eq!(result.failures, ["rate 0.8705 is below 0.88"]);
        assert_eq!(result.outcome(), Outcome::Failed);
        std::fs::write(folder.path().join("n"), "nothing").unwrap();
        assert!(
            execute(&args(folder.path(), "n")).unwrap_err().to_string().contains("no acceptance figures")
        );
    }
}
