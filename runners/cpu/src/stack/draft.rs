//! The draft head of a stack: which drafts of the step are accepted, and the new ones.
//!
//! Rows and tokens as in vLLM `DeepSeekMultiTokenPredictor` and `SpecDecodeBaseProposer`: a row has the token behind it and the target's stream of its
//! own; the first pass goes up to the last accepted row, every further draft is one row more.

use shardcheck_engine::{EngineError, StackPlan, StreamLayout, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::lanes::Lanes;
use super::worker::Rows;
use super::{Passage, Scene, Seen, StackMemory, Step};
use crate::batch::Batch;
use crate::memory::Metadata;

/// What a draft head decides.
#[derive(Clone, Copy, PartialEq)]
pub struct DraftPolicies {
    /// Whether a draft is accepted: `(token of the row before it, draft)`.
    pub accepts: fn(usize, usize) -> bool,
    /// Row of a request behind which the first new draft stands: `(last row that is no draft, accepted drafts, drafts)`.
    pub last: fn(usize, usize, usize) -> usize,
    /// Token that a row is given: `(tokens of the request's rows, row)`; the one behind it, but for the last.
    pub token: fn(&[usize], usize) -> usize,
    /// Whether the token in front of another chunk of a prompt is the prompt's own.
    pub knows_the_prompt: bool,
    /// Layer whose cache the head has: `(its own, the target's last)`.
    pub cache: fn(usize, usize) -> usize,
    /// Whether a further draft is made of the head's own stream, and not of the target's again.
    pub own_stream: bool,
    /// Request whose row a request's stream is taken of: `(request, requests)`.
    pub request: fn(usize, usize) -> usize,
}

impl DraftPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        accepts: |token, draft| token == draft,
        last: |certain, accepted, _| certain + accepted,
        token: |tokens, row| tokens[row + 1],
        knows_the_prompt: true,
        cache: |own, _| own,
        own_stream: true,
        request: |request, _| request,
    };
}

/// What the head is given of the target.
pub struct Target<'a> {
    /// Token of each row.
    pub tokens: &'a [i32],
    /// Rows behind the last norm, by rank.
    pub normed: &'a [Vec<f32>],
}

/// What became of a request's drafts.
struct Verified {
    accepted: usize,
    /// Rows that the head runs over; none without a row of the request.
    rows: usize,
    /// Tokens that they are given.
    tokens: Vec<usize>,
}

/// Accepts drafts and makes new ones: `accepted_drafts i32 [ranks, n]`, `draft_tokens i32 [ranks, n, k]`.
///
/// # Errors
/// As a step through the layers.
pub fn propose(
    step: &Step<'_>,
    inputs: &Tensors,
    target: &Target<'_>,
    memory: &mut StackMemory,
    collectives: &mut [u64],
) -> Result<Tensors, EngineError> {
    let (scene, drafts) = (step.scene, step.plan.drafts);
    let (ranks, requests) = (target.normed.len(), scene.batch.seq_lens.len());
    let verified = verified(step, inputs, target)?;
    let hidden = step.weights.sizes.hidden;
    let mut lengths = Vec::new();
    for (request, own) in verified.iter().enumerate() {
        let rows = (scene.batch.starts[request + 1] - scene.batch.starts[request]) as usize;
        let behind = rows - own.rows;
        // what is rejected is no longer there
        lengths.push(scene.batch.seq_lens[request] - behind);
    }
    let of_request = |request: usize| (scene.policies.stack.draft.request)(request, requests);
    let streams = target.normed.iter().map(|normed| {
        let rows = verified.iter().enumerate().flat_map(|(request, own)| {
            let first = scene.batch.starts[of_request(request)] as usize;
            (0..own.rows).flat_map(move |row| {
                let at = (first + row).min(normed.len() / hidden - 1) * hidden;
                &normed[at..at + hidden]
            })
        });
        rows.copied().collect::<Vec<f32>>()
    });
    let mut pass = Pass {
        tokens: verified.iter().flat_map(|own| own.tokens.iter().copied()).collect(),
        rows: verified.iter().map(|own| own.rows).collect(),
        streams: streams.collect(),
        lengths,
    };
    let first = pass.streams.iter().map(|stream| pass.last_rows(stream, hidden)).collect::<Vec<_>>();
    let mut drafted = vec![vec![-1; requests * drafts]; ranks];
    for draft in 0..drafts {
        let (streams, tokens) = pass.run(step, memory, collectives)?;
        let mut present = pass.rows.iter().scan(0, |end, rows| {
            *end += rows;
            Some((*rows > 0).then(|| *end - 1))
        });
        for request in 0..requests {
            let Some(last) = present.next().flatten() else { continue };
            for (own, tokens) in drafted.iter_mut().zip(&tokens) {
                own[request * drafts + draft] = tokens[last];
            }
        }
        let own = scene.policies.stack.draft.own_stream;
        let next = streams.iter().map(|stream| pass.last_rows(stream, hidden)).collect();
        pass = Pass {
            tokens: (0..requests)
                .filter(|request| pass.rows[*request] > 0)
                .map(|request| drafted[0][request * drafts + draft] as usize)
                .collect(),
            streams: if own { next } else { first.clone() },
            lengths: pass.lengths.iter().map(|length| length + 1).collect(),
            rows: pass.rows.iter().map(|rows| (*rows).min(1)).collect(),
        };
    }
    let accepted: Vec<i32> = verified.iter().map(|own| own.accepted as i32).collect();
    Ok(Tensors::new()
        .with("accepted_drafts", Tensor::from_i32(&[ranks, requests], &accepted.repeat(ranks)))
        .with("draft_tokens", Tensor::from_i32(&[ranks, requests, drafts], &drafted.concat())))
}

/// Which drafts are accepted, and the tokens of the head's rows.
fn verified(step: &Step<'_>, inputs: &Tensors, target: &Target<'_>) -> Result<Vec<Verified>, EngineError> {
    let (batch, policies) = (step.scene.batch, &step.scene.policies.stack.draft);
    let requests = batch.seq_lens.len();
    let counts = inputs.get("draft_counts")?.expect("draft_counts", Dtype::I32, &[requests])?.to_i64();
    let next = inputs.get("next_tokens")?.expect("next_tokens", Dtype::I32, &[requests])?.to_i64();
    let of_request = |request: usize| -> Result<Verified, EngineError> {
        let rows = batch.starts[request] as usize..batch.starts[request + 1] as usize;
        let Some(certain) = rows.len().checked_sub(1 + counts[request].max(0) as usize) else {
            if rows.is_empty() {
                return Ok(Verified { accepted: 0, rows: 0, tokens: Vec::new() });
            }
            let text = format!("request {request} has {} drafts among {} rows", counts[request], rows.len());
            return Err(EngineError::Crash { text });
        };
        let (own, seen) = (&step.rows.tokens[rows.clone()], &target.tokens[rows]);
        let drafts = own.len() - 1 - certain;
        let is_right =
            |draft: &usize| (policies.accepts)(seen[certain + draft] as usize, own[certain + draft + 1]);
        let accepted = (0..drafts).take_while(is_right).count();
        let last = (policies.last)(certain, accepted, drafts);
        let known = usize::try_from(next[request]).ok().filter(|_| policies.knows_the_prompt);
        let behind = known.unwrap_or(seen[last] as usize);
        let tokens: Vec<usize> = own[..=last].iter().copied().chain([behind]).collect();
        let tokens = (0..=last).map(|row| (policies.token)(&tokens, row)).collect();
        Ok(Verified { accepted, rows: last + 1, tokens })
    };
    (0..requests).map(of_request).collect()
}

/// The head's streams behind its layer and the tokens of its rows, by rank.
type Passed = (Vec<Vec<f32>>, Vec<Vec<i32>>);

/// Rows that the head runs over at once.
struct Pass {
    tokens: Vec<usize>,
    /// Rows of each request.
    rows: Vec<usize>,
    /// The streams that they are given, by rank.
    streams: Vec<Vec<f32>>,
    /// Length of each request, the rows included.
    lengths: Vec<usize>,
}

impl Pass {
    /// The last row of each request that has some.
    fn last_rows(&self, stream: &[f32], hidden: usize) -> Vec<f32> {
        let mut end = 0;
        let mut last = Vec::new();
        for rows in self.rows.iter().filter(|rows| **rows > 0) {
            end += rows;
            last.extend_from_slice(&stream[(end - 1) * hidden..end * hidden]);
        }
        last
    }

    /// Runs the head over the rows.
    fn run(
        &self,
        step: &Step<'_>,
        memory: &mut StackMemory,
        collectives: &mut [u64],
    ) -> Result<Passed, EngineError> {
        let mut starts = vec![0];
        self.rows.iter().for_each(|rows| starts.push(starts[starts.len() - 1] + *rows as i32));
        let (seq_lens, table) = (self.lengths.clone(), step.scene.batch.table.clone());
        let batch = Batch { seq_lens, starts, rows: self.tokens.len(), table };
        let metadata: Vec<Metadata> =
            step.scene.metadata.iter().map(|own| Metadata { batch: batch.clone(), ..own.clone() }).collect();
        let scene = Scene {
            configuration: step.scene.configuration,
            grids: step.scene.grids,
            batch: &batch,
            metadata: &metadata,
            ranks: step.scene.ranks,
            policies: step.scene.policies,
        };
        let positions = self
            .rows
            .iter()
            .zip(&self.lengths)
            .flat_map(|(rows, length)| (0..*rows).map(move |row| (length + row).saturating_sub(*rows)));
        let places = (0..self.tokens.len()).map(Some).collect();
        let rows = Rows { tokens: self.tokens.clone(), positions: positions.collect(), places };
        // and every rank of prefill context parallelism too
        let lanes = Lanes::whole(step.lanes.all.len(), &batch, &metadata, &rows);
        // every rank has all rows of the head's stream
        let plan = StackPlan { stream: StreamLayout::Whole, ..step.plan };
        let own =
            Step { inputs: step.inputs, scene: &scene, plan, weights: step.weights, rows: &rows, lanes };
        let mut passage = Passage {
            streams: self.streams.clone(),
            seen: vec![Seen::default(); self.streams.len()],
            collectives: vec![0; self.streams.len()],
        };
        let first = plan.places();
        passage.streams = passage.all(&own, |worker, stream| worker.draft_rows(stream, first))?;
        own.layer(plan.layers, &mut passage, memory)?;
        let tokens = passage.all(&own, |worker, stream| {
            let normed = worker.normed(stream, first + 4)?;
            Ok(worker.logits(&normed)?.1)
        })?;
        collectives.iter_mut().zip(&passage.collectives).for_each(|(sum, own)| *sum += own);
        Ok((passage.streams, tokens))
    }
}
