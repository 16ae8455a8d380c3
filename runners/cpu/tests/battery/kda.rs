//! A session of Kimi delta attention for the battery: new and empty requests, rejected rows, forks within a step, recycled slots, held rows.

use shardcheck_engine::{KdaGate, KdaPlan, Operation, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::Battery;
use crate::scene::{Scene, step, uniform};

const HEADS: usize = 8;
const VALUE_HEADS: usize = 16;
const DEPTH: usize = 4;
const WIDTH: usize = 3;
const TAPS: usize = 3;

/// Rows, slot that is read (−1: new), rows that count, slot that is written.
type Request = [i32; 4];

const STEPS: [&[Request]; 6] = [
    &[[7, -1, 0, 0], [0, -1, 0, 1], [4, -1, 0, 2]],
    &[[3, 0, 7, 0], [2, 1, 0, 1], [0, 2, 4, 3]],
    &[[1, 0, 2, 0], [2, 0, 1, 4], [3, 2, 4, 2]],
    &[[2, 4, 2, 1], [1, 1, 2, 4], [1, -1, 0, 3]],
    &[[2, 2, 2, 2], [1, 1, 2, 1]],
    &[[5, 3, 1, 3], [2, 2, 2, 0]],
];

/// The step whose rows leave states as they are.
const HELD: usize = 4;

impl Battery<'_> {
    pub(super) fn kda(&mut self) {
        for (gate, chunk) in [(KdaGate::LowerBound, 1), (KdaGate::Softplus, 3)] {
            let scene = Scene::small(4).with(|scene| scene.configuration.dcp = 2);
            let mut session = scene.open(self.engine);
            for (number, requests) in STEPS.iter().enumerate() {
                let operation = Operation::Kda { plan: KdaPlan { gate, slots: 5, drafts: 2, chunk } };
                let reply = step(session.as_mut(), &operation, &mut inputs(number, requests));
                self.reply("kda", &["out", "core", "state", "window"], &reply);
            }
        }
    }
}

fn inputs(number: usize, requests: &[Request]) -> Tensors {
    let mut starts = vec![0];
    requests.iter().for_each(|request| starts.push(starts[starts.len() - 1] + request[0]));
    let rows = starts[requests.len()] as usize;
    let column = |at: usize| {
        let values: Vec<i32> = requests.iter().map(|request| request[at]).collect();
        Tensor::from_i32(&[values.len()], &values)
    };
    let drawn = |seed: usize, dtype: Dtype, shape: &[usize]| {
        let values = uniform(seed as u64, shape.iter().product());
        Tensor::from_f32(dtype, shape, &values)
    };
    let of_step = |seed: usize, dtype: Dtype, shape: &[usize]| drawn(100 + 10 * number + seed, dtype, shape);
    let logits = |seed: usize, shape: &[usize]| {
        let held = Tensor::from_f32(Dtype::F32, shape, &vec![-2000.0; shape.iter().product()]);
        if number == HELD { held } else { of_step(seed, Dtype::F32, shape) }
    };
    Tensors::new()
        .with("query_start_loc", Tensor::from_i32(&[starts.len()], &starts))
        .with("read_slots", column(1))
        .with("accepted", column(2))
        .with("write_slots", column(3))
        .with("query", of_step(0, Dtype::Bf16, &[rows, HEADS, DEPTH]))
        .with("key", of_step(1, Dtype::Bf16, &[rows, HEADS, DEPTH]))
        .with("value", of_step(2, Dtype::Bf16, &[rows, VALUE_HEADS, WIDTH]))
        .with("gate", logits(3, &[rows, VALUE_HEADS, DEPTH]))
        .with("beta", logits(4, &[rows, VALUE_HEADS]))
        .with("output_gate", of_step(5, Dtype::F32, &[rows, VALUE_HEADS, WIDTH]))
        .with("conv_query", drawn(1, Dtype::F32, &[HEADS, DEPTH, TAPS]))
        .with("conv_key", drawn(2, Dtype::F32, &[HEADS, DEPTH, TAPS]))
        .with("conv_value", drawn(3, Dtype::F32, &[VALUE_HEADS, WIDTH, TAPS]))
        .with("a_log", drawn(4, Dtype::F32, &[VALUE_HEADS]))
        .with("dt_bias", drawn(5, Dtype::F32, &[VALUE_HEADS, DEPTH]))
        .with("norm_weight", drawn(6, Dtype::F32, &[WIDTH]))
}
