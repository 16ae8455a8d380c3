//! The command line: verbs, options, and which exit code an error means.

use clap::{Parser, Subcommand};

use crate::commands;
use crate::engines::EngineChoiceError;
use crate::status::Exit;

/// Is a context-parallel attention engine right, and if not, exactly where?
///
/// shardcheck compares an engine that shards a sequence over ranks with an oracle of global attention, property by property,
/// with a tolerance derived for each element. Without options, `shardcheck run` gates the embedded engine in under a minute
/// and proves on known faults that the checks have teeth.
#[derive(Debug, Parser)]
#[command(name = "shardcheck", version, propagate_version = true, max_term_width = 110)]
#[command(after_help = "Exit codes: 0 passed, 1 failed, 2 usage, 3 inconclusive only, 4 nothing selected, \
    5 rerun outstanding, 6 baseline failed, 7 mutants survived, 8 submission invalid, 9 no device, 10 engine not started, 70 internal error. \
    `shardcheck explain exit-codes` says more.")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Judge the cases of a suite on an engine
    Run(commands::run::Args),
    /// Print the cases that a selection holds
    List(commands::list::Args),
    /// Explain a property, a case, a fault, or a topic
    Explain(commands::explain::Args),
    /// Judge one case again, from its id, its file or a run
    Replay(commands::replay::Args),
    /// Write a suite's questions as files, for whatever this program can't start
    ///
    /// Each case gets a folder with the inputs of one plain pass. Something else computes and writes its outputs beside them: an
    /// emulator, a lab without a network, a program in C++. `shardcheck judge DIR` decides. docs/files.md has the formats.
    Export(commands::export::Args),
    /// Decide again on the stored failures of a run, without the engine; or on the answers in an exported folder
    Judge(commands::judge::Args),
    /// Say which known fault explains the stored failures of a run
    ///
    /// The questions that the failed cases asked are put to the embedded engine with one known fault at a time. A fault explains a
    /// case when it gives the wrong outputs that were seen, within the width of each element's certified interval; a run has
    /// one cause more often than many, so a fault that explains every case comes first. Works on runs of any engine: only stored
    /// outputs are needed. `shardcheck explain diagnosis` says more.
    Diagnose(commands::diagnose::Args),
    /// Find the smallest case that still fails in the same way
    ///
    /// Every axis is tried: requests, lengths, rows, W, groups, heads, S, B, widths, model, cache format, exchange, padding, placement,
    /// probe, seed. Small is one measure: tokens (Σ over requests of length and rows), then W, heads, S, B, dims. The smaller
    /// case fails the same property, so that it shows the same mistake. The search ends by itself or with its time, and the same
    /// arguments give the same case when time suffices.
    Shrink(commands::shrink::Args),
    /// Try the known faults: which property kills which
    Mutants(commands::mutants::Args),
    /// Corrupt what verdicts rest on, and prove that the right check notices
    ///
    /// Passing proves something only where failing is possible. One element of one answer on one seed of a hundred, one bit of a
    /// golden file, one stored verdict, one bound of the oracle: each is corrupted for real, goes through the real judge, and
    /// must be noticed by the check that it belongs to, by name. A whole gate does this first.
    SelfTest(commands::self_test::Args),
    /// Compare two runs: what newly fails, what was fixed, what drifted
    Diff(commands::diff::Args),
    /// Make or verify the golden vectors that other programs can load
    Golden(commands::golden::Args),
    /// Measure the checks: speed of the oracle, violations of the bounds, what the rules see
    Bench(commands::bench::Args),
    /// GSM8K against a server: run, compare, gate, acceptance
    Gsm8k(shardcheck_gsm8k::Gsm8kArgs),
    /// Compare two servers' log-probabilities at the edges of a sharded cache: sees what accuracy cannot
    Logprobs(shardcheck_gsm8k::logprobs::LogprobsArgs),
    /// Answer for the embedded engine as an adapter does, over the socket of the harness that started this
    ///
    /// `shardcheck run --engine 'exec:shardcheck adapter'` judges the embedded engine behind the process protocol.
    Adapter(commands::adapter::Args),
    /// Fetch published engines whose own code can be judged
    Engines(commands::engines::Args),
    /// Judge one call of your own attention function, from a file of its tensors
    ///
    /// No adapter: a safetensors file holds what the call was given and what it returned, and the key
    /// `shardcheck` of its metadata holds a JSON header, as text, that says what they are. Each element
    /// is judged by its own interval, derived from the values that the block table really addresses and
    /// from a rounding contract (bf16, f16, f32, fp8, or one in full). A failure names token, head, rank
    /// and stage, and the known slip that gives what was seen.
    ///
    /// From Python, `shardcheck.assert_decode`, `assert_verify`, `assert_merge` and `assert_layout` write
    /// the file and call this verb. By hand, a header and the tensors of each check:
    ///
    ///   {"schema_version": 1, "check": "decode", "softmax_scale": 0.07, "kv_lora_rank": 512}
    ///
    ///   decode  q [T,H,D], kv_cache [blocks,B,D] (or key_cache and value_cache), block_table,
    ///           seq_lens, out, lse
    ///   verify  the same, with query_start_loc for ragged rows; "mask": "bidirectional"
    ///   merge   partial_out [N,T,H,D], partial_lse [N,T,H], out, lse
    ///   layout  seq_lens, and any of local_lens, slot_mapping (with block_table), row_lens
    ///
    /// docs/check.md has every field. Exit codes: 0 passes, 1 fails, 2 the file is wrong, 3 undecided.
    #[command(verbatim_doc_comment)]
    Check(commands::check::Args),
    /// Say what this machine and an engine can do
    Doctor(commands::doctor::Args),
}

/// Why a command ended without a verdict.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The command line or a file that it names is wrong.
    #[error("{0}")]
    Usage(String),
    /// The selection is empty, or there is no failure to work on.
    #[error("{0}")]
    NothingSelected(String),
    /// The engine fails without any fault.
    #[error("{0}")]
    BaselineFailed(String),
    /// The engine under test is not there.
    #[error("{0}")]
    EngineNotStarted(String),
    /// The engine needs a device that is not there.
    #[error("{0}")]
    NoDevice(String),
    /// The harness is at fault, or the machine refused something.
    #[error("{0}")]
    Internal(String),
}

impl From<EngineChoiceError> for CommandError {
    fn from(error: EngineChoiceError) -> Self {
        match error {
            EngineChoiceError::Start { .. } => Self::EngineNotStarted(error.to_string()),
            EngineChoiceError::NoDevice { .. } => Self::NoDevice(error.to_string()),
            _ => Self::usage(error),
        }
    }
}

impl CommandError {
    /// A usage error out of any error.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        Self::Usage(error.to_string())
    }

    /// An internal error out of any error.
    pub fn internal(error: impl std::fmt::Display) -> Self {
        Self::Internal(error.to_string())
    }

    /// Its exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) => Exit::Usage,
            Self::NothingSelected(_) => Exit::NothingSelected,
            Self::BaselineFailed(_) => Exit::BaselineFailed,
            Self::EngineNotStarted(_) => Exit::EngineNotStarted,
            Self::NoDevice(_) => Exit::NoDevice,
            Self::Internal(_) => Exit::Internal,
        }
    }
}

/// Runs the program with the arguments of the process.
pub fn main() -> Exit {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // clap prints help and version to stdout and errors to stderr
            let printed = error.print();
            return if error.use_stderr() || printed.is_err() { Exit::Usage } else { Exit::Passed };
        }
    };
    let outcome = match cli.verb {
        Verb::Run(args) => commands::run::run(&args),
        Verb::List(args) => commands::list::run(&args),
        Verb::Explain(args) => commands::explain::run(&args),
        Verb::Replay(args) => commands::replay::run(&args),
        Verb::Export(args) => commands::export::run(&args),
        Verb::Judge(args) => commands::judge::run(&args),
        Verb::Diagnose(args) => commands::diagnose::run(&args),
        Verb::Shrink(args) => commands::shrink::run(&args),
        Verb::SelfTest(args) => commands::self_test::run(&args),
        Verb::Mutants(args) => commands::mutants::run(&args),
        Verb::Diff(args) => commands::diff::run(&args),
        Verb::Golden(args) => commands::golden::run(&args),
        Verb::Bench(args) => commands::bench::run(&args),
        Verb::Gsm8k(args) => commands::gsm8k::run(shardcheck_gsm8k::run(&args)),
        Verb::Logprobs(args) => commands::gsm8k::run(shardcheck_gsm8k::logprobs::run(&args)),
        Verb::Adapter(args) => commands::adapter::run(&args),
        Verb::Engines(args) => commands::engines::run(&args),
        Verb::Check(args) => commands::check::run(&args),
        Verb::Doctor(args) => commands::doctor::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.exit()
    })
}
