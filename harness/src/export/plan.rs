//! The one plain pass of a case: the steps of its session, in order, with what each is given and what it is to give.

use shardcheck_cases::{Body, Case, Family};
use shardcheck_engine::{Configuration, OperationKind, Profile, Provenance, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::{OutputShape, StepRequest, TensorShape};
use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::recording::{Answered, Recorder, StepRecord};

/// A pass.
pub(crate) struct Pass {
    pub configuration: Configuration,
    pub steps: Vec<Step>,
}

/// One step of a pass.
pub(crate) struct Step {
    pub request: StepRequest,
    /// Contiguous copies: a file holds no strides.
    pub inputs: Tensors,
}

/// The pass of a case for an engine of that profile.
///
/// The embedded engine is asked the same, for the shapes of the outputs alone: nothing that it computes leaves this function.
///
/// # Errors
/// Why files can't ask the case.
pub(crate) fn pass_of(case: &Case, profile: &Profile) -> Result<Pass, String> {
    if matches!(case.body, Body::Rules(_)) {
        return Err("settings are asked of a running engine, not of files".to_owned());
    }
    let material = Material::of(case, profile)?;
    let template = shardcheck_cpu::engine();
    let recorder = Recorder::new(&template);
    let laboratory = Laboratory::new(case, &recorder, &material);
    let done = match case.family {
        Family::Sequence => laboratory.played().map(|_| ()),
        Family::Write => laboratory.written().map(|_| ()),
        _ => laboratory.observed().map(|_| ()),
    };
    done.map_err(|halt| format!("the pass can't be laid out: {halt:?}"))?;
    let session = recorder.recording().sessions.into_iter().next().ok_or("no session was opened")?;
    let steps = session
        .steps
        .into_iter()
        .enumerate()
        .map(|(index, record)| step_of(case, profile, index, record))
        .collect::<Result<_, _>>()?;
    Ok(Pass { configuration: session.configuration, steps })
}

fn step_of(case: &Case, profile: &Profile, index: usize, record: StepRecord) -> Result<Step, String> {
    let mut inputs = Tensors::new();
    record.inputs.iter().for_each(|(name, tensor)| inputs.insert(name, tensor.to_contiguous()));
    let kind = record.operation.kind(&record.inputs);
    let declared = profile.operation(kind).ok_or_else(|| format!("the profile does not declare {kind}"))?;
    let Answered::Done(reply) = record.answer else {
        return Err(format!("step {index} ({kind}) has no outputs to lay out"));
    };
    let provenance_of = |name: &str| {
        kind.tensors()
            .iter()
            .rev()
            .find(|tensor| tensor.name == name && tensor.provenance != Provenance::Given)
            .map(|tensor| tensor.provenance)
    };
    let outputs = reply
        .outputs
        .iter()
        .filter_map(|(name, tensor)| {
            let required = provenance_of(name)? == Provenance::Output
                && !declared.absent.iter().any(|absent| absent == name);
            let dtype = output_dtype(case, profile, kind, name, tensor);
            Some(OutputShape { name: name.to_owned(), dtype, shape: tensor.shape().to_vec(), required })
        })
        .collect();
    // what a session's caches and metadata are in between is looked at where it is there
    let needed = match kind {
        OperationKind::ReadCache | OperationKind::Layout => case.family != Family::Sequence,
        _ => true,
    };
    let request = StepRequest {
        folder: format!("step{index}"),
        operation: record.operation,
        kind,
        needed,
        conventions: declared.conventions.clone(),
        inputs: inputs
            .iter()
            .map(|(name, tensor)| TensorShape {
                name: name.to_owned(),
                dtype: tensor.dtype(),
                shape: tensor.shape().to_vec(),
            })
            .collect(),
        outputs,
    };
    Ok(Step { request, inputs })
}

/// The output of attention has the contract's element type; that of a merge has the one of the given states.
fn output_dtype(case: &Case, profile: &Profile, kind: OperationKind, name: &str, tensor: &Tensor) -> Dtype {
    let dtype = case.configuration().map_or(Dtype::Bf16, |configuration| configuration.dtype);
    let contract = profile.operation(kind).and_then(|operation| operation.contract_of(dtype));
    match contract {
        Some(contract) if name == "out" && !matches!(case.body, Body::Merge(_)) => contract.output,
        _ => tensor.dtype(),
    }
}
