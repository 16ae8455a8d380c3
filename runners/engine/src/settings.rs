//! Launch settings and the answer of an engine's configuration rules to them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Launch settings as a user gives them: names as in the engines' configuration, JSON values uncoerced.
///
/// Values are kept raw because coercion is part of what is tested: `"8"` becomes 8, `0` becomes false, and the string
/// `"false"` becomes **true** in Python.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Settings(pub BTreeMap<String, Value>);

impl Settings {
    /// No settings: every default holds.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a setting, builder style.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    /// The raw value of a setting.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// An integer setting, numeric strings coerced; `default` when absent or not numeric.
    pub fn integer(&self, name: &str, default: i64) -> i64 {
        match self.0.get(name) {
            Some(Value::Number(n)) => n.as_i64().unwrap_or(default),
            Some(Value::String(s)) => s.trim().parse().unwrap_or(default),
            Some(Value::Bool(b)) => i64::from(*b),
            _ => default,
        }
    }

    /// A truth setting, coerced as Python's `bool()` does: any non-empty string is true.
    pub fn truth(&self, name: &str, default: bool) -> bool {
        match self.0.get(name) {
            Some(Value::Bool(b)) => *b,
            Some(Value::Number(n)) => n.as_f64() != Some(0.0),
            Some(Value::String(s)) => !s.is_empty(),
            Some(Value::Null) => false,
            Some(Value::Array(a)) => !a.is_empty(),
            Some(Value::Object(o)) => !o.is_empty(),
            None => default,
        }
    }

    /// A text setting; `default` when absent or not a string.
    pub fn text<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.0.get(name).and_then(Value::as_str).unwrap_or(default)
    }
}

/// Whose rules are asked for. Engines and versions differ, so rules are data with an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleSetName {
    /// What this project's own engine accepts: any W ≥ 1.
    Own,
    /// ATOM as its context-parallel guide of August 2026 describes it.
    Atom,
    /// ATOM later: query replication under speculation is decided by layer.
    AtomNext,
    /// vLLM.
    Vllm,
    /// vLLM with pull request 48392: caches of a draft whose KV heads are replicated over the group.
    VllmNext,
    /// vLLM on Ascend.
    VllmAscend,
}

impl RuleSetName {
    /// All rule sets, in a stable order.
    pub const ALL: [Self; 6] =
        [Self::Own, Self::Atom, Self::AtomNext, Self::Vllm, Self::VllmNext, Self::VllmAscend];

    /// Name as it stands in case files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Atom => "atom",
            Self::AtomNext => "atom_next",
            Self::Vllm => "vllm",
            Self::VllmNext => "vllm_next",
            Self::VllmAscend => "vllm_ascend",
        }
    }
}

impl fmt::Display for RuleSetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for RuleSetName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|name| name.name() == text).ok_or_else(|| {
            format!("unknown rule set {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// Whether settings are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The engine starts.
    Accept,
    /// The engine refuses to start.
    Reject,
}

/// A feature that was asked for and switched off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disabled {
    /// Setting that no longer holds.
    pub feature: String,
    /// Why, as the engine says it.
    pub reason: String,
}

/// What an engine says to settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Validation {
    /// Taken or refused.
    pub decision: Decision,
    /// Why, when refused; empty otherwise.
    pub reason: String,
    /// Features that were switched off, when taken.
    pub disabled: Vec<Disabled>,
    /// Settings that hold, but that the engine warns of, when taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
}

/// A setting that holds with a caution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Setting that the user had better change.
    pub setting: String,
    /// Why, as the engine says it.
    pub reason: String,
}

impl Validation {
    /// Taken as asked.
    pub fn accept() -> Self {
        Self { decision: Decision::Accept, reason: String::new(), disabled: Vec::new(), warnings: Vec::new() }
    }

    /// Refused.
    pub fn reject(reason: impl Into<String>) -> Self {
        Self { decision: Decision::Reject, reason: reason.into(), ..Self::accept() }
    }

    /// Adds a setting that the engine warns of, builder style.
    #[must_use]
    pub fn warning(mut self, setting: &str, reason: impl Into<String>) -> Self {
        self.warnings.push(Warning { setting: setting.to_owned(), reason: reason.into() });
        self
    }

    /// Adds a feature that was switched off, builder style.
    #[must_use]
    pub fn disabling(mut self, feature: &str, reason: impl Into<String>) -> Self {
        self.disabled.push(Disabled { feature: feature.to_owned(), reason: reason.into() });
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_coerced_as_python_would_the_trap_included() {
        let settings = Settings::new().with("n", "8").with("off", 0).with("trap", "false").with("none", "");
        assert_eq!(settings.integer("n", 1), 8);
        assert!(!settings.truth("off", true));
        assert!(settings.truth("trap", false), "the string \"false\" is truthy");
        assert!(!settings.truth("none", true));
        assert!(settings.truth("absent", true));
    }

    #[test]
    fn rule_set_names_parse_back() {
        for name in RuleSetName::ALL {
            assert_eq!(name.name().parse::<RuleSetName>().unwrap(), name);
        }
        assert!("atomic".parse::<RuleSetName>().unwrap_err().contains("atom_next"));
    }
}
