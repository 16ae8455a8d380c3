//! Attention layers of published models, reproduced from their weights to the tolerance that each stored case
//! states.

mod stored;

use serde_json::Value;
use shardcheck_references::attention::mla::{Inputs, Mla};
use shardcheck_references::attention::plain::{Attention, Problem, Values, attend, attend_deterministic};
use shardcheck_references::attention::rope::{Pairing, Rope, Yarn};
use shardcheck_references::visibility::Visible;
use stored::{Stored, count};

/// A case and what it takes to compare with it.
struct Case<'a> {
    stored: &'a Stored,
    json: &'a Value,
}

impl Case<'_> {
    fn name(&self) -> &str {
        self.json["name"].as_str().unwrap()
    }

    fn count(&self, field: &str) -> usize {
        count(&self.json["config"], field)
    }

    fn number(&self, field: &str) -> Option<f64> {
        self.json["config"][field].as_f64()
    }

    fn has(&self, tensor: &str) -> bool {
        self.json["tensors"].get(format!("{}.{tensor}", self.name())).is_some()
    }

    fn tensor(&self, tensor: &str) -> Vec<f64> {
        self.stored.f64(&format!("{}.{tensor}", self.name()))
    }

    fn compare(&self, tensor: &str, ours: &[f64]) {
        let (absolute, relative) = (
            self.json["tolerance"]["abs"].as_f64().unwrap(),
            self.json["tolerance"]["rel"].as_f64().unwrap(),
        );
        let expected = self.tensor(tensor);
        assert_eq!(ours.len(), expected.len(), "{} {tensor}", self.name());
        for (index, (ours, expected)) in ours.iter().zip(expected).enumerate() {
            let tolerance = absolute + relative * expected.abs();
            let error = (ours - expected).abs();
            assert!(error <= tolerance, "{} {tensor}[{index}]: {ours} against {expected}", self.name());
        }
    }
}

/// `[rows, out]` from `[rows, in]` by weights `[out, in]` and an optional bias.
fn linear(x: &[f64], weight: &[f64], width: usize, bias: Option<&[f64]>) -> Vec<f64> {
    x.chunks_exact(width)
        .flat_map(|row| {
            weight.chunks_exact(width).enumerate().map(move |(out, weights)| {
                row.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() + bias.map_or(0.0, |bias| bias[out])
            })
        })
        .collect()
}

fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let factor = 1.0 / (mean + eps).sqrt();
            row.iter().zip(weight).map(move |(x, w)| x * factor * w)
        })
        .collect()
}

/// `[a, b, c]` as `[b, a, c]`.
fn swap(x: &[f64], a: usize, b: usize, c: usize) -> Vec<f64> {
    (0..b)
        .flat_map(|j| (0..a).flat_map(move |i| x[(i * b + j) * c..(i * b + j + 1) * c].iter().copied()))
        .collect()
}

fn mla_rope(case: &Case) -> Rope {
    let stated = &case.json["config"]["rope"];
    let field = |name: &str| stated[name].as_f64().unwrap();
    let yarn = (stated["rope_type"] == "yarn").then(|| Yarn {
        factor: field("factor"),
        mscale: field("mscale"),
        mscale_all_dim: field("mscale_all_dim"),
        beta_fast: field("beta_fast"),
        beta_slow: field("beta_slow"),
        original_max_position: field("original_max_position_embeddings"),
    });
    let pairing = match case.json["config"]["interleave"].as_bool().unwrap() {
        true => Pairing::InterleavedToHalfSplit,
        false => Pairing::HalfSplit,
    };
    Rope { dim: case.count("P"), theta: field("rope_theta"), pairing, yarn }
}

#[test]
fn deepseek_v3_attention_is_reproduced_absorbed_and_not() {
    let Some(stored) = Stored::open("fixtures/mla") else { return };
    for json in stored.cases() {
        mla_case(&Case { stored: &stored, json });
    }
    assert_eq!(stored.cases().len(), 6);
}

fn mla_case(case: &Case) {
    let [batch, len, hidden, heads, rank, n, p, v] =
        ["B", "S", "hidden", "H", "R", "N", "P", "V"].map(|f| case.count(f));
    let rope = mla_rope(case);
    let scale = ((n + p) as f64).powf(-0.5) * rope.yarn.map_or(1.0, |yarn| yarn.scale_factor());
    approx::assert_relative_eq!(scale, case.number("softmax_scale").unwrap(), max_relative = 1e-14);
    let (x, positions) = (case.tensor("hidden"), case.tensor("position_ids"));
    let query = if case.has("q_proj.weight") {
        linear(&x, &case.tensor("q_proj.weight"), hidden, None)
    } else {
        let low = linear(&x, &case.tensor("q_a_proj.weight"), hidden, None);
        let normed = rms_norm(&low, &case.tensor("q_a_layernorm.weight"), 1e-6);
        linear(&normed, &case.tensor("q_b_proj.weight"), case.count("q_lora"), None)
    };
    let compressed = linear(&x, &case.tensor("kv_a_proj_with_mqa.weight"), hidden, None);
    let norm = case.tensor("kv_a_layernorm.weight");
    let mla = Mla::from_kv_b(heads, (n, p, v, rank), &case.tensor("kv_b_proj.weight"));
    let (mut latents, mut keys, mut expanded, mut absorbed, mut lse) =
        (vec![], vec![], vec![], vec![], vec![]);
    for b in 0..batch {
        let (mut latent, mut k_pe, mut q_nope, mut q_pe) = (vec![], vec![], vec![], vec![]);
        for t in 0..len {
            let (token, position) = (b * len + t, positions[b * len + t] as usize);
            let row = &compressed[token * (rank + p)..(token + 1) * (rank + p)];
            latent.extend(rms_norm(&row[..rank], &norm, 1e-6));
            k_pe.extend(rope.rotate(&row[rank..], position));
            for head in query[token * heads * (n + p)..(token + 1) * heads * (n + p)].chunks_exact(n + p) {
                q_nope.extend_from_slice(&head[..n]);
                q_pe.extend(rope.rotate(&head[n..], position));
            }
        }
        let inputs = Inputs { q_nope: &q_nope, q_pe: &q_pe, latent: &latent, k_pe: &k_pe, scale };
        let visible = Visible::causal(len, len);
        let direct = mla.attend_expanded(&inputs, &visible);
        expanded.extend(direct.out);
        lse.extend(swap(&direct.lse, len, heads, 1));
        absorbed.extend(mla.project(&mla.attend_absorbed(&inputs, &visible).out));
        latents.extend(latent);
        keys.extend(k_pe);
    }
    case.compare("c_kv", &latents);
    case.compare("k_pe", &keys);
    case.compare("attn_out", &expanded);
    case.compare("attn_out", &absorbed);
    case.compare("lse", &lse);
    case.compare("out", &linear(&expanded, &case.tensor("o_proj.weight"), heads * v, None));
}

#[test]
fn grouped_query_attention_is_reproduced_with_window_sinks_and_soft_cap() {
    let Some(stored) = Stored::open("fixtures/gqa") else { return };
    let (mut windows, mut sinks, mut caps) = (0, 0, 0);
    for json in stored.cases() {
        let case = Case { stored: &stored, json };
        gqa_case(&case);
        windows += usize::from(case.number("window").is_some());
        sinks += usize::from(case.has("sinks"));
        caps += usize::from(case.number("softcap").is_some());
    }
    assert_eq!((stored.cases().len(), windows, sinks, caps), (6, 3, 2, 2));
}

fn gqa_case(case: &Case) {
    let [batch, len, hidden, heads, kv_heads, dim] =
        ["B", "S", "hidden", "H", "KV", "D"].map(|f| case.count(f));
    let rope = Rope { dim, theta: case.number("theta").unwrap(), pairing: Pairing::HalfSplit, yarn: None };
    let (x, positions) = (case.tensor("hidden"), case.tensor("position_ids"));
    let project = |name: &str| {
        let bias = case.has(&format!("{name}.bias")).then(|| case.tensor(&format!("{name}.bias")));
        linear(&x, &case.tensor(&format!("{name}.weight")), hidden, bias.as_deref())
    };
    let rotated = |x: Vec<f64>, heads: usize| -> Vec<f64> {
        x.chunks_exact(dim)
            .enumerate()
            .flat_map(|(i, x)| rope.rotate(x, positions[i / heads] as usize))
            .collect()
    };
    let (query, key, value) =
        (rotated(project("q_proj"), heads), rotated(project("k_proj"), kv_heads), project("v_proj"));
    let sink = case.has("sinks").then(|| case.tensor("sinks"));
    let visible = match case.number("window") {
        Some(window) => Visible::sliding_window(len, len, window as usize),
        None => Visible::causal(len, len),
    };
    let (mut out, mut lse, mut lse_no_sink) = (vec![], vec![], vec![]);
    for b in 0..batch {
        let rows = |x: &[f64], heads: usize| x[b * len * heads * dim..(b + 1) * len * heads * dim].to_vec();
        let (query, key, value) = (rows(&query, heads), rows(&key, kv_heads), rows(&value, kv_heads));
        let scale = case.number("softmax_scale").unwrap();
        let values = Values::Separate(&value);
        let mut problem = Problem::new(heads, kv_heads, dim, dim, scale, &query, &key, values);
        problem.softcap = case.number("softcap");
        lse_no_sink.extend(swap(&attend(&problem, &visible).lse, len, heads, 1));
        problem.sink = sink.as_deref();
        let result = attend(&problem, &visible);
        agree(&result, &attend_deterministic(&problem, &visible));
        out.extend(result.out);
        lse.extend(swap(&result.lse, len, heads, 1));
    }
    let by_head = |x: &[f64], heads: usize| -> Vec<f64> {
        x.chunks_exact(len * heads * dim).flat_map(|x| swap(x, len, heads, dim)).collect()
    };
    case.compare("q", &by_head(&query, heads));
    case.compare("k", &by_head(&key, kv_heads));
    case.compare("v", &by_head(&value, kv_heads));
    case.compare("attn_out", &out);
    case.compare("lse", &lse);
    case.compare("lse_no_sink", &lse_no_sink);
    let bias = case.has("o_proj.bias").then(|| case.tensor("o_proj.bias"));
    case.compare("out", &linear(&out, &case.tensor("o_proj.weight"), heads * dim, bias.as_deref()));
}

fn agree(a: &Attention, b: &Attention) {
    for (a, b) in a.out.iter().chain(&a.lse).zip(b.out.iter().chain(&b.lse)) {
        assert!((a - b).abs() <= 1e-13 * a.abs().max(1.0), "{a} against {b}");
    }
}
