//! The scheduler's side of a sequence: which request holds which blocks and tokens, step by step.
//!
//! Plain on purpose: a stack of free blocks, a count of owners for each block, a list of tokens for each request. A block
//! that was freed last is given away first, so that stale content is met at once (vLLM `BlockPool`: a queue; the stack is the
//! hardest order).

use std::collections::BTreeMap;

use shardcheck_engine::CacheLayout;

use super::{
    Import, MAX_SEQUENCE_REQUESTS, MAX_SEQUENCE_TOKENS, MAX_STEPS, NewTokens, RunKind, SequenceCase, Step,
};
use crate::stream::Stream;
use crate::{AttentionCase, MAX_TOKENS, Placement, Probe, Request, Workload};

/// One run of the engine, with everything that the scheduler decided for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Index of the step among all steps of the sequence.
    pub step: usize,
    /// What the engine computes.
    pub kind: RunKind,
    /// Number of each request of the batch.
    pub requests: Vec<usize>,
    /// Tokens of each request, the new ones included. A token has a number of its own: one that was rejected and the one that
    /// takes its place differ.
    pub tokens: Vec<Vec<u32>>,
    /// New tokens of each request, which are the last ones.
    pub new_tokens: Vec<usize>,
    /// Blocks of each request, as many as its tokens need.
    pub blocks: Vec<Vec<i32>>,
    /// Rows by which the step is padded.
    pub padded_rows: usize,
    /// Workspace of one context gather in tokens.
    pub chunk_budget_tokens: usize,
    /// What comes from other sessions before the run.
    pub imports: Vec<Import>,
}

impl Turn {
    /// The run as a case of a single step.
    pub fn case(&self, sequence: &SequenceCase) -> AttentionCase {
        let requests = self
            .tokens
            .iter()
            .zip(&self.new_tokens)
            .map(|(tokens, new)| Request { context_tokens: tokens.len() - new, query_tokens: *new });
        let mut configuration = sequence.configuration.clone();
        configuration.second_group = None;
        let mla = configuration.attention.is_mla();
        if self.kind == RunKind::Prefill {
            // the operation takes no up-projection
            configuration.project_before_merge = false;
        }
        AttentionCase {
            model: sequence.model.clone(),
            configuration,
            workload: Workload {
                requests: requests.collect(),
                padded_rows: self.padded_rows,
                placement: Placement::Shuffled,
                chunk_budget_tokens: self.chunk_budget_tokens,
            },
            probe: Probe::Gaussian,
            latent_output: sequence.latent_output || (mla && self.kind == RunKind::Prefill),
            selected: None,
        }
    }
}

/// The runs of a sequence; `seed` decides in which order blocks are given away at first.
///
/// # Errors
/// The first step that can't be taken, and why.
pub fn turns(sequence: &SequenceCase, seed: u64) -> Result<Vec<Turn>, String> {
    let configuration = &sequence.configuration;
    let mut free: Vec<i32> = (1..configuration.blocks as i32).collect();
    let mut counter = Stream::SessionBlocks.counter(seed);
    for last in (1..free.len()).rev() {
        free.swap(last, counter.below(last as u64 + 1) as usize);
    }
    run_all(&sequence.steps, Scheduler::new(free, configuration.virtual_block_tokens()))
}

/// Blocks that the steps need at once, the null block not counted, for virtual blocks of B·W tokens.
///
/// # Errors
/// As [`turns`].
pub fn peak_blocks(steps: &[Step], virtual_block_tokens: usize) -> Result<usize, String> {
    let mut scheduler = Scheduler::growing(virtual_block_tokens);
    let mut peak = 0;
    for (index, step) in steps.iter().enumerate() {
        scheduler.take(step).map_err(|why| format!("step {}: {why}", index + 1))?;
        peak = peak.max(scheduler.owners.values().filter(|owners| **owners > 0).count());
    }
    Ok(peak)
}

fn run_all(steps: &[Step], mut scheduler: Scheduler) -> Result<Vec<Turn>, String> {
    if steps.len() > MAX_STEPS {
        return Err(format!("{} steps; there may be {MAX_STEPS}", steps.len()));
    }
    let mut turns = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let turn = scheduler.take(step).map_err(|why| format!("step {}: {why}", index + 1))?;
        if let (Step::Import { .. }, Some(import)) = (step, scheduler.imports.last_mut()) {
            import.step = index;
        }
        turns.extend(turn.map(|turn| Turn { step: index, ..turn }));
    }
    if let Some(import) = scheduler.imports.last() {
        return Err(format!("step {}: no run stands behind the import", import.step + 1));
    }
    Ok(turns)
}

/// A request that has a number.
#[derive(Debug, Clone, Default)]
struct Held {
    /// Blocks, in the order of positions; those of rejected tokens stay.
    blocks: Vec<i32>,
    /// Tokens that were computed or, after an eviction, are to be computed again.
    tokens: Vec<u32>,
    /// Tokens that lie in the cache.
    cached: usize,
}

/// Blocks and requests as they stand between two steps.
#[derive(Debug, Clone)]
pub(super) struct Scheduler {
    free: Vec<i32>,
    owners: BTreeMap<i32, usize>,
    held: BTreeMap<usize, Held>,
    virtual_block_tokens: usize,
    next_token: u32,
    /// Whether blocks are made as they are needed.
    grows: bool,
    /// What came from other sessions since the last run.
    imports: Vec<Import>,
}

impl Scheduler {
    pub fn new(free: Vec<i32>, virtual_block_tokens: usize) -> Self {
        Self {
            free,
            owners: BTreeMap::new(),
            held: BTreeMap::new(),
            virtual_block_tokens: virtual_block_tokens.max(1),
            next_token: 0,
            grows: false,
            imports: Vec::new(),
        }
    }

    /// A scheduler that never runs out of blocks.
    pub fn growing(virtual_block_tokens: usize) -> Self {
        Self { grows: true, ..Self::new(Vec::new(), virtual_block_tokens) }
    }

    /// Requests and what of them lies in the cache: `(number, cached tokens)`.
    pub fn cached(&self) -> Vec<(usize, usize)> {
        self.held.iter().map(|(number, held)| (*number, held.cached)).collect()
    }

    /// Tokens of a request that must be computed again.
    pub fn evicted(&self, request: usize) -> usize {
        self.held.get(&request).map_or(0, |held| held.tokens.len() - held.cached)
    }

    /// Takes a step; a run gives its turn (whose index is for the caller to set).
    ///
    /// # Errors
    /// Why it can't be taken.
    pub fn take(&mut self, step: &Step) -> Result<Option<Turn>, String> {
        match step {
            Step::Run { kind, batch, padded_rows, chunk_budget_tokens } => {
                self.run(*kind, batch, *padded_rows, *chunk_budget_tokens).map(Some)
            }
            Step::Reject { request, tokens } => self.reject(*request, *tokens).map(|()| None),
            Step::Hit { request, source, blocks } => self.hit(*request, *source, *blocks).map(|()| None),
            Step::Free { request } => {
                let held = self.held.remove(request).ok_or_else(|| unknown(*request))?;
                self.release(&held.blocks);
                Ok(None)
            }
            Step::Evict { request } => {
                let held = self.held.get_mut(request).ok_or_else(|| unknown(*request))?;
                let blocks = std::mem::take(&mut held.blocks);
                held.cached = 0;
                self.release(&blocks);
                Ok(None)
            }
            Step::Import { batch, source } => self.import(batch, *source).map(|()| None),
        }
    }

    fn run(
        &mut self,
        kind: RunKind,
        batch: &[NewTokens],
        padded_rows: usize,
        chunk_budget_tokens: usize,
    ) -> Result<Turn, String> {
        let mut turn = Turn {
            step: 0,
            kind,
            requests: Vec::new(),
            tokens: Vec::new(),
            new_tokens: Vec::new(),
            blocks: Vec::new(),
            padded_rows,
            chunk_budget_tokens,
            imports: std::mem::take(&mut self.imports),
        };
        if (kind == RunKind::Prefill) != (chunk_budget_tokens > 0) || chunk_budget_tokens > MAX_TOKENS {
            return Err(format!(
                "a prefill, and nothing else, has a chunk budget of at least one token and {MAX_TOKENS} at most"
            ));
        }
        for NewTokens { request, tokens } in batch {
            if turn.requests.contains(request) {
                return Err(format!("request {request} stands twice in the batch"));
            }
            if *request >= MAX_SEQUENCE_REQUESTS {
                return Err(format!("request {request}; numbers go up to {}", MAX_SEQUENCE_REQUESTS - 1));
            }
            self.append(*request, *tokens)?;
            let held = &self.held[request];
            turn.requests.push(*request);
            turn.new_tokens.push(*tokens);
            turn.tokens.push(held.tokens[..held.cached].to_vec());
            turn.blocks.push(held.blocks[..held.cached.div_ceil(self.virtual_block_tokens)].to_vec());
        }
        Ok(turn)
    }

    fn import(&mut self, batch: &[NewTokens], source: CacheLayout) -> Result<(), String> {
        super::import::check_source(&source)?;
        let mut import =
            Import { step: 0, requests: Vec::new(), tokens: Vec::new(), blocks: Vec::new(), source };
        for NewTokens { request, tokens } in batch {
            if *request >= MAX_SEQUENCE_REQUESTS || *tokens == 0 {
                return Err(format!("request {request} can't be imported with {tokens} tokens"));
            }
            if self.held.get(request).is_some_and(|held| held.cached > 0) {
                return Err(format!("request {request} lies in the cache already and can't be imported"));
            }
            self.append(*request, *tokens)?;
            let held = &self.held[request];
            import.requests.push(*request);
            import.tokens.push(held.tokens[..held.cached].to_vec());
            import.blocks.push(held.blocks.clone());
        }
        self.imports.push(import);
        Ok(())
    }

    fn append(&mut self, request: usize, tokens: usize) -> Result<(), String> {
        let mut held = self.held.get(&request).cloned().unwrap_or_default();
        if tokens > MAX_SEQUENCE_TOKENS || self.next_token as usize + tokens > MAX_SEQUENCE_TOKENS {
            return Err(format!(
                "request {request} takes the sequence beyond {MAX_SEQUENCE_TOKENS} tokens in all"
            ));
        }
        let total = held.cached + tokens;
        while held.blocks.len() < total.div_ceil(self.virtual_block_tokens) {
            if self.free.is_empty() && self.grows {
                self.free.push(self.owners.len() as i32 + 1);
            }
            let block = self.free.pop().ok_or_else(|| {
                format!("request {request} needs a block and none is free: give the caches more (n)")
            })?;
            self.owners.insert(block, 1);
            held.blocks.push(block);
        }
        for position in held.cached..total {
            let block = held.blocks[position / self.virtual_block_tokens];
            if self.owners[&block] > 1 {
                return Err(format!("request {request} writes position {position} into a shared block"));
            }
            if position == held.tokens.len() {
                held.tokens.push(self.next_token);
                self.next_token += 1;
            }
        }
        held.cached = total;
        self.held.insert(request, held);
        Ok(())
    }

    fn reject(&mut self, request: usize, tokens: usize) -> Result<(), String> {
        let held = self.held.get_mut(&request).ok_or_else(|| unknown(request))?;
        let Some(left) = held.cached.checked_sub(tokens).filter(|_| tokens > 0) else {
            return Err(format!("request {request} has {} tokens and can't lose {tokens}", held.cached));
        };
        held.tokens.truncate(left);
        held.cached = left;
        Ok(())
    }

    fn hit(&mut self, request: usize, source: usize, blocks: usize) -> Result<(), String> {
        if self.held.contains_key(&request) || request >= MAX_SEQUENCE_REQUESTS {
            return Err(format!(
                "request {request} exists, or its number is too large, and can't begin with a prefix"
            ));
        }
        let tokens = blocks.saturating_mul(self.virtual_block_tokens);
        let from = self.held.get(&source).ok_or_else(|| unknown(source))?;
        if blocks == 0 || from.cached < tokens {
            let cached = from.cached;
            return Err(format!("request {source} has {cached} cached tokens, not {blocks} whole blocks"));
        }
        let shared = Held {
            blocks: from.blocks[..blocks].to_vec(),
            tokens: from.tokens[..tokens].to_vec(),
            cached: tokens,
        };
        shared.blocks.iter().for_each(|block| *self.owners.entry(*block).or_default() += 1);
        self.held.insert(request, shared);
        Ok(())
    }

    /// Takes owners from blocks; those that nobody owns any more are free, the first one on top.
    fn release(&mut self, blocks: &[i32]) {
        for block in blocks.iter().rev() {
            let owners = self.owners.entry(*block).or_default();
            *owners = owners.saturating_sub(1);
            if *owners == 0 {
                self.free.push(*block);
            }
        }
    }
}

fn unknown(request: usize) -> String {
    format!("there is no request {request}")
}

#[cfg(test)]
mod tests {
    use super::super::read_steps;
    use super::*;

    fn played(steps: &str, blocks: i32) -> Result<Vec<Turn>, String> {
        run_all(&read_steps(steps).unwrap(), Scheduler::new((1..=blocks).collect(), 4))
    }

    #[test]
    fn a_request_grows_into_new_blocks_and_keeps_its_tokens() {
        let turns = played("p0+5.c4_d0_d0_d0_d0", 4).unwrap();
        assert_eq!(turns[0].blocks, [[4, 3]]);
        assert_eq!(turns[4].blocks, [[4, 3, 2]]);
        assert_eq!(turns[4].tokens, [(0..9).collect::<Vec<u32>>()]);
        assert_eq!(turns[4].new_tokens, [1]);
    }

    #[test]
    fn a_rejected_token_gives_its_position_to_another_token_in_the_same_block() {
        let turns = played("v0+4_r0-3_v0+2", 2).unwrap();
        assert_eq!(turns[0].tokens, [[0, 1, 2, 3]]);
        assert_eq!(turns[1].tokens, [[0, 4, 5]]);
        assert_eq!(turns[1].blocks, turns[0].blocks);
    }

    #[test]
    fn a_freed_block_is_the_first_to_be_given_to_the_next_request() {
        let turns = played("v0+8_f0_v1+3", 9).unwrap();
        assert_eq!(turns[1].blocks[0][0], turns[0].blocks[0][0]);
        assert_eq!(turns[1].tokens, [[8, 9, 10]]);
    }

    #[test]
    fn a_prefix_hit_shares_blocks_until_the_last_owner_goes() {
        let turns = played("v0+9_h1=0x2_v1+1_f0_v2+4_f1_v3+4", 5).unwrap();
        assert_eq!(turns[1].blocks[0][..2], turns[0].blocks[0][..2]);
        assert_eq!(turns[1].tokens, [[0, 1, 2, 3, 4, 5, 6, 7, 9]]);
        assert!(!turns[1].blocks[0].contains(&turns[2].blocks[0][0]), "shared blocks are not free yet");
        assert!(turns[1].blocks[0].contains(&turns[3].blocks[0][0]), "now they are");
    }

    #[test]
    fn an_evicted_request_computes_the_same_tokens_again_in_other_blocks() {
        let turns = played("v0+6_e0_v1+5_p0+4.c8_d0_d0_d0", 9).unwrap();
        assert_eq!(turns[2].tokens, [[0, 1, 2, 3]]);
        assert_eq!(turns[5].tokens, [[0, 1, 2, 3, 4, 5, 11]]);
        assert_ne!(turns[2].blocks[0][0], turns[0].blocks[0][0]);
    }

    #[test]
    fn an_imported_request_is_in_the_cache_before_the_run_behind_it() {
        let turns = played("v0+2_f0_i0+5,1+4.w3.s2.b4_e1_d0_i1+2.w1.s1.b8_d1", 9).unwrap();
        let [none, first, second] = &turns[..] else { panic!("three runs") };
        assert!(none.imports.is_empty());
        assert_eq!(first.imports[0].step, 2);
        assert_eq!(first.imports[0].tokens, [vec![2, 3, 4, 5, 6], vec![7, 8, 9, 10]]);
        assert_eq!(first.tokens, [[2, 3, 4, 5, 6, 11]]);
        assert_eq!(first.blocks[0], first.imports[0].blocks[0]);
        assert_eq!(second.imports[0].tokens, [[7, 8]], "an evicted request comes back with its own tokens");
        assert_eq!(second.tokens, [[7, 8, 9]]);
    }

    #[test]
    fn steps_that_cannot_be_taken_are_named_with_the_reason() {
        for (steps, reason) in [
            ("v0+4_r0-5", "step 2: request 0 has 4 tokens"),
            ("v0+4_r1-1", "there is no request 1"),
            ("v0+4_h1=0x2", "not 2 whole blocks"),
            ("v0+4_h0=0x1", "request 0 exists"),
            ("v0+8_h1=0x2_r0-1_d0", "shared block"),
            ("v0+40", "none is free"),
            ("d0,0", "stands twice"),
            ("p0+3", "chunk budget"),
            ("d0_i0+4.w2.s1.b4_d0", "lies in the cache already"),
            ("i0+0.w2.s1.b4_d0", "with 0 tokens"),
            ("i0+4.w2.s3.b4_d0", "interleave"),
            ("d0_i1+4.w2.s1.b4", "step 2: no run stands behind the import"),
        ] {
            let why = played(steps, 5).unwrap_err();
            assert!(why.contains(reason), "{steps}: {why}");
        }
    }

    #[test]
    fn the_peak_counts_blocks_that_are_held_at_the_same_time() {
        let peak = |steps: &str| peak_blocks(&read_steps(steps).unwrap(), 4).unwrap();
        assert_eq!(peak("v0+9"), 3);
        assert_eq!(peak("v0+9_f0_v1+4_v2+4"), 3);
        assert_eq!(peak("v0+9_h1=0x2_v1+1"), 4);
    }
}
