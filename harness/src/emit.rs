//! A case as a stand-alone Python script, for the people who mend the engine: inputs, a plain reference, what is allowed.
//!
//! The script needs numpy alone and has one place where their call goes. Arrays lie in it as base64, or beside it in an `.npz` when there is
//! more than a megabyte of them.

mod arrays;
mod npz;

use serde_json::{Value, json};
use shardcheck_cases::{Case, Family};
use shardcheck_engine::{Profile, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::export::{Pass, pass_of};
use crate::judge::Allowed;
use crate::laboratory::Halt;
use crate::material::{AttentionMaterial, Material};
use crate::recording::{Answered, Recording};

use arrays::Arrays;

/// Families that a script has a reference for.
pub const FAMILIES: [Family; 7] = [
    Family::MergeStates,
    Family::MergePartials,
    Family::Decode,
    Family::Verify,
    Family::Draft,
    Family::Context,
    Family::Layout,
];

const TEMPLATE: &str = include_str!("emit/script.py");
const DATA_MARK: &str = "@DATA@";

/// A script, and the arrays that did not fit into it.
#[derive(Debug)]
pub struct Script {
    /// The Python file.
    pub text: String,
    /// The `.npz` file that goes beside it.
    pub archive: Option<Vec<u8>>,
}

/// A case that no script can be written for.
#[derive(Debug, thiserror::Error)]
#[error("no script can be written for {id}: {reason}")]
pub struct EmitError {
    id: String,
    reason: String,
}

/// The script of a case, judged by the contract of `profile`; `recording` holds what an engine answered, where that is known. `archive_name` is the file that large
/// arrays go into, beside the script.
///
/// # Errors
/// [`EmitError`]: a family without a reference ([`FAMILIES`]), or a case that no bound can be derived for.
pub fn script(
    case: &Case,
    profile: &Profile,
    recording: Option<&Recording>,
    archive_name: &str,
) -> Result<Script, EmitError> {
    let error = |reason: String| EmitError { id: case.id(), reason };
    if !FAMILIES.contains(&case.family) {
        let known = FAMILIES.map(Family::name).join(", ");
        let reason =
            format!("there is a reference for {known}; `shardcheck export` writes any case as files");
        return Err(error(reason));
    }
    let pass = pass_of(case, profile).map_err(error)?;
    let material = Material::of(case, profile).map_err(error)?;
    let wanted = wanted(case, &material).map_err(|halt| error(format!("{halt:?}")))?;
    let seen = recording.and_then(|recording| answered(recording, &pass));
    let mut arrays = Arrays::default();
    let (last, before) = pass.steps.split_last().ok_or_else(|| error("it has no step".to_owned()))?;
    let writes: Vec<Value> = before
        .iter()
        .enumerate()
        .map(|(step, write)| arrays.tensors(&format!("write{step}"), &write.inputs))
        .collect();
    let mut data = json!({
        "case": case.id(),
        "family": case.family.name(),
        "configuration": pass.configuration,
        "operation": last.request.operation,
        "inputs": arrays.tensors("input", &last.inputs),
        "writes": writes,
        "wanted": wanted.iter().map(|output| (output.name.to_owned(), output.value(&mut arrays))).collect::<serde_json::Map<_, _>>(),
        "attention": match &material {
            Material::Attention(material) if case.family != Family::Layout => attention(material, &mut arrays),
            _ => Value::Null,
        },
        "seen": seen.map_or(Value::Null, |reply| arrays.tensors("seen", &of_interest(&reply, &wanted))),
        "archive": Value::Null,
    });
    let archive = arrays.finish(&mut data);
    if archive.is_some() {
        data["archive"] = archive_name.into();
    }
    let text = serde_json::to_string_pretty(&data).map_err(|reason| error(reason.to_string()))?;
    Ok(Script { text: TEMPLATE.replacen(DATA_MARK, &text, 1), archive })
}

/// An output, and what each of its elements may be.
struct Wanted {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    allowed: Vec<Allowed>,
}

impl Wanted {
    fn value(&self, arrays: &mut Arrays) -> Value {
        let mut add = |what: &str, of: &dyn Fn(Allowed) -> f64| {
            let values: Vec<f64> = self.allowed.iter().map(|allowed| of(*allowed)).collect();
            arrays.numbers(&format!("{}.{what}", self.name), &self.shape, &values)
        };
        let (expected, low, high) = (
            add("expected", &Allowed::expected),
            add("low", &|allowed| interval(allowed).0),
            add("high", &|allowed| interval(allowed).1),
        );
        json!({"dtype": self.dtype, "shape": self.shape, "expected": expected, "low": low, "high": high})
    }
}

/// Smallest and largest allowed value; NaN twice where anything is.
fn interval(allowed: Allowed) -> (f64, f64) {
    match allowed {
        Allowed::Exactly(value) => (value, value),
        Allowed::NegativeInfinity => (f64::NEG_INFINITY, f64::NEG_INFINITY),
        Allowed::Between { low, high, .. } => (low, high),
        Allowed::Undefined => (f64::NAN, f64::NAN),
    }
}

fn wanted(case: &Case, material: &Material) -> Result<Vec<Wanted>, Halt> {
    let state = |dtype: Dtype, shape: Vec<usize>, out: Vec<Allowed>, lse: Vec<Allowed>| {
        let states = shape[..3].to_vec();
        vec![
            Wanted { name: "out", dtype, shape, allowed: out },
            Wanted { name: "lse", dtype: Dtype::F32, shape: states, allowed: lse },
        ]
    };
    match material {
        Material::Merge(material) => {
            let expected = material.expected()?;
            let (out, lse) = (expected.out.clone(), expected.lse.clone());
            Ok(state(material.output_dtype(), material.output_shape(), out, lse))
        }
        Material::Attention(material) if case.family == Family::Layout => {
            let requests = &material.case.workload.requests;
            let lens = (0..material.ranks()).flat_map(|rank| {
                let len = move |tokens| material.layout.local_len(tokens, material.dcp_rank(rank));
                requests.iter().map(move |request| Allowed::Exactly(len(request.seq_len()) as f64))
            });
            let shape = vec![material.ranks(), requests.len()];
            Ok(vec![Wanted { name: "local_lens", dtype: Dtype::I32, shape, allowed: lens.collect() }])
        }
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

/// What the reference of attention needs: keys and values as the cache holds them, and which of them each row sees.
fn attention(material: &AttentionMaterial, arrays: &mut Arrays) -> Value {
    let configuration = material.configuration();
    let shape = configuration.attention;
    let (kv_heads, qk_dim, value_dim) = (shape.kv_heads(), shape.qk_dim(), shape.value_dim());
    let mut floats = |name: String, shape: &[usize], values: &[f32]| {
        arrays.tensor(&name, &Tensor::from_f32(Dtype::F32, shape, values))
    };
    let (rows, heads) = (material.rows.len(), material.heads());
    let query: Vec<f32> =
        (0..rows * heads).flat_map(|at| material.query(at / heads, at % heads).to_vec()).collect();
    let query = floats("query".to_owned(), &[rows, heads, qk_dim], &query);
    let mut held = |name: &str, tokens: &[Vec<f32>], width: usize| -> Vec<Value> {
        let each = tokens.iter().enumerate();
        each.map(|(request, values)| {
            let shape = [values.len() / (kv_heads * width), kv_heads, width];
            floats(format!("{name}{request}"), &shape, values)
        })
        .collect()
    };
    let keys = held("key", &material.held_keys, qk_dim);
    let values = if shape.is_mla() { Vec::new() } else { held("value", &material.held_values, value_dim) };
    let groups = configuration.tp / configuration.dcp;
    let weights: Option<Vec<f32>> = (0..groups)
        .map(|group| material.up_projection(group))
        .collect::<Option<Vec<_>>>()
        .map(|all| all.concat());
    let w_uv = weights.map_or(Value::Null, |weights| {
        floats("w_uv".to_owned(), &[heads, value_dim, shape.v_head_dim()], &weights)
    });
    let places: Vec<Value> = (0..rows)
        .map(|row| {
            material.rows[row]
                .map_or(Value::Null, |(request, _)| json!([request, material.visible_tokens(row)]))
        })
        .collect();
    json!({
        "query": query, "keys": keys, "values": values, "w_uv": w_uv, "rows": places,
        "ranks": configuration.tp, "heads": configuration.heads_per_rank,
        "gathered_heads": configuration.gathered_heads(), "kv_heads": kv_heads, "value_dim": value_dim,
        "softmax_scale": f64::from(configuration.softmax_scale),
    })
}

/// What an engine answered to the last step of the pass.
fn answered(recording: &Recording, pass: &Pass) -> Option<Reply> {
    let last = pass.steps.last()?;
    let asked = |inputs: &Tensors| {
        inputs.len() == last.inputs.len()
            && inputs.iter().all(|(name, tensor)| last.inputs.find(name) == Some(&tensor.to_contiguous()))
    };
    let mut steps = recording.sessions.iter().flat_map(|session| &session.steps);
    let step = steps.find(|step| step.operation == last.request.operation && asked(&step.inputs))?;
    match &step.answer {
        Answered::Done(reply) => Some(reply.clone()),
        _ => None,
    }
}

/// The outputs of a reply that the script judges.
fn of_interest(reply: &Reply, wanted: &[Wanted]) -> Tensors {
    let mut tensors = Tensors::new();
    for (name, tensor) in
        reply.outputs.iter().filter(|(name, _)| wanted.iter().any(|output| output.name == *name))
    {
        tensors.insert(name, tensor.to_contiguous());
    }
    tensors
}
