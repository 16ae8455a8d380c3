//! Layers of a stack that have a mixture of experts: how rows are routed, and what stands around the experts.

use serde::{Deserialize, Serialize};

use crate::{ExpertChoice, Router};

/// Layers of a stack that have a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackExperts {
    /// Layers, the first ones, that have a plain MLP.
    pub dense: usize,
    /// How the experts of a row are chosen and weighed in the others.
    pub router: Router,
    /// Layers, the first of those with experts, in which a table has the experts of every token id; weights are scores all the same.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hashed: usize,
    /// Whether experts work in a narrower space: a down-projection, the experts and their sum over all ranks, a norm, an up-projection.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub latent: bool,
    /// Whether there is an expert that every row has, of the normed row in its full width, its inner width shared out over all ranks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
}

fn is_zero(value: &usize) -> bool {
    *value == 0
}

impl StackExperts {
    /// Router of a layer, by its number among those that have experts.
    pub fn router_of(&self, mixture: usize) -> Router {
        let choice = if mixture < self.hashed { ExpertChoice::Hashed } else { self.router.choice };
        Router { choice, ..self.router }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MaskedFill, Renormalise, Scoring};

    #[test]
    fn the_first_mixtures_are_routed_by_a_table_and_a_plan_of_before_reads_as_it_did() {
        let router = Router {
            scoring: Scoring::Sigmoid,
            choice: ExpertChoice::Biased,
            top_k: 2,
            groups: 1,
            top_groups: 1,
            fill: MaskedFill::NegativeInfinity,
            renormalise: Renormalise::Sum,
            scale: 1.0,
        };
        let plan = StackExperts { dense: 1, router, hashed: 2, latent: true, shared: true };
        let choices = [0, 1, 2].map(|mixture| plan.router_of(mixture).choice);
        assert_eq!(choices, [ExpertChoice::Hashed, ExpertChoice::Hashed, ExpertChoice::Biased]);
        let plain = StackExperts { hashed: 0, latent: false, shared: false, ..plan };
        let value = serde_json::to_value(plain).unwrap();
        assert_eq!(value.as_object().unwrap().len(), 2);
        assert_eq!(serde_json::from_value::<StackExperts>(value).unwrap(), plain);
    }
}
