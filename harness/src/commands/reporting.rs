//! Options of reports, and the reports that they ask for.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use crate::cli::CommandError;
use crate::event::{CaseResult, Event};
use crate::finding::Finding;
use crate::properties;
use crate::report::block::{Block, Origin, short};
use crate::report::github::GithubReporter;
use crate::report::html::HtmlReporter;
use crate::report::json::JsonReporter;
use crate::report::junit::JunitReporter;
use crate::report::terminal::{Progress, StatusLevel, Style, TerminalOptions, TerminalReporter};
use crate::report::{Glossary, Reporter, Reporters};
use crate::run_directory::RunDirectory;
use crate::status::Status;

/// Options of reports.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Reports")]
pub struct ReportArgs {
    /// Write a JUnit file: a testcase for every judged or skipped case
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,

    /// Write the HTML report to this file as well; a run folder always holds one
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// What goes to standard output: text for people, or one JSON event a line (text then goes to standard error)
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    message_format: MessageFormat,

    /// Verdicts that get lines of their own
    #[arg(long, value_enum, default_value = "fail", value_name = "LEVEL")]
    status_level: StatusLevel,

    /// Print the table of the run: checks by family and property area, and why the rest was not judged. Always for
    /// engines other than the embedded one; results.json holds it for every run
    #[arg(long)]
    table: bool,

    /// Show no progress
    #[arg(long)]
    no_progress: bool,
}

impl ReportArgs {
    /// Whether reports can be written where they are asked for; to be told before hours of work, not after.
    ///
    /// # Errors
    /// [`CommandError::Usage`] with the option and the folder that is missing.
    pub(super) fn check(&self) -> Result<(), CommandError> {
        for (option, path) in [("--junit", &self.junit), ("--html", &self.html)] {
            let Some(path) = path else { continue };
            let target = behind_links(path);
            let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
            if folder.is_some_and(|folder| !folder.is_dir()) || target.is_dir() || target.is_symlink() {
                return Err(CommandError::Usage(format!(
                    "{option} {}: no file can be written there; name a file in a folder that exists",
                    path.display()
                )));
            }
        }
        Ok(())
    }
}

/// Links that are followed from one to the next.
const MOST_LINKS: usize = 40;

/// The file that is written when `path` is: what a chain of links ends in, there or not; a link where they go in a circle.
fn behind_links(path: &Path) -> PathBuf {
    let mut target = path.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(next) = std::fs::read_link(&target) else { break };
        // a link is meant from the folder that it lies in
        target = target.parent().unwrap_or_else(|| Path::new("")).join(next);
    }
    target
}

/// What goes to standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MessageFormat {
    /// Text for people
    Human,
    /// One JSON event a line, as in events.jsonl
    Json,
}

/// Sentences of all properties.
pub(super) fn glossary() -> Glossary {
    Glossary::new(properties::all().map(|property| (property.id, property.statement)))
}

/// The reports that the options ask for, fed by one stream of events; `table` asks for the table of the run as well.
pub(super) fn reporters(args: &ReportArgs, directory: &RunDirectory, table: bool) -> Reporters {
    let to_stderr = args.message_format == MessageFormat::Json;
    let is_terminal =
        if to_stderr { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
    let variable = |name: &str| std::env::var_os(name);
    let mut style = Style::detect(is_terminal, variable("NO_COLOR").as_deref(), variable("TERM").as_deref());
    if args.no_progress {
        style.progress = Progress::Off;
    }
    let options = TerminalOptions {
        style,
        status_level: args.status_level,
        run_folder: Some(directory.path().to_owned()),
        table: table || args.table,
        judged_before: 0,
    };
    let mut reporters = Reporters::new();
    if to_stderr {
        reporters = reporters.with(JsonReporter::new(std::io::stdout())).with(TerminalReporter::new(
            std::io::stderr(),
            options,
            glossary(),
        ));
    } else {
        reporters = reporters.with(TerminalReporter::new(std::io::stdout(), options, glossary()));
    }
    reporters = reporters
        .with(JunitReporter::new(directory.path().join("junit.xml"), glossary()))
        .with(HtmlReporter::new(directory.path().join("report.html"), glossary()));
    if let Some(path) = &args.junit {
        reporters = reporters.with(JunitReporter::new(path.clone(), glossary()));
    }
    if let Some(path) = &args.html {
        reporters = reporters.with(HtmlReporter::new(path.clone(), glossary()));
    }
    if GithubReporter::<std::io::Stdout>::is_wanted(std::env::var("GITHUB_ACTIONS").ok().as_deref()) {
        // annotations are read from either stream; standard output must stay JSON lines where it was asked for
        reporters = if to_stderr {
            reporters.with(GithubReporter::new(std::io::stderr(), glossary()))
        } else {
            reporters.with(GithubReporter::new(std::io::stdout(), glossary()))
        };
    }
    reporters
}

/// Feeds events to reporters; a closed pipe or a full disk must not end the run, so the first error waits until its end.
pub(super) struct Feed {
    reporters: Reporters,
    first_error: Option<String>,
}

impl Feed {
    /// A feed of `reporters`.
    pub fn new(reporters: Reporters) -> Self {
        Self { reporters, first_error: None }
    }

    /// Passes an event on.
    pub fn event(&mut self, event: &Event) {
        if let Err(error) = self.reporters.event(event) {
            self.first_error.get_or_insert_with(|| error.to_string());
        }
    }

    /// The first report that could not be written.
    ///
    /// # Errors
    /// [`CommandError::Usage`]: the results themselves are in the run folder.
    pub fn finish(self) -> Result<(), CommandError> {
        match self.first_error {
            None => Ok(()),
            Some(error) => Err(CommandError::Usage(format!("a report could not be written: {error}"))),
        }
    }
}

/// Everything that was found of a case, whatever its verdict.
pub(super) fn full_text(result: &CaseResult, origin: Option<Origin<'_>>) -> String {
    if result.status.is_failure() {
        return Block::of(result, origin, &glossary()).to_string();
    }
    let mut text = format!("{} {}\n", result.status, result.id);
    for check in &result.checks {
        let what = match &check.finding {
            Finding::Holds(measured) => {
                let figures = measured.figures.map(|figures| format!("; {figures}")).unwrap_or_default();
                format!(
                    "{} elements, {} of them exact, largest |error|/bound {}{figures}",
                    measured.compared,
                    measured.exact,
                    short(measured.worst_ratio)
                )
            }
            Finding::Inconclusive(why) | Finding::Unsupported(why) => why.clone(),
            Finding::Broken(failure) => failure.headline.clone(),
            Finding::Engine { text, .. } => text.clone(),
        };
        let status = check.status();
        let status = if status == Status::Pass { "holds" } else { status.name() };
        text += &format!("  {:<28} {status}: {what}\n", check.property);
        if let Some(expected) = &check.expected {
            let (entry, reason) = (&expected.entry, &expected.reason);
            text += &format!("  {:<28} {entry}: {reason} ({})\n", "", expected.reference);
        }
    }
    text
}
