//! Steps to smaller selections of tokens.

use shardcheck_cases::{Case, IndexLayersCase, IndexPattern, Placement, Request, SelectCase, default_blocks};
use shardcheck_engine::{IndexSharing, SelectionMode, SharingRule, SlotList};
use shardcheck_formats::Dtype;

use super::size::{Size, place};

/// Most requests whose own sizes are tried.
const MOST_TRIED: usize = 16;

/// Cases that differ in one axis, or in a few that go together.
pub(super) fn moves(whole: &Case, case: &SelectCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut SelectCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        // what needs fewer blocks has fewer
        let virtual_block = changed.block_size.saturating_mul(changed.dcp).max(1);
        changed.blocks = default_blocks(&changed.workload, virtual_block);
        found.push(Case::select_sparse(changed, whole.seed));
    };
    let requests = &case.workload.requests;
    add(&|c| c.workload.requests.truncate(c.workload.requests.len() / 2));
    for index in 0..requests.len().min(MOST_TRIED) {
        add(&|c| {
            c.workload.requests.remove(index);
        });
        for request in smaller(requests[index]) {
            add(&|c| c.workload.requests[index] = request);
        }
    }
    add(&|c| c.workload.padded_rows = 0);
    add(&|c| c.workload.placement = Placement::Sequential);
    for k in [1, 2, case.selector.top_k / 2, case.selector.top_k.saturating_sub(1)] {
        add(&|c| c.selector.top_k = k);
    }
    for ranks in [1, 2, 3, (case.dcp / 2).max(1)] {
        add(&|c| (c.tp, c.dcp) = (ranks, ranks));
    }
    for (interleave, block_size) in [(1, 1), (1, 2), (1, case.block_size), (2, 2), (2, 4)] {
        add(&|c| (c.interleave, c.block_size) = (interleave, block_size));
    }
    for (heads, dim) in [(1, 2), (1, case.index_dim), (2, 4), (case.index_heads, 4)] {
        add(&|c| (c.index_heads, c.index_dim) = (heads, dim));
    }
    add(&|c| c.index_dtype = Dtype::Bf16);
    for pattern in IndexPattern::ALL {
        add(&|c| c.pattern = pattern);
    }
    for mode in SelectionMode::ALL {
        add(&|c| c.selector.mode = mode);
    }
    for list in SlotList::ALL {
        add(&|c| c.selector.list = list);
    }
    found
}

fn smaller(request: Request) -> Vec<Request> {
    let Request { context_tokens, query_tokens } = request;
    let with = |context_tokens, query_tokens| Request { context_tokens, query_tokens };
    vec![
        with(0, query_tokens),
        with(context_tokens / 2, query_tokens),
        with(context_tokens.saturating_sub(1), query_tokens),
        with(context_tokens, query_tokens.min(1)),
        with(context_tokens, query_tokens / 2),
        with(context_tokens, query_tokens.saturating_sub(1)),
    ]
}

/// How large a selection is.
pub(super) fn size(case: &SelectCase) -> Size {
    Size {
        tokens: case.workload.requests.iter().map(|r| r.seq_len() + r.query_tokens).sum(),
        world: case.dcp,
        heads: case.index_heads,
        interleave: case.interleave,
        block: case.block_size,
        dims: case.index_dim,
    }
}

/// What a plain selection has not.
pub(super) fn plainness(case: &SelectCase) -> Vec<u64> {
    vec![
        case.workload.requests.len() as u64,
        case.workload.padded_rows as u64,
        (case.tp / case.dcp) as u64,
        case.selector.top_k as u64,
        u64::from(case.index_dtype != Dtype::Bf16),
        place(&Placement::ALL, &case.workload.placement),
        place(&IndexPattern::ALL, &case.pattern),
        place(&SelectionMode::ALL, &case.selector.mode),
        place(&SlotList::ALL, &case.selector.list),
        case.blocks as u64,
    ]
}

/// A rough count of the multiplications that it costs.
pub(super) fn work(case: &SelectCase) -> usize {
    (case.scores() + 1) * case.index_heads * case.index_dim + 1000 * case.tp
}

/// Models that are one step smaller or say less of their layers.
pub(super) fn layer_moves(case: &IndexLayersCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut IndexSharing)| {
        let mut changed = case.clone();
        change(&mut changed.sharing);
        found.push(Case::index_layers(changed));
    };
    for less in [1, 2, case.sharing.layers / 2, case.sharing.layers - 1] {
        add(&|s| {
            s.layers = less.clamp(1, s.layers);
            let layers = s.layers;
            s.pattern.iter_mut().for_each(|pattern| pattern.truncate(layers));
            s.types.iter_mut().for_each(|types| types.truncate(layers));
        });
    }
    add(&|s| s.draft_layers = 0);
    add(&|s| s.draft_layers = s.draft_layers.min(1));
    add(&|s| s.frequency = 1);
    add(&|s| s.frequency = s.frequency.min(2));
    add(&|s| s.offset = None);
    add(&|s| s.pattern = None);
    add(&|s| s.types = None);
    add(&|s| s.index_cache = false);
    found
}

/// How large a model is.
pub(super) fn layer_size(case: &IndexLayersCase) -> Size {
    let tokens = case.sharing.layers + case.sharing.draft_layers;
    Size { tokens, world: 1, heads: 0, interleave: 1, block: 1, dims: 0 }
}

/// What a plain model has not.
pub(super) fn layer_plainness(case: &IndexLayersCase) -> Vec<u64> {
    let sharing = &case.sharing;
    let given =
        [sharing.offset.is_some(), sharing.pattern.is_some(), sharing.types.is_some(), sharing.index_cache];
    let mut plain = vec![sharing.frequency as u64, sharing.draft_layers as u64];
    plain.extend(given.map(u64::from));
    plain.push(place(&SharingRule::ALL, &sharing.rule));
    plain
}
