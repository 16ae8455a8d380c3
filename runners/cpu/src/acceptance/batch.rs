//! A batch of drafts as it is given, checked.

use std::ops::Range;

use shardcheck_engine::{AcceptanceMethod, EngineError, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::{AcceptancePolicies, NoDraft};

/// Tokens of each rank: ceil(V / P) of them, fewer or none on the last ones.
pub fn shards(vocabulary: usize, ranks: usize) -> Vec<Range<usize>> {
    let width = vocabulary.div_ceil(ranks);
    (0..ranks).map(|rank| (rank * width).min(vocabulary)..((rank + 1) * width).min(vocabulary)).collect()
}

/// One request, as it is decided.
pub(super) struct Request {
    pub number: usize,
    pub first: usize,
    pub drafts: Vec<i64>,
    pub temperature: f32,
}

/// The inputs of a step.
pub(super) struct Batch {
    pub vocabulary: usize,
    pub columns: usize,
    pub draft: Option<Vec<f32>>,
    pub uniform: Vec<f32>,
    starts: Vec<usize>,
    drafts: Vec<i64>,
    target: Vec<f32>,
    temperature: Vec<f32>,
    noise: Vec<f32>,
}

fn crash(text: &str) -> EngineError {
    EngineError::Crash { text: text.to_owned() }
}

impl Batch {
    /// Reads a batch; greedy ones have no temperatures, numbers and noise.
    pub fn read(inputs: &Tensors, method: AcceptanceMethod) -> Result<Self, EngineError> {
        let (given, target) = (inputs.get("draft_tokens")?, inputs.get("target_logits")?);
        let (&[count, columns], &[rows, vocabulary]) = (given.shape(), target.shape()) else {
            return Err(crash("draft_tokens and target_logits are tables"));
        };
        let starts =
            inputs.get("query_start_loc")?.expect("query_start_loc", Dtype::I32, &[count + 1])?.to_i64();
        let drafts = given.expect("draft_tokens", Dtype::I32, &[count, columns])?.to_i64();
        let starts = starts.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>();
        let starts = starts.map_err(|_| crash("a start is negative"))?;
        let grows = |pair: &[usize]| pair[1] > pair[0] && pair[1] - pair[0] <= columns + 1;
        if starts[0] != 0 || starts[count] != rows || !starts.windows(2).all(grows) {
            return Err(crash("query_start_loc does not give each request its drafts' rows and one more"));
        }
        let valid = |draft: &i64| *draft >= -1 && *draft < vocabulary as i64;
        if vocabulary == 0 || !drafts.iter().all(valid) {
            return Err(crash("a draft is no token"));
        }
        let floats = |name: &str, shape: &[usize]| -> Result<Vec<f32>, EngineError> {
            Ok(inputs.get(name)?.expect(name, Dtype::F32, shape)?.to_f32())
        };
        let chance = method != AcceptanceMethod::Greedy;
        let drawn = |name: &str, shape: &[usize]| if chance { floats(name, shape) } else { Ok(Vec::new()) };
        let draft = inputs.find("draft_logits").filter(|_| chance).map(Tensor::shape).is_some();
        Ok(Self {
            vocabulary,
            columns,
            draft: draft.then(|| floats("draft_logits", &[count, columns, vocabulary])).transpose()?,
            uniform: drawn("uniform", &[rows])?,
            target: floats("target_logits", &[rows, vocabulary])?,
            temperature: drawn("temperature", &[count])?,
            noise: drawn("noise", &[rows, vocabulary])?,
            starts,
            drafts,
        })
    }

    pub fn requests(&self) -> usize {
        self.starts.len() - 1
    }

    /// A request with the drafts that count.
    pub fn request(&self, number: usize, policies: &AcceptancePolicies) -> Request {
        let (first, end) = (self.starts[number], self.starts[number + 1]);
        let count = (policies.drafts)(end - first - 1, self.columns).min(self.columns);
        let own = &self.drafts[number * self.columns..][..count];
        let ends = own.iter().position(|draft| *draft < 0).filter(|_| policies.none == NoDraft::Ends);
        let drafts = own[..ends.unwrap_or(count)].to_vec();
        Request { number, first, drafts, temperature: self.temperature.get(number).copied().unwrap_or(0.0) }
    }

    /// The draft of a request at a column; −1 behind the last one.
    pub fn draft_at(&self, number: usize, column: usize) -> i64 {
        if column < self.columns { self.drafts[number * self.columns + column] } else { -1 }
    }

    /// Logits of the target at a row; the last one's behind the end.
    pub fn target_row(&self, row: usize) -> &[f32] {
        &self.target[row.min(self.starts[self.requests()] - 1) * self.vocabulary..][..self.vocabulary]
    }

    pub fn noise_row(&self, row: usize) -> &[f32] {
        &self.noise[row.min(self.starts[self.requests()] - 1) * self.vocabulary..][..self.vocabulary]
    }

    /// Logits of the drafter, where there are any.
    pub fn draft_row(&self, number: usize, index: usize) -> Option<&[f32]> {
        let row = number * self.columns + index;
        self.draft.as_ref().map(|all| &all[row * self.vocabulary..][..self.vocabulary])
    }
}
