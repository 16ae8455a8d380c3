//! Which token each row of a stack's session has, and the steps that drafts add to it.

use shardcheck_formats::Counter;

use super::{StackCase, StackWiring};
use crate::stream::Stream;
use crate::{NewTokens, RunKind, SequenceCase, Step, Turn, turns};

/// What a session runs, with tokens where they are laid out.
#[derive(Debug, Clone)]
pub struct Script {
    /// The session, with the steps of drafts behind its own.
    pub session: SequenceCase,
    /// Of each run: what is given beside the batch. Empty where tokens are drawn.
    pub runs: Vec<RunScript>,
    /// Whether the last run is there for the blocks that the one before writes drafts to, and is not run itself.
    ahead: bool,
}

/// What a run is given of each request.
#[derive(Debug, Clone, Default)]
pub struct RunScript {
    /// Tokens of its rows.
    pub fed: Vec<Vec<usize>>,
    /// How many of them, the last ones, are drafts.
    pub drafted: Vec<i32>,
    /// Token behind the last row where it is known already, as in front of another chunk of a prompt; −1: the one that the row gives.
    pub next: Vec<i32>,
    /// Whether drafts are verified, also where a request has none: its rows are a decode's.
    pub verifies: bool,
}

/// A text: a token that stands there once, then a few others over and over.
#[derive(Debug, Clone)]
struct Text {
    first: usize,
    cycle: Vec<usize>,
}

impl Text {
    /// The first token is the vocabulary's last one; those that follow are drawn, each once in a period. Where there is room, a draft head is
    /// mistaken once in it.
    fn drawn(vocabulary: usize, period: usize, counter: &mut Counter) -> Self {
        let mut others: Vec<usize> = (0..vocabulary - 1).collect();
        for last in (1..others.len()).rev() {
            others.swap(last, counter.below(last as u64 + 1) as usize);
        }
        others.truncate(period.clamp(1, others.len()));
        let [before, draft] = MISTAKEN;
        let period = others.len();
        if period > 3 {
            if !others.contains(&before) {
                others[0] = before;
            }
            let at = others.iter().position(|token| *token == before).unwrap_or(0);
            if others[(at + 2) % period] == draft {
                others.swap((at + 1) % period, (at + 2) % period);
            }
        }
        Self { first: vocabulary - 1, cycle: others }
    }

    fn at(&self, position: usize) -> usize {
        match position {
            0 => self.first,
            later => self.cycle[(later - 1) % self.cycle.len()],
        }
    }
}

/// Token two rows behind which a draft head that is laid out is mistaken, and what it drafts there. Small vocabularies have none.
pub(super) const MISTAKEN: [usize; 2] = [1, 2];

/// What such a head drafts behind two tokens, where the target has another.
fn mistaken(before: usize, found: usize, vocabulary: usize) -> usize {
    if vocabulary > MISTAKEN[1] + 1 && before == MISTAKEN[0] { MISTAKEN[1] } else { found }
}

/// Drafts behind a request's tokens and the one that follows them: what stood behind the same token before, as the head has it, or behind the
/// first token where there was none.
fn drafts(mut tokens: Vec<usize>, next: usize, count: usize, vocabulary: usize) -> Vec<usize> {
    tokens.push(next);
    for _ in 0..count {
        let [before, last] = [tokens[tokens.len() - 2], tokens[tokens.len() - 1]];
        let found = tokens.windows(2).find(|pair| pair[0] == last).map_or(tokens[1], |pair| pair[1]);
        tokens.push(mistaken(before, found, vocabulary));
    }
    tokens.split_off(tokens.len() - count)
}

/// A request as the script follows it.
#[derive(Debug, Clone)]
struct Held {
    text: Text,
    /// Tokens in the cache.
    cached: usize,
}

impl Held {
    fn tokens(&self) -> Vec<usize> {
        (0..self.cached).map(|position| self.text.at(position)).collect()
    }
}

impl Script {
    /// The script of a case; `seed` decides the texts.
    ///
    /// # Errors
    /// Why the steps can't be followed.
    pub fn of(case: &StackCase, seed: u64) -> Result<Self, String> {
        let plain = Self { session: case.session.clone(), runs: Vec::new(), ahead: false };
        let Some(wiring) = case.wiring else { return Ok(plain) };
        let mut writer = Writer {
            vocabulary: case.vocabulary,
            counter: Stream::StackText.counter(seed),
            held: Default::default(),
            script: Self { session: SequenceCase { steps: Vec::new(), ..case.session.clone() }, ..plain },
        };
        for (index, step) in case.session.steps.iter().enumerate() {
            writer.take(index, step, &case.session)?;
        }
        if wiring.drafts > 0 {
            writer.rounds(wiring);
        }
        Ok(writer.script)
    }

    /// The runs; where drafts are made, with the blocks that they are written to.
    ///
    /// # Errors
    /// The first step that can't be taken, and why.
    pub fn turns(&self, seed: u64) -> Result<Vec<Turn>, String> {
        let mut turns = turns(&self.session, seed)?;
        if self.ahead {
            for index in (0..turns.len().saturating_sub(1)).rev() {
                let (own, later) = turns.split_at_mut(index + 1);
                let Some(turn) = own.last_mut() else { continue };
                for (request, blocks) in turn.requests.iter().zip(&mut turn.blocks) {
                    let next = later.iter().find_map(|later| {
                        later.requests.iter().position(|other| other == request).map(|at| &later.blocks[at])
                    });
                    if let Some(next) = next.filter(|next| next.len() > blocks.len()) {
                        blocks.clone_from(next);
                    }
                }
            }
            turns.pop();
        }
        Ok(turns)
    }
}

/// Writes a script step by step.
struct Writer {
    vocabulary: usize,
    counter: Counter,
    held: std::collections::BTreeMap<usize, Held>,
    script: Script,
}

impl Writer {
    /// Takes a step of the session as it is.
    fn take(&mut self, index: usize, step: &Step, session: &SequenceCase) -> Result<(), String> {
        match step {
            Step::Run { batch, .. } => {
                let later = &session.steps[index + 1..];
                let mut run = RunScript::default();
                for own in batch {
                    self.begin(own.request, session);
                    let Some(held) = self.held.get_mut(&own.request) else { continue };
                    run.fed.push((0..own.tokens).map(|row| held.text.at(held.cached + row)).collect());
                    held.cached += own.tokens;
                    let goes_on = later.iter().any(|step| {
                        matches!(step, Step::Run { kind: RunKind::Verify, batch, .. }
                            if batch.iter().any(|other| other.request == own.request))
                    });
                    run.drafted.push(0);
                    run.next.push(if goes_on { held.text.at(held.cached) as i32 } else { -1 });
                }
                self.script.runs.push(run);
            }
            Step::Reject { request, tokens } => {
                if let Some(held) = self.held.get_mut(request) {
                    held.cached = held.cached.saturating_sub(*tokens);
                }
            }
            Step::Hit { request, source, blocks } => {
                let from = self.held.get(source).ok_or(format!("there is no request {source}"))?.clone();
                let cached = blocks * session.configuration.virtual_block_tokens();
                self.held.insert(*request, Held { cached, ..from });
            }
            Step::Free { request } => {
                self.held.remove(request);
            }
            Step::Evict { request } => {
                if let Some(held) = self.held.get_mut(request) {
                    held.cached = 0;
                }
            }
            Step::Import { .. } => return Err("a stack takes no caches over".to_owned()),
        }
        self.script.session.steps.push(step.clone());
        Ok(())
    }

    /// A text for a request that is new: its period shows whole, and once more, in the steps of several rows that the session has, and
    /// does not depend on how many single rows follow.
    fn begin(&mut self, request: usize, session: &SequenceCase) {
        if self.held.contains_key(&request) {
            return;
        }
        let of_step = |step: &Step| match step {
            Step::Run { kind: RunKind::Verify, batch, .. } => {
                batch.iter().filter(|own| own.request == request).map(|own| own.tokens).sum()
            }
            _ => 0,
        };
        let tokens: usize = session.steps.iter().map(of_step).sum();
        let text = Text::drawn(self.vocabulary, tokens.saturating_sub(2), &mut self.counter);
        self.held.insert(request, Held { text, cached: 0 });
    }

    /// Steps in which all requests have their drafts verified, one more than are run. Some have one draft less.
    fn rounds(&mut self, wiring: StackWiring) {
        self.script.ahead = true;
        for round in 0..=wiring.rounds {
            let mut run = RunScript { verifies: true, ..RunScript::default() };
            let (mut batch, mut rejected) = (Vec::new(), Vec::new());
            for (request, held) in &mut self.held {
                let count = wiring.drafts - usize::from((round + request) % 3 == 2);
                let next = held.text.at(held.cached);
                let drafts = drafts(held.tokens(), next, wiring.drafts, self.vocabulary);
                let right = |index: &usize| drafts[*index] == held.text.at(held.cached + 1 + index);
                let accepted = (0..count).take_while(right).count();
                run.fed.push(std::iter::once(next).chain(drafts[..count].iter().copied()).collect());
                run.drafted.push(count as i32);
                run.next.push(-1);
                batch.push(NewTokens { request: *request, tokens: 1 + count });
                held.cached += 1 + accepted;
                if count > accepted {
                    rejected.push(Step::Reject { request: *request, tokens: count - accepted });
                }
            }
            let (kind, padded_rows) = (RunKind::Verify, round % 2);
            self.script.session.steps.push(Step::Run { kind, batch, padded_rows, chunk_budget_tokens: 0 });
            self.script.session.steps.extend(rejected);
            self.script.runs.push(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Body, Case};

    fn case(stack: &str, steps: &str) -> StackCase {
        let id = format!(
            "stack/l2.h40.i9.v8.whole.{stack}/tiny-mla/mla24+8v12.tp2.dcp2.h1.s1.b2.n40.bf16.ag_rs/drafts/{steps}/7"
        );
        match id.parse::<Case>().unwrap().body {
            Body::Stack(body) => *body,
            _ => panic!("another body"),
        }
    }

    #[test]
    fn texts_show_their_period_once_and_a_token_more_before_anything_is_drafted() {
        let script = Script::of(&case("wired.m2.r1", "v0+9,1+4"), 3).unwrap();
        let fed = &script.runs[0].fed;
        assert_eq!((fed[0][0], fed[1][0]), (7, 7));
        assert_eq!(fed[0][1], fed[0][8]);
        let mut period = fed[0][1..8].to_vec();
        period.sort_unstable();
        assert_eq!(period, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(fed[1][1], fed[1][3]);
        assert_ne!(fed[1][1], fed[1][2]);
    }

    #[test]
    fn drafts_go_on_as_the_text_did_but_for_what_stands_two_rows_behind_a_certain_token() {
        assert_eq!(drafts(vec![7, 0, 3, 4, 0], 3, 3, 8), [4, 0, 3]);
        assert_eq!(drafts(vec![7, 3, 1, 4, 5, 0, 3], 1, 1, 8), [4]);
        // 2 stands where 5 should, and what follows is behind the 2
        assert_eq!(drafts(vec![7, 1, 4, 5, 2, 0, 1], 4, 3, 8), [2, 0, 1]);
        assert_eq!(drafts(vec![2, 1, 0, 1], 0, 2, 3), [1, 0], "too few tokens for a mistake");
    }

    #[test]
    fn rejected_drafts_are_those_behind_the_first_wrong_one() {
        let case = case("wired.m3.r6", "v0+9,1+6");
        let script = Script::of(&case, 5).unwrap();
        let turns = script.turns(5).unwrap();
        assert_eq!((turns.len(), script.runs.len()), (7, 8));
        let mut kept = [0, 0];
        for (index, turn) in turns.iter().enumerate().skip(1) {
            for request in 0..2 {
                let run = &script.runs[index];
                let text: Vec<usize> = turn.tokens[request].iter().map(|number| *number as usize).collect();
                assert_eq!(turn.new_tokens[request], run.fed[request].len());
                assert_eq!(run.drafted[request] as usize + 1, run.fed[request].len());
                assert!(turn.blocks[request].len() * 4 >= text.len());
                kept[request] += run.fed[request].len();
            }
        }
        for seed in 0..20 {
            let script = Script::of(&case, seed).unwrap();
            let of = |request: usize| {
                let is_own =
                    |step: &&Step| matches!(step, Step::Reject { request: own, .. } if *own == request);
                script.session.steps.iter().filter(is_own).count()
            };
            assert!(of(0) > 0 && of(1) > 0, "seed {seed}: drafts of each request are rejected at some time");
        }
        let rejected = script.session.steps.iter().filter(|step| matches!(step, Step::Reject { .. })).count();
        assert!(rejected > 0 && kept.iter().all(|rows| *rows >= 6 * 3), "{rejected} {kept:?}");
    }
}
