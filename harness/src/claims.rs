//! What is known of an engine's releases: findings that they must show, and what they claim to support.
//!
//! A file holds entries for ranges of versions. For the version under test they become [`Claims`]: a failing check that an entry
//! covers is an expected failure, and at the end of a run every entry gets a verdict of its own.

mod conclude;
mod version;

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use shardcheck_cases::{Case, Family};
use shardcheck_engine::Profile;

use crate::event::{CaseResult, Check};
use crate::finding::Finding;
use crate::nearest::nearest;
use crate::properties;
use crate::select::{Expression, Subject, TextTest};
use crate::status::Status;

pub use conclude::{EntryKind, EntryVerdict};
pub use version::{Version, VersionError, Versions};

/// Version of claims files. A reader refuses a version that it does not know.
pub const CLAIMS_SCHEMA_VERSION: u32 = 1;

/// Claims files that the program holds, by the engine's name in its profile.
const EMBEDDED: [(&str, &str); 5] = [
    ("vllm", include_str!("../../cases/engines/vllm.toml")),
    ("vllm-ascend", include_str!("../../cases/engines/vllm-ascend.toml")),
    ("sglang", include_str!("../../cases/engines/sglang.toml")),
    ("flashinfer", include_str!("../../cases/engines/flashinfer.toml")),
    ("ring-flash-attn", include_str!("../../cases/engines/ring-flash-attn.toml")),
];

/// A finding that versions of an engine must show.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownFinding {
    /// Name of the entry, once in its file.
    pub id: String,
    /// Properties that fail: whole ids, or patterns with `*`.
    pub properties: Vec<String>,
    /// Cases that show it: an expression as of `-E`. Absent: all that the properties are judged on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cases: Option<Expression>,
    /// Versions that have it.
    pub versions: Versions,
    /// Why it fails, in a sentence.
    pub reason: String,
    /// Public reference: an issue, a pull request, or how it was seen.
    pub reference: String,
    /// Text that the headline, the worst value or the engine's words must contain, letter case aside, such as `nan`: something else that fails
    /// there is not what was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<String>,
    /// Whether every matching case must show it. Otherwise one of those judged in a run must.
    #[serde(default, skip_serializing_if = "is_false")]
    pub every: bool,
    /// Judged cases from which on it counts that none shows it: of a finding that some inputs hide.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub at_least: usize,
}

/// What versions of an engine claim to support: it must be judged, not just unsupported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SupportClaim {
    /// Name of the entry, once in its file.
    pub id: String,
    /// Families whose cases are judged, whatever the property.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub families: Vec<Family>,
    /// Properties that are judged: whole ids, or patterns with `*`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub properties: Vec<String>,
    /// Which cases it is about: an expression as of `-E`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cases: Option<Expression>,
    /// Versions that claim it.
    pub versions: Versions,
    /// Cases that must be judged, or all that match where a selection holds fewer.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub at_least: usize,
}

/// The content of a claims file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimsFile {
    /// [`CLAIMS_SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Engine name, as its profile has it.
    pub engine: String,
    /// Findings that are expected.
    #[serde(default, rename = "finding")]
    pub findings: Vec<KnownFinding>,
    /// What is claimed.
    #[serde(default, rename = "claim")]
    pub supports: Vec<SupportClaim>,
}

/// The entries that hold for one version of an engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Claims {
    /// Engine name.
    pub engine: String,
    /// Version under test.
    pub version: String,
    /// Findings that it must show.
    pub findings: Vec<KnownFinding>,
    /// What it claims.
    pub supports: Vec<SupportClaim>,
}

/// Which entry covers a failing check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Name of the entry.
    pub entry: String,
    /// Why it fails.
    pub reason: String,
    /// Public reference.
    pub reference: String,
}

/// Claims that can't be used, and what to do. All are usage errors.
#[derive(Debug, thiserror::Error)]
pub enum ClaimsError {
    /// The file can't be read.
    #[error("failed to read the claims {file}: {source}")]
    NotReadable {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file does not hold what it should.
    #[error("the claims {file} do not read: {reason}; `docs/claims.md` says what a file holds")]
    Malformed {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// Another engine's claims.
    #[error(
        "the claims {file} are about the engine {claimed:?}, and the engine under test is {engine:?}: give its own, or --no-claims"
    )]
    OtherEngine {
        /// The file.
        file: String,
        /// Engine of the file.
        claimed: String,
        /// Engine of the profile.
        engine: String,
    },
    /// An engine whose version does not compare.
    #[error(
        "claims can't be looked up for {engine}: {source}; make its profile say a version, or give --no-claims"
    )]
    EngineVersion {
        /// Engine of the profile.
        engine: String,
        /// What is wrong with its version.
        source: VersionError,
    },
}

impl ClaimsFile {
    /// Reads a file's text. `file` names it in errors.
    ///
    /// # Errors
    /// [`ClaimsError::Malformed`]: syntax, unknown fields, another schema version, an entry that repeats a name, an id that no property has, an
    /// empty reason.
    pub fn parse(text: &str, file: &str) -> Result<Self, ClaimsError> {
        let malformed = |reason: String| ClaimsError::Malformed { file: file.to_owned(), reason };
        let claims: Self =
            toml::from_str(text).map_err(|error| malformed(error.to_string().trim_end().to_owned()))?;
        claims.check().map_err(malformed)?;
        Ok(claims)
    }

    /// The file of that path.
    ///
    /// # Errors
    /// [`ClaimsError::NotReadable`], and as [`Self::parse`].
    pub fn read(path: &Path) -> Result<Self, ClaimsError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ClaimsError::NotReadable { file: file.clone(), source })?;
        Self::parse(&text, &file)
    }

    /// The file that the program holds for an engine, by the name in its profile.
    ///
    /// # Panics
    /// When an embedded file does not read: a test reads them all.
    pub fn embedded(engine: &str) -> Option<Self> {
        let (name, text) = EMBEDDED.into_iter().find(|(name, _)| *name == engine)?;
        Some(Self::parse(text, name).unwrap_or_else(|error| panic!("{error}")))
    }

    /// The entries that hold for the engine under test.
    ///
    /// # Errors
    /// [`ClaimsError::OtherEngine`]; [`ClaimsError::EngineVersion`].
    pub fn resolve(self, profile: &Profile, file: &str) -> Result<Claims, ClaimsError> {
        if profile.engine != self.engine {
            let engine = profile.engine.clone();
            return Err(ClaimsError::OtherEngine { file: file.to_owned(), claimed: self.engine, engine });
        }
        let version: Version = profile
            .version
            .parse()
            .map_err(|source| ClaimsError::EngineVersion { engine: profile.engine.clone(), source })?;
        Ok(Claims {
            engine: self.engine,
            version: profile.version.clone(),
            findings: self.findings.into_iter().filter(|entry| entry.versions.contains(&version)).collect(),
            supports: self.supports.into_iter().filter(|entry| entry.versions.contains(&version)).collect(),
        })
    }

    fn check(&self) -> Result<(), String> {
        if self.schema_version != CLAIMS_SCHEMA_VERSION {
            let found = self.schema_version;
            return Err(format!("schema version {found}, this program reads {CLAIMS_SCHEMA_VERSION}"));
        }
        let mut ids = BTreeSet::new();
        for id in self.findings.iter().map(|e| &e.id).chain(self.supports.iter().map(|e| &e.id)) {
            if id.trim().is_empty() {
                return Err("an entry has an empty id: give it a name".to_owned());
            }
            if !ids.insert(id) {
                return Err(format!("the id {id:?} stands twice: each entry has one of its own"));
            }
        }
        for entry in &self.findings {
            let lacks = |what: &str| format!("the finding {} {what}", entry.id);
            if entry.properties.is_empty() {
                return Err(lacks("names no properties"));
            }
            if entry.reason.trim().is_empty() {
                return Err(lacks("gives no reason"));
            }
            if entry.reference.trim().is_empty() {
                return Err(lacks("gives no reference: an issue, a pull request, or how it was seen"));
            }
            check_names(&entry.id, &entry.properties, entry.cases.as_ref())?;
        }
        for entry in &self.supports {
            if entry.properties.is_empty() && entry.families.is_empty() {
                return Err(format!("the claim {} names neither families nor properties", entry.id));
            }
            check_names(&entry.id, &entry.properties, entry.cases.as_ref())?;
        }
        let counts = self.findings.iter().map(|entry| (&entry.id, entry.at_least));
        let counts = counts.chain(self.supports.iter().map(|entry| (&entry.id, entry.at_least)));
        if let Some((id, _)) = counts.into_iter().find(|(_, at_least)| *at_least == 0) {
            return Err(format!("{id} has an at_least of 0: it is 1 or more"));
        }
        Ok(())
    }
}

impl Claims {
    /// The claims for an engine: of the file that is given, else of the one that the program holds for it, if any.
    ///
    /// # Errors
    /// [`ClaimsError`].
    pub fn of(profile: &Profile, file: Option<&Path>) -> Result<Option<Self>, ClaimsError> {
        match file {
            Some(path) => ClaimsFile::read(path)?.resolve(profile, &path.display().to_string()).map(Some),
            None => {
                let held = ClaimsFile::embedded(&profile.engine);
                held.map(|claims| claims.resolve(profile, "that the program holds")).transpose()
            }
        }
    }

    /// Marks the failing checks that entries cover, and decides the case's verdict anew.
    pub fn mark(&self, case: &Case, result: &mut CaseResult) {
        let mut marked = false;
        for check in &mut result.checks {
            check.expected =
                self.findings.iter().find(|entry| entry.covers(&result.id, case, check)).map(|entry| {
                    Expected {
                        entry: entry.id.clone(),
                        reason: entry.reason.clone(),
                        reference: entry.reference.clone(),
                    }
                });
            marked |= check.expected.is_some();
        }
        if marked {
            result.status = CaseResult::status_of(&result.checks);
        }
    }
}

impl KnownFinding {
    /// Whether the entry is about this property on this case.
    fn is_about(&self, id: &str, case: &Case, property: &str) -> bool {
        names(&self.properties, property) && holds(self.cases.as_ref(), id, case, property)
    }

    /// Whether a check fails as the entry says.
    fn covers(&self, id: &str, case: &Case, check: &Check) -> bool {
        let words = match &check.finding {
            Finding::Broken(failure) => {
                let worst = failure.worst.as_ref().map_or("", |worst| worst.seen.as_str());
                format!("{} {worst}", failure.headline)
            }
            Finding::Engine { status: Status::Crash | Status::Timeout, text } => text.clone(),
            _ => return false,
        };
        let words = words.to_lowercase();
        self.seen.as_ref().is_none_or(|seen| words.contains(&seen.to_lowercase()))
            && self.is_about(id, case, &check.property)
    }
}

impl SupportClaim {
    /// Whether the entry is about this property on this case.
    fn is_about(&self, id: &str, case: &Case, property: &str) -> bool {
        (self.families.contains(&case.family) || names(&self.properties, property))
            && holds(self.cases.as_ref(), id, case, property)
    }
}

fn holds(expression: Option<&Expression>, id: &str, case: &Case, property: &str) -> bool {
    let subject = Subject { id, case, property: Some(property) };
    expression.is_none_or(|expression| expression.may_match(&subject))
}

fn names(patterns: &[String], property: &str) -> bool {
    patterns.iter().any(|pattern| TextTest::Glob(pattern.clone()).holds(property))
}

/// Refuses ids that no property has: a typo must not make an entry silent.
fn check_names(entry: &str, patterns: &[String], cases: Option<&Expression>) -> Result<(), String> {
    let whole = cases.map(Expression::whole_properties).unwrap_or_default();
    for pattern in patterns.iter().map(String::as_str).chain(whole) {
        if !properties::all().any(|property| names(&[pattern.to_owned()], property.id)) {
            let hint = nearest(pattern, properties::all().map(|property| property.id));
            let hint = hint.map_or(String::new(), |known| format!("; did you mean {known:?}?"));
            return Err(format!("{entry} names {pattern:?}, which no property is called{hint}"));
        }
    }
    Ok(())
}

fn one() -> usize {
    1
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

fn is_false(value: &bool) -> bool {
    !value
}

#[cfg(test)]
mod tests;
