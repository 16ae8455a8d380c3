//! An engine that answers from the files of one case.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shardcheck_engine::archive::{self, StridedViews};
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, RuleSetName, Session, Settings,
    Tensors, Validation,
};

use super::plan::{Pass, Step};
use super::{FileReply, OUTPUTS_FILE, REPLY_FILE};
use crate::recording::Answered;

const OTHER: &str = "files answer one plain pass of a case, and this property asks for another run";

/// An engine over the answers of one pass.
///
/// The pass is answered once from its first step to its last. Whatever else is asked, and the same a second time, is unsupported: a file that is read twice
/// says nothing about a repetition.
pub(super) struct Filed {
    profile: Profile,
    configuration: Configuration,
    steps: Arc<Vec<FiledStep>>,
    is_spent: Arc<AtomicBool>,
}

struct FiledStep {
    operation: Operation,
    inputs: Tensors,
    answer: Answered<Reply>,
}

impl Filed {
    /// The answers that lie in `folder`; or the files that are still to come.
    pub fn read(folder: &Path, pass: Pass, profile: &Profile) -> Result<Self, Vec<String>> {
        let mut missing = Vec::new();
        let mut steps = Vec::new();
        for step in pass.steps {
            match answer_of(&folder.join(&step.request.folder), &step) {
                None => missing.push(format!("{}/{OUTPUTS_FILE}", step.request.folder)),
                Some(answer) => {
                    steps.push(FiledStep { operation: step.request.operation, inputs: step.inputs, answer });
                }
            }
        }
        if !missing.is_empty() {
            return Err(missing);
        }
        Ok(Self {
            profile: profile.clone(),
            configuration: pass.configuration,
            steps: Arc::new(steps),
            is_spent: Arc::new(AtomicBool::new(false)),
        })
    }
}

/// The answer to a step; `None` where it is still to come.
fn answer_of(folder: &Path, step: &Step) -> Option<Answered<Reply>> {
    let spoilt = |file: &str, reason: String| {
        Some(Answered::Crash(format!("{}/{file} can't be read: {reason}", step.request.folder)))
    };
    let reply = match std::fs::read(folder.join(REPLY_FILE)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => FileReply::default(),
        Err(error) => return spoilt(REPLY_FILE, error.to_string()),
        Ok(bytes) => match serde_json::from_slice::<FileReply>(&bytes) {
            Ok(reply) => reply,
            Err(error) => return spoilt(REPLY_FILE, error.to_string()),
        },
    };
    if let Some(why) = reply.unsupported {
        return Some(Answered::Unsupported(why));
    }
    let outputs = match std::fs::read(folder.join(OUTPUTS_FILE)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if !step.request.needed {
                return Some(Answered::Unsupported(format!("{} has no outputs", step.request.folder)));
            }
            if step.request.outputs.iter().any(|output| output.required) {
                return None;
            }
            Tensors::new()
        }
        Err(error) => return spoilt(OUTPUTS_FILE, error.to_string()),
        Ok(bytes) => match archive::unpack(&bytes, &StridedViews::new()) {
            Ok(outputs) => outputs,
            Err(error) => return spoilt(OUTPUTS_FILE, error.to_string()),
        },
    };
    Some(Answered::Done(Reply { outputs, effective: reply.effective, collectives: reply.collectives }))
}

impl Engine for Filed {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn validate(&self, _: RuleSetName, _: &Settings) -> Result<Answer<Validation>, EngineError> {
        Ok(Answer::Unsupported(OTHER.to_owned()))
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        if self.is_spent.load(Ordering::Relaxed) || *configuration != self.configuration {
            return Ok(Answer::Unsupported(OTHER.to_owned()));
        }
        let (steps, is_spent) = (Arc::clone(&self.steps), Arc::clone(&self.is_spent));
        Ok(Answer::Done(Box::new(FiledSession { steps, is_spent, next: Some(0) })))
    }
}

struct FiledSession {
    steps: Arc<Vec<FiledStep>>,
    is_spent: Arc<AtomicBool>,
    /// Place of the next step; `None` once something else was asked.
    next: Option<usize>,
}

impl Session for FiledSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let place = self.next.take();
        let step = place.and_then(|place| self.steps.get(place));
        let asked = step.filter(|step| {
            step.operation == *operation
                && step.inputs.len() == inputs.len()
                && inputs.iter().all(|(name, tensor)| step.inputs.find(name) == Some(&tensor.to_contiguous()))
        });
        let (Some(place), Some(step)) = (place, asked) else {
            return Ok(Answer::Unsupported(OTHER.to_owned()));
        };
        self.next = Some(place + 1);
        if place + 1 == self.steps.len() {
            self.is_spent.store(true, Ordering::Relaxed);
        }
        step.answer.clone().play()
    }
}
