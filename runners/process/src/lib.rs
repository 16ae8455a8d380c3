//! Any engine in any language: a command that answers over a local socket (docs/protocol.md).
//!
//! [`ProcessEngine`] is the harness's side: it starts the command, asks, waits no longer than a limit, kills and starts anew.
//! [`answer_for`] is an adapter's side in Rust: it puts any [`shardcheck_engine::Engine`] behind the socket.

mod adapter;
mod child;
mod connection;
mod eager;
mod engine;
mod family;
pub mod frame;
mod hostile;
mod interrupt;
mod log;
pub mod message;
mod progress;
mod unwritten;

pub use adapter::{AdapterError, answer_for};
pub use engine::{ProcessEngine, ProcessOptions, StartError};
pub use hostile::{Misbehaviour, Strike};
pub use interrupt::say_at_interrupt;
pub use log::EngineLog;
pub use progress::{Progress, ProgressRecord, RANKS};
pub use unwritten::{pattern, unwritten_elements};

/// Address of the harness's socket: `unix:PATH`.
pub const ADDRESS_VARIABLE: &str = "SHARDCHECK_ADDRESS";
/// The word that a hello must say.
pub const TOKEN_VARIABLE: &str = "SHARDCHECK_TOKEN";
/// Folder in shared memory for large payloads.
pub const FOLDER_VARIABLE: &str = "SHARDCHECK_FOLDER";
/// File of progress records.
pub const PROGRESS_VARIABLE: &str = "SHARDCHECK_PROGRESS";

/// The version of the protocol that this crate speaks.
pub const PROTOCOL: u32 = 1;

/// Exit status of an adapter that can't run on this machine at all.
pub const CANNOT_RUN_HERE: i32 = 89;
