//! The report as one HTML file: no network, readable without script.

mod histogram;
mod page;

use std::path::PathBuf;

use minijinja::Environment;
use minijinja::value::Serde;

use crate::event::Event;
use crate::record::RunRecord;
use crate::report::{Glossary, ReportError, Reporter};
use crate::run_directory::write_atomically;

use page::Page;

/// Name of the template. Its ending turns escaping on.
const TEMPLATE: &str = "page.html";

/// Writes an HTML file when the run ends.
pub struct HtmlReporter {
    path: PathBuf,
    glossary: Glossary,
    record: Option<RunRecord>,
}

impl HtmlReporter {
    /// Writes to `path`.
    pub fn new(path: PathBuf, glossary: Glossary) -> Self {
        Self { path, glossary, record: None }
    }
}

impl Reporter for HtmlReporter {
    fn event(&mut self, event: &Event) -> Result<(), ReportError> {
        RunRecord::follow(&mut self.record, event);
        let (Event::RunFinished { .. }, Some(record)) = (event, &self.record) else { return Ok(()) };
        let text = render(record, &self.glossary)
            .map_err(|reason| ReportError::Layout { path: self.path.clone(), reason })?;
        Ok(write_atomically(&self.path, &text)?)
    }
}

/// The HTML document of a run, finished or killed.
///
/// # Errors
/// What the template engine says; that is a bug.
pub fn render(record: &RunRecord, glossary: &Glossary) -> Result<String, String> {
    let mut environment = Environment::new();
    environment.add_template(TEMPLATE, include_str!("html/page.html")).map_err(|error| error.to_string())?;
    let template = environment.get_template(TEMPLATE).map_err(|error| error.to_string())?;
    template.render(Serde(Page::of(record, glossary))).map_err(|error| format!("{error:#}"))
}

/// Anchor of a case in the page: stable, so that a link to it outlives the run.
pub fn case_anchor(id: &str) -> String {
    format!("case-{}", &blake3::hash(id.as_bytes()).to_hex()[..12])
}

#[cfg(test)]
mod tests;
