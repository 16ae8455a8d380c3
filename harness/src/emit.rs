//! A case as a stand-alone Python script, for the people who mend the engine: inputs, a plain reference, what is allowed.
//!
//! The script needs numpy alone and has one place where their call goes, or it ends in the engine's own call: a file of calls, which the engine names,
//! then stands in that place, and the script needs what that file imports. Arrays lie in it as base64, or beside it in an `.npz` when there is
//! more than a megabyte of them.

mod arrays;
mod calls;
mod npz;
mod outputs;

use std::collections::BTreeSet;
use std::iter;

use serde_json::{Value, json};
use shardcheck_cases::{Case, Family};
use shardcheck_engine::{Profile, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::export::{Pass, pass_of};
use crate::laboratory::Halt;
use crate::material::{AttentionMaterial, Material};
use crate::properties::Property;
use crate::recording::{Answered, Recording};

pub use calls::{Call, CallError};

use arrays::Arrays;
use calls::imported;
use outputs::{Wanted, wanted};

/// Families that a script has a reference for.
pub const FAMILIES: [Family; 8] = [
    Family::MergeStates,
    Family::MergePartials,
    Family::Decode,
    Family::Verify,
    Family::Draft,
    Family::AttendSinks,
    Family::Context,
    Family::Layout,
];

const TEMPLATE: &str = include_str!("emit/script.py");
const PLACE: &str = include_str!("emit/place.py");
/// The one property whose own step a script can ask.
pub const LSE_UNIT: &str = "lse.unit";
const DATA_MARK: &str = "@DATA@";
const ENGINE_MARK: &str = "@ENGINE@";

/// A script, and the arrays that did not fit into it.
#[derive(Debug)]
pub struct Script {
    /// The Python file.
    pub text: String,
    /// The `.npz` file that goes beside it.
    pub archive: Option<Vec<u8>>,
    /// Whether it ends in the engine's own call.
    pub is_called: bool,
    /// Why not, where there was a file of calls.
    pub without_call: Option<CallError>,
}

/// A case that no script can be written for.
#[derive(Debug, thiserror::Error)]
pub enum EmitError {
    /// A family that the script has no reference for.
    #[error(
        "a script holds what is allowed of each element, and that is fixed in advance for {}; this case is of the family {family}{}. Its inputs are written as files, whose \
         answers `shardcheck judge inputs` decides on, by: shardcheck export inputs --case '{id}'",
        FAMILIES.map(Family::name).join(", "),
        if *family == Family::Stack { ", where each stage is judged by what the engine showed of the one before" } else { "" }
    )]
    NoReference {
        /// Case id.
        id: String,
        /// Its family.
        family: Family,
    },
    /// A family that neither a script nor files can ask.
    #[error(
        "this case asks for settings, which a running engine answers and neither a script nor files can; it is asked by: shardcheck replay '{id}'"
    )]
    Rules {
        /// Case id.
        id: String,
    },
    /// A property that does not ask anything of the case.
    #[error(
        "{LSE_UNIT} asks nothing of {id}: `shardcheck explain {LSE_UNIT}` says of what it does; without --property the script asks for the case's own step"
    )]
    NotAsked {
        /// Case id.
        id: String,
    },
    /// Nothing to derive a bound from.
    #[error("no script can be written for {id}: {reason}")]
    NoBound {
        /// Case id.
        id: String,
        /// What is missing.
        reason: String,
    },
}

/// What a script asks of a case.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Its own step.
    #[default]
    Step,
    /// What the property `lse.unit` asks: the same step with queries of zeros, whose LSEs are logarithms of numbers of tokens in all 32 bits, whatever
    /// the engine's contract says that it loses of an LSE.
    EqualLogits,
}

impl Asked {
    /// Whether a property judges what the script does.
    pub fn is_judged_by(self, property: &Property) -> bool {
        let id = property.id;
        match self {
            Self::Step => id.ends_with(".output") || id.ends_with(".lse") || id.starts_with("layout."),
            Self::EqualLogits => id == LSE_UNIT,
        }
    }
}

/// What a script is to say beside the case.
#[derive(Debug, Default)]
pub struct Telling<'a> {
    /// What it asks.
    pub asked: Asked,
    /// What an engine answered, where that is known.
    pub recording: Option<&'a Recording>,
    /// File that large arrays go into, beside the script.
    pub archive_name: &'a str,
    /// The engine's own call.
    pub call: Option<&'a Call>,
}

/// The script of a case, judged by the contract of `profile`.
///
/// # Errors
/// [`EmitError`]: a family without a reference ([`FAMILIES`]), or a case that no bound can be derived for.
pub fn script(case: &Case, profile: &Profile, telling: &Telling<'_>) -> Result<Script, EmitError> {
    refuse(case, telling.asked)?;
    let error = |reason: String| EmitError::NoBound { id: case.id(), reason };
    let halted = |halt: Halt| error(format!("{halt:?}"));
    let mut pass = pass_of(case, profile).map_err(error)?;
    let mut material = Material::of(case, profile).map_err(error)?;
    if telling.asked == Asked::EqualLogits {
        material = with_equal_logits(&material, &mut pass).map_err(halted)?;
    }
    let (last, before) = pass.steps.split_last().ok_or_else(|| error("it has no step".to_owned()))?;
    let declared = profile.operation(last.request.kind);
    let wanted = wanted(case, &material, declared, telling.asked).map_err(halted)?;
    let seen = telling.recording.and_then(|recording| answered(recording, &pass));
    let mut arrays = Arrays::default();
    let writes: Vec<Value> = before
        .iter()
        .enumerate()
        .map(|(step, write)| arrays.tensors(&format!("write{step}"), &write.inputs))
        .collect();
    let mut data = json!({
        "case": case.id(),
        "property": match telling.asked { Asked::Step => Value::Null, Asked::EqualLogits => LSE_UNIT.into() },
        "family": case.family.name(),
        "engine": format!("{} {}", profile.engine, profile.version),
        "release": profile.release_folder,
        "configuration": pass.configuration,
        "operation": last.request.operation,
        "inputs": arrays.tensors("input", &last.inputs),
        "writes": writes,
        "wanted": wanted.iter().map(|output| (output.name.to_owned(), output.value(&mut arrays))).collect::<serde_json::Map<_, _>>(),
        "attention": match &material {
            Material::Attention(material) if case.family != Family::Layout => attention(material, &mut arrays),
            _ => Value::Null,
        },
        "seen": seen.as_ref().map_or(Value::Null, |reply| arrays.tensors("seen", &of_interest(reply, &wanted))),
        "effective": seen.as_ref().map_or_else(|| json!({}), |reply| json!(reply.effective)),
        "archive": Value::Null,
    });
    let archive = arrays.finish(&mut data);
    if archive.is_some() {
        data["archive"] = telling.archive_name.into();
    }
    let called =
        telling.call.map(|call| call.body(last.request.kind, &[TEMPLATE, PLACE].concat())).transpose();
    let (called, without_call) = called.map_or_else(|why| (None, Some(why)), |called| (called, None));
    data["is_called"] = called.is_some().into();
    let text = serde_json::to_string_pretty(&data).map_err(|reason| error(reason.to_string()))?;
    Ok(Script { text: filled(called.as_deref(), &text), archive, is_called: called.is_some(), without_call })
}

/// A case, and its last step, with queries of zeros.
fn with_equal_logits(material: &Material, pass: &mut Pass) -> Result<Material, Halt> {
    let zeroed = match material {
        Material::Attention(material) => material.with_equal_logits()?,
        _ => return Err(Halt::Inconclusive("lse.unit asks for attention".to_owned())),
    };
    if let Some(step) = pass.steps.last_mut() {
        zeroed
            .step_inputs()
            .iter()
            .for_each(|(name, tensor)| step.inputs.insert(name, tensor.to_contiguous()));
    }
    Ok(Material::Attention(Box::new(zeroed)))
}

/// Refuses what a script can't hold, with what to do instead.
///
/// # Errors
/// [`EmitError::NoReference`], [`EmitError::Rules`] and [`EmitError::NotAsked`].
pub fn refuse(case: &Case, asked: Asked) -> Result<(), EmitError> {
    let id = case.id();
    if case.family == Family::Rules {
        return Err(EmitError::Rules { id });
    }
    if !FAMILIES.contains(&case.family) {
        return Err(EmitError::NoReference { id, family: case.family });
    }
    if asked == Asked::EqualLogits
        && !crate::properties::find(LSE_UNIT).is_some_and(|property| property.is_for(case))
    {
        return Err(EmitError::NotAsked { id });
    }
    Ok(())
}

/// The template with its places filled; the data last, so that nothing in them is taken for a place.
fn filled(called: Option<&str>, data: &str) -> String {
    let (needs, usage, engine) = match called {
        Some(body) => (
            "Needs what the calls of the engine below import, and a release of\nthe engine; nothing of shardcheck.",
            "Run it with the folder of the unpacked release: `python3 THIS FOLDER`.",
            body,
        ),
        None => (
            "Needs numpy and nothing else.",
            "Put your call into `engine` below and run this file.",
            PLACE.trim_end(),
        ),
    };
    let packages: BTreeSet<&str> = iter::once("numpy").chain(called.into_iter().flat_map(imported)).collect();
    let packages = packages.into_iter().collect::<Vec<_>>().join(" ");
    let filled = [("@NEEDS@", needs), ("@USE@", usage), ("@PACKAGES@", &packages)]
        .into_iter()
        .fold(TEMPLATE.to_owned(), |text, (mark, with)| text.replacen(mark, with, 1));
    let (before, behind) = filled.split_once(ENGINE_MARK).unwrap_or((&filled, ""));
    format!("{}{engine}{behind}", before.replacen(DATA_MARK, data, 1))
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
    let sinks: Option<Vec<f64>> =
        (0..groups).map(|group| material.sinks(group)).collect::<Option<Vec<_>>>().map(|all| all.concat());
    let places: Vec<Value> = (0..rows)
        .map(|row| {
            material.rows[row]
                .map_or(Value::Null, |(request, _)| json!([request, material.visible_tokens(row)]))
        })
        .collect();
    json!({
        "query": query, "keys": keys, "values": values, "w_uv": w_uv, "sinks": sinks, "rows": places,
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
