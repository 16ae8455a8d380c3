//! The bound of chunked prefill: chunks merged one after another into a running output that is stored in between.

use super::Certified;
use super::output::{StateBound, bound_state_merged};
use crate::attention::plain::{Element, Problem};
use crate::moments::{Moments, Passes, State, Underivable};
use crate::split::Split;
use crate::visibility::Visible;
use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::{Contract, Merge};

use super::U32;

/// The bound of attention to `chunk_tokens` consecutive chunks (the last one takes whatever follows), each merged
/// into a running output by a two-state merge in binary32; the running output is stored in the contract's partial
/// format after each merge but the last.
///
/// Against a merge of all parts at once:
///
/// * the merge weights of the first chunk pass through `C − 1` merges, so `η` counts that often;
/// * every stored running output is rounded: `Σ_{c=2}^{C−1} G_c·hulp(|o_{≤c}| + cp_c + acc/G_c)` with
///   `G_c = Σ_{r≤c} g_r`, the running output `o_{≤c} = Σ_{r≤c} g_r·o_r / G_c`, its error so far
///   `cp_c = (Σ_{r≤c} g_r(preR_r + hulp(|o_r| + preR_r)) + E5)/G_c`, and `acc` the sum of the roundings before;
/// * `8C·u·Σp|v|` for the arithmetic of `C` merges. The contract's own merge plays no part.
///
/// [`Certified::partials`] are the chunks.
///
/// # Errors
/// [`Underivable`].
///
/// # Panics
/// The shapes do not fit, or there is no chunk.
pub fn certify_chain<T: Element>(
    problem: &Problem<T>,
    chunk_tokens: &[usize],
    visible: &[Visible],
    contract: &Contract,
    keep_terms: bool,
) -> Result<Certified, Underivable> {
    let contract = Contract { merge: Merge::A2a, ..contract.clone() };
    let moments =
        Moments::collect(problem, Split::Chunks(chunk_tokens), visible, Passes::needed_by(&contract))?;
    let mut certified = Certified::empty(&moments, keep_terms);
    let merges = chunk_tokens.len().saturating_sub(1).max(1);
    for row in 0..moments.rows {
        for head in 0..moments.heads {
            let index = row * moments.heads + head;
            let mut bound = bound_state_merged(&moments, &contract, row, head, merges)?;
            add_running(&moments.states[index], &contract, &mut bound);
            certified.push(&moments, &contract, index, bound);
        }
    }
    Ok(certified)
}

/// Adds the stored running outputs and the arithmetic of the merges to the terms and the bound.
fn add_running(state: &State, contract: &Contract, bound: &mut StateBound) {
    let chunks = state.parts.len();
    for d in 0..state.out.len() {
        let (mut weight, mut out, mut error, mut stored) = (0.0, 0.0, 0.0, 0.0);
        for (count, (part, own)) in state.parts.iter().zip(&bound.parts).enumerate() {
            let magnitude = part.out[d].abs() + own.pre[d];
            weight += part.weight;
            out += part.weight * part.out[d];
            error += part.weight * (own.pre[d] + half_ulp(contract.partial, magnitude));
            if (1..chunks - 1).contains(&count) && weight > 0.0 {
                let reach = (out.abs() + error + bound.terms.merge[d] + stored) / weight;
                stored += weight * half_ulp(contract.partial, reach);
            }
        }
        let magnitude: f64 = state.parts.iter().map(|part| part.weight * part.abs[d]).sum();
        bound.terms.partial[d] += stored;
        if chunks > 1 {
            bound.terms.merge[d] += 8.0 * chunks as f64 * U32 * magnitude;
        }
    }
    bound.pre = bound.terms.total();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plain::Values;
    use crate::bound::{certify, certify_moments};
    use crate::layout::Layout;
    use shardcheck_formats::recipe::Counter;

    const TOKENS: usize = 60;

    fn with_problem(check: impl Fn(&Problem, &Contract)) {
        let mut random = Counter::new(8, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
        let (query, key, value) = (draw(2 * 8), draw(TOKENS * 8), draw(TOKENS * 4));
        let problem = Problem::new(2, 1, 8, 4, 0.3, &query, &key, Values::Separate(&value));
        check(&problem, &Contract::bf16_default(Merge::AgRsBf16));
    }

    #[test]
    fn one_chunk_is_attention_without_a_merge() {
        with_problem(|problem, contract| {
            let visible = [Visible::Prefix(TOKENS)];
            let chain = certify_chain(problem, &[TOKENS], &visible, contract, false).unwrap();
            let whole = certify(problem, &Layout::single(), &visible, contract).unwrap();
            assert_eq!((chain.out, chain.pre, chain.lse_bound), (whole.out, whole.pre, whole.lse_bound));
        });
    }

    #[test]
    fn stored_running_outputs_widen_the_bound_of_a_merge_at_once() {
        with_problem(|problem, contract| {
            let visible = [Visible::Prefix(TOKENS)];
            let chunks = [10; 6];
            let chain = certify_chain(problem, &chunks, &visible, contract, true).unwrap();
            let at_once = Contract { merge: Merge::A2a, ..contract.clone() };
            let moments = Moments::collect(problem, Split::Chunks(&chunks), &visible, Passes::One).unwrap();
            let at_once = certify_moments(&moments, &at_once, true).unwrap();
            assert_eq!(chain.out, at_once.out);
            let partial = |certified: &Certified| certified.terms.as_ref().unwrap()[0].partial.clone();
            for (stored, once) in partial(&chain).iter().zip(partial(&at_once)) {
                // four running outputs are stored, each about as large as what it is made of
                assert!(*stored > 1.5 * once && *stored < 8.0 * once, "{stored} {once}");
            }
            assert!(chain.pre.iter().zip(&at_once.pre).all(|(chain, once)| chain > once));
        });
    }

    #[test]
    fn a_chain_adds_its_stored_outputs_and_its_merges_to_a_merge_at_once_in_binary32() {
        with_problem(|problem, contract| {
            let (visible, chunks) = ([Visible::Prefix(TOKENS)], [7, 20, 3, 30]);
            let chain = certify_chain(problem, &chunks, &visible, contract, true).unwrap();
            let at_once = Contract { merge: Merge::A2a, ..contract.clone() };
            let moments = Moments::collect(problem, Split::Chunks(&chunks), &visible, Passes::One).unwrap();
            for (head, terms) in chain.terms.as_ref().unwrap().iter().enumerate() {
                let once = bound_state_merged(&moments, &at_once, 0, head, 3).unwrap();
                let parts = &moments.states[head].parts;
                for d in 0..4 {
                    let hulp = |x: f64| half_ulp(contract.partial, x);
                    let mut stored = 0.0;
                    for last in 1..3 {
                        let over = |f: &dyn Fn(usize) -> f64| {
                            (0..=last).map(|r| parts[r].weight * f(r)).sum::<f64>()
                        };
                        let share = over(&|_| 1.0);
                        let out = over(&|r| parts[r].out[d]) / share;
                        let own = |r: usize| {
                            once.parts[r].pre[d] + hulp(parts[r].out[d].abs() + once.parts[r].pre[d])
                        };
                        let error = (over(&own) + once.terms.merge[d]) / share;
                        stored += share * hulp(out.abs() + error + stored / share);
                    }
                    let magnitude: f64 = parts.iter().map(|part| part.weight * part.abs[d]).sum();
                    let merge = once.terms.merge[d] + 32.0 * U32 * magnitude;
                    approx::assert_relative_eq!(
                        terms.partial[d],
                        once.terms.partial[d] + stored,
                        max_relative = 1e-12
                    );
                    approx::assert_relative_eq!(terms.merge[d], merge, max_relative = 1e-12);
                    let pre = chain.pre[head * 4 + d];
                    approx::assert_relative_eq!(pre, terms.total()[d], max_relative = 1e-12);
                }
            }
        });
    }

    #[test]
    fn chunks_that_a_row_does_not_reach_change_no_result() {
        with_problem(|problem, contract| {
            let visible = [Visible::Prefix(25)];
            let chain = certify_chain(problem, &[10, 10, 10, 30], &visible, contract, false).unwrap();
            let whole = certify(problem, &Layout::single(), &visible, contract).unwrap();
            for (a, b) in chain.out.iter().zip(&whole.out) {
                approx::assert_abs_diff_eq!(a, b, epsilon = 1e-14);
            }
            assert_eq!(chain.partials[3].lse, [f64::NEG_INFINITY; 2]);
        });
    }
}
