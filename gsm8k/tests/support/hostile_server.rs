//! A small HTTP server for tests whose every answer is chosen by the test, down to cut and missing ones.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A request as the server read it.
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: String,
    /// How many completion requests came before this one.
    pub earlier: usize,
}

impl Request {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// What the server does with a request.
pub enum Reply {
    /// A whole answer: status, extra header lines, body.
    Whole(u16, Vec<String>, String),
    /// The header of a whole answer, then only this many bytes of the body, then the end of the connection.
    CutAfter(usize, String),
    /// Nothing for this long, then the end of the connection.
    Hang(Duration),
    /// The end of the connection at once.
    Close,
}

impl Reply {
    pub fn ok(body: impl Into<String>) -> Self {
        Reply::Whole(200, Vec::new(), body.into())
    }

    pub fn status(status: u16, body: &str) -> Self {
        Reply::Whole(status, Vec::new(), body.to_owned())
    }
}

type Behaviour = dyn Fn(&Request) -> Reply + Send + Sync;

/// A running server; it ends when dropped.
pub struct HostileServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
    bodies: Arc<Mutex<Vec<String>>>,
    accepting: Option<JoinHandle<()>>,
}

impl HostileServer {
    /// Starts a server that answers completion requests with `behaviour`; `/v1/models` lists `m`, `/version` says 1.
    pub fn start(behaviour: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), behaviour)
    }

    /// As [`HostileServer::start`], at an address that was in use before.
    pub fn start_at(
        address: SocketAddr,
        behaviour: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let served = Arc::new(AtomicUsize::new(0));
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let behaviour: Arc<Behaviour> = Arc::new(behaviour);
        let accepting = {
            let (stop, served, bodies) = (stop.clone(), served.clone(), bodies.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let connection = Connection {
                        stop: stop.clone(),
                        served: served.clone(),
                        bodies: bodies.clone(),
                        behaviour: behaviour.clone(),
                    };
                    std::thread::spawn(move || connection.serve(stream.unwrap()));
                }
            })
        };
        Self { address, stop, served, bodies, accepting: Some(accepting) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Completion requests read so far.
    pub fn served(&self) -> usize {
        self.served.load(Ordering::Relaxed)
    }

    /// The bodies of the completion requests, in the order of arrival.
    pub fn bodies(&self) -> Vec<String> {
        self.bodies.lock().unwrap().clone()
    }
}

impl Drop for HostileServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            accepting.join().unwrap();
        }
    }
}

/// An address where nothing listens.
pub fn refused_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// The JSON of a completion.
pub fn completion(text: &str) -> String {
    serde_json::json!({
        "id": "c", "object": "text_completion", "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": null}],
        "usage": {"prompt_tokens": 700, "completion_tokens": 40, "total_tokens": 740},
    })
    .to_string()
}

struct Connection {
    stop: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
    bodies: Arc<Mutex<Vec<String>>>,
    behaviour: Arc<Behaviour>,
}

impl Connection {
    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut stream = stream;
        while let Some(mut request) = read_request(&mut reader) {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let reply = match request.path.as_str() {
                "/v1/models" => Reply::ok("{\"data\": [{\"id\": \"m\"}]}"),
                "/version" => Reply::ok("{\"version\": \"1\"}"),
                "/v1/completions" => {
                    request.earlier = self.served.fetch_add(1, Ordering::Relaxed);
                    self.bodies.lock().unwrap().push(request.body.clone());
                    (self.behaviour)(&request)
                }
                _ => (self.behaviour)(&request),
            };
            if !write_reply(&mut stream, reply) {
                return;
            }
        }
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { method, path, headers, body: String::from_utf8(body).unwrap(), earlier: 0 })
}

/// Writes a reply; false when the connection is over.
fn write_reply(stream: &mut TcpStream, reply: Reply) -> bool {
    let head = |status: u16, extra: &[String], length: usize| {
        let extra: String = extra.iter().map(|line| format!("{line}\r\n")).collect();
        format!(
            "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{extra}Content-Length: {length}\r\n\r\n"
        )
    };
    match reply {
        Reply::Whole(status, extra, body) => {
            stream.write_all(format!("{}{body}", head(status, &extra, body.len())).as_bytes()).is_ok()
        }
        Reply::CutAfter(bytes, body) => {
            let _ = stream.write_all(head(200, &[], body.len()).as_bytes());
            let _ = stream.write_all(&body.as_bytes()[..bytes]);
            false
        }
        Reply::Hang(time) => {
            std::thread::sleep(time);
            false
        }
        Reply::Close => false,
    }
}
