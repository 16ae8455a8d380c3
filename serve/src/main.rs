//! The program `shardcheck-serve`: serves a GGUF Llama on a loopback address until it is told to stop.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use shardcheck_formats::Dtype;

use shardcheck_serve::attention::dtype::OutputDtype;
use shardcheck_serve::attention::embedded::{KV_DTYPES, fault_named};
use shardcheck_serve::attention::fault::Fault;
use shardcheck_serve::attention::merge::MergeOrder;
use shardcheck_serve::engine::EngineConfig;
use shardcheck_serve::kernels::Simd;
use shardcheck_serve::service::{AttentionChoice, Service, ServiceConfig};

/// Serves a GGUF Llama model with sharded attention through OpenAI's completions API.
#[derive(Debug, Parser)]
#[command(version, about, after_long_help = fault_list())]
struct Arguments {
    /// GGUF file; default: $SHARDCHECK_SMOLLM2, else where `serve/fetch-model` puts SmolLM2
    #[arg(long)]
    model: Option<PathBuf>,
    /// Name that clients use; default: the file's name without its ending
    #[arg(long)]
    served_model_name: Option<String>,
    /// Address to bind
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,

    /// Who computes: the project's embedded multi-rank engine, or the server's own sharded attention
    #[arg(long, default_value_t = AttentionName::Embedded, value_enum, help_heading = "Attention")]
    attention: AttentionName,
    /// Ranks W over which the KV cache is sharded
    #[arg(long, default_value_t = 1, help_heading = "Attention")]
    dcp: usize,
    /// Interleave S: consecutive tokens on one rank
    #[arg(long, default_value_t = 1, help_heading = "Attention")]
    interleave: usize,
    /// Block B: tokens of a physical block of one rank
    #[arg(long, default_value_t = 16, help_heading = "Attention")]
    block_size: usize,
    /// How partials are merged
    #[arg(long, default_value_t = MergeOrder::A2a, help_heading = "Attention",
          value_parser = named::<MergeOrder>(MergeOrder::ALL.map(MergeOrder::name)))]
    merge: MergeOrder,
    /// Dtype of partial and merged outputs; sharded: f32 unless given, embedded: always bf16
    #[arg(long, help_heading = "Attention",
          value_parser = named::<OutputDtype>(OutputDtype::ALL.map(OutputDtype::name)))]
    attention_dtype: Option<OutputDtype>,
    /// Dtype of the KV cache; embedded: bf16 unless given, sharded: always f32
    #[arg(long, help_heading = "Attention", value_parser = kv_dtype_parser())]
    kv_dtype: Option<Dtype>,
    /// Break attention in a named way; --help lists the names of each attention
    #[arg(long, help_heading = "Attention")]
    fault: Option<String>,
    /// Break only calls of at most this many query rows, of sharded attention; 1: decode alone, prefill stays right
    #[arg(long, requires = "fault", help_heading = "Attention")]
    fault_max_rows: Option<usize>,

    /// Longest sequence in tokens; default: the model's
    #[arg(long, help_heading = "Limits")]
    max_model_len: Option<usize>,
    /// Sequences that run together
    #[arg(long, default_value_t = 8, help_heading = "Limits")]
    max_num_seqs: usize,
    /// Prompt tokens per step
    #[arg(long, default_value_t = 128, help_heading = "Limits")]
    prefill_tokens: usize,
    /// Tokens that the KV cache holds
    #[arg(long, default_value_t = 16_384, help_heading = "Limits")]
    kv_tokens: usize,
    /// Requests that may wait; more are answered 429
    #[arg(long, default_value_t = 256, help_heading = "Limits")]
    max_waiting: usize,
    /// Open connections; more are answered 503
    #[arg(long, default_value_t = 128, help_heading = "Limits")]
    max_connections: usize,
    /// Longest request body in bytes
    #[arg(long, default_value_t = 8 << 20, help_heading = "Limits")]
    max_body_bytes: usize,
    /// Seconds that requests under way get after SIGTERM or SIGINT; a second signal ends at once
    #[arg(long, default_value_t = 30, help_heading = "Limits")]
    shutdown_timeout_s: u64,

    /// Draft tokens per step by prompt lookup; 0 means no speculation
    #[arg(long, default_value_t = 0, help_heading = "Engine")]
    draft_tokens: usize,
    /// Do not reuse the KV of common prefixes
    #[arg(long, help_heading = "Engine")]
    no_prefix_cache: bool,
    /// Threads of the numeric work; default: all processors
    #[arg(long, help_heading = "Engine")]
    threads: Option<usize>,
}

/// The implementations of attention, as they are named on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AttentionName {
    Embedded,
    Sharded,
}

fn kv_dtype_parser() -> impl TypedValueParser<Value = Dtype> {
    PossibleValuesParser::new(KV_DTYPES.map(Dtype::name)).try_map(|name| name.parse::<Dtype>())
}

/// The faults of both implementations, for the long help.
fn fault_list() -> String {
    let mut text =
        format!("Faults of sharded: {}\n\nFaults of embedded:", Fault::ALL.map(Fault::name).join(", "));
    for fault in shardcheck_cpu::faults() {
        text.push_str(&format!("\n  {:40} {}", fault.name, fault.title));
    }
    text
}

/// A parser of one of `names`, which clap lists in its help and errors.
fn named<T>(names: impl IntoIterator<Item = &'static str>) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = String> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse::<T>())
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let signalled = watch_signals()?;
    let grace = Duration::from_secs(arguments.shutdown_timeout_s);
    let config = config(arguments)?;
    let (model_name, draft_tokens) = (config.model_name.clone(), config.engine.draft_tokens);
    let loading = Instant::now();
    let service = Service::start(config)?;
    let path = service.path();
    eprintln!(
        "{model_name}: {} W={} S={} B={}, merge {}, {} outputs, {} KV, fault {}, {draft_tokens} draft tokens, {} kernels, \
         sequences up to {} tokens; loaded in {:.1} s",
        path.engine,
        path.ranks,
        path.interleave_tokens,
        path.block_tokens,
        path.merge,
        path.dtype,
        path.kv_dtype,
        path.fault.as_deref().unwrap_or("none"),
        Simd::detect().name(),
        service.max_model_tokens(),
        loading.elapsed().as_secs_f64(),
    );
    // On standard output, alone and flushed, for scripts that asked for port 0. A closed pipe is no reason to stop.
    let _ =
        writeln!(std::io::stdout(), "http://{}", service.address()).and_then(|()| std::io::stdout().flush());
    while !signalled.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(50));
    }
    eprintln!("stopping: requests under way have {} s", grace.as_secs());
    match service.stop(grace) {
        0 => Ok(()),
        cut => bail!("{cut} connections were not done after {} s", grace.as_secs()),
    }
}

/// Set by the first SIGTERM or SIGINT; the second ends the process at once, with the status of a signal.
fn watch_signals() -> anyhow::Result<Arc<AtomicBool>> {
    let signalled = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let register = || -> std::io::Result<()> {
            // In this order: the first signal finds the flag unset and sets it.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, signalled.clone())?;
            signal_hook::flag::register(signal, signalled.clone())?;
            Ok(())
        };
        register().context("cannot watch signals")?;
    }
    Ok(signalled)
}

fn config(arguments: Arguments) -> anyhow::Result<ServiceConfig> {
    let attention = attention(&arguments)?;
    let model_path =
        arguments.model.or_else(cached_model).context("give --model: there is no home directory")?;
    if !model_path.exists() {
        bail!("{} does not exist: run serve/fetch-model, or give --model", model_path.display());
    }
    let defaults = ServiceConfig::new(model_path);
    let engine = EngineConfig {
        max_sequences: arguments.max_num_seqs.max(1),
        prefill_tokens: arguments.prefill_tokens.max(1),
        max_model_tokens: arguments.max_model_len.unwrap_or(usize::MAX),
        max_waiting: arguments.max_waiting,
        draft_tokens: arguments.draft_tokens,
        prefix_cache: !arguments.no_prefix_cache,
        threads: arguments.threads.unwrap_or(defaults.engine.threads),
    };
    Ok(ServiceConfig {
        model_name: arguments.served_model_name.unwrap_or(defaults.model_name),
        model_path: defaults.model_path,
        address: SocketAddr::from((arguments.host, arguments.port)),
        ranks: arguments.dcp,
        interleave_tokens: arguments.interleave,
        block_tokens: arguments.block_size,
        merge: arguments.merge,
        attention,
        cache_tokens: arguments.kv_tokens,
        engine,
        max_connections: arguments.max_connections,
        max_body_bytes: arguments.max_body_bytes,
    })
}

/// The attention that the options ask for; an option of the other implementation is refused, as it would do nothing.
fn attention(arguments: &Arguments) -> anyhow::Result<AttentionChoice> {
    let fault = arguments.fault.as_deref();
    match arguments.attention {
        AttentionName::Sharded => {
            if arguments.kv_dtype.is_some_and(|dtype| dtype != Dtype::F32) {
                bail!("sharded attention keeps its KV cache in f32: --kv-dtype needs --attention embedded");
            }
            let other = |name| shardcheck_cpu::fault(name).is_some();
            let fault = fault.map(|name| {
                let hint = if other(name) { ", but it is one of --attention embedded" } else { "" };
                name.parse::<Fault>().map_err(|error| anyhow!("--fault {error}{hint}"))
            });
            Ok(AttentionChoice::Sharded {
                dtype: arguments.attention_dtype.unwrap_or(OutputDtype::F32),
                fault: fault.transpose()?,
                fault_max_rows: arguments.fault_max_rows.unwrap_or(usize::MAX),
            })
        }
        AttentionName::Embedded => {
            if arguments.attention_dtype == Some(OutputDtype::F32) {
                bail!("the embedded engine returns bf16: --attention-dtype f32 needs --attention sharded");
            }
            if arguments.fault_max_rows.is_some() {
                bail!(
                    "the embedded engine breaks every call alike: --fault-max-rows needs --attention sharded"
                );
            }
            let fault = fault.map(|name| {
                let sharded = name.parse::<Fault>().is_ok();
                let hint = if sharded { ". It is one of --attention sharded" } else { "" };
                fault_named(name).map_err(|error| anyhow!("--fault {error}{hint}"))
            });
            let kv_dtype = arguments.kv_dtype.unwrap_or(Dtype::Bf16);
            Ok(AttentionChoice::Embedded { kv_dtype, fault: fault.transpose()? })
        }
    }
}

/// The model that the environment names, else where `serve/fetch-model` puts it.
fn cached_model() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(model) = variable("SHARDCHECK_SMOLLM2") {
        return Some(model);
    }
    let cache = variable("SHARDCHECK_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("shardcheck")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/shardcheck")))?;
    Some(cache.join("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
}
