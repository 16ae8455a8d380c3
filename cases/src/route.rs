//! Cases of a router: the experts of given logits.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{
    Configuration, ExpertChoice, MaskedFill, Operation, Renormalise, Router, Scoring, Tensor, Tensors,
    vocabulary,
};
use shardcheck_formats::{Counter, Dtype};

use crate::pcp::nothing;
use crate::stream::Stream;
use crate::tokens::Tokens;
use crate::{Body, Case, CaseError, Family, MAX_ROWS};

/// Token ids of a hash table.
pub const TOKEN_IDS: usize = 64;
/// Most experts.
pub(crate) const MAX_EXPERTS: usize = 1024;
/// Most groups: the ways to keep some of them are listed.
const MAX_GROUPS: usize = 8;
/// Logit of an expert that [`LogitPattern::OneHot`] chooses: its score is 1 in 32 bits, and its exponential more than they hold.
const HIGH: f32 = 100.0;
/// Logit of any other: its score is 0.
const LOW: f32 = -160.0;

vocabulary! {
    /// How logits and bias are drawn.
    LogitPattern ("pattern of logits") {
        /// Independent, of deviation 1.5; bias around 0.1.
        Random = "random",
        /// Whole numbers, and a bias of quarters: many choices are equal.
        Ties = "ties",
        /// A bias that makes every choice negative, so that a group filled with zeros wins.
        Negative = "negative",
        /// Around −60: the sum of the weights is as small as 1e-20.
        Cold = "cold",
        /// Far from zero on both sides: scores are equal because they are 0 or 1.
        Saturated = "saturated",
        /// The score of k experts is 1 or 1/k, and of all others 0: weights are exact.
        OneHot = "one_hot",
    }
}

/// The experts of tokens whose logits are given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteCase {
    /// How experts are chosen and weighed.
    pub router: Router,
    /// Experts E.
    pub experts: usize,
    /// Tokens N.
    pub tokens: usize,
    /// How logits are drawn.
    pub logits: LogitPattern,
}

impl RouteCase {
    /// What a session for the case is opened with: one rank of nothing.
    pub fn configuration(&self) -> Configuration {
        nothing()
    }

    /// The step.
    pub fn operation(&self) -> Operation {
        Operation::Route { router: self.router }
    }

    /// Inputs of the step.
    pub fn tensors(&self, seed: u64) -> Tensors {
        draw(&self.router, self.experts, self.tokens, self.logits, seed)
    }

    pub(crate) fn check(&self) -> Result<(), CaseError> {
        if self.tokens > MAX_ROWS {
            return Err(CaseError::OutOfRange(format!("{} tokens; at most {MAX_ROWS}", self.tokens)));
        }
        check_router(&self.router, self.experts)
    }

    /// Two parts of an id, such as `sigmoid.biased.e16.k4.g4.kept2.zero.sum.x2.5/t20.ties`.
    pub(crate) fn spell(&self) -> String {
        let router = spell_router(&self.router, self.experts);
        format!("{router}/t{}.{}", self.tokens, self.logits.name())
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read(router: &str, tokens: &str) -> Result<Self, String> {
        let (router, experts) = read_router(router)?;
        let mut rest = Tokens::split(tokens);
        let tokens = rest.need_number("t")?;
        let logits = take_pattern(&mut rest)?;
        rest.finish()?;
        Ok(Self { router, experts, tokens, logits })
    }
}

/// Checks that a router can choose among so many experts.
pub(crate) fn check_router(router: &Router, experts: usize) -> Result<(), CaseError> {
    let fail = |reason: String| Err(CaseError::OutOfRange(reason));
    let Router { top_k, groups, top_groups, scale, .. } = *router;
    if experts == 0
        || experts > MAX_EXPERTS
        || groups == 0
        || groups > MAX_GROUPS
        || !experts.is_multiple_of(groups)
    {
        return fail(format!(
            "{experts} experts in {groups} groups; there may be 1 to {MAX_EXPERTS} in 1 to {MAX_GROUPS} groups of equal size"
        ));
    }
    if top_groups == 0 || top_groups > groups || top_k == 0 || top_k > top_groups * (experts / groups) {
        let most = top_groups.min(groups) * (experts / groups);
        return fail(format!(
            "{top_k} experts of {top_groups} groups; there may be 1 to {most} experts, of 1 to {groups} groups"
        ));
    }
    if router.choice == ExpertChoice::Hashed && groups != 1 {
        return fail("a table of experts knows no groups".to_owned());
    }
    if router.choice == ExpertChoice::Biased && groups > 1 && experts / groups < 2 {
        return fail("a biased choice takes two experts of each group at least".to_owned());
    }
    if !scale.is_finite() || scale <= 0.0 || scale > 1e6 {
        return fail(format!("scale is {scale}; it must be above 0 and at most 1e6"));
    }
    Ok(())
}

/// `sigmoid.biased.e16.k4.g4.kept2.zero.sum.x2.5`.
pub(crate) fn spell_router(router: &Router, experts: usize) -> String {
    let Router { scoring, choice, top_k, groups, top_groups, fill, renormalise, scale } = router;
    format!("{scoring}.{choice}.e{experts}.k{top_k}.g{groups}.kept{top_groups}.{fill}.{renormalise}.x{scale}")
}

/// Reads what [`spell_router`] wrote.
pub(crate) fn read_router(text: &str) -> Result<(Router, usize), String> {
    let mut tokens = Tokens::split(text);
    let experts = tokens.need_number("e")?;
    let scale = tokens
        .take(|token| token.strip_prefix('x')?.parse().ok())
        .ok_or("the scale is missing, such as x2.5")?;
    let router = Router {
        scoring: tokens.need("scoring", &Scoring::ALL, Scoring::name)?,
        choice: tokens.need("choice", &ExpertChoice::ALL, ExpertChoice::name)?,
        top_groups: tokens.need_number("kept")?,
        top_k: tokens.need_number("k")?,
        groups: tokens.need_number("g")?,
        fill: tokens.need("fill", &MaskedFill::ALL, MaskedFill::name)?,
        renormalise: tokens.need("renormalisation", &Renormalise::ALL, Renormalise::name)?,
        scale,
    };
    tokens.finish()?;
    Ok((router, experts))
}

pub(crate) fn take_pattern(tokens: &mut Tokens) -> Result<LogitPattern, String> {
    tokens.need("pattern of logits", &LogitPattern::ALL, LogitPattern::name)
}

/// Logits, and bias or table where the router takes one.
pub(crate) fn draw(
    router: &Router,
    experts: usize,
    tokens: usize,
    pattern: LogitPattern,
    seed: u64,
) -> Tensors {
    let stream = |stream: Stream| stream.counter(seed);
    let (mut ids, mut table) = (Vec::new(), Vec::new());
    if router.choice == ExpertChoice::Hashed {
        let mut drawn = stream(Stream::RouteTokenIds);
        ids.extend((0..tokens).map(|_| drawn.below(TOKEN_IDS as u64) as i64));
        let mut drawn = stream(Stream::RouteTable);
        (0..TOKEN_IDS).for_each(|_| table.extend(distinct(&mut drawn, experts, router.top_k)));
    }
    let mut drawn = stream(Stream::RouteLogits);
    let mut logits = Vec::with_capacity(tokens * experts);
    for token in 0..tokens {
        let chosen = match ids.get(token) {
            Some(id) => table[*id as usize * router.top_k..][..router.top_k].to_vec(),
            None => within_groups(&mut drawn, router, experts),
        };
        logits.extend((0..experts).map(|expert| logit(&mut drawn, pattern, chosen.contains(&expert))));
    }
    let mut tensors =
        Tensors::new().with("logits", Tensor::from_f32(Dtype::F32, &[tokens, experts], &logits));
    match router.choice {
        ExpertChoice::Scores => {}
        ExpertChoice::Biased => {
            let mut drawn = stream(Stream::RouteBias);
            let bias: Vec<f32> = (0..experts).map(|_| bias(&mut drawn, pattern, router.top_k)).collect();
            tensors.insert("bias", Tensor::from_f32(Dtype::F32, &[experts], &bias));
        }
        ExpertChoice::Hashed => {
            tensors.insert("token_ids", Tensor::from_i64(&[tokens], &ids));
            let table: Vec<i32> = table.iter().map(|expert| *expert as i32).collect();
            tensors.insert("hash_table", Tensor::from_i32(&[TOKEN_IDS, router.top_k], &table));
        }
    }
    tensors
}

fn logit(drawn: &mut Counter, pattern: LogitPattern, chosen: bool) -> f32 {
    let gaussian = drawn.gaussian() as f32;
    match pattern {
        LogitPattern::Random | LogitPattern::Negative => 1.5 * gaussian,
        LogitPattern::Ties => gaussian.round(),
        LogitPattern::Cold => gaussian - 60.0,
        LogitPattern::Saturated => 25.0f32.copysign(gaussian) + 10.0 * gaussian,
        LogitPattern::OneHot => {
            if chosen {
                HIGH
            } else {
                LOW
            }
        }
    }
}

fn bias(drawn: &mut Counter, pattern: LogitPattern, top_k: usize) -> f32 {
    let gaussian = drawn.gaussian() as f32;
    match pattern {
        LogitPattern::Ties => (2.0 * gaussian).round() / 4.0,
        LogitPattern::Negative => -2.0 + 0.1 * gaussian,
        // never more than what tells a chosen expert from another
        LogitPattern::OneHot => 0.03 * gaussian / top_k as f32,
        _ => 0.1 + 0.2 * gaussian,
    }
}

/// `count` of `total`, in a drawn order.
fn distinct(drawn: &mut Counter, total: usize, count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..total).collect();
    for place in 0..count {
        let other = place + drawn.below((total - place) as u64) as usize;
        all.swap(place, other);
    }
    all.truncate(count);
    all
}

/// Experts of as many groups as are kept.
fn within_groups(drawn: &mut Counter, router: &Router, experts: usize) -> Vec<usize> {
    let size = experts / router.groups;
    let groups = distinct(drawn, router.groups, router.top_groups);
    let members = distinct(drawn, groups.len() * size, router.top_k);
    members.into_iter().map(|member| groups[member / size] * size + member % size).collect()
}

impl Case {
    /// A case of a router of the current schema version.
    pub fn route(body: RouteCase, seed: u64) -> Self {
        Self::of(Family::Route, Body::Route(body), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_and_the_json_read_back() {
        for id in [
            "route/sigmoid.biased.e16.k4.g4.kept2.zero.sum_and_tiny.x2.5/t20.ties/7",
            "route/softmax.scores.e64.k6.g8.kept3.negative_infinity.raw.x1/t0.cold/0",
            "route/sigmoid.hashed.e8.k2.g1.kept1.zero.sum.x1.827/t9.one_hot/3",
        ] {
            Case::read_back(id).configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        for (id, reason) in [
            ("route/sigmoid.biased.e16.k4.g3.kept2.zero.sum.x1/t1.ties/7", "groups of equal size"),
            (
                "route/sigmoid.biased.e16.k9.g4.kept2.zero.sum.x1/t1.ties/7",
                "there may be 1 to 8 experts, of 1 to 4 groups",
            ),
            ("route/sigmoid.biased.e4.k1.g4.kept2.zero.sum.x1/t1.ties/7", "two experts of each group"),
            ("route/sigmoid.hashed.e16.k4.g4.kept2.zero.sum.x1/t1.ties/7", "knows no groups"),
            ("route/sigmoid.biased.e16.k4.g4.kept2.zero.sum.x0/t1.ties/7", "scale is 0"),
            ("route/relu.biased.e16.k4.g4.kept2.zero.sum.x1/t1.ties/7", "scoring"),
            ("route/sigmoid.biased.e16.k4.g4.kept2.zero.sum.x1/t99999999.ties/7", "tokens; at most"),
            ("route/sigmoid.biased.e16.k4.g4.kept2.zero.sum.x1/t1.ties", "parts between slashes"),
        ] {
            let error = id.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{id}: {error}");
        }
    }

    #[test]
    fn experts_of_a_table_are_distinct_and_one_hot_logits_follow_them() {
        let id = "route/softmax.hashed.e8.k4.g1.kept1.zero.sum.x1/t30.one_hot/3";
        let Body::Route(body) = id.parse::<Case>().unwrap().body else { panic!("another family") };
        let tensors = body.tensors(3);
        let table = tensors.get("hash_table").unwrap().to_i64();
        let logits = tensors.get("logits").unwrap().to_f32();
        for (token, id) in tensors.get("token_ids").unwrap().to_i64().into_iter().enumerate() {
            let own = &table[id as usize * 4..][..4];
            assert_eq!(own.iter().collect::<std::collections::HashSet<_>>().len(), 4);
            for expert in 0..8 {
                assert_eq!(logits[token * 8 + expert] == HIGH, own.contains(&(expert as i64)));
            }
        }
    }
}
