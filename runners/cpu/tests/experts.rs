//! Routers and layers of experts of the embedded engine: worked examples, and what is refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_engine::{
    Activation, EngineError, ExpertChoice, ExpertSharding, MaskedFill, MoeExchange, MoePlan, Operation,
    Renormalise, Reply, Router, Scoring, SharedExpert, Tensor, Tensors,
};
use shardcheck_formats::{Dtype, round_bf16};

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

/// A router of one expert a token, chosen by the score.
const FIRST: Router = Router { choice: ExpertChoice::Scores, top_k: 1, groups: 1, ..ROUTER };

/// [`tagged`] with inner width 5, over which expert e gives 31 times the number, and a shared expert of width 3 that writes 7 times the
/// number into the first column.
fn tagged_and_shared(dp_tokens: &[i32], experts: usize) -> Tensors {
    let hidden = experts + 1;
    let up = |width: usize| (0..width * hidden).map(|at| f32::from(u8::from(at % hidden == 0)));
    let down = |width: usize, column: usize| {
        (0..hidden * width).map(move |at| if at / width == column { (1 << (at % width)) as f32 } else { 0.0 })
    };
    let bf16 = |shape: &[usize], values: Vec<f32>| Tensor::from_f32(Dtype::Bf16, shape, &values);
    tagged(dp_tokens, experts)
        .with("w_up", bf16(&[experts, 5, hidden], (0..experts).flat_map(|_| up(5)).collect()))
        .with("w_down", bf16(&[experts, hidden, 5], (0..experts).flat_map(|e| down(5, e + 1)).collect()))
        .with("shared_up", bf16(&[3, hidden], up(3).collect()))
        .with("shared_down", bf16(&[hidden, 3], down(3, 0).collect()))
}

/// Tokens of 3 and 5 that a rank has rows of, in order.
fn own_tokens(rank: usize, plan: &MoePlan) -> Vec<usize> {
    let (dp, pcp) = (rank / (plan.pcp * plan.tp), rank / plan.tp % plan.pcp);
    let group = if dp == 0 { 0..3 } else { 3..8 };
    match plan.exchange {
        MoeExchange::Local | MoeExchange::Gathered => group.skip(pcp).step_by(plan.pcp).collect(),
        MoeExchange::Redundant | MoeExchange::Sliced => group.collect(),
    }
}

#[test]
fn every_rank_gets_its_own_rows_of_what_its_expert_and_the_shared_one_give_however_they_are_shared_out() {
    let experts = 3;
    for exchange in MoeExchange::ALL {
        let (pcp, slices, collectives) = match exchange {
            // a sum over tensor parallelism alone; rows are gathered, summed and scattered; sent, sent back and gathered
            MoeExchange::Local => (2, [2, 3], 1),
            MoeExchange::Gathered => (2, [3, 3], 3),
            MoeExchange::Redundant => (2, [5, 5], 3),
            MoeExchange::Sliced => (1, [3, 3], 3),
        };
        for (sharding, shared) in ExpertSharding::ALL
            .into_iter()
            .flat_map(|sharding| SharedExpert::ALL.into_iter().map(move |shared| (sharding, shared)))
        {
            let plan =
                MoePlan { dp: 2, pcp, tp: 2, exchange, sharding, shared, activation: Activation::Linear };
            let reply =
                run(&Operation::Moe { router: FIRST, plan }, tagged_and_shared(&[3, 5], experts)).unwrap();
            let most = (0..plan.ranks()).map(|rank| own_tokens(rank, &plan).len()).max().unwrap();
            let (mut out, mut ids, mut weights) = (Vec::new(), Vec::new(), Vec::new());
            for rank in 0..plan.ranks() {
                let mut rows = own_tokens(rank, &plan).into_iter();
                for token in (0..most).map(|_| rows.next()) {
                    let number = token.map_or(0.0, |token| token as f64 + 1.0);
                    let mut row = vec![0.0; experts + 1];
                    row[0] = if shared == SharedExpert::None { 0.0 } else { 7.0 * number };
                    row[token.map_or(1, |token| token % experts + 1)] = 31.0 * number;
                    out.extend(row);
                    ids.push(token.map_or(0.0, |token| (token % experts) as f64));
                    weights.push(f64::from(u8::from(token.is_some())));
                }
            }
            let what = format!("{exchange} {sharding} {shared}");
            assert_eq!(values(&reply, "out"), out, "{what}");
            assert_eq!(values(&reply, "topk_ids"), ids, "{what}");
            assert_eq!(values(&reply, "topk_weights"), weights, "{what}");
            let of_groups = [slices[0], slices[1]].map(|rows| vec![f64::from(rows); 2 * pcp]).concat();
            assert_eq!(values(&reply, "slice_rows"), of_groups, "{what}");
            assert_eq!(reply.collectives, vec![collectives; plan.ranks()], "{what}");
            // a token counts on one rank, or where experts are split on all that have a part of it; rows are never split
            let times = match (exchange, sharding) {
                (MoeExchange::Sliced, _) | (_, ExpertSharding::Whole) => 1.0,
                (MoeExchange::Local, ExpertSharding::Split) => 2.0,
                (_, ExpertSharding::Split) => plan.ranks() as f64,
            };
            let counts = values(&reply, "expert_tokens");
            let of = |expert: usize| counts.iter().skip(expert).step_by(experts).sum::<f64>();
            assert_eq!([0, 1, 2].map(of), [3.0, 3.0, 2.0].map(|count| count * times), "{what}");
        }
    }
}

#[test]
fn a_gated_expert_is_the_silu_of_its_gate_times_its_up_projection_and_stores_that_in_bf16() {
    let (gate, up, down, x) =
        ([0.5, -1.0, 2.0, 1.0f32], [1.0, 2.0, -1.0, 0.5f32], [1.0, 1.0, -2.0, 0.5f32], [1.5, -0.5f32]);
    let bf16 = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::Bf16, shape, values);
    let inputs = Tensors::new()
        .with("hidden", bf16(&[1, 2], &x))
        .with("dp_tokens", Tensor::from_i32(&[1], &[1]))
        .with("logits", Tensor::from_f32(Dtype::F32, &[1, 1], &[40.0]))
        .with("w_gate", bf16(&[1, 2, 2], &gate))
        .with("w_up", bf16(&[1, 2, 2], &up))
        .with("w_down", bf16(&[1, 2, 2], &down));
    let plan = MoePlan {
        dp: 1,
        pcp: 1,
        tp: 1,
        exchange: MoeExchange::Local,
        sharding: ExpertSharding::Whole,
        shared: SharedExpert::None,
        activation: Activation::SiluGated,
    };
    let dot = |row: &[f32]| row.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>();
    let active: Vec<f32> = (0..2)
        .map(|row| {
            let (g, u) = (dot(&gate[row * 2..][..2]), dot(&up[row * 2..][..2]));
            round_bf16(g / (1.0 + (-g).exp()) * u)
        })
        .collect();
    let wanted =
        [0, 1].map(|row| f64::from(round_bf16(down[row * 2] * active[0] + down[row * 2 + 1] * active[1])));
    let reply = run(&Operation::Moe { router: FIRST, plan }, inputs).unwrap();
    assert_eq!(values(&reply, "out"), wanted);
}

/// Weights and experts of one token by the logits of four experts.
fn routed(router: Router, logits: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let inputs = Tensors::new().with("logits", Tensor::from_f32(Dtype::F32, &[1, logits.len()], logits));
    let reply = run(&Operation::Route { router }, inputs).unwrap();
    assert_eq!(reply.collectives, [0]);
    (values(&reply, "topk_ids"), values(&reply, "topk_weights"))
}

fn near(seen: &[f64], wanted: &[f64]) {
    let close = seen.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(seen.len() == wanted.len() && close, "{seen:?} {wanted:?}");
}

#[test]
fn weights_are_scores_as_they_are_or_by_their_sum_and_scaled_after_that() {
    let logits = [1f32.ln(), 4f32.ln(), 2f32.ln(), 3f32.ln()];
    let with = |scoring, renormalise| {
        routed(Router { scoring, renormalise, top_k: 2, scale: 2.5, ..FIRST }, &logits)
    };
    for (scoring, [first, second]) in [(Scoring::Softmax, [0.4, 0.3]), (Scoring::Sigmoid, [0.8, 0.75])] {
        for renormalise in Renormalise::ALL {
            let sum = if renormalise == Renormalise::Raw { 1.0 } else { first + second };
            let (ids, weights) = with(scoring, renormalise);
            assert_eq!(ids, [1.0, 3.0]);
            near(&weights, &[first, second].map(|score: f64| score / sum * 2.5));
        }
    }
}

#[test]
fn weights_that_all_vanish_are_zero_where_something_tiny_is_added_to_their_sum() {
    let router = |renormalise| Router { renormalise, top_k: 2, ..FIRST };
    let (_, weights) = routed(router(Renormalise::SumAndTiny), &[-200.0; 4]);
    assert_eq!(weights, [0.0, 0.0]);
    let (_, weights) = routed(router(Renormalise::Sum), &[-200.0; 4]);
    assert!(weights.iter().all(|weight| weight.is_nan()));
}

#[test]
fn without_a_bias_a_group_is_kept_by_its_best_expert_alone() {
    let router = Router { groups: 2, top_groups: 1, top_k: 2, ..FIRST };
    assert_eq!(routed(router, &[3.0, -3.0, 2.0, 2.5]).0, [0.0, 1.0]);
    // of equal choices the lower id is taken, of groups and of experts
    assert_eq!(routed(router, &[1.0; 4]).0, [0.0, 1.0]);
}

#[test]
fn a_table_gives_the_experts_of_a_token_id_and_the_scores_their_weights() {
    let router = Router { choice: ExpertChoice::Hashed, ..Router { top_k: 2, ..FIRST } };
    let inputs = |ids: &[i64], table: &[i32]| {
        let logits: Vec<f32> = ids.iter().flat_map(|_| [0.0, 4f32.ln(), 0.0, 3f32.ln()]).collect();
        Tensors::new()
            .with("logits", Tensor::from_f32(Dtype::F32, &[ids.len(), 4], &logits))
            .with("token_ids", Tensor::from_i64(&[ids.len()], ids))
            .with("hash_table", Tensor::from_i32(&[table.len() / 2, 2], table))
    };
    let reply = run(&Operation::Route { router }, inputs(&[2, 0, 1], &[3, 1, 0, 2, 1, 2])).unwrap();
    assert_eq!(values(&reply, "topk_ids"), [1.0, 2.0, 3.0, 1.0, 0.0, 2.0]);
    near(&values(&reply, "topk_weights"), &[0.8, 0.5, 0.75, 0.8, 0.5, 0.5]);
    for unknown in [4, -1] {
        let refused = run(&Operation::Route { router }, inputs(&[0], &[3, unknown])).unwrap_err();
        assert!(matches!(refused, EngineError::Crash { .. }), "{refused}");
    }
}
