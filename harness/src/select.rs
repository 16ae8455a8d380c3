//! Which cases a command is about.

mod atom;
mod axis;
mod choice;
mod expression;
mod glob;
mod number;
mod parser;
mod partition;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
use shardcheck_cases::{Case, CaseError};

use crate::nearest::nearest;

pub use atom::{Atom, NumberTest, TextTest};
pub use axis::{Axis, ChoiceAxis, NumberAxis, TextAxis, TruthAxis};
pub use expression::{Expression, Subject};
pub use parser::{ExpressionError, ExpressionErrorKind};
pub use partition::{Partition, PartitionError};

/// Options that select cases.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Selection")]
pub struct SelectArgs {
    /// Run cases whose id contains any of these texts, such as `verify/` or `e4m3fn`; `shardcheck list` prints the ids
    #[arg(value_name = "FILTER")]
    pub filters: Vec<String>,

    /// Take each FILTER as a whole id instead of a part of one
    #[arg(long, overrides_with = "exact")]
    pub exact: bool,

    /// Run cases that an expression over their axes selects: 'family(verify) & world(>=4) & not probe(cold | hot)'.
    /// Given more than once, any may select. `shardcheck explain filter-expressions` lists the axes
    #[arg(short = 'E', long = "filter-expr", value_name = "EXPR")]
    pub expressions: Vec<String>,

    /// Same as FILTER, spelt as in pytest. It takes a part of an id; expressions are given with -E
    #[arg(short = 'k', value_name = "TEXT")]
    pub substrings: Vec<String>,

    /// Leave out cases whose id contains this text; wins over every other option
    #[arg(long, value_name = "TEXT")]
    pub skip: Vec<String>,

    /// Run one part of N: `hash:1/8` to `hash:8/8`. A case stays in its part whatever cases come or go
    #[arg(long, value_name = "hash:K/N")]
    pub partition: Option<String>,

    /// Run the ids that stand in a file, one a line; blank lines and lines that start with `#` don't count
    #[arg(long, value_name = "FILE")]
    pub caselist: Option<PathBuf>,
}

/// A selection that can't be made, and what to do. All are usage errors.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// An expression that does not parse.
    #[error(transparent)]
    Expression(#[from] ExpressionError),
    /// A partition that does not parse.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// A list of cases that can't be read.
    #[error("failed to read the case list {}: {source}", path.display())]
    CaseList {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A list of cases without any: it would select nothing, which is never what is meant.
    #[error("the case list {} names no case: write one id a line, as `shardcheck list` prints them", path.display())]
    EmptyCaseList {
        /// The file.
        path: PathBuf,
    },
    /// An option with an empty text, which every id contains.
    #[error(
        "{option} is given an empty text, which is part of every id: leave it out, or give a part of an id"
    )]
    EmptyText {
        /// The option.
        option: &'static str,
    },
    /// Something that pytest's `-k` understands and this one does not.
    #[error(
        "-k {text:?} looks like an expression, but -k takes a part of an id: give expressions with -E, such as -E 'family(verify) & not probe(cold)'"
    )]
    NotASubstring {
        /// The text.
        text: String,
    },
    /// A whole id that no case has.
    #[error("no case has the id {id:?}{}", nearest.as_ref().map_or_else(|| "; `shardcheck list` prints the ids".to_owned(), |known| format!("; did you mean {known:?}?")))]
    UnknownId {
        /// The id.
        id: String,
        /// The known id that looks most like it.
        nearest: Option<String>,
    },
    /// A whole property id that no property has: it would select nothing, or leave nothing out.
    #[error("no property has the id {id:?}{}", nearest.as_ref().map_or_else(|| "; `shardcheck explain properties` lists them".to_owned(), |known| format!("; did you mean {known:?}?")))]
    UnknownProperty {
        /// The id.
        id: String,
        /// The known id that looks most like it.
        nearest: Option<String>,
    },
}

/// Which cases are selected: those that pass every part that is given.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selection {
    /// Texts of which an id must contain one, unless it is in `exact`.
    pub filters: Vec<String>,
    /// Whole ids. With `filters` empty, nothing else is selected.
    pub exact: BTreeSet<String>,
    /// Texts that an id must not contain.
    pub skip: Vec<String>,
    /// What must hold of the case.
    pub expression: Option<Expression>,
    /// Part that the id must fall into.
    pub partition: Option<Partition>,
}

impl SelectArgs {
    /// The selection that the options describe. Reads the case list.
    ///
    /// # Errors
    /// [`SelectError`]; all of them are usage errors.
    pub fn selection(&self) -> Result<Selection, SelectError> {
        for (option, texts) in [("FILTER", &self.filters), ("-k", &self.substrings), ("--skip", &self.skip)] {
            if texts.iter().any(|text| text.trim().is_empty()) {
                return Err(SelectError::EmptyText { option });
            }
        }
        let is_word = |text: &str| text.split_whitespace().any(|word| matches!(word, "and" | "or" | "not"));
        if let Some(text) = self.substrings.iter().find(|text| is_word(text)) {
            return Err(SelectError::NotASubstring { text: text.clone() });
        }
        let mut selection = Selection { skip: self.skip.clone(), ..Selection::default() };
        if self.exact {
            selection.exact.extend(self.filters.iter().cloned());
        } else {
            selection.filters.clone_from(&self.filters);
        }
        selection.filters.extend(self.substrings.iter().cloned());
        if let Some(path) = &self.caselist {
            let text = fs::read_to_string(path)
                .map_err(|source| SelectError::CaseList { path: path.clone(), source })?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
            let before = selection.exact.len();
            selection.exact.extend(lines.map(str::to_owned));
            if selection.exact.len() == before {
                return Err(SelectError::EmptyCaseList { path: path.clone() });
            }
        }
        for text in &self.expressions {
            let next = Expression::parse(text)?;
            selection.expression = Some(match selection.expression.take() {
                None => next,
                Some(before) => Expression::Or(Box::new(before), Box::new(next)),
            });
        }
        selection.partition = self.partition.as_deref().map(str::parse).transpose()?;
        Ok(selection)
    }
}

impl Selection {
    /// Whether the case is selected: it may still be that none of its properties is ([`Selection::matches_property`]).
    pub fn matches(&self, id: &str, case: &Case) -> bool {
        self.matches_id(id)
            && self.expression.as_ref().is_none_or(|e| e.may_match(&Subject { id, case, property: None }))
    }

    /// Whether one property of a selected case is to be judged: `prop(…)` in the expression decides.
    pub fn matches_property(&self, id: &str, case: &Case, property: &str) -> bool {
        let subject = Subject { id, case, property: Some(property) };
        self.expression.as_ref().is_none_or(|expression| expression.may_match(&subject))
    }

    /// Whether the case is selected and at least one of the given properties is judged on it.
    pub fn matches_any_of<'a>(
        &self,
        id: &str,
        case: &Case,
        properties: impl IntoIterator<Item = &'a str>,
    ) -> bool {
        self.matches(id, case)
            && properties.into_iter().any(|property| self.matches_property(id, case, property))
    }

    /// Whether everything but the expression lets the id through.
    pub fn matches_id(&self, id: &str) -> bool {
        let named = (self.filters.is_empty() && self.exact.is_empty())
            || self.exact.contains(id)
            || self.filters.iter().any(|text| id.contains(text.as_str()));
        named
            && !self.skip.iter().any(|text| id.contains(text.as_str()))
            && self.partition.is_none_or(|partition| partition.contains(id))
    }

    /// A stored selection in words; as JSON where another version wrote it.
    pub fn in_words(stored: &serde_json::Value) -> String {
        serde_json::from_value::<Self>(stored.clone()).map_or_else(|_| stored.to_string(), |s| s.to_string())
    }

    /// Whether nothing is left out.
    pub fn is_everything(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses whole ids that no case has: a typo in a case list must not make a run smaller.
    ///
    /// # Errors
    /// [`SelectError::UnknownId`] for the first of them.
    pub fn check_exact<'a>(&self, known: impl IntoIterator<Item = &'a str>) -> Result<(), SelectError> {
        if self.exact.is_empty() {
            return Ok(());
        }
        let known: BTreeSet<&str> = known.into_iter().collect();
        match self.exact.iter().find(|id| !known.contains(id.as_str())) {
            None => Ok(()),
            Some(id) => {
                // what reads as a case under another id is that one
                let read = match id.parse::<Case>() {
                    Ok(case) => Some(case.id()),
                    Err(CaseError::Spelling { right, .. }) => Some(right),
                    Err(_) => None,
                };
                let read = read.filter(|right| known.contains(right.as_str()));
                let nearest = || nearest(id, known.iter().copied()).map(str::to_owned);
                Err(SelectError::UnknownId { id: id.clone(), nearest: read.or_else(nearest) })
            }
        }
    }

    /// Refuses whole property ids in the expression that no property has.
    ///
    /// # Errors
    /// [`SelectError::UnknownProperty`] for the first of them.
    pub fn check_properties<'a>(&self, known: impl IntoIterator<Item = &'a str>) -> Result<(), SelectError> {
        let known: BTreeSet<&str> = known.into_iter().collect();
        let named = self.expression.as_ref().map(Expression::whole_properties).unwrap_or_default();
        match named.into_iter().find(|id| !known.contains(id)) {
            None => Ok(()),
            Some(id) => Err(SelectError::UnknownProperty {
                id: id.to_owned(),
                nearest: nearest(id, known.iter().copied()).map(str::to_owned),
            }),
        }
    }
}

impl fmt::Display for Selection {
    /// The selection in words, for "0 of 312 cases …".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        let quoted =
            |texts: &[String]| texts.iter().map(|t| format!("{t:?}")).collect::<Vec<_>>().join(" or ");
        if !self.filters.is_empty() {
            parts.push(format!("id contains {}", quoted(&self.filters)));
        }
        match self.exact.len() {
            0 => {}
            1..=3 => parts.push(format!("id is {}", quoted(&self.exact.iter().cloned().collect::<Vec<_>>()))),
            n => parts.push(format!("id is one of {n}")),
        }
        if !self.skip.is_empty() {
            parts.push(format!("id does not contain {}", quoted(&self.skip)));
        }
        if let Some(expression) = &self.expression {
            parts.push(expression.to_string());
        }
        if let Some(partition) = self.partition {
            parts.push(format!("in partition {partition}"));
        }
        if parts.is_empty() { f.write_str("all cases") } else { f.write_str(&parts.join(", ")) }
    }
}

#[cfg(test)]
mod tests;
