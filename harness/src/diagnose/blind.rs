//! Blind trials: an engine with one fault fails some cases, and the diagnosis must say which fault it was.

use std::time::Duration;

use shardcheck_cases::Case;
use shardcheck_cpu::{CpuEngine, Fault, FaultClass};
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, RuleSetName, Session, Settings, Tensor,
    Tensors, Validation,
};
use shardcheck_formats::Dtype;

use super::replay::is_output;
use super::{Diagnosis, Evidence, diagnose};
use crate::properties;
use crate::quiet::Quiet;
use crate::recording::Recorder;
use crate::run::{has_real_heads, judge_case};

/// How the engine under test appears to the diagnosis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Disguise {
    /// As the embedded engine that it is: every observable, equal bits.
    None,
    /// As an engine of another vendor: outputs alone, another name, and every fourth output rounded to a neighbouring number
    /// in bf16.
    Foreign,
}

/// What the diagnosis made of one fault.
#[derive(Debug, Clone)]
pub struct Trial {
    /// The fault that the engine had.
    pub fault: &'static Fault,
    /// Place of the right fault, or of one with the same effect on all failed cases, from 1; `None` when it is not listed.
    pub place: Option<usize>,
    /// The diagnosis; `None` when the fault failed no case.
    pub diagnosis: Option<Diagnosis>,
}

/// Failed cases that a blind trial gathers.
const FAILED_CASES: usize = 4;
/// Cases that are tried for them.
const MOST_CASES: usize = 1500;
/// How long the ranks of a fault that makes them wait are waited for.
const WAIT: Duration = Duration::from_millis(300);

/// Lets an engine with `fault` fail some of `cases` and diagnoses what was seen.
pub fn blind(fault: &'static Fault, cases: &[Case], disguise: Disguise) -> Trial {
    let _quiet = Quiet::new();
    let mut engine = CpuEngine::with_fault(fault);
    if fault.class == FaultClass::Hang {
        engine = engine.with_timeout(WAIT);
    }
    let dressed = |engine: CpuEngine| -> Box<dyn Engine> {
        match disguise {
            Disguise::None => Box::new(engine),
            Disguise::Foreign => Box::new(Foreign::new(engine)),
        }
    };
    let evidence = gather(fault, cases, dressed(engine).as_ref(), dressed(shardcheck_cpu::engine()).as_ref());
    let diagnosis = diagnose(&evidence, Duration::from_secs(600));
    let place = diagnosis.as_ref().and_then(|diagnosis| {
        let names = |candidate: &super::Candidate| {
            candidate.fault == fault.name || candidate.same_effect.iter().any(|name| name == fault.name)
        };
        diagnosis.candidates.iter().position(names).map(|place| place + 1)
    });
    Trial { fault, place, diagnosis }
}

/// Failures of `engine`, on cases that it passes without its fault: a disguise must not be what fails.
fn gather(fault: &Fault, cases: &[Case], engine: &dyn Engine, healthy: &dyn Engine) -> Vec<Evidence> {
    let named = |case: &Case| properties::of(case).any(|property| fault.killed_by.contains(&property.id));
    let mut order: Vec<&Case> = cases.iter().filter(|case| !has_real_heads(case) && named(case)).collect();
    // neighbours in a suite are alike
    order.sort_by_cached_key(|case| {
        *blake3::hash(format!("{} {}", fault.name, case.id()).as_bytes()).as_bytes()
    });
    let mut evidence = Vec::new();
    for case in order.into_iter().take(MOST_CASES) {
        let recorder = Recorder::new(engine);
        let chosen = |property: &properties::Property| fault.killed_by.contains(&property.id);
        let result = judge_case(case, &recorder, &chosen);
        if !result.status.is_failure() || judge_case(case, healthy, &chosen).status.is_failure() {
            continue;
        }
        evidence.extend(Evidence::of(case, &result, recorder.recording()));
        if evidence.len() == FAILED_CASES {
            break;
        }
    }
    evidence
}

/// An engine of another vendor: other roundings, and nothing but outputs.
struct Foreign {
    engine: CpuEngine,
    profile: Profile,
}

impl Foreign {
    fn new(engine: CpuEngine) -> Self {
        let mut profile = engine.profile().clone();
        profile.engine = "foreign".to_owned();
        profile.operations.values_mut().for_each(|operation| operation.observables.clear());
        Self { engine, profile }
    }
}

impl Engine for Foreign {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        self.engine.validate(rules, settings)
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        Ok(match self.engine.open(configuration)? {
            Answer::Done(session) => Answer::Done(Box::new(ForeignSession { session })),
            Answer::Unsupported(why) => Answer::Unsupported(why),
        })
    }
}

struct ForeignSession {
    session: Box<dyn Session>,
}

impl Session for ForeignSession {
    fn step(
        &mut self,
        operation: &Operation,
        inputs: &mut Tensors,
    ) -> Result<Answer<shardcheck_engine::Reply>, EngineError> {
        let Answer::Done(mut reply) = self.session.step(operation, inputs)? else {
            return Ok(Answer::Unsupported("the engine does not do it".to_owned()));
        };
        let mut outputs = Tensors::new();
        for (name, tensor) in reply.outputs.iter().filter(|(name, _)| is_output(operation, name)) {
            let moved = name == "out" && tensor.dtype() == Dtype::Bf16;
            outputs.insert(name, if moved { neighbours(tensor) } else { tensor.clone() });
        }
        reply.outputs = outputs;
        Ok(Answer::Done(reply))
    }
}

/// Every fourth element moved to the next number away from zero; the choice follows from place and value.
fn neighbours(tensor: &Tensor) -> Tensor {
    let moved = tensor.to_codes().into_iter().enumerate().map(|(index, code)| {
        let chosen =
            (index as u64).wrapping_mul(0x9E37_79B9).wrapping_add(code.wrapping_mul(0x85EB_CA6B)) >> 7;
        // the neighbour of a subnormal number is further away than a rounding
        let normal = (0x0080..0x7F7F).contains(&(code & 0x7FFF));
        if chosen.is_multiple_of(4) && normal { code + 1 } else { code }
    });
    Tensor::from_codes(tensor.dtype(), tensor.shape(), &moved.collect::<Vec<_>>())
}
