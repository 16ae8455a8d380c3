//! The certified bound against ninety stored cases of an independent implementation of the same formulas.

mod stored;

use serde_json::Value;
use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::{Contract, Depth, Merge};
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::bound::{Certified, Terms, certify_moments, interval};
use shardcheck_references::layout::Layout;
use shardcheck_references::moments::{Moments, Passes};
use shardcheck_references::split::Split;
use shardcheck_references::visibility::Visible;
use stored::{Stored, count};

struct Case<'a> {
    stored: &'a Stored,
    name: &'a str,
    contract: Contract,
    moments: Moments,
    certified: Certified,
    rows: usize,
    heads: usize,
    v_dim: usize,
    world: usize,
}

fn contract(case: &Value) -> Contract {
    let stated = &case["contract"];
    let merge = stated["backend"].as_str().unwrap().parse::<Merge>().unwrap();
    let mut contract = Contract::bf16_default(merge);
    contract.u_acc = case["u_acc"].as_f64().unwrap();
    contract.depth = match stated["depth"].as_u64() {
        Some(_) => Depth::PerTile { tile: 16, extra: 16 },
        None => Depth::Any,
    };
    contract.l_rounded = stated["lrounded"].as_bool().unwrap();
    assert_eq!(stated["up"].as_f64().unwrap(), contract.u_p());
    assert_eq!(stated["pfloor"].as_f64().unwrap(), contract.p_floor);
    assert_eq!(stated["kexp"].as_f64().unwrap(), contract.kexp);
    assert_eq!(count(stated, "tile_min"), contract.tile_min);
    contract
}

fn run<'a>(stored: &'a Stored, case: &'a Value) -> Case<'a> {
    let name = case["case"].as_str().unwrap();
    let [rows, heads, kv_heads, qk_dim, v_dim, context, world, interleave] =
        ["rows", "heads", "kv_heads", "qk_dim", "v_dim", "context", "world", "interleave"]
            .map(|field| count(case, field));
    let (query, key) = (stored.f32(&format!("{name}.q")), stored.f32(&format!("{name}.k")));
    let value = stored.f32(&format!("{name}.v"));
    let scale = case["scale"].as_f64().unwrap();
    let problem = Problem::new(heads, kv_heads, qk_dim, v_dim, scale, &query, &key, Values::Separate(&value));
    let layout = Layout::new(world, interleave, interleave).unwrap();
    let contract = contract(case);
    let visible = Visible::causal(context, rows);
    let moments = Moments::collect(&problem, Split::Ranks(&layout), &visible, Passes::Two).unwrap();
    let certified = certify_moments(&moments, &contract, true).unwrap();
    Case { stored, name, contract, moments, certified, rows, heads, v_dim, world }
}

fn for_each_case(check: impl Fn(&Case)) {
    let Some(stored) = Stored::open("bounds/bounds") else { return };
    assert_eq!(stored.cases().len(), 90);
    for case in stored.cases() {
        check(&run(&stored, case));
    }
}

impl Case<'_> {
    fn tensor(&self, tensor: &str) -> Vec<f64> {
        self.stored.f64(&format!("{}.{tensor}", self.name))
    }

    /// `[rows, heads, v_dim]` of one term.
    fn term(&self, pick: impl Fn(&Terms) -> &Vec<f64>) -> Vec<f64> {
        self.certified.terms.as_ref().unwrap().iter().flat_map(|terms| pick(terms).clone()).collect()
    }

    /// The stored cases take the whole context for `n` in every row; ours takes what the row sees, which makes
    /// the earlier rows' bounds smaller. Only in the last row are the two the same.
    fn in_last_row(&self, index: usize) -> bool {
        index / (self.heads * self.v_dim) == self.rows - 1
    }

    /// Compares a term with the stored one, to `relative`, beside `absolute` for what float64 rounding leaves.
    fn compare(&self, tensor: &str, ours: &[f64], relative: f64, absolute: &[f64]) {
        for (index, ((ours, stored), absolute)) in
            ours.iter().zip(self.tensor(tensor)).zip(absolute).enumerate()
        {
            let slack = relative * stored + absolute;
            assert!(*ours <= stored + slack, "{} {tensor}[{index}]: {ours:e} above {stored:e}", self.name);
            let least = if self.in_last_row(index) { stored - slack } else { 0.9 * stored - slack };
            assert!(*ours >= least, "{} {tensor}[{index}]: {ours:e} far below {stored:e}", self.name);
        }
    }

    /// `(|o| + E1 + E2 + E3)·expm1(2η)`, the common error of merge weights that are not normalised again.
    fn unnormalised(&self) -> Vec<f64> {
        let terms = self.certified.terms.as_ref().unwrap();
        let mut all = Vec::new();
        for (state, terms) in self.moments.states.iter().zip(terms) {
            let largest = state.max_abs_score.max(state.lse.abs() + (state.tokens as f64).ln());
            let eta = 2f64.powi(-24) * (6.0 * largest + 4.0 * self.contract.kexp + 4.0);
            for d in 0..self.v_dim {
                let pre = terms.score[d] + terms.probability[d] + terms.sum[d];
                all.push((state.out[d].abs() + pre) * (2.0 * eta).exp_m1());
            }
        }
        all
    }

    /// What float64 leaves of a spread that is nothing but rounding: tiny against the output.
    fn noise(&self) -> Vec<f64> {
        self.certified.out.iter().map(|out| 1e-10 * (1.0 + out.abs())).collect()
    }
}

#[test]
fn exact_outputs_lse_and_partials_agree_to_1e_12() {
    for_each_case(|case| {
        let close = |ours: &[f64], tensor: &str| {
            let stored = case.tensor(tensor);
            assert_eq!(ours.len(), stored.len());
            for (ours, stored) in ours.iter().zip(stored) {
                let same = *ours == stored || (ours - stored).abs() <= 1e-12 * stored.abs().max(1.0);
                assert!(same, "{} {tensor}: {ours} against {stored}", case.name);
            }
        };
        close(&case.certified.out, "o");
        close(&case.certified.lse, "lse");
        let of_ranks = |pick: fn(&shardcheck_references::bound::CertifiedPart) -> &Vec<f64>| {
            case.certified.partials.iter().flat_map(|part| pick(part).clone()).collect::<Vec<_>>()
        };
        close(&of_ranks(|part| &part.out), "rank_out");
        close(&of_ranks(|part| &part.lse), "rank_lse");
        close(&of_ranks(|part| &part.weight), "rank_weight");
    });
}

#[test]
fn the_score_term_agrees_to_a_billionth() {
    // with a constant V, or one dominant token, the spread Σpv² − o² is float64 noise, and so is the stored term
    for_each_case(|case| case.compare("E1", &case.term(|terms| &terms.score), 1e-9, &case.noise()));
}

#[test]
fn the_probability_term_agrees_to_a_billionth() {
    for_each_case(|case| {
        if case.contract.l_rounded {
            // ours divides by 1 − Σpe, the rounding that the normaliser can really have; the stored cases by 1 −
            // u_p
            let ours = case.term(|terms| &terms.probability);
            for (index, (ours, stored)) in ours.iter().zip(case.tensor("E2")).enumerate() {
                let most = stored * (1.0 + 1e-9) + case.noise()[index] * 1e-6;
                assert!(*ours <= most, "{} [{index}]: {ours:e} {stored:e}", case.name);
                let least = stored * (1.0 - 2f64.powi(-7));
                assert!(*ours >= least, "{} [{index}]: {ours:e} {stored:e}", case.name);
            }
        } else {
            case.compare("E2", &case.term(|terms| &terms.probability), 1e-9, &case.noise());
        }
    });
}

#[test]
fn the_sum_term_agrees_to_a_billionth() {
    for_each_case(|case| {
        let rounded = if case.contract.l_rounded { 1e-4 } else { 1e-9 };
        let ours = case.term(|terms| &terms.sum);
        for (index, (ours, stored)) in ours.iter().zip(case.tensor("E3")).enumerate() {
            assert!(*ours <= stored * (1.0 + 1e-9), "{} [{index}]: {ours:e} {stored:e}", case.name);
            if case.in_last_row(index) {
                assert!(*ours >= stored * (1.0 - rounded), "{} [{index}]: {ours:e} {stored:e}", case.name);
            }
        }
    });
}

#[test]
fn the_partial_term_agrees_where_no_rounding_step_is_crossed() {
    // Steps of hulp make the term jump. Ours sees a slightly larger preR: Cauchy–Schwarz over moments in place of
    // a sum over tokens, and with a rounded normaliser its error too, which the stored cases leave out of preR.
    let (mut same, mut all) = (0, 0);
    for_each_case(|case| {
        let ours = case.term(|terms| &terms.partial);
        for (ours, stored) in ours.iter().zip(case.tensor("E4")) {
            let most = if case.world == 1 { 0.0 } else { 2.0 * stored };
            assert!(*ours <= most && *ours >= stored * 0.5, "{}: {ours:e} {stored:e}", case.name);
        }
    });
    let Some(stored) = Stored::open("bounds/bounds") else { return };
    for case in stored.cases() {
        let case = run(&stored, case);
        for (ours, stored) in case.term(|terms| &terms.partial).iter().zip(case.tensor("E4")) {
            all += 1;
            same += usize::from((ours - stored).abs() <= 1e-9 * stored);
        }
    }
    assert!(same * 1000 >= all * 995, "{same} of {all} elements agree to 1e-9");
}

#[test]
fn the_merge_term_agrees_but_for_two_reasons() {
    for_each_case(|case| {
        let unnormalised = case.unnormalised();
        for (index, (ours, stored)) in
            case.term(|terms| &terms.merge).iter().zip(case.tensor("E5")).enumerate()
        {
            if case.world == 1 {
                assert_eq!(*ours, 0.0);
                continue;
            }
            // reason 1: published all-to-all merges multiply by e^(lse_r − lse) without normalising again, as
            // all-gather ones do; the stored cases grant the common error to the latter only
            let ours = ours - if case.contract.merge == Merge::A2a { unnormalised[index] } else { 0.0 };
            // reason 2: the larger preR, as for the partial term
            let larger = match case.contract.merge {
                Merge::AgRsBf16 => 1.0,
                _ if case.contract.l_rounded => 5e-3,
                _ => 3e-3,
            };
            assert!(ours <= stored * (1.0 + larger), "{} [{index}]: {ours:e} {stored:e}", case.name);
            if case.in_last_row(index) {
                let least = stored * (1.0 - 1e-9) - case.noise()[index] * 1e-6;
                assert!(ours >= least, "{} [{index}]: {ours:e} {stored:e}", case.name);
            }
        }
    });
}

#[test]
fn the_whole_bound_exceeds_the_stored_one_by_no_more_than_its_reasons() {
    for_each_case(|case| {
        let stored = case.tensor("bpre");
        let rest = case.term(|terms| &terms.rest);
        let mut above = Vec::new();
        for (index, (ours, stored)) in case.certified.pre.iter().zip(&stored).enumerate() {
            let allowed = match case.contract.merge {
                Merge::AgRsBf16 => 2.0,
                _ if case.world > 1 => 1.2,
                _ => 1.0 + 1e-8,
            };
            assert!(*ours <= stored * allowed + rest[index], "{} [{index}]: {ours:e} {stored:e}", case.name);
            above.push(ours / stored);
        }
        above.sort_unstable_by(f64::total_cmp);
        let median = above[above.len() / 2];
        assert!(median <= 1.01, "{}: median {median}", case.name);
    });
}

#[test]
fn what_the_stored_terms_leave_out_is_less_than_a_hundredth_of_the_bound() {
    for_each_case(|case| {
        for (rest, bound) in case.term(|terms| &terms.rest).iter().zip(case.tensor("bpre")) {
            assert!(*rest <= 1e-2 * bound, "{}: {rest:e} of {bound:e}", case.name);
        }
    });
}

#[test]
fn lse_bounds_agree_to_a_billionth() {
    for_each_case(|case| {
        for (state, (ours, stored)) in case.certified.lse_bound.iter().zip(case.tensor("blse")).enumerate() {
            assert!(*ours <= stored * (1.0 + 1e-9), "{} [{state}]: {ours:e} {stored:e}", case.name);
            if state / case.heads == case.rows - 1 {
                assert!(*ours >= stored * (1.0 - 1e-9), "{} [{state}]: {ours:e} {stored:e}", case.name);
            }
        }
    });
}

#[test]
fn bf16_intervals_are_the_stored_ones_or_one_step_wider() {
    let (mut same, mut all) = (0, 0);
    let Some(stored) = Stored::open("bounds/bounds") else { return };
    for case in stored.cases() {
        let case = run(&stored, case);
        let ends = case.tensor("lo").into_iter().zip(case.tensor("hi"));
        for ((out, pre), (lo, hi)) in case.certified.out.iter().zip(&case.certified.pre).zip(ends) {
            let ours = interval(*out, *pre, case.contract.output);
            same += usize::from(ours == (lo, hi));
            all += 1;
            // a step of the partial term may widen it a little; it is narrower by no more than the rows' own
            // length makes
            let (width, stored_width) = (ours.1 - ours.0, hi - lo);
            let step = 2.0 * half_ulp(case.contract.output, lo.abs().max(hi.abs()));
            assert!(width <= 1.1 * stored_width + step, "{}: {ours:?} against {lo}, {hi}", case.name);
            assert!(width >= 0.9 * stored_width - step, "{}: {ours:?} against {lo}, {hi}", case.name);
        }
    }
    assert!(same * 100 >= all * 97, "{same} of {all} intervals are the same");
    assert!(all > 9_000);
}
