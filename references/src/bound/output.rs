//! The bound of one state: its output, its partials and their LSEs, term by term.

use super::accumulation::{Contribution, HalfUlp, merge_arithmetic, partial_rounding};
use super::weights::{ExponentError, merge_weight_error};
use super::{TINY32, lse, summation};
use crate::moments::{Moments, Part, RIVAL_GAP, State, Underivable};
use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;

/// The terms of an output's bound, `[v_dim]` each; their sum is the bound before the final rounding.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Terms {
    /// E1: relative errors `w_i` of the softmax weights, from scores, exp, rescaling and merge weights. They hit
    /// the numerator and the normaliser alike, so only `|v_i − o|` counts: `Σ p·w·|v − o| / (1 − SW)`, here by
    /// Cauchy–Schwarz `√(Σp·w² · Σp(v − o)²) / (1 − SW)` with `SW = Σ p·w`.
    pub score: Vec<f64>,
    /// E2: rounding of the probabilities, `Σ_r Σ pe·|v| · (1 + 2SW)/(1 − SW)`, where `pe_i = max(u_p·p_i,
    /// p_floor·max p)` and 0 for a part's largest, which is exactly `e^0` under a true running maximum without a
    /// sink. Where the normaliser sums rounded probabilities: at least `Σ pe·|v − o| / (1 − Σpe)`, either being
    /// allowed.
    pub probability: Vec<f64>,
    /// E3: `(γ(h, u_acc) + γ(h, u) + 3u)(Σp|v| + E1 + E2)`.
    pub sum: Vec<f64>,
    /// E4: rounding of partial outputs, `Σ g·hulp(|o_r| + preR)`; 0 without a merge.
    pub partial: Vec<f64>,
    /// E5: merge arithmetic, `(W + 4)u·Σg(|o_r| + preR)`, 16-bit sums where the contract says so, and
    /// `(|o| + E1 + E2 + E3)·expm1(2η)` since published merges multiply by `e^(lse_r − lse)` without normalising
    /// the weights again; 0 without a merge.
    pub merge: Vec<f64>,
    /// What the five leave out: the largest token of a part when another one, with a larger score error, becomes
    /// the computed maximum; the weights' common error on the partials' rounding; underflow (2^−126 per token and
    /// for the result); the oracle's own float64 rounding (1e−13·Σp|v|).
    pub rest: Vec<f64>,
}

impl Terms {
    /// `[v_dim]`: the sum of all terms.
    pub fn total(&self) -> Vec<f64> {
        (0..self.score.len())
            .map(|d| {
                self.score[d]
                    + self.probability[d]
                    + self.sum[d]
                    + self.partial[d]
                    + self.merge[d]
                    + self.rest[d]
            })
            .collect()
    }
}

/// The bound of one part's own output and LSE.
#[derive(Debug, Clone, PartialEq)]
pub struct PartBound {
    /// `[v_dim]`: bound before the partial is rounded, `preR`.
    pub pre: Vec<f64>,
    /// Certified bound on the part's LSE.
    pub lse_bound: f64,
    /// Practical bound on the part's LSE, where its gate holds.
    pub practical_lse_bound: Option<f64>,
}

/// The bound of one state.
#[derive(Debug, Clone, PartialEq)]
pub struct StateBound {
    /// `[v_dim]`: bound before the final rounding.
    pub pre: Vec<f64>,
    /// Certified bound on the LSE.
    pub lse_bound: f64,
    /// Practical bound on the LSE, where its gate holds.
    pub practical_lse_bound: Option<f64>,
    /// `η`, the error of the merge weights' exponents; 0 without a merge.
    pub merge_weight_error: f64,
    /// `[parts]`.
    pub parts: Vec<PartBound>,
    /// The terms that `pre` is the sum of.
    pub terms: Terms,
}

/// Mean weight errors of a row and what they multiply.
struct RowErrors {
    /// `δ`, without the merge.
    own: ExponentError,
    /// `δ + η`.
    merged: ExponentError,
    /// `η`.
    eta: f64,
    /// `SW`.
    mean: f64,
    /// `Σ p·w²`.
    mean_square: f64,
    /// `SD`, the mean of `expm1(δ)`.
    own_mean: f64,
    /// `(1 + 2SW)/(1 − SW)`.
    growth: f64,
    /// Whether the largest token of a part escapes rounding.
    exact_max: bool,
}

/// The bound of the state `(row, head)` of `moments` under `contract`, its parts being merged at once.
///
/// # Errors
/// [`Underivable`] where the contract and the data admit any result.
pub fn bound_state(
    moments: &Moments,
    contract: &Contract,
    row: usize,
    head: usize,
) -> Result<StateBound, Underivable> {
    bound_state_merged(moments, contract, row, head, 1)
}

/// The same with `merges` merges one after another, each of which gets its weights wrong by `η`.
pub(super) fn bound_state_merged(
    moments: &Moments,
    contract: &Contract,
    row: usize,
    head: usize,
    merges: usize,
) -> Result<StateBound, Underivable> {
    let state = &moments.states[row * moments.heads + head];
    let summed = summation(contract, state.tokens);
    if !summed.is_finite() || !super::gamma(moments.qk_dim, contract.u_acc).is_finite() {
        let additions = contract.depth_for(state.tokens).max(moments.qk_dim);
        return Err(Underivable::TooDeep { additions, unit_roundoff: contract.u_acc });
    }
    let errors = row_errors(moments, contract, state, merges);
    if errors.mean >= 1.0 {
        return Err(Underivable::WeightError { row, head, weight_error: errors.mean });
    }
    let mut parts = Vec::with_capacity(state.parts.len());
    for part in &state.parts {
        let bound = part_bound(moments, contract, state, part, &errors, summed);
        parts.push(bound.map_err(|weight_error| Underivable::WeightError { row, head, weight_error })?);
    }
    let rounding: f64 =
        state.parts.iter().map(|part| part.weight * rounding_sum(contract, &errors, part)).sum();
    if contract.l_rounded && rounding >= 1.0 {
        return Err(Underivable::WeightError { row, head, weight_error: rounding });
    }
    let terms = terms(contract, state, &errors, &parts, (summed, rounding));
    let pre: Vec<f64> = (0..moments.v_dim)
        .map(|d| {
            terms.score[d]
                + terms.probability[d]
                + terms.sum[d]
                + terms.partial[d]
                + terms.merge[d]
                + terms.rest[d]
        })
        .collect();
    if pre.iter().any(|bound| !bound.is_finite()) || overflows(contract, state, &parts) {
        return Err(Underivable::Overflow { row, head });
    }
    Ok(StateBound {
        pre,
        lse_bound: lse::certified(contract, state.tokens, state.lse, errors.own_mean, rounding)
            + if state.lse == f64::NEG_INFINITY { 0.0 } else { errors.eta },
        practical_lse_bound: lse::practical(contract, moments.qk_dim, state),
        merge_weight_error: errors.eta,
        parts,
        terms,
    })
}

fn row_errors(moments: &Moments, contract: &Contract, state: &State, merges: usize) -> RowErrors {
    let own = ExponentError::of_state(contract, moments.qk_dim, moments.softcap, state);
    let reach = (state.tokens.max(1) as f64).ln();
    let largest_lse =
        state.max_abs_score.max(if state.lse.is_finite() { state.lse.abs() } else { 0.0 } + reach);
    let eta = merges as f64 * merge_weight_error(contract, state.parts.len(), largest_lse);
    let merged = own.with_merge(eta);
    let sink_share = |error: &ExponentError, power: i32| {
        state.sink.map_or(0.0, |(logit, p)| p * error.at(0.0, logit.abs()).exp_m1().powi(power))
    };
    let mean_of =
        |f: &dyn Fn(&Part) -> f64| state.parts.iter().map(|part| part.weight * f(part)).sum::<f64>();
    let mean = mean_of(&|part| merged.mean(part, state.max_abs_score)) + sink_share(&merged, 1);
    let largest =
        state.parts.iter().map(|part| merged.at(part.max_a, state.max_abs_score)).fold(0.0, f64::max);
    RowErrors {
        own,
        merged,
        eta,
        mean,
        mean_square: mean_of(&|part| merged.mean_square(part, state.max_abs_score)) + sink_share(&merged, 2),
        own_mean: mean_of(&|part| own.mean(part, state.max_abs_score)) + sink_share(&own, 1),
        growth: (1.0 + 2.0 * mean) / (1.0 - mean),
        // beyond the gap a token that is no rival may still become the computed maximum; and an engine may start
        // its running maximum at the sink
        exact_max: contract.exact_max && state.sink.is_none() && 2.0 * largest <= RIVAL_GAP,
    }
}

/// `p_floor`, and in f16 at least half the spacing of its subnormals, which a contract may leave unsaid.
pub(crate) fn probability_floor(contract: &Contract) -> f64 {
    match contract.p_dtype {
        Some(Dtype::F16) => contract.p_floor.max(half_ulp(Dtype::F16, f64::MIN_POSITIVE)),
        _ => contract.p_floor,
    }
}

/// `Σ pe·|v|` of a part over its own softmax, in dimension `d`.
fn rounding_error(contract: &Contract, errors: &RowErrors, part: &Part, d: usize) -> f64 {
    let (peak, peak_abs) = if errors.exact_max { (part.peak, part.peak_value[d].abs()) } else { (0.0, 0.0) };
    let relative = contract.u_p() * (part.abs[d] - peak * peak_abs).max(0.0);
    let floor = probability_floor(contract) * part.peak * (part.sum_abs[d] - peak_abs).max(0.0);
    relative + floor
}

/// `Σ pe` of a part over its own softmax.
fn rounding_sum(contract: &Contract, errors: &RowErrors, part: &Part) -> f64 {
    if part.tokens == 0 {
        return 0.0;
    }
    let (peak, rest) = if errors.exact_max { (part.peak, part.tokens - 1) } else { (0.0, part.tokens) };
    contract.u_p() * (1.0 - peak).max(0.0) + probability_floor(contract) * part.peak * rest as f64
}

/// What the largest token of a part may be off by, although it escapes rounding: when a rival with a larger score
/// error becomes the computed maximum, the token's own probability is below 1 and rounds, at most up to 1. To be
/// multiplied by the token's `|v|`.
fn rival_error(errors: &RowErrors, part: &Part) -> f64 {
    match part.rival_a {
        Some(rival) if errors.exact_max => {
            part.peak * errors.own.excess(rival, part.peak_a, RIVAL_GAP).exp_m1()
        }
        _ => 0.0,
    }
}

/// The part's own bound; `Err` holds a mean weight error of 1 or more.
fn part_bound(
    moments: &Moments,
    contract: &Contract,
    state: &State,
    part: &Part,
    errors: &RowErrors,
    summed: f64,
) -> Result<PartBound, f64> {
    let mean = errors.merged.mean(part, state.max_abs_score);
    if part.tokens > 0 && mean >= 1.0 {
        return Err(mean);
    }
    let mean_square = errors.merged.mean_square(part, state.max_abs_score);
    let largest = errors.merged.at(part.max_a, state.max_abs_score).exp_m1();
    // 5 % covers the products of the errors below; where they are not small, their own growth does
    let growth = ((1.0 + 2.0 * mean) / (1.0 - mean)).max(1.05);
    let (rounding, rival) = (rounding_sum(contract, errors, part), rival_error(errors, part));
    if part.tokens == 0 {
        let pre = vec![0.0; moments.v_dim];
        return Ok(PartBound { pre, lse_bound: 0.0, practical_lse_bound: Some(0.0) });
    }
    let pre = (0..moments.v_dim)
        .map(|d| {
            let weights = (mean_square * part.square[d]).sqrt().min(largest * part.abs[d]);
            let probability = rounding_error(contract, errors, part, d) + rival * part.peak_value[d].abs();
            let normaliser = if contract.l_rounded { part.out[d].abs() * rounding } else { 0.0 };
            // as in `rest`: probabilities and products below the normal numbers lose up to 2^−126 each
            let underflow = TINY32 * (part.sum_abs[d] + 1.0);
            growth * (2.0 * weights + probability + 2.0 * summed * part.abs[d]) + normaliser + underflow
        })
        .collect();
    let own_mean = errors.own.mean(part, state.max_abs_score);
    Ok(PartBound {
        pre,
        lse_bound: lse::certified(contract, part.tokens, part.lse, own_mean, rounding),
        practical_lse_bound: lse::practical_part(contract, moments.qk_dim, part, state.max_abs_score),
    })
}

/// Sums over the parts, weighted by their share of the row, `[v_dim]` each.
struct RowSums {
    abs: Vec<f64>,
    square: Vec<f64>,
    rounding: Vec<f64>,
    rival: Vec<f64>,
    /// `Σ |v|`, without weights.
    sum_abs: Vec<f64>,
}

impl RowSums {
    fn of(contract: &Contract, errors: &RowErrors, state: &State) -> Self {
        let none = || vec![0.0; state.out.len()];
        let mut sums = Self { abs: none(), square: none(), rounding: none(), rival: none(), sum_abs: none() };
        for part in state.parts.iter().filter(|part| part.tokens > 0) {
            let rival = rival_error(errors, part);
            for d in 0..state.out.len() {
                sums.abs[d] += part.weight * part.abs[d];
                sums.square[d] += part.weight * part.square[d];
                sums.rounding[d] += part.weight * rounding_error(contract, errors, part, d);
                sums.rival[d] += part.weight * rival * part.peak_value[d].abs();
                sums.sum_abs[d] += part.sum_abs[d];
            }
        }
        sums
    }
}

fn terms(
    contract: &Contract,
    state: &State,
    errors: &RowErrors,
    parts: &[PartBound],
    (summed, rounding): (f64, f64),
) -> Terms {
    let sums = RowSums::of(contract, errors, state);
    let (mut terms, mut shares) = (Terms::default(), Vec::with_capacity(parts.len()));
    let half_ulp = HalfUlp::of(contract.partial);
    for d in 0..state.out.len() {
        let out = state.out[d];
        // the float64 difference may come out too small by its own rounding
        let spread = (sums.square[d] - out * out).max(0.0) + 1e-13 * sums.square[d];
        let score = (errors.mean_square * spread).sqrt() / (1.0 - errors.mean);
        let mut probability = sums.rounding[d] * errors.growth;
        if contract.l_rounded {
            let centred = rounded_normaliser(contract, errors, state, d, spread.sqrt(), rounding);
            probability = probability.max(centred * errors.growth);
        }
        let sum = summed * (sums.abs[d] + score + probability);
        let rivals = sums.rival[d] * errors.growth;
        let underflow = if state.tokens == 0 { 0.0 } else { TINY32 * (1.0 + sums.sum_abs[d]) };
        let mut rest = rivals * (1.0 + summed) + underflow + 1e-13 * sums.abs[d];
        let (mut partial, mut merge) = (0.0, 0.0);
        if parts.len() > 1 {
            let unnormalised = (2.0 * errors.eta).exp_m1();
            shares.clear();
            shares.extend(state.parts.iter().zip(parts).map(|(part, bound)| Contribution {
                weight: part.weight,
                out: part.out[d],
                pre: bound.pre[d],
            }));
            partial = partial_rounding(&shares, half_ulp);
            merge = merge_arithmetic(contract, &shares, half_ulp)
                + (out.abs() + score + probability + sum) * unnormalised;
            rest += (partial + rivals) * unnormalised;
        }
        terms.score.push(score);
        terms.probability.push(probability);
        terms.sum.push(sum);
        terms.partial.push(partial);
        terms.merge.push(merge);
        terms.rest.push(rest);
    }
    terms
}

/// `Σ pe·|v − o| / (1 − Σpe)`, or its Cauchy–Schwarz bound where the second pass was not made.
fn rounded_normaliser(
    contract: &Contract,
    errors: &RowErrors,
    state: &State,
    d: usize,
    spread: f64,
    rounding: f64,
) -> f64 {
    let relative = match &state.centred {
        Some(centred) if errors.exact_max => (centred.all[d] - centred.peaks[d]).max(0.0),
        Some(centred) => centred.all[d],
        None => spread,
    };
    let floor: f64 = state
        .parts
        .iter()
        .map(|part| part.weight * part.peak * (part.sum_abs[d] + part.tokens as f64 * state.out[d].abs()))
        .sum();
    (contract.u_p() * relative + probability_floor(contract) * floor) / (1.0 - rounding)
}

/// Whether a partial output may be too large for its format.
fn overflows(contract: &Contract, state: &State, parts: &[PartBound]) -> bool {
    let (limit, half_ulp) = (contract.partial.max_finite(), HalfUlp::of(contract.partial));
    state.parts.len() > 1
        && state.parts.iter().zip(parts).any(|(part, bound)| {
            part.out.iter().zip(&bound.pre).any(|(out, pre)| {
                let magnitude = out.abs() + pre;
                magnitude + half_ulp.at(magnitude) > limit
            })
        })
}
