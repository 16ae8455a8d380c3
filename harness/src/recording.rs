//! Recording of what an engine answered, and an engine that answers from such a recording.
//!
//! A case that failed is stored with every step's inputs and reply. [`Recorded`] plays them back, so that `judge`
//! decides again with the same properties and without the hardware.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, RuleSetName, Session, Settings,
    Tensors, Validation,
};

/// Version of the recording format.
pub const RECORD_SCHEMA_VERSION: u32 = 1;

/// One step of a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// What was asked.
    pub operation: Operation,
    /// Inputs before the step.
    pub inputs: Tensors,
    /// Inputs after the step, when the engine changed them.
    pub inputs_after: Option<Tensors>,
    /// What was answered.
    pub answer: Answered<Reply>,
}

/// An answer in a form that can be stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answered<T> {
    /// The answer.
    Done(T),
    /// Why there is none.
    Unsupported(String),
    /// The engine crashed.
    Crash(String),
    /// The engine did not answer.
    Timeout {
        /// Rank that waits.
        rank: Option<usize>,
        /// What it waits in.
        waiting_in: String,
        /// Seconds waited.
        waited_s: f64,
    },
    /// The device went away.
    DeviceLost(String),
    /// The session was lost to something that is not its own.
    Interrupted(String),
    /// The inputs did not fit.
    Input(String),
}

impl<T: Clone> Answered<T> {
    fn of(result: &Result<Answer<T>, EngineError>) -> Self {
        match result {
            Ok(Answer::Done(value)) => Self::Done(value.clone()),
            Ok(Answer::Unsupported(why)) => Self::Unsupported(why.clone()),
            Err(EngineError::Crash { text }) => Self::Crash(text.clone()),
            Err(EngineError::Timeout { rank, waiting_in, waited_s }) => {
                Self::Timeout { rank: *rank, waiting_in: waiting_in.clone(), waited_s: *waited_s }
            }
            Err(EngineError::DeviceLost { text }) => Self::DeviceLost(text.clone()),
            Err(EngineError::Interrupted { text }) => Self::Interrupted(text.clone()),
            Err(EngineError::Input(error)) => Self::Input(error.to_string()),
        }
    }

    pub(crate) fn play(self) -> Result<Answer<T>, EngineError> {
        match self {
            Self::Done(value) => Ok(Answer::Done(value)),
            Self::Unsupported(why) => Ok(Answer::Unsupported(why)),
            Self::Crash(text) => Err(EngineError::Crash { text }),
            Self::Timeout { rank, waiting_in, waited_s } => {
                Err(EngineError::Timeout { rank, waiting_in, waited_s })
            }
            Self::DeviceLost(text) => Err(EngineError::DeviceLost { text }),
            Self::Interrupted(text) => Err(EngineError::Interrupted { text }),
            Self::Input(text) => Err(EngineError::Crash { text: format!("input did not fit: {text}") }),
        }
    }
}

/// One session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionRecord {
    /// What it was opened with.
    pub configuration: Configuration,
    /// Whether and why it did not open.
    pub opened: Answered<()>,
    /// Its steps.
    pub steps: Vec<StepRecord>,
}

/// One question about settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValidationRecord {
    /// Whose rules.
    pub rules: RuleSetName,
    /// What was asked for.
    pub settings: Settings,
    /// What was answered.
    pub answer: Answered<Validation>,
}

/// Everything that an engine was asked for one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    /// Version of this format.
    pub schema_version: u32,
    /// The engine's profile.
    pub profile: Profile,
    /// Sessions in the order in which they were opened.
    pub sessions: Vec<SessionRecord>,
    /// Questions about settings, in order.
    pub validations: Vec<ValidationRecord>,
}

/// An engine that passes everything on and keeps a copy.
pub struct Recorder<'a> {
    engine: &'a dyn Engine,
    recording: Arc<Mutex<Recording>>,
}

impl<'a> Recorder<'a> {
    /// A recorder before `engine`.
    pub fn new(engine: &'a dyn Engine) -> Self {
        let recording = Recording {
            schema_version: RECORD_SCHEMA_VERSION,
            profile: engine.profile().clone(),
            sessions: Vec::new(),
            validations: Vec::new(),
        };
        Self { engine, recording: Arc::new(Mutex::new(recording)) }
    }

    /// What was recorded so far.
    pub fn recording(&self) -> Recording {
        lock(&self.recording).clone()
    }
}

impl Engine for Recorder<'_> {
    fn profile(&self) -> &Profile {
        self.engine.profile()
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        let answer = self.engine.validate(rules, settings);
        lock(&self.recording).validations.push(ValidationRecord {
            rules,
            settings: settings.clone(),
            answer: Answered::of(&answer),
        });
        answer
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        let opened = self.engine.open(configuration);
        let (note, result) = match opened {
            Ok(Answer::Done(session)) => (Answered::Done(()), Ok(Answer::Done(session))),
            Ok(Answer::Unsupported(why)) => {
                (Answered::Unsupported(why.clone()), Ok(Answer::Unsupported(why)))
            }
            Err(error) => (Answered::of(&Err::<Answer<()>, _>(error.clone())), Err(error)),
        };
        let index = {
            let mut recording = lock(&self.recording);
            recording.sessions.push(SessionRecord {
                configuration: configuration.clone(),
                opened: note,
                steps: Vec::new(),
            });
            recording.sessions.len() - 1
        };
        Ok(match result? {
            Answer::Done(session) => Answer::Done(Box::new(RecordingSession {
                session,
                recording: Arc::clone(&self.recording),
                index,
            })),
            Answer::Unsupported(why) => Answer::Unsupported(why),
        })
    }
}

struct RecordingSession {
    session: Box<dyn Session>,
    recording: Arc<Mutex<Recording>>,
    index: usize,
}

impl Session for RecordingSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let before = inputs.clone();
        let answer = self.session.step(operation, inputs);
        // a step that failed may have left its inputs behind
        let inputs_after = (answer.is_ok() && *inputs != before).then(|| inputs.clone());
        let step = StepRecord {
            operation: operation.clone(),
            inputs: before,
            inputs_after,
            answer: Answered::of(&answer),
        };
        lock(&self.recording).sessions[self.index].steps.push(step);
        answer
    }
}

/// An engine that answers from a recording: the same questions in the same order, or a crash that says so.
pub struct Recorded {
    profile: Profile,
    sessions: Mutex<VecDeque<SessionRecord>>,
    validations: Mutex<VecDeque<ValidationRecord>>,
}

impl Recorded {
    /// An engine over `recording`.
    ///
    /// # Errors
    /// When the recording has another version.
    pub fn new(recording: Recording) -> Result<Self, String> {
        if recording.schema_version != RECORD_SCHEMA_VERSION {
            return Err(format!(
                "recording has schema version {}, this program reads {RECORD_SCHEMA_VERSION}: run the case again",
                recording.schema_version
            ));
        }
        Ok(Self {
            profile: recording.profile,
            sessions: Mutex::new(recording.sessions.into()),
            validations: Mutex::new(recording.validations.into()),
        })
    }
}

fn not_recorded(what: &str) -> EngineError {
    EngineError::Crash { text: format!("{what} is not in the recording: run the case again with `replay`") }
}

impl Engine for Recorded {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        let mut validations = lock(&self.validations);
        let found = validations.iter().position(|v| v.rules == rules && v.settings == *settings);
        let record = found.and_then(|index| validations.remove(index));
        record.ok_or_else(|| not_recorded("this question about settings"))?.answer.play()
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        let mut sessions = lock(&self.sessions);
        let found = sessions.iter().position(|s| s.configuration == *configuration);
        let record =
            found.and_then(|index| sessions.remove(index)).ok_or_else(|| not_recorded("this session"))?;
        Ok(match record.opened.play()? {
            Answer::Done(()) => Answer::Done(Box::new(RecordedSession { steps: record.steps.into() })),
            Answer::Unsupported(why) => Answer::Unsupported(why),
        })
    }
}

struct RecordedSession {
    steps: VecDeque<StepRecord>,
}

impl Session for RecordedSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let step = self.steps.pop_front().ok_or_else(|| not_recorded("this step"))?;
        if step.operation != *operation || step.inputs != *inputs {
            return Err(not_recorded("a step with these inputs"));
        }
        if let Some(after) = step.inputs_after {
            *inputs = after;
        }
        step.answer.play()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // a panic while the lock was held leaves a list that is still complete up to that step
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
