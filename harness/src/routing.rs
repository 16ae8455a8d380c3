//! Material of a router: what the oracle says of the experts of each token, and of a case that asks for nothing else.

use shardcheck_cases::RouteCase;
use shardcheck_engine::{
    Configuration, ExpertChoice, MaskedFill, Operation, OperationKind, Profile, Router, Tensor, Tensors,
};
use shardcheck_formats::Dtype;
use shardcheck_references::moe::{self, Choice, Fill, Renormalise, Rule, Scores, Scoring, Weights};

use crate::judge::{Allowed, Comparison};

/// What may be said of the experts of tokens.
pub struct Routing {
    rule: Rule,
    scores: Vec<Scores>,
    bias: Vec<f32>,
    /// Experts of each token where a table has them.
    given: Option<Vec<Vec<usize>>>,
}

impl Routing {
    /// The oracle of a router on its inputs, for an engine whose exponential is right to `kexp` units in the last place.
    pub fn new(router: &Router, inputs: &Tensors, kexp: f64) -> Self {
        let rule = Rule {
            scoring: match router.scoring {
                shardcheck_engine::Scoring::Softmax => Scoring::Softmax,
                shardcheck_engine::Scoring::Sigmoid => Scoring::Sigmoid,
            },
            choice: match router.choice {
                ExpertChoice::Scores => Choice::Scores,
                ExpertChoice::Biased => Choice::Biased,
                ExpertChoice::Hashed => Choice::Given,
            },
            top_k: router.top_k,
            groups: router.groups,
            top_groups: router.top_groups,
            fill: match router.fill {
                MaskedFill::Zero => Fill::Zero,
                MaskedFill::NegativeInfinity => Fill::NegativeInfinity,
            },
            renormalise: match router.renormalise {
                shardcheck_engine::Renormalise::Raw => Renormalise::Raw,
                shardcheck_engine::Renormalise::Sum => Renormalise::Sum,
                shardcheck_engine::Renormalise::SumAndTiny => Renormalise::SumAndTiny,
            },
            scale: f64::from(router.scale),
        };
        let values = |name: &str| inputs.find(name).map(Tensor::to_f32).unwrap_or_default();
        let whole = |name: &str| inputs.find(name).map(Tensor::to_i64);
        let experts = inputs.find("logits").and_then(|t| t.shape().last().copied()).unwrap_or(1);
        let scores =
            values("logits").chunks(experts).map(|row| moe::scores(rule.scoring, row, kexp)).collect();
        let given = whole("token_ids").zip(whole("hash_table")).map(|(ids, table)| {
            let row = |id: &i64| &table[*id as usize * rule.top_k..][..rule.top_k];
            ids.iter().map(|id| row(id).iter().map(|expert| *expert as usize).collect()).collect()
        });
        Self { rule, scores, bias: values("bias"), given }
    }

    /// Experts of a token.
    pub fn top_k(&self) -> usize {
        self.rule.top_k
    }

    /// The experts that a row of ids names; in words why they are none.
    ///
    /// # Errors
    /// That an id is out of range or stands there twice.
    pub fn experts(&self, token: usize, ids: &[i64]) -> Result<Vec<usize>, String> {
        let count = self.scores[token].value.len();
        let mut experts = Vec::new();
        for id in ids {
            match usize::try_from(*id).ok().filter(|expert| *expert < count) {
                None => return Err(format!("token {token} has expert {id} of {count}")),
                Some(expert) if experts.contains(&expert) => {
                    return Err(format!("token {token} has expert {expert} twice"));
                }
                Some(expert) => experts.push(expert),
            }
        }
        Ok(experts)
    }

    /// Whether a token may have these experts; `None` where it can't be told.
    pub fn admits(&self, token: usize, experts: &[usize]) -> Option<bool> {
        match &self.given {
            Some(given) => Some(experts.iter().all(|expert| given[token].contains(expert))),
            None => moe::admits(&self.rule, &self.scores[token], &self.bias, experts),
        }
    }

    /// Every set of experts that a token may have; `None` where there are too many.
    pub fn sets(&self, token: usize) -> Option<Vec<Vec<usize>>> {
        match &self.given {
            Some(given) => Some(vec![given[token].clone()]),
            None => moe::selections(&self.rule, &self.scores[token], &self.bias),
        }
    }

    /// Weights that a token's experts have.
    pub fn weights(&self, token: usize, experts: &[usize]) -> Weights {
        moe::weights(&self.rule, &self.scores[token], experts)
    }

    /// A set of experts with what they are chosen by, in words.
    pub fn words(&self, token: usize, experts: &[usize]) -> String {
        let choice = |expert: &usize| {
            let bias = if self.rule.choice == Choice::Biased { f64::from(self.bias[*expert]) } else { 0.0 };
            format!("{expert} ({:.6})", self.scores[token].value[*expert] + bias)
        };
        experts.iter().map(choice).collect::<Vec<_>>().join(", ")
    }

    /// Why a token may not have the experts of a row of ids; `None` where it may, or where it can't be told.
    pub fn refusal(&self, token: usize, ids: &[i64]) -> Option<String> {
        let experts = match self.experts(token, ids) {
            Ok(experts) => experts,
            Err(why) => return Some(why),
        };
        if self.admits(token, &experts) != Some(false) {
            return None;
        }
        let own = self.words(token, &experts);
        let best = self.sets(token).and_then(|sets| sets.first().map(|set| self.words(token, set)));
        let best = best.map_or(String::new(), |best| format!(", not {best}"));
        Some(format!("token {token} has the experts {own}{best}"))
    }

    /// Compares the weights of one token's experts, at `flat` of the tensor.
    pub fn compare(&self, comparison: &mut Comparison, flat: usize, token: usize, ids: &[i64], seen: &[f64]) {
        // what is no set of experts has no weights; the choice is judged by itself
        let Ok(experts) = self.experts(token, ids) else { return };
        let weights = self.weights(token, &experts);
        for (index, seen) in seen.iter().enumerate() {
            let (value, error) = (weights.value[index], weights.error[index]);
            let low = shardcheck_formats::round(Dtype::F32, value - error);
            let high = shardcheck_formats::round(Dtype::F32, value + error);
            comparison.element(flat + index, *seen, Allowed::Between { expected: value, low, high });
        }
    }
}

/// Material of one case of a router.
pub struct RouteMaterial {
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: Tensors,
    /// Tokens N.
    pub tokens: usize,
    /// The oracle.
    pub routing: Routing,
}

impl RouteMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// That its contract is missing.
    pub fn new(case: &RouteCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let contract =
            profile.operation(OperationKind::Route).and_then(|operation| operation.contract.as_ref());
        let contract = contract.ok_or("the engine declares no contract for route")?;
        let inputs = case.tensors(seed);
        let routing = Routing::new(&case.router, &inputs, contract.kexp);
        let (configuration, operation) = (case.configuration(), case.operation());
        Ok(Self { configuration, operation, inputs, tokens: case.tokens, routing })
    }

    /// Inputs of one token by itself.
    pub fn alone(&self, token: usize) -> Tensors {
        let mut inputs = self.inputs.clone();
        for name in ["logits", "token_ids"] {
            let Some(tensor) = inputs.find(name) else { continue };
            let row = tensor.len() / self.tokens;
            let codes = &tensor.to_codes()[token * row..(token + 1) * row];
            let shape: Vec<usize> = std::iter::once(1).chain(tensor.shape()[1..].iter().copied()).collect();
            let one = Tensor::from_codes(tensor.dtype(), &shape, codes);
            inputs.insert(name, one);
        }
        inputs
    }
}
