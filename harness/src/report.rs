//! Reports: every format is fed by the same events, so that none can say what another does not.

pub mod block;
pub mod github;
pub mod html;
pub mod json;
pub mod junit;
pub mod terminal;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use crate::event::Event;
use crate::run_directory::RunDirectoryError;

/// A format that results are reported in.
pub trait Reporter {
    /// Takes one event of the run, in order. What is reported at the end is written at [`Event::RunFinished`].
    ///
    /// # Errors
    /// [`ReportError`] when the report can't be written.
    fn event(&mut self, event: &Event) -> Result<(), ReportError>;
}

/// A report that can't be written, and where.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The terminal or pipe is closed.
    #[error("failed to write to the {stream}: {source}")]
    Stream {
        /// Which.
        stream: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The file can't be written.
    #[error(transparent)]
    File(#[from] RunDirectoryError),
    /// A bug of the report.
    #[error("failed to lay out {}: {reason}; report it as a bug of shardcheck", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What the library said.
        reason: String,
    },
}

/// One sentence for each property, for reports to explain what failed.
#[derive(Debug, Clone, Default)]
pub struct Glossary(BTreeMap<String, String>);

impl Glossary {
    /// A glossary of `(property id, sentence)` pairs.
    pub fn new(sentences: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>) -> Self {
        Self(sentences.into_iter().map(|(id, sentence)| (id.into(), sentence.into())).collect())
    }

    /// The sentence of a property, if it is known.
    pub fn sentence(&self, property: &str) -> Option<&str> {
        self.0.get(property).map(String::as_str)
    }
}

/// Feeds events to several reporters; the first error does not keep the others from theirs.
#[derive(Default)]
pub struct Reporters(Vec<Box<dyn Reporter + Send>>);

impl Reporters {
    /// No reporter.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one, builder style.
    #[must_use]
    pub fn with(mut self, reporter: impl Reporter + Send + 'static) -> Self {
        self.0.push(Box::new(reporter));
        self
    }
}

impl Reporter for Reporters {
    fn event(&mut self, event: &Event) -> Result<(), ReportError> {
        let outcomes: Vec<_> = self.0.iter_mut().map(|reporter| reporter.event(event)).collect();
        outcomes.into_iter().collect()
    }
}
