//! The forward pass: against a plain one in f64, over ranks, in pieces, in company, and with faults.

mod support;

use std::collections::HashMap;

use shardcheck_serve::attention::Attention;
use shardcheck_serve::attention::dtype::OutputDtype;
use shardcheck_serve::attention::fault::Fault;
use shardcheck_serve::attention::interleave::Interleave;
use shardcheck_serve::attention::merge::MergeOrder;
use shardcheck_serve::attention::sharded::{Sharded, ShardedConfig};
use shardcheck_serve::kernels::Simd;
use shardcheck_serve::model::{Model, Span};
use shardcheck_serve::service::load;
use support::tiny::{FEED_FORWARD, HEAD_DIM, HEADS, KV_HEADS, LAYERS, NORM_EPSILON, ROPE_BASE, Tiny, WIDTH};

const TOKENS: usize = 45;

fn tokens() -> Vec<u32> {
    (0..TOKENS as u32).map(|i| 2 + (i * 37 + i * i) % 250).collect()
}

fn sharded(model: &Model, ranks: usize, interleave: usize, fault: Option<Fault>) -> Sharded {
    let config = ShardedConfig {
        layout: Interleave::new(ranks, interleave, 4).expect("a valid layout"),
        merge: MergeOrder::A2a,
        dtype: OutputDtype::F32,
        fault,
        fault_max_rows: usize::MAX,
        cache_tokens: 1024,
    };
    Sharded::new(model.config().attention, config, Simd::detect()).expect("a valid config")
}

/// Logits of all tokens, run in pieces of the given lengths.
fn logits(model: &Model, attention: &mut dyn Attention, pieces: &[usize]) -> Vec<f32> {
    let tokens = tokens();
    let table: Vec<u32> = (0..attention.virtual_blocks() as u32).rev().collect();
    let (mut first, mut out) = (0, Vec::new());
    for piece in pieces {
        let span = Span {
            tokens: &tokens[first..first + piece],
            first_position: first,
            block_table: &table,
            logits: 0..*piece,
        };
        out.extend(model.forward(attention, &[span]).expect("it never fails"));
        first += piece;
    }
    assert_eq!(first, TOKENS, "pieces must cover all tokens");
    out
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, |worst, d| if d > worst || d.is_nan() { d } else { worst })
}

type Weights = HashMap<String, Vec<Vec<f64>>>;

/// Llama's forward pass by its definition, in f64, over the whole sequence at once.
fn definition(weights: &Weights, tokens: &[u32]) -> Vec<Vec<f64>> {
    let get = |name: String| &weights[&format!("{name}.weight")];
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let times = |matrix: &Vec<Vec<f64>>, x: &[f64]| matrix.iter().map(|row| dot(row, x)).collect::<Vec<_>>();
    let norm = |x: &[f64], weight: &[f64]| {
        let scale = 1.0 / (dot(x, x) / x.len() as f64 + NORM_EPSILON).sqrt();
        x.iter().zip(weight).map(|(x, w)| x * scale * w).collect::<Vec<_>>()
    };
    let rotate = |heads: &mut [f64], position: usize| {
        for head in heads.chunks_exact_mut(HEAD_DIM) {
            for i in 0..HEAD_DIM / 2 {
                let angle = position as f64 * ROPE_BASE.powf(-2.0 * i as f64 / HEAD_DIM as f64);
                let (x, y) = (head[2 * i], head[2 * i + 1]);
                head[2 * i] = x * angle.cos() - y * angle.sin();
                head[2 * i + 1] = x * angle.sin() + y * angle.cos();
            }
        }
    };
    let mut stream: Vec<Vec<f64>> =
        tokens.iter().map(|id| get("token_embd".into())[*id as usize].clone()).collect();
    for layer in 0..LAYERS {
        let part = |name: &str| get(format!("blk.{layer}.{name}"));
        let normed: Vec<_> = stream.iter().map(|x| norm(x, &part("attn_norm")[0])).collect();
        let project = |name: &str, rotated: bool| {
            let mut rows: Vec<Vec<f64>> = normed.iter().map(|x| times(part(name), x)).collect();
            if rotated {
                rows.iter_mut().enumerate().for_each(|(position, row)| rotate(row, position));
            }
            rows
        };
        let (q, k, v) = (project("attn_q", true), project("attn_k", true), project("attn_v", false));
        for t in 0..tokens.len() {
            let mut attended = Vec::new();
            for head in 0..HEADS {
                let of = |rows: &[Vec<f64>], t: usize, head: usize| {
                    rows[t][head * HEAD_DIM..][..HEAD_DIM].to_vec()
                };
                let kv = head / (HEADS / KV_HEADS);
                let scores =
                    (0..=t).map(|s| dot(&of(&q, t, head), &of(&k, s, kv)) / (HEAD_DIM as f64).sqrt());
                let weights: Vec<f64> = scores.map(f64::exp).collect();
                let total: f64 = weights.iter().sum();
                let value = |d: usize| (0..=t).map(|s| weights[s] / total * of(&v, s, kv)[d]).sum::<f64>();
                attended.extend((0..HEAD_DIM).map(value));
            }
            let out = times(part("attn_output"), &attended);
            stream[t].iter_mut().zip(out).for_each(|(x, y)| *x += y);
        }
        for x in &mut stream {
            let normed = norm(x, &part("ffn_norm")[0]);
            let (gate, up) = (times(part("ffn_gate"), &normed), times(part("ffn_up"), &normed));
            let inside: Vec<f64> =
                (0..FEED_FORWARD).map(|i| gate[i] / (1.0 + (-gate[i]).exp()) * up[i]).collect();
            x.iter_mut().zip(times(part("ffn_down"), &inside)).for_each(|(x, y)| *x += y);
        }
    }
    let output_norm = &get("output_norm".into())[0];
    assert_eq!(output_norm.len(), WIDTH);
    let output = weights.get("output.weight").unwrap_or(get("token_embd".into()));
    stream.iter().map(|x| times(output, &norm(x, output_norm))).collect()
}

#[test]
fn logits_are_those_of_llamas_definition() {
    for (kind, tiny) in [("own output", Tiny::new(1)), ("tied output", Tiny::tied(1))] {
        let exact: Vec<f32> =
            definition(&tiny.weights, &tokens()).concat().iter().map(|x| *x as f32).collect();
        let spread = exact.iter().map(|x| x.abs()).fold(0.0, f32::max);
        assert!(spread > 5.0, "logits are not all alike: {spread}");
        let file = tiny.file();
        for simd in [Simd::detect(), Simd::portable()] {
            let (model, _) = load(file.path(), simd).expect("the tiny model");
            let seen = logits(&model, &mut sharded(&model, 1, 1, None), &[TOKENS]);
            let worst = largest_difference(&seen, &exact);
            assert!(worst < 2e-4, "{kind}, {}: {worst} of {spread}", simd.name());
        }
    }
}

#[test]
fn four_ranks_give_the_logits_and_tokens_of_one() {
    let (model, _) = load(Tiny::new(2).file().path(), Simd::detect()).expect("the tiny model");
    let vocabulary = model.config().vocabulary;
    let argmax = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
    let choices = |logits: &[f32]| logits.chunks_exact(vocabulary).map(argmax).collect::<Vec<_>>();
    let one = logits(&model, &mut sharded(&model, 1, 1, None), &[TOKENS]);
    for (ranks, interleave) in [(2, 1), (4, 1), (4, 2), (4, 4), (3, 4)] {
        let many = logits(&model, &mut sharded(&model, ranks, interleave, None), &[TOKENS]);
        let worst = largest_difference(&one, &many);
        assert!(worst < 1e-4, "W{ranks} S{interleave}: {worst}");
        assert!(worst > 0.0, "W{ranks} S{interleave}: another summation order leaves some trace");
        assert_eq!(choices(&one), choices(&many), "W{ranks} S{interleave}");
    }
}

#[test]
fn every_fault_changes_the_logits_of_four_ranks() {
    let (model, _) = load(Tiny::new(2).file().path(), Simd::detect()).expect("the tiny model");
    let right = logits(&model, &mut sharded(&model, 4, 1, None), &[TOKENS]);
    for fault in Fault::ALL.into_iter().filter(|fault| *fault != Fault::BlockTableClamped) {
        let wrong = logits(&model, &mut sharded(&model, 4, 1, Some(fault)), &[TOKENS]);
        let worst = largest_difference(&right, &wrong);
        assert!(worst > 0.05, "{fault}: {worst}");
    }
    // This one needs more than 16 blocks of 4 tokens on 4 ranks.
    let clamped = logits(&model, &mut sharded(&model, 4, 1, Some(Fault::BlockTableClamped)), &[TOKENS]);
    assert_eq!(clamped, right);
}

#[test]
fn a_sequence_in_pieces_has_the_bits_of_one_in_one_piece() {
    let (model, _) = load(Tiny::new(3).file().path(), Simd::detect()).expect("the tiny model");
    for ranks in [1, 4] {
        let whole = logits(&model, &mut sharded(&model, ranks, 2, None), &[TOKENS]);
        let single = logits(&model, &mut sharded(&model, ranks, 2, None), &[1; TOKENS]);
        let uneven = logits(&model, &mut sharded(&model, ranks, 2, None), &[7, 1, 13, 2, 22]);
        assert_eq!(whole, single, "W{ranks}");
        assert_eq!(whole, uneven, "W{ranks}");
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_among_others() {
    let (model, _) = load(Tiny::new(3).file().path(), Simd::detect()).expect("the tiny model");
    let tokens = tokens();
    let mut alone = Vec::new();
    for take in [5, TOKENS, 9] {
        let mut attention = sharded(&model, 2, 1, None);
        let table: Vec<u32> = (0..attention.virtual_blocks() as u32).collect();
        let span =
            Span { tokens: &tokens[..take], first_position: 0, block_table: &table, logits: take - 1..take };
        alone.extend(model.forward(&mut attention, &[span]).expect("it never fails"));
    }
    let mut attention = sharded(&model, 2, 1, None);
    let tables: Vec<Vec<u32>> = (0..3).map(|i| (i * 20..(i + 1) * 20).collect()).collect();
    let spans: Vec<Span<'_>> = [5, TOKENS, 9]
        .iter()
        .zip(&tables)
        .map(|(take, table)| Span {
            tokens: &tokens[..*take],
            first_position: 0,
            block_table: table,
            logits: take - 1..*take,
        })
        .collect();
    assert_eq!(model.forward(&mut attention, &spans), Ok(alone));
}
