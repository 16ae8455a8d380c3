//! What is allowed of each element of the outputs that a script judges.

use serde_json::{Value, json};
use shardcheck_cases::{Case, Family};
use shardcheck_engine::OperationProfile;
use shardcheck_formats::Dtype;

use super::Asked;
use super::arrays::Arrays;
use crate::judge::Allowed;
use crate::laboratory::Halt;
use crate::material::{AttentionMaterial, Material};
use crate::properties::unit_lse;

/// An output, and what each of its elements may be.
pub(super) struct Wanted {
    /// Name of the output.
    pub name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    allowed: Vec<Allowed>,
    /// Whether an answer without it is wrong.
    required: bool,
}

impl Wanted {
    /// The output as it stands in a script.
    pub fn value(&self, arrays: &mut Arrays) -> Value {
        let mut add = |what: &str, of: &dyn Fn(Allowed) -> f64| {
            let values: Vec<f64> = self.allowed.iter().map(|allowed| of(*allowed)).collect();
            arrays.numbers(&format!("{}.{what}", self.name), &self.shape, &values)
        };
        let (expected, low, high) = (
            add("expected", &Allowed::expected),
            add("low", &|allowed| interval(allowed).0),
            add("high", &|allowed| interval(allowed).1),
        );
        let mut value = json!({
            "dtype": self.dtype, "shape": self.shape, "required": self.required,
            "expected": expected, "low": low, "high": high,
        });
        let or_nan = |allowed| matches!(allowed, Allowed::OrNan { .. });
        if self.allowed.iter().copied().any(or_nan) {
            value["or_nan"] = add("or_nan", &|allowed| f64::from(u8::from(or_nan(allowed))));
        }
        value
    }
}

/// Smallest and largest allowed value; NaN twice where anything is.
fn interval(allowed: Allowed) -> (f64, f64) {
    match allowed {
        Allowed::Exactly(value) => (value, value),
        Allowed::NegativeInfinity => (f64::NEG_INFINITY, f64::NEG_INFINITY),
        Allowed::Between { low, high, .. } | Allowed::OrNan { low, high, .. } => (low, high),
        Allowed::Undefined => (f64::NAN, f64::NAN),
    }
}

/// What is judged of a case, without what the engine declares that it has not got.
///
/// # Errors
/// [`Halt`] where no bound can be derived.
pub(super) fn wanted(
    case: &Case,
    material: &Material,
    declared: Option<&OperationProfile>,
    asked: Asked,
) -> Result<Vec<Wanted>, Halt> {
    let mut outputs = all(case, material)?;
    if let (Asked::EqualLogits, Material::Attention(material)) = (asked, material) {
        outputs
            .iter_mut()
            .filter(|output| output.name == "lse")
            .for_each(|lse| lse.allowed = unit_lse(material));
    }
    let absent =
        |name: &str| declared.is_some_and(|declared| declared.absent.iter().any(|absent| absent == name));
    outputs.retain(|output| !absent(output.name));
    Ok(outputs)
}

fn all(case: &Case, material: &Material) -> Result<Vec<Wanted>, Halt> {
    let state = |dtype: Dtype, shape: Vec<usize>, out: Vec<Allowed>, lse: Vec<Allowed>| {
        let states = shape[..3].to_vec();
        vec![
            Wanted { name: "out", dtype, shape, allowed: out, required: true },
            Wanted { name: "lse", dtype: Dtype::F32, shape: states, allowed: lse, required: true },
        ]
    };
    match material {
        Material::Merge(material) => {
            let expected = material.expected()?;
            let (out, lse) = (expected.out.clone(), expected.lse.clone());
            Ok(state(material.output_dtype(), material.output_shape(), out, lse))
        }
        Material::Attention(material) if case.family == Family::Layout => Ok(layout(material)),
        Material::Attention(material) => {
            let expected = material.expected()?;
            let shape = material.output_shape();
            let (mut out, mut lse) = (Vec::new(), Vec::new());
            for rank in 0..shape[0] {
                for row in 0..shape[1] {
                    for head in 0..shape[2] {
                        let at = row * material.heads() + rank * shape[2] + head;
                        lse.push(expected.lse[at]);
                        out.extend_from_slice(&expected.out[at * shape[3]..(at + 1) * shape[3]]);
                    }
                }
            }
            Ok(state(material.output_dtype(), shape, out, lse))
        }
        _ => Err(Halt::Inconclusive("it has no outputs of one step".to_owned())),
    }
}

/// The integers of a layout. Local lengths must be there; what else an engine derives is judged where it is.
fn layout(material: &AttentionMaterial) -> Vec<Wanted> {
    let workload = &material.case.workload;
    let (ranks, requests, rows) = (material.ranks(), workload.requests.len(), workload.query_rows());
    let held = |rank: usize, request: usize| {
        material.layout.local_len(workload.requests[request].seq_len(), material.dcp_rank(rank))
    };
    let pairs = || (0..ranks).flat_map(|rank| (0..requests).map(move |request| (rank, request)));
    let width = pairs().map(|(rank, request)| held(rank, request)).max().unwrap_or(0);
    let (mut row_lens, mut mask, mut slots) = (Vec::new(), Vec::new(), Vec::new());
    for rank in 0..ranks {
        let member = material.dcp_rank(rank);
        for row in &material.rows[..rows] {
            let Some((request, t)) = *row else { continue };
            let (length, q) = (workload.requests[request].seq_len(), workload.requests[request].query_tokens);
            row_lens.push(exactly(material.layout.verify_row_len(length, q, t, member)));
            mask.extend((0..width).map(|local| match local < held(rank, request) {
                true => exactly(usize::from(material.layout.row_sees(length, q, t, local, member))),
                false => Allowed::Undefined,
            }));
        }
        for (request, spec) in workload.requests.iter().enumerate() {
            let table = material.block_table(request);
            let slot = |position| material.layout.slot(position, member, table) as f64;
            slots.extend((0..spec.seq_len()).map(|position| Allowed::Exactly(slot(position))));
        }
    }
    let lens = pairs().map(|(rank, request)| exactly(held(rank, request))).collect();
    let integers = |name, dtype, shape, allowed, required| Wanted { name, dtype, shape, allowed, required };
    vec![
        integers("local_lens", Dtype::I32, vec![ranks, requests], lens, true),
        integers("row_lens", Dtype::I32, vec![ranks, rows], row_lens, false),
        integers("row_mask", Dtype::U8, vec![ranks, rows, width], mask, false),
        integers("slots", Dtype::I64, vec![ranks, workload.total_tokens()], slots, false),
    ]
}

fn exactly(count: usize) -> Allowed {
    Allowed::Exactly(count as f64)
}
