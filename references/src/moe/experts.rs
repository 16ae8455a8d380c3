//! What experts compute of one token, and how far any sharing out of their work may be from it.

use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;

use crate::bound::{U32, gamma};
use crate::kda::Near;

/// What a gate and an up-projection are multiplied as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// `g σ(g) · u`.
    Silu,
    /// `4 tanh(g / 4) σ(g) · 25 tanh(u / 25)` (Kimi-K3).
    Situ,
}

/// Largest value of a gate's part of SiTU, and of its up-projection's.
const SITU: [f64; 2] = [4.0, 25.0];

/// Weights of a gated or linear MLP, row-major, exact.
#[derive(Debug, Clone, Copy)]
pub struct Mlp<'a> {
    /// `[inner, hidden]`; without it the MLP is linear.
    pub gate: Option<&'a [f32]>,
    /// `[inner, hidden]`.
    pub up: &'a [f32],
    /// `[hidden, inner]`.
    pub down: &'a [f32],
    /// How gate and up-projection go together, where there is a gate.
    pub gating: Gating,
}

/// What an MLP gives, element by element.
#[derive(Debug, Clone, PartialEq)]
pub struct Term {
    /// Exact value.
    pub out: Vec<f64>,
    /// Bound on an engine's error before anything is stored.
    pub error: Vec<f64>,
    /// Σ|a·w| over the inner width with its error: no part of the sum is larger, however it is shared out.
    pub reach: Vec<f64>,
}

/// `W_down act(x)` of a row that is known exactly; as [`mlp_of`].
///
/// # Panics
/// When shapes do not fit.
pub fn mlp(weights: &Mlp<'_>, x: &[f32], contract: &Contract) -> Term {
    let exact: Vec<Near> = x.iter().copied().map(Near::exact).collect();
    mlp_of(weights, &exact, contract)
}

/// `W_down act(x)`, sums in binary32 with the contract's accumulation, the activation stored in the contract's `p_dtype`.
///
/// With `Δg`, `Δu` of gate and up, `γ(depth + 1, u_acc)Σ(|x| + Δx)|w| + ΣΔx|w|` each: silu has a slope below 1.1 and its own arithmetic an
/// error of (4·kexp + 6)u, so `Δa = (sΔg + (4·kexp + 6)u(|silu| + sΔg))(|u| + Δu) + |silu|Δu + u|a|` with the slope s, below `(1 + |x|)eˣ`
/// as well where all that the gate may be lies below an x < 0, and half a unit of `p_dtype` for storing it; `Δy = Σ Δa|w| + γ(depth + 2, u_acc)Σ(|a| + Δa)|w|`.
///
/// SiTU's gate is nowhere steeper than silu, since `|tanh t| ≤ |t|` and tanh has a slope below 1, which is that of its other part too. A tanh of
/// exponentials is off by `(2·kexp + 4)u` beside its relative error, as it may be a difference of numbers near 1.
///
/// # Panics
/// When shapes do not fit.
pub fn mlp_of(weights: &Mlp<'_>, x: &[Near], contract: &Contract) -> Term {
    let (hidden, inner) = (x.len(), weights.up.len() / x.len().max(1));
    assert!(weights.up.len() == hidden * inner && weights.down.len() == hidden * inner, "shapes do not fit");
    let chain = |count: usize, more: usize| gamma(contract.depth_for(count) + more, contract.u_acc);
    let row = |matrix: &[f32], index: usize| {
        let products = || matrix[index * hidden..(index + 1) * hidden].iter().zip(x);
        let value: f64 = products().map(|(w, x)| f64::from(*w) * x.value).sum();
        let moved: f64 = products().map(|(w, x)| f64::from(w.abs()) * x.error).sum();
        let size: f64 = products().map(|(w, x)| f64::from(w.abs()) * (x.value.abs() + x.error)).sum();
        (value, chain(hidden, 1) * size + moved)
    };
    let stored = |value: f64, error: f64| {
        error + contract.p_dtype.map_or(0.0, |dtype| half_ulp(dtype, value.abs() + error))
    };
    let active: Vec<(f64, f64)> = (0..inner)
        .map(|index| {
            let (up, up_error) = row(weights.up, index);
            let Some(gate) = weights.gate else {
                return (up, stored(up, up_error));
            };
            let (gate, gate_error) = row(gate, index);
            let open = 1.0 / (1.0 + (-gate).exp());
            let (open, up) = match weights.gating {
                Gating::Silu => {
                    (Near { value: gate * open, error: 0.0 }, Near { value: up, error: up_error })
                }
                Gating::Situ => {
                    let gate = bent(Near { value: gate, error: 0.0 }, SITU[0], contract);
                    let up = bent(Near { value: up, error: up_error }, SITU[1], contract);
                    (Near { value: gate.value * open, error: gate.error * open }, up)
                }
            };
            let moved = slope(gate + gate_error) * gate_error + open.error;
            let silu_error = moved + (4.0 * contract.kexp + 6.0) * U32 * (open.value.abs() + moved);
            let value = open.value * up.value;
            let error =
                silu_error * (up.value.abs() + up.error) + open.value.abs() * up.error + U32 * value.abs();
            (value, stored(value, error * (1.0 + U32)))
        })
        .collect();
    let mut term = Term { out: Vec::new(), error: Vec::new(), reach: Vec::new() };
    for index in 0..hidden {
        let own = || weights.down[index * inner..(index + 1) * inner].iter().zip(&active);
        let passed: f64 = own().map(|(w, (_, error))| f64::from(w.abs()) * error).sum();
        let reach: f64 = own().map(|(w, (a, error))| f64::from(w.abs()) * (a.abs() + error)).sum();
        let error = passed + chain(inner, 2) * reach;
        term.out.push(own().map(|(w, (a, _))| f64::from(*w) * a).sum());
        term.error.push(error);
        term.reach.push(reach + error);
    }
    term
}

/// `m tanh(x / m)`: three roundings, a tanh of exponentials.
fn bent(x: Near, most: f64, contract: &Contract) -> Near {
    let value = most * (x.value / most).tanh();
    let argument = U32 * (x.value.abs() + x.error);
    let relative = (4.0 * contract.kexp + 6.0) * U32 * (value.abs() + x.error + argument);
    Near { value, error: x.error + argument + relative + (2.0 * contract.kexp + 4.0) * U32 * most }
}

/// Most that silu rises or falls anywhere below x: `|σ(x)(1 + x(1 − σ(x)))| ≤ (1 + |x|)eˣ` for x < 0, which grows up to 0.
fn slope(x: f64) -> f64 {
    if x < 0.0 { ((1.0 - x) * x.exp()).min(1.1) } else { 1.1 }
}

/// A term of a token's output with its weight.
#[derive(Debug, Clone, Copy)]
pub struct Addend<'a> {
    /// Weight of an expert; 1 for the shared one.
    pub weight: f64,
    /// Bound on its error.
    pub weight_error: f64,
    /// What is weighed.
    pub term: &'a Term,
}

/// How the parts of an output come together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// Ranks that hold parts of it.
    pub ranks: usize,
}

/// `Σ w·y` and a bound on an engine's result before its last rounding, for any sharing out of the terms over the ranks.
///
/// Beside the errors of weights and terms: the sum of the terms in binary32 with a scaling beforehand, `γ(terms + 4, u)A`, with
/// `A = Σ(|w| + Δw)·reach`. With several ranks each stores its part in the contract's partial format, which loses `u_p·A` over all of
/// them, since the parts of any sharing out are no larger together than A; and at most ranks − 1 additions in the format of the merge
/// lie on the way of a part, `γ(ranks − 1, u_m)A(1 + u_p)`.
pub fn combine(
    addends: &[Addend<'_>],
    hidden: usize,
    reduction: Reduction,
    contract: &Contract,
) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut bound) = (vec![0.0; hidden], vec![0.0; hidden]);
    let (stored, summed) = if reduction.ranks > 1 {
        let merge = contract.merge.rounded_to().map_or(U32, Dtype::unit_roundoff);
        (contract.partial.unit_roundoff(), gamma(reduction.ranks - 1, merge))
    } else {
        (0.0, 0.0)
    };
    for index in 0..hidden {
        let (mut error, mut reach) = (0.0, 0.0);
        for addend in addends {
            let (value, own) = (addend.term.out[index], addend.term.error[index]);
            out[index] += addend.weight * value;
            error += addend.weight_error * value.abs() + (addend.weight.abs() + addend.weight_error) * own;
            reach += (addend.weight.abs() + addend.weight_error) * addend.term.reach[index];
        }
        let first = error + gamma(addends.len() + 4, U32) * reach;
        let least = if reach > 0.0 {
            reduction.ranks as f64 * half_ulp(contract.partial, f64::MIN_POSITIVE)
        } else {
            0.0
        };
        bound[index] = first + stored * (reach + first) + least + summed * (reach + first) * (1.0 + stored);
    }
    (out, bound)
}

#[cfg(test)]
mod tests {
    use shardcheck_formats::contract::Depth;

    use super::*;
    use shardcheck_formats::contract::Merge;

    /// Chains of n + 3 additions, so that γ of n terms and m more operations is that of n + m + 3.
    fn contract(p_dtype: Option<Dtype>, merge: Merge) -> Contract {
        let depth = Depth::PerTile { tile: 1, extra: 3 };
        Contract { u_acc: 2f64.powi(-20), depth, kexp: 3.0, p_dtype, ..Contract::bf16_default(merge) }
    }

    fn chain(operations: f64) -> f64 {
        let product = operations * 2f64.powi(-20);
        product / (1.0 - product)
    }

    fn near(seen: f64, wanted: f64) {
        assert!((seen - wanted).abs() <= 1e-11 * wanted.abs(), "{seen} {wanted}");
    }

    #[test]
    fn a_linear_mlp_is_off_by_both_its_products_and_what_is_stored_between_them() {
        let (x, up, down) =
            ([1.5f32, -0.5], [1.0f32, 2.0, -1.0, 0.5, 3.0, -2.0], [1.0f32, -2.0, 0.5, -1.0, 4.0, 2.0]);
        let term = mlp(
            &Mlp { gate: None, up: &up, down: &down, gating: Gating::Silu },
            &x,
            &contract(Some(Dtype::Bf16), Merge::A2a),
        );
        // values 0.5, −1.75 and 5.5 of products whose sizes are 2.5, 1.75 and 5.5; bf16 has units of 2⁻⁸, 2⁻⁷ and 2⁻⁵ above them
        let active = [0.5, -1.75, 5.5];
        let sizes = [2.5, 1.75, 5.5].map(|size| chain(2.0 + 3.0 + 1.0) * size);
        let errors: Vec<f64> =
            (0..3).map(|i| sizes[i] + half_ulp(Dtype::Bf16, f64::abs(active[i]) + sizes[i])).collect();
        for row in 0..2 {
            let own: Vec<f64> = down[row * 3..(row + 1) * 3].iter().map(|w| f64::from(*w)).collect();
            let passed: f64 = (0..3).map(|i| own[i].abs() * errors[i]).sum();
            let sum: f64 = (0..3).map(|i| own[i].abs() * f64::abs(active[i])).sum();
            let error = passed + chain(3.0 + 3.0 + 2.0) * (sum + passed);
            near(term.out[row], (0..3).map(|i| own[i] * active[i]).sum());
            near(term.error[row], error);
            near(term.reach[row], sum + passed + error);
        }
    }

    #[test]
    fn a_gated_mlp_is_off_by_its_gate_its_silu_and_its_up_projection_as_well() {
        for (gate, up) in [(-0.5f32, -2.0f32), (0.75, 1.25), (2.0, -0.5)] {
            let weights = Mlp { gate: Some(&[gate]), up: &[up], down: &[-3.0], gating: Gating::Silu };
            let term = mlp(&weights, &[1.5], &contract(None, Merge::A2a));
            let [g, u] = [gate, up].map(|weight| f64::from(weight) * 1.5);
            let [of_gate, of_up] = [g, u].map(|value| chain(1.0 + 3.0 + 1.0) * value.abs());
            let silu = g / (1.0 + (-g).exp());
            let unit = 2f64.powi(-24);
            // a gate of −0.75 lies where silu is flatter
            let edge: f64 = g + of_gate;
            let slope = if edge < 0.0 { (1.0 - edge) * edge.exp() } else { 1.1 };
            let of_silu = slope * of_gate + 18.0 * unit * (silu.abs() + slope * of_gate);
            let value = silu * u;
            let error =
                (of_silu * (u.abs() + of_up) + silu.abs() * of_up + unit * value.abs()) * (1.0 + unit);
            let wanted = 3.0 * error + chain(1.0 + 3.0 + 2.0) * 3.0 * (value.abs() + error);
            near(term.out[0], -3.0 * value);
            near(term.error[0], wanted);
            near(term.reach[0], 3.0 * (value.abs() + error) + wanted);
        }
    }

    #[test]
    fn situ_bends_both_factors_and_its_gate_is_nowhere_steeper_than_silu() {
        let weights = |gating| Mlp { gate: Some(&[6.0]), up: &[40.0], down: &[1.0], gating };
        let term = mlp(&weights(Gating::Situ), &[1.0], &contract(None, Merge::A2a));
        let wanted = 4.0 * 1.5f64.tanh() / (1.0 + (-6f64).exp()) * 25.0 * 1.6f64.tanh();
        near(term.out[0], wanted);
        let silu = mlp(&weights(Gating::Silu), &[1.0], &contract(None, Merge::A2a));
        assert!(silu.out[0] > 2.0 * term.out[0], "{} {}", silu.out[0], term.out[0]);
        assert!(term.error[0] < 1e-4 * term.out[0], "{:?}", term);
        let situ = |x: f64| 4.0 * (x / 4.0).tanh() / (1.0 + (-x).exp());
        for step in -1200..800 {
            let x = f64::from(step) / 100.0;
            for below in [0.01, 0.5, 3.0] {
                let risen = (situ(x) - situ(x - below)).abs() / below;
                assert!(risen <= slope(x), "{x} {below}: {risen}");
            }
        }
    }

    #[test]
    fn no_step_of_silu_is_steeper_than_its_slope_says() {
        let silu = |x: f64| x / (1.0 + (-x).exp());
        for step in -1200..800 {
            let x = f64::from(step) / 100.0;
            for below in [0.01, 0.5, 3.0] {
                let risen = (silu(x) - silu(x - below)).abs() / below;
                assert!(risen <= slope(x), "{x} {below}: {risen}");
            }
        }
        assert!(slope(-8.0) < 0.01 && slope(0.5) == 1.1);
    }

    #[test]
    fn a_sum_of_terms_is_off_by_weights_terms_additions_and_what_ranks_store_and_add() {
        let a = Term { out: vec![0.0, 2.0], error: vec![0.0, 0.25], reach: vec![0.0, 3.0] };
        let b = Term { out: vec![0.0, -4.0], error: vec![0.0, 0.5], reach: vec![0.0, 5.0] };
        let addends = [
            Addend { weight: 0.5, weight_error: 0.125, term: &a },
            Addend { weight: -2.0, weight_error: 0.25, term: &b },
        ];
        let (error, reach) = (0.125 * 2.0 + 0.625 * 0.25 + 0.25 * 4.0 + 2.25 * 0.5, 0.625 * 3.0 + 2.25 * 5.0);
        let gamma = |count: f64, unit: f64| count * unit / (1.0 - count * unit);
        let (single, half) = (2f64.powi(-24), Dtype::Bf16.unit_roundoff());
        let first = error + gamma(2.0 + 4.0, single) * reach;
        for (merge, unit) in [(Merge::A2a, single), (Merge::AgRsF32, single), (Merge::AgRsBf16, half)] {
            for ranks in [1, 2, 4] {
                let (out, bound) = combine(&addends, 2, Reduction { ranks }, &contract(None, merge));
                assert_eq!((out[0], bound[0]), (0.0, 0.0), "nothing has no error");
                near(out[1], 9.0);
                let whole = reach + first;
                let travel = half * whole + gamma(ranks as f64 - 1.0, unit) * whole * (1.0 + half);
                near(bound[1], first + if ranks > 1 { travel } else { 0.0 });
            }
        }
    }

    #[test]
    fn parts_that_vanish_may_be_lost_on_every_rank() {
        let term = Term { out: vec![0.0], error: vec![0.0], reach: vec![1e-300] };
        let addend = Addend { weight: 1.0, weight_error: 0.0, term: &term };
        let (_, bound) = combine(&[addend], 1, Reduction { ranks: 3 }, &contract(None, Merge::A2a));
        near(bound[0], 3.0 * half_ulp(Dtype::Bf16, f64::MIN_POSITIVE));
    }
}
