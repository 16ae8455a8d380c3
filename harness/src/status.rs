//! Verdicts and exit codes: two closed sets, documented from here.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Verdict of one case, or of one property of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Everything that was asked holds.
    Pass,
    /// Holds, but past a soft line that is worth a look.
    Warn,
    /// Fails, as the claims file of the engine says it must.
    ExpectedFail,
    /// The engine says that it does not do this.
    Unsupported,
    /// Not run, for a stated reason.
    Skipped,
    /// Nothing could be decided: a bound that cannot be derived, or a comparison of two runs that took the same path.
    Inconclusive,
    /// Passes although the claims file says that it must fail.
    UnexpectedPass,
    /// Does not hold.
    Fail,
    /// The engine ended or panicked.
    Crash,
    /// The engine did not answer in time.
    Timeout,
    /// The device went away.
    DeviceLost,
    /// The harness itself is at fault.
    HarnessError,
}

impl Status {
    /// All verdicts, from best to worst: the verdict of a whole is the worst of its parts.
    pub const ALL: [Self; 12] = [
        Self::Pass,
        Self::Warn,
        Self::ExpectedFail,
        Self::Unsupported,
        Self::Skipped,
        Self::Inconclusive,
        Self::UnexpectedPass,
        Self::Fail,
        Self::Crash,
        Self::Timeout,
        Self::DeviceLost,
        Self::HarnessError,
    ];

    /// Name as it stands in results and on the terminal.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Warn => "warn",
            Self::ExpectedFail => "expected_fail",
            Self::Unsupported => "unsupported",
            Self::Skipped => "skipped",
            Self::Inconclusive => "inconclusive",
            Self::UnexpectedPass => "unexpected_pass",
            Self::Fail => "fail",
            Self::Crash => "crash",
            Self::Timeout => "timeout",
            Self::DeviceLost => "device_lost",
            Self::HarnessError => "harness_error",
        }
    }

    /// One sentence for `explain` and the docs.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Pass => "everything that was asked holds",
            Self::Warn => "holds, but past a soft line that is worth a look",
            Self::ExpectedFail => "fails, as the engine's claims file says it must",
            Self::Unsupported => "the engine says that it does not do this",
            Self::Skipped => "not run, for the stated reason",
            Self::Inconclusive => {
                "nothing could be decided: no bound can be derived, or two runs to compare took the same path"
            }
            Self::UnexpectedPass => "passes although the claims file says that it must fail; fails the run",
            Self::Fail => "does not hold",
            Self::Crash => "the engine ended or panicked",
            Self::Timeout => {
                "the engine did not answer in time; the waiting rank is named where it can be told"
            }
            Self::DeviceLost => "the device went away",
            Self::HarnessError => "the harness itself is at fault: please report it",
        }
    }

    /// Whether a run with this verdict has failed.
    pub fn is_failure(self) -> bool {
        self >= Self::UnexpectedPass
    }

    /// Whether something was really decided about the engine.
    pub fn is_judged(self) -> bool {
        matches!(self, Self::Pass | Self::Warn | Self::ExpectedFail) || self.is_failure()
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Status {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|status| status.name() == text).ok_or_else(|| {
            format!("unknown status {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// Exit code of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// Everything passed.
    Passed,
    /// Something failed.
    Failed,
    /// The command line, or a file that it names, is wrong.
    Usage,
    /// No failure, but nothing was decided for at least one case.
    Inconclusive,
    /// The selection is empty, or there is no failure to replay, shrink or diagnose.
    NothingSelected,
    /// A resumed or partitioned run still lacks cases.
    RerunOutstanding,
    /// The engine fails without any fault, so mutants prove nothing.
    BaselineFailed,
    /// A fault was not killed, or not by the property that names it.
    MutantsSurvived,
    /// A submission bundle is incomplete or altered.
    SubmissionInvalid,
    /// The engine needs a device that is not there.
    NoDevice,
    /// The engine under test could not be started, or its adapter was refused.
    EngineNotStarted,
    /// The harness itself is at fault.
    Internal,
    /// Kept for adapters: they cannot run on this machine.
    AdapterUnsupported,
}

impl Exit {
    /// All exit codes, ascending.
    pub const ALL: [Self; 13] = [
        Self::Passed,
        Self::Failed,
        Self::Usage,
        Self::Inconclusive,
        Self::NothingSelected,
        Self::RerunOutstanding,
        Self::BaselineFailed,
        Self::MutantsSurvived,
        Self::SubmissionInvalid,
        Self::NoDevice,
        Self::EngineNotStarted,
        Self::Internal,
        Self::AdapterUnsupported,
    ];

    /// The number that the shell sees.
    pub fn code(self) -> u8 {
        match self {
            Self::Passed => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Inconclusive => 3,
            Self::NothingSelected => 4,
            Self::RerunOutstanding => 5,
            Self::BaselineFailed => 6,
            Self::MutantsSurvived => 7,
            Self::SubmissionInvalid => 8,
            Self::NoDevice => 9,
            Self::EngineNotStarted => 10,
            Self::Internal => 70,
            Self::AdapterUnsupported => 89,
        }
    }

    /// One sentence for `explain exit-codes` and the docs.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Passed => "everything passed",
            Self::Failed => "something failed",
            Self::Usage => "the command line, or a file that it names, is wrong",
            Self::Inconclusive => "no failure, but nothing could be decided for at least one case",
            Self::NothingSelected => {
                "the selection is empty, or there is no failure to replay, shrink or diagnose"
            }
            Self::RerunOutstanding => "a resumed or partitioned run still lacks cases",
            Self::BaselineFailed => "the engine fails without any fault, so mutants prove nothing",
            Self::MutantsSurvived => "a fault was not killed, or not by the property that names it",
            Self::SubmissionInvalid => "a submission bundle is incomplete or altered",
            Self::NoDevice => "the engine needs a device that is not there",
            Self::EngineNotStarted => {
                "the engine under test could not be started, or its adapter was refused"
            }
            Self::Internal => "the harness itself is at fault",
            Self::AdapterUnsupported => "kept for adapters: they can't run on this machine",
        }
    }

    /// Exit code of a run whose cases had these verdicts.
    pub fn of(statuses: impl IntoIterator<Item = Status>) -> Self {
        let worst = statuses.into_iter().max();
        match worst {
            None => Self::NothingSelected,
            Some(Status::HarnessError) => Self::Internal,
            Some(status) if status.is_failure() => Self::Failed,
            Some(Status::Inconclusive) => Self::Inconclusive,
            Some(_) => Self::Passed,
        }
    }

    /// The same, where nothing but judged cases can be a pass.
    pub fn of_judged(statuses: &[Status]) -> Self {
        match Self::of(statuses.iter().copied()) {
            Self::Passed if !statuses.iter().any(|status| status.is_judged()) => Self::Inconclusive,
            exit => exit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_verdict_decides_the_exit_code() {
        assert_eq!(Exit::of([Status::Pass, Status::Fail, Status::Inconclusive]), Exit::Failed);
        assert_eq!(Exit::of([Status::Pass, Status::Inconclusive]), Exit::Inconclusive);
        assert_eq!(Exit::of([Status::Pass, Status::Unsupported]), Exit::Passed);
        assert_eq!(Exit::of([Status::UnexpectedPass]), Exit::Failed);
        assert_eq!(Exit::of([Status::Timeout, Status::HarnessError]), Exit::Internal);
        assert_eq!(Exit::of([]), Exit::NothingSelected);
        assert_eq!(Exit::of([Status::Unsupported]), Exit::Passed);
        assert_eq!(Exit::of_judged(&[Status::Unsupported, Status::Skipped]), Exit::Inconclusive);
        assert_eq!(Exit::of_judged(&[Status::Unsupported, Status::Warn]), Exit::Passed);
    }

    #[test]
    fn every_failing_verdict_fails_and_no_other() {
        let failing: Vec<_> = Status::ALL.into_iter().filter(|s| s.is_failure()).collect();
        assert_eq!(
            failing,
            [
                Status::UnexpectedPass,
                Status::Fail,
                Status::Crash,
                Status::Timeout,
                Status::DeviceLost,
                Status::HarnessError
            ]
        );
    }

    #[test]
    fn an_unsupported_or_skipped_case_counts_as_not_judged() {
        assert!(!Status::Unsupported.is_judged() && !Status::Skipped.is_judged());
        assert!(!Status::Inconclusive.is_judged());
        assert!(Status::Pass.is_judged() && Status::Crash.is_judged());
    }

    #[test]
    fn exit_codes_are_distinct() {
        let mut codes = Exit::ALL.map(Exit::code).to_vec();
        codes.dedup();
        assert_eq!(codes.len(), Exit::ALL.len());
    }
}
