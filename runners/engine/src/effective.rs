//! The effective path: what really ran, as the engine reports it with each reply.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What took effect in one step, as sorted key/value pairs.
///
/// Keys in use: `comm_backend`, `lane_order`, `query_replication`, `project_before_merge`, `route` (`decode`, `verify`, `draft`,
/// `context`), `kernel_heads` (width after padding), `chunks`, `pages`. An engine may add its own. Two runs that were configured
/// differently but report the same path prove nothing about that difference: the comparison is Inconclusive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EffectivePath(BTreeMap<String, String>);

impl EffectivePath {
    /// Nothing reported.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fact, builder style.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Self {
        self.0.insert(key.to_owned(), value.to_string());
        self
    }

    /// The value of a fact.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Facts, ordered by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

impl fmt::Display for EffectivePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (key, value)) in self.0.iter().enumerate() {
            write!(f, "{}{key}={value}", if index == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}
