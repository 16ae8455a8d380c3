//! Long texts for the terminal, made from the vocabularies themselves.

mod documents;
mod table;
mod vocabulary;

use std::fmt;
use std::str::FromStr;

use crate::nearest::nearest;

pub use documents::{case_json, expression_examples, filter_expressions, operations};
pub use table::Table;
pub use vocabulary::{axes, exit_codes, families, family_meaning, junit_mapping, probes, stages, statuses};

/// A text of `shardcheck explain`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topic {
    /// What the shell sees.
    ExitCodes,
    /// Verdicts.
    Statuses,
    /// What an engine is asked.
    Families,
    /// How inputs are drawn.
    Probes,
    /// Where a value can first go wrong.
    Stages,
    /// Operations and their tensors.
    Operations,
    /// The language of `-E`.
    FilterExpressions,
    /// A case as a file.
    CaseJson,
    /// How a failure is traced to a known fault.
    Diagnosis,
    /// How a failing case is made small.
    Shrink,
}

impl Topic {
    /// All topics, in the order of `shardcheck explain`.
    pub const ALL: [Self; 10] = [
        Self::ExitCodes,
        Self::Statuses,
        Self::Families,
        Self::Probes,
        Self::Stages,
        Self::Operations,
        Self::FilterExpressions,
        Self::CaseJson,
        Self::Diagnosis,
        Self::Shrink,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::ExitCodes => "exit-codes",
            Self::Statuses => "statuses",
            Self::Families => "families",
            Self::Probes => "probes",
            Self::Stages => "stages",
            Self::Operations => "operations",
            Self::FilterExpressions => "filter-expressions",
            Self::CaseJson => "case-json",
            Self::Diagnosis => "diagnosis",
            Self::Shrink => "shrink",
        }
    }

    /// One line for the list of topics.
    pub fn headline(self) -> &'static str {
        match self {
            Self::ExitCodes => "what the exit code says",
            Self::Statuses => "verdicts of a case, from best to worst",
            Self::Families => "what an engine is asked, in the order in which one is brought up",
            Self::Probes => "how queries, keys and values are drawn, and what each way exposes",
            Self::Stages => "where in the way of a step a value can first go wrong",
            Self::Operations => "operations of an engine and the tensors of each",
            Self::FilterExpressions => "the language of -E",
            Self::CaseJson => "a case as a file",
            Self::Diagnosis => "how a failure is traced to a known fault",
            Self::Shrink => "how a failing case is made small, and what small means",
        }
    }

    /// The text.
    pub fn text(self) -> String {
        match self {
            Self::ExitCodes => exit_codes().to_text(),
            Self::Statuses => statuses().to_text(),
            Self::Families => families().to_text(),
            Self::Probes => probes().to_text(),
            Self::Stages => stages().to_text(),
            Self::Operations => operations(),
            Self::FilterExpressions => filter_expressions(),
            Self::CaseJson => case_json(),
            Self::Diagnosis => include_str!("../../docs/diagnosis.md").to_owned(),
            Self::Shrink => include_str!("../../docs/shrink.md").to_owned(),
        }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Topic {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|topic| topic.name() == text).ok_or_else(|| {
            format!("unknown topic {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// Nothing is known under that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "nothing is known as {word:?}{}; give a topic ({}), a family, a class of faults, a public bug, or the id of a property, a fault or a case",
    nearest.as_ref().map_or_else(String::new, |name| format!("; did you mean {name:?}?")),
    Topic::ALL.map(Topic::name).join(", ")
)]
pub struct UnknownWord {
    /// What was asked for.
    pub word: String,
    /// The known name that looks most like it.
    pub nearest: Option<String>,
}

/// Text on an id, if there is one.
type LookUp<'a> = Box<dyn Fn(&str) -> Option<String> + 'a>;

/// Where the text on an id comes from.
struct Source<'a> {
    kind: &'static str,
    ids: Vec<String>,
    text: LookUp<'a>,
}

/// Explains topics, and ids of whatever sources it is given.
#[derive(Default)]
pub struct Explainer<'a> {
    sources: Vec<Source<'a>>,
}

impl<'a> Explainer<'a> {
    /// Explains topics only.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a source of ids, builder style: what they name ("property"), the ids for the index and for suggestions (none where
    /// there are too many), and what looks a text up. Earlier sources go first.
    #[must_use]
    pub fn with(
        mut self,
        kind: &'static str,
        ids: impl IntoIterator<Item = impl Into<String>>,
        text: impl Fn(&str) -> Option<String> + 'a,
    ) -> Self {
        self.sources.push(Source {
            kind,
            ids: ids.into_iter().map(Into::into).collect(),
            text: Box::new(text),
        });
        self
    }

    /// The text on a word; `topics` gives the index. A name that is known in several places gets the text of each.
    ///
    /// # Errors
    /// [`UnknownWord`], with what was most likely meant.
    pub fn explain(&self, word: &str) -> Result<String, UnknownWord> {
        if word == "topics" {
            return Ok(self.index());
        }
        let mut parts = Vec::new();
        if let Ok(topic) = word.parse::<Topic>() {
            parts.push(format!("{}\n\n{}", topic.headline(), topic.text()));
        }
        for source in &self.sources {
            if let Some(text) = (source.text)(word) {
                parts.push(format!("{} {word}\n\n{text}", source.kind));
            }
        }
        if parts.is_empty() {
            let mut known: Vec<&str> = Topic::ALL.map(Topic::name).to_vec();
            known.extend(self.sources.iter().flat_map(|source| source.ids.iter().map(String::as_str)));
            let nearest = nearest(word, known).map(str::to_owned);
            return Err(UnknownWord { word: word.to_owned(), nearest });
        }
        Ok(parts.join("\n\n"))
    }

    /// What can be explained.
    pub fn index(&self) -> String {
        let mut text = String::from("topics\n");
        for topic in Topic::ALL {
            text += &format!("  {:<20} {}\n", topic.name(), topic.headline());
        }
        for source in &self.sources {
            text += &format!("ids of a {}\n", source.kind);
            for id in &source.ids {
                text += &format!("  {id}\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests;
