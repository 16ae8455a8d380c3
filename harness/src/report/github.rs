//! Annotations of GitHub Actions: one for each root cause, so that one bug is one annotation.

use std::collections::BTreeMap;
use std::io::Write;

use crate::event::{CaseResult, Event, RunHeader};
use crate::record::KILLED;
use crate::report::block::{Block, root_cause};
use crate::report::{Glossary, ReportError, Reporter};

/// Annotations of one run; GitHub shows ten of a kind for each step and drops the rest.
pub const MOST_ANNOTATIONS: usize = 10;

/// Cases of one root cause.
struct Cause {
    cases: usize,
    first: CaseResult,
}

/// Writes annotations when the run ends.
pub struct GithubReporter<W> {
    out: W,
    glossary: Glossary,
    header: Option<RunHeader>,
    causes: BTreeMap<(String, String), Cause>,
    unkilled: Vec<String>,
    claims: Vec<(String, String)>,
}

impl<W: Write> GithubReporter<W> {
    /// Writes to `out`, which must be what the runner of GitHub Actions reads: standard output or standard error.
    pub fn new(out: W, glossary: Glossary) -> Self {
        Self {
            out,
            glossary,
            header: None,
            causes: BTreeMap::new(),
            unkilled: Vec::new(),
            claims: Vec::new(),
        }
    }

    /// Whether the program runs under GitHub Actions: `GITHUB_ACTIONS` is `true`.
    pub fn is_wanted(github_actions: Option<&str>) -> bool {
        github_actions == Some("true")
    }

    fn take_in(&mut self, result: &CaseResult) {
        let mut causes: Vec<_> = result.failures().map(root_cause).collect();
        causes.dedup();
        if causes.is_empty() && result.status.is_failure() {
            causes.push((result.status.name().to_owned(), "no property".to_owned()));
        }
        for cause in causes {
            self.causes
                .entry(cause)
                .and_modify(|known| known.cases += 1)
                .or_insert_with(|| Cause { cases: 1, first: result.clone() });
        }
    }

    fn annotations(&self) -> Vec<String> {
        let mut lines: Vec<String> = self
            .causes
            .iter()
            .map(|((property, stage), cause)| {
                let others = match cause.cases {
                    1 => String::new(),
                    n => format!("{} other cases fail of the same\n", n - 1),
                };
                let block = Block::of(&cause.first, self.header.as_ref().map(Into::into), &self.glossary);
                annotation(&format!("{property}: {stage}"), &format!("{block}{others}"))
            })
            .collect();
        lines.extend(self.claims.iter().map(|(title, text)| annotation(title, text)));
        lines.extend(self.unkilled.iter().map(|line| annotation("fault not killed", line)));
        if lines.len() > MOST_ANNOTATIONS {
            let left_out = lines.len() - (MOST_ANNOTATIONS - 1);
            lines.truncate(MOST_ANNOTATIONS - 1);
            let text = format!("{left_out} further causes are in the log and in the report of the run");
            lines.push(annotation("further causes", &text));
        }
        lines
    }
}

impl<W: Write> Reporter for GithubReporter<W> {
    fn event(&mut self, event: &Event) -> Result<(), ReportError> {
        match event {
            Event::RunStarted(header) => self.header = Some((**header).clone()),
            Event::CaseJudged(result) => self.take_in(result),
            Event::MutantTried { fault, state, tried, .. }
                if state != KILLED && state != "not_applicable" =>
            {
                self.unkilled.push(format!("{fault}: {state}, {tried} cases tried"));
            }
            Event::ClaimJudged(verdict) if verdict.status.is_failure() => {
                let title = format!("claims: {} {}", verdict.status, verdict.entry);
                self.claims.push((title, format!("{}\n{}", verdict.text, verdict.cases.join("\n"))));
            }
            Event::RunFinished { .. } => {
                let text: String = self.annotations().concat();
                return self
                    .out
                    .write_all(text.as_bytes())
                    .and_then(|()| self.out.flush())
                    .map_err(|source| ReportError::Stream { stream: "log of GitHub Actions", source });
            }
            _ => {}
        }
        Ok(())
    }
}

/// One workflow command. Line ends and percent signs are escaped in its message, colons and commas in its title as well
/// (GitHub, "Workflow commands", as `actions/toolkit` escapes them).
fn annotation(title: &str, message: &str) -> String {
    let escape = |text: &str| text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let title = escape(title).replace(':', "%3A").replace(',', "%2C");
    format!("::error title={title}::{}\n", escape(message.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Failure, Stage};
    use crate::sample;

    fn annotations(events: &[Event]) -> Vec<String> {
        let mut out = Vec::new();
        let mut reporter = GithubReporter::new(&mut out, Glossary::default());
        events.iter().for_each(|event| reporter.event(event).unwrap());
        String::from_utf8(out).unwrap().lines().map(str::to_owned).collect()
    }

    fn finished() -> Event {
        Event::RunFinished { counts: Default::default(), elapsed_s: 1.0, exit_code: 1 }
    }

    #[test]
    fn cases_of_one_cause_get_one_annotation() {
        let lines = annotations(&sample::events(&sample::header()));
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert!(lines.iter().any(|line| line.contains("claims%3A unexpected_pass nan-leaks")), "{lines:?}");
        let merge = lines.iter().find(|line| line.contains("merge")).unwrap();
        assert!(merge.starts_with("::error title=attention.bound%3A merge::fail verify/tiny-mla"), "{merge}");
        assert!(merge.ends_with("%0A1 other cases fail of the same"), "{merge}");
        assert!(
            lines.iter().any(|line| line.contains("swap-lanes%3A") || line.contains("swap-lanes: survived"))
        );
    }

    #[test]
    fn annotations_are_capped_and_the_rest_is_counted() {
        let mut events: Vec<Event> = (0..25)
            .map(|index| {
                let stage = Stage::ALL[index % Stage::ALL.len()];
                let failure = Failure::because("broken").at(stage);
                let mut result = sample::failed(&format!("verify/{index}"), failure);
                result.checks[1].property = format!("property-{index}");
                Event::CaseJudged(result)
            })
            .collect();
        events.push(finished());
        let lines = annotations(&events);
        assert_eq!(lines.len(), MOST_ANNOTATIONS);
        assert!(lines[9].contains("16 further causes"), "{}", lines[9]);
    }

    #[test]
    fn a_message_cannot_start_a_command_of_its_own() {
        let failure = Failure::because("50% gone\n::set-output name=x::y");
        let lines = annotations(&[Event::CaseJudged(sample::failed("verify/a", failure)), finished()]);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("50%25 gone%0A"), "{}", lines[0]);
    }

    #[test]
    fn a_clean_run_is_silent() {
        assert!(annotations(&[Event::CaseJudged(sample::passed("decode/a", 0.5)), finished()]).is_empty());
    }

    #[test]
    fn annotations_are_wanted_under_github_actions_alone() {
        assert!(GithubReporter::<Vec<u8>>::is_wanted(Some("true")));
        assert!(!GithubReporter::<Vec<u8>>::is_wanted(Some("")));
        assert!(!GithubReporter::<Vec<u8>>::is_wanted(None));
    }
}
