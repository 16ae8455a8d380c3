//! Experts: the oracle against a brute force of its own, against fixtures made by other people's code, and its bounds against arithmetic
//! in 32 bits.

use std::path::Path;

use safetensors::SafeTensors;
use shardcheck_formats::contract::{Contract, Depth, Merge};
use shardcheck_formats::recipe::Counter;
use shardcheck_formats::round_bf16;
use shardcheck_references::moe::{
    Addend, Choice, Fill, Gating, Mlp, Reduction, Renormalise, Rule, Scores, Scoring, admits, combine, mlp,
    scores, selections, weights,
};

fn rule() -> Rule {
    Rule {
        scoring: Scoring::Sigmoid,
        choice: Choice::Biased,
        top_k: 3,
        groups: 4,
        top_groups: 2,
        fill: Fill::NegativeInfinity,
        renormalise: Renormalise::Sum,
        scale: 1.0,
    }
}

/// Subsets of `0..count` of `size` elements.
fn subsets(count: usize, size: usize) -> Vec<Vec<usize>> {
    let of = |mask: usize| (0..count).filter(move |index| mask >> index & 1 == 1).collect::<Vec<_>>();
    (0..1 << count).filter(|mask: &usize| mask.count_ones() as usize == size).map(of).collect()
}

/// Sets that a router may choose by exact scores: every way to keep groups, every set of experts, each by its definition alone.
fn brute_force(rule: &Rule, values: &[f64], bias: &[f32]) -> Vec<Vec<usize>> {
    let count = values.len();
    let choice: Vec<f64> = (0..count)
        .map(|e| values[e] + if rule.choice == Choice::Biased { f64::from(bias[e]) } else { 0.0 })
        .collect();
    let size = count / rule.groups;
    let group = |g: usize| {
        let mut own = choice[g * size..(g + 1) * size].to_vec();
        own.sort_by(|a, b| b.partial_cmp(a).unwrap());
        if rule.choice == Choice::Biased { own[0] + own[1] } else { own[0] }
    };
    let best = |values: &[f64], set: &[usize]| {
        let outside = (0..values.len()).filter(|index| !set.contains(index));
        outside.into_iter().all(|other| set.iter().all(|own| values[*own] >= values[other]))
    };
    let groups: Vec<f64> = (0..rule.groups).map(|g| if rule.groups == 1 { 0.0 } else { group(g) }).collect();
    let mut found = Vec::new();
    for kept in subsets(rule.groups, rule.top_groups).into_iter().filter(|kept| best(&groups, kept)) {
        let fill = if rule.fill == Fill::Zero { 0.0 } else { f64::NEG_INFINITY };
        let masked: Vec<f64> =
            (0..count).map(|e| if kept.contains(&(e / size)) { choice[e] } else { fill }).collect();
        for set in subsets(count, rule.top_k).into_iter().filter(|set| best(&masked, set)) {
            if !found.contains(&set) {
                found.push(set);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn sets_are_those_of_a_brute_force_over_all_groups_and_all_sets_ties_and_negative_choices_included() {
    let mut random = Counter::new(5, 0);
    let (mut several, mut masked) = (0, 0);
    for round in 0..400 {
        let biased = round % 2 == 0;
        let groups = [1, 2, 4][round % 3];
        let rule = Rule {
            choice: if biased { Choice::Biased } else { Choice::Scores },
            fill: if round % 5 < 2 { Fill::Zero } else { Fill::NegativeInfinity },
            groups,
            top_groups: groups.div_ceil(2),
            top_k: 1 + round % 3,
            ..rule()
        };
        let quarters = |random: &mut Counter| (2.0 * random.gaussian()).round() / 4.0;
        let value: Vec<f64> =
            (0..8).map(|_| if round % 7 < 4 { quarters(&mut random) } else { random.gaussian() }).collect();
        let bias: Vec<f32> =
            (0..8).map(|_| quarters(&mut random) as f32 - if round % 3 == 0 { 2.0 } else { 0.0 }).collect();
        let given = Scores { relative: vec![0.0; 8], absolute: 0.0, value };
        let wanted = brute_force(&rule, &given.value, &bias);
        several += usize::from(wanted.len() > 1);
        if let Some(mut sets) = selections(&rule, &given, &bias) {
            sets.sort();
            assert_eq!(sets, wanted, "round {round}: {rule:?} {:?} {bias:?}", given.value);
        } else {
            assert!(wanted.len() > 16, "{} sets are not too many", wanted.len());
        }
        for set in subsets(8, rule.top_k) {
            assert_eq!(
                admits(&rule, &given, &bias, &set),
                Some(wanted.contains(&set)),
                "round {round} {set:?}"
            );
            masked += 1;
        }
    }
    assert!(several > 60 && masked > 5000, "{several} {masked}");
}

#[test]
fn scores_within_rounding_of_each_other_may_be_chosen_either_way_and_no_others() {
    let logits = [1.0f32, 1.0 + f32::EPSILON, 0.5, -3.0];
    let rule = Rule { choice: Choice::Scores, groups: 1, top_groups: 1, top_k: 1, ..rule() };
    for scoring in [Scoring::Sigmoid, Scoring::Softmax] {
        let near = scores(scoring, &logits, 2.0);
        assert_eq!(selections(&rule, &near, &[]).unwrap().len(), 2);
        assert_eq!(admits(&rule, &near, &[], &[2]), Some(false));
        assert_eq!(selections(&rule, &near.exact(), &[]).unwrap(), [[1]]);
    }
}

#[test]
fn scores_and_weights_of_32_bits_lie_within_their_bounds_and_use_a_good_part_of_them() {
    let mut random = Counter::new(6, 0);
    let mut worst = [0.0f64; 2];
    for round in 0..600 {
        let deviation = [1.0, 8.0, 30.0][round % 3];
        let logits: Vec<f32> = (0..32).map(|_| (deviation * random.gaussian()) as f32).collect();
        let scoring = if round % 2 == 0 { Scoring::Sigmoid } else { Scoring::Softmax };
        let bounds = scores(scoring, &logits, 1.0);
        let most = logits.iter().copied().fold(f32::MIN, f32::max);
        let exps: Vec<f32> = logits.iter().map(|x| (x - most).exp()).collect();
        let sum: f32 = exps.iter().sum();
        let seen: Vec<f32> = match scoring {
            Scoring::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            Scoring::Softmax => exps.iter().map(|exp| exp / sum).collect(),
        };
        for (expert, seen) in seen.iter().enumerate() {
            let off = (f64::from(*seen) - bounds.value[expert]).abs() / bounds.error(expert);
            assert!(off <= 1.0, "{scoring:?} {off} at {}", logits[expert]);
            worst[0] = worst[0].max(off);
        }
        let rule = Rule { renormalise: Renormalise::SumAndTiny, scale: 2.5, ..rule() };
        let own = [3, 17, 29];
        let sum = own.iter().map(|expert| seen[*expert]).sum::<f32>() + 1e-20;
        let wanted = weights(&rule, &bounds, &own);
        for (index, expert) in own.iter().enumerate() {
            let weight = seen[*expert] / sum * 2.5;
            let off = (f64::from(weight) - wanted.value[index]).abs() / wanted.error[index];
            assert!(off <= 1.0, "{scoring:?} {off} of a weight");
            worst[1] = worst[1].max(off);
        }
    }
    assert!(worst.iter().all(|worst| *worst > 0.05), "a bound that nothing comes near: {worst:?}");
}

#[test]
fn experts_in_32_bits_over_any_sharing_lie_within_their_bounds() {
    let (hidden, inner) = (20, 12);
    let contract =
        Contract { u_acc: 2f64.powi(-24), depth: Depth::Any, ..Contract::bf16_default(Merge::AgRsBf16) };
    let mut random = Counter::new(7, 0);
    let mut draw =
        |count: usize| (0..count).map(|_| round_bf16(random.gaussian() as f32)).collect::<Vec<f32>>();
    let mut worst = 0.0f64;
    for round in 0..60 {
        let ranks = [1, 2, 3, 5][round % 4];
        let (gate, up, down, x) =
            (draw(hidden * inner), draw(hidden * inner), draw(hidden * inner), draw(hidden));
        let is_gated = round % 3 > 0;
        let term = mlp(
            &Mlp { gate: is_gated.then_some(&gate[..]), up: &up, down: &down, gating: Gating::Silu },
            &x,
            &contract,
        );
        let weight = 0.75f32;
        let addend = Addend { weight: f64::from(weight), weight_error: 0.0, term: &term };
        let (out, bound) = combine(&[addend], hidden, Reduction { ranks }, &contract);
        let dot =
            |matrix: &[f32], row: usize| (0..hidden).map(|d| matrix[row * hidden + d] * x[d]).sum::<f32>();
        let act = |index: usize| {
            let (g, u) = (dot(&gate, index), dot(&up, index));
            round_bf16(if is_gated { g / (1.0 + (-g).exp()) * u } else { u })
        };
        for d in 0..hidden {
            let part = |rank: usize| {
                let own =
                    (rank * inner / ranks..(rank + 1) * inner / ranks).map(|i| act(i) * down[d * inner + i]);
                let part = weight * own.sum::<f32>();
                if ranks > 1 { round_bf16(part) } else { part }
            };
            let seen = (1..ranks).fold(part(0), |sum, rank| round_bf16(sum + part(rank)));
            let off = (f64::from(seen) - out[d]).abs() / bound[d];
            assert!(off <= 1.0, "round {round}, dim {d}: {off}");
            worst = worst.max(off);
        }
    }
    assert!(worst > 0.1, "a bound that nothing comes near: {worst}");
}

/// The fixture file and its description, or `None` with a visible line.
fn fixture(test: &str) -> Option<(Vec<u8>, serde_json::Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/fixtures");
    let read = |name: &str| std::fs::read(folder.join(name));
    match (read("moe.safetensors"), read("moe.json")) {
        (Ok(tensors), Ok(json)) => Some((tensors, serde_json::from_slice(&json).unwrap())),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("SKIPPED: {test}: {}: {error}", folder.display());
            None
        }
    }
}

/// Rows of a tensor as f64.
fn rows(tensors: &SafeTensors<'_>, name: &str) -> Option<Vec<Vec<f64>>> {
    let view = tensors.tensor(name).ok()?;
    let values: Vec<f64> = match view.dtype() {
        safetensors::Dtype::F32 => view
            .data()
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect(),
        safetensors::Dtype::F64 => {
            view.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
        }
        _ => view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
    };
    Some(values.chunks(*view.shape().last().unwrap()).map(<[f64]>::to_vec).collect())
}

fn flat32(tensors: &SafeTensors<'_>, name: &str) -> Option<Vec<f32>> {
    rows(tensors, name).map(|rows| rows.concat().into_iter().map(|value| value as f32).collect())
}

/// Exact scores of logits in 64 bits.
fn exact_scores(scoring: Scoring, logits: &[f64]) -> Scores {
    let most = logits.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - most).exp()).sum();
    let value = logits.iter().map(|x| match scoring {
        Scoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Scoring::Softmax => (x - most).exp() / sum,
    });
    Scores { value: value.collect(), relative: vec![0.0; logits.len()], absolute: 0.0 }
}

#[test]
fn routers_of_vllm_sglang_and_aiter_choose_and_weigh_as_the_oracle_says() {
    let Some((file, json)) = fixture("routers of vllm, sglang and aiter") else { return };
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let (mut judged, mut several) = (0, 0);
    for case in json["cases"].as_array().unwrap() {
        let (name, config) = (case["name"].as_str().unwrap(), &case["config"]);
        if !config["masked_fill"].is_object() {
            continue;
        }
        let logits = rows(&tensors, &format!("{name}.router_logits")).unwrap();
        let bias = flat32(&tensors, &format!("{name}.bias")).unwrap_or_default();
        let scoring = if config["score"] == "softmax" { Scoring::Softmax } else { Scoring::Sigmoid };
        for (engine, fill) in config["masked_fill"].as_object().unwrap() {
            let size = |key: &str| config[key].as_u64().unwrap() as usize;
            let tiny = config["renorm_eps"][engine].as_f64().unwrap() > 0.0;
            let rule = Rule {
                scoring,
                choice: if bias.is_empty() { Choice::Scores } else { Choice::Biased },
                top_k: size("k"),
                groups: size("ng"),
                top_groups: size("tg"),
                fill: if fill == "0.0" { Fill::Zero } else { Fill::NegativeInfinity },
                renormalise: match (config["norm"].as_bool().unwrap(), tiny) {
                    (false, _) => Renormalise::Raw,
                    (true, false) => Renormalise::Sum,
                    (true, true) => Renormalise::SumAndTiny,
                },
                scale: config["scale_applied"][engine].as_f64().unwrap(),
            };
            let ids = rows(&tensors, &format!("{name}.{engine}.topk_ids")).unwrap();
            let wanted = rows(&tensors, &format!("{name}.{engine}.topk_weights")).unwrap();
            for (token, logits) in logits.iter().enumerate() {
                let scores = exact_scores(scoring, logits);
                let set: Vec<usize> = ids[token].iter().map(|id| *id as usize).collect();
                assert_eq!(
                    admits(&rule, &scores, &bias, &set),
                    Some(true),
                    "{name} {engine} {token}: {set:?}"
                );
                several += usize::from(selections(&rule, &scores, &bias).is_none_or(|sets| sets.len() > 1));
                let own = weights(&rule, &scores, &set);
                for (own, wanted) in own.value.iter().zip(&wanted[token]) {
                    assert!((own - wanted).abs() <= 1e-11 + 1e-10 * wanted.abs(), "{name} {engine} {token}");
                }
                judged += 1;
            }
        }
    }
    assert!(judged >= 600 && several >= 40, "{judged} {several}");
}

/// The router of a layer's fixture.
fn rule_of(config: &serde_json::Value, biased: bool) -> Rule {
    let size = |key: &str| config[key].as_u64().map_or(1, |value| value as usize);
    let tiny = config["renorm_eps"].as_f64().unwrap_or(0.0) > 0.0;
    Rule {
        scoring: match config["scoring"].as_str() {
            Some(scoring) if scoring.starts_with("softmax") => Scoring::Softmax,
            _ => Scoring::Sigmoid,
        },
        choice: if biased { Choice::Biased } else { Choice::Scores },
        top_k: size("k"),
        groups: size("ng"),
        top_groups: size("tg"),
        fill: if config["masked_fill"] == "0.0" { Fill::Zero } else { Fill::NegativeInfinity },
        renormalise: match (config["renormalised"].as_bool().unwrap_or(false), tiny) {
            (false, _) => Renormalise::Raw,
            (true, false) => Renormalise::Sum,
            (true, true) => Renormalise::SumAndTiny,
        },
        scale: config["scale"].as_f64().unwrap_or(1.0),
    }
}

#[test]
fn layers_of_deepseek_and_qwen_come_out_as_the_oracle_says() {
    let Some((file, json)) = fixture("layers of deepseek and qwen") else { return };
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let contract = Contract::bf16_default(Merge::AgRsF32);
    let mut judged = 0;
    for case in json["cases"].as_array().unwrap() {
        let (name, config) = (case["name"].as_str().unwrap(), &case["config"]);
        let own = |tensor: &str| format!("{name}.{tensor}");
        let (Some(out), Some(hidden)) = (rows(&tensors, &own("out")), rows(&tensors, &own("hidden"))) else {
            continue;
        };
        let size = |key: &str| config[key].as_u64().map_or(1, |value| value as usize);
        let (width, inner) = (size("hidden"), size("I"));
        let logits = rows(&tensors, &own("router_logits")).unwrap();
        let bias = flat32(&tensors, &own("gate.e_score_correction_bias")).unwrap_or_default();
        let rule = rule_of(config, !bias.is_empty());
        let (both, down) = (
            flat32(&tensors, &own("experts.gate_up_proj")).unwrap(),
            flat32(&tensors, &own("experts.down_proj")).unwrap(),
        );
        let shared = ["gate", "up", "down"]
            .map(|part| flat32(&tensors, &own(&format!("shared_experts.{part}_proj.weight"))));
        let ids = rows(&tensors, &own("topk_ids")).unwrap();
        for (token, x) in hidden.iter().enumerate() {
            let x: Vec<f32> = x.iter().map(|value| *value as f32).collect();
            let scores = exact_scores(rule.scoring, &logits[token]);
            let set: Vec<usize> = ids[token].iter().map(|id| *id as usize).collect();
            assert_eq!(selections(&rule, &scores, &bias), Some(vec![set.clone()]), "{name} {token}");
            let weights = weights(&rule, &scores, &set);
            let block = inner * width;
            let mut terms: Vec<_> = set
                .iter()
                .map(|expert| {
                    let of = &both[2 * expert * block..2 * (expert + 1) * block];
                    let weights = Mlp {
                        gate: Some(&of[..block]),
                        up: &of[block..],
                        down: &down[expert * block..(expert + 1) * block],
                        gating: Gating::Silu,
                    };
                    mlp(&weights, &x, &contract)
                })
                .collect();
            if let [Some(gate), Some(up), Some(down)] = &shared {
                terms.push(mlp(&Mlp { gate: Some(gate), up, down, gating: Gating::Silu }, &x, &contract));
            }
            let weight = |index: usize| weights.value.get(index).copied().unwrap_or(1.0);
            let addends: Vec<Addend<'_>> = terms
                .iter()
                .enumerate()
                .map(|(index, term)| Addend { weight: weight(index), weight_error: 0.0, term })
                .collect();
            let (own, _) = combine(&addends, width, Reduction { ranks: 1 }, &contract);
            for (own, wanted) in own.iter().zip(&out[token]) {
                assert!(
                    (own - wanted).abs() <= 1e-11 + 1e-10 * wanted.abs(),
                    "{name} {token}: {own} {wanted}"
                );
            }
            judged += 1;
        }
    }
    assert!(judged >= 100, "{judged}");
}
