//! `logprobs`: what two servers think of the same tokens, at lengths where a sharded KV cache can go wrong.
//!
//! Accuracy needs hundreds of answers to see a point; the probabilities of fixed tokens show a fault at once, and at
//! which length. A is taken as good (DCP off), B is in question (DCP on).

pub mod judge;
pub mod pattern;
pub mod plan;
pub mod probe;
mod reasons;
pub mod words;

use std::fmt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use clap::Args;
use serde::Serialize;

use self::judge::{JudgeInput, Judgement};
use self::plan::{Edge, PlanInput, ProbeSpec};
use self::probe::{Bench, Position, ProbeError, ProbeResult};
use self::words::Vocabulary;
use crate::client::{Client, FailureKind, RetryPolicy};
use crate::coverage::Sharding;
use crate::outcome::{Error, Outcome};
use crate::output::{Format, print};
use crate::run::refuse_unusable;

/// Compares the log-probabilities of two servers at chosen lengths.
#[derive(Debug, Clone, Args)]
pub struct LogprobsArgs {
    /// Address of the server taken as good, e.g. with DCP off.
    #[arg(long)]
    pub a: String,
    /// Address of the server in question, e.g. with DCP on.
    #[arg(long)]
    pub b: String,
    /// The model's served name.
    #[arg(long)]
    pub model: String,
    /// The name under which B serves it, if another.
    #[arg(long)]
    pub model_b: Option<String>,
    /// Decode context parallel size of B.
    #[arg(long)]
    pub dcp: u64,
    /// Interleave size of B in tokens.
    #[arg(long, default_value_t = 1)]
    pub interleave: u64,
    /// Block size of one rank of B in tokens.
    #[arg(long)]
    pub block_size: Option<u64>,
    /// Longest context in tokens; edges beyond it are named and not probed.
    #[arg(long, default_value_t = 1024)]
    pub max_tokens: u64,
    /// Further context lengths to walk across, also beyond --max-tokens.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    pub lengths: Vec<u64>,
    /// Tokens generated after each context.
    #[arg(long, default_value_t = 16)]
    pub decode_tokens: u32,
    /// Independent prompts per length.
    #[arg(long, default_value_t = 2)]
    pub repeats: u64,
    /// A shift in log-odds that is a fault whatever the noise.
    #[arg(long, default_value_t = 1.0)]
    pub cap: f64,
    /// The width of noise, in log-odds, that is legitimate between A and B, e.g. 1e-4 when both compute in f32; more is a
    /// fault [default: whatever is seen is taken as noise, up to the cap].
    #[arg(long)]
    pub max_noise: Option<f64>,
    /// Do not measure A twice; its own noise is then unknown.
    #[arg(long)]
    pub no_repeat_a: bool,
    /// Probes at the same time.
    #[arg(long, default_value_t = 4)]
    pub concurrency: usize,
    /// Limit of one request in seconds.
    #[arg(long, default_value_t = 300.0)]
    pub timeout_s: f64,
    /// Seed of the probes' words.
    #[arg(long, default_value_t = 1234)]
    pub seed: u64,
    /// Environment variable that holds the API key.
    #[arg(long, default_value = "OPENAI_API_KEY")]
    pub api_key_env: String,
    /// Write every compared position to this file, one JSON line each.
    #[arg(long)]
    pub positions: Option<PathBuf>,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// The comparison with everything it rests on.
#[derive(Debug, Clone, Serialize)]
pub struct LogprobsReport {
    /// Address of A.
    pub a: String,
    /// Address of B.
    pub b: String,
    /// The sharding stated for B.
    pub sharding: Sharding,
    /// One line per prompt.
    pub probes: Vec<ProbeLine>,
    /// Edges that the longest context leaves out.
    pub edges_beyond: Vec<u64>,
    /// The first place where the generated texts differ: context length and A's top-2 margin there.
    pub first_divergence: Option<(u64, Option<f64>)>,
    /// The judgement.
    pub judgement: Judgement,
    /// Seconds taken.
    pub wall_s: f64,
}

/// What one prompt gave.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProbeLine {
    /// Planned tokens of the context.
    pub context_tokens: u64,
    /// Why this length.
    pub why: Vec<Edge>,
    /// Positions compared.
    pub positions: usize,
    /// Largest absolute shift in log-odds.
    pub largest: f64,
    /// Root mean square of the shifts.
    pub rms: f64,
    /// Positions where the best token differs.
    pub flips: usize,
}

/// Runs the command.
///
/// # Errors
/// See [`execute`].
pub fn run(args: &LogprobsArgs) -> Result<Outcome, Error> {
    let report = execute(args)?;
    print(args.format, &report, &report);
    Ok(report.judgement.verdict.outcome())
}

/// Measures and judges without printing.
///
/// # Errors
/// [`Error::Server`] when a server does not answer or A fails, [`Error::Usage`] for arguments that do not fit, servers
/// that cannot echo, or different tokenizers, [`Error::Io`].
pub fn execute(args: &LogprobsArgs) -> Result<LogprobsReport, Error> {
    check(args)?;
    let started = Instant::now();
    let (a, b) = (client(args, &args.a)?, client(args, &args.b)?);
    let vocabulary = Vocabulary::measure(&a, &args.model)?;
    let sharding = Sharding { dcp: args.dcp, interleave: args.interleave, block_size: args.block_size };
    let (specs, edges_beyond) = plan::plan(&PlanInput {
        sharding,
        max_tokens: args.max_tokens,
        chosen: args.lengths.clone(),
        shortest_with_needle: vocabulary.shortest_with_needle(),
        decode_tokens: u64::from(args.decode_tokens),
        repeats: args.repeats,
        seed: args.seed,
    });
    let bench = Bench {
        a: &a,
        b: &b,
        model_a: &args.model,
        model_b: args.model_b.as_deref().unwrap_or(&args.model),
        vocabulary: &vocabulary,
        decode_tokens: args.decode_tokens,
    };
    let results = measure(args, &bench, &specs)?;
    let lengths: Vec<u64> = specs.iter().map(|spec| spec.context_tokens).collect();
    let judgement =
        judge::judge(&results, &lengths, JudgeInput { sharding, cap: args.cap, max_noise: args.max_noise });
    if let Some(path) = &args.positions {
        write_positions(path, &results)?;
    }
    Ok(LogprobsReport {
        a: a.root_url().to_owned(),
        b: b.root_url().to_owned(),
        sharding,
        probes: specs.iter().zip(&results).map(|(spec, result)| line(spec, result)).collect(),
        edges_beyond,
        first_divergence: results.iter().find_map(|result| result.first_divergence),
        judgement,
        wall_s: started.elapsed().as_secs_f64(),
    })
}

fn check(args: &LogprobsArgs) -> Result<(), Error> {
    let positive = [
        ("--dcp", args.dcp),
        ("--interleave", args.interleave),
        ("--block-size", args.block_size.unwrap_or(1)),
        ("--repeats", args.repeats),
        ("--concurrency", args.concurrency as u64),
    ];
    if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
        return Err(Error::Usage(format!("{name} must be at least 1")));
    }
    if args.decode_tokens < 4 {
        return Err(Error::Usage("--decode-tokens must be at least 4, to walk across an edge".to_owned()));
    }
    if !(args.cap > 0.0 && args.timeout_s > 1e-3 && args.timeout_s < 1e6) {
        return Err(Error::Usage("--cap and --timeout-s must be positive".to_owned()));
    }
    Ok(())
}

fn client(args: &LogprobsArgs, url: &str) -> Result<Client, Error> {
    let policy = RetryPolicy { timeout_s: args.timeout_s, ..RetryPolicy::default() };
    let client = Client::new(url, std::env::var(&args.api_key_env).ok(), policy)?;
    if let Err(failure) = client.get("/v1/models") {
        refuse_unusable(&client, &failure, &args.api_key_env)?;
    }
    Ok(client)
}

/// Runs all probes, several at a time.
fn measure(args: &LogprobsArgs, bench: &Bench, specs: &[ProbeSpec]) -> Result<Vec<ProbeResult>, Error> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let results: Mutex<Vec<Option<ProbeResult>>> = Mutex::new(vec![None; specs.len()]);
    let error: Mutex<Option<Error>> = Mutex::new(None);
    let work = || {
        while !failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(spec) = specs.get(number) else { return };
            match bench.run(number, spec, !args.no_repeat_a) {
                Ok(result) => results.lock().expect("no thread panics here")[number] = Some(result),
                Err(why) => {
                    failed.store(true, Ordering::Relaxed);
                    error.lock().expect("no thread panics here").get_or_insert(explain(bench, spec, &why));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.concurrency).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().expect("a probing thread panicked: this is a bug");
        }
    });
    if let Some(error) = error.into_inner().expect("threads are done") {
        return Err(error);
    }
    let results = results.into_inner().expect("threads are done");
    let results: Vec<ProbeResult> =
        results.into_iter().map(|result| result.expect("every probe ran")).collect();
    refuse_absent_b(bench, &results)?;
    Ok(results)
}

/// A B that answered nothing at all was not there; that is no finding about its arithmetic.
fn refuse_absent_b(bench: &Bench, results: &[ProbeResult]) -> Result<(), Error> {
    let nothing = results.iter().all(|result| result.positions.is_empty());
    let failure = results.iter().find_map(|result| result.b_failed.as_ref());
    match failure.filter(|_| nothing) {
        Some(failure) => {
            let words = format!("{} answered no probe at all: {failure}", bench.b.root_url());
            let usage = failure.kind.is_fatal() || failure.kind == FailureKind::Rejected;
            Err(if usage { Error::Usage(words) } else { Error::Server(words) })
        }
        None => Ok(()),
    }
}

fn explain(bench: &Bench, spec: &ProbeSpec, why: &ProbeError) -> Error {
    match why {
        ProbeError::AFailed(failure) => Error::Server(format!(
            "{} (A) failed on a prompt of {} tokens, so there is nothing to compare with: {failure}",
            bench.a.root_url(),
            spec.context_tokens
        )),
        ProbeError::DifferentTokens { a, b } => Error::Usage(format!(
            "the servers cut the same text into different tokens ({a} in A, {b} in B): not the same model?"
        )),
    }
}

fn line(spec: &ProbeSpec, result: &ProbeResult) -> ProbeLine {
    let sizes = || result.positions.iter().map(|position| position.shift.abs());
    let count = result.positions.len();
    ProbeLine {
        context_tokens: spec.context_tokens,
        why: spec.why.clone(),
        positions: count,
        largest: sizes().fold(0.0, f64::max),
        rms: (sizes().fold(0.0, |sum, size| sum + size * size) / count.max(1) as f64).sqrt(),
        flips: result.positions.iter().filter(|position| position.flip_margin.is_some()).count(),
    }
}

fn write_positions(path: &PathBuf, results: &[ProbeResult]) -> Result<(), Error> {
    let to_line =
        |position: &Position| serde_json::to_string(position).expect("a position is always JSON") + "\n";
    let text: String = results.iter().flat_map(|result| &result.positions).map(to_line).collect();
    std::fs::write(path, text).map_err(|source| Error::io("write", path, source))
}

impl fmt::Display for LogprobsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sharding = self.sharding;
        let block = sharding.block_size.map_or("not stated".to_owned(), |size| size.to_string());
        writeln!(
            f,
            "A: {}\nB: {} (dcp {}, interleave {}, block {block})",
            self.a, self.b, sharding.dcp, sharding.interleave
        )?;
        writeln!(f, "context  positions  largest shift     rms  flips  why")?;
        for probe in &self.probes {
            let why: Vec<&str> = probe.why.iter().map(|edge| edge.name()).collect();
            writeln!(
                f,
                "{:>7}  {:>9}  {:>13.5}  {:>7.5}  {:>5}  {}",
                probe.context_tokens,
                probe.positions,
                probe.largest,
                probe.rms,
                probe.flips,
                why.join(", ")
            )?;
        }
        if !self.edges_beyond.is_empty() {
            writeln!(f, "not probed, beyond --max-tokens: edges at {:?}", self.edges_beyond)?;
        }
        self.write_figures(f)?;
        for reason in &self.judgement.reasons {
            writeln!(f, "  - {reason}")?;
        }
        for note in &self.judgement.notes {
            writeln!(f, "  note: {note}")?;
        }
        for pattern in &self.judgement.patterns {
            writeln!(
                f,
                "  where: {}: {} of {} positions there are beyond the limit, {} of {} elsewhere",
                pattern.words, pattern.bad_inside, pattern.inside, pattern.bad_outside, pattern.outside
            )?;
        }
        if let Some(shortest) = self.judgement.shortest_bad_context {
            writeln!(f, "  shortest context that shows it: {shortest} tokens")?;
            if let Some(first_step) = &self.judgement.first_step {
                writeln!(f, "  {first_step}")?;
            }
            if let Some(beginning) = self.judgement.beginning {
                writeln!(
                    f,
                    "  the servers begin to differ at a context of {} tokens: usual shift {:.6} there, at most {:.6} before",
                    beginning.context_tokens, beginning.after, beginning.before
                )?;
            }
            let onsets = self.judgement.onsets.iter().take(8);
            let onsets: Vec<String> =
                onsets.map(|(context, prompts)| format!("{context} ({prompts})")).collect();
            writeln!(f, "  first beyond the limit, by context (prompts): {}", onsets.join(", "))?;
        }
        Ok(())
    }
}

impl LogprobsReport {
    fn write_figures(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for figures in &self.judgement.routes {
            writeln!(
                f,
                "{}: {} positions, noise {:.6}, limit {:.6}, largest {:.6}, {} beyond; mean {:+.6} ({:+.1} standard errors); \
                 {} flips, A's largest margin there {:.4}",
                figures.route,
                figures.positions,
                figures.noise,
                figures.limit,
                figures.largest,
                figures.beyond,
                figures.mean,
                figures.z,
                figures.flips,
                figures.largest_flip_margin
            )?;
        }
        match self.judgement.largest_repeated {
            Some(largest) => writeln!(f, "A against itself: largest shift {largest:.6}")?,
            None => writeln!(f, "A against itself: not measured")?,
        }
        writeln!(f, "needles: {:.0} % of their tokens recalled by A", 100.0 * self.judgement.recalled)?;
        match self.first_divergence {
            Some((context, margin)) => {
                let margin = margin.map_or("unknown".to_owned(), |margin| format!("{margin:.4}"));
                writeln!(
                    f,
                    "generated texts first differ at a context of {context} tokens, A's margin {margin}"
                )?
            }
            None => writeln!(f, "generated texts never differ")?,
        }
        writeln!(f, "VERDICT: {} ({:.1} s)", self.judgement.verdict, self.wall_s)
    }
}
