//! Cases of a layer of experts: how tokens, experts and ranks go together.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{
    Activation, Configuration, ExpertSharding, MoeExchange, MoePlan, Operation, Router, SharedExpert, Tensor,
    Tensors, vocabulary,
};
use shardcheck_formats::Dtype;

use crate::pcp::nothing;
use crate::route::{check_router, draw, read_router, spell_router, take_pattern};
use crate::stream::Stream;
use crate::tokens::Tokens;
use crate::{Body, Case, CaseError, Family, LogitPattern, MAX_RANKS};

/// Most tokens of a case.
const MAX_TOKENS: usize = 4096;
/// Widest token, and widest expert.
const MAX_WIDTH: usize = 1 << 16;
/// Most elements of the weights of all experts.
const MAX_WEIGHTS: usize = 1 << 26;
/// Most tokens whose number fits into bf16 however many ranks add parts of it.
const MAX_TAGS: usize = 64;

vocabulary! {
    /// What the weights of experts are.
    ExpertWeights ("kind of weights") {
        /// Independent values.
        Random = "random",
        /// Every expert gives back what it gets.
        Identity = "identity",
        /// An expert writes the number of the token into the column that is its own: the output says who computed what.
        Tagged = "tagged",
    }
}

/// A layer of experts over the ranks of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeCase {
    /// How experts are chosen and weighed.
    pub router: Router,
    /// Experts E.
    pub experts: usize,
    /// How ranks share tokens and experts out.
    pub plan: MoePlan,
    /// Tokens of each data-parallel group; 0 is legal.
    pub dp_tokens: Vec<usize>,
    /// Width h of a token.
    pub hidden: usize,
    /// Inner width I of an expert.
    pub inner: usize,
    /// Inner width J of the shared expert; 0 without one.
    pub shared_inner: usize,
    /// What the weights are.
    pub weights: ExpertWeights,
    /// How logits are drawn.
    pub logits: LogitPattern,
}

impl MoeCase {
    /// Tokens of all groups.
    pub fn tokens(&self) -> usize {
        self.dp_tokens.iter().sum()
    }

    /// What a session for the case is opened with: one rank of nothing, since the ranks of a plan are the operation's own.
    pub fn configuration(&self) -> Configuration {
        nothing()
    }

    /// The step.
    pub fn operation(&self) -> Operation {
        Operation::Moe { router: self.router, plan: self.plan }
    }

    /// Inputs of the step.
    pub fn tensors(&self, seed: u64) -> Tensors {
        let (experts, hidden, inner) = (self.experts, self.hidden, self.inner);
        let mut tensors = draw(&self.router, experts, self.tokens(), self.logits, seed);
        let counts: Vec<i32> = self.dp_tokens.iter().map(|tokens| *tokens as i32).collect();
        tensors.insert("dp_tokens", Tensor::from_i32(&[counts.len()], &counts));
        let mut insert = |name: &str, shape: &[usize], values: Vec<f32>| {
            tensors.insert(name, Tensor::from_f32(Dtype::Bf16, shape, &values));
        };
        insert("hidden", &[self.tokens(), hidden], self.rows(seed));
        let is_gated = self.plan.activation.is_gated();
        if is_gated {
            insert("w_gate", &[experts, inner, hidden], self.matrix(Stream::MoeGate, seed, experts, hidden));
        }
        insert("w_up", &[experts, inner, hidden], self.matrix(Stream::MoeUp, seed, experts, hidden));
        insert("w_down", &[experts, hidden, inner], self.down(Stream::MoeDown, seed, 0..experts, inner));
        if self.plan.shared != SharedExpert::None {
            let shared = Self { inner: self.shared_inner, ..self.clone() };
            let width = shared.inner;
            if is_gated {
                insert(
                    "shared_gate",
                    &[width, hidden],
                    shared.matrix(Stream::MoeSharedGate, seed, 1, hidden),
                );
            }
            insert("shared_up", &[width, hidden], shared.matrix(Stream::MoeSharedUp, seed, 1, hidden));
            let down = shared.down(Stream::MoeSharedDown, seed, experts..experts + 1, width);
            insert("shared_down", &[hidden, width], down);
        }
        tensors
    }

    /// The column in which a tagged expert writes; that of the shared one comes behind those of all others.
    pub fn column(expert: usize) -> usize {
        1 + expert
    }

    /// The number that a tagged token bears.
    pub fn tag(token: usize) -> usize {
        1 + token
    }

    fn rows(&self, seed: u64) -> Vec<f32> {
        if self.weights == ExpertWeights::Tagged {
            let of_token =
                |token| (0..self.hidden).map(move |d| if d == 0 { Self::tag(token) as f32 } else { 0.0 });
            return (0..self.tokens()).flat_map(of_token).collect();
        }
        gaussians(Stream::MoeHidden, seed, self.tokens() * self.hidden, 1.0)
    }

    /// `[count, inner, hidden]`: the identity, or drawn.
    fn matrix(&self, stream: Stream, seed: u64, count: usize, hidden: usize) -> Vec<f32> {
        if self.weights == ExpertWeights::Random {
            // SiTU is bent at 4 and at 25: what lies below tells nothing of it
            let size = match (self.plan.activation, stream) {
                (Activation::SituGated, Stream::MoeGate | Stream::MoeSharedGate) => 4.0,
                (Activation::SituGated, _) => 16.0,
                _ => 1.0,
            };
            return gaussians(stream, seed, count * self.inner * hidden, size * (hidden as f64).powf(-0.5));
        }
        let element = |index: usize| index / hidden % self.inner == index % hidden;
        (0..count * self.inner * hidden).map(|index| f32::from(u8::from(element(index)))).collect()
    }

    /// `[experts, hidden, inner]`: the identity, what moves the first element into the expert's column, or drawn.
    fn down(&self, stream: Stream, seed: u64, experts: std::ops::Range<usize>, inner: usize) -> Vec<f32> {
        let size = self.hidden * inner;
        if self.weights == ExpertWeights::Random {
            return gaussians(stream, seed, experts.len() * size, (inner as f64).powf(-0.5));
        }
        let element = |expert: usize, row: usize, column: usize| match self.weights {
            ExpertWeights::Tagged => row == (column + Self::column(expert)) % self.hidden,
            _ => row == column,
        };
        experts
            .flat_map(|expert| (0..size).map(move |index| (expert, index / inner, index % inner)))
            .map(|(expert, row, column)| f32::from(u8::from(element(expert, row, column))))
            .collect()
    }

    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: &str| Err(CaseError::OutOfRange(reason.to_owned()));
        check_router(&self.router, self.experts)?;
        let MoePlan { dp, pcp, tp, exchange, sharding, shared, activation } = self.plan;
        let ranks = dp.checked_mul(pcp).and_then(|ranks| ranks.checked_mul(tp)).unwrap_or(usize::MAX);
        if ranks == 0 || ranks > MAX_RANKS {
            return fail(&format!("dp·pcp·tp is {dp}·{pcp}·{tp}; it must be between 1 and {MAX_RANKS}"));
        }
        if self.dp_tokens.len() != dp
            || self.dp_tokens.iter().any(|tokens| *tokens > MAX_TOKENS)
            || self.tokens() > MAX_TOKENS
        {
            let (groups, tokens) = (self.dp_tokens.len(), &self.dp_tokens);
            return fail(&format!(
                "tokens are given for each of {dp} dp groups, at most {MAX_TOKENS} in all; here for {groups}: {tokens:?}"
            ));
        }
        let widths = [self.hidden, self.inner, self.shared_inner];
        let size = self.experts.saturating_mul(self.hidden.saturating_mul(self.inner));
        if self.hidden == 0
            || self.inner == 0
            || widths.iter().any(|width| *width > MAX_WIDTH)
            || size > MAX_WEIGHTS
        {
            return fail(&format!(
                "h, i and j are {widths:?}, E·h·i is {size}; widths are 1 to {MAX_WIDTH} (j from 0), E·h·i at most {MAX_WEIGHTS}"
            ));
        }
        if (shared == SharedExpert::None) != (self.shared_inner == 0) {
            return fail("a shared expert has a width j, and without one j is 0");
        }
        let is_sliced = exchange == MoeExchange::Sliced;
        if is_sliced && (pcp != 1 || sharding != ExpertSharding::Whole || shared == SharedExpert::Sharded) {
            return fail("sliced rows go to whole experts, with pcp1 and no shared expert that is sharded");
        }
        if self.weights != ExpertWeights::Random {
            let is_square = self.inner == self.hidden && [0, self.hidden].contains(&self.shared_inner);
            if activation != Activation::Linear || !is_square {
                return fail("experts that are not random are linear and square");
            }
        }
        if self.weights == ExpertWeights::Tagged {
            let exact = self.router.top_k.is_power_of_two() && self.router.scale == 1.0;
            if self.logits != LogitPattern::OneHot
                || !exact
                || self.tokens() > MAX_TAGS
                || self.hidden < self.experts + 2
            {
                return fail(&format!(
                    "tags need one_hot logits, a power of two of experts a token, scale 1, h of e + 2 and at most {MAX_TAGS} tokens"
                ));
            }
        }
        Ok(())
    }

    /// Three parts of an id, such as `ROUTER/gathered.whole.silu_gated.dp1.pcp2.tp2.replicated/n7+3.h32.i16.j16.random.ties`.
    pub(crate) fn spell(&self) -> String {
        let router = spell_router(&self.router, self.experts);
        let MoePlan { dp, pcp, tp, exchange, sharding, shared, activation } = self.plan;
        let tokens: Vec<String> = self.dp_tokens.iter().map(usize::to_string).collect();
        format!(
            "{router}/{exchange}.{sharding}.{activation}.dp{dp}.pcp{pcp}.tp{tp}.{shared}/n{}.h{}.i{}.j{}.{}.{}",
            tokens.join("+"),
            self.hidden,
            self.inner,
            self.shared_inner,
            self.weights.name(),
            self.logits.name()
        )
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read(router: &str, plan: &str, tokens: &str) -> Result<Self, String> {
        let (router, experts) = read_router(router)?;
        let mut of_plan = Tokens::split(plan);
        let plan = MoePlan {
            dp: of_plan.need_number("dp")?,
            pcp: of_plan.need_number("pcp")?,
            tp: of_plan.need_number("tp")?,
            exchange: of_plan.need("exchange", &MoeExchange::ALL, MoeExchange::name)?,
            sharding: of_plan.need("sharding", &ExpertSharding::ALL, ExpertSharding::name)?,
            shared: of_plan.need("shared expert", &SharedExpert::ALL, SharedExpert::name)?,
            activation: of_plan.need("activation", &Activation::ALL, Activation::name)?,
        };
        of_plan.finish()?;
        let mut rest = Tokens::split(tokens);
        let dp_tokens = rest
            .take(|token| {
                token
                    .strip_prefix('n')?
                    .split('+')
                    .map(|count| count.parse().ok())
                    .collect::<Option<Vec<usize>>>()
            })
            .ok_or("the tokens are missing, such as n7+3")?;
        let case = Self {
            router,
            experts,
            plan,
            dp_tokens,
            hidden: rest.need_number("h")?,
            inner: rest.need_number("i")?,
            shared_inner: rest.need_number("j")?,
            weights: rest.need("kind of weights", &ExpertWeights::ALL, ExpertWeights::name)?,
            logits: take_pattern(&mut rest)?,
        };
        rest.finish()?;
        Ok(case)
    }
}

fn gaussians(stream: Stream, seed: u64, count: usize, deviation: f64) -> Vec<f32> {
    let mut drawn = stream.counter(seed);
    (0..count).map(|_| (deviation * drawn.gaussian()) as f32).collect()
}

impl Case {
    /// A case of a layer of experts of the current schema version.
    pub fn moe(body: MoeCase, seed: u64) -> Self {
        Self::of(Family::Moe, Body::Moe(body), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTER: &str = "sigmoid.biased.e6.k2.g1.kept1.zero.sum.x1";

    fn case(plan: &str, tokens: &str) -> Result<Case, CaseError> {
        format!("moe/{ROUTER}/{plan}/{tokens}/7").parse()
    }

    #[test]
    fn an_id_and_the_json_read_back() {
        for (plan, tokens) in [
            ("gathered.whole.silu_gated.dp2.pcp3.tp2.replicated", "n7+3.h32.i16.j8.random.random"),
            ("local.split.linear.dp1.pcp4.tp1.none", "n0.h8.i8.j0.identity.ties"),
            ("sliced.whole.linear.dp2.pcp1.tp4.none", "n9+0.h8.i8.j0.tagged.one_hot"),
            ("redundant.split.linear.dp1.pcp2.tp2.sharded", "n5.h8.i8.j8.tagged.one_hot"),
        ] {
            let case = case(plan, tokens).unwrap();
            assert_eq!(case.id(), format!("moe/{ROUTER}/{plan}/{tokens}/7"));
            assert_eq!(Case::from_json(&case.to_json()).unwrap(), case);
            case.configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        let plain = "gathered.whole.linear.dp1.pcp2.tp2.none";
        for (plan, tokens, reason) in [
            ("gathered.whole.linear.dp0.pcp2.tp2.none", "n1.h8.i8.j0.random.ties", "dp·pcp·tp"),
            (plain, "n1+2.h8.i8.j0.random.ties", "for each of 1 dp groups"),
            (plain, "n1.h0.i8.j0.random.ties", "widths are"),
            (plain, "n1.h8.i8.j4.random.ties", "without one j is 0"),
            (plain, "n1.h8.i4.j0.identity.ties", "linear and square"),
            (plain, "n1.h8.i8.j0.tagged.ties", "tags need"),
            (plain, "n65.h8.i8.j0.tagged.one_hot", "tags need"),
            (plain, "n1.h8.i8.j0.random", "pattern of logits"),
            ("sliced.whole.linear.dp1.pcp2.tp2.none", "n1.h8.i8.j0.random.ties", "sliced rows"),
            ("sliced.split.linear.dp1.pcp1.tp2.none", "n1.h8.i8.j0.random.ties", "sliced rows"),
        ] {
            let error = case(plan, tokens).unwrap_err().to_string();
            assert!(error.contains(reason), "{plan} {tokens}: {error}");
        }
    }

    #[test]
    fn a_tagged_expert_moves_the_token_number_into_its_column() {
        let case = case("local.whole.linear.dp1.pcp1.tp1.sharded", "n3.h9.i9.j9.tagged.one_hot").unwrap();
        let Body::Moe(body) = &case.body else { panic!("another family") };
        let tensors = body.tensors(case.seed);
        let (hidden, down) =
            (tensors.get("hidden").unwrap().to_f32(), tensors.get("w_down").unwrap().to_f32());
        let shared = tensors.get("shared_down").unwrap().to_f32();
        for token in 0..3 {
            for expert in 0..7 {
                let matrix = if expert == 6 { &shared[..] } else { &down[expert * 81..(expert + 1) * 81] };
                let out: Vec<f32> =
                    (0..9).map(|d| (0..9).map(|i| matrix[d * 9 + i] * hidden[token * 9 + i]).sum()).collect();
                let wanted: Vec<f32> =
                    (0..9).map(|d| if d == 1 + expert { token as f32 + 1.0 } else { 0.0 }).collect();
                assert_eq!(out, wanted);
            }
        }
    }
}
