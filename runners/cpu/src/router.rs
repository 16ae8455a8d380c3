//! The router of a layer of experts: scores, the choice among them, and weights. 32-bit, as published.
//!
//! Formulas: DeepSeek-V3 and its copies in vLLM (`grouped_topk`), SGLang (`biased_grouped_topk_impl`) and aiter
//! (`biased_grouped_topk_torch`); DeepSeek-V4 for tables by token id. Of equal choices the lower id is taken.

use shardcheck_engine::{
    EngineError, ExpertChoice, MaskedFill, Renormalise, Reply, Router, Scoring, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

/// What the router decides.
#[derive(Clone, Copy, PartialEq)]
pub struct RouterPolicies {
    /// Row by whose logits a row is routed: `(row, rows)`.
    pub row: fn(usize, usize) -> usize,
    /// Scores of logits.
    pub scores: fn(Scoring, &[f32]) -> Vec<f32>,
    /// What an expert is chosen by: `(score, bias)`.
    pub choice: fn(f32, f32) -> f32,
    /// What a group is kept by: `(choices of its experts, whether they are biased)`.
    pub group: fn(&[f32], bool) -> f32,
    /// Groups that are kept, of so many that are asked for.
    pub kept: fn(usize) -> usize,
    /// What stands for the choices of other groups.
    pub fill: fn(MaskedFill) -> f32,
    /// Indices of the largest values, so many of them.
    pub largest: fn(&[f32], usize) -> Vec<usize>,
    /// Row of the table of experts: `(token id, row of the batch)`.
    pub table_row: fn(i64, usize) -> usize,
    /// What a chosen expert weighs: `(score, choice)`.
    pub weight: fn(f32, f32) -> f32,
    /// Divides weights by their sum.
    pub renormalise: fn(&mut [f32], Renormalise),
    /// Multiplies them by the scale: `(weights, scale, whether they are divided by their sum)`.
    pub scale: fn(&mut [f32], f32, Renormalise),
}

impl RouterPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        row: |row, _| row,
        scores,
        choice: |score, bias| score + bias,
        group: |choices, biased| {
            largest(choices, if biased { 2 } else { 1 }).iter().map(|at| choices[*at]).sum()
        },
        kept: |asked| asked,
        fill: |fill| if fill == MaskedFill::Zero { 0.0 } else { f32::NEG_INFINITY },
        largest,
        table_row: |id, _| usize::try_from(id).unwrap_or(usize::MAX),
        weight: |score, _| score,
        renormalise,
        scale: |weights, scale, _| weights.iter_mut().for_each(|weight| *weight *= scale),
    };
}

/// Softmax or the logistic function, in 32 bits.
pub fn scores(scoring: Scoring, logits: &[f32]) -> Vec<f32> {
    match scoring {
        Scoring::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        Scoring::Softmax => {
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exps: Vec<f32> = logits.iter().map(|x| (x - most).exp()).collect();
            let sum: f32 = exps.iter().sum();
            exps.iter().map(|exp| exp / sum).collect()
        }
    }
}

/// Indices of the `count` largest values, the largest first, of equal ones the lower index first.
pub fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.truncate(count);
    order
}

/// Divides weights by their sum, if so with what keeps it from zero.
pub fn renormalise(weights: &mut [f32], how: Renormalise) {
    let sum: f32 = weights.iter().sum();
    let sum = match how {
        Renormalise::Raw => return,
        Renormalise::Sum => sum,
        Renormalise::SumAndTiny => sum + 1e-20,
    };
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

/// Experts of one token and their weights.
#[derive(Debug, Clone)]
pub struct Routed {
    /// Experts.
    pub experts: Vec<usize>,
    /// Weights in the same order.
    pub weights: Vec<f32>,
}

/// A router with what it needs beside logits.
pub struct Routing<'a> {
    router: Router,
    experts: usize,
    bias: Option<Vec<f32>>,
    table: Option<Vec<usize>>,
    policies: &'a RouterPolicies,
}

impl<'a> Routing<'a> {
    /// Reads bias and table.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit, a crash for a router that asks for more than there is.
    pub fn read(inputs: &Tensors, router: Router, policies: &'a RouterPolicies) -> Result<Self, EngineError> {
        let experts = inputs.get("logits")?.shape().last().copied().unwrap_or(0);
        let size = experts.checked_div(router.groups).unwrap_or(0);
        if size == 0 || router.top_groups > router.groups || router.top_k > router.top_groups * size {
            return Err(EngineError::Crash { text: format!("{experts} experts do not do for {router:?}") });
        }
        let bias = match router.choice {
            ExpertChoice::Biased => {
                Some(inputs.get("bias")?.expect("bias", Dtype::F32, &[experts])?.to_f32())
            }
            _ => None,
        };
        let table = match router.choice {
            ExpertChoice::Hashed => {
                let table = inputs.get("hash_table")?;
                let ids = table.shape().first().copied().unwrap_or(0);
                let entries = table.expect("hash_table", Dtype::I32, &[ids, router.top_k])?.to_i64();
                let known = |entry: i64| usize::try_from(entry).ok().filter(|expert| *expert < experts);
                let entries = entries.into_iter().map(known).collect::<Option<Vec<_>>>();
                Some(
                    entries
                        .ok_or(EngineError::Crash { text: "the table names an unknown expert".to_owned() })?,
                )
            }
            _ => None,
        };
        Ok(Self { router, experts, bias, table, policies })
    }

    /// Experts that there are.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Experts of a token.
    pub fn top_k(&self) -> usize {
        self.router.top_k
    }

    /// Routes rows of logits `[rows, E]` with the id of each token where there is a table.
    pub fn route(&self, logits: &[f32], ids: &[i64]) -> Vec<Routed> {
        let rows = logits.len() / self.experts;
        (0..rows)
            .map(|row| {
                let from = (self.policies.row)(row, rows);
                self.one(&logits[from * self.experts..(from + 1) * self.experts], ids.get(row).copied(), row)
            })
            .collect()
    }

    fn one(&self, logits: &[f32], id: Option<i64>, row: usize) -> Routed {
        let (router, policies) = (&self.router, self.policies);
        let scores = (policies.scores)(router.scoring, logits);
        let choice = |expert: usize| match &self.bias {
            Some(bias) => (policies.choice)(scores[expert], bias[expert]),
            None => scores[expert],
        };
        let mut choices: Vec<f32> = (0..self.experts).map(choice).collect();
        let experts = match (&self.table, id) {
            (Some(table), Some(id)) => {
                let rows = table.len() / router.top_k;
                let row = (policies.table_row)(id, row).min(rows - 1);
                table[row * router.top_k..(row + 1) * router.top_k].to_vec()
            }
            _ => {
                self.mask(&mut choices);
                (policies.largest)(&choices, router.top_k)
            }
        };
        let mut weights: Vec<f32> =
            experts.iter().map(|expert| (policies.weight)(scores[*expert], choice(*expert))).collect();
        (policies.renormalise)(&mut weights, router.renormalise);
        (policies.scale)(&mut weights, router.scale, router.renormalise);
        Routed { experts, weights }
    }

    /// Fills the choices of groups that are not kept.
    fn mask(&self, choices: &mut [f32]) {
        let (router, policies) = (&self.router, self.policies);
        if router.groups == 1 {
            return;
        }
        let size = self.experts / router.groups;
        let of_groups: Vec<f32> =
            choices.chunks(size).map(|group| (policies.group)(group, self.bias.is_some())).collect();
        let kept = largest(&of_groups, (policies.kept)(router.top_groups));
        for (expert, choice) in choices.iter_mut().enumerate() {
            if !kept.contains(&(expert / size)) {
                *choice = (policies.fill)(router.fill);
            }
        }
    }
}

/// Ids of tokens, where the router takes them.
///
/// # Errors
/// [`EngineError::Input`] for a tensor that does not fit.
pub fn token_ids(inputs: &Tensors, router: &Router, tokens: usize) -> Result<Vec<i64>, EngineError> {
    if router.choice != ExpertChoice::Hashed {
        return Ok(Vec::new());
    }
    Ok(inputs.get("token_ids")?.expect("token_ids", Dtype::I64, &[tokens])?.to_i64())
}

/// The experts of given logits.
///
/// # Errors
/// As [`Routing::read`].
pub fn route(inputs: &Tensors, router: Router, policies: &RouterPolicies) -> Result<Reply, EngineError> {
    let routing = Routing::read(inputs, router, policies)?;
    let tokens = inputs.get("logits")?.shape()[0];
    let logits = inputs.get("logits")?.expect("logits", Dtype::F32, &[tokens, routing.experts])?.to_f32();
    let routed = routing.route(&logits, &token_ids(inputs, &router, tokens)?);
    let ids: Vec<i32> = routed.iter().flat_map(|r| r.experts.iter().map(|expert| *expert as i32)).collect();
    let weights: Vec<f32> = routed.iter().flat_map(|r| r.weights.iter().copied()).collect();
    let shape = [1, tokens, router.top_k];
    let outputs = Tensors::new()
        .with("topk_ids", Tensor::from_i32(&shape, &ids))
        .with("topk_weights", Tensor::from_f32(Dtype::F32, &shape, &weights));
    Ok(Reply { outputs, collectives: vec![0], ..Reply::default() })
}
