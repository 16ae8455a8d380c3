//! How a command ends: the outcomes with their exit codes, and the errors a user can act on.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use crate::vocabulary::named;

/// How a command ended. The exit codes are those of the whole `shardcheck` program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Everything that was asked for holds.
    Passed,
    /// Something that was asked for does not hold.
    Failed,
    /// The command was asked for something that makes no sense, or for a comparison that would mean nothing.
    Usage,
    /// Nothing failed, but the data cannot carry the claim.
    Inconclusive,
    /// No question was selected.
    NothingSelected,
    /// Requests failed or were never sent; the same command with `--resume` continues.
    RerunOutstanding,
    /// The program itself failed (a full disk, a bug).
    Internal,
}

impl Outcome {
    /// Every outcome, in the order of the exit codes.
    pub const ALL: [Outcome; 7] = [
        Outcome::Passed,
        Outcome::Failed,
        Outcome::Usage,
        Outcome::Inconclusive,
        Outcome::NothingSelected,
        Outcome::RerunOutstanding,
        Outcome::Internal,
    ];

    /// The name used in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Passed => "passed",
            Outcome::Failed => "failed",
            Outcome::Usage => "usage",
            Outcome::Inconclusive => "inconclusive",
            Outcome::NothingSelected => "nothing-selected",
            Outcome::RerunOutstanding => "rerun-outstanding",
            Outcome::Internal => "internal",
        }
    }

    /// The process exit code: 0, 1, 2, 3, 4, 5 or 70 (`EX_SOFTWARE` of `sysexits.h`).
    pub fn exit_code(self) -> u8 {
        match self {
            Outcome::Passed => 0,
            Outcome::Failed => 1,
            Outcome::Usage => 2,
            Outcome::Inconclusive => 3,
            Outcome::NothingSelected => 4,
            Outcome::RerunOutstanding => 5,
            Outcome::Internal => 70,
        }
    }

    /// The outcome of several checks together: a failure outranks an unfinished run, which outranks doubt.
    pub fn worst(outcomes: impl IntoIterator<Item = Outcome>) -> Outcome {
        let rank = |outcome: Outcome| match outcome {
            Outcome::Passed => 0,
            Outcome::Inconclusive => 1,
            Outcome::NothingSelected => 2,
            Outcome::RerunOutstanding => 3,
            Outcome::Failed => 4,
            Outcome::Usage => 5,
            Outcome::Internal => 6,
        };
        outcomes.into_iter().max_by_key(|outcome| rank(*outcome)).unwrap_or(Outcome::Passed)
    }
}

named!(Outcome, "outcome");

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        ExitCode::from(outcome.exit_code())
    }
}

/// What can go wrong before a verdict is possible. Every message says what to do next.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Wrong or contradictory arguments.
    #[error("{0}")]
    Usage(String),
    /// Two runs that must not be compared; each reason is one difference.
    #[error("these runs must not be compared:\n  - {}", .0.join("\n  - "))]
    Incomparable(Vec<String>),
    /// The selection holds no question.
    #[error("{0}")]
    NothingSelected(String),
    /// Data or run files that are missing or not what they should be.
    #[error("{0}")]
    Data(String),
    /// The server could not be used; nothing was lost and the command can be repeated.
    #[error("{0}")]
    Server(String),
    /// Reading or writing a file failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The operating system's answer.
        source: io::Error,
    },
}

impl Error {
    /// The outcome, hence the exit code, that this error stands for.
    pub fn outcome(&self) -> Outcome {
        match self {
            Error::Usage(_) | Error::Incomparable(_) | Error::Data(_) => Outcome::Usage,
            Error::NothingSelected(_) => Outcome::NothingSelected,
            Error::Server(_) => Outcome::RerunOutstanding,
            Error::Io { .. } => Outcome::Internal,
        }
    }

    /// An [`Error::Io`] that names the action and the path.
    pub(crate) fn io(action: &str, path: &Path, source: io::Error) -> Self {
        Error::Io { what: format!("cannot {action} {}", path.display()), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outcome_is_found_again_by_its_name_and_codes_are_distinct() {
        let mut codes = Vec::new();
        for outcome in Outcome::ALL {
            assert_eq!(outcome.name().parse::<Outcome>(), Ok(outcome));
            assert!(!codes.contains(&outcome.exit_code()));
            codes.push(outcome.exit_code());
        }
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 70]);
        assert!("fine".parse::<Outcome>().unwrap_err().contains("rerun-outstanding"));
    }

    #[test]
    fn a_failure_outranks_an_unfinished_run_and_doubt() {
        use Outcome::*;
        assert_eq!(Outcome::worst([Passed, Inconclusive, Passed]), Inconclusive);
        assert_eq!(Outcome::worst([Inconclusive, RerunOutstanding]), RerunOutstanding);
        assert_eq!(Outcome::worst([RerunOutstanding, Failed, Inconclusive]), Failed);
        assert_eq!(Outcome::worst([]), Passed);
    }
}
