//! Engines that misbehave, for tests of whoever drives engines: a driver must turn each of them into a verdict.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, RuleSetName, Session, Settings,
    Tensor, Tensors, Validation,
};
use shardcheck_formats::Dtype;

use crate::engine::{CpuEngine, engine};

/// How an engine misbehaves in operations that return an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hostility {
    /// Outputs are zeros, LSEs too.
    ZeroOutput,
    /// Outputs and LSEs are NaN.
    NanOutput,
    /// The output has its elements in another shape.
    WrongShape,
    /// The output is f32 where bf16 is asked for, and the other way round.
    WrongDtype,
    /// The output is missing.
    NoOutput,
    /// A bit of every input is changed.
    ChangesInput,
    /// Query replication is never run and always reported as asked for.
    ClaimsReplication,
    /// The step panics.
    Panics,
    /// The step never returns.
    Hangs,
}

impl Hostility {
    /// All of them, in a stable order.
    pub const ALL: [Self; 9] = [
        Self::ZeroOutput,
        Self::NanOutput,
        Self::WrongShape,
        Self::WrongDtype,
        Self::NoOutput,
        Self::ChangesInput,
        Self::ClaimsReplication,
        Self::Panics,
        Self::Hangs,
    ];

    /// Name as it stands in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::ZeroOutput => "zero-output",
            Self::NanOutput => "nan-output",
            Self::WrongShape => "wrong-shape",
            Self::WrongDtype => "wrong-dtype",
            Self::NoOutput => "no-output",
            Self::ChangesInput => "changes-input",
            Self::ClaimsReplication => "claims-replication",
            Self::Panics => "panics",
            Self::Hangs => "hangs",
        }
    }
}

impl fmt::Display for Hostility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Hostility {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            format!("unknown hostility {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// An engine that misbehaves in one way and is healthy otherwise.
pub fn hostile(kind: Hostility) -> Box<dyn Engine> {
    Box::new(HostileEngine { healthy: engine(), kind })
}

struct HostileEngine {
    healthy: CpuEngine,
    kind: Hostility,
}

impl Engine for HostileEngine {
    fn profile(&self) -> &Profile {
        self.healthy.profile()
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        self.healthy.validate(rules, settings)
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        let mut opened = configuration.clone();
        if self.kind == Hostility::ClaimsReplication {
            opened.query_replication = false;
        }
        let asked = configuration.dcp > 1 && configuration.query_replication;
        Ok(match self.healthy.open(&opened)? {
            Answer::Done(healthy) => {
                Answer::Done(Box::new(HostileSession { healthy, kind: self.kind, asked }))
            }
            Answer::Unsupported(reason) => Answer::Unsupported(reason),
        })
    }
}

struct HostileSession {
    healthy: Box<dyn Session>,
    kind: Hostility,
    /// Whether query replication would take effect.
    asked: bool,
}

impl Session for HostileSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        if !returns_output(operation) {
            return self.healthy.step(operation, inputs);
        }
        match self.kind {
            Hostility::Panics => panic!("hostile engine: a deliberate panic"),
            Hostility::Hangs => loop {
                std::thread::sleep(Duration::from_secs(3600));
            },
            _ => {}
        }
        let mut answer = self.healthy.step(operation, inputs)?;
        if let Answer::Done(reply) = &mut answer {
            self.spoil(reply, inputs);
        }
        Ok(answer)
    }
}

impl HostileSession {
    fn spoil(&self, reply: &mut Reply, inputs: &mut Tensors) {
        match self.kind {
            Hostility::ZeroOutput => fill(reply, 0.0),
            Hostility::NanOutput => fill(reply, f32::NAN),
            Hostility::WrongShape => {
                change_output(reply, |out| Tensor::from_codes(out.dtype(), &[out.len()], &out.to_codes()))
            }
            Hostility::WrongDtype => change_output(reply, |out| {
                let dtype = if out.dtype() == Dtype::F32 { Dtype::Bf16 } else { Dtype::F32 };
                Tensor::from_f32(dtype, out.shape(), &out.to_f32())
            }),
            Hostility::NoOutput => drop(reply.outputs.remove("out")),
            Hostility::ChangesInput => {
                let names: Vec<String> = inputs.iter().map(|(name, _)| name.to_owned()).collect();
                let first_bytes =
                    names.iter().filter_map(|name| inputs.get_mut(name)?.bytes_mut().first_mut().map(flip));
                assert!(first_bytes.count() > 0, "a step that returns an output has inputs");
            }
            Hostility::ClaimsReplication => {
                reply.effective = reply.effective.clone().with("query_replication", self.asked);
            }
            Hostility::Panics | Hostility::Hangs => {}
        }
    }
}

fn flip(byte: &mut u8) {
    *byte ^= 1;
}

fn returns_output(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::Attend { .. }
            | Operation::AttendContext { .. }
            | Operation::MergePartials { .. }
            | Operation::MergeStates
            | Operation::MergeSegments { .. }
    )
}

fn fill(reply: &mut Reply, value: f32) {
    for name in ["out", "lse"] {
        if let Some(tensor) = reply.outputs.get_mut(name) {
            *tensor = Tensor::from_f32(tensor.dtype(), tensor.shape(), &vec![value; tensor.len()]);
        }
    }
}

fn change_output(reply: &mut Reply, change: impl Fn(&Tensor) -> Tensor) {
    if let Some(out) = reply.outputs.get_mut("out") {
        *out = change(out);
    }
}
