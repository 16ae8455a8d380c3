//! `/v1/completions`: what an answer says.

use serde_json::{Map, Value, json};

use super::completion::{Completion, Prompt};
use crate::engine::logprobs::TokenLogprob;
use crate::engine::request::{Finish, Generation};
use crate::tokenizer::{TokenId, Tokenizer};

/// One element of `choices`.
pub fn choice(
    index: usize,
    asked: &Completion,
    prompt: &Prompt,
    generation: &Generation,
    tokenizer: &Tokenizer,
) -> Value {
    let mut text = if asked.echo { prompt.text.clone() } else { Vec::new() };
    text.extend_from_slice(&generation.text);
    let stop_reason = match &generation.finish {
        Finish::StopText(text) => json!(text),
        Finish::StopToken(id) => json!(id),
        Finish::End | Finish::Length => Value::Null,
    };
    let logprobs = asked.logprobs.map(|top| logprobs(asked, top, prompt, generation, tokenizer));
    let prompt_logprobs =
        asked.prompt_logprobs.map(|top| prompt_logprobs(&generation.prompt_logprobs, top, tokenizer));
    let mut choice = json!({
        "index": index,
        "text": String::from_utf8_lossy(&text),
        "logprobs": logprobs,
        "finish_reason": generation.finish.reason(),
        "stop_reason": stop_reason,
        "prompt_logprobs": prompt_logprobs,
    });
    if asked.return_token_ids {
        choice["token_ids"] = json!(generation.tokens);
        choice["prompt_token_ids"] = json!(prompt.tokens);
    }
    choice
}

/// `usage` over all prompts.
pub fn usage(prompts: &[Prompt], generations: &[Generation]) -> Value {
    let prompt_tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let completion_tokens: usize = generations.iter().map(|generation| generation.tokens.len()).sum();
    let cached: usize = generations.iter().map(|generation| generation.cached_tokens).sum();
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

/// OpenAI's `logprobs` object. With `echo` it begins with the prompt, whose first token has no probability.
fn logprobs(
    asked: &Completion,
    top: usize,
    prompt: &Prompt,
    generation: &Generation,
    tokenizer: &Tokenizer,
) -> Value {
    let name =
        |id: TokenId| if asked.tokens_as_ids { format!("token_id:{id}") } else { tokenizer.display(id) };
    let mut columns = Columns {
        tokens: Vec::new(),
        logprobs: Vec::new(),
        tops: Vec::new(),
        offsets: Vec::new(),
        characters: 0,
    };
    if asked.echo {
        let unscored = prompt.tokens.first().map(|id| (*id, None));
        let scored = generation.prompt_logprobs.iter().map(|scored| (scored.token, Some(scored)));
        for (id, scored) in unscored.into_iter().chain(scored) {
            columns.push(name(id), tokenizer.bytes_of(id), scored, top, name);
        }
    }
    for scored in &generation.logprobs {
        // Control tokens are no part of generated text.
        let bytes = if tokenizer.is_control(scored.token) { &[] } else { tokenizer.bytes_of(scored.token) };
        columns.push(name(scored.token), bytes, Some(scored), top, name);
    }
    json!({
        "tokens": columns.tokens,
        "token_logprobs": columns.logprobs,
        "top_logprobs": columns.tops,
        "text_offset": columns.offsets,
    })
}

struct Columns {
    tokens: Vec<String>,
    logprobs: Vec<Option<f64>>,
    tops: Vec<Value>,
    offsets: Vec<usize>,
    /// Characters of the text before the next token.
    characters: usize,
}

impl Columns {
    fn push(
        &mut self,
        name: String,
        bytes: &[u8],
        scored: Option<&TokenLogprob>,
        top: usize,
        names: impl Fn(TokenId) -> String,
    ) {
        self.tokens.push(name);
        self.logprobs.push(scored.map(|scored| scored.logprob));
        self.tops.push(scored.map_or(Value::Null, |scored| {
            shown(scored, top)
                .map(|(id, logprob, _)| (names(id), json!(logprob)))
                .collect::<Map<_, _>>()
                .into()
        }));
        self.offsets.push(self.characters);
        // A token may hold part of a character: count the bytes that begin one.
        self.characters += bytes.iter().filter(|byte| **byte & 0xc0 != 0x80).count();
    }
}

/// vLLM's `prompt_logprobs`: null for the first token, then a map from token ids.
fn prompt_logprobs(scored: &[TokenLogprob], top: usize, tokenizer: &Tokenizer) -> Value {
    let entry = |(id, logprob, rank): (TokenId, f64, usize)| {
        let entry = json!({"logprob": logprob, "rank": rank, "decoded_token": tokenizer.display(id)});
        (id.to_string(), entry)
    };
    let maps = scored.iter().map(|scored| Value::Object(shown(scored, top).map(entry).collect()));
    std::iter::once(Value::Null).chain(maps).collect()
}

/// The `top` most likely tokens and, if it is not among them, the token itself, as vLLM does: id, log-probability, rank.
fn shown(scored: &TokenLogprob, top: usize) -> impl Iterator<Item = (TokenId, f64, usize)> {
    let best = scored.top.iter().take(top).zip(1..).map(|((id, logprob), rank)| (*id, *logprob, rank));
    let missing = !scored.top.iter().take(top).any(|(id, _)| *id == scored.token);
    best.chain(missing.then_some((scored.token, scored.logprob, scored.rank)))
}
