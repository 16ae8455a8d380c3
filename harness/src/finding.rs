//! What judging a property found: a measurement, or a failure that says where.

use serde::{Deserialize, Serialize};

use crate::status::Status;

/// Where in the way of a step a value first goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Owner, local index, lengths, slots.
    Layout,
    /// Choice of the experts of a row.
    Routing,
    /// Choice of the tokens that a row attends to.
    Selection,
    /// Local length of a query row: which keys it may see.
    RowBound,
    /// Cast and store into the cache.
    Write,
    /// All-gather or replication of the queries.
    Query,
    /// Gather and reorder of a cached context.
    Gather,
    /// Attention over the rank's own tokens.
    Partial,
    /// Collective that carries partials.
    Exchange,
    /// Merge by LSE.
    Merge,
    /// Projection and final rounding.
    Output,
    /// Configuration rules.
    Configuration,
}

impl Stage {
    /// All stages in the order of a step.
    pub const ALL: [Self; 12] = [
        Self::Layout,
        Self::Routing,
        Self::Selection,
        Self::RowBound,
        Self::Write,
        Self::Query,
        Self::Gather,
        Self::Partial,
        Self::Exchange,
        Self::Merge,
        Self::Output,
        Self::Configuration,
    ];

    /// Name in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Layout => "layout",
            Self::Routing => "routing",
            Self::Selection => "selection",
            Self::RowBound => "row bound",
            Self::Write => "write",
            Self::Query => "query gather",
            Self::Gather => "context gather",
            Self::Partial => "partial attention",
            Self::Exchange => "exchange",
            Self::Merge => "merge",
            Self::Output => "output",
            Self::Configuration => "configuration",
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The element that misses its bound by most.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// Tensor that it lies in.
    pub tensor: String,
    /// Where, in words: `rank 1, request 0 row 2 (position 258), head 5, dim 17`.
    pub place: String,
    /// Value that the engine gave. As text, so that NaN and infinities survive JSON.
    pub seen: String,
    /// Value that the oracle gives.
    pub expected: String,
    /// What was allowed, in words: an interval or "exact".
    pub allowed: String,
    /// |seen − expected| over the allowed deviation; `None` when either is not finite.
    pub ratio: Option<f64>,
}

/// Why a property does not hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// One sentence.
    pub headline: String,
    /// The worst element, where values were compared.
    pub worst: Option<Worst>,
    /// Elements out of bound.
    pub out_of_bound: u64,
    /// Elements compared.
    pub compared: u64,
    /// First stage that diverges, where it can be told.
    pub stage: Option<Stage>,
    /// Further lines: rows concerned, what fixed tolerances would have said, attributed tokens.
    pub notes: Vec<String>,
}

impl Failure {
    /// A failure that is a statement rather than a comparison.
    pub fn because(headline: impl Into<String>) -> Self {
        Self {
            headline: headline.into(),
            worst: None,
            out_of_bound: 0,
            compared: 0,
            stage: None,
            notes: Vec::new(),
        }
    }

    /// Names the stage, builder style.
    #[must_use]
    pub fn at(mut self, stage: Stage) -> Self {
        self.stage = Some(stage);
        self
    }

    /// Adds a line, builder style.
    #[must_use]
    pub fn note(mut self, line: impl Into<String>) -> Self {
        self.notes.push(line.into());
        self
    }
}

/// What the residual of a whole output shows: for reports, to follow drift.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Mean of ((seen − expected)/σ)².
    pub chi_square: Option<f64>,
    /// Largest score of a matched filter, in standard deviations.
    pub top_score: Option<f64>,
    /// Largest |error| over the probable bound.
    pub probable_ratio: Option<f64>,
    /// Largest difference of a merged LSE.
    pub lse_difference: Option<f64>,
    /// States (row and head) that took no part.
    pub excluded_states: u64,
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let number = |value: Option<f64>| value.map_or("unknown".to_owned(), |value| format!("{value:.3}"));
        let lse = self.lse_difference.map_or("unknown".to_owned(), |value| format!("{value:.1e}"));
        write!(
            f,
            "mean squared deviation {}, top score {}, {} of the probable bound, LSE off by {lse} at most, {} states excluded",
            number(self.chi_square),
            number(self.top_score),
            number(self.probable_ratio),
            self.excluded_states
        )
    }
}

/// Figures of a property that holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Elements compared.
    pub compared: u64,
    /// Largest |error| over its bound; 0 where equality was asked.
    pub worst_ratio: f64,
    /// Elements for which equality was asked.
    pub exact: u64,
    /// What the residual shows, where it was examined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figures: Option<Figures>,
}

impl Measured {
    /// `count` elements that had to be equal, and were.
    pub fn exact(count: usize) -> Self {
        Self { compared: count as u64, worst_ratio: 0.0, exact: count as u64, figures: None }
    }

    /// Figures of two comparisons together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            compared: self.compared + other.compared,
            worst_ratio: self.worst_ratio.max(other.worst_ratio),
            exact: self.exact + other.exact,
            figures: self.figures.or(other.figures),
        }
    }
}

/// Outcome of judging one property on one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// Holds.
    Holds(Measured),
    /// Does not hold.
    Broken(Box<Failure>),
    /// Can't be decided, and why.
    Inconclusive(String),
    /// The engine does not do it, and why.
    Unsupported(String),
    /// The engine failed while it was asked.
    Engine {
        /// Crash, Timeout, DeviceLost or HarnessError.
        status: Status,
        /// What happened.
        text: String,
    },
}

impl Finding {
    /// The verdict.
    pub fn status(&self) -> Status {
        match self {
            Self::Holds(_) => Status::Pass,
            Self::Broken(_) => Status::Fail,
            Self::Inconclusive(_) => Status::Inconclusive,
            Self::Unsupported(_) => Status::Unsupported,
            Self::Engine { status, .. } => *status,
        }
    }
}
