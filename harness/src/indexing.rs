//! Material of a case of selecting tokens for shared rows: where rows are, and what all tokens score that a row sees.

use std::sync::OnceLock;

use shardcheck_cases::SelectPcpCase;
use shardcheck_engine::{Configuration, Operation, OperationKind, Profile, Tensor, Tensors};
use shardcheck_formats::Contract;
use shardcheck_references::sparse::{Heads, Score, score};

use crate::sharing::SharingMaterial;

/// Material of one case of selecting tokens for shared rows. Its oracle knows no ranks.
pub struct IndexMaterial {
    /// The case.
    pub case: SelectPcpCase,
    /// Where each row of the batch is.
    pub sharing: SharingMaterial,
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: Tensors,
    /// Keys of each request, in the order of positions.
    pub keys: Vec<Vec<f32>>,
    contract: Contract,
    query: Vec<f32>,
    weights: Vec<f32>,
    scores: Vec<OnceLock<Vec<Score>>>,
}

impl IndexMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// That its contract is missing.
    pub fn new(case: &SelectPcpCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let declared = profile.operation(OperationKind::SelectPcp);
        let contract = declared.and_then(|operation| operation.contract.as_ref());
        let contract = contract.ok_or("the engine declares no contract for select_pcp")?.clone();
        let sharing = SharingMaterial::new(&case.batch);
        let inputs = case.tensors(seed);
        let values = |name: &str| inputs.find(name).map(Tensor::to_f32).unwrap_or_default();
        let (mut new, mut context) = (values("index_key").into_iter(), values("index_context").into_iter());
        let mut keys_of = |request: &shardcheck_cases::PcpRequest| -> Vec<f32> {
            let before = context.by_ref().take(request.context_tokens * case.index_dim);
            before.chain(new.by_ref().take(request.query_tokens * case.index_dim)).collect()
        };
        Ok(Self {
            keys: case.batch.requests.iter().map(&mut keys_of).collect(),
            configuration: case.batch.configuration(),
            operation: case.operation(sharing.asked),
            query: values("index_query"),
            weights: values("index_weights"),
            scores: std::iter::repeat_with(OnceLock::new).take(sharing.placed.len()).collect(),
            case: case.clone(),
            sharing,
            contract,
            inputs,
        })
    }

    /// Tokens of the longest request.
    pub fn longest(&self) -> usize {
        self.keys.iter().map(|keys| keys.len() / self.case.index_dim).max().unwrap_or(0)
    }

    /// Scores of the tokens that a row of the batch sees, in the order of positions.
    pub fn scores(&self, row: usize) -> &[Score] {
        let make = || {
            let (heads, dim, placed) =
                (self.case.index_heads, self.case.index_dim, &self.sharing.placed[row]);
            let own = Heads {
                query: &self.query[row * heads * dim..(row + 1) * heads * dim],
                weights: &self.weights[row * heads..(row + 1) * heads],
            };
            let keys = self.keys[placed.request].chunks_exact(dim).take(placed.visible_tokens());
            keys.map(|key| score(&own, key, 1.0, &self.contract)).collect()
        };
        self.scores[row].get_or_init(make)
    }
}

#[cfg(test)]
mod tests;
