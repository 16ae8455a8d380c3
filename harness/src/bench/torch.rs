//! The same attention in PyTorch, where it is installed: float64, all scores formed, from the same bf16 cache.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use shardcheck_formats::bf16_from_f32;

use super::inputs::Tensors;

const SCRIPT: &str = include_str!("torch_reference.py");

/// What a run of the reference gave.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Measured {
    /// Version of PyTorch.
    pub version: String,
    /// Seconds of each run.
    pub seconds: Vec<f64>,
    /// `[rows, heads, v_dim]`.
    pub out: Vec<f64>,
}

#[derive(Deserialize)]
struct Printed {
    version: String,
    seconds: Vec<f64>,
}

/// Version of PyTorch that `python3` imports.
///
/// # Errors
/// What `python3` said instead.
pub(super) fn version() -> Result<String, String> {
    let output = Command::new("python3")
        .args(["-c", "import torch; print(torch.__version__)"])
        .output()
        .map_err(|error| format!("python3 does not start: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(text.lines().last().unwrap_or("python3 failed without a word").to_owned());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A folder that is removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("shardcheck-torch-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // nothing depends on it
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs the reference `runs` times on the tensors, which hold values of bf16.
///
/// # Errors
/// What went wrong, in words.
pub(super) fn measure(tensors: &Tensors, runs: usize) -> Result<Measured, String> {
    let folder = Folder::new().map_err(|error| format!("failed to make a folder: {error}"))?;
    write(&folder.0, tensors, runs).map_err(|error| format!("failed to write its inputs: {error}"))?;
    let output = Command::new("python3")
        .arg(folder.0.join("torch_reference.py"))
        .arg(&folder.0)
        .output()
        .map_err(|error| format!("python3 does not start: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(text.lines().last().unwrap_or("it failed without a word").to_owned());
    }
    let printed: Printed = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("its answer is not the JSON that was asked for: {error}"))?;
    let bytes = std::fs::read(folder.0.join("out.bin")).map_err(|error| format!("no output: {error}"))?;
    let out = bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
    Ok(Measured { version: printed.version, seconds: printed.seconds, out })
}

fn write(folder: &Path, tensors: &Tensors, runs: usize) -> std::io::Result<()> {
    let shape = tensors.shape;
    let request = serde_json::json!({
        "rows": shape.rows, "heads": shape.heads, "kv_heads": shape.kv_heads, "tokens": shape.tokens,
        "qk_dim": shape.qk_dim, "v_dim": shape.v_dim, "latent": shape.latent,
        "scale": tensors.problem().scale, "runs": runs, "threads": rayon::current_num_threads(),
    });
    std::fs::write(folder.join("request.json"), request.to_string())?;
    std::fs::write(folder.join("torch_reference.py"), SCRIPT)?;
    for (name, values) in
        [("query.bin", &tensors.query), ("key.bin", &tensors.key), ("value.bin", &tensors.value)]
    {
        let bytes: Vec<u8> = values.iter().flat_map(|x| bf16_from_f32(*x).to_le_bytes()).collect();
        std::fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
