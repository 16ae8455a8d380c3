//! Inputs of a case of Kimi delta attention: weights, rows, and the tensors of a step that any rows may be put together in.

use shardcheck_engine::{KdaGate, Tensor, Tensors};
use shardcheck_formats::{Counter, Dtype, round_bf16};

use super::{KdaCase, KdaPattern, KdaRequest};
use crate::stream::Stream;

/// Beyond it σ, exp and softplus of 32 bits are at their ends.
const FAR: f32 = 2000.0;

/// Inputs of one row over all heads.
#[derive(Debug, Clone, PartialEq)]
pub struct KdaRow {
    /// `[H, K]`.
    pub query: Vec<f32>,
    /// `[H, K]`.
    pub key: Vec<f32>,
    /// `[HV, V]`.
    pub value: Vec<f32>,
    /// `[HV, K]`.
    pub gate: Vec<f32>,
    /// `[HV]`.
    pub beta: Vec<f32>,
    /// `[HV, V]`.
    pub output_gate: Vec<f32>,
    /// Whether the row leaves a state as it is.
    pub is_held: bool,
}

/// Requests of a step by what they read, keep and have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KdaStep {
    /// Requests.
    pub requests: Vec<KdaRequest>,
    /// Rows that count of the step that each request goes on from.
    pub accepted: Vec<usize>,
    /// Rows of each request, by their number in [`KdaInputs::rows`].
    pub rows: Vec<Vec<usize>>,
}

/// Inputs of one case.
#[derive(Debug, Clone)]
pub struct KdaInputs {
    /// Weights by name, as a step has them.
    pub weights: Tensors,
    /// Rows of all steps.
    pub rows: Vec<KdaRow>,
    /// Steps of the case.
    pub steps: Vec<KdaStep>,
}

/// Makes the inputs of a case. Equal arguments give equal inputs.
pub fn generate_kda(case: &KdaCase, seed: u64) -> KdaInputs {
    let mut counter = Stream::KdaRows.counter(seed);
    let (mut rows, mut steps) = (Vec::new(), Vec::new());
    for (number, requests) in case.steps.iter().enumerate() {
        let mut own = Vec::new();
        for request in requests {
            own.push((rows.len()..rows.len() + request.rows).collect());
            rows.extend((0..request.rows).map(|_| row(case, number, &mut counter)));
        }
        let accepted = requests.iter().map(|request| case.accepted(number, *request)).collect();
        steps.push(KdaStep { requests: requests.clone(), accepted, rows: own });
    }
    KdaInputs { weights: weights(case, seed), rows, steps }
}

fn gaussians(counter: &mut Counter, count: usize, mean: f64, spread: f64) -> Vec<f32> {
    (0..count).map(|_| (mean + counter.gaussian() * spread) as f32).collect()
}

fn weights(case: &KdaCase, seed: u64) -> Tensors {
    let mut counter = Stream::KdaWeights.counter(seed);
    let KdaCase { heads, value_heads, key_dim, value_dim, taps, .. } = *case;
    let mut tensors = Tensors::new();
    for (name, shape, mean, spread) in [
        ("conv_query", vec![heads, key_dim, taps], 0.0, 0.6),
        ("conv_key", vec![heads, key_dim, taps], 0.0, 0.6),
        ("conv_value", vec![value_heads, value_dim, taps], 0.0, 0.6),
        ("a_log", vec![value_heads], 0.0, 0.5),
        ("dt_bias", vec![value_heads, key_dim], 0.5, 0.5),
        ("norm_weight", vec![value_dim], 1.0, 0.2),
    ] {
        let values = gaussians(&mut counter, shape.iter().product(), mean, spread);
        tensors.insert(name, Tensor::from_f32(Dtype::F32, &shape, &values));
    }
    tensors
}

fn row(case: &KdaCase, step: usize, counter: &mut Counter) -> KdaRow {
    let KdaCase { heads, value_heads, key_dim, value_dim, .. } = *case;
    let mut coded = |count: usize| -> Vec<f32> {
        gaussians(counter, count, 0.0, 1.0).into_iter().map(round_bf16).collect()
    };
    let (query, key, value) =
        (coded(heads * key_dim), coded(heads * key_dim), coded(value_heads * value_dim));
    let pace = if case.pattern == KdaPattern::Slow { -6.0 } else { -2.0 };
    let mut row = KdaRow {
        query,
        key,
        value,
        gate: gaussians(counter, value_heads * key_dim, pace, 1.2),
        beta: gaussians(counter, value_heads, 0.5, 1.5),
        output_gate: gaussians(counter, value_heads * value_dim, 0.0, 1.5),
        is_held: false,
    };
    match case.pattern {
        KdaPattern::Hold if step % 2 == 1 => {
            row.is_held = true;
            row.gate.fill(-FAR);
            row.beta.fill(-FAR);
        }
        KdaPattern::Forget => {
            // channels and heads forget by themselves; decays of softplus are below anything, those of the bound add up to that
            let often = if case.gate == KdaGate::Softplus { 4 } else { 2 };
            for gate in &mut row.gate {
                *gate = if counter.below(often) == 0 { FAR } else { *gate };
            }
            for beta in &mut row.beta {
                *beta = if counter.below(2) == 0 { FAR } else { *beta };
            }
        }
        _ => {}
    }
    row
}

impl KdaInputs {
    /// Tensors of a step.
    pub fn tensors(&self, case: &KdaCase, step: &KdaStep) -> Tensors {
        let KdaCase { heads, value_heads, key_dim, value_dim, .. } = *case;
        let mut starts = vec![0i32];
        starts.extend(step.rows.iter().scan(0, |end, rows| {
            *end += rows.len() as i32;
            Some(*end)
        }));
        let rows: Vec<&KdaRow> = step.rows.iter().flatten().map(|row| &self.rows[*row]).collect();
        let integers = |values: Vec<i32>| Tensor::from_i32(&[values.len()], &values);
        let floats = |dtype: Dtype, shape: &[usize], of: fn(&KdaRow) -> &Vec<f32>| {
            let values: Vec<f32> = rows.iter().flat_map(|row| of(row).iter().copied()).collect();
            let shape: Vec<usize> = std::iter::once(rows.len()).chain(shape.iter().copied()).collect();
            Tensor::from_f32(dtype, &shape, &values)
        };
        let slots = |of: fn(&KdaRequest) -> i32| integers(step.requests.iter().map(of).collect());
        let mut tensors = Tensors::new()
            .with("query_start_loc", integers(starts))
            .with("read_slots", slots(|request| request.read.map_or(-1, |slot| slot as i32)))
            .with("write_slots", slots(|request| request.write as i32))
            .with("accepted", integers(step.accepted.iter().map(|rows| *rows as i32).collect()))
            .with("query", floats(Dtype::Bf16, &[heads, key_dim], |row| &row.query))
            .with("key", floats(Dtype::Bf16, &[heads, key_dim], |row| &row.key))
            .with("value", floats(Dtype::Bf16, &[value_heads, value_dim], |row| &row.value))
            .with("gate", floats(Dtype::F32, &[value_heads, key_dim], |row| &row.gate))
            .with("beta", floats(Dtype::F32, &[value_heads], |row| &row.beta))
            .with("output_gate", floats(Dtype::F32, &[value_heads, value_dim], |row| &row.output_gate));
        for (name, tensor) in self.weights.iter() {
            tensors.insert(name, tensor.clone());
        }
        tensors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Body;
    use crate::Case;
    use shardcheck_engine::{OperationKind, Provenance};

    fn case(pattern: &str) -> KdaCase {
        let id = format!("kda/softplus.h2.hv4.k8.v6.t4/tp2.dcp2.c4.d3/5.n0+0.n1_4.0+1.1_1.0-2w2/{pattern}/7");
        match id.parse::<Case>().unwrap().body {
            Body::Kda(body) => body,
            _ => panic!("another body"),
        }
    }

    #[test]
    fn a_step_has_every_given_tensor_and_rows_of_its_requests() {
        let case = case("gaussian");
        let inputs = generate_kda(&case, 3);
        let step = inputs.tensors(&case, &inputs.steps[2]);
        let given = OperationKind::Kda.tensors().iter().filter(|t| t.provenance == Provenance::Given);
        assert!(given.clone().all(|tensor| step.find(tensor.name).is_some()));
        assert_eq!(step.iter().count(), given.count());
        assert_eq!(step.get("query").unwrap().shape(), [1, 2, 8]);
        assert_eq!(step.get("accepted").unwrap().to_i64(), [2]);
        let first = inputs.tensors(&case, &inputs.steps[0]);
        assert_eq!(first.get("query_start_loc").unwrap().to_i64(), [0, 5, 5]);
        assert_eq!(first.get("read_slots").unwrap().to_i64(), [-1, -1]);
        assert_eq!(generate_kda(&case, 3).rows, inputs.rows);
        assert_ne!(generate_kda(&case, 4).rows, inputs.rows);
    }

    #[test]
    fn edges_of_gates_are_where_32_bits_end() {
        let held = generate_kda(&case("hold"), 3);
        assert!(held.steps[1].rows.iter().flatten().all(|row| held.rows[*row].is_held));
        assert!(held.steps[0].rows.iter().flatten().all(|row| !held.rows[*row].is_held));
        let far = generate_kda(&case("forget"), 3);
        let ends = far.rows.iter().flat_map(|row| &row.gate).filter(|gate| **gate == FAR).count();
        assert!(ends > 20, "{ends}");
        assert_eq!(1.0 / (1.0 + FAR.exp()), 0.0);
    }
}
