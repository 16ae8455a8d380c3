//! Smaller stacks: fewer layers, narrower ones, a smaller vocabulary, a stream that is not sharded, and smaller sessions.

use shardcheck_cases::{Body, Case, StackCase, StackMixture, StackWiring};
use shardcheck_engine::StreamLayout;

use super::session;
use super::size::Size;

/// Stacks one step away.
pub(super) fn moves(whole: &Case, case: &StackCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |changed: StackCase| found.push(Case { body: Body::Stack(changed), ..whole.clone() });
    for layers in
        [1, case.layers / 2, case.layers - 1].into_iter().filter(|fewer| (1..case.layers).contains(fewer))
    {
        add(StackCase { layers, ..case.clone() });
    }
    let narrower =
        |width: usize| [1, 2, 4, width / 2].into_iter().filter(move |less| (1..width).contains(less));
    narrower(case.hidden).for_each(|hidden| add(StackCase { hidden, ..case.clone() }));
    narrower(case.inner).for_each(|inner| add(StackCase { inner, ..case.clone() }));
    narrower(case.vocabulary).for_each(|vocabulary| add(StackCase { vocabulary, ..case.clone() }));
    add(StackCase { stream: StreamLayout::Whole, ..case.clone() });
    if let Some(own) = case.mixture {
        add(StackCase { mixture: None, ..case.clone() });
        let mut mixed = |mixture: StackMixture| add(StackCase { mixture: Some(mixture), ..case.clone() });
        narrower(own.experts)
            .for_each(|experts| mixed(StackMixture { experts, top_k: own.top_k.min(experts), ..own }));
        narrower(own.top_k).for_each(|top_k| mixed(StackMixture { top_k, ..own }));
        (0..own.dense).for_each(|dense| mixed(StackMixture { dense, ..own }));
    }
    if let Some(own) = case.wiring {
        let mut wired = |wiring: StackWiring| add(StackCase { wiring: Some(wiring), ..case.clone() });
        (1..own.drafts).for_each(|drafts| wired(StackWiring { drafts, ..own }));
        narrower(own.rounds).for_each(|rounds| wired(StackWiring { rounds, ..own }));
        if own.drafts > 0 {
            wired(StackWiring { drafts: 0, rounds: 0 });
        }
        add(StackCase { wiring: None, ..case.clone() });
    }
    let sessions = session::moves(&Case::sequence(case.session.clone(), whole.seed), &case.session);
    for smaller in sessions {
        if let Body::Sequence(session) = smaller.body {
            add(StackCase { session, ..case.clone() });
        }
    }
    found
}

/// The size of a stack: that of its session, wider by the stream, the MLPs and the vocabulary of all layers.
pub(super) fn size(case: &StackCase) -> Size {
    let session = session::size(&case.session);
    Size { dims: session.dims + case.layers * (case.hidden + case.inner) + case.vocabulary, ..session }
}

/// What is plainer among stacks of one size.
pub(super) fn plainness(case: &StackCase) -> Vec<u64> {
    let mut plain = session::plainness(&case.session);
    let groups = case.session.configuration.tp / case.session.configuration.dcp;
    plain.extend([
        groups as u64,
        case.layers as u64,
        u64::from(case.stream != StreamLayout::Whole),
        case.mixture.map_or(0, |own| (1 + own.experts + own.top_k + own.dense) as u64),
        case.wiring.map_or(0, |own| (1 + own.drafts + own.rounds) as u64),
        case.vocabulary as u64,
    ]);
    plain
}

/// A rough count of multiplications.
pub(super) fn work(case: &StackCase) -> usize {
    let rows = session::size(&case.session).tokens;
    let heads = case.session.configuration.total_heads();
    let row = case.hidden * (3 * case.inner + heads * case.session.configuration.attention.qk_dim());
    case.layers * (session::work(&case.session) + rows * row) + rows * case.hidden * case.vocabulary
}
