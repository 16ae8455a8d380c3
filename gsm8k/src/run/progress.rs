//! Progress of a run: a bar on a terminal, a plain line now and then elsewhere.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::dialect::Filter;
use crate::samples::SampleRow;

/// Time between two plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Counts answers and shows them on standard error.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    total: usize,
    state: Mutex<State>,
}

struct State {
    started: Instant,
    last_line: Instant,
    known: usize,
    answered: usize,
    failed: usize,
    right: BTreeMap<Filter, usize>,
}

impl Progress {
    /// Progress of `total` questions of which `known` were answered before.
    pub fn new(total: usize, known: usize, filters: &[Filter]) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
            let template = "{bar:30} {pos}/{len} {elapsed_precise} eta {eta} {msg}";
            bar.set_style(ProgressStyle::with_template(template).expect("a fixed template is valid"));
            bar.set_position(known as u64);
            bar.reset_eta();
            bar
        });
        let now = Instant::now();
        let right = filters.iter().map(|filter| (*filter, 0)).collect();
        let state = State { started: now, last_line: now, known, answered: 0, failed: 0, right };
        Self { bar, total, state: Mutex::new(state) }
    }

    /// Counts one finished request by its rows.
    pub fn count(&self, rows: &[SampleRow]) {
        let mut state = self.state.lock().expect("no thread panics here");
        if rows.iter().any(|row| row.error.is_some()) {
            state.failed += 1;
        } else {
            state.answered += 1;
            for row in rows.iter().filter(|row| row.exact_match == Some(1.0)) {
                if let Ok(filter) = row.filter.parse() {
                    *state.right.entry(filter).or_default() += 1;
                }
            }
        }
        match &self.bar {
            Some(bar) => {
                bar.set_position((state.known + state.answered) as u64);
                bar.set_message(state.summary());
            }
            None if state.last_line.elapsed() >= LINE_INTERVAL => {
                state.last_line = Instant::now();
                eprintln!("gsm8k: {}/{} {}", state.known + state.answered, self.total, state.summary());
            }
            None => {}
        }
    }

    /// Shows a remark without disturbing the bar.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(format!("gsm8k: stopping: {text}")),
            None => eprintln!("gsm8k: stopping: {text}"),
        }
    }

    /// Ends the display; returns how many requests were answered and how many failed.
    pub fn finish(&self) -> (usize, usize) {
        let state = self.state.lock().expect("threads are done");
        match &self.bar {
            Some(bar) => bar.finish_with_message(state.summary()),
            None => eprintln!("gsm8k: {}/{} {}", state.known + state.answered, self.total, state.summary()),
        }
        (state.answered, state.failed)
    }
}

impl State {
    /// Running accuracy of this session's answers, rate and failures.
    fn summary(&self) -> String {
        let seconds = self.started.elapsed().as_secs_f64().max(1e-9);
        let share = |right: usize| right as f64 / self.answered.max(1) as f64;
        let scores: Vec<String> =
            self.right.iter().map(|(filter, right)| format!("{filter} {:.4}", share(*right))).collect();
        format!("{} {:.2} q/s, {} failed", scores.join(" "), self.answered as f64 / seconds, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(filter: Filter, exact_match: Option<f64>) -> SampleRow {
        let mut row: SampleRow = serde_json::from_value(serde_json::json!({
            "doc_id": 0, "resps": [], "filtered_resps": [], "filter": filter.name(), "prompt_hash": ""
        }))
        .unwrap();
        row.exact_match = exact_match;
        if exact_match.is_none() {
            row.error = Some(crate::client::Failure {
                kind: crate::client::FailureKind::Cut,
                status: None,
                detail: String::new(),
                attempts: 1,
            });
        }
        row
    }

    #[test]
    fn answers_failures_and_running_accuracy_are_counted_per_filter() {
        let progress = Progress::new(10, 4, &[Filter::StrictMatch, Filter::FlexibleExtract]);
        progress.count(&[row(Filter::StrictMatch, Some(0.0)), row(Filter::FlexibleExtract, Some(1.0))]);
        progress.count(&[row(Filter::StrictMatch, Some(1.0)), row(Filter::FlexibleExtract, Some(1.0))]);
        progress.count(&[row(Filter::StrictMatch, None), row(Filter::FlexibleExtract, None)]);
        let summary = progress.state.lock().unwrap().summary();
        assert!(summary.starts_with("strict-match 0.5000 flexible-extract 1.0000"), "{summary}");
        assert!(summary.ends_with("1 failed"), "{summary}");
        assert_eq!(progress.finish(), (2, 1));
    }
}
