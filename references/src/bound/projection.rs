//! The bound of attention followed by an up-projection per head, `y = o·W_UV`, after the merge or before it.
//!
//! Errors that are common to all numbers of a token's value — its softmax weight, the rounding of its probability
//! — pass through the projection as if the *projected* values had been attended to: E1 and E2 are those of the
//! values `v·W_UV`. Errors that are independent from one latent dimension to the next propagate through `|W_UV|`.

use super::accumulation::{Contribution, HalfUlp, merge_arithmetic, partial_rounding};
use super::output::{StateBound, Terms, bound_state};
use super::{Certified, CertifiedPart, certify_moments, gamma};
use crate::attention::plain::{Element, Problem, Values};
use crate::attention::streaming;
use crate::moments::{Moments, Passes, State, Underivable};
use crate::split::Split;
use crate::visibility::Visible;
use rayon::prelude::*;
use shardcheck_formats::contract::Contract;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// When the outputs are projected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProjectionOrder {
    /// The merged latent output is stored in the contract's output format, then projected.
    AfterMerge,
    /// Each rank projects its stored partial (ATOM "project before merge"), so that shorter vectors travel.
    BeforeMerge,
}

/// A name that is no projection order.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown projection order `{0}`: use after_merge or before_merge")]
pub struct UnknownProjectionOrder(pub String);

impl ProjectionOrder {
    /// Both orders.
    pub const ALL: [Self; 2] = [Self::AfterMerge, Self::BeforeMerge];

    /// The name used in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AfterMerge => "after_merge",
            Self::BeforeMerge => "before_merge",
        }
    }
}

impl fmt::Display for ProjectionOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ProjectionOrder {
    type Err = UnknownProjectionOrder;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|order| order.name() == text);
        known.ok_or_else(|| UnknownProjectionOrder(text.to_owned()))
    }
}

/// An up-projection per head, of exact weights.
#[derive(Debug, Clone, Copy)]
pub struct UpProjection<'a> {
    /// `W_UV`, `[heads, latent, v_dim]`, where `latent` is the problem's `v_dim`.
    pub weights: &'a [f32],
    /// Length of a projected vector, `V`.
    pub v_dim: usize,
}

/// Bounds before and after the projection.
#[derive(Debug, Clone, PartialEq)]
pub struct CertifiedProjection {
    /// The latent results: merged output, partials and LSEs.
    pub latent: Certified,
    /// The projected output. Its partials are the projected ones if the projection comes before the merge;
    /// otherwise there are none.
    pub projected: Certified,
}

/// The bound of `y = o·W_UV`. Exact weights, accumulation at the contract's `u_acc` in any order, one rounding of
/// `y` at the end (for [`super::interval`]) and, before a merge, of each rank's `y_r` to the partial format.
///
/// Beside E1 and E2 of the projected values, with `L(x) = Σ_c x_c·|W_c|`:
///
/// ```text
/// after:   L(E3 + E4 + E5 + rest) + L(hulp_output(|o| + pre)) + γ(R, u_acc)·L(|o| + pre + hulp)
/// before:  L(E3 + rest) + Σ_r g_r·[ L(hulp_partial(|o_r| + preR)) + γ(R, u_acc)·L(|o_r| + preR + hulp) ]
///          + Σ_r g_r·hulp_partial(|y_r| + preY_r) + merge arithmetic of the y_r
/// preY_r = preR of the projected values + L(2.1·(γ(h, u_acc) + γ(h, u) + 3u)·Σp|v|) + the bracket above
/// ```
///
/// # Errors
/// [`Underivable`].
///
/// # Panics
/// The shapes do not fit.
pub fn certify_projected<T: Element>(
    problem: &Problem<T>,
    split: Split,
    visible: &[Visible],
    contract: &Contract,
    projection: &UpProjection,
    order: ProjectionOrder,
) -> Result<CertifiedProjection, Underivable> {
    let (latent_dim, v_dim) = (problem.v_dim, projection.v_dim);
    assert_eq!(
        projection.weights.len(),
        problem.heads * latent_dim * v_dim,
        "weights are not [heads, latent, v_dim]"
    );
    let passes = Passes::needed_by(contract);
    let moments = Moments::collect(problem, split, visible, passes)?;
    let latent = certify_moments(&moments, contract, false)?;
    let by_head = (0..problem.heads)
        .into_par_iter()
        .map(|head| {
            let values = project_head(problem, split, visible, projection, head, passes)?;
            let weights = &projection.weights[head * latent_dim * v_dim..(head + 1) * latent_dim * v_dim];
            let absolute: Vec<f64> = weights.iter().map(|w| f64::from(w.abs())).collect();
            let one = |row: usize| {
                let latent_bound = bound_state(&moments, contract, row, head)?;
                let values_bound = bound_state(&values, contract, row, 0)?;
                let latent = &moments.states[row * moments.heads + head];
                let (values, absolute) = (&values.states[row], absolute.as_slice());
                Ok(One { contract, absolute, latent, latent_bound, values, values_bound }.bound(order))
            };
            (0..moments.rows).map(one).collect::<Result<Vec<_>, _>>()
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut projected = Certified {
        rows: moments.rows,
        heads: moments.heads,
        v_dim,
        world: split.parts(),
        out: Vec::new(),
        lse: latent.lse.clone(),
        pre: Vec::new(),
        lse_bound: latent.lse_bound.clone(),
        practical_lse_bound: latent.practical_lse_bound.clone(),
        partials: Vec::new(),
        terms: Some(Vec::new()),
    };
    if order == ProjectionOrder::BeforeMerge {
        let latent_partials = latent.partials.iter().cloned();
        projected.partials =
            latent_partials.map(|part| CertifiedPart { out: Vec::new(), pre: Vec::new(), ..part }).collect();
    }
    for row in 0..moments.rows {
        for bounds in &by_head {
            projected.push_projected(&bounds[row]);
        }
    }
    Ok(CertifiedProjection { latent, projected })
}

/// What comes of one state.
struct Projected {
    out: Vec<f64>,
    terms: Terms,
    /// `[parts]`; none where the merge comes first.
    partials: Vec<ProjectedPart>,
}

/// A rank's projected output `y_r` and its bound, rounding included, `[v_dim]` each.
struct ProjectedPart {
    out: Vec<f64>,
    pre: Vec<f64>,
}

impl Certified {
    fn push_projected(&mut self, state: &Projected) {
        self.out.extend(&state.out);
        self.pre.extend(state.terms.total());
        for (partial, projected) in self.partials.iter_mut().zip(&state.partials) {
            partial.out.extend(&projected.out);
            partial.pre.extend(&projected.pre);
        }
        if let Some(terms) = &mut self.terms {
            terms.push(state.terms.clone());
        }
    }
}

/// Moments of one head over the projected values; every row is a state.
fn project_head<T: Element>(
    problem: &Problem<T>,
    split: Split,
    visible: &[Visible],
    projection: &UpProjection,
    head: usize,
    passes: Passes,
) -> Result<Moments, Underivable> {
    let (latent_dim, v_dim, kv_head) = (problem.v_dim, projection.v_dim, problem.kv_head(head));
    let weights = &projection.weights[head * latent_dim * v_dim..(head + 1) * latent_dim * v_dim];
    let query: Vec<f64> =
        (0..problem.rows()).flat_map(|row| problem.query_at(row, head)).map(|x| (*x).into()).collect();
    let end = visible.iter().map(Visible::end).max().unwrap_or(0);
    let tokens: Vec<usize> =
        (0..end).filter(|&token| visible.iter().any(|seen| seen.contains(token))).collect();
    let mut key = vec![0.0; end * problem.qk_dim];
    for &token in &tokens {
        for (to, from) in key[token * problem.qk_dim..].iter_mut().zip(problem.key_at(token, kv_head)) {
            *to = (*from).into();
        }
    }
    let mut value = vec![0.0; end * v_dim];
    streaming::project_values(problem, kv_head, &tokens, weights, v_dim, &mut value);
    let sink = problem.sink.map(|sink| [sink[head]]);
    let head_problem = Problem {
        heads: 1,
        kv_heads: 1,
        qk_dim: problem.qk_dim,
        v_dim,
        scale: problem.scale,
        query: &query,
        key: &key,
        value: Values::Separate(&value),
        sink: sink.as_ref().map(|sink| sink.as_slice()),
        softcap: problem.softcap,
    };
    Moments::collect(&head_problem, split, visible, passes)
}

/// One state before and after the projection.
struct One<'a> {
    contract: &'a Contract,
    /// `|W_UV|` of the head, `[latent, v_dim]`.
    absolute: &'a [f64],
    latent: &'a State,
    latent_bound: StateBound,
    values: &'a State,
    values_bound: StateBound,
}

impl One<'_> {
    fn v_dim(&self) -> usize {
        self.values.out.len()
    }

    /// `L(x) = Σ_c x_c·|W_c|`, `[v_dim]`.
    fn spread(&self, x: impl Fn(usize) -> f64) -> Vec<f64> {
        let mut sum = vec![0.0; self.v_dim()];
        for (c, row) in self.absolute.chunks_exact(self.v_dim()).enumerate() {
            let x = x(c);
            for (sum, weight) in sum.iter_mut().zip(row) {
                *sum += x * weight;
            }
        }
        sum
    }

    /// Relative error of a product with `W_UV`.
    fn product_error(&self) -> f64 {
        gamma(self.latent.out.len(), self.contract.u_acc)
    }

    fn bound(&self, order: ProjectionOrder) -> Projected {
        let (terms, partials) = match order {
            ProjectionOrder::AfterMerge => (self.after(), Vec::new()),
            ProjectionOrder::BeforeMerge => self.before(),
        };
        Projected { out: self.values.out.clone(), terms, partials }
    }

    fn after(&self) -> Terms {
        let (own, error) = (&self.latent_bound.terms, self.product_error());
        let half_ulp = HalfUlp::of(self.contract.output);
        let stored = |c: usize| {
            let magnitude = self.latent.out[c].abs() + self.latent_bound.pre[c];
            (magnitude, half_ulp.at(magnitude))
        };
        let product = self.spread(|c| error * (stored(c).0 + stored(c).1));
        let sum = self.spread(|c| own.sum[c]);
        let values = &self.values_bound.terms;
        Terms {
            score: values.score.clone(),
            probability: values.probability.clone(),
            sum: add(&sum, &product),
            partial: self.spread(|c| own.partial[c] + stored(c).1),
            merge: self.spread(|c| own.merge[c]),
            rest: add(&values.rest, &self.spread(|c| own.rest[c])),
        }
    }

    fn before(&self) -> (Terms, Vec<ProjectedPart>) {
        let (own, values, error) = (&self.latent_bound.terms, &self.values_bound.terms, self.product_error());
        let summed = super::summation(self.contract, self.latent.tokens);
        let merged = self.latent.parts.len() > 1;
        let mut terms = Terms {
            score: values.score.clone(),
            probability: values.probability.clone(),
            sum: self.spread(|c| own.sum[c]),
            partial: vec![0.0; self.v_dim()],
            merge: vec![0.0; self.v_dim()],
            rest: add(&values.rest, &self.spread(|c| own.rest[c])),
        };
        let (mut shares, mut partials) = (vec![Vec::new(); self.v_dim()], Vec::new());
        let half_ulp = HalfUlp::of(self.contract.partial);
        for (rank, part) in self.latent.parts.iter().enumerate() {
            let pre = &self.latent_bound.parts[rank].pre;
            let magnitude = |c: usize| part.out[c].abs() + pre[c];
            let stored = self.spread(|c| half_ulp.at(magnitude(c)));
            let product = self.spread(|c| error * (magnitude(c) + half_ulp.at(magnitude(c))));
            let sums = self.spread(|c| 2.1 * summed * part.abs[c]);
            for v in 0..self.v_dim() {
                terms.partial[v] += part.weight * stored[v];
                terms.sum[v] += part.weight * product[v];
                let pre = self.values_bound.parts[rank].pre[v] + sums[v] + stored[v] + product[v];
                shares[v].push(Contribution {
                    weight: part.weight,
                    out: self.values.parts[rank].out[v],
                    pre,
                });
            }
            let rounded = |share: &Contribution| share.pre + half_ulp.at(share.out.abs() + share.pre);
            let pre = shares.iter().map(|shares| rounded(&shares[rank])).collect();
            partials.push(ProjectedPart { out: self.values.parts[rank].out.clone(), pre });
        }
        if merged {
            let unnormalised = (2.0 * self.latent_bound.merge_weight_error).exp_m1();
            for v in 0..self.v_dim() {
                terms.partial[v] += partial_rounding(&shares[v], half_ulp);
                let before = terms.score[v] + terms.probability[v] + terms.sum[v] + terms.partial[v];
                terms.merge[v] = merge_arithmetic(self.contract, &shares[v], half_ulp)
                    + (self.values.out[v].abs() + before) * unnormalised;
            }
        }
        (terms, partials)
    }
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use shardcheck_formats::codec::half_ulp;
    use shardcheck_formats::contract::Merge;
    use shardcheck_formats::dtype::Dtype;
    use shardcheck_formats::recipe::Counter;

    #[test]
    fn the_exact_projection_is_the_projection_of_the_exact_latent() {
        let mut random = Counter::new(9, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
        let (heads, qk_dim, latent, v_dim, tokens) = (2, 6, 5, 3, 20);
        let (query, key, weights) =
            (draw(heads * qk_dim), draw(tokens * qk_dim), draw(heads * latent * v_dim));
        let problem = Problem::new(heads, 1, qk_dim, latent, 0.4, &query, &key, Values::KeyPrefix);
        let layout = Layout::new(3, 1, 1).unwrap();
        let contract = Contract::bf16_default(Merge::A2a);
        let projection = UpProjection { weights: &weights, v_dim };
        for order in ProjectionOrder::ALL {
            let visible = [Visible::Prefix(tokens)];
            let both =
                certify_projected(&problem, Split::Ranks(&layout), &visible, &contract, &projection, order)
                    .unwrap();
            for head in 0..heads {
                for v in 0..v_dim {
                    let exact: f64 = (0..latent)
                        .map(|c| {
                            both.latent.out[head * latent + c]
                                * f64::from(weights[(head * latent + c) * v_dim + v])
                        })
                        .sum();
                    approx::assert_abs_diff_eq!(exact, both.projected.out[head * v_dim + v], epsilon = 1e-13);
                }
            }
            assert_eq!(both.projected.lse, both.latent.lse);
            assert_eq!(
                both.projected.partials.len(),
                if order == ProjectionOrder::BeforeMerge { 3 } else { 0 }
            );
        }
    }

    /// What a projection is made of: the bound of the latent, that of the projected values, and `L`.
    struct Parts<'a> {
        contract: &'a Contract,
        latent: (State, StateBound),
        values: (State, StateBound),
        weights: &'a [f32],
    }

    impl Parts<'_> {
        fn spread(&self, v: usize, x: impl Fn(usize) -> f64) -> f64 {
            let (latent, v_dim) = (self.latent.0.out.len(), self.values.0.out.len());
            (0..latent).map(|c| x(c) * f64::from(self.weights[c * v_dim + v].abs())).sum()
        }

        fn product(&self) -> f64 {
            gamma(self.latent.0.out.len(), self.contract.u_acc)
        }

        /// All terms but E1 and E2, which are those of the projected values.
        fn after(&self, v: usize) -> [f64; 4] {
            let (state, bound) = &self.latent;
            let reach = |c: usize| state.out[c].abs() + bound.pre[c];
            let stored = |c: usize| half_ulp(self.contract.output, reach(c));
            let terms = &bound.terms;
            [
                self.spread(v, |c| terms.sum[c] + self.product() * (reach(c) + stored(c))),
                self.spread(v, |c| terms.partial[c] + stored(c)),
                self.spread(v, |c| terms.merge[c]),
                self.spread(v, |c| terms.rest[c]) + self.values.1.terms.rest[v],
            ]
        }

        /// The same before the merge, and the bound of each rank's projected output.
        fn before(&self, v: usize) -> ([f64; 4], Vec<f64>) {
            let ((state, bound), (values, values_bound)) = (&self.latent, &self.values);
            let partial = self.contract.partial;
            let [mut sum, mut rounded] = [self.spread(v, |c| bound.terms.sum[c]), 0.0];
            let (mut shares, mut ranks) = (Vec::new(), Vec::new());
            for (rank, part) in state.parts.iter().enumerate() {
                let reach = |c: usize| part.out[c].abs() + bound.parts[rank].pre[c];
                let stored = self.spread(v, |c| half_ulp(partial, reach(c)));
                let product = self.product() * self.spread(v, |c| reach(c) + half_ulp(partial, reach(c)));
                let summed = 2.1 * crate::bound::summation(self.contract, state.tokens);
                let sums = summed * self.spread(v, |c| part.abs[c]);
                let out = values.parts[rank].out[v];
                let pre = values_bound.parts[rank].pre[v] + sums + stored + product;
                sum += part.weight * product;
                rounded += part.weight * stored;
                ranks.push(pre + half_ulp(partial, out.abs() + pre));
                shares.push(Contribution { weight: part.weight, out, pre });
            }
            let rest = values_bound.terms.rest[v] + self.spread(v, |c| bound.terms.rest[c]);
            if shares.len() == 1 {
                return ([sum, rounded, 0.0, rest], ranks);
            }
            let travel: f64 = shares.iter().map(|s| s.weight * half_ulp(partial, s.out.abs() + s.pre)).sum();
            let so_far =
                values_bound.terms.score[v] + values_bound.terms.probability[v] + sum + rounded + travel;
            let common = (2.0 * bound.merge_weight_error).exp_m1() * (values.out[v].abs() + so_far);
            let merge = merge_arithmetic(self.contract, &shares, HalfUlp::of(partial)) + common;
            ([sum, rounded + travel, merge, rest], ranks)
        }
    }

    #[test]
    fn every_term_of_a_projection_is_what_its_formula_says() {
        let mut random = Counter::new(10, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
        let (heads, qk_dim, latent, v_dim, tokens) = (2, 6, 5, 3, 20);
        let (query, key, weights) =
            (draw(heads * qk_dim), draw(tokens * qk_dim), draw(heads * latent * v_dim));
        let problem = Problem::new(heads, 1, qk_dim, latent, 0.4, &query, &key, Values::KeyPrefix);
        let visible = [Visible::Prefix(tokens)];
        let finer = Contract { partial: Dtype::F32, ..Contract::bf16_default(Merge::A2a) };
        for (world, contract) in
            [(3, Contract::bf16_default(Merge::AgRsBf16)), (2, finer.clone()), (1, finer)]
        {
            let layout = Layout::new(world, 1, 1).unwrap();
            let projection = UpProjection { weights: &weights, v_dim };
            let certified = |order| {
                certify_projected(&problem, Split::Ranks(&layout), &visible, &contract, &projection, order)
                    .unwrap()
            };
            let (after, before) =
                (certified(ProjectionOrder::AfterMerge), certified(ProjectionOrder::BeforeMerge));
            let moments = Moments::collect(&problem, Split::Ranks(&layout), &visible, Passes::One).unwrap();
            for head in 0..heads {
                let weights = &weights[head * latent * v_dim..][..latent * v_dim];
                let value = |t: usize, v: usize| -> f64 {
                    (0..latent)
                        .map(|c| f64::from(key[t * qk_dim + c]) * f64::from(weights[c * v_dim + v]))
                        .sum()
                };
                let value: Vec<f64> = (0..tokens * v_dim).map(|at| value(at / v_dim, at % v_dim)).collect();
                let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
                let (query, key) = (wide(&query[head * qk_dim..][..qk_dim]), wide(&key));
                let values = Problem::new(1, 1, qk_dim, v_dim, 0.4, &query, &key, Values::Separate(&value));
                let values = Moments::collect(&values, Split::Ranks(&layout), &visible, Passes::One).unwrap();
                let bound = |moments: &Moments, head: usize| {
                    (moments.states[head].clone(), bound_state(moments, &contract, 0, head).unwrap())
                };
                let parts = Parts {
                    contract: &contract,
                    latent: bound(&moments, head),
                    values: bound(&values, 0),
                    weights,
                };
                for v in 0..v_dim {
                    let at = head * v_dim + v;
                    let (written, ranks) = parts.before(v);
                    for (both, written) in [(&after, parts.after(v)), (&before, written)] {
                        let terms = &both.projected.terms.as_ref().unwrap()[head];
                        let own = [terms.sum[v], terms.partial[v], terms.merge[v], terms.rest[v]];
                        for (own, written) in own.iter().zip(written) {
                            approx::assert_relative_eq!(*own, written, max_relative = 1e-9);
                        }
                        let given = [terms.score[v], terms.probability[v]];
                        let of_values = &parts.values.1.terms;
                        approx::assert_relative_eq!(given[0], of_values.score[v], max_relative = 1e-9);
                        approx::assert_relative_eq!(given[1], of_values.probability[v], max_relative = 1e-9);
                        let total: f64 = own.iter().chain(&given).sum();
                        approx::assert_relative_eq!(both.projected.pre[at], total, max_relative = 1e-12);
                    }
                    for (rank, written) in ranks.into_iter().enumerate() {
                        let (own, exact) =
                            (&before.projected.partials[rank], &parts.values.0.parts[rank].out);
                        approx::assert_relative_eq!(own.pre[at], written, max_relative = 1e-9);
                        approx::assert_relative_eq!(own.out[at], exact[v], epsilon = 1e-12);
                    }
                }
            }
            assert!(before.projected.partials.iter().all(|part| part.out.len() == heads * v_dim));
        }
    }

    #[test]
    fn orders_are_known_by_name() {
        for order in ProjectionOrder::ALL {
            assert_eq!(order.to_string().parse(), Ok(order));
        }
        assert!("during".parse::<ProjectionOrder>().is_err());
    }
}
