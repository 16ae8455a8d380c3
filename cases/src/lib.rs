//! What to try: models, axes, rule sets, workloads, probes and suites.

mod acceptance;
mod axes;
mod case;
mod check;
pub mod covering;
mod error;
mod id;
mod index_layers;
mod inputs;
mod json;
mod kda;
mod merge;
mod models;
mod moe;
mod pcp;
mod probe;
mod route;
pub mod rules;
mod selected;
mod sequence;
mod sparse;
mod stack;
mod stream;
mod suites;
mod tokens;
mod workload;

pub use acceptance::{
    AcceptanceCase, AcceptanceInputs, AcceptancePattern, DraftRequest, Enumeration, generate_acceptance,
};
pub use case::{
    AttentionCase, Body, CASE_SCHEMA_VERSION, Case, Family, MergeCase, MergePattern, RuleCase, StateView,
};
pub use check::{
    MAX_ELEMENTS, MAX_RANKS, MAX_REQUESTS, MAX_ROWS, MAX_TOKENS, MAX_WIDTH, patterns, usual_patterns,
};
pub use error::CaseError;
pub use id::default_blocks;
pub use index_layers::IndexLayersCase;
pub use inputs::{Inputs, TokenCode, cache_code, cache_value, generate};
pub use json::{read_as, read_json};
pub use kda::{KdaCase, KdaInputs, KdaPattern, KdaRequest, KdaRow, KdaStep, generate_kda};
pub use merge::{MergeInputs, active_segments, generate_merge};
pub use models::{CUSTOM_MODEL, Model};
pub use moe::{ExpertWeights, MoeCase};
pub use pcp::attention::AttendPcpCase;
pub use pcp::compression::{CompressPcpCase, GatePattern, held_tokens};
pub use pcp::selection::SelectPcpCase;
pub use pcp::{PcpCase, PcpRequest};
pub use probe::Probe;
pub use route::{LogitPattern, RouteCase, TOKEN_IDS};
pub use selected::{SelectedTokens, TokenChoice};
pub use sequence::{
    Import, MAX_SEQUENCE_REQUESTS, MAX_STEPS, NewTokens, RunKind, SequenceCase, Step, Turn,
    generate_sequence, peak_blocks, turns,
};
pub use sparse::{IndexPattern, SelectCase};
pub use stack::{
    StackCase, StackInputs, StackMixture, StackRecurrence, StackSelection, StackTurn, StackWiring, StateTurn,
    generate_stack, state_turns,
};
pub use suites::{SuiteName, suite};
pub use workload::{Placement, Request, Workload};
