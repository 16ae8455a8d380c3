//! `self-test`: what verdicts rest on is corrupted, and the right check must notice.

use crate::cli::CommandError;
use crate::commands::print;
use crate::self_test::{Outcome, run_all};
use crate::status::Exit;

/// Options of `self-test`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the outcomes as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `self-test`.
///
/// # Errors
/// [`CommandError::Internal`] when a corruption goes unnoticed: verdicts of this build prove nothing then.
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let outcomes = run_all();
    if args.json {
        print(serde_json::to_string_pretty(&outcomes).map_err(CommandError::internal)? + "\n")?;
    } else {
        for outcome in &outcomes {
            let word = if outcome.noticed { "noticed" } else { "UNNOTICED" };
            print(format!(
                "{word:<10} {:<24} {}\n{:36}{}\n",
                outcome.name, outcome.corrupts, "", outcome.seen
            ))?;
        }
    }
    conclude(&outcomes)
}

/// The verdict on all corruptions.
pub(super) fn conclude(outcomes: &[Outcome]) -> Result<Exit, CommandError> {
    let missed: Vec<String> = outcomes
        .iter()
        .filter(|outcome| !outcome.noticed)
        .map(|outcome| {
            format!(
                "{} ({}) had to be noticed by {}: {}",
                outcome.name, outcome.corrupts, outcome.must_notice, outcome.seen
            )
        })
        .collect();
    if missed.is_empty() {
        let elapsed_s: f64 = outcomes.iter().map(|outcome| outcome.elapsed_s).sum();
        eprintln!(
            "self-test: {} corruptions, each noticed by the check that it belongs to ({elapsed_s:.1} s of work)",
            outcomes.len()
        );
        return Ok(Exit::Passed);
    }
    Err(CommandError::Internal(format!(
        "the self-test failed, so verdicts prove nothing: {}",
        missed.join("; ")
    )))
}
