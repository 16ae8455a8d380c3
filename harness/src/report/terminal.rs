//! The report for people: progress, failure blocks, and a summary that ends with the line against vacuity.

mod pace;
mod style;

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::claims::{EntryKind, EntryVerdict};
use crate::event::{CaseResult, Event, RunHeader};
use crate::record::KILLED;
use crate::report::block::{Block, printable, root_cause, short};
use crate::report::{Glossary, ReportError, Reporter};
use crate::status::{Exit, Status};
use crate::summary::{Summary, expected_reasons, ratio, undecided_reason};
use crate::tally::{Columns, table_of};

use pace::Pace;
pub use style::{Progress, StatusLevel, Style};

/// Full blocks that one root cause (property and stage) gets; its further cases get a line each.
const BLOCKS_PER_CAUSE: usize = 3;
/// Reasons that the summary lists for each verdict that decides nothing.
const REASONS_PER_STATUS: usize = 5;
/// Failed cases that the summary lists again.
const FAILURES_LISTED: usize = 10;

/// How the terminal report looks.
#[derive(Debug, Clone, Default)]
pub struct TerminalOptions {
    /// Colours and progress.
    pub style: Style,
    /// Verdicts that get a line or block of their own.
    pub status_level: StatusLevel,
    /// Folder of the run, told at the end.
    pub run_folder: Option<PathBuf>,
    /// Whether the table of the run is printed at its end.
    pub table: bool,
    /// Cases of a resumed run that had a verdict before.
    pub judged_before: usize,
}

/// The report for people.
pub struct TerminalReporter<W> {
    out: W,
    options: TerminalOptions,
    glossary: Glossary,
    header: Option<RunHeader>,
    started: Instant,
    bar: Option<ProgressBar>,
    pace: Pace,
    summary: Summary,
    blocks_by_cause: HashMap<(String, String), usize>,
    failed: Vec<String>,
    failed_count: usize,
    unkilled: Vec<String>,
    diagnosis: Vec<String>,
    /// Verdicts of the run, kept only where its table is printed.
    results: Vec<CaseResult>,
    claims: Vec<EntryVerdict>,
}

impl<W: Write> TerminalReporter<W> {
    /// Writes to `out`: standard error where standard output belongs to a program. A progress bar goes to standard error.
    pub fn new(out: W, options: TerminalOptions, glossary: Glossary) -> Self {
        Self {
            out,
            options,
            glossary,
            header: None,
            started: Instant::now(),
            bar: None,
            pace: Pace::new(0),
            summary: Summary::default(),
            blocks_by_cause: HashMap::new(),
            failed: Vec::new(),
            failed_count: 0,
            unkilled: Vec::new(),
            diagnosis: Vec::new(),
            results: Vec::new(),
            claims: Vec::new(),
        }
    }

    fn start(&mut self, header: &RunHeader) -> Result<(), ReportError> {
        self.started = Instant::now();
        self.pace = Pace::new(header.selected);
        let fault =
            header.fault.as_ref().map_or(String::new(), |fault| format!(", fault {}", printable(fault)));
        let line = format!(
            "{} cases of suite {} on engine {}{fault}, seed {}",
            header.selected,
            printable(&header.suite),
            printable(&header.engine),
            header.seed
        );
        if self.options.style.progress == Progress::Bar {
            let bar =
                ProgressBar::with_draw_target(Some(header.selected as u64), ProgressDrawTarget::stderr());
            let style =
                ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}").expect("the template is constant");
            bar.set_style(style);
            bar.set_position(self.options.judged_before as u64);
            self.bar = Some(bar);
        }
        self.header = Some(header.clone());
        self.print(&format!("{line}\n"))
    }

    fn judged(&mut self, result: &CaseResult) -> Result<(), ReportError> {
        self.summary.add(result);
        if self.options.table {
            self.results.push(result.clone());
        }
        let text = self.case_text(result);
        if !text.is_empty() {
            self.print(&text)?;
        }
        let done = self.options.judged_before + self.summary.total();
        let now_s = self.started.elapsed().as_secs_f64();
        let state = self.progress_text(now_s);
        match (&self.bar, self.options.style.progress) {
            (Some(bar), _) => {
                bar.set_message(state);
                bar.set_position(done as u64);
                Ok(())
            }
            (None, Progress::Lines) if self.pace.is_due(done, now_s) => {
                let selected = self.header.as_ref().map_or(done, |header| header.selected);
                self.print(&format!("[{done}/{selected}] {state}\n"))
            }
            _ => Ok(()),
        }
    }

    fn progress_text(&self, now_s: f64) -> String {
        let rate = self.summary.total() as f64 / now_s.max(1e-3);
        format!("{}, {rate:.1} cases/s", self.summary.verdicts())
    }

    /// What a case gets on the terminal, under the status level.
    fn case_text(&mut self, result: &CaseResult) -> String {
        if result.status.is_failure() {
            self.failed_count += 1;
            if self.failed.len() < FAILURES_LISTED {
                self.failed.push(result.id.clone());
            }
            let cause = result.failures().next().map(root_cause).unwrap_or_default();
            let seen = self.blocks_by_cause.entry(cause.clone()).or_insert(0);
            *seen += 1;
            let text = if *seen <= BLOCKS_PER_CAUSE {
                self.painted(&Block::of(result, self.header.as_ref().map(Into::into), &self.glossary))
            } else {
                let like = format!("as above: {}, {}", cause.0, cause.1);
                format!("{} {} ({like})\n", self.status_word(result.status), printable(&result.id))
            };
            return text;
        }
        if !self.options.status_level.shows(result.status) {
            return String::new();
        }
        let reasons: Vec<_> = expected_reasons(result).into_iter().chain(undecided_reason(result)).collect();
        let reason = match reasons.is_empty() {
            true => String::new(),
            false => format!(": {}", printable(&reasons.join("; "))),
        };
        let mut text = format!("{} {}{reason}\n", self.status_word(result.status), printable(&result.id));
        if self.options.status_level == StatusLevel::All {
            for check in &result.checks {
                let ratio = ratio(check).map_or(String::new(), |r| format!(", {} of the bound", short(r)));
                text += &format!("{:>14}  {}{ratio}\n", check.status().name(), check.property);
            }
        }
        text
    }

    fn painted(&self, block: &Block) -> String {
        let style = &self.options.style;
        let mut text = format!("{} {}\n", self.status_word(block.status), style.bold(&block.id));
        for line in &block.lines {
            let label = style.dim(&format!("{:>14}", line.label));
            let body = match line.label {
                "reproduce" => style.bold(&line.text),
                _ => line.text.clone(),
            };
            text += &format!("{label}  {body}\n");
        }
        text
    }

    fn status_word(&self, status: Status) -> String {
        self.options.style.status(status)
    }

    fn mutant(
        &mut self,
        fault: &str,
        state: &str,
        property: Option<&str>,
        tried: usize,
    ) -> Result<(), ReportError> {
        self.summary.add_fault(state);
        let killer = property.map_or(String::new(), |p| format!(" by {}", printable(p)));
        let line = format!("{state} {}{killer} ({tried} cases tried)", printable(fault));
        let is_fine = state == KILLED || state == "not_applicable";
        if !is_fine {
            self.unkilled.push(line.clone());
        }
        if is_fine && !self.options.status_level.shows(Status::Pass) {
            return Ok(());
        }
        self.print(&format!("{line}\n"))
    }

    fn finish(&mut self, elapsed_s: f64, exit_code: u8) -> Result<(), ReportError> {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        let style = self.options.style;
        let exit = Exit::ALL.into_iter().find(|exit| exit.code() == exit_code);
        let meaning = exit.map_or("unknown", Exit::meaning);
        let (before, new) = (self.options.judged_before, self.summary.total());
        let resumed = if before > 0 { format!(" ({before} more were judged before)") } else { String::new() };
        let mut text = format!("\n{}\n", style.bold(&format!("exit code {exit_code}: {meaning}")));
        text += &format!("  verdicts    {}{resumed}\n", self.summary.verdicts());
        text += &format!(
            "  elements    {} compared, {} of them for equality\n",
            self.summary.compared, self.summary.exact
        );
        text += &format!("  elapsed     {elapsed_s:.1} s, {:.1} cases/s\n", new as f64 / elapsed_s.max(1e-3));
        text += &self.families_text();
        text += &self.reasons_text();
        text += &self.failures_text();
        text += &self.claims_text();
        if let Some(folder) = &self.options.run_folder {
            text += &format!("  run folder  {}\n", folder.display());
        }
        text += &format!("{}\n", self.summary.vacuity_line());
        self.print(&text)
    }

    fn families_text(&self) -> String {
        let mut text = String::new();
        for (name, family) in &self.summary.families {
            let Some(worst) = family.worst_ratio else { continue };
            if text.is_empty() {
                text += "  largest |error| over its bound, by family\n";
            }
            let case = family.worst_case.as_deref().unwrap_or_default();
            text += &format!("    {name:<16}{:>10}  {}\n", short(worst), printable(case));
        }
        text
    }

    fn reasons_text(&self) -> String {
        let mut text = String::new();
        for (status, reasons) in &self.summary.reasons {
            let mut sorted: Vec<_> = reasons.iter().collect();
            sorted.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            for (reason, count) in sorted.iter().take(REASONS_PER_STATUS) {
                text += &format!("  {status}  {count} × {}\n", printable(reason));
            }
            if sorted.len() > REASONS_PER_STATUS {
                text += &format!("  {status}  and {} other reasons\n", sorted.len() - REASONS_PER_STATUS);
            }
        }
        text
    }

    fn failures_text(&self) -> String {
        let mut text = String::new();
        for id in &self.failed {
            text += &format!("  failed      {}\n", printable(id));
        }
        if self.failed_count > self.failed.len() {
            text += &format!("  failed      and {} more\n", self.failed_count - self.failed.len());
        }
        for line in &self.diagnosis {
            text += &format!("  diagnosis   {}\n", printable(line));
        }
        for line in &self.unkilled {
            text += &format!("  fault       {line}\n");
        }
        text
    }

    /// The table of the run where it is asked for, and what the claims came to.
    fn claims_text(&self) -> String {
        let mut text = String::new();
        if self.options.table && !self.results.is_empty() {
            text += &Columns(&table_of(&self.results)).to_string();
        }
        for verdict in self.claims.iter().filter(|verdict| verdict.status != Status::Pass) {
            let word = self.status_word(verdict.status);
            text += &format!("  claims      {word}: {}\n", printable(&verdict.text));
            for id in &verdict.cases {
                let without = if verdict.kind == EntryKind::Finding { "passes" } else { "not judged" };
                text += &format!("              {without}: {}\n", printable(id));
            }
        }
        text
    }

    fn print(&mut self, text: &str) -> Result<(), ReportError> {
        let out = &mut self.out;
        let mut write = || out.write_all(text.as_bytes()).and_then(|()| out.flush());
        let outcome = match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        };
        outcome.map_err(|source| ReportError::Stream { stream: "terminal", source })
    }
}

impl<W: Write> Reporter for TerminalReporter<W> {
    fn event(&mut self, event: &Event) -> Result<(), ReportError> {
        match event {
            Event::RunStarted(header) => self.start(header),
            Event::CaseJudged(result) => self.judged(result),
            Event::CaseFailed { .. } => Ok(()),
            Event::Diagnosed(diagnosis) => {
                self.diagnosis = diagnosis.lines();
                Ok(())
            }
            Event::ClaimJudged(verdict) => {
                self.claims.push(verdict.clone());
                Ok(())
            }
            Event::MutantTried { fault, state, property, tried, .. } => {
                self.mutant(fault, state, property.as_deref(), *tried)
            }
            Event::RunFinished { elapsed_s, exit_code, .. } => self.finish(*elapsed_s, *exit_code),
        }
    }
}

#[cfg(test)]
mod tests;
