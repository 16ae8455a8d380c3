//! The bound against its formulas, written out token by token.

use super::output::bound_state_merged;
use super::*;
use crate::attention::plain::{Problem, Values};
use crate::layout::Layout;
use crate::moments::{Moments, Passes, RIVAL_GAP, State, Underivable};
use crate::split::Split;
use crate::visibility::Visible;
use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::{Depth, Merge};
use shardcheck_formats::dtype::Dtype;
use shardcheck_formats::recipe::Counter;

/// A token with its probability in its part, score, size and value.
struct Token {
    p: f64,
    score: f64,
    size: f64,
    value: Vec<f64>,
}

/// A state with its tokens by part.
struct Written<'a> {
    contract: &'a Contract,
    state: &'a State,
    parts: Vec<Vec<Token>>,
    qk_dim: usize,
    softcap: Option<f64>,
    merges: f64,
}

/// Sums of a row or a part that several bounds are made of.
#[derive(Clone, Copy)]
struct Means {
    mean: f64,
    square: f64,
    own: f64,
}

impl Written<'_> {
    fn count(&self) -> f64 {
        self.parts.len() as f64
    }

    fn alpha(&self, size: f64, score: f64) -> f64 {
        let (contract, state) = (self.contract, self.state);
        let rescales = 1.0 + state.tokens as f64 / contract.tile_min as f64 + self.count();
        let softcap = self.softcap.map_or(0.0, |cap| cap * (2.0 * contract.kexp + 6.0));
        let common = state.max_abs_score + state.score_range.min(110.0) + softcap;
        gamma(self.qk_dim, contract.u_acc) * size
            + U32 * (5.0 * score + common + (2.0 * contract.kexp + 2.0) * rescales)
    }

    fn eta(&self) -> f64 {
        let lse = if self.state.lse.is_finite() { self.state.lse.abs() } else { 0.0 };
        let largest = self.state.max_abs_score.max(lse + (self.state.tokens.max(1) as f64).ln());
        let one = U32 * (6.0 * largest + 4.0 * self.contract.kexp + 4.0) + self.contract.lse_rel * largest;
        if self.parts.len() > 1 { self.merges * one } else { 0.0 }
    }

    fn largest(&self, tokens: &[Token], eta: f64) -> f64 {
        let size = tokens.iter().map(|token| token.size).fold(0.0, f64::max);
        self.alpha(size, self.state.max_abs_score) + eta
    }

    fn means(&self, tokens: &[Token]) -> Means {
        let over = |f: &dyn Fn(f64) -> f64, eta: f64| -> f64 {
            tokens.iter().map(|token| token.p * f(self.alpha(token.size, token.score.abs()) + eta)).sum()
        };
        let series = |eta: f64| {
            let last = self.largest(tokens, eta).exp() / 24.0;
            over(&|a| a + a.powi(2) / 2.0 + a.powi(3) / 6.0 + a.powi(4) * last, eta)
        };
        let last = 7.0 / 12.0 * (2.0 * self.largest(tokens, self.eta())).exp();
        let square = over(&|a| a.powi(2) + a.powi(3) + a.powi(4) * last, self.eta());
        Means { mean: series(self.eta()), square, own: series(0.0) }
    }

    fn row_means(&self) -> Means {
        let mut row = Means { mean: 0.0, square: 0.0, own: 0.0 };
        for (part, tokens) in self.state.parts.iter().zip(&self.parts) {
            let means = self.means(tokens);
            row.mean += part.weight * means.mean;
            row.square += part.weight * means.square;
            row.own += part.weight * means.own;
        }
        if let Some((logit, p)) = self.state.sink {
            let alpha = self.alpha(0.0, logit.abs());
            row.mean += p * (alpha + self.eta()).exp_m1();
            row.square += p * (alpha + self.eta()).exp_m1().powi(2);
            row.own += p * alpha.exp_m1();
        }
        row
    }

    fn summed(&self) -> f64 {
        let depth = self.contract.depth_for(self.state.tokens);
        gamma(depth, self.contract.u_acc) + gamma(depth, U32) + 3.0 * U32
    }

    fn exact_max(&self) -> bool {
        let largest = self.parts.iter().map(|tokens| self.largest(tokens, self.eta())).fold(0.0, f64::max);
        self.contract.exact_max && self.state.sink.is_none() && 2.0 * largest <= RIVAL_GAP
    }

    /// Place of the token with the largest probability, where it escapes rounding.
    fn exact(&self, tokens: &[Token]) -> Option<usize> {
        let largest = (0..tokens.len()).reduce(|a, b| if tokens[b].p > tokens[a].p { b } else { a });
        largest.filter(|_| self.exact_max())
    }

    /// `Σ pe·f(value)` over the tokens of a part that round.
    fn rounded(&self, tokens: &[Token], f: impl Fn(&Token) -> f64) -> f64 {
        let peak = tokens.iter().map(|token| token.p).fold(0.0, f64::max);
        let floor = match self.contract.p_dtype {
            Some(Dtype::F16) => self.contract.p_floor.max(2f64.powi(-25)),
            _ => self.contract.p_floor,
        };
        let exact = self.exact(tokens);
        let rounding = tokens.iter().enumerate().filter(|(index, _)| exact != Some(*index));
        rounding.map(|(_, token)| (self.contract.u_p() * token.p + floor * peak) * f(token)).sum()
    }

    /// What the largest token of a part may be off by, times its `|v|`.
    fn rival(&self, index: usize, d: usize) -> f64 {
        let (part, tokens) = (&self.state.parts[index], &self.parts[index]);
        let (Some(exact), Some(rival)) = (self.exact(tokens), part.rival_a) else { return 0.0 };
        let further = gamma(self.qk_dim, self.contract.u_acc) * (rival - tokens[exact].size).max(0.0);
        part.peak * (further + 5.0 * U32 * RIVAL_GAP).exp_m1() * tokens[exact].value[d].abs()
    }

    fn pre_of_part(&self, index: usize, d: usize) -> f64 {
        let (part, tokens) = (&self.state.parts[index], &self.parts[index]);
        if tokens.is_empty() {
            return 0.0;
        }
        let means = self.means(tokens);
        let growth = ((1.0 + 2.0 * means.mean) / (1.0 - means.mean)).max(1.05);
        let most = self.largest(tokens, self.eta()).exp_m1() * part.abs[d];
        let weights = (means.square * part.square[d]).sqrt().min(most);
        let probability = self.rounded(tokens, |token| token.value[d].abs()) + self.rival(index, d);
        let normaliser = self.rounded(tokens, |_| part.out[d].abs());
        growth * (2.0 * weights + probability + 2.0 * self.summed() * part.abs[d])
            + if self.contract.l_rounded { normaliser } else { 0.0 }
            + TINY32 * (part.sum_abs[d] + 1.0)
    }

    fn over_parts(&self, f: impl Fn(usize) -> f64) -> f64 {
        (0..self.parts.len()).map(|index| self.state.parts[index].weight * f(index)).sum()
    }

    /// E1, E2, E3, E4, E5 and the rest.
    fn terms(&self, d: usize) -> [f64; 6] {
        let (state, contract, means) = (self.state, self.contract, self.row_means());
        let growth = (1.0 + 2.0 * means.mean) / (1.0 - means.mean);
        let abs = self.over_parts(|index| state.parts[index].abs[d]);
        let square = self.over_parts(|index| state.parts[index].square[d]);
        let spread = (square - state.out[d].powi(2)).max(0.0) + 1e-13 * square;
        let score = (means.square * spread).sqrt() / (1.0 - means.mean);
        let plain = self.over_parts(|index| self.rounded(&self.parts[index], |token| token.value[d].abs()));
        let rounding = self.over_parts(|index| self.rounded(&self.parts[index], |_| 1.0));
        let centred = if contract.l_rounded { self.centred(d) / (1.0 - rounding) } else { 0.0 };
        let probability = plain.max(centred) * growth;
        let sum = self.summed() * (abs + score + probability);
        let rivals = self.over_parts(|index| self.rival(index, d)) * growth;
        let sum_abs: f64 = state.parts.iter().map(|part| part.sum_abs[d]).sum();
        let underflow = if state.tokens > 0 { TINY32 * (1.0 + sum_abs) } else { 0.0 };
        let rest = rivals * (1.0 + self.summed()) + underflow + 1e-13 * abs;
        if self.parts.len() == 1 {
            return [score, probability, sum, 0.0, 0.0, rest];
        }
        let reach = |index: usize| state.parts[index].out[d].abs() + self.pre_of_part(index, d);
        let partial = self.over_parts(|index| half_ulp(contract.partial, reach(index)));
        let common = (2.0 * self.eta()).exp_m1();
        let merge = self.merge(d) + (state.out[d].abs() + score + probability + sum) * common;
        [score, probability, sum, partial, merge, rest + (partial + rivals) * common]
    }

    /// `Σ pe·|v − o|`, the floor by `|v| + |o|` of every token.
    fn centred(&self, d: usize) -> f64 {
        let out = self.state.out[d];
        self.over_parts(|index| {
            let (part, tokens) = (&self.state.parts[index], &self.parts[index]);
            let exact = self.exact(tokens);
            let rounding = tokens.iter().enumerate().filter(|(index, _)| exact != Some(*index));
            let relative: f64 = rounding.map(|(_, token)| token.p * (token.value[d] - out).abs()).sum();
            let floor: f64 = tokens.iter().map(|token| token.value[d].abs() + out.abs()).sum();
            self.contract.u_p() * relative + self.contract.p_floor * part.peak * floor
        })
    }

    /// Arithmetic of the merge.
    fn merge(&self, d: usize) -> f64 {
        let (state, contract) = (self.state, self.contract);
        let reach = |index: usize| state.parts[index].out[d].abs() + self.pre_of_part(index, d);
        let stored =
            |dtype: Dtype, x: f64| x * (1.0 + dtype.unit_roundoff()) + half_ulp(dtype, f64::MIN_POSITIVE);
        let magnitude = self.over_parts(|index| stored(contract.partial, reach(index)));
        let in_f32 = (self.count() + 4.0) * U32 * magnitude;
        let added = match contract.merge {
            Merge::A2a | Merge::AgRsF32 => return in_f32,
            Merge::AgRsBf16 => Dtype::Bf16,
            Merge::AgRsF16 => Dtype::F16,
        };
        let (unit, in_added) = (added.unit_roundoff(), |x: f64| half_ulp(added, x));
        let shares: Vec<usize> = (0..self.parts.len()).collect();
        let product = |index: &usize| in_added(state.parts[*index].weight * stored(added, reach(*index)));
        let products: f64 = shares.iter().map(product).sum();
        let moved = self
            .over_parts(|index| self.pre_of_part(index, d) + 2.0 * unit * state.parts[index].out[d].abs());
        let per_part = self.count() * unit;
        let steps = 2.0 * self.count() * half_ulp(added, f64::MIN_POSITIVE);
        let slack = (1.0 + per_part) * moved + per_part * magnitude + steps;
        let finer = contract.output.unit_roundoff() < unit;
        let inner = |size: usize| {
            // the largest magnitude of any sum of at most `size` terms
            let sums = (0..1u32 << shares.len()).filter(|set| set.count_ones() as usize <= size).map(|set| {
                let chosen = shares.iter().filter(|index| set >> **index & 1 == 1);
                chosen.map(|index| state.parts[*index].weight * state.parts[*index].out[d]).sum::<f64>().abs()
            });
            in_added(sums.fold(0.0, f64::max) + slack)
        };
        let last = if finer { shares.len() } else { shares.len() - 1 };
        in_f32 + products + (2..=last).map(inner).sum::<f64>()
    }

    fn lse_bound(&self, tokens: usize, lse: f64, own: f64, rounding: f64) -> f64 {
        if lse == f64::NEG_INFINITY {
            return 0.0;
        }
        let rounded = if self.contract.l_rounded { 1.1 * rounding } else { 0.0 };
        own / (1.0 - own) + gamma(self.contract.depth_for(tokens), U32) + 4.0 * U32 * lse.abs() + rounded
    }

    fn practical(&self, tokens: usize, lse: f64, mean_size: f64) -> Option<f64> {
        let largest = self.state.max_abs_score;
        if lse == f64::NEG_INFINITY {
            return Some(0.0);
        }
        if self.contract.l_rounded || mean_size > (self.qk_dim as f64).sqrt() * (1.0 + largest) {
            return None;
        }
        let (steps, depth) = match self.contract.depth {
            Depth::PerTile { tile, extra } => {
                ((self.qk_dim as f64 / tile as f64).ceil() + 1.0, tokens as f64 / tile as f64 + extra as f64)
            }
            Depth::Any => (self.qk_dim as f64, tokens as f64),
        };
        let random = U32 * (16.0 * (1.0 + lse.abs() + largest) + 8.0 * depth.sqrt());
        Some(random + steps * self.contract.u_acc * mean_size / 8.0 + self.contract.lse_rel * lse.abs())
    }

    fn check(&self, bound: &StateBound) {
        close(bound.merge_weight_error, self.eta(), "eta");
        for d in 0..self.state.out.len() {
            let size = self.over_parts(|index| self.state.parts[index].abs[d]);
            let terms = &bound.terms;
            let names = ["score", "probability", "sum", "partial", "merge", "rest"];
            let ours =
                [&terms.score, &terms.probability, &terms.sum, &terms.partial, &terms.merge, &terms.rest];
            for ((name, ours), written) in names.iter().zip(ours).zip(self.terms(d)) {
                close_to(ours[d], written, size, name);
            }
            close_to(bound.pre[d], self.terms(d).iter().sum(), size, "pre");
            close(terms.total()[d], bound.pre[d], "total");
            for (index, part) in bound.parts.iter().enumerate() {
                close_to(
                    part.pre[d],
                    self.pre_of_part(index, d),
                    self.state.parts[index].abs[d],
                    "pre of a part",
                );
            }
        }
        let rounding = self.over_parts(|index| self.rounded(&self.parts[index], |_| 1.0));
        let eta = if self.state.lse == f64::NEG_INFINITY { 0.0 } else { self.eta() };
        let own = self.row_means().own;
        let written = self.lse_bound(self.state.tokens, self.state.lse, own, rounding) + eta;
        close_to(bound.lse_bound, written, 1.0, "lse");
        let mean_size = |tokens: &[Token]| tokens.iter().map(|token| token.p * token.size).sum::<f64>();
        let row_size = self.over_parts(|index| mean_size(&self.parts[index]));
        same(bound.practical_lse_bound, self.practical(self.state.tokens, self.state.lse, row_size));
        for (index, part) in self.state.parts.iter().enumerate() {
            let (tokens, bound) = (&self.parts[index], &bound.parts[index]);
            let rounding = self.rounded(tokens, |_| 1.0);
            let written = self.lse_bound(part.tokens, part.lse, self.means(tokens).own, rounding);
            close_to(bound.lse_bound, written, 1.0, "lse of a part");
            same(bound.practical_lse_bound, self.practical(part.tokens, part.lse, mean_size(tokens)));
        }
    }
}

#[track_caller]
fn close(a: f64, b: f64, what: &str) {
    close_to(a, b, 0.0, what);
}

/// Differences of numbers as large as `size` may have cancelled.
#[track_caller]
fn close_to(a: f64, b: f64, size: f64, what: &str) {
    assert!(a == b || (a - b).abs() <= 1e-10 * b.abs() + 1e-16 * size, "{what}: {a:e} against {b:e}");
}

#[track_caller]
fn same(a: Option<f64>, b: Option<f64>) {
    assert_eq!(a.is_some(), b.is_some(), "{a:?} against {b:?}");
    close(a.unwrap_or(0.0), b.unwrap_or(0.0), "practical");
}

/// Contracts that between them use every parameter.
fn contracts() -> Vec<Contract> {
    let usual = Contract::bf16_default;
    let narrow = |exact_max| Contract {
        p_dtype: Some(Dtype::E4m3fn),
        p_floor: 2f64.powi(-10),
        l_rounded: true,
        exact_max,
        ..usual(Merge::A2a)
    };
    vec![
        usual(Merge::A2a),
        usual(Merge::AgRsBf16),
        Contract { output: Dtype::F32, depth: Depth::Any, ..usual(Merge::AgRsBf16) },
        Contract { p_dtype: None, partial: Dtype::F32, ..usual(Merge::AgRsF32) },
        narrow(true),
        narrow(false),
        Contract {
            p_dtype: Some(Dtype::F16),
            partial: Dtype::F16,
            lse_rel: 2f64.powi(-16),
            ..usual(Merge::A2a)
        },
        Contract { depth: Depth::Any, ..usual(Merge::AgRsBf16).in_f16() },
        Contract { output: Dtype::F32, l_rounded: true, ..usual(Merge::AgRsBf16).in_f16() },
        Contract { u_acc: 2f64.powi(-11), kexp: 15.0, tile_min: 16, l_rounded: true, ..usual(Merge::A2a) },
    ]
}

fn tokens_of(problem: &Problem, row: usize, head: usize, tokens: &[usize], lse: f64) -> Vec<Token> {
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let (query, kv_head) = (problem.query_at(row, head), problem.kv_head(head));
    let of = |&token: &usize| {
        let key = problem.key_at(token, kv_head);
        let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let scaled = dot * problem.scale;
        let score = problem.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        let value = problem.value_at(token, kv_head).iter().map(|v| f64::from(*v)).collect();
        let size = problem.scale.abs() * norm(query) * norm(key);
        Token { p: (score - lse).exp(), score, size, value }
    };
    tokens.iter().map(of).collect()
}

/// Compares every bound of a problem with its formulas; returns how many states were compared.
fn check_problem(problem: &Problem, layout: &Layout, visible: &[Visible]) -> usize {
    let moments = Moments::collect(problem, Split::Ranks(layout), visible, Passes::Two).unwrap();
    let mut compared = 0;
    for contract in contracts() {
        for (index, state) in moments.states.iter().enumerate() {
            let (row, head) = (index / moments.heads, index % moments.heads);
            let held = Split::Ranks(layout).positions(&visible[row]);
            let of_part = |(tokens, part): (&Vec<usize>, &crate::moments::Part)| {
                tokens_of(problem, row, head, tokens, part.lse)
            };
            let parts = || held.iter().zip(&state.parts).map(of_part).collect();
            for merges in [1, 3] {
                let bound = match bound_state_merged(&moments, &contract, row, head, merges) {
                    Err(Underivable::WeightError { .. }) => continue,
                    bound => bound.unwrap(),
                };
                let (qk_dim, softcap) = (moments.qk_dim, problem.softcap);
                let contract = &contract;
                Written { contract, state, parts: parts(), qk_dim, softcap, merges: merges as f64 }
                    .check(&bound);
                compared += 1;
            }
        }
    }
    compared
}

#[test]
fn every_bound_is_what_its_formula_says() {
    let mut random = Counter::new(51, 0);
    let (heads, kv_heads, qk_dim, v_dim, tokens) = (4, 2, 6, 3, 29);
    let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
    let (query, mut key) = (draw(2 * heads * qk_dim), draw(tokens * kv_heads * qk_dim));
    let value = draw(tokens * kv_heads * v_dim);
    // tokens of equal scores: rivals of each other
    for token in 0..6 {
        key.copy_within(..kv_heads * qk_dim, (2 + 4 * token) * kv_heads * qk_dim);
    }
    let sink = [0.3, 1.5, -1.0, 2.0];
    let mut compared = 0;
    for (scale, loud) in [(0.4, false), (3.0, true)] {
        let mut problem =
            Problem::new(heads, kv_heads, qk_dim, v_dim, scale, &query, &key, Values::Separate(&value));
        for (world, with_sink, softcap) in
            [(3, false, None), (1, true, None), (4, true, Some(2.0)), (1, false, None)]
        {
            problem.sink = with_sink.then_some(sink.as_slice());
            problem.softcap = softcap;
            let layout = Layout::new(world, 1, 1).unwrap();
            compared += check_problem(&problem, &layout, &Visible::causal(tokens, 2));
            if !loud {
                // ranks without a token, and rows without any
                compared += check_problem(&problem, &layout, &[Visible::Prefix(2), Visible::Prefix(0)]);
            }
        }
    }
    assert!(compared > 1000, "{compared}");
}

#[test]
fn a_value_that_carries_no_weight_still_counts_for_underflow_and_one_token_for_the_oracle_s_rounding() {
    let (query, key, value) = ([1.0], [0.0, -2000.0, -2000.0], [0.0, 3.0, -2.0]);
    let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
    for (world, seen) in [(1, 3), (2, 3), (1, 1)] {
        check_problem(&problem, &Layout::new(world, 1, 1).unwrap(), &[Visible::Prefix(seen)]);
    }
    let one = [5.0];
    let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &[0.5], Values::Separate(&one));
    check_problem(&problem, &Layout::single(), &[Visible::Prefix(1)]);
}

#[test]
fn a_rank_whose_own_weights_may_be_off_by_a_factor_is_inconclusive_however_little_it_weighs() {
    // the second rank's token has a long key that the query hardly sees
    let mut query = vec![0f32; 64];
    (query[0], query[1]) = (1.0, 0.5);
    let mut key = vec![0f32; 128];
    (key[64], key[65]) = (-32.0, 34.0);
    let problem = Problem::new(1, 1, 64, 64, 1.0, &query, &key, Values::KeyPrefix);
    let contract = Contract { u_acc: 2f64.powi(-11), ..Contract::bf16_default(Merge::A2a) };
    let of = |visible| certify(&problem, &Layout::new(2, 1, 1).unwrap(), &[visible], &contract);
    let Err(Underivable::WeightError { weight_error, .. }) = of(Visible::Prefix(2)) else {
        panic!("a bound was stated")
    };
    assert!(weight_error >= 1.0, "{weight_error}");
    assert!(of(Visible::Prefix(1)).is_ok());
}
