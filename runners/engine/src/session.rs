//! The traits that an engine implements, and what it answers.

use serde::{Deserialize, Serialize};

use crate::{
    Configuration, EffectivePath, Operation, Profile, RuleSetName, Settings, TensorError, Tensors, Validation,
};

/// An engine under test.
pub trait Engine: Send + Sync {
    /// What the engine declares of itself; constant over its life.
    fn profile(&self) -> &Profile;

    /// What the engine's configuration rules say to launch settings.
    ///
    /// # Errors
    /// [`EngineError`] when the engine fails to answer. A refusal is a [`Validation`], not an error.
    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError>;

    /// Opens a session: ranks, caches and metadata for one configuration.
    ///
    /// # Errors
    /// [`EngineError`] when the engine fails. "I don't run this configuration" is [`Answer::Unsupported`].
    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError>;
}

/// State of an engine between steps.
pub trait Session: Send {
    /// Performs one operation. Inputs must come back unchanged; that they are passed as `&mut` lets the harness check it.
    ///
    /// # Errors
    /// [`EngineError`] when the engine fails; the session must not be used again then.
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError>;
}

/// An answer, or the statement that there is none to be had.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer<T> {
    /// The answer.
    Done(T),
    /// The engine does not do that, and says why. A verdict of its own, neither pass nor failure.
    Unsupported(String),
}

/// Result of a step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Reply {
    /// Outputs by name, the first axis being the rank.
    pub outputs: Tensors,
    /// What really ran.
    pub effective: EffectivePath,
    /// Collectives that each rank entered in this step, in rank order. They must be equal, or a rank waits for ever.
    pub collectives: Vec<u64>,
}

/// A failure of the engine itself. Each kind becomes a verdict of its own.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EngineError {
    /// The engine panicked, exited or returned an error of its own.
    #[error("engine crashed: {text}")]
    Crash {
        /// What it said.
        text: String,
    },
    /// The engine did not answer in time.
    #[error("engine timed out after {waited_s} s: {} waits in {waiting_in}", waiter(*rank))]
    Timeout {
        /// Rank that waits, where it can be told.
        rank: Option<usize>,
        /// What it waits in, such as the name of a collective.
        waiting_in: String,
        /// Seconds until the engine was given up.
        waited_s: f64,
    },
    /// The device went away.
    #[error("device lost: {text}")]
    DeviceLost {
        /// What the driver said.
        text: String,
    },
    /// The session was lost to something that is not its own: nothing can be said of the engine by that.
    #[error("session lost: {text}")]
    Interrupted {
        /// What happened.
        text: String,
    },
    /// The inputs do not fit the operation: a bug of the harness or of the case.
    #[error("input does not fit the operation: {0}")]
    Input(#[from] TensorError),
}

fn waiter(rank: Option<usize>) -> String {
    rank.map_or_else(|| "a rank that can't be told".to_owned(), |rank| format!("rank {rank}"))
}
