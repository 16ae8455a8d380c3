//! Indexers and sparse attention layers of published models, reproduced from their weights (shared/data/fixtures, when present).

mod stored;

use serde_json::Value;
use shardcheck_formats::contract::{Contract, Merge};
use shardcheck_references::attention::mla::{Inputs, Mla};
use shardcheck_references::attention::rope::{Pairing, Rope};
use shardcheck_references::sparse::{Heads, Score, admits, best, score};
use shardcheck_references::visibility::Visible;
use stored::{Stored, count};

/// Base of the rotary frequencies in the stored models.
const THETA: f64 = 10_000.0;

struct Case<'a> {
    stored: &'a Stored,
    json: &'a Value,
}

impl Case<'_> {
    fn name(&self) -> &str {
        self.json["name"].as_str().unwrap()
    }

    fn tensor(&self, tensor: &str) -> Vec<f64> {
        self.stored.f64(&format!("{}.{tensor}", self.name()))
    }

    fn count(&self, field: &str) -> usize {
        count(&self.json["config"], field)
    }

    /// The part of a tensor that belongs to one sequence of the batch.
    fn rows(&self, tensor: &str, b: usize) -> Vec<f64> {
        let all = self.tensor(tensor);
        let own = all.len() / self.count("B");
        all[b * own..(b + 1) * own].to_vec()
    }

    fn rope(&self, field: &str) -> Rope {
        let pairing = match self.json["config"][field].as_str().unwrap() {
            "half-split" => Pairing::HalfSplit,
            _ => Pairing::InterleavedToHalfSplit,
        };
        Rope { dim: self.count("P"), theta: THETA, pairing, yarn: None }
    }

    /// The normed low-rank queries of a sequence, which the indexer shares with the attention.
    fn low_rank(&self, b: usize) -> Vec<f64> {
        let down = linear(&self.rows("hidden", b), &self.tensor("q_a_proj.weight"), self.count("hidden"));
        rms_norm(&down, &self.tensor("q_a_layernorm.weight"))
    }

    fn flags(&self, tensor: &str) -> Vec<bool> {
        self.stored.bytes(&format!("{}.{tensor}", self.name())).iter().map(|flag| *flag != 0).collect()
    }

    fn near(&self, what: &str, ours: f64, theirs: f64) {
        let stated = |field: &str| self.json["tolerance"][field].as_f64().unwrap();
        let tolerance = stated("abs") + stated("rel") * theirs.abs();
        assert!((ours - theirs).abs() <= tolerance, "{} {what}: {ours} against {theirs}", self.name());
    }
}

/// `[rows, out]` from `[rows, in]` by weights `[out, in]`.
fn linear(x: &[f64], weight: &[f64], width: usize) -> Vec<f64> {
    let dot = |row: &[f64], weights: &[f64]| row.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>();
    x.chunks_exact(width)
        .flat_map(|row| weight.chunks_exact(width).map(move |weights| dot(row, weights)))
        .collect()
}

fn rms_norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let factor = 1.0 / (mean + 1e-6).sqrt();
            row.iter().zip(weight).map(move |(x, w)| x * factor * w)
        })
        .collect()
}

fn layer_norm(row: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
    let factor = 1.0 / (variance + 1e-6).sqrt();
    row.iter().zip(weight).zip(bias).map(|((x, w), b)| (x - mean) * factor * w + b).collect()
}

/// The first elements of a vector rotated, the rest as it is.
fn rotated(rope: &Rope, vector: &[f64], position: usize) -> Vec<f64> {
    let (turned, plain) = vector.split_at(rope.dim);
    rope.rotate(turned, position).into_iter().chain(plain.iter().copied()).collect()
}

#[test]
fn published_indexers_and_the_attention_over_what_they_select_are_reproduced() {
    let Some(stored) = Stored::open("fixtures/dsa") else { return };
    let (mut rows, mut tied) = (0, 0);
    for json in stored.cases() {
        let (own, open) = layer(&Case { stored: &stored, json });
        rows += own;
        tied += open;
    }
    assert!(stored.cases().len() == 6 && rows > 200 && tied > 0, "{rows} {tied}");
}

/// Compares one layer; gives its rows, and how many of them are tied at the cut.
fn layer(case: &Case) -> (usize, usize) {
    let [batch, len, k] = ["B", "S", "topk"].map(|field| case.count(field));
    let (their_scores, selected) = (case.tensor("index_scores"), case.flags("selected"));
    let untied = case.flags("untied_rows");
    let mut tied = 0;
    for b in 0..batch {
        let mut visible = Vec::new();
        for (t, values) in index_scores(case, b).into_iter().enumerate() {
            let row = b * len + t;
            for (s, ours) in values.iter().enumerate() {
                case.near("index_scores", *ours, their_scores[row * len + s]);
            }
            let theirs: Vec<usize> = (0..len).filter(|s| selected[row * len + s]).collect();
            let all: Vec<usize> = (0..=t).collect();
            assert_eq!(theirs.len(), k.min(t + 1), "{} row {row}", case.name());
            if untied[row] {
                let mut ours = best(&values, &all, k);
                ours.sort_unstable();
                assert_eq!(ours, theirs, "{} row {row}", case.name());
            } else {
                // two orders of summation may tell a tie apart by a bit
                let loose: Vec<Score> =
                    values.iter().map(|value| Score { value: *value, error: 1e-12 }).collect();
                assert_eq!(admits(&loose, &all, &theirs), Ok(()), "{} row {row}", case.name());
                tied += 1;
            }
            visible.push(Visible::set(theirs).unwrap());
        }
        attention(case, b, &visible);
    }
    (batch * len, tied)
}

/// Scores of each row of a sequence for the tokens that it sees.
fn index_scores(case: &Case, b: usize) -> Vec<Vec<f64>> {
    let [len, hidden, low, heads, dim] =
        ["S", "hidden", "q_lora", "index_heads", "index_dim"].map(|field| case.count(field));
    let (rope, x) = (case.rope("indexer_rope"), case.rows("hidden", b));
    let positions = case.rows("position_ids", b);
    let query = linear(&case.low_rank(b), &case.tensor("indexer.wq_b.weight"), low);
    let keys = linear(&x, &case.tensor("indexer.wk.weight"), hidden);
    let weights = linear(&x, &case.tensor("indexer.weights_proj.weight"), hidden);
    let (weight, bias) = (case.tensor("indexer.k_norm.weight"), case.tensor("indexer.k_norm.bias"));
    let key = |t: usize| {
        let key = layer_norm(&keys[t * dim..(t + 1) * dim], &weight, &bias);
        rotated(&rope, &key, positions[t] as usize)
    };
    let keys: Vec<Vec<f64>> = (0..len).map(key).collect();
    let contract = Contract::bf16_default(Merge::A2a);
    let row = |t: usize| {
        let own = query[t * heads * dim..(t + 1) * heads * dim].chunks_exact(dim);
        let own: Vec<f64> = own.flat_map(|head| rotated(&rope, head, positions[t] as usize)).collect();
        // all constant factors go into the weights, since relu lets them through
        let factor = ((heads * dim) as f64).powf(-0.5);
        let weights: Vec<f64> =
            weights[t * heads..(t + 1) * heads].iter().map(|weight| weight * factor).collect();
        let given = Heads { query: &own, weights: &weights };
        keys[..=t].iter().map(|key| score(&given, key, 1.0, &contract).value).collect()
    };
    (0..len).map(row).collect()
}

/// Compares the attention of a sequence over what its rows select.
fn attention(case: &Case, b: usize, visible: &[Visible]) {
    let [len, hidden, heads, rank, n, p, v, low] =
        ["S", "hidden", "H", "R", "N", "P", "V", "q_lora"].map(|field| case.count(field));
    let (rope, positions) = (case.rope("main_rope"), case.rows("position_ids", b));
    let query = linear(&case.low_rank(b), &case.tensor("q_b_proj.weight"), low);
    let compressed = linear(&case.rows("hidden", b), &case.tensor("kv_a_proj_with_mqa.weight"), hidden);
    let norm = case.tensor("kv_a_layernorm.weight");
    let mla = Mla::from_kv_b(heads, (n, p, v, rank), &case.tensor("kv_b_proj.weight"));
    let (mut latent, mut k_pe, mut q_nope, mut q_pe) = (vec![], vec![], vec![], vec![]);
    for t in 0..len {
        let row = &compressed[t * (rank + p)..(t + 1) * (rank + p)];
        latent.extend(rms_norm(&row[..rank], &norm));
        k_pe.extend(rope.rotate(&row[rank..], positions[t] as usize));
        for head in query[t * heads * (n + p)..(t + 1) * heads * (n + p)].chunks_exact(n + p) {
            q_nope.extend_from_slice(&head[..n]);
            q_pe.extend(rope.rotate(&head[n..], positions[t] as usize));
        }
    }
    let scale = case.json["config"]["softmax_scale"].as_f64().unwrap();
    let inputs = Inputs { q_nope: &q_nope, q_pe: &q_pe, latent: &latent, k_pe: &k_pe, scale };
    let ours = mla.attend_expanded(&inputs, visible).out;
    let absorbed = mla.project(&mla.attend_absorbed(&inputs, visible).out);
    for ((ours, absorbed), theirs) in ours.iter().zip(&absorbed).zip(case.rows("attn_out", b)) {
        case.near("attn_out", *ours, theirs);
        case.near("attn_out, absorbed", *absorbed, theirs);
    }
    let projected = linear(&ours, &case.tensor("o_proj.weight"), heads * v);
    for (ours, theirs) in projected.iter().zip(case.rows("out", b)) {
        case.near("out", *ours, theirs);
    }
}
