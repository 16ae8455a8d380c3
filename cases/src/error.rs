//! What is wrong with a case.

use crate::CASE_SCHEMA_VERSION;

/// A case that can't be used, and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CaseError {
    /// Not the JSON of a case.
    #[error("malformed case: {0}; `shardcheck explain case-json` shows the format")]
    Malformed(String),
    /// A name that is none of its axis; the text names the valid ones.
    #[error("case has an unknown value: {0}")]
    UnknownValue(String),
    /// Written by another version.
    #[error("case has schema version {found}, this program reads {CASE_SCHEMA_VERSION}: export it again")]
    Version {
        /// Version in the file.
        found: u64,
    },
    /// A value contradicts another.
    #[error("case is out of range: {0}")]
    OutOfRange(String),
    /// An id that reads as a case, and is not what this program calls it: each case has one id.
    #[error("case id {id:?} is spelt another way: write {right:?}")]
    Spelling {
        /// The id.
        id: String,
        /// The id of the case.
        right: String,
    },
    /// An id that does not parse.
    #[error("case id {id:?} does not parse: {reason}; `shardcheck list` prints ids")]
    Id {
        /// The id.
        id: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl CaseError {
    /// The same, of a step of a session.
    pub(crate) fn at_step(self, step: usize) -> Self {
        match self {
            Self::OutOfRange(reason) => Self::OutOfRange(format!("step {step}: {reason}")),
            other => other,
        }
    }
}
