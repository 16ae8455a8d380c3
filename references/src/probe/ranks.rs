//! Weights of ranks: values that differ by rank alone, so that an error of a rank's LSE shows.
//!
//! P4 gives ranks equal shares and values of +1 on one rank and −1 on another: the output is zero, and an error δ of
//! either LSE shows as δ/W. A merge in bf16 hides errors below half a step of the weight there, so P5 gives unequal
//! shares and values `1 + k/128` on one rank: a weight that is off by δ moves a share of the products over a rounding
//! edge.

use shardcheck_formats::codec::round;
use shardcheck_formats::contract::Contract;

use super::expectation::Element;
use crate::bound::weights::merge_weight_error;
use crate::bound::{TINY32, U32, gamma};

/// The common share of ranks that see something: the smallest of their lengths, 0 where none does.
pub fn equal_share(lens: &[usize]) -> usize {
    lens.iter().copied().filter(|len| *len > 0).min().unwrap_or(0)
}

/// Unequal shares: rank `r` of `W` takes part with about `(r + 1)/W` of its tokens, at least one where it has any.
pub fn unequal_shares(lens: &[usize]) -> Vec<usize> {
    let world = lens.len();
    lens.iter().enumerate().map(|(rank, len)| (len * (rank + 1)).div_ceil(world).min(*len)).collect()
}

/// Pairs of neighbours among ranks that see something, each with the next one.
pub fn pairs(lens: &[usize]) -> Vec<(usize, usize)> {
    let held: Vec<usize> = (0..lens.len()).filter(|rank| lens[*rank] > 0).collect();
    held.windows(2).map(|pair| (pair[0], pair[1])).collect()
}

/// Dither values `1 + k/128`, `count` of them, spread over all `k` and shifted by `launch`, restricted to what a cache
/// format of `mantissa_bits` fraction bits holds exactly.
pub fn dither(count: usize, launch: usize, mantissa_bits: u32) -> Vec<f64> {
    let bits = mantissa_bits.min(7);
    let steps = 1usize << bits;
    // an odd stride visits every step before it repeats one
    let stride = (steps / 3) | 1;
    (0..count).map(|index| 1.0 + ((index + launch * count) * stride % steps) as f64 / steps as f64).collect()
}

/// What a row may come out as when rank `r` counts `counts[r]` tokens of equal score and equal value `values[r]`.
///
/// Every rounding of the contract is applied to the two ends of an interval, which is exact since rounding is monotone;
/// only the merge weights (η of the certified bound) and sums in binary32 are bounded. With at most two values that are
/// not zero, no order of summation is left.
///
/// # Panics
/// More than two values are not zero, or the lengths differ.
pub fn weighed(contract: &Contract, counts: &[i64], values: &[f64]) -> Element {
    assert_eq!(counts.len(), values.len(), "one value a rank");
    let used: Vec<usize> =
        (0..values.len()).filter(|rank| values[*rank] != 0.0 && counts[*rank] > 0).collect();
    assert!(used.len() <= 2, "the order of summation counts from three values on");
    let total: i64 = counts.iter().sum();
    if total == 0 || used.is_empty() {
        return Element { exact: 0.0, low: 0.0, high: 0.0 };
    }
    let world = counts.len();
    let eta = merge_weight_error(contract, world, (total as f64).ln());
    let weight_error = (2.0 * eta).exp_m1();
    let (mut exact, mut low, mut high) = (0.0, 0.0, 0.0);
    for rank in used.iter().copied() {
        let (weight, value) = (counts[rank] as f64 / total as f64, values[rank]);
        exact += weight * value;
        let own = own_error(contract, counts[rank] as usize);
        let (mut ends, slack) = ([value * (1.0 - own), value * (1.0 + own)], weight_error + 2.0 * U32);
        if world > 1 {
            ends = ends.map(|end| round(contract.partial, end));
            ends = [ends[0] * weight * (1.0 - slack), ends[1] * weight * (1.0 + slack)];
            if let Some(dtype) = contract.merge.rounded_to() {
                ends = ends.map(|end| round(dtype, end));
            }
        }
        low += ends[0].min(ends[1]);
        high += ends[0].max(ends[1]);
    }
    if world > 1 {
        let size: f64 = low.abs().max(high.abs());
        let sums = match contract.merge.rounded_to() {
            Some(_) => 0.0,
            None => (world + 4) as f64 * U32 * size,
        };
        (low, high) = (low - sums - TINY32 * sums.signum(), high + sums + TINY32 * sums.signum());
        if let Some(dtype) = contract.merge.rounded_to() {
            (low, high) = (round(dtype, low), round(dtype, high));
        }
    }
    Element { exact, low: round(contract.output, low), high: round(contract.output, high) }
}

/// Relative error of the mean of `count` equal values: their sum, the division, and a probability that is not 1 under a
/// lazily updated maximum.
fn own_error(contract: &Contract, count: usize) -> f64 {
    let depth = contract.depth_for(count);
    let lazy = if contract.exact_max { 0.0 } else { contract.u_p() };
    3.0 * U32 + gamma(depth, contract.u_acc) + gamma(depth, U32) + lazy
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::contract::Merge;
    use shardcheck_formats::dtype::Dtype;

    fn contract(merge: Merge) -> Contract {
        Contract::bf16_default(merge)
    }

    #[test]
    fn shares_are_equal_or_all_different() {
        assert_eq!(equal_share(&[5, 0, 3, 4]), 3);
        assert_eq!(equal_share(&[0, 0]), 0);
        assert_eq!(unequal_shares(&[16, 16, 16, 16]), [4, 8, 12, 16]);
        assert_eq!(unequal_shares(&[1, 1, 0]), [1, 1, 0]);
        assert_eq!(pairs(&[2, 0, 1, 4]), [(0, 2), (2, 3)]);
    }

    #[test]
    fn dither_values_are_held_exactly_and_differ() {
        let values = dither(128, 0, 7);
        let mut distinct = values.clone();
        distinct.sort_by(f64::total_cmp);
        distinct.dedup();
        assert_eq!(distinct.len(), 128);
        assert!(values.iter().all(|value| round(Dtype::Bf16, *value) == *value));
        for value in dither(20, 3, 3) {
            assert_eq!(round(Dtype::E4m3fn, value), value);
        }
        for value in dither(20, 3, 2) {
            assert_eq!(round(Dtype::E5m2, value), value);
        }
    }

    #[test]
    fn opposite_values_of_equal_shares_cancel_to_zero_on_every_backend() {
        for merge in Merge::ALL {
            let zero = weighed(&contract(merge), &[7, 7, 7, 7, 7, 7], &[0.0, 1.0, -1.0, 0.0, 0.0, 0.0]);
            assert_eq!(zero.exact, 0.0);
            assert!(zero.admits(0.0) && !zero.admits(1e-3), "{merge} {zero:?}");
        }
    }

    #[test]
    fn an_lse_that_is_off_by_a_thousandth_moves_some_dither_values_out() {
        let counts = [4i64, 8, 12, 16, 20, 24, 28, 32];
        for merge in [Merge::A2a, Merge::AgRsBf16] {
            let contract = contract(merge);
            let (mut out, mut ambiguous) = (0, 0);
            for rank in 0..counts.len() {
                for value in dither(128, 0, 7) {
                    let mut values = [0.0; 8];
                    values[rank] = value;
                    let allowed = weighed(&contract, &counts, &values);
                    ambiguous += usize::from(allowed.low != allowed.high);
                    let total: f64 = counts.iter().sum::<i64>() as f64;
                    let raised = counts[rank] as f64 * 1e-3f64.exp();
                    let weight = raised / (total - counts[rank] as f64 + raised);
                    let healthy = round(Dtype::Bf16, value * counts[rank] as f64 / total);
                    assert!(allowed.admits(healthy));
                    out += usize::from(!allowed.admits(round(Dtype::Bf16, value * weight)));
                }
            }
            assert!(out >= 22, "{merge}: {out} of 1024");
            assert!(ambiguous < 64, "{merge}: {ambiguous} of 1024");
        }
    }

    #[test]
    fn a_stride_visits_every_step_before_it_repeats_one() {
        for bits in 0..=7 {
            let mut values = dither(1 << bits, 1, bits);
            values.sort_by(f64::total_cmp);
            let steps: Vec<f64> = (0..1 << bits).map(|k| 1.0 + f64::from(k) / f64::from(1 << bits)).collect();
            assert_eq!(values, steps, "{bits} bits");
        }
    }

    #[test]
    fn one_rank_may_be_off_by_its_sums_its_division_and_a_lazy_maximum() {
        for (exact_max, lazy) in [(true, 0.0), (false, 2f64.powi(-8))] {
            let contract = Contract { output: Dtype::F32, exact_max, ..contract(Merge::A2a) };
            let gamma = |unit: f64| 78.0 * unit / (1.0 - 78.0 * unit);
            let own = 3.0 * U32 + gamma(contract.u_acc) + gamma(U32) + lazy;
            // 1000 tokens in tiles of 16, and 16 additions more: 78
            let element = weighed(&contract, &[1000], &[1.5]);
            assert_eq!(element.exact, 1.5);
            approx::assert_relative_eq!(element.low, 1.5 * (1.0 - own), max_relative = 1e-7);
            approx::assert_relative_eq!(element.high, 1.5 * (1.0 + own), max_relative = 1e-7);
        }
    }

    #[test]
    fn two_ranks_are_weighed_by_their_tokens() {
        for merge in Merge::ALL {
            let element = weighed(&contract(merge), &[3, 0, 5], &[2.0, 0.0, -1.0]);
            assert_eq!(element.exact, 0.125);
            assert!(
                element.low <= 0.125 && 0.125 <= element.high && element.high - element.low < 0.02,
                "{element:?}"
            );
        }
        let nothing = weighed(&contract(Merge::A2a), &[3, 5], &[0.0, 0.0]);
        assert_eq!((nothing.low, nothing.high), (0.0, 0.0), "tokens of value 0 give exactly 0");
    }

    #[test]
    fn nothing_that_counts_is_exactly_zero() {
        let nothing = weighed(&contract(Merge::A2a), &[0, 0], &[1.0, 0.0]);
        assert_eq!((nothing.low, nothing.high), (0.0, 0.0));
    }
}
