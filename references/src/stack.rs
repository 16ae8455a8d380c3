//! What stands between two attentions of a transformer, stage by stage, of inputs that are known exactly; with the error of an engine.
//!
//! A stage gets what an engine showed of the one before it, so that its bound is that of one product, one norm or one sum, however many
//! layers there are. Sums run in any order of the contract; results are before their last rounding.

pub mod latent;

use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::Contract;

use crate::bound::{U32, gamma};
use crate::kda::surround::{root_mean_square, sigmoid};
use crate::kda::{Arithmetic, Near};
use crate::moe::{Addend, Mlp, Reduction, Term, combine, mlp, mlp_of};

/// A row that is known exactly.
pub fn exact(x: &[f32]) -> Vec<Near> {
    x.iter().copied().map(Near::exact).collect()
}

/// `x / √(mean x² + ε) · weight` of a row that is known exactly.
///
/// # Panics
/// When lengths differ.
pub fn norm(x: &[f32], weight: &[f32], epsilon: f64, contract: &Contract) -> Vec<Near> {
    norm_of(&exact(x), weight, epsilon, contract)
}

/// `x / √(mean x² + ε) · weight`.
///
/// # Panics
/// When lengths differ.
pub fn norm_of(x: &[Near], weight: &[f32], epsilon: f64, contract: &Contract) -> Vec<Near> {
    assert_eq!(x.len(), weight.len(), "a weight for each element");
    let unit = root_mean_square(x, epsilon, &Arithmetic::of(contract, 1));
    unit.iter()
        .zip(weight)
        .map(|(unit, weight)| {
            let (weight, largest) = (f64::from(*weight), unit.value.abs() + unit.error);
            Near { value: unit.value * weight, error: weight.abs() * (unit.error + U32 * largest) }
        })
        .collect()
}

/// `W x` of weights `[outputs, inputs]` and a row that is known exactly.
pub fn project(weights: &[f32], x: &[f32], contract: &Contract) -> Vec<Near> {
    project_of(weights, &exact(x), contract)
}

/// `W x` of weights `[outputs, inputs]`: each element within `γ(depth + 1, u_acc)Σ|w|(|x| + Δx) + Σ|w|Δx`.
pub fn project_of(weights: &[f32], x: &[Near], contract: &Contract) -> Vec<Near> {
    let rounding = gamma(contract.depth_for(x.len()) + 1, contract.u_acc);
    weights
        .chunks_exact(x.len().max(1))
        .map(|row| {
            let products = || row.iter().zip(x);
            let value = products().map(|(w, x)| f64::from(*w) * x.value).sum();
            let moved: f64 = products().map(|(w, x)| f64::from(w.abs()) * x.error).sum();
            Near { value, error: moved + rounding * reach(row, x) }
        })
        .collect()
}

/// `Σ|w|(|x| + Δx)`.
fn reach(weights: &[f32], x: &[Near]) -> f64 {
    weights.iter().zip(x).map(|(w, x)| f64::from(w.abs()) * (x.value.abs() + x.error)).sum()
}

/// A projected vector as it is stored, its last elements turned by given cosines and sines, element i with i + half.
///
/// Each is stored in the contract's partial format before it turns; the turn is two products and a sum of binary32.
///
/// # Panics
/// When the vector is shorter than what is turned.
pub fn turned(vector: &[Near], cos: &[f32], sin: &[f32], contract: &Contract) -> Vec<Near> {
    let mut turned = vector.to_vec();
    let half = cos.len();
    let first = vector.len() - 2 * half;
    for index in 0..half {
        let [a, b] = [first + index, first + half + index].map(|at| vector[at].stored(contract.partial));
        let (cos, sin) = (f64::from(cos[index]), f64::from(sin[index]));
        let sum = |a: Near, b: Near, sin: f64| {
            let reach = cos.abs() * (a.value.abs() + a.error) + sin.abs() * (b.value.abs() + b.error);
            let passed = cos.abs() * a.error + sin.abs() * b.error;
            Near { value: cos * a.value + sin * b.value, error: passed + gamma(2, U32) * reach }
        };
        turned[first + index] = sum(a, b, -sin);
        turned[first + half + index] = sum(b, a, sin);
    }
    turned
}

/// Sum over ranks of the products of a matrix `[outputs, inputs]` whose columns are shared out over them.
pub fn summed(weights: &[f32], x: &[f32], ranks: usize, contract: &Contract) -> Vec<Near> {
    summed_of(weights, &exact(x), ranks, contract)
}

/// As [`summed`], of a row with errors.
pub fn summed_of(weights: &[f32], x: &[Near], ranks: usize, contract: &Contract) -> Vec<Near> {
    over_ranks(&product(weights, x, contract), ranks, contract)
}

/// The products of a matrix `[outputs, inputs]` as a term that ranks may share out.
fn product(weights: &[f32], x: &[Near], contract: &Contract) -> Term {
    let projected = project_of(weights, x, contract);
    let sizes = weights.chunks_exact(x.len().max(1)).map(|row| reach(row, x));
    Term {
        out: projected.iter().map(|near| near.value).collect(),
        error: projected.iter().map(|near| near.error).collect(),
        reach: sizes.zip(&projected).map(|(size, near)| size + near.error).collect(),
    }
}

/// Sum over ranks of an MLP whose inner width is shared out over them.
pub fn feed_forward(weights: &Mlp<'_>, x: &[f32], ranks: usize, contract: &Contract) -> Vec<Near> {
    feed_forward_of(weights, &exact(x), ranks, contract)
}

/// As [`feed_forward`], of a row with errors.
pub fn feed_forward_of(weights: &Mlp<'_>, x: &[Near], ranks: usize, contract: &Contract) -> Vec<Near> {
    over_ranks(&mlp_of(weights, x, contract), ranks, contract)
}

/// Sum over ranks of the experts of a row, each by its weight and the error of that, whole experts being shared out over the ranks.
pub fn mixture(experts: &[(f64, f64, Mlp<'_>)], x: &[f32], ranks: usize, contract: &Contract) -> Vec<Near> {
    let terms: Vec<Term> = experts.iter().map(|(_, _, weights)| mlp(weights, x, contract)).collect();
    let addends: Vec<Addend<'_>> = terms
        .iter()
        .zip(experts)
        .map(|(term, (weight, weight_error, _))| Addend {
            weight: *weight,
            weight_error: *weight_error,
            term,
        })
        .collect();
    near(combine(&addends, x.len(), Reduction { ranks }, contract))
}

fn over_ranks(term: &Term, ranks: usize, contract: &Contract) -> Vec<Near> {
    let addend = Addend { weight: 1.0, weight_error: 0.0, term };
    near(combine(&[addend], term.out.len(), Reduction { ranks }, contract))
}

fn near((values, errors): (Vec<f64>, Vec<f64>)) -> Vec<Near> {
    values.into_iter().zip(errors).map(|(value, error)| Near { value, error }).collect()
}

/// The stream behind an update: one sum of binary32.
pub fn joined(stream: f32, update: f32) -> Near {
    joined_of(Near::exact(stream), Near::exact(update))
}

/// As [`joined`], of values with errors.
pub fn joined_of(stream: Near, update: Near) -> Near {
    let (value, moved) = (stream.value + update.value, stream.error + update.error);
    Near { value, error: moved + U32 * (value.abs() + moved) }
}

/// `a σ(W x)` of what attention gave to some elements and of the normed row: products, and the sigmoid, may be stored in the contract's partial
/// format.
///
/// # Panics
/// When there is not a row of weights for each element.
pub fn gated(weights: &[f32], x: &[f32], attention: &[f32], contract: &Contract) -> Vec<Near> {
    let logits = logits(weights, x, contract);
    assert_eq!(logits.len(), attention.len(), "a logit for each element");
    let arithmetic = Arithmetic::of(contract, 1);
    let element = |(logit, attention): (&Near, &f32)| {
        let open = sigmoid(logit.value, logit.error, &arithmetic).stored(contract.partial);
        let (value, size) = (f64::from(*attention) * open.value, f64::from(attention.abs()));
        let moved = size * open.error;
        Near { value, error: moved + U32 * (value.abs() + moved) }
    };
    logits.iter().zip(attention).map(element).collect()
}

/// Logits of a row: products that may be stored in the contract's partial format before they are 32 bits wide.
pub fn logits(head: &[f32], x: &[f32], contract: &Contract) -> Vec<Near> {
    logits_of(head, &exact(x), contract)
}

/// As [`logits`], of a row with errors.
pub fn logits_of(head: &[f32], x: &[Near], contract: &Contract) -> Vec<Near> {
    project_of(head, x, contract)
        .into_iter()
        .map(|near| {
            let largest = near.value.abs() + near.error;
            Near { error: near.error + half_ulp(contract.partial, largest) + U32 * largest, ..near }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use shardcheck_formats::contract::{Depth, Merge};
    use shardcheck_formats::dtype::Dtype;

    use super::*;
    use crate::moe::Gating;

    fn contract() -> Contract {
        Contract { u_acc: U32, depth: Depth::Any, ..Contract::bf16_default(Merge::AgRsBf16) }
    }

    fn close(seen: f64, wanted: f64) {
        assert!((seen - wanted).abs() <= 1e-12 * wanted.abs().max(1e-300), "{seen} {wanted}");
    }

    #[test]
    fn a_norm_is_the_row_over_its_root_mean_square_times_the_weight() {
        let seen = norm(&[3.0, -4.0], &[2.0, 0.5], 0.5, &contract());
        // √((9 + 16) / 2 + 0.5) = √13
        close(seen[0].value, 6.0 / 13f64.sqrt());
        close(seen[1].value, -2.0 / 13f64.sqrt());
        assert!(seen.iter().all(|near| near.error > 0.0 && near.error < 1e-5 * near.value.abs()));
        let zero = norm(&[0.0, 0.0], &[1.0, 1.0], 1e-5, &contract());
        assert!(zero.iter().all(|near| near.value == 0.0 && near.error == 0.0));
    }

    #[test]
    fn a_product_is_off_by_a_rounding_for_each_addition_and_one_more() {
        let seen = project(&[1.0, 2.0, -1.0, 0.5, 0.0, 4.0], &[1.5, -0.5, 2.0], &contract());
        let chain = 4.0 * U32 / (1.0 - 4.0 * U32);
        close(seen[0].value, -1.5);
        close(seen[0].error, chain * 4.5);
        close(seen[1].value, 8.75);
        close(seen[1].error, chain * 8.75);
    }

    #[test]
    fn a_quarter_of_a_turn_exchanges_the_two_halves_and_leaves_what_stands_before_them() {
        let vector: Vec<Near> = [7.0, 1.0, 2.0, 3.0, 4.0].map(|value| Near { value, error: 0.25 }).to_vec();
        let seen = turned(&vector, &[0.0, 1.0], &[1.0, 0.0], &contract());
        let values: Vec<f64> = seen.iter().map(|near| near.value).collect();
        assert_eq!(values, [7.0, -3.0, 2.0, 1.0, 4.0]);
        assert_eq!(seen[0].error, 0.25, "what does not turn is stored once, at the end");
        // half a unit of bf16 at 3.25, and at 1.25, is what storing costs; two roundings of 32 bits follow
        let rounding = |reach: f64| 2.0 * U32 / (1.0 - 2.0 * U32) * reach;
        let wide = 0.25 + half_ulp(Dtype::Bf16, 3.25);
        close(seen[1].error, wide + rounding(3.0 + wide));
        let narrow = 0.25 + half_ulp(Dtype::Bf16, 1.25);
        close(seen[3].error, narrow + rounding(1.0 + narrow));
    }

    #[test]
    fn what_ranks_share_out_is_off_by_what_they_store_and_add() {
        let (weights, x) = ([1.0, -2.0, 0.5, 0.25], [3.0, 1.0]);
        let one = summed(&weights, &x, 1, &contract());
        let two = summed(&weights, &x, 2, &contract());
        close(one[0].value, 1.0);
        close(one[1].value, 1.75);
        for (one, two) in one.iter().zip(&two) {
            assert_eq!(one.value, two.value);
            assert!(one.error < 1e-5 && two.error > one.error + 2f64.powi(-9), "{one:?} {two:?}");
        }
        // Σ|w·x| is 5: each part is stored, and one addition lies on the way
        let u = Dtype::Bf16.unit_roundoff();
        assert!(two[0].error > 2.0 * u * 5.0 && two[0].error < 2.1 * u * 5.0, "{:?}", two[0]);
    }

    #[test]
    fn an_mlp_over_ranks_is_the_mlp_and_a_stream_the_sum() {
        let weights =
            Mlp { gate: Some(&[0.0, 1.0]), up: &[1.0, 1.0], down: &[2.0, -3.0], gating: Gating::Silu };
        let seen = feed_forward(&weights, &[2.0], 2, &contract());
        // silu(0)·2 and silu(2)·2
        close(seen[0].value, -3.0 * 2.0 * 2.0 / (1.0 + (-2f64).exp()));
        let sum = joined(1.0, 2f32.powi(-30));
        assert_eq!(sum.value, 1.0 + 2f64.powi(-30));
        assert_eq!(sum.error, U32 * sum.value);
    }

    #[test]
    fn experts_add_up_by_their_weights_and_an_error_of_a_weight_moves_the_sum() {
        let [one, two] = [[1.0f32], [-2.0]];
        let expert = |down| Mlp { gate: None, up: &[1.0], down, gating: Gating::Silu };
        let seen = |error: f64| {
            mixture(&[(0.75, error, expert(&one)), (0.5, 0.0, expert(&two))], &[4.0], 1, &contract())[0]
        };
        assert_eq!(seen(0.0).value, 0.75 * 4.0 - 0.5 * 8.0);
        let moved = seen(0.125).error - seen(0.0).error;
        assert!((moved - 0.125 * 4.0).abs() < 0.02, "{moved}");
    }

    #[test]
    fn logits_may_be_stored_in_half_before_they_are_wide() {
        let seen = logits(&[1.0, 1.0], &[1.0, 0.5], &contract());
        close(seen[0].value, 1.5);
        assert!(
            seen[0].error > half_ulp(Dtype::Bf16, 1.5) && seen[0].error < 1.01 * half_ulp(Dtype::Bf16, 1.5)
        );
    }

    #[test]
    fn a_gate_lets_a_share_through_by_its_own_row_of_weights() {
        let contract = Contract { u_acc: U32, depth: Depth::Any, ..Contract::bf16_default(Merge::AgRsBf16) };
        let near = gated(&[1.0, 0.0, -2.0, 1.0], &[3.0, 6.0], &[8.0, -4.0], &contract);
        let open = |x: f64| 1.0 / (1.0 + (-x).exp());
        let wanted = [8.0 * open(3.0), -4.0 * open(0.0)];
        for (near, wanted) in near.iter().zip(wanted) {
            assert!((near.value - wanted).abs() < 1e-12, "{near:?} {wanted}");
            // a logit and a sigmoid of eight bits, and not much more
            assert!(
                near.error > wanted.abs() * 2f64.powi(-9) && near.error < wanted.abs() * 0.01,
                "{near:?}"
            );
        }
        assert_eq!(gated(&[500.0], &[-4.0], &[2.0], &contract)[0].value, 0.0);
    }
}
