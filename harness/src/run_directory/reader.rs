//! Reading a run folder back, whole or killed.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use serde_json::Value;

use super::{EVENTS_FILE, RESULTS_FILE, RUN_FILE, RunDirectoryError};
use crate::event::{Event, RESULTS_SCHEMA_VERSION, RunHeader};
use crate::record::{Results, RunRecord};

/// run.json of a run folder.
///
/// # Errors
/// [`RunDirectoryError::NotARun`] without run.json, [`RunDirectoryError::UnknownVersion`],
/// [`RunDirectoryError::Malformed`].
pub fn read_header(run: &Path) -> Result<RunHeader, RunDirectoryError> {
    if !run.is_dir() {
        let reason = if run.exists() { "it is a file" } else { "there is no such folder" };
        return Err(RunDirectoryError::NotARun { path: run.to_owned(), reason: reason.to_owned() });
    }
    let path = run.join(RUN_FILE);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let reason = format!("it holds no {RUN_FILE}");
            return Err(RunDirectoryError::NotARun { path: run.to_owned(), reason });
        }
        other => other.map_err(|source| RunDirectoryError::NotReadable { path: path.clone(), source })?,
    };
    let value = versioned(&path, &text)?;
    serde_json::from_value(value).map_err(|error| malformed(&path, 1, &error))
}

/// Header and events of a run folder.
///
/// A last line without line end that does not parse is what a kill leaves: it is left out and the record says so.
///
/// # Errors
/// As [`read_header`]; [`RunDirectoryError::Malformed`] with the line for anything else that does not parse.
pub fn read_events(run: &Path) -> Result<RunRecord, RunDirectoryError> {
    let mut record = RunRecord::new(read_header(run)?);
    let path = run.join(EVENTS_FILE);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other.map_err(|source| RunDirectoryError::NotReadable { path: path.clone(), source })?,
    };
    for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        match serde_json::from_slice::<Event>(line) {
            Ok(event) => record.absorb(&event),
            Err(_) if line.trim_ascii().is_empty() => {}
            Err(_) if !line.ends_with(b"\n") => record.torn = true,
            Err(error) => return Err(malformed(&path, index + 1, &error)),
        }
    }
    Ok(record)
}

/// results.json of a run folder.
///
/// # Errors
/// [`RunDirectoryError::NotARun`] when it is not there (a killed run has events only),
/// [`RunDirectoryError::UnknownVersion`], [`RunDirectoryError::Malformed`].
pub fn read_results(run: &Path) -> Result<Results, RunDirectoryError> {
    let path = run.join(RESULTS_FILE);
    let text = fs::read_to_string(&path).map_err(|_| RunDirectoryError::NotARun {
        path: run.to_owned(),
        reason: format!("it holds no {RESULTS_FILE}, as after a kill; resume the run to get one"),
    })?;
    let value = versioned(&path, &text)?;
    serde_json::from_value(value).map_err(|error| malformed(&path, 1, &error))
}

/// Makes the events end with a line end: a torn line is cut off, a whole one that only lacks its end gets it.
pub(super) fn end_last_line(path: &Path) -> Result<(), RunDirectoryError> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(|source| RunDirectoryError::NotReadable { path: path.to_owned(), source })?,
    };
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |place| place + 1);
    if whole == bytes.len() {
        return Ok(());
    }
    let unwritable = |source| RunDirectoryError::NotWritable { path: path.to_owned(), source };
    if serde_json::from_slice::<Event>(&bytes[whole..]).is_ok() {
        let mut file = OpenOptions::new().append(true).open(path).map_err(unwritable)?;
        return io::Write::write_all(&mut file, b"\n").map_err(unwritable);
    }
    let file = OpenOptions::new().write(true).open(path).map_err(unwritable)?;
    file.set_len(whole as u64).map_err(unwritable)
}

fn versioned(path: &Path, text: &str) -> Result<Value, RunDirectoryError> {
    let value: Value = serde_json::from_str(text).map_err(|error| malformed(path, error.line(), &error))?;
    match value.get("schema_version") {
        Some(version) if version.as_u64() == Some(u64::from(RESULTS_SCHEMA_VERSION)) => Ok(value),
        found => Err(RunDirectoryError::UnknownVersion {
            path: path.to_owned(),
            found: found.map_or_else(|| "none".to_owned(), Value::to_string),
        }),
    }
}

fn malformed(path: &Path, line: usize, error: &serde_json::Error) -> RunDirectoryError {
    RunDirectoryError::Malformed { path: path.to_owned(), line, reason: error.to_string() }
}
