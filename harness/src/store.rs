//! A failed case on disk: the case, what was asked and answered, and the findings.
//!
//! `case.json` reproduces it; `recording.json` and `tensors.safetensors` hold every step's inputs and outputs, so that
//! `judge` decides again without the engine; `findings.json` says what was found.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;
use shardcheck_cases::Case;
use shardcheck_engine::archive::{self, StridedView};
use shardcheck_engine::{Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::event::CaseResult;
use crate::recording::Recording;

/// The file of a folder that holds its case.
pub const CASE_FILE: &str = "case.json";

/// Why a stored case can't be written or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{path} is damaged: {reason}; run the case again with `shardcheck replay`")]
    Damaged {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Writes a failed case into `folder`, which exists.
///
/// # Errors
/// [`StoreError::Io`].
pub fn write(
    folder: &Path,
    case: &Case,
    recording: &Recording,
    result: &CaseResult,
) -> Result<(), StoreError> {
    put(&folder.join(CASE_FILE), case.to_json().as_bytes())?;
    put(&folder.join("findings.json"), &pretty(result))?;
    let mut tensors = BTreeMap::new();
    let mut document = serde_json::to_value(Skeleton::of(recording, &mut tensors)).unwrap_or(Value::Null);
    document["tensors"] = Value::from("tensors.safetensors");
    put(&folder.join("recording.json"), &pretty(&document))?;
    let path = folder.join("tensors.safetensors");
    let (bytes, _) = archive::pack(tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)))
        .map_err(|error| StoreError::Damaged { path: path.clone(), reason: error.to_string() })?;
    put(&path, &bytes)
}

/// Reads a failed case.
///
/// # Errors
/// [`StoreError`] that names the file.
pub fn read(folder: &Path) -> Result<(Case, Recording), StoreError> {
    let damaged = |name: &str, reason: String| StoreError::Damaged { path: folder.join(name), reason };
    let text = String::from_utf8_lossy(&get(&folder.join(CASE_FILE))?).into_owned();
    let case = Case::from_json(&text).map_err(|error| damaged(CASE_FILE, error.to_string()))?;
    let document = get(&folder.join("recording.json"))?;
    let skeleton: Skeleton =
        serde_json::from_slice(&document).map_err(|error| damaged("recording.json", error.to_string()))?;
    let bytes = get(&folder.join("tensors.safetensors"))?;
    let stored = SafeTensors::deserialize(&bytes)
        .map_err(|error| damaged("tensors.safetensors", error.to_string()))?;
    let recording = skeleton.fill(&stored).map_err(|reason| damaged("recording.json", reason))?;
    Ok((case, recording))
}

fn put(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    std::fs::write(path, bytes).map_err(|source| StoreError::Io { path: path.to_owned(), source })
}

fn get(path: &Path) -> Result<Vec<u8>, StoreError> {
    std::fs::read(path).map_err(|source| StoreError::Io { path: path.to_owned(), source })
}

fn pretty(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec_pretty(value).unwrap_or_default()
}

/// A recording whose tensors lie elsewhere: the recording with empty tensors, and where each belongs.
#[derive(serde::Serialize, serde::Deserialize)]
struct Skeleton {
    recording: Recording,
    /// Strided tensors by name: dtype, shape, strides. Their bytes are stored flat.
    strided: BTreeMap<String, (Dtype, Vec<usize>, Vec<usize>)>,
    names: Vec<Vec<StepNames>>,
    #[serde(default)]
    tensors: String,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct StepNames {
    inputs: Vec<String>,
    inputs_after: Option<Vec<String>>,
    outputs: Vec<String>,
}

impl Skeleton {
    fn of(recording: &Recording, tensors: &mut BTreeMap<String, Tensor>) -> Self {
        let mut recording = recording.clone();
        let mut strided = BTreeMap::new();
        let mut names = Vec::new();
        for (session, record) in recording.sessions.iter_mut().enumerate() {
            let mut steps = Vec::new();
            for (index, step) in record.steps.iter_mut().enumerate() {
                let mut take = |kind: &str, from: &mut Tensors| {
                    let prefix = format!("session{session}.step{index}.{kind}");
                    let mut list = Vec::new();
                    for (name, tensor) in from.iter() {
                        let full = format!("{prefix}.{name}");
                        if let Some(view) = archive::strided_view(tensor) {
                            strided.insert(full.clone(), (view.dtype, view.shape, view.strides));
                        }
                        tensors.insert(full, tensor.clone());
                        list.push(name.to_owned());
                    }
                    *from = Tensors::new();
                    list
                };
                let inputs = take("input", &mut step.inputs);
                let inputs_after = step.inputs_after.as_mut().map(|after| take("input_after", after));
                let outputs = match &mut step.answer {
                    crate::recording::Answered::Done(reply) => take("output", &mut reply.outputs),
                    _ => Vec::new(),
                };
                steps.push(StepNames { inputs, inputs_after, outputs });
            }
            names.push(steps);
        }
        Self { recording, strided, names, tensors: String::new() }
    }

    fn fill(mut self, stored: &SafeTensors<'_>) -> Result<Recording, String> {
        let strided: HashMap<_, _> = self
            .strided
            .into_iter()
            .map(|(name, (dtype, shape, strides))| (name, StridedView { dtype, shape, strides }))
            .collect();
        let load = |prefix: String, list: &[String]| -> Result<Tensors, String> {
            let mut tensors = Tensors::new();
            for name in list {
                let full = format!("{prefix}.{name}");
                let view = stored.tensor(&full).map_err(|error| format!("{full}: {error}"))?;
                let tensor = archive::tensor_of(&view, strided.get(&full));
                tensors.insert(name, tensor.map_err(|error| format!("{full}: {error}"))?);
            }
            Ok(tensors)
        };
        if self.names.len() != self.recording.sessions.len() {
            return Err("sessions and tensor names differ in number".to_owned());
        }
        for (session, (record, names)) in self.recording.sessions.iter_mut().zip(&self.names).enumerate() {
            if record.steps.len() != names.len() {
                return Err(format!("steps and tensor names of session {session} differ in number"));
            }
            for (index, (step, names)) in record.steps.iter_mut().zip(names).enumerate() {
                let prefix = format!("session{session}.step{index}");
                step.inputs = load(format!("{prefix}.input"), &names.inputs)?;
                if let Some(list) = &names.inputs_after {
                    step.inputs_after = Some(load(format!("{prefix}.input_after"), list)?);
                }
                if let crate::recording::Answered::Done(reply) = &mut step.answer {
                    reply.outputs = load(format!("{prefix}.output"), &names.outputs)?;
                }
            }
        }
        Ok(self.recording)
    }
}

#[cfg(test)]
mod tests;
