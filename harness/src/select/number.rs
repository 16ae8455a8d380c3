//! The numbers of a case, by axis.

use shardcheck_cases::{
    AcceptanceCase, AttentionCase, Body, Case, Family, KdaCase, MergeCase, MoeCase, PcpCase, SelectCase,
    SequenceCase,
};

use shardcheck_engine::Configuration;

use super::atom::NumberAxis;

impl NumberAxis {
    /// Value of a case; `None` where the axis means nothing.
    pub fn of(self, case: &Case) -> Option<u64> {
        if self == Self::Seed {
            return (!matches!(case.body, Body::Pcp(_) | Body::IndexLayers(_) | Body::Rules(_)))
                .then_some(case.seed);
        }
        let value = match &case.body {
            Body::Attention(attention) => Some(self.of_attention(attention)),
            Body::Merge(merge) => self.of_merge(case.family, merge),
            Body::Sequence(sequence) => self.of_sequence(sequence),
            Body::Stack(stack) => self.of_sequence(&stack.session),
            Body::Pcp(pcp) => self.of_pcp(pcp),
            Body::AttendPcp(shared) => {
                self.of_pcp(&shared.batch).or_else(|| self.of_session(&shared.configuration))
            }
            Body::SelectPcp(shared) => self.of_pcp(&shared.batch),
            Body::CompressPcp(shared) => self.of_pcp(&shared.batch),
            Body::Route(route) => (self == Self::Rows).then_some(route.tokens),
            Body::Moe(moe) => self.of_moe(moe),
            Body::Acceptance(acceptance) => self.of_acceptance(acceptance),
            Body::SelectSparse(select) => self.of_select(select),
            Body::IndexLayers(_) => None,
            Body::Kda(kda) => self.of_kda(kda),
            Body::Rules(_) => None,
        };
        value.map(|value| value as u64)
    }

    fn of_attention(self, case: &AttentionCase) -> usize {
        let (configuration, workload) = (&case.configuration, &case.workload);
        match self {
            Self::World => configuration.dcp,
            Self::Tp => configuration.tp,
            Self::Interleave => configuration.interleave,
            Self::Block => configuration.block_size,
            Self::Q => workload.max_query_tokens(),
            Self::Heads => configuration.gathered_heads(),
            Self::Tokens => workload.requests.iter().map(|r| r.seq_len()).max().unwrap_or(0),
            Self::Rows => workload.query_rows(),
            Self::Requests => workload.requests.len(),
            Self::Padded => workload.padded_rows,
            Self::Seed => unreachable!("the seed is read from the case itself"),
        }
    }

    fn of_select(self, case: &SelectCase) -> Option<usize> {
        let workload = &case.workload;
        match self {
            Self::World => Some(case.dcp),
            Self::Tp => Some(case.tp),
            Self::Interleave => Some(case.interleave),
            Self::Block => Some(case.block_size),
            Self::Q => Some(workload.max_query_tokens()),
            Self::Tokens => workload.requests.iter().map(|request| request.seq_len()).max(),
            Self::Rows => Some(workload.query_rows()),
            Self::Requests => Some(workload.requests.len()),
            Self::Padded => Some(workload.padded_rows),
            _ => None,
        }
    }

    fn of_acceptance(self, case: &AcceptanceCase) -> Option<usize> {
        match self {
            Self::World => Some(case.ranks),
            Self::Q => case.requests.iter().map(|r| r.drafts + 1).max(),
            Self::Rows => Some(case.rows()),
            Self::Requests => Some(case.requests.len()),
            _ => None,
        }
    }

    fn of_kda(self, case: &KdaCase) -> Option<usize> {
        match self {
            Self::World => Some(case.dcp),
            Self::Tp => Some(case.tp),
            Self::Q => case.steps.iter().flatten().map(|request| request.rows).max(),
            Self::Heads => Some(case.value_heads),
            Self::Rows => Some(case.rows()),
            Self::Requests => case.steps.iter().map(Vec::len).max(),
            _ => None,
        }
    }

    fn of_pcp(self, case: &PcpCase) -> Option<usize> {
        match self {
            Self::World => Some(case.world),
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
            Self::Rows => Some(case.tokens()),
            _ => None,
        }
    }

    fn of_sequence(self, case: &SequenceCase) -> Option<usize> {
        let configuration = &case.configuration;
        match self {
            Self::World => Some(configuration.dcp),
            Self::Tp => Some(configuration.tp),
            Self::Interleave => Some(configuration.interleave),
            Self::Block => Some(configuration.block_size),
            Self::Heads => Some(configuration.gathered_heads()),
            _ => None,
        }
    }

    fn of_merge(self, family: Family, case: &MergeCase) -> Option<usize> {
        match self {
            Self::World => Some(case.world),
            Self::Rows => Some(case.rows),
            Self::Heads if family == Family::MergePartials => Some(case.heads_per_rank * case.world),
            Self::Heads => Some(case.heads_per_rank),
            _ => None,
        }
    }
}
