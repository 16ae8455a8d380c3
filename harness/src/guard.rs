//! An engine behind a guard: a panic becomes a crash, and a question that is never answered a timeout.
//!
//! Each session lives on a thread of its own. A thread cannot be stopped from outside, so one that hangs is left behind
//! and ends with the process; the run goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, RuleSetName, Session, Settings,
    Tensors, Validation,
};

use crate::run::panic_text;

/// An engine that passes every question on, on another thread, and waits for the answer no longer than a limit.
pub struct Guarded {
    engine: Arc<dyn Engine>,
    limit: Duration,
}

impl Guarded {
    /// A guard before `engine`; `limit` is the longest time that one question may take, computing included.
    pub fn new(engine: impl Into<Arc<dyn Engine>>, limit: Duration) -> Self {
        Self { engine: engine.into(), limit }
    }
}

impl Engine for Guarded {
    fn profile(&self) -> &Profile {
        self.engine.profile()
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        let (engine, settings) = (Arc::clone(&self.engine), settings.clone());
        let (send, receive) = mpsc::channel();
        spawn(move || {
            let answer = caught(|| engine.validate(rules, &settings));
            // the receiver is gone only when the limit has passed
            let _ = send.send(answer);
        })?;
        wait(&receive, self.limit, "validate")?
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        let (engine, configuration) = (Arc::clone(&self.engine), configuration.clone());
        let (tell, opened) = mpsc::channel();
        let (ask, asked) = mpsc::channel::<(Operation, Tensors)>();
        let (answer, answered) = mpsc::channel();
        spawn(move || {
            let mut session = match caught(|| engine.open(&configuration)) {
                Ok(Answer::Done(session)) => session,
                Ok(Answer::Unsupported(why)) => return drop(tell.send(Ok(Answer::Unsupported(why)))),
                Err(error) => return drop(tell.send(Err(error))),
            };
            if tell.send(Ok(Answer::Done(()))).is_err() {
                return;
            }
            for (operation, mut inputs) in asked {
                let reply = caught(|| session.step(&operation, &mut inputs));
                if answer.send((reply, inputs)).is_err() {
                    return;
                }
            }
        })?;
        Ok(match wait(&opened, self.limit, "open")?? {
            Answer::Unsupported(why) => Answer::Unsupported(why),
            Answer::Done(()) => {
                Answer::Done(Box::new(GuardedSession { ask, answered, limit: self.limit, ended: None }))
            }
        })
    }
}

struct GuardedSession {
    ask: mpsc::Sender<(Operation, Tensors)>,
    answered: mpsc::Receiver<(Result<Answer<Reply>, EngineError>, Tensors)>,
    limit: Duration,
    /// What the session failed with: it must not be used again.
    ended: Option<EngineError>,
}

impl Session for GuardedSession {
    /// As the engine's own; after a failure the same failure again. Inputs of a step that never returned stay there.
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let question = (operation.clone(), std::mem::take(inputs));
        let reply = match self.ask.send(question) {
            Err(_) => Err(gone()),
            Ok(()) => wait(&self.answered, self.limit, &format!("{operation:?}")),
        };
        let answer = reply.and_then(|(answer, returned)| {
            *inputs = returned;
            answer
        });
        answer.inspect_err(|error| self.ended = Some(error.clone()))
    }
}

fn caught<T>(ask: impl FnOnce() -> Result<T, EngineError>) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(ask))
        .unwrap_or_else(|panic| Err(EngineError::Crash { text: panic_text(panic.as_ref()) }))
}

fn spawn(body: impl FnOnce() + Send + 'static) -> Result<(), EngineError> {
    thread::Builder::new()
        .name("engine".to_owned())
        .spawn(body)
        .map(drop)
        .map_err(|error| EngineError::Crash { text: format!("no thread for the engine: {error}") })
}

fn wait<T>(receive: &mpsc::Receiver<T>, limit: Duration, waiting_in: &str) -> Result<T, EngineError> {
    receive.recv_timeout(limit).map_err(|error| match error {
        mpsc::RecvTimeoutError::Disconnected => gone(),
        mpsc::RecvTimeoutError::Timeout => EngineError::Timeout {
            rank: None,
            waiting_in: waiting_in.to_owned(),
            waited_s: limit.as_secs_f64(),
        },
    })
}

fn gone() -> EngineError {
    EngineError::Crash { text: "the engine's thread has ended".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_cases::{SuiteName, suite};
    use shardcheck_cpu::hostile::{Hostility, hostile};

    fn session(kind: Hostility, limit: Duration) -> (Box<dyn Session>, Operation) {
        let case = suite(SuiteName::EngineSmoke, 1)
            .into_iter()
            .find(|case| case.family == shardcheck_cases::Family::MergeStates)
            .unwrap();
        let engine = Guarded::new(hostile(kind), limit);
        let Answer::Done(session) = engine.open(&case.configuration().unwrap()).unwrap() else {
            panic!("the engine opens")
        };
        (session, case.operation().unwrap())
    }

    #[test]
    fn a_panic_becomes_a_crash_and_the_session_stays_ended() {
        let (mut session, operation) = session(Hostility::Panics, Duration::from_secs(60));
        for _ in 0..2 {
            let error = session.step(&operation, &mut Tensors::new()).unwrap_err();
            let EngineError::Crash { text } = error else { panic!("{error}") };
            assert!(text.contains("a deliberate panic"), "{text}");
        }
    }

    #[test]
    fn a_step_that_never_returns_is_given_up_and_named() {
        let (mut session, operation) = session(Hostility::Hangs, Duration::from_millis(50));
        let error = session.step(&operation, &mut Tensors::new()).unwrap_err();
        let EngineError::Timeout { rank: None, waiting_in, waited_s } = error else { panic!("{error}") };
        assert_eq!((waiting_in.as_str(), waited_s), ("MergeStates", 0.05));
    }

    #[test]
    fn a_healthy_engine_is_passed_through_with_its_inputs() {
        let case: shardcheck_cases::Case =
            "merge_states/w2.t4.h2.d16.bf16.ag_rs/random/sliced/7".parse().unwrap();
        let shardcheck_cases::Body::Merge(body) = &case.body else { panic!("a merge") };
        let given = shardcheck_cases::generate_merge(case.family, body, case.seed).tensors;
        let ask = |engine: &dyn Engine| {
            let mut inputs = given.clone();
            let Answer::Done(mut session) = engine.open(&case.configuration().unwrap()).unwrap() else {
                panic!("the engine opens")
            };
            let reply = session.step(&case.operation().unwrap(), &mut inputs).unwrap();
            (reply, inputs)
        };
        let healthy: Box<dyn Engine> = Box::new(shardcheck_cpu::engine());
        let direct = ask(healthy.as_ref());
        let guarded = ask(&Guarded::new(healthy, Duration::from_secs(60)));
        assert_eq!(direct, guarded);
        assert_eq!(guarded.1, given);
    }
}
