//! What experts compute of one token, and how far any sharing out of their work may be from it.

use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::{Contract, Merge};
use shardcheck_formats::dtype::Dtype;

use crate::bound::{U32, gamma};

/// Weights of a gated or linear MLP, row-major, exact.
#[derive(Debug, Clone, Copy)]
pub struct Mlp<'a> {
    /// `[inner, hidden]`; without it the MLP is linear.
    pub gate: Option<&'a [f32]>,
    /// `[inner, hidden]`.
    pub up: &'a [f32],
    /// `[hidden, inner]`.
    pub down: &'a [f32],
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

/// `W_down act(x)`, sums in binary32 with the contract's accumulation, the activation stored in the contract's `p_dtype`.
///
/// With `Δg`, `Δu` of gate and up, `γ(depth + 1, u_acc)Σ|x||w|` each: silu has a slope below 1.1 and its own arithmetic an error of
/// (4·kexp + 6)u, so `Δa = (1.1Δg + (4·kexp + 6)u(|silu| + 1.1Δg))(|u| + Δu) + |silu|Δu + u|a|`, and half a unit of `p_dtype` for storing
/// it; `Δy = Σ Δa|w| + γ(depth + 2, u_acc)Σ(|a| + Δa)|w|`.
///
/// # Panics
/// When shapes do not fit.
pub fn mlp(weights: &Mlp<'_>, x: &[f32], contract: &Contract) -> Term {
    let (hidden, inner) = (x.len(), weights.up.len() / x.len().max(1));
    assert!(weights.up.len() == hidden * inner && weights.down.len() == hidden * inner, "shapes do not fit");
    let chain = |count: usize, more: usize| gamma(contract.depth_for(count) + more, contract.u_acc);
    let row = |matrix: &[f32], index: usize| {
        let products = || matrix[index * hidden..(index + 1) * hidden].iter().zip(x);
        let value: f64 = products().map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        let size: f64 = products().map(|(w, x)| f64::from(w.abs()) * f64::from(x.abs())).sum();
        (value, chain(hidden, 1) * size)
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
            let silu = gate / (1.0 + (-gate).exp());
            let moved = 1.1 * gate_error;
            let silu_error = moved + (4.0 * contract.kexp + 6.0) * U32 * (silu.abs() + moved);
            let value = silu * up;
            let error = silu_error * (up.abs() + up_error) + silu.abs() * up_error + U32 * value.abs();
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
        let merge = match contract.merge {
            Merge::AgRsBf16 => Dtype::Bf16.unit_roundoff(),
            Merge::A2a | Merge::AgRsF32 => U32,
        };
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
