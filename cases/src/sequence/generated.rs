//! Drawn sequences: a scheduler that does whatever it may, on the layouts that are hardest to get right.

use shardcheck_engine::{CommBackend, Configuration, LaneOrder};
use shardcheck_formats::{Counter, Dtype};

use super::schedule::Scheduler;
use super::{NewTokens, RunKind, SequenceCase, Step, peak_blocks};
use crate::Model;

/// Rows that graphs are captured for.
const BUCKETS: [usize; 5] = [2, 4, 8, 12, 24];
/// Requests that are alive at the same time, at most.
const MOST_REQUESTS: usize = 4;
/// Tokens beyond which a request is ended rather than continued.
const MOST_TOKENS: usize = 72;
/// Runs of a drawn sequence that a scheduler may refuse before it is cut short.
const MOST_REFUSALS: usize = 400;

/// Draws a sequence of about `runs` runs of the engine. Equal states of the counter give equal sequences.
pub fn generate_sequence(runs: usize, counter: &mut Counter) -> SequenceCase {
    let mut configuration = draw_configuration(counter);
    let model = if configuration.attention.is_mla() { "tiny-mla" } else { "tiny-gqa" };
    let mut drawing = Drawing {
        scheduler: Scheduler::growing(configuration.virtual_block_tokens()),
        virtual_block_tokens: configuration.virtual_block_tokens(),
        next_request: 0,
        steps: Vec::new(),
        counter,
    };
    let mut refusals = 0;
    while drawing.runs() < runs && refusals < MOST_REFUSALS {
        refusals += usize::from(!drawing.act());
    }
    let steps = drawing.steps;
    let peak = peak_blocks(&steps, configuration.virtual_block_tokens())
        .unwrap_or_else(|why| panic!("a drawn sequence can be taken: {why}"));
    // as few blocks as will do: a freed one is soon somebody else's
    configuration.blocks = 1 + peak + counter.below(2) as usize;
    let latent_output =
        configuration.attention.is_mla() && !configuration.project_before_merge && counter.below(2) == 0;
    SequenceCase {
        name: "generated".to_owned(),
        model: model.to_owned(),
        configuration,
        latent_output,
        steps,
    }
}

fn pick<T: Copy>(counter: &mut Counter, values: &[T]) -> T {
    values[counter.below(values.len() as u64) as usize]
}

fn draw_configuration(counter: &mut Counter) -> Configuration {
    let name = pick(counter, &["tiny-mla", "tiny-gqa"]);
    let model = Model::find(name).unwrap_or_else(|| panic!("{name} is a model"));
    let dcp = pick(counter, &[3, 2, 3, 4, 5, 1]);
    let heads_per_rank = pick(counter, &[1, 2]);
    let interleave = pick(counter, &[1, 2, 4]);
    let (kv_dtype, kv_scale) = pick(
        counter,
        &[
            (Dtype::Bf16, 1.0),
            (Dtype::Bf16, 1.0),
            (Dtype::E4m3fn, 0.5),
            (Dtype::E4m3fnuz, 0.1),
            (Dtype::E5m2, 0.25),
        ],
    );
    let comm_backend = pick(counter, &CommBackend::ALL);
    let lane_order =
        if comm_backend == CommBackend::A2a { pick(counter, &LaneOrder::ALL) } else { LaneOrder::HiLo };
    let projects = name == "tiny-mla" && dcp > 1;
    Configuration {
        attention: model.attention(heads_per_rank * dcp),
        tp: dcp * if dcp < 3 { pick(counter, &[1, 2]) } else { 1 },
        dcp,
        heads_per_rank,
        interleave,
        block_size: interleave * pick(counter, &[1, 2, 4]),
        blocks: 1,
        dtype: Dtype::Bf16,
        kv_dtype,
        kv_scale,
        softmax_scale: model.softmax_scale,
        comm_backend,
        lane_order,
        query_replication: counter.below(2) == 0,
        project_before_merge: projects && counter.below(3) == 0,
        kernel_head_widths: Vec::new(),
        second_group: None,
    }
}

struct Drawing<'c> {
    scheduler: Scheduler,
    virtual_block_tokens: usize,
    next_request: usize,
    steps: Vec<Step>,
    counter: &'c mut Counter,
}

impl Drawing<'_> {
    fn runs(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Run { .. })).count()
    }

    fn below(&mut self, n: usize) -> usize {
        self.counter.below(n as u64) as usize
    }

    /// Takes all of `steps`, or none of them.
    fn try_steps(&mut self, steps: Vec<Step>) -> bool {
        let mut scheduler = self.scheduler.clone();
        if steps.is_empty() || steps.iter().any(|step| scheduler.take(step).is_err()) {
            return false;
        }
        self.scheduler = scheduler;
        self.steps.extend(steps);
        true
    }

    /// One thing that a scheduler does; whether it could be done.
    fn act(&mut self) -> bool {
        let alive = self.scheduler.cached();
        let longest = alive.iter().max_by_key(|(_, cached)| *cached).copied();
        if let Some((request, _)) = longest.filter(|(_, cached)| *cached > MOST_TOKENS) {
            return self.try_steps(vec![Step::Free { request }]);
        }
        match self.below(13) {
            0 | 1 => self.begin(alive.len()),
            2 | 3 => self.run(RunKind::Decode, 1),
            4 | 5 => self.verify(),
            6 => self.draft_block(),
            7 => self.draft_one_by_one(),
            8 => self.hit(&alive),
            9 | 12 => self.replace(&alive),
            10 => self.evict(&alive),
            _ => self.run(RunKind::Prefill, 9),
        }
    }

    /// A new request, its prompt in one chunk or two.
    fn begin(&mut self, alive: usize) -> bool {
        if alive >= MOST_REQUESTS || self.next_request >= super::MAX_SEQUENCE_REQUESTS {
            return false;
        }
        let request = self.next_request;
        self.next_request += 1;
        let edges = [1, self.virtual_block_tokens, self.virtual_block_tokens + 1, 7, 19];
        let chunks = 1 + self.below(2);
        let steps = (0..chunks)
            .map(|_| {
                let tokens = pick(self.counter, &edges).min(32);
                let kind = pick(self.counter, &[RunKind::Prefill, RunKind::Prefill, RunKind::Verify]);
                self.step(kind, vec![NewTokens { request, tokens }])
            })
            .collect();
        self.try_steps(steps)
    }

    /// A step over some of the requests, in any order.
    fn run(&mut self, kind: RunKind, most_tokens: usize) -> bool {
        let batch = self.batch(most_tokens);
        if batch.is_empty() {
            return false;
        }
        let step = self.step(kind, batch);
        self.try_steps(vec![step])
    }

    fn batch(&mut self, most_tokens: usize) -> Vec<NewTokens> {
        let ready = self.scheduler.cached().into_iter().filter(|(_, cached)| *cached > 0);
        let mut requests: Vec<usize> = ready.map(|(request, _)| request).collect();
        if self.below(2) == 0 {
            requests.reverse();
        }
        let keep = 1 + self.below(requests.len().max(1));
        requests.truncate(keep);
        let tokens = |drawing: &mut Self| 1 + drawing.below(most_tokens);
        requests.into_iter().map(|request| NewTokens { request, tokens: tokens(self) }).collect()
    }

    fn step(&mut self, kind: RunKind, batch: Vec<NewTokens>) -> Step {
        let rows: usize = batch.iter().map(|entry| entry.tokens).sum();
        let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= rows).unwrap_or(rows);
        let padded_rows = if kind == RunKind::Prefill || self.below(4) == 0 { 0 } else { bucket - rows };
        let budgets = [1, 2 * self.virtual_block_tokens + 1, 1000];
        let chunk_budget_tokens = if kind == RunKind::Prefill { pick(self.counter, &budgets) } else { 0 };
        Step::Run { kind, batch, padded_rows, chunk_budget_tokens }
    }

    fn verify(&mut self) -> bool {
        let batch = self.batch(4);
        if batch.is_empty() {
            return false;
        }
        let mut steps = vec![self.step(RunKind::Verify, batch.clone())];
        for entry in batch {
            let tokens = self.below(entry.tokens + 1);
            if tokens > 0 {
                steps.push(Step::Reject { request: entry.request, tokens });
            }
        }
        self.try_steps(steps)
    }

    /// A draft block, whose tokens are all rejected before the target verifies.
    fn draft_block(&mut self) -> bool {
        let batch = self.batch(4);
        if batch.is_empty() {
            return false;
        }
        let mut steps = vec![self.step(RunKind::Draft, batch.clone())];
        let reject = |entry: &NewTokens| Step::Reject { request: entry.request, tokens: entry.tokens };
        steps.extend(batch.iter().map(reject));
        self.try_steps(steps)
    }

    /// Draft steps of one token each, then a verify step over as many.
    fn draft_one_by_one(&mut self) -> bool {
        let batch = self.batch(1);
        if batch.is_empty() {
            return false;
        }
        let count = 2 + self.below(2);
        let mut steps: Vec<Step> = (0..count).map(|_| self.step(RunKind::Decode, batch.clone())).collect();
        let reject = |entry: &NewTokens| Step::Reject { request: entry.request, tokens: count };
        steps.extend(batch.iter().map(reject));
        let verified =
            batch.iter().map(|entry| NewTokens { request: entry.request, tokens: count }).collect();
        steps.push(self.step(RunKind::Verify, verified));
        self.try_steps(steps)
    }

    /// A request ends, and a new one takes over its blocks with fewer tokens.
    fn replace(&mut self, alive: &[(usize, usize)]) -> bool {
        if alive.is_empty() || self.next_request >= super::MAX_SEQUENCE_REQUESTS {
            return false;
        }
        let (gone, cached) = pick(self.counter, alive);
        let request = self.next_request;
        self.next_request += 1;
        let tokens = 1 + self.below(cached.clamp(1, 32));
        let kind = pick(self.counter, &[RunKind::Prefill, RunKind::Verify]);
        let begin = self.step(kind, vec![NewTokens { request, tokens }]);
        let next = self.step(RunKind::Decode, vec![NewTokens { request, tokens: 1 }]);
        self.try_steps(vec![Step::Free { request: gone }, begin, next])
    }

    fn hit(&mut self, alive: &[(usize, usize)]) -> bool {
        let whole = |(request, cached): &(usize, usize)| (*request, cached / self.virtual_block_tokens);
        let sources: Vec<(usize, usize)> =
            alive.iter().map(whole).filter(|(_, blocks)| *blocks > 0).collect();
        if sources.is_empty()
            || alive.len() >= MOST_REQUESTS
            || self.next_request >= super::MAX_SEQUENCE_REQUESTS
        {
            return false;
        }
        let (source, whole) = pick(self.counter, &sources);
        let request = self.next_request;
        self.next_request += 1;
        let blocks = 1 + self.below(whole);
        let tokens = 1 + self.below(6);
        let kind = pick(self.counter, &[RunKind::Prefill, RunKind::Verify]);
        let fork = self.step(kind, vec![NewTokens { request, tokens }]);
        // the source goes on beside its fork
        let both = vec![NewTokens { request: source, tokens: 1 }, NewTokens { request, tokens: 1 }];
        let beside = self.step(RunKind::Decode, both);
        self.try_steps(vec![Step::Hit { request, source, blocks }, fork, beside])
    }

    /// A request loses its blocks, another one takes them, and the first computes its tokens again.
    fn evict(&mut self, alive: &[(usize, usize)]) -> bool {
        if alive.is_empty() {
            return false;
        }
        let (request, _) = pick(self.counter, alive);
        let mut steps = vec![Step::Evict { request }];
        if let Some((other, _)) = alive.iter().find(|(other, cached)| *other != request && *cached > 0) {
            let tokens = 1 + self.below(5);
            steps.push(self.step(RunKind::Verify, vec![NewTokens { request: *other, tokens }]));
        }
        let before = self.scheduler.clone();
        let taken: Result<Vec<_>, _> = steps.iter().map(|step| self.scheduler.take(step)).collect();
        let again = self.scheduler.evicted(request);
        self.scheduler = before;
        if taken.is_err() || again == 0 {
            return false;
        }
        steps.push(self.step(RunKind::Prefill, vec![NewTokens { request, tokens: again }]));
        self.try_steps(steps)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::Case;

    #[test]
    fn drawn_sequences_can_be_taken_and_read_back_and_do_everything_that_a_scheduler_does() {
        let mut seen = BTreeSet::new();
        let (mut reused, mut shared_worlds) = (0, 0);
        for seed in 0..40 {
            let body = generate_sequence(12, &mut Counter::new(seed, 1));
            let case = Case::sequence(body.clone(), seed);
            case.check().unwrap();
            assert_eq!(case.id().parse::<Case>().unwrap(), case);
            for step in &body.steps {
                seen.insert(match step {
                    Step::Run { kind, padded_rows, .. } => format!("{kind} {}", *padded_rows > 0),
                    Step::Reject { .. } => "reject".to_owned(),
                    Step::Hit { .. } => "hit".to_owned(),
                    Step::Free { .. } => "free".to_owned(),
                    Step::Evict { .. } => "evict".to_owned(),
                    Step::Import { .. } => "import".to_owned(),
                });
            }
            shared_worlds += usize::from(body.configuration.dcp == 3 && body.configuration.interleave > 1);
            let turns = crate::turns(&body, seed).unwrap();
            let owners: BTreeSet<(i32, usize)> = turns
                .iter()
                .flat_map(|turn| turn.blocks.iter().zip(&turn.requests))
                .flat_map(|(blocks, request)| blocks.iter().map(move |block| (*block, *request)))
                .collect();
            let blocks: BTreeSet<i32> = owners.iter().map(|(block, _)| *block).collect();
            reused += owners.len() - blocks.len();
        }
        let wanted = [
            "decode false",
            "decode true",
            "draft true",
            "evict",
            "free",
            "hit",
            "prefill false",
            "reject",
            "verify false",
            "verify true",
        ];
        assert!(wanted.iter().all(|what| seen.contains(*what)), "{seen:?}");
        assert!(reused > 80 && shared_worlds > 3, "{reused} blocks changed hands, {shared_worlds}");
    }
}
