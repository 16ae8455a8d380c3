//! The harness: select → run → judge → explain → report.

pub mod event;
pub mod expected;
pub mod finding;
pub mod judge;
pub mod laboratory;
mod localise;
pub mod material;
pub mod merging;
pub mod mutants;
pub mod nearest;
pub mod properties;
pub mod record;
pub mod recording;
pub mod run;
pub mod run_directory;
pub mod select;
pub mod status;
pub mod store;

#[cfg(test)]
mod sample;
