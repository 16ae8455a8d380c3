//! Kimi delta attention against what published code gave for stored inputs (shared/data/fixtures, when present).

mod stored;

use shardcheck_formats::Dtype;
use shardcheck_references::kda::recurrence::step;
use shardcheck_references::kda::surround::{decay, normalise};
use shardcheck_references::kda::{Arithmetic, Gate, Layer, Near, Shape, State, Token, advance};
use stored::{Stored, count};

const EXACT: Arithmetic = Arithmetic { u_acc: 0.0, kexp: 0.0, stored: Dtype::F32, chunk: 1 };

/// Holds values to the tolerance that the file states; returns how many there were.
fn assert_as_stored(seen: &[f64], wanted: &[f64], case: &serde_json::Value, what: &str) -> usize {
    assert_eq!(seen.len(), wanted.len(), "{what}");
    let bound = |field: &str| case["tolerance"][field].as_f64().unwrap();
    for (seen, wanted) in seen.iter().zip(wanted) {
        let most = bound("abs") + bound("rel") * wanted.abs();
        assert!((seen - wanted).abs() <= most, "{}: {what}: {seen} {wanted}", case["name"]);
    }
    seen.len()
}

fn unit(head: &[f64], scale: f64, norm: bool) -> Vec<f64> {
    let near: Vec<Near> = head.iter().map(|value| Near { value: *value, error: 0.0 }).collect();
    match norm {
        true => normalise(&near, scale, &EXACT).iter().map(|x| x.value).collect(),
        false => head.iter().map(|x| x * scale).collect(),
    }
}

#[test]
fn gates_outputs_and_states_of_published_recurrences_are_the_oracles() {
    let Some(stored) = Stored::open("fixtures/kda") else { return };
    let mut compared = 0;
    for case in stored.cases() {
        let (name, config) = (case["name"].as_str().unwrap(), &case["config"]);
        if name == "kimi_layer" {
            continue;
        }
        let [batch, tokens, heads, value_heads, depth, width] =
            ["B", "T", "H", "HV", "K", "V"].map(|field| count(config, field));
        let tensor = |field: &str| stored.f64(&format!("{name}.{field}"));
        let [q, k, v, beta] = ["q", "k", "v", "beta"].map(tensor);
        let gates: Vec<f64> = if config["gate"].is_string() {
            let [a, log, bias] = ["a", "A_log", "dt_bias"].map(tensor);
            let gate = match config["gate"].as_str() {
                Some("softplus") => Gate::Softplus,
                _ => Gate::LowerBound(config["lb"].as_f64().unwrap()),
            };
            let of = |at: usize| {
                let (head, channel) = (at / depth % value_heads, at % (value_heads * depth));
                decay(gate, log[head], a[at], bias[channel], &EXACT).value
            };
            let made: Vec<f64> = (0..a.len()).map(of).collect();
            compared += assert_as_stored(&made, &tensor("g"), case, "g");
            made
        } else {
            // one decay for all channels of a head
            tensor("g").iter().flat_map(|g| std::iter::repeat_n(*g, depth)).collect()
        };
        let norm = config["l2"] != false;
        let starts = config["init"] == true || name == "qwen3next_gdn";
        let initial = starts.then(|| tensor("initial_state"));
        let (mut out, mut last) = (vec![0.0; v.len()], Vec::new());
        for own in 0..batch * value_heads {
            let (item, head) = (own / value_heads, own % value_heads);
            let group = head / (value_heads / heads);
            let size = depth * width;
            let mut state =
                initial.as_ref().map_or(vec![0.0; size], |all| all[own * size..(own + 1) * size].to_vec());
            for token in item * tokens..(item + 1) * tokens {
                let at = token * value_heads + head;
                let key = (token * heads + group) * depth;
                let row = step(
                    &mut state,
                    &unit(&q[key..key + depth], (depth as f64).sqrt().recip(), norm),
                    &unit(&k[key..key + depth], 1.0, norm),
                    &v[at * width..(at + 1) * width],
                    &gates[at * depth..(at + 1) * depth],
                    beta[at],
                );
                out[at * width..(at + 1) * width].copy_from_slice(&row);
            }
            last.extend(state);
        }
        compared += assert_as_stored(&out, &tensor("o"), case, "o");
        compared += assert_as_stored(&last, &tensor("final_state"), case, "final_state");
    }
    assert!(compared > 50_000, "{compared}");
}

#[test]
fn a_whole_published_layer_is_the_oracles() {
    let Some(stored) = Stored::open("fixtures/kda") else { return };
    let case = stored.cases().iter().find(|case| case["name"] == "kimi_layer").unwrap();
    let config = &case["config"];
    let [batch, tokens, heads, dim, hidden] =
        ["B", "T", "H", "D", "hidden"].map(|field| count(config, field));
    let tensor = |field: &str| stored.f64(&format!("kimi_layer.{field}"));
    let times = |matrix: &[f64], x: &[f64]| -> Vec<f64> {
        matrix.chunks(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let layer = Layer {
        shape: Shape { heads, value_heads: heads, key_dim: dim, value_dim: dim, taps: 4 },
        gate: Gate::Softplus,
        convolution: tensor("conv1d.weight"),
        a_log: tensor("forget_gate.A_log"),
        bias: tensor("forget_gate.dt_bias"),
        norm_weight: tensor("o_norm.weight"),
        epsilon: config["eps"].as_f64().unwrap(),
    };
    let weights = ["q_proj", "k_proj", "v_proj"].map(|name| tensor(&format!("{name}.weight")));
    let [fa, fb] = ["f_a_proj", "f_b_proj"].map(|name| tensor(&format!("forget_gate.{name}.weight")));
    let [ga, gb, b, o] =
        ["g_a_proj", "g_b_proj", "b_proj", "o_proj"].map(|name| tensor(&format!("{name}.weight")));
    let inputs = tensor("hidden");
    let (mut core, mut out) = (Vec::new(), Vec::new());
    for item in 0..batch {
        let given: Vec<Token> = (item * tokens..(item + 1) * tokens)
            .map(|token| {
                let x = &inputs[token * hidden..(token + 1) * hidden];
                Token {
                    channels: weights.iter().flat_map(|matrix| times(matrix, x)).collect(),
                    gate: times(&fb, &times(&fa, x)),
                    beta: times(&b, x),
                    output_gate: times(&gb, &times(&ga, x)),
                }
            })
            .collect();
        for row in advance(&layer, &State::zero(&layer.shape), &given, &EXACT) {
            core.extend(row.core.iter().map(|x| x.value));
            out.extend(times(&o, &row.out.iter().map(|x| x.value).collect::<Vec<_>>()));
        }
    }
    assert_as_stored(&core, &tensor("core_o"), case, "core_o");
    assert_as_stored(&out, &tensor("out"), case, "out");
}
