//! What the process protocol costs: the same steps on the embedded engine in this process and behind a socket.

use std::time::{Duration, Instant};

use shardcheck_cases::{Case, SuiteName, suite};
use shardcheck_engine::{
    Answer, Attention, CommBackend, Configuration, Engine, LaneOrder, Operation, Session, Tensor, Tensors,
};
use shardcheck_formats::{Counter, Dtype};

use crate::explain::Table;
use crate::run::judge_case;

/// What is measured.
#[derive(Debug, Clone)]
pub struct Options {
    /// Runs of which the median counts.
    pub runs: usize,
    /// Sizes of a cache that is loaded and read back, in bytes.
    pub sizes_bytes: Vec<usize>,
}

/// One line.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// What was asked.
    pub what: String,
    /// Bytes that went over.
    pub bytes: usize,
    /// Median in this process.
    pub direct_s: f64,
    /// Median behind the socket.
    pub behind_s: f64,
}

impl Line {
    /// Seconds that the protocol takes.
    pub fn overhead_s(&self) -> f64 {
        self.behind_s - self.direct_s
    }
}

/// Measures the steps on both engines, by turns.
///
/// # Errors
/// What an engine says that fails or does not do a step.
pub fn measure(direct: &dyn Engine, behind: &dyn Engine, options: &Options) -> Result<Vec<Line>, String> {
    let mut lines = vec![small_step(direct, behind, options)?];
    lines.extend(whole_cases(direct, behind, options));
    for bytes in &options.sizes_bytes {
        lines.extend(cache(direct, behind, options, *bytes)?);
    }
    Ok(lines)
}

/// The lines as a table.
pub fn table(lines: &[Line]) -> Table {
    let rows = lines.iter().map(|line| {
        let rate = line.bytes as f64 / line.overhead_s().max(1e-9) / 1e9;
        [
            line.what.clone(),
            line.bytes.to_string(),
            milliseconds(line.direct_s),
            milliseconds(line.behind_s),
            milliseconds(line.overhead_s()),
            if line.bytes < 1 << 20 { "–".to_owned() } else { format!("{rate:.2}") },
        ]
    });
    Table::new(["question", "bytes", "direct", "behind", "overhead", "GB/s"], rows)
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", seconds * 1e3)
}

/// A merge of two tiny states on an open session: nearly nothing is computed.
fn small_step(direct: &dyn Engine, behind: &dyn Engine, options: &Options) -> Result<Line, String> {
    let case: Case = "merge_states/w2.t3.h2.d8.bf16.a2a.hi_lo/random/contiguous/7"
        .parse()
        .map_err(|error| format!("{error}"))?;
    let inputs = case.merge_inputs().ok_or("a merge has inputs")?.tensors;
    let operation = case.operation().ok_or("a merge is an operation")?;
    let configuration = case.configuration().ok_or("a merge has a configuration")?;
    let mut medians = [0.0; 2];
    for (engine, median) in [direct, behind].into_iter().zip(&mut medians) {
        let mut session = open(engine, &configuration)?;
        let mut times = Vec::new();
        for _ in 0..options.runs * 20 {
            times.push(timed(|| step(session.as_mut(), &operation, &inputs))?.0);
        }
        *median = middle(times);
    }
    let bytes = inputs.iter().map(|(_, tensor)| tensor.bytes().len()).sum();
    Ok(Line { what: "a step of merge_states".to_owned(), bytes, direct_s: medians[0], behind_s: medians[1] })
}

/// Whole cases of the smallest suite, oracle and properties included: the one in the middle, and the mean, which the long sequences
/// of steps among them raise.
fn whole_cases(direct: &dyn Engine, behind: &dyn Engine, options: &Options) -> [Line; 2] {
    let cases = suite(SuiteName::EngineSmoke, 1);
    let mut times = vec![[Vec::new(), Vec::new()]; cases.len()];
    for _ in 0..options.runs {
        for (case, times) in cases.iter().zip(&mut times) {
            for (engine, times) in [direct, behind].into_iter().zip(times) {
                let started = Instant::now();
                judge_case(case, engine, &|_| true);
                times.push(started.elapsed().as_secs_f64());
            }
        }
    }
    let mut lines: Vec<Line> = times
        .into_iter()
        .map(|times| {
            let [direct_s, behind_s] = times.map(middle);
            Line { what: "the middle case of engine-smoke".to_owned(), bytes: 0, direct_s, behind_s }
        })
        .collect();
    let mean = |seconds: fn(&Line) -> f64| lines.iter().map(seconds).sum::<f64>() / lines.len() as f64;
    let what = "engine-smoke, mean of its cases".to_owned();
    let mean = Line { what, bytes: 0, direct_s: mean(|l| l.direct_s), behind_s: mean(|l| l.behind_s) };
    lines.sort_by(|a, b| a.overhead_s().total_cmp(&b.overhead_s()));
    [lines.swap_remove(lines.len() / 2), mean]
}

/// A cache that is loaded, and one that is read back.
fn cache(
    direct: &dyn Engine,
    behind: &dyn Engine,
    options: &Options,
    bytes: usize,
) -> Result<[Line; 2], String> {
    let mut configuration = Configuration {
        attention: Attention::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64, v_head_dim: 128 },
        tp: 1,
        dcp: 1,
        heads_per_rank: 1,
        interleave: 1,
        block_size: 64,
        blocks: 1,
        dtype: Dtype::Bf16,
        kv_dtype: Dtype::Bf16,
        kv_scale: 1.0,
        softmax_scale: 1.0,
        comm_backend: CommBackend::A2a,
        lane_order: LaneOrder::HiLo,
        query_replication: false,
        project_before_merge: false,
        kernel_head_widths: Vec::new(),
        second_group: None,
    };
    let block_bytes = configuration.block_size * configuration.attention.qk_dim() * 2;
    configuration.blocks = bytes.div_ceil(block_bytes).max(1);
    let shape = [1, configuration.blocks, configuration.block_size, 1, configuration.attention.qk_dim()];
    let mut draws = Counter::new(1, 1);
    let content: Vec<u8> =
        (0..configuration.blocks * block_bytes / 8).flat_map(|_| draws.next_u64().to_le_bytes()).collect();
    let bytes = content.len();
    let tensor = Tensor::new(Dtype::Bf16, shape.to_vec(), content).map_err(|error| error.to_string())?;
    let given = Tensors::new().with("key_cache", tensor);
    let mut loads = [Vec::new(), Vec::new()];
    let mut reads = [Vec::new(), Vec::new()];
    for (index, engine) in [direct, behind].into_iter().enumerate() {
        let mut session = open(engine, &configuration)?;
        for _ in 0..options.runs {
            loads[index].push(timed(|| step(session.as_mut(), &Operation::LoadCache, &given))?.0);
            let (seconds, back) = timed(|| step(session.as_mut(), &Operation::ReadCache, &Tensors::new()))?;
            if back.find("key_cache").map(Tensor::bytes) != given.find("key_cache").map(Tensor::bytes) {
                return Err("the cache did not come back as it went".to_owned());
            }
            reads[index].push(seconds);
        }
    }
    let line = |what: &str, [direct, behind]: [Vec<f64>; 2]| Line {
        what: what.to_owned(),
        bytes,
        direct_s: middle(direct),
        behind_s: middle(behind),
    };
    Ok([line("a cache loaded", loads), line("a cache read back", reads)])
}

fn open(engine: &dyn Engine, configuration: &Configuration) -> Result<Box<dyn Session>, String> {
    match engine.open(configuration).map_err(|error| error.to_string())? {
        Answer::Done(session) => Ok(session),
        Answer::Unsupported(why) => Err(why),
    }
}

fn step(session: &mut dyn Session, operation: &Operation, inputs: &Tensors) -> Result<Tensors, String> {
    let mut given = inputs.clone();
    match session.step(operation, &mut given).map_err(|error| error.to_string())? {
        Answer::Done(reply) => Ok(reply.outputs),
        Answer::Unsupported(why) => Err(why),
    }
}

fn timed<T>(ask: impl FnOnce() -> Result<T, String>) -> Result<(f64, T), String> {
    let started = Instant::now();
    let value = ask()?;
    Ok((Duration::as_secs_f64(&started.elapsed()), value))
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
