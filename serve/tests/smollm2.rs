//! The real model, where it is: it knows its capitals, and four ranks say what one says.

mod support;

use std::path::PathBuf;

use serde_json::{Value, json};
use shardcheck_serve::service::{AttentionChoice, Service, ServiceConfig};
use support::client::complete;
use support::real_model;

fn served(model: PathBuf, change: impl FnOnce(&mut ServiceConfig)) -> Service {
    let mut config = ServiceConfig::new(model);
    change(&mut config);
    Service::start(config).expect("a free port")
}

fn greedy(service: &Service, prompt: &str, max_tokens: usize) -> Value {
    let body = json!({
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "return_token_ids": true,
    });
    complete(service.address(), &body)["choices"][0].take()
}

#[test]
fn the_model_answers_with_sense() {
    let Some(model) = real_model("the_model_answers_with_sense") else { return };
    let cases = [
        ("The capital of France is", " Paris"),
        ("1, 2, 3, 4, 5, 6,", " 7"),
        ("The opposite of hot is", " cold"),
        ("Monday, Tuesday, Wednesday, Thursday,", " Friday"),
    ];
    for attention in [AttentionChoice::SHARDED, AttentionChoice::EMBEDDED] {
        let service = served(model.clone(), |config| (config.ranks, config.attention) = (4, attention));
        for (prompt, expected) in cases {
            let text = greedy(&service, prompt, 3)["text"].clone();
            assert!(text.as_str().expect("text").starts_with(expected), "{attention:?}: {prompt} {text}");
        }
    }
}

#[test]
fn four_ranks_say_what_one_says_or_diverge_at_a_tie() {
    let Some(model) = real_model("four_ranks_say_what_one_says_or_diverge_at_a_tie") else { return };
    let sharded = |ranks, interleave_tokens| {
        served(model.clone(), |config| {
            config.attention = AttentionChoice::SHARDED;
            (config.ranks, config.interleave_tokens) = (ranks, interleave_tokens);
        })
    };
    let (one, four) = (sharded(1, 1), sharded(4, 2));
    for prompt in ["Once upon a time, there was", "The three laws of motion are:", "def fibonacci(n):\n"] {
        let [a, b] = [&one, &four].map(|service| greedy(service, prompt, 24));
        let column =
            |choice: &Value, name: &str| choice["logprobs"][name].as_array().expect("a column").clone();
        let same = a["token_ids"] == b["token_ids"];
        let pairs = column(&a, "tokens").into_iter().zip(column(&b, "tokens"));
        let agreed = pairs.take_while(|(x, y)| x == y).count();
        for at in 0..agreed {
            let [x, y] =
                [&a, &b].map(|choice| column(choice, "token_logprobs")[at].as_f64().expect("a number"));
            assert!((x - y).abs() < 1e-3, "{prompt:?} token {at}: {x} {y}");
        }
        if !same {
            let top = column(&a, "top_logprobs")[agreed].clone();
            let mut best: Vec<f64> =
                top.as_object().expect("a map").values().filter_map(Value::as_f64).collect();
            best.sort_by(f64::total_cmp);
            let margin = best[best.len() - 1] - best[best.len() - 2];
            assert!(margin < 1e-3, "{prompt:?} diverges at token {agreed} by a margin of {margin}");
        }
    }
}
