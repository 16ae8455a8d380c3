//! The harness: select → run → judge → explain → report.

pub mod event;
pub mod finding;
pub mod nearest;
pub mod record;
pub mod run_directory;
pub mod select;
pub mod status;

#[cfg(test)]
mod sample;
