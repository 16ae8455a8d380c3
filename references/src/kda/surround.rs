//! What stands around the recurrence: convolution, norm of queries and keys, gates, gated norm; each with the error of 32-bit arithmetic.

use shardcheck_formats::dtype::Dtype;

use super::{Arithmetic, Gate, NORM_FLOOR, Near};
use crate::bound::{U32, gamma};

/// Relative error of an exp or a log.
fn exp_error(arithmetic: &Arithmetic) -> f64 {
    2.0 * arithmetic.kexp * U32
}

/// Half a unit of what intermediate values are stored in; none for binary32, whose rounding the operations count.
fn stored(near: Near, arithmetic: &Arithmetic) -> Near {
    if arithmetic.stored == Dtype::F32 { near } else { near.stored(arithmetic.stored) }
}

/// `silu` of the convolution's sum for the last token of `window` (`taps` tokens, oldest first).
///
/// The sum is within `γ(taps)Σ|w·x|`; silu has a slope below 1.1 and an error of its own of `(4·kexp + 6)u`.
pub fn convolve(window: &[Vec<f64>], weights: &[f64], taps: usize, arithmetic: &Arithmetic) -> Vec<Near> {
    (0..window[0].len())
        .map(|channel| {
            let own = || (0..taps).map(|tap| weights[channel * taps + tap] * window[tap][channel]);
            let sum: f64 = own().sum();
            let moved = 1.1 * gamma(taps, arithmetic.u_acc.max(U32)) * own().map(f64::abs).sum::<f64>();
            let value = sum / (1.0 + (-sum).exp());
            let error = moved + (4.0 * arithmetic.kexp + 6.0) * U32 * (value.abs() + moved);
            stored(Near { value, error }, arithmetic)
        })
        .collect()
}

/// A head divided by `N = √(Σx² + 1e-6)`, times a scale.
///
/// `x̂/N̂ − x/N = (x̂ − x)/N̂ + (x/N)(N − N̂)/N̂`, and N moves by no more than the length of the error. Squares, their sum in any order, root,
/// quotient and scale are within `γ(K + 8)`.
pub fn normalise(head: &[Near], scale: f64, arithmetic: &Arithmetic) -> Vec<Near> {
    let length = (head.iter().map(|x| x.value * x.value).sum::<f64>() + NORM_FLOOR).sqrt();
    let moved = head.iter().map(|x| x.error * x.error).sum::<f64>().sqrt();
    let rounding = gamma(head.len() + 8, arithmetic.u_acc.max(U32));
    head.iter()
        .map(|x| {
            let value = x.value / length;
            // both are between −1 and 1, whatever the error
            let most = 1.0 + value.abs();
            let error =
                if moved < length { (x.error + value.abs() * moved) / (length - moved) } else { most };
            let error = error.min(most);
            let error = error + rounding * (value.abs() + error);
            Near { value: value * scale, error: error * scale }
        })
        .collect()
}

/// `σ(x)` of an x within `moved`: `|ln σ′|` has a slope below 1, so σ moves by no more than `σ(1 − σ)·e^δ·δ`.
pub fn sigmoid(x: f64, moved: f64, arithmetic: &Arithmetic) -> Near {
    let (value, other) = (1.0 / (1.0 + (-x).exp()), 1.0 / (1.0 + x.exp()));
    let error = (value * other * moved.min(700.0).exp() * moved).min(1.0);
    // where exp(−x) is beyond binary32, σ is 0 or a number below the smallest normal one
    let error = error + (exp_error(arithmetic) + 3.0 * U32) * (value + error) + f64::from(f32::MIN_POSITIVE);
    Near { value, error }
}

/// Log of a decay: `lower·σ(exp(A)(a + bias))`, or `−exp(A)·softplus(a + bias)`.
///
/// The argument is within `(2·kexp + 3)u` of itself and a rounding of the sum; softplus, of slope below 1, is taken as `ln(1 + exp z)`,
/// which has an absolute error of a unit of 1.
pub fn decay(gate: Gate, a_log: f64, a: f64, bias: f64, arithmetic: &Arithmetic) -> Near {
    let (factor, sum) = (a_log.exp(), a + bias);
    let own = exp_error(arithmetic);
    match gate {
        Gate::LowerBound(lower) => {
            let x = factor * sum;
            let near = sigmoid(x, (own + 3.0 * U32) * x.abs(), arithmetic);
            let value = lower * near.value;
            Near { value, error: lower.abs() * near.error * (1.0 + U32) + U32 * value.abs() }
        }
        Gate::Softplus => {
            let softplus = sum.max(0.0) + (-sum.abs()).exp().ln_1p();
            let error = U32 * sum.abs() + (own + 2.0 * U32) * (1.0 + softplus);
            let value = -factor * softplus;
            Near { value, error: factor * error * (1.0 + own) + (own + 2.0 * U32) * value.abs() }
        }
    }
}

/// `x / √(mean x² + ε)`.
///
/// As for [`normalise`], with the mean in place of the sum; no element of the quotient is beyond the root of their number. Where errors are no
/// small part of a row, the root lies between that of the smallest elements that there may be and that of the largest, which says more.
pub fn root_mean_square(row: &[Near], epsilon: f64, arithmetic: &Arithmetic) -> Vec<Near> {
    let count = row.len() as f64;
    let root = |element: &dyn Fn(&Near) -> f64| {
        (row.iter().map(|x| element(x) * element(x)).sum::<f64>() / count + epsilon).sqrt()
    };
    let length = root(&|x| x.value);
    let (shortest, longest) =
        (root(&|x| (x.value.abs() - x.error).max(0.0)), root(&|x| x.value.abs() + x.error));
    let moved = (row.iter().map(|x| x.error * x.error).sum::<f64>() / count).sqrt();
    let rounding = gamma(row.len() + 8, arithmetic.u_acc.max(U32));
    row.iter()
        .map(|x| {
            let (value, size) = (x.value / length, x.value.abs());
            let most = value.abs() + count.sqrt();
            let error =
                if moved < length { (x.error + value.abs() * moved) / (length - moved) } else { most };
            let up = (size + x.error) / shortest - size / length;
            let least = size - x.error;
            let down = size / length - least / if least > 0.0 { longest } else { shortest };
            let error = error.min(most).min(up.max(down).max(0.0));
            Near { value, error: error + rounding * (value.abs() + error) }
        })
        .collect()
}

/// `core / √(mean core² + ε) · weight · σ(gate)` of one head; the core is first stored.
pub fn gated_norm(
    core: &[Near],
    weight: &[f64],
    gate: &[f64],
    epsilon: f64,
    arithmetic: &Arithmetic,
) -> Vec<Near> {
    let core: Vec<Near> = core.iter().map(|x| stored(*x, arithmetic)).collect();
    root_mean_square(&core, epsilon, arithmetic)
        .into_iter()
        .enumerate()
        .map(|(index, Near { value, error })| {
            let open = sigmoid(gate[index], 0.0, arithmetic);
            let whole = (value.abs() + error) * (open.value + open.error);
            let error = error * open.value + value.abs() * open.error + error * open.error;
            Near {
                value: value * weight[index] * open.value,
                error: weight[index].abs() * (error + 4.0 * U32 * whole) + f64::from(f32::MIN_POSITIVE),
            }
        })
        .collect()
}
