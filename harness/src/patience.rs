//! An engine that is waited for once: after a question that was not answered in time, the case asks no more.
//!
//! The properties of a case open sessions of their own. An engine that hangs would cost each of them the whole time limit, and nothing
//! more would be learned.

use std::sync::{Arc, Mutex, PoisonError};

use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, RuleSetName, Session, Settings,
    Tensors, Validation,
};

type Ended = Arc<Mutex<Option<EngineError>>>;

/// Passes every question on until one times out; then every further question has that answer.
pub struct Patience<'a> {
    engine: &'a dyn Engine,
    ended: Ended,
}

impl<'a> Patience<'a> {
    /// Patience with `engine`, for one case.
    pub fn new(engine: &'a dyn Engine) -> Self {
        Self { engine, ended: Ended::default() }
    }
}

impl Engine for Patience<'_> {
    fn profile(&self) -> &Profile {
        self.engine.profile()
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        noted(&self.ended, || self.engine.validate(rules, settings))
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        Ok(match noted(&self.ended, || self.engine.open(configuration))? {
            Answer::Unsupported(why) => Answer::Unsupported(why),
            Answer::Done(session) => {
                Answer::Done(Box::new(PatientSession { session, ended: Arc::clone(&self.ended) }))
            }
        })
    }
}

struct PatientSession {
    session: Box<dyn Session>,
    ended: Ended,
}

impl Session for PatientSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        noted(&self.ended, || self.session.step(operation, inputs))
    }
}

fn noted<T>(
    ended: &Ended,
    ask: impl FnOnce() -> Result<Answer<T>, EngineError>,
) -> Result<Answer<T>, EngineError> {
    let known = || ended.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = &*known() {
        return Err(error.clone());
    }
    ask().inspect_err(|error| {
        if matches!(error, EngineError::Timeout { .. }) {
            *known() = Some(error.clone());
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::Guarded;
    use shardcheck_cases::Case;
    use shardcheck_cpu::hostile::{Hostility, hostile};
    use std::time::{Duration, Instant};

    #[test]
    fn an_engine_that_hangs_costs_a_case_its_time_limit_once() {
        let case: Case = "merge_states/w2.t4.h2.d16.bf16.ag_rs/random/sliced/7".parse().unwrap();
        let limit = Duration::from_millis(300);
        let engine = Guarded::new(hostile(Hostility::Hangs), limit);
        let patience = Patience::new(&engine);
        let started = Instant::now();
        let mut session = match patience.open(&case.configuration().unwrap()).unwrap() {
            Answer::Done(session) => session,
            Answer::Unsupported(why) => panic!("{why}"),
        };
        let operation = case.operation().unwrap();
        let first = session.step(&operation, &mut Tensors::new()).unwrap_err();
        let waited = started.elapsed();
        assert!(matches!(first, EngineError::Timeout { .. }) && waited >= limit, "{first}");
        for _ in 0..1000 {
            let again = patience.open(&case.configuration().unwrap()).err();
            assert_eq!(again.as_ref(), Some(&first));
        }
        assert_eq!(session.step(&operation, &mut Tensors::new()).unwrap_err(), first);
    }
}
