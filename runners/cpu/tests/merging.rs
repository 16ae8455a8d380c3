//! Merges of given states, and the packing of an LSE.

mod scene;

use proptest::prelude::*;
use scene::{Scene, step, uniform};
use shardcheck_cpu::engine;
use shardcheck_engine::{CommBackend, LaneOrder, LseBase, Operation, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

const ROWS: usize = 5;
const DIM: usize = 6;

fn merge(world: usize, backend: CommBackend, out: &Tensor, lse: &[f32]) -> Reply {
    merge_in(LseBase::E, world, backend, out, lse)
}

fn merge_in(lse_base: LseBase, world: usize, backend: CommBackend, out: &Tensor, lse: &[f32]) -> Reply {
    let scene = Scene::small(world).with(|s| s.configuration.comm_backend = backend);
    let shape = &out.shape()[..3];
    let mut inputs = Tensors::new()
        .with("partial_out", out.clone())
        .with("partial_lse", Tensor::from_f32(Dtype::F32, shape, lse));
    step(scene.open(&engine()).as_mut(), &Operation::MergePartials { lse_base }, &mut inputs).unwrap()
}

/// Merge in f64, `[W, rows, heads, dim]` to `[rows, heads, dim]` and `[rows, heads]`.
fn exact(world: usize, out: &[f32], lse: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let states = lse.len() / world;
    let at = |rank: usize, state: usize| f64::from(lse[rank * states + state]);
    let merged: Vec<f64> =
        (0..states).map(|state| (0..world).map(|rank| at(rank, state).exp()).sum::<f64>().ln()).collect();
    let values = (0..states * DIM).map(|i| {
        let term = |rank: usize| {
            (at(rank, i / DIM) - merged[i / DIM]).exp() * f64::from(out[rank * states * DIM + i])
        };
        (0..world).map(term).sum()
    });
    (values.collect(), merged)
}

/// `[rows, heads]` of all ranks' own heads, in head order.
fn in_head_order(values: &[f32], world: usize, own: usize, width: usize) -> Vec<f32> {
    let at = |row: usize, head: usize| ((head / own * ROWS + row) * own + head % own) * width;
    (0..ROWS)
        .flat_map(|row| (0..world * own).flat_map(move |head| (0..width).map(move |d| at(row, head) + d)))
        .map(|index| values[index])
        .collect()
}

#[test]
fn merges_of_random_partials_are_exact_up_to_their_roundings() {
    for world in [1, 2, 3, 5, 8] {
        for backend in CommBackend::ALL {
            for (dtype, tolerance) in [(Dtype::F32, 1e-5), (Dtype::Bf16, 0.02), (Dtype::F16, 0.02 / 8.0)] {
                let shape = [world, ROWS, 2 * world, DIM];
                let out = Tensor::from_f32(dtype, &shape, &uniform(1, shape.iter().product()));
                let lse: Vec<f32> = uniform(2, world * ROWS * 2 * world).iter().map(|v| 4.0 * v).collect();
                let reply = merge(world, backend, &out, &lse);
                let (values, merged) = exact(world, &out.to_f32(), &lse);
                let (seen, seen_lse) = (reply.outputs.get("out").unwrap(), reply.outputs.get("lse").unwrap());
                assert_eq!((seen.dtype(), seen.shape()), (dtype, &[world, ROWS, 2, DIM][..]));
                let close = |a: Vec<f32>, b: &[f64], limit: f64| {
                    a.iter().zip(b).all(|(a, b)| (f64::from(*a) - b).abs() < limit)
                };
                assert!(close(in_head_order(&seen.to_f32(), world, 2, DIM), &values, tolerance));
                assert!(close(in_head_order(&seen_lse.to_f32(), world, 2, 1), &merged, 1e-5));
            }
        }
    }
}

#[test]
fn lses_in_base_2_weigh_as_the_natural_ones_and_the_merged_one_is_in_their_base() {
    for backend in CommBackend::ALL {
        let shape = [3, ROWS, 3, DIM];
        let values = uniform(5, shape.iter().product());
        let mut lse: Vec<f32> = uniform(6, 3 * ROWS * 3).iter().map(|u| 9.0 * u - 4.0).collect();
        lse[..ROWS].fill(f32::NEG_INFINITY);
        let in_base_2: Vec<f32> = lse.iter().map(|lse| lse * std::f32::consts::LOG2_E).collect();
        let out = Tensor::from_f32(Dtype::F32, &shape, &values);
        let natural = merge(3, backend, &out, &lse);
        let other = merge_in(LseBase::Two, 3, backend, &out, &in_base_2);
        let near = |name: &str, factor: f32| {
            let [a, b] = [&natural, &other].map(|reply| reply.outputs.get(name).unwrap().to_f32());
            a.iter().zip(&b).all(|(a, b)| a == b || (a * factor - b).abs() < 1e-5 * (1.0 + b.abs()))
        };
        assert!(near("out", 1.0) && near("lse", std::f32::consts::LOG2_E), "{backend:?}");
    }
}

#[test]
fn an_empty_partial_is_neutral_whatever_its_output_holds() {
    for backend in CommBackend::ALL {
        for empty in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
            let world = 3;
            let shape = [world, ROWS, 3, DIM];
            let states = ROWS * 3;
            let mut out = vec![f32::NAN; world * states * DIM];
            let mut lse = vec![empty; world * states];
            let kept = uniform(3, states * DIM);
            out[states * DIM..2 * states * DIM].copy_from_slice(&kept);
            lse[states..2 * states].fill(-7.25);
            let reply = merge(world, backend, &Tensor::from_f32(Dtype::Bf16, &shape, &out), &lse);
            let seen = in_head_order(&reply.outputs.get("out").unwrap().to_f32(), world, 1, DIM);
            assert_eq!(seen, kept);
            assert!(reply.outputs.get("lse").unwrap().to_f32().iter().all(|lse| *lse == -7.25));
        }
    }
}

#[test]
fn partials_that_are_all_empty_merge_into_zeros_and_minus_infinity() {
    for backend in CommBackend::ALL {
        let shape = [4, ROWS, 4, DIM];
        let out = Tensor::from_f32(Dtype::Bf16, &shape, &vec![f32::NAN; shape.iter().product()]);
        let reply = merge(4, backend, &out, &[f32::NEG_INFINITY; 4 * ROWS * 4]);
        assert!(reply.outputs.get("out").unwrap().to_codes().iter().all(|code| *code == 0));
        assert!(reply.outputs.get("lse").unwrap().to_f32().iter().all(|lse| *lse == f32::NEG_INFINITY));
    }
}

#[test]
fn a_world_of_one_returns_its_partial_untouched() {
    let shape = [1, ROWS, 2, DIM];
    let out = Tensor::from_f32(Dtype::F32, &shape, &uniform(4, shape.iter().product()));
    let lse = uniform(5, ROWS * 2);
    let reply = merge(1, CommBackend::A2a, &out, &lse);
    assert_eq!(reply.outputs.get("out").unwrap(), &out);
    assert_eq!(reply.outputs.get("lse").unwrap().to_f32(), lse);
    assert_eq!((reply.effective.get("comm_backend"), reply.collectives), (Some("none"), vec![0]));
}

#[test]
fn large_gaps_between_lses_neither_overflow_nor_lose_the_larger_state() {
    let shape = [2, ROWS, 2, DIM];
    let values = uniform(6, shape.iter().product());
    let out = Tensor::from_f32(Dtype::F32, &shape, &values);
    let lse: Vec<f32> = (0..2 * ROWS * 2).map(|i| if i < ROWS * 2 { 1000.0 } else { -1000.0 }).collect();
    let reply = merge(2, CommBackend::A2a, &out, &lse);
    let seen = in_head_order(&reply.outputs.get("out").unwrap().to_f32(), 2, 1, DIM);
    assert_eq!(seen, values[..ROWS * 2 * DIM]);
}

#[test]
fn the_two_exchanges_agree_within_the_roundings_of_bf16() {
    let shape = [8, ROWS, 8, DIM];
    let out = Tensor::from_f32(Dtype::Bf16, &shape, &uniform(7, shape.iter().product()));
    let lse = uniform(8, 8 * ROWS * 8);
    let [a, b] = CommBackend::ALL.map(|backend| merge(8, backend, &out, &lse));
    let (a_out, b_out) = (a.outputs.get("out").unwrap().to_f32(), b.outputs.get("out").unwrap().to_f32());
    let worst = a_out.iter().zip(&b_out).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst > 0.0 && worst < 0.02, "{worst}");
    assert_eq!(a.outputs.get("lse"), b.outputs.get("lse"));
    // one exchange against two
    assert_eq!((a.collectives, b.collectives), (vec![2; 8], vec![1; 8]));
}

#[test]
fn both_lane_orders_carry_the_same_lse() {
    let shape = [3, ROWS, 3, DIM];
    let out = Tensor::from_f32(Dtype::Bf16, &shape, &uniform(9, shape.iter().product()));
    let lse = Tensor::from_f32(Dtype::F32, &shape[..3], &uniform(10, 3 * ROWS * 3));
    let [a, b] = LaneOrder::ALL.map(|order| {
        let scene = Scene::small(3).with(|s| s.configuration.lane_order = order);
        let mut inputs = Tensors::new().with("partial_out", out.clone()).with("partial_lse", lse.clone());
        step(scene.open(&engine()).as_mut(), &Operation::MergePartials { lse_base: LseBase::E }, &mut inputs)
            .unwrap()
    });
    assert_eq!(a.outputs, b.outputs);
    assert_ne!(a.effective, b.effective);
}

#[test]
fn two_states_merge_as_the_partials_of_two_ranks_do() {
    let states = ROWS * 2;
    let shape = [ROWS, 2, DIM];
    let (a, b) = (uniform(11, states * DIM), uniform(12, states * DIM));
    let (a_lse, b_lse) = (uniform(13, states), uniform(14, states));
    let mut inputs = Tensors::new()
        .with("prefix_out", Tensor::from_f32(Dtype::F32, &shape, &a))
        .with("prefix_lse", Tensor::from_f32(Dtype::F32, &shape[..2], &a_lse))
        .with("suffix_out", Tensor::from_f32(Dtype::F32, &shape, &b))
        .with("suffix_lse", Tensor::from_f32(Dtype::F32, &shape[..2], &b_lse));
    let reply = step(Scene::small(1).open(&engine()).as_mut(), &Operation::MergeStates, &mut inputs).unwrap();
    let (values, merged) = exact(2, &[a, b].concat(), &[a_lse, b_lse].concat());
    let (out, lse) = (reply.outputs.get("out").unwrap(), reply.outputs.get("lse").unwrap());
    assert_eq!(out.shape(), [1, ROWS, 2, DIM]);
    assert_eq!(reply.collectives, [0], "one rank has nobody to ask");
    assert!(out.to_f64().iter().zip(&values).all(|(a, b)| (a - b).abs() < 1e-6));
    assert!(lse.to_f64().iter().zip(&merged).all(|(a, b)| (a - b).abs() < 1e-6));
}

#[test]
fn segments_merge_as_in_the_worked_example_and_inactive_ones_are_never_read() {
    let tensor = |values: &[f32], last: usize| Tensor::from_f32(Dtype::F32, &[4, 2, 1, last], values);
    let nan = f32::NAN;
    let flat = |values: &[f32]| Tensor::from_f32(Dtype::F32, &[4, 2, 1], values);
    // row 0: two tiles in two segments; row 1: no token at all
    let mut inputs = Tensors::new()
        .with("segment_max", flat(&[0.0, nan, 1.0, nan, nan, nan, nan, nan]))
        .with("segment_sum", flat(&[1.0, nan, 1.0, nan, nan, nan, nan, nan]))
        .with("segment_acc", tensor(&[1.0, nan, 3.0, nan, nan, nan, nan, nan], 1))
        .with("row_lens", Tensor::from_i32(&[2], &[100, 0]));
    let operation = Operation::MergeSegments { tile_tokens: 64 };
    let reply = step(Scene::small(1).open(&engine()).as_mut(), &operation, &mut inputs).unwrap();
    let (out, lse) = (reply.outputs.get("out").unwrap().to_f32(), reply.outputs.get("lse").unwrap().to_f32());
    assert!((out[0] - 7.0 / 3.0).abs() < 1e-6 && (lse[0] - 3f32.ln()).abs() < 1e-6, "{out:?} {lse:?}");
    assert_eq!((out[1], lse[1]), (0.0, f32::NEG_INFINITY));
    assert_eq!(reply.collectives, [0], "one rank has nobody to ask");
}

#[test]
fn segments_of_every_row_and_head_are_merged_into_their_own_place() {
    // two segments of two rows of two heads; maxima 0 and sums 1, so that the parts of active segments count alike
    let (segments, states, dim) = (2, 4, 3);
    let acc: Vec<f32> = (0..segments * states * dim).map(|index| index as f32).collect();
    let flat = |value: f32| Tensor::from_f32(Dtype::F32, &[2, 2, 2], &[value; 8]);
    let mut inputs = Tensors::new()
        .with("segment_max", flat(0.0))
        .with("segment_sum", flat(1.0))
        .with("segment_acc", Tensor::from_f32(Dtype::F32, &[2, 2, 2, dim], &acc))
        .with("row_lens", Tensor::from_i32(&[2], &[128, 64]));
    let operation = Operation::MergeSegments { tile_tokens: 64 };
    let reply = step(Scene::small(1).open(&engine()).as_mut(), &operation, &mut inputs).unwrap();
    let (both, first) = acc[..states * dim].split_at(2 * dim);
    let expected: Vec<f32> =
        both.iter().map(|value| value + (states * dim) as f32 / 2.0).chain(first.iter().copied()).collect();
    assert_eq!(reply.outputs.get("out").unwrap().to_f32(), expected);
    assert_eq!(reply.outputs.get("lse").unwrap().to_f32(), [2f32.ln(), 2f32.ln(), 0.0, 0.0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bit_pattern_of_an_lse_survives_its_lanes(codes in prop::collection::vec(any::<u32>(), 1..64)) {
        for order in LaneOrder::ALL {
            let scene = Scene::small(2).with(|s| s.configuration.lane_order = order);
            let wide: Vec<u64> = codes.iter().map(|code| u64::from(*code)).collect();
            let mut inputs = Tensors::new().with("lse", Tensor::from_codes(Dtype::F32, &[wide.len()], &wide));
            let reply = step(scene.open(&engine()).as_mut(), &Operation::PackLse, &mut inputs).unwrap();
            prop_assert_eq!(reply.outputs.get("unpacked").unwrap().to_codes(), wide.clone().into_iter().collect::<Vec<_>>());
            let lanes = reply.outputs.get("lanes").unwrap();
            prop_assert_eq!(lanes.shape(), &[1, wide.len(), 2]);
            let first = if order == LaneOrder::HiLo { wide[0] >> 16 } else { wide[0] & 0xFFFF };
            prop_assert_eq!(lanes.to_codes()[0], first);
        }
    }
}
