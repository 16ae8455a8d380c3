//! Corruption of what lies on disk: golden vectors, stored verdicts, stored answers.

use std::path::{Path, PathBuf};

use shardcheck_cases::Case;
use shardcheck_cpu::CpuEngine;
use shardcheck_engine::Engine;

use super::canary::{DECODE, case_of};
use crate::event::CaseResult;
use crate::golden;
use crate::recording::{Answered, Recorded, Recorder};
use crate::run::{contradicts, judge_case};
use crate::status::Status;
use crate::store;

/// A folder of its own that goes when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Result<Self, String> {
        let path = std::env::temp_dir().join(format!("shardcheck-self-test-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // what is left in the temporary folder harms nobody
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn flip_bit(path: &Path) -> Result<(), String> {
    let words = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut bytes = std::fs::read(path).map_err(words)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).map_err(words)
}

fn golden_differs(name: &str, hide: bool) -> Result<String, String> {
    let folder = Folder::new(name)?;
    let (files, manifest) = golden::files();
    golden::write(&folder.0, &files, &manifest).map_err(|error| error.to_string())?;
    if !golden::compare(&folder.0, &files, &manifest).map_err(|error| error.to_string())?.is_empty() {
        return Err("golden vectors differ before anything was changed".to_owned());
    }
    for (file, bytes) in &files {
        let path = folder.0.join(file);
        flip_bit(&path)?;
        if hide {
            golden::relist(&folder.0, file).map_err(|error| error.to_string())?;
        }
        let found = golden::compare(&folder.0, &files, &manifest).map_err(|error| error.to_string())?;
        if found.len() != 1 || found[0].file != *file {
            return Err(format!("{file} was changed; found: {found:?}"));
        }
        std::fs::write(&path, bytes).map_err(|error| error.to_string())?;
        if hide {
            golden::write(&folder.0, &files, &manifest).map_err(|error| error.to_string())?;
        }
    }
    Ok(format!("each of {} files was named, and it alone", files.len()))
}

pub(super) fn golden_bit() -> Result<String, String> {
    golden_differs("bit", false)
}

pub(super) fn golden_bit_and_manifest() -> Result<String, String> {
    golden_differs("manifest", true)
}

/// A case judged on `engine`, stored, read back, its stored result changed by `corrupt`, and decided again.
fn decided_again(
    name: &str,
    engine: &dyn Engine,
    corrupt: impl Fn(&mut CaseResult, &mut crate::recording::Recording),
) -> Result<(CaseResult, CaseResult), String> {
    let case: Case = case_of(DECODE, 3)?;
    let recorder = Recorder::new(engine);
    let mut result = judge_case(&case, &recorder, &|_| true);
    let folder = Folder::new(name)?;
    store::write(&folder.0, &case, &recorder.recording(), &result).map_err(|error| error.to_string())?;
    let (case, recording) = store::read(&folder.0).map_err(|error| error.to_string())?;
    let untouched = Recorded::new(recording.clone())?;
    if contradicts(Some(&result), &judge_case(&case, &untouched, &|_| true)) {
        return Err("deciding again differs before anything was changed".to_owned());
    }
    let mut recording = recording;
    corrupt(&mut result, &mut recording);
    let again = judge_case(&case, &Recorded::new(recording)?, &|_| true);
    Ok((result, again))
}

fn inverted(name: &str, engine: &dyn Engine, to: Status) -> Result<String, String> {
    let (stored, again) = decided_again(name, engine, |result, _| result.status = to)?;
    if stored.status == again.status || !contradicts(Some(&stored), &again) {
        return Err(format!("stored as {}, decided again as {}: not noticed", stored.status, again.status));
    }
    Ok(format!("stored as {}, decided again as {}", stored.status, again.status))
}

pub(super) fn failure_turned_round() -> Result<String, String> {
    let fault = shardcheck_cpu::fault("row-misses-itself").ok_or("the fault is not known")?;
    inverted("failure", &CpuEngine::with_fault(fault), Status::Pass)
}

pub(super) fn pass_turned_round() -> Result<String, String> {
    inverted("pass", &shardcheck_cpu::engine(), Status::Fail)
}

pub(super) fn answer_changed() -> Result<String, String> {
    let flip = |_: &mut CaseResult, recording: &mut crate::recording::Recording| {
        let steps = recording.sessions.iter_mut().flat_map(|session| &mut session.steps);
        for step in steps {
            let Answered::Done(reply) = &mut step.answer else { continue };
            if let Some(out) = reply.outputs.get_mut("out") {
                // the highest bit of the exponent: out of any interval
                out.bytes_mut()[1] ^= 0x40;
                return;
            }
        }
    };
    let (stored, again) = decided_again("answer", &shardcheck_cpu::engine(), flip)?;
    if !contradicts(Some(&stored), &again) {
        return Err("a changed answer is decided as before".to_owned());
    }
    super::canary::noticed_first(&again, "decode.output")?;
    Ok(format!("stored as {}, decided again as {} by decode.output", stored.status, again.status))
}
