//! A small transformer by the embedded engine: a worked example, and what is refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_engine::{
    Activation, Answer, Attention, Engine, Operation, Reply, Session, StackPlan, StreamLayout, Tensor,
    Tensors,
};
use shardcheck_formats::Dtype;

/// Three tokens whose embeddings are the axes, doubled; the head asks token t for token t + 1, the last one for the first. Nothing is
/// attended to and nothing is added by MLPs.
fn inputs(ids: &[i32], lens: &[i32], starts: &[i32]) -> Tensors {
    let zeros = |shape: &[usize]| Tensor::from_f32(Dtype::Bf16, shape, &vec![0.0; shape.iter().product()]);
    let (embedding, head) =
        ([2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    let rotary: Vec<f32> = (0..8 * 8).map(|at| if at % 8 < 4 { 1.0 } else { 0.0 }).collect();
    Tensors::new()
        .with("token_ids", Tensor::from_i32(&[ids.len()], ids))
        .with("seq_lens", Tensor::from_i32(&[lens.len()], lens))
        .with("query_start_loc", Tensor::from_i32(&[starts.len()], starts))
        .with("block_table", Tensor::from_i32(&[lens.len(), 1], &(1..=lens.len() as i32).collect::<Vec<_>>()))
        .with("embedding", Tensor::from_f32(Dtype::Bf16, &[3, 3], &embedding))
        .with("norm_weight", Tensor::from_f32(Dtype::F32, &[5, 3], &[1.0; 15]))
        .with("rotary", Tensor::from_f32(Dtype::F32, &[8, 8], &rotary))
        .with("w_query", zeros(&[2, 4, 24, 3]))
        .with("w_key", zeros(&[2, 24, 3]))
        .with("w_uv", zeros(&[2, 4, 16, 4]))
        .with("w_output", zeros(&[2, 3, 16]))
        .with("w_gate", zeros(&[2, 5, 3]))
        .with("w_up", zeros(&[2, 5, 3]))
        .with("w_down", zeros(&[2, 3, 5]))
        .with("w_head", Tensor::from_f32(Dtype::Bf16, &[3, 3], &head))
}

fn forward(layers: usize, stream: StreamLayout) -> Operation {
    Operation::Forward {
        plan: StackPlan {
            layers,
            stream,
            experts: None,
            pattern: None,
            recurrent: None,
            activation: Activation::SiluGated,
            output_gate: false,
            list: None,
            drafts: 0,
            pcp: None,
        },
    }
}

fn session() -> Box<dyn Session> {
    Scene::small(2).open(&engine())
}

fn ints(reply: &Reply, name: &str) -> Vec<i64> {
    reply.outputs.get(name).unwrap().to_i64()
}

#[test]
fn tokens_are_those_of_the_head_on_every_rank_whichever_shard_has_them() {
    for stream in StreamLayout::ALL {
        let mut session = session();
        let reply =
            step(session.as_mut(), &forward(2, stream), &mut inputs(&[0, 2, 1, 2, 0], &[3, 2], &[0, 3, 5]))
                .unwrap();
        assert_eq!(ints(&reply, "tokens"), [1, 0, 2, 0, 1, 1, 0, 2, 0, 1], "{stream}");
        let rows = if stream == StreamLayout::Whole { 5 } else { 3 };
        assert_eq!(reply.outputs.get("hidden").unwrap().shape(), [2, 5, rows, 3]);
        // a row of one 2 has a root mean square of 2 / √3
        let logits = reply.outputs.get("logits").unwrap().to_f64();
        assert!((logits[1] - 3f64.sqrt()).abs() < 0.01 && logits[0] == 0.0, "{:?}", &logits[..3]);
        let next =
            step(session.as_mut(), &forward(2, stream), &mut inputs(&[1, 1], &[4, 3], &[0, 1, 2])).unwrap();
        assert_eq!(ints(&next, "tokens"), [2, 2, 2, 2], "{stream}");
    }
}

#[test]
fn what_can_not_be_is_refused() {
    let plan = forward(2, StreamLayout::Whole);
    let refused = |operation: &Operation, mut given: Tensors| {
        step(session().as_mut(), operation, &mut given).unwrap_err().to_string()
    };
    let whole = || inputs(&[0, 1], &[2], &[0, 2]);
    for (ids, lens, reason) in
        [([0, 3], 2, "not among the 3"), ([-1, 0], 2, "not among the 3"), ([0, 1], 9, "beyond the 8")]
    {
        let error = refused(&plan, inputs(&ids, &[lens], &[0, 2]));
        assert!(error.contains(reason), "{error}");
    }
    assert!(refused(&forward(3, StreamLayout::Whole), whole()).contains("norm_weight"));
    let narrow = whole().with("rotary", Tensor::from_f32(Dtype::F32, &[8, 6], &[0.0; 48]));
    assert!(refused(&plan, narrow).contains("rotary"));
    let tall = whole().with("w_down", Tensor::from_f32(Dtype::Bf16, &[2, 3, 4], &[0.0; 24]));
    assert!(refused(&plan, tall).contains("w_gate"));
}

#[test]
fn grouped_queries_are_no_stack() {
    let scene = Scene::small(2).with(|scene| {
        scene.configuration.attention = Attention::Gqa { kv_heads: 1, head_dim: 8, v_head_dim: 8 };
    });
    let Answer::Done(mut session) = engine().open(&scene.configuration).unwrap() else { panic!("refused") };
    let answer = session.step(&forward(2, StreamLayout::Whole), &mut inputs(&[0], &[1], &[0, 1])).unwrap();
    assert!(matches!(answer, Answer::Unsupported(why) if why.contains("latent")));
}
