//! A filter expression over the axes of a case.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardcheck_cases::Case;

use super::{Atom, ExpressionError, TextAxis, TextTest, parser};

/// What an expression is asked about.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Case id.
    pub id: &'a str,
    /// The case.
    pub case: &'a Case,
    /// One of its properties, where one is in question.
    pub property: Option<&'a str>,
}

/// A filter expression, such as `family(verify) & world(>=4) & not probe(cold | hot)`.
///
/// `not` binds tighter than `and`, `and` tighter than `or`; both group from the left. Its text ([`fmt::Display`]) parses
/// back to the same value, and this is how it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Expression {
    /// One axis.
    Atom(Atom),
    /// The opposite.
    Not(Box<Expression>),
    /// Both.
    And(Box<Expression>, Box<Expression>),
    /// Either.
    Or(Box<Expression>, Box<Expression>),
}

impl Expression {
    /// Reads an expression.
    ///
    /// # Errors
    /// [`ExpressionError`], which shows the place and lists what could stand there.
    pub fn parse(text: &str) -> Result<Self, ExpressionError> {
        parser::parse(text)
    }

    /// Whether the expression holds, or may hold for some property while none is in question.
    pub fn may_match(&self, subject: &Subject<'_>) -> bool {
        self.evaluate(subject) != Some(false)
    }

    /// Three-valued logic of Kleene: `None` where the answer hangs on the property.
    fn evaluate(&self, subject: &Subject<'_>) -> Option<bool> {
        match self {
            Self::Atom(atom) => atom.holds(subject),
            Self::Not(inner) => inner.evaluate(subject).map(|value| !value),
            Self::And(left, right) => match (left.evaluate(subject), right.evaluate(subject)) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (Some(true), Some(true)) => Some(true),
                _ => None,
            },
            Self::Or(left, right) => match (left.evaluate(subject), right.evaluate(subject)) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), Some(false)) => Some(false),
                _ => None,
            },
        }
    }

    /// Property ids that `prop(…)` names as a whole, from left to right.
    pub fn whole_properties(&self) -> Vec<&str> {
        match self {
            Self::Atom(Atom::Text(TextAxis::Prop, tests)) => {
                let whole = tests.iter().filter_map(|test| match test {
                    TextTest::Is(id) => Some(id.as_str()),
                    _ => None,
                });
                whole.collect()
            }
            Self::Atom(_) => Vec::new(),
            Self::Not(inner) => inner.whole_properties(),
            Self::And(left, right) | Self::Or(left, right) => {
                [left.whole_properties(), right.whole_properties()].concat()
            }
        }
    }

    fn binding(&self) -> u8 {
        match self {
            Self::Or(..) => 0,
            Self::And(..) => 1,
            Self::Not(_) => 2,
            Self::Atom(_) => 3,
        }
    }

    /// Writes a part, in parentheses where it binds less tightly than `at_least`.
    fn write_part(&self, f: &mut fmt::Formatter<'_>, at_least: u8) -> fmt::Result {
        if self.binding() < at_least { write!(f, "({self})") } else { write!(f, "{self}") }
    }
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Atom(atom) => write!(f, "{atom}"),
            Self::Not(inner) => {
                f.write_str("not ")?;
                inner.write_part(f, 2)
            }
            Self::And(left, right) => {
                left.write_part(f, 1)?;
                f.write_str(" & ")?;
                right.write_part(f, 2)
            }
            Self::Or(left, right) => {
                left.write_part(f, 0)?;
                f.write_str(" | ")?;
                right.write_part(f, 1)
            }
        }
    }
}

impl FromStr for Expression {
    type Err = ExpressionError;

    fn from_str(text: &str) -> Result<Self, ExpressionError> {
        Self::parse(text)
    }
}

impl TryFrom<String> for Expression {
    type Error = ExpressionError;

    fn try_from(text: String) -> Result<Self, ExpressionError> {
        Self::parse(&text)
    }
}

impl From<Expression> for String {
    fn from(expression: Expression) -> Self {
        expression.to_string()
    }
}
