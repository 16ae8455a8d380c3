//! One client connection: requests in, responses out, and a look whether the client is still there.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::message::{Limits, Request, RequestError, Response, parse_head};

/// How long a connection may stay silent between requests.
const IDLE: Duration = Duration::from_secs(75);

/// How long a request may take to arrive, from its first byte.
const ARRIVAL: Duration = Duration::from_secs(30);

/// How long a response may wait for the client to read.
const WRITE: Duration = Duration::from_secs(30);

/// How often a silent connection looks whether the server is stopping.
const TICK: Duration = Duration::from_millis(100);

/// A client connection.
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    limits: Limits,
}

/// What came over a connection.
#[derive(Debug)]
pub enum Incoming {
    /// A whole request.
    Request(Request),
    /// A request that can't be read.
    Bad(RequestError),
    /// Nothing more: closed, silent for too long, or the server is stopping.
    End,
}

enum Filled {
    Some,
    Closed,
    Silent,
}

impl Connection {
    /// Wraps an accepted stream.
    ///
    /// # Errors
    /// If timeouts can't be set.
    pub fn new(stream: TcpStream, limits: Limits) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(WRITE))?;
        Ok(Self { stream, buffer: Vec::new(), limits })
    }

    /// Waits for the next request; `stopping` ends the wait between requests.
    pub fn next(&mut self, stopping: impl Fn() -> bool) -> Incoming {
        let opened = Instant::now();
        while self.buffer.is_empty() {
            match self.fill() {
                Filled::Some => {}
                Filled::Closed => return Incoming::End,
                Filled::Silent if stopping() || opened.elapsed() > IDLE => return Incoming::End,
                Filled::Silent => {}
            }
        }
        match self.read_request(Instant::now() + ARRIVAL) {
            Ok(Some(request)) => Incoming::Request(request),
            Ok(None) => Incoming::End,
            Err(error) => Incoming::Bad(error),
        }
    }

    /// Sends a response.
    ///
    /// # Errors
    /// If the client is gone or does not read.
    pub fn send(&mut self, response: &Response, close: bool, head_only: bool) -> std::io::Result<()> {
        self.stream.write_all(&response.bytes(close, head_only))?;
        self.stream.flush()
    }

    /// Sends a last response although unread input may be left: reads on for a moment, since closing over unread input
    /// would reset the connection before the client has seen the answer.
    pub fn send_last(&mut self, response: &Response) {
        if self.send(response, true, false).is_err()
            || self.stream.shutdown(std::net::Shutdown::Write).is_err()
        {
            return;
        }
        let deadline = Instant::now() + Duration::from_secs(2);
        let mut chunk = [0; 16 * 1024];
        while Instant::now() < deadline {
            match self.stream.read(&mut chunk) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if timed_out(&error) => {}
                Err(_) => return,
            }
        }
    }

    /// Whether the client has closed the connection.
    pub fn client_is_gone(&self) -> bool {
        if self.stream.set_nonblocking(true).is_err() {
            return true;
        }
        let peeked = self.stream.peek(&mut [0]);
        let restored = self.stream.set_nonblocking(false);
        match peeked {
            Ok(count) => count == 0 || restored.is_err(),
            Err(error) => !timed_out(&error) || restored.is_err(),
        }
    }

    /// Reads one request until `deadline`; `None` if the client closed in the middle of it.
    fn read_request(&mut self, deadline: Instant) -> Result<Option<Request>, RequestError> {
        let mut searched = 0;
        let head_end = loop {
            let found = self.buffer[searched..].windows(4).position(|window| window == b"\r\n\r\n");
            if let Some(at) = found {
                break searched + at;
            }
            if self.buffer.len() > self.limits.head_bytes {
                return Err(RequestError::HeadTooLarge(self.limits.head_bytes));
            }
            searched = self.buffer.len().saturating_sub(3);
            if !self.fill_before(deadline)? {
                return Ok(None);
            }
        };
        if head_end > self.limits.head_bytes {
            return Err(RequestError::HeadTooLarge(self.limits.head_bytes));
        }
        let head = parse_head(&self.buffer[..head_end], self.limits)?;
        self.buffer.drain(..head_end + 4);
        if head.expects_continue && self.buffer.len() < head.body_bytes {
            // A client that is gone shows itself at the next read.
            let _ = self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        while self.buffer.len() < head.body_bytes {
            if !self.fill_before(deadline)? {
                return Ok(None);
            }
        }
        let body = self.buffer.drain(..head.body_bytes).collect();
        Ok(Some(Request { body, ..head.request }))
    }

    fn fill_before(&mut self, deadline: Instant) -> Result<bool, RequestError> {
        loop {
            match self.fill() {
                Filled::Some => return Ok(true),
                Filled::Closed => return Ok(false),
                Filled::Silent => {}
            }
            if Instant::now() > deadline {
                return Err(RequestError::Timeout);
            }
        }
    }

    fn fill(&mut self) -> Filled {
        let mut chunk = [0; 16 * 1024];
        match self.stream.read(&mut chunk) {
            Ok(0) => Filled::Closed,
            Ok(count) => {
                self.buffer.extend_from_slice(&chunk[..count]);
                Filled::Some
            }
            Err(error) if timed_out(&error) => Filled::Silent,
            Err(_) => Filled::Closed,
        }
    }
}

fn timed_out(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
