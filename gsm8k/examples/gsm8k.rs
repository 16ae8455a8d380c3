//! The commands of this crate as a program of their own: `cargo run -p shardcheck-gsm8k --example gsm8k -- gsm8k run …`.

use std::process::ExitCode;

use clap::Parser;
use shardcheck_gsm8k::{Gsm8kArgs, logprobs};

#[derive(Parser)]
enum Program {
    /// GSM8K end to end: run, compare, gate.
    Gsm8k(Box<Gsm8kArgs>),
    /// Compare the log-probabilities of two servers at chosen lengths.
    Logprobs(Box<logprobs::LogprobsArgs>),
}

fn main() -> ExitCode {
    let result = match Program::parse() {
        Program::Gsm8k(args) => shardcheck_gsm8k::run(&args),
        Program::Logprobs(args) => logprobs::run(&args),
    };
    let outcome = result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.outcome()
    });
    outcome.into()
}
