//! One sequence on its way: its tokens, its text so far, and whether it is done.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use super::blocks::Lease;
use super::logprobs::TokenLogprob;
use super::request::{Finish, GenerateError, GenerateRequest, Generation};
use crate::tokenizer::{TokenId, Tokenizer};

/// What a caller waits for.
pub type Reply = Sender<Result<Generation, GenerateError>>;

/// A request that waits for room.
pub struct Waiting {
    /// What is asked.
    pub request: GenerateRequest,
    /// Where the result goes.
    pub reply: Reply,
    /// When it came.
    pub arrived: Instant,
}

/// A request that runs.
pub struct Sequence {
    /// What is asked.
    pub request: GenerateRequest,
    /// Where the result goes.
    pub reply: Reply,
    /// When it came.
    pub arrived: Instant,
    /// Its blocks.
    pub lease: Lease,
    /// Prompt and generated tokens.
    pub tokens: Vec<TokenId>,
    /// Leading tokens whose keys and values are stored.
    pub computed: usize,
    /// Draft tokens of the step under way.
    pub drafts: Vec<TokenId>,
    /// Log-probabilities of generated tokens.
    pub logprobs: Vec<TokenLogprob>,
    /// Log-probabilities of prompt tokens.
    pub prompt_logprobs: Vec<TokenLogprob>,
    cached_tokens: usize,
    text: Vec<u8>,
    tokenizer: Arc<Tokenizer>,
}

impl Sequence {
    /// A sequence whose first `cached_tokens` are in its blocks already.
    pub fn new(waiting: Waiting, lease: Lease, cached_tokens: usize, tokenizer: Arc<Tokenizer>) -> Self {
        let Waiting { request, reply, arrived } = waiting;
        Self {
            tokens: request.prompt.clone(),
            request,
            reply,
            arrived,
            lease,
            computed: cached_tokens,
            drafts: Vec::new(),
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            cached_tokens,
            text: Vec::new(),
            tokenizer,
        }
    }

    /// Whether prompt tokens are left to compute besides the last, whose logits start the generation.
    pub fn prefilling(&self) -> bool {
        self.computed + 1 < self.request.prompt.len()
    }

    /// Tokens generated so far.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Appends a generated token; says whether, and why, that was the last.
    pub fn push(&mut self, token: TokenId) -> Option<Finish> {
        self.tokens.push(token);
        let stop = &self.request.stop;
        if stop.tokens.contains(&token) {
            return Some(Finish::StopToken(token));
        }
        if !stop.ignore_end && self.tokenizer.ends().contains(&token) {
            return Some(Finish::End);
        }
        if !self.tokenizer.is_control(token) {
            let before = self.text.len();
            self.text.extend_from_slice(self.tokenizer.bytes_of(token));
            if let Some((at, stop_text)) = earliest_stop(&self.text, before, &stop.texts) {
                self.text.truncate(if stop.keep_text { at + stop_text.len() } else { at });
                return Some(Finish::StopText(stop_text.clone()));
            }
        }
        (self.generated() >= self.request.max_tokens).then_some(Finish::Length)
    }

    /// Sends the result and gives the blocks back to the caller.
    pub fn finish(self, finish: Finish) -> Lease {
        let generation = Generation {
            tokens: self.tokens[self.request.prompt.len()..].to_vec(),
            text: self.text,
            finish,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            cached_tokens: self.cached_tokens,
        };
        // A caller that went away needs no answer.
        let _ = self.reply.send(Ok(generation));
        self.lease
    }

    /// Sends an error and gives the blocks back to the caller.
    pub fn fail(self, error: GenerateError) -> Lease {
        let _ = self.reply.send(Err(error));
        self.lease
    }
}

/// The earliest stop text that ends after `before`; of those at one place the first in the list.
fn earliest_stop<'a>(text: &[u8], before: usize, stops: &'a [String]) -> Option<(usize, &'a String)> {
    let found = stops.iter().filter_map(|stop| {
        let from = (before + 1).saturating_sub(stop.len());
        let at = text[from..].windows(stop.len()).position(|window| window == stop.as_bytes())?;
        Some((from + at, stop))
    });
    found.min_by_key(|(at, _)| *at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(texts: &[&str]) -> Vec<String> {
        texts.iter().map(ToString::to_string).collect()
    }

    fn at(text: &str, before: usize, list: &[&str]) -> Option<(usize, String)> {
        earliest_stop(text.as_bytes(), before, &stops(list)).map(|(at, stop)| (at, stop.clone()))
    }

    #[test]
    fn a_stop_text_is_found_across_tokens() {
        assert_eq!(at("answer Question: x", 12, &["Question:"]), Some((7, "Question:".to_string())));
        assert_eq!(at("answer Quest", 10, &["Question:"]), None);
        assert_eq!(at("ab", 0, &["abc"]), None, "a stop longer than the text");
    }

    #[test]
    fn the_earliest_of_several_wins_and_then_the_first_listed() {
        assert_eq!(at("one two", 0, &["two", "ne"]), Some((1, "ne".to_string())));
        assert_eq!(at("one two", 0, &["on", "one"]), Some((0, "on".to_string())));
    }

    #[test]
    fn what_ended_before_the_new_token_is_not_looked_at_again() {
        assert_eq!(at("stop more", 4, &["stop"]), None);
        assert_eq!(at("stop more", 3, &["stop"]), Some((0, "stop".to_string())));
    }
}
