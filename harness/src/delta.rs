//! Material of a case of Kimi delta attention: its steps, and what the oracle allows each row and each state.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use shardcheck_cases::{KdaCase, KdaInputs, KdaRequest, KdaRow, KdaStep, generate_kda};
use shardcheck_engine::{
    Configuration, KdaGate, KdaPlan, Operation, OperationKind, Profile, Tensor, Tensors,
};
use shardcheck_formats::{Contract, Dtype};
use shardcheck_references::bound::interval;
use shardcheck_references::kda::{Arithmetic, Gate, Layer, Near, Row, Shape, State, Token, advance};

use crate::judge::Allowed;

/// Material of one case of Kimi delta attention.
pub struct KdaMaterial {
    /// The case.
    pub case: KdaCase,
    /// Inputs, by row.
    pub inputs: KdaInputs,
    contract: Contract,
    layer: Layer,
    expected: OnceLock<Vec<ExpectedStep>>,
    histories: OnceLock<Vec<Vec<History>>>,
}

/// What a step may show, request by request.
pub type ExpectedStep = Vec<ExpectedRequest>;

/// What a request of a step may show.
#[derive(Debug, Clone)]
pub struct ExpectedRequest {
    /// Its rows.
    pub rows: Vec<Row>,
    /// States behind all of them.
    pub state: State,
}

/// How a request came to be where it is behind a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// Rows that its states are made of, by their number.
    pub rows: Vec<usize>,
    /// Whether some step behind its first has rejected rows.
    pub is_rolled_back: bool,
    /// Whether it went over into another slot.
    pub is_forked: bool,
    /// Whether it began in a slot that another request had written.
    pub is_recycled: bool,
}

impl KdaMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// That its contract is missing.
    pub fn new(case: &KdaCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let contract =
            profile.operation(OperationKind::Kda).and_then(|operation| operation.contract.as_ref());
        let contract = contract.ok_or("the engine declares no contract for kda")?.clone();
        let inputs = generate_kda(case, seed);
        let layer = layer(case, &inputs.weights);
        let case = case.clone();
        Ok(Self { case, inputs, contract, layer, expected: OnceLock::new(), histories: OnceLock::new() })
    }

    /// What a session of the case is opened with.
    pub fn configuration(&self) -> Configuration {
        self.case.configuration()
    }

    /// The case's operation.
    pub fn operation(&self) -> Operation {
        self.case.operation()
    }

    /// Tensors of a step.
    pub fn tensors(&self, step: &KdaStep) -> Tensors {
        self.inputs.tensors(&self.case, step)
    }

    /// Element types of the output and of the core.
    pub fn dtypes(&self) -> [Dtype; 2] {
        [self.contract.output, self.contract.partial]
    }

    /// Value heads of a rank.
    pub fn own_heads(&self) -> usize {
        self.case.value_heads / self.case.tp
    }

    /// Channels of a rank.
    pub fn own_channels(&self) -> usize {
        self.layer.shape.channels() / self.case.tp
    }

    /// What the case's steps may show.
    pub fn expected(&self) -> &[ExpectedStep] {
        self.expected.get_or_init(|| self.play(&self.inputs.steps))
    }

    /// What steps may show whose requests are put together from the case's rows.
    pub fn play(&self, steps: &[KdaStep]) -> Vec<ExpectedStep> {
        let arithmetic = Arithmetic::of(&self.contract, self.case.chunk);
        let zero = State::zero(&self.layer.shape);
        // states behind no, one, … all rows of the step that last wrote a slot
        let mut slots: BTreeMap<usize, Vec<State>> = BTreeMap::new();
        let mut played = Vec::new();
        for step in steps {
            let mut written = Vec::new();
            let mut shown = Vec::new();
            for (index, request) in step.requests.iter().enumerate() {
                let behind = request.read.and_then(|slot| slots.get(&slot));
                let start = behind.map_or(&zero, |states| &states[step.accepted[index]]);
                let tokens: Vec<Token> =
                    step.rows[index].iter().map(|row| token(&self.inputs.rows[*row])).collect();
                let rows = advance(&self.layer, start, &tokens, &arithmetic);
                let mut states = vec![start.clone()];
                states.extend(rows.iter().map(|row| row.state.clone()));
                let state = states[states.len() - 1].clone();
                written.push((request.write, states));
                shown.push(ExpectedRequest { rows, state });
            }
            slots.extend(written);
            played.push(shown);
        }
        played
    }

    /// How each request of each step came to be where it is.
    pub fn histories(&self) -> &[Vec<History>] {
        self.histories.get_or_init(|| {
            let mut slots: BTreeMap<usize, History> = BTreeMap::new();
            let one = |step: &KdaStep, index: usize, slots: &BTreeMap<usize, History>| {
                let request = step.requests[index];
                let known = request.read.and_then(|slot| slots.get(&slot)).cloned();
                let mut own = known.unwrap_or_else(|| History {
                    rows: Vec::new(),
                    is_rolled_back: false,
                    is_forked: false,
                    is_recycled: slots.contains_key(&request.write),
                });
                own.rows.truncate(own.rows.len() - request.rejected);
                own.is_rolled_back |= request.rejected > 0;
                own.is_forked |= request.read.is_some_and(|read| read != request.write);
                own.rows.extend(&step.rows[index]);
                own
            };
            let of_step = |step: &KdaStep| -> Vec<History> {
                let shown: Vec<History> =
                    (0..step.requests.len()).map(|index| one(step, index, &slots)).collect();
                slots.extend(step.requests.iter().map(|r| r.write).zip(shown.iter().cloned()));
                shown
            };
            self.inputs.steps.iter().map(of_step).collect()
        })
    }

    /// A step in which new requests, each in a slot of its own, run rows of the case.
    pub fn recomputed(&self, rows: Vec<Vec<usize>>) -> (KdaStep, Operation) {
        let new = |(slot, rows): (usize, &Vec<usize>)| KdaRequest {
            rows: rows.len(),
            read: None,
            rejected: 0,
            write: slot,
        };
        let plan = KdaPlan { slots: rows.len().max(1), ..self.case.plan() };
        let step = KdaStep {
            requests: rows.iter().enumerate().map(new).collect(),
            accepted: vec![0; rows.len()],
            rows,
        };
        (step, Operation::Kda { plan })
    }

    /// Steps of one row a request that come to the same as the case's; for cases without rejected rows.
    pub fn split(&self) -> Vec<KdaStep> {
        let mut found = Vec::new();
        for step in &self.inputs.steps {
            let longest = step.rows.iter().map(Vec::len).max().unwrap_or(0);
            for place in 0..longest.max(1) {
                let mut part = KdaStep { requests: vec![], accepted: vec![], rows: vec![] };
                for (index, request) in step.requests.iter().enumerate() {
                    // all enter the first part, so that they read what there was before the step
                    if place > 0 && place >= request.rows {
                        continue;
                    }
                    let rows: Vec<usize> = step.rows[index].iter().copied().skip(place).take(1).collect();
                    let read = if place == 0 { request.read } else { Some(request.write) };
                    part.requests.push(KdaRequest { rows: rows.len(), read, ..*request });
                    part.rows.push(rows);
                }
                found.push(part);
            }
        }
        let mut last = BTreeMap::new();
        for part in &mut found {
            part.accepted = part
                .requests
                .iter()
                .map(|r| r.read.and_then(|slot| last.get(&slot)).copied().unwrap_or(0))
                .collect();
            last.extend(part.requests.iter().map(|request| (request.write, request.rows)));
        }
        found
    }

    /// What an element of the output may be.
    pub fn allowed_out(&self, near: Near) -> Allowed {
        within(near, self.contract.output)
    }

    /// What an element of the core may be.
    pub fn allowed_core(&self, near: Near) -> Allowed {
        within(near, self.contract.partial)
    }
}

fn within(near: Near, dtype: Dtype) -> Allowed {
    let (low, high) = interval(near.value, near.error, dtype);
    Allowed::Between { expected: near.value, low, high }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

fn token(row: &KdaRow) -> Token {
    Token {
        channels: [&row.query, &row.key, &row.value].into_iter().flat_map(|part| wide(part)).collect(),
        gate: wide(&row.gate),
        beta: wide(&row.beta),
        output_gate: wide(&row.output_gate),
    }
}

fn layer(case: &KdaCase, weights: &Tensors) -> Layer {
    let KdaCase { heads, value_heads, key_dim, value_dim, taps, .. } = *case;
    let values = |name: &str| weights.find(name).map(Tensor::to_f64).unwrap_or_default();
    Layer {
        shape: Shape { heads, value_heads, key_dim, value_dim, taps },
        gate: match case.gate {
            KdaGate::LowerBound => Gate::LowerBound(f64::from(KdaGate::LOWER_BOUND)),
            KdaGate::Softplus => Gate::Softplus,
        },
        convolution: ["conv_query", "conv_key", "conv_value"].into_iter().flat_map(values).collect(),
        a_log: values("a_log"),
        bias: values("dt_bias"),
        norm_weight: values("norm_weight"),
        epsilon: f64::from(KdaPlan::EPSILON),
    }
}

#[cfg(test)]
mod tests;
