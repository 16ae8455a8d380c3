//! How far two engines' answers to one question may lie apart when both conform: the width of each element's interval.

use shardcheck_engine::{LseBase, Operation, OperationKind, Profile, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::judge::Allowed;
use crate::material::{AttentionMaterial, Material};
use crate::recording::StepRecord;

/// Relative distance of neighbouring bf16 numbers at most: what one rounding of an output may move.
const OUTPUT_STEP: f64 = 1.0 / 128.0;
/// Relative distance, of one plus its size, of two LSEs of which nothing is certified.
const LSE_STEP: f64 = 1.0 / (1u64 << 16) as f64;

/// Widths of the certified intervals of a case's step, and rules for everything else.
pub(crate) struct Widths {
    step: Option<CertifiedStep>,
}

struct CertifiedStep {
    operation: Operation,
    inputs: Tensors,
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl Widths {
    /// Widths for a case. Without material there are the rules alone.
    pub fn of(material: Option<&Material>) -> Self {
        let step = match material {
            Some(Material::Attention(material)) => certified_attention(material),
            // packing moves bits and has no interval
            Some(Material::Merge(material)) if material.operation != Operation::PackLse => {
                material.expected().ok().map(|expected| CertifiedStep {
                    operation: material.operation.clone(),
                    inputs: material.inputs.tensors.clone(),
                    out: expected.out.iter().map(|allowed| width(*allowed)).collect(),
                    lse: expected.lse.iter().map(|allowed| width(*allowed)).collect(),
                })
            }
            _ => None,
        };
        Self { step }
    }

    /// Width of each element of an answer whose values are `values`; `None` where elements must be equal.
    ///
    /// Where the step is the case's own, that of the element's certified interval, and at least one rounding of the output format
    /// at the value that is there: a fault moves values to where the interval was not made for. For other steps of the
    /// recording, whose oracle is not at hand, one rounding at the largest value of the row.
    pub fn of_tensor(
        &self,
        step: &StepRecord,
        name: &str,
        tensor: &Tensor,
        values: &[f64],
    ) -> Option<Vec<f64>> {
        if !matches!(tensor.dtype(), Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
            return None;
        }
        if matches!(step.operation, Operation::PackLse) || name == "gathered_query" {
            return None;
        }
        let certified = self.step.as_ref().filter(|own| {
            own.operation == step.operation && own.inputs == step.inputs && matches!(name, "out" | "lse")
        });
        let own = certified.map(|own| if name == "out" { &own.out } else { &own.lse });
        let own = own.filter(|own| own.len() == values.len());
        if name.ends_with("lse") {
            let floor = |value: f64| LSE_STEP * (1.0 + value.abs());
            return Some(with_floor(own, values, floor));
        }
        if own.is_some() {
            return Some(with_floor(own, values, |value| OUTPUT_STEP * value.abs()));
        }
        let row = tensor.shape().last().copied().unwrap_or(1).max(1);
        let largest =
            |row: &[f64]| row.iter().filter(|v| v.is_finite()).fold(0.0f64, |most, v| most.max(v.abs()));
        Some(
            values
                .chunks(row)
                .flat_map(|values| std::iter::repeat_n(OUTPUT_STEP * largest(values), values.len()))
                .collect(),
        )
    }
}

fn with_floor(own: Option<&Vec<f64>>, values: &[f64], floor: impl Fn(f64) -> f64) -> Vec<f64> {
    let floor = |value: f64| if value.is_finite() { floor(value) } else { 0.0 };
    let own = |index: usize| own.map_or(0.0, |own| own[index]);
    values.iter().enumerate().map(|(index, value)| floor(*value).max(own(index))).collect()
}

fn width(allowed: Allowed) -> f64 {
    match allowed {
        Allowed::Between { low, high, .. } | Allowed::OrNan { low, high, .. } => high - low,
        Allowed::Undefined => f64::INFINITY,
        Allowed::Exactly(_) | Allowed::NegativeInfinity => 0.0,
    }
}

fn certified_attention(material: &AttentionMaterial) -> Option<CertifiedStep> {
    if material.operation() == Operation::Layout {
        return None;
    }
    let expected = material.expected().ok()?;
    let shape = material.output_shape();
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for rank in 0..shape[0] {
        for row in 0..shape[1] {
            for head in 0..shape[2] {
                let state = row * material.heads() + rank * shape[2] + head;
                lse.push(width(expected.lse[state]));
                out.extend((0..shape[3]).map(|d| width(expected.out[state * shape[3] + d])));
            }
        }
    }
    Some(CertifiedStep { operation: material.operation(), inputs: material.step_inputs(), out, lse })
}

/// The partial LSEs of a reply are in the base that the profile declares; everything else is natural.
pub(crate) fn natural(profile: &Profile, operation: &Operation, name: &str, values: Vec<f64>) -> Vec<f64> {
    let kind = match operation {
        Operation::Attend { .. } => OperationKind::Decode,
        _ => return values,
    };
    let base = profile.operation(kind).map(|operation| operation.conventions.lse_base);
    match base {
        Some(LseBase::Two) if name == "partial_lse" => {
            values.into_iter().map(|lse| lse * std::f64::consts::LN_2).collect()
        }
        _ => values,
    }
}
