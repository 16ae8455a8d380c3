//! The one measure of small that a shrunk case is judged by, and what is plainer among cases of one size.

use std::fmt;

use serde::{Deserialize, Serialize};
use shardcheck_cases::{
    AttentionCase, Body, CUSTOM_MODEL, Case, MergeCase, MergePattern, Placement, Probe, StateView,
};
use shardcheck_engine::{CommBackend, LaneOrder};
use shardcheck_formats::Dtype;

use super::{experts, prefill, session, sparse, stack};

/// How large a case is. Sizes compare part by part, in the order of the fields: tokens first, then W, and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Size {
    /// Σ over requests of length L (context and new rows) and new rows q, also of a batch of prefill context parallelism; rows of a merge; twice the new tokens of a sequence.
    pub tokens: usize,
    /// Ranks W that a sequence is sharded over; states of a merge; ranks of prefill context parallelism.
    pub world: usize,
    /// Query heads of all ranks.
    pub heads: usize,
    /// Interleave size S; 1 for a merge.
    pub interleave: usize,
    /// Block size B; 1 for a merge.
    pub block: usize,
    /// Elements of a query, a value and a projected value together; elements of an output of a merge.
    pub dims: usize,
}

impl Size {
    /// The size of a case. Rule cases have none: all their parts are 0.
    pub fn of(case: &Case) -> Self {
        match &case.body {
            Body::Attention(attention) => Self::of_attention(attention),
            Body::Merge(merge) => Self {
                tokens: merge.rows,
                world: merge.world,
                heads: merge.heads_per_rank,
                interleave: 1,
                block: 1,
                dims: merge.dim,
            },
            Body::Pcp(pcp) => prefill::batch_size(pcp),
            Body::AttendPcp(shared) => prefill::size(shared),
            Body::SelectPcp(shared) => prefill::selection_size(shared),
            Body::CompressPcp(shared) => prefill::compression_size(shared),
            Body::Route(route) => experts::route_size(route),
            Body::Moe(moe) => experts::moe_size(moe),
            Body::Acceptance(acceptance) => Self {
                tokens: acceptance.rows(),
                world: acceptance.ranks,
                heads: 0,
                interleave: 1,
                block: 1,
                dims: acceptance.vocabulary,
            },
            Body::SelectSparse(select) => sparse::size(select),
            Body::IndexLayers(layers) => sparse::layer_size(layers),
            Body::Kda(kda) => Self {
                tokens: kda.rows(),
                world: kda.tp,
                heads: kda.value_heads,
                interleave: 1,
                block: 1,
                dims: kda.key_dim + kda.value_dim,
            },
            Body::Sequence(sequence) => session::size(sequence),
            Body::Stack(stack) => stack::size(stack),
            Body::Rules(_) => Self { tokens: 0, world: 0, heads: 0, interleave: 0, block: 0, dims: 0 },
        }
    }

    pub(super) fn of_attention(case: &AttentionCase) -> Self {
        let configuration = &case.configuration;
        let attention = configuration.attention;
        let mut dims = attention.qk_dim() + attention.value_dim() + attention.kv_heads();
        if attention.is_mla() && !case.latent_output {
            dims += attention.v_head_dim();
        }
        Self {
            tokens: case
                .workload
                .requests
                .iter()
                .map(|request| request.seq_len() + request.query_tokens)
                .sum(),
            world: configuration.dcp,
            heads: configuration.total_heads(),
            interleave: configuration.interleave,
            block: configuration.block_size,
            dims,
        }
    }

    /// The parts in the order in which they count.
    pub fn parts(self) -> [usize; 6] {
        [self.tokens, self.world, self.heads, self.interleave, self.block, self.dims]
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "tokens {} W {} heads {} S {} B {} dims {}",
            self.tokens, self.world, self.heads, self.interleave, self.block, self.dims
        )
    }
}

/// What a shrink makes smaller: the size, then everything else that a plain case has not.
pub(crate) fn key(case: &Case) -> (Size, Vec<u64>) {
    let mut plain = match &case.body {
        Body::Attention(attention) => plainness(attention),
        Body::Merge(merge) => merge_plainness(merge),
        Body::Pcp(pcp) => prefill::batch_plainness(pcp),
        Body::AttendPcp(shared) => prefill::plainness(shared),
        Body::SelectPcp(shared) => prefill::selection_plainness(shared),
        Body::CompressPcp(shared) => prefill::compression_plainness(shared),
        Body::Route(route) => experts::route_plainness(route),
        Body::Moe(moe) => experts::moe_plainness(moe),
        Body::Acceptance(acceptance) => vec![
            acceptance.requests.len() as u64,
            u64::from(acceptance.one_hot),
            acceptance.requests.iter().filter(|request| request.none_at.is_some()).count() as u64,
        ],
        Body::SelectSparse(select) => sparse::plainness(select),
        Body::IndexLayers(layers) => sparse::layer_plainness(layers),
        Body::Kda(kda) => vec![
            kda.steps.len() as u64,
            kda.steps.iter().map(Vec::len).sum::<usize>() as u64,
            kda.steps
                .iter()
                .flatten()
                .filter(|request| request.read.is_some_and(|r| r != request.write))
                .count() as u64,
            kda.steps.iter().flatten().map(|request| request.rejected).sum::<usize>() as u64,
            kda.steps.iter().flatten().filter(|request| request.read.is_some()).count() as u64,
            (kda.dcp + kda.taps + kda.chunk + kda.drafts) as u64,
            (kda.value_heads - kda.heads.min(kda.value_heads)) as u64,
        ],
        Body::Sequence(sequence) => session::plainness(sequence),
        Body::Stack(stack) => stack::plainness(stack),
        Body::Rules(_) => Vec::new(),
    };
    plain.push(case.seed);
    (Size::of(case), plain)
}

/// A rough count of the multiplications that a case costs, to order cases by.
pub fn work(case: &Case) -> usize {
    match &case.body {
        Body::Attention(attention) => attention_work(attention),
        Body::Merge(merge) => merge.rows * merge.world * merge.world * merge.heads_per_rank * merge.dim,
        Body::Pcp(pcp) => (pcp.rows() + 1) * pcp.world,
        Body::AttendPcp(shared) => prefill::work(shared),
        Body::SelectPcp(shared) => prefill::selection_work(shared),
        Body::CompressPcp(shared) => (shared.batch.rows() + 1) * shared.batch.world * shared.columns(),
        Body::Route(route) => (route.tokens + 1) * route.experts,
        Body::Moe(moe) => experts::moe_work(moe),
        // an enumeration has its few thousand rows of three tokens
        Body::Acceptance(acceptance) => {
            (acceptance.rows().max(1000) + 1) * acceptance.vocabulary * acceptance.ranks
        }
        Body::SelectSparse(select) => sparse::work(select),
        Body::IndexLayers(layers) => layers.sharing.layers + layers.sharing.draft_layers,
        Body::Kda(kda) => {
            (kda.rows() + 1) * kda.value_heads * kda.key_dim * (kda.value_dim + kda.chunk) + 1000 * kda.tp
        }
        Body::Sequence(sequence) => session::work(sequence),
        Body::Stack(stack) => stack::work(stack),
        Body::Rules(_) => 1,
    }
}

pub(super) fn attention_work(case: &AttentionCase) -> usize {
    let configuration = &case.configuration;
    let width = configuration.attention.qk_dim() + configuration.attention.value_dim();
    let pairs: usize = case.workload.requests.iter().map(|r| r.query_tokens.max(1) * r.seq_len()).sum();
    pairs * configuration.total_heads() * width + 1000 * configuration.tp
}

pub(super) fn place<T: PartialEq>(all: &[T], value: &T) -> u64 {
    all.iter().position(|other| other == value).unwrap_or(all.len()) as u64
}

pub(super) fn plainness(case: &AttentionCase) -> Vec<u64> {
    let configuration = &case.configuration;
    let switches = [configuration.query_replication, configuration.project_before_merge];
    vec![
        case.workload.requests.len() as u64,
        case.workload.padded_rows as u64,
        (configuration.tp / configuration.dcp) as u64,
        configuration.kernel_head_widths.len() as u64,
        switches.into_iter().map(u64::from).sum(),
        u64::from(configuration.dtype != Dtype::Bf16),
        u64::from(configuration.kv_dtype != configuration.dtype),
        u64::from(configuration.kv_scale != 1.0),
        place(&Placement::ALL, &case.workload.placement),
        place(&Probe::ALL, &case.probe),
        exchange(configuration.comm_backend, configuration.lane_order),
        u64::from(case.model != CUSTOM_MODEL && !case.model.starts_with("tiny-")),
        u64::from(case.model == CUSTOM_MODEL),
        u64::MAX - (case.workload.chunk_budget_tokens as u64).min(1 << 20),
        configuration.blocks as u64,
    ]
}

fn exchange(backend: CommBackend, order: LaneOrder) -> u64 {
    2 * u64::from(backend != CommBackend::AgRs) + u64::from(order != LaneOrder::HiLo)
}

fn merge_plainness(case: &MergeCase) -> Vec<u64> {
    vec![
        place(&MergePattern::ALL, &case.pattern),
        place(&StateView::ALL, &case.view),
        u64::from(case.dtype != Dtype::Bf16),
        exchange(case.comm_backend, case.lane_order),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(id: &str) -> Size {
        Size::of(&id.parse().unwrap())
    }

    #[test]
    fn tokens_count_lengths_and_rows_of_all_requests() {
        let size = size("verify/tiny-mla/tp4.dcp2.h2.s2.b8.n12.bf16.ag_rs/12+3_0+0_7+2.seq/gaussian/7");
        assert_eq!(size.tokens, (15 + 3) + (9 + 2));
        assert_eq!((size.world, size.heads, size.interleave, size.block), (2, 8, 2, 8));
    }

    #[test]
    fn fewer_tokens_weigh_more_than_anything_else() {
        let few = size("decode/tiny-mla/tp8.dcp8.h2.s2.b8.n12.bf16.ag_rs/1+1.seq/gaussian/7");
        let many = size("decode/tiny-mla/tp1.dcp1.h1.s1.b1.n12.bf16.ag_rs/2+1.seq/gaussian/7");
        assert!(few < many);
    }

    #[test]
    fn among_cases_of_one_size_the_plainer_one_is_smaller() {
        let key = |id: &str| key(&id.parse().unwrap());
        let plain = key("decode/tiny-mla/tp2.dcp2.h1.s1.b4.n4.bf16.ag_rs/3+1.seq/gaussian/0");
        for id in [
            "decode/tiny-mla/tp2.dcp2.h1.s1.b4.n4.bf16.ag_rs/3+1.shuf/gaussian/0",
            "decode/tiny-mla/tp2.dcp2.h1.s1.b4.n4.bf16.ag_rs/3+1.pad1.seq/gaussian/0",
            "decode/tiny-mla/tp2.dcp2.h1.s1.b4.n4.e4m3fn@0.5.ag_rs/3+1.seq/gaussian/0",
            "decode/tiny-mla/tp2.dcp2.h1.s1.b4.n4.bf16.a2a.hi_lo/3+1.seq/gaussian/0",
            "decode/tiny-mla/tp2.dcp2.h1.s1.b4.n4.bf16.ag_rs/3+1.seq/cold/0",
            "decode/tiny-mla/tp2.dcp2.h1.s1.b4.n4.bf16.ag_rs/3+1_0+0.seq/gaussian/0",
        ] {
            assert_eq!(plain.0, key(id).0, "{id}");
            assert!(plain < key(id), "{id}");
        }
    }
}
