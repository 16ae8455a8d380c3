//! The numbers of a case, by axis.

use shardcheck_cases::{
    AcceptanceCase, AttentionCase, Body, Case, Family, KdaCase, MergeCase, MoeCase, PcpCase, SelectCase,
    SequenceCase, StackCase, Turn, Workload, turns,
};
use shardcheck_engine::Configuration;

use super::axis::NumberAxis;
use super::choice::batch;

impl NumberAxis {
    /// Value of a case; `None` where the axis means nothing.
    pub fn of(self, case: &Case) -> Option<u64> {
        if self == Self::Seed {
            return (!matches!(case.body, Body::Pcp(_) | Body::IndexLayers(_) | Body::Rules(_)))
                .then_some(case.seed);
        }
        let value = match &case.body {
            Body::Attention(attention) => self.of_attention(attention),
            Body::Merge(merge) => self.of_merge(case.family, merge),
            Body::Sequence(sequence) => self.of_sequence(sequence),
            Body::Stack(stack) => self.of_stack(stack, case.seed),
            Body::AttendPcp(shared) => {
                self.of_batch(&shared.batch).or_else(|| self.of_session(&shared.configuration))
            }
            Body::SelectPcp(shared) if self == Self::Selected => Some(shared.top_k),
            Body::Pcp(_) | Body::SelectPcp(_) | Body::CompressPcp(_) => self.of_batch(batch(case)?),
            Body::Route(route) => match self {
                Self::Rows => Some(route.tokens),
                Self::Experts => Some(route.experts),
                Self::Topk => Some(route.router.top_k),
                _ => None,
            },
            Body::Moe(moe) => self.of_moe(moe),
            Body::Acceptance(acceptance) => self.of_acceptance(acceptance),
            Body::SelectSparse(select) => self.of_select(select),
            Body::IndexLayers(case) => (self == Self::Layers).then_some(case.sharing.layers),
            Body::Kda(kda) => self.of_kda(kda),
            Body::Rules(_) => None,
        };
        value.map(|value| value as u64)
    }

    fn of_attention(self, case: &AttentionCase) -> Option<usize> {
        match self {
            Self::World => Some(case.configuration.dcp),
            Self::Selected => case.selected.map(|tokens| tokens.top_k),
            _ => self.of_workload(&case.workload).or_else(|| self.of_session(&case.configuration)),
        }
    }

    fn of_workload(self, workload: &Workload) -> Option<usize> {
        match self {
            Self::Q => Some(workload.max_query_tokens()),
            Self::Tokens => workload.requests.iter().map(|request| request.seq_len()).max(),
            Self::Rows => Some(workload.query_rows()),
            Self::Requests => Some(workload.requests.len()),
            Self::Padded => Some(workload.padded_rows),
            _ => None,
        }
    }

    fn of_select(self, case: &SelectCase) -> Option<usize> {
        match self {
            Self::World | Self::Dcp => Some(case.dcp),
            Self::Tp => Some(case.tp),
            Self::Interleave => Some(case.interleave),
            Self::Block => Some(case.block_size),
            Self::Selected => Some(case.selector.top_k),
            _ => self.of_workload(&case.workload),
        }
    }

    fn of_acceptance(self, case: &AcceptanceCase) -> Option<usize> {
        match self {
            Self::World => Some(case.ranks),
            Self::Q => case.requests.iter().map(|r| r.drafts + 1).max(),
            Self::Drafts => case.requests.iter().map(|r| r.drafts).max(),
            Self::Rows => Some(case.rows()),
            Self::Requests => Some(case.requests.len()),
            _ => None,
        }
    }

    fn of_kda(self, case: &KdaCase) -> Option<usize> {
        match self {
            Self::World | Self::Dcp => Some(case.dcp),
            Self::Tp => Some(case.tp),
            Self::Q => case.steps.iter().flatten().map(|request| request.rows).max(),
            Self::Heads => Some(case.value_heads),
            Self::Rows => Some(case.rows()),
            Self::Requests => case.steps.iter().map(Vec::len).max(),
            Self::Steps => Some(case.steps.len()),
            Self::Drafts => Some(case.drafts),
            _ => None,
        }
    }

    fn of_batch(self, case: &PcpCase) -> Option<usize> {
        match self {
            Self::World | Self::Pcp => Some(case.world),
            Self::Q => case.requests.iter().map(|r| r.query_tokens).max(),
            Self::Tokens => case.requests.iter().map(|r| r.context_tokens + r.query_tokens).max(),
            Self::Rows => Some(case.rows()),
            Self::Requests => Some(case.requests.len()),
            Self::Padded => Some(case.extra_rows),
            _ => None,
        }
    }

    fn of_session(self, configuration: &Configuration) -> Option<usize> {
        match self {
            Self::Dcp => Some(configuration.dcp),
            Self::Tp => Some(configuration.tp),
            Self::Interleave => Some(configuration.interleave),
            Self::Block => Some(configuration.block_size),
            Self::Heads => Some(configuration.gathered_heads()),
            _ => None,
        }
    }

    fn of_moe(self, case: &MoeCase) -> Option<usize> {
        match self {
            Self::World => Some(case.plan.ranks()),
            Self::Tp => Some(case.plan.tp),
            Self::Pcp => Some(case.plan.pcp),
            Self::Dp => Some(case.plan.dp),
            Self::Rows => Some(case.tokens()),
            Self::Experts => Some(case.experts),
            Self::Topk => Some(case.router.top_k),
            _ => None,
        }
    }

    fn of_sequence(self, case: &SequenceCase) -> Option<usize> {
        match self {
            Self::World => Some(case.configuration.dcp),
            _ => self
                .of_session(&case.configuration)
                .or_else(|| self.is_of_turns().then(|| self.of_turns(&turns(case, 0).ok()?))?),
        }
    }

    fn of_stack(self, case: &StackCase, seed: u64) -> Option<usize> {
        match self {
            Self::World => Some(case.configuration().dcp),
            Self::Pcp => Some(case.plan().pcp_ranks()),
            Self::Layers => Some(case.layers),
            Self::Experts => Some(case.mixture.map_or(0, |mixture| mixture.experts)),
            Self::Topk => case.mixture.map(|mixture| mixture.top_k),
            Self::Selected => case.selection.map(|selection| selection.top_k),
            Self::Drafts => Some(case.drafts()),
            _ => self
                .of_session(case.configuration())
                .or_else(|| self.is_of_turns().then(|| self.of_turns(&case.turns(seed).ok()?))?),
        }
    }

    /// Whether it is read from the runs of a session.
    fn is_of_turns(self) -> bool {
        matches!(self, Self::Q | Self::Tokens | Self::Rows | Self::Requests | Self::Padded | Self::Steps)
    }

    fn of_turns(self, turns: &[Turn]) -> Option<usize> {
        match self {
            Self::Q => turns.iter().flat_map(|turn| turn.new_tokens.iter().copied()).max(),
            Self::Tokens => turns.iter().flat_map(|turn| turn.tokens.iter().map(Vec::len)).max(),
            Self::Rows => Some(turns.iter().flat_map(|turn| &turn.new_tokens).sum()),
            Self::Requests => turns.iter().map(|turn| turn.requests.len()).max(),
            Self::Padded => turns.iter().map(|turn| turn.padded_rows).max(),
            Self::Steps => Some(turns.len()),
            _ => None,
        }
    }

    fn of_merge(self, family: Family, case: &MergeCase) -> Option<usize> {
        match self {
            Self::World => Some(case.world),
            Self::Dcp if family == Family::MergePartials => Some(case.world),
            Self::Rows => Some(case.rows),
            Self::Heads if family == Family::MergePartials => Some(case.heads_per_rank * case.world),
            Self::Heads => Some(case.heads_per_rank),
            _ => None,
        }
    }
}
