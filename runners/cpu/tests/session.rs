//! What a session takes, refuses and survives.

mod scene;

use std::time::Duration;

use proptest::prelude::*;
use scene::{Scene, step};
use shardcheck_cpu::{CpuEngine, engine, fault};
use shardcheck_engine::{
    Answer, Attention, CacheLayout, CommBackend, Engine, EngineError, Mask, Operation, OperationKind, Tensor,
    Tensors,
};
use shardcheck_formats::Dtype;

fn read(scene: &Scene, engine: &CpuEngine) -> Tensors {
    let mut session = scene.open(engine);
    step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
    step(session.as_mut(), &Operation::ReadCache, &mut Tensors::new()).unwrap().outputs
}

#[test]
fn caches_come_up_with_nan_in_every_slot() {
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2] {
        let scene = Scene::small(2).with(|s| {
            s.configuration.kv_dtype = dtype;
            // a cache of 16 bits has the type of the activations
            if dtype == Dtype::F16 {
                s.configuration.dtype = dtype;
            }
        });
        let mut session = scene.open(&engine());
        let cache = step(session.as_mut(), &Operation::ReadCache, &mut Tensors::new()).unwrap().outputs;
        let keys = cache.get("key_cache").unwrap();
        assert_eq!((keys.dtype(), keys.shape()), (dtype, &[2, 64, 4, 1, 24][..]));
        assert!(keys.to_f32().iter().all(|value| value.is_nan()), "{dtype}");
        assert!(cache.find("value_cache").is_none());
    }
}

#[test]
fn every_token_is_written_once_and_nothing_else_is_touched() {
    let scene = Scene::small(3);
    let keys = read(&scene, &engine()).get("key_cache").unwrap().to_f32();
    let mut held: Vec<Vec<u32>> = keys
        .chunks(24)
        .filter(|key| !key[0].is_nan())
        .map(|key| key.iter().map(|v| v.to_bits()).collect())
        .collect();
    let mut written: Vec<Vec<u32>> =
        scene.keys().chunks(24).map(|key| key.iter().map(|v| v.to_bits()).collect()).collect();
    held.sort_unstable();
    written.sort_unstable();
    assert_eq!(held, written);
}

#[test]
fn a_write_that_spills_over_fills_the_slot_behind_its_own_and_ends_with_its_block() {
    // seven tokens of one request: a whole block of four and three slots of another, which is not the next of the pool
    let scene = Scene::small(1).with(|s| s.requests = vec![(6, 1)]);
    let held = |engine: &CpuEngine| -> Vec<usize> {
        let keys = read(&scene, engine).get("key_cache").unwrap().to_f32();
        keys.chunks(24).enumerate().filter(|(_, key)| !key[0].is_nan()).map(|(slot, _)| slot).collect()
    };
    let (table, _) = scene.block_table();
    let slots = |block: i32, count: usize| (0..count).map(move |slot| block as usize * 4 + slot);
    let expected = |rest: usize| -> Vec<usize> { slots(table[0], 4).chain(slots(table[1], rest)).collect() };
    assert_eq!(held(&engine()), expected(3));
    let spilling = CpuEngine::with_fault(fault("write-spills-over").unwrap());
    assert_eq!(held(&spilling), expected(4));
}

#[test]
fn reported_slots_are_those_of_the_layout_step_and_minus_one_for_padding() {
    let scene = Scene::small(4).with(|s| s.configuration.interleave = 2);
    let mut session = scene.open(&engine());
    let layout = step(session.as_mut(), &Operation::Layout, &mut scene.metadata()).unwrap().outputs;
    let written = step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap().outputs;
    let tokens: usize = scene.lens().iter().sum();
    let (planned, seen) = (layout.get("slots").unwrap().to_i64(), written.get("slots").unwrap().to_i64());
    for rank in 0..4 {
        let row = &seen[rank * (tokens + 2)..(rank + 1) * (tokens + 2)];
        assert_eq!(row[..tokens], planned[rank * tokens..(rank + 1) * tokens]);
        assert_eq!(row[tokens..], [-1, -1]);
    }
}

#[test]
fn a_cache_that_was_read_can_be_loaded_into_another_session() {
    let scene = Scene::small(2).with(|s| {
        s.configuration.attention = Attention::Gqa { kv_heads: 2, head_dim: 8, v_head_dim: 6 };
    });
    let mut cache = read(&scene, &engine());
    let mut session = scene.open(&engine());
    step(session.as_mut(), &Operation::LoadCache, &mut cache).unwrap();
    let attend = Operation::Attend { mask: Mask::Causal };
    let reply = step(session.as_mut(), &attend, &mut scene.attend_inputs()).unwrap();
    assert_eq!(reply.outputs, scene.run().outputs);
}

#[test]
fn steps_without_an_exchange_say_that_no_rank_entered_one() {
    let scene = Scene::small(3);
    let mut session = scene.open(&engine());
    let mut caches = step(session.as_mut(), &Operation::ReadCache, &mut Tensors::new()).unwrap().outputs;
    for (operation, inputs) in [
        (Operation::Layout, &mut scene.metadata()),
        (Operation::WriteKv, &mut scene.write_inputs()),
        (Operation::ReadCache, &mut Tensors::new()),
        (Operation::LoadCache, &mut caches),
    ] {
        let reply = step(session.as_mut(), &operation, inputs).unwrap();
        assert_eq!(reply.collectives, [0, 0, 0], "{operation:?}");
    }
    let attended =
        step(session.as_mut(), &Operation::Attend { mask: Mask::Causal }, &mut scene.attend_inputs())
            .unwrap();
    assert!(attended.collectives.iter().all(|count| *count > 0 && *count == attended.collectives[0]));
}

#[test]
fn caches_of_more_bytes_than_keys_and_values_may_take_are_refused_before_they_are_made() {
    let scene = Scene::small(1).with(|s| {
        s.configuration.attention = Attention::Gqa { kv_heads: 2, head_dim: 8, v_head_dim: 7 };
        // 8 slots of 2 heads of 8 + 7 elements of 2 bytes: 480 bytes a block, and 7.5 GiB in all
        s.configuration.block_size = 8;
        s.configuration.blocks = 1 << 24;
    });
    let Answer::Unsupported(why) = engine().open(&scene.configuration).unwrap() else { panic!("it opens") };
    assert!(why.contains("more than 4294967296 bytes"), "{why}");
}

/// The scene's cache in another layout, as inputs of an import into the scene's own.
fn of_another_layout(scene: &Scene, source: CacheLayout) -> Tensors {
    let there = scene.clone().with(|s| {
        s.configuration.tp = source.dcp;
        s.configuration.dcp = source.dcp;
        s.configuration.interleave = source.interleave;
        s.configuration.block_size = source.block_size;
        // as many KV heads to a rank, so that the query heads must divide over them
        s.configuration.heads_per_rank = 2;
    });
    let caches = read(&there, &engine());
    let (table, width) = there.block_table();
    let lens: Vec<i32> = there.lens().iter().map(|len| *len as i32).collect();
    let mut inputs = scene.metadata();
    inputs.remove("query_start_loc");
    inputs.insert("source_block_table", Tensor::from_i32(&[lens.len(), width], &table));
    for (name, tensor) in caches.iter() {
        inputs.insert(&format!("source_{name}"), tensor.clone());
    }
    inputs
}

#[test]
fn a_cache_of_another_layout_comes_in_as_if_it_had_been_written_here() {
    let grouped = Attention::Gqa { kv_heads: 2, head_dim: 8, v_head_dim: 6 };
    for (dcp, interleave, block_size) in [(1, 1, 4), (2, 1, 4), (3, 2, 6), (4, 4, 4), (5, 1, 2)] {
        let source = CacheLayout { dcp, interleave, block_size };
        for (world, change) in [
            (3, None),
            (1, None),
            (2, Some((grouped, Dtype::E4m3fn, 0.25))),
            (2, Some((grouped, Dtype::Bf16, 1.0))),
        ] {
            let scene = Scene::small(world).with(|s| {
                s.configuration.interleave = 2;
                s.configuration.tp = 2 * world;
                if let Some((attention, dtype, scale)) = change {
                    (s.configuration.attention, s.configuration.kv_dtype) = (attention, dtype);
                    s.configuration.kv_scale = scale;
                }
            });
            let mut session = scene.open(&engine());
            let mut inputs = of_another_layout(&scene, source);
            let imported = step(session.as_mut(), &Operation::ImportCache { source }, &mut inputs).unwrap();
            assert_eq!(imported.collectives, vec![0; 2 * world], "every rank has the whole of what is given");
            let seen = step(session.as_mut(), &Operation::ReadCache, &mut Tensors::new()).unwrap();
            assert!(seen.outputs == read(&scene, &engine()), "{source:?} into {world} ranks");
        }
    }
}

#[test]
fn an_import_that_does_not_fit_is_named() {
    let (scene, source) = (Scene::small(2), CacheLayout { dcp: 3, interleave: 1, block_size: 4 });
    let fails = |source: CacheLayout, change: fn(&mut Tensors)| {
        let mut inputs = of_another_layout(&scene, CacheLayout { dcp: 3, interleave: 1, block_size: 4 });
        change(&mut inputs);
        let mut session = scene.open(&engine());
        session.step(&Operation::ImportCache { source }, &mut inputs).unwrap_err()
    };
    let wrong_world = fails(CacheLayout { dcp: 2, ..source }, |_| {});
    assert!(matches!(&wrong_world, EngineError::Input(e) if e.to_string().contains("source_key_cache")));
    let missing = fails(source, |inputs| drop(inputs.remove("source_block_table")));
    assert!(matches!(&missing, EngineError::Input(e) if e.to_string().contains("source_block_table")));
    let longer = fails(source, |inputs| inputs.insert("seq_lens", Tensor::from_i32(&[4], &[1000, 0, 0, 0])));
    assert!(matches!(&longer, EngineError::Crash { text } if text.contains("illegal address")), "{longer}");
    let negative = fails(source, |inputs| inputs.insert("seq_lens", Tensor::from_i32(&[4], &[-1, 0, 0, 0])));
    assert!(matches!(&negative, EngineError::Crash { text } if text.contains("negative")), "{negative}");
    let fewer = fails(source, |inputs| inputs.insert("source_block_table", Tensor::from_i32(&[1, 1], &[0])));
    assert!(
        matches!(&fewer, EngineError::Input(e) if e.to_string().contains("source_block_table")),
        "{fewer}"
    );
}

#[test]
fn two_kv_groups_of_a_session_answer_as_each_does_by_itself() {
    let sharded = Scene::small(3);
    let replicated = Scene::small(1).with(|s| {
        (s.configuration.tp, s.configuration.block_size, s.seed) = (3, 6, 90);
        s.configuration.attention = Attention::Gqa { kv_heads: 2, head_dim: 8, v_head_dim: 6 };
    });
    let both = sharded
        .clone()
        .with(|s| s.configuration.second_group = Some(Box::new(replicated.configuration.clone())));
    let mut session = both.open(&engine());
    let attend = || Operation::Attend { mask: Mask::Causal };
    let mut seen = [Vec::new(), Vec::new()];
    for (group, scene) in [&sharded, &replicated].into_iter().enumerate() {
        step(session.as_mut(), &Operation::WriteKv.in_group(group), &mut scene.write_inputs()).unwrap();
    }
    for (group, scene) in [&sharded, &replicated].into_iter().enumerate() {
        let mut steps = [
            (Operation::Layout, scene.metadata()),
            (attend(), scene.attend_inputs()),
            (Operation::ReadCache, Tensors::new()),
        ];
        let mut alone = scene.open(&engine());
        step(alone.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
        for (operation, inputs) in &mut steps {
            let own = step(alone.as_mut(), operation, inputs).unwrap();
            let beside = step(session.as_mut(), &operation.clone().in_group(group), inputs).unwrap();
            assert!(own == beside, "{operation:?} in group {group}");
            seen[group].push(beside);
        }
    }
    assert_ne!(seen[0], seen[1]);
    let unknown = session.step(&Operation::ReadCache.in_group(2), &mut Tensors::new()).unwrap();
    assert!(matches!(&unknown, Answer::Unsupported(why) if why.contains("the session has 2")), "{unknown:?}");
}

#[test]
fn a_configuration_that_contradicts_itself_is_unsupported_with_the_reason() {
    let refused = |change: fn(&mut Scene), expected: &str| {
        let scene = Scene::small(2).with(change);
        let Answer::Unsupported(reason) = engine().open(&scene.configuration).unwrap() else {
            panic!("opened without: {expected}")
        };
        assert!(reason.contains(expected), "{reason}");
    };
    refused(|s| s.configuration.dcp = 3, "does not divide tp");
    refused(|s| s.configuration.interleave = 3, "not a multiple of interleave");
    refused(|s| s.configuration.kv_dtype = Dtype::U8, "not a float format");
    refused(|s| (s.configuration.tp, s.configuration.dcp) = (512, 512), "more than the 256 threads");
    refused(
        |s| (s.configuration.blocks, s.configuration.block_size) = (1 << 24, 1 << 10),
        "use fewer blocks",
    );
}

#[test]
fn inputs_that_do_not_fit_are_named_and_not_a_crash() {
    let scene = Scene::small(2);
    let attend = Operation::Attend { mask: Mask::Causal };
    let error = |change: fn(&mut Tensors)| {
        let mut inputs = scene.attend_inputs();
        change(&mut inputs);
        scene.open(&engine()).step(&attend, &mut inputs).unwrap_err()
    };
    let missing = error(|inputs| drop(inputs.remove("seq_lens")));
    assert!(matches!(&missing, EngineError::Input(e) if e.to_string().contains("seq_lens")), "{missing}");
    let mistyped = error(|inputs| inputs.insert("seq_lens", Tensor::from_i64(&[4], &[13, 37, 0, 3])));
    assert!(
        matches!(&mistyped, EngineError::Input(e) if e.to_string().contains("expected i32")),
        "{mistyped}"
    );
    let misshapen =
        error(|inputs| inputs.insert("query", Tensor::from_f32(Dtype::Bf16, &[1, 24], &[0.0; 24])));
    assert!(matches!(misshapen, EngineError::Input(_)), "{misshapen}");
}

#[test]
fn a_block_that_does_not_exist_is_an_illegal_address_not_a_panic() {
    let scene = Scene::small(2);
    let mut inputs = scene.attend_inputs();
    let (mut table, width) = scene.block_table();
    table[1] = 64;
    inputs.insert("block_table", Tensor::from_i32(&[4, width], &table));
    let attend = Operation::Attend { mask: Mask::Causal };
    let error = scene.open(&engine()).step(&attend, &mut inputs).unwrap_err();
    let EngineError::Crash { text } = error else { panic!("{error}") };
    assert!(text.contains("block 64 of 64, entry 1 of request 0"), "{text}");
    let error =
        scene.open(&engine()).step(&Operation::WriteKv, &mut scene.write_inputs().with_table(&table, width));
    assert!(matches!(error, Err(EngineError::Crash { .. })), "{error:?}");
}

trait WithTable {
    fn with_table(self, table: &[i32], width: usize) -> Self;
}

impl WithTable for Tensors {
    fn with_table(self, table: &[i32], width: usize) -> Self {
        self.with("block_table", Tensor::from_i32(&[table.len() / width, width], table))
    }
}

#[test]
fn negative_lengths_and_falling_row_starts_are_refused() {
    let scene = Scene::small(2);
    for (name, values) in [("seq_lens", vec![13, -1, 0, 3]), ("query_start_loc", vec![0, 2, 1, 2, 3])] {
        let mut inputs = scene.metadata().with(name, Tensor::from_i32(&[values.len()], &values));
        let error = scene.open(&engine()).step(&Operation::Layout, &mut inputs).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_rank_that_skips_a_collective_ends_the_step_by_timeout_with_its_name() {
    let scene = Scene::small(4).with(|s| s.configuration.comm_backend = CommBackend::AgRs);
    let hanging = CpuEngine::with_fault(fault("one-rank-skips-the-lse-gather").unwrap())
        .with_timeout(Duration::from_millis(50));
    let error = scene.run_on(&hanging).unwrap_err();
    let EngineError::Timeout { rank: Some(rank), waiting_in, .. } = error else { panic!("{error}") };
    // three ranks wait for the fourth, or the fourth for them one collective further on
    let named = waiting_in.contains("all_gather_lse") || waiting_in.contains("reduce_scatter_output");
    assert!(rank < 4 && named, "rank {rank}: {waiting_in}");
}

#[test]
fn a_failed_step_leaves_the_engine_usable_in_another_session() {
    let scene = Scene::small(2);
    let healthy = engine();
    let mut inputs = scene.attend_inputs().with_table(&[9999; 16], 4);
    assert!(scene.open(&healthy).step(&Operation::Attend { mask: Mask::Causal }, &mut inputs).is_err());
    assert_eq!(scene.run_on(&healthy).unwrap().outputs, scene.run().outputs);
}

#[test]
fn inputs_come_back_unchanged_from_every_step() {
    let scene = Scene::small(2);
    let mut session = scene.open(&engine());
    for (operation, inputs) in [
        (Operation::Layout, scene.metadata()),
        (Operation::WriteKv, scene.write_inputs()),
        (Operation::Attend { mask: Mask::Causal }, scene.attend_inputs()),
        (Operation::Attend { mask: Mask::Bidirectional }, scene.attend_inputs()),
        (Operation::AttendContext { chunk_budget_tokens: 64 }, scene.context_inputs()),
    ] {
        let mut given = inputs.clone();
        step(session.as_mut(), &operation, &mut given).unwrap();
        assert_eq!(given, inputs, "{operation:?}");
    }
}

#[test]
fn the_profile_is_within_the_ceiling_and_names_every_observable_that_replies_carry() {
    let engine = engine();
    engine.profile().check().unwrap();
    let decode = engine.profile().operation(OperationKind::Decode).unwrap();
    let reply = Scene::small(2).run();
    for name in &decode.observables {
        assert!(reply.outputs.find(name).is_some(), "{name}");
    }
    assert!(OperationKind::ALL.iter().all(|kind| engine.profile().operation(*kind).is_some()));
}

#[test]
fn a_second_step_of_a_session_does_not_remember_the_first() {
    let first = Scene::small(2).with(|s| s.requests = vec![(9, 1), (30, 1)]);
    let second = first.clone().with(|s| s.requests = vec![(23, 1), (12, 1)]);
    let mut session = first.open(&engine());
    let attend = Operation::Attend { mask: Mask::Causal };
    for scene in [&first, &second] {
        step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
        let reply = step(session.as_mut(), &attend, &mut scene.attend_inputs()).unwrap();
        assert_eq!(reply.outputs, scene.run().outputs);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_batch_on_any_layout_gives_dense_attention(
        world in 1usize..6,
        runs in 0usize..3,
        blocks_of_runs in 1usize..4,
        requests in prop::collection::vec((0usize..40, 0usize..4), 1..5),
        padded_rows in 0usize..3,
        backend in prop::sample::select(CommBackend::ALL.to_vec()),
        draft in any::<bool>(),
        seed in 0u64..1000,
    ) {
        let scene = Scene::small(world).with(|s| {
            s.configuration.interleave = 1 << runs;
            s.configuration.block_size = blocks_of_runs << runs;
            s.configuration.blocks = 512;
            s.configuration.comm_backend = backend;
            s.requests = requests;
            s.padded_rows = padded_rows;
            s.mask = if draft { Mask::Bidirectional } else { Mask::Causal };
            s.seed = seed;
        });
        let (out, lse) = scene.distance(&scene.run());
        prop_assert!(out < 0.05 && lse < 1e-4, "{} {}", out, lse);
    }
}
