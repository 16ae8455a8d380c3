//! The HTTP interface: OpenAI's completions as vLLM serves them, and what belongs to them.

pub mod answer;
pub mod completion;
pub mod error;
pub mod fields;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::attention::AttentionPath;
use crate::engine::Engine;
use crate::engine::request::{GenerateError, GenerateRequest, Generation};
use crate::http::message::{Request, RequestError, Response};
use crate::http::server::Handler;
use crate::metrics::Metrics;
use crate::tokenizer::Tokenizer;
use completion::{Completion, token_list};
use error::ApiError;
use fields::Fields;

/// How often a waiting request looks whether its client is still there.
const TICK: Duration = Duration::from_millis(100);

/// The routes: method and path.
const ROUTES: [(&str, &str); 7] = [
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
];

/// One served model.
pub struct Api {
    engine: Arc<Engine>,
    tokenizer: Arc<Tokenizer>,
    metrics: Arc<Metrics>,
    path: AttentionPath,
    model: String,
    speculates: bool,
    started_s: u64,
    answers: AtomicU64,
}

impl Api {
    /// An interface to `engine` under the model name `model`.
    pub fn new(
        engine: Arc<Engine>,
        tokenizer: Arc<Tokenizer>,
        metrics: Arc<Metrics>,
        path: AttentionPath,
        model: String,
        speculates: bool,
    ) -> Self {
        Self {
            engine,
            tokenizer,
            metrics,
            path,
            model,
            speculates,
            started_s: now_s(),
            answers: AtomicU64::new(0),
        }
    }

    fn route(&self, request: &Request, client_is_gone: &dyn Fn() -> bool) -> Result<Response, ApiError> {
        let method = if request.method == "HEAD" { "GET" } else { request.method.as_str() };
        match (method, request.path.as_str()) {
            ("POST", "/v1/completions") => self.complete(&request.body, client_is_gone),
            ("GET", "/v1/models") => Ok(self.models()),
            ("GET", "/health") if self.engine.alive() => Ok(Response::text("text/plain", String::new())),
            ("GET", "/health") => Err(ApiError::new(503, "stopping", "the engine has stopped".to_string())),
            ("GET", "/metrics") => {
                let page = self.metrics.page(&self.model, &self.path, self.speculates);
                Ok(Response::text("text/plain; version=0.0.4; charset=utf-8", page))
            }
            ("GET", "/version") => {
                let version = concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION"));
                Ok(Response::json(200, &json!({ "version": version })))
            }
            ("POST", "/tokenize") => self.tokenize(&request.body),
            ("POST", "/detokenize") => self.detokenize(&request.body),
            (method, path) => Err(no_route(method, path)),
        }
    }

    fn complete(&self, body: &[u8], client_is_gone: &dyn Fn() -> bool) -> Result<Response, ApiError> {
        let fields = Fields::parse(body)?;
        self.check_model(&fields)?;
        let asked = Completion::parse(&fields, &self.tokenizer)?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let generations = self.generate(&asked, &cancelled, client_is_gone).inspect_err(|_| {
            // Whatever failed, the request's other prompts need not go on.
            cancelled.store(true, Ordering::Relaxed);
        })?;
        let pairs = asked.prompts.iter().zip(&generations).enumerate();
        let choices: Vec<Value> = pairs
            .map(|(i, (prompt, result))| answer::choice(i, &asked, prompt, result, &self.tokenizer))
            .collect();
        let number = self.answers.fetch_add(1, Ordering::Relaxed);
        let answer = json!({
            "id": format!("cmpl-{}-{number}", self.started_s),
            "object": "text_completion",
            "created": now_s(),
            "model": self.model,
            "choices": choices,
            "usage": answer::usage(&asked.prompts, &generations),
        });
        Ok(Response::json(200, &answer))
    }

    fn generate(
        &self,
        asked: &Completion,
        cancelled: &Arc<AtomicBool>,
        client_is_gone: &dyn Fn() -> bool,
    ) -> Result<Vec<Generation>, ApiError> {
        let mut results = Vec::new();
        for prompt in &asked.prompts {
            results.push(self.engine.submit(GenerateRequest {
                prompt: prompt.tokens.clone(),
                max_tokens: asked.max_tokens,
                sampling: asked.sampling,
                stop: asked.stop.clone(),
                logprobs: asked.logprobs,
                prompt_logprobs: asked.engine_prompt_logprobs(),
                cancelled: cancelled.clone(),
            })?);
        }
        results.iter().map(|result| wait(result, client_is_gone).map_err(ApiError::from)).collect()
    }

    fn models(&self) -> Response {
        let model = json!({
            "id": self.model,
            "object": "model",
            "created": self.started_s,
            "owned_by": "shardcheck",
            "root": self.model,
            "parent": null,
            "max_model_len": self.engine.max_model_tokens(),
        });
        Response::json(200, &json!({"object": "list", "data": [model]}))
    }

    fn tokenize(&self, body: &[u8]) -> Result<Response, ApiError> {
        let fields = Fields::parse(body)?;
        self.check_model(&fields)?;
        let missing = || ApiError::field("prompt", "`prompt` is missing".to_string());
        let mut tokens = self.tokenizer.encode(fields.text("prompt")?.ok_or_else(missing)?)?;
        if fields.get("add_special_tokens").is_none() || fields.flag("add_special_tokens")? {
            tokens.splice(0..0, self.tokenizer.start());
        }
        let strings: Option<Vec<String>> = fields
            .flag("return_token_strs")?
            .then(|| tokens.iter().map(|id| self.tokenizer.display(*id)).collect());
        let answer = json!({
            "count": tokens.len(),
            "max_model_len": self.engine.max_model_tokens(),
            "tokens": tokens,
            "token_strs": strings,
        });
        Ok(Response::json(200, &answer))
    }

    fn detokenize(&self, body: &[u8]) -> Result<Response, ApiError> {
        let fields = Fields::parse(body)?;
        self.check_model(&fields)?;
        let Some(Value::Array(values)) = fields.get("tokens") else {
            return Err(ApiError::field("tokens", "`tokens` must be a list of token ids".to_string()));
        };
        let text = self.tokenizer.decode(&token_list(values, "tokens", &self.tokenizer)?);
        Ok(Response::json(200, &json!({"prompt": String::from_utf8_lossy(&text)})))
    }

    fn check_model(&self, fields: &Fields) -> Result<(), ApiError> {
        match fields.text("model")? {
            Some(other) if other != self.model => {
                let message = format!("the model `{other}` does not exist; this server has `{}`", self.model);
                let param = Some("model".to_string());
                Err(ApiError { status: 404, code: "model_not_found", param, message })
            }
            _ => Ok(()),
        }
    }
}

impl Handler for Api {
    fn answer(&self, request: &Request, client_is_gone: &dyn Fn() -> bool) -> Response {
        self.route(request, client_is_gone).unwrap_or_else(|error| error.response())
    }

    fn unreadable(&self, error: &RequestError) -> Response {
        ApiError::from(error).response()
    }

    fn overloaded(&self) -> Response {
        let message = "too many open connections: close some or try again later";
        ApiError::new(503, "overloaded", message.to_string()).response()
    }

    fn panicked(&self) -> Response {
        let message = "the server failed on this request; its log says where";
        ApiError::new(500, "internal_error", message.to_string()).response()
    }
}

/// Waits for a result as long as the client does.
fn wait(
    result: &Receiver<Result<Generation, GenerateError>>,
    client_is_gone: &dyn Fn() -> bool,
) -> Result<Generation, GenerateError> {
    loop {
        match result.recv_timeout(TICK) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Timeout) if client_is_gone() => return Err(GenerateError::Cancelled),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(GenerateError::Stopped),
        }
    }
}

fn no_route(method: &str, path: &str) -> ApiError {
    let known: Vec<String> = ROUTES.iter().map(|(method, path)| format!("{method} {path}")).collect();
    let (status, code) = if ROUTES.iter().any(|(_, other)| *other == path) {
        (405, "method_not_allowed")
    } else {
        (404, "not_found")
    };
    ApiError::new(status, code, format!("there is no {method} {path}; this server has {}", known.join(", ")))
}

fn now_s() -> u64 {
    // A clock before 1970 is no reason to fail.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
