//! Properties of selecting tokens on the embedded engine and on its faults.

use shardcheck_cases::{Body, Case, Family, IndexPattern, SuiteName};
use shardcheck_engine::{Engine, SelectionMode};
use shardcheck_references::sparse::certain;

use crate::selecting::SelectMaterial;
use crate::verdicts::{cases_of, faults_are_seen, passes_the_gate};

fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
    cases_of(Family::SelectSparse, name, seed)
}

#[test]
fn the_embedded_engine_selects_rightly_on_every_case_of_the_gate() {
    passes_the_gate(Family::SelectSparse, 30);
}

#[test]
fn every_fault_of_selecting_fails_every_property_that_it_names_on_the_gate() {
    faults_are_seen(Family::SelectSparse, "sparse.", 30);
}

fn materials(name: SuiteName, seed: u64) -> Vec<(Case, SelectMaterial)> {
    let profile = shardcheck_cpu::engine().profile().clone();
    let material = |case: Case| {
        let Body::SelectSparse(body) = &case.body else { panic!("a case of another family") };
        let material = SelectMaterial::new(body, case.seed, &profile).unwrap();
        (case, material)
    };
    cases(name, seed).into_iter().map(material).collect()
}

#[test]
fn few_selections_are_left_open_but_where_ties_are_made() {
    let (mut open, mut all) = (0, 0);
    for (_, material) in materials(SuiteName::Gate, 1) {
        if matches!(material.case.pattern, IndexPattern::Ties | IndexPattern::Zeros) {
            continue;
        }
        if material.case.selector.mode == SelectionMode::Union {
            continue;
        }
        for row in 0..material.rows() {
            let candidates = material.candidates(row, 0);
            let wanted = candidates.len().min(material.top_k());
            let scores = material.scores(row);
            all += wanted;
            open += wanted - certain(&scores, &candidates, material.top_k()).len().min(wanted);
        }
    }
    // one head leaves zeros, and keys of eight bits are few
    assert!(all > 800 && open * 25 < all, "{open} of {all} are open");
}

#[test]
fn the_gate_has_rows_that_see_more_and_fewer_tokens_than_k_and_ranks_that_own_none_of_them() {
    let (mut more, mut fewer, mut nothing, mut empty) = (0, 0, 0, 0);
    for (_, material) in materials(SuiteName::Gate, 1) {
        for row in 0..material.rows() {
            let candidates: Vec<usize> = (0..material.bound(row)).collect();
            more += usize::from(candidates.len() > material.top_k());
            fewer += usize::from((1..material.top_k()).contains(&candidates.len()));
            nothing += usize::from(candidates.is_empty());
            let sure = certain(&material.scores(row), &candidates, material.top_k());
            let whole = sure.len() == material.top_k().min(candidates.len()) && !sure.is_empty();
            let owned = |rank: usize| sure.iter().any(|token| material.layout.owner(*token) == rank);
            empty += usize::from(whole && !(0..material.case.dcp).all(owned));
        }
    }
    assert!(more > 100 && fewer > 30 && nothing > 5 && empty > 30, "{more} {fewer} {nothing} {empty}");
}
