//! Which of the configured features take effect, and what the engine says of it.

use shardcheck_engine::{CommBackend, Configuration, EffectivePath, LaneOrder};

/// Collectives of the merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// A world of one: nothing is exchanged.
    None,
    /// All-gather and reduce-scatter.
    AgRs,
    /// All-to-all.
    A2a,
}

impl Backend {
    /// Name as in [`CommBackend::name`], `none` for a world of one.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::AgRs => CommBackend::AgRs.name(),
            Self::A2a => CommBackend::A2a.name(),
        }
    }
}

/// The path of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Collectives of the merge.
    pub backend: Backend,
    /// Whether every rank projects the group's heads itself.
    pub query_replication: bool,
    /// Whether the up-projection comes before the merge.
    pub project_before_merge: bool,
}

impl Route {
    /// The facts of the path.
    pub fn report(&self, lane_order: LaneOrder) -> EffectivePath {
        let lanes = if self.backend == Backend::A2a { lane_order.name() } else { "none" };
        EffectivePath::new()
            .with("comm_backend", self.backend.name())
            .with("lane_order", lanes)
            .with("query_replication", self.query_replication)
            .with("project_before_merge", self.project_before_merge)
    }
}

/// What is run and what is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dispatch {
    /// The path that is run.
    pub run: Route,
    /// The path that is reported.
    pub reported: Route,
}

/// The path for a configuration; `projects` says whether there is an up-projection. A world of one has no exchange,
/// so that neither query replication nor project-before-merge means anything there.
pub fn dispatch(configuration: &Configuration, projects: bool) -> Dispatch {
    let grouped = configuration.dcp > 1;
    let backend = match configuration.comm_backend {
        _ if !grouped => Backend::None,
        CommBackend::AgRs => Backend::AgRs,
        CommBackend::A2a => Backend::A2a,
    };
    let run = Route {
        backend,
        query_replication: grouped && configuration.query_replication,
        project_before_merge: grouped && projects && configuration.project_before_merge,
    };
    Dispatch { run, reported: run }
}
