//! Merge vectors: given states with empty ones among them, and what they merge to.

use std::collections::BTreeMap;

use shardcheck_engine::Tensor;
use shardcheck_formats::{Counter, Dtype, round_bf16};
use shardcheck_references::attention::plain::Functions;
use shardcheck_references::exp::Fixed;

use super::{f64_tensor, pack};

const STATES: usize = 6;
const DIM: usize = 16;

/// The file: for each number of parts W, `wW.out` bf16 `[W, states, dim]` and `wW.lse` f32 `[W, states]` go in,
/// `wW.merged_out` and `wW.merged_lse` in f64 come out.
///
/// State 0 is empty everywhere; state 1 holds something in part 0 only; in state 2 part W−1 is empty. Beside an LSE of −∞
/// the output is NaN, and must be ignored. LSEs of state 3 lie up to 80 apart.
pub(super) fn file() -> Vec<u8> {
    let mut tensors = BTreeMap::new();
    for world in [1usize, 2, 3, 4, 5, 8] {
        let mut counter = Counter::new(0x6e76, world as u32);
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for part in 0..world {
            for state in 0..STATES {
                let empty =
                    state == 0 || state == 1 && part > 0 || state == 2 && part + 1 == world && world > 1;
                let spread = if state == 3 { 40.0 } else { 2.0 };
                let drawn = (spread * counter.gaussian().clamp(-2.0, 2.0)) as f32;
                lse.push(if empty { f32::NEG_INFINITY } else { drawn });
                for _ in 0..DIM {
                    let value = round_bf16(counter.gaussian() as f32);
                    out.push(if empty { f32::NAN } else { value });
                }
            }
        }
        let (merged_out, merged_lse) = merge(world, &out, &lse);
        tensors.insert(format!("w{world}.out"), Tensor::from_f32(Dtype::Bf16, &[world, STATES, DIM], &out));
        tensors.insert(format!("w{world}.lse"), Tensor::from_f32(Dtype::F32, &[world, STATES], &lse));
        tensors.insert(format!("w{world}.merged_out"), f64_tensor(&[STATES, DIM], &merged_out));
        tensors.insert(format!("w{world}.merged_lse"), f64_tensor(&[STATES], &merged_lse));
    }
    pack(&tensors)
}

/// The definition, with elementary functions that give the same bits everywhere.
fn merge(world: usize, out: &[f32], lse: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let (mut merged_out, mut merged_lse) = (vec![0.0; STATES * DIM], vec![f64::NEG_INFINITY; STATES]);
    for state in 0..STATES {
        let held: Vec<usize> = (0..world).filter(|part| lse[part * STATES + state].is_finite()).collect();
        if held.is_empty() {
            continue;
        }
        let value = |part: usize| f64::from(lse[part * STATES + state]);
        let largest = held.iter().map(|part| value(*part)).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = held.iter().map(|part| Fixed::exp(value(*part) - largest)).sum();
        merged_lse[state] = largest + Fixed::ln(total);
        for part in held {
            let weight = Fixed::exp(value(part) - largest) / total;
            for d in 0..DIM {
                merged_out[state * DIM + d] += weight * f64::from(out[(part * STATES + state) * DIM + d]);
            }
        }
    }
    (merged_out, merged_lse)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_references::merge::{Partial, merge as reference};

    #[test]
    fn the_vectors_agree_with_the_reference_merge() {
        let out: Vec<f32> = (0..3 * STATES * DIM).map(|i| (i % 17) as f32 - 8.0).collect();
        let mut lse: Vec<f32> = (0..3 * STATES).map(|i| (i % 5) as f32).collect();
        lse[4] = f32::NEG_INFINITY;
        let (merged_out, merged_lse) = merge(3, &out, &lse);
        let parts: Vec<Partial> = (0..3)
            .map(|p| Partial {
                out: out[p * STATES * DIM..(p + 1) * STATES * DIM].iter().map(|v| f64::from(*v)).collect(),
                lse: lse[p * STATES..(p + 1) * STATES].iter().map(|v| f64::from(*v)).collect(),
            })
            .collect();
        let expected = reference(&parts);
        for (a, b) in merged_out.iter().chain(&merged_lse).zip(expected.out.iter().chain(&expected.lse)) {
            assert!((a - b).abs() <= 1e-13 * (1.0 + b.abs()), "{a} against {b}");
        }
    }
}
