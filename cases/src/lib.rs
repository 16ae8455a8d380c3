//! What to try: models, axes, rule sets, workloads, probes and suites.

mod case;
mod check;
mod id;
mod inputs;
mod models;
mod probe;
pub mod rules;
mod workload;

pub use case::{
    AttentionCase, Body, CASE_SCHEMA_VERSION, Case, CaseError, Family, MergeCase, MergePattern, RuleCase,
    StateView,
};
pub use check::{MAX_ELEMENTS, MAX_RANKS, MAX_REQUESTS, MAX_ROWS, MAX_TOKENS, patterns};
pub use id::default_blocks;
pub use inputs::{Inputs, TokenCode, cache_code, cache_value, generate};
pub use models::{CUSTOM_MODEL, Model};
pub use probe::Probe;
pub use workload::{Placement, Request, Workload};
