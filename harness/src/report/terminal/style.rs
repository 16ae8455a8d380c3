//! Colours, progress, and which verdicts are shown.

use std::ffi::OsStr;
use std::str::FromStr;

use clap::ValueEnum;

use crate::status::Status;

/// How progress is shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Progress {
    /// A bar that is drawn over: a terminal.
    Bar,
    /// A line now and then: a log.
    #[default]
    Lines,
    /// Not at all.
    Off,
}

/// Colours and progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    /// Whether to colour.
    pub colour: bool,
    /// How progress is shown.
    pub progress: Progress,
}

impl Style {
    /// Style for a stream. Colours need a terminal, a `TERM` other than `dumb`, and no `NO_COLOR` (no-color.org: set and not
    /// empty); the bar needs the first two.
    pub fn detect(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> Self {
        let able = is_terminal && term.is_none_or(|term| term != "dumb");
        let colour = able && no_color.is_none_or(OsStr::is_empty);
        Self { colour, progress: if able { Progress::Bar } else { Progress::Lines } }
    }

    pub(super) fn status(self, status: Status) -> String {
        let code = match status {
            Status::Pass => "32",
            Status::Warn | Status::Inconclusive => "33",
            Status::ExpectedFail | Status::Unsupported | Status::Skipped => "2",
            _ => "31;1",
        };
        self.paint(code, status.name())
    }

    pub(super) fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub(super) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// Verdicts that get a line or a block of their own while the run goes on. Each level shows what the one before shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum StatusLevel {
    /// Failures
    #[default]
    Fail,
    /// Also warnings, expected failures and cases about which nothing could be decided
    Warn,
    /// Also skipped and unsupported cases
    Skip,
    /// Also passed cases
    Pass,
    /// Everything, property by property
    All,
}

impl StatusLevel {
    /// All levels, from the quietest.
    pub const ALL: [Self; 5] = [Self::Fail, Self::Warn, Self::Skip, Self::Pass, Self::All];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fail => "fail",
            Self::Warn => "warn",
            Self::Skip => "skip",
            Self::Pass => "pass",
            Self::All => "all",
        }
    }

    /// Whether the verdict is shown.
    pub fn shows(self, status: Status) -> bool {
        let needed = match status {
            Status::Pass => Self::Pass,
            Status::Warn | Status::ExpectedFail | Status::Inconclusive => Self::Warn,
            Status::Unsupported | Status::Skipped => Self::Skip,
            _ => Self::Fail,
        };
        self >= needed
    }
}

impl FromStr for StatusLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|level| level.name() == text).ok_or_else(|| {
            format!("unknown status level {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_needs_a_terminal_that_can_and_a_user_who_does_not_object() {
        let detect = |terminal, no_color: Option<&str>, term: Option<&str>| {
            Style::detect(terminal, no_color.map(OsStr::new), term.map(OsStr::new))
        };
        assert_eq!(detect(true, None, Some("xterm")), Style { colour: true, progress: Progress::Bar });
        assert_eq!(detect(true, Some("1"), Some("xterm")), Style { colour: false, progress: Progress::Bar });
        assert!(detect(true, Some(""), None).colour, "an empty NO_COLOR does not count");
        assert_eq!(detect(true, None, Some("dumb")), Style { colour: false, progress: Progress::Lines });
        assert_eq!(detect(false, None, Some("xterm")), Style { colour: false, progress: Progress::Lines });
    }

    #[test]
    fn each_level_shows_what_the_one_before_shows() {
        for status in Status::ALL {
            for pair in StatusLevel::ALL.windows(2) {
                assert!(pair[1].shows(status) || !pair[0].shows(status), "{status} at {pair:?}");
            }
            assert_eq!(StatusLevel::Fail.shows(status), status.is_failure(), "{status}");
            assert!(StatusLevel::All.shows(status));
        }
        assert!(
            StatusLevel::Warn.shows(Status::Inconclusive) && !StatusLevel::Warn.shows(Status::Unsupported)
        );
    }

    #[test]
    fn the_names_of_the_levels_are_those_of_the_command_line() {
        for level in StatusLevel::ALL {
            assert_eq!(level.to_possible_value().unwrap().get_name(), level.name());
            assert_eq!(level.name().parse::<StatusLevel>().unwrap(), level);
        }
        assert!("loud".parse::<StatusLevel>().unwrap_err().contains("fail, warn, skip, pass, all"));
    }
}
