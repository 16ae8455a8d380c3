//! Steps to smaller batches of prefill context parallelism, and to smaller ones that attend.

use shardcheck_cases::{
    AttendPcpCase, CUSTOM_MODEL, Case, CompressPcpCase, GatePattern, IndexPattern, Model, PcpCase, Placement,
    Probe, SelectPcpCase, default_blocks,
};
use shardcheck_engine::{PcpDecodes, PcpStrategy};
use shardcheck_formats::Dtype;

use super::size::{self, Size, place};

/// Batches that are one step smaller.
pub(super) fn moves(case: &PcpCase) -> Vec<Case> {
    batches(case).into_iter().map(Case::pcp).collect()
}

fn batches(case: &PcpCase) -> Vec<PcpCase> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut PcpCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        found.push(changed);
    };
    let smaller = |value: usize| [0, 1, value / 2, value.saturating_sub(1)].map(|less| less.min(value));
    for index in 0..case.requests.len() {
        add(&|c| {
            c.requests.remove(index);
        });
        for less in smaller(case.requests[index].query_tokens) {
            add(&|c| c.requests[index].query_tokens = less);
        }
        for less in smaller(case.requests[index].context_tokens) {
            add(&|c| c.requests[index].context_tokens = less);
        }
        add(&|c| c.requests[index].is_prefilling = true);
    }
    for world in [1, 2, 3, 4, case.world / 2] {
        add(&|c| c.world = world.min(c.world));
    }
    add(&|c| c.overlap = false);
    add(&|c| c.extra_rows = 0);
    add(&|c| c.extra_rows = c.extra_rows.min(1));
    found
}

/// Cases that are one step smaller in their batch, their session, their shape or their values.
pub(super) fn attention_moves(whole: &Case, case: &AttendPcpCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut AttendPcpCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        let configuration = &mut changed.configuration;
        if let Some(model) = Model::find(&changed.model) {
            configuration.attention = model.attention(configuration.gathered_heads());
            configuration.softmax_scale = model.softmax_scale;
        }
        let virtual_block = changed.configuration.virtual_block_tokens().max(1);
        changed.configuration.blocks = default_blocks(&changed.attention().workload, virtual_block);
        found.push(Case::attend_pcp(changed, whole.seed));
    };
    for batch in batches(&case.batch) {
        add(&|c| c.batch.clone_from(&batch));
    }
    let session = &case.configuration;
    for ranks in [1, 2, session.dcp / 2] {
        let ranks = ranks.clamp(1, session.dcp);
        add(&|c| (c.configuration.tp, c.configuration.dcp) = (ranks, ranks));
    }
    for heads in [1, 2, session.heads_per_rank / 2] {
        add(&|c| c.configuration.heads_per_rank = heads.clamp(1, session.heads_per_rank));
    }
    for (interleave, block_size) in [(1, 1), (1, 2), (1, session.block_size), (2, 2), (2, 4)] {
        add(&|c| (c.configuration.interleave, c.configuration.block_size) = (interleave, block_size));
    }
    for tiny in Model::all().iter().filter(|model| model.is_tiny()) {
        if tiny.attention(session.gathered_heads()).is_mla() == session.attention.is_mla() {
            add(&|c| c.model.clone_from(&tiny.name));
        }
    }
    for probe in Probe::ALL {
        add(&|c| c.probe = probe);
    }
    add(&|c| c.placement = Placement::Sequential);
    add(&|c| (c.query_dtype, c.query_scale) = (c.configuration.dtype, 1.0));
    add(&|c| (c.configuration.kv_dtype, c.configuration.kv_scale) = (c.configuration.dtype, 1.0));
    add(&|c| {
        c.configuration.dtype = Dtype::Bf16;
        (c.configuration.kv_dtype, c.configuration.kv_scale) = (Dtype::Bf16, 1.0);
        (c.query_dtype, c.query_scale) = (Dtype::Bf16, 1.0);
    });
    found
}

pub(super) fn batch_size(case: &PcpCase) -> Size {
    Size {
        tokens: case.requests.iter().map(|r| r.context_tokens + 2 * r.query_tokens).sum(),
        world: case.world,
        heads: 0,
        interleave: 1,
        block: 1,
        dims: 0,
    }
}

pub(super) fn size(case: &AttendPcpCase) -> Size {
    Size { world: case.batch.world, ..Size::of_attention(&case.attention()) }
}

pub(super) fn batch_plainness(case: &PcpCase) -> Vec<u64> {
    vec![
        case.requests.len() as u64,
        case.extra_rows as u64,
        u64::from(case.overlap),
        place(&PcpStrategy::ALL, &case.strategy),
        place(&PcpDecodes::ALL, &case.decodes),
        case.requests.iter().filter(|request| !request.is_prefilling).count() as u64,
    ]
}

pub(super) fn plainness(case: &AttendPcpCase) -> Vec<u64> {
    let mut plain = batch_plainness(&case.batch);
    plain.push(case.configuration.dcp as u64);
    plain.push(u64::from(case.query_dtype.is_fp8()));
    plain.push(u64::from(case.model == CUSTOM_MODEL));
    plain.extend(size::plainness(&case.attention()));
    plain
}

pub(super) fn work(case: &AttendPcpCase) -> usize {
    size::attention_work(&case.attention()) + 1000 * case.batch.world
}

/// Selections that are one step smaller in their batch, their indexer or their values.
pub(super) fn selection_moves(whole: &Case, case: &SelectPcpCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut SelectPcpCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        found.push(Case::select_pcp(changed, whole.seed));
    };
    for batch in batches(&case.batch) {
        add(&|c| c.batch.clone_from(&batch));
    }
    for less in [1, 2, case.top_k / 2, case.top_k - 1] {
        add(&|c| c.top_k = less.clamp(1, c.top_k));
    }
    for less in [1, case.index_heads / 2] {
        add(&|c| c.index_heads = less.clamp(1, c.index_heads));
    }
    for less in [2, case.index_dim / 2] {
        add(&|c| c.index_dim = less.clamp(2, c.index_dim.max(2)));
    }
    for pattern in IndexPattern::ALL {
        add(&|c| c.pattern = pattern);
    }
    found
}

pub(super) fn selection_size(case: &SelectPcpCase) -> Size {
    Size { heads: case.index_heads, dims: case.index_dim, ..batch_size(&case.batch) }
}

pub(super) fn selection_plainness(case: &SelectPcpCase) -> Vec<u64> {
    let mut plain = batch_plainness(&case.batch);
    plain.extend([case.top_k as u64, place(&IndexPattern::ALL, &case.pattern)]);
    plain
}

pub(super) fn selection_work(case: &SelectPcpCase) -> usize {
    let scores: usize =
        case.batch.requests.iter().map(|r| r.query_tokens * (r.context_tokens + r.query_tokens)).sum();
    (scores + 1) * case.index_heads * case.index_dim + 1000 * case.batch.world
}

/// Compressions that are one step smaller in their batch, their blocks or their values.
pub(super) fn compression_moves(whole: &Case, case: &CompressPcpCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut CompressPcpCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        found.push(Case::compress_pcp(changed, whole.seed));
    };
    for batch in batches(&case.batch) {
        add(&|c| c.batch.clone_from(&batch));
    }
    for less in [1, 2, 4, case.ratio / 2, case.ratio - 1] {
        add(&|c| c.ratio = less.clamp(1, c.ratio));
    }
    for less in [1, case.dim / 2] {
        add(&|c| c.dim = less.clamp(1, c.dim));
    }
    for pattern in GatePattern::ALL {
        add(&|c| c.pattern = pattern);
    }
    add(&|c| c.overlap = false);
    found
}

pub(super) fn compression_size(case: &CompressPcpCase) -> Size {
    Size { dims: case.columns(), ..batch_size(&case.batch) }
}

pub(super) fn compression_plainness(case: &CompressPcpCase) -> Vec<u64> {
    let mut plain = batch_plainness(&case.batch);
    plain.extend([case.ratio as u64, u64::from(case.overlap), place(&GatePattern::ALL, &case.pattern)]);
    plain
}
