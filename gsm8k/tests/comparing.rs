//! Runs compared and gated: equal, churning and faulty servers, logs of lm-eval, and everything that is refused.

mod support;

use std::path::{Path, PathBuf};

use shardcheck_gsm8k::compare::{CompareArgs, Comparison, Rule, execute};
use shardcheck_gsm8k::dialect::Filter;
use shardcheck_gsm8k::gate::{self, Band, GateArgs};
use shardcheck_gsm8k::outcome::{Error, Outcome};
use shardcheck_gsm8k::output::Format;
use shardcheck_gsm8k::statistics::Verdict;
use support::bench::{Bench, QUESTIONS, asked_number, right_answer};
use support::hostile_server::{HostileServer, Reply, Request, completion};

/// A run against a server that answers wrongly whenever `wrong` says so.
fn run_with(wrong: impl Fn(usize) -> bool + Send + Sync + 'static) -> Bench {
    let bench = Bench::new();
    let server = HostileServer::start(move |request: &Request| match wrong(asked_number(request)) {
        true => Reply::ok(completion(" no idea\n#### 7777")),
        false => right_answer(request),
    });
    assert!(bench.run(&server.url()).is_complete());
    bench
}

fn args(a: &Path, b: &Path) -> CompareArgs {
    CompareArgs {
        a: a.to_owned(),
        b: b.to_owned(),
        pair: Vec::new(),
        aa: None,
        rule: Rule { margin_points: 15.0, ..Rule::default() },
        format: Format::Text,
    }
}

fn compare(a: &Bench, b: &Bench) -> Comparison {
    execute(&args(&a.out(), &b.out())).unwrap()
}

fn gate(run: &Bench) -> GateArgs {
    GateArgs {
        run: run.out(),
        baseline: None,
        aa: None,
        reference: None,
        band: None,
        min_acceptance_rate: None,
        min_acceptance_length: None,
        max_length_share: None,
        max_invalid_share: None,
        rule: Rule { margin_points: 15.0, ..Rule::default() },
        format: Format::Text,
    }
}

#[test]
fn equal_servers_are_not_worse_and_a_faulty_one_is() {
    let (healthy, churning) = (run_with(|doc| doc == 3), run_with(|doc| doc == 4));
    let faulty = run_with(|doc| doc % 6 == 0 || doc == 3);
    let same = compare(&healthy, &churning);
    assert_eq!((same.verdict, same.outcome()), (Verdict::NotWorse, Outcome::Passed), "{same}");
    assert_eq!((same.deciding().only_a, same.deciding().only_b), (1, 1));
    assert_eq!((same.same_text, same.same_answer), (58, 58));
    let worse = compare(&healthy, &faulty);
    assert_eq!((worse.verdict, worse.outcome()), (Verdict::Worse, Outcome::Failed), "{worse}");
    assert_eq!(worse.deciding().only_a, 10);
    assert!(worse.to_string().contains("VERDICT: worse"));
    // a narrow margin cannot be shown with sixty questions, and the text says how many it takes
    let mut narrow = args(&healthy.out(), &churning.out());
    narrow.rule.margin_points = 1.0;
    let narrow = execute(&narrow).unwrap();
    assert_eq!(narrow.outcome(), Outcome::Inconclusive);
    let text = narrow.to_string();
    assert!(text.contains("inconclusive") && text.contains("runs of each server"), "{text}");
    assert!(text.contains("smallest drop that this comparison finds"), "{text}");
}

#[test]
fn equal_runs_give_the_churn_and_unequal_ones_are_no_yardstick() {
    let (first, second) = (run_with(|doc| doc == 3), run_with(|doc| doc == 4));
    let odd = run_with(|doc| doc % 5 == 0);
    let mut with_aa = args(&first.out(), &second.out());
    with_aa.aa = Some(vec![first.out(), second.out()]);
    let comparison = execute(&with_aa).unwrap();
    assert!(comparison.churn_from_aa && (comparison.churn - 2.0 / 60.0).abs() < 1e-12);
    assert_eq!(comparison.verdict, Verdict::NotWorse);
    with_aa.aa = Some(vec![first.out(), odd.out()]);
    let comparison = execute(&with_aa).unwrap();
    assert_eq!(comparison.verdict, Verdict::Inconclusive);
    assert!(comparison.to_string().contains("no yardstick"), "{comparison}");
    // B changes many answers without losing any on balance: a remark, no verdict of its own
    let shuffled = run_with(|doc| (10..20).contains(&doc));
    let unsteady = run_with(|doc| (20..30).contains(&doc));
    let mut restless = args(&shuffled.out(), &unsteady.out());
    restless.aa = Some(vec![first.out(), first.out()]);
    assert!(execute(&restless).unwrap().to_string().contains("B changes answers"));
}

#[test]
fn a_server_with_nothing_to_lose_is_no_yardstick_either() {
    let (hopeless, as_hopeless) = (run_with(|doc| doc != 3), run_with(|doc| doc != 3));
    let comparison = compare(&hopeless, &as_hopeless);
    assert_eq!(comparison.verdict, Verdict::Inconclusive);
    assert!(comparison.to_string().contains("A itself answers only 1.67 % rightly"), "{comparison}");
}

#[test]
fn further_pairs_sharpen_the_verdict_and_no_run_counts_twice() {
    let runs: Vec<Bench> = (0..4).map(|number| run_with(move |doc| doc == number)).collect();
    let mut single = args(&runs[0].out(), &runs[1].out());
    single.rule.margin_points = 9.0;
    assert_eq!(execute(&single).unwrap().verdict, Verdict::Inconclusive);
    single.pair = vec![runs[2].out(), runs[3].out()];
    let pooled = execute(&single).unwrap();
    assert_eq!((pooled.deciding().total(), pooled.verdict), (120, Verdict::NotWorse), "{pooled}");
    single.pair = vec![runs[0].out(), runs[3].out()];
    let error = execute(&single).unwrap_err();
    assert!(error.to_string().contains("more than one place"), "{error}");
}

#[test]
fn unequal_prompts_budgets_stops_and_failed_requests_are_refused_together() {
    let healthy = run_with(|_| false);
    let other = Bench::new();
    let server = HostileServer::start(right_answer);
    let mut different = other.args(&server.url());
    (different.limit, different.max_tokens, different.eos_string) = (Some(50), 512, Some("<eos>".to_owned()));
    shardcheck_gsm8k::run::execute(&different).unwrap();
    let Err(Error::Incomparable(reasons)) = execute(&args(&healthy.out(), &other.out())) else {
        panic!("these runs are not comparable")
    };
    let all = reasons.join("\n");
    for part in ["10 only in the first", "max_tokens 256 against 512", "stop", "<eos>"] {
        assert!(all.contains(part), "{part}: {all}");
    }
    let failing = Bench::new();
    let server = HostileServer::start(|request| match asked_number(request) {
        7 => Reply::status(400, "no"),
        _ => right_answer(request),
    });
    failing.run(&server.url());
    let error = execute(&args(&healthy.out(), &failing.out())).unwrap_err();
    assert!(error.to_string().contains("1 requests failed"), "{error}");
    assert_eq!(error.outcome(), Outcome::Usage);
}

#[test]
fn a_sample_log_of_lm_eval_pairs_with_a_run_of_ours() {
    let (healthy, faulty) = (run_with(|_| false), run_with(|doc| doc % 6 == 0));
    let folder = tempfile::tempdir().unwrap();
    let log = as_lm_eval_log(&faulty.out(), folder.path());
    let comparison = execute(&args(&healthy.out(), &log)).unwrap();
    assert_eq!((comparison.verdict, comparison.deciding().only_a), (Verdict::Worse, 10), "{comparison}");
    assert!(comparison.to_string().contains("does not say the token budget; taken as 256"), "{comparison}");
    let mut other_budget = args(&healthy.out(), &log);
    other_budget.rule.assume_max_tokens = 512;
    assert!(execute(&other_budget).unwrap_err().to_string().contains("max_tokens 256 against 512"));
    let mut missing = args(&healthy.out(), &log);
    missing.rule.filter = Some(Filter::LastInt);
    assert_eq!(execute(&missing).unwrap_err().outcome(), Outcome::Usage);
}

/// The log with exactly the fields that lm-eval writes.
fn as_lm_eval_log(run: &Path, folder: &Path) -> PathBuf {
    let fields = [
        "doc_id",
        "doc",
        "target",
        "arguments",
        "resps",
        "filtered_resps",
        "filter",
        "metrics",
        "doc_hash",
        "prompt_hash",
        "target_hash",
        "exact_match",
    ];
    let text: String = support::json_lines(&run.join("samples.jsonl"))
        .into_iter()
        .map(|row| {
            let kept: serde_json::Map<_, _> =
                fields.iter().map(|field| ((*field).to_owned(), row[*field].clone())).collect();
            serde_json::Value::Object(kept).to_string() + "\n"
        })
        .collect();
    let path = folder.join("samples_gsm8k_2026-11-29.jsonl");
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_gate_joins_accuracy_with_the_log_and_the_shares() {
    let (healthy, faulty) = (run_with(|_| false), run_with(|doc| doc % 6 == 0));
    let mut gated = gate(&faulty);
    gated.baseline = Some(healthy.out());
    let result = gate::execute(&gated).unwrap();
    assert_eq!(result.outcome(), Outcome::Failed);
    assert!(result.to_string().contains("GATE: failed"), "{result}");
    let mut gated = gate(&healthy);
    gated.band = Some(Band { low: 0.9, high: 1.0 });
    assert_eq!(gate::execute(&gated).unwrap().outcome(), Outcome::Passed);
    gated.max_length_share = Some(0.0);
    gated.max_invalid_share = Some(0.0);
    let result = gate::execute(&gated).unwrap();
    assert_eq!(result.outcome(), Outcome::Passed, "{result}");
    // asked for acceptance where there is none: nothing to look at is no pass
    gated.min_acceptance_rate = Some(0.5);
    assert_eq!(gate::execute(&gated).unwrap().outcome(), Outcome::Failed);
    assert_eq!(gate::execute(&gate(&healthy)).unwrap_err().outcome(), Outcome::Usage);
}

#[test]
fn an_unfinished_run_is_gated_as_unfinished_whatever_its_answers() {
    let bench = Bench::new();
    let server = HostileServer::start(|request| match asked_number(request) {
        7 => Reply::status(400, "no"),
        _ => right_answer(request),
    });
    bench.run(&server.url());
    let mut gated = gate(&bench);
    gated.band = Some(Band { low: 0.1, high: 1.0 });
    let result = gate::execute(&gated).unwrap();
    assert_eq!(result.outcome(), Outcome::RerunOutstanding);
    assert!(result.to_string().contains("59 of 60"), "{result}");
}

#[test]
fn errors_in_the_servers_log_and_its_metrics_reach_report_and_gate() {
    let bench = Bench::new();
    let log = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(log.path(), "ERROR from before the run\n").unwrap();
    let path = log.path().to_owned();
    let steps = std::sync::atomic::AtomicU64::new(1000);
    let server = HostileServer::start(move |request| {
        if request.path == "/metrics" {
            let steps = steps.load(std::sync::atomic::Ordering::SeqCst);
            return Reply::ok(metrics(steps));
        }
        // 40 tokens an answer: 1 + 13 steps + 26 accepted
        steps.fetch_add(13, std::sync::atomic::Ordering::SeqCst);
        if asked_number(request) == 30 {
            use std::io::Write;
            let mut log = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
            log.write_all(b"Memory access fault by GPU node-1 on address 0x7f\n").unwrap();
        }
        right_answer(request)
    });
    let mut run = bench.args(&server.url());
    (run.server_log, run.no_metrics) = (Some(log.path().to_owned()), false);
    (run.dcp, run.block_size) = (Some(8), Some(64));
    let (_, report) = shardcheck_gsm8k::run::execute(&run).unwrap();
    let text = report.to_string();
    assert!(text.contains("server log: 1 findings") && text.contains("memory-fault: 1"), "{text}");
    let acceptance = report.acceptance.as_ref().unwrap();
    assert_eq!(acceptance.counts.steps, 13 * QUESTIONS as u64);
    assert!(acceptance.broken_identities.is_empty(), "{text}");
    assert_eq!(acceptance.undrafted_tokens, Some(0));
    assert!(text.contains("the server ran 3 and queued 1 at most"), "{text}");
    assert!(text.contains("tokens on a rank while decoding"), "{text}");
    let mut gated = gate(&bench);
    gated.band = Some(Band { low: 0.9, high: 1.0 });
    let result = gate::execute(&gated).unwrap();
    assert_eq!(result.outcome(), Outcome::Failed);
    assert!(result.to_string().contains("memory-fault: 1"), "{result}");
}

/// Metrics of a server that drafts two tokens a step and has all accepted.
fn metrics(steps: u64) -> String {
    let accepted = 2 * steps;
    format!(
        "vllm:num_requests_running{{engine=\"0\"}} 3\nvllm:num_requests_waiting{{engine=\"0\"}} 1\n\
         vllm:spec_decode_num_drafts_total {steps}\nvllm:spec_decode_num_draft_tokens_total {accepted}\n\
         vllm:spec_decode_num_accepted_tokens_total {accepted}\n\
         vllm:spec_decode_num_accepted_tokens_per_pos_total{{position=\"0\"}} {steps}\n\
         vllm:spec_decode_num_accepted_tokens_per_pos_total{{position=\"1\"}} {steps}\n"
    )
}
