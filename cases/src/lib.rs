//! What to try: models, axes, rule sets, workloads, probes and suites.

mod case;
mod probe;
mod workload;

pub use case::{
    AttentionCase, Body, CASE_SCHEMA_VERSION, Case, CaseError, Family, MergeCase, MergePattern, RuleCase,
    StateView,
};
pub use probe::Probe;
pub use workload::{Placement, Request, Workload};
