//! The probable bound: how far outputs of a conforming engine are likely to be off, and the standard deviation
//! that goes with it. For reports; a verdict needs the certified bound.
//!
//! Rounding errors of probabilities and of partial outputs are taken for independent with mean zero, which gives
//! √n in place of n (Hoeffding; Higham & Mary 2019, Ipsen & Zhou 2019). Where they are not — equal scores round
//! alike, and scores so close together that all probabilities fall into a few cells of their format round with a
//! bias — gates fall back on the certified bound. A known hole: a narrow cluster of scores beside one dominant
//! token passes the gates.

use crate::bound::accumulation::HalfUlp;
use crate::bound::output::probability_floor;
use crate::bound::{StateBound, U32, bound_state};
use crate::moments::{Moments, Part, State, Statistics, Underivable};
use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;

/// The chance of a violation in a whole problem that the bound is usually stated for.
pub const USUAL_CHANCE: f64 = 1e-6;
/// Share of distinct scores below which tokens of equal score are added up before they are squared.
pub(crate) const MIN_DISTINCT: f64 = 0.99;
/// Standard deviation of rounding a value `u·x` whose logarithm is uniform within a binade: `√(E[1/m²]/3)`.
pub(crate) const UNIFORM_CELL: f64 = 0.4247;

/// The probable errors of a problem's outputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Probable {
    /// `[rows, heads, v_dim]`: bound before the final rounding; never above the certified one.
    pub pre: Vec<f64>,
    /// `[rows, heads, v_dim]`: estimated standard deviation of the output, its final rounding included.
    pub sigma: Vec<f64>,
    /// `[rows, heads]`: whether the gates hold. Where they don't, `pre` is the certified bound, and `sigma` is
    /// not to be used.
    pub gates_hold: Vec<bool>,
}

/// The probable bound, broken in a problem with probability `chance` at most if its assumption holds.
///
/// ```text
/// min(certified, λ·√(Q2 + Σ(g·hulp(|o_r| + 2c_r))² + ag + h(u_acc·A1)²)
///                + E1 + (|o| + pre)·expm1(2η) + (W + 4)u·Σg|o_r|)
/// λ = √(2 ln(2N/chance)),  Q2 = Σ pe²·v²,  c_r = √(Σ_r pe²·v²),  ag: roundings of a bf16 merge, squared
/// ```
///
/// # Errors
/// [`Underivable`].
///
/// # Panics
/// The moments were not taken by [`Moments::collect_with`].
pub fn probable(moments: &Moments, contract: &Contract, chance: f64) -> Result<Probable, Underivable> {
    let elements = (moments.states.len() * moments.v_dim) as f64;
    let lambda = (2.0 * (2.0 * elements / chance).ln()).sqrt();
    let mut probable = Probable { pre: Vec::new(), sigma: Vec::new(), gates_hold: Vec::new() };
    for (index, state) in moments.states.iter().enumerate() {
        let certified = bound_state(moments, contract, index / moments.heads, index % moments.heads)?;
        let gates_hold = state.parts.iter().all(|part| gate_holds(contract, part));
        probable.gates_hold.push(gates_hold);
        for d in 0..moments.v_dim {
            let errors = Squares::of(contract, state, d);
            let bound = lambda * errors.total(1.0).sqrt() + errors.common(contract, state, &certified, d);
            probable.pre.push(if gates_hold { bound.min(certified.pre[d]) } else { certified.pre[d] });
            probable.sigma.push(errors.sigma(contract, state, &certified, d));
        }
    }
    Ok(probable)
}

/// The scores of a part spread over at least eight cells of the probabilities' format.
fn gate_holds(contract: &Contract, part: &Part) -> bool {
    part.tokens <= 1 || statistics(part).score_deviation >= 8.0 * contract.u_p()
}

fn statistics(part: &Part) -> &Statistics {
    part.statistics.as_ref().expect("moments that were taken by their definition")
}

/// Squared errors of one output element.
struct Squares {
    /// `Q2`: probabilities.
    probability: f64,
    /// Partial outputs.
    partial: f64,
    /// A merge in 16 bits.
    merge: f64,
    /// Sums over tokens.
    sum: f64,
}

impl Squares {
    fn of(contract: &Contract, state: &State, d: usize) -> Self {
        let half_ulp = HalfUlp::of(contract.partial);
        let merged = state.parts.len() > 1;
        let (mut probability, mut partial, mut abs) = (0.0, 0.0, 0.0);
        for part in state.parts.iter().filter(|part| part.tokens > 0) {
            let square = part_square(contract, part, state.out[d], d);
            probability += part.weight * part.weight * square;
            abs += part.weight * part.abs[d];
            if merged {
                partial += (part.weight * half_ulp.at(part.out[d].abs() + 2.0 * square.sqrt())).powi(2);
            }
        }
        let depth = contract.depth_for(state.tokens) as f64;
        let merge = match contract.merge.rounded_to() {
            Some(dtype) if merged => merge_square(dtype, contract, state, probability, d),
            _ => 0.0,
        };
        Self { probability, partial, merge, sum: depth * (contract.u_acc * abs).powi(2) }
    }

    fn total(&self, of_sums: f64) -> f64 {
        self.probability + self.partial + self.merge + of_sums * self.sum
    }

    /// Errors that don't average out: those of the weights, of the merge weights, and of a merge in f32.
    fn common(&self, contract: &Contract, state: &State, certified: &StateBound, d: usize) -> f64 {
        let merged: f64 = state.parts.iter().map(|part| part.weight * part.out[d].abs()).sum();
        let count = state.parts.len();
        let arithmetic = if count > 1 { (count + 4) as f64 * U32 * merged } else { 0.0 };
        let terms = &certified.terms;
        let pre = terms.score[d] + terms.probability[d] + terms.sum[d];
        // a sum that truncates has a bias, which no number of terms averages out
        let bias = if contract.u_acc > U32 { terms.sum[d] } else { 0.0 };
        let unnormalised = (state.out[d].abs() + pre) * (2.0 * certified.merge_weight_error).exp_m1();
        terms.score[d] + unnormalised + arithmetic + bias + terms.rest[d]
    }

    /// `σ² = Q2·0.4247² + Σ(g·hulp(o_r))²/3 + ag/3 + hulp(o)²/3 + 0.1·h(u_acc·A1)² + (0.05·E1)²`.
    fn sigma(&self, contract: &Contract, state: &State, certified: &StateBound, d: usize) -> f64 {
        let rounding = HalfUlp::of(contract.output).at(state.out[d]);
        let square = self.probability * UNIFORM_CELL * UNIFORM_CELL
            + (self.partial + self.merge + rounding * rounding) / 3.0
            + 0.1 * self.sum
            + (0.05 * certified.terms.score[d]).powi(2);
        square.sqrt()
    }
}

/// `Σ pe²·v²` of a part over its own softmax; with a rounded normaliser at least `Σ pe²(v − o)²`.
fn part_square(contract: &Contract, part: &Part, out: f64, d: usize) -> f64 {
    let statistics = statistics(part);
    let unit = contract.u_p();
    let classes = statistics.distinct < MIN_DISTINCT;
    let mut square = if classes { statistics.class_square[d] } else { statistics.square[d] };
    if contract.l_rounded {
        square = square.max((square.sqrt() + out.abs() * statistics.weight_square.sqrt()).powi(2));
    }
    if !contract.exact_max {
        square += (part.peak * part.peak_value[d]).powi(2);
    }
    let floor = probability_floor(contract) * part.peak;
    unit * unit * square + floor * floor * part.sum_abs[d] * part.sum_abs[d] / part.tokens.max(1) as f64
}

/// Roundings of a reduce-scatter in bf16, squared: of each product, and of each inner sum in the order of ranks.
fn merge_square(dtype: Dtype, contract: &Contract, state: &State, probability: f64, d: usize) -> f64 {
    let half_ulp = HalfUlp::of(dtype);
    let (mut square, mut sum, mut sum_square) = (0.0, 0.0f64, 0.0f64);
    for (index, part) in state.parts.iter().enumerate() {
        let term = part.weight * part.out[d];
        let own = if part.tokens > 0 { part_square(contract, part, state.out[d], d).sqrt() } else { 0.0 };
        square += half_ulp.at(term.abs() + 2.0 * part.weight * own).powi(2);
        sum += term;
        sum_square += term * term;
        if (1..state.parts.len() - 1).contains(&index) {
            let reach = sum.abs().max(sum_square.sqrt()) + 2.0 * probability.sqrt();
            square += half_ulp.at(reach).powi(2);
        }
    }
    square
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plain::{Platform, Problem, Values};
    use crate::layout::Layout;
    use crate::split::Split;
    use crate::visibility::Visible;
    use shardcheck_formats::contract::Merge;
    use shardcheck_formats::recipe::Counter;

    fn moments(tokens: usize, repeat: usize) -> Moments {
        let mut random = Counter::new(31, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
        let (query, value) = (draw(32), draw(tokens * 16));
        let keys = draw(tokens * 32);
        let key: Vec<f32> =
            (0..tokens).flat_map(|t| keys[t % repeat * 32..(t % repeat + 1) * 32].to_vec()).collect();
        let problem = Problem::new(1, 1, 32, 16, 32f64.powf(-0.5), &query, &key, Values::Separate(&value));
        let layout = Layout::new(4, 1, 1).unwrap();
        let visible = [Visible::Prefix(tokens)];
        Moments::collect_with::<Platform, f32>(&problem, Split::Ranks(&layout), &visible).unwrap()
    }

    fn contract(merge: Merge) -> Contract {
        Contract { u_acc: U32, ..Contract::bf16_default(merge) }
    }

    #[test]
    fn the_probable_bound_is_several_times_tighter_at_four_thousand_tokens() {
        let moments = moments(4096, 4096);
        let probable = probable(&moments, &contract(Merge::A2a), USUAL_CHANCE).unwrap();
        let certified = bound_state(&moments, &contract(Merge::A2a), 0, 0).unwrap();
        assert!(probable.gates_hold[0]);
        for (probable, certified) in probable.pre.iter().zip(&certified.pre) {
            assert!(*probable < certified / 2.5, "{probable} {certified}");
        }
    }

    #[test]
    fn repeated_keys_are_added_up_before_they_are_squared() {
        let (distinct, repeated) = (moments(512, 512), moments(512, 3));
        let of = |moments: &Moments| probable(moments, &contract(Merge::A2a), USUAL_CHANCE).unwrap().sigma;
        assert!(statistics(&repeated.states[0].parts[0]).distinct < 0.1);
        let (a, b): (f64, f64) = (of(&distinct).iter().sum(), of(&repeated).iter().sum());
        assert!(b > 2.0 * a, "{a} {b}");
    }

    #[test]
    fn scores_in_one_cell_fall_back_on_the_certified_bound() {
        let (query, value) = ([1e-5f32], [1f32, -1.0, 0.5]);
        let key = [0.1f32, 0.2, 0.3];
        let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        let (layout, visible) = (Layout::single(), [Visible::Prefix(3)]);
        let moments =
            Moments::collect_with::<Platform, f32>(&problem, Split::Ranks(&layout), &visible).unwrap();
        let probable = probable(&moments, &contract(Merge::A2a), USUAL_CHANCE).unwrap();
        assert_eq!(probable.gates_hold, [false]);
        assert_eq!(probable.pre, bound_state(&moments, &contract(Merge::A2a), 0, 0).unwrap().pre);
    }

    /// `Σ pe²·v²` of a part with tokens, as the documentation of [`probable`] says it.
    fn written_square(contract: &Contract, part: &Part, out: f64, d: usize) -> f64 {
        let statistics = part.statistics.as_ref().unwrap();
        let apart = statistics.distinct >= 0.99;
        let sums = if apart { statistics.square[d] } else { statistics.class_square[d] };
        let about = sums.sqrt() + out.abs() * statistics.weight_square.sqrt();
        let rounded = if contract.l_rounded { about.powi(2) } else { sums };
        let peak = if contract.exact_max { 0.0 } else { part.peak * part.peak_value[d] };
        let floor = contract.p_floor * part.peak * part.sum_abs[d];
        contract.u_p().powi(2) * (rounded + peak.powi(2)) + floor.powi(2) / part.tokens as f64
    }

    /// The bound and the deviation of one element.
    fn written(moments: &Moments, contract: &Contract, d: usize) -> (f64, f64) {
        let (state, hulp) = (&moments.states[0], |dtype, x| shardcheck_formats::codec::half_ulp(dtype, x));
        let certified = bound_state(moments, contract, 0, 0).unwrap();
        let held: Vec<&Part> = state.parts.iter().filter(|part| part.tokens > 0).collect();
        let (world, out) = (state.parts.len(), state.out[d]);
        let own = |part: &Part| written_square(contract, part, out, d);
        let probability: f64 = held.iter().map(|part| part.weight.powi(2) * own(part)).sum();
        let travels =
            |part: &&Part| part.weight * hulp(contract.partial, part.out[d].abs() + 2.0 * own(part).sqrt());
        let partial: f64 = held.iter().map(|part| travels(part).powi(2)).sum();
        let added = contract.merge.rounded_to().unwrap_or(Dtype::F32);
        let products = |part: &&Part| {
            hulp(added, (part.weight * part.out[d]).abs() + 2.0 * part.weight * own(part).sqrt())
        };
        let mut in_16: f64 = held.iter().map(|part| products(part).powi(2)).sum();
        for last in 1..world.saturating_sub(1) {
            let terms = || state.parts[..=last].iter().map(|part| part.weight * part.out[d]);
            let reach = terms().sum::<f64>().abs().max(terms().map(|term| term * term).sum::<f64>().sqrt());
            in_16 += hulp(added, reach + 2.0 * probability.sqrt()).powi(2);
        }
        let several = if world > 1 { 1.0 } else { 0.0 };
        let merge = contract.merge.rounded_to().map_or(0.0, |_| several * in_16);
        let abs: f64 = held.iter().map(|part| part.weight * part.abs[d]).sum();
        let sum = contract.depth_for(state.tokens) as f64 * (contract.u_acc * abs).powi(2);
        let squares = probability + several * partial + merge + sum;
        let terms = &certified.terms;
        let pre = terms.score[d] + terms.probability[d] + terms.sum[d];
        let weights = (2.0 * certified.merge_weight_error).exp_m1() * (out.abs() + pre);
        let magnitude: f64 = held.iter().map(|part| part.weight * part.out[d].abs()).sum();
        let arithmetic = several * (world as f64 + 4.0) * U32 * magnitude;
        let bias = if contract.u_acc > U32 { terms.sum[d] } else { 0.0 };
        let lambda = (2.0 * (2.0 * moments.v_dim as f64 / USUAL_CHANCE).ln()).sqrt();
        let bound = lambda * squares.sqrt() + terms.score[d] + weights + arithmetic + bias + terms.rest[d];
        let last = hulp(contract.output, out);
        let variance = probability * UNIFORM_CELL.powi(2)
            + (several * partial + merge + last * last) / 3.0
            + 0.1 * sum
            + (0.05 * terms.score[d]).powi(2);
        (bound.min(certified.pre[d]), variance.sqrt())
    }

    #[test]
    fn bound_and_deviation_are_what_their_formulas_say() {
        let narrow = Contract {
            p_dtype: Some(Dtype::E4m3fn),
            p_floor: 2f64.powi(-10),
            exact_max: false,
            ..contract(Merge::AgRsBf16)
        };
        let contracts = [
            contract(Merge::A2a),
            contract(Merge::AgRsBf16),
            contract(Merge::AgRsBf16).in_f16(),
            Contract { l_rounded: true, ..contract(Merge::A2a) },
            Contract { partial: Dtype::F32, ..Contract::bf16_default(Merge::AgRsF32) },
            narrow,
        ];
        let mut tighter = 0;
        for moments in [moments(300, 300), moments(300, 7), moments(3, 3)] {
            for contract in &contracts {
                let probable = probable(&moments, contract, USUAL_CHANCE).unwrap();
                let certified = bound_state(&moments, contract, 0, 0).unwrap().pre;
                for d in 0..moments.v_dim {
                    let (bound, sigma) = written(&moments, contract, d);
                    let bound = if probable.gates_hold[0] { bound } else { certified[d] };
                    approx::assert_relative_eq!(probable.pre[d], bound, max_relative = 1e-12);
                    approx::assert_relative_eq!(probable.sigma[d], sigma, max_relative = 1e-12);
                    tighter += usize::from(bound < certified[d]);
                }
            }
        }
        assert!(tighter > 40, "the certified bound stood in nearly everywhere: {tighter}");
    }

    #[test]
    fn every_row_and_head_has_its_own_bound() {
        let mut random = Counter::new(32, 0);
        let mut draw = |count: usize| (0..count).map(|_| 1e-5 * random.gaussian() as f32).collect::<Vec<_>>();
        let (query, key, value) =
            (draw(2 * 3 * 2), draw(9 * 2), [1f32, -2.0, 4.0, 0.5, 8.0, -1.0, 3.0, 2.0, 7.0]);
        let problem = Problem::new(3, 1, 2, 1, 1.0, &query, &key, Values::Separate(&value));
        let (layout, visible) = (Layout::single(), Visible::causal(9, 2));
        let moments =
            Moments::collect_with::<Platform, f32>(&problem, Split::Ranks(&layout), &visible).unwrap();
        // scores in one cell: the certified bound of each state stands in
        let probable = probable(&moments, &contract(Merge::A2a), USUAL_CHANCE).unwrap();
        for (index, pre) in probable.pre.iter().enumerate() {
            let certified = bound_state(&moments, &contract(Merge::A2a), index / 3, index % 3).unwrap();
            assert!(!probable.gates_hold[index] && *pre == certified.pre[0], "state {index}");
        }
        assert_eq!(probable.pre.len(), 6);
    }

    #[test]
    fn a_merge_in_bf16_has_a_larger_deviation() {
        let moments = moments(512, 512);
        let of = |merge| probable(&moments, &contract(merge), USUAL_CHANCE).unwrap().sigma;
        let (a2a, bf16) = (of(Merge::A2a), of(Merge::AgRsBf16));
        assert!(a2a.iter().zip(&bf16).all(|(a, b)| a <= b));
        assert!(a2a.iter().sum::<f64>() < 0.9 * bf16.iter().sum::<f64>());
    }
}
