//! Steps from a case to smaller or plainer ones, each along one axis or a few that go together.

use shardcheck_cases::{
    AcceptanceCase, AttentionCase, Body, CUSTOM_MODEL, Case, Family, KdaCase, MergeCase, Model, Placement,
    Probe, Request, SelectedTokens, StateView, TokenChoice, default_blocks, patterns,
};
use shardcheck_engine::{Attention, CommBackend, LaneOrder, SlotList};
use shardcheck_formats::Dtype;

use super::size::key;
use super::{experts, prefill, session, sparse, stack};

/// Cases one step away that are smaller or plainer and hold together, smallest first.
pub(crate) fn moves(case: &Case) -> Vec<Case> {
    let mut found = match &case.body {
        Body::Attention(attention) => attention_moves(case, attention),
        Body::Merge(merge) => merge_moves(case, merge),
        Body::Pcp(pcp) => prefill::moves(pcp),
        Body::AttendPcp(shared) => prefill::attention_moves(case, shared),
        Body::SelectPcp(shared) => prefill::selection_moves(case, shared),
        Body::CompressPcp(shared) => prefill::compression_moves(case, shared),
        Body::Route(route) => experts::route_moves(case, route),
        Body::Moe(moe) => experts::moe_moves(case, moe),
        Body::Acceptance(acceptance) => acceptance_moves(acceptance, case.seed),
        Body::SelectSparse(select) => sparse::moves(case, select),
        Body::IndexLayers(layers) => sparse::layer_moves(layers),
        Body::Kda(kda) => kda_moves(kda, case.seed),
        Body::Sequence(sequence) => session::moves(case, sequence),
        Body::Stack(stack) => stack::moves(case, stack),
        Body::Rules(_) => Vec::new(),
    };
    for seed in [0, 1, 2] {
        found.push(Case { seed, ..case.clone() });
    }
    let own = key(case);
    found.retain(|smaller| key(smaller) < own && smaller.check().is_ok());
    found.sort_by_cached_key(key);
    found.dedup();
    found
}

/// Puts a changed attention case in order: what follows from its sizes follows from the new ones.
pub(crate) fn refit(case: &mut AttentionCase) {
    let configuration = &mut case.configuration;
    let gathered = configuration.gathered_heads();
    match Model::find(&case.model) {
        Some(model) => {
            configuration.attention = model.attention(gathered);
            configuration.softmax_scale = model.softmax_scale;
        }
        None => {
            if let Attention::Gqa { kv_heads, .. } = &mut configuration.attention {
                while !gathered.is_multiple_of(*kv_heads) {
                    *kv_heads -= 1;
                }
            }
        }
    }
    configuration.blocks = default_blocks(&case.workload, configuration.virtual_block_tokens());
}

fn attention_moves(whole: &Case, case: &AttentionCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut AttentionCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        refit(&mut changed);
        found.push(Case { body: Body::Attention(changed), ..whole.clone() });
    };
    for requests in
        fewer_requests(&case.workload.requests).into_iter().chain(shorter_requests(case, whole.family))
    {
        add(&move |c| c.workload.requests = requests.clone());
    }
    parallel_moves(case, &mut add);
    shape_moves(case, &mut add);
    plain_moves(case, &mut add);
    found
}

fn fewer_requests(requests: &[Request]) -> Vec<Vec<Request>> {
    let mut found = Vec::new();
    if requests.len() < 2 {
        return found;
    }
    for index in 0..requests.len().min(16) {
        found.push(vec![requests[index]]);
        let mut without = requests.to_vec();
        without.remove(index);
        found.push(without);
    }
    let (front, back) = requests.split_at(requests.len() / 2);
    found.extend([front.to_vec(), back.to_vec()]);
    found
}

/// Each request shorter, and all of them shorter at once.
fn shorter_requests(case: &AttentionCase, family: Family) -> Vec<Vec<Request>> {
    let configuration = &case.configuration;
    let (run, block) = (configuration.interleave * configuration.dcp, configuration.virtual_block_tokens());
    let lengths = |len: usize| {
        let mut lengths = vec![0, 1, 2, 3, len / 2, len / 4, len.saturating_sub(1), len.saturating_sub(2)];
        for edge in [configuration.dcp, run, block] {
            lengths.extend([
                edge.saturating_sub(1),
                edge,
                edge + 1,
                len.saturating_sub(edge),
                len / edge * edge,
            ]);
        }
        lengths.retain(|shorter| *shorter < len);
        lengths.sort_unstable();
        lengths.dedup();
        lengths
    };
    let least_rows = usize::from(family != Family::Layout && family != Family::Write);
    let mut found = Vec::new();
    for (index, request) in case.workload.requests.iter().enumerate().take(16) {
        let mut add = |shorter: Request| {
            let mut requests = case.workload.requests.clone();
            requests[index] = shorter;
            found.push(requests);
        };
        for context_tokens in lengths(request.context_tokens) {
            add(Request { context_tokens, ..*request });
        }
        for query_tokens in [0, 1, 2, request.query_tokens / 2, request.query_tokens.saturating_sub(1)] {
            if query_tokens < request.query_tokens
                && (query_tokens >= least_rows || request.context_tokens == 0)
            {
                add(Request { query_tokens, ..*request });
                // the same length with fewer new rows
                add(Request {
                    query_tokens,
                    context_tokens: request.context_tokens + request.query_tokens - query_tokens,
                });
            }
        }
    }
    for divisor in [2, 4, 16] {
        let shorter = |r: &Request| Request { context_tokens: r.context_tokens / divisor, ..*r };
        found.push(case.workload.requests.iter().map(shorter).collect());
    }
    found
}

type Add<'a> = dyn FnMut(&dyn Fn(&mut AttentionCase)) + 'a;

fn parallel_moves(case: &AttentionCase, add: &mut Add<'_>) {
    let configuration = &case.configuration;
    let groups = configuration.tp / configuration.dcp;
    let resize = |c: &mut AttentionCase, dcp: usize, groups: usize| {
        c.configuration.dcp = dcp;
        c.configuration.tp = dcp * groups;
    };
    for dcp in (1..configuration.dcp).filter(|dcp| *dcp <= 4 || dcp.is_power_of_two()) {
        add(&|c| resize(c, dcp, groups));
        add(&|c| resize(c, dcp, 1));
        // a length that was cut for W ranks has its place for fewer as well
        add(&|c| {
            for request in &mut c.workload.requests {
                request.context_tokens = request.context_tokens * dcp / configuration.dcp;
            }
            resize(c, dcp, groups);
        });
    }
    for fewer in (1..groups).filter(|fewer| *fewer <= 2 || groups.is_multiple_of(*fewer)) {
        add(&|c| resize(c, configuration.dcp, fewer));
    }
    let heads = configuration.heads_per_rank;
    for fewer in (1..heads).filter(|fewer| *fewer <= 4 || heads.is_multiple_of(*fewer)) {
        add(&|c| c.configuration.heads_per_rank = fewer);
        add(&|c| {
            c.configuration.heads_per_rank = fewer;
            c.configuration.kernel_head_widths = vec![fewer * configuration.dcp + 1];
        });
    }
    let (s, b) = (configuration.interleave, configuration.block_size);
    for interleave in (1..=s).filter(|interleave| s.is_multiple_of(*interleave)) {
        for blocks in 1..=4 {
            let block_size = interleave * blocks;
            if block_size < b || (interleave < s && block_size == b) {
                add(&|c| {
                    c.configuration.interleave = interleave;
                    c.configuration.block_size = block_size;
                });
            }
        }
        if b.is_multiple_of(interleave) && interleave < s {
            add(&|c| c.configuration.interleave = interleave);
        }
    }
    if b.is_multiple_of(2 * s) {
        add(&|c| c.configuration.block_size = b / 2);
    }
}

fn shape_moves(case: &AttentionCase, add: &mut Add<'_>) {
    let attention = case.configuration.attention;
    for tiny in Model::all().iter().filter(|model| model.is_tiny()) {
        let shape = tiny.attention(case.configuration.gathered_heads());
        if shape.is_mla() == attention.is_mla() && tiny.name != case.model {
            add(&|c| c.model.clone_from(&tiny.name));
            add(&|c| {
                c.model.clone_from(&tiny.name);
                c.configuration.heads_per_rank = c.configuration.heads_per_rank.min(2);
                c.configuration.kernel_head_widths.clear();
            });
        }
    }
    for scale in [0usize, 1, 2, 4, 8] {
        let smaller = |width: usize| if scale == 0 { width.div_ceil(2) } else { width.min(scale) };
        let mut shapes = vec![];
        match attention {
            Attention::Mla { kv_lora_rank: r, qk_rope_head_dim: p, v_head_dim: v } => {
                let mla = |r, p, v| Attention::Mla { kv_lora_rank: r, qk_rope_head_dim: p, v_head_dim: v };
                shapes.extend([mla(smaller(r), smaller(p), smaller(v)), mla(smaller(r), p, v)]);
                shapes.extend([mla(r, smaller(p), v), mla(r, p, smaller(v))]);
            }
            Attention::Gqa { kv_heads, head_dim: d, v_head_dim: v } => {
                let gqa = |d, v| Attention::Gqa { kv_heads, head_dim: d, v_head_dim: v };
                shapes.extend([gqa(smaller(d), smaller(v)), gqa(smaller(d), v), gqa(d, smaller(v))]);
                shapes.push(Attention::Gqa { kv_heads: 1, head_dim: d, v_head_dim: v });
            }
        }
        for shape in shapes.into_iter().filter(|shape| *shape != attention) {
            add(&|c| {
                CUSTOM_MODEL.clone_into(&mut c.model);
                c.configuration.attention = shape;
            });
        }
    }
}

fn plain_moves(case: &AttentionCase, add: &mut Add<'_>) {
    for rows in [0, 1, case.workload.padded_rows / 2] {
        add(&|c| c.workload.padded_rows = rows.min(c.workload.padded_rows));
    }
    add(&|c| c.workload.placement = Placement::Sequential);
    add(&|c| c.workload.placement = Placement::Shuffled);
    for probe in Probe::ALL {
        add(&|c| c.probe = probe);
    }
    for dtype in [Dtype::Bf16, case.configuration.dtype] {
        add(&|c| {
            (c.configuration.dtype, c.configuration.kv_dtype) = (dtype, dtype);
            c.configuration.kv_scale = 1.0;
        });
    }
    add(&|c| c.configuration.kv_scale = 1.0);
    add(&|c| c.configuration.query_replication = false);
    add(&|c| c.configuration.project_before_merge = false);
    add(&|c| c.configuration.kernel_head_widths.clear());
    add(&|c| {
        c.configuration.comm_backend = CommBackend::AgRs;
        c.configuration.lane_order = LaneOrder::HiLo;
    });
    add(&|c| c.configuration.lane_order = LaneOrder::HiLo);
    if case.configuration.attention.is_mla() {
        add(&|c| {
            c.latent_output = true;
            c.configuration.project_before_merge = false;
        });
    }
    if let Some(tokens) = case.selected {
        let mut select =
            |change: &dyn Fn(&mut SelectedTokens)| add(&|c| c.selected.iter_mut().for_each(change));
        for top_k in [1, 2, tokens.top_k / 2, tokens.top_k.saturating_sub(1)] {
            select(&|own| own.top_k = top_k);
        }
        for list in SlotList::ALL {
            select(&|own| own.list = list);
        }
        for choice in TokenChoice::ALL {
            select(&|own| own.choice = choice);
        }
    }
    if case.workload.chunk_budget_tokens > 0 {
        for budget in [1, case.configuration.virtual_block_tokens(), 1 << 20] {
            add(&|c| c.workload.chunk_budget_tokens = budget);
        }
    }
}

fn acceptance_moves(case: &AcceptanceCase, seed: u64) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut AcceptanceCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        found.push(Case::acceptance(changed, seed));
    };
    add(&|c| c.requests.truncate(c.requests.len() / 2));
    for index in 0..case.requests.len().min(64) {
        add(&|c| {
            c.requests.remove(index);
        });
        add(&|c| c.requests[index].none_at = None);
        add(&|c| {
            let request = &mut c.requests[index];
            request.drafts = request.drafts.saturating_sub(1);
            request.none_at = request.none_at.filter(|none| *none < request.drafts);
        });
    }
    for ranks in [1, 2, 3, case.ranks / 2] {
        add(&|c| c.ranks = ranks.min(c.ranks));
    }
    for tokens in [2, 3, 5, case.vocabulary / 2] {
        add(&|c| c.vocabulary = tokens.min(c.vocabulary));
    }
    add(&|c| c.one_hot = false);
    found
}

fn kda_moves(case: &KdaCase, seed: u64) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut KdaCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        found.push(Case::kda(changed, seed));
    };
    let smaller =
        |value: usize| [1, 2, value / 2, value.saturating_sub(1)].map(|less| less.min(value).max(1));
    for step in 0..case.steps.len() {
        add(&|c| c.steps.truncate(step));
        add(&|c| {
            c.steps.remove(step);
        });
        for index in 0..case.steps[step].len() {
            add(&|c| {
                c.steps[step].remove(index);
            });
            add(&|c| c.steps[step][index].rejected = 0);
            add(&|c| c.steps[step][index].read = None);
            for less in
                [0, 1, case.steps[step][index].rows / 2, case.steps[step][index].rows.saturating_sub(1)]
            {
                add(&|c| c.steps[step][index].rows = less.min(c.steps[step][index].rows));
            }
        }
    }
    for less in smaller(case.tp) {
        add(&|c| c.tp = less);
        add(&|c| (c.tp, c.dcp) = (less, less.min(c.dcp)));
    }
    for less in smaller(case.value_heads) {
        add(&|c| (c.value_heads, c.heads) = (less, less.min(c.heads)));
    }
    for less in smaller(case.key_dim) {
        add(&|c| c.key_dim = less);
    }
    for less in smaller(case.value_dim) {
        add(&|c| c.value_dim = less);
    }
    add(&|c| c.dcp = 1);
    add(&|c| c.heads = c.value_heads);
    add(&|c| c.taps = c.taps.min(2));
    add(&|c| c.taps = 1);
    add(&|c| c.chunk = 1);
    add(&|c| c.chunk = c.chunk.min(2));
    add(&|c| c.drafts = c.steps.iter().flatten().map(|request| request.rejected).max().unwrap_or(0));
    found
}

fn merge_moves(whole: &Case, case: &MergeCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut MergeCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        for seed in [whole.seed, 0, 1, 2, 3] {
            found.push(Case { body: Body::Merge(changed.clone()), seed, ..whole.clone() });
        }
    };
    let smaller = |value: usize| {
        let mut values = vec![1, 2, 3, 4, value / 2, value.saturating_sub(1)];
        values.retain(|smaller| (1..value).contains(smaller));
        values
    };
    for rows in smaller(case.rows) {
        add(&|c| c.rows = rows);
        add(&|c| (c.rows, c.heads_per_rank, c.dim) = (rows, 1, c.dim.min(4)));
    }
    for world in smaller(case.world) {
        add(&|c| c.world = world);
    }
    for heads in smaller(case.heads_per_rank) {
        add(&|c| c.heads_per_rank = heads);
    }
    for dim in smaller(case.dim) {
        add(&|c| c.dim = dim);
    }
    for pattern in patterns(whole.family) {
        add(&|c| c.pattern = *pattern);
    }
    for view in StateView::ALL {
        add(&|c| c.view = view);
    }
    add(&|c| c.dtype = Dtype::Bf16);
    add(&|c| (c.comm_backend, c.lane_order) = (CommBackend::AgRs, LaneOrder::HiLo));
    add(&|c| c.lane_order = LaneOrder::HiLo);
    found
}
