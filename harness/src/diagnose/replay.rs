//! Questions of a recorded session put to another engine, and what it answers.

use shardcheck_engine::{Answer, Engine, EngineError, Operation, Reply, Tensors};

use crate::recording::{Answered, SessionRecord};

/// An answer, and the inputs where the engine changed them.
pub(crate) type PlayedStep = (Answered<Reply>, Option<Tensors>);

/// What an engine answers to the steps of one session.
pub(crate) struct Played {
    /// Whether the session opened.
    pub opened: Answered<()>,
    /// Answers; fewer than in the record when a step failed.
    pub steps: Vec<PlayedStep>,
}

/// Puts every question of `record` to `engine`, with the inputs of the record.
pub(crate) fn play(engine: &dyn Engine, record: &SessionRecord) -> Played {
    let mut played = Played { opened: Answered::Done(()), steps: Vec::new() };
    put(engine, record, &mut played, &mut |_, _| true);
    played
}

/// As [`play`], as long as `goes_on` says so of each answer and its place; `None` when it stops.
pub(crate) fn play_while(
    engine: &dyn Engine,
    record: &SessionRecord,
    goes_on: &mut dyn FnMut(usize, &PlayedStep) -> bool,
) -> Option<Played> {
    let mut played = Played { opened: Answered::Done(()), steps: Vec::new() };
    put(engine, record, &mut played, goes_on).then_some(played)
}

/// Fills in what is answered; false when it was stopped.
fn put(
    engine: &dyn Engine,
    record: &SessionRecord,
    played: &mut Played,
    goes_on: &mut dyn FnMut(usize, &PlayedStep) -> bool,
) -> bool {
    let mut session = match engine.open(&record.configuration) {
        Ok(Answer::Done(session)) => session,
        Ok(Answer::Unsupported(why)) => {
            played.opened = Answered::Unsupported(why);
            return true;
        }
        Err(error) => {
            played.opened = refusal(error);
            return true;
        }
    };
    for (place, step) in record.steps.iter().enumerate() {
        let mut inputs = step.inputs.clone();
        let answer = match session.step(&step.operation, &mut inputs) {
            Ok(Answer::Done(reply)) => Answered::Done(reply),
            Ok(Answer::Unsupported(why)) => Answered::Unsupported(why),
            Err(error) => refusal(error),
        };
        let ended = !matches!(answer, Answered::Done(_) | Answered::Unsupported(_));
        let changed = (!ended && inputs != step.inputs).then_some(inputs);
        let answer = (answer, changed);
        let stops = !goes_on(place, &answer);
        played.steps.push(answer);
        if stops {
            return false;
        }
        if ended {
            break;
        }
    }
    true
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
