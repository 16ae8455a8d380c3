//! The server as a server: errors, limits, connections, cancellation and stopping, over raw sockets.

mod support;

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::json;
use shardcheck_serve::service::{Service, ServiceConfig};
use support::client::{Client, complete, metric, wait_until};
use support::tiny::Tiny;
use tempfile::NamedTempFile;

fn served(change: impl FnOnce(&mut ServiceConfig)) -> (Service, NamedTempFile) {
    let file = Tiny::new(5).file();
    let mut config = ServiceConfig::new(file.path().to_path_buf());
    config.model_name = "tiny".to_string();
    config.block_tokens = 4;
    config.cache_tokens = 32_768; // a whole context of the tiny model
    config.engine.threads = 1;
    change(&mut config);
    (Service::start(config).expect("a free port"), file)
}

/// A request that runs for as long as the context allows.
fn long() -> String {
    json!({"prompt": "go on", "max_tokens": 29_000, "temperature": 0, "ignore_eos": true}).to_string()
}

fn running(address: SocketAddr) -> f64 {
    metric(address, "vllm:num_requests_running", "")
}

#[test]
fn a_kept_connection_serves_one_request_after_another() {
    let (service, _file) = served(|_| {});
    let mut client = Client::connect(service.address());
    assert_eq!(client.get("/health").status, 200);
    let models = client.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], json!("tiny"));
    assert_eq!(models["data"][0]["max_model_len"], json!(30_000));
    let tokens = client.post("/tokenize", r#"{"prompt": "the inn", "return_token_strs": true}"#).json();
    assert_eq!(tokens["token_strs"], json!(["t", "he", " ", "in", "n"]));
    assert_eq!(tokens["count"], json!(5));
    let text = client.post("/detokenize", &json!({"tokens": tokens["tokens"]}).to_string()).json();
    assert_eq!(text["prompt"], json!("the inn"));
    assert!(
        client.get("/version").json()["version"].as_str().expect("text").starts_with("shardcheck-serve ")
    );
    let answer = client.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 1}"#);
    assert!(answer.head.contains("connection: keep-alive"), "{answer:?}");
}

#[test]
fn two_requests_in_one_packet_and_one_in_many_are_all_read() {
    let (service, _file) = served(|_| {});
    let mut client = Client::connect(service.address());
    client.send(b"GET /health HTTP/1.1\r\n\r\nGET /version?x HTTP/1.1\r\n\r\n");
    assert_eq!((client.answer().status, client.answer().status), (200, 200));
    let body = r#"{"prompt": "a", "max_tokens": 1}"#;
    let request = format!("POST /v1/completions HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    for piece in request.as_bytes().chunks(7) {
        client.send(piece);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(client.answer().status, 200);
    client.send(
        format!("POST /tokenize HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len())
            .as_bytes(),
    );
    let mut interim = [0; 25];
    std::io::Read::read_exact(&mut client.0, &mut interim).expect("an interim answer");
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.send(body.as_bytes());
    assert_eq!(client.answer().status, 200);
}

#[test]
fn bad_requests_get_errors_that_name_the_field() {
    let (service, _file) = served(|_| {});
    let mut client = Client::connect(service.address());
    let cases = [
        ("{", None, "not valid JSON"),
        ("[]", None, "must be a JSON object"),
        ("{}", Some("prompt"), "`prompt` is missing"),
        (r#"{"prompt": 3}"#, Some("prompt"), "must be a string, a list"),
        (r#"{"prompt": []}"#, Some("prompt"), "1 to 256 items"),
        (r#"{"prompt": ""}"#, Some("prompt"), "the prompt is empty"),
        (r#"{"prompt": [1, "a"]}"#, Some("prompt"), "where a token id should be"),
        (r#"{"prompt": [999999]}"#, Some("prompt"), "outside the vocabulary"),
        (r#"{"prompt": "a", "max_tokens": -1}"#, Some("max_tokens"), "integer from 0"),
        (r#"{"prompt": "a", "max_tokens": 30000}"#, Some("prompt"), "maximum context length is 30000"),
        (r#"{"prompt": "a", "temperature": -0.1}"#, Some("temperature"), "number from 0"),
        (r#"{"prompt": "a", "top_p": 0}"#, Some("top_p"), "above 0"),
        (r#"{"prompt": "a", "logprobs": 21}"#, Some("logprobs"), "0 to 20"),
        (r#"{"prompt": "a", "seed": 0.5}"#, Some("seed"), "integer"),
        (r#"{"prompt": "a", "stop": ["x", ""]}"#, Some("stop"), "must not be empty"),
        (r#"{"prompt": "a", "stop": 3}"#, Some("stop"), "string or a list"),
        (r#"{"prompt": "a", "stream": true}"#, Some("stream"), "does not stream"),
        (r#"{"prompt": "a", "n": 2}"#, Some("n"), "does not support `n` = 2"),
        (r#"{"prompt": "a", "logit_bias": {"1": 5}}"#, Some("logit_bias"), "does not support"),
    ];
    for (body, param, message) in cases {
        let error = client.post("/v1/completions", body).error(400);
        assert_eq!(error["param"], json!(param), "{body}");
        assert!(error["message"].as_str().expect("text").contains(message), "{body}: {error}");
        assert_eq!(error["type"], json!("invalid_request_error"));
    }
    let harmless =
        r#"{"prompt": "a", "n": 1, "logit_bias": {}, "presence_penalty": 0.0, "user": "x", "stop": null}"#;
    assert_eq!(client.post("/v1/completions", harmless).status, 200);
    let error = client.post("/v1/completions", r#"{"model": "gpt-9", "prompt": "a"}"#).error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    assert!(
        client.get("/v1/nothing").error(404)["message"]
            .as_str()
            .expect("text")
            .contains("POST /v1/completions")
    );
    assert_eq!(client.get("/v1/completions").error(405)["code"], json!("method_not_allowed"));
}

#[test]
fn what_is_not_http_or_too_large_is_answered_and_closed() {
    let (service, _file) = served(|config| config.max_body_bytes = 1000);
    let cases = [
        ("nonsense\r\n\r\n".to_string(), 400),
        ("POST /tokenize HTTP/1.1\r\n\r\n".to_string(), 411),
        ("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_string(), 411),
        (format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(20_000)), 431),
        (format!("POST /tokenize HTTP/1.1\r\nContent-Length: 500000\r\n\r\n{}", "x".repeat(500_000)), 413),
    ];
    for (request, status) in cases {
        let mut client = Client::connect(service.address());
        client.send(request.as_bytes());
        let answer = client.answer();
        answer.error(status);
        assert!(answer.head.contains("connection: close"));
        client.0.shutdown(Shutdown::Write).expect("still open");
        assert!(client.closed());
    }
}

#[test]
fn a_client_that_says_close_or_sends_half_a_request_is_let_go() {
    let (service, _file) = served(|_| {});
    let mut client = Client::connect(service.address());
    client.send(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n");
    assert!(client.answer().head.contains("connection: close") && client.closed());
    let mut half = Client::connect(service.address());
    half.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{\"prompt\"");
    half.0.shutdown(Shutdown::Write).expect("still open");
    assert!(half.closed());
    assert_eq!(Client::connect(service.address()).get("/health").status, 200);
}

#[test]
fn a_request_whose_client_went_away_is_dropped() {
    let (service, _file) = served(|_| {});
    let address = service.address();
    let mut client = Client::connect(address);
    client.send_post("/v1/completions", &long());
    wait_until("it runs", || running(address) == 1.0);
    drop(client);
    wait_until("it is dropped", || running(address) == 0.0);
    assert_eq!(metric(address, "vllm:request_success_total", "abort"), 1.0);
    assert_eq!(metric(address, "vllm:request_success_total", "length"), 0.0);
    assert_eq!(metric(address, "vllm:kv_cache_usage_perc", ""), 0.0);
}

#[test]
fn a_full_queue_answers_429_and_says_when_to_come_back() {
    let (service, _file) = served(|config| {
        config.engine.max_sequences = 1;
        config.engine.max_waiting = 1;
    });
    let address = service.address();
    let mut busy = Client::connect(address);
    busy.send_post("/v1/completions", &long());
    wait_until("the first runs", || running(address) == 1.0);
    let mut queued = Client::connect(address);
    queued.send_post("/v1/completions", r#"{"prompt": "a", "max_tokens": 1}"#);
    wait_until("the second waits", || metric(address, "vllm:num_requests_waiting", "") == 1.0);
    let refused = Client::connect(address).post("/v1/completions", r#"{"prompt": "a"}"#);
    assert_eq!(refused.error(429)["code"], json!("queue_full"));
    assert!(refused.head.contains("retry-after: 1"), "{refused:?}");
    drop(busy);
    assert_eq!(queued.answer().status, 200, "the one that waited gets its turn");
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    let (service, _file) = served(|config| config.max_connections = 2);
    let mut kept: Vec<Client> = (0..2).map(|_| Client::connect(service.address())).collect();
    kept.iter_mut().for_each(|client| assert_eq!(client.get("/health").status, 200));
    let mut extra = Client::connect(service.address());
    assert_eq!(extra.answer().error(503)["code"], json!("overloaded"));
    drop((kept, extra));
    let answered = || {
        let mut stream = TcpStream::connect(service.address()).expect("it listens");
        stream.write_all(b"GET /health HTTP/1.1\r\n\r\n").expect("it reads");
        Client(stream).answer().status == 200
    };
    wait_until("a place is free", answered);
}

#[test]
fn stopping_lets_a_request_end_and_takes_no_more() {
    let (service, _file) = served(|_| {});
    let address = service.address();
    let mut idle = Client::connect(address);
    assert_eq!(idle.get("/health").status, 200);
    let mut client = Client::connect(address);
    client.send_post(
        "/v1/completions",
        &json!({"prompt": "go on", "max_tokens": 2500, "ignore_eos": true}).to_string(),
    );
    wait_until("it runs", || running(address) == 1.0);
    assert_eq!(service.stop(Duration::from_secs(60)), 0, "nothing is cut");
    let answer = client.answer();
    assert_eq!(answer.json()["usage"]["completion_tokens"], json!(2500));
    assert!(answer.head.contains("connection: close"));
    assert!(client.closed() && idle.closed());
    assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
}

#[test]
fn stopping_without_grace_fails_what_runs_with_an_answer() {
    let (service, _file) = served(|_| {});
    let address = service.address();
    let mut client = Client::connect(address);
    client.send_post("/v1/completions", &long());
    wait_until("it runs", || running(address) == 1.0);
    assert!(service.stop(Duration::ZERO) >= 1, "the request was cut");
    assert_eq!(client.answer().error(503)["code"], json!("stopping"));
}

#[test]
fn logits_that_are_not_finite_are_an_error_and_not_a_token() {
    let mut tiny = Tiny::new(5);
    let huge = vec![f32::MAX; support::tiny::WIDTH].iter().flat_map(|x| x.to_le_bytes()).collect();
    let encoding = shardcheck_serve::encoding::Encoding::F32;
    tiny.writer.tensor("blk.0.ffn_norm.weight", &[support::tiny::WIDTH], encoding, huge);
    let file = tiny.file();
    let service = Service::start(ServiceConfig::new(file.path().to_path_buf())).expect("a free port");
    let answer = Client::connect(service.address()).post("/v1/completions", r#"{"prompt": "abc"}"#);
    let error = answer.error(500);
    assert_eq!(error["code"], json!("not_finite"));
    assert!(error["message"].as_str().expect("text").contains("position 2"), "{error}");
    assert_eq!(complete_status(service.address()), 500, "the engine goes on");
}

fn complete_status(address: SocketAddr) -> u16 {
    Client::connect(address).post("/v1/completions", r#"{"prompt": "abc"}"#).status
}

#[test]
fn an_address_in_use_is_refused_with_its_name() {
    let (service, _file) = served(|_| {});
    let file = Tiny::new(5).file();
    let mut config = ServiceConfig::new(file.path().to_path_buf());
    config.address = service.address();
    let error = Service::start(config).err().expect("in use").to_string();
    assert!(error.contains(&service.address().to_string()), "{error}");
    assert_eq!(complete(service.address(), &json!({"prompt": "a"}))["model"], json!("tiny"));
}
