//! A small data set of our own and a run over it, so that tests need nothing beside the repository.

use std::path::{Path, PathBuf};

use shardcheck_gsm8k::dialect::{Dialect, Filter};
use shardcheck_gsm8k::output::Format;
use shardcheck_gsm8k::report::RunReport;
use shardcheck_gsm8k::run::{RunArgs, execute};

use super::hostile_server::{HostileServer, Reply, Request, completion};

/// Questions in the data set.
pub const QUESTIONS: usize = 60;

fn data() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let line = |split: &str, number: usize| {
        let question = format!("{split} {number}: what is {number} + 1?{}", " Think.".repeat(number % 7));
        let answer = format!("It is {number} + 1 = <<{number}+1={0}>>{0}.\n#### {0}", number + 1);
        serde_json::json!({"question": question, "answer": answer}).to_string() + "\n"
    };
    for (split, count) in [("test", QUESTIONS), ("train", 40)] {
        let text: String = (0..count).map(|number| line(split, number)).collect();
        std::fs::write(folder.path().join(format!("{split}.jsonl")), text).unwrap();
    }
    folder
}

/// A data set and a folder for runs over it.
pub struct Bench {
    data: tempfile::TempDir,
    home: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Self {
        Self { data: data(), home: tempfile::tempdir().unwrap() }
    }

    pub fn out(&self) -> PathBuf {
        self.home.path().join("run")
    }

    pub fn args(&self, url: &str) -> RunArgs {
        RunArgs {
            base_url: url.to_owned(),
            model: "m".to_owned(),
            data: self.data.path().to_owned(),
            out: Some(self.out()),
            resume: self.out().exists(),
            dialect: Dialect::LmEval,
            num_fewshot: 2,
            limit: None,
            concurrency: 4,
            seed: 1234,
            request_seed: None,
            max_tokens: 256,
            eos_string: None,
            attempts: 3,
            timeout_s: 5.0,
            retry_wait_s: 0.0,
            throttle_budget_s: 5.0,
            give_up_after: None,
            api_key_env: "SHARDCHECK_TEST_KEY_THAT_IS_NOT_SET".to_owned(),
            server_version: None,
            server_flags: None,
            server_log: None,
            no_metrics: true,
            dcp: None,
            interleave: 1,
            block_size: None,
            format: Format::Text,
        }
    }

    pub fn run(&self, url: &str) -> RunReport {
        execute(&self.args(url)).unwrap().1
    }

    /// Runs again against a server that answers everything rightly, and checks that nothing is missing or asked twice.
    pub fn resume_with_a_good_server(&self, still_missing: usize) {
        let good = HostileServer::start(right_answer);
        let report = self.run(&good.url());
        assert!(report.is_complete(), "{report}");
        assert_eq!(report.scores[&Filter::StrictMatch].total, QUESTIONS as u64);
        assert_eq!(good.served(), still_missing);
        assert_each_question_once(&self.out());
    }
}

/// Answers so that both filters are satisfied.
pub fn right_answer(request: &Request) -> Reply {
    Reply::ok(completion(&format!(" easy\n#### {}", asked_number(request) + 1)))
}

/// The number of the question in a request, which is also its `doc_id`.
pub fn asked_number(request: &Request) -> usize {
    let json = request.json();
    let prompt = json["prompt"].as_str().unwrap();
    let question = prompt.rsplit("Question: test ").next().unwrap();
    question.split(':').next().unwrap().parse().unwrap()
}

/// Checks that a run's log has exactly one row for each question and filter.
pub fn assert_each_question_once(out: &Path) {
    let rows = super::json_lines(&out.join("samples.jsonl"));
    let mut seen: Vec<(u64, String)> = rows
        .iter()
        .map(|row| (row["doc_id"].as_u64().unwrap(), row["filter"].as_str().unwrap().to_owned()))
        .collect();
    seen.sort();
    let mut expected: Vec<(u64, String)> = (0..QUESTIONS as u64)
        .flat_map(|doc| ["flexible-extract", "strict-match"].map(|filter| (doc, filter.to_owned())))
        .collect();
    expected.sort();
    assert_eq!(seen, expected);
}
