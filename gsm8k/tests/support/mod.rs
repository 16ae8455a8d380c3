//! What several tests share: the published data, and servers that misbehave.
#![allow(dead_code)] // each test binary uses its part

pub mod bench;
pub mod hostile_server;
pub mod toy_model;

use std::path::PathBuf;

/// The folder with the GSM8K files and fixtures beside the repository, or `None` with a visible remark.
pub fn fixtures() -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/gsm8k");
    if folder.join("prompt_index.jsonl").is_file() {
        return Some(folder);
    }
    eprintln!("SKIPPED: no GSM8K fixtures in {} (../shared/data/gsm8k of the repository)", folder.display());
    None
}

/// Every line of a JSONL file.
pub fn json_lines(path: &std::path::Path) -> Vec<serde_json::Value> {
    std::fs::read_to_string(path)
        .unwrap_or_else(|why| panic!("{}: {why}", path.display()))
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}
