//! The probe against a model that is really computed, sharded, and really broken.

mod support;

use shardcheck_gsm8k::logprobs::judge::LogprobVerdict;
use shardcheck_gsm8k::logprobs::{LogprobsArgs, LogprobsReport, execute};
use shardcheck_gsm8k::outcome::{Error, Outcome};
use shardcheck_gsm8k::output::Format;
use support::hostile_server::{HostileServer, Reply, completion, refused_url};
use support::toy_model::{Fault, ToyModel};

fn args(a: &str, b: &str) -> LogprobsArgs {
    LogprobsArgs {
        a: a.to_owned(),
        b: b.to_owned(),
        model: "m".to_owned(),
        model_b: None,
        dcp: 4,
        interleave: 1,
        block_size: Some(16),
        max_tokens: 340,
        lengths: Vec::new(),
        decode_tokens: 16,
        repeats: 2,
        cap: 1.0,
        max_noise: None,
        no_repeat_a: false,
        concurrency: 2,
        timeout_s: 60.0,
        seed: 1234,
        api_key_env: "SHARDCHECK_TEST_KEY_THAT_IS_NOT_SET".to_owned(),
        positions: None,
        format: Format::Text,
    }
}

/// One rank against four with a fault.
fn compare(change: impl Fn(&mut ToyModel)) -> LogprobsReport {
    let a = ToyModel::new(1, 1, Fault::None).serve();
    let mut model = ToyModel::new(4, 1, Fault::None);
    change(&mut model);
    let b = model.serve();
    execute(&args(&a.url(), &b.url())).unwrap()
}

fn faulty(fault: Fault) -> LogprobsReport {
    let report = compare(|model| model.fault = fault);
    assert_eq!(report.judgement.verdict, LogprobVerdict::Fault, "{fault:?}\n{report}");
    report
}

fn patterns(report: &LogprobsReport) -> String {
    report.judgement.patterns.iter().map(|pattern| pattern.words.clone() + "\n").collect()
}

#[test]
fn sharding_alone_is_clean_in_f32_and_with_bf16_partials() {
    for rounds in [false, true] {
        let report = compare(|model| model.rounds_to_bf16 = rounds);
        assert_eq!(report.judgement.verdict, LogprobVerdict::Clean, "{report}");
        assert!(
            report.judgement.recalled > 0.5 && report.judgement.ranks_without_needle.is_empty(),
            "{report}"
        );
        assert_eq!(report.judgement.largest_repeated, Some(0.0));
        assert!(report.to_string().contains("VERDICT: clean"), "{report}");
    }
}

#[test]
fn another_interleave_is_clean_as_well() {
    let a = ToyModel::new(1, 1, Fault::None).serve();
    let b = ToyModel::new(4, 8, Fault::None).serve();
    let report = execute(&LogprobsArgs { interleave: 8, ..args(&a.url(), &b.url()) }).unwrap();
    assert_eq!(report.judgement.verdict, LogprobVerdict::Clean, "{report}");
}

#[test]
fn a_rank_lost_beyond_a_length_is_found_with_that_length() {
    let report = faulty(Fault::LostRankFrom(2, 300));
    assert_eq!(report.judgement.shortest_bad_context, Some(300), "{report}");
    assert!(patterns(&report).contains("context of at least 300 tokens"), "{report}");
}

#[test]
fn a_fault_that_leaves_most_texts_as_they_were_is_found_all_the_same() {
    let report = faulty(Fault::NewestMissingAtVirtualBlock);
    assert!(patterns(&report).contains("context mod 64 = 1"), "{report}");
    // greedy texts, which is all that an accuracy run sees, hardly change
    let bad = report.judgement.routes.iter().map(|figures| figures.flips).sum::<usize>();
    let all = report.judgement.routes.iter().map(|figures| figures.positions).sum::<usize>();
    assert!(bad * 50 < all, "{bad} of {all} best tokens changed");
}

#[test]
fn a_fault_of_the_decode_path_is_told_from_the_prefill() {
    let report = faulty(Fault::StaleBlockInDecode);
    let beyond = |route: &str| {
        report.judgement.routes.iter().find(|figures| figures.route.name() == route).unwrap().beyond
    };
    assert_eq!(beyond("prefill"), 0, "{report}");
    assert!(beyond("decode") > 0);
    assert!(patterns(&report).contains("decode"), "{report}");
}

#[test]
fn faults_are_found_through_the_rounding_of_bf16_partials() {
    for fault in [Fault::LostRankFrom(1, 200), Fault::StaleBlockInDecode] {
        let report = compare(|model| (model.fault, model.rounds_to_bf16) = (fault, true));
        assert_eq!(report.judgement.verdict, LogprobVerdict::Fault, "{fault:?}\n{report}");
    }
}

#[test]
fn a_slightly_wrong_merge_weight_is_told_from_rounding() {
    // it leaves the positions alone at which one token has all the attention; rounding spares none
    faulty(Fault::Overweight(1.01));
    let a = ToyModel::new(1, 1, Fault::None).serve();
    let bounded = |url: &str| {
        let bounded = LogprobsArgs { max_noise: Some(1e-4), ..args(&a.url(), url) };
        execute(&bounded).unwrap().judgement.verdict
    };
    assert_eq!(bounded(&ToyModel::new(4, 1, Fault::None).serve().url()), LogprobVerdict::Clean);
    let mut rounding = ToyModel::new(4, 1, Fault::None);
    rounding.rounds_to_bf16 = true;
    assert_eq!(bounded(&rounding.serve().url()), LogprobVerdict::Fault);
}

#[test]
fn a_server_that_dies_or_returns_nan_at_some_length_is_faulty_there() {
    let report = faulty(Fault::CrashBeyond(250));
    assert!(report.judgement.reasons[0].contains("engine dead"), "{report}");
    let report = faulty(Fault::NanBeyond(320));
    assert_eq!(report.judgement.shortest_bad_context, Some(321), "{report}");
}

#[test]
fn edges_out_of_reach_and_positions_are_written_down() {
    let a = ToyModel::new(1, 1, Fault::None).serve();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("positions.jsonl");
    let mut short = args(&a.url(), &a.url());
    (short.max_tokens, short.positions, short.lengths) = (150, Some(file.clone()), vec![180]);
    let report = execute(&short).unwrap();
    assert_eq!(report.edges_beyond, [192]);
    assert_eq!(report.probes.last().unwrap().context_tokens, 172, "the chosen length, less half the walk");
    assert!(report.to_string().contains("not probed, beyond --max-tokens: edges at [192]"), "{report}");
    // no room for needles of this tokenizer: the loss of a shard would hardly show, so nothing is called clean
    assert_eq!(report.judgement.verdict, LogprobVerdict::Inconclusive);
    let rows = support::json_lines(&file);
    assert_eq!(rows.len(), report.probes.iter().map(|probe| probe.positions).sum::<usize>());
    assert!(rows.iter().any(|row| row["route"] == "decode"));
}

#[test]
fn servers_that_cannot_be_compared_are_refused_with_the_reason() {
    let a = ToyModel::new(1, 1, Fault::None).serve();
    let deaf = HostileServer::start(|_| Reply::ok(completion("no logprobs here")));
    let error = execute(&args(&deaf.url(), &a.url())).unwrap_err();
    assert!(error.to_string().contains("cannot echo a prompt with log-probabilities"), "{error}");
    assert_eq!(error.outcome(), Outcome::Usage);
    let error = execute(&args(&a.url(), &refused_url())).unwrap_err();
    assert!(matches!(error, Error::Server(_)), "{error}");
    let other = HostileServer::start(|request| {
        // another tokenizer: two bytes a token
        let text = request.json()["prompt"].as_str().unwrap().to_owned();
        let tokens: Vec<String> =
            text.as_bytes().chunks(2).map(|pair| String::from_utf8_lossy(pair).into_owned()).collect();
        let logprobs = vec![-1.0; tokens.len()];
        let usage = serde_json::json!({"prompt_tokens": tokens.len(), "completion_tokens": 0});
        let lists = serde_json::json!({"tokens": tokens, "token_logprobs": logprobs});
        Reply::ok(
            serde_json::json!({"choices": [{"text": "", "logprobs": lists}], "usage": usage}).to_string(),
        )
    });
    let error = execute(&args(&a.url(), &other.url())).unwrap_err();
    assert!(error.to_string().contains("different tokens"), "{error}");
    let senseless = LogprobsArgs { dcp: 0, ..args(&a.url(), &a.url()) };
    assert_eq!(execute(&senseless).unwrap_err().outcome(), Outcome::Usage);
}
