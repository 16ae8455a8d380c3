//! Atoms of a filter expression: an axis, and what its value must be.

use std::fmt;

use super::Subject;
use super::axis::{Axis, ChoiceAxis, NumberAxis, TextAxis, TruthAxis, model};
use super::glob::glob_matches;

/// What a number must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberTest {
    /// `4`
    Is(u64),
    /// `!=4`
    Not(u64),
    /// `<4`
    Below(u64),
    /// `<=4`
    AtMost(u64),
    /// `>4`
    Above(u64),
    /// `>=4`
    AtLeast(u64),
    /// `2..=8`
    Between(u64, u64),
}

impl NumberTest {
    /// Whether the number is as it must be.
    pub fn holds(self, value: u64) -> bool {
        match self {
            Self::Is(n) => value == n,
            Self::Not(n) => value != n,
            Self::Below(n) => value < n,
            Self::AtMost(n) => value <= n,
            Self::Above(n) => value > n,
            Self::AtLeast(n) => value >= n,
            Self::Between(low, high) => (low..=high).contains(&value),
        }
    }
}

impl fmt::Display for NumberTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Is(n) => write!(f, "{n}"),
            Self::Not(n) => write!(f, "!={n}"),
            Self::Below(n) => write!(f, "<{n}"),
            Self::AtMost(n) => write!(f, "<={n}"),
            Self::Above(n) => write!(f, ">{n}"),
            Self::AtLeast(n) => write!(f, ">={n}"),
            Self::Between(low, high) => write!(f, "{low}..={high}"),
        }
    }
}

/// What a text must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextTest {
    /// `~part`
    Contains(String),
    /// `=whole`
    Is(String),
    /// `/glob/`: the whole text, `*` for any characters and `?` for one.
    Glob(String),
}

impl TextTest {
    /// Whether the text is as it must be.
    pub fn holds(&self, text: &str) -> bool {
        match self {
            Self::Contains(part) => text.contains(part.as_str()),
            Self::Is(whole) => text == whole,
            Self::Glob(pattern) => {
                glob_matches(&pattern.chars().collect::<Vec<_>>(), &text.chars().collect::<Vec<_>>())
            }
        }
    }
}

impl fmt::Display for TextTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Contains(text) => write!(f, "~{}", quoted(text)),
            Self::Is(text) => write!(f, "={}", quoted(text)),
            Self::Glob(text) => write!(f, "/{}/", quoted(text)),
        }
    }
}

/// The text itself where it can stand bare, else in quotes.
fn quoted(text: &str) -> String {
    let bare = |c: char| c.is_alphanumeric() || "._-+@=*?".contains(c);
    if !text.is_empty() && text.chars().all(bare) {
        return text.to_owned();
    }
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// One atom: an axis, and tests of which one must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Atom {
    /// `probe(cold | hot)`
    Choice(ChoiceAxis, Vec<&'static str>),
    /// `world(2 | >=8)`
    Number(NumberAxis, Vec<NumberTest>),
    /// `qrep(true)`
    Truth(TruthAxis, bool),
    /// `id(~part)`
    Text(TextAxis, Vec<TextTest>),
}

impl Atom {
    /// The axis.
    pub fn axis(&self) -> Axis {
        match self {
            Self::Choice(axis, _) => Axis::Choice(*axis),
            Self::Number(axis, _) => Axis::Number(*axis),
            Self::Truth(axis, _) => Axis::Truth(*axis),
            Self::Text(axis, _) => Axis::Text(*axis),
        }
    }

    /// Whether the atom holds; `None` for `prop(…)` while no property is in question. An axis that means nothing for the
    /// case does not hold.
    pub fn holds(&self, subject: &Subject<'_>) -> Option<bool> {
        Some(match self {
            Self::Choice(axis, names) => axis.of(subject.case).is_some_and(|value| names.contains(&value)),
            Self::Number(axis, tests) => {
                axis.of(subject.case).is_some_and(|value| tests.iter().any(|test| test.holds(value)))
            }
            Self::Truth(axis, wanted) => axis.of(subject.case) == Some(*wanted),
            Self::Text(axis, tests) => {
                let text = match axis {
                    TextAxis::Id => Some(subject.id),
                    TextAxis::Model => model(subject.case),
                    TextAxis::Prop => Some(subject.property?),
                };
                text.is_some_and(|text| tests.iter().any(|test| test.holds(text)))
            }
        })
    }
}

impl fmt::Display for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<String> = match self {
            Self::Choice(_, names) => names.iter().map(|name| (*name).to_owned()).collect(),
            Self::Number(_, tests) => tests.iter().map(NumberTest::to_string).collect(),
            Self::Truth(_, wanted) => vec![wanted.to_string()],
            Self::Text(_, tests) => tests.iter().map(TextTest::to_string).collect(),
        };
        write!(f, "{}({})", self.axis().name(), values.join(" | "))
    }
}
