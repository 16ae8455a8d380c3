//! Steps to smaller routers and layers of experts.

use shardcheck_cases::{Case, ExpertWeights, LogitPattern, MoeCase, RouteCase};
use shardcheck_engine::{
    Activation, ExpertChoice, ExpertSharding, MaskedFill, MoeExchange, Renormalise, Router, Scoring,
    SharedExpert,
};

use super::size::{Size, place};

fn smaller(value: usize) -> [usize; 4] {
    [0, 1, value / 2, value.saturating_sub(1)].map(|less| less.min(value))
}

/// Plainer routers with the experts that they choose among.
fn routers(router: &Router, experts: usize) -> Vec<(Router, usize)> {
    let mut found = vec![
        (Router { groups: 1, top_groups: 1, ..*router }, experts),
        (Router { scale: 1.0, ..*router }, experts),
        (Router { fill: MaskedFill::ALL[0], ..*router }, experts),
        (Router { top_groups: router.top_groups.saturating_sub(1), ..*router }, experts),
    ];
    found.extend(Renormalise::ALL.map(|renormalise| (Router { renormalise, ..*router }, experts)));
    found.extend(Scoring::ALL.map(|scoring| (Router { scoring, ..*router }, experts)));
    found.extend(ExpertChoice::ALL.map(|choice| (Router { choice, ..*router }, experts)));
    found.extend([1, 2, router.top_k - 1].map(|top_k| (Router { top_k, ..*router }, experts)));
    found.extend([2, 4, experts / 2, experts - 1].map(|experts| (*router, experts)));
    found
}

fn router_plainness(router: &Router) -> Vec<u64> {
    vec![
        router.top_k as u64,
        router.groups as u64,
        router.top_groups as u64,
        u64::from(router.scale != 1.0),
        place(&Scoring::ALL, &router.scoring),
        place(&ExpertChoice::ALL, &router.choice),
        place(&MaskedFill::ALL, &router.fill),
        place(&Renormalise::ALL, &router.renormalise),
    ]
}

pub(super) fn route_moves(whole: &Case, case: &RouteCase) -> Vec<Case> {
    let mut found = Vec::new();
    for tokens in smaller(case.tokens) {
        found.push(RouteCase { tokens, ..case.clone() });
    }
    for logits in LogitPattern::ALL {
        found.push(RouteCase { logits, ..case.clone() });
    }
    for (router, experts) in routers(&case.router, case.experts) {
        found.push(RouteCase { router, experts, ..case.clone() });
    }
    found.into_iter().map(|body| Case::route(body, whole.seed)).collect()
}

pub(super) fn moe_moves(whole: &Case, case: &MoeCase) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut MoeCase)| {
        let mut changed = case.clone();
        change(&mut changed);
        found.push(Case::moe(changed, whole.seed));
    };
    for group in 0..case.dp_tokens.len() {
        for tokens in smaller(case.dp_tokens[group]) {
            add(&|c| c.dp_tokens[group] = tokens);
        }
        add(&|c| {
            c.dp_tokens.remove(group);
            c.plan.dp -= 1;
        });
    }
    for ranks in [1, 2, 3] {
        add(&|c| c.plan.tp = ranks.min(c.plan.tp));
        add(&|c| c.plan.pcp = ranks.min(c.plan.pcp));
    }
    let square = |c: &mut MoeCase, width: usize| {
        c.hidden = width.min(c.hidden);
        c.inner = if c.weights == ExpertWeights::Random { c.inner } else { c.hidden };
        c.shared_inner = if c.plan.shared == SharedExpert::None { 0 } else { c.inner };
    };
    for width in [1, 2, 4, 8, case.experts + 2, case.hidden / 2] {
        add(&|c| square(c, width));
        add(&|c| {
            c.inner = width.min(c.inner);
            c.shared_inner = width.min(c.shared_inner);
        });
    }
    for shared in SharedExpert::ALL {
        add(&|c| {
            c.plan.shared = shared;
            square(c, c.hidden);
        });
    }
    for exchange in MoeExchange::ALL {
        add(&|c| c.plan.exchange = exchange);
    }
    add(&|c| c.plan.sharding = ExpertSharding::Whole);
    add(&|c| c.plan.activation = Activation::Linear);
    for logits in LogitPattern::ALL {
        add(&|c| c.logits = logits);
    }
    for (router, experts) in routers(&case.router, case.experts) {
        add(&|c| {
            c.router = router;
            c.experts = experts;
        });
    }
    found
}

pub(super) fn route_size(case: &RouteCase) -> Size {
    Size { tokens: case.tokens, world: 1, heads: case.experts, interleave: 1, block: 1, dims: 0 }
}

pub(super) fn moe_size(case: &MoeCase) -> Size {
    let dims = case.hidden + case.inner + case.shared_inner;
    Size {
        tokens: case.tokens(),
        world: case.plan.ranks(),
        heads: case.experts,
        interleave: 1,
        block: 1,
        dims,
    }
}

pub(super) fn route_plainness(case: &RouteCase) -> Vec<u64> {
    let mut plain = router_plainness(&case.router);
    plain.push(place(&LogitPattern::ALL, &case.logits));
    plain
}

pub(super) fn moe_plainness(case: &MoeCase) -> Vec<u64> {
    let mut plain = vec![
        place(&MoeExchange::ALL, &case.plan.exchange),
        place(&ExpertSharding::ALL, &case.plan.sharding),
        place(&SharedExpert::ALL, &case.plan.shared),
        place(&Activation::ALL, &case.plan.activation),
        place(&LogitPattern::ALL, &case.logits),
    ];
    plain.extend(router_plainness(&case.router));
    plain
}

pub(super) fn moe_work(case: &MoeCase) -> usize {
    let products = (case.tokens() + 1) * case.router.top_k * case.hidden * case.inner * 3;
    products + 1000 * case.plan.ranks()
}
