//! Material of a case of accepting drafts: the batch, the step, and what the oracle lets each request emit.

use std::sync::OnceLock;

use shardcheck_cases::{AcceptanceCase, AcceptanceInputs, generate_acceptance};
use shardcheck_engine::{AcceptanceMethod, Configuration, Operation};
use shardcheck_references::acceptance::{Method, Outcome, Request, outcomes};

/// Material of one case of accepting drafts.
pub struct AcceptanceMaterial {
    /// The case.
    pub case: AcceptanceCase,
    /// Its seed.
    pub seed: u64,
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: AcceptanceInputs,
    /// The method in the oracle's words.
    pub method: Method,
    outcomes: OnceLock<Vec<Vec<Outcome>>>,
}

impl AcceptanceMaterial {
    /// Makes the material.
    pub fn new(case: &AcceptanceCase, seed: u64) -> Self {
        let method = match case.method {
            AcceptanceMethod::Greedy => Method::Greedy,
            AcceptanceMethod::Standard => Method::Standard,
            AcceptanceMethod::Block => Method::Block,
        };
        Self {
            case: case.clone(),
            seed,
            configuration: case.configuration(),
            operation: case.operation(),
            inputs: generate_acceptance(case, seed),
            method,
            outcomes: OnceLock::new(),
        }
    }

    /// Requests of the batch.
    pub fn count(&self) -> usize {
        self.inputs.drafts.len()
    }

    /// A request as the oracle takes it.
    pub fn request(&self, number: usize) -> Request<'_> {
        let (inputs, vocabulary) = (&self.inputs, self.case.vocabulary);
        let (first, end) = (inputs.starts[number], inputs.starts[number + 1]);
        let own = inputs.columns * vocabulary;
        Request {
            vocabulary,
            drafts: &inputs.drafts[number],
            target: &inputs.target[first * vocabulary..end * vocabulary],
            draft: inputs.draft.as_ref().map(|all| &all[number * own..(number + 1) * own]),
            temperature: inputs.temperature[number],
            uniform: &inputs.uniform[first..end],
            noise: &inputs.noise[first * vocabulary..end * vocabulary],
        }
    }

    /// What each request may emit, made once.
    pub fn outcomes(&self) -> &[Vec<Outcome>] {
        let of_all =
            || (0..self.count()).map(|number| outcomes(self.method, &self.request(number))).collect();
        self.outcomes.get_or_init(of_all)
    }
}

#[cfg(test)]
mod tests;
