//! Routers and layers of experts of the embedded engine: worked examples, and what is refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_engine::{
    Activation, EngineError, ExpertChoice, ExpertSharding, MaskedFill, MoeExchange, MoePlan, Operation,
    Renormalise, Reply, Router, Scoring, SharedExpert, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

const ROUTER: Router = Router {
    scoring: Scoring::Sigmoid,
    choice: ExpertChoice::Biased,
    top_k: 2,
    groups: 2,
    top_groups: 1,
    fill: MaskedFill::NegativeInfinity,
    renormalise: Renormalise::Raw,
    scale: 1.0,
};

fn run(operation: &Operation, mut inputs: Tensors) -> Result<Reply, EngineError> {
    step(Scene::small(1).open(&engine()).as_mut(), operation, &mut inputs)
}

fn values(reply: &Reply, name: &str) -> Vec<f64> {
    reply.outputs.get(name).unwrap().to_f64()
}

/// One token whose scores are one half each.
fn even(bias: &[f32]) -> Tensors {
    Tensors::new()
        .with("logits", Tensor::from_f32(Dtype::F32, &[1, bias.len()], &vec![0.0; bias.len()]))
        .with("bias", Tensor::from_f32(Dtype::F32, &[bias.len()], bias))
}

#[test]
fn a_group_is_kept_by_its_two_best_and_weights_know_no_bias() {
    // the first group has the best choice, the second the better pair
    let reply = run(&Operation::Route { router: ROUTER }, even(&[3.0, 0.0, 2.0, 2.5])).unwrap();
    assert_eq!(values(&reply, "topk_ids"), [3.0, 2.0]);
    assert_eq!(values(&reply, "topk_weights"), [0.5, 0.5]);
}

#[test]
fn of_negative_choices_a_group_filled_with_zeros_wins_and_one_filled_with_infinity_does_not() {
    let fill =
        |fill| run(&Operation::Route { router: Router { fill, ..ROUTER } }, even(&[-1.0, -1.5, -3.0, -3.5]));
    assert_eq!(values(&fill(MaskedFill::NegativeInfinity).unwrap(), "topk_ids"), [0.0, 1.0]);
    assert_eq!(values(&fill(MaskedFill::Zero).unwrap(), "topk_ids"), [2.0, 3.0]);
}

/// Tokens 1, 2, 3, … in the first of `experts + 1` columns; expert e writes the number into column e + 1. Token t has expert t mod E.
fn tagged(dp_tokens: &[i32], experts: usize) -> Tensors {
    let (count, hidden) = (dp_tokens.iter().sum::<i32>() as usize, experts + 1);
    let logits: Vec<f32> = (0..count * experts)
        .map(|at| if at / experts % experts == at % experts { 40.0 } else { -160.0 })
        .collect();
    let rows: Vec<f32> =
        (0..count * hidden).map(|at| if at % hidden == 0 { (at / hidden + 1) as f32 } else { 0.0 }).collect();
    let up: Vec<f32> = (0..experts * hidden).map(|at| f32::from(u8::from(at % hidden == 0))).collect();
    let down: Vec<f32> =
        (0..experts * hidden).map(|at| f32::from(u8::from(at % hidden == at / hidden + 1))).collect();
    let bf16 = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::Bf16, shape, values);
    Tensors::new()
        .with("hidden", bf16(&[count, hidden], &rows))
        .with("dp_tokens", Tensor::from_i32(&[dp_tokens.len()], dp_tokens))
        .with("logits", Tensor::from_f32(Dtype::F32, &[count, experts], &logits))
        .with("w_up", bf16(&[experts, 1, hidden], &up))
        .with("w_down", bf16(&[experts, hidden, 1], &down))
}

fn layer(exchange: MoeExchange, (dp, pcp, tp): (usize, usize, usize)) -> Operation {
    let router = Router { choice: ExpertChoice::Scores, top_k: 1, groups: 1, ..ROUTER };
    let (sharding, shared, activation) = (ExpertSharding::Whole, SharedExpert::None, Activation::Linear);
    Operation::Moe { router, plan: MoePlan { dp, pcp, tp, exchange, sharding, shared, activation } }
}

#[test]
fn nine_tokens_on_four_ranks_are_twelve_rows_in_slices_of_three_of_which_nine_come_back() {
    let reply = run(&layer(MoeExchange::Sliced, (1, 1, 4)), tagged(&[9], 5)).unwrap();
    assert_eq!(values(&reply, "slice_rows"), [3.0; 4]);
    assert_eq!(reply.outputs.get("out").unwrap().shape(), [4, 9, 6]);
    let rank = &values(&reply, "out")[3 * 54..];
    for (token, row) in rank.chunks(6).enumerate() {
        let wanted: Vec<f64> =
            (0..6).map(|d| if d == token % 5 + 1 { token as f64 + 1.0 } else { 0.0 }).collect();
        assert_eq!(row, wanted);
    }
    // padding is routed, and not counted
    assert_eq!(values(&reply, "expert_tokens").iter().sum::<f64>(), 9.0);
}

#[test]
fn a_group_with_more_tokens_makes_all_groups_pad_to_it() {
    let reply = run(&layer(MoeExchange::Sliced, (2, 1, 2)), tagged(&[1, 7], 3)).unwrap();
    assert_eq!(values(&reply, "slice_rows"), [4.0; 4]);
    assert_eq!(values(&reply, "expert_tokens").iter().sum::<f64>(), 8.0);
}

#[test]
fn merge_zero_and_merge_one_give_a_rank_of_prefill_its_own_rows() {
    for exchange in [MoeExchange::Local, MoeExchange::Gathered] {
        let reply = run(&layer(exchange, (1, 2, 2)), tagged(&[5], 3)).unwrap();
        let out = values(&reply, "out");
        // ranks 2 and 3 are the second of prefill context parallelism: tokens 1 and 3, and padding
        for rank in [2, 3] {
            let rows = &out[rank * 12..rank * 12 + 8];
            assert_eq!(rows, [0.0, 0.0, 2.0, 0.0, 0.0, 4.0, 0.0, 0.0], "{exchange}");
        }
    }
}

#[test]
fn no_tokens_at_all_are_no_rows() {
    for exchange in MoeExchange::ALL {
        let pcp = if exchange == MoeExchange::Sliced { 1 } else { 2 };
        let reply = run(&layer(exchange, (2, pcp, 2)), tagged(&[0, 0], 3)).unwrap();
        assert_eq!(reply.outputs.get("out").unwrap().shape(), [4 * pcp, 0, 4]);
    }
}

#[test]
fn a_router_that_asks_for_more_than_there_is_and_a_plan_without_ranks_are_refused() {
    let refused =
        run(&Operation::Route { router: Router { top_k: 3, ..ROUTER } }, even(&[0.0; 4])).unwrap_err();
    assert!(matches!(refused, EngineError::Crash { .. }), "{refused}");
    let refused = run(&layer(MoeExchange::Local, (1, 0, 2)), tagged(&[1], 3)).unwrap_err();
    assert!(matches!(refused, EngineError::Crash { .. }), "{refused}");
    let inputs = tagged(&[2], 3).with("dp_tokens", Tensor::from_i32(&[1], &[3]));
    let refused = run(&layer(MoeExchange::Local, (1, 1, 2)), inputs).unwrap_err();
    assert!(matches!(refused, EngineError::Input(_)), "{refused}");
}
