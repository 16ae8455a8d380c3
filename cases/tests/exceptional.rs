//! The gate asks every merge for each exceptional input that the properties know.

use std::collections::BTreeSet;

use shardcheck_cases::{Body, Case, Family, MergeInputs, StateView, SuiteName, suite};

/// What may be exceptional in the states of one row and head.
const STATES: [&str; 7] = [
    "all empty, outputs NaN",
    "NaN beside an LSE of −∞",
    "first state empty",
    "last state empty",
    "an LSE of +∞",
    "a NaN LSE",
    "LSEs 20 apart",
];
/// And in how they lie in memory.
const VIEWS: [&str; 3] = ["dense", "gaps between rows", "strided by head"];

/// What is exceptional in the inputs of a merge.
fn exceptions(case: &Case, inputs: &MergeInputs) -> BTreeSet<&'static str> {
    let mut found = BTreeSet::new();
    let Body::Merge(merge) = &case.body else { return found };
    found.insert(match merge.view {
        StateView::Contiguous => VIEWS[0],
        StateView::Sliced => VIEWS[1],
        StateView::HeadMajor => VIEWS[2],
    });
    let (states, places) = (merge.world, inputs.lses.len() / merge.world);
    for place in 0..places {
        let lses: Vec<f64> = (0..states).map(|state| inputs.lses[state * places + place]).collect();
        let is_nan = |state: usize| inputs.outs[(state * places + place) * merge.dim].is_nan();
        let empty = |state: usize| lses[state] == f64::NEG_INFINITY;
        let finite: Vec<f64> = lses.iter().copied().filter(|lse| lse.is_finite()).collect();
        let some = !finite.is_empty();
        let gap =
            finite.iter().copied().fold(f64::MIN, f64::max) - finite.iter().copied().fold(f64::MAX, f64::min);
        let holds = [
            (0..states).all(|state| empty(state) && is_nan(state)),
            some && (0..states).any(|state| empty(state) && is_nan(state)),
            some && empty(0),
            some && empty(states - 1),
            lses.contains(&f64::INFINITY),
            lses.iter().any(|lse| lse.is_nan()),
            some && gap > 20.0,
        ];
        found.extend(STATES.iter().zip(holds).filter(|(_, holds)| *holds).map(|(name, _)| *name));
    }
    found
}

#[test]
fn the_gate_asks_every_merge_for_each_exceptional_input() {
    let cases = suite(SuiteName::Gate, 1);
    let of = |family: Family, backend: &str| -> BTreeSet<&'static str> {
        let asked = cases.iter().filter(|case| case.family == family && case.id().contains(backend));
        asked.flat_map(|case| exceptions(case, &case.merge_inputs().expect("it is a merge"))).collect()
    };
    let all: BTreeSet<_> = STATES.into_iter().chain(VIEWS).collect();
    for backend in [".a2a.", ".ag_rs/"] {
        assert_eq!(of(Family::MergePartials, backend), all, "partials over ranks, {backend}");
    }
    assert_eq!(of(Family::MergeStates, ""), all, "two states");
}
