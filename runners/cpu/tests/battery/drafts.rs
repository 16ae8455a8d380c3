//! Batches of drafts for the battery: ragged, with drafts that are none, zeros, ties, equal laws, numbers at their edges.

use shardcheck_engine::{AcceptanceMethod, Operation, Tensor, Tensors};
use shardcheck_formats::Dtype;

const TOKENS: usize = 7;
const COLUMNS: usize = 4;

/// Steps of every method, with and without a law of the drafts.
pub fn steps() -> Vec<(Operation, Tensors)> {
    let mut steps = Vec::new();
    for method in AcceptanceMethod::ALL {
        for one_hot in [false, true] {
            for counts in [[3, 0, 4, 1, 2, 4, 3, 4, 2, 4, 1, 3].repeat(24), vec![0, 0]] {
                let inputs = batch(&counts, one_hot, method == AcceptanceMethod::Greedy);
                steps.push((Operation::AcceptDrafts { method, ranks: 3 }, inputs));
            }
        }
    }
    steps
}

fn batch(counts: &[usize], one_hot: bool, greedy: bool) -> Tensors {
    let mut state = 11u64;
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let (mut starts, mut drafts) = (vec![0i32], Vec::new());
    let (mut target, mut law, mut heat) = (Vec::new(), Vec::new(), Vec::new());
    for (request, count) in counts.iter().enumerate() {
        starts.push(starts[request] + *count as i32 + 1);
        heat.push([0.0, 0.6, 1.0, 1.5][request % 4]);
        for row in 0..=COLUMNS {
            let logit = |wide: u64| if wide == 0 { f32::NEG_INFINITY } else { wide as f32 * 0.5 };
            let own: Vec<f32> =
                (0..TOKENS).map(|token| if token == row { 1.0 } else { logit(below(5)) }).collect();
            // every third request has equal laws
            let other: Vec<f32> = own
                .iter()
                .map(|logit| if request % 3 == 2 { *logit } else { below(4) as f32 * 0.7 })
                .collect();
            let best = (0..TOKENS).fold(0, |best, token| if own[token] > own[best] { token } else { best });
            if row < COLUMNS {
                let none = request % 4 == 3 && row == request % 3;
                let any = below(TOKENS as u64) as usize;
                drafts.push(if none { -1 } else { [best, any][below(2) as usize] as i32 });
                law.extend(other);
            }
            if row <= *count {
                target.extend(own);
            }
        }
    }
    let rows = target.len() / TOKENS;
    let numbers: Vec<f32> =
        (0..rows).map(|row| if row % 5 == 0 { 0.0 } else { below(1000) as f32 / 1000.0 }).collect();
    let noise: Vec<f32> = (0..rows * TOKENS).map(|_| below(1000) as f32 / 700.0).collect();
    let floats = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values);
    let count = counts.len();
    let mut inputs = Tensors::new()
        .with("query_start_loc", Tensor::from_i32(&[count + 1], &starts))
        .with("draft_tokens", Tensor::from_i32(&[count, COLUMNS], &drafts))
        .with("target_logits", floats(&[rows, TOKENS], &target));
    if greedy {
        return inputs;
    }
    if !one_hot {
        inputs.insert("draft_logits", floats(&[count, COLUMNS, TOKENS], &law));
    }
    inputs
        .with("temperature", floats(&[count], &heat))
        .with("uniform", floats(&[rows], &numbers))
        .with("noise", floats(&[rows, TOKENS], &noise))
}
