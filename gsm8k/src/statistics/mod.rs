//! The statistics of paired and single runs: exact tests, intervals, power. No data, no files, only formulas.

pub mod binomial;
pub mod design;
pub mod mcnemar;
pub mod normal;
pub mod paired;

use serde::{Deserialize, Serialize};

use crate::outcome::Outcome;
use crate::vocabulary::named;

/// What a comparison can conclude.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// B is worse than A: chance alone explains the difference with probability at most α.
    Worse,
    /// B is not worse than A by the stated margin or more, with error probability at most α.
    NotWorse,
    /// The data cannot tell.
    Inconclusive,
}

impl Verdict {
    /// Every verdict.
    pub const ALL: [Verdict; 3] = [Verdict::Worse, Verdict::NotWorse, Verdict::Inconclusive];

    /// The name used in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Worse => "worse",
            Verdict::NotWorse => "not-worse",
            Verdict::Inconclusive => "inconclusive",
        }
    }

    /// How a command that reached this verdict ends.
    pub fn outcome(self) -> Outcome {
        match self {
            Verdict::Worse => Outcome::Failed,
            Verdict::NotWorse => Outcome::Passed,
            Verdict::Inconclusive => Outcome::Inconclusive,
        }
    }
}

named!(Verdict, "verdict");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_read_back_and_end_commands_differently() {
        for verdict in Verdict::ALL {
            assert_eq!(verdict.name().parse::<Verdict>(), Ok(verdict));
        }
        let codes: Vec<u8> = Verdict::ALL.iter().map(|verdict| verdict.outcome().exit_code()).collect();
        assert_eq!(codes, [1, 0, 3]);
    }
}
