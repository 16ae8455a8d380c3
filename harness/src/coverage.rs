//! What the documents say that this program was made for, and what checks each statement.
//!
//! The text lies in `coverage.toml`. Every property of the registry has to stand beside a statement: one that nobody asks for is a
//! check without a purpose.

use std::sync::LazyLock;

use serde::Deserialize;

use crate::bugs::Later;

/// Where statements come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
pub enum Document {
    /// ATOM's guide on prefill and decode context parallelism.
    #[serde(rename = "atom-guide")]
    AtomGuide,
    /// vLLM's change for causal verification of several tokens.
    #[serde(rename = "vllm#51705")]
    Vllm51705,
    /// vLLM's change for Kimi-K3 with DSpark.
    #[serde(rename = "vllm#52188")]
    Vllm52188,
    /// TensorCast's proposal on modelling context parallelism.
    #[serde(rename = "tensorcast-rfc")]
    TensorcastRfc,
    /// The code of published engines.
    #[serde(rename = "engines")]
    Engines,
}

impl Document {
    /// All of them, in the order of the page.
    pub const ALL: [Self; 5] =
        [Self::AtomGuide, Self::Vllm51705, Self::Vllm52188, Self::TensorcastRfc, Self::Engines];

    /// What a heading calls it.
    pub fn title(self) -> &'static str {
        match self {
            Self::AtomGuide => "ATOM, guide on context parallelism",
            Self::Vllm51705 => "vLLM 51705, causal verification of several tokens",
            Self::Vllm52188 => "vLLM 52188, Kimi-K3 with DSpark",
            Self::TensorcastRfc => "TensorCast, proposal on modelling context parallelism",
            Self::Engines => "what the documents take for granted, from the code of the engines",
        }
    }
}

/// A statement of a document.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// Where it stands.
    pub document: Document,
    /// Where in there.
    pub section: String,
    /// What it says, in one clause.
    pub says: String,
    /// Ids of the properties that fail when it does not hold.
    #[serde(default)]
    pub properties: Vec<String>,
    /// Another part of the program that checks it.
    pub elsewhere: Option<String>,
    /// What must exist before the rest of it can be checked.
    pub waits_for: Option<Later>,
    /// What is missing, or why it can't be checked.
    pub why: Option<String>,
}

/// All statements, by document.
///
/// # Panics
/// When the list does not read: it is part of the program.
pub fn statements() -> &'static [Statement] {
    #[derive(Deserialize)]
    struct List {
        statement: Vec<Statement>,
    }
    static STATEMENTS: LazyLock<Vec<Statement>> = LazyLock::new(|| {
        toml::from_str::<List>(include_str!("coverage.toml"))
            .unwrap_or_else(|error| panic!("{error}"))
            .statement
    });
    &STATEMENTS
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::properties;

    #[test]
    fn every_property_stands_beside_a_statement_and_every_name_is_a_property() {
        let named: BTreeSet<&str> =
            statements().iter().flat_map(|statement| &statement.properties).map(String::as_str).collect();
        let known: BTreeSet<&str> = properties::all().map(|property| property.id).collect();
        let forgotten: Vec<_> = known.difference(&named).collect();
        let unknown: Vec<_> = named.difference(&known).collect();
        assert!(forgotten.is_empty(), "coverage.toml has no statement for {forgotten:?}");
        assert!(unknown.is_empty(), "coverage.toml names {unknown:?}, which are no properties");
    }

    #[test]
    fn a_statement_is_checked_or_says_why_it_is_not() {
        for statement in statements() {
            let checked = !statement.properties.is_empty() || statement.elsewhere.is_some();
            assert!(checked || statement.why.is_some(), "{}", statement.says);
            assert!(statement.waits_for.is_none() || statement.why.is_some(), "{}", statement.says);
            assert!(statement.says.len() > 20 && !statement.says.ends_with('.'), "{}", statement.says);
        }
    }

    #[test]
    fn every_document_has_statements_and_they_stand_together() {
        let mut order: Vec<Document> = statements().iter().map(|statement| statement.document).collect();
        order.dedup();
        assert_eq!(order, Document::ALL);
    }
}
