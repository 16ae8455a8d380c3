//! The tiny model over the embedded engine: ranks that agree, faults that show, failures that are answered.

mod support;

use serde_json::{Value, json};
use shardcheck_serve::attention::embedded::{Embedded, EmbeddedConfig, fault_named};
use shardcheck_serve::attention::interleave::Interleave;
use shardcheck_serve::service::{AttentionChoice, Service, ServiceConfig, ServiceError};
use support::client::{Client, complete};
use support::tiny::Tiny;
use tempfile::NamedTempFile;

const PROMPT: &str = "Question: how many things are in the box on the table?\nAnswer:";

fn config(file: &NamedTempFile, ranks: usize) -> ServiceConfig {
    let mut config = ServiceConfig::new(file.path().to_path_buf());
    (config.ranks, config.block_tokens, config.attention) = (ranks, 4, AttentionChoice::EMBEDDED);
    (config.engine.prefill_tokens, config.engine.threads) = (16, 2);
    (config.cache_tokens, config.engine.max_model_tokens) = (4096, 4096);
    config
}

fn with_fault(file: &NamedTempFile, ranks: usize, fault: &str) -> ServiceConfig {
    let mut config = config(file, ranks);
    let AttentionChoice::Embedded { fault: place, .. } = &mut config.attention else { unreachable!() };
    *place = Some(fault_named(fault).expect("a fault"));
    config
}

fn greedy(service: &Service) -> Value {
    let body = json!({
        "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 2, "ignore_eos": true, "return_token_ids": true,
    });
    complete(service.address(), &body)["choices"][0].take()
}

/// Log-probabilities of a prompt's tokens but the first.
fn scores(config: ServiceConfig) -> Vec<f64> {
    let service = Service::start(config).expect("a free port");
    let body = json!({"prompt": PROMPT.repeat(2), "max_tokens": 0, "echo": true, "logprobs": 1});
    let answer = complete(service.address(), &body);
    let column = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("a column");
    column.iter().skip(1).map(|x| x.as_f64().expect("a number")).collect()
}

fn worst(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
}

/// Most that a log-probability of the tiny model moves by the roundings of its attention to bf16.
const ROUNDING: f64 = 0.2;

#[test]
fn scores_agree_with_the_sharded_attention_within_the_rounding_to_bf16() {
    let file = Tiny::new(5).file();
    let mut sharded = config(&file, 1);
    sharded.attention = AttentionChoice::SHARDED;
    let exact = scores(sharded);
    for ranks in [1, 3, 4] {
        let difference = worst(&exact, &scores(config(&file, ranks)));
        assert!(difference > 1e-4 && difference < ROUNDING, "W = {ranks}: {difference}");
    }
}

#[test]
fn four_ranks_generate_what_one_does_or_diverge_at_a_near_tie() {
    let file = Tiny::new(5).file();
    let [a, b] = [1, 4].map(|ranks| greedy(&Service::start(config(&file, ranks)).expect("a free port")));
    let column = |choice: &Value, name: &str| choice["logprobs"][name].as_array().expect("a column").clone();
    let pairs = column(&a, "tokens").into_iter().zip(column(&b, "tokens"));
    let agreed = pairs.take_while(|(x, y)| x == y).count();
    for at in 0..agreed {
        let [x, y] = [&a, &b].map(|choice| column(choice, "token_logprobs")[at].as_f64().expect("a number"));
        assert!((x - y).abs() < ROUNDING, "token {at}: {x} {y}");
    }
    if let Some(top) = column(&a, "top_logprobs").get(agreed) {
        let mut best: Vec<f64> = top.as_object().expect("a map").values().filter_map(Value::as_f64).collect();
        best.sort_by(f64::total_cmp);
        let margin = best[best.len() - 1] - best[best.len() - 2];
        assert!(margin < 2.0 * ROUNDING, "diverges at token {agreed} by a margin of {margin}");
    }
}

#[test]
fn faults_move_the_scores_by_more_than_any_rounding() {
    let file = Tiny::new(5).file();
    let healthy = scores(config(&file, 4));
    for fault in ["committed-prefix-rows", "lse-base-2-as-natural", "owner-rotated"] {
        let difference = worst(&healthy, &scores(with_fault(&file, 4, fault)));
        assert!(difference > 2.0 * ROUNDING, "{fault}: {difference}");
    }
}

#[test]
fn a_failing_engine_is_answered_with_its_words_and_the_server_lives_on() {
    use shardcheck_cpu::hostile::{Hostility, hostile};
    let file = Tiny::new(5).file();
    let service = Service::start_with(config(&file, 2), |shape, _| {
        let config = EmbeddedConfig {
            layout: Interleave::new(2, 1, 4)?,
            merge: shardcheck_serve::attention::merge::MergeOrder::A2a,
            kv_dtype: shardcheck_formats::Dtype::Bf16,
            fault: None,
            cache_tokens: 4096,
        };
        let attention = Embedded::with_engine(shape, config, hostile(Hostility::Panics));
        Ok(Box::new(attention.map_err(ServiceError::from)?))
    });
    let service = service.expect("a free port");
    let mut client = Client::connect(service.address());
    for _ in 0..3 {
        let answer = client.post("/v1/completions", &json!({"prompt": PROMPT}).to_string());
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["code"]), (500, &json!("attention_failed")), "{answer:?}");
        assert!(error["message"].as_str().expect("text").contains("panic"), "{error}");
        assert_eq!(client.get("/health").status, 200);
    }
}
