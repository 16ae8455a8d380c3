//! Runs as comparisons read them: a run's folder, or a sample log of lm-eval.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::dialect::Filter;
use crate::manifest::Manifest;
use crate::outcome::Error;
use crate::report::RunReport;
use crate::samples::{self, Answer, SampleRow};
use crate::score::Score;

/// A run that can be paired with another.
#[derive(Debug, Clone)]
pub struct RunLog {
    /// Where it was read from, for messages.
    pub name: String,
    /// Its answers by prompt hash.
    pub answers: BTreeMap<String, Answer>,
    /// How it was made, as far as the log says.
    pub settings: Settings,
    /// The report, for a run of this program.
    pub report: Option<RunReport>,
}

/// The settings that must be equal for answers to be comparable. `None`: the log does not say.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Settings {
    /// Most tokens generated.
    pub max_tokens: Option<u32>,
    /// Stop texts, in any order.
    pub stop: Option<Vec<String>>,
    /// Temperature.
    pub temperature: Option<f64>,
    /// Seed of the request.
    pub request_seed: Option<u64>,
}

impl RunLog {
    /// Reads a run's folder, a sample log (`samples_gsm8k_….jsonl` of lm-eval or `samples.jsonl` of this program), or
    /// a folder that holds exactly one of the former.
    ///
    /// # Errors
    /// [`Error::Data`] when there is no such log or it holds no sample of gsm8k; [`Error::Io`].
    pub fn load(path: &Path) -> Result<Self, Error> {
        if path.join("run.json").is_file() {
            return Self::load_own(path);
        }
        let file = if path.is_dir() { the_only_log(path)? } else { path.to_owned() };
        let rows = samples::read(&file)?;
        let settings = settings_of(&rows);
        let answers = by_prompt(samples::join(rows), path)?;
        Ok(Self { name: path.display().to_string(), answers, settings, report: None })
    }

    fn load_own(folder: &Path) -> Result<Self, Error> {
        let (report, answers) = RunReport::load(folder)?;
        let settings = settings_of_manifest(&report.manifest);
        let answers = by_prompt(answers, folder)?;
        Ok(Self { name: folder.display().to_string(), answers, settings, report: Some(report) })
    }

    /// Answers that failed; such a run has no score.
    pub fn failed(&self) -> usize {
        self.answers.values().filter(|answer| answer.error.is_some()).count()
    }

    /// Questions that were planned and never answered nor failed.
    pub fn not_sent(&self) -> usize {
        self.report.as_ref().map_or(0, |report| report.not_sent)
    }

    /// The score under a filter; `None` when some answer lacks it.
    pub fn score(&self, filter: Filter) -> Option<Score> {
        let verdicts: Option<Vec<bool>> =
            self.answers.values().map(|answer| answer.is_correct(filter)).collect();
        verdicts.filter(|verdicts| !verdicts.is_empty()).map(Score::of)
    }

    /// The filters that every answer was scored under.
    pub fn filters(&self) -> Vec<Filter> {
        Filter::ALL.into_iter().filter(|filter| self.score(*filter).is_some()).collect()
    }

    /// Answers whose recorded verdict this program's scorer does not share.
    pub fn rescoring_differs(&self) -> usize {
        self.answers.values().map(|answer| answer.rescoring_differs).sum()
    }
}

fn the_only_log(folder: &Path) -> Result<PathBuf, Error> {
    let entries = std::fs::read_dir(folder).map_err(|source| Error::io("read", folder, source))?;
    let mut logs: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("samples_gsm8k") && name.ends_with(".jsonl")
        })
        .collect();
    match (logs.pop(), logs.len()) {
        (Some(log), 0) => Ok(log),
        (None, _) => Err(Error::Data(format!(
            "{} holds neither run.json nor a samples_gsm8k_….jsonl of lm-eval's --log_samples",
            folder.display()
        ))),
        (Some(_), more) => Err(Error::Data(format!(
            "{} holds {} sample logs; name the one that is meant",
            folder.display(),
            more + 1
        ))),
    }
}

fn by_prompt(answers: Vec<Answer>, path: &Path) -> Result<BTreeMap<String, Answer>, Error> {
    let count = answers.len();
    let by_prompt: BTreeMap<String, Answer> =
        answers.into_iter().map(|answer| (answer.prompt_hash.clone(), answer)).collect();
    if by_prompt.is_empty() {
        return Err(Error::Data(format!("{} holds no answer", path.display())));
    }
    if by_prompt.len() < count {
        return Err(Error::Data(format!(
            "{} holds {} answers to prompts that occur twice; pairing by prompt would be ambiguous",
            path.display(),
            count - by_prompt.len()
        )));
    }
    Ok(by_prompt)
}

fn settings_of_manifest(manifest: &Manifest) -> Settings {
    let plan = &manifest.plan;
    Settings {
        max_tokens: Some(plan.max_tokens),
        stop: Some(sorted(plan.stop.clone())),
        temperature: Some(plan.temperature),
        request_seed: Some(plan.request_seed),
    }
}

/// What lm-eval's log says of the settings: `arguments.gen_args_0.arg_1` of its first row.
fn settings_of(rows: &[SampleRow]) -> Settings {
    let Some(settings) = rows.first().map(|row| &row.arguments["gen_args_0"]["arg_1"]) else {
        return Settings::default();
    };
    let texts = |value: &Value| match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(list) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        _ => None,
    };
    let budget = ["max_gen_toks", "max_tokens", "max_new_tokens"]
        .iter()
        .find_map(|name| settings[name].as_u64())
        .and_then(|tokens| u32::try_from(tokens).ok());
    Settings {
        max_tokens: budget,
        stop: texts(&settings["until"]).map(sorted),
        temperature: settings["temperature"].as_f64(),
        request_seed: None,
    }
}

fn sorted(mut texts: Vec<String>) -> Vec<String> {
    texts.sort();
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(doc_id: usize, filter: &str, prompt_hash: &str) -> String {
        serde_json::json!({
            "doc_id": doc_id, "target": "#### 1", "resps": [["#### 1"]], "filtered_resps": ["1"],
            "filter": filter, "prompt_hash": prompt_hash, "exact_match": 1.0,
            "arguments": {"gen_args_0": {"arg_0": "p", "arg_1": {
                "until": ["b", "a"], "do_sample": false, "temperature": 0.0, "max_gen_toks": 512}}},
        })
        .to_string()
            + "\n"
    }

    #[test]
    fn a_log_of_lm_eval_is_read_with_its_settings() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("samples_gsm8k_2026.jsonl");
        std::fs::write(&file, row(0, "strict-match", "x") + &row(0, "flexible-extract", "x")).unwrap();
        for path in [file.as_path(), folder.path()] {
            let log = RunLog::load(path).unwrap();
            assert_eq!(log.filters(), [Filter::StrictMatch, Filter::FlexibleExtract]);
            assert_eq!(log.score(Filter::StrictMatch), Some(Score { correct: 1, total: 1 }));
            assert_eq!(log.settings.max_tokens, Some(512));
            assert_eq!(log.settings.stop, Some(vec!["a".to_owned(), "b".to_owned()]));
            assert_eq!((log.failed(), log.not_sent(), log.rescoring_differs()), (0, 0, 0));
        }
        std::fs::copy(&file, folder.path().join("samples_gsm8k_2027.jsonl")).unwrap();
        assert!(RunLog::load(folder.path()).unwrap_err().to_string().contains("2 sample logs"));
    }

    #[test]
    fn empty_folders_and_repeated_prompts_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(RunLog::load(folder.path()).unwrap_err().to_string().contains("log_samples"));
        let file = folder.path().join("samples_gsm8k_1.jsonl");
        std::fs::write(&file, row(0, "strict-match", "x") + &row(1, "strict-match", "x")).unwrap();
        assert!(RunLog::load(&file).unwrap_err().to_string().contains("occur twice"));
    }
}
