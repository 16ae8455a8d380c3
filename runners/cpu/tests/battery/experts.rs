//! Routers and layers of experts.

use shardcheck_engine::{
    Activation, ExpertChoice, ExpertSharding, MaskedFill, MoeExchange, MoePlan, Operation, Renormalise,
    Router, Scoring, SharedExpert, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use super::{Battery, Scene, step, uniform};

impl Battery<'_> {
    pub(super) fn routers(&mut self) {
        for choice in ExpertChoice::ALL {
            for (scoring, fill, renormalise) in [
                (Scoring::Sigmoid, MaskedFill::Zero, Renormalise::Raw),
                (Scoring::Softmax, MaskedFill::NegativeInfinity, Renormalise::Sum),
                (Scoring::Sigmoid, MaskedFill::Zero, Renormalise::Sum),
                (Scoring::Sigmoid, MaskedFill::NegativeInfinity, Renormalise::SumAndTiny),
            ] {
                let groups: usize = if choice == ExpertChoice::Hashed { 1 } else { 4 };
                let top_groups = groups.div_ceil(2);
                let router =
                    Router { scoring, choice, top_k: 3, groups, top_groups, fill, renormalise, scale: 2.5 };
                for (center, bias) in [(0.0, 0.0), (0.0, -2.0), (-60.0, 0.0), (120.0, 0.0)] {
                    let mut inputs = routing(9, 12, 3, (center, bias));
                    let mut session = Scene::small(1).open(self.engine);
                    let reply = step(session.as_mut(), &Operation::Route { router }, &mut inputs);
                    self.reply("route", &["topk_ids", "topk_weights"], &reply);
                }
            }
        }
    }

    pub(super) fn layers(&mut self) {
        let names = ["out", "expert_tokens", "slice_rows", "topk_ids", "topk_weights"];
        for exchange in MoeExchange::ALL {
            for (choice, shared, tokens, activation) in [
                (ExpertChoice::Biased, SharedExpert::Replicated, [7, 4], Activation::Linear),
                (ExpertChoice::Hashed, SharedExpert::None, [1, 0], Activation::SituGated),
                (ExpertChoice::Hashed, SharedExpert::Sharded, [5, 6], Activation::Linear),
            ] {
                if exchange == MoeExchange::Sliced && shared == SharedExpert::Sharded {
                    continue;
                }
                let pcp = if exchange == MoeExchange::Sliced { 1 } else { 2 };
                let plan = MoePlan {
                    dp: 2,
                    pcp,
                    tp: 3,
                    exchange,
                    sharding: ExpertSharding::Whole,
                    shared,
                    activation,
                };
                let groups: usize = if choice == ExpertChoice::Hashed { 1 } else { 4 };
                let router = Router {
                    scoring: Scoring::Sigmoid,
                    choice,
                    top_k: 3,
                    groups,
                    top_groups: groups.div_ceil(2),
                    fill: MaskedFill::NegativeInfinity,
                    renormalise: Renormalise::Sum,
                    scale: 2.5,
                };
                let count: i32 = tokens.iter().sum();
                // SiTU is bent where its factors are large
                let size = if activation == Activation::Linear { 1.0 } else { 16.0 };
                let bf16 = |seed: u64, shape: &[usize]| {
                    let values: Vec<f32> =
                        uniform(seed, shape.iter().product()).iter().map(|value| size * value).collect();
                    Tensor::from_f32(Dtype::Bf16, shape, &values)
                };
                let mut inputs = routing(count as usize, 16, 3, (0.0, 0.0))
                    .with("dp_tokens", Tensor::from_i32(&[2], &tokens))
                    .with("hidden", bf16(41, &[count as usize, 6]))
                    .with("w_gate", bf16(46, &[16, 5, 6]))
                    .with("w_up", bf16(42, &[16, 5, 6]))
                    .with("w_down", bf16(43, &[16, 6, 5]))
                    .with("shared_up", bf16(44, &[5, 6]))
                    .with("shared_down", bf16(45, &[6, 5]));
                let mut session = Scene::small(1).open(self.engine);
                let reply = step(session.as_mut(), &Operation::Moe { router, plan }, &mut inputs);
                self.reply("moe", &names, &reply);
            }
        }
    }
}

/// Logits around a centre, ties among them, a bias and a table for `top_k` of so many experts.
fn routing(tokens: usize, experts: usize, top_k: usize, (center, bias): (f32, f32)) -> Tensors {
    let logits: Vec<f32> =
        uniform(31, tokens * experts).into_iter().map(|value| center + (8.0 * value).round() / 2.0).collect();
    let biases: Vec<f32> = uniform(32, experts).into_iter().map(|value| bias + 0.5 * value).collect();
    let ids: Vec<i64> = (0..tokens as i64).map(|token| (5 * token + 3) % 8).collect();
    let table: Vec<i32> =
        (0..8 * top_k).map(|entry| ((entry / top_k * 3 + entry % top_k * 5) % experts) as i32).collect();
    Tensors::new()
        .with("logits", Tensor::from_f32(Dtype::F32, &[tokens, experts], &logits))
        .with("bias", Tensor::from_f32(Dtype::F32, &[experts], &biases))
        .with("token_ids", Tensor::from_i64(&[tokens], &ids))
        .with("hash_table", Tensor::from_i32(&[8, top_k], &table))
}
