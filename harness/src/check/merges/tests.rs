//! Merges, right and with one slip each.

use shardcheck_engine::{LseBase, Tensor, Tensors};
use shardcheck_formats::{Dtype, round};

use super::*;
use crate::check::tests::scene::Random;
use crate::check::tests::survived;
use crate::check::{Header, Subject, check, pack};
use crate::status::Status;

const PARTS: usize = 3;
const ROWS: usize = 5;
const HEADS: usize = 4;
const DIM: usize = 16;

/// Partials of which the last part is empty in row 1, with NaN beside it, and all parts in row 3.
fn given() -> (Vec<f32>, Vec<f32>) {
    let mut random = Random(3);
    let number = |random: &mut Random| round(Dtype::Bf16, f64::from(random.number())) as f32;
    let mut out: Vec<f32> = (0..PARTS * ROWS * HEADS * DIM).map(|_| number(&mut random)).collect();
    let mut lse: Vec<f32> = (0..PARTS * ROWS * HEADS).map(|_| random.number() * 1.5 + 1.0).collect();
    for state in 0..PARTS * ROWS * HEADS {
        let (part, row) = (state / HEADS / ROWS, state / HEADS % ROWS);
        if row == 3 || row == 1 && part == 2 {
            lse[state] = f32::NEG_INFINITY;
            out[state * DIM..(state + 1) * DIM].fill(f32::NAN);
        }
    }
    (out, lse)
}

/// Merges with weights of `weight(part, LSE)`; `divide` by their sum or not.
fn merged(weight: impl Fn(usize, f64) -> f64, divide: bool) -> (Vec<f32>, Vec<f32>) {
    let (out, lse) = given();
    let (mut merged, mut lses) = (Vec::new(), Vec::new());
    for state in 0..ROWS * HEADS {
        let weights: Vec<f64> =
            (0..PARTS).map(|part| weight(part, f64::from(lse[part * ROWS * HEADS + state]))).collect();
        let sum: f64 = weights.iter().sum();
        let total = if divide { sum } else { 1.0 };
        for d in 0..DIM {
            let part = |part: usize| f64::from(out[(part * ROWS * HEADS + state) * DIM + d]);
            let held = (0..PARTS).filter(|p| weights[*p] > 0.0);
            let value: f64 = held.map(|p| weights[p] * part(p)).sum();
            merged.push(if sum == 0.0 { 0.0 } else { (value / total) as f32 });
        }
        lses.push(sum.ln() as f32);
    }
    (merged, lses)
}

fn report(header: &Header, out: &[f32], lse: Option<&[f32]>) -> Report {
    let (partial_out, partial_lse) = given();
    let mut tensors = Tensors::new()
        .with("partial_out", Tensor::from_f32(Dtype::Bf16, &[PARTS, ROWS, HEADS, DIM], &partial_out))
        .with("partial_lse", Tensor::from_f32(Dtype::F32, &[PARTS, ROWS, HEADS], &partial_lse))
        .with("out", Tensor::from_f32(Dtype::Bf16, &[ROWS, HEADS, DIM], out));
    if let Some(lse) = lse {
        tensors.insert("lse", Tensor::from_f32(Dtype::F32, &[ROWS, HEADS], lse));
    }
    check(&pack(header, &tensors).unwrap()).unwrap()
}

fn judged((out, lse): (Vec<f32>, Vec<f32>)) -> Report {
    report(&Header::new(Subject::Merge), &out, Some(&lse))
}

fn first(report: &Report) -> (&str, Option<&str>) {
    assert_eq!(report.status, Status::Fail, "{report}");
    let diagnosis = report.diagnosis.as_ref().unwrap();
    let first = diagnosis.explanations.first().unwrap_or_else(|| panic!("no explanation: {report}"));
    assert_eq!(first.explains, diagnosis.looked_at, "{report}");
    (&first.hypothesis, first.which.as_deref())
}

#[test]
fn a_right_merge_passes_with_empty_parts_and_an_empty_row() {
    let report = judged(merged(|_, lse| lse.exp(), true));
    assert_eq!(report.status, Status::Pass, "{report}");
    assert_eq!(report.compared as usize, ROWS * HEADS * (DIM + 1));
}

#[test]
fn every_slip_of_a_merge_is_failed_and_named() {
    let keep = |lse: f64, by: f64| if lse.is_finite() { by } else { 0.0 };
    let name = |slip: MergeHypothesis, which| (slip.name(), which);
    let missing = judged(merged(|part, lse| if part == 0 { 0.0 } else { lse.exp() }, true));
    assert_eq!(first(&missing), name(MergeHypothesis::PartMissing, Some("part 0")));
    let twice = judged(merged(|part, lse| if part == 1 { 2.0 * lse.exp() } else { lse.exp() }, true));
    assert_eq!(first(&twice), name(MergeHypothesis::PartTwice, Some("part 1")));
    let alone = judged(merged(|part, lse| if part == 1 { lse.exp() } else { 0.0 }, true));
    assert_eq!(first(&alone), name(MergeHypothesis::PartAlone, Some("part 1")));
    let base = judged(merged(|_, lse| lse.exp2(), true));
    assert_eq!(first(&base).0, MergeHypothesis::MergeBase.name());
    let averaged = judged(merged(|_, lse| keep(lse, 1.0), true));
    assert_eq!(first(&averaged), name(MergeHypothesis::Averaged, Some("over parts that hold tokens")));
    let summed = judged(merged(|_, lse| keep(lse, 1.0), false));
    assert_eq!(first(&summed).0, MergeHypothesis::Summed.name());
    let (out, lse) = merged(|_, lse| lse.exp(), true);
    let in_base_2: Vec<f32> = lse.iter().map(|lse| lse * std::f32::consts::LOG2_E).collect();
    assert_eq!(first(&judged((out.clone(), in_base_2))).0, MergeHypothesis::LseBase.name());
    let mut shifted = (out.clone(), lse.clone());
    for state in 0..ROWS * HEADS {
        let from = state / HEADS * HEADS + (state + 1) % HEADS;
        shifted.0[state * DIM..(state + 1) * DIM].copy_from_slice(&out[from * DIM..(from + 1) * DIM]);
        shifted.1[state] = lse[from];
    }
    assert_eq!(first(&judged(shifted)), name(MergeHypothesis::HeadsShifted, Some("the one after it")));
    let (_, partial) = given();
    let largest = |state: usize| {
        (0..PARTS).map(|part| partial[part * ROWS * HEADS + state]).fold(f32::NEG_INFINITY, f32::max)
    };
    let largest: Vec<f32> = (0..ROWS * HEADS).map(largest).collect();
    assert_eq!(first(&judged((out, largest))).0, MergeHypothesis::LseLargest.name());
    assert_eq!(first(&judged((vec![0.0; ROWS * HEADS * DIM], lse))).0, MergeHypothesis::Zeros.name());
}

#[test]
fn partial_lses_in_base_2_are_read_as_such() {
    let mut header = Header::new(Subject::Merge);
    header.lse_base = LseBase::Two;
    let (out, _) = merged(|_, lse| lse.exp2(), true);
    assert_eq!(report(&header, &out, None).status, Status::Pass);
    let (natural, _) = merged(|_, lse| lse.exp(), true);
    let wrong = report(&header, &natural, None);
    assert_eq!(first(&wrong), ("merge-base", Some("e^LSE of LSEs in base 2")), "{wrong}");
}

#[test]
fn a_part_with_nan_that_counts_makes_its_row_undecided() {
    let (mut partial_out, partial_lse) = given();
    partial_out[5] = f32::NAN;
    let (out, _) = merged(|_, lse| lse.exp(), true);
    let tensors = Tensors::new()
        .with("partial_out", Tensor::from_f32(Dtype::Bf16, &[PARTS, ROWS, HEADS, DIM], &partial_out))
        .with("partial_lse", Tensor::from_f32(Dtype::F32, &[PARTS, ROWS, HEADS], &partial_lse))
        .with("out", Tensor::from_f32(Dtype::Bf16, &[ROWS, HEADS, DIM], &out));
    let report = check(&pack(&Header::new(Subject::Merge), &tensors).unwrap()).unwrap();
    assert_eq!(report.status, Status::Inconclusive, "{report}");
    assert!(report.inconclusive[0].starts_with("row 0:"), "{report}");
}

#[test]
fn whatever_a_tensor_is_the_answer_is_a_report_or_an_error() {
    let (partial_out, partial_lse) = given();
    let (out, lse) = merged(|_, lse| lse.exp(), true);
    let good = Tensors::new()
        .with("partial_out", Tensor::from_f32(Dtype::Bf16, &[PARTS, ROWS, HEADS, DIM], &partial_out))
        .with("partial_lse", Tensor::from_f32(Dtype::F32, &[PARTS, ROWS, HEADS], &partial_lse))
        .with("out", Tensor::from_f32(Dtype::Bf16, &[ROWS, HEADS, DIM], &out))
        .with("lse", Tensor::from_f32(Dtype::F32, &[ROWS, HEADS], &lse));
    let (reports, errors) = survived(&Header::new(Subject::Merge), &good);
    assert!(reports > 5 && errors > 300, "{reports} {errors}");
}
