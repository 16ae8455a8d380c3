//! Decides on the answers that lie in an export.

use std::path::Path;

use rayon::prelude::*;
use shardcheck_cases::Case;

use super::filed::Filed;
use super::plan::pass_of;
use super::write::image;
use super::{EXPORT_SCHEMA_VERSION, ExportError, INPUTS_FILE, MANIFEST_FILE, Manifest, ManifestEntry};
use crate::event::{CaseResult, Coverage};
use crate::properties::UNCHANGED;
use crate::run::judge_case;
use crate::status::{Exit, Status};
use crate::store::CASE_FILE;

/// Verdicts on an export.
#[derive(Debug)]
pub struct Decided {
    /// One for each exported case, in order; skipped where outputs are still to come.
    pub results: Vec<CaseResult>,
    /// Cases whose outputs are still to come.
    pub outstanding: usize,
}

impl Decided {
    /// The exit code, as of a run: with outputs to come and nothing wrong, [`Exit::RerunOutstanding`].
    pub fn exit(&self) -> Exit {
        match Exit::of(self.results.iter().map(|result| result.status)) {
            Exit::Passed if self.outstanding > 0 => Exit::RerunOutstanding,
            exit => exit,
        }
    }
}

/// The manifest of an export.
///
/// # Errors
/// [`ExportError::Io`], [`ExportError::Altered`] for another version, unknown fields, a folder that lies elsewhere, or a contract that would pass
/// anything.
pub fn read_manifest(folder: &Path) -> Result<Manifest, ExportError> {
    let path = folder.join(MANIFEST_FILE);
    let bytes = std::fs::read(&path).map_err(ExportError::io(&path))?;
    let altered = |reason: String| ExportError::Altered { path: path.clone(), reason };
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| altered(error.to_string()))?;
    if manifest.schema_version != EXPORT_SCHEMA_VERSION {
        let found = manifest.schema_version;
        return Err(altered(format!("schema version {found}, this program reads {EXPORT_SCHEMA_VERSION}")));
    }
    let is_plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']);
    if let Some(entry) = manifest.cases.iter().find(|entry| !is_plain(&entry.folder)) {
        return Err(altered(format!("{:?} is no folder beside it", entry.folder)));
    }
    manifest.profile.check().map_err(altered)?;
    Ok(manifest)
}

/// Decides on every case of an export.
///
/// # Errors
/// As [`read_manifest`]; [`ExportError::Altered`] when a case or its inputs are not what was exported: then nothing can be said about the
/// outputs. Whatever is wrong with outputs is a verdict, never an error.
pub fn decide(folder: &Path) -> Result<Decided, ExportError> {
    let manifest = read_manifest(folder)?;
    let verdicts: Vec<(CaseResult, bool)> = manifest
        .cases
        .par_iter()
        .map(|entry| decide_case(folder, &manifest, entry))
        .collect::<Result<_, _>>()?;
    let outstanding = verdicts.iter().filter(|(_, outstanding)| *outstanding).count();
    Ok(Decided { results: verdicts.into_iter().map(|(result, _)| result).collect(), outstanding })
}

fn decide_case(
    folder: &Path,
    manifest: &Manifest,
    entry: &ManifestEntry,
) -> Result<(CaseResult, bool), ExportError> {
    let folder = folder.join(&entry.folder);
    let path = folder.join(CASE_FILE);
    let text = std::fs::read_to_string(&path).map_err(ExportError::io(&path))?;
    let altered = |reason: String| ExportError::Altered { path: path.clone(), reason };
    let case = Case::from_json(&text).map_err(|error| altered(error.to_string()))?;
    if case.id() != entry.id {
        return Err(altered(format!("it is the case {}", case.id())));
    }
    let pass = pass_of(&case, &manifest.profile).map_err(altered)?;
    for step in &pass.steps {
        let path = folder.join(&step.request.folder).join(INPUTS_FILE);
        let bytes = std::fs::read(&path).map_err(ExportError::io(&path))?;
        if bytes != image(&entry.id, step)? {
            let reason =
                "these are not the inputs that the case has in this version of the program".to_owned();
            return Err(ExportError::Altered { path, reason });
        }
    }
    Ok(match Filed::read(&folder, pass, &manifest.profile) {
        // a file can't be changed by who answers it
        Ok(engine) => (judge_case(&case, &engine, &|property| property.id != UNCHANGED), false),
        Err(missing) => (to_come(entry, &missing), true),
    })
}

fn to_come(entry: &ManifestEntry, missing: &[String]) -> CaseResult {
    CaseResult {
        id: entry.id.clone(),
        status: Status::Skipped,
        checks: Vec::new(),
        elapsed_s: 0.0,
        coverage: Coverage::default(),
        reason: Some(format!("no outputs yet: {}/{}", entry.folder, missing.join(", "))),
    }
}
