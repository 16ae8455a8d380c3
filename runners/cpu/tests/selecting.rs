//! Selection of tokens by the embedded engine: a worked example over ranks, lists in each form, and what is refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_engine::{EngineError, Operation, Reply, SelectionMode, Selector, SlotList, Tensor, Tensors};
use shardcheck_formats::Dtype;

/// Two ranks, tokens dealt one by one, blocks of four; eleven tokens whose scores are given, and one row that sees all, one padding row.
fn scene() -> Scene {
    Scene::small(2).with(|s| {
        s.requests = vec![(10, 1)];
        s.padded_rows = 1;
    })
}

/// One head of width 2 whose score is the first element of the key.
fn inputs(scores: &[f32]) -> Tensors {
    let scene = scene();
    let configuration = &scene.configuration;
    let (blocks, block) = (configuration.blocks, configuration.block_size);
    let (table, _) = scene.block_table();
    let mut cache = vec![f32::NAN; 2 * blocks * block * 2];
    for (position, score) in scores.iter().enumerate() {
        let (rank, local) = (position % 2, position / 2);
        let slot = (rank * blocks + table[local / block] as usize) * block + local % block;
        cache[2 * slot] = *score;
        cache[2 * slot + 1] = 0.0;
    }
    scene
        .metadata()
        .with("index_query", Tensor::from_f32(Dtype::Bf16, &[2, 1, 2], &[1.0, 0.0, 1.0, 0.0]))
        .with("index_weights", Tensor::from_f32(Dtype::F32, &[2, 1], &[1.0, 1.0]))
        .with("index_cache", Tensor::from_f32(Dtype::Bf16, &[2, blocks, block, 2], &cache))
}

fn select(selector: Selector, mut given: Tensors) -> Result<Reply, EngineError> {
    step(scene().open(&engine()).as_mut(), &Operation::SelectSparse { selector }, &mut given)
}

fn whole(reply: &Reply, name: &str) -> Vec<i64> {
    reply.outputs.get(name).unwrap().to_i64()
}

const SCORES: [f32; 11] = [3.0, 1.0, 8.0, 2.0, 7.0, 2.0, 6.0, 0.0, 5.0, 4.0, 9.0];

#[test]
fn the_best_of_all_ranks_are_the_same_on_each_and_shared_out_by_owner() {
    let selector = Selector { top_k: 3, mode: SelectionMode::Exact, list: SlotList::Padded };
    let reply = select(selector, inputs(&SCORES)).unwrap();
    // the best three are even positions: rank 1 owns none of them
    assert_eq!(whole(&reply, "topk"), [10, 2, 4, -1, -1, -1].repeat(2));
    assert_eq!(whole(&reply, "counts"), [3, 0, 0, 0]);
    assert_eq!(whole(&reply, "indptr"), [0, 3, 6, 0, 3, 6]);
    let table = scene().block_table().0;
    // local tokens 5, 1, 2 of blocks of four
    let slot = |local: i64| i64::from(table[local as usize / 4]) * 4 + local % 4;
    let own = [slot(5), slot(1), slot(2), -1, -1, -1];
    assert_eq!(whole(&reply, "slots"), [own, [-1; 6]].concat());
    assert_eq!(reply.collectives, [1, 1]);
}

#[test]
fn a_union_has_the_best_of_each_rank_and_exchanges_nothing() {
    let selector = Selector { top_k: 2, mode: SelectionMode::Union, list: SlotList::Packed };
    let reply = select(selector, inputs(&SCORES)).unwrap();
    // of equal scores of rank 1 the older token is taken
    assert_eq!(whole(&reply, "topk"), [10, 2, -1, -1, 9, 3, -1, -1]);
    assert_eq!(whole(&reply, "counts"), [2, 0, 2, 0]);
    assert_eq!(whole(&reply, "indptr"), [0, 2, 2, 0, 2, 2]);
    assert_eq!(reply.collectives, [0, 0]);
}

#[test]
fn an_empty_row_has_no_entry_or_one_of_slot_zero() {
    for (list, entries, fill) in [(SlotList::Packed, 0, -1), (SlotList::PackedDummy, 1, 0)] {
        let selector = Selector { top_k: 2, mode: SelectionMode::Exact, list };
        let reply = select(selector, inputs(&SCORES)).unwrap();
        assert_eq!(whole(&reply, "topk"), [10, 2, -1, -1].repeat(2));
        assert_eq!(whole(&reply, "counts"), [2, 0, 0, 0], "a dummy is not counted");
        let indptr = [0, 2, 2 + entries, 0, entries, 2 * entries];
        assert_eq!(whole(&reply, "indptr"), indptr);
        assert_eq!(whole(&reply, "slots")[4..], [fill, fill, -1, -1], "{list}");
    }
}

#[test]
fn all_tokens_are_selected_where_they_are_fewer_than_k_though_all_scores_are_negative() {
    let selector = Selector { top_k: 16, mode: SelectionMode::Exact, list: SlotList::Padded };
    let mut given = inputs(&SCORES);
    given.insert("index_weights", Tensor::from_f32(Dtype::F32, &[2, 1], &[-1.0, -1.0]));
    let reply = select(selector, given).unwrap();
    let mut own = whole(&reply, "topk")[..16].to_vec();
    own.sort_unstable();
    assert_eq!(own, [vec![-1; 5], (0..11).collect()].concat());
    assert_eq!(whole(&reply, "counts"), [6, 0, 5, 0]);
}

#[test]
fn what_does_not_fit_is_refused_and_never_a_panic() {
    let selector = Selector { top_k: 2, mode: SelectionMode::Exact, list: SlotList::Padded };
    let none = select(Selector { top_k: 0, ..selector }, inputs(&SCORES));
    assert!(matches!(none, Err(EngineError::Crash { .. })), "{none:?}");
    for name in ["seq_lens", "query_start_loc", "block_table", "index_query", "index_weights", "index_cache"]
    {
        let mut given = inputs(&SCORES);
        given.insert(name, Tensor::from_f32(Dtype::F32, &[1], &[0.0]));
        let refused = select(selector, given);
        assert!(matches!(refused, Err(EngineError::Input(_))), "{name}: {refused:?}");
    }
    // keys of eight bits need their scales
    let mut given = inputs(&SCORES);
    for (name, shape) in [("index_query", vec![2, 1, 2]), ("index_cache", vec![2, 64, 4, 2])] {
        let count = shape.iter().product();
        given.insert(name, Tensor::from_f32(Dtype::E4m3fn, &shape, &vec![1.0; count]));
    }
    assert!(matches!(select(selector, given), Err(EngineError::Input(_))));
    // a request that is longer than its blocks
    let mut given = inputs(&SCORES);
    given.insert("seq_lens", Tensor::from_i32(&[1], &[1000]));
    let illegal = select(selector, given);
    assert!(
        matches!(&illegal, Err(EngineError::Crash { text }) if text.contains("illegal address")),
        "{illegal:?}"
    );
}
