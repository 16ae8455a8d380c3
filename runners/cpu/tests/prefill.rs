//! Prefill context parallelism of the embedded engine: worked examples of the published splits, and what is refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::{CpuEngine, engine, fault};
use shardcheck_engine::{EngineError, Operation, PcpDecodes, PcpStrategy, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

/// Requests as `(tokens computed before, new rows, whether they are a prompt's)`.
type Request = (i32, i32, bool);

fn inputs(batch: &[Request]) -> Tensors {
    let mut starts = vec![0];
    batch.iter().for_each(|(_, rows, _)| starts.push(starts[starts.len() - 1] + rows));
    let computed: Vec<i32> = batch.iter().map(|request| request.0).collect();
    let prefills: Vec<u64> = batch.iter().map(|request| u64::from(request.2)).collect();
    Tensors::new()
        .with("query_start_loc", Tensor::from_i32(&[starts.len()], &starts))
        .with("context_lens", Tensor::from_i32(&[batch.len()], &computed))
        .with("is_prefilling", Tensor::from_codes(Dtype::U8, &[batch.len()], &prefills))
}

type Split = (PcpStrategy, PcpDecodes);

fn share(world: usize, split: Split, padded_rows: usize, batch: &[Request]) -> Reply {
    share_on(&engine(), world, split, padded_rows, batch)
}

fn share_on(
    engine: &CpuEngine,
    world: usize,
    (strategy, decodes): Split,
    padded_rows: usize,
    batch: &[Request],
) -> Reply {
    let operation = Operation::PcpLayout { world, strategy, decodes, padded_rows, overlap: false };
    step(Scene::small(1).open(engine).as_mut(), &operation, &mut inputs(batch)).unwrap()
}

fn output(reply: &Reply, name: &str) -> Vec<i64> {
    reply.outputs.get(name).unwrap().to_i64()
}

const HEAD_TAIL: Split = (PcpStrategy::HeadTail, PcpDecodes::Replicated);

#[test]
fn a_round_robin_of_seven_rows_pads_the_second_rank_and_comes_back_transposed() {
    let split = (PcpStrategy::RoundRobin, PcpDecodes::Split);
    let reply = share(2, split, 0, &[(0, 3, true), (4, 4, true)]);
    assert_eq!(output(&reply, "rows"), [0, 2, 4, 6, 1, 3, 5, -1]);
    assert_eq!(output(&reply, "positions"), [0, 2, 5, 7, 1, 4, 6, 0]);
    assert_eq!(output(&reply, "row_lens"), [1, 3, 6, 8, 2, 5, 7, 0]);
    assert_eq!(output(&reply, "restore"), [0, 4, 1, 5, 2, 6, 3].repeat(2));
    assert_eq!(output(&reply, "kv_writer"), [1, 1, 1, 1, 1, 1, 1, 0].repeat(2));
    assert_eq!(reply.collectives, [0, 0], "each rank works out its own share");
}

#[test]
fn five_rows_over_four_ranks_leave_chunks_absent() {
    let reply = share(4, HEAD_TAIL, 0, &[(0, 5, true)]);
    assert_eq!(output(&reply, "rows"), [0, -1, 1, -1, 2, -1, 3, 4]);
    assert_eq!(output(&reply, "restore")[..5], [0, 2, 4, 6, 7]);
}

#[test]
fn a_decode_is_on_every_rank_and_its_first_copy_is_written_and_brought_back() {
    let reply = share(2, HEAD_TAIL, 0, &[(9, 1, false), (0, 4, true)]);
    assert_eq!(output(&reply, "rows"), [0, 1, 4, 0, 2, 3]);
    assert_eq!(output(&reply, "restore")[..5], [0, 1, 4, 5, 2]);
    assert_eq!(output(&reply, "kv_writer")[..6], [1, 1, 1, 0, 1, 1]);
}

#[test]
fn decodes_with_an_owner_go_round_the_ranks_and_idle_ones_do_not_count() {
    let split = (PcpStrategy::HeadTail, PcpDecodes::Owned);
    let reply = share(2, split, 0, &[(9, 1, false), (5, 0, false), (3, 1, false), (4, 1, false)]);
    assert_eq!(output(&reply, "rows"), [0, 2, 1, -1]);
    assert_eq!(output(&reply, "row_lens"), [10, 5, 4, 0]);
}

#[test]
fn a_prompt_that_fills_no_last_chunk_is_whole_on_every_rank_where_that_is_asked_for() {
    let split = (PcpStrategy::HeadTailOrWhole, PcpDecodes::Replicated);
    let reply = share(2, split, 0, &[(0, 3, true)]);
    assert_eq!(output(&reply, "rows"), [0, 1, 2, 0, 1, 2]);
    assert_eq!(output(&reply, "kv_writer")[..6], [1, 1, 1, 0, 0, 0]);
}

#[test]
fn a_prompt_is_whole_as_long_as_its_last_chunk_is_empty_and_shared_out_from_the_first_row_in_it() {
    let split = (PcpStrategy::HeadTailOrWhole, PcpDecodes::Replicated);
    let rows = |count: i32| output(&share(2, split, 0, &[(0, count, true)]), "rows");
    // four chunks: of one row each, of two with none left for the last, of two with one left for it
    assert_eq!(rows(4), [0, 3, 1, 2]);
    assert_eq!(rows(6), [0, 1, 2, 3, 4, 5].repeat(2));
    assert_eq!(rows(7), [0, 1, 6, -1, 2, 3, 4, 5]);
}

#[test]
fn the_order_of_a_tail_chunk_is_its_own_and_the_chunk_from_the_front_keeps_its_rows_in_order() {
    let backwards = CpuEngine::with_fault(fault("pcp-tail-chunk-backwards").unwrap());
    let reply = share_on(&backwards, 2, HEAD_TAIL, 0, &[(0, 8, true)]);
    assert_eq!(output(&reply, "rows"), [0, 1, 7, 6, 2, 3, 5, 4]);
}

#[test]
fn a_graph_pads_every_rank_and_a_batch_without_rows_has_nothing_else() {
    let padded = share(2, HEAD_TAIL, 5, &[(0, 4, true)]);
    assert_eq!(output(&padded, "rows"), [0, 3, -1, -1, -1, 1, 2, -1, -1, -1]);
    let empty = share(3, HEAD_TAIL, 0, &[(7, 0, true)]);
    assert_eq!(empty.outputs.get("rows").unwrap().shape(), [3, 0]);
    assert_eq!(empty.outputs.get("restore").unwrap().shape(), [3, 0]);
}

#[test]
fn starts_that_fall_and_lengths_below_zero_are_refused() {
    let operation = Operation::PcpLayout {
        world: 2,
        strategy: PcpStrategy::HeadTail,
        decodes: PcpDecodes::Replicated,
        padded_rows: 0,
        overlap: false,
    };
    for (name, wrong) in [
        ("query_start_loc", Tensor::from_i32(&[3], &[0, 4, 2])),
        ("query_start_loc", Tensor::from_i32(&[3], &[1, 2, 4])),
        ("context_lens", Tensor::from_i32(&[2], &[0, -1])),
    ] {
        let mut given = inputs(&[(0, 2, true), (0, 2, true)]).with(name, wrong);
        let session = &mut *Scene::small(1).open(&engine());
        let refused = step(session, &operation, &mut given).unwrap_err();
        assert!(matches!(refused, EngineError::Crash { .. }), "{refused}");
    }
    let mut given = inputs(&[(0, 2, true)]).with("is_prefilling", Tensor::from_i32(&[1], &[1]));
    let refused = step(Scene::small(1).open(&engine()).as_mut(), &operation, &mut given).unwrap_err();
    assert!(matches!(refused, EngineError::Input(_)), "{refused}");
}

#[test]
fn two_groups_are_divided_between_requests_and_each_is_dealt_out_and_padded_by_itself() {
    let (strategy, decodes) = (PcpStrategy::RoundRobin, PcpDecodes::Split);
    let groups = |world: usize, batch: &[Request]| {
        let operation = Operation::PcpLayout { world, strategy, decodes, padded_rows: 0, overlap: true };
        step(Scene::small(1).open(&engine()).as_mut(), &operation, &mut inputs(batch)).unwrap()
    };
    let reply = groups(2, &[(0, 3, true), (5, 4, true)]);
    assert_eq!(output(&reply, "groups"), [1, 1, 1, 1]);
    assert_eq!(output(&reply, "rows"), [0, 2, 3, 5, 1, -1, 4, 6]);
    assert_eq!(output(&reply, "positions")[2..4], [5, 7]);
    assert_eq!(output(&reply, "restore")[..7], [0, 4, 1, 2, 6, 3, 7]);
    let whole = groups(4, &[(0, 2, true), (0, 5, true)]);
    assert_eq!(output(&whole, "groups"), [2, 0].repeat(4), "fewer than two rows a rank are not divided");
}
