//! What the tests share: a tiny random Llama written as GGUF, a plain HTTP client, the real model if it is there.
#![allow(dead_code)] // each test program uses its own part

pub mod client;
pub mod gguf_writer;
pub mod tiny;

use std::path::PathBuf;

/// The real model, named by SHARDCHECK_SMOLLM2 or in the default cache; otherwise says that the test is skipped.
pub fn real_model(test: &str) -> Option<PathBuf> {
    let named = std::env::var_os("SHARDCHECK_SMOLLM2").map(PathBuf::from);
    let cached = || {
        let home = std::env::var_os("HOME").map(PathBuf::from)?;
        Some(home.join(".cache/shardcheck/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    };
    let path = named.or_else(cached).filter(|path| path.exists());
    if path.is_none() {
        eprintln!("SKIPPED: {test}: no SmolLM2; run serve/fetch-model or set SHARDCHECK_SMOLLM2");
    }
    path
}
