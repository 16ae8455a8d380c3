//! Single tokens dropped and doubled at a million tokens, through the embedded engine, and read back: `cargo run --release -p
//! shardcheck --example probe_engine [steps a setting]`.
//!
//! Head `h` looks at column `h` of a key alone. A token whose key is shut there is dropped for that head and no other; one
//! of eight further positions, shut for every head, that holds a copy of a token and is opened for one head doubles it
//! there. So each step tries eight faults, one a head, with a cache that is written once.

use std::time::Instant;

use shardcheck_cpu::engine;
use shardcheck_engine::{
    Answer, Attention, CommBackend, Configuration, Engine, LaneOrder, Mask, Operation, Session, Tensor,
    Tensors,
};
use shardcheck_formats::{Contract, Counter, Dtype, Merge};
use shardcheck_references::layout::Layout;
use shardcheck_references::probe::{
    Attribution, AttributionKind, Code, Decoder, Gate, Rounding, Seen, Sight, Space, Token,
};

const WORLD: usize = 8;
const BLOCK: usize = 16;
const DIM: usize = 64;
/// Tokens written in one step.
const WRITTEN_AT_ONCE: usize = 1 << 16;

fn main() {
    let steps = std::env::args().nth(1).map_or(4, |text| text.parse().expect("a number of steps"));
    println!(
        "{:<32} {:>6} {:>7} {:>6} {:>6} {:>12} {:>7}",
        "setting", "faults", "missed", "named", "clean", "clean silent", "seconds"
    );
    let mut all = Tried::default();
    for tokens in [1_048_576, 1_000_003] {
        for interleave in [1, 16] {
            for backend in CommBackend::ALL {
                let started = Instant::now();
                let tried = Scene::new(tokens, interleave, backend).run(steps);
                let name = format!("n={tokens} W={WORLD} S={interleave} {}", backend.name());
                tried.print(&name, started.elapsed().as_secs_f64());
                all = all.and(tried);
            }
        }
    }
    all.print("all", f64::NAN);
    assert!(
        all.missed == 0 && all.silent == all.clean,
        "a fault was missed, or a healthy row was not silent"
    );
}

#[derive(Debug, Clone, Copy, Default)]
struct Tried {
    faults: usize,
    missed: usize,
    named: usize,
    clean: usize,
    silent: usize,
}

impl Tried {
    fn and(self, other: Self) -> Self {
        Self {
            faults: self.faults + other.faults,
            missed: self.missed + other.missed,
            named: self.named + other.named,
            clean: self.clean + other.clean,
            silent: self.silent + other.silent,
        }
    }

    fn print(&self, name: &str, seconds: f64) {
        println!(
            "{name:<32} {:>6} {:>7} {:>6} {:>6} {:>12} {seconds:>7.1}",
            self.faults, self.missed, self.named, self.clean, self.silent
        );
    }
}

/// A session whose cache holds a request of `tokens` tokens and eight shut positions behind them.
struct Scene {
    session: Box<dyn Session>,
    configuration: Configuration,
    code: Code,
    contract: Contract,
    gate: Gate,
    tokens: usize,
    table: Vec<i32>,
}

/// What is wrong for a head.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Dropped(usize),
    Doubled(usize),
}

impl Scene {
    fn new(tokens: usize, interleave: usize, backend: CommBackend) -> Self {
        let layout = Layout::new(WORLD, interleave, BLOCK).expect("a layout");
        let entries = layout.blocks_needed(tokens + WORLD);
        let configuration = Configuration {
            attention: Attention::Gqa { kv_heads: 1, head_dim: DIM, v_head_dim: DIM },
            tp: WORLD,
            dcp: WORLD,
            heads_per_rank: 1,
            interleave,
            block_size: BLOCK,
            blocks: entries + 1,
            dtype: Dtype::Bf16,
            kv_dtype: Dtype::Bf16,
            kv_scale: 1.0,
            softmax_scale: 0.125,
            comm_backend: backend,
            lane_order: LaneOrder::HiLo,
            query_replication: false,
            project_before_merge: false,
            kernel_head_widths: Vec::new(),
            second_group: None,
        };
        let engine = engine();
        let declared = engine.profile().operation(shardcheck_engine::OperationKind::Decode);
        let declared = declared.and_then(|operation| operation.contract.clone()).expect("a contract");
        let merge = if backend == CommBackend::A2a { Merge::A2a } else { Merge::AgRsBf16 };
        let session = match engine.open(&configuration).expect("the embedded engine opens") {
            Answer::Done(session) => session,
            Answer::Unsupported(why) => panic!("{why}"),
        };
        let gate = Gate::new(1, Dtype::Bf16, 1.0, f64::from(configuration.softmax_scale)).expect("a gap");
        let code = Code::new(Space { layout, requests: 1, tokens, blocks: 0 }, &[]);
        assert!(code.dims() <= DIM, "{} signs do not fit a head of {DIM}", code.dims());
        let mut scene = Self {
            session,
            configuration,
            code,
            contract: Contract { merge, ..declared },
            gate,
            tokens,
            // blocks from the last one down, as a pool hands them out after some use
            table: (1..=entries as i32).rev().collect(),
        };
        for first in (0..tokens + WORLD).step_by(WRITTEN_AT_ONCE) {
            let positions: Vec<usize> = (first..(first + WRITTEN_AT_ONCE).min(tokens + WORLD)).collect();
            scene.write(&positions, |_| None);
        }
        scene
    }

    /// Writes tokens; `change` gives the token whose value is written instead and the heads for which it is open.
    fn write(&mut self, positions: &[usize], change: impl Fn(usize) -> Option<(usize, [bool; WORLD])>) {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let mut signs = Vec::new();
        for position in positions {
            let (source, open) = change(*position).unwrap_or((*position, [*position < self.tokens; WORLD]));
            let mut key = [0.0; DIM];
            (0..WORLD).for_each(|head| self.gate.key(open[head], &mut key[head..=head]));
            keys.extend(key);
            self.code.signs(Token { request: 0, position: source.min(self.tokens - 1) }, &mut signs);
            let mut value = [0.0; DIM];
            value.iter_mut().zip(&signs).for_each(|(value, sign)| *value = *sign as f32);
            values.extend(value);
        }
        let count = positions.len();
        let positions: Vec<i64> = positions.iter().map(|position| *position as i64).collect();
        let mut inputs = Tensors::new()
            .with("key", Tensor::from_f32(Dtype::Bf16, &[count, 1, DIM], &keys))
            .with("value", Tensor::from_f32(Dtype::Bf16, &[count, 1, DIM], &values))
            .with("positions", Tensor::from_i64(&[count], &positions))
            .with("requests", Tensor::from_i32(&[count], &vec![0; count]))
            .with("block_table", Tensor::from_i32(&[1, self.table.len()], &self.table));
        self.session.step(&Operation::WriteKv, &mut inputs).expect("the embedded engine writes");
    }

    /// One decode step over `len` positions through a block table: what each head gives, read back.
    fn step(&mut self, len: usize, table: &[i32]) -> Vec<Option<Attribution>> {
        let mut query = vec![0.0; WORLD * DIM];
        (0..WORLD).for_each(|head| self.gate.query(&mut query[head * DIM + head..=head * DIM + head]));
        let mut inputs = Tensors::new()
            .with("query", Tensor::from_f32(Dtype::Bf16, &[1, WORLD, DIM], &query))
            .with("seq_lens", Tensor::from_i32(&[1], &[len as i32]))
            .with("query_start_loc", Tensor::from_i32(&[2], &[0, 1]))
            .with("block_table", Tensor::from_i32(&[1, table.len()], table));
        let operation = Operation::Attend { mask: Mask::Causal };
        let reply = match self.session.step(&operation, &mut inputs).expect("the embedded engine attends") {
            Answer::Done(reply) => reply,
            Answer::Unsupported(why) => panic!("{why}"),
        };
        let out = reply.outputs.get("out").expect("an output").to_f64();
        let lse = reply.outputs.get("lse").expect("an LSE").to_f64();
        let sight = Sight::of(0, 0, self.tokens);
        let decoder = Decoder {
            code: &self.code,
            rounding: Rounding::of(&self.contract),
            rows: &[],
            written: std::slice::from_ref(&self.tokens),
            tables: &[],
        };
        (0..WORLD)
            .map(|head| {
                let seen = Seen { out: &out[head * DIM..][..self.code.dims()], lse: Some(lse[head]) };
                decoder.decode(sight, &seen)
            })
            .collect()
    }

    fn run(&mut self, steps: usize) -> Tried {
        let table = self.table.clone();
        let mut tried = Tried { clean: WORLD, ..Tried::default() };
        tried.silent = self.step(self.tokens, &table).iter().filter(|found| found.is_none()).count();
        let mut draw = Counter::new(self.tokens as u64, self.configuration.interleave as u32);
        for step in 0..steps {
            let faults = self.draw(step, &mut draw);
            self.inject(&faults);
            for (fault, found) in faults.iter().zip(self.step(self.tokens + WORLD, &table)) {
                tried.faults += 1;
                tried.missed += usize::from(found.is_none());
                tried.named += usize::from(found.is_some_and(|found| names(&found, *fault, self.tokens)));
            }
            self.restore(&faults);
        }
        tried.and(self.tamper(&table))
    }

    /// One fault a head: the first step tries the ends and the borders of pages and runs.
    fn draw(&self, step: usize, draw: &mut Counter) -> Vec<Fault> {
        let last = self.tokens - 1;
        let edges = [0, last, 1, 127, 128, last / 128 * 128, last / 128 * 128 - 1, 15];
        (0..WORLD)
            .map(|head| {
                let token = if step == 0 { edges[head] } else { draw.below(self.tokens as u64) as usize };
                if (head + step).is_multiple_of(2) { Fault::Dropped(token) } else { Fault::Doubled(token) }
            })
            .collect()
    }

    fn inject(&mut self, faults: &[Fault]) {
        for (head, fault) in faults.iter().enumerate() {
            match *fault {
                Fault::Dropped(token) => {
                    let shut = |other: usize| faults.get(other) != Some(&Fault::Dropped(token));
                    self.write(&[token], |position| Some((position, std::array::from_fn(shut))));
                }
                Fault::Doubled(token) => {
                    let extra = self.tokens + head;
                    self.write(&[extra], |_| Some((token, std::array::from_fn(|other| other == head))));
                }
            }
        }
    }

    fn restore(&mut self, faults: &[Fault]) {
        for (head, fault) in faults.iter().enumerate() {
            match *fault {
                Fault::Dropped(token) => self.write(&[token], |_| None),
                Fault::Doubled(_) => self.write(&[self.tokens + head], |_| None),
            }
        }
    }

    /// Metadata tampered with: a length that is short, and a block table with an entry of another page.
    fn tamper(&mut self, table: &[i32]) -> Tried {
        let short = self.step(self.tokens - 3, table);
        let wanted = Attribution::PrefixShort { seen: self.tokens - 3 };
        let mut aliased = table.to_vec();
        aliased[4321] = aliased[1234];
        let pages = self.step(self.tokens, &aliased);
        let named = short.iter().filter(|found| found.as_ref() == Some(&wanted)).count();
        // which of eight thousand pages was read is not searched for: that something is wrong has to show
        let seen = |found: &&Option<Attribution>| {
            found.as_ref().is_some_and(|found| found.kind() != AttributionKind::PrefixShort)
        };
        let missed = short.iter().chain(&pages).filter(|found| found.is_none()).count();
        let named = named + pages.iter().filter(seen).count();
        Tried { faults: 2 * WORLD, missed, named, ..Tried::default() }
    }
}

fn names(found: &Attribution, fault: Fault, tokens: usize) -> bool {
    match (found, fault) {
        (Attribution::Lost(token), Fault::Dropped(dropped)) => token.position == dropped,
        (Attribution::PrefixShort { seen }, Fault::Dropped(dropped)) => {
            dropped == tokens - 1 && *seen == dropped
        }
        (Attribution::Doubled(token), Fault::Doubled(doubled)) => token.position == doubled,
        _ => false,
    }
}
