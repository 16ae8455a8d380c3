//! A plain HTTP client on a TCP stream, which shows what really went over the wire.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A status, the headers in lower case, and the body.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The `error` object of an answer with this status.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        let error = self.json()["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string(), "{self:?}");
        error
    }
}

/// A connection that is kept.
pub struct Client(pub TcpStream);

impl Client {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        Self(stream)
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the server reads");
    }

    pub fn get(&mut self, path: &str) -> Answer {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes());
        self.answer()
    }

    pub fn post(&mut self, path: &str, body: &str) -> Answer {
        self.send_post(path, body);
        self.answer()
    }

    pub fn send_post(&mut self, path: &str, body: &str) {
        let length = body.len();
        self.send(
            format!("POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n{body}")
                .as_bytes(),
        );
    }

    /// Reads one answer, whose length its head tells.
    pub fn answer(&mut self) -> Answer {
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).expect("an answer");
            bytes.push(byte[0]);
        }
        let head = String::from_utf8(bytes).expect("a text head").to_ascii_lowercase();
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a status");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
        let mut body = vec![0; length.parse().expect("a number")];
        self.0.read_exact(&mut body).expect("a whole body");
        Answer { status, head, body: String::from_utf8(body).expect("a text body") }
    }

    /// Whether the server has closed the connection.
    pub fn closed(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0))
    }
}

/// One completion over a connection of its own; the answer must be 200.
pub fn complete(address: SocketAddr, body: &Value) -> Value {
    let answer = Client::connect(address).post("/v1/completions", &body.to_string());
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// The value of the first sample of a metric whose line contains `label`.
pub fn metric(address: SocketAddr, name: &str, label: &str) -> f64 {
    let page = Client::connect(address).get("/metrics").body;
    let line = page.lines().find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label));
    let line = line.unwrap_or_else(|| panic!("no {name} with {label} in\n{page}"));
    line.rsplit(' ').next().expect("a value").parse().expect("a number")
}

/// Waits until `done` holds.
pub fn wait_until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
