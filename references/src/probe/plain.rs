//! What the plainest conforming engine gives for a row of equal scores: rank after rank, rounded where a contract says.

use shardcheck_formats::codec::round;
use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;
use shardcheck_formats::single::round_bf16;

use super::tally::Tally;

/// Output of a row in the first `dims` dimensions, and its natural LSE: exact sums over each rank's tokens, divided in
/// binary32 and rounded to the partial's format, weighed by `e^(lse_r − lse)`, summed in rank order (ATOM `cp_lse_a2a`,
/// `cp_lse_ag_out_rs`). It closes the circle where there is no engine: decoding what this gives must name the tokens of
/// the tally.
pub fn plain_row(tally: &Tally, dims: usize, contract: &Contract) -> (Vec<f64>, f64) {
    let counts: Vec<f32> = tally.counts().iter().map(|count| *count as f32).collect();
    let lse: Vec<f32> = counts.iter().map(|count| count.ln()).collect();
    let largest = lse.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if largest == f32::NEG_INFINITY {
        return (vec![0.0; dims], f64::NEG_INFINITY);
    }
    let total = largest + lse.iter().map(|lse| (lse - largest).exp()).sum::<f32>().ln();
    let weights: Vec<f32> = lse.iter().map(|lse| (lse - total).exp()).collect();
    let world = counts.len();
    let out = (0..dims).map(|dim| {
        if world == 1 {
            return rounded(contract.output, tally.rank_sum(dim, 0) as f32 * (1.0 / counts[0]));
        }
        let mut sum = 0.0f32;
        for rank in (0..world).filter(|rank| counts[*rank] > 0.0) {
            let partial =
                rounded(contract.partial, tally.rank_sum(dim, rank) as f32 * (1.0 / counts[rank])) as f32;
            let in_format = |value: f32| match contract.merge.rounded_to() {
                Some(dtype) => rounded(dtype, value) as f32,
                None => value,
            };
            sum = in_format(sum + in_format(weights[rank] * partial));
        }
        rounded(contract.output, sum)
    });
    (out.collect(), f64::from(total))
}

fn rounded(dtype: Dtype, value: f32) -> f64 {
    match dtype {
        Dtype::Bf16 => f64::from(round_bf16(value)),
        Dtype::F32 => f64::from(value),
        other => round(other, f64::from(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::probe::{Code, Expectation, Rounding, Space};
    use shardcheck_formats::contract::Merge;

    #[test]
    fn a_plain_row_is_what_is_expected_at_every_length_and_world_size() {
        for (world, interleave) in [(1, 1), (2, 1), (3, 1), (5, 4), (8, 16)] {
            let layout = Layout::new(world, interleave, 16).unwrap();
            let code = Code::new(Space { layout, requests: 1, tokens: 3000, blocks: 0 }, &[]);
            for merge in Merge::ALL {
                let contract = Contract::bf16_default(merge);
                for tokens in (0..3000).step_by(7) {
                    let tally = Tally::prefix(&code, 0, tokens);
                    let expected = Expectation::of(&tally, code.dims(), &Rounding::of(&contract));
                    let (out, lse) = plain_row(&tally, code.dims(), &contract);
                    for (dim, (element, seen)) in expected.elements.iter().zip(&out).enumerate() {
                        assert!(element.admits(*seen), "W={world} n={tokens} dim {dim}: {element:?} {seen}");
                    }
                    assert!(tokens == 0 || (lse - expected.lse).abs() <= expected.lse_bound);
                }
            }
        }
    }
}
