//! Compares the CUDA engine with the embedded one, operation by operation, on random sessions: the quick look at a card before the harness
//! judges it. Integers and codes have to be equal, floats near; exits with 1 when anything differs.
//!
//! `compare [SESSIONS] [--graphs] [--portable] [--devices N,N,… [--one]]`: with joined devices, and those against one device in place of the
//! embedded engine.

use std::process::ExitCode;

use shardcheck_cuda::{CudaEngine, Devices, Graphs, Options};
use shardcheck_engine::{
    Answer, Attention, CacheLayout, CommBackend, Configuration, Engine, LaneOrder, LseBase, Mask, Operation,
    Reply, Session, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 33) as usize % bound.max(1)
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn normal(&mut self) -> f32 {
        (0..6).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum::<f32>()
            * std::f32::consts::SQRT_2
    }

    fn tensor(&mut self, dtype: Dtype, shape: &[usize]) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal()).collect();
        Tensor::from_f32(dtype, shape, &values)
    }
}

fn configuration(random: &mut Random) -> Configuration {
    let dcp = random.of(&[1, 2, 3, 4]);
    let real = random.below(5) == 0;
    let attention = match (real, random.below(2)) {
        (true, _) => Attention::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64, v_head_dim: 128 },
        (false, 0) => {
            Attention::Mla { kv_lora_rank: random.of(&[16, 40]), qk_rope_head_dim: 8, v_head_dim: 24 }
        }
        (false, _) => {
            let v_head_dim = random.of(&[16, 24]);
            Attention::Gqa { kv_heads: random.of(&[1, 2]), head_dim: 24, v_head_dim }
        }
    };
    let kv_dtype = random.of(&[
        Dtype::Bf16,
        Dtype::Bf16,
        Dtype::F16,
        Dtype::F32,
        Dtype::E4m3fn,
        Dtype::E4m3fnuz,
        Dtype::E5m2,
    ]);
    let heads_per_rank = random.of(&[2, 4, 6]) * if real { 10 } else { 1 };
    let interleave = random.of(&[1, 2, 4]);
    let first = Configuration {
        attention,
        tp: dcp * random.of(&[1, 2]),
        dcp,
        heads_per_rank,
        interleave,
        block_size: interleave * random.of(&[2, 4]),
        blocks: 1200,
        dtype: Dtype::Bf16,
        kv_dtype,
        kv_scale: if kv_dtype.size_bytes() == 1 { random.of(&[0.02, 0.5]) } else { 1.0 },
        softmax_scale: 1.0 / (attention.qk_dim() as f32).sqrt(),
        comm_backend: random.of(&CommBackend::ALL),
        lane_order: random.of(&LaneOrder::ALL),
        query_replication: random.below(2) == 0,
        project_before_merge: random.below(2) == 0,
        kernel_head_widths: random.of(&[&[][..], &[16, 32, 64, 128]]).to_vec(),
        second_group: None,
    };
    let second = Configuration { dcp: first.tp, block_size: 2 * first.block_size, ..first.clone() };
    let second_group = (random.below(4) == 0).then(|| Box::new(second));
    Configuration { second_group, ..first }
}

/// A batch: lengths, starts and a table of blocks that nobody shares.
struct Batch {
    lens: Vec<i32>,
    starts: Vec<i32>,
    table: Tensor,
}

fn batch(random: &mut Random, configuration: &Configuration, lens: Vec<i32>, most_rows: usize) -> Batch {
    let mut starts = vec![0i32];
    for len in &lens {
        let rows = random.below(most_rows + 1).min((*len).max(0) as usize);
        starts.push(starts[starts.len() - 1] + rows as i32);
    }
    let tokens = configuration.virtual_block_tokens();
    let width = lens.iter().map(|len| (*len as usize).div_ceil(tokens)).max().unwrap_or(0) + 1;
    let mut free: Vec<i32> = (0..configuration.blocks as i32).collect();
    for index in (1..free.len()).rev() {
        let other = random.below(index + 1);
        free.swap(index, other);
    }
    let mut table = Vec::new();
    for len in &lens {
        for entry in 0..width {
            let needed = entry < (*len as usize).div_ceil(tokens);
            table.push(if needed { free.pop().expect("enough blocks") } else { i32::MAX });
        }
    }
    Batch { table: Tensor::from_i32(&[lens.len(), width], &table), lens, starts }
}

impl Batch {
    fn with(&self, lens: &str) -> Tensors {
        Tensors::new()
            .with(lens, Tensor::from_i32(&[self.lens.len()], &self.lens))
            .with("query_start_loc", Tensor::from_i32(&[self.starts.len()], &self.starts))
            .with("block_table", self.table.clone())
    }

    fn rows(&self) -> usize {
        self.starts[self.lens.len()] as usize
    }
}

/// Steps of one session.
fn steps(random: &mut Random, configuration: &Configuration) -> Vec<(Operation, Tensors)> {
    let attention = configuration.attention;
    let (kv, dk, dv) = (attention.kv_heads(), attention.qk_dim(), attention.value_dim());
    let count = 1 + random.below(4);
    let longest = random.of(&[12, 90, 700]);
    let lens: Vec<i32> =
        (0..count).map(|_| if random.below(5) == 0 { 0 } else { random.below(longest) as i32 }).collect();
    let written = batch(random, configuration, lens.clone(), 3);
    let requests: Vec<i32> =
        lens.iter().enumerate().flat_map(|(r, len)| vec![r as i32; *len as usize]).chain([-1, -1]).collect();
    let positions: Vec<i64> = lens.iter().flat_map(|len| 0..i64::from(*len)).chain([0, 7]).collect();
    let tokens = requests.len();
    let mut write = Tensors::new()
        .with("key", random.tensor(Dtype::Bf16, &[tokens, kv, dk]))
        .with("positions", Tensor::from_i64(&[tokens], &positions))
        .with("requests", Tensor::from_i32(&[tokens], &requests))
        .with("block_table", written.table.clone());
    if !attention.is_mla() {
        write.insert("value", random.tensor(Dtype::Bf16, &[tokens, kv, dv]));
    }
    let mut steps = vec![
        (Operation::Layout, written.with("seq_lens")),
        (Operation::WriteKv, write),
        (Operation::ReadCache, Tensors::new()),
    ];
    for (mask, projects) in [(Mask::Causal, false), (Mask::Bidirectional, true), (Mask::Causal, true)] {
        let rows = written.rows() + random.below(3);
        let shape = [rows, configuration.total_heads(), dk];
        let mut attend = written.with("seq_lens").with("query", random.tensor(Dtype::Bf16, &shape));
        if projects && attention.is_mla() {
            let shape = [configuration.total_heads(), dv, attention.v_head_dim()];
            attend.insert("w_uv", random.tensor(Dtype::Bf16, &shape));
        }
        steps.push((Operation::Attend { mask }, attend));
    }
    let shorter = Batch {
        lens: lens.iter().map(|len| len / 2).collect(),
        starts: (0..=count as i32).collect(),
        table: written.table.clone(),
    };
    let query = random.tensor(Dtype::Bf16, &[count, configuration.total_heads(), dk]);
    steps.push((Operation::Attend { mask: Mask::Causal }, shorter.with("seq_lens").with("query", query)));
    let rows = written.rows() + random.below(2);
    let mut context = written
        .with("context_lens")
        .with("query", random.tensor(Dtype::Bf16, &[rows, configuration.total_heads(), dk]))
        .with("key", random.tensor(Dtype::Bf16, &[rows, kv, dk]));
    if !attention.is_mla() {
        context.insert("value", random.tensor(Dtype::Bf16, &[rows, kv, dv]));
    }
    let chunk_budget_tokens = random.of(&[1, 64, 4096]);
    steps.push((Operation::AttendContext { chunk_budget_tokens }, context));
    steps.extend(merges(random, configuration));
    steps.push(import(random, configuration, &written));
    steps.push((Operation::ReadCache, Tensors::new()));
    steps
}

/// The requests of a batch out of random caches of another layout.
fn import(random: &mut Random, configuration: &Configuration, batch: &Batch) -> (Operation, Tensors) {
    let attention = configuration.attention;
    let source = CacheLayout { dcp: 1 + random.below(3), interleave: 2, block_size: random.of(&[2, 6]) };
    let tokens = source.dcp * source.block_size;
    let needed = |len: &i32| (*len as usize).div_ceil(tokens);
    let (blocks, width) = (
        batch.lens.iter().map(needed).sum::<usize>() + 1,
        batch.lens.iter().map(needed).max().unwrap_or(0) + 1,
    );
    let mut free = (0..blocks as i32).rev();
    let entry = |request: usize, entry: usize| entry < needed(&batch.lens[request]);
    let places = (0..batch.lens.len()).flat_map(|request| (0..width).map(move |at| (request, at)));
    let table: Vec<i32> = places
        .map(|(request, at)| if entry(request, at) { free.next().expect("enough blocks") } else { -7 })
        .collect();
    let mut cache = |dim: usize| {
        random.tensor(
            configuration.kv_dtype,
            &[source.dcp, blocks, source.block_size, attention.kv_heads(), dim],
        )
    };
    let mut inputs = Tensors::new()
        .with("source_key_cache", cache(attention.qk_dim()))
        .with("source_block_table", Tensor::from_i32(&[batch.lens.len(), width], &table))
        .with("seq_lens", Tensor::from_i32(&[batch.lens.len()], &batch.lens))
        .with("block_table", batch.table.clone());
    if !attention.is_mla() {
        inputs.insert("source_value_cache", cache(attention.value_dim()));
    }
    (Operation::ImportCache { source }, inputs)
}

/// Steps of every KV group of a session.
fn steps_of_groups(random: &mut Random, configuration: &Configuration) -> Vec<(Operation, Tensors)> {
    let groups = (0..2).filter_map(|number| Some((number, configuration.group(number)?)));
    groups
        .flat_map(|(number, group)| {
            let steps = steps(random, &group);
            steps.into_iter().map(move |(operation, inputs)| (operation.in_group(number), inputs))
        })
        .collect()
}

fn merges(random: &mut Random, configuration: &Configuration) -> Vec<(Operation, Tensors)> {
    let (world, rows, heads, dim) = (configuration.dcp, 3, configuration.gathered_heads(), 20);
    let dtype = random.of(&[Dtype::Bf16, Dtype::F32]);
    let mut lse = |shape: &[usize]| {
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| match random.below(6) {
                0 => f32::NEG_INFINITY,
                1 => random.of(&[f32::NAN, f32::INFINITY, 300.0, -300.0]),
                _ => 3.0 * random.normal(),
            })
            .collect();
        Tensor::from_f32(Dtype::F32, shape, &values)
    };
    let (partial_lse, first_lse, second_lse) =
        (lse(&[world, rows, heads]), lse(&[rows, heads]), lse(&[rows, heads]));
    let packed = lse(&[77]);
    let partials = Tensors::new()
        .with("partial_out", random.tensor(dtype, &[world, rows, heads, dim]))
        .with("partial_lse", partial_lse);
    let states = Tensors::new()
        .with("prefix_out", random.tensor(dtype, &[rows, heads, dim]))
        .with("prefix_lse", first_lse)
        .with("suffix_out", random.tensor(Dtype::F32, &[rows, heads, dim]))
        .with("suffix_lse", second_lse);
    let segments = 4;
    let sums: Vec<f32> = (0..segments * rows * heads).map(|_| 1.0 + random.normal().abs()).collect();
    let segments_given = Tensors::new()
        .with("segment_max", random.tensor(Dtype::F32, &[segments, rows, heads]))
        .with("segment_sum", Tensor::from_f32(Dtype::F32, &[segments, rows, heads], &sums))
        .with("segment_acc", random.tensor(Dtype::F32, &[segments, rows, heads, dim]))
        .with("row_lens", Tensor::from_i32(&[rows], &[0, 70, 200]));
    vec![
        (Operation::MergePartials { lse_base: random.of(&[LseBase::E, LseBase::Two]) }, partials),
        (Operation::MergeStates, states),
        (Operation::MergeSegments { tile_tokens: 16 }, segments_given),
        (Operation::PackLse, Tensors::new().with("lse", packed)),
    ]
}

/// How far apart two replies are; `Err` with the first tensor that differs too much. `same_kernels`: whether both come from the same kernels,
/// whose answers are equal to the last bit but for sums that a reduce-scatter adds in another order.
fn compare(expected: &Reply, seen: &Reply, same_kernels: bool) -> Result<f64, String> {
    if expected.collectives != seen.collectives {
        return Err(format!("collectives {:?} and {:?}", expected.collectives, seen.collectives));
    }
    let mut worst = 0.0f64;
    for (name, tensor) in expected.outputs.iter() {
        let other = seen.outputs.find(name).ok_or_else(|| format!("{name} is missing"))?;
        if tensor.shape() != other.shape() || tensor.dtype() != other.dtype() {
            return Err(format!("{name}: {tensor:?} and {other:?}"));
        }
        let reduced = seen.effective.get("comm_backend") == Some(CommBackend::AgRs.name()) && name == "out";
        let exact = (same_kernels && !reduced)
            || !tensor.dtype().is_float()
            || ["key_cache", "value_cache", "gathered_query", "unpacked"].contains(&name);
        if exact {
            let (a, b) = (tensor.to_codes(), other.to_codes());
            if let Some(at) = (0..a.len()).find(|at| a[*at] != b[*at]) {
                return Err(format!("{name}[{at}] is {:#x}, expected {:#x}", b[at], a[at]));
            }
            continue;
        }
        let (a, b) = (tensor.to_f64(), other.to_f64());
        let empty = if name == "partial_out" {
            let lses = expected.outputs.get("partial_lse").map_err(|e| e.to_string())?.to_f64();
            let width = a.len() / lses.len().max(1);
            lses.iter().flat_map(|lse| vec![*lse == f64::NEG_INFINITY; width]).collect()
        } else {
            vec![false; a.len()]
        };
        let scale = a.iter().filter(|v| v.is_finite()).fold(1e-3f64, |most, v| most.max(v.abs()));
        let allowed = if name.ends_with("lse") { 3e-4 } else { 0.012 * scale };
        for at in (0..a.len()).filter(|at| !empty[*at]) {
            let same = a[at] == b[at] || (a[at].is_nan() && b[at].is_nan());
            // a NaN on one side alone is not near
            let near = (a[at] - b[at]).abs() <= allowed;
            if !same && !near {
                return Err(format!("{name}[{at}] of {:?} is {}, expected {}", tensor.shape(), b[at], a[at]));
            }
            if !same {
                worst = worst.max((a[at] - b[at]).abs() / allowed);
            }
        }
    }
    Ok(worst)
}

fn open(engine: &dyn Engine, configuration: &Configuration) -> Result<Box<dyn Session>, String> {
    match engine.open(configuration) {
        Ok(Answer::Done(session)) => Ok(session),
        Ok(Answer::Unsupported(why)) => Err(why),
        Err(error) => Err(error.to_string()),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let graphs = if has("--graphs") { Graphs::On } else { Graphs::Off };
    // mma.sync in place of the warpgroup instructions
    let target = has("--portable").then_some("sm_90");
    let sessions: u64 = arguments.iter().find_map(|a| a.parse().ok()).unwrap_or(60);
    let joined: Option<Vec<usize>> = arguments
        .iter()
        .position(|argument| argument == "--devices")
        .map(|at| arguments[at + 1].split(',').filter_map(|number| number.parse().ok()).collect());
    let options = Options { graphs, target, ..Options::default() };
    let devices = joined.as_ref().map_or(Devices::One(0), |ordinals| Devices::Joined(ordinals));
    let cuda = match CudaEngine::open(Options { devices, ..options }) {
        Ok(engine) => engine,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(9);
        }
    };
    let same_kernels = has("--one");
    let reference: Box<dyn Engine> = if same_kernels {
        match CudaEngine::open(options) {
            Ok(engine) => Box::new(engine),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::from(9);
            }
        }
    } else {
        Box::new(shardcheck_cpu::engine())
    };
    println!("{:?}", cuda.profile().devices);
    let (mut differ, mut tried) = (0, 0);
    let mut kernels = std::collections::BTreeMap::<String, usize>::new();
    for seed in 1..=sessions {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let configuration = configuration(&mut random);
        let (mut one, mut other) = match (open(&*reference, &configuration), open(&cuda, &configuration)) {
            (Ok(one), Ok(other)) => (one, other),
            (one, other) => {
                println!("{seed}: {:?} {:?}", one.err(), other.err());
                continue;
            }
        };
        for (operation, mut inputs) in steps_of_groups(&mut random, &configuration) {
            tried += 1;
            let expected = one.step(&operation, &mut inputs);
            let seen = other.step(&operation, &mut inputs);
            let outcome = match (expected, seen) {
                (Ok(Answer::Done(expected)), Ok(Answer::Done(seen))) => {
                    if let Some(kernel) = seen.effective.get("kernel") {
                        *kernels.entry(kernel.to_owned()).or_default() += 1;
                    }
                    compare(&expected, &seen, same_kernels)
                }
                (expected, seen) => Err(format!("{:?} and {:?}", expected.err(), seen.err())),
            };
            if let Err(why) = outcome {
                differ += 1;
                if differ <= 40 {
                    println!("{seed} {operation:?}: {why}\n  {configuration:?}");
                }
            }
        }
    }
    println!("{differ} of {tried} steps differ; {kernels:?}");
    if differ == 0 && tried > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
