//! Completions of the tiny model over loopback: what is generated, scored, stopped, cached and speculated.

mod support;

use std::net::SocketAddr;

use serde_json::{Value, json};
use shardcheck_serve::service::{AttentionChoice, Service, ServiceConfig};
use support::client::{Client, complete, metric};
use support::tiny::Tiny;
use tempfile::NamedTempFile;

struct Served {
    service: Service,
    _file: NamedTempFile,
}

impl Served {
    fn new(change: impl FnOnce(&mut ServiceConfig)) -> Self {
        let file = Tiny::new(5).file();
        let mut config = ServiceConfig::new(file.path().to_path_buf());
        config.model_name = "tiny".to_string();
        config.attention = AttentionChoice::SHARDED;
        config.block_tokens = 4;
        config.engine.prefill_tokens = 16;
        config.engine.threads = 2;
        change(&mut config);
        Self { service: Service::start(config).expect("a free port"), _file: file }
    }

    fn address(&self) -> SocketAddr {
        self.service.address()
    }
}

fn greedy(prompt: impl Into<Value>, max_tokens: usize) -> Value {
    json!({
        "model": "tiny", "prompt": prompt.into(), "max_tokens": max_tokens, "temperature": 0, "logprobs": 3,
        "return_token_ids": true, "ignore_eos": true,
    })
}

fn with(mut body: Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body
}

const PROMPT: &str = "Question: how many things are in the box on the table?\nAnswer:";

#[test]
fn a_completion_has_the_shape_that_clients_expect() {
    let served = Served::new(|_| {});
    let answer = complete(served.address(), &greedy(PROMPT, 5));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("tiny")));
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("length"), &Value::Null));
    let prompt_tokens = choice["prompt_token_ids"].as_array().expect("ids").len();
    assert_eq!(choice["token_ids"].as_array().expect("ids").len(), 5);
    assert_eq!(answer["usage"]["prompt_tokens"], json!(prompt_tokens));
    assert_eq!(answer["usage"]["completion_tokens"], json!(5));
    assert_eq!(answer["usage"]["total_tokens"], json!(prompt_tokens + 5));
    let logprobs = &choice["logprobs"];
    for column in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[column].as_array().expect("a column").len(), 5, "{column}");
    }
    for (logprob, top) in logprobs["token_logprobs"]
        .as_array()
        .expect("a column")
        .iter()
        .zip(logprobs["top_logprobs"].as_array().expect("a column"))
    {
        let best =
            top.as_object().expect("a map").values().filter_map(Value::as_f64).fold(f64::MIN, f64::max);
        assert_eq!(logprob.as_f64(), Some(best), "greedy takes the most likely token");
    }
    let default = complete(served.address(), &json!({"prompt": PROMPT, "ignore_eos": true}));
    assert_eq!(default["usage"]["completion_tokens"], json!(16), "OpenAI's default");
    assert_eq!(default["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn text_and_token_prompts_are_the_same_prompt() {
    let served = Served::new(|_| {});
    let by_text = complete(served.address(), &greedy(PROMPT, 8));
    let ids = by_text["choices"][0]["prompt_token_ids"].clone();
    let by_ids = complete(served.address(), &greedy(ids.clone(), 8));
    assert_eq!(by_text["choices"], by_ids["choices"]);
    let several = complete(served.address(), &greedy(json!([ids, ids]), 8));
    assert_eq!(several["choices"].as_array().expect("choices").len(), 2);
    for (index, choice) in several["choices"].as_array().expect("choices").iter().enumerate() {
        assert_eq!(choice["index"], json!(index));
        assert_eq!(choice["token_ids"], by_text["choices"][0]["token_ids"]);
    }
    assert_eq!(several["usage"]["completion_tokens"], json!(16));
}

/// Prompt and generated tokens, with the log-probabilities of the generated ones.
fn generated(address: SocketAddr, max_tokens: usize) -> (Vec<Value>, Vec<Value>) {
    let answer = complete(address, &greedy(PROMPT, max_tokens));
    let choice = &answer["choices"][0];
    let ids = |key: &str| choice[key].as_array().expect("ids").clone();
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().expect("a column").clone();
    ([ids("prompt_token_ids"), ids("token_ids")].concat(), logprobs)
}

#[test]
fn a_continuation_has_the_log_probabilities_that_teacher_forcing_gives_it() {
    for ranks in [1, 4] {
        for draft_tokens in [0, 3] {
            let served = Served::new(|config| {
                config.ranks = ranks;
                config.engine.draft_tokens = draft_tokens;
            });
            let (tokens, logprobs) = generated(served.address(), 40);
            let forced =
                with(with(greedy(tokens.clone(), 0), "echo", json!(true)), "prompt_logprobs", json!(0));
            let forced = complete(served.address(), &forced);
            let choice = &forced["choices"][0];
            let scored = choice["logprobs"]["token_logprobs"].as_array().expect("a column");
            assert_eq!(scored.len(), tokens.len());
            assert_eq!(scored[0], Value::Null, "nothing comes before the first token");
            assert_eq!(
                scored[tokens.len() - 40..],
                logprobs[..],
                "W{ranks}, {draft_tokens} drafts: to the last bit"
            );
            let sum = |column: &[Value]| column.iter().filter_map(Value::as_f64).sum::<f64>();
            assert!(sum(&logprobs) < -1.0 && sum(scored) < sum(&logprobs), "there is something to compare");
            // vLLM's own form says the same.
            let maps = choice["prompt_logprobs"].as_array().expect("a list");
            assert_eq!(maps[0], Value::Null);
            for (position, map) in maps.iter().enumerate().skip(1) {
                let entry = &map[tokens[position].to_string()];
                assert_eq!(entry["logprob"], scored[position]);
                assert!(entry["rank"].as_u64().expect("a rank") >= 1);
            }
        }
    }
}

#[test]
fn a_fault_of_decode_alone_is_in_what_is_generated_and_not_in_what_is_scored() {
    use shardcheck_serve::attention::{dtype::OutputDtype, fault::Fault};
    let interleave = 8;
    let served = Served::new(|config| {
        (config.ranks, config.interleave_tokens, config.block_tokens) = (4, interleave, 8);
        config.attention = AttentionChoice::Sharded {
            dtype: OutputDtype::F32,
            fault: Some(Fault::DropLastTokenOnBoundary),
            fault_max_rows: 1,
        };
    });
    let healthy = Served::new(|config| {
        (config.ranks, config.interleave_tokens, config.block_tokens) = (4, interleave, 8);
    });
    let (tokens, logprobs) = generated(served.address(), 40);
    let score = |served: &Served| {
        let forced = complete(served.address(), &with(greedy(tokens.clone(), 0), "echo", json!(true)));
        forced["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("a column").clone()
    };
    let scored = score(&served);
    assert_eq!(scored, score(&healthy), "scoring runs in chunks, which are right");
    let first = tokens.len() - 40;
    let differs = (0..40).find(|at| scored[first + at] != logprobs[*at]);
    // The token at index i of the sequence is chosen when the length is i.
    let boundary = (first + 1..).find(|length| length % (4 * interleave) == 0).expect("endless");
    assert_eq!(differs, Some(boundary - first), "right up to the first length that is a multiple of W·S");
}

#[test]
fn ranks_merge_orders_and_dtypes_agree_as_far_as_their_rounding_goes() {
    use shardcheck_serve::attention::{dtype::OutputDtype, merge::MergeOrder};
    let scores = |change: &dyn Fn(&mut ServiceConfig)| {
        let served = Served::new(|config| change(config));
        let body = with(greedy(PROMPT.repeat(4), 0), "echo", json!(true));
        let answer = complete(served.address(), &body);
        let column = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("a column").clone();
        column.iter().skip(1).map(|x| x.as_f64().expect("a number")).collect::<Vec<_>>()
    };
    let worst = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
    let one = scores(&|_| {});
    for merge in MergeOrder::ALL {
        let four = scores(&|config| (config.ranks, config.merge) = (4, merge));
        assert!(worst(&one, &four) < 1e-4, "{merge}");
        let attention =
            AttentionChoice::Sharded { dtype: OutputDtype::Bf16, fault: None, fault_max_rows: usize::MAX };
        let rounded =
            scores(&|config| (config.ranks, config.merge, config.attention) = (4, merge, attention));
        let difference = worst(&one, &rounded);
        assert!(difference > 1e-3 && difference < 1.0, "{merge} bf16: {difference}");
    }
    for fault in ["lse-base-2", "drop-last-token-on-boundary", "rank-lse-offset"] {
        let attention = AttentionChoice::Sharded {
            dtype: OutputDtype::F32,
            fault: Some(fault.parse().expect("a fault")),
            fault_max_rows: usize::MAX,
        };
        let wrong = scores(&|config| (config.ranks, config.attention) = (4, attention));
        assert!(worst(&one, &wrong) > 0.1, "{fault}");
    }
}

#[test]
fn echo_puts_the_prompt_before_the_text_and_offsets_point_into_it() {
    let served = Served::new(|_| {});
    let prompt = "naïve 漢 the";
    let answer = complete(served.address(), &with(greedy(prompt, 4), "echo", json!(true)));
    let choice = &answer["choices"][0];
    let text: Vec<char> = choice["text"].as_str().expect("text").chars().collect();
    assert_eq!(text[..prompt.chars().count()].iter().collect::<String>(), prompt);
    let column = |name: &str| choice["logprobs"][name].as_array().expect("a column").clone();
    for (token, offset) in column("tokens").iter().zip(column("text_offset")) {
        let (token, offset) = (token.as_str().expect("text"), offset.as_u64().expect("an offset") as usize);
        if !token.starts_with("bytes:") && !token.starts_with("<|") {
            let here: String = text[offset..offset + token.chars().count()].iter().collect();
            assert_eq!(here, token);
        }
    }
    let named =
        complete(served.address(), &with(greedy(prompt, 1), "return_tokens_as_token_ids", json!(true)));
    let choice = &named["choices"][0];
    assert_eq!(choice["logprobs"]["tokens"][0], json!(format!("token_id:{}", choice["token_ids"][0])));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let served = Served::new(|_| {});
    let free = complete(served.address(), &greedy(PROMPT, 30));
    let text = free["choices"][0]["text"].as_str().expect("text").to_string();
    // Two characters that stand next to each other, each a token of its own.
    let characters: Vec<char> = text.chars().collect();
    let pair = characters.windows(2).rfind(|pair| pair.iter().all(|c| c.is_ascii()));
    let stop: String = pair.expect("a random text of bytes has ASCII somewhere").iter().collect();
    let at = text.find(&stop).expect("it is in there");
    let cut = complete(served.address(), &with(greedy(PROMPT, 30), "stop", json!(["never there", stop])));
    let choice = &cut["choices"][0];
    assert_eq!(choice["text"], json!(text[..at]));
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(stop)));
    let tokens = choice["token_ids"].as_array().expect("ids");
    assert!(
        tokens.len() < 30 && free["choices"][0]["token_ids"].as_array().expect("ids").starts_with(tokens)
    );
    let kept = with(with(greedy(PROMPT, 30), "stop", json!(stop)), "include_stop_str_in_output", json!(true));
    let kept = complete(served.address(), &kept);
    assert_eq!(kept["choices"][0]["text"], json!(text[..at + stop.len()]));
}

#[test]
fn a_stop_token_ends_generation_and_is_named() {
    let served = Served::new(|_| {});
    let free = complete(served.address(), &greedy(PROMPT, 12));
    let tokens = free["choices"][0]["token_ids"].as_array().expect("ids").clone();
    let first = tokens.iter().position(|id| *id == tokens[6]).expect("it is there");
    let cut = complete(served.address(), &with(greedy(PROMPT, 12), "stop_token_ids", json!([tokens[6]])));
    let choice = &cut["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &tokens[6]));
    assert_eq!(choice["token_ids"], json!(tokens[..=first]));
}

#[test]
fn a_seed_repeats_its_text_and_another_gives_another() {
    let served = Served::new(|_| {});
    let text = |seed: Option<i64>| {
        let body =
            json!({"prompt": PROMPT, "max_tokens": 24, "temperature": 1.5, "seed": seed, "ignore_eos": true});
        complete(served.address(), &body)["choices"][0]["text"].clone()
    };
    assert_eq!(text(Some(7)), text(Some(7)));
    assert_ne!(text(Some(7)), text(Some(-8)));
    assert_ne!(text(None), text(None), "without a seed each request draws its own");
}

#[test]
fn a_common_prefix_is_computed_once_and_changes_nothing() {
    let served = Served::new(|config| config.ranks = 2);
    let plain = Served::new(|config| {
        config.ranks = 2;
        config.engine.prefix_cache = false;
    });
    let shots = "Question: one and one?\nAnswer: two\n\n".repeat(6);
    for (index, question) in
        ["Question: two?", "Question: three?", "Question: two and two?"].iter().enumerate()
    {
        let body = greedy(format!("{shots}{question}\nAnswer:"), 10);
        let (cached, fresh) = (complete(served.address(), &body), complete(plain.address(), &body));
        assert_eq!(cached["choices"], fresh["choices"]);
        let reused = cached["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        assert_eq!(reused > 150, index > 0, "{reused} tokens of request {index}");
        assert_eq!(reused % 8, 0, "whole virtual blocks of 4 tokens on 2 ranks");
        assert_eq!(fresh["usage"]["prompt_tokens_details"]["cached_tokens"], json!(0));
    }
    let hits = metric(served.address(), "vllm:prefix_cache_hits_total", "");
    assert!(hits > 300.0 && hits < metric(served.address(), "vllm:prefix_cache_queries_total", ""));
    assert_eq!(metric(plain.address(), "vllm:prefix_cache_queries_total", ""), 0.0);
}

#[test]
fn speculation_changes_no_token_and_its_counters_add_up() {
    let plain = Served::new(|_| {});
    let drafting = Served::new(|config| config.engine.draft_tokens = 4);
    let repetitive = "one two three one two three one two three one two";
    for (prompt, max_tokens) in [(PROMPT, 60), (repetitive, 1), (repetitive, 2), (repetitive, 90)] {
        for body in
            [greedy(prompt, max_tokens), with(greedy(prompt, max_tokens), "prompt_logprobs", json!(1))]
        {
            for temperature in [0.0, 0.4] {
                let body = with(with(body.clone(), "temperature", json!(temperature)), "seed", json!(3));
                let answers =
                    [&plain, &drafting].map(|served| complete(served.address(), &body)["choices"].clone());
                assert_eq!(answers[0], answers[1], "{prompt:?} {max_tokens} T{temperature}");
            }
        }
    }
    let value = |name: &str, label: &str| {
        metric(drafting.address(), &format!("vllm:spec_decode_num_{name}_total"), label)
    };
    let (drafts, drafted, accepted) =
        (value("drafts", ""), value("draft_tokens", ""), value("accepted_tokens", ""));
    assert!(
        accepted > 20.0 && accepted < drafted && drafted <= 4.0 * drafts,
        "{accepted} {drafted} {drafts}"
    );
    let positions: Vec<f64> =
        (0..4).map(|at| value("accepted_tokens_per_pos", &format!("position=\"{at}\""))).collect();
    assert_eq!(positions.iter().sum::<f64>(), accepted);
    assert!(positions.windows(2).all(|pair| pair[0] >= pair[1]) && positions[0] <= drafts, "{positions:?}");
    let tokens = |served: &Served| metric(served.address(), "vllm:generation_tokens_total", "");
    assert_eq!(tokens(&plain), tokens(&drafting));
    assert!(!Client::connect(plain.address()).get("/metrics").body.contains("spec_decode"));
}

#[test]
fn requests_at_once_get_the_answers_that_they_get_alone() {
    let served = Served::new(|config| {
        config.ranks = 4;
        config.engine.max_sequences = 4;
        config.engine.draft_tokens = 2;
    });
    let bodies: Vec<Value> =
        (0..10).map(|i| greedy(format!("{i} {}", PROMPT.repeat(1 + i % 4)), 10 + 3 * i)).collect();
    let address = served.address();
    let alone: Vec<Value> = bodies.iter().map(|body| complete(address, body)["choices"].clone()).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = bodies
            .iter()
            .map(|body| scope.spawn(move || complete(address, body)["choices"].clone()))
            .collect();
        for (thread, expected) in threads.into_iter().zip(&alone) {
            assert_eq!(&thread.join().expect("an answer"), expected);
        }
    });
    assert_eq!(metric(address, "vllm:num_requests_running", ""), 0.0);
    assert_eq!(metric(address, "vllm:request_success_total", "length"), 20.0);
    assert_eq!(metric(address, "vllm:e2e_request_latency_seconds_count", ""), 20.0);
    assert_eq!(metric(address, "vllm:kv_cache_usage_perc", ""), 0.0, "all blocks are given back");
}

#[test]
fn requests_wait_for_room_in_a_small_cache_and_all_get_through() {
    let served = Served::new(|config| config.cache_tokens = 160);
    let address = served.address();
    std::thread::scope(|scope| {
        let ask = |i: usize| {
            complete(address, &greedy(format!("{i}{PROMPT}"), 60))["usage"]["completion_tokens"].clone()
        };
        let threads: Vec<_> = (0..6).map(|i| scope.spawn(move || ask(i))).collect();
        assert!(threads.into_iter().all(|thread| thread.join().expect("an answer") == json!(60)));
    });
}
