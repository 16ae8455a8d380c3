//! Rounding in the merge of partial outputs: E4, E5 and what a reduce-scatter adds.

use super::U32;
use shardcheck_formats::codec;
use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;

/// [`codec::half_ulp`] of one format, prepared: the bound asks for it several times an element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HalfUlp {
    unit_roundoff: f64,
    /// Half the spacing of subnormals.
    least: f64,
}

impl HalfUlp {
    /// Of numbers that are not rounded.
    pub(crate) const EXACT: Self = Self { unit_roundoff: 0.0, least: 0.0 };

    pub(crate) fn of(dtype: Dtype) -> Self {
        Self { unit_roundoff: dtype.unit_roundoff(), least: codec::half_ulp(dtype, f64::MIN_POSITIVE) }
    }

    /// Half the distance from `|x|` to the next larger value of the format; 0 at 0, infinite where `x` is not
    /// finite.
    #[inline]
    pub(crate) fn at(&self, x: f64) -> f64 {
        if x == 0.0 {
            return 0.0;
        }
        const EXPONENT: u64 = 0x7FF << 52;
        (f64::from_bits(x.to_bits() & EXPONENT) * self.unit_roundoff).max(self.least)
    }

    /// The largest magnitude that one of at most `magnitude` rounds to: `(1 + u)`, and half a step of the subnormals, which is
    /// all there is below the normal numbers: 2^−25 in f16, where sums of outputs do get, and 2^−134 in bf16, where none does.
    fn rounded_up(&self, magnitude: f64) -> f64 {
        magnitude * (1.0 + self.unit_roundoff) + self.least
    }
}

/// One part's contribution to an output element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Contribution {
    /// Merge weight `g`.
    pub weight: f64,
    /// Exact partial output `o_r`.
    pub out: f64,
    /// Bound on the partial's error before it is rounded, `preR`.
    pub pre: f64,
}

impl Contribution {
    /// Largest magnitude that the partial may have before it is rounded.
    fn magnitude(&self) -> f64 {
        self.out.abs() + self.pre
    }
}

/// E4: `Σ g·hulp(|o_r| + preR)`, partial outputs rounded to the format in which they travel.
pub(crate) fn partial_rounding(parts: &[Contribution], partial: HalfUlp) -> f64 {
    parts.iter().map(|part| part.weight * partial.at(part.magnitude())).sum()
}

/// `G = Σ g·((|o_r| + preR)(1 + u) + s)`: the sum of magnitudes that the merge adds up, `u` and `s` being the roundoff and
/// half the spacing of subnormals of the format in which the partials `arrive`.
pub(crate) fn merged_magnitude(parts: &[Contribution], arrive: HalfUlp) -> f64 {
    parts.iter().map(|part| part.weight * arrive.rounded_up(part.magnitude())).sum()
}

/// E5 without the common error of the weights: `(W + 4)u·G` for products and sums in binary32, and for a merge in 16
/// bits the rounding of every product and of every sum but the last, which is the final rounding. Infinite where a sum may
/// leave the range of those 16 bits.
pub(crate) fn merge_arithmetic(contract: &Contract, parts: &[Contribution], arrive: HalfUlp) -> f64 {
    let magnitude = merged_magnitude(parts, arrive);
    let in_f32 = (parts.len() + 4) as f64 * U32 * magnitude;
    match contract.merge.rounded_to() {
        None => in_f32,
        Some(dtype) => in_f32 + in_16_bits(dtype, contract, parts, magnitude),
    }
}

/// `Σ hulp(g(|o_r| + preR)(1 + u) + s) + Σ_{k=2}^{W−1} hulp(M_k + slack)`: each of the `W` products, and each of
/// the `W − 2` inner sums of any reduction tree. `M_k` is the largest magnitude of a sum of at most `k` of the
/// exact terms: their `k` largest or `k` smallest; the slack holds what rounding has moved before, by `u` of a normal number
/// and by `s`, half a step, of a subnormal one, once for each product and each sum. The last sum is the final rounding of the
/// output, and counts (`k = W`) only where the output's format is finer than that.
fn in_16_bits(dtype: Dtype, contract: &Contract, parts: &[Contribution], magnitude: f64) -> f64 {
    let (roundoff, half_ulp) = (dtype.unit_roundoff(), HalfUlp::of(dtype));
    let count = parts.len() as f64;
    let products: f64 =
        parts.iter().map(|part| half_ulp.at(part.weight * half_ulp.rounded_up(part.magnitude()))).sum();
    let moved: f64 =
        parts.iter().map(|part| part.weight * (part.pre + 2.0 * roundoff * part.out.abs())).sum();
    let steps = 2.0 * count * half_ulp.least;
    let slack = (1.0 + count * roundoff) * moved + count * roundoff * magnitude + steps;
    let mut terms: Vec<f64> = parts.iter().map(|part| part.weight * part.out).collect();
    terms.sort_unstable_by(f64::total_cmp);
    let (mut smallest, mut largest, mut reach, mut inner) = (0.0f64, 0.0f64, 0.0f64, 0.0);
    let last = if contract.output.unit_roundoff() < roundoff { parts.len() } else { parts.len() - 1 };
    for k in 1..=last {
        smallest += terms[k - 1];
        largest += terms[parts.len() - k];
        reach = reach.max(smallest.abs()).max(largest.abs());
        if k >= 2 {
            inner += half_ulp.at(reach + slack);
            if reach + slack > dtype.max_finite() {
                return f64::INFINITY;
            }
        }
    }
    products + inner
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::contract::Merge;

    fn part(weight: f64, out: f64) -> Contribution {
        Contribution { weight, out, pre: 0.0 }
    }

    #[test]
    fn a_prepared_half_ulp_is_the_format_s_own() {
        let mut random = shardcheck_formats::recipe::Counter::new(1, 0);
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let prepared = HalfUlp::of(dtype);
            for power in -160..130 {
                let x = random.gaussian() * 2f64.powi(power);
                assert_eq!(prepared.at(x), codec::half_ulp(dtype, x), "{dtype} at {x:e}");
            }
            assert_eq!((prepared.at(0.0), prepared.at(f64::INFINITY)), (0.0, f64::INFINITY));
        }
    }

    #[test]
    fn partials_in_f32_lose_less_than_partials_in_bf16() {
        let parts = [part(0.5, 1.0), part(0.5, -3.0)];
        assert_eq!(
            partial_rounding(&parts, HalfUlp::of(Dtype::Bf16)),
            0.5 * 2f64.powi(-8) + 0.5 * 2f64.powi(-7)
        );
        assert!(
            partial_rounding(&parts, HalfUlp::of(Dtype::F32))
                < partial_rounding(&parts, HalfUlp::of(Dtype::Bf16)) * 1e-4
        );
    }

    #[test]
    fn two_ranks_in_bf16_round_two_products_and_no_inner_sum() {
        let contract = Contract::bf16_default(Merge::AgRsBf16);
        let parts = [part(0.5, 1.0), part(0.5, 1.0)];
        let in_f32 = merge_arithmetic(&Contract::bf16_default(Merge::AgRsF32), &parts, HalfUlp::EXACT);
        let products = 2.0 * codec::half_ulp(Dtype::Bf16, 0.5 * (1.0 + 2f64.powi(-8)));
        assert_eq!(merge_arithmetic(&contract, &parts, HalfUlp::EXACT), in_f32 + products);
    }

    #[test]
    fn an_output_finer_than_bf16_shows_the_last_sum_too() {
        let coarse = Contract::bf16_default(Merge::AgRsBf16);
        let fine = Contract { output: Dtype::F32, ..coarse.clone() };
        let parts = [part(0.5, 1.0), part(0.5, 0.5)];
        let of = |contract| merge_arithmetic(contract, &parts, HalfUlp::EXACT);
        let more = of(&fine) - of(&coarse);
        assert_eq!(more, 2f64.powi(-9));
    }

    #[test]
    fn an_inner_sum_reaches_as_far_as_what_went_wrong_before_it() {
        let contract = Contract::bf16_default(Merge::AgRsBf16);
        let (roundoff, third) = (2f64.powi(-8), part(0.0, 0.0));
        // 1 is reached with the error of the products' own sum, and missed by as much without it
        let out = 1.0 / (1.0 + 2.0 * roundoff);
        let bound = in_16_bits(Dtype::Bf16, &contract, &[part(0.5, out), part(0.5, out), third], 0.0);
        assert_eq!(bound, 2.0 * 2f64.powi(-10) + 2f64.powi(-8));
        let of_magnitude = |magnitude| in_16_bits(Dtype::Bf16, &contract, &[third; 3], magnitude);
        assert_eq!(of_magnitude(1.001 / (3.0 * roundoff)), 2f64.powi(-8));
        assert_eq!(of_magnitude(0.999 / (3.0 * roundoff)), 2f64.powi(-9));
    }

    #[test]
    fn an_inner_sum_reaches_the_largest_terms_of_one_sign() {
        // terms 0.5, 0.5, -0.5: an inner sum of two reaches 1, not the total 0.5
        let parts = [part(0.5, 1.0), part(0.5, 1.0), part(0.5, -1.0)];
        let bound = in_16_bits(Dtype::Bf16, &Contract::bf16_default(Merge::AgRsBf16), &parts, 1.5);
        assert!(bound >= 3.0 * 2f64.powi(-9) + 2f64.powi(-8), "{bound}");
    }
}
