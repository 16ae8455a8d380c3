//! The harness: select → run → judge → explain → report.

pub mod diff;
pub mod event;
pub mod explain;
pub mod finding;
pub mod nearest;
pub mod record;
pub mod report;
pub mod run_directory;
pub mod select;
pub mod status;
pub mod summary;

#[cfg(test)]
mod sample;
