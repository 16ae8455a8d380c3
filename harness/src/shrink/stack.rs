//! Smaller stacks: fewer layers, narrower ones, a smaller vocabulary, a stream that is not sharded, and smaller sessions.

use shardcheck_cases::{Body, Case, StackCase, StackMixture, StackRecurrence, StackSelection, StackWiring};
use shardcheck_engine::{LayerKind, StackPcp, StreamLayout};

use super::session;
use super::size::Size;

/// Stacks one step away.
pub(super) fn moves(whole: &Case, case: &StackCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add =
        |changed: StackCase| found.push(Case { body: Body::Stack(Box::new(changed)), ..whole.clone() });
    for layers in
        [1, case.layers / 2, case.layers - 1].into_iter().filter(|fewer| (1..case.layers).contains(fewer))
    {
        let pattern = case.pattern.and_then(|pattern| pattern.first(layers));
        let is_recurrent = pattern.is_some_and(|pattern| pattern.kinds().contains(&LayerKind::Recurrent));
        let recurrence = case.recurrence.filter(|_| is_recurrent);
        let selects = pattern.is_some_and(|pattern| pattern.kinds().contains(&LayerKind::Selecting));
        let selection = case.selection.filter(|_| selects);
        add(StackCase { layers, pattern, recurrence, selection, ..case.clone() });
    }
    let narrower =
        |width: usize| [1, 2, 4, width / 2].into_iter().filter(move |less| (1..width).contains(less));
    narrower(case.hidden).for_each(|hidden| add(StackCase { hidden, ..case.clone() }));
    narrower(case.inner).for_each(|inner| add(StackCase { inner, ..case.clone() }));
    narrower(case.vocabulary).for_each(|vocabulary| add(StackCase { vocabulary, ..case.clone() }));
    add(StackCase { stream: StreamLayout::Whole, ..case.clone() });
    for plainer in
        [StackCase { situ: false, ..case.clone() }, StackCase { output_gate: false, ..case.clone() }]
    {
        if plainer != *case {
            add(plainer);
        }
    }
    if let Some(own) = case.pcp {
        add(StackCase { pcp: None, ..case.clone() });
        let mut ranks = |pcp: StackPcp| add(StackCase { pcp: Some(pcp), ..case.clone() });
        (2..own.world).for_each(|world| ranks(StackPcp { world, ..own }));
        if own.merged {
            ranks(StackPcp { merged: false, ..own });
        }
    }
    recurrent_moves(case).into_iter().for_each(&mut add);
    if let Some(own) = case.selection {
        add(StackCase { selection: None, pattern: None, recurrence: None, ..case.clone() });
        narrower(own.top_k).for_each(|top_k| {
            add(StackCase { selection: Some(StackSelection { top_k, ..own }), ..case.clone() });
        });
    }
    if let Some(own) = case.mixture {
        add(StackCase {
            mixture: None,
            pcp: case.pcp.map(|own| StackPcp { merged: false, ..own }),
            ..case.clone()
        });
        let mut mixed = |mixture: StackMixture| add(StackCase { mixture: Some(mixture), ..case.clone() });
        narrower(own.experts)
            .for_each(|experts| mixed(StackMixture { experts, top_k: own.top_k.min(experts), ..own }));
        narrower(own.top_k).for_each(|top_k| mixed(StackMixture { top_k, ..own }));
        for plainer in [
            StackMixture { hashed: 0, ..own },
            StackMixture { shared: 0, ..own },
            StackMixture { latent: 0, ..own },
            StackMixture { biased: false, ..own },
        ] {
            if plainer != own {
                mixed(plainer);
            }
        }
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

/// Fewer recurrent layers, and smaller ones.
fn recurrent_moves(case: &StackCase) -> Vec<StackCase> {
    let (Some(pattern), Some(own)) = (case.pattern, case.recurrence) else { return Vec::new() };
    let mut found = vec![StackCase { pattern: None, recurrence: None, selection: None, ..case.clone() }];
    let kinds = pattern.to_string();
    for layer in 0..case.layers {
        let mut fewer = kinds.clone();
        fewer.remove(layer);
        if fewer.contains(LayerKind::Recurrent.letter()) {
            let pattern = fewer.parse().ok();
            found.push(StackCase { layers: case.layers - 1, pattern, ..case.clone() });
        }
    }
    let tp = case.session.configuration.tp;
    for smaller in [
        StackRecurrence { heads: tp, value_heads: tp, ..own },
        StackRecurrence { value_heads: own.heads, ..own },
        StackRecurrence { key_dim: own.key_dim.div_ceil(2), ..own },
        StackRecurrence { value_dim: own.value_dim.div_ceil(2), ..own },
        StackRecurrence { taps: 1, ..own },
        StackRecurrence { chunk: 1, ..own },
    ] {
        if smaller != own {
            found.push(StackCase { recurrence: Some(smaller), ..case.clone() });
        }
    }
    found
}

/// The size of a stack: that of its session, wider by the stream, the MLPs and the vocabulary of all layers.
pub(super) fn size(case: &StackCase) -> Size {
    let session = session::size(&case.session);
    let own = case.recurrence.map_or(0, |own| own.channels() + own.taps + own.chunk);
    Size { dims: session.dims + case.layers * (case.hidden + case.inner) + case.vocabulary + own, ..session }
}

/// What is plainer among stacks of one size.
pub(super) fn plainness(case: &StackCase) -> Vec<u64> {
    let mut plain = session::plainness(&case.session);
    let groups = case.session.configuration.tp / case.session.configuration.dcp;
    plain.extend([
        groups as u64,
        case.layers as u64,
        u64::from(case.stream != StreamLayout::Whole),
        case.mixture.map_or(0, |own| {
            let around = own.hashed + own.shared + own.latent + usize::from(own.biased);
            (1 + own.experts + own.top_k + own.dense + around) as u64
        }),
        u64::from(case.recurrence.is_some()),
        case.selection.map_or(0, |own| 1 + own.top_k as u64),
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
