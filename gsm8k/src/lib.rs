//! GSM8K against a server: the run that lm-eval would do, the paired comparison of two runs, the gate for CI, and the
//! log-probability probe that sees what accuracy cannot.
//!
//! Every command is a `clap` argument struct with a `run` function that returns an [`Outcome`] or an [`Error`], both of
//! which have the exit codes of the whole program. [`Gsm8kArgs`] and [`logprobs::LogprobsArgs`] are all that a program
//! has to mount.

pub mod acceptance;
pub mod client;
pub mod compare;
pub mod completion;
pub mod coverage;
pub mod dataset;
pub mod dialect;
pub mod gate;
pub mod logprobs;
pub mod manifest;
pub mod mersenne;
pub mod outcome;
pub mod output;
pub mod prompts;
pub mod report;
pub mod run;
pub mod runlog;
pub mod samples;
pub mod score;
pub mod scoring;
pub mod server_log;
pub mod server_metrics;
pub mod simulate;
pub mod statistics;
pub mod timestamp;
mod vocabulary;

use clap::{Args, Subcommand};

pub use outcome::{Error, Outcome};

/// GSM8K end to end: run, compare, gate.
#[derive(Debug, Clone, Args)]
pub struct Gsm8kArgs {
    #[command(subcommand)]
    command: Gsm8kCommand,
}

/// The commands below `gsm8k`.
#[derive(Debug, Clone, Subcommand)]
pub enum Gsm8kCommand {
    /// Ask a server all questions and score its answers as lm-eval does.
    Run(Box<run::RunArgs>),
    /// Compare two runs question by question: worse, not worse, or inconclusive.
    Compare(compare::CompareArgs),
    /// Check a run in CI, against a baseline run, a number or a band.
    Gate(gate::GateArgs),
    /// Sum up and gate the acceptance of speculative decoding.
    Acceptance(acceptance::command::AcceptanceArgs),
    /// Count how often the gate's rule is wrong, over simulated runs.
    Simulate(simulate::SimulateArgs),
}

impl Gsm8kArgs {
    /// The command that was chosen.
    pub fn command(&self) -> &Gsm8kCommand {
        &self.command
    }
}

/// Runs the chosen command and prints its result.
///
/// # Errors
/// What the command returns; [`Error::outcome`] gives the exit code.
pub fn run(args: &Gsm8kArgs) -> Result<Outcome, Error> {
    match &args.command {
        Gsm8kCommand::Run(args) => run::run(args),
        Gsm8kCommand::Compare(args) => compare::run(args),
        Gsm8kCommand::Gate(args) => gate::run(args),
        Gsm8kCommand::Acceptance(args) => acceptance::command::run(args),
        Gsm8kCommand::Simulate(args) => simulate::run(args),
    }
}
