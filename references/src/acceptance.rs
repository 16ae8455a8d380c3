//! Acceptance of drafted tokens: which outcomes a conforming engine may have, request by request.
//!
//! `Mb` is the target's law of a row, `Ms` the drafter's, x the drafts. Greedy requests (temperature 0) accept while a draft is the
//! first argmax of the target's logits. Standard (Leviathan et al. 2211.17192): draft i is accepted iff `Mb(x_i) > u_i·Ms(x_i)`;
//! the token behind the accepted ones is drawn from `max(Mb − Ms, 0)`, or from `Mb` where no draft is left. Block (Sun et al.
//! 2403.10444): `p_0 = 1`, `p_i = min(1, p_{i−1}·Mb(x_i)/Ms(x_i))`, `R_i = Σ_x max(p_i·Mb(x) − Ms(x), 0)` over the row behind
//! draft i, `h_i = R_i/(R_i + 1 − p_i)` (1 for 0/0), `h_k = p_k`; the longest i with `u_i ≤ h_i` is accepted, and the token behind
//! is drawn from `max(p_i·Mb − Ms, 0)`. Drafts without a law are points of mass 1: `R_i = p_i·(1 − Mb(x_{i+1}))`, and the token is
//! drawn from `Mb` without the rejected one. A draft −1 ends the drafts of its request. A draft of probability 0 is never accepted.
//!
//! A token drawn with Gumbel noise g is the first argmax of `ln weight + g`.
//!
//! Everything is an interval that covers 32-bit arithmetic ([`interval`]): where a decision's sides overlap, both outcomes are
//! allowed, and everything that follows from either; elsewhere there is exactly one.

pub mod interval;
pub mod law;

use interval::{Interval, U, law_of_row};

/// How drafted tokens are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By argmax alone.
    Greedy,
    /// Each draft by itself.
    Standard,
    /// The longest prefix that is accepted as a block.
    Block,
}

/// One request: k drafts, k + 1 rows of V logits.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Tokens V.
    pub vocabulary: usize,
    /// Its k drafts; a negative one ends them.
    pub drafts: &'a [i64],
    /// Logits of the target, (k + 1)·V, before the temperature.
    pub target: &'a [f32],
    /// Logits that the drafts were drawn from, k·V, before the temperature; `None`: they have no law.
    pub draft: Option<&'a [f32]>,
    /// Temperature; 0 is greedy.
    pub temperature: f32,
    /// A number in [0, 1) for each row; empty for greedy requests.
    pub uniform: &'a [f32],
    /// Gumbel noise, (k + 1)·V; empty for greedy requests.
    pub noise: &'a [f32],
}

/// One outcome that a conforming engine may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Drafts that are accepted.
    pub accepted: usize,
    /// Tokens that may stand behind them, ascending.
    pub tokens: Vec<usize>,
}

/// A decision in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    Yes,
    No,
    Either,
}

impl Choice {
    fn may(self, yes: bool) -> bool {
        self == Self::Either || (self == Self::Yes) == yes
    }
}

impl<'a> Request<'a> {
    /// Drafts before the first that is none.
    pub fn drafts(&self) -> &'a [i64] {
        let end = self.drafts.iter().position(|draft| *draft < 0).unwrap_or(self.drafts.len());
        &self.drafts[..end]
    }

    fn target_row(&self, row: usize) -> &'a [f32] {
        &self.target[row * self.vocabulary..][..self.vocabulary]
    }

    /// Whether the request takes no part in chance.
    pub fn is_greedy(&self, method: Method) -> bool {
        method == Method::Greedy || self.temperature == 0.0
    }

    fn target_law(&self, row: usize) -> Vec<Interval> {
        law_of_row(self.target_row(row), self.temperature)
    }

    fn draft_law(&self, row: usize) -> Option<Vec<Interval>> {
        let logits = self.draft?;
        Some(law_of_row(&logits[row * self.vocabulary..][..self.vocabulary], self.temperature))
    }

    /// Probability that the drafter gave to a token at a row.
    fn drafted(&self, law: Option<&[Interval]>, token: usize) -> Interval {
        law.map_or(Interval::ONE, |law| law[token])
    }
}

/// First of the largest logits: ties go to the lowest token.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (token, logit) in row.iter().enumerate() {
        if *logit > row[best] {
            best = token;
        }
    }
    best
}

/// All outcomes that a conforming engine may have, by ascending number of accepted drafts.
///
/// # Panics
/// When slices are shorter than the sizes say, or a draft is not below V.
pub fn outcomes(method: Method, request: &Request<'_>) -> Vec<Outcome> {
    let drafts = request.drafts();
    if request.is_greedy(method) {
        let wanted = |row: usize| argmax(request.target_row(row));
        let accepted = (0..drafts.len()).take_while(|i| drafts[*i] == wanted(*i) as i64).count();
        return vec![Outcome { accepted, tokens: vec![wanted(accepted)] }];
    }
    let reached = match method {
        Method::Block => block(request),
        _ => standard(request),
    };
    let outcome = |accepted: usize| {
        let tokens = drawn(&weights(method, request, accepted), noise_row(request, accepted));
        Outcome { accepted, tokens }
    };
    reached.into_iter().map(outcome).collect()
}

fn noise_row<'a>(request: &Request<'a>, row: usize) -> &'a [f32] {
    &request.noise[row * request.vocabulary..][..request.vocabulary]
}

/// Numbers of drafts that may be accepted when each is tried by itself.
fn standard(request: &Request<'_>) -> Vec<usize> {
    let drafts = request.drafts();
    let mut reached = Vec::new();
    for (row, token) in drafts.iter().enumerate() {
        let token = *token as usize;
        let (target, draft) = (request.target_law(row)[token], request.draft_law(row));
        let choice =
            exceeds(target, request.drafted(draft.as_deref(), token), f64::from(request.uniform[row]));
        if choice.may(false) {
            reached.push(row);
        }
        if !choice.may(true) {
            return reached;
        }
    }
    reached.push(drafts.len());
    reached
}

/// Whether `target > uniform·draft`.
fn exceeds(target: Interval, draft: Interval, uniform: f64) -> Choice {
    if target.high == 0.0 {
        return Choice::No;
    }
    // a drafter does not draw what it gives no probability
    if draft.high == 0.0 {
        return Choice::Either;
    }
    let threshold = draft.times(Interval::point(uniform)).rounded(&[target, draft, Interval::point(uniform)]);
    match (target.low > threshold.high, target.high < threshold.low) {
        (true, _) => Choice::Yes,
        (_, true) => Choice::No,
        _ => Choice::Either,
    }
}

/// p_1 to p_k of the block method.
fn prefixes(request: &Request<'_>) -> Vec<Interval> {
    let mut prefix = Interval::ONE;
    let step = |(row, token): (usize, &i64)| {
        let token = *token as usize;
        let (target, draft) = (request.target_law(row)[token], request.draft_law(row));
        let draft = request.drafted(draft.as_deref(), token);
        let product = prefix.times(target).over(draft);
        prefix = product.rounded(&[prefix, target, draft]).at_most_one();
        prefix
    };
    request.drafts().iter().enumerate().map(step).collect()
}

/// Numbers of drafts that may be accepted as a block.
fn block(request: &Request<'_>) -> Vec<usize> {
    let drafts = request.drafts();
    let prefixes = prefixes(request);
    let choice = |index: usize| {
        let prefix = prefixes[index];
        let bound = if index + 1 == drafts.len() {
            prefix
        } else {
            continued(prefix, mass(request, prefix, index + 1))
        };
        let uniform = f64::from(request.uniform[index]);
        // a prefix that the target can't have is no part of a block, though `u ≤ 0` holds for u = 0
        if prefix.high == 0.0 || uniform > bound.high {
            return Choice::No;
        }
        // where nothing is left behind a prefix, only the number 0 takes it, and which numbers there are is the engine's business
        if uniform <= bound.low && bound.low > 0.0 { Choice::Yes } else { Choice::Either }
    };
    let choices: Vec<Choice> = (0..drafts.len()).map(choice).collect();
    let longest = |length: usize| {
        (length == 0 || choices[length - 1].may(true)) && choices[length..].iter().all(|c| c.may(false))
    };
    (0..=drafts.len()).filter(|length| longest(*length)).collect()
}

/// R of the row that is behind a prefix of probability `prefix`.
fn mass(request: &Request<'_>, prefix: Interval, row: usize) -> Interval {
    if request.draft.is_none() {
        let next = request.target_law(row)[request.drafts()[row] as usize];
        return prefix.times(next.complement()).rounded(&[prefix]);
    }
    let all = residual(request, prefix, row);
    Interval::sum(&all)
}

/// h of a prefix behind which a residual of mass `mass` is left.
fn continued(prefix: Interval, mass: Interval) -> Interval {
    let part = |mass: f64, prefix: f64| {
        if mass + (1.0 - prefix) == 0.0 { 1.0 } else { mass / (mass + 1.0 - prefix) }
    };
    if prefix.low >= 1.0 {
        return Interval::ONE;
    }
    Interval { low: part(mass.low, prefix.low), high: part(mass.high, prefix.high) }
        .rounded(&[])
        .at_most_one()
}

/// `max(prefix·Mb − Ms, 0)` at a row that has a draft.
fn residual(request: &Request<'_>, prefix: Interval, row: usize) -> Vec<Interval> {
    let target = request.target_law(row);
    let Some(draft) = request.draft_law(row) else {
        let rejected = request.drafts()[row] as usize;
        let mut left = target;
        left[rejected] = Interval::ZERO;
        return left;
    };
    let left = |(target, draft): (&Interval, &Interval)| prefix.times(*target).minus(*draft).at_least_zero();
    target.iter().zip(&draft).map(left).collect()
}

/// Weights of the tokens that may be drawn behind `accepted` drafts.
///
/// # Panics
/// As [`outcomes`]; the request is not greedy.
pub fn weights(method: Method, request: &Request<'_>, accepted: usize) -> Vec<Interval> {
    if accepted >= request.drafts().len() {
        return request.target_law(accepted);
    }
    let prefix = match method {
        Method::Block if accepted > 0 => prefixes(request)[accepted - 1],
        _ => Interval::ONE,
    };
    let left = residual(request, prefix, accepted);
    if left.iter().any(|weight| weight.high > 0.0) {
        return left;
    }
    // nothing is left where both laws are the same or the number is 0: any token that the target can have may follow
    request.target_law(accepted).iter().map(|chance| Interval { low: 0.0, ..*chance }).collect()
}

/// Tokens that may be the first argmax of `ln weight + noise`.
fn drawn(weights: &[Interval], noise: &[f32]) -> Vec<usize> {
    let scores: Vec<Interval> = weights
        .iter()
        .zip(noise)
        .map(|(weight, noise)| {
            let noise = f64::from(*noise);
            let (low, high) = (weight.low.ln() + noise, weight.high.ln() + noise);
            let slack = |score: f64| {
                if score.is_finite() { 4.0 * U * (score.abs() + noise.abs() + 1.0) } else { 0.0 }
            };
            Interval { low: low - slack(low), high: high + slack(high) }
        })
        .collect();
    let surely = scores.iter().map(|score| score.low).fold(f64::NEG_INFINITY, f64::max);
    let may = |token: &usize| weights[*token].high > 0.0 && scores[*token].high >= surely;
    (0..weights.len()).filter(may).collect()
}

#[cfg(test)]
mod tests;
