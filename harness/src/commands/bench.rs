//! `bench`: measurements of the checks themselves, outside of any gate.

use std::time::Duration;

use clap::ValueEnum;
use shardcheck_formats::Merge;

use crate::bench::oracle::OracleShape;
use crate::bench::{bounds, oracle, protocol, sensitivity};
use crate::cli::CommandError;
use crate::commands::print;
use crate::engines::{self, EngineArgs};
use crate::explain::Table;
use crate::status::Exit;

/// False alarms that are told one by one.
const MOST_TOLD: usize = 20;

/// Largest cache that `bench protocol` sends.
const LARGEST_CACHE_BYTES: u64 = 2_000_000_000;

/// Options of `bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: BenchVerb,
}

#[derive(Debug, clap::Subcommand)]
enum BenchVerb {
    /// Time the oracle, its bounds and the judge
    Oracle(OracleArgs),
    /// Run conforming arithmetic of every kind against the bounds: no element may be outside
    Bounds(BoundsArgs),
    /// Time the process protocol: the same steps on the embedded engine here and behind a socket
    Protocol(ProtocolArgs),
    /// Inject faults of known size and count which rule sees them, and which rejects clean runs
    Sensitivity(SensitivityArgs),
}

/// How tables are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Columns side by side
    Text,
    /// Markdown
    Markdown,
}

impl Format {
    fn write(self, table: &Table) -> String {
        match self {
            Self::Text => table.to_text(),
            Self::Markdown => table.to_markdown(),
        }
    }
}

/// A reference to time the oracle against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Against {
    /// PyTorch in float64, every score formed, from the same bf16 cache; needs a `python3` that imports torch
    Torch,
}

#[derive(Debug, clap::Args)]
struct OracleArgs {
    /// Shapes: mla, mla-8, gqa
    #[arg(long, value_delimiter = ',', default_value = "mla,mla-8,gqa", value_name = "NAMES")]
    shapes: Vec<OracleShape>,

    /// Context lengths in tokens
    #[arg(long, value_delimiter = ',', default_value = "1024,8192", value_name = "NUMBERS")]
    contexts: Vec<usize>,

    /// Runs of which the median counts, at least 5
    #[arg(long, default_value_t = 5, value_name = "N")]
    runs: usize,

    /// Time another reference of the same case in the same call
    #[arg(long, value_name = "NAME")]
    against: Option<Against>,

    /// How tables are written
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

#[derive(Debug, clap::Args)]
struct BoundsArgs {
    /// Output elements to reach, such as 1e8
    #[arg(long, default_value = "1e6", value_parser = count, value_name = "N")]
    elements: u64,

    /// Seed of everything that is drawn
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// End early after so many seconds, with what was measured until then
    #[arg(long, value_name = "SECONDS")]
    limit_s: Option<f64>,

    /// How tables are written
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

#[derive(Debug, clap::Args)]
struct SensitivityArgs {
    /// Trials of each fault at each length
    #[arg(long, default_value_t = 10, value_name = "N")]
    trials: u64,

    /// Clean runs at each length
    #[arg(long, default_value_t = 100, value_name = "N")]
    clean: u64,

    /// Lengths in tokens, each at least 64
    #[arg(long = "n", value_delimiter = ',', default_value = "128,4096", value_name = "NUMBERS")]
    tokens: Vec<usize>,

    /// Arithmetic of the merge: a2a, ag_rs_f32, ag_rs_bf16, ag_rs_f16
    #[arg(long, default_value = "a2a", value_name = "NAME")]
    merge: Merge,

    /// Seed of everything that is drawn
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// How tables are written
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

#[derive(Debug, clap::Args)]
struct ProtocolArgs {
    /// Runs of which the median counts, at least 5
    #[arg(long, default_value_t = 5, value_name = "N")]
    runs: usize,

    /// Sizes of the cache that goes over, in bytes, such as 256e6
    #[arg(long, value_delimiter = ',', default_value = "1e6,64e6,256e6", value_parser = count, value_name = "BYTES")]
    sizes: Vec<u64>,

    /// Command of an adapter of the embedded engine; this program's own when not given
    #[arg(long, value_name = "COMMAND")]
    adapter: Option<String>,

    /// How tables are written
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

/// A count that may be written with an exponent.
fn count(text: &str) -> Result<u64, String> {
    let number: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if (1.0..=1e15).contains(&number) && number.fract() == 0.0 {
        Ok(number as u64)
    } else {
        Err(format!("{text} is no whole number between 1 and 1e15"))
    }
}

/// Runs `bench`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    match &args.verb {
        BenchVerb::Oracle(args) => time_oracle(args),
        BenchVerb::Bounds(args) => measure_bounds(args),
        BenchVerb::Protocol(args) => time_protocol(args),
        BenchVerb::Sensitivity(args) => measure_sensitivity(args),
    }
}

fn time_oracle(args: &OracleArgs) -> Result<Exit, CommandError> {
    if args.runs < 5 {
        return Err(CommandError::Usage("--runs takes at least 5: a median of fewer says little".to_owned()));
    }
    if args.contexts.contains(&0) {
        return Err(CommandError::Usage("--contexts takes lengths of at least one token".to_owned()));
    }
    let options = oracle::Options {
        shapes: args.shapes.clone(),
        contexts: args.contexts.clone(),
        runs: args.runs,
        against_torch: args.against == Some(Against::Torch),
    };
    let report = oracle::measure(&options).map_err(CommandError::internal)?;
    print(format!("{}\n{}", report.summary(), args.format.write(&report.table())))?;
    Ok(Exit::Passed)
}

fn measure_bounds(args: &BoundsArgs) -> Result<Exit, CommandError> {
    let limit = match args.limit_s {
        Some(seconds) if !(seconds.is_finite() && seconds > 0.0) => {
            return Err(CommandError::Usage("--limit-s takes a number of seconds above zero".to_owned()));
        }
        seconds => seconds.map(Duration::from_secs_f64),
    };
    let report = bounds::measure(&bounds::Options { elements: args.elements, seed: args.seed, limit });
    print(report.summary())?;
    for table in report.tables() {
        print(format!("\n{}", args.format.write(&table)))?;
    }
    Ok(if report.whole().violations() == 0 { Exit::Passed } else { Exit::Failed })
}

fn time_protocol(args: &ProtocolArgs) -> Result<Exit, CommandError> {
    if args.runs < 5 {
        return Err(CommandError::Usage("--runs takes at least 5: a median of fewer says little".to_owned()));
    }
    if let Some(size) = args.sizes.iter().find(|size| **size > LARGEST_CACHE_BYTES) {
        let text = format!(
            "--sizes takes up to {LARGEST_CACHE_BYTES} bytes, not {size}: the cache is held several times"
        );
        return Err(CommandError::Usage(text));
    }
    let command = match &args.adapter {
        Some(command) => command.clone(),
        None => format!("{} adapter", std::env::current_exe().map_err(CommandError::internal)?.display()),
    };
    let named = EngineArgs::named(Some(format!("exec:{command}")));
    let engine = EngineArgs { start_timeout_s: 60.0, ..named };
    let behind = engines::open(&engine, None, 60.0)?;
    let sizes_bytes = args.sizes.iter().map(|size| *size as usize).collect();
    let options = protocol::Options { runs: args.runs, sizes_bytes };
    let lines =
        protocol::measure(&shardcheck_cpu::engine(), &*behind, &options).map_err(CommandError::internal)?;
    print(args.format.write(&protocol::table(&lines)))?;
    Ok(Exit::Passed)
}

fn measure_sensitivity(args: &SensitivityArgs) -> Result<Exit, CommandError> {
    if args.tokens.iter().any(|tokens| !(64..=1 << 20).contains(tokens)) {
        return Err(CommandError::Usage("--n takes lengths between 64 and 1048576 tokens".to_owned()));
    }
    let options = sensitivity::Options {
        trials: args.trials,
        clean: args.clean,
        tokens: args.tokens.clone(),
        merge: args.merge,
        seed: args.seed,
    };
    let lengths = sensitivity::measure(&options);
    let names: Vec<String> = lengths.iter().map(|length| length.tokens.to_string()).collect();
    let seconds: f64 = lengths.iter().map(|length| length.elapsed_s).sum();
    if args.trials > 0 {
        print(format!(
            "detected in percent of {} trials, {} tokens, merge {}, seed {}\n\n{}\n",
            args.trials,
            names.join("/"),
            args.merge,
            args.seed,
            args.format.write(&sensitivity::fault_table(&lengths))
        ))?;
    }
    if args.clean > 0 {
        print(format!(
            "clean runs rejected\n\n{}\n",
            args.format.write(&sensitivity::clean_table(&lengths))
        ))?;
    }
    let false_alarms: Vec<&String> = lengths.iter().flat_map(|length| &length.false_alarms).collect();
    for told in false_alarms.iter().take(MOST_TOLD) {
        print(format!("rejected by mistake: {told}\n"))?;
    }
    print(format!("{seconds:.0} s\n"))?;
    Ok(if false_alarms.is_empty() { Exit::Passed } else { Exit::Failed })
}
