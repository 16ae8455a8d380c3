//! The per-sample log: one JSON line per question and filter, in the fields of lm-eval's `--log_samples`.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::client::Failure;
use crate::completion::{Completion, RequestAcceptance};
use crate::dataset::{Item, sha256_hex};
use crate::dialect::{Dialect, Filter};
use crate::outcome::Error;
use crate::prompts::Prompt;
use crate::scoring::{self, Scored};

/// One line of a sample log. The first block is lm-eval's, the second this program's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleRow {
    /// Position of the question in the test file.
    pub doc_id: usize,
    /// The question and its worked answer.
    #[serde(default)]
    pub doc: Value,
    /// The worked answer.
    #[serde(default)]
    pub target: String,
    /// What was sent: `gen_args_0.arg_0` is the prompt, `arg_1` the generation settings.
    #[serde(default)]
    pub arguments: Value,
    /// The completions as returned; one list per request, one text per repeat. Empty for a failed request.
    pub resps: Vec<Vec<String>>,
    /// The extracted answers.
    pub filtered_resps: Vec<String>,
    /// The filter that extracted them.
    pub filter: String,
    /// Names of the metrics in this row.
    #[serde(default)]
    pub metrics: Vec<String>,
    /// SHA-256 of the question as indented JSON.
    #[serde(default)]
    pub doc_hash: String,
    /// SHA-256 of the prompt: the key by which runs are paired.
    pub prompt_hash: String,
    /// SHA-256 of the worked answer.
    #[serde(default)]
    pub target_hash: String,
    /// 1 for a right answer, 0 for a wrong one, absent for a failed request.
    #[serde(default)]
    pub exact_match: Option<f64>,

    /// Why generation ended, in the server's word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<String>,
    /// Tokens of the prompt, as the server counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Tokens generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// Seconds from sending to the last byte, of the attempt that succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_s: Option<f64>,
    /// Attempts made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// Acceptance of this request's drafts, when the server reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acceptance: Option<RequestAcceptance>,
    /// The failure, for a request that failed for good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
}

/// What is known of one question: the rows of all filters together.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Position of the question in the test file.
    pub doc_id: usize,
    /// SHA-256 of the prompt.
    pub prompt_hash: String,
    /// The completion; `None` for a failed request.
    pub text: Option<String>,
    /// Extraction and verdict by filter; empty for a failed request.
    pub scored: BTreeMap<Filter, Scored>,
    /// Rows whose recorded verdict differs from what this program's scorer says.
    pub rescoring_differs: usize,
    /// Why generation ended.
    pub finish_reason: Option<String>,
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated.
    pub completion_tokens: Option<u64>,
    /// Seconds to the last byte.
    pub latency_s: Option<f64>,
    /// Attempts made.
    pub attempts: u32,
    /// Acceptance of its drafts.
    pub acceptance: Option<RequestAcceptance>,
    /// The failure, if it failed.
    pub error: Option<Failure>,
}

impl Answer {
    /// Whether the answer is right under a filter; `None` when the request failed or the filter is not in the log.
    pub fn is_correct(&self, filter: Filter) -> Option<bool> {
        self.scored.get(&filter).map(|scored| scored.correct)
    }
}

/// The rows of one finished request, one per filter of the dialect.
pub fn rows(
    dialect: Dialect,
    stop: &[String],
    item: &Item,
    prompt: &Prompt,
    result: &Result<(Completion, u32), Failure>,
) -> Vec<SampleRow> {
    let text = result.as_ref().ok().map(|(completion, _)| completion.text.as_str());
    dialect
        .filters()
        .iter()
        .map(|filter| {
            let scored = text.map(|text| scoring::score(*filter, text, &item.answer));
            let mut row = bare_row(*filter, stop, item, prompt);
            row.resps = text.map(|text| vec![text.to_owned()]).into_iter().collect();
            row.filtered_resps = scored.iter().map(|scored| scored.extracted.clone()).collect();
            row.exact_match = scored.map(|scored| f64::from(u8::from(scored.correct)));
            match result {
                Ok((completion, attempts)) => {
                    row.finish_reason = completion.finish_reason.clone();
                    row.prompt_tokens = completion.prompt_tokens;
                    row.completion_tokens = completion.completion_tokens;
                    row.latency_s = Some(completion.latency_s);
                    row.attempts = Some(*attempts);
                    row.acceptance = completion.acceptance.clone();
                }
                Err(failure) => {
                    row.attempts = Some(failure.attempts);
                    row.error = Some(failure.clone());
                }
            }
            row
        })
        .collect()
}

fn bare_row(filter: Filter, stop: &[String], item: &Item, prompt: &Prompt) -> SampleRow {
    SampleRow {
        doc_id: prompt.doc_id,
        doc: json!({"question": item.question, "answer": item.answer}),
        target: item.answer.clone(),
        arguments: json!({"gen_args_0": {
            "arg_0": prompt.text,
            "arg_1": {"until": stop, "do_sample": false, "temperature": 0.0},
        }}),
        resps: Vec::new(),
        filtered_resps: Vec::new(),
        filter: filter.name().to_owned(),
        metrics: vec!["exact_match".to_owned()],
        doc_hash: doc_hash(item),
        prompt_hash: prompt.sha256.clone(),
        target_hash: sha256_hex(&item.answer),
        exact_match: None,
        finish_reason: None,
        prompt_tokens: None,
        completion_tokens: None,
        latency_s: None,
        attempts: None,
        acceptance: None,
        error: None,
    }
}

/// SHA-256 of `json.dumps(doc, indent=2, ensure_ascii=False)`, as lm-eval hashes a question.
fn doc_hash(item: &Item) -> String {
    let quoted = |text: &str| serde_json::to_string(text).expect("text is always JSON");
    sha256_hex(&format!(
        "{{\n  \"question\": {},\n  \"answer\": {}\n}}",
        quoted(&item.question),
        quoted(&item.answer)
    ))
}

/// Groups rows by question, in the order of `doc_id`. A later row replaces an earlier one of the same filter, and
/// the rows of an answered question replace those of its earlier failure.
pub fn join(rows: impl IntoIterator<Item = SampleRow>) -> Vec<Answer> {
    let mut answers: BTreeMap<(usize, String), Answer> = BTreeMap::new();
    for row in rows {
        let key = (row.doc_id, row.prompt_hash.clone());
        let known = answers.remove(&key).filter(|known| known.error.is_some() == row.error.is_some());
        answers.insert(key, merge(known, row));
    }
    answers.into_values().collect()
}

fn merge(known: Option<Answer>, row: SampleRow) -> Answer {
    let text = row.resps.into_iter().flatten().next();
    let mut answer = known.unwrap_or(Answer {
        doc_id: row.doc_id,
        prompt_hash: row.prompt_hash,
        text: None,
        scored: BTreeMap::new(),
        rescoring_differs: 0,
        finish_reason: None,
        prompt_tokens: None,
        completion_tokens: None,
        latency_s: None,
        attempts: 0,
        acceptance: None,
        error: None,
    });
    if let (Ok(filter), Some(exact_match)) = (row.filter.parse::<Filter>(), row.exact_match) {
        let extracted = row.filtered_resps.into_iter().next().unwrap_or_default();
        let scored = Scored { extracted, correct: exact_match == 1.0 };
        if let Some(text) = text.as_deref().filter(|_| !row.target.is_empty()) {
            answer.rescoring_differs += usize::from(scoring::score(filter, text, &row.target) != scored);
        }
        answer.scored.insert(filter, scored);
    }
    answer.text = text;
    answer.finish_reason = row.finish_reason;
    answer.prompt_tokens = row.prompt_tokens;
    answer.completion_tokens = row.completion_tokens;
    answer.latency_s = row.latency_s;
    answer.attempts = row.attempts.unwrap_or(1);
    answer.acceptance = row.acceptance;
    answer.error = row.error;
    answer
}

/// Reads every line of a sample log.
///
/// # Errors
/// [`Error::Data`] with file and line for anything that is no sample row.
pub fn read(path: &Path) -> Result<Vec<SampleRow>, Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::io("read", path, source))?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|why| {
                Error::Data(format!(
                    "{}:{}: no sample of gsm8k (expected the fields of lm-eval's --log_samples): {why}",
                    path.display(),
                    index + 1
                ))
            })
        })
        .collect()
}

/// A sample log that is being written: each question's rows reach the file in one piece as soon as they exist.
pub struct Journal {
    path: PathBuf,
    file: Mutex<File>,
}

impl Journal {
    /// Opens a log for appending and returns the answers that are already in it.
    ///
    /// A line that a killed run left unfinished is cut off; its question is asked again.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Data`] when the file holds something else.
    pub fn open(path: &Path) -> Result<(Self, Vec<Answer>), Error> {
        let fail = |source| Error::io("open", path, source);
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path).map_err(fail)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(fail)?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        if whole < bytes.len() {
            file.set_len(whole as u64).map_err(fail)?;
            file.seek(SeekFrom::End(0)).map_err(fail)?;
        }
        let known = join(read(path)?);
        Ok((Self { path: path.to_owned(), file: Mutex::new(file) }, known))
    }

    /// Appends the rows of one question.
    ///
    /// # Errors
    /// [`Error::Io`], for example on a full disk.
    pub fn append(&self, rows: &[SampleRow]) -> Result<(), Error> {
        let text = lines(rows);
        let mut file = self.file.lock().expect("no thread panics while it holds the journal");
        file.write_all(text.as_bytes()).map_err(|source| Error::io("write", &self.path, source))
    }

    /// Rewrites the log in the order of questions, keeping the last rows of each, and returns its answers.
    ///
    /// The old file stays until the new one is complete.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(self) -> Result<Vec<Answer>, Error> {
        let fail = |source| Error::io("write", &self.path, source);
        self.file.lock().expect("threads are done").sync_all().map_err(fail)?;
        let mut last: BTreeMap<(usize, String), SampleRow> = BTreeMap::new();
        for row in read(&self.path)? {
            last.insert((row.doc_id, row.filter.clone()), row);
        }
        let rows: Vec<SampleRow> = last.into_values().collect();
        let fresh = self.path.with_extension("jsonl.new");
        fs::write(&fresh, lines(&rows)).map_err(fail)?;
        fs::rename(&fresh, &self.path).map_err(fail)?;
        Ok(join(rows))
    }
}

fn lines(rows: &[SampleRow]) -> String {
    rows.iter().map(|row| serde_json::to_string(row).expect("a row is always JSON") + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::FailureKind;

    fn item() -> Item {
        Item { question: "How \"many\"?\u{2028}".to_owned(), answer: "Two.\n#### 2".to_owned() }
    }

    fn prompt(doc_id: usize) -> Prompt {
        let text = format!("Question: {doc_id}\nAnswer:");
        Prompt { doc_id, shots: Vec::new(), sha256: sha256_hex(&text), text }
    }

    fn answered(text: &str) -> Result<(Completion, u32), Failure> {
        let body =
            json!({"choices": [{"text": text, "finish_reason": "stop"}], "usage": {"prompt_tokens": 7}});
        Ok((Completion::parse(&body.to_string(), 0.25).unwrap(), 2))
    }

    fn failed() -> Result<(Completion, u32), Failure> {
        Err(Failure { kind: FailureKind::Timeout, status: None, detail: "late".to_owned(), attempts: 3 })
    }

    fn write(doc_id: usize, result: &Result<(Completion, u32), Failure>) -> Vec<SampleRow> {
        rows(Dialect::LmEval, &Dialect::LmEval.stop(), &item(), &prompt(doc_id), result)
    }

    #[test]
    fn the_question_is_hashed_as_python_would_dump_it() {
        // hashlib.sha256(json.dumps({"question": …, "answer": …}, indent=2, ensure_ascii=False).encode())
        assert_eq!(doc_hash(&item()), PYTHON_DOC_HASH);
    }

    #[test]
    fn a_row_has_lm_evals_fields_and_survives_a_round_trip() {
        let written = write(3, &answered(" 1 + 1 = 2\n#### 2"));
        assert_eq!(written.len(), 2);
        let json = serde_json::to_value(&written[0]).unwrap();
        for field in ["doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"]
        {
            assert!(!json[field].is_null(), "{field}");
        }
        assert_eq!(json["exact_match"], 1.0);
        assert_eq!(json["filter"], "strict-match");
        assert_eq!(json["arguments"]["gen_args_0"]["arg_1"]["until"][0], "Question:");
        assert_eq!(json["finish_reason"], "stop");
        assert_eq!(serde_json::from_value::<SampleRow>(json).unwrap(), written[0]);
    }

    #[test]
    fn a_later_answer_replaces_a_failure_and_a_failed_row_has_no_score() {
        let failure = write(3, &failed());
        assert_eq!((failure[0].exact_match, failure[0].resps.len()), (None, 0));
        let only = join(failure.clone());
        assert_eq!(only[0].error.as_ref().unwrap().kind, FailureKind::Timeout);
        assert_eq!(only[0].is_correct(Filter::StrictMatch), None);
        let both = join(failure.into_iter().chain(write(3, &answered("#### 2"))));
        assert_eq!((both.len(), both[0].error.clone()), (1, None));
        assert_eq!(both[0].is_correct(Filter::FlexibleExtract), Some(true));
        assert_eq!(both[0].rescoring_differs, 0);
    }

    #[test]
    fn a_recorded_verdict_that_the_scorer_does_not_share_is_counted() {
        let mut written = write(0, &answered("#### 3"));
        written[0].exact_match = Some(1.0);
        assert_eq!(join(written)[0].rescoring_differs, 1);
    }

    #[test]
    fn a_torn_line_is_cut_and_the_finished_log_is_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        let (journal, known) = Journal::open(&path).unwrap();
        assert!(known.is_empty());
        journal.append(&write(5, &failed())).unwrap();
        journal.append(&write(2, &answered("#### 2"))).unwrap();
        let torn = lines(&write(1, &answered("#### 2")));
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&torn.as_bytes()[..torn.len() - 20]).unwrap();
        drop(journal);

        let (journal, known) = Journal::open(&path).unwrap();
        // the first of the torn question's two rows was complete
        assert_eq!(known.iter().map(|answer| answer.doc_id).collect::<Vec<_>>(), [1, 2, 5]);
        assert_eq!(known[0].scored.len(), 1);
        journal.append(&write(1, &answered("#### 9"))).unwrap();
        journal.append(&write(5, &answered("#### 2"))).unwrap();
        let answers = journal.finish().unwrap();
        assert_eq!(answers.iter().map(|answer| answer.doc_id).collect::<Vec<_>>(), [1, 2, 5]);
        assert!(answers.iter().all(|answer| answer.error.is_none() && answer.scored.len() == 2));
        assert_eq!(answers[0].is_correct(Filter::StrictMatch), Some(false));
        assert_eq!(read(&path).unwrap().len(), 6);
    }

    #[test]
    fn a_foreign_file_is_refused_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("other.jsonl");
        fs::write(&path, "{\"a\": 1}\n").unwrap();
        let message = read(&path).unwrap_err().to_string();
        assert!(message.contains("other.jsonl:1") && message.contains("log_samples"), "{message}");
    }

    const PYTHON_DOC_HASH: &str = "b06b5484bb3f08f5a1a454821cc675d2512b6ca15c364b4de75689db32a43a8f";
}
