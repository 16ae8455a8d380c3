//! Servers that refuse, fail, hang, cut, lie or leave: errors are clear, nothing is lost, and a resume completes.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shardcheck_gsm8k::dialect::{Dialect, Filter};
use shardcheck_gsm8k::outcome::{Error, Outcome};
use shardcheck_gsm8k::run::execute;
use support::bench::{Bench, QUESTIONS, asked_number, assert_each_question_once, right_answer};
use support::hostile_server::{HostileServer, Reply, Request, completion, refused_url};

#[test]
fn a_good_server_is_asked_in_lm_evals_words_and_order() {
    let bench = Bench::new();
    let server = HostileServer::start(right_answer);
    let mut args = bench.args(&format!("{}/v1/completions", server.url()));
    args.concurrency = 1;
    let (_, report) = execute(&args).unwrap();
    assert_eq!(report.outcome(), Outcome::Passed);
    assert_eq!(report.scores[&Filter::StrictMatch].correct, QUESTIONS as u64);
    assert_eq!((report.most_in_flight, report.retried), (1, 0));
    assert_eq!(report.manifest.server.version_reported.as_deref(), Some("1"));
    let bodies: Vec<serde_json::Value> =
        server.bodies().iter().map(|body| serde_json::from_str(body).unwrap()).collect();
    let lengths: Vec<usize> =
        bodies.iter().map(|body| body["prompt"].as_str().unwrap().chars().count()).collect();
    assert!(lengths.is_sorted_by(|a, b| a >= b), "longest first: {lengths:?}");
    let mut body = bodies[0].clone();
    body["prompt"] = "P".into();
    assert_eq!(
        body,
        serde_json::json!({"prompt": "P", "model": "m", "max_tokens": 256, "temperature": 0.0,
            "stop": ["Question:", "</s>", "<|im_end|>"], "seed": 1234})
    );
    assert_each_question_once(&bench.out());
}

#[test]
fn the_other_dialect_has_its_own_shots_stops_seed_and_score() {
    let bench = Bench::new();
    let server = HostileServer::start(|request| {
        // right only for a rule that takes the last integer and overlooks the sign
        Reply::ok(completion(&format!(" it is {} or rather -{}...", 3, asked_number(request) + 1)))
    });
    let mut args = bench.args(&server.url());
    args.dialect = Dialect::LastInt;
    let (_, report) = execute(&args).unwrap();
    assert_eq!(report.scores[&Filter::LastInt].correct, QUESTIONS as u64);
    assert_eq!(report.results()["results"]["gsm8k"]["exact_match,last-int"], 1.0);
    for body in server.bodies() {
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert!(body["prompt"].as_str().unwrap().starts_with("Question: train 0: "));
        assert_eq!(body["stop"], serde_json::json!(["Question", "Assistant:", "<|separator|>"]));
        assert_eq!(body["seed"], 42);
    }
}

#[test]
fn requests_overlap_up_to_the_allowed_number_and_no_further() {
    let bench = Bench::new();
    let (running, most) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let seen = most.clone();
    let server = HostileServer::start(move |request| {
        seen.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        running.fetch_sub(1, Ordering::SeqCst);
        right_answer(request)
    });
    let report = bench.run(&server.url());
    assert_eq!(most.load(Ordering::SeqCst), 4);
    assert_eq!(report.most_in_flight, 4);
}

#[test]
fn a_refused_connection_is_an_unfinished_run_that_leaves_no_trace() {
    let bench = Bench::new();
    let error = execute(&bench.args(&refused_url())).unwrap_err();
    assert_eq!(error.outcome(), Outcome::RerunOutstanding);
    assert!(
        error.to_string().contains("does not answer") && error.to_string().contains("nothing was sent"),
        "{error}"
    );
    assert!(!bench.out().exists());
    bench.resume_with_a_good_server(QUESTIONS);
}

#[test]
fn an_unknown_model_is_named_together_with_the_known_ones() {
    let bench = Bench::new();
    let server = HostileServer::start(right_answer);
    let mut args = bench.args(&server.url());
    args.model = "llama".to_owned();
    let error = execute(&args).unwrap_err();
    assert_eq!(error.outcome(), Outcome::Usage);
    assert!(error.to_string().contains("'llama'") && error.to_string().contains("it serves: m"), "{error}");
    assert_eq!(server.served(), 0);
}

#[test]
fn a_model_that_only_the_endpoint_refuses_stops_the_run_at_once() {
    let bench = Bench::new();
    let server = HostileServer::start(|_| {
        Reply::status(404, "{\"error\": {\"message\": \"The model `m` does not exist.\", \"code\": 404}}")
    });
    let report = bench.run(&server.url());
    assert_eq!(report.outcome(), Outcome::RerunOutstanding);
    assert!(server.served() <= 4, "{} requests for a model that does not exist", server.served());
    let text = report.to_string();
    assert!(text.contains("NO SCORE") && text.contains("The model `m` does not exist."), "{text}");
    bench.resume_with_a_good_server(QUESTIONS);
}

#[test]
fn a_server_that_always_fails_is_given_up_and_the_rest_is_not_sent() {
    let bench = Bench::new();
    let server = HostileServer::start(|_| Reply::status(500, "{\"error\": {\"message\": \"engine died\"}}"));
    let report = bench.run(&server.url());
    assert_eq!(report.outcome(), Outcome::RerunOutstanding);
    assert!(server.served() < 30, "{}", server.served());
    assert_eq!(report.failed_total() + report.not_sent, QUESTIONS);
    let text = report.to_string();
    assert!(
        text.contains("seems dead") && text.contains("server-error") && text.contains("engine died"),
        "{text}"
    );
    assert_eq!(report.results()["results"], serde_json::Value::Null);
    bench.resume_with_a_good_server(QUESTIONS);
}

#[test]
fn single_failures_are_tried_again_and_leave_no_mark_on_the_score() {
    let bench = Bench::new();
    let server = HostileServer::start(|request| match request.earlier % 3 {
        0 => Reply::status(500, "no"),
        1 => Reply::Close,
        _ => right_answer(request),
    });
    let mut args = bench.args(&server.url());
    (args.concurrency, args.attempts, args.give_up_after) = (1, 5, Some(100));
    let (_, report) = execute(&args).unwrap();
    assert!(report.is_complete(), "{report}");
    assert_eq!(report.scores[&Filter::FlexibleExtract].correct, QUESTIONS as u64);
    assert_eq!(report.retried, QUESTIONS);
}

#[test]
fn a_hanging_server_times_out_and_is_given_up() {
    let bench = Bench::new();
    let server = HostileServer::start(|request| match request.earlier {
        0..20 => right_answer(request),
        _ => Reply::Hang(Duration::from_secs(4)),
    });
    let mut args = bench.args(&server.url());
    (args.timeout_s, args.attempts) = (1.0, 2);
    let (_, report) = execute(&args).unwrap();
    assert_eq!((report.answered, report.outcome()), (20, Outcome::RerunOutstanding));
    assert!(report.failed.contains_key("timeout"), "{report}");
    bench.resume_with_a_good_server(QUESTIONS - 20);
}

#[test]
fn cut_answers_wrong_json_and_null_text_are_failures_with_their_own_names() {
    type Behaviour = fn(&Request) -> Reply;
    let bodies: [(&str, Behaviour); 5] = [
        ("cut", |_| {
            let body = completion("a long answer #### 18");
            Reply::CutAfter(body.len() / 2, body)
        }),
        ("bad-json", |_| Reply::ok("<html>busy</html>")),
        ("bad-json", |_| Reply::ok("{\"choices\": []}")),
        ("null-text", |_| Reply::ok("{\"choices\": [{\"text\": null, \"finish_reason\": \"stop\"}]}")),
        ("rejected", |_| Reply::status(400, "{\"error\": {\"message\": \"prompt too long\"}}")),
    ];
    for (name, bad) in bodies {
        let bench = Bench::new();
        // every sixth question is answered badly whenever it is asked
        let server = HostileServer::start(move |request| {
            if asked_number(request).is_multiple_of(6) { bad(request) } else { right_answer(request) }
        });
        let report = bench.run(&server.url());
        assert_eq!(report.failed.get(name), Some(&(QUESTIONS / 6)), "{name}: {report}");
        assert_eq!(report.answered, QUESTIONS - QUESTIONS / 6, "{name}");
        let tries = if name == "rejected" { 1 } else { 3 };
        assert_eq!(server.served(), QUESTIONS - QUESTIONS / 6 + tries * QUESTIONS / 6, "{name}");
        // the failed are not counted as wrong: no score, only bounds
        let (low, high) = report.bounds(Filter::StrictMatch).unwrap();
        assert_eq!((low.correct, high.correct), (50, 60), "{name}");
        assert!(report.to_string().contains("NO SCORE"), "{name}");
        bench.resume_with_a_good_server(QUESTIONS / 6);
    }
}

#[test]
fn a_throttling_server_is_waited_for_as_long_as_it_asks() {
    let bench = Bench::new();
    // 429 for more attempts than are allowed: waiting is not an attempt
    let server = HostileServer::start(|request| match request.earlier {
        0..8 => Reply::Whole(429, vec!["Retry-After: 0".to_owned()], "slow down".to_owned()),
        _ => right_answer(request),
    });
    let mut args = bench.args(&server.url());
    (args.concurrency, args.attempts) = (1, 1);
    let (_, report) = execute(&args).unwrap();
    assert!(report.is_complete(), "{report}");
    assert_eq!(server.served(), QUESTIONS + 8);
}

#[test]
fn an_endless_throttle_ends_with_the_budget() {
    let bench = Bench::new();
    let server = HostileServer::start(|_| {
        Reply::Whole(429, vec!["Retry-After: 3600".to_owned()], "{\"message\": \"quota\"}".to_owned())
    });
    let mut args = bench.args(&server.url());
    (args.limit, args.throttle_budget_s) = (Some(3), 10.0);
    let (_, report) = execute(&args).unwrap();
    assert_eq!(report.failed.get("throttled"), Some(&3), "{report}");
    assert_eq!(server.served(), 3);
}

#[test]
fn a_server_that_goes_away_after_fifty_requests_loses_nothing() {
    let bench = Bench::new();
    let server = HostileServer::start(|request| match request.earlier {
        0..50 => right_answer(request),
        _ => Reply::Close,
    });
    let address = server.address();
    let report = bench.run(&server.url());
    assert_eq!((report.answered, report.outcome()), (50, Outcome::RerunOutstanding), "{report}");
    drop(server);
    let error = execute(&bench.args(&format!("http://{address}"))).unwrap_err();
    assert!(matches!(error, Error::Server(_)), "{error}");
    bench.resume_with_a_good_server(10);
}

#[test]
fn a_connection_that_closes_after_each_answer_is_opened_again() {
    let bench = Bench::new();
    let server = HostileServer::start(|request| match right_answer(request) {
        Reply::Whole(status, _, body) => Reply::Whole(status, vec!["Connection: close".to_owned()], body),
        other => other,
    });
    let report = bench.run(&server.url());
    assert!(report.is_complete() && report.retried == 0, "{report}");
}

#[test]
fn a_folder_with_another_run_is_not_touched() {
    let bench = Bench::new();
    let server = HostileServer::start(right_answer);
    bench.run(&server.url());
    let before = std::fs::read(bench.out().join("samples.jsonl")).unwrap();
    let mut fresh = bench.args(&server.url());
    fresh.resume = false;
    assert!(execute(&fresh).unwrap_err().to_string().contains("--resume"));
    let mut other = bench.args(&server.url());
    other.max_tokens = 512;
    let error = execute(&other).unwrap_err();
    assert!(error.to_string().contains("max_tokens: 256 against 512"), "{error}");
    assert_eq!(error.outcome(), Outcome::Usage);
    assert_eq!(std::fs::read(bench.out().join("samples.jsonl")).unwrap(), before);
    // a finished run is resumed without a single request
    let served = server.served();
    assert!(bench.run(&server.url()).is_complete());
    assert_eq!(server.served(), served);
}

#[test]
fn the_api_key_is_sent_and_never_written_down() {
    // any variable that cargo sets for tests serves as a key
    let (variable, key) = ("CARGO_MANIFEST_DIR", env!("CARGO_MANIFEST_DIR"));
    let bench = Bench::new();
    let server = HostileServer::start(move |request| {
        match request.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer ")) {
            Some(sent) if sent == key => right_answer(request),
            _ => Reply::status(401, "{\"error\": {\"message\": \"invalid key\"}}"),
        }
    });
    let report = bench.run(&server.url());
    assert!(report.to_string().contains("unauthorized") && server.served() <= 4, "{report}");
    let mut args = bench.args(&server.url());
    args.api_key_env = variable.to_owned();
    let (folder, report) = execute(&args).unwrap();
    assert!(report.is_complete(), "{report}");
    for entry in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        assert!(!text.contains(key));
    }
}

#[test]
fn nothing_selected_and_senseless_arguments_have_their_own_endings() {
    let bench = Bench::new();
    let mut args = bench.args("http://127.0.0.1:1");
    args.limit = Some(0);
    assert_eq!(execute(&args).unwrap_err().outcome(), Outcome::NothingSelected);
    args.limit = None;
    args.concurrency = 0;
    assert_eq!(execute(&args).unwrap_err().outcome(), Outcome::Usage);
    args.concurrency = 1;
    args.num_fewshot = 41;
    assert!(execute(&args).unwrap_err().to_string().contains("more than the 40 train questions"));
    args.num_fewshot = 2;
    args.timeout_s = f64::NAN;
    assert_eq!(execute(&args).unwrap_err().outcome(), Outcome::Usage);
}
