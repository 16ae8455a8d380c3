//! Attention over a cached context, gathered in chunks, equals dense causal attention.

mod battery;
mod scene;

use battery::{contexts, run_context};
use scene::Scene;
use shardcheck_cpu::engine;
use shardcheck_engine::CommBackend;

fn ragged(s: &mut Scene) {
    s.requests = vec![(37, 3), (5, 1), (0, 2), (0, 0), (70, 2)];
    s.new_tokens_given = true;
}

#[test]
fn every_world_interleave_and_chunk_budget_gives_dense_attention() {
    for world in [1, 2, 3, 4, 8] {
        for interleave in [1, 4] {
            for budget in [0, 40, 100, 100_000] {
                let scene =
                    Scene::small(world).with(ragged).with(|s| s.configuration.interleave = interleave);
                let reply = run_context(&scene, budget, &engine()).unwrap();
                let (out, lse) = scene.distance(&reply);
                assert!(out < 0.03 && lse < 1e-4, "W {world}, S {interleave}, budget {budget}: {out} {lse}");
            }
        }
    }
}

#[test]
fn every_cache_format_gives_dense_attention_over_what_it_holds() {
    for (scene, budget) in contexts() {
        let scene = scene.with(|s| s.new_tokens_given = true);
        let (out, lse) = scene.distance(&run_context(&scene, budget, &engine()).unwrap());
        assert!(out < 0.03 && lse < 1e-4, "{:?}: {out} {lse}", scene.configuration);
    }
}

#[test]
fn context_and_decode_of_the_same_tokens_agree() {
    let scene = Scene::small(4).with(|s| s.requests = vec![(20, 1), (3, 1), (50, 1)]);
    let decode = scene.run();
    let context = run_context(&scene, 64, &engine()).unwrap();
    let (a, b) = (decode.outputs.get("out").unwrap().to_f32(), context.outputs.get("out").unwrap().to_f32());
    let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 0.05, "{worst}");
    let (a, b) = (decode.outputs.get("lse").unwrap().to_f32(), context.outputs.get("lse").unwrap().to_f32());
    assert!(a.iter().zip(&b).all(|(a, b)| a == b || (a - b).abs() < 1e-4));
}

#[test]
fn chunks_add_up_to_the_context_and_hold_each_token_once() {
    let scene = Scene::small(3).with(ragged);
    let reply = run_context(&scene, 40, &engine()).unwrap();
    let lens = reply.outputs.get("chunk_lens").unwrap();
    let &[ranks, chunks, requests] = lens.shape() else { panic!("{lens:?}") };
    assert_eq!(
        (ranks, requests, reply.effective.get("chunks").unwrap()),
        (3, 5, chunks.to_string().as_str())
    );
    assert!(chunks > 2);
    let lens = lens.to_i64();
    for (request, (cached, _)) in scene.requests.iter().enumerate() {
        for rank in 0..ranks {
            let sum: i64 = (0..chunks).map(|c| lens[(rank * chunks + c) * requests + request]).sum();
            assert_eq!(sum, *cached as i64);
        }
    }
    // the gathered keys are the written ones, in some order
    let bits = |keys: &[f32]| {
        let mut rows: Vec<Vec<u32>> =
            keys.chunks(24).map(|k| k.iter().map(|v| v.to_bits()).collect()).collect();
        rows.sort_unstable();
        rows
    };
    let gathered = reply.outputs.get("gathered_key").unwrap();
    let written = scene.write_context_inputs().get("key").unwrap().to_f32();
    let per_rank = gathered.len() / ranks;
    for rank in 0..ranks {
        assert_eq!(bits(&gathered.to_f32()[rank * per_rank..(rank + 1) * per_rank]), bits(&written));
    }
}

#[test]
fn all_ranks_gather_every_chunk_even_where_one_of_them_holds_nothing() {
    let scene = Scene::small(8).with(|s| s.requests = vec![(3, 2)]);
    let reply = run_context(&scene, 8, &engine()).unwrap();
    assert_eq!(reply.collectives, [1; 8]);
    let none = Scene::small(8).with(|s| s.requests = vec![(0, 2)]);
    assert_eq!(run_context(&none, 8, &engine()).unwrap().collectives, [0; 8]);
}

#[test]
fn without_a_context_its_state_is_empty_and_the_new_tokens_stand_alone() {
    let scene = Scene::small(2).with(|s| s.requests = vec![(0, 3), (0, 1)]);
    let reply = run_context(&scene, 64, &engine()).unwrap();
    let lse = reply.outputs.get("context_lse").unwrap().to_f32();
    assert!(lse.iter().all(|lse| *lse == f32::NEG_INFINITY));
    let (out, lse) = scene.distance(&reply);
    assert!(out < 0.03 && lse < 1e-4, "{out} {lse}");
}

#[test]
fn the_exchange_of_outputs_plays_no_part_in_a_context_step() {
    let a = Scene::small(4).with(ragged);
    let b = a.clone().with(|s| s.configuration.comm_backend = CommBackend::AgRs);
    let [a, b] = [a, b].map(|scene| run_context(&scene, 64, &engine()).unwrap());
    assert_eq!(a.outputs, b.outputs);
}
