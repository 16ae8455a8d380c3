//! Attention over the sharded cache equals dense attention, whatever the layout and the exchange.

mod scene;

use scene::Scene;
use shardcheck_cpu::{CpuEngine, fault};
use shardcheck_engine::{Attention, CommBackend, LaneOrder, Mask};
use shardcheck_formats::Dtype;

#[test]
fn every_world_size_gives_dense_attention_powers_of_two_or_not() {
    for world in [1, 2, 3, 4, 5, 8] {
        Scene::small(world).assert_dense();
    }
}

#[test]
fn every_interleave_size_gives_dense_attention() {
    for (interleave, block) in [(1, 16), (2, 16), (4, 16), (16, 16), (16, 32), (3, 6)] {
        let scene = Scene::small(4).with(|s| {
            s.configuration.interleave = interleave;
            s.configuration.block_size = block;
        });
        scene.assert_dense();
    }
}

#[test]
fn both_backends_and_both_lane_orders_give_dense_attention() {
    for backend in CommBackend::ALL {
        for order in LaneOrder::ALL {
            let scene = Scene::small(4).with(|s| {
                s.configuration.comm_backend = backend;
                s.configuration.lane_order = order;
            });
            let reply = scene.assert_dense();
            let expected = if backend == CommBackend::A2a { order.name() } else { "none" };
            assert_eq!(reply.effective.get("lane_order"), Some(expected));
        }
    }
}

#[test]
fn several_rows_a_request_are_causal_in_global_positions() {
    for (world, interleave) in [(2, 1), (3, 1), (4, 2), (8, 4)] {
        let scene = Scene::small(world).with(|s| {
            s.configuration.interleave = interleave;
            s.requests = vec![(33, 4), (0, 3), (0, 0), (8, 2), (7, 1)];
        });
        let reply = scene.assert_dense();
        assert_eq!(reply.effective.get("route"), Some("verify"));
    }
}

#[test]
fn a_draft_block_sees_all_of_itself() {
    let scene = Scene::small(4).with(|s| {
        s.mask = Mask::Bidirectional;
        s.requests = vec![(33, 4), (0, 3), (5, 4)];
    });
    assert_eq!(scene.assert_dense().effective.get("route"), Some("draft"));
}

#[test]
fn grouped_query_attention_reads_its_own_kv_heads() {
    for backend in CommBackend::ALL {
        let scene = Scene::small(2).with(|s| {
            s.configuration.attention = Attention::Gqa { kv_heads: 2, head_dim: 8, v_head_dim: 6 };
            s.configuration.comm_backend = backend;
            s.requests = vec![(20, 3), (1, 1)];
        });
        scene.assert_dense();
    }
}

#[test]
fn groups_of_ranks_each_hold_the_whole_sequence() {
    let scene = Scene::small(2).with(|s| s.configuration.tp = 6);
    let reply = scene.assert_dense();
    assert_eq!(reply.collectives, [2; 6]);
}

#[test]
fn eight_bit_caches_give_dense_attention_over_what_they_hold() {
    for dtype in [Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2, Dtype::F16, Dtype::F32] {
        for scale in [1.0, 0.02] {
            let scene = Scene::small(4).with(|s| {
                s.configuration.kv_dtype = dtype;
                s.configuration.kv_scale = scale;
                s.in_16_bits(dtype);
                s.sharpness = 1.0;
            });
            scene.assert_dense();
        }
    }
}

#[test]
fn projection_before_and_after_the_merge_agree_with_dense_attention() {
    for before in [false, true] {
        for backend in CommBackend::ALL {
            let scene = Scene::small(4).with(|s| {
                s.projects = true;
                s.configuration.project_before_merge = before;
                s.configuration.comm_backend = backend;
            });
            let (reply, (out, lse)) = (scene.run(), scene.distance(&scene.run()));
            assert!(out < 0.15 && lse < 1e-4, "{out} {lse}");
            assert_eq!(
                reply.effective.get("project_before_merge"),
                Some(if before { "true" } else { "false" })
            );
            let width = if before { 4 } else { 16 };
            assert_eq!(reply.outputs.get("partial_out").unwrap().shape()[3], width);
        }
    }
}

#[test]
fn query_replication_gives_the_same_bits_with_one_collective_less() {
    let plain = Scene::small(4).run();
    let replicated = Scene::small(4).with(|s| s.configuration.query_replication = true).run();
    assert_eq!(plain.outputs, replicated.outputs);
    assert_eq!((plain.collectives[0], replicated.collectives[0]), (2, 1));
    assert_eq!(replicated.effective.get("query_replication"), Some("true"));
}

#[test]
fn padded_head_widths_leave_no_trace_in_the_result() {
    let plain = Scene::small(3).run();
    let padded = Scene::small(3).with(|s| s.configuration.kernel_head_widths = vec![16, 8, 4]).run();
    assert_eq!(plain.outputs, padded.outputs);
    assert_eq!(
        (plain.effective.get("kernel_heads"), padded.effective.get("kernel_heads")),
        (Some("6"), Some("8"))
    );
}

#[test]
fn a_context_shorter_than_the_world_leaves_empty_shards_that_change_nothing() {
    for backend in CommBackend::ALL {
        for shift in [-400.0, 0.0, 400.0] {
            let scene = Scene::small(8).with(|s| {
                s.requests = (0..20).map(|cached| (cached, 1)).collect();
                s.configuration.comm_backend = backend;
                s.shift = shift;
            });
            let (out, lse) = scene.distance(&scene.run());
            assert!(out < 0.06 && lse < 1e-3, "{out} {lse}"); // eight bf16 roundings of values up to 4
        }
    }
}

#[test]
fn committed_prefix_rows_is_far_from_dense_attention() {
    let scene = Scene::small(2).with(|s| s.requests = vec![(33, 4), (5, 3)]);
    let faulty = CpuEngine::with_fault(fault("committed-prefix-rows").unwrap());
    let (out, lse) = scene.distance(&scene.run_on(&faulty).unwrap());
    assert!(out > 0.3 && lse > 0.1, "{out} {lse}");
}

#[test]
fn rows_of_the_output_that_nobody_writes_hold_nan_on_every_rank_and_the_others_what_they_did() {
    let scene = Scene::small(2);
    let (rows, real) = (scene.rows(), scene.rows() - scene.padded_rows);
    let faulty = CpuEngine::with_fault(fault("padding-output-unwritten").unwrap());
    let (healthy, seen) = (scene.run(), scene.run_on(&faulty).unwrap());
    for name in ["out", "lse"] {
        let [healthy, seen] = [&healthy, &seen].map(|reply| reply.outputs.get(name).unwrap().to_f32());
        let width = healthy.len() / (2 * rows);
        for (index, (healthy, seen)) in healthy.chunks(width).zip(seen.chunks(width)).enumerate() {
            assert!(healthy.iter().all(|value| !value.is_nan()), "{name} of row {index}");
            if index % rows < real {
                assert_eq!(seen, healthy, "{name} of row {index}");
            } else {
                assert!(seen.iter().all(|value| value.is_nan()), "{name} of row {index}: {seen:?}");
            }
        }
    }
}
