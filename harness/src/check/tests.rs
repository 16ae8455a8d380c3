//! Answers of a small engine, right and with one slip each, against the verdict and the slip that is named.

mod hard;
mod named;
pub(super) mod scene;

use shardcheck_engine::{Mask, Tensor};
use shardcheck_formats::Dtype;

use super::*;
use crate::status::Status;
use scene::{Join, Scene, Slip, Unused};

const RAGGED: [(usize, usize); 4] = [(37, 2), (5, 3), (0, 0), (64, 1)];

/// Names of the explanations, the first first.
fn names(report: &Report) -> Vec<&str> {
    assert_eq!(report.status, Status::Fail, "{report}");
    let diagnosis = report.diagnosis.as_ref().expect("a failure is diagnosed");
    diagnosis.explanations.iter().map(|found| found.hypothesis.as_str()).collect()
}

/// Gives every tensor of a call in turn another shape and another type; how many calls were judged, and how many refused.
pub(super) fn survived(header: &Header, good: &shardcheck_engine::Tensors) -> (usize, usize) {
    let shapes: [&[usize]; 8] =
        [&[], &[0], &[1], &[3, 0, 4], &[2, 8], &[1, 1, 1], &[2, 2, 2, 2], &[2, 1, 8, 1, 32]];
    let (mut reports, mut errors) = (0, 0);
    for (name, own) in good.iter() {
        for shape in shapes.iter().copied().chain([own.shape()]) {
            for dtype in Dtype::ALL {
                let codes = vec![1; shape.iter().product()];
                let changed = good.clone().with(name, Tensor::from_codes(dtype, shape, &codes));
                match check(&pack(header, &changed).unwrap()) {
                    Ok(_) => reports += 1,
                    Err(error) => errors += usize::from(!error.to_string().is_empty()),
                }
            }
        }
    }
    (reports, errors)
}

#[test]
fn right_answers_pass_for_every_layout_and_kind_of_attention() {
    for (world, interleave) in [(1, 1), (2, 1), (3, 2), (4, 8)] {
        for scene in [Scene::latent(world, interleave, &RAGGED), Scene::grouped(world, interleave, &RAGGED)] {
            let report = scene.report(&Slip::none());
            assert_eq!(report.status, Status::Pass, "{world} {interleave}: {report}");
            assert!(report.compared > 300 && report.worst_ratio > 0.05, "{report}");
        }
    }
}

#[test]
fn a_report_survives_json() {
    let mut scene = Scene::latent(2, 1, &RAGGED);
    let inputs = scene.inputs();
    let mut answer = scene.answer(&inputs, &Slip::joining(Join::Missing(1)));
    answer.out[3] = f32::NAN;
    scene.header.empty_rows = EmptyRows::Undefined;
    let report = scene.judged(&inputs, &answer);
    assert_eq!(report.status, Status::Fail);
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
}

#[test]
fn one_wrong_element_fails_and_is_named_with_its_place() {
    let scene = Scene::latent(3, 2, &RAGGED);
    let inputs = scene.inputs();
    let mut answer = scene.answer(&inputs, &Slip::none());
    // token 3 is row 1 of request 1
    answer.out[(3 * 4 + 2) * 24 + 5] += 0.5;
    let report = scene.judged(&inputs, &answer);
    let failure = &report.failures[0];
    assert_eq!((report.status, failure.out_of_bound), (Status::Fail, 1));
    let place = &failure.worst.as_ref().unwrap().place;
    assert_eq!(place, "token 3 (request 1, row 1, position 3), head 2, dim 5");
    assert!(
        failure.notes.iter().any(|note| note.contains("sees 4 tokens of request 1: 2 on rank 0")),
        "{report}"
    );
    assert!(report.to_string().contains("no known explanation"), "{report}");
}

#[test]
fn what_fixed_tolerances_would_have_passed_is_said() {
    let scene = Scene::latent(2, 1, &[(600, 1)]);
    let report = scene.report(&Slip::seeing(|_, _| (0..590).map(|p| (0, p)).collect()));
    if report.status == Status::Fail {
        assert!(report.to_string().contains("assert_close(atol=rtol=2e-2)"), "{report}");
    } else {
        panic!("an LSE that is short of ten tokens fails: {report}");
    }
}

#[test]
fn shapes_that_people_have_give_the_same_verdict() {
    let scene = Scene::grouped(2, 2, &RAGGED);
    let inputs = scene.inputs();
    let answer = scene.answer(&inputs, &Slip::none());
    let (rows, heads, dim) = (6, 4, 16);
    let out = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::Bf16, shape, values);
    let by_rank: Vec<f32> = (0..2)
        .flat_map(|rank| (0..rows).map(move |row| (rank, row)))
        .flat_map(|(rank, row)| answer.out[(row * heads + rank * 2) * dim..][..2 * dim].to_vec())
        .collect();
    let twice = [answer.out.clone(), answer.out.clone()].concat();
    let transposed: Vec<f32> = (0..heads)
        .flat_map(|head| (0..rows).map(move |row| row * heads + head))
        .map(|at| answer.lse[at])
        .collect();
    let base_2: Vec<f32> =
        transposed.iter().map(|lse| (f64::from(*lse) * std::f64::consts::LOG2_E) as f32).collect();
    for (out, lse, two) in [
        (
            out(&[rows, heads, dim], &answer.out),
            Tensor::from_f32(Dtype::F32, &[heads, rows], &transposed),
            false,
        ),
        (out(&[rows, heads * dim], &answer.out), Tensor::from_f32(Dtype::F32, &[heads, rows], &base_2), true),
        (
            out(&[2, rows, 2, dim], &by_rank),
            Tensor::from_f32(Dtype::F32, &[2, rows, 2], &split(&answer.lse)),
            false,
        ),
        (
            out(&[2, rows, heads, dim], &twice),
            Tensor::from_f32(Dtype::F32, &[2, rows, heads], &answer.lse.repeat(2)),
            false,
        ),
    ] {
        let mut header = scene.header.clone();
        if two {
            header.lse_base = shardcheck_engine::LseBase::Two;
        }
        let tensors = inputs.tensors.clone().with("out", out.clone()).with("lse", lse);
        let report = check(&pack(&header, &tensors).unwrap()).unwrap();
        assert_eq!(report.status, Status::Pass, "{:?}: {report}", out.shape());
    }
}

/// `[T, 4]` as `[2, T, 2]`.
fn split(lse: &[f32]) -> Vec<f32> {
    (0..2).flat_map(|rank| lse.chunks(4).flat_map(move |row| row[rank * 2..rank * 2 + 2].to_vec())).collect()
}

#[test]
fn pages_with_heads_before_tokens_and_a_cache_without_ranks_are_read_as_said() {
    let scene = Scene::grouped(1, 1, &RAGGED);
    let inputs = scene.inputs();
    let answer = scene.answer(&inputs, &Slip::none());
    let mut header = scene.header.clone();
    header.kv_layout = PageLayout::Hnd;
    // the same tokens, seen as the whole of two ranks
    (header.world, header.interleave) = (2, 3);
    let mut tensors = inputs.tensors.clone();
    for name in ["key_cache", "value_cache"] {
        let nhd = inputs.tensors.get(name).unwrap();
        let [blocks, block, heads, dim] = *nhd.shape() else { panic!("four axes") };
        let strides = vec![block * heads * dim, dim, heads * dim, 1];
        let hnd = Tensor::view(nhd.dtype(), vec![blocks, heads, block, dim], strides, nhd.bytes().to_vec());
        tensors.insert(name, hnd.unwrap().to_contiguous());
    }
    tensors.insert("out", Tensor::from_f32(Dtype::Bf16, &[6, 4, 16], &answer.out));
    let report = check(&pack(&header, &tensors).unwrap()).unwrap();
    assert_eq!(report.status, Status::Pass, "{report}");
    header.kv_layout = PageLayout::Nhd;
    let wrong = check(&pack(&header, &tensors).unwrap());
    assert!(matches!(wrong, Err(CheckError::Shape { .. })), "{wrong:?}");
}

#[test]
fn only_some_pages_may_be_sent_with_their_numbers() {
    let scene = Scene::latent(2, 1, &[(20, 1), (3, 1)]);
    let inputs = scene.inputs();
    let answer = scene.answer(&inputs, &Slip::none());
    let cache = inputs.tensors.get("kv_cache").unwrap();
    let table = inputs.tensors.get("block_table").unwrap().to_i64();
    let (needed, pages) = ([table[0], table[1], table[2]], cache.shape()[1]);
    let page = 8 * 32 * 2;
    let mut bytes = Vec::new();
    for rank in 0..2 {
        for block in needed {
            let start = (rank * pages + block as usize) * page;
            bytes.extend_from_slice(&cache.bytes()[start..start + page]);
        }
    }
    let mut tensors = inputs.tensors.clone();
    tensors.insert("kv_cache", Tensor::new(Dtype::Bf16, vec![2, 3, 8, 32], bytes).unwrap());
    tensors.insert("blocks", Tensor::from_i64(&[3], &needed));
    tensors.insert("out", Tensor::from_f32(Dtype::Bf16, &[2, 4, 24], &answer.out));
    let mut header = scene.header.clone();
    header.cache_blocks = Some(pages);
    let judged =
        |header: &Header, tensors: &shardcheck_engine::Tensors| check(&pack(header, tensors).unwrap());
    assert_eq!(judged(&header, &tensors).unwrap().status, Status::Pass);
    tensors.insert("blocks", Tensor::from_i64(&[3], &[needed[0], needed[1], 1000]));
    assert!(matches!(judged(&header, &tensors), Err(CheckError::NoBlock { request: 1, entry: 0, .. })));
}

#[test]
fn inputs_that_do_not_fit_are_refused_with_what_would() {
    let scene = Scene::latent(2, 1, &[(20, 1), (3, 1)]);
    let inputs = scene.inputs();
    let answer = scene.answer(&inputs, &Slip::none());
    let good = inputs.tensors.clone().with("out", Tensor::from_f32(Dtype::Bf16, &[2, 4, 24], &answer.out));
    let refused = |change: &dyn Fn(&mut Header, &mut shardcheck_engine::Tensors)| {
        let (mut header, mut tensors) = (scene.header.clone(), good.clone());
        change(&mut header, &mut tensors);
        check(&pack(&header, &tensors).unwrap()).expect_err("the call does not fit").to_string()
    };
    let say = |text: String, parts: &[&str]| {
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    say(refused(&|_, t| drop(t.remove("q"))), &["\"q\" is missing"]);
    say(refused(&|_, t| t.insert("seq_lens", Tensor::from_i32(&[2], &[20, 300]))), &["request 1", "300"]);
    say(refused(&|_, t| t.insert("seq_lens", Tensor::from_i32(&[2], &[20, -3]))), &["seq_lens[1] is -3"]);
    say(refused(&|_, t| t.insert("query_start_loc", Tensor::from_i32(&[3], &[0, 2, 1]))), &["ascending"]);
    say(refused(&|_, t| t.insert("out", Tensor::from_i32(&[2], &[0, 1]))), &["out has dtype i32"]);
    say(
        refused(&|_, t| t.insert("lse", Tensor::from_f32(Dtype::Bf16, &[2, 4], &[0.0; 8]))),
        &["lse", "bf16"],
    );
    say(
        refused(&|_, t| t.insert("lse", Tensor::from_f32(Dtype::F32, &[3, 4], &[0.0; 12]))),
        &["[2, 4]", "[4, 2]"],
    );
    say(refused(&|h, _| h.softmax_scale = None), &["softmax_scale"]);
    say(refused(&|h, _| (h.k_scale, h.v_scale) = (-1.0, -1.0)), &["k_scale", "positive"]);
    say(refused(&|h, _| h.k_scale = 2.0), &["v_scale", "the same as k_scale"]);
    say(refused(&|h, _| h.world = 3), &["world is 3"]);
    say(refused(&|h, _| h.interleave = 3), &["interleave", "multiple"]);
    say(refused(&|h, _| h.kv_lora_rank = Some(40)), &["kv_lora_rank is 40"]);
    say(refused(&|h, _| h.contract = ContractChoice::Named("bf8".to_owned())), &["bf8", "f16"]);
    let loose = Preset::Bf16.contract(Dtype::Bf16);
    let loose = shardcheck_formats::Contract { u_acc: 0.1, ..loose };
    say(refused(&|h, _| h.contract = ContractChoice::Full(Box::new(loose.clone()))), &["u_acc"]);
    let bad_entry = |t: &mut shardcheck_engine::Tensors| {
        let mut table = t.get("block_table").unwrap().to_i64();
        table[1] = -1;
        let shape = t.get("block_table").unwrap().shape().to_vec();
        t.insert("block_table", Tensor::from_i64(&shape, &table));
    };
    say(refused(&|_, t| bad_entry(t)), &["block_table[0][1] is -1"]);
}

#[test]
fn every_preset_is_within_the_ceiling_and_every_name_reads_back() {
    for preset in Preset::ALL {
        assert_eq!(preset.contract(Dtype::F32).check_ceiling(), Ok(()), "{}", preset.name());
        assert_eq!(preset.name().parse::<Preset>().unwrap(), preset);
    }
    let mut all: Vec<&str> = Hypothesis::ALL.iter().map(|hypothesis| hypothesis.name()).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), Hypothesis::ALL.len());
}

#[test]
fn the_page_names_every_field_every_check_and_every_preset() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/check.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut full = Header::new(Subject::Merge);
    (full.merge, full.softmax_scale, full.kv_lora_rank) =
        (Some(shardcheck_formats::Merge::A2a), Some(1.0), Some(1));
    (full.block_size, full.per_rank, full.cache_blocks, full.rank) = (Some(1), Some(true), Some(1), Some(0));
    full.lse_layout = Some(LseLayout::TokensHeads);
    let fields = serde_json::to_value(&full).unwrap();
    for field in fields.as_object().unwrap().keys() {
        assert!(page.contains(&format!("`{field}`")), "{field}");
    }
    assert!(
        fields.as_object().unwrap().values().all(|value| !value.is_null()),
        "a field was left out: {fields}"
    );
    for name in Subject::ALL.map(Subject::name).into_iter().chain(Preset::ALL.map(Preset::name)) {
        assert!(page.contains(&format!("`{name}`")) || page.contains(&format!("`\"{name}\"`")), "{name}");
    }
}
