//! Faults at the boundary of any engine: what the harness hands to it, or gets from it, is tampered with on the way.
//!
//! The oracle keeps the truth, so that every check must fail as it would on an engine with that fault. This proves on a
//! user's own engine that the checks have teeth, without a change to the engine. An input that the engine derives for
//! itself, or an answer that it does not give, cannot be tampered with: such a fault is not applicable, with the reason.

mod batches;
mod inputs;
mod layers;
mod replies;
mod tensors;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;
use shardcheck_cases::Case;
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, OperationKind, Profile, Reply, RuleSetName,
    Session, Settings, Tensor, Tensors, Validation,
};

use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::matrix::{KillState, Row};
use crate::mutants::in_own_order;
use crate::properties;

/// Where a step stands when its inputs are tampered with.
pub struct Place<'a> {
    /// What is asked for.
    pub operation: &'a Operation,
    /// What the session was opened with.
    pub configuration: &'a Configuration,
}

/// What is done to what passes the boundary.
#[derive(Clone, Copy)]
pub enum Tamper {
    /// Changes what a session is opened with.
    Configuration(fn(&mut Configuration)),
    /// Changes the inputs of a step. They come back as the harness gave them.
    Inputs(fn(&Place<'_>, &mut Tensors)),
    /// Changes an answer, given the one before it in the session to a step of the same kind; attention is of one kind.
    Reply(fn(&Place<'_>, &mut Reply, Option<&Reply>)),
}

/// A fault at the boundary.
#[derive(Clone, Copy)]
pub struct BoundaryFault {
    /// Name, unique among the faults at the boundary.
    pub name: &'static str,
    /// What is wrong, in one line.
    pub title: &'static str,
    /// What is tampered with.
    pub touches: &'static str,
    /// Properties that must notice it: any of them, on the cases that an engine runs.
    pub killed_by: &'static [&'static str],
    /// How.
    pub tamper: Tamper,
}

/// All faults at the boundary: of attention what is handed over, then what comes back; then of everything else.
pub fn boundary_faults() -> impl Iterator<Item = &'static BoundaryFault> {
    inputs::FAULTS.iter().chain(replies::FAULTS).chain(batches::FAULTS).chain(layers::FAULTS)
}

/// The fault at the boundary of that name.
pub fn boundary_fault(name: &str) -> Option<&'static BoundaryFault> {
    boundary_faults().find(|fault| fault.name == name)
}

/// An engine behind a boundary that tampers.
pub struct Tampered<'a> {
    engine: &'a dyn Engine,
    fault: &'static BoundaryFault,
    touched: Arc<AtomicUsize>,
}

impl<'a> Tampered<'a> {
    /// The engine, with everything that passes to and from it tampered with.
    pub fn new(engine: &'a dyn Engine, fault: &'static BoundaryFault) -> Self {
        Self { engine, fault, touched: Arc::default() }
    }

    /// How often something was changed on its way.
    pub fn touched(&self) -> usize {
        self.touched.load(Ordering::Relaxed)
    }
}

impl Engine for Tampered<'_> {
    fn profile(&self) -> &Profile {
        self.engine.profile()
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        self.engine.validate(rules, settings)
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        let mut handed = configuration.clone();
        if let Tamper::Configuration(change) = self.fault.tamper {
            change(&mut handed);
            if handed != *configuration {
                self.touched.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(match self.engine.open(&handed)? {
            Answer::Unsupported(why) => Answer::Unsupported(why),
            Answer::Done(session) => Answer::Done(Box::new(TamperedSession {
                session,
                configuration: handed,
                tamper: self.fault.tamper,
                touched: Arc::clone(&self.touched),
                before: HashMap::new(),
            })),
        })
    }
}

struct TamperedSession {
    session: Box<dyn Session>,
    configuration: Configuration,
    tamper: Tamper,
    touched: Arc<AtomicUsize>,
    /// Answer of the last step of each kind, as the engine gave it.
    before: HashMap<OperationKind, Reply>,
}

impl TamperedSession {
    /// One step with tampered inputs; what the engine itself changed in them is passed on, the tampering is taken back.
    fn step_with(
        &mut self,
        change: fn(&Place<'_>, &mut Tensors),
        operation: &Operation,
        inputs: &mut Tensors,
    ) -> Result<Answer<Reply>, EngineError> {
        let mut handed = inputs.clone();
        change(&Place { operation, configuration: &self.configuration }, &mut handed);
        if handed != *inputs {
            self.touched.fetch_add(1, Ordering::Relaxed);
        }
        let mut returned = handed.clone();
        let answer = self.session.step(operation, &mut returned);
        for (name, tensor) in returned.iter().filter(|(name, tensor)| handed.find(name) != Some(tensor)) {
            inputs.insert(name, tensor.clone());
        }
        answer
    }
}

impl Session for TamperedSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let answer = match self.tamper {
            Tamper::Inputs(change) => self.step_with(change, operation, inputs),
            _ => self.session.step(operation, inputs),
        };
        let (Tamper::Reply(change), Ok(Answer::Done(mut reply))) = (self.tamper, answer.clone()) else {
            return answer;
        };
        let kind = match operation {
            // what is answered to a batch does not depend on the operation that its rows are called by
            Operation::Attend { .. } | Operation::AttendContext { .. } => OperationKind::Decode,
            other => other.kind(inputs),
        };
        let before = self.before.insert(kind, reply.clone());
        let honest = reply.clone();
        let place = Place { operation, configuration: &self.configuration };
        change(&place, &mut reply, before.as_ref());
        if reply != honest {
            self.touched.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Answer::Done(reply))
    }
}

/// Changes an input of that name, where there is one.
fn given(inputs: &mut Tensors, name: &str, change: impl FnOnce(&Tensor) -> Tensor) {
    if let Some(tensor) = inputs.get_mut(name) {
        *tensor = change(tensor);
    }
}

/// Changes a tensor of an answer, where there is one of that name.
fn returned(reply: &mut Reply, name: &str, change: impl FnOnce(&Tensor) -> Tensor) {
    if let Some(tensor) = reply.outputs.get_mut(name) {
        *tensor = change(tensor);
    }
}

/// Class of faults at the boundary in a kill matrix.
pub const CLASS: &str = "boundary";

/// Most cases on which a fault at the boundary is tried.
const MOST_CASES: usize = 400;

/// Tries faults at the boundary of an engine on the small cases of a suite, in parallel.
pub fn try_boundary(
    faults: &[&'static BoundaryFault],
    engine: &dyn Engine,
    cases: &[Case],
    done: &(dyn Fn(&Row) + Sync),
) -> Vec<Row> {
    faults
        .par_iter()
        .map(|fault| {
            let trial = try_one(fault, engine, cases);
            done(&trial);
            trial
        })
        .collect()
}

/// Tries one fault until a property that it names fails on it and holds without it.
fn try_one(fault: &'static BoundaryFault, engine: &dyn Engine, cases: &[Case]) -> Row {
    let named = |property: &properties::Property| fault.killed_by.contains(&property.id);
    let tampered = Tampered::new(engine, fault);
    let mut trial = Row::new(fault.name, CLASS);
    let mut order = in_own_order(fault.name, cases, &named);
    order.truncate(MOST_CASES);
    let mut changed = false;
    for case in order {
        let Ok(material) = Material::of(case, engine.profile()) else { continue };
        trial.tried += 1;
        let before = tampered.touched();
        let laboratory = Laboratory::new(case, &tampered, &material);
        let failing =
            properties::of(case).filter(|p| named(p)).find(|p| p.judge(&laboratory).status().is_failure());
        if let Some(property) = failing {
            // a property that fails without the fault proves nothing
            if property.judge(&Laboratory::new(case, engine, &material)).status().is_failure() {
                continue;
            }
            return trial.killed(property.id, case.id());
        }
        if tampered.touched() > before && !changed {
            changed = laboratory.answers() != Laboratory::new(case, engine, &material).answers();
        }
    }
    if trial.tried == 0 {
        return trial.not_applicable("no case of the suite shows it");
    }
    if tampered.touched() == 0 {
        let reason = format!(
            "nothing to tamper with on {} cases: {} does not pass the boundary of this engine, or each case has too few requests or rows",
            trial.tried, fault.touches
        );
        return trial.not_applicable(reason);
    }
    if !changed && !matches!(fault.tamper, Tamper::Reply(_)) {
        return trial
            .not_applicable(format!("no answer depends on {}: the engine derives it itself", fault.touches));
    }
    trial.state = KillState::Survived;
    trial
}

#[cfg(test)]
mod tests;
