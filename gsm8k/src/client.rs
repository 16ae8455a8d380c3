//! The HTTP side: one client for an OpenAI-compatible server, with retries, waits and errors that can be named.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::completion::{Completion, CompletionRequest};
use crate::outcome::Error;
use crate::timestamp;
use crate::vocabulary::named;

/// Largest response read, in bytes; an echoed long prompt with log-probabilities takes tens of megabytes.
const MAX_BODY_BYTES: u64 = 512 << 20;
/// Limit of a question about the server itself (its models, version, metrics), in seconds.
const ENQUIRY_TIMEOUT_S: f64 = 10.0;
/// Shortest wait for a throttling server, in seconds, so that `Retry-After: 0` cannot become a busy loop.
const MIN_THROTTLE_WAIT_S: f64 = 0.1;
/// How much of an error body goes into a message, in characters.
const EXCERPT_CHARS: usize = 240;

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// No connection: refused, reset before an answer, host unknown.
    Unreachable,
    /// No complete answer within the time limit.
    Timeout,
    /// The connection ended in the middle of the answer.
    Cut,
    /// 429, or 503 with `Retry-After`, for longer than the throttle budget.
    Throttled,
    /// Another 5xx status.
    ServerError,
    /// A 4xx status: this request will never work.
    Rejected,
    /// 401 or 403.
    Unauthorized,
    /// The server does not know the model, or has no completions endpoint.
    UnknownModel,
    /// A 200 whose body is not the JSON of a completion.
    BadJson,
    /// A completion whose text is null: there is no answer to score.
    NullText,
}

impl FailureKind {
    /// Every kind.
    pub const ALL: [FailureKind; 10] = [
        FailureKind::Unreachable,
        FailureKind::Timeout,
        FailureKind::Cut,
        FailureKind::Throttled,
        FailureKind::ServerError,
        FailureKind::Rejected,
        FailureKind::Unauthorized,
        FailureKind::UnknownModel,
        FailureKind::BadJson,
        FailureKind::NullText,
    ];

    /// The name used in sample logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            FailureKind::Unreachable => "unreachable",
            FailureKind::Timeout => "timeout",
            FailureKind::Cut => "cut",
            FailureKind::Throttled => "throttled",
            FailureKind::ServerError => "server-error",
            FailureKind::Rejected => "rejected",
            FailureKind::Unauthorized => "unauthorized",
            FailureKind::UnknownModel => "unknown-model",
            FailureKind::BadJson => "bad-json",
            FailureKind::NullText => "null-text",
        }
    }

    /// Whether the same request may work a moment later.
    pub fn is_transient(self) -> bool {
        use FailureKind::*;
        matches!(self, Unreachable | Timeout | Cut | Throttled | ServerError | BadJson | NullText)
    }

    /// Whether no other request can work either, so that the run should stop at once.
    pub fn is_fatal(self) -> bool {
        matches!(self, FailureKind::Unauthorized | FailureKind::UnknownModel)
    }
}

named!(FailureKind, "kind of failure");

/// A request that failed for good.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Why.
    pub kind: FailureKind,
    /// The HTTP status, when there was one.
    pub status: Option<u16>,
    /// The server's or the system's words, shortened.
    pub detail: String,
    /// How often it was tried.
    pub attempts: u32,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(status) = self.status {
            write!(f, " (HTTP {status})")?;
        }
        write!(f, ": {} [{} attempts]", self.detail, self.attempts)
    }
}

/// How long to wait and how often to try. The defaults are lm-eval's.
#[derive(Debug, Clone, PartialEq)]
pub struct RetryPolicy {
    /// Attempts per request.
    pub attempts: u32,
    /// Limit of one attempt, in seconds, from connecting to the last byte.
    pub timeout_s: f64,
    /// Shortest wait between attempts, in seconds; it doubles up to ten times itself.
    pub wait_s: f64,
    /// How long one request may spend waiting because the server asked for it, in seconds. These waits are not
    /// attempts.
    pub throttle_budget_s: f64,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { attempts: 3, timeout_s: 300.0, wait_s: 1.0, throttle_budget_s: 600.0 }
    }
}

impl RetryPolicy {
    /// The wait after the given failed attempt (from 1): tenacity's `wait_exponential(0.5, min=1, max=10)`.
    fn wait_after(&self, attempt: u32) -> f64 {
        let exponential = 0.5 * 2f64.powi(attempt.saturating_sub(1).min(16) as i32);
        self.wait_s * exponential.clamp(1.0, 10.0)
    }
}

/// A client for one server. Threads share it; connections are kept alive.
pub struct Client {
    agent: ureq::Agent,
    completions_url: String,
    root_url: String,
    api_key: Option<String>,
    policy: RetryPolicy,
    gauges: Gauges,
}

/// What threads report while they work.
#[derive(Debug, Default)]
pub struct Gauges {
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    failures_in_a_row: AtomicUsize,
    stop: AtomicBool,
}

impl Gauges {
    /// The largest number of requests that were waiting for the server at the same time.
    pub fn most_in_flight(&self) -> usize {
        self.most_in_flight.load(Ordering::Relaxed)
    }

    /// Failed attempts since the last answer, over all threads.
    pub fn failures_in_a_row(&self) -> usize {
        self.failures_in_a_row.load(Ordering::Relaxed)
    }

    /// Asks every thread to give up its waits.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether [`Gauges::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

impl Client {
    /// A client for `base_url`: the server's root, its `/v1`, or the whole completions address.
    ///
    /// # Errors
    /// [`Error::Usage`] for an address that is not `http://…` (or `https://…` with feature `tls`).
    pub fn new(base_url: &str, api_key: Option<String>, policy: RetryPolicy) -> Result<Self, Error> {
        let root_url = root_of(base_url)?;
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(Duration::from_secs_f64(policy.timeout_s)))
            .http_status_as_error(false)
            .proxy(None) // the server under test is addressed directly, as lm-eval does
            .max_idle_connections(1024)
            .max_idle_connections_per_host(1024)
            .build();
        Ok(Self {
            agent: config.new_agent(),
            completions_url: format!("{root_url}/v1/completions"),
            root_url,
            api_key,
            policy,
            gauges: Gauges::default(),
        })
    }

    /// The server's address without `/v1/completions`.
    pub fn root_url(&self) -> &str {
        &self.root_url
    }

    /// What the threads using this client report.
    pub fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// Sends one completion request, trying again as the policy says.
    ///
    /// Returns the completion and how many attempts it took.
    ///
    /// # Errors
    /// The last failure, once the attempts or the throttle budget are used up or trying again is pointless.
    pub fn complete(&self, request: &CompletionRequest) -> Result<(Completion, u32), Failure> {
        let body = serde_json::to_vec(request).expect("a request is always JSON");
        let mut attempt = 0;
        let mut throttled_s = 0.0;
        loop {
            attempt += 1;
            let (failure, retry_after_s) = match self.attempt(&body) {
                Ok(completion) => {
                    self.gauges.failures_in_a_row.store(0, Ordering::Relaxed);
                    return Ok((completion, attempt));
                }
                Err(failed) => failed,
            };
            let failure = Failure { attempts: attempt, ..failure };
            if let Some(wait_s) = retry_after_s {
                let wait_s = wait_s.max(MIN_THROTTLE_WAIT_S);
                throttled_s += wait_s;
                if throttled_s > self.policy.throttle_budget_s || !self.pause(wait_s) {
                    return Err(failure);
                }
                attempt -= 1;
                continue;
            }
            self.gauges.failures_in_a_row.fetch_add(1, Ordering::Relaxed);
            let exhausted = attempt >= self.policy.attempts || !failure.kind.is_transient();
            if exhausted || !self.pause(self.policy.wait_after(attempt)) {
                return Err(failure);
            }
        }
    }

    /// Fetches a path below the server's root, once, as text.
    ///
    /// # Errors
    /// A [`Failure`] with the status or the connection's error.
    pub fn get(&self, path: &str) -> Result<String, Failure> {
        let limit_s = self.policy.timeout_s.min(ENQUIRY_TIMEOUT_S);
        let request = self
            .agent
            .get(format!("{}{path}", self.root_url))
            .config()
            .timeout_global(Some(Duration::from_secs_f64(limit_s)))
            .build();
        let request = match &self.api_key {
            Some(key) => request.header("Authorization", format!("Bearer {key}")),
            None => request,
        };
        read_response(request.call()).map(|(_, body)| body).map_err(|(failure, _)| failure)
    }

    /// Posts JSON to a path below the server's root, once, and returns the JSON answer.
    ///
    /// # Errors
    /// A [`Failure`] with the status, the connection's error, or [`FailureKind::BadJson`].
    pub fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        let url = format!("{}{path}", self.root_url);
        let (_, text) = self.send(&url, body.to_string().as_bytes()).map_err(|(failure, _)| failure)?;
        serde_json::from_str(&text).map_err(|why| failure(FailureKind::BadJson, None, why.to_string()))
    }

    fn attempt(&self, body: &[u8]) -> Result<Completion, (Failure, Option<f64>)> {
        let now = self.gauges.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.gauges.most_in_flight.fetch_max(now, Ordering::Relaxed);
        let started = Instant::now();
        let answer = self.send(&self.completions_url, body);
        self.gauges.in_flight.fetch_sub(1, Ordering::Relaxed);
        let (status, text) = answer?;
        Completion::parse(&text, started.elapsed().as_secs_f64())
            .map_err(|(kind, detail)| (failure(kind, Some(status), detail), None))
    }

    fn send(&self, url: &str, body: &[u8]) -> Result<(u16, String), (Failure, Option<f64>)> {
        let key = self.api_key.as_deref().unwrap_or("");
        let request = self
            .agent
            .post(url)
            .header("Content-Type", "application/json")
            .header("Authorization", format!("Bearer {key}"));
        read_response(request.send(body))
    }

    /// Waits in small steps; false when the run was stopped meanwhile.
    fn pause(&self, seconds: f64) -> bool {
        let until = Instant::now() + Duration::from_secs_f64(seconds.max(0.0));
        while !self.gauges.is_stopped() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
        false
    }
}

fn root_of(base_url: &str) -> Result<String, Error> {
    let trimmed = base_url.trim().trim_end_matches('/');
    let root = ["/v1/completions", "/completions", "/v1"]
        .iter()
        .find_map(|suffix| trimmed.strip_suffix(suffix))
        .unwrap_or(trimmed)
        .trim_end_matches("/v1");
    if root.starts_with("https://") && !cfg!(feature = "tls") {
        return Err(Error::Usage(format!(
            "{base_url}: this build speaks plain HTTP only; build it with `--features tls` for HTTPS"
        )));
    }
    if !root.starts_with("http://") && !root.starts_with("https://") {
        return Err(Error::Usage(format!(
            "{base_url}: expected an address like http://127.0.0.1:8000 or http://host:8000/v1"
        )));
    }
    Ok(root.to_owned())
}

type Response = ureq::http::Response<ureq::Body>;

/// The status and text of a 2xx answer; otherwise the failure and, when the server asked for it, the wait.
fn read_response(answer: Result<Response, ureq::Error>) -> Result<(u16, String), (Failure, Option<f64>)> {
    let mut response = answer.map_err(|why| (transport_failure(&why, FailureKind::Unreachable), None))?;
    let status = response.status().as_u16();
    let retry_after = response
        .headers()
        .get("retry-after")
        .and_then(|value| value.to_str().ok())
        .and_then(|value| retry_after_s(value, SystemTime::now()));
    let bytes = response
        .body_mut()
        .with_config()
        .limit(MAX_BODY_BYTES)
        .read_to_vec()
        .map_err(|why| (transport_failure(&why, FailureKind::Cut), None))?;
    let text = String::from_utf8(bytes)
        .map_err(|_| (failure(FailureKind::BadJson, Some(status), "the answer is not UTF-8".into()), None))?;
    if (200..300).contains(&status) {
        return Ok((status, text));
    }
    let kind = kind_of_status(status, &text);
    let wait = match (status, retry_after) {
        (429, None) => Some(1.0),
        (429 | 503, wait) => wait,
        _ => None,
    };
    let kind = if wait.is_some() { FailureKind::Throttled } else { kind };
    Err((failure(kind, Some(status), excerpt(&text)), wait))
}

fn kind_of_status(status: u16, body: &str) -> FailureKind {
    let body = body.to_lowercase();
    let names_model = body.contains("model") && (body.contains("not exist") || body.contains("not found"));
    match status {
        401 | 403 => FailureKind::Unauthorized,
        404 => FailureKind::UnknownModel,
        400 | 422 if names_model => FailureKind::UnknownModel,
        408 => FailureKind::Timeout,
        400..=499 => FailureKind::Rejected,
        _ => FailureKind::ServerError,
    }
}

/// Sorts an error of the transport; `otherwise` is what a broken connection means at this point.
fn transport_failure(why: &ureq::Error, otherwise: FailureKind) -> Failure {
    let kind = match why {
        ureq::Error::Timeout(_) => FailureKind::Timeout,
        ureq::Error::Io(io) if io.kind() == io::ErrorKind::TimedOut => FailureKind::Timeout,
        ureq::Error::Io(io) if io.kind() == io::ErrorKind::UnexpectedEof => FailureKind::Cut,
        ureq::Error::Protocol(_) => FailureKind::Cut,
        _ => otherwise,
    };
    failure(kind, None, why.to_string())
}

fn failure(kind: FailureKind, status: Option<u16>, detail: String) -> Failure {
    Failure { kind, status, detail, attempts: 1 }
}

/// The server's own message when the body is the usual error JSON, else the body's beginning.
fn excerpt(body: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let message = parsed.as_ref().and_then(|json| {
        [&json["error"]["message"], &json["message"], &json["detail"], &json["error"]]
            .into_iter()
            .find_map(|value| value.as_str())
    });
    let text = message.unwrap_or(body).trim();
    if text.is_empty() {
        return "no message".to_owned();
    }
    text.chars().take(EXCERPT_CHARS).collect()
}

/// Seconds to wait for a `Retry-After` header: a number of seconds or an HTTP date (RFC 9110, 10.2.3).
fn retry_after_s(value: &str, now: SystemTime) -> Option<f64> {
    if let Ok(seconds) = value.trim().parse::<f64>() {
        return (seconds.is_finite() && seconds >= 0.0).then_some(seconds);
    }
    let at = timestamp::parse_http_date(value.trim())?;
    let now = now.duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    Some((at as f64 - now).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_failure_is_found_by_name_and_fatal_ones_are_not_retried() {
        for kind in FailureKind::ALL {
            assert_eq!(kind.name().parse::<FailureKind>(), Ok(kind));
            assert!(!(kind.is_fatal() && kind.is_transient()), "{kind}");
        }
    }

    #[test]
    fn root_v1_and_the_whole_address_mean_the_same_server() {
        for url in
            ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/completions"]
        {
            assert_eq!(root_of(url).unwrap(), "http://h:1", "{url}");
        }
        assert_eq!(root_of("http://h/llm/v1").unwrap(), "http://h/llm");
        assert!(matches!(root_of("h:8000"), Err(Error::Usage(_))));
        #[cfg(not(feature = "tls"))]
        assert!(root_of("https://h").unwrap_err().to_string().contains("--features tls"));
    }

    #[test]
    fn waits_grow_like_those_of_lm_eval() {
        let policy = RetryPolicy::default();
        let waits: Vec<f64> = (1..=7).map(|attempt| policy.wait_after(attempt)).collect();
        assert_eq!(waits, [1.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]);
    }

    #[test]
    fn retry_after_is_read_as_seconds_and_as_a_date() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_770);
        assert_eq!(retry_after_s("2", now), Some(2.0));
        assert_eq!(retry_after_s("Sun, 06 Nov 1994 08:49:37 GMT", now), Some(7.0));
        assert_eq!(retry_after_s("Sun, 06 Nov 1994 08:49:20 GMT", now), Some(0.0));
        assert_eq!(retry_after_s("soon", now), None);
    }

    #[test]
    fn statuses_are_sorted_by_what_can_be_done_about_them() {
        assert_eq!(kind_of_status(404, "{}"), FailureKind::UnknownModel);
        assert_eq!(kind_of_status(400, "The model `x` does not exist"), FailureKind::UnknownModel);
        assert_eq!(kind_of_status(400, "context too long"), FailureKind::Rejected);
        assert_eq!(kind_of_status(500, ""), FailureKind::ServerError);
        assert_eq!(excerpt("{\"error\": {\"message\": \"no\"}}"), "no");
        assert_eq!(excerpt(""), "no message");
    }
}
