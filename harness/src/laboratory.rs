//! The bench on which one case is judged: the case, its material, an engine, and what the engine was seen to do.
//!
//! Properties share observations: a case whose ten properties look at one decode step runs that step once. Whatever step any of them
//! asks for, what it changes in its inputs is noted.

mod watched;

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;

use shardcheck_cases::{Body, Case};
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, Session, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use crate::accepting::AcceptanceMaterial;
use crate::compressing::CompressMaterial;
use crate::delta::KdaMaterial;
use crate::finding::{Failure, Finding, Stage};
use crate::indexing::IndexMaterial;
use crate::layer::MoeMaterial;
use crate::material::{AttentionMaterial, Material};
use crate::merging::MergeMaterial;
use crate::prefilling::PrefillMaterial;
use crate::routing::RouteMaterial;
use crate::selecting::SelectMaterial;
use crate::sequence::{Play, SequenceMaterial};
use crate::sharing::SharingMaterial;
use crate::stacking::StackMaterial;
use crate::status::Status;

pub use watched::{Change, Watched};

/// Why a check ends before it has compared anything.
#[derive(Debug, Clone)]
pub enum Halt {
    /// The engine does not do it.
    Unsupported(String),
    /// It can't be decided.
    Inconclusive(String),
    /// It does not hold.
    Broken(Box<Failure>),
    /// The engine failed.
    Engine(Status, String),
}

impl From<EngineError> for Halt {
    fn from(error: EngineError) -> Self {
        let status = match error {
            EngineError::Interrupted { text } => return Self::Inconclusive(text),
            EngineError::Crash { .. } => Status::Crash,
            EngineError::Timeout { .. } => Status::Timeout,
            EngineError::DeviceLost { .. } => Status::DeviceLost,
            EngineError::Input(_) => Status::HarnessError,
        };
        Self::Engine(status, error.to_string())
    }
}

impl From<Failure> for Halt {
    fn from(failure: Failure) -> Self {
        Self::Broken(Box::new(failure))
    }
}

impl From<Halt> for Finding {
    fn from(halt: Halt) -> Self {
        match halt {
            Halt::Unsupported(why) => Self::Unsupported(why),
            Halt::Inconclusive(why) => Self::Inconclusive(why),
            Halt::Broken(failure) => Self::Broken(failure),
            Halt::Engine(status, text) => Self::Engine { status, text },
        }
    }
}

/// A reply, and which inputs came back changed.
#[derive(Debug, Clone)]
pub struct Observed {
    /// What the engine answered.
    pub reply: Reply,
    /// Inputs that the engine changed.
    pub changed_inputs: Vec<String>,
    /// Outputs that the engine declares to have nothing to say about.
    pub absent: Vec<String>,
}

impl Observed {
    /// A reply by itself.
    pub fn of(reply: Reply) -> Self {
        Self { reply, changed_inputs: Vec::new(), absent: Vec::new() }
    }

    /// Whether an output is not there, and the engine declares that it has none.
    pub fn lacks(&self, name: &str) -> bool {
        self.reply.outputs.find(name).is_none() && self.absent.iter().any(|absent| absent == name)
    }

    /// An output by name, with dtype and shape checked: a missing, mistyped or misshapen output is a failure of the
    /// engine, never of the harness. One that the engine's profile declares absent is not asked for.
    ///
    /// # Errors
    /// [`Halt::Broken`] that names what is wrong, [`Halt::Unsupported`] when the profile declares it absent.
    pub fn output(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&Tensor, Halt> {
        if self.lacks(name) {
            return Err(Halt::Unsupported(format!("the engine declares that it has no {name}")));
        }
        let tensor =
            self.reply.outputs.get(name).map_err(|e| Failure::because(e.to_string()).at(Stage::Output))?;
        tensor.expect(name, dtype, shape).map_err(|e| Failure::because(e.to_string()).at(Stage::Output))?;
        Ok(tensor)
    }

    /// An observable by name: `Unsupported` when the engine does not return it.
    ///
    /// # Errors
    /// [`Halt::Unsupported`] when it is absent, [`Halt::Broken`] when it has the wrong dtype or shape.
    pub fn observable(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&Tensor, Halt> {
        match self.reply.outputs.find(name) {
            None => Err(Halt::Unsupported(format!("the engine does not return {name}"))),
            Some(_) => self.output(name, dtype, shape),
        }
    }
}

/// A session that notes what its steps changed.
pub struct Run {
    session: Box<dyn Session>,
    profile: Profile,
    /// Element type of the session's activations.
    dtype: Dtype,
    steps: usize,
    changes: Rc<RefCell<Vec<Change>>>,
}

impl Run {
    /// Opens a session.
    ///
    /// # Errors
    /// [`Halt`] when the engine refuses or fails.
    pub fn open(watched: &Watched<'_>, configuration: &Configuration) -> Result<Self, Halt> {
        let engine = watched.engine;
        if configuration.second_group.is_some() && !engine.profile().second_group {
            return Err(Halt::Unsupported("the engine does not declare a second KV group".to_owned()));
        }
        let dtype = configuration.dtype;
        // an engine that knows of no such activations may not know what to make of the configuration either
        if !engine.profile().operations.values().any(|operation| operation.takes(dtype)) {
            return Err(Halt::Unsupported(format!("the engine does not declare activations of {dtype}")));
        }
        match engine.open(configuration)? {
            Answer::Done(session) => Ok(Self {
                session,
                profile: engine.profile().clone(),
                dtype,
                steps: 0,
                changes: Rc::clone(&watched.changes),
            }),
            Answer::Unsupported(why) => Err(Halt::Unsupported(why)),
        }
    }

    /// Performs one step and notes which inputs came back changed.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do it or fails.
    pub fn step(&mut self, operation: &Operation, inputs: &Tensors) -> Result<Observed, Halt> {
        let kind = operation.kind(inputs);
        let takes = self.profile.operation(kind).is_none_or(|operation| operation.takes(self.dtype));
        if kind.has_activations() && !takes {
            return Err(Halt::Unsupported(format!("the engine does not declare {kind} in {}", self.dtype)));
        }
        let mut given = inputs.clone();
        self.steps += 1;
        match self.session.step(operation, &mut given)? {
            Answer::Unsupported(why) => Err(Halt::Unsupported(why)),
            Answer::Done(reply) => {
                let changed_inputs: Vec<String> = inputs
                    .iter()
                    .filter(|(name, tensor)| given.find(name) != Some(tensor))
                    .map(|(name, _)| name.to_owned())
                    .collect();
                if !changed_inputs.is_empty() {
                    let group = match operation {
                        Operation::InGroup { group, .. } => *group,
                        _ => 0,
                    };
                    self.changes.borrow_mut().push(Change {
                        step: self.steps,
                        operation: kind,
                        group,
                        tensors: changed_inputs.clone(),
                    });
                }
                let declared = self.profile.operation(kind);
                let absent = declared.map(|operation| operation.absent.clone()).unwrap_or_default();
                Ok(Observed { reply, changed_inputs, absent })
            }
        }
    }
}

/// A bench.
pub struct Laboratory<'a> {
    /// The case.
    pub case: &'a Case,
    /// The engine under test.
    pub engine: Watched<'a>,
    /// Inputs and oracle, shared by all engines that this case is tried on.
    pub material: &'a Material,
    base: OnceCell<Result<Observed, Halt>>,
    written: OnceCell<Result<Written, Halt>>,
    played: OnceCell<Result<Play, Halt>>,
    stepped: OnceCell<Result<Vec<Observed>, Halt>>,
    session: RefCell<Option<Run>>,
}

/// What the write of a case's tokens was seen to do.
#[derive(Debug, Clone)]
pub struct Written {
    /// Caches before.
    pub before: Reply,
    /// The write.
    pub write: Observed,
    /// Caches after.
    pub after: Reply,
}

impl<'a> Laboratory<'a> {
    /// A bench with nothing observed yet.
    pub fn new(case: &'a Case, engine: &'a dyn Engine, material: &'a Material) -> Self {
        Self {
            case,
            engine: Watched::new(engine),
            material,
            base: OnceCell::new(),
            written: OnceCell::new(),
            played: OnceCell::new(),
            stepped: OnceCell::new(),
            session: RefCell::new(None),
        }
    }

    /// Material of an attention case.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn attention(&self) -> &'a AttentionMaterial {
        match self.material {
            Material::Attention(material) => material,
            _ => panic!("an attention property on the case {}", self.case.id()),
        }
    }

    /// Material of a merge case.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn merging(&self) -> &'a MergeMaterial {
        match self.material {
            Material::Merge(material) => material,
            _ => panic!("a merge property on the case {}", self.case.id()),
        }
    }

    /// Material of a case of attention under prefill context parallelism.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn prefilling(&self) -> &'a PrefillMaterial {
        match self.material {
            Material::Prefilling(material) => material,
            _ => panic!("a property of attention for shared rows on the case {}", self.case.id()),
        }
    }

    /// Where the rows of a case of prefill context parallelism are, of one that attends as well.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn sharing(&self) -> &'a SharingMaterial {
        match self.material {
            Material::Sharing(material) => material,
            Material::Prefilling(material) => &material.sharing,
            Material::Indexing(material) => &material.sharing,
            Material::Compressing(material) => &material.sharing,
            _ => panic!("a property of prefill context parallelism on the case {}", self.case.id()),
        }
    }

    /// Material of a case of selecting tokens for shared rows.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn indexing(&self) -> &'a IndexMaterial {
        match self.material {
            Material::Indexing(material) => material,
            _ => panic!("a property of an indexer of shared rows on the case {}", self.case.id()),
        }
    }

    /// Material of a case of compressing tokens.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn compressing(&self) -> &'a CompressMaterial {
        match self.material {
            Material::Compressing(material) => material,
            _ => panic!("a property of a compressor on the case {}", self.case.id()),
        }
    }

    /// Material of a router.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn routing(&self) -> &'a RouteMaterial {
        match self.material {
            Material::Route(material) => material,
            _ => panic!("a property of routers on the case {}", self.case.id()),
        }
    }

    /// Material of a layer of experts.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn layer(&self) -> &'a MoeMaterial {
        match self.material {
            Material::Layer(material) => material,
            _ => panic!("a property of experts on the case {}", self.case.id()),
        }
    }

    /// Material of a case of accepting drafts.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn accepting(&self) -> &'a AcceptanceMaterial {
        match self.material {
            Material::Accepting(material) => material,
            _ => panic!("a property of accepting drafts on the case {}", self.case.id()),
        }
    }

    /// Material of a case of selecting tokens.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn selecting(&self) -> &'a SelectMaterial {
        match self.material {
            Material::Selecting(material) => material,
            _ => panic!("a property of selecting tokens on the case {}", self.case.id()),
        }
    }

    /// Material of a case of Kimi delta attention.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn delta(&self) -> &'a KdaMaterial {
        match self.material {
            Material::Delta(material) => material,
            _ => panic!("a property of Kimi delta attention on the case {}", self.case.id()),
        }
    }

    /// Material of a case of a stack.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn stack(&self) -> &'a StackMaterial {
        match self.material {
            Material::Stack(material) => material,
            _ => panic!("a property of stacks on the case {}", self.case.id()),
        }
    }

    /// Every step of a case of Kimi delta attention, or of a stack, performed once.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do one or fails; the same one each time.
    pub fn stepped(&self) -> Result<&[Observed], Halt> {
        let perform = || {
            if let Material::Stack(material) = self.material {
                return material.play(&self.engine);
            }
            let material = self.delta();
            let mut run = Run::open(&self.engine, &material.configuration())?;
            let steps = material.inputs.steps.iter();
            steps.map(|step| run.step(&material.operation(), &material.tensors(step))).collect()
        };
        self.stepped.get_or_init(perform).as_ref().map(Vec::as_slice).map_err(Clone::clone)
    }

    /// Material of a sequence.
    ///
    /// # Panics
    /// When the case is of another kind: properties are registered by family.
    pub fn sequence(&self) -> &'a SequenceMaterial {
        match self.material {
            Material::Sequence(material) => material,
            _ => panic!("a sequence property on the case {}", self.case.id()),
        }
    }

    /// The session of a sequence, taken through its steps once.
    ///
    /// # Errors
    /// [`Halt`] when no session can be opened.
    pub fn played(&self) -> Result<&Play, Halt> {
        self.played.get_or_init(|| Play::of(&self.engine, self.sequence())).as_ref().map_err(Clone::clone)
    }

    /// The one step that the case is about, performed once: layout, attend, attend-context, or merge.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do it or fails; the same one each time.
    pub fn observed(&self) -> Result<&Observed, Halt> {
        self.base.get_or_init(|| self.perform()).as_ref().map_err(Clone::clone)
    }

    /// The write of the case's tokens with the caches before and after, performed once.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do it or fails.
    pub fn written(&self) -> Result<&Written, Halt> {
        let perform = || {
            let material = self.attention();
            let mut run = Run::open(&self.engine, material.configuration())?;
            if let Some(stale) = material.stale_inputs() {
                run.step(&Operation::WriteKv, &stale)?;
            }
            let before = run.step(&Operation::ReadCache, &Tensors::new())?.reply;
            let write = run.step(&Operation::WriteKv, &material.write_inputs())?;
            let after = run.step(&Operation::ReadCache, &Tensors::new())?.reply;
            Ok(Written { before, write, after })
        };
        self.written.get_or_init(perform).as_ref().map_err(Clone::clone)
    }

    /// The caches as they stand after [`Self::observed`].
    ///
    /// # Errors
    /// [`Halt`] when the engine does not return its caches.
    pub fn caches_after(&self) -> Result<Reply, Halt> {
        self.observed()?;
        let mut session = self.session.borrow_mut();
        let run = session.as_mut().ok_or_else(|| Halt::Unsupported("no session is open".to_owned()))?;
        Ok(run.step(&Operation::ReadCache, &Tensors::new())?.reply)
    }

    /// What the engine answers to the case: to its step and its write, or to its settings. Two engines that answer alike on
    /// a case can't be told apart by one step of it.
    pub fn answers(&self) -> Vec<Result<Reply, String>> {
        let text = |halt: Halt| format!("{halt:?}");
        match (self.material, &self.case.body) {
            (Material::Rules, Body::Rules(rules)) => {
                vec![Err(format!("{:?}", self.engine.engine.validate(rules.rules, &rules.settings)))]
            }
            (Material::Attention(_), _) => {
                let changed = self.observed().map(|observed| observed.changed_inputs.join(" "));
                let written = || self.written();
                vec![
                    self.observed().map(|observed| observed.reply.clone()).map_err(text),
                    Err(changed.unwrap_or_else(text)),
                    written().map(|written| written.write.reply.clone()).map_err(text),
                    written().map(|written| written.after.clone()).map_err(text),
                ]
            }
            (Material::Delta(_) | Material::Stack(_), _) => match self.stepped() {
                Ok(steps) => steps.iter().map(|step| Ok(step.reply.clone())).collect(),
                Err(halt) => vec![Err(text(halt))],
            },
            _ => vec![self.observed().map(|observed| observed.reply.clone()).map_err(text)],
        }
    }

    fn perform(&self) -> Result<Observed, Halt> {
        match self.material {
            Material::Attention(material) => {
                let (observed, run) = attend(&self.engine, material)?;
                *self.session.borrow_mut() = Some(run);
                Ok(observed)
            }
            Material::Merge(material) => {
                let mut run = Run::open(&self.engine, &material.configuration)?;
                run.step(&material.operation, &material.inputs.tensors)
            }
            Material::Sharing(material) => {
                let mut run = Run::open(&self.engine, &material.configuration)?;
                run.step(&material.operation, &material.inputs)
            }
            Material::Prefilling(material) => material.observe(&self.engine),
            Material::Indexing(material) => {
                Run::open(&self.engine, &material.configuration)?.step(&material.operation, &material.inputs)
            }
            Material::Compressing(material) => {
                Run::open(&self.engine, &material.configuration)?.step(&material.operation, &material.inputs)
            }
            Material::Route(material) => {
                let mut run = Run::open(&self.engine, &material.configuration)?;
                run.step(&material.operation, &material.inputs)
            }
            Material::Layer(material) => {
                let mut run = Run::open(&self.engine, &material.configuration)?;
                run.step(&material.operation, &material.inputs)
            }
            Material::Accepting(material) => {
                let mut run = Run::open(&self.engine, &material.configuration)?;
                run.step(&material.operation, &material.inputs.tensors)
            }
            Material::Selecting(material) => {
                let mut run = Run::open(&self.engine, &material.configuration)?;
                run.step(&material.operation, &material.inputs)
            }
            Material::Step => {
                let asked = self.case.configuration().zip(self.case.operation());
                let (configuration, operation) =
                    asked.ok_or_else(|| Halt::Inconclusive("the case has no step".to_owned()))?;
                Run::open(&self.engine, &configuration)?.step(&operation, &Tensors::new())
            }
            Material::Delta(_) | Material::Stack(_) => {
                let nothing = || Halt::Inconclusive("the case has no step".to_owned());
                self.stepped()?.last().cloned().ok_or_else(nothing)
            }
            Material::Sequence(_) => Err(Halt::Inconclusive("a sequence has more than one step".to_owned())),
            Material::Rules => Err(Halt::Inconclusive("a rules case has no step".to_owned())),
        }
    }
}

/// Writes the tokens of `material` through the engine's own slot mapping, then performs its step.
///
/// # Errors
/// [`Halt`] when the engine does not do it or fails.
pub fn attend(engine: &Watched<'_>, material: &AttentionMaterial) -> Result<(Observed, Run), Halt> {
    let mut run = Run::open(engine, material.configuration())?;
    if material.operation() != Operation::Layout {
        if let Some(stale) = material.stale_inputs() {
            run.step(&Operation::WriteKv, &stale)?;
        }
        run.step(&Operation::WriteKv, &material.write_inputs())?;
    }
    let observed = run.step(&material.operation(), &material.step_inputs())?;
    Ok((observed, run))
}

#[cfg(test)]
mod tests;
