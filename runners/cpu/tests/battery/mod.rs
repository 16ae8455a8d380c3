//! A battery of small steps, and a digest of everything that an engine was seen to do in them.

#![allow(dead_code)]

mod drafts;
mod experts;
mod hybrid;
mod kda;
mod selected;
mod selection;
mod sequence;
mod shared_rows;
mod sinks;
mod stack;
mod transfer;

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use shardcheck_cpu::CpuEngine;
use shardcheck_engine::{
    Answer, Attention, CommBackend, Engine, EngineError, LaneOrder, LseBase, Mask, Operation, PcpDecodes,
    PcpStrategy, Reply, RuleSetName, Settings, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use crate::scene::{Scene, step, uniform};

/// Digests by `family.part`, such as `decode.partial_lse`.
pub type Seen = BTreeMap<String, u64>;

/// A part of the battery, tried by itself.
pub struct Trial(Box<dyn Fn(&mut Battery<'_>) + Send + Sync>);

impl Trial {
    fn new(run: impl Fn(&mut Battery<'_>) + Send + Sync + 'static) -> Self {
        Self(Box::new(run))
    }

    /// Everything that it shows of an engine.
    pub fn observe(&self, engine: &CpuEngine) -> Seen {
        let mut battery = Battery { engine, seen: Seen::new() };
        (self.0)(&mut battery);
        battery.seen
    }
}

/// The whole battery. Neighbours in a list of scenes are alike, so that they are not tried in a row.
pub fn trials() -> Vec<Trial> {
    let mut small = vec![
        Trial::new(|battery| battery.given_cache()),
        Trial::new(|battery| battery.equal_logits()),
        Trial::new(|battery| battery.merges()),
        Trial::new(|battery| battery.states()),
        Trial::new(|battery| battery.segments()),
        Trial::new(|battery| battery.pack()),
        Trial::new(|battery| battery.prefill()),
        Trial::new(|battery| battery.routers()),
        Trial::new(|battery| battery.layers()),
        Trial::new(|battery| battery.drafts()),
        Trial::new(|battery| battery.selections()),
        Trial::new(|battery| battery.layers_that_share()),
        Trial::new(|battery| battery.selected()),
        Trial::new(|battery| battery.sinks()),
        Trial::new(|battery| battery.kda()),
        Trial::new(|battery| battery.stacks()),
        Trial::new(|battery| battery.draft_heads()),
        Trial::new(|battery| battery.hybrids()),
        Trial::new(|battery| battery.shared_rows()),
        Trial::new(|battery| battery.shared_tokens()),
        Trial::new(|battery| battery.rules()),
    ];
    for (scene, budget) in contexts() {
        small.push(Trial::new(move |battery| battery.context(&scene, budget)));
    }
    let attend = |(family, scene): (&'static str, Scene)| Trial::new(move |b| b.attend(family, &scene));
    let mut scenes: Vec<Trial> = scenes().into_iter().map(attend).collect();
    let mut trials = small;
    while !scenes.is_empty() {
        // every seventh, then every seventh of the rest
        let (chosen, rest): (Vec<_>, Vec<_>) = scenes.into_iter().enumerate().partition(|(i, _)| i % 7 == 3);
        let (chosen, rest) = if chosen.is_empty() { (rest, chosen) } else { (chosen, rest) };
        trials.extend(chosen.into_iter().map(|(_, trial)| trial));
        scenes = rest.into_iter().map(|(_, trial)| trial).collect();
    }
    trials.push(Trial::new(|battery| battery.sequence()));
    trials.push(Trial::new(|battery| battery.transfer()));
    for block_size in [2, 8] {
        trials.push(Trial::new(move |battery| {
            battery.turns(sequence::play_groups(battery.engine, block_size))
        }));
    }
    trials
}

/// What is tried.
pub struct Battery<'a> {
    engine: &'a CpuEngine,
    seen: Seen,
}

/// What a layout shows.
const LAYOUT: [&str; 10] = [
    "local_lens",
    "row_lens",
    "draft_lens",
    "slots",
    "blocks_needed",
    "units",
    "sub_page_table",
    "row_mask",
    "read_indptr",
    "read_slots",
];

impl Battery<'_> {
    fn note(&mut self, key: &str, what: impl Hash) {
        let mut hasher = DefaultHasher::new();
        self.seen.get(key).hash(&mut hasher);
        what.hash(&mut hasher);
        self.seen.insert(key.to_owned(), hasher.finish());
    }

    /// Notes each output of a reply, or the kind of the error under every name that the family has.
    fn reply(&mut self, family: &str, names: &[&str], reply: &Result<Reply, EngineError>) {
        match reply {
            Ok(reply) => {
                for name in names {
                    let tensor = reply.outputs.find(name).map(|t| (format!("{t:?}"), t.bytes().to_vec()));
                    self.note(&format!("{family}.{name}"), tensor);
                }
                self.note(&format!("{family}.effective"), reply.effective.to_string());
                self.note(&format!("{family}.collectives"), &reply.collectives);
            }
            Err(error) => {
                for name in names.iter().chain(&["effective", "collectives"]) {
                    self.note(&format!("{family}.{name}"), std::mem::discriminant(error));
                }
            }
        }
    }

    fn attend(&mut self, family: &str, scene: &Scene) {
        const NAMES: [&str; 6] = ["out", "lse", "partial_out", "partial_lse", "row_lens", "gathered_query"];
        let mut session = scene.open(self.engine);
        let layout = step(session.as_mut(), &Operation::Layout, &mut scene.metadata());
        self.reply("layout", &LAYOUT, &layout);
        let written = step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs());
        self.reply("write", &["slots"], &written);
        let read = step(session.as_mut(), &Operation::ReadCache, &mut Tensors::new());
        self.reply("write", &["key_cache", "value_cache"], &read);
        let mut inputs = scene.attend_inputs();
        let reply = step(session.as_mut(), &Operation::Attend { mask: scene.mask }, &mut inputs);
        let mut unchanged = vec![inputs == scene.attend_inputs()];
        // later steps of the same session as well; two, so that a fault that answers by turns keeps its turn
        for _ in 0..2 {
            let mut later = scene.attend_inputs();
            let _ = step(session.as_mut(), &Operation::Attend { mask: scene.mask }, &mut later);
            unchanged.push(later == scene.attend_inputs());
        }
        self.note("attend.inputs", unchanged);
        self.reply(family, &NAMES, &reply);
    }

    /// One session of many steps.
    fn sequence(&mut self) {
        self.turns(sequence::play(self.engine));
    }

    fn turns(&mut self, answers: Vec<sequence::Answers>) {
        for [layout, write, attend, caches] in answers {
            self.reply("sequence", &["local_lens"], &layout);
            self.reply("sequence", &["slots"], &write);
            self.reply("sequence", &["out", "lse", "row_lens", "chunk_lens"], &attend);
            self.reply("sequence", &["key_cache"], &caches);
        }
    }

    /// Requests that come from a session of another layout.
    fn transfer(&mut self) {
        let [caches, decode] = transfer::play(self.engine);
        self.reply("transfer", &["key_cache"], &caches);
        self.reply("sequence", &["out"], &decode);
    }

    /// Decode over caches that a healthy engine laid out.
    fn given_cache(&mut self) {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let scene = Scene::small(2).with(|s| s.in_16_bits(dtype));
            let healthy = shardcheck_cpu::engine();
            let mut writer = scene.open(&healthy);
            step(writer.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
            let mut cache =
                step(writer.as_mut(), &Operation::ReadCache, &mut Tensors::new()).unwrap().outputs;
            let mut session = scene.open(self.engine);
            let loaded = step(session.as_mut(), &Operation::LoadCache, &mut cache);
            let attend = Operation::Attend { mask: Mask::Causal };
            let reply = loaded.and_then(|_| step(session.as_mut(), &attend, &mut scene.attend_inputs()));
            self.reply("given", &["out", "lse"], &reply);
        }
    }

    fn equal_logits(&mut self) {
        for (world, backend) in [(1, CommBackend::A2a), (4, CommBackend::A2a), (4, CommBackend::AgRs)] {
            let scene = Scene::small(world).with(|s| {
                s.sharpness = 0.0;
                s.configuration.comm_backend = backend;
            });
            let reply = scene.run_on(self.engine);
            self.reply("unit", &["lse", "partial_lse"], &reply);
        }
    }

    fn context(&mut self, scene: &Scene, chunk_budget_tokens: usize) {
        let reply = run_context(scene, chunk_budget_tokens, self.engine);
        let names = ["out", "lse", "context_out", "context_lse", "gathered_key", "chunk_lens"];
        self.reply("context", &names, &reply);
    }

    fn merges(&mut self) {
        for (world, dtype) in [
            (1, Dtype::Bf16),
            (2, Dtype::Bf16),
            (3, Dtype::F32),
            (4, Dtype::Bf16),
            (1, Dtype::F16),
            (3, Dtype::F16),
        ] {
            for backend in CommBackend::ALL {
                for order in LaneOrder::ALL {
                    let scene = Scene::small(world).with(|s| {
                        s.configuration.comm_backend = backend;
                        s.configuration.lane_order = order;
                        s.in_16_bits(dtype);
                    });
                    for (strided, lse_base) in
                        [(false, LseBase::E), (true, LseBase::E), (false, LseBase::Two)]
                    {
                        let mut session = scene.open(self.engine);
                        let mut inputs = partials(world, dtype, strided);
                        let operation = Operation::MergePartials { lse_base };
                        let reply = step(session.as_mut(), &operation, &mut inputs);
                        self.reply("merge", &["out", "lse"], &reply);
                    }
                }
            }
        }
    }

    fn states(&mut self) {
        let lses = [0.5, -1.0, f32::NEG_INFINITY, f32::INFINITY, 3.0, 80.0, f32::NAN];
        let pairs: Vec<(f32, f32)> = lses.iter().flat_map(|a| lses.iter().map(move |b| (*a, *b))).collect();
        let lse = |pick: fn(&(f32, f32)) -> f32| -> Vec<f32> { pairs.iter().map(pick).collect() };
        let out = |seed: u64, lse: &[f32]| -> Vec<f32> {
            let nan_where_empty = |(i, v): (usize, f32)| if lse[i / 2].is_finite() { v } else { f32::NAN };
            uniform(seed, lse.len() * 2).into_iter().enumerate().map(nan_where_empty).collect()
        };
        let (prefix, suffix) = (lse(|pair| pair.0), lse(|pair| pair.1));
        let shape = [pairs.len(), 1, 2];
        let mut inputs = Tensors::new()
            .with("prefix_out", Tensor::from_f32(Dtype::F32, &shape, &out(1, &prefix)))
            .with("prefix_lse", Tensor::from_f32(Dtype::F32, &shape[..2], &prefix))
            .with("suffix_out", Tensor::from_f32(Dtype::F32, &shape, &out(2, &suffix)))
            .with("suffix_lse", Tensor::from_f32(Dtype::F32, &shape[..2], &suffix));
        let mut session = Scene::small(1).open(self.engine);
        let reply = step(session.as_mut(), &Operation::MergeStates, &mut inputs);
        self.reply("states", &["out", "lse"], &reply);
        for name in ["prefix_out", "suffix_out"] {
            let mut halves = inputs.get(name).unwrap().to_f32();
            halves.chunks_exact_mut(2).for_each(at_both_ends);
            inputs.insert(name, Tensor::from_f32(Dtype::F16, &shape, &halves));
        }
        let mut session = Scene::small(1).with(|s| s.in_16_bits(Dtype::F16)).open(self.engine);
        let reply = step(session.as_mut(), &Operation::MergeStates, &mut inputs);
        self.reply("states", &["out", "lse"], &reply);
        let mut session = Scene::small(1).open(self.engine);
        let mut strided = inputs.clone();
        strided.insert("prefix_out", head_major(&uniform(3, 12), &[3, 2, 2]));
        strided.insert("prefix_lse", Tensor::from_f32(Dtype::F32, &[3, 2], &uniform(4, 6)));
        strided.insert("suffix_out", head_major(&uniform(5, 12), &[3, 2, 2]));
        strided.insert("suffix_lse", Tensor::from_f32(Dtype::F32, &[3, 2], &uniform(6, 6)));
        let reply = step(session.as_mut(), &Operation::MergeStates, &mut strided);
        self.reply("states", &["out", "lse"], &reply);
    }

    fn segments(&mut self) {
        let row_lens = [0, 1, 64, 130, 257, 5000];
        let (segments, rows, dim) = (4, row_lens.len(), 3);
        let mut sums: Vec<f32> = uniform(7, segments * rows).iter().map(|v| v.abs() + 0.5).collect();
        let mut maxima: Vec<f32> = uniform(8, segments * rows).iter().map(|v| v * 4.0).collect();
        // what no tile was given to holds NaN
        for (row, len) in row_lens.iter().enumerate() {
            for segment in (*len as usize).div_ceil(64).min(segments)..segments {
                sums[segment * rows + row] = f32::NAN;
                maxima[segment * rows + row] = f32::NAN;
            }
        }
        let shape = [segments, rows, 1, dim];
        let mut inputs = Tensors::new()
            .with("segment_max", Tensor::from_f32(Dtype::F32, &shape[..3], &maxima))
            .with("segment_sum", Tensor::from_f32(Dtype::F32, &shape[..3], &sums))
            .with("segment_acc", Tensor::from_f32(Dtype::F32, &shape, &uniform(9, segments * rows * dim)))
            .with("row_lens", Tensor::from_i32(&[rows], &row_lens));
        let mut session = Scene::small(1).open(self.engine);
        let reply = step(session.as_mut(), &Operation::MergeSegments { tile_tokens: 64 }, &mut inputs);
        self.reply("segments", &["out", "lse"], &reply);
    }

    fn pack(&mut self) {
        let codes =
            [0u64, 0xC049_0FDB, 0xC049_7F81, 0xFF80_0000, 0x7F81_0001, 0x7FC0_0000, 0x3F80_0001, 0x0000_FF81];
        for order in LaneOrder::ALL {
            let scene = Scene::small(2).with(|s| s.configuration.lane_order = order);
            let mut session = scene.open(self.engine);
            let mut inputs =
                Tensors::new().with("lse", Tensor::from_codes(Dtype::F32, &[codes.len()], &codes));
            let reply = step(session.as_mut(), &Operation::PackLse, &mut inputs);
            self.reply("pack", &["lanes", "unpacked"], &reply);
        }
    }

    fn prefill(&mut self) {
        let names = ["rows", "positions", "row_lens", "restore", "kv_writer"];
        let splits = [
            (PcpStrategy::HeadTail, PcpDecodes::Replicated),
            (PcpStrategy::HeadTail, PcpDecodes::Owned),
            (PcpStrategy::RoundRobin, PcpDecodes::Split),
        ];
        for (strategy, decodes) in splits {
            let operation =
                Operation::PcpLayout { world: 3, strategy, decodes, padded_rows: 0, overlap: false };
            let mut inputs = Tensors::new()
                .with("query_start_loc", Tensor::from_i32(&[9], &[0, 11, 12, 12, 16, 20, 22, 23, 24]))
                .with("context_lens", Tensor::from_i32(&[8], &[5, 7, 2, 0, 3, 1, 9, 4]))
                .with("is_prefilling", Tensor::from_codes(Dtype::U8, &[8], &[1, 0, 1, 1, 1, 1, 0, 0]));
            let mut session = Scene::small(1).open(self.engine);
            let reply = step(session.as_mut(), &operation, &mut inputs);
            self.reply("pcp", &names, &reply);
        }
        self.groups();
    }

    fn drafts(&mut self) {
        for (operation, mut inputs) in drafts::steps() {
            let mut session = Scene::small(1).open(self.engine);
            let reply = step(session.as_mut(), &operation, &mut inputs);
            self.reply("acceptance", &["tokens", "accepted", "statistics"], &reply);
        }
    }

    fn rules(&mut self) {
        for set in RuleSetName::ALL {
            for settings in settings() {
                let answer = self.engine.validate(set, &settings).unwrap();
                let Answer::Done(validation) = answer else { panic!("{settings:?}") };
                let features: Vec<_> = validation.disabled.into_iter().map(|d| d.feature).collect();
                let warned: Vec<_> = validation.warnings.into_iter().map(|w| w.setting).collect();
                self.note("rules.answers", (format!("{:?}", validation.decision), features, warned));
            }
        }
    }
}

/// A draft whose heads a group of four ranks among eight must replicate.
fn replicated_draft(kv_heads: i64, model: &str) -> Settings {
    Settings::new()
        .with("tensor_parallel_size", 8)
        .with("decode_context_parallel_size", 4)
        .with("speculative_tokens", 4)
        .with("draft_kv_heads", kv_heads)
        .with("draft_model", model)
}

/// Settings that touch every rule that a fault leaves out or adds.
fn settings() -> Vec<Settings> {
    let sized = |tp: i64, dcp: i64| {
        Settings::new().with("tensor_parallel_size", tp).with("decode_context_parallel_size", dcp)
    };
    let knob = |key: &str, value: serde_json::Value| serde_json::json!({ key: value });
    vec![
        sized(8, 8),
        sized(8, 3),
        sized(6, 3),
        sized(1, 1),
        sized(8, 8).with("speculative_tokens", 3).with("arch", "gfx942"),
        sized(8, 8).with("speculative_tokens", 3),
        sized(8, 8).with("speculative_tokens", 3).with("cp_kv_cache_interleave_size", 4),
        sized(8, 8).with("speculative_tokens", 3).with("dcp_config", knob("interleave_size", 4.into())),
        sized(8, 8)
            .with("cp_kv_cache_interleave_size", 3)
            .with("dcp_config", knob("interleave_size", 3.into())),
        sized(8, 8).with("dcp_comm_backend", "ring").with("dcp_config", knob("comm_backend", "ring".into())),
        sized(2, 2).with("query_heads", 256),
        replicated_draft(64, "qwen3_dspark"),
        replicated_draft(64, "llama_eagle3"),
        replicated_draft(64, "qwen3_dspark").with("draft_kv_dtype", "e4m3fn"),
        replicated_draft(4, "qwen3_dspark"),
        sized(8, 8).with("mxfp4", true),
        sized(8, 8).with("kv_transfer", true),
        sized(8, 2).with("query_heads", 64).with("kv_heads", 8),
        sized(8, 2)
            .with("query_heads", 128)
            .with("kv_heads", 1)
            .with("draft_query_heads", 64)
            .with("draft_kv_heads", 8)
            .with("speculative_tokens", 1),
        sized(8, 8).with("returns_decode_lse", false),
        sized(8, 8).with("runner", "v2"),
        sized(8, 8).with("speculative_tokens", 3).with("dynamic_speculation", true),
        sized(8, 4).with("sparse", true).with("replicated_indexer", true).with("arch", "a3"),
        sized(8, 8).with("sparse", true).with("block_size", 128).with("cp_kv_cache_interleave_size", 1),
        sized(8, 8).with("sparse_kv_offload", true),
        sized(2, 1).with("prefill_context_parallel_size", 2).with("lora", true),
        sized(2, 1).with("prefill_context_parallel_size", 2).with("enable_dp_attention", true),
        sized(1, 1)
            .with("prefill_context_parallel_size", 8)
            .with("enable_tbo", "all")
            .with("pcp_moe_merge", false),
        sized(2, 1).with("prefill_context_parallel_size", 2).with("enable_tbo", "prefill"),
    ]
}

/// Partials of a world: random ones, then rows in which some or all ranks are empty, broken, or far apart.
fn partials(world: usize, dtype: Dtype, strided: bool) -> Tensors {
    let (rows, heads, dim) = (7, 2 * world, 3);
    let mut out = uniform(11, world * rows * heads * dim);
    let mut lse: Vec<f32> = uniform(12, world * rows * heads).iter().map(|v| v * 3.0).collect();
    for rank in 0..world {
        for head in 0..heads {
            let at = |row: usize| (rank * rows + row) * heads + head;
            lse[at(6)] += 100.0;
            lse[at(4)] += 12.0 * rank as f32;
            let broken = [f32::NAN, f32::INFINITY][rank % 2];
            for (row, value) in
                [(1, f32::NEG_INFINITY), (2, f32::NEG_INFINITY), (3, broken), (5, lse[at(5)] - 80.0)]
            {
                if row == 2 || rank + 1 == world {
                    lse[at(row)] = value;
                }
                if !lse[at(row)].is_finite() {
                    out[at(row) * dim..(at(row) + 1) * dim].fill(f32::NAN);
                }
            }
        }
    }
    if dtype == Dtype::F16 {
        out.chunks_exact_mut(dim).for_each(at_both_ends);
    }
    let shape = [world, rows, heads, dim];
    let contiguous = Tensor::from_f32(dtype, &shape, &out);
    let out = if strided { transposed(&contiguous) } else { contiguous };
    Tensors::new()
        .with("partial_out", out)
        .with("partial_lse", Tensor::from_f32(Dtype::F32, &shape[..3], &lse))
}

/// The largest number of f16, one among its subnormals, and one that bf16 does not hold, in place of what is a number.
fn at_both_ends(row: &mut [f32]) {
    let ends = [65504.0, 3.0 / (1u32 << 24) as f32, 1.0 + 1.0 / 1024.0];
    row.iter_mut().zip(ends).filter(|(value, _)| !value.is_nan()).for_each(|(value, end)| *value = end);
}

/// The same tensor with its second and third axes swapped in memory.
fn transposed(tensor: &Tensor) -> Tensor {
    let &[world, rows, heads, dim] = tensor.shape() else { panic!("{tensor:?}") };
    let codes = tensor.to_codes();
    let order = (0..world).flat_map(|w| (0..heads).flat_map(move |h| (0..rows).map(move |r| (w, h, r))));
    let moved: Vec<u64> =
        order.flat_map(|(w, h, r)| codes[((w * rows + r) * heads + h) * dim..][..dim].to_vec()).collect();
    let memory = Tensor::from_codes(tensor.dtype(), &[world, heads, rows, dim], &moved);
    let strides = vec![heads * rows * dim, dim, rows * dim, 1];
    Tensor::view(tensor.dtype(), tensor.shape().to_vec(), strides, memory.bytes().to_vec()).unwrap()
}

fn head_major(values: &[f32], shape: &[usize; 3]) -> Tensor {
    let bytes = Tensor::from_f32(Dtype::F32, shape, values).bytes().to_vec();
    Tensor::view(Dtype::F32, shape.to_vec(), vec![shape[2], shape[0] * shape[2], 1], bytes).unwrap()
}

/// Writes the contexts alone and attends to them with the new tokens given.
pub fn run_context(
    scene: &Scene,
    chunk_budget_tokens: usize,
    engine: &CpuEngine,
) -> Result<Reply, EngineError> {
    let mut session = scene.open(engine);
    step(session.as_mut(), &Operation::WriteKv, &mut scene.write_context_inputs())?;
    step(session.as_mut(), &Operation::AttendContext { chunk_budget_tokens }, &mut scene.context_inputs())
}

/// Batches with cached contexts, and their workspaces.
pub fn contexts() -> Vec<(Scene, usize)> {
    let contexts = |s: &mut Scene| s.requests = vec![(37, 3), (5, 1), (0, 2), (0, 0), (70, 2)];
    let mut list = Vec::new();
    for (world, interleave, budget) in [(1, 1, 64), (2, 1, 48), (2, 4, 1000), (3, 2, 1), (4, 1, 64)] {
        let scene = Scene::small(world).with(contexts).with(|s| s.configuration.interleave = interleave);
        list.push((scene, budget));
    }
    let narrow = |dtype| {
        move |s: &mut Scene| {
            s.configuration.kv_dtype = dtype;
            s.configuration.kv_scale = 0.0625;
        }
    };
    list.push((Scene::small(2).with(contexts).with(narrow(Dtype::E4m3fn)), 1000));
    list.push((Scene::small(2).with(contexts).with(narrow(Dtype::E4m3fnuz)), 48));
    let grouped = Attention::Gqa { kv_heads: 2, head_dim: 8, v_head_dim: 6 };
    list.push((Scene::small(2).with(contexts).with(|s| s.configuration.attention = grouped), 48));
    list.push((Scene::small(2).with(contexts).with(|s| s.in_16_bits(Dtype::F16)), 48));
    // a rank without a token of the context
    list.push((Scene::small(4).with(|s| s.requests = vec![(2, 3)]), 64));
    list
}

/// Batches of decode, verify and draft steps that between them touch every policy.
pub fn scenes() -> Vec<(&'static str, Scene)> {
    let mut list = Vec::new();
    let verify = |s: &mut Scene| s.requests = vec![(33, 4), (5, 3), (0, 0), (20, 1)];
    for world in [1, 2, 3, 4] {
        for backend in CommBackend::ALL {
            for (interleave, block) in [(1, 4), (2, 4), (4, 12)] {
                let scene = Scene::small(world).with(|s| {
                    s.configuration.comm_backend = backend;
                    s.configuration.interleave = interleave;
                    s.configuration.block_size = block;
                    s.requests.push((12 * world - 1, 1));
                });
                list.push(("decode", scene.clone()));
                list.push(("verify", scene.clone().with(verify)));
                list.push(("draft", scene.with(verify).with(|s| s.mask = Mask::Bidirectional)));
            }
        }
    }
    for (dtype, scale) in [(Dtype::E4m3fn, 0.0625), (Dtype::E4m3fnuz, 0.03), (Dtype::E4m3fn, 0.005)] {
        let narrow = |s: &mut Scene| {
            s.configuration.kv_dtype = dtype;
            s.configuration.kv_scale = scale;
        };
        list.push(("decode", Scene::small(2).with(narrow)));
        list.push(("verify", Scene::small(2).with(narrow).with(verify)));
    }
    for backend in CommBackend::ALL {
        let half = |s: &mut Scene| {
            s.in_16_bits(Dtype::F16);
            s.configuration.comm_backend = backend;
        };
        list.push(("decode", Scene::small(3).with(half)));
        list.push(("verify", Scene::small(2).with(half).with(verify)));
    }
    for project_before_merge in [false, true] {
        let replicated = |s: &mut Scene| {
            s.configuration.tp = 4;
            s.projects = true;
            s.configuration.project_before_merge = project_before_merge;
            s.configuration.query_replication = project_before_merge;
            s.configuration.lane_order = LaneOrder::LoHi;
            s.configuration.kernel_head_widths = vec![7, 9];
        };
        list.push(("decode", Scene::small(2).with(replicated)));
        list.push(("verify", Scene::small(2).with(replicated).with(verify)));
    }
    let grouped = Attention::Gqa { kv_heads: 2, head_dim: 8, v_head_dim: 6 };
    list.push(("decode", Scene::small(2).with(|s| s.configuration.attention = grouped)));
    list.push(("verify", Scene::small(2).with(verify).with(|s| s.configuration.attention = grouped)));
    // a scale that leaves small values below the smallest normal number of the cache
    let narrow_groups = |s: &mut Scene| {
        s.configuration.attention = grouped;
        s.configuration.kv_dtype = Dtype::E4m3fn;
        s.configuration.kv_scale = 4.0;
    };
    list.push(("decode", Scene::small(2).with(narrow_groups)));
    list.push(("verify", Scene::small(2).with(verify).with(narrow_groups)));
    for shift in [-400.0, 400.0] {
        list.push(("decode", Scene::small(4).with(|s| s.shift = shift)));
        list.push(("verify", Scene::small(4).with(verify).with(|s| s.shift = shift)));
    }
    // several tiles on one rank, and heads enough that the maximum rises between tiles for some
    let tiles = |requests: Vec<(usize, usize)>| {
        Scene::small(1).with(|s| {
            s.requests = requests;
            s.configuration.heads_per_rank = 8;
        })
    };
    list.push(("decode", tiles(vec![(85, 1), (120, 1)])));
    list.push(("verify", tiles(vec![(190, 3)])));
    list
}
