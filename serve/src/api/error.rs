//! Errors as OpenAI's API shapes them.

use serde_json::json;

use crate::engine::request::{GenerateError, SubmitError};
use crate::http::message::{RequestError, Response};
use crate::tokenizer::TokenizerError;

/// An error that goes to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Machine-readable code.
    pub code: &'static str,
    /// The field of the request that is to blame.
    pub param: Option<String>,
    /// What is wrong and what to do.
    pub message: String,
}

impl ApiError {
    /// 400 for a field.
    pub fn field(param: &str, message: String) -> Self {
        Self { status: 400, code: "invalid_value", param: Some(param.to_string()), message }
    }

    /// An error about no field in particular.
    pub fn new(status: u16, code: &'static str, message: String) -> Self {
        Self { status, code, param: None, message }
    }

    /// The response: `{"error": {"message", "type", "param", "code"}}`.
    pub fn response(&self) -> Response {
        let kind = match self.status {
            404 => "not_found_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        let error = json!({"message": self.message, "type": kind, "param": self.param, "code": self.code});
        let mut response = Response::json(self.status, &json!({ "error": error }));
        if matches!(self.status, 429 | 503) {
            response.headers.push(("Retry-After", "1".to_string()));
        }
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::EmptyPrompt => Self::field("prompt", message),
            SubmitError::TooLong { .. } => Self {
                status: 400,
                code: "context_length_exceeded",
                param: Some("prompt".to_string()),
                message,
            },
            SubmitError::QueueFull { .. } => Self::new(429, "queue_full", message),
            SubmitError::Stopped => Self::new(503, "stopping", message),
        }
    }
}

impl From<GenerateError> for ApiError {
    fn from(error: GenerateError) -> Self {
        let message = error.to_string();
        match error {
            GenerateError::NotFinite { .. } => Self::new(500, "not_finite", message),
            GenerateError::Attention(_) => Self::new(500, "attention_failed", message),
            GenerateError::Cancelled | GenerateError::Stopped => Self::new(503, "stopping", message),
        }
    }
}

impl From<TokenizerError> for ApiError {
    fn from(error: TokenizerError) -> Self {
        Self::field("prompt", error.to_string())
    }
}

impl From<&RequestError> for ApiError {
    fn from(error: &RequestError) -> Self {
        Self::new(error.status(), "bad_request", error.to_string())
    }
}
