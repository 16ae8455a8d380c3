//! A sequence: the steps that one session of an engine goes through, with requests that come, grow, fork and go.

mod content;
mod generated;
mod import;
mod schedule;
mod spelling;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{CacheLayout, Configuration};

use crate::{CaseError, Family};

pub use generated::generate_sequence;
pub use import::Import;
pub use schedule::{Turn, peak_blocks, turns};
pub(crate) use spelling::{read_steps, spell_steps};

/// Most steps of a sequence.
pub const MAX_STEPS: usize = 256;
/// Most tokens of all requests of a sequence, rejected ones included: each has content of its own, 2^46 elements of a tensor of 2^60.
pub const MAX_SEQUENCE_TOKENS: usize = 1 << 14;
/// Requests of a sequence have numbers below this.
pub const MAX_SEQUENCE_REQUESTS: usize = 64;

/// What the engine computes in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunKind {
    /// New tokens are written and attend to the gathered context and to each other (a chunk of a prefill).
    Prefill,
    /// One new token a request is written and attends to all tokens of its request.
    Decode,
    /// Several new tokens a request are written and attend causally.
    Verify,
    /// A block of draft tokens is written and attends to the whole request, without a mask.
    Draft,
}

impl RunKind {
    /// All kinds, in a stable order.
    pub const ALL: [Self; 4] = [Self::Prefill, Self::Decode, Self::Verify, Self::Draft];

    /// Name in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Draft => "draft",
        }
    }

    /// The family of single-step cases that asks for the same operation.
    pub fn family(self) -> Family {
        match self {
            Self::Prefill => Family::Context,
            Self::Decode => Family::Decode,
            Self::Verify => Family::Verify,
            Self::Draft => Family::Draft,
        }
    }
}

impl fmt::Display for RunKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for RunKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            format!("unknown kind of step {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// New tokens of one request in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewTokens {
    /// Number of the request; a number that is new, or was freed, begins a request.
    pub request: usize,
    /// New tokens; 0 leaves the request in the batch without a row.
    pub tokens: usize,
}

/// One step of a sequence: a run of the engine, or what the scheduler does between two runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "step", deny_unknown_fields)]
pub enum Step {
    /// The engine writes the new tokens of a batch and attends.
    Run {
        /// What it computes.
        kind: RunKind,
        /// The batch, in its order.
        batch: Vec<NewTokens>,
        /// Rows by which the step is padded to its graph bucket.
        padded_rows: usize,
        /// Workspace of one context gather in tokens; prefill only, 0 elsewhere.
        chunk_budget_tokens: usize,
    },
    /// The last tokens of a request are rejected: their slots are written again by the tokens that take their place.
    Reject {
        /// Number of the request.
        request: usize,
        /// Tokens that are taken back.
        tokens: usize,
    },
    /// A new request finds whole virtual blocks of another one's prefix in the cache and shares them.
    Hit {
        /// Number of the new request.
        request: usize,
        /// Number of the request whose blocks are shared.
        source: usize,
        /// Virtual blocks that are shared.
        blocks: usize,
    },
    /// A request ends; blocks that nobody shares are the next to be given away.
    Free {
        /// Number of the request.
        request: usize,
    },
    /// A request loses its blocks but goes on later: its tokens must be computed again.
    Evict {
        /// Number of the request.
        request: usize,
    },
    /// Requests that hold no token yet, or none any more, come with the caches of a session of another layout.
    Import {
        /// The requests, and how many tokens of each come.
        batch: Vec<NewTokens>,
        /// Layout of the caches that they come with.
        source: CacheLayout,
    },
}

/// A session: what it is opened with, and its steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SequenceCase {
    /// What the sequence is after, a name in kebab case; `generated` for drawn ones. Nothing depends on it.
    pub name: String,
    /// Name of the model whose shape this is, or `custom`.
    pub model: String,
    /// What the session is opened with.
    pub configuration: Configuration,
    /// MLA: no up-projection is given and the output stays in the latent space. Prefill steps of MLA are always so.
    #[serde(default)]
    pub latent_output: bool,
    /// The steps.
    pub steps: Vec<Step>,
}

impl SequenceCase {
    /// The same steps in the second KV group, where there is one: its own configuration, and prefixes that are shared counted in its
    /// own blocks.
    ///
    /// # Errors
    /// A shared prefix that is not made of whole blocks of the group, or an import, which comes for one group alone.
    pub fn in_second_group(&self) -> Result<Option<Self>, String> {
        let Some(configuration) = self.configuration.group(1) else { return Ok(None) };
        let (first, own) = (self.configuration.virtual_block_tokens(), configuration.virtual_block_tokens());
        let step = |(index, step): (usize, &Step)| match step {
            Step::Hit { request, source, blocks } => match blocks * first % own.max(1) {
                0 => {
                    Ok(Step::Hit { request: *request, source: *source, blocks: blocks * first / own.max(1) })
                }
                _ => Err(format!(
                    "step {}: the prefix is no whole number of blocks of the second KV group",
                    index + 1
                )),
            },
            Step::Import { .. } => {
                Err(format!("step {}: an import into two KV groups is not defined", index + 1))
            }
            other => Ok(other.clone()),
        };
        let steps = self.steps.iter().enumerate().map(step).collect::<Result<_, _>>()?;
        let latent_output = self.latent_output && configuration.attention.is_mla();
        Ok(Some(Self {
            configuration,
            latent_output,
            steps,
            name: self.name.clone(),
            model: self.model.clone(),
        }))
    }

    /// Checks that the steps can be taken one after the other within the blocks of the caches, and that each is a case by
    /// itself.
    ///
    /// # Errors
    /// [`CaseError::OutOfRange`] with the first step that can't be taken, and why.
    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let kebab = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if self.name.is_empty() || !self.name.chars().all(kebab) {
            let name = &self.name;
            return Err(CaseError::OutOfRange(format!("name {name:?} is not made of a-z, 0-9 and -")));
        }
        // sizes first: the schedule divides by them
        self.configuration.check().map_err(|error| CaseError::OutOfRange(error.reason))?;
        if let Some(second) = self.in_second_group().map_err(CaseError::OutOfRange)? {
            second.check()?;
        }
        let turns = turns(self, 0).map_err(CaseError::OutOfRange)?;
        if turns.is_empty() {
            return Err(CaseError::OutOfRange("no step runs the engine".to_owned()));
        }
        for turn in &turns {
            let mut case = turn.case(self);
            // that the blocks suffice is known: shared ones would be counted twice
            case.configuration.blocks += turn.blocks.iter().map(Vec::len).sum::<usize>();
            crate::check::check_attention(turn.kind.family(), &case)
                .map_err(|error| error.at_step(turn.step + 1))?;
        }
        Ok(())
    }
}
