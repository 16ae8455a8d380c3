//! What latent experts and the expert of every row add to the stream, with the error of an engine.

use shardcheck_formats::contract::Contract;

use super::{exact, near, product};
use crate::kda::Near;
use crate::moe::{Addend, Mlp, Reduction, Term, combine, mlp};

/// `U n + E(x)`: the up-projection `[hidden, z]` of a normed latent row and the shared expert of the row in its full width, columns and
/// inner elements being shared out over ranks, whose parts are summed once.
pub fn lifted(
    up: &[f32],
    normed: &[f32],
    shared: Option<(&Mlp<'_>, &[f32])>,
    ranks: usize,
    contract: &Contract,
) -> Vec<Near> {
    let mut terms: Vec<Term> = vec![product(up, &exact(normed), contract)];
    terms.extend(shared.map(|(weights, x)| mlp(weights, x, contract)));
    let one = |term| Addend { weight: 1.0, weight_error: 0.0, term };
    let addends: Vec<Addend<'_>> = terms.iter().map(one).collect();
    near(combine(&addends, terms[0].out.len(), Reduction { ranks }, contract))
}

#[cfg(test)]
mod tests {
    use shardcheck_formats::contract::{Depth, Merge};

    use super::*;
    use crate::bound::U32;
    use crate::moe::Gating;

    #[test]
    fn the_projection_and_the_shared_expert_add_up_and_ranks_cost_a_rounding() {
        let contract = Contract { u_acc: U32, depth: Depth::Any, ..Contract::bf16_default(Merge::AgRsBf16) };
        let (up, normed, x) = ([1.0, -2.0, 0.5, 0.25], [3.0, 1.0], [4.0, -1.0]);
        let shared = Mlp { gate: None, up: &[1.0, 1.0], down: &[2.0, -3.0], gating: Gating::Silu };
        let alone = lifted(&up, &normed, None, 1, &contract);
        assert_eq!([alone[0].value, alone[1].value], [1.0, 1.75]);
        let one = lifted(&up, &normed, Some((&shared, &x)), 1, &contract);
        // the shared expert's only inner element is 4 − 1
        assert_eq!([one[0].value, one[1].value], [1.0 + 6.0, 1.75 - 9.0]);
        let three = lifted(&up, &normed, Some((&shared, &x)), 3, &contract);
        assert!(one.iter().zip(&three).all(|(one, three)| three.error > one.error + 2f64.powi(-9)));
    }
}
