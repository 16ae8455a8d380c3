//! The embedded multi-rank engine, assembled from policies, and its faults.
//!
//! [`engine`] runs the published algorithms of decode context parallelism on threads as ranks, with real exchanges
//! between them, paged per-rank caches of real codes, and the roundings of GPU kernels where those have them. It is
//! assembled from a table of [`policies::Policies`]; a [`Fault`] is that table with one entry replaced. It never
//! calls the reference: an engine that did would prove nothing. [`hostile`] holds engines that misbehave, for tests.

// entries of the table are compared as what they are copies of (`reach`): equal addresses are the same code, and no more is concluded
#![allow(unpredictable_function_pointer_comparisons)]

mod acceptance;
mod attend;
mod batch;
mod cache;
mod chunks;
mod communicator;
mod context;
mod crew;
mod derive;
mod engine;
mod experts;
mod faults;
mod grid;
pub mod hostile;
mod kda;
mod kernel;
mod lanes;
mod memory;
mod merge;
mod policies;
mod prefill;
mod profile;
mod query;
mod reach;
mod route;
mod router;
mod rules;
mod selected;
mod session;
mod sharing;
mod sinks;
mod sparse;
mod stack;
mod states;
mod transfer;
mod write;

pub use engine::{CpuEngine, DEFAULT_TIMEOUT, MAX_CACHE_BYTES, MAX_RANKS, engine};
pub use faults::{Fault, FaultClass, fault, faults};
pub use policies::Policies;
pub use rules::{SETTING_NAMES, Setting};
