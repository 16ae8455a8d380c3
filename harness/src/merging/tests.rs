//! Material of merge cases: what is expected is the merge in float64, and changed inputs change what they say.

use super::*;
use shardcheck_cases::{Body, Case};
use shardcheck_engine::Engine;

const PARTIALS: &str = "merge_partials/w3.t4.h2.d6.bf16.a2a.hi_lo/random/head_major/7";
const SOME_EMPTY: &str = "merge_partials/w4.t5.h2.d6.f32.ag_rs/some_empty/contiguous/7";
const TAGGED: &str = "merge_partials/w3.t4.h2.d6.bf16.a2a.hi_lo/tagged/contiguous/7";
const TWO: &str = "merge_states/w2.t4.h3.d6.bf16.a2a.hi_lo/large_gaps/sliced/7";
const BROKEN: &str = "merge_states/w2.t6.h8.d6.bf16.a2a.hi_lo/broken_lse/contiguous/7";

fn material(id: &str) -> MergeMaterial {
    let case: Case = id.parse().unwrap_or_else(|error| panic!("{error}"));
    let Body::Merge(body) = &case.body else { panic!("{id} is a merge") };
    MergeMaterial::new(case.family, body, case.seed, shardcheck_cpu::engine().profile()).unwrap()
}

/// The merge of the given states, `[T, Hg]` of outputs and LSE, in float64.
fn merged(states: &[State], dim: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for at in 0..states[0].lse.len() {
        let held: Vec<&State> = states.iter().filter(|state| state.lse[at].is_finite()).collect();
        let most = held.iter().map(|state| state.lse[at]).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = held.iter().map(|state| (state.lse[at] - most).exp()).sum();
        lse.push(if held.is_empty() { f64::NEG_INFINITY } else { most + total.ln() });
        for d in 0..dim {
            let sum: f64 =
                held.iter().map(|state| (state.lse[at] - most).exp() * state.out[at * dim + d]).sum();
            out.push(if held.is_empty() { 0.0 } else { sum / total });
        }
    }
    (out, lse)
}

#[test]
fn what_is_expected_is_the_merge_in_float64_in_the_order_of_the_ranks() {
    for id in [PARTIALS, SOME_EMPTY] {
        let material = material(id);
        let (rows, heads, dim) = (material.case.rows, material.heads(), material.case.dim);
        let (out, lse) = merged(&material.states, dim);
        let expected = material.expected().unwrap();
        assert_eq!(expected.lse.len(), rows * heads);
        for (flat, allowed) in expected.lse.iter().enumerate() {
            let per_rank = material.case.heads_per_rank;
            let (rank, row, head) = (flat / per_rank / rows, flat / per_rank % rows, flat % per_rank);
            let at = row * heads + rank * per_rank + head;
            assert!(allowed.admits(lse[at]), "{id}: {}", material.place_state(flat));
            for d in 0..dim {
                let seen = shardcheck_formats::round(material.case.dtype, out[at * dim + d]);
                let allowed = expected.out[flat * dim + d];
                assert!(allowed.admits(seen), "{id}: {}", material.place(flat * dim + d));
                assert!(!allowed.admits(seen + 0.5), "{id}: {}", material.place(flat * dim + d));
            }
        }
    }
}

#[test]
fn the_only_state_that_holds_something_comes_out_bit_for_bit() {
    let material = material(PARTIALS);
    let (inputs, expected) = material.with_only(1);
    let lse = inputs.get("partial_lse").unwrap().to_f64();
    let states = lse.len() / 3;
    assert!(lse[..states].iter().chain(&lse[2 * states..]).all(|lse| *lse == f64::NEG_INFINITY));
    assert!(inputs.get("partial_out").unwrap().to_f64()[..states * 6].iter().all(|out| out.is_nan()));
    let kept = &material.states[1];
    // rank 1 keeps heads 2 and 3; row 2, head 0 of it is state (2, 2) of the six heads
    let (flat, at) = (4 * 2 + 2 * 2, 2 * 6 + 2);
    assert!(matches!(expected.lse[flat], Allowed::Exactly(lse) if lse == kept.lse[at]));
    assert!(matches!(expected.out[flat * 6 + 5], Allowed::Exactly(out) if out == kept.out[at * 6 + 5]));
}

#[test]
fn reversed_states_are_the_same_states_in_the_other_order() {
    let material = material(PARTIALS);
    let (given, reversed) = (material.contiguous(), material.reversed());
    let lse = |tensors: &Tensors| tensors.get("partial_lse").unwrap().to_f64();
    let (given, reversed) = (lse(&given), lse(&reversed));
    let states = given.len() / 3;
    for part in 0..3 {
        assert_eq!(given[part * states..][..states], reversed[(2 - part) * states..][..states]);
    }
    assert_ne!(given, reversed);
}

#[test]
fn contiguous_copies_hold_the_same_numbers_without_gaps() {
    for id in [PARTIALS, TWO] {
        let material = material(id);
        let copies = material.contiguous();
        for (name, tensor) in material.inputs.tensors.iter() {
            let copy = copies.get(name).unwrap();
            assert!(copy.is_contiguous());
            assert_eq!((copy.shape(), copy.to_codes()), (tensor.shape(), tensor.to_codes()), "{name}");
        }
        assert!(material.inputs.tensors.iter().any(|(_, tensor)| !tensor.is_contiguous()));
    }
}

#[test]
fn shifting_every_lse_moves_the_merged_one_and_leaves_the_output() {
    let material = material(PARTIALS);
    let (_, shifted) = material.shifted(8.0).unwrap();
    let (out, lse) = merged(&material.states, 6);
    // rank 0, row 0, head 0 stands first in either order
    assert!(shifted.lse[0].admits(lse[0] + 8.0) && !shifted.lse[0].admits(lse[0] + 8.01));
    assert!(shifted.out[0].admits(shardcheck_formats::round(material.case.dtype, out[0])));
}

#[test]
fn a_fold_of_two_state_merges_is_expected_near_the_merge_of_all() {
    let material = material(PARTIALS);
    let fold = material.expected_fold().unwrap();
    let (out, lse) = merged(&material.states, 6);
    for (allowed, exact) in fold.out.iter().zip(&out).chain(fold.lse.iter().zip(&lse)) {
        assert!(allowed.admits(*exact) && !allowed.admits(*exact + 1e-4), "{allowed:?} {exact}");
    }
}

#[test]
fn an_lse_that_is_no_number_makes_its_state_empty_and_leaves_the_others() {
    for id in [BROKEN, &BROKEN.replace("merge_states/w2.t6.h8", "merge_partials/w2.t6.h4")] {
        let material = material(id);
        let odd = |state: &State| state.lse.iter().any(|lse| lse.is_nan() || *lse == f64::INFINITY);
        assert!(material.states.iter().all(odd), "{id}");
        let (rows, heads) = (material.case.rows, material.heads());
        let (_, lse) = merged(&material.states, 6);
        for (flat, allowed) in material.expected().unwrap().lse.iter().enumerate() {
            let per_rank = material.case.heads_per_rank;
            let (rank, row, head) = (flat / per_rank / rows, flat / per_rank % rows, flat % per_rank);
            let at = row * heads + rank * per_rank + head;
            // of two states alone, a NaN may also spoil what it is merged with
            let nan = material.states.iter().any(|state| state.lse[at].is_nan());
            let spoils = nan && id == BROKEN;
            assert!(allowed.admits(lse[at]) && allowed.admits(f64::NAN) == spoils, "{id} state {flat}");
        }
    }
}

#[test]
fn what_two_states_with_a_nan_lse_merge_to_is_the_other_state_or_nan() {
    let mut material = material(TWO);
    material.states[0].lse[5] = f64::NAN;
    let expected = material.expected().unwrap();
    let (out, lse) = (material.states[1].out[5 * 6], material.states[1].lse[5]);
    for (allowed, exact) in [(expected.out[5 * 6], out), (expected.lse[5], lse)] {
        assert!(matches!(allowed, Allowed::OrNan { .. }), "{allowed:?}");
        assert!(allowed.admits(exact) && allowed.admits(f64::NAN) && allowed.ratio(f64::NAN) == 0.0);
        assert!(!allowed.admits(0.5 * exact) && !allowed.admits(f64::INFINITY), "{allowed:?}");
    }
    assert!(matches!(expected.lse[4], Allowed::Between { .. }), "its neighbour holds two numbers");
    // beside an empty state there is nothing left, which is still no reason to invent a number
    material.states[1].lse.fill(f64::NEG_INFINITY);
    let (_, nothing) = material.with_only(0);
    assert!(nothing.lse[5].admits(f64::NEG_INFINITY) && nothing.lse[5].admits(f64::NAN));
    assert!(nothing.out[5 * 6].admits(0.0) && !nothing.out[5 * 6].admits(material.states[0].out[5 * 6]));
}

#[test]
fn an_output_in_the_wrong_place_is_recognised() {
    let material = material(TAGGED);
    let expected = material.expected().unwrap();
    let mut seen: Vec<f64> = expected
        .out
        .iter()
        .map(|allowed| if let Allowed::Between { expected, .. } = allowed { *expected } else { 0.0 })
        .map(|value| shardcheck_formats::round(material.case.dtype, value))
        .collect();
    assert_eq!(material.identify(&seen, &[]), Vec::<String>::new());
    let (first, second) = (0, 3);
    for d in 0..6 {
        seen.swap(first * 6 + d, second * 6 + d);
    }
    let broken: Vec<usize> = (0..6).map(|d| first * 6 + d).collect();
    let lines = material.identify(&seen, &broken);
    assert_eq!(lines, ["rank 0, row 0, head 0 carries what belongs to rank 0, row 1, head 1"]);
}

#[test]
fn places_name_rank_row_head_and_dim() {
    let material = material(PARTIALS);
    assert_eq!(material.output_shape(), [3, 4, 2, 6]);
    assert_eq!(material.place(((2 * 4 + 3) * 2 + 1) * 6 + 5), "rank 2, row 3, head 1, dim 5");
    assert_eq!(material.place_folded((3 * 6 + 5) * 6 + 2), "row 3, head 5, dim 2");
    assert_eq!(self::material(TWO).output_shape(), [1, 4, 3, 6]);
}

#[test]
fn segments_are_expected_to_be_normalised_by_the_sum_over_all_that_are_active() {
    let material = material("merge_segments/w3.t4.h2.d6.f32.a2a.hi_lo/random/contiguous/7");
    let read = |name: &str| material.inputs.tensors.get(name).unwrap().to_f64();
    let (max, sum, acc, lens) =
        (read("segment_max"), read("segment_sum"), read("segment_acc"), read("row_lens"));
    let expected = material.expected().unwrap();
    for state in 0..8 {
        let length = lens[state / 2] as usize;
        let tiles = length.div_ceil(3 * MergeCase::TILE_TOKENS).max(1);
        let active = length.div_ceil(tiles * MergeCase::TILE_TOKENS);
        let total: f64 = (0..active).map(|s| sum[s * 8 + state] * max[s * 8 + state].exp2()).sum();
        let lse = total.ln();
        assert!(expected.lse[state].admits(lse), "state {state}: {:?} {lse}", expected.lse[state]);
        for d in 0..6 {
            let out: f64 =
                (0..active).map(|s| acc[(s * 8 + state) * 6 + d] * max[s * 8 + state].exp2()).sum();
            assert!(expected.out[state * 6 + d].admits(out / total), "state {state} dim {d}");
        }
    }
}
