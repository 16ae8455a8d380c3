//! The program itself: what it prints, how it stops, what it says when it can't start.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::json;
use support::client::{Client, complete, metric, wait_until};
use support::tiny::Tiny;

/// A running program that is killed with the test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    fn start(model: &Path, arguments: &[&str]) -> (Self, SocketAddr) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardcheck-serve"));
        command
            .arg("--model")
            .arg(model)
            .args(["--port", "0", "--threads", "1", "--kv-tokens", "32768"])
            .args(arguments);
        let child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let mut program = Self(child);
        let mut line = String::new();
        BufReader::new(program.0.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("http://").expect("an address").parse().expect("an address");
        (program, address)
    }

    fn signal(&self, name: &str) {
        let status =
            Command::new("kill").args([name, &self.0.id().to_string()]).status().expect("kill is there");
        assert!(status.success());
    }

    /// Its end, and what it wrote to standard error.
    fn end(&mut self) -> (ExitStatus, String) {
        let mut text = String::new();
        self.0.stderr.take().expect("piped").read_to_string(&mut text).expect("text");
        (self.0.wait().expect("it ends"), text)
    }
}

#[test]
fn it_prints_its_address_says_what_computes_and_serves() {
    let file = Tiny::new(5).file();
    let arguments =
        ["--dcp", "4", "--interleave", "2", "--served-model-name", "mine", "--fault", "owner-rotated"];
    let (mut program, address) = Program::start(file.path(), &arguments);
    assert!(address.ip().is_loopback());
    assert_eq!(complete(address, &json!({"model": "mine", "prompt": "a"}))["model"], json!("mine"));
    let label = "attention=\"embedded\",dcp=\"4\",interleave=\"2\",block_size=\"16\",merge=\"a2a\",dtype=\"bf16\",\
                 kv_dtype=\"bf16\",fault=\"owner-rotated\"";
    assert_eq!(metric(address, "shardcheck_serve_attention_info", label), 1.0);
    program.signal("-TERM");
    let (status, text) = program.end();
    assert!(status.success(), "{text}");
    assert!(text.contains("mine: embedded W=4 S=2 B=16") && text.contains("fault owner-rotated"), "{text}");
}

#[test]
fn sigterm_lets_a_request_end_and_a_second_one_does_not() {
    let file = Tiny::new(5).file();
    let body =
        |max_tokens: usize| json!({"prompt": "go", "max_tokens": max_tokens, "ignore_eos": true}).to_string();
    for signals in [1, 2] {
        let (mut program, address) = Program::start(file.path(), &["--attention", "sharded"]);
        let mut client = Client::connect(address);
        client.send_post("/v1/completions", &body(if signals == 1 { 2500 } else { 29_000 }));
        wait_until("it runs", || metric(address, "vllm:num_requests_running", "") == 1.0);
        program.signal("-TERM");
        if signals == 1 {
            assert_eq!(client.answer().json()["usage"]["completion_tokens"], json!(2500));
            assert_eq!(program.end().0.code(), Some(0));
        } else {
            wait_until("it stops listening", || std::net::TcpStream::connect(address).is_err());
            program.signal("-TERM");
            assert_eq!(program.end().0.code(), Some(128 + 15));
        }
    }
}

#[test]
fn what_it_cannot_do_is_said_with_what_to_do() {
    let file = Tiny::new(5).file();
    let model = file.path().to_str().expect("a text path");
    let failure = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_shardcheck-serve")).args(arguments).output().expect("it runs");
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).expect("text")
    };
    let missing = failure(&["--model", "/nowhere.gguf"]);
    assert!(missing.contains("/nowhere.gguf does not exist: run serve/fetch-model"), "{missing}");
    let fault =
        failure(&["--model", model, "--port", "0", "--attention", "sharded", "--fault", "lse-base-2"]);
    assert!(fault.contains("needs at least two ranks"), "{fault}");
    for (attention, known) in
        [("sharded", "drop-last-token-on-boundary"), ("embedded", "committed-prefix-rows")]
    {
        let arguments = ["--model", model, "--dcp", "2", "--attention", attention, "--fault", "no-such"];
        let unknown = failure(&arguments);
        assert!(unknown.contains(known), "{unknown}");
    }
    for (attention, fault, owner) in
        [("sharded", "owner-rotated", "embedded"), ("embedded", "rank-left-out", "sharded")]
    {
        let other = failure(&["--model", model, "--attention", attention, "--fault", fault]);
        assert!(other.contains(&format!("one of --attention {owner}")), "{other}");
    }
    for (option, value, attention) in [
        ("--kv-dtype", "bf16", "sharded"),
        ("--attention-dtype", "f32", "embedded"),
        ("--fault-max-rows", "1", "embedded"),
    ] {
        let fault = if attention == "sharded" { "lse-base-2" } else { "owner-rotated" };
        let arguments = ["--model", model, "--attention", attention, "--fault", fault, option, value];
        let idle = failure(&arguments);
        assert!(idle.contains(option) && idle.contains("needs --attention"), "{idle}");
    }
    let layout = failure(&["--model", model, "--dcp", "2", "--interleave", "3", "--block-size", "16"]);
    assert!(layout.contains("block size 16 is no multiple of interleave 3"), "{layout}");
}
