//! What each fault makes of the metadata of a step, given those of the steps before.

use shardcheck_engine::{Tensor, Tensors};

use super::super::faulty::with;
use super::*;
use crate::batch::{Batch, BlockTable};

const BLOCKS: usize = 32;

fn table(rows: &[[i32; 3]]) -> BlockTable {
    let tensor = Tensor::from_i32(&[rows.len(), 3], &rows.concat());
    BlockTable::read(&Tensors::new().with("block_table", tensor), BLOCKS).unwrap()
}

/// Metadata of the last of two ranks: for each request its length, its rows and its blocks, and rows of padding behind them.
fn metadata(requests: &[(usize, i32, [i32; 3])], padding: usize) -> Metadata {
    let mut starts = vec![0];
    requests.iter().for_each(|(_, rows, _)| starts.push(starts[starts.len() - 1] + rows));
    let rows = starts[requests.len()] as usize + padding;
    let seq_lens = requests.iter().map(|(len, ..)| *len).collect();
    let blocks: Vec<[i32; 3]> = requests.iter().map(|(.., blocks)| *blocks).collect();
    let batch = Batch { seq_lens, starts, rows, table: table(&blocks) };
    Metadata { kind: StepKind::Attend, batch, causal: true, member: 1, world: 2, enters_gather: true }
}

/// What the last of some steps runs with.
fn last_of(name: &str, steps: &[Metadata]) -> Metadata {
    let (policies, mut memory) = (with(name), Memory::default());
    let recalled = steps.iter().map(|step| (policies.session.recall)(&mut memory, step.clone()));
    recalled.last().unwrap()
}

fn lens(metadata: &Metadata) -> &[usize] {
    &metadata.batch.seq_lens
}

// request 0 in blocks 3, 4, 5, request 1 in 7, 8, 9; −1 where a request has no further block
const A: [i32; 3] = [3, 4, 5];
const B: [i32; 3] = [7, 8, 9];

fn first() -> Metadata {
    metadata(&[(10, 2, A), (20, 1, B)], 0)
}

fn second() -> Metadata {
    metadata(&[(11, 1, A), (22, 2, B)], 0)
}

fn third() -> Metadata {
    metadata(&[(12, 1, [3, 6, 5]), (23, 1, B), (5, 1, [1, 2, -1])], 1)
}

#[test]
fn no_fault_shows_in_the_first_step() {
    for fault in FAULTS {
        assert_eq!(last_of(fault.name, &[first()]), first(), "{}", fault.name);
    }
}

#[test]
fn steps_of_another_kind_are_neither_changed_nor_kept() {
    let context = || Metadata { kind: StepKind::Context, ..second() };
    assert_eq!(last_of("lengths-of-the-first-step", &[first(), context()]), context());
    assert_eq!(last_of("lengths-of-the-first-step", &[context(), first()]), first());
    assert_eq!(last_of("context-lengths-of-the-first-chunk", &[context(), first()]), first());
}

#[test]
fn the_lengths_are_those_of_the_step_that_the_title_names() {
    let steps = [first(), second(), third()];
    for (name, expected) in [
        ("lengths-of-the-first-step", [10, 20, 5]),
        ("lengths-of-the-previous-step", [11, 22, 5]),
        ("longest-length-captured", [12, 20, 5]),
        ("last-rank-replays-the-first-lengths", [10, 20, 5]),
        ("lengths-before-the-rejection", [12, 23, 5]),
        ("buckets-share-a-buffer", [12, 22, 5]),
    ] {
        let seen = last_of(name, &steps);
        assert_eq!(lens(&seen), expected, "{name}");
        let mut otherwise = third();
        otherwise.batch.seq_lens = expected.to_vec();
        assert_eq!(seen, otherwise, "{name}: nothing else is stale");
    }
}

#[test]
fn one_rank_alone_is_stale_where_the_title_says_so() {
    let name = "last-rank-replays-the-first-lengths";
    let on = |member, world| {
        let of = |metadata: Metadata| Metadata { member, world, ..metadata };
        lens(&last_of(name, &[of(first()), of(second())])).to_vec()
    };
    assert_eq!([on(0, 2), on(1, 2), on(2, 4), on(3, 4)], [[11, 22], [10, 20], [11, 22], [10, 20]]);
    assert_eq!(on(0, 1), [11, 22], "a rank by itself is no rank of a group");
}

#[test]
fn a_bucket_replays_the_lengths_that_it_was_captured_with() {
    let larger = metadata(&[(12, 1, A), (23, 1, B)], 5);
    let name = "lengths-captured-by-bucket";
    assert_eq!(lens(&last_of(name, &[first(), second()])), [10, 20], "three rows again");
    assert_eq!(lens(&last_of(name, &[first(), larger.clone()])), [12, 23], "seven rows are captured anew");
    assert_eq!(lens(&last_of(name, &[larger, first(), second()])), [10, 20]);
    // the buffer is shared where the number of rows changes, and there alone
    assert_eq!(lens(&last_of("buckets-share-a-buffer", &[first(), second()])), [11, 22]);
}

#[test]
fn the_block_table_is_that_of_the_step_that_the_title_names() {
    let (moved, back) = (metadata(&[(12, 1, [3, 6, 5]), (23, 1, [2, 8, 9])], 0), second());
    let entries = |seen: &Metadata| [0, 1].map(|request| seen.batch.table.entries(request).to_vec());
    let of = |name: &str| entries(&last_of(name, &[first(), moved.clone(), back.clone()]));
    assert_eq!(of("block-table-of-the-first-step"), [[3, 4, 5], [7, 8, 9]]);
    assert_eq!(of("block-table-of-the-previous-step"), [[3, 6, 5], [2, 8, 9]]);
    // a fork of request 0 begins with its first block: the row is looked up by it
    let fork = metadata(&[(12, 1, [3, 6, 1]), (23, 1, [2, 8, 9])], 0);
    let read = last_of("fork-reads-the-blocks-of-its-source", &[first(), fork]);
    assert_eq!(entries(&read), [[3, 4, 5], [2, 8, 9]]);
    // what a request does not hold is not replaced
    let short = metadata(&[(2, 1, [6, -1, -1])], 0);
    let seen = last_of("block-table-of-the-previous-step", &[first(), short]);
    assert_eq!(seen.batch.table.entries(0), [3, -1, -1]);
}

#[test]
fn rows_are_dealt_as_in_the_step_that_the_title_names() {
    let starts = |name: &str, steps: &[Metadata]| last_of(name, steps).batch.starts;
    assert_eq!(starts("rows-of-the-first-step", &[first(), second()]), [0, 2, 3]);
    assert_eq!(
        starts("rows-of-the-first-step", &[first(), third()]),
        [0, 1, 2, 3],
        "three requests had no rows then"
    );
    let single = metadata(&[(4, 1, A)], 0);
    assert_eq!(starts("rows-of-the-first-step", &[first(), single]), [0, 1], "no more rows than there are");
    let name = "padding-dealt-as-in-a-larger-step";
    let smaller = |rows: i32, padding: usize| metadata(&[(12, 1, A), (23, rows, B)], padding);
    assert_eq!(
        starts(name, &[smaller(3, 0), smaller(1, 2)]),
        [0, 1, 4],
        "two rows of padding belong to the last request"
    );
    assert_eq!(starts(name, &[smaller(3, 0), smaller(1, 1)]), [0, 1, 3], "as far as there are rows");
    assert_eq!(starts(name, &[smaller(1, 0), smaller(1, 2)]), [0, 1, 2], "the step before was no larger");
    assert_eq!(
        starts(name, &[smaller(3, 0), smaller(0, 3)]),
        [0, 1, 1],
        "a last request without rows has none to go on"
    );
}

#[test]
fn a_draft_step_runs_with_the_lengths_of_the_step_that_it_goes_on_from() {
    let name = "draft-lengths-not-rebuilt";
    let step = |a: usize, b: usize, rows: i32| metadata(&[(a, 1, A), (b, rows, B)], 0);
    assert_eq!(lens(&last_of(name, &[step(10, 20, 1), step(11, 21, 1)])), [10, 20]);
    assert_eq!(lens(&last_of(name, &[step(10, 20, 1), step(11, 22, 1)])), [11, 22], "one went on by two");
    assert_eq!(lens(&last_of(name, &[step(10, 20, 1), step(11, 21, 2)])), [11, 21], "other rows");
    let draft = |metadata: Metadata| Metadata { causal: false, ..metadata };
    let name = "draft-block-lengths-of-the-step-before";
    assert_eq!(lens(&last_of(name, &[first(), draft(second())])), [10, 20]);
    assert_eq!(lens(&last_of(name, &[first(), second()])), [11, 22], "a masked step is no draft block");
}

#[test]
fn a_request_is_told_by_its_first_block_where_it_may_not_get_shorter() {
    let name = "lengths-before-the-rejection";
    let (long, short) = (metadata(&[(10, 1, A), (20, 1, B)], 0), metadata(&[(9, 1, A), (18, 1, B)], 0));
    assert_eq!(lens(&last_of(name, &[long.clone(), short])), [10, 20]);
    let swapped = metadata(&[(18, 1, B), (9, 1, A)], 0);
    assert_eq!(lens(&last_of(name, &[long.clone(), swapped])), [20, 10]);
    let others = metadata(&[(3, 1, [1, 4, 5]), (4, 1, [-1, -1, -1])], 0);
    assert_eq!(lens(&last_of(name, &[long, others])), [3, 4]);
    let nameless = |len| metadata(&[(len, 1, [-1, -1, -1])], 0);
    assert_eq!(
        lens(&last_of(name, &[nameless(9), nameless(4)])),
        [4],
        "requests without a block are not told apart"
    );
}

#[test]
fn a_mask_is_absent_where_the_first_step_had_one_row_a_request() {
    let single = metadata(&[(10, 1, A), (20, 1, B)], 0);
    let causal = |steps: &[Metadata]| last_of("mask-absent-since-capture", steps).causal;
    assert!(!causal(&[single.clone(), second()]), "captured without a mask");
    assert!(causal(&[first(), second()]), "captured with one");
    let draft = Metadata { causal: false, ..second() };
    assert!(!causal(&[first(), draft.clone()]) && !causal(&[single, draft]), "a draft block has none");
}

#[test]
fn the_last_rank_alone_keeps_out_of_the_gather_of_a_larger_step() {
    let enters = |steps: &[Metadata], member, world| {
        let steps: Vec<Metadata> =
            steps.iter().map(|step| Metadata { member, world, ..step.clone() }).collect();
        last_of("one-rank-keeps-out-of-the-gather-of-a-larger-step", &steps).enters_gather
    };
    assert!(!enters(&[first(), third()], 1, 2), "four rows behind three");
    assert!(enters(&[first(), third()], 0, 2), "the first rank");
    assert!(!enters(&[first(), third()], 3, 4));
    assert!(enters(&[first(), second()], 1, 2), "as many rows");
    assert!(enters(&[third(), first()], 1, 2), "fewer rows");
}

#[test]
fn a_context_is_gathered_with_the_lengths_or_the_table_that_the_title_names() {
    let context = |metadata: Metadata| Metadata { kind: StepKind::Context, ..metadata };
    let steps = [context(first()), context(second()), context(third())];
    assert_eq!(lens(&last_of("context-lengths-of-the-first-chunk", &steps)), [10, 20, 5]);
    assert_eq!(lens(&last_of("context-lengths-of-the-previous-step", &steps)), [11, 22, 5]);
    let table = last_of("context-table-of-the-previous-step", &steps);
    assert_eq!((table.batch.table.entries(0), lens(&table)), (&[3, 4, 5][..], &[12, 23, 5][..]));
    let layout = |metadata: Metadata| Metadata { kind: StepKind::Layout, ..metadata };
    let steps = [layout(first()), layout(second()), layout(third())];
    assert_eq!(lens(&last_of("layout-mirror-one-step-late", &steps)), [11, 22, 5]);
}

fn write(positions: &[i64], requests: &[i64], rows: &[[i32; 3]]) -> WriteMap {
    WriteMap { positions: positions.to_vec(), requests: requests.to_vec(), table: table(rows) }
}

/// What the second of two writes is done with, attention standing between them.
fn second_write(name: &str, writes: [&WriteMap; 2]) -> WriteMap {
    let (policies, mut memory) = (with(name), Memory::default());
    let layout = Metadata { kind: StepKind::Layout, ..first() };
    let before = (policies.session.recall_write)(&mut memory, writes[0].clone());
    assert_eq!(before, *writes[0], "{name}: the first write is as given");
    // a layout step between write and attention changes nothing
    assert_eq!((policies.session.recall)(&mut memory, layout.clone()), layout);
    assert_eq!((policies.session.recall)(&mut memory, first()), first());
    (policies.session.recall_write)(&mut memory, writes[1].clone())
}

#[test]
fn a_write_goes_where_the_title_says() {
    let old = write(&[4, 5, 9], &[0, 0, 1], &[A, B]);
    let now = write(&[6, 10, -1], &[0, 1, -1], &[[3, 6, 5], [7, 8, 2]]);
    assert_eq!(second_write("slots-of-the-earlier-batch", [&old, &now]), old);
    let shorter = write(&[6, 10], &[0, 1], &[A, B]);
    assert_eq!(second_write("slots-of-the-earlier-batch", [&old, &shorter]), shorter);
    let padded = second_write("padding-written-as-in-a-larger-step", [&old, &now]);
    assert_eq!((&padded.positions[..], &padded.requests[..]), (&[6, 10, 9][..], &[0, 1, 1][..]));
    assert_eq!(padded.table, now.table);
    let alone = write(&[6, -1, -1, -1], &[0, -1, -1, -1], &[A]);
    let padded = second_write("padding-written-as-in-a-larger-step", [&old, &alone]);
    assert_eq!(padded.requests, [0, 0, -1, -1], "request 1 is gone, and there was no fourth row");
    assert_eq!(padded.positions, [6, 5, -1, -1]);
    let through = second_write("write-table-of-the-previous-step", [&old, &now]);
    assert_eq!(through, WriteMap { table: table(&[A, B]), ..now.clone() });
    let more = write(&[6], &[2], &[[3, 6, 5], [7, 8, 2], [1, 2, 0]]);
    let through = second_write("write-table-of-the-previous-step", [&old, &more]);
    assert_eq!(through.table, table(&[A, B, [1, 2, 0]]), "a request that is new has its own blocks");
    let fewer = write(&[6], &[0], &[[3, 6, 5]]);
    assert_eq!(second_write("write-table-of-the-previous-step", [&old, &fewer]).table, table(&[A]));
}

#[test]
fn a_write_that_no_attention_followed_is_not_replayed() {
    let (policies, mut memory) = (with("slots-of-the-earlier-batch"), Memory::default());
    let (old, now) = (write(&[4], &[0], &[A]), write(&[5], &[0], &[A]));
    (policies.session.recall_write)(&mut memory, old);
    assert_eq!((policies.session.recall_write)(&mut memory, now.clone()), now);
}

#[test]
fn a_fork_writes_into_the_blocks_of_its_source() {
    let (policies, mut memory) = (with("fork-writes-into-the-blocks-of-its-source"), Memory::default());
    assert_eq!((policies.session.recall)(&mut memory, first()), first());
    let fork = write(&[12], &[0], &[[3, 6, 1], [1, 8, 9]]);
    let seen = (policies.session.recall_write)(&mut memory, fork);
    assert_eq!(seen.table, table(&[A, [1, 8, 9]]));
}

#[test]
fn a_slot_is_written_again_unless_the_title_says_otherwise() {
    let writes = |name: &str, of: &[Origin]| -> Vec<bool> {
        let mut memory = Memory::default();
        of.iter().map(|origin| (with(name).session.overwrites)(&mut memory, 5, *origin)).collect()
    };
    // by first block and position: the same token again, another position, the first one again
    let tokens = [(3, 8), (3, 8), (3, 9), (3, 8), (7, 8), (7, 8)];
    assert_eq!(writes("rejected-token-kept", &tokens), [true, false, true, true, true, false]);
    assert_eq!(writes("freed-block-keeps-its-content", &tokens), [true, true, true, true, false, false]);
}
