//! Attention of shared rows on the embedded engine: dense attention on every rank, worked lengths, and what is refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_engine::{
    Attention, EngineError, Operation, PcpDecodes, PcpPlan, PcpStrategy, Reply, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

const PLAIN: PcpPlan = PcpPlan {
    world: 2,
    strategy: PcpStrategy::HeadTail,
    decodes: PcpDecodes::Replicated,
    padded_rows: 0,
    query_dtype: Dtype::Bf16,
    query_scale: 1.0,
};

fn scene(requests: &[(usize, usize)]) -> Scene {
    Scene::small(2).with(|s| {
        s.configuration.interleave = 2;
        s.requests = requests.to_vec();
        s.padded_rows = 0;
        s.new_tokens_given = true;
    })
}

fn inputs(scene: &Scene, prefills: &[u64]) -> Tensors {
    let flags = Tensor::from_codes(Dtype::U8, &[prefills.len()], prefills);
    scene.context_inputs().with("is_prefilling", flags)
}

fn attend(scene: &Scene, plan: PcpPlan, prefills: &[u64]) -> Result<Reply, EngineError> {
    let mut session = scene.open(&engine());
    step(session.as_mut(), &Operation::WriteKv, &mut scene.write_context_inputs())?;
    step(session.as_mut(), &Operation::AttendPcp { plan }, &mut inputs(scene, prefills))
}

fn integers(reply: &Reply, name: &str) -> Vec<i64> {
    reply.outputs.get(name).unwrap().to_i64()
}

fn floats(reply: &Reply, name: &str) -> Vec<f32> {
    reply.outputs.get(name).unwrap().to_f32()
}

#[test]
fn a_chunk_from_each_end_has_a_length_of_its_own_behind_the_prefix() {
    // eleven rows in chunks of three behind four cached tokens: rank 0 has rows 0..3 and 9..11, rank 1 rows 3..9
    let reply = attend(&scene(&[(4, 11)]), PLAIN, &[1]).unwrap();
    assert_eq!(integers(&reply, "rows"), [0, 1, 2, 9, 10, -1, 3, 4, 5, 6, 7, 8]);
    assert_eq!(integers(&reply, "row_lens"), [5, 6, 7, 14, 15, 0, 8, 9, 10, 11, 12, 13]);
    assert_eq!(reply.collectives, [3, 3], "keys, outputs and LSEs");
}

#[test]
fn rows_in_turn_see_their_own_positions() {
    let plan = PcpPlan { strategy: PcpStrategy::RoundRobin, decodes: PcpDecodes::Split, ..PLAIN };
    let reply = attend(&scene(&[(3, 3), (9, 1), (0, 3)]), plan, &[1, 0, 1]).unwrap();
    assert_eq!(integers(&reply, "rows"), [0, 2, 4, 6, 1, 3, 5, -1]);
    assert_eq!(integers(&reply, "row_lens"), [4, 6, 1, 3, 5, 10, 2, 0]);
}

#[test]
fn every_rank_has_the_keys_in_their_order_and_the_same_batch_in_its_order() {
    for (strategy, decodes) in [
        (PcpStrategy::HeadTail, PcpDecodes::Replicated),
        (PcpStrategy::HeadTail, PcpDecodes::Owned),
        (PcpStrategy::RoundRobin, PcpDecodes::Split),
        (PcpStrategy::Contiguous, PcpDecodes::Replicated),
    ] {
        let scene = scene(&[(5, 9), (7, 1), (0, 0), (0, 2), (6, 1)]);
        let one = attend(&scene, PcpPlan { world: 1, strategy, decodes, ..PLAIN }, &[1, 0, 1, 1, 0]).unwrap();
        for (world, padded_rows) in [(2, 0), (3, 12), (8, 0)] {
            let plan = PcpPlan { world, strategy, decodes, padded_rows, ..PLAIN };
            let reply = attend(&scene, plan, &[1, 0, 1, 1, 0]).unwrap();
            for name in ["out", "lse", "gathered_key"] {
                let (whole, own) = (floats(&one, name), floats(&reply, name));
                assert_eq!(own, whole.repeat(world), "{name} of {world} ranks, {strategy}");
            }
            let keys = floats(&reply, "gathered_key");
            assert_eq!(keys[..scene.keys().len()], scene.keys(), "{strategy}");
        }
    }
}

#[test]
fn queries_of_eight_bits_are_read_behind_their_cast_with_the_scale_in_them() {
    let scene = scene(&[(2, 3)]).with(|s| {
        s.configuration.attention = Attention::Gqa { kv_heads: 2, head_dim: 8, v_head_dim: 8 };
    });
    let plan = PcpPlan { world: 1, query_dtype: Dtype::E4m3fn, query_scale: 0.25, ..PLAIN };
    let seen = floats(&attend(&scene, plan, &[1]).unwrap(), "kernel_query");
    let given = scene.query();
    // e4m3fn has three bits behind the point: a value comes back within a sixteenth of itself
    assert!(given.iter().zip(&seen).all(|(a, b)| (a - b).abs() <= a.abs() / 16.0 + 0.25 / 512.0));
    assert!(given.iter().zip(&seen).any(|(a, b)| a != b));
}

#[test]
fn no_ranks_and_tensors_that_do_not_fit_are_refused() {
    let scene = scene(&[(2, 3)]);
    assert!(matches!(attend(&scene, PcpPlan { world: 0, ..PLAIN }, &[1]), Err(EngineError::Crash { .. })));
    assert!(matches!(attend(&scene, PLAIN, &[1, 1]), Err(EngineError::Input(_))));
    let mut session = scene.open(&engine());
    for name in ["query", "key", "block_table", "context_lens"] {
        let mut inputs = inputs(&scene, &[1]);
        inputs.remove(name);
        let reply = step(session.as_mut(), &Operation::AttendPcp { plan: PLAIN }, &mut inputs);
        assert!(matches!(reply, Err(EngineError::Input(_))), "{name}");
    }
}
