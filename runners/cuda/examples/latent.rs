//! Times latent decode at DeepSeek-R1's dimensions, one rank's part of a step: milliseconds, bytes and operations a second, beside the card's
//! own copy bandwidth, as one JSON value a line; before them, what the card's arithmetic is seen to be.
//!
//! `latent [--bytes] [--portable]`

use std::process::ExitCode;

use shardcheck_cuda::{CudaEngine, Decode, Options, Queue};
use shardcheck_engine::{Attention, CommBackend, Configuration, EngineError, LaneOrder};
use shardcheck_formats::Dtype;

fn configuration(blocks: usize, kv_dtype: Dtype) -> Configuration {
    Configuration {
        attention: Attention::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64, v_head_dim: 128 },
        tp: 1,
        dcp: 1,
        heads_per_rank: 128,
        interleave: 1,
        block_size: 64,
        blocks,
        dtype: Dtype::Bf16,
        kv_dtype,
        kv_scale: 1.0,
        softmax_scale: 0.134_763,
        comm_backend: CommBackend::A2a,
        lane_order: LaneOrder::HiLo,
        query_replication: false,
        project_before_merge: false,
        second_group: None,
        kernel_head_widths: vec![],
    }
}

fn median(mut times: Vec<f32>) -> f64 {
    times.sort_by(f32::total_cmp);
    f64::from(times[times.len() / 2])
}

/// Local lengths of rank 0 of 8 for nine ragged requests up to 32k, of single long ones, and of a batch.
fn workloads() -> Vec<(&'static str, Vec<usize>)> {
    let ragged = [5, 300, 1000, 2048, 4096, 8191, 16384, 20000, 32768];
    vec![
        ("nine lengths to 32k, rank 0 of 8", ragged.iter().map(|len: &usize| len.div_ceil(8)).collect()),
        ("one request of 2^20, one rank of 8", vec![(1 << 20) / 8]),
        ("one request of 2^20, one rank", vec![1 << 20]),
        ("64 requests of 8192", vec![8192; 64]),
        ("one request of 4096", vec![4096]),
    ]
}

fn copy_gb_s(queue: &std::sync::Arc<Queue>) -> Result<f64, EngineError> {
    let bytes = 4usize << 30;
    let (from, to) = (queue.allocate(bytes)?, queue.allocate(bytes)?);
    queue.fill(&from, 0x5A)?;
    queue.copy(&from, &to, bytes)?;
    queue.wait()?;
    let ms = median(queue.time_ms(15, || queue.copy(&from, &to, bytes))?);
    Ok(2.0 * bytes as f64 / ms / 1e6)
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    // mma.sync in place of the warpgroup instructions
    let target = std::env::args().any(|a| a == "--portable").then_some("sm_90");
    let engine = CudaEngine::open(Options { target, ..Options::default() })?;
    let dtype = if std::env::args().any(|a| a == "--bytes") { Dtype::E4m3fn } else { Dtype::Bf16 };
    let queue = Queue::new(std::sync::Arc::clone(engine.device()))?;
    for reading in shardcheck_cuda::readings(engine.device())? {
        println!(
            "{:<36} {:?} declared {}; seen {}",
            reading.what, reading.agrees, reading.declared, reading.seen
        );
    }
    println!("{{\"copy_gb_s\": {:.0}}}", copy_gb_s(&queue)?);
    for (name, lens) in workloads() {
        let blocks = lens.iter().map(|len| len.div_ceil(64)).sum::<usize>().max(1);
        let decode = Decode::new(&queue, configuration(blocks, dtype), &lens)?;
        let cold = median(decode.time_ms(5)?);
        let ms = median(decode.time_ms(41)?);
        let tokens = lens.iter().sum::<usize>() as f64;
        let bytes =
            tokens * 576.0 * dtype.size_bytes() as f64 + lens.len() as f64 * 128.0 * (576.0 + 512.0) * 2.0;
        let operations = tokens * 128.0 * (576.0 + 512.0) * 2.0;
        println!(
            "{{\"workload\": \"{name}\", \"cache\": \"{dtype}\", \"segments\": {}, \"ms\": {ms:.4}, \"first_ms\": {cold:.4}, \"gb_s\": {:.0}, \
             \"tflop_s\": {:.0}}}",
            decode.segments(),
            bytes / ms / 1e6,
            operations / ms / 1e9
        );
    }
    Ok(())
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
