//! What is asked of the engine for one prompt, and what it gives back.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use thiserror::Error;

use super::logprobs::TokenLogprob;
use super::sampling::Sampling;
use crate::attention::AttentionError;
use crate::tokenizer::TokenId;

/// One prompt to continue.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// At least one token.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate; 0 only scores the prompt.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When to stop early.
    pub stop: StopRule,
    /// Log-probabilities of generated tokens, with this many alternatives.
    pub logprobs: Option<usize>,
    /// Log-probabilities of the prompt's tokens, with this many alternatives. Such a request does not read the prefix
    /// cache, as it needs the logits of every position.
    pub prompt_logprobs: Option<usize>,
    /// Set by the caller when nobody waits for the result any more.
    pub cancelled: Arc<AtomicBool>,
}

/// When generation ends before its limit.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StopRule {
    /// Texts, none empty.
    pub texts: Vec<String>,
    /// Tokens, besides the model's own end tokens.
    pub tokens: Vec<TokenId>,
    /// Go on over the model's own end tokens.
    pub ignore_end: bool,
    /// Leave a matched stop text in the output.
    pub keep_text: bool,
}

/// Why generation ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Finish {
    /// An end token of the model.
    End,
    /// A token of [`StopRule::tokens`].
    StopToken(TokenId),
    /// A text of [`StopRule::texts`].
    StopText(String),
    /// The limit of tokens.
    Length,
}

impl Finish {
    /// OpenAI's `finish_reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::End | Self::StopToken(_) | Self::StopText(_) => "stop",
            Self::Length => "length",
        }
    }
}

/// A finished generation.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Generated tokens, with the one that ended it.
    pub tokens: Vec<TokenId>,
    /// Their text, cut before a stop text and without control tokens. It need not be UTF-8.
    pub text: Vec<u8>,
    /// Why it ended.
    pub finish: Finish,
    /// One entry per generated token, if asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// One entry per prompt token but the first, if asked for.
    pub prompt_logprobs: Vec<TokenLogprob>,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
}

/// Why the engine does not take a request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// No prompt token.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// Longer than the model or the server allows.
    #[error(
        "this model's maximum context length is {limit} tokens, but {prompt} prompt tokens and {max_tokens} to generate \
         were asked for: shorten the prompt or lower max_tokens"
    )]
    TooLong {
        /// The server's limit for a sequence, in tokens.
        limit: usize,
        /// Prompt tokens.
        prompt: usize,
        /// Tokens to generate.
        max_tokens: usize,
    },
    /// Too many requests wait.
    #[error("{waiting} requests are waiting, which is this server's limit: try again later")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
    },
    /// The engine is stopping or has died.
    #[error("the engine has stopped")]
    Stopped,
}

/// Why a request that was taken came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GenerateError {
    /// The model's logits at a position are infinite or NaN.
    #[error("the logits at position {position} are not finite: attention or weights are broken")]
    NotFinite {
        /// Position in the sequence.
        position: usize,
    },
    /// The engine of the attention failed, perhaps over another request of the same step.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// The caller went away.
    #[error("the request was cancelled")]
    Cancelled,
    /// The engine stopped before the end.
    #[error("the engine stopped before the request was done")]
    Stopped,
}
