//! Integers of a layout, right and with one slip each, computed by plain loops.

use shardcheck_engine::{Tensor, Tensors};

use super::*;
use crate::check::tests::survived;
use crate::check::{Subject, check, pack};
use crate::status::Status;

const WORLD: usize = 3;
const RUN: usize = 2;
const BLOCK: usize = 4;
const LENS: [usize; 3] = [29, 8, 13];
const ROWS: [usize; 3] = [3, 2, 1];
const TABLE: [i32; 9] = [5, 2, 7, 1, 0, 9, 3, 8, 4];

fn header() -> Header {
    let mut header = Header::new(Subject::Layout);
    (header.world, header.interleave, header.block_size) = (WORLD, RUN, Some(BLOCK));
    header
}

/// Tokens of a rank among the first `len`, counted one by one.
fn owned(len: usize, rank: usize, run: usize) -> i32 {
    (0..len).filter(|position| position / run % WORLD == rank).count() as i32
}

/// `(request, position, rows before and including)` of each row.
fn rows() -> Vec<(usize, usize)> {
    (0..3)
        .flat_map(|request| (0..ROWS[request]).map(move |row| (request, LENS[request] - ROWS[request] + row)))
        .collect()
}

fn lens(len: impl Fn(usize, usize) -> i32) -> Tensor {
    let all: Vec<i32> = (0..WORLD).flat_map(|rank| LENS.map(|tokens| len(tokens, rank))).collect();
    Tensor::from_i32(&[WORLD, 3], &all)
}

fn by_row(of: impl Fn(usize, usize, usize) -> i32) -> Tensor {
    let all: Vec<i32> = (0..WORLD)
        .flat_map(|rank| rows().into_iter().map(move |(request, position)| (rank, request, position)))
        .map(|(rank, request, position)| of(rank, request, position))
        .collect();
    Tensor::from_i32(&[WORLD, 6], &all)
}

/// The slot of a position on its own rank: its place among the rank's tokens, by counting.
fn slot(request: usize, position: usize) -> i32 {
    let rank = position / RUN % WORLD;
    let local = owned(position, rank, RUN) as usize;
    TABLE[request * 3 + local / BLOCK] * BLOCK as i32 + (local % BLOCK) as i32
}

fn masked(rank: usize, request: usize, position: usize) -> i32 {
    if position / RUN % WORLD == rank { slot(request, position) } else { -1 }
}

fn report(name: &str, tensor: Tensor) -> Report {
    let tensors = Tensors::new()
        .with("seq_lens", Tensor::from_i32(&[3], &LENS.map(|len| len as i32)))
        .with("query_start_loc", Tensor::from_i32(&[4], &[0, 3, 5, 6]))
        .with("block_table", Tensor::from_i32(&[3, 3], &TABLE))
        .with(name, tensor);
    check(&pack(&header(), &tensors).unwrap()).unwrap()
}

fn first(report: &Report) -> &str {
    assert_eq!(report.status, Status::Fail, "{report}");
    let diagnosis = report.diagnosis.as_ref().unwrap();
    &diagnosis.explanations.first().unwrap_or_else(|| panic!("no explanation: {report}")).hypothesis
}

#[test]
fn right_integers_pass() {
    for (name, tensor) in [
        ("local_lens", lens(|len, rank| owned(len, rank, RUN))),
        ("slot_mapping", by_row(masked)),
        ("row_lens", by_row(|rank, _, position| owned(position + 1, rank, RUN))),
    ] {
        let report = report(name, tensor);
        assert_eq!(report.status, Status::Pass, "{name}: {report}");
    }
}

#[test]
fn wrong_local_lengths_are_named() {
    let of = |len: &dyn Fn(usize, usize) -> i32| report("local_lens", lens(len));
    assert_eq!(first(&of(&|len, rank| owned(len, rank, 4))), "other-interleave");
    assert_eq!(first(&of(&|len, _| (len / WORLD) as i32)), "even-lengths");
    assert_eq!(first(&of(&|len, rank| owned(len, WORLD - 1 - rank, RUN))), "ranks-reversed");
    assert_eq!(first(&of(&|len, rank| owned(len, (rank + 1) % WORLD, RUN))), "ranks-shifted");
    assert_eq!(first(&of(&|len, _| len as i32)), "not-dealt");
    assert_eq!(first(&of(&|len, rank| owned(len - 1, rank, RUN))), "one-short");
    assert_eq!(first(&of(&|len, rank| owned(len + 1, rank, RUN))), "one-long");
}

#[test]
fn wrong_slots_are_named() {
    let of = |slot: &dyn Fn(usize, usize, usize) -> i32| report("slot_mapping", by_row(slot));
    assert_eq!(first(&of(&|_, request, position| slot(request, position))), "not-masked");
    let zero = |rank: usize, request: usize, position: usize| masked(rank, request, position).max(0);
    assert_eq!(first(&of(&zero)), "marked-by-zero");
    assert_eq!(first(&of(&|rank, request, position| masked(rank, request, position - 1))), "one-short");
    let without_table = |rank: usize, request: usize, position: usize| {
        if masked(rank, request, position) < 0 { -1 } else { owned(position, rank, RUN) }
    };
    assert_eq!(first(&of(&without_table)), "no-table");
}

#[test]
fn wrong_row_lengths_are_named_as_a_row_bound() {
    let of = |len: &dyn Fn(usize, usize, usize) -> i32| report("row_lens", by_row(len));
    let whole = of(&|rank, request, _| owned(LENS[request], rank, RUN));
    assert_eq!((first(&whole), whole.stage), ("no-causal-mask", Some(Stage::RowBound)));
    let committed = of(&|rank, request, _| owned(LENS[request] - ROWS[request], rank, RUN));
    assert_eq!(first(&committed), "committed-prefix-only");
    let trimmed = of(&|rank, request, position| {
        owned(LENS[request], rank, RUN) - (LENS[request] - 1 - position) as i32
    });
    assert_eq!(first(&trimmed), "local-trim");
}

#[test]
fn one_rank_alone_may_be_asked_and_padding_of_slots_is_minus_one() {
    let mut header = header();
    header.rank = Some(1);
    let mut slots: Vec<i32> =
        rows().into_iter().map(|(request, position)| masked(1, request, position)).collect();
    slots.extend([-1, -1]);
    let tensors = |slots: &[i32]| {
        Tensors::new()
            .with("seq_lens", Tensor::from_i32(&[3], &LENS.map(|len| len as i32)))
            .with("query_start_loc", Tensor::from_i32(&[4], &[0, 3, 5, 6]))
            .with("block_table", Tensor::from_i32(&[3, 3], &TABLE))
            .with("slot_mapping", Tensor::from_i32(&[slots.len()], slots))
    };
    let judged = |slots: &[i32]| check(&pack(&header, &tensors(slots)).unwrap());
    assert_eq!(judged(&slots).unwrap().status, Status::Pass);
    slots[7] = 0;
    assert!(judged(&slots).unwrap_err().to_string().contains("padding"));
}

#[test]
fn a_wrong_integer_that_no_slip_gives_is_listed_with_its_place() {
    let report =
        report("local_lens", lens(|len, rank| owned(len, rank, RUN) + i32::from(len == 8 && rank == 1)));
    assert_eq!(report.status, Status::Fail);
    let text = report.to_string();
    assert!(text.contains("rank 1, request 1 of 8 tokens: 3 instead of 2"), "{text}");
    assert!(text.contains("no known explanation"), "{text}");
}

#[test]
fn whatever_a_tensor_is_the_answer_is_a_report_or_an_error() {
    let good = Tensors::new()
        .with("seq_lens", Tensor::from_i32(&[3], &LENS.map(|len| len as i32)))
        .with("query_start_loc", Tensor::from_i32(&[4], &[0, 3, 5, 6]))
        .with("block_table", Tensor::from_i32(&[3, 3], &TABLE))
        .with("local_lens", lens(|len, rank| owned(len, rank, RUN)))
        .with("slot_mapping", by_row(masked))
        .with("row_lens", by_row(|rank, _, position| owned(position + 1, rank, RUN)));
    let (reports, errors) = survived(&header(), &good);
    assert!(reports > 5 && errors > 500, "{reports} {errors}");
}
