//! `/v1/completions`: what a request may say.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, short};
use crate::engine::request::StopRule;
use crate::engine::sampling::Sampling;
use crate::tokenizer::{TokenId, Tokenizer, TokenizerError};

/// Most alternatives per position (vLLM's default `max_logprobs`).
const MAX_LOGPROBS: u64 = 20;

/// Most prompts in one request.
const MAX_PROMPTS: usize = 256;

/// Most stop texts in one request.
const MAX_STOPS: usize = 16;

/// Fields that change what is generated, which this server does not have, with the value that switches each off.
const UNSUPPORTED: [(&str, Option<f64>); 14] = [
    ("n", Some(1.0)),
    ("best_of", Some(1.0)),
    ("presence_penalty", Some(0.0)),
    ("frequency_penalty", Some(0.0)),
    ("repetition_penalty", Some(1.0)),
    ("length_penalty", Some(1.0)),
    ("min_p", Some(0.0)),
    ("min_tokens", Some(0.0)),
    ("suffix", None),
    ("logit_bias", None),
    ("response_format", None),
    ("structured_outputs", None),
    ("allowed_token_ids", None),
    ("truncate_prompt_tokens", None),
];

/// One prompt of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The text as given, or as its tokens spell it.
    pub text: Vec<u8>,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
}

/// A checked request.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// When to stop.
    pub stop: StopRule,
    /// Alternatives per position under `logprobs`, if asked for.
    pub logprobs: Option<usize>,
    /// Alternatives per position under `prompt_logprobs`, if asked for.
    pub prompt_logprobs: Option<usize>,
    /// Whether the prompt is part of the answer.
    pub echo: bool,
    /// Whether tokens are shown as `token_id:N`.
    pub tokens_as_ids: bool,
    /// Whether the answer has `token_ids` and `prompt_token_ids`.
    pub return_token_ids: bool,
}

impl Completion {
    /// Checks a request's fields. Unknown fields are ignored, as vLLM does; known ones that are not supported are
    /// refused unless they are at the value that switches them off.
    ///
    /// # Errors
    /// 400 with the field.
    pub fn parse(fields: &Fields, tokenizer: &Tokenizer) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let stop = StopRule {
            texts: fields.texts("stop")?,
            tokens: stop_tokens(fields, tokenizer)?,
            ignore_end: fields.flag("ignore_eos")?,
            keep_text: fields.flag("include_stop_str_in_output")?,
        };
        if stop.texts.iter().any(String::is_empty) {
            return Err(ApiError::field("stop", "a stop string must not be empty".to_string()));
        }
        if stop.texts.len() > MAX_STOPS {
            return Err(ApiError::field(
                "stop",
                format!("at most {MAX_STOPS} stop strings, not {}", stop.texts.len()),
            ));
        }
        let top_p = fields.number("top_p", 0.0, 1.0)?.unwrap_or(1.0);
        if top_p == 0.0 {
            return Err(ApiError::field("top_p", "`top_p` must be above 0".to_string()));
        }
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0, 100.0)?.unwrap_or(1.0),
            top_k: top_k(fields)?,
            top_p,
            seed: seed(fields)?,
        };
        Ok(Self {
            prompts: prompts(fields, tokenizer)?,
            max_tokens: fields.count("max_tokens", u64::from(u32::MAX))?.unwrap_or(16),
            sampling,
            stop,
            logprobs: fields.count("logprobs", MAX_LOGPROBS)?,
            prompt_logprobs: fields.count("prompt_logprobs", MAX_LOGPROBS)?,
            echo: fields.flag("echo")?,
            tokens_as_ids: fields.flag("return_tokens_as_token_ids")?,
            return_token_ids: fields.flag("return_token_ids")?,
        })
    }

    /// Alternatives per prompt position that the engine must give, for either purpose.
    pub fn engine_prompt_logprobs(&self) -> Option<usize> {
        let echoed = if self.echo { self.logprobs } else { None };
        echoed.max(self.prompt_logprobs)
    }
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    if fields.flag("stream")? {
        let message = "this server does not stream: leave `stream` out or false";
        return Err(ApiError::field("stream", message.to_string()));
    }
    for (name, off) in UNSUPPORTED {
        let Some(value) = fields.get(name) else { continue };
        let empty = matches!(value, Value::Object(map) if map.is_empty());
        if !empty && (off.is_none() || value.as_f64() != off) {
            let message = format!("this server does not support `{name}` = {}: leave it out", short(value));
            return Err(ApiError::field(name, message));
        }
    }
    Ok(())
}

/// 0 and −1 both mean all tokens, as in vLLM.
fn top_k(fields: &Fields) -> Result<usize, ApiError> {
    if fields.get("top_k").and_then(Value::as_i64) == Some(-1) {
        return Ok(0);
    }
    Ok(fields.count("top_k", u64::from(u32::MAX))?.unwrap_or(0))
}

/// The seed, or a random one.
fn seed(fields: &Fields) -> Result<u64, ApiError> {
    match fields.get("seed") {
        None => Ok(RandomState::new().hash_one(0u8)),
        Some(value) => {
            let seed = value.as_u64().or(value.as_i64().map(|negative| negative as u64));
            seed.ok_or_else(|| {
                ApiError::field("seed", format!("`seed` must be an integer, not {}", short(value)))
            })
        }
    }
}

fn stop_tokens(fields: &Fields, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, ApiError> {
    let Some(value) = fields.get("stop_token_ids") else { return Ok(Vec::new()) };
    let Value::Array(values) = value else {
        return Err(ApiError::field(
            "stop_token_ids",
            "`stop_token_ids` must be a list of token ids".to_string(),
        ));
    };
    token_list(values, "stop_token_ids", tokenizer)
}

fn prompts(fields: &Fields, tokenizer: &Tokenizer) -> Result<Vec<Prompt>, ApiError> {
    let Some(value) = fields.get("prompt") else {
        return Err(ApiError::field("prompt", "`prompt` is missing".to_string()));
    };
    let with_start = fields.get("add_special_tokens").is_none() || fields.flag("add_special_tokens")?;
    let wrong = |value: &Value| {
        let wanted = "a string, a list of strings, a list of token ids or a list of such lists";
        ApiError::field("prompt", format!("`prompt` must be {wanted}, not {}", short(value)))
    };
    let one = |value: &Value| match value {
        Value::String(text) => text_prompt(text, with_start, tokenizer).map_err(ApiError::from),
        Value::Array(values) => token_prompt(values, tokenizer),
        other => Err(wrong(other)),
    };
    let prompts = match value {
        Value::Array(values) if !values.first().is_some_and(Value::is_number) => {
            if values.is_empty() || values.len() > MAX_PROMPTS {
                let message = format!("`prompt` must have 1 to {MAX_PROMPTS} items, not {}", values.len());
                return Err(ApiError::field("prompt", message));
            }
            values.iter().map(one).collect::<Result<_, _>>()?
        }
        single => vec![one(single)?],
    };
    Ok(prompts)
}

fn text_prompt(text: &str, with_start: bool, tokenizer: &Tokenizer) -> Result<Prompt, TokenizerError> {
    let start = tokenizer.start().filter(|_| with_start);
    let tokens = start.into_iter().chain(tokenizer.encode(text)?).collect();
    Ok(Prompt { text: text.as_bytes().to_vec(), tokens })
}

fn token_prompt(values: &[Value], tokenizer: &Tokenizer) -> Result<Prompt, ApiError> {
    let tokens = token_list(values, "prompt", tokenizer)?;
    Ok(Prompt { text: tokenizer.decode(&tokens), tokens })
}

/// A list of token ids of the vocabulary.
///
/// # Errors
/// 400 that names the first that is none.
pub fn token_list(values: &[Value], param: &str, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, ApiError> {
    let id = |value: &Value| {
        let wrong =
            || ApiError::field(param, format!("`{param}` has {} where a token id should be", short(value)));
        let id = value.as_u64().ok_or_else(wrong)?;
        tokenizer.checked(id).map_err(|error| ApiError::field(param, error.to_string()))
    };
    values.iter().map(id).collect()
}
