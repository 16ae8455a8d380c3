//! What a run says about itself: scores, failures, lengths, and what it cannot have seen.

mod text;
pub mod unseen;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::acceptance::AcceptanceCounts;
use crate::acceptance::Emitted;
use crate::acceptance::sources;
use crate::acceptance::summary::{AcceptanceSummary, DESIGN_EFFECT};
use crate::coverage::Reach;
use crate::dialect::Filter;
use crate::manifest::Manifest;
use crate::outcome::{Error, Outcome};
use crate::samples::Answer;
use crate::score::Score;
use crate::server_log::LogScan;

/// Error probability on each side of the intervals in a report.
pub const REPORT_ALPHA: f64 = 0.01;

/// A finished or interrupted run, summed up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// The manifest of the run.
    pub manifest: Manifest,
    /// Questions answered.
    pub answered: usize,
    /// Requests that failed for good, by kind.
    pub failed: BTreeMap<String, usize>,
    /// Questions never sent.
    pub not_sent: usize,
    /// Scores by filter, of the answered questions only. They are the run's scores only when it is complete.
    pub scores: BTreeMap<Filter, Score>,
    /// Answers by filter in which no answer was found.
    pub invalid: BTreeMap<Filter, usize>,
    /// Answers that reached `max_tokens`.
    pub finished_by_length: usize,
    /// Answers without a finish reason.
    pub unknown_finish: usize,
    /// Answers on whose correctness the filters disagree.
    pub filters_disagree: usize,
    /// Answers that took more than one attempt.
    pub retried: usize,
    /// Prompt tokens of all answers, when the server counts.
    pub prompt_tokens: u64,
    /// Tokens generated in all answers.
    pub completion_tokens: u64,
    /// Latency in seconds at the median, the 95th percentile and the maximum.
    pub latency_s: Option<[f64; 3]>,
    /// Seconds of sending, over all sessions.
    pub wall_s: f64,
    /// Most requests in flight, seen from here.
    pub most_in_flight: usize,
    /// Lengths reached.
    pub reach: Option<Reach>,
    /// Findings in the server's log over all sessions; `None` when no log was given.
    pub server_log: Option<LogScan>,
    /// Acceptance of speculative decoding, when the server tells.
    pub acceptance: Option<AcceptanceSummary>,
    /// A mode that forces acceptance was in use: the scores mean nothing.
    pub forced_acceptance: Option<String>,
    /// What this run cannot have seen, one sentence each.
    pub unseen: Vec<String>,
}

impl RunReport {
    /// Sums up the answers of a run.
    pub fn new(manifest: Manifest, answers: &[Answer]) -> Self {
        let filters = manifest.plan.dialect.filters();
        let good: Vec<&Answer> = answers.iter().filter(|answer| answer.error.is_none()).collect();
        let mut failed = BTreeMap::new();
        for failure in answers.iter().filter_map(|answer| answer.error.as_ref()) {
            *failed.entry(failure.kind.name().to_owned()).or_default() += 1;
        }
        let verdicts = |filter: Filter| good.iter().filter_map(move |answer| answer.is_correct(filter));
        let is_invalid = |filter: &Filter| {
            good.iter().filter(|answer| answer.scored.get(filter).is_some_and(|s| s.is_invalid())).count()
        };
        let finish = |answer: &&&Answer| answer.finish_reason.as_deref() == Some("length");
        let mut report = Self {
            answered: good.len(),
            not_sent: manifest.plan.questions.saturating_sub(answers.len()),
            scores: filters.iter().map(|filter| (*filter, Score::of(verdicts(*filter)))).collect(),
            invalid: filters.iter().map(|filter| (*filter, is_invalid(filter))).collect(),
            finished_by_length: good.iter().filter(finish).count(),
            unknown_finish: good.iter().filter(|answer| answer.finish_reason.is_none()).count(),
            filters_disagree: good.iter().filter(|answer| disagrees(answer)).count(),
            retried: answers.iter().filter(|answer| answer.attempts > 1).count(),
            prompt_tokens: good.iter().filter_map(|answer| answer.prompt_tokens).sum(),
            completion_tokens: good.iter().filter_map(|answer| answer.completion_tokens).sum(),
            latency_s: latencies(&good),
            wall_s: manifest.sessions.iter().map(|session| session.wall_s).sum(),
            most_in_flight: manifest.sessions.iter().map(|s| s.most_in_flight).max().unwrap_or(0),
            reach: Reach::of(answers, manifest.sharding),
            server_log: joint_log(&manifest),
            acceptance: acceptance(&manifest, answers),
            forced_acceptance: forced_acceptance(&manifest),
            unseen: Vec::new(),
            failed,
            manifest,
        };
        report.unseen = unseen::sentences(&report);
        report
    }

    /// Reads the run in `folder` and sums it up.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Data`] for a folder that holds no run.
    pub fn load(folder: &Path) -> Result<(Self, Vec<Answer>), Error> {
        let manifest = Manifest::load(folder)?;
        let answers = crate::samples::join(crate::samples::read(&folder.join("samples.jsonl"))?);
        Ok((Self::new(manifest, &answers), answers))
    }

    /// Whether every question was answered, so that the scores are scores.
    pub fn is_complete(&self) -> bool {
        self.failed_total() == 0 && self.not_sent == 0 && self.answered > 0
    }

    /// Requests that failed for good.
    pub fn failed_total(&self) -> usize {
        self.failed.values().sum()
    }

    /// How the command that made this run ends.
    pub fn outcome(&self) -> Outcome {
        if self.is_complete() { Outcome::Passed } else { Outcome::RerunOutstanding }
    }

    /// The range of scores over all questions if the missing answers were all wrong or all right.
    pub fn bounds(&self, filter: Filter) -> Option<(Score, Score)> {
        let score = *self.scores.get(&filter)?;
        let total = self.manifest.plan.questions as u64;
        let missing = total - score.total;
        Some((Score { correct: score.correct, total }, Score { correct: score.correct + missing, total }))
    }

    /// Writes `results.json`, in the keys that readers of lm-eval's results use, with the report beside them, and
    /// `report.txt`. An incomplete run gets no `results`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, folder: &Path) -> Result<(), Error> {
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            fs::write(&path, text).map_err(|source| Error::io("write", &path, source))
        };
        let json = serde_json::to_string_pretty(&self.results()).expect("results are always JSON");
        write("results.json", json + "\n")?;
        write("report.txt", self.to_string())
    }

    /// The content of `results.json`.
    pub fn results(&self) -> Value {
        let plan = &self.manifest.plan;
        let mut task = json!({"alias": "gsm8k"});
        for (filter, score) in &self.scores {
            task[format!("exact_match,{filter}")] = json!(score.mean());
            task[format!("exact_match_stderr,{filter}")] = json!(score.stderr());
        }
        let results = if self.is_complete() { json!({"gsm8k": task}) } else { Value::Null };
        json!({
            "results": results,
            "versions": {"gsm8k": plan.dialect.task_version()},
            "n-shot": {"gsm8k": plan.num_fewshot},
            "n-samples": {"gsm8k": {"original": plan.questions, "effective": self.answered}},
            "outcome": self.outcome().name(),
            "shardcheck": self,
        })
    }
}

/// Whether two filters disagree on an answer.
fn disagrees(answer: &Answer) -> bool {
    let mut verdicts = answer.scored.values().map(|scored| scored.correct);
    let first = verdicts.next();
    verdicts.any(|verdict| Some(verdict) != first)
}

fn latencies(answers: &[&Answer]) -> Option<[f64; 3]> {
    let mut all: Vec<f64> = answers.iter().filter_map(|answer| answer.latency_s).collect();
    all.sort_by(f64::total_cmp);
    let at = |share: f64| all[((all.len() - 1) as f64 * share).round() as usize];
    (!all.is_empty()).then(|| [at(0.5), at(0.95), at(1.0)])
}

fn joint_log(manifest: &Manifest) -> Option<LogScan> {
    let mut joint: Option<LogScan> = None;
    for scan in manifest.sessions.iter().filter_map(|session| session.server_log.as_ref()) {
        joint.get_or_insert_default().add(scan);
    }
    joint
}

fn forced_acceptance(manifest: &Manifest) -> Option<String> {
    let in_flags = manifest.server.flags_given.as_deref().and_then(sources::forced_mode);
    let in_log = manifest.sessions.iter().find_map(|session| session.forced_acceptance.clone());
    in_flags.map(str::to_owned).or(in_log)
}

/// Per-request counts when every answer carries them, else the sum of the sessions' counters.
fn acceptance(manifest: &Manifest, answers: &[Answer]) -> Option<AcceptanceSummary> {
    let good = || answers.iter().filter(|answer| answer.error.is_none());
    let tokens: Option<u64> = good().map(|answer| answer.completion_tokens).sum();
    let emitted =
        tokens.map(|completion_tokens| Emitted { requests: good().count() as u64, completion_tokens });
    if let Some((counts, histograms)) = sources::from_answers(answers) {
        return Some(AcceptanceSummary::new(
            "per request",
            counts,
            Some(&histograms),
            emitted,
            DESIGN_EFFECT,
            REPORT_ALPHA,
        ));
    }
    let mut sum: Option<AcceptanceCounts> = None;
    for counts in manifest.sessions.iter().filter_map(|session| session.acceptance.as_ref()) {
        sum.get_or_insert_default().add(counts);
    }
    let counts = sum.filter(|counts| counts.steps > 0)?;
    // a killed session's counters are unknown, and failed requests were counted by the server but not here
    let whole = manifest.sessions.iter().all(|session| session.acceptance.is_some() && session.failed == 0);
    let emitted = emitted.filter(|_| whole);
    let source = if whole { "server, whole run" } else { "server, only the sessions that ended" };
    Some(AcceptanceSummary::new(source, counts, None, emitted, DESIGN_EFFECT, REPORT_ALPHA))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::acceptance::interval::Basis;
    use crate::client::{Failure, FailureKind};
    use crate::completion::RequestAcceptance;
    use crate::manifest::{FORMAT, ServerIdentity, Session, tests::plan};
    use crate::scoring::Scored;

    pub(crate) fn answer(doc_id: usize, strict: bool, flexible: bool) -> Answer {
        let scored = |correct| Scored { extracted: "1".to_owned(), correct };
        Answer {
            doc_id,
            prompt_hash: format!("h{doc_id}"),
            text: Some("1".to_owned()),
            scored: [(Filter::StrictMatch, scored(strict)), (Filter::FlexibleExtract, scored(flexible))]
                .into(),
            rescoring_differs: 0,
            finish_reason: Some("length".to_owned()),
            prompt_tokens: Some(700 + doc_id as u64),
            completion_tokens: Some(100),
            latency_s: Some(1.0 + doc_id as f64),
            attempts: 1 + doc_id as u32,
            acceptance: Some(RequestAcceptance {
                acceptance_histogram: vec![10, 0, 40],
                num_draft_tokens: None,
            }),
            error: None,
        }
    }

    fn failed(doc_id: usize) -> Answer {
        Answer {
            error: Some(Failure {
                kind: FailureKind::Timeout,
                status: None,
                detail: "late".to_owned(),
                attempts: 3,
            }),
            scored: BTreeMap::new(),
            text: None,
            ..answer(doc_id, false, false)
        }
    }

    pub(crate) fn manifest() -> Manifest {
        Manifest {
            format: FORMAT,
            tool: "shardcheck-gsm8k 0".to_owned(),
            plan: plan(),
            server: ServerIdentity::default(),
            sharding: None,
            sessions: vec![Session { wall_s: 2.0, most_in_flight: 4, ..Session::default() }],
        }
    }

    #[test]
    fn a_complete_run_has_scores_in_lm_evals_keys() {
        let answers = [answer(0, true, true), answer(1, false, true), answer(2, true, true)];
        let report = RunReport::new(manifest(), &answers);
        assert!(report.is_complete());
        assert_eq!(report.outcome(), Outcome::Passed);
        let json = report.results();
        let task = &json["results"]["gsm8k"];
        assert_eq!(task["exact_match,flexible-extract"], 1.0);
        assert!((task["exact_match,strict-match"].as_f64().unwrap() - 2.0 / 3.0).abs() < 1e-15);
        assert!((task["exact_match_stderr,strict-match"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!((report.filters_disagree, report.retried, report.finished_by_length), (1, 2, 3));
        assert_eq!(report.reach.as_ref().unwrap().longest_sequence, 802);
        assert_eq!(json["shardcheck"]["latency_s"], serde_json::json!([2.0, 3.0, 3.0]));
    }

    #[test]
    fn a_failed_request_takes_the_score_away_and_leaves_bounds() {
        let answers = [answer(0, true, true), failed(1)];
        let report = RunReport::new(manifest(), &answers);
        assert_eq!((report.outcome(), report.not_sent), (Outcome::RerunOutstanding, 1));
        assert_eq!(report.results()["results"], Value::Null);
        let (low, high) = report.bounds(Filter::StrictMatch).unwrap();
        assert_eq!((low.correct, high.correct, high.total), (1, 3, 3));
        let text = report.to_string();
        assert!(text.contains("NO SCORE") && text.contains("timeout: 1"), "{text}");
        assert!(!text.contains("|strict-match"), "{text}");
    }

    #[test]
    fn per_request_acceptance_is_preferred_and_checked_against_tokens() {
        let answers = [answer(0, true, true), answer(1, true, true), answer(2, true, true)];
        let acceptance = RunReport::new(manifest(), &answers).acceptance.unwrap();
        assert_eq!(acceptance.counts.steps, 150);
        assert!(matches!(acceptance.estimate.unwrap().basis, Basis::Clustered { requests: 3 }));
        // 3 requests: 3 + 150 + 240 counted, 300 received, at most 6 cut
        assert!(acceptance.broken_identities[0].contains("not of this run"));
    }

    #[test]
    fn a_forced_acceptance_mode_is_reported_from_flags_and_log() {
        let mut with_flag = manifest();
        with_flag.server.flags_given = Some("--forced-acceptance-length 2".to_owned());
        let answers = [answer(0, true, true), answer(1, true, true), answer(2, true, true)];
        let report = RunReport::new(with_flag, &answers);
        assert_eq!(report.forced_acceptance.as_deref(), Some("forced-acceptance"));
        assert!(report.to_string().contains("FORCED ACCEPTANCE"));
    }
}
