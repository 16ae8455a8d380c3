//! `gsm8k run`: asks every question of a server, keeps every answer, and sums up.

mod progress;
mod work;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;

use crate::acceptance::sources;
use crate::client::{Client, Failure, FailureKind, RetryPolicy};
use crate::coverage::Sharding;
use crate::dataset::Dataset;
use crate::dialect::{self, Dialect};
use crate::manifest::{FORMAT, Manifest, Plan, ServerIdentity, Session};
use crate::outcome::{Error, Outcome};
use crate::output::{Format, print};
use crate::prompts::{self, Prompt};
use crate::report::RunReport;
use crate::samples::{Answer, Journal};
use crate::{server_log, timestamp};

/// Asks an OpenAI-compatible server the GSM8K questions and scores its answers as lm-eval does.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Address of the server: http://host:port, its /v1, or the whole completions address.
    #[arg(long)]
    pub base_url: String,
    /// The model's served name.
    #[arg(long)]
    pub model: String,
    /// Folder with test.jsonl and train.jsonl, or one that holds them in main/ or grade_school_math/data/.
    #[arg(long)]
    pub data: PathBuf,
    /// Folder of this run [default: runs/gsm8k- and the UTC time].
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Continue the run in --out: ask only what has no answer yet.
    #[arg(long, requires = "out")]
    pub resume: bool,
    /// Prompts, request and scoring of which harness.
    #[arg(long, value_enum, default_value_t = Dialect::LmEval)]
    pub dialect: Dialect,
    /// Shots per question.
    #[arg(long, default_value_t = dialect::NUM_FEWSHOT)]
    pub num_fewshot: usize,
    /// Ask only the first N questions.
    #[arg(long)]
    pub limit: Option<usize>,
    /// Requests in flight.
    #[arg(long, default_value_t = 64)]
    pub concurrency: usize,
    /// Seed of the few-shot draws; another one changes every prompt.
    #[arg(long, default_value_t = dialect::FEWSHOT_SEED)]
    pub seed: u64,
    /// The seed in the request body [default: 1234 for lm-eval, 42 for last-int].
    #[arg(long)]
    pub request_seed: Option<u64>,
    /// Most tokens generated per answer.
    #[arg(long, default_value_t = dialect::MAX_TOKENS)]
    pub max_tokens: u32,
    /// The tokenizer's end-of-text token as a further stop text, which lm-eval adds when it sends one at a time.
    #[arg(long)]
    pub eos_string: Option<String>,
    /// Attempts per request.
    #[arg(long, default_value_t = 3)]
    pub attempts: u32,
    /// Limit of one attempt in seconds.
    #[arg(long, default_value_t = 300.0)]
    pub timeout_s: f64,
    /// Shortest wait between attempts in seconds; it grows up to ten times itself.
    #[arg(long, default_value_t = 1.0)]
    pub retry_wait_s: f64,
    /// How long one request may wait because the server says 429 or Retry-After, in seconds.
    #[arg(long, default_value_t = 600.0)]
    pub throttle_budget_s: f64,
    /// Stop the run after this many failed attempts without any answer between them [default: the larger of the
    /// concurrency and three requests' attempts].
    #[arg(long)]
    pub give_up_after: Option<usize>,
    /// Environment variable that holds the API key.
    #[arg(long, default_value = "OPENAI_API_KEY")]
    pub api_key_env: String,
    /// The server's version, for the record.
    #[arg(long)]
    pub server_version: Option<String>,
    /// The flags that the server was started with, for the record.
    #[arg(long, allow_hyphen_values = true)]
    pub server_flags: Option<String>,
    /// The server's log file: what it writes during the run is scanned for errors.
    #[arg(long)]
    pub server_log: Option<PathBuf>,
    /// Do not read the server's /metrics.
    #[arg(long)]
    pub no_metrics: bool,
    /// Decode context parallel size of the server, to report what its ranks held.
    #[arg(long)]
    pub dcp: Option<u64>,
    /// Interleave size of the KV cache in tokens.
    #[arg(long, default_value_t = 1, requires = "dcp")]
    pub interleave: u64,
    /// Block size of one rank in tokens.
    #[arg(long, requires = "dcp")]
    pub block_size: Option<u64>,
    /// How the report is printed.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// Runs the command: sends, saves, prints the report.
///
/// # Errors
/// See [`execute`].
pub fn run(args: &RunArgs) -> Result<Outcome, Error> {
    let (folder, report) = execute(args)?;
    print(args.format, &report.results(), &report);
    eprintln!("answers and report: {}", folder.display());
    Ok(report.outcome())
}

/// Runs the command without printing its report; returns the run's folder and the report.
///
/// # Errors
/// [`Error::Usage`] for arguments or a folder that do not fit, [`Error::NothingSelected`], [`Error::Data`],
/// [`Error::Server`] when the server cannot be used at all, [`Error::Io`]. Failed requests are no errors: they are
/// in the report, and the run can be resumed.
pub fn execute(args: &RunArgs) -> Result<(PathBuf, RunReport), Error> {
    check(args)?;
    let data = Dataset::load(&args.data)?;
    if args.num_fewshot > data.train.len() {
        return Err(Error::Usage(format!(
            "--num-fewshot {} is more than the {} train questions",
            args.num_fewshot,
            data.train.len()
        )));
    }
    let prompts = prompts::build(&data, args.dialect, args.num_fewshot, args.seed, args.limit);
    if prompts.is_empty() {
        return Err(Error::NothingSelected("--limit 0 selects no question".to_owned()));
    }
    let plan = plan(args, &data, &prompts);
    let folder = args.out.clone().unwrap_or_else(|| {
        PathBuf::from(format!("runs/gsm8k-{}", timestamp::utc_compact(SystemTime::now())))
    });
    let earlier = earlier_manifest(args, &folder, &plan)?;
    let client = client(args)?;
    let server = identify(args, &client)?;
    let mut manifest = manifest(args, plan, server, earlier)?;
    eprintln!("gsm8k: answers go to {}", folder.display());
    std::fs::create_dir_all(&folder).map_err(|source| Error::io("create", &folder, source))?;
    let (journal, known) = Journal::open(&folder.join("samples.jsonl"))?;
    let outstanding = outstanding(&prompts, &known, args.dialect);
    if !outstanding.is_empty() {
        let session = Session {
            started: timestamp::utc(SystemTime::now()),
            concurrency: args.concurrency,
            ..Session::default()
        };
        manifest.sessions.push(session);
        manifest.save(&folder)?;
        let session = manifest.sessions.last_mut().expect("a session was just added");
        send(args, &client, &data, &prompts, &outstanding, &journal, session)?;
        session.ended = Some(timestamp::utc(SystemTime::now()));
    }
    manifest.save(&folder)?;
    let answers = journal.finish()?;
    let report = RunReport::new(manifest, &answers);
    report.save(&folder)?;
    Ok((folder, report))
}

fn check(args: &RunArgs) -> Result<(), Error> {
    let positive = [
        ("--concurrency", args.concurrency as u64),
        ("--attempts", u64::from(args.attempts)),
        ("--max-tokens", u64::from(args.max_tokens)),
        ("--interleave", args.interleave),
        ("--dcp", args.dcp.unwrap_or(1)),
        ("--block-size", args.block_size.unwrap_or(1)),
    ];
    if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
        return Err(Error::Usage(format!("{name} must be at least 1")));
    }
    let seconds = [
        ("--timeout-s", args.timeout_s, 1e-3),
        ("--retry-wait-s", args.retry_wait_s, 0.0),
        ("--throttle-budget-s", args.throttle_budget_s, 0.0),
    ];
    if let Some((name, value, least)) =
        seconds.iter().find(|(_, value, least)| !(value >= least && *value <= 1e6))
    {
        return Err(Error::Usage(format!("{name} {value} is no usable time: at least {least} seconds")));
    }
    Ok(())
}

fn plan(args: &RunArgs, data: &Dataset, prompts: &[Prompt]) -> Plan {
    let mut stop = args.dialect.stop();
    stop.extend(args.eos_string.clone().filter(|eos| !stop.contains(eos)));
    Plan {
        dialect: args.dialect,
        num_fewshot: args.num_fewshot,
        fewshot_seed: args.seed,
        limit: args.limit.filter(|limit| *limit < data.test.len()),
        questions: prompts.len(),
        prompts_sha256: prompts::joint_sha256(prompts),
        prompts_sharing_two_shots: prompts::sharing_first_shots(prompts, 2.min(args.num_fewshot)),
        test_sha256: data.test_sha256.clone(),
        train_sha256: data.train_sha256.clone(),
        published_data: data.is_published(),
        model: args.model.clone(),
        max_tokens: args.max_tokens,
        temperature: 0.0,
        stop,
        request_seed: args.request_seed.unwrap_or(args.dialect.request_seed()),
    }
}

/// The manifest of this invocation: a new one, or the earlier one if the same server goes on answering.
fn manifest(
    args: &RunArgs,
    plan: Plan,
    server: ServerIdentity,
    earlier: Option<Manifest>,
) -> Result<Manifest, Error> {
    let sharding =
        args.dcp.map(|dcp| Sharding { dcp, interleave: args.interleave, block_size: args.block_size });
    let Some(earlier) = earlier else {
        let tool = concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned();
        return Ok(Manifest { format: FORMAT, tool, plan, server, sharding, sessions: Vec::new() });
    };
    let changed = earlier.server.changes_to(&server);
    if !changed.is_empty() {
        return Err(Error::Usage(format!(
            "the server is not the one that answered before, and answers of two must not be mixed; use another \
             --out:\n  - {}",
            changed.join("\n  - ")
        )));
    }
    let server = ServerIdentity {
        version_given: server.version_given.or(earlier.server.version_given),
        flags_given: server.flags_given.or(earlier.server.flags_given),
        ..server
    };
    Ok(Manifest { server, sharding: sharding.or(earlier.sharding), ..earlier })
}

/// The manifest of the run that is to be continued, if any.
fn earlier_manifest(args: &RunArgs, folder: &Path, plan: &Plan) -> Result<Option<Manifest>, Error> {
    if !folder.join("run.json").exists() {
        return match folder.join("samples.jsonl").exists() {
            true => Err(Error::Usage(format!(
                "{} holds samples but no run.json; choose another --out",
                folder.display()
            ))),
            false => Ok(None),
        };
    }
    if !args.resume {
        return Err(Error::Usage(format!(
            "{} holds a run already; continue it with --resume or choose another --out",
            folder.display()
        )));
    }
    let manifest = Manifest::load(folder)?;
    let differences = manifest.plan.differences(plan);
    if !differences.is_empty() {
        return Err(Error::Usage(format!(
            "{} is another run and cannot be continued with these arguments:\n  - {}",
            folder.display(),
            differences.join("\n  - ")
        )));
    }
    Ok(Some(manifest))
}

fn client(args: &RunArgs) -> Result<Client, Error> {
    let policy = RetryPolicy {
        attempts: args.attempts,
        timeout_s: args.timeout_s,
        wait_s: args.retry_wait_s,
        throttle_budget_s: args.throttle_budget_s,
    };
    Client::new(&args.base_url, std::env::var(&args.api_key_env).ok(), policy)
}

/// Asks the server who it is, before anything is written: a wrong address or model ends here.
fn identify(args: &RunArgs, client: &Client) -> Result<ServerIdentity, Error> {
    let models_reported = match client.get("/v1/models") {
        Ok(text) => model_names(&text),
        Err(failure) => {
            refuse_unusable(client, &failure, &args.api_key_env)?;
            Vec::new()
        }
    };
    if !models_reported.is_empty() && !models_reported.contains(&args.model) {
        return Err(Error::Usage(format!(
            "{} does not serve the model '{}'; it serves: {}",
            client.root_url(),
            args.model,
            models_reported.join(", ")
        )));
    }
    let version_reported = client.get("/version").ok().and_then(|text| {
        let json: serde_json::Value = serde_json::from_str(&text).ok()?;
        json["version"].as_str().map(str::to_owned)
    });
    Ok(ServerIdentity {
        url: client.root_url().to_owned(),
        version_given: args.server_version.clone(),
        flags_given: args.server_flags.clone(),
        version_reported,
        models_reported,
    })
}

/// Ends the command for a server that cannot answer anything; one that merely lists no models is fine.
pub(crate) fn refuse_unusable(client: &Client, failure: &Failure, key_env: &str) -> Result<(), Error> {
    let url = client.root_url();
    match failure.kind {
        FailureKind::Unauthorized => {
            Err(Error::Usage(format!("{url} refuses the API key; set {key_env} to a valid one: {failure}")))
        }
        FailureKind::Unreachable | FailureKind::Timeout | FailureKind::Cut => Err(Error::Server(format!(
            "{url} does not answer ({failure}); nothing was sent. Start the server, then repeat the command"
        ))),
        _ => Ok(()),
    }
}

fn model_names(models: &str) -> Vec<String> {
    let json: serde_json::Value = serde_json::from_str(models).unwrap_or_default();
    let list = json["data"].as_array().cloned().unwrap_or_default();
    list.iter().filter_map(|model| model["id"].as_str().map(str::to_owned)).collect()
}

/// Positions of the prompts without a complete answer, in sending order.
fn outstanding(prompts: &[Prompt], known: &[Answer], dialect: Dialect) -> Vec<usize> {
    let complete = |prompt: &Prompt| {
        known.iter().any(|answer| {
            answer.prompt_hash == prompt.sha256
                && answer.error.is_none()
                && dialect.filters().iter().all(|filter| answer.scored.contains_key(filter))
        })
    };
    prompts::sending_order(prompts).into_iter().filter(|index| !complete(&prompts[*index])).collect()
}

/// One session: sends what is outstanding and notes what the server's log and metrics say about that time.
fn send(
    args: &RunArgs,
    client: &Client,
    data: &Dataset,
    prompts: &[Prompt],
    outstanding: &[usize],
    journal: &Journal,
    session: &mut Session,
) -> Result<(), Error> {
    let log_start = args.server_log.as_deref().map(server_log::end_of).transpose()?;
    let counters = || (!args.no_metrics).then(|| client.get("/metrics").ok()).flatten();
    let before = counters().and_then(|text| sources::from_metrics(&text));
    work::send_all(args, client, data, prompts, outstanding, journal, session)?;
    let after = counters().and_then(|text| sources::from_metrics(&text));
    if let Some(after) = after {
        // a server that was restarted meanwhile counts from zero
        let since = before.as_ref().and_then(|before| after.since(before));
        session.acceptance = Some(since.unwrap_or(after));
    }
    if let (Some(path), Some(start)) = (&args.server_log, log_start) {
        session.server_log = Some(server_log::scan_from(path, start)?);
        let whole = std::fs::read(path).map_err(|source| Error::io("read", path, source))?;
        let text = String::from_utf8_lossy(&whole);
        session.forced_acceptance = sources::forced_mode(&text).map(str::to_owned);
        let part = text.get(usize::try_from(start).unwrap_or(0)..).unwrap_or(&text);
        session.acceptance = session.acceptance.take().or_else(|| sources::from_log(part));
    }
    Ok(())
}
