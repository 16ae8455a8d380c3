//! The engine's loop: admit, run one step of all sequences, hand out what came of it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rayon::prelude::*;

use super::blocks::BlockPool;
use super::logprobs::token_logprob;
use super::request::{Finish, GenerateError};
use super::sequence::Sequence;
use super::{EngineConfig, Shared, draft};
use crate::attention::{Attention, AttentionError};
use crate::metrics::Metrics;
use crate::model::{Model, Span};
use crate::tokenizer::{TokenId, Tokenizer};

/// Everything that the engine's thread owns.
pub struct Scheduler {
    model: Arc<Model>,
    tokenizer: Arc<Tokenizer>,
    attention: Box<dyn Attention>,
    config: EngineConfig,
    metrics: Arc<Metrics>,
    threads: rayon::ThreadPool,
    blocks: BlockPool,
    running: Vec<Sequence>,
}

/// What one sequence does in a step.
struct Work {
    /// Tokens to run, drafts included; the first stands at position `first`.
    tokens: Vec<TokenId>,
    first: usize,
    /// Which of them need logits.
    logits: Range<usize>,
}

/// What became of a sequence after a step.
enum Outcome {
    Running,
    Finished(Finish),
    Failed(GenerateError),
}

impl Scheduler {
    /// A scheduler without sequences.
    pub fn new(
        model: Arc<Model>,
        tokenizer: Arc<Tokenizer>,
        attention: Box<dyn Attention>,
        config: EngineConfig,
        metrics: Arc<Metrics>,
        threads: rayon::ThreadPool,
    ) -> Self {
        let (blocks, tokens) = (attention.virtual_blocks(), attention.virtual_block_tokens());
        let blocks = BlockPool::new(blocks, tokens, config.prefix_cache);
        Self { model, tokenizer, attention, config, metrics, threads, blocks, running: Vec::new() }
    }

    /// Runs until the queue says stop.
    pub fn run(mut self, shared: &Shared) {
        while self.admit(shared) {
            self.drop_cancelled();
            if !self.running.is_empty() {
                self.step();
            }
            self.show_gauges();
        }
        for sequence in self.running.drain(..) {
            self.blocks.release(sequence.fail(GenerateError::Stopped));
        }
        self.show_gauges();
    }

    /// Waits until there is something to do and takes in what there is room for. False: stop.
    ///
    /// One prompt at a time is taken in: the next one waits until this one's blocks are remembered, so that a prefix
    /// which both share is computed once. It costs nothing, as a step's prompt rows are limited anyway.
    fn admit(&mut self, shared: &Shared) -> bool {
        let mut queue = shared.queue();
        while !queue.stopping && queue.waiting.is_empty() && self.running.is_empty() {
            queue = shared.changed.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        if queue.stopping {
            return false;
        }
        while self.running.len() < self.config.max_sequences && !self.running.iter().any(Sequence::prefilling)
        {
            let Some(waiting) = queue.waiting.front() else { break };
            let request = &waiting.request;
            let total = request.prompt.len() + request.max_tokens;
            let reads_cache = request.prompt_logprobs.is_none();
            // Without room now the queue waits, in order: running sequences will give their blocks back.
            let Some((lease, cached)) = self.blocks.lease(&request.prompt, total, reads_cache) else { break };
            if reads_cache && self.config.prefix_cache {
                self.metrics.prefix_queries.add(request.prompt.len() as u64);
                self.metrics.prefix_hits.add(cached as u64);
            }
            let waiting = queue.waiting.pop_front().expect("the front was just seen");
            self.running.push(Sequence::new(waiting, lease, cached, self.tokenizer.clone()));
        }
        self.metrics.waiting.set(queue.waiting.len() as u64);
        true
    }

    fn drop_cancelled(&mut self) {
        let gone = |s: &mut Sequence| s.request.cancelled.load(Ordering::Relaxed);
        for sequence in self.running.extract_if(.., gone) {
            self.metrics.aborted.add(1);
            self.blocks.release(sequence.fail(GenerateError::Cancelled));
        }
    }

    fn step(&mut self) {
        let work = self.plan();
        let spans: Vec<Span<'_>> = work
            .iter()
            .zip(&self.running)
            .map(|(work, sequence)| Span {
                tokens: &work.tokens,
                first_position: work.first,
                block_table: sequence.lease.table(),
                logits: work.logits.clone(),
            })
            .collect();
        let (model, attention) = (&self.model, self.attention.as_mut());
        let logits = match self.threads.install(|| model.forward(attention, &spans)) {
            Ok(logits) => logits,
            Err(error) => return self.fail_all(&error),
        };
        let vocabulary = self.model.config().vocabulary;
        let mut rest = logits.as_slice();
        let mut still_running = Vec::with_capacity(self.running.len());
        for (mut sequence, work) in std::mem::take(&mut self.running).into_iter().zip(work) {
            let (own, others) = rest.split_at(work.logits.len() * vocabulary);
            rest = others;
            let rows: Vec<&[f32]> = own.chunks_exact(vocabulary).collect();
            let outcome = self.threads.install(|| advance(&mut sequence, &work, &rows, &self.metrics));
            let known = sequence.computed.min(sequence.tokens.len());
            self.blocks.remember(&mut sequence.lease, &sequence.tokens[..known]);
            match outcome {
                Outcome::Running => still_running.push(sequence),
                Outcome::Finished(finish) => {
                    self.metrics.finished(&finish, sequence.arrived.elapsed());
                    self.blocks.release(sequence.finish(finish));
                }
                Outcome::Failed(error) => {
                    self.metrics.aborted.add(1);
                    self.blocks.release(sequence.fail(error));
                }
            }
        }
        self.running = still_running;
    }

    /// Every sequence under way has lost its keys and values, and so has every remembered prefix.
    fn fail_all(&mut self, error: &AttentionError) {
        for sequence in self.running.drain(..) {
            self.metrics.aborted.add(1);
            self.blocks.release(sequence.fail(GenerateError::Attention(error.clone())));
        }
        self.blocks.forget_all();
    }

    /// The rows of the next step, one entry per running sequence.
    fn plan(&mut self) -> Vec<Work> {
        let draft_tokens = self.config.draft_tokens;
        let prefill_tokens = self.config.prefill_tokens;
        self.running.iter_mut().map(|sequence| plan_one(sequence, prefill_tokens, draft_tokens)).collect()
    }

    fn show_gauges(&self) {
        self.metrics.running.set(self.running.len() as u64);
        self.metrics.blocks_held.set(self.blocks.held() as u64);
        self.metrics.blocks_total.set(self.blocks.total() as u64);
    }
}

fn plan_one(sequence: &mut Sequence, prefill_tokens: usize, draft_tokens: usize) -> Work {
    let first = sequence.computed;
    let known = (sequence.tokens.len() - first).min(prefill_tokens);
    let reaches_end = first + known == sequence.tokens.len();
    sequence.drafts.clear();
    if reaches_end && draft_tokens > 0 {
        // The step itself yields one token, so more drafts than the rest less one can't be used.
        let useful = (sequence.request.max_tokens - sequence.generated()).saturating_sub(1);
        sequence.drafts = draft::propose(&sequence.tokens, draft_tokens.min(useful));
    }
    let mut tokens = sequence.tokens[first..first + known].to_vec();
    tokens.extend(&sequence.drafts);
    let end = tokens.len();
    let logits = if sequence.request.prompt_logprobs.is_some() && first < sequence.request.prompt.len() {
        0..end
    } else if reaches_end && sequence.request.max_tokens > 0 {
        known - 1..end
    } else {
        end..end
    };
    Work { tokens, first, logits }
}

/// Takes in the logits of a step: prompt log-probabilities, then generated tokens as far as drafts were right.
fn advance(sequence: &mut Sequence, work: &Work, rows: &[&[f32]], metrics: &Metrics) -> Outcome {
    let first_row = work.first + work.logits.start;
    let broken = rows.par_iter().position_first(|row| !row.iter().all(|x| x.is_finite()));
    if let Some(row) = broken {
        return Outcome::Failed(GenerateError::NotFinite { position: first_row + row });
    }
    let prompt = &sequence.request.prompt;
    if let Some(top) = sequence.request.prompt_logprobs {
        let scored = rows.par_iter().enumerate().filter_map(|(row, logits)| {
            let next = prompt.get(first_row + row + 1)?;
            Some(token_logprob(logits, *next, top))
        });
        let scored: Vec<_> = scored.collect();
        sequence.prompt_logprobs.extend(scored);
    }
    let known = work.tokens.len() - sequence.drafts.len();
    sequence.computed = work.first + known;
    if sequence.computed < sequence.tokens.len() {
        return Outcome::Running;
    }
    if sequence.generated() == 0 {
        metrics.prompt_tokens.add(prompt.len() as u64);
    }
    if sequence.request.max_tokens == 0 {
        return Outcome::Finished(Finish::Length);
    }
    if sequence.generated() == 0 {
        metrics.first_token(sequence.arrived.elapsed());
    }
    let last_known = rows.len() - 1 - sequence.drafts.len();
    let (accepted, finish) = accept(sequence, &rows[last_known..]);
    if !sequence.drafts.is_empty() {
        metrics.drafted(sequence.drafts.len(), accepted);
    }
    metrics.generation_tokens.add((accepted + 1) as u64);
    // The keys of accepted drafts are those of the tokens themselves; the last token is not computed yet.
    sequence.computed += accepted;
    finish.map_or(Outcome::Running, Outcome::Finished)
}

/// Chooses a token from each row as long as the row before chose what was drafted. Returns how many drafts were right and
/// kept, and why the sequence ended, if it did. The result is what single steps would have chosen.
fn accept(sequence: &mut Sequence, rows: &[&[f32]]) -> (usize, Option<Finish>) {
    for (index, logits) in rows.iter().enumerate() {
        let token = sequence.request.sampling.choose(logits, sequence.tokens.len());
        if let Some(top) = sequence.request.logprobs {
            sequence.logprobs.push(token_logprob(logits, token, top));
        }
        let finish = sequence.push(token);
        if finish.is_some() || sequence.drafts.get(index) != Some(&token) {
            return (index, finish);
        }
    }
    unreachable!("the last row has no draft to compare with")
}
