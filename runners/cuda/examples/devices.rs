//! What several devices do together: steps repeated to the last bit, a rank that keeps out of a collective told by name, and the time of
//! merges beside the library's own all-gather of the same bytes.
//!
//! `devices N,N,… [FILE OF libnccl.so.2]`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use shardcheck_cuda::{CudaEngine, Devices, Exchange, Options};
use shardcheck_engine::{
    Answer, Attention, CommBackend, Configuration, Engine, EngineError, LaneOrder, Mask, Operation, Reply,
    Session, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Repeats of a step that have to be equal to the last bit.
const REPEATS: usize = 50;

fn configuration(ranks: usize, comm_backend: CommBackend) -> Configuration {
    Configuration {
        attention: Attention::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64, v_head_dim: 128 },
        tp: ranks,
        dcp: ranks,
        heads_per_rank: 128 / ranks,
        interleave: 1,
        block_size: 64,
        blocks: 128,
        dtype: Dtype::Bf16,
        kv_dtype: Dtype::Bf16,
        kv_scale: 1.0,
        softmax_scale: 0.134_763,
        comm_backend,
        lane_order: LaneOrder::HiLo,
        query_replication: false,
        project_before_merge: false,
        second_group: None,
        kernel_head_widths: vec![],
    }
}

fn opened(engine: &dyn Engine, configuration: &Configuration) -> Outcome<Box<dyn Session>> {
    match engine.open(configuration)? {
        Answer::Done(session) => Ok(session),
        Answer::Unsupported(why) => Err(why.into()),
    }
}

/// bf16 codes between 1/4 and 2 of either sign, from a counter.
fn codes(shape: &[usize], seed: u64) -> Tensor {
    let code = |at: u64| {
        let bits = (at ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        (0x3E80 + (bits & 0x017F)) | (bits >> 8 & 0x8000)
    };
    let count = shape.iter().product::<usize>() as u64;
    Tensor::from_codes(Dtype::Bf16, shape, &(0..count).map(code).collect::<Vec<_>>())
}

/// Caches of random numbers and a decode step over them.
struct Decode {
    caches: Tensors,
    inputs: Tensors,
}

impl Decode {
    fn of(configuration: &Configuration) -> Self {
        let shape = [configuration.tp, configuration.blocks, configuration.block_size, 1, 576];
        let table: Vec<i32> = (0..4 * 32).collect();
        Self {
            caches: Tensors::new().with("key_cache", codes(&shape, 1)),
            inputs: Tensors::new()
                .with("seq_lens", Tensor::from_i32(&[4], &[5, 300, 1000, 2048]))
                .with("query_start_loc", Tensor::from_i32(&[5], &[0, 1, 2, 3, 4]))
                .with("block_table", Tensor::from_i32(&[4, 32], &table))
                .with("query", codes(&[4, configuration.total_heads(), 576], 2)),
        }
    }

    fn ask(&mut self, session: &mut dyn Session) -> Result<Reply, EngineError> {
        let done = |answer: Answer<Reply>| match answer {
            Answer::Done(reply) => Ok(reply),
            Answer::Unsupported(why) => Err(EngineError::Crash { text: why }),
        };
        session.step(&Operation::LoadCache, &mut self.caches).and_then(done)?;
        session.step(&Operation::Attend { mask: Mask::Causal }, &mut self.inputs).and_then(done)
    }
}

fn repeats(engine: &CudaEngine, ranks: usize) -> Outcome<()> {
    for backend in CommBackend::ALL {
        let configuration = configuration(ranks, backend);
        let mut session = opened(engine, &configuration)?;
        let mut decode = Decode::of(&configuration);
        let first = decode.ask(&mut *session)?;
        println!("{}", first.effective);
        for repeat in 1..REPEATS {
            let again = decode.ask(&mut *session)?;
            for (name, tensor) in first.outputs.iter() {
                if tensor.bytes() != again.outputs.get(name)?.bytes() {
                    return Err(format!("{}: {name} differs at repeat {repeat}", backend.name()).into());
                }
            }
        }
        println!("{} ranks, {}: {REPEATS} repeats equal to the last bit", ranks, backend.name());
    }
    Ok(())
}

/// The last rank keeps out of a gather: its peers are told by name, and the next engine works.
fn hang(ordinals: &[usize], file: Option<&Path>) -> Outcome<()> {
    for (fault, backend) in [
        ("one-rank-skips-the-query-gather", CommBackend::A2a),
        ("one-rank-skips-the-lse-gather", CommBackend::AgRs),
    ] {
        let options = Options {
            devices: Devices::Joined(ordinals),
            collectives: file,
            wait: Duration::from_secs(2),
            fault: Some(fault),
            ..Options::default()
        };
        let engine = CudaEngine::open(options)?;
        let configuration = configuration(ordinals.len(), backend);
        let mut decode = Decode::of(&configuration);
        for attempt in ["first", "second"] {
            let mut session = opened(&engine, &configuration)?;
            let began = Instant::now();
            match decode.ask(&mut *session) {
                Err(error @ EngineError::Timeout { rank: Some(_), .. }) => {
                    println!("{fault}, {attempt}: {error}; {:.1} s", began.elapsed().as_secs_f64());
                }
                other => {
                    return Err(
                        format!("{fault}, {attempt}: {:?}", other.map(|reply| reply.effective)).into()
                    );
                }
            }
        }
        let healthy = CudaEngine::open(Options { fault: None, ..options })?;
        decode.ask(&mut *opened(&healthy, &configuration)?)?;
        println!("{fault}: an engine without it works behind it");
    }
    Ok(())
}

fn median(mut times: Vec<f32>) -> f64 {
    times.sort_by(f32::total_cmp);
    f64::from(times[times.len() / 2])
}

fn exchanges(engine: &CudaEngine, devices: usize) -> Outcome<()> {
    for ranks in [devices, 4 * devices] {
        for rows in [1, 64, 1024] {
            for backend in CommBackend::ALL {
                let exchange = Exchange::new(engine, &configuration(ranks, backend), rows)?;
                let device_bytes = exchange.rank_bytes() * ranks / devices;
                exchange.merge_ms(3)?;
                exchange.all_gather_ms(device_bytes, 3)?;
                let merge = median(exchange.merge_ms(21)?);
                let gather = median(exchange.all_gather_ms(device_bytes, 21)?);
                let others = (devices - 1) as f64;
                println!(
                    "{ranks} ranks, {rows} rows, {}: merge {merge:.3} ms; all-gather of the same {device_bytes} bytes a device \
                     {gather:.3} ms, {:.1} GB/s into each",
                    backend.name(),
                    others * device_bytes as f64 / gather / 1e6,
                );
            }
        }
    }
    Ok(())
}

fn run() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let ordinals = arguments.next().unwrap_or_else(|| "0".to_owned());
    let ordinals = ordinals.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let file = arguments.next().map(PathBuf::from);
    let options =
        Options { devices: Devices::Joined(&ordinals), collectives: file.as_deref(), ..Options::default() };
    let engine = CudaEngine::open(options)?;
    println!("{:?}", engine.profile().devices);
    for ranks in [ordinals.len(), 4 * ordinals.len()] {
        repeats(&engine, ranks)?;
    }
    if ordinals.len() > 1 {
        hang(&ordinals, file.as_deref())?;
    }
    exchanges(&engine, ordinals.len())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
