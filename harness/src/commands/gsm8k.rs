//! `gsm8k` and `logprobs`: their outcomes in the exit codes of the whole program.

use shardcheck_gsm8k::{Error, Outcome};

use crate::cli::CommandError;
use crate::status::Exit;

/// Ends `gsm8k` or `logprobs`.
///
/// # Errors
/// [`CommandError`] of the kind that has the outcome's exit code.
pub fn run(result: Result<Outcome, Error>) -> Result<Exit, CommandError> {
    match result {
        Ok(outcome) => Ok(exit(outcome)),
        Err(error) => Err(match error.outcome() {
            Outcome::Internal => CommandError::Internal(error.to_string()),
            Outcome::NothingSelected => CommandError::NothingSelected(error.to_string()),
            _ => CommandError::Usage(error.to_string()),
        }),
    }
}

fn exit(outcome: Outcome) -> Exit {
    match outcome {
        Outcome::Passed => Exit::Passed,
        Outcome::Failed => Exit::Failed,
        Outcome::Usage => Exit::Usage,
        Outcome::Inconclusive => Exit::Inconclusive,
        Outcome::NothingSelected => Exit::NothingSelected,
        Outcome::RerunOutstanding => Exit::RerunOutstanding,
        Outcome::Internal => Exit::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_halves_of_the_program_agree_on_every_exit_code() {
        for outcome in Outcome::ALL {
            assert_eq!(exit(outcome).code(), outcome.exit_code(), "{}", outcome.name());
        }
    }
}
