//! Writes an export.

use std::fs;
use std::path::Path;

use shardcheck_cases::Case;
use shardcheck_engine::Profile;
use shardcheck_engine::archive;

use super::plan::{Pass, pass_of};
use super::{
    EXPORT_SCHEMA_VERSION, ExportError, INPUTS_FILE, LeftOut, MANIFEST_FILE, Manifest, ManifestEntry,
    REQUEST_FILE, Request,
};
use crate::run_directory::case_folder_name;
use crate::store::CASE_FILE;

/// Writes the passes of `cases` into a new or empty folder, the manifest last: a folder without one is not finished.
///
/// # Errors
/// [`ExportError::NotEmpty`], [`ExportError::Io`].
pub fn export(
    folder: &Path,
    cases: &[Case],
    suite: &str,
    seed: u64,
    profile: &Profile,
) -> Result<Manifest, ExportError> {
    fs::create_dir_all(folder).map_err(ExportError::io(folder))?;
    if fs::read_dir(folder).map_err(ExportError::io(folder))?.next().is_some() {
        return Err(ExportError::NotEmpty { path: folder.to_owned() });
    }
    let mut manifest = Manifest {
        schema_version: EXPORT_SCHEMA_VERSION,
        tool_version: env!("CARGO_PKG_VERSION").to_owned(),
        suite: suite.to_owned(),
        seed,
        profile: profile.clone(),
        cases: Vec::new(),
        left_out: Vec::new(),
    };
    for case in cases {
        let id = case.id();
        match pass_of(case, profile) {
            Err(reason) => manifest.left_out.push(LeftOut { id, reason }),
            Ok(pass) => {
                let name = case_folder_name(&id);
                write_pass(&folder.join(&name), case, pass)?;
                manifest.cases.push(ManifestEntry { id, folder: name });
            }
        }
    }
    put(&folder.join(MANIFEST_FILE), &pretty(&manifest))?;
    Ok(manifest)
}

fn write_pass(folder: &Path, case: &Case, pass: Pass) -> Result<(), ExportError> {
    fs::create_dir_all(folder).map_err(ExportError::io(folder))?;
    put(&folder.join(CASE_FILE), case.to_json().as_bytes())?;
    for step in &pass.steps {
        let path = folder.join(&step.request.folder);
        fs::create_dir_all(&path).map_err(ExportError::io(&path))?;
        put(&path.join(INPUTS_FILE), &image(&case.id(), step)?)?;
    }
    let request = Request {
        schema_version: EXPORT_SCHEMA_VERSION,
        id: case.id(),
        configuration: pass.configuration,
        steps: pass.steps.into_iter().map(|step| step.request).collect(),
    };
    put(&folder.join(REQUEST_FILE), &pretty(&request))
}

/// The image of a step's inputs: the same inputs give the same bytes.
pub(super) fn image(id: &str, step: &super::plan::Step) -> Result<Vec<u8>, ExportError> {
    archive::pack(step.inputs.iter())
        .map(|(bytes, _)| bytes)
        .map_err(|error| ExportError::Case { id: id.to_owned(), reason: error.to_string() })
}

fn put(path: &Path, bytes: &[u8]) -> Result<(), ExportError> {
    fs::write(path, bytes).map_err(ExportError::io(path))
}

fn pretty(value: &impl serde::Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("plain data");
    bytes.push(b'\n');
    bytes
}
