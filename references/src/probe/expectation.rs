//! What a row of equal scores may come out as: its sums, divided and rounded as the contract says.

use shardcheck_formats::contract::Contract;

use super::tally::Tally;
use crate::bound::accumulation::{Contribution, HalfUlp, merge_arithmetic, partial_rounding};
use crate::bound::weights::merge_weight_error;
use crate::bound::{TINY32, U32, gamma, interval};

/// A contract made ready for rows of equal scores, whose probabilities are exactly 1.
#[derive(Debug, Clone, Copy)]
pub struct Rounding<'a> {
    contract: &'a Contract,
    half_ulp: HalfUlp,
    unit: f64,
    largest_score: f64,
}

impl<'a> Rounding<'a> {
    /// For values of −1, 0 and 1.
    pub fn of(contract: &'a Contract) -> Self {
        let half_ulp = HalfUlp::of(contract.partial);
        Self { contract, half_ulp, unit: 1.0, largest_score: 0.0 }
    }

    /// For values that are multiples of `unit`. Sums of fewer than 2^24 of them are exact where it is a power of two, and
    /// round as the contract says where it is not.
    #[must_use]
    pub fn with_unit(mut self, unit: f64) -> Self {
        self.unit = unit;
        self
    }

    fn has_exact_sums(&self) -> bool {
        // no fraction bit is set
        self.unit.to_bits() << 12 == 0
    }

    /// For rows whose equal scores are up to `score` in magnitude instead of zero.
    #[must_use]
    pub fn with_scores_up_to(mut self, score: f64) -> Self {
        self.largest_score = score;
        self
    }

    /// The contract.
    pub fn contract(&self) -> &Contract {
        self.contract
    }

    /// What one element may come out as, in units, from the tokens and the sum of each rank.
    ///
    /// The terms are those of the certified bound, for probabilities of exactly 1 and scores that are equal, so that only
    /// the division, the partials' rounding, the merge weights and the merge remain (E3 to E5 and the last rounding).
    pub fn element(&self, counts: &[i64], sum: impl Fn(usize) -> i64, lse: f64) -> Element {
        let total: i64 = counts.iter().sum();
        if total <= 0 {
            return Element { exact: 0.0, low: 0.0, high: 0.0 };
        }
        let (contract, world) = (self.contract, counts.len());
        let exact = (0..world).map(&sum).sum::<i64>() as f64 * self.unit / total as f64;
        let mut parts = Vec::with_capacity(world);
        for (rank, count) in counts.iter().enumerate() {
            parts.push(self.contribution(*count, sum(rank), total));
        }
        let eta = merge_weight_error(contract, world, lse.abs().max(self.largest_score));
        let mean = eta.exp_m1();
        let moved: f64 = parts.iter().map(|part| part.weight * (part.out - exact).abs()).sum();
        let own: f64 = parts.iter().map(|part| part.weight * part.pre).sum();
        let weights = mean * moved / (1.0 - mean);
        let mut pre = own + weights + TINY32 * (1.0 + world as f64) + 1e-15 * exact.abs();
        if world > 1 {
            pre += partial_rounding(&parts, self.half_ulp)
                + merge_arithmetic(contract, &parts, self.half_ulp)
                + (exact.abs() + pre) * (2.0 * eta).exp_m1();
        }
        let (low, high) = interval(exact, pre, contract.output);
        Element { exact: exact / self.unit, low: low / self.unit, high: high / self.unit }
    }

    fn contribution(&self, count: i64, sum: i64, total: i64) -> Contribution {
        if count <= 0 {
            return Contribution { weight: 0.0, out: 0.0, pre: 0.0 };
        }
        let out = sum as f64 * self.unit / count as f64;
        let mut relative = 3.0 * U32;
        if !self.contract.exact_max {
            // a lazily updated maximum leaves a common probability other than 1
            relative += self.contract.u_p();
        }
        let mut pre = relative * out.abs();
        if !self.has_exact_sums() {
            let depth = self.contract.depth_for(count as usize);
            pre += self.unit * (gamma(depth, self.contract.u_acc) + gamma(depth, U32));
        }
        Contribution { weight: count as f64 / total as f64, out, pre }
    }

    /// How far the natural LSE of a row of `tokens` equal scores of `score` may be from `score + ln tokens`: its sum is
    /// exact, so that a logarithm, the merge and a rounding to f32 each are left.
    pub fn lse_bound(&self, tokens: i64, score: f64) -> f64 {
        let lse = score.abs() + (tokens.max(1) as f64).ln();
        16.0 * U32 * (1.0 + lse + self.largest_score) + self.contract.lse_rel * lse
    }
}

/// What one element may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Element {
    /// Exact value.
    pub exact: f64,
    /// Smallest value that a conforming engine gives.
    pub low: f64,
    /// Largest value that a conforming engine gives.
    pub high: f64,
}

impl Element {
    /// Whether a value is allowed; NaN never is.
    pub fn admits(&self, seen: f64) -> bool {
        self.low <= seen && seen <= self.high
    }

    /// The largest deviation that is allowed, in units of one token of `tokens`. A row whose spelling dimensions stay below
    /// one half spells what it lost; one that does not can only notice.
    pub fn tolerance(&self, tokens: i64) -> f64 {
        (self.high - self.exact).max(self.exact - self.low) * tokens as f64
    }
}

/// Every element of a row and its LSE.
#[derive(Debug, Clone, PartialEq)]
pub struct Expectation {
    /// `[dims]`.
    pub elements: Vec<Element>,
    /// Natural LSE; −inf without a token.
    pub lse: f64,
    /// How far it may be off.
    pub lse_bound: f64,
    /// Tokens of the row.
    pub tokens: i64,
}

impl Expectation {
    /// Of a row whose tokens have this tally, in the first `dims` dimensions.
    pub fn of(tally: &Tally, dims: usize, rounding: &Rounding) -> Self {
        let tokens = tally.tokens();
        let lse = if tokens > 0 { (tokens as f64).ln() } else { f64::NEG_INFINITY };
        let elements = (0..dims)
            .map(|dim| rounding.element(tally.counts(), |rank| tally.rank_sum(dim, rank), lse.max(0.0)))
            .collect();
        Self { elements, lse, lse_bound: rounding.lse_bound(tokens, 0.0), tokens }
    }

    /// The largest [`Element::tolerance`] over some dimensions.
    pub fn tolerance(&self, dims: std::ops::Range<usize>) -> f64 {
        self.elements[dims].iter().map(|element| element.tolerance(self.tokens)).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::probe::attribution::Sight;
    use crate::probe::code::{Code, Space};
    use shardcheck_formats::contract::Merge;

    fn tolerance(world: usize, interleave: usize, block: usize, tokens: usize, merge: Merge) -> f64 {
        let layout = Layout::new(world, interleave, block).unwrap();
        let code = Code::new(Space { layout, requests: 1, tokens, blocks: 0 }, &[]);
        let contract = Contract::bf16_default(merge);
        let tally = Tally::prefix(&code, 0, tokens);
        let expectation = Expectation::of(&tally, code.dims(), &Rounding::of(&contract));
        expectation.tolerance(code.spelling())
    }

    /// What merging the parts of a tally in f32 gives, LSEs rounded to f32.
    fn merged(tally: &Tally, dim: usize) -> f64 {
        let lses: Vec<f32> = tally.counts().iter().map(|count| (*count as f32).ln()).collect();
        let most = lses.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = most + lses.iter().map(|lse| (lse - most).exp()).sum::<f32>().ln();
        let part = |(rank, lse): (usize, &f32)| match tally.counts()[rank] {
            0 => 0.0,
            count => (lse - total).exp() * (tally.rank_sum(dim, rank) as f32 / count as f32),
        };
        f64::from(lses.iter().enumerate().map(part).sum::<f32>())
    }

    #[test]
    fn new_tokens_beside_the_ranks_are_merged_within_their_tolerance_and_outside_that_of_the_ranks_alone() {
        let layout = Layout::new(2, 1, 4).unwrap();
        let code = Code::new(Space { layout, requests: 1, tokens: 64, blocks: 0 }, &[]);
        let contract = Contract {
            partial: shardcheck_formats::Dtype::F32,
            output: shardcheck_formats::Dtype::F32,
            ..Contract::bf16_default(Merge::AgRsF32)
        };
        let mut false_alarms = 0;
        for (history, visible) in (0..60).flat_map(|history| (1..4).map(move |new| (history, history + new)))
        {
            let beside = Sight { beside_from: Some(history), ..Sight::of(0, 0, visible) };
            let seen = Tally::seen(&code, beside);
            let expected = Expectation::of(&seen, code.dims(), &Rounding::of(&contract));
            let ranks =
                Expectation::of(&Tally::prefix(&code, 0, visible), code.dims(), &Rounding::of(&contract));
            for dim in 0..code.dims() {
                let out = merged(&seen, dim);
                assert!(
                    expected.elements[dim].admits(out),
                    "{history}+{} dim {dim}: {out}",
                    visible - history
                );
                assert!(expected.elements[dim].tolerance(visible as i64) < 1e-3);
                false_alarms += usize::from(!ranks.elements[dim].admits(out));
            }
        }
        assert!(false_alarms > 0, "sums that cancel on each rank and not in the new tokens alone");
    }

    #[test]
    fn a_tolerance_is_the_largest_deviation_in_tokens() {
        let element = |exact: f64, low: f64, high: f64| Element { exact, low, high };
        let elements = vec![element(0.5, 0.25, 0.625), element(0.0, -0.125, 0.5), element(9.0, 0.0, 9.0)];
        let row = Expectation { elements, lse: 8f64.ln(), lse_bound: 0.0, tokens: 8 };
        assert_eq!((row.elements[0].tolerance(8), row.elements[1].tolerance(8)), (2.0, 4.0));
        assert_eq!((row.tolerance(0..2), row.tolerance(0..1), row.tolerance(0..3)), (4.0, 2.0, 72.0));
    }

    #[test]
    fn an_lse_is_off_by_its_roundings_and_by_what_the_contract_allows_of_it() {
        let contract = Contract { lse_rel: 2f64.powi(-10), ..Contract::bf16_default(Merge::A2a) };
        let rounding = Rounding { largest_score: 5.0, ..Rounding::of(&contract) };
        for (tokens, score, lse) in [(0, 0.0, 0.0), (1, -2.0, 2.0), (1000, 3.0, 3.0 + 1000f64.ln())] {
            let wanted = 2f64.powi(-20) * (1.0 + lse + 5.0) + 2f64.powi(-10) * lse;
            let seen = rounding.lse_bound(tokens, score);
            assert!((seen - wanted).abs() < 1e-12, "{tokens} {score}: {seen} {wanted}");
        }
    }

    #[test]
    fn a_million_tokens_leave_room_to_spell_on_both_backends() {
        for (interleave, tokens) in [(1, 1 << 20), (16, 1 << 20), (1, 1_000_003), (16, 1_000_003)] {
            for merge in Merge::ALL {
                let tolerance = tolerance(8, interleave, 16, tokens, merge);
                assert!(tolerance < 0.5, "S={interleave} n={tokens} {merge}: {tolerance}");
            }
        }
    }

    #[test]
    fn world_sizes_that_are_no_power_of_two_spell_at_a_hundred_thousand_tokens() {
        for world in [3, 5, 6, 7] {
            for merge in Merge::ALL {
                let tolerance = tolerance(world, 1, 16, 100_003, merge);
                assert!(tolerance < 0.5, "W={world} {merge}: {tolerance}");
            }
        }
    }

    #[test]
    fn a_row_without_tokens_is_exactly_zero() {
        let layout = Layout::new(2, 1, 4).unwrap();
        let code = Code::new(Space { layout, requests: 1, tokens: 9, blocks: 0 }, &[]);
        let contract = Contract::bf16_default(Merge::A2a);
        let nothing = Expectation::of(&Tally::nothing(&code), code.dims(), &Rounding::of(&contract));
        assert_eq!(nothing.lse, f64::NEG_INFINITY);
        assert!(nothing.elements.iter().all(|element| (element.low, element.high) == (0.0, 0.0)));
    }

    #[test]
    fn the_constant_dimension_must_be_one() {
        let layout = Layout::new(6, 1, 16).unwrap();
        let code = Code::new(Space { layout, requests: 1, tokens: 997, blocks: 0 }, &[]);
        let contract = Contract::bf16_default(Merge::A2a);
        let expectation =
            Expectation::of(&Tally::prefix(&code, 0, 997), code.dims(), &Rounding::of(&contract));
        let one = expectation.elements[0];
        assert_eq!(one.exact, 1.0);
        assert!(one.admits(1.0) && !one.admits(0.98) && !one.admits(1.02) && !one.admits(f64::NAN));
    }

    #[test]
    fn a_unit_that_is_no_power_of_two_is_allowed_more_and_one_that_is_just_the_same() {
        let contract = Contract::bf16_default(Merge::A2a);
        let of =
            |unit: f64, sum: i64| Rounding::of(&contract).with_unit(unit).element(&[500, 500], |_| sum, 6.9);
        assert!(of(0.02, 0).high > of(1.0, 0).high);
        assert_eq!(of(0.25, 3), of(1.0, 3));
    }

    #[test]
    fn an_interval_ends_on_numbers_of_the_format_that_the_unit_leads_to() {
        let contract = Contract::bf16_default(Merge::A2a);
        let unit = 0.03;
        let element = Rounding::of(&contract).with_unit(unit).element(&[3, 4], |_| 1, 1.9);
        for end in [element.low, element.high] {
            let output = end * unit;
            let rounded = shardcheck_formats::codec::round(contract.output, output);
            assert!((output - rounded).abs() <= 1e-15, "{output}");
        }
        assert!(element.tolerance(7) > 0.0 && element.tolerance(7) < 0.1);
    }
}
