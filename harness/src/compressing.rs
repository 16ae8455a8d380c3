//! Material of a case of compressing tokens for shared rows: where rows are, which blocks a step fills, and what their entries are.

use shardcheck_cases::{CompressPcpCase, PcpRequest};
use shardcheck_engine::{
    Configuration, Operation, OperationKind, PcpDecodes, PcpStrategy, Profile, Tensor, Tensors,
};
use shardcheck_formats::{Contract, Dtype};
use shardcheck_references::compressor::{Blocks, Pooled, Token};

use crate::laboratory::{Halt, Observed};
use crate::sharing::SharingMaterial;

/// Tokens of a request that are given, values beside gates.
struct Line {
    /// Position of the first of them.
    first: usize,
    kv: Vec<f32>,
    gate: Vec<f32>,
}

/// Material of one case of compressing tokens. Its oracle knows no ranks.
pub struct CompressMaterial {
    /// The case.
    pub case: CompressPcpCase,
    /// Where each row of the batch is.
    pub sharing: SharingMaterial,
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: Tensors,
    /// What blocks are.
    pub blocks: Blocks,
    contract: Contract,
    lines: Vec<Line>,
    bias: Vec<f32>,
}

impl CompressMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// That its contract is missing.
    pub fn new(case: &CompressPcpCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let declared = profile.operation(OperationKind::CompressPcp);
        let contract = declared.and_then(|operation| operation.contract.as_ref());
        let contract = contract.ok_or("the engine declares no contract for compress_pcp")?.clone();
        let sharing = SharingMaterial::new(&case.batch);
        let inputs = case.tensors(seed);
        let blocks = Blocks { ratio: case.ratio, overlap: case.overlap, dim: case.dim };
        let columns = case.columns();
        let values = |name: &str| inputs.find(name).map(Tensor::to_f32).unwrap_or_default().into_iter();
        let [mut kv, mut gate, mut state_kv, mut state_gate] =
            ["kv", "gate", "state_kv", "state_gate"].map(values);
        let mut line = |request: &PcpRequest| {
            let (held, new) = (case.held(request.context_tokens) * columns, request.query_tokens * columns);
            Line {
                first: blocks.first_held(request.context_tokens),
                kv: state_kv.by_ref().take(held).chain(kv.by_ref().take(new)).collect(),
                gate: state_gate.by_ref().take(held).chain(gate.by_ref().take(new)).collect(),
            }
        };
        Ok(Self {
            lines: case.batch.requests.iter().map(&mut line).collect(),
            bias: values("gate_bias").collect(),
            configuration: case.batch.configuration(),
            operation: case.operation(sharing.asked),
            case: case.clone(),
            sharing,
            blocks,
            contract,
            inputs,
        })
    }

    /// `(request, block)` of each entry that the step makes, in order.
    pub fn made(&self) -> Vec<(usize, usize)> {
        let of_request = |(number, request): (usize, &PcpRequest)| {
            let filled = self.blocks.completed(request.context_tokens, request.query_tokens);
            filled.map(move |block| (number, block)).collect::<Vec<_>>()
        };
        self.case.batch.requests.iter().enumerate().flat_map(of_request).collect()
    }

    /// What an entry may be.
    pub fn entry(&self, request: usize, block: usize) -> Vec<Pooled> {
        let (line, columns) = (&self.lines[request], self.blocks.columns());
        let token = |position: usize| {
            let at = (position - line.first) * columns;
            Token { kv: &line.kv[at..at + columns], gate: &line.gate[at..at + columns] }
        };
        self.blocks.entry(block, token, &self.bias, &self.contract)
    }

    /// Values and gates that are held behind the step, request after request.
    pub fn state(&self) -> [Vec<f32>; 2] {
        let (mut values, mut gates) = (Vec::new(), Vec::new());
        for (line, request) in self.lines.iter().zip(&self.case.batch.requests) {
            let len = request.context_tokens + request.query_tokens;
            let from = (self.blocks.first_held(len) - line.first) * self.blocks.columns();
            values.extend_from_slice(&line.kv[from..]);
            gates.extend_from_slice(&line.gate[from..]);
        }
        [values, gates]
    }

    /// Rows of each request that the first of two steps has: half of them, rounded up.
    pub fn first_rows(&self) -> Vec<usize> {
        self.case.batch.requests.iter().map(|request| request.query_tokens.div_ceil(2)).collect()
    }

    /// The first or the second of two steps that the batch is divided into within its requests, rows in turn: its operation, and its
    /// inputs but for the state.
    pub fn part(&self, second: bool) -> (Operation, Tensors) {
        let mut case = self.case.clone();
        (case.batch.strategy, case.batch.decodes) = (PcpStrategy::RoundRobin, PcpDecodes::Split);
        case.batch.extra_rows = 0;
        let (mut rows, mut row) = (Vec::new(), 0);
        for (request, first) in case.batch.requests.iter_mut().zip(self.first_rows()) {
            let own = if second { row + first..row + request.query_tokens } else { row..row + first };
            row += request.query_tokens;
            request.context_tokens += if second { first } else { 0 };
            request.query_tokens = own.len();
            rows.extend(own);
        }
        let mut inputs = case.batch.tensors();
        for name in ["kv", "gate"] {
            let width = self.blocks.columns();
            let all = self.inputs.find(name).map(Tensor::to_f32).unwrap_or_default();
            let own: Vec<f32> =
                rows.iter().flat_map(|row| all[row * width..(row + 1) * width].iter().copied()).collect();
            inputs.insert(name, Tensor::from_f32(Dtype::F32, &[rows.len(), width], &own));
        }
        if let Some(bias) = self.inputs.find("gate_bias") {
            inputs.insert("gate_bias", bias.clone());
        }
        (case.operation(0), inputs)
    }

    /// Rows that all requests hold between the two parts.
    pub fn held_between(&self) -> usize {
        let requests = self.case.batch.requests.iter().zip(self.first_rows());
        requests.map(|(request, first)| self.case.held(request.context_tokens + first)).sum()
    }

    /// Entries that a step of the case made on a rank: `[entries, d]`, whatever their number.
    ///
    /// # Errors
    /// That the engine did not return them so.
    pub fn entries(&self, observed: &Observed, rank: usize) -> Result<Vec<f64>, Halt> {
        let given = observed.reply.outputs.find("entries").and_then(|tensor| tensor.shape().get(1).copied());
        let shape = [self.sharing.world, given.unwrap_or(0), self.blocks.dim];
        let all = observed.output("entries", Dtype::F32, &shape)?.to_f64();
        let size = shape[1] * shape[2];
        Ok(all[rank * size..(rank + 1) * size].to_vec())
    }
}

#[cfg(test)]
mod tests;
