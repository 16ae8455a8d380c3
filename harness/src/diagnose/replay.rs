//! Questions of a recorded session put to another engine, and what it answers.

use shardcheck_engine::{Answer, Engine, EngineError, Operation, Reply, Tensors};

use crate::recording::{Answered, SessionRecord};

/// What an engine answers to the steps of one session.
pub(crate) struct Played {
    /// Whether the session opened.
    pub opened: Answered<()>,
    /// Answers, and the inputs where the engine changed them; shorter than the record when a step failed.
    pub steps: Vec<(Answered<Reply>, Option<Tensors>)>,
}

/// Puts every question of `record` to `engine`, with the inputs of the record.
pub(crate) fn play(engine: &dyn Engine, record: &SessionRecord) -> Played {
    let mut session = match engine.open(&record.configuration) {
        Ok(Answer::Done(session)) => session,
        Ok(Answer::Unsupported(why)) => {
            return Played { opened: Answered::Unsupported(why), steps: Vec::new() };
        }
        Err(error) => return Played { opened: refusal(error), steps: Vec::new() },
    };
    let mut steps = Vec::new();
    for step in &record.steps {
        let mut inputs = step.inputs.clone();
        let answer = match session.step(&step.operation, &mut inputs) {
            Ok(Answer::Done(reply)) => Answered::Done(reply),
            Ok(Answer::Unsupported(why)) => Answered::Unsupported(why),
            Err(error) => refusal(error),
        };
        let ended = !matches!(answer, Answered::Done(_) | Answered::Unsupported(_));
        let changed = (!ended && inputs != step.inputs).then_some(inputs);
        steps.push((answer, changed));
        if ended {
            break;
        }
    }
    Played { opened: Answered::Done(()), steps }
}

fn refusal<T>(error: EngineError) -> Answered<T> {
    match error {
        EngineError::Crash { text } => Answered::Crash(text),
        EngineError::Timeout { rank, waiting_in, waited_s } => {
            Answered::Timeout { rank, waiting_in, waited_s }
        }
        EngineError::DeviceLost { text } => Answered::DeviceLost(text),
        EngineError::Interrupted { text } => Answered::Interrupted(text),
        EngineError::Input(error) => Answered::Input(error.to_string()),
    }
}

/// Whether a tensor of that name is what the operation is for, rather than an observable beside it.
pub(crate) fn is_output(operation: &Operation, name: &str) -> bool {
    match operation {
        Operation::WriteKv | Operation::LoadCache => false,
        Operation::Attend { .. } | Operation::AttendContext { .. } => matches!(name, "out" | "lse"),
        _ => true,
    }
}
