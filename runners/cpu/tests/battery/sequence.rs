//! A session of many steps: what each leaves behind must not show in the next.

use shardcheck_cpu::CpuEngine;
use shardcheck_engine::{EngineError, Mask, Operation, Reply, Session, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::scene::{Scene, step, uniform};

/// A step: which operation, the requests as (blocks, tokens, new tokens), and the padding rows.
type Turn = (Kind, &'static [(&'static [i32], usize, usize)], usize);

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Causal,
    Draft,
    Context,
}

/// Blocks of twelve tokens over three ranks. Requests fork, end, give their blocks away, lose tokens and grow again.
const TURNS: [Turn; 14] = [
    (Kind::Context, &[(&[5, 2, 7], 26, 26), (&[1], 4, 4)], 0),
    (Kind::Causal, &[(&[5, 2, 7], 27, 1), (&[1], 5, 1)], 2),
    (Kind::Causal, &[(&[5, 2, 7], 28, 1), (&[1], 6, 1)], 2),
    (Kind::Causal, &[(&[5, 2, 7], 29, 1), (&[1], 7, 1)], 2),
    (Kind::Draft, &[(&[5, 2, 7], 32, 3), (&[1], 10, 3)], 0),
    // all but the first of the drafts were rejected
    (Kind::Causal, &[(&[5, 2, 7], 31, 2), (&[1], 9, 2)], 2),
    (Kind::Causal, &[(&[1], 8, 1), (&[5, 2, 7], 30, 1)], 0),
    (Kind::Context, &[(&[5, 2, 4], 27, 3), (&[1, 6], 15, 7)], 0),
    // a fork of the first request beside it
    (Kind::Causal, &[(&[5, 2, 4], 28, 1), (&[5, 2, 7], 31, 1), (&[1, 6], 16, 1)], 3),
    (Kind::Causal, &[(&[1, 6], 17, 1)], 3),
    // the blocks of both ends hold other requests
    (Kind::Context, &[(&[3, 7], 16, 16)], 0),
    (Kind::Context, &[(&[8, 3], 13, 2), (&[3, 7], 20, 4)], 0),
    (Kind::Causal, &[(&[7, 2], 20, 20)], 0),
    (Kind::Causal, &[(&[7, 2], 21, 1), (&[1, 6], 21, 4)], 7),
];

/// What each turn answers: layout, write, attention, and the caches behind it.
pub type Answers = [Result<Reply, EngineError>; 4];

/// Takes a session through the turns, as far as it goes.
pub fn play(engine: &CpuEngine) -> Vec<Answers> {
    let scene = Scene::small(3).with(|s| s.configuration.comm_backend = shardcheck_engine::CommBackend::AgRs);
    let mut session = scene.open(engine);
    let mut answers: Vec<Answers> = Vec::new();
    for (index, turn) in TURNS.iter().enumerate() {
        let failed = answers.last().is_some_and(|last| last.iter().any(Result::is_err));
        if failed {
            break;
        }
        answers.push(take(session.as_mut(), &scene, turn, 100 * index as u64, 0));
    }
    answers
}

/// A session with a replicated group of blocks of `block_size` tokens beside a sharded one, through the first turns.
pub fn play_groups(engine: &CpuEngine, block_size: usize) -> Vec<Answers> {
    let scene = Scene::small(3).with(|s| {
        let mut second = s.configuration.clone();
        (second.dcp, second.block_size) = (1, block_size);
        s.configuration.second_group = Some(Box::new(second));
    });
    let second = scene.clone().with(|s| s.configuration = *s.configuration.second_group.clone().unwrap());
    let mut session = scene.open(engine);
    let mut answers = Vec::new();
    for (index, turn) in TURNS[..6].iter().enumerate() {
        let seed = 100 * index as u64;
        answers.push(take(session.as_mut(), &scene, turn, seed, 0));
        answers.push(take(session.as_mut(), &second, turn, seed + 50, 1));
    }
    answers
}

/// Block-table entries of a request: those of the turn in the first group, others in the second.
fn entries(blocks: &[i32], group: usize, tokens: usize, block_size: usize) -> Vec<i32> {
    if group == 0 {
        return (0..4).map(|entry| blocks.get(entry).copied().unwrap_or(-7)).collect();
    }
    let own = |entry: usize| match entry < tokens.div_ceil(block_size) {
        true => blocks[0] % 2 + 2 * (5 * entry as i32 % 32),
        false => -7,
    };
    (0..17).map(own).collect()
}

fn take(session: &mut dyn Session, scene: &Scene, turn: &Turn, seed: u64, group: usize) -> Answers {
    let (kind, requests, padding) = turn;
    let (dim, heads) = (scene.configuration.attention.qk_dim(), scene.configuration.total_heads());
    let lens: Vec<i32> = requests.iter().map(|(_, tokens, _)| *tokens as i32).collect();
    let contexts: Vec<i32> = requests.iter().map(|(_, tokens, new)| (tokens - new) as i32).collect();
    let mut starts = vec![0];
    let (mut positions, mut owners) = (Vec::new(), Vec::new());
    for (index, (_, tokens, new)) in requests.iter().enumerate() {
        starts.push(starts[index] + *new as i32);
        positions.extend((tokens - new..*tokens).map(|position| position as i64));
        owners.extend(vec![index as i32; *new]);
    }
    positions.extend(vec![0; *padding]);
    owners.extend(vec![-1; *padding]);
    let rows = positions.len();
    let table: Vec<i32> = requests
        .iter()
        .flat_map(|(blocks, tokens, _)| entries(blocks, group, *tokens, scene.configuration.block_size))
        .collect();
    let count = requests.len();
    let width = table.len() / count;
    let key = Tensor::from_f32(Dtype::Bf16, &[rows, 1, dim], &uniform(seed, rows * dim));
    let query = Tensor::from_f32(Dtype::Bf16, &[rows, heads, dim], &uniform(seed + 1, rows * heads * dim));
    let table = Tensor::from_i32(&[count, width], &table);
    let starts = Tensor::from_i32(&[count + 1], &starts);
    let layout = Tensors::new()
        .with("seq_lens", Tensor::from_i32(&[count], &lens))
        .with("query_start_loc", starts)
        .with("block_table", table.clone());
    let mut write = Tensors::new()
        .with("key", key.clone())
        .with("positions", Tensor::from_i64(&[rows], &positions))
        .with("requests", Tensor::from_i32(&[rows], &owners))
        .with("block_table", table);
    let mut attend = layout.clone().with("query", query);
    let operation = match kind {
        Kind::Causal => Operation::Attend { mask: Mask::Causal },
        Kind::Draft => Operation::Attend { mask: Mask::Bidirectional },
        Kind::Context => {
            attend.insert("context_lens", Tensor::from_i32(&[count], &contexts));
            attend.insert("key", key);
            Operation::AttendContext { chunk_budget_tokens: 25 }
        }
    };
    [
        step(session, &Operation::Layout.in_group(group), &mut layout.clone()),
        step(session, &Operation::WriteKv.in_group(group), &mut write),
        step(session, &operation.in_group(group), &mut attend),
        step(session, &Operation::ReadCache.in_group(group), &mut Tensors::new()),
    ]
}
