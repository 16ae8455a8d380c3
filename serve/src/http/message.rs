//! One request and one response of HTTP/1.1.

use std::fmt::Write;

use thiserror::Error;

/// Sizes that a request may have.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Request line and headers, in bytes.
    pub head_bytes: usize,
    /// Body, in bytes.
    pub body_bytes: usize,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// `GET`, `POST`, …
    pub method: String,
    /// Path without query.
    pub path: String,
    /// Header names in lower case, with their values.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
    /// Whether the client wants the connection closed after the answer.
    pub close: bool,
}

/// Why a request can't be read. The connection is closed after the answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// Not HTTP/1.x.
    #[error("malformed HTTP request: {0}")]
    Malformed(&'static str),
    /// A body of unknown length.
    #[error("send the body with Content-Length; chunked bodies are not supported")]
    LengthRequired,
    /// Head too large.
    #[error("request line and headers are longer than {0} bytes")]
    HeadTooLarge(usize),
    /// Body too large.
    #[error("the body has {found} bytes; this server takes {limit}")]
    BodyTooLarge {
        /// Announced length.
        found: u64,
        /// Limit.
        limit: usize,
    },
    /// The client took too long to send it.
    #[error("the request was not complete in time")]
    Timeout,
}

impl RequestError {
    /// The status that answers it.
    pub fn status(&self) -> u16 {
        match self {
            Self::Malformed(_) => 400,
            Self::LengthRequired => 411,
            Self::HeadTooLarge(_) => 431,
            Self::BodyTooLarge { .. } => 413,
            Self::Timeout => 408,
        }
    }
}

/// A request whose body is still to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The request, with an empty body.
    pub request: Request,
    /// Bytes of its body.
    pub body_bytes: usize,
    /// Whether the client waits for `100 Continue`.
    pub expects_continue: bool,
}

/// Parses a head: all bytes up to the empty line, without it.
///
/// # Errors
/// [`RequestError`].
pub fn parse_head(bytes: &[u8], limits: Limits) -> Result<Head, RequestError> {
    let text = std::str::from_utf8(bytes).map_err(|_| RequestError::Malformed("headers are not UTF-8"))?;
    let mut lines = text.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(RequestError::Malformed("the request line is not `METHOD PATH VERSION`"));
    };
    if !version.starts_with("HTTP/1.") {
        return Err(RequestError::Malformed("the version is not HTTP/1.x"));
    }
    if method.is_empty() || !target.starts_with('/') {
        return Err(RequestError::Malformed("the request line has no method or no path"));
    }
    let mut headers = Vec::new();
    for line in lines {
        let (name, value) =
            line.split_once(':').ok_or(RequestError::Malformed("a header without a colon"))?;
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(RequestError::Malformed("a header name with spaces"));
        }
        headers.push((name.to_ascii_lowercase(), value.trim().to_string()));
    }
    let path = target.split('?').next().unwrap_or_default().to_string();
    let mut request = Request { method: method.to_string(), path, headers, body: Vec::new(), close: false };
    let connection = request.header("connection").unwrap_or_default().to_ascii_lowercase();
    request.close = match version {
        "HTTP/1.0" => connection != "keep-alive",
        _ => connection.split(',').any(|word| word.trim() == "close"),
    };
    let body_bytes = body_bytes(&request, limits)?;
    let expects_continue =
        request.header("expect").is_some_and(|value| value.eq_ignore_ascii_case("100-continue"));
    Ok(Head { request, body_bytes, expects_continue })
}

fn body_bytes(request: &Request, limits: Limits) -> Result<usize, RequestError> {
    if request.header("transfer-encoding").is_some() {
        return Err(RequestError::LengthRequired);
    }
    let mut lengths =
        request.headers.iter().filter(|(name, _)| name == "content-length").map(|(_, value)| value);
    let Some(first) = lengths.next() else {
        return if request.method == "POST" { Err(RequestError::LengthRequired) } else { Ok(0) };
    };
    // Two lengths that differ are how requests are smuggled past a proxy.
    if lengths.any(|other| other != first) || !first.bytes().all(|b| b.is_ascii_digit()) {
        return Err(RequestError::Malformed("Content-Length is not one number"));
    }
    let found: u64 =
        first.parse().map_err(|_| RequestError::Malformed("Content-Length is not one number"))?;
    if found > limits.body_bytes as u64 {
        return Err(RequestError::BodyTooLarge { found, limit: limits.body_bytes });
    }
    Ok(found as usize)
}

impl Request {
    /// The first header of a name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }
}

/// A response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// `Content-Type`.
    pub content_type: &'static str,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
    /// Body.
    pub body: Vec<u8>,
}

impl Response {
    /// A JSON response.
    pub fn json(status: u16, body: &serde_json::Value) -> Self {
        let body = body.to_string().into_bytes();
        Self { status, content_type: "application/json", headers: Vec::new(), body }
    }

    /// A text response with a content type.
    pub fn text(content_type: &'static str, body: String) -> Self {
        Self { status: 200, content_type, headers: Vec::new(), body: body.into_bytes() }
    }

    /// The bytes to send; `head_only` leaves the body out (for `HEAD`).
    pub fn bytes(&self, close: bool, head_only: bool) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {} {}\r\n", self.status, phrase(self.status));
        let connection = if close { "close" } else { "keep-alive" };
        // Writing to a string can't fail.
        let _ = write!(
            head,
            "Content-Type: {}\r\nContent-Length: {}\r\nConnection: {connection}\r\n",
            self.content_type,
            self.body.len()
        );
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        if !head_only {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        411 => "Length Required",
        413 => "Content Too Large",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        _ => "Unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { head_bytes: 1000, body_bytes: 100 };

    fn head(text: &str) -> Result<Head, RequestError> {
        parse_head(text.as_bytes(), LIMITS)
    }

    #[test]
    fn a_request_is_taken_apart() {
        let text =
            "POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nCONTENT-length: 12\r\nExpect: 100-Continue";
        let head = head(text).expect("well-formed");
        assert_eq!((head.request.method.as_str(), head.request.path.as_str()), ("POST", "/v1/completions"));
        assert_eq!((head.body_bytes, head.expects_continue, head.request.close), (12, true, false));
        assert_eq!(head.request.header("host"), Some("a"));
    }

    #[test]
    fn a_connection_closes_when_the_client_says_so() {
        let close = |text: &str| head(text).expect("well-formed").request.close;
        assert!(close("GET / HTTP/1.1\r\nConnection: Close"));
        assert!(close("GET / HTTP/1.0"));
        assert!(!close("GET / HTTP/1.0\r\nConnection: keep-alive"));
        assert!(!close("GET / HTTP/1.1"));
    }

    #[test]
    fn what_is_not_http_is_refused() {
        for text in
            ["", "GET /", "GET  / HTTP/1.1", "GET / HTTP/2", "GET x HTTP/1.1", "GET / HTTP/1.1\r\nno colon"]
        {
            assert!(matches!(head(text), Err(RequestError::Malformed(_))), "{text:?}");
        }
        assert!(matches!(parse_head(b"GET / HTTP/1.1\r\nA: \xff", LIMITS), Err(RequestError::Malformed(_))));
    }

    #[test]
    fn a_body_needs_one_length_within_the_limit() {
        let post = |headers: &str| head(&format!("POST / HTTP/1.1\r\n{headers}")).map(|head| head.body_bytes);
        assert_eq!(post("A: b"), Err(RequestError::LengthRequired));
        assert_eq!(post("Transfer-Encoding: chunked"), Err(RequestError::LengthRequired));
        assert_eq!(post("Content-Length: 101"), Err(RequestError::BodyTooLarge { found: 101, limit: 100 }));
        assert_eq!(post("Content-Length: 7\r\nContent-Length: 7"), Ok(7));
        for bad in [
            "Content-Length: 7\r\nContent-Length: 8",
            "Content-Length: -1",
            "Content-Length: 99999999999999999999",
        ] {
            assert!(matches!(post(bad), Err(RequestError::Malformed(_))), "{bad}");
        }
    }

    #[test]
    fn a_response_carries_its_length() {
        let bytes = Response::json(404, &serde_json::json!({"a": 1})).bytes(true, false);
        let text = String::from_utf8(bytes).expect("text");
        let expected = "HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\
                        Connection: close\r\n\r\n{\"a\":1}";
        assert_eq!(text, expected);
    }
}
