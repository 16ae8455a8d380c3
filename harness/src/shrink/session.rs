//! Smaller sequences: fewer steps, fewer requests in a step, fewer new tokens, no padding, and fewer ranks, heads and slots to a block.

use shardcheck_cases::{Body, Case, NewTokens, SequenceCase, Step};
use shardcheck_engine::{Attention, CacheLayout, Configuration};

use super::size::Size;

/// Sequences one step away. Most do not hold together, as later steps need what earlier ones wrote; the check of a case
/// tells.
pub(super) fn moves(whole: &Case, case: &SequenceCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |steps: Vec<Step>| {
        let changed = SequenceCase { steps, ..case.clone() };
        found.push(Case { body: Body::Sequence(changed), ..whole.clone() });
    };
    let requests: std::collections::BTreeSet<usize> = case.steps.iter().flat_map(named).collect();
    for request in requests {
        add(case.steps.iter().filter_map(|step| without(step, request)).collect());
    }
    for index in 0..case.steps.len() {
        let mut fewer = case.steps.clone();
        fewer.remove(index);
        add(fewer);
        add(case.steps[index + 1..].to_vec());
        add(case.steps[..index].to_vec());
        for smaller in smaller(&case.steps[index]) {
            let mut steps = case.steps.clone();
            steps[index] = smaller;
            add(steps);
        }
    }
    for configuration in configurations(&case.configuration) {
        let changed = SequenceCase { configuration, ..case.clone() };
        found.push(Case { body: Body::Sequence(changed), ..whole.clone() });
    }
    found
}

/// Smaller configurations, one axis at a time.
fn configurations(whole: &Configuration) -> Vec<Configuration> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut Configuration)| {
        let mut smaller = whole.clone();
        change(&mut smaller);
        let (tp, dcp) = (smaller.tp, smaller.dcp);
        if let Some(second) = smaller.second_group.as_deref_mut() {
            second.tp = tp;
            second.dcp = if second.dcp == whole.dcp { dcp } else { second.dcp.min(dcp) };
            hold_as_much(second, whole.second_group.as_deref().unwrap_or(whole));
        }
        hold_as_much(&mut smaller, whole);
        found.push(smaller);
    };
    let groups = whole.tp / whole.dcp;
    for dcp in 1..whole.dcp {
        for groups in [1, groups] {
            add(&|c| (c.dcp, c.tp) = (dcp, dcp * groups));
        }
    }
    if groups > 1 {
        add(&|c| c.tp = c.dcp);
    }
    for heads in 1..whole.heads_per_rank {
        add(&|c| c.heads_per_rank = heads);
    }
    let (s, b) = (whole.interleave, whole.block_size);
    for interleave in (1..=s).filter(|interleave| s.is_multiple_of(*interleave)) {
        for block_size in (1..=4).map(|runs| runs * interleave) {
            if block_size < b || (interleave < s && block_size == b) {
                add(&|c| (c.interleave, c.block_size) = (interleave, block_size));
            }
        }
    }
    found
}

/// Blocks for as many tokens as `whole` has room for, KV heads for the heads that are left, and no features that a world of one has
/// no use for.
fn hold_as_much(smaller: &mut Configuration, whole: &Configuration) {
    let growth = whole.virtual_block_tokens().div_ceil(smaller.virtual_block_tokens());
    smaller.blocks = smaller.blocks.saturating_mul(growth);
    if smaller.dcp == 1 {
        smaller.query_replication = false;
        smaller.project_before_merge = false;
    }
    let heads = smaller.gathered_heads();
    if let Attention::Gqa { kv_heads, .. } = &mut smaller.attention {
        // query heads divide evenly over those of the cache
        *kv_heads = (1..=*kv_heads).rev().find(|fewer| heads.is_multiple_of(*fewer)).unwrap_or(1);
    }
}

/// Requests that a step names.
fn named(step: &Step) -> Vec<usize> {
    match step {
        Step::Run { batch, .. } | Step::Import { batch, .. } => batch.iter().map(|new| new.request).collect(),
        Step::Hit { request, source, .. } => vec![*request, *source],
        Step::Reject { request, .. } | Step::Free { request } | Step::Evict { request } => vec![*request],
    }
}

/// The step as it is without a request; `None` where nothing is left of it.
fn without(step: &Step, request: usize) -> Option<Step> {
    match step {
        Step::Run { kind, batch, padded_rows, chunk_budget_tokens } => {
            let rest: Vec<_> = batch.iter().copied().filter(|new| new.request != request).collect();
            (!rest.is_empty()).then_some(Step::Run {
                kind: *kind,
                batch: rest,
                padded_rows: *padded_rows,
                chunk_budget_tokens: *chunk_budget_tokens,
            })
        }
        Step::Import { batch, source } => {
            let rest: Vec<_> = batch.iter().copied().filter(|new| new.request != request).collect();
            (!rest.is_empty()).then_some(Step::Import { batch: rest, source: *source })
        }
        other => (!named(other).contains(&request)).then(|| other.clone()),
    }
}

fn smaller(step: &Step) -> Vec<Step> {
    match step {
        Step::Run { kind, batch, padded_rows, chunk_budget_tokens } => {
            let run = |batch, padded_rows| Step::Run {
                kind: *kind,
                batch,
                padded_rows,
                chunk_budget_tokens: *chunk_budget_tokens,
            };
            let mut found = Vec::new();
            if *padded_rows > 0 {
                found.extend([run(batch.clone(), 0), run(batch.clone(), padded_rows - 1)]);
            }
            found.extend(fewer_tokens(batch).into_iter().map(|batch| run(batch, *padded_rows)));
            found
        }
        Step::Import { batch, source } => {
            let fewer = fewer_tokens(batch).into_iter().map(|batch| Step::Import { batch, source: *source });
            let shorter_block = |divisor: usize| {
                let block_size = source.block_size / divisor;
                let layout =
                    CacheLayout { block_size, interleave: source.interleave.min(block_size), ..*source };
                Step::Import { batch: batch.clone(), source: layout }
            };
            let smaller_world = CacheLayout { dcp: source.dcp - 1, ..*source };
            let blocks = (source.block_size > 1).then(|| shorter_block(2));
            let ranks =
                (source.dcp > 1).then(|| Step::Import { batch: batch.clone(), source: smaller_world });
            fewer.chain(blocks).chain(ranks).collect()
        }
        Step::Reject { request, tokens } => [1, tokens / 2]
            .into_iter()
            .filter(|fewer| (1..*tokens).contains(fewer))
            .map(|tokens| Step::Reject { request: *request, tokens })
            .collect(),
        Step::Hit { request, source, blocks } if *blocks > 1 => {
            vec![Step::Hit { request: *request, source: *source, blocks: 1 }]
        }
        Step::Hit { .. } | Step::Free { .. } | Step::Evict { .. } => Vec::new(),
    }
}

/// A batch with a request less, or fewer tokens of one.
fn fewer_tokens(batch: &[NewTokens]) -> Vec<Vec<NewTokens>> {
    let mut found = Vec::new();
    for (index, new) in batch.iter().enumerate() {
        let mut rest = batch.to_vec();
        rest.remove(index);
        if !rest.is_empty() {
            found.push(rest);
        }
        for tokens in [0, 1, new.tokens / 2, new.tokens.saturating_sub(1)] {
            if tokens < new.tokens {
                let mut shorter = batch.to_vec();
                shorter[index].tokens = tokens;
                found.push(shorter);
            }
        }
    }
    found
}

/// The size of a session: new tokens of all runs, each a row that attends as well.
pub(super) fn size(case: &SequenceCase) -> Size {
    let configuration = &case.configuration;
    let attention = configuration.attention;
    Size {
        tokens: 2 * new_tokens(case),
        world: configuration.dcp,
        heads: configuration.total_heads(),
        interleave: configuration.interleave,
        block: configuration.block_size,
        dims: attention.qk_dim() + attention.value_dim() + attention.kv_heads(),
    }
}

/// New tokens of all runs, and those that came from other sessions.
fn new_tokens(case: &SequenceCase) -> usize {
    let of_step = |step: &Step| match step {
        Step::Run { batch, .. } | Step::Import { batch, .. } => batch.iter().map(|new| new.tokens).sum(),
        _ => 0,
    };
    case.steps.iter().map(of_step).sum()
}

/// What is plainer among sessions of one size: fewer steps, fewer padded rows.
pub(super) fn plainness(case: &SequenceCase) -> Vec<u64> {
    let padded = |step: &Step| match step {
        Step::Run { padded_rows, .. } => *padded_rows,
        _ => 0,
    };
    let requests = |step: &Step| match step {
        Step::Run { batch, .. } => batch.len(),
        _ => 0,
    };
    [case.steps.len(), case.steps.iter().map(requests).sum(), case.steps.iter().map(padded).sum::<usize>()]
        .map(|count| count as u64)
        .to_vec()
}

/// A rough count of multiplications: every new token sees what came before it.
pub(super) fn work(case: &SequenceCase) -> usize {
    let configuration = &case.configuration;
    let width = configuration.attention.qk_dim() + configuration.attention.value_dim();
    let tokens = new_tokens(case);
    tokens * tokens * configuration.total_heads() * width + 1000 * configuration.tp * case.steps.len()
}
