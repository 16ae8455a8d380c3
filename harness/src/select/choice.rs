//! The names and switches of a case, by axis.

use shardcheck_cases::{AttentionCase, Body, Case, Family, MergeCase, PcpCase};
use shardcheck_engine::{CommBackend, Configuration, LaneOrder, PcpDecodes, PcpStrategy};

use super::axis::{ChoiceAxis, TruthAxis};

impl ChoiceAxis {
    /// Value of a case; `None` where the axis means nothing.
    pub fn of(self, case: &Case) -> Option<&'static str> {
        match self {
            Self::Family => Some(case.family.name()),
            Self::Probe => match &case.body {
                Body::AttendPcp(c) => Some(c.probe.name()),
                _ => attention(case).map(|c| c.probe.name()),
            },
            Self::Kv => session(case).map(|c| c.kv_dtype.name()),
            Self::Placement => match &case.body {
                Body::AttendPcp(c) => Some(c.placement.name()),
                Body::SelectSparse(c) => Some(c.workload.placement.name()),
                _ => attention(case).map(|c| c.workload.placement.name()),
            },
            Self::Dtype => match merge(case) {
                Some(states) => Some(states.dtype.name()),
                None => session(case).map(|c| c.dtype.name()),
            },
            Self::Pattern => pattern(case),
            Self::View => merge(case).map(|c| c.view.name()),
            Self::Backend => exchange(case).map(|(backend, _)| backend.name()),
            Self::Lane => match exchange(case) {
                Some((CommBackend::A2a, lane)) => Some(lane.name()),
                Some(_) => None,
                None => merge(case).filter(|_| case.family == Family::PackLse).map(|c| c.lane_order.name()),
            },
            Self::Strategy => split(case).map(|(strategy, _)| strategy.name()),
            Self::Decodes => split(case).map(|(_, decodes)| decodes.name()),
            Self::Stream => match &case.body {
                Body::Stack(c) => Some(c.stream.name()),
                _ => None,
            },
            Self::Method => match &case.body {
                Body::Acceptance(c) => Some(c.method.name()),
                _ => None,
            },
            Self::Rules => match &case.body {
                Body::Rules(rules) => Some(rules.rules.name()),
                _ => None,
            },
        }
    }
}

impl TruthAxis {
    /// Value of a case; `None` where the axis means nothing.
    pub fn of(self, case: &Case) -> Option<bool> {
        if self == Self::Wired {
            return match &case.body {
                Body::Stack(c) => Some(c.wiring.is_some()),
                _ => None,
            };
        }
        let latent = match &case.body {
            Body::Attention(c) => c.latent_output,
            Body::Sequence(c) => c.latent_output,
            Body::Stack(c) => c.session.latent_output,
            _ => return None,
        };
        session(case).map(|c| match self {
            Self::Qrep => c.query_replication,
            Self::Pbm => c.project_before_merge,
            Self::Latent | Self::Wired => latent,
        })
    }
}

fn attention(case: &Case) -> Option<&AttentionCase> {
    match &case.body {
        Body::Attention(attention) => Some(attention),
        _ => None,
    }
}

/// What a case with caches opens its session with.
fn session(case: &Case) -> Option<&Configuration> {
    match &case.body {
        Body::Attention(c) => Some(&c.configuration),
        Body::AttendPcp(c) => Some(&c.configuration),
        Body::Sequence(c) => Some(&c.configuration),
        Body::Stack(c) => Some(c.configuration()),
        _ => None,
    }
}

fn merge(case: &Case) -> Option<&MergeCase> {
    match &case.body {
        Body::Merge(merge) => Some(merge),
        _ => None,
    }
}

fn exchange(case: &Case) -> Option<(CommBackend, LaneOrder)> {
    match &case.body {
        Body::Attention(_) | Body::Sequence(_) | Body::Stack(_) => {
            session(case).map(|c| (c.comm_backend, c.lane_order))
        }
        Body::Merge(c) if case.family == Family::MergePartials => Some((c.comm_backend, c.lane_order)),
        _ => None,
    }
}

/// The batch that a case shares out over ranks of prefill context parallelism, where it is one by itself.
pub(super) fn batch(case: &Case) -> Option<&PcpCase> {
    match &case.body {
        Body::Pcp(c) => Some(c),
        Body::AttendPcp(c) => Some(&c.batch),
        Body::SelectPcp(c) => Some(&c.batch),
        Body::CompressPcp(c) => Some(&c.batch),
        _ => None,
    }
}

fn split(case: &Case) -> Option<(PcpStrategy, PcpDecodes)> {
    match &case.body {
        Body::Stack(c) => c.pcp.map(|pcp| (pcp.strategy, pcp.decodes)),
        _ => batch(case).map(|batch| (batch.strategy, batch.decodes)),
    }
}

fn pattern(case: &Case) -> Option<&'static str> {
    match &case.body {
        Body::Merge(c) => Some(c.pattern.name()),
        Body::Route(c) => Some(c.logits.name()),
        Body::Moe(c) => Some(c.logits.name()),
        Body::Acceptance(c) => Some(c.pattern.name()),
        Body::SelectSparse(c) => Some(c.pattern.name()),
        Body::SelectPcp(c) => Some(c.pattern.name()),
        Body::CompressPcp(c) => Some(c.pattern.name()),
        Body::Kda(c) => Some(c.pattern.name()),
        _ => None,
    }
}
