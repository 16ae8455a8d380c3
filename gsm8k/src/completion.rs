//! The completions API: the request body that a dialect sends, and what is read from an answer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::FailureKind;

/// The body of `POST /v1/completions`, in the field order of lm-eval's payload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CompletionRequest {
    /// The prompt, as text or as token ids.
    pub prompt: PromptInput,
    /// The model's served name.
    pub model: String,
    /// Most tokens to generate; 0 only together with `echo`.
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f64,
    /// Generation ends before any of these texts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Seed of the server's sampler.
    pub seed: u64,
    /// Number of alternatives whose log-probability is returned per position.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u32>,
    /// Whether the prompt is returned (and scored) before the completion.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub echo: bool,
    /// vLLM's extension: tokens are named `token_id:N`, so that different ids never share a name.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub return_tokens_as_token_ids: bool,
}

/// A prompt as the API takes it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum PromptInput {
    /// Text, tokenised by the server.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
}

/// What is kept of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The text of the first choice.
    pub text: String,
    /// `stop`, `length` or the server's own word.
    pub finish_reason: Option<String>,
    /// Tokens of the prompt, as the server counted them.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated.
    pub completion_tokens: Option<u64>,
    /// The model name in the answer.
    pub model: Option<String>,
    /// Seconds from sending to the last byte.
    pub latency_s: f64,
    /// Acceptance of this request's drafts, when the server reports it.
    pub acceptance: Option<RequestAcceptance>,
    /// Log-probabilities per position, when asked for.
    pub logprobs: Option<Logprobs>,
}

/// Acceptance of one request's drafts: vLLM's `metrics.speculative_decoding`, sent with
/// `--per-request-spec-decode-metrics`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestAcceptance {
    /// Steps by accepted draft tokens; index 0 counts the steps that accepted none.
    pub acceptance_histogram: Vec<u64>,
    /// Draft tokens proposed; absent when every step proposed as many as the histogram has room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_draft_tokens: Option<u64>,
}

/// The `logprobs` object of a choice. All lists have one entry per returned token.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
pub struct Logprobs {
    /// The tokens, as text or as `token_id:N`.
    pub tokens: Vec<String>,
    /// Natural log-probability of each token; `None` for the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f64>>,
    /// The best alternatives of each position by token.
    #[serde(default)]
    pub top_logprobs: Vec<Option<BTreeMap<String, f64>>>,
    /// Where each token begins in the text, in characters.
    #[serde(default)]
    pub text_offset: Vec<u64>,
}

impl Completion {
    /// Reads the answer to a completions request.
    ///
    /// # Errors
    /// [`FailureKind::BadJson`] for anything that is no completion, [`FailureKind::NullText`] for one without text,
    /// [`FailureKind::ServerError`] for one that says it was aborted; each with what was seen.
    pub fn parse(body: &str, latency_s: f64) -> Result<Self, (FailureKind, String)> {
        let json: Value = serde_json::from_str(body)
            .map_err(|why| (FailureKind::BadJson, format!("the answer is not JSON: {why}")))?;
        if let Some(message) = json["error"]["message"].as_str().or(json["error"].as_str()) {
            return Err((FailureKind::ServerError, message.to_owned()));
        }
        let choice = json["choices"]
            .get(0)
            .ok_or_else(|| (FailureKind::BadJson, "the answer has no choices".to_owned()))?;
        let finish_reason = choice["finish_reason"].as_str().map(str::to_owned);
        if matches!(finish_reason.as_deref(), Some("abort" | "error")) {
            return Err((FailureKind::ServerError, format!("finish_reason is {}", choice["finish_reason"])));
        }
        let text = match &choice["text"] {
            Value::String(text) => text.clone(),
            Value::Null => return Err((FailureKind::NullText, "the completion's text is null".to_owned())),
            other => return Err((FailureKind::BadJson, format!("the completion's text is {other}"))),
        };
        let logprobs = match &choice["logprobs"] {
            Value::Null => None,
            value => Some(Logprobs::deserialize(value).map_err(|why| {
                (FailureKind::BadJson, format!("the logprobs are not those of the completions API: {why}"))
            })?),
        };
        Ok(Self {
            text,
            finish_reason,
            prompt_tokens: json["usage"]["prompt_tokens"].as_u64(),
            completion_tokens: json["usage"]["completion_tokens"].as_u64(),
            model: json["model"].as_str().map(str::to_owned),
            latency_s,
            // a server's own way of reporting it is no reason to reject the answer
            acceptance: RequestAcceptance::deserialize(&json["metrics"]["speculative_decoding"]).ok(),
            logprobs,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_holds_lm_evals_fields_and_nothing_else() {
        let request = CompletionRequest {
            prompt: PromptInput::Text("Question: …\nAnswer:".to_owned()),
            model: "M".to_owned(),
            max_tokens: 256,
            temperature: 0.0,
            stop: vec!["Question:".to_owned(), "</s>".to_owned(), "<|im_end|>".to_owned()],
            seed: 1234,
            logprobs: None,
            echo: false,
            return_tokens_as_token_ids: false,
        };
        assert_eq!(
            serde_json::to_string(&request).unwrap(),
            "{\"prompt\":\"Question: …\\nAnswer:\",\"model\":\"M\",\"max_tokens\":256,\"temperature\":0.0,\
             \"stop\":[\"Question:\",\"</s>\",\"<|im_end|>\"],\"seed\":1234}"
        );
        let tokens = CompletionRequest { prompt: PromptInput::Tokens(vec![1, 2]), echo: true, ..request };
        let json = serde_json::to_value(&tokens).unwrap();
        assert_eq!((json["prompt"].clone(), json["echo"].clone()), (serde_json::json!([1, 2]), true.into()));
    }

    #[test]
    fn an_answer_gives_text_reason_counts_and_acceptance() {
        let body = r#"{"model": "m", "choices": [{"text": " 18", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2},
            "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 0, 3], "num_draft_tokens": 7}}}"#;
        let answer = Completion::parse(body, 0.5).unwrap();
        assert_eq!((answer.text.as_str(), answer.finish_reason.as_deref()), (" 18", Some("stop")));
        assert_eq!((answer.prompt_tokens, answer.completion_tokens), (Some(9), Some(2)));
        let acceptance = answer.acceptance.unwrap();
        assert_eq!((acceptance.acceptance_histogram, acceptance.num_draft_tokens), (vec![1, 0, 3], Some(7)));
        assert_eq!(answer.logprobs, None);
    }

    #[test]
    fn answers_that_are_none_are_told_apart() {
        let kind = |body: &str| Completion::parse(body, 0.0).unwrap_err().0;
        assert_eq!(kind("<html>"), FailureKind::BadJson);
        assert_eq!(kind("{}"), FailureKind::BadJson);
        assert_eq!(kind(r#"{"choices": []}"#), FailureKind::BadJson);
        assert_eq!(kind(r#"{"choices": [{"text": 18}]}"#), FailureKind::BadJson);
        assert_eq!(kind(r#"{"choices": [{"text": null}]}"#), FailureKind::NullText);
        assert_eq!(
            kind(r#"{"choices": [{"text": "x", "finish_reason": "abort"}]}"#),
            FailureKind::ServerError
        );
        assert_eq!(kind(r#"{"error": {"message": "engine dead"}}"#), FailureKind::ServerError);
        let broken = r#"{"choices": [{"text": "x", "logprobs": {"tokens": 3}}]}"#;
        assert_eq!(kind(broken), FailureKind::BadJson);
    }
}
