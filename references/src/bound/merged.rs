//! The bound of a merge alone: partial outputs and LSEs are given and exact.

use super::accumulation::{Contribution, HalfUlp, merge_arithmetic};
use super::certified::Certified;
use super::weights::merge_weight_error;
use super::{Terms, U32};
use crate::bound::TINY32;
use crate::merge::{Partial, merge};
use crate::moments::Underivable;
use shardcheck_formats::contract::Contract;

/// Partials as an engine is given them.
#[derive(Debug, Clone, Copy)]
pub struct MergeInputs<'a> {
    /// Query rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Length of an output vector.
    pub v_dim: usize,
    /// `[parts, rows, heads, v_dim]`.
    pub out: &'a [f64],
    /// `[parts, rows, heads]`: natural LSEs. What stands beside −inf in `out` is ignored.
    pub lse: &'a [f64],
}

impl MergeInputs<'_> {
    fn partials(&self) -> Vec<Partial> {
        let states = self.rows * self.heads;
        assert!(states > 0 && self.v_dim > 0, "rows, heads and v_dim are at least 1");
        assert!(self.lse.len().is_multiple_of(states), "lse is not [parts, {}, {}]", self.rows, self.heads);
        assert_eq!(self.out.len(), self.lse.len() * self.v_dim, "out is not [parts, rows, heads, v_dim]");
        self.lse
            .chunks_exact(states)
            .zip(self.out.chunks_exact(states * self.v_dim))
            .map(|(lse, out)| Partial { out: out.to_vec(), lse: lse.to_vec() })
            .collect()
    }
}

/// The bound of merging given partials: errors of the merge weights (E1 with `w = expm1(η)`), the merge's own
/// arithmetic (E5), and nothing before it. With two parts and [`Merge::A2a`] this is the two-state merge of
/// prefix and suffix (`merge_attn_states`): binary32 inside, one rounding at the end.
///
/// [`Merge::A2a`]: shardcheck_formats::contract::Merge::A2a
///
/// # Errors
/// [`Underivable`]: a contributing partial is NaN or infinite, an LSE is NaN or +inf, the weights may be wrong
/// by a factor of 2, or a sum in 16 bits may leave their range.
///
/// # Panics
/// The shapes do not fit.
pub fn certify_merge(
    inputs: &MergeInputs,
    contract: &Contract,
    keep_terms: bool,
) -> Result<Certified, Underivable> {
    let partials = inputs.partials();
    let exact = merge(&partials);
    let mut certified = Certified {
        rows: inputs.rows,
        heads: inputs.heads,
        v_dim: inputs.v_dim,
        world: partials.len(),
        out: exact.out,
        lse: exact.lse,
        pre: Vec::new(),
        lse_bound: Vec::new(),
        practical_lse_bound: Vec::new(),
        partials: Vec::new(),
        terms: keep_terms.then(Vec::new),
    };
    for state in 0..certified.lse.len() {
        let (row, head) = (state / inputs.heads, state % inputs.heads);
        let held: Vec<&Partial> =
            partials.iter().filter(|partial| partial.lse[state] != f64::NEG_INFINITY).collect();
        let range = state * inputs.v_dim..(state + 1) * inputs.v_dim;
        let finite = |partial: &&Partial| {
            partial.lse[state].is_finite() && partial.out[range.clone()].iter().all(|out| out.is_finite())
        };
        if !held.iter().all(finite) {
            return Err(Underivable::NonFinite { row, head });
        }
        let total = certified.lse[state];
        let largest = held.iter().map(|partial| partial.lse[state].abs()).fold(total.abs(), f64::max);
        let largest = if largest.is_finite() { largest } else { 0.0 };
        let eta = merge_weight_error(contract, partials.len(), largest);
        let mean = eta.exp_m1();
        if mean >= 1.0 {
            return Err(Underivable::WeightError { row, head, weight_error: mean });
        }
        let mut terms = Terms::default();
        for index in range {
            let shares: Vec<Contribution> = held
                .iter()
                .map(|partial| Contribution {
                    weight: (partial.lse[state] - total).exp(),
                    out: partial.out[index],
                    pre: 0.0,
                })
                .collect();
            let out = certified.out[index];
            push_terms(&mut terms, contract, &shares, partials.len(), out, eta);
        }
        let pre = (0..inputs.v_dim).map(|d| terms.score[d] + terms.merge[d] + terms.rest[d]);
        certified.pre.extend(pre);
        if certified.pre.iter().rev().take(inputs.v_dim).any(|bound| !bound.is_finite()) {
            return Err(Underivable::Overflow { row, head });
        }
        certified.lse_bound.push(if held.is_empty() { 0.0 } else { eta + 4.0 * U32 * total.abs() });
        certified.practical_lse_bound.push(None);
        if let Some(kept) = &mut certified.terms {
            kept.push(terms);
        }
    }
    Ok(certified)
}

fn push_terms(
    terms: &mut Terms,
    contract: &Contract,
    shares: &[Contribution],
    parts: usize,
    out: f64,
    eta: f64,
) {
    let mean = eta.exp_m1();
    let magnitude: f64 = shares.iter().map(|share| share.weight * share.out.abs()).sum();
    let score =
        shares.iter().map(|share| share.weight * mean * (share.out - out).abs()).sum::<f64>() / (1.0 - mean);
    // a part without tokens still passes through every sum, as an exact zero
    let mut all = shares.to_vec();
    all.resize(parts, Contribution { weight: 0.0, out: 0.0, pre: 0.0 });
    let merge = if parts > 1 {
        merge_arithmetic(contract, &all, HalfUlp::EXACT) + (out.abs() + score) * (2.0 * eta).exp_m1()
    } else {
        0.0
    };
    terms.score.push(score);
    terms.probability.push(0.0);
    terms.sum.push(0.0);
    terms.partial.push(0.0);
    terms.merge.push(merge);
    terms.rest.push(if shares.is_empty() { 0.0 } else { TINY32 * (1.0 + parts as f64) + 1e-13 * magnitude });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bound::interval;
    use shardcheck_formats::codec::round;
    use shardcheck_formats::contract::Merge;
    use shardcheck_formats::dtype::Dtype;

    fn inputs<'a>(out: &'a [f64], lse: &'a [f64]) -> MergeInputs<'a> {
        MergeInputs { rows: 1, heads: 1, v_dim: out.len() / lse.len(), out, lse }
    }

    #[test]
    fn an_exact_merge_in_f32_is_within_one_rounding() {
        let contract = Contract::bf16_default(Merge::A2a);
        let certified = certify_merge(&inputs(&[1.0, 3.0], &[0.0, 1.0]), &contract, true).unwrap();
        approx::assert_abs_diff_eq!(certified.out[0], 2.462_117_157_260_009, epsilon = 1e-12);
        assert!(certified.pre[0] > 1e-7 && certified.pre[0] < 1e-4, "{}", certified.pre[0]);
        let (lo, hi) = interval(certified.out[0], certified.pre[0], Dtype::Bf16);
        assert_eq!((lo, hi), (round(Dtype::Bf16, certified.out[0]), lo));
    }

    #[test]
    fn a_merge_in_bf16_is_allowed_more_than_one_in_f32() {
        let (out, lse) = ([1.0, 3.0, -2.0], [0.0, 1.0, 0.5]);
        let pre =
            |merge| certify_merge(&inputs(&out, &lse), &Contract::bf16_default(merge), false).unwrap().pre[0];
        assert!(pre(Merge::AgRsBf16) > 100.0 * pre(Merge::AgRsF32));
        assert_eq!(pre(Merge::AgRsF32), pre(Merge::A2a));
    }

    #[test]
    fn nan_beside_minus_infinity_is_ignored_and_beside_a_finite_lse_inconclusive() {
        let contract = Contract::bf16_default(Merge::A2a);
        let empty = [1.0, f64::NAN];
        let ignored = certify_merge(&inputs(&empty, &[0.0, f64::NEG_INFINITY]), &contract, false).unwrap();
        assert_eq!(ignored.out[0], 1.0);
        let error = certify_merge(&inputs(&empty, &[0.0, 0.0]), &contract, false).unwrap_err();
        assert_eq!(error, Underivable::NonFinite { row: 0, head: 0 });
    }

    #[test]
    fn nan_of_an_empty_part_is_ignored_in_the_states_behind_it_too() {
        let (nan, contract) = (f64::NAN, Contract::bf16_default(Merge::A2a));
        let (out, lse) = ([1.0, 1.0, 2.0, 2.0, nan, nan, 4.0, 4.0], [0.0, 0.0, f64::NEG_INFINITY, 0.0]);
        let two_rows = MergeInputs { rows: 2, heads: 1, v_dim: 2, out: &out, lse: &lse };
        assert_eq!(certify_merge(&two_rows, &contract, false).unwrap().out, [1.0, 1.0, 3.0, 3.0]);
    }

    #[test]
    fn all_parts_empty_is_exactly_zero_and_minus_infinity() {
        let contract = Contract::bf16_default(Merge::AgRsBf16);
        let both = [f64::NEG_INFINITY; 2];
        let certified = certify_merge(&inputs(&[f64::NAN; 2], &both), &contract, false).unwrap();
        assert_eq!(
            (certified.out[0], certified.lse[0], certified.lse_bound[0]),
            (0.0, f64::NEG_INFINITY, 0.0)
        );
        assert_eq!(certified.pre[0], 0.0);
    }
}
