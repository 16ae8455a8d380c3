//! `run.json`: what a run asked, of whom, and in which sessions; it decides what may be resumed and compared.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::acceptance::AcceptanceCounts;
use crate::coverage::Sharding;
use crate::dialect::Dialect;
use crate::outcome::Error;
use crate::server_log::LogScan;
use crate::server_metrics::ServerPeak;

/// The version of `run.json`.
pub const FORMAT: u32 = 1;

/// Everything about a run except its answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this file's layout.
    pub format: u32,
    /// Name and version of the program.
    pub tool: String,
    /// What was asked; fixed for the life of a run.
    pub plan: Plan,
    /// Who was asked.
    pub server: ServerIdentity,
    /// The server's sharding, if stated.
    pub sharding: Option<Sharding>,
    /// One entry per invocation, in order.
    pub sessions: Vec<Session>,
}

/// What is asked. Two runs with different plans are not the same measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The dialect.
    pub dialect: Dialect,
    /// Shots per question.
    pub num_fewshot: usize,
    /// Seed of the few-shot draws.
    pub fewshot_seed: u64,
    /// Number of questions, when fewer than all.
    pub limit: Option<usize>,
    /// Questions asked.
    pub questions: usize,
    /// SHA-256 over all prompts joined.
    pub prompts_sha256: String,
    /// Prompts whose first two shots are those of an earlier one: what a prefix cache could have reused.
    pub prompts_sharing_two_shots: usize,
    /// SHA-256 of the test file.
    pub test_sha256: String,
    /// SHA-256 of the train file.
    pub train_sha256: String,
    /// Whether both files are the published ones, byte for byte.
    pub published_data: bool,
    /// The model's served name.
    pub model: String,
    /// Most tokens generated per answer.
    pub max_tokens: u32,
    /// Temperature; 0 is greedy.
    pub temperature: f64,
    /// Stop texts.
    pub stop: Vec<String>,
    /// Seed in the request body.
    pub request_seed: u64,
}

/// The server, as it was described and as it described itself.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ServerIdentity {
    /// Address.
    pub url: String,
    /// Version, as given by the operator.
    pub version_given: Option<String>,
    /// Start flags, as given by the operator.
    pub flags_given: Option<String>,
    /// Version, as the server answers at `/version`.
    pub version_reported: Option<String>,
    /// Models that the server lists.
    pub models_reported: Vec<String>,
}

/// One invocation that sent requests.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Session {
    /// Start, UTC.
    pub started: String,
    /// End, UTC; absent when the invocation was killed.
    pub ended: Option<String>,
    /// Requests allowed in flight.
    pub concurrency: usize,
    /// Requests answered.
    pub answered: usize,
    /// Requests that failed for good.
    pub failed: usize,
    /// Seconds of sending.
    pub wall_s: f64,
    /// Most requests that were in flight at the same time, seen from here.
    pub most_in_flight: usize,
    /// Most requests that the server said it ran and queued.
    pub server_peak: Option<ServerPeak>,
    /// Why sending stopped early.
    pub stopped: Option<String>,
    /// What the server's log holds from this session.
    pub server_log: Option<LogScan>,
    /// Draft–verify counts of this session out of the server's metrics or log.
    pub acceptance: Option<AcceptanceCounts>,
    /// A forced-acceptance mode that the server's flags or log mention.
    pub forced_acceptance: Option<String>,
}

impl Plan {
    /// Every field in which another plan differs, in words.
    pub fn differences(&self, other: &Plan) -> Vec<String> {
        let (mine, theirs) = (fields(self), fields(other));
        mine.iter()
            .zip(&theirs)
            .filter(|(mine, theirs)| mine != theirs)
            .map(|((name, mine), (_, theirs))| format!("{name}: {mine} against {theirs}"))
            .collect()
    }
}

impl ServerIdentity {
    /// What another description of the server contradicts, in words; what either leaves open contradicts nothing.
    /// The address may differ: a restarted server can have moved.
    pub fn changes_to(&self, other: &ServerIdentity) -> Vec<String> {
        let pairs = [
            ("version reported", &self.version_reported, &other.version_reported),
            ("version given", &self.version_given, &other.version_given),
            ("flags given", &self.flags_given, &other.flags_given),
        ];
        pairs
            .into_iter()
            .filter_map(|(name, before, now)| {
                let (before, now) = (before.as_ref()?, now.as_ref()?);
                (before != now).then(|| format!("{name}: {before} against {now}"))
            })
            .collect()
    }
}

impl Manifest {
    /// Reads `run.json` in a run's folder.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Data`] (not a manifest, or one of a later program).
    pub fn load(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("run.json");
        let text = fs::read_to_string(&path).map_err(|source| Error::io("read", &path, source))?;
        let manifest: Self = serde_json::from_str(&text).map_err(|why| {
            Error::Data(format!("{} is not the manifest of a gsm8k run: {why}", path.display()))
        })?;
        if manifest.format != FORMAT {
            return Err(Error::Data(format!(
                "{} has format {}, this program reads format {FORMAT}",
                path.display(),
                manifest.format
            )));
        }
        Ok(manifest)
    }

    /// Writes `run.json`; an older one stays until the new one is complete.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.join("run.json");
        let fresh = folder.join("run.json.new");
        let text = serde_json::to_string_pretty(self).expect("a manifest is always JSON") + "\n";
        fs::write(&fresh, text).map_err(|source| Error::io("write", &fresh, source))?;
        fs::rename(&fresh, &path).map_err(|source| Error::io("write", &path, source))
    }
}

fn fields(plan: &Plan) -> Vec<(String, String)> {
    let serde_json::Value::Object(fields) = serde_json::to_value(plan).expect("a plan is always JSON") else {
        unreachable!("a struct with named fields is a JSON object")
    };
    fields.into_iter().map(|(name, value)| (name, value.to_string())).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn plan() -> Plan {
        Plan {
            dialect: Dialect::LmEval,
            num_fewshot: 5,
            fewshot_seed: 1234,
            limit: None,
            questions: 3,
            prompts_sha256: "p".to_owned(),
            prompts_sharing_two_shots: 0,
            test_sha256: "t".to_owned(),
            train_sha256: "s".to_owned(),
            published_data: false,
            model: "m".to_owned(),
            max_tokens: 256,
            temperature: 0.0,
            stop: Dialect::LmEval.stop(),
            request_seed: 1234,
        }
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written_and_a_later_format_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut manifest = Manifest {
            format: FORMAT,
            tool: "t 1".to_owned(),
            plan: plan(),
            server: ServerIdentity::default(),
            sharding: Some(Sharding { dcp: 8, interleave: 1, block_size: None }),
            sessions: vec![Session::default()],
        };
        manifest.save(folder.path()).unwrap();
        assert_eq!(Manifest::load(folder.path()).unwrap(), manifest);
        manifest.format = FORMAT + 1;
        manifest.save(folder.path()).unwrap();
        assert!(Manifest::load(folder.path()).unwrap_err().to_string().contains("reads format"));
    }

    #[test]
    fn a_server_that_contradicts_its_earlier_self_is_another_one() {
        let version = |text: &str| Some(text.to_owned());
        let before = ServerIdentity { version_reported: version("1"), ..ServerIdentity::default() };
        let silent = ServerIdentity { url: "elsewhere".to_owned(), ..ServerIdentity::default() };
        assert!(before.changes_to(&silent).is_empty());
        let newer = ServerIdentity { version_reported: version("2"), ..ServerIdentity::default() };
        assert_eq!(before.changes_to(&newer), ["version reported: 1 against 2"]);
    }

    #[test]
    fn differing_plans_name_the_fields() {
        let other = Plan { max_tokens: 512, model: "n".to_owned(), ..plan() };
        let differences = plan().differences(&other);
        assert_eq!(differences, ["max_tokens: 256 against 512", "model: \"m\" against \"n\""]);
        assert!(plan().differences(&plan()).is_empty());
    }
}
