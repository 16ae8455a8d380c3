//! The harness: select → run → judge → explain → report.

pub mod event;
pub mod finding;
pub mod status;
