//! What the mixtures of a stack may choose and add, by what the engine showed before them.

use shardcheck_engine::{StackPlan, Tensor, Tensors};
use shardcheck_formats::Dtype;
use shardcheck_references::kda::Near;
use shardcheck_references::moe::Mlp;
use shardcheck_references::stack;

use super::StackMaterial;
use crate::routing::Routing;

/// A layer by its number among those with experts, and a row of the step.
pub type MixtureRow = (usize, usize);

impl StackMaterial {
    /// The oracle of the router of a layer, by its number among those with experts, given the logits `[T, E]` and the tokens of the rows of
    /// a step; none where a logit is no number.
    pub fn routing(&self, mixture: usize, logits: &[f32], tokens: &[i32]) -> Option<Routing> {
        let (own, plan) = (self.case.mixture?, self.case.plan().experts?);
        if !logits.iter().all(|logit| logit.is_finite()) {
            return None;
        }
        let shape = [logits.len() / own.experts, own.experts];
        let mut inputs = Tensors::new().with("logits", Tensor::from_f32(Dtype::F32, &shape, logits));
        if mixture < own.hashed {
            let ids: Vec<i64> = tokens[..shape[0]].iter().map(|token| i64::from(*token)).collect();
            let table = self.weight("hash_table", Some(mixture));
            let entries: Vec<i32> = table.iter().map(|entry| *entry as i32).collect();
            inputs.insert("token_ids", Tensor::from_i64(&[ids.len()], &ids));
            inputs.insert("hash_table", Tensor::from_i32(&[self.case.vocabulary, own.top_k], &entries));
        } else if own.biased {
            let bias = self.weight("router_bias", Some(mixture));
            inputs.insert("bias", Tensor::from_f32(Dtype::F32, &[own.experts], bias));
        }
        Some(Routing::new(&plan.router_of(mixture), &inputs, self.contract.kexp))
    }

    /// What the experts of a row give over all ranks, of its row in their own width; with the expert of every row where experts are not latent.
    pub fn mixture_update(
        &self,
        (mixture, row): MixtureRow,
        (routing, experts): (&Routing, &[usize]),
        x: &[f32],
    ) -> Vec<Near> {
        let weights = routing.weights(row, experts);
        let of = |name: &str, expert: usize| {
            let all = self.weight(name, Some(mixture));
            let size = x.len() * self.case.inner;
            &all[expert * size..(expert + 1) * size]
        };
        let mut terms: Vec<(f64, f64, Mlp<'_>)> = experts
            .iter()
            .enumerate()
            .map(|(index, expert)| {
                let gate = Some(of("expert_gate", *expert));
                let mlp = Mlp {
                    gate,
                    up: of("expert_up", *expert),
                    down: of("expert_down", *expert),
                    gating: self.gating(),
                };
                (weights.value[index], weights.error[index], mlp)
            })
            .collect();
        if !self.is_latent() {
            terms.extend(self.shared_expert(mixture).map(|mlp| (1.0, 0.0, mlp)));
        }
        stack::mixture(&terms, x, self.expert_ranks(), &self.contract)
    }

    /// Whether experts are latent.
    pub fn is_latent(&self) -> bool {
        self.case.mixture.is_some_and(|own| own.latent > 0)
    }

    fn shared_expert(&self, mixture: usize) -> Option<Mlp<'_>> {
        self.case.mixture.filter(|own| own.shared > 0)?;
        let [gate, up, down] =
            ["shared_gate", "shared_up", "shared_down"].map(|name| self.weight(name, Some(mixture)));
        Some(Mlp { gate: Some(gate), up, down, gating: self.gating() })
    }

    /// A row behind the norm of latent experts.
    pub fn latent_normed(&self, mixture: usize, sum: &[f32]) -> Vec<Near> {
        let weight = self.weight("latent_norm", Some(mixture));
        stack::norm(sum, weight, f64::from(StackPlan::EPSILON), &self.contract)
    }

    /// What latent experts and the expert of every row add to the stream, given the normed row of the former and that of the stream.
    pub fn latent_update(&self, mixture: usize, normed: &[f32], x: &[f32]) -> Vec<Near> {
        let shared = self.shared_expert(mixture);
        let shared = shared.as_ref().map(|mlp| (mlp, x));
        let up = self.weight("latent_up", Some(mixture));
        stack::latent::lifted(up, normed, shared, self.ranks(), &self.contract)
    }
}
