//! Calls at the edges: nothing to see, poison, scales, size.

use super::*;

#[test]
fn a_request_without_tokens_gives_zeros_and_minus_infinity_or_what_it_likes() {
    let scene = Scene::latent(3, 1, &[(9, 1), (0, 2), (4, 1)]);
    let inputs = scene.inputs();
    let answer = scene.answer(&inputs, &Slip::none());
    assert_eq!(scene.judged(&inputs, &answer).status, Status::Pass);
    let mut undefined = answer.clone();
    undefined.out[4 * 24 + 3] = f32::NAN;
    undefined.lse[4] = f32::INFINITY;
    let report = scene.judged(&inputs, &undefined);
    assert_eq!((report.status, report.failures.len()), (Status::Fail, 2), "{report}");
    let place = &report.failures[0].worst.as_ref().unwrap().place;
    assert_eq!(place, "token 1 (request 1, row 0, before the first position), head 0, dim 3");
    let mut lenient = scene.clone();
    lenient.header.empty_rows = EmptyRows::Undefined;
    assert_eq!(lenient.judged(&inputs, &undefined).status, Status::Pass);
}

#[test]
fn more_rows_than_tokens_are_refused_because_lengths_count_the_new_ones() {
    let scene = Scene::latent(2, 1, &[(2, 4)]);
    let inputs = scene.inputs();
    let answer = scene.answer(&inputs, &Slip::none());
    let rows = answer.out.len() / (scene.heads * scene.v_dim);
    let shape = [rows, scene.heads, scene.v_dim];
    let tensors = inputs.tensors.with("out", Tensor::from_f32(Dtype::Bf16, &shape, &answer.out));
    let error = check(&pack(&scene.header, &tensors).unwrap()).unwrap_err().to_string();
    assert!(error.contains("4 rows and 2 tokens"), "{error}");
}

#[test]
fn nan_never_passes_wherever_it_stands() {
    let scene = Scene::latent(2, 1, &RAGGED);
    let inputs = scene.inputs();
    let right = scene.answer(&inputs, &Slip::none());
    for index in [0, 17, right.out.len() - 1] {
        let mut answer = right.clone();
        answer.out[index] = f32::NAN;
        let report = scene.judged(&inputs, &answer);
        assert_eq!((report.status, report.failures[0].out_of_bound), (Status::Fail, 1), "{report}");
    }
}

#[test]
fn nan_that_a_row_sees_is_undecided_with_its_slot_and_does_not_excuse_the_others() {
    let scene = Scene::latent(2, 1, &[(9, 2), (12, 1)]);
    let mut inputs = scene.inputs();
    // position 8 is the last token of request 0, which row 1 alone sees: rank 0, row 4 of the first block
    let table = inputs.tensors.get("block_table").unwrap().to_i64();
    let start = ((table[0] as usize * 8 + 4) * 32) * 2;
    let right = scene.answer(&inputs, &Slip::none());
    let cache = inputs.tensors.get_mut("kv_cache").unwrap();
    cache.bytes_mut()[start..start + 2].copy_from_slice(&0x7FC0u16.to_le_bytes());
    let report = scene.judged(&inputs, &right);
    assert_eq!(report.status, Status::Inconclusive, "{report}");
    assert_eq!(report.inconclusive.len(), 1);
    let text = report.to_string();
    assert!(text.contains("row 1, position 8") && text.contains("for position 8 (rank 0, block"), "{text}");
    let mut wrong = right.clone();
    wrong.out[2 * 4 * 24] += 1.0;
    let report = scene.judged(&inputs, &wrong);
    assert_eq!(report.status, Status::Fail, "{report}");
}

#[test]
fn a_row_that_reads_the_poison_behind_its_end_is_told_so() {
    let scene = Scene::latent(2, 1, &[(9, 1), (12, 1)]);
    let inputs = scene.inputs();
    let mut answer = scene.answer(&inputs, &Slip::none());
    answer.out[..4 * 24].fill(f32::NAN);
    answer.lse[..4].fill(f32::NAN);
    let report = scene.judged(&inputs, &answer);
    assert_eq!(names(&report).first(), Some(&Hypothesis::OneTokenTooMany.name()), "{report}");
}

#[test]
fn a_call_without_a_row_proves_nothing() {
    let scene = Scene::latent(1, 1, &[(9, 0)]);
    let report = scene.report(&Slip::none());
    assert_eq!((report.status, report.compared), (Status::Inconclusive, 0), "{report}");
}

#[test]
fn counts_that_no_machine_has_are_refused_before_they_cost_anything() {
    let mut scene = Scene::latent(1, 1, &[(9, 1)]);
    let inputs = scene.inputs();
    scene.header.world = usize::MAX;
    let error = check(&pack(&scene.header, &inputs.tensors).unwrap()).unwrap_err();
    assert!(error.to_string().contains("4096"), "{error}");
}

#[test]
fn whatever_a_tensor_is_the_answer_is_a_report_or_an_error() {
    for scene in [Scene::latent(2, 1, &[(9, 1), (3, 2)]), Scene::grouped(1, 1, &[(9, 1), (3, 2)])] {
        let inputs = scene.inputs();
        let answer = scene.answer(&inputs, &Slip::none());
        let good = inputs
            .tensors
            .clone()
            .with("out", Tensor::from_f32(Dtype::Bf16, &[3, 4, scene.v_dim], &answer.out))
            .with("lse", Tensor::from_f32(Dtype::F32, &[3, 4], &answer.lse));
        let (reports, errors) = survived(&scene.header, &good);
        assert!(reports > 10 && errors > 450, "{reports} {errors}");
    }
}

#[test]
fn padding_rows_are_not_judged() {
    let scene = Scene::latent(1, 1, &[(9, 1), (12, 1)]);
    let inputs = scene.inputs();
    let answer = scene.answer(&inputs, &Slip::none());
    let mut query = inputs.tensors.get("q").unwrap().to_f32();
    query.extend(vec![f32::NAN; 4 * 32]);
    let mut out = answer.out.clone();
    out.extend(vec![f32::NAN; 4 * 24]);
    let tensors = inputs
        .tensors
        .clone()
        .with("q", Tensor::from_f32(Dtype::Bf16, &[3, 4, 32], &query))
        .with("out", Tensor::from_f32(Dtype::Bf16, &[3, 4, 24], &out));
    let report = check(&pack(&scene.header, &tensors).unwrap()).unwrap();
    assert_eq!((report.status, report.compared), (Status::Pass, 2 * 4 * 24), "{report}");
}

#[test]
fn caches_of_eight_bits_with_scales_pass_in_every_format() {
    for cache in [Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2] {
        let mut scene = Scene { cache, ..Scene::latent(3, 2, &RAGGED) };
        (scene.header.k_scale, scene.header.v_scale) = (0.37, 0.37);
        let report = scene.report(&Slip::none());
        assert_eq!(report.status, Status::Pass, "{cache}: {report}");
    }
}

#[test]
fn an_f32_contract_is_stricter_than_a_bf16_one() {
    let mut scene = Scene::latent(1, 1, &RAGGED);
    scene.header.contract = ContractChoice::Named("f32".to_owned());
    let report = scene.report(&Slip::none());
    assert_eq!(report.status, Status::Fail, "weights in bf16 are no f32 arithmetic: {report}");
}

#[test]
fn a_lost_token_that_no_element_shows_is_found_in_the_whole_output() {
    let mut scene = Scene { heads: 16, ..Scene::latent(2, 1, &[(3100, 1), (2800, 1)]) };
    (scene.qk_dim, scene.v_dim, scene.header.kv_lora_rank) = (96, 64, Some(64));
    scene.header.softmax_scale = Some(0.3 / 96f64.sqrt());
    let inputs = scene.inputs();
    let out_alone = |scene: &Scene, slip: &Slip| {
        let answer = scene.answer(&inputs, slip);
        let out = Tensor::from_f32(Dtype::Bf16, &[2, 16, 64], &answer.out);
        check(&pack(&scene.header, &inputs.tensors.clone().with("out", out)).unwrap()).unwrap()
    };
    assert_eq!(out_alone(&scene, &Slip::none()).status, Status::Pass);
    let slip = Slip::seeing(|request, _| {
        (0..[3100, 2800][request]).filter(|p| (request, *p) != (1, 123)).map(|p| (request, p)).collect()
    });
    let report = out_alone(&scene, &slip);
    let text = report.to_string();
    assert_eq!(report.status, Status::Fail, "{text}");
    assert!(text.contains("request 1: token 123 (rank 1) is missing"), "{text}");
    let mut elements = scene.clone();
    elements.header.statistics = false;
    assert_eq!(out_alone(&elements, &slip).status, Status::Pass, "what elements alone can't see");
}

/// One row over `tokens`, dealt to eight ranks, with the widths of DeepSeek's latent.
fn wide(tokens: usize, heads: usize) -> Scene {
    let mut scene = Scene::latent(8, 1, &[(tokens, 1)]);
    scene.header.kv_lora_rank = Some(512);
    scene.header.softmax_scale = Some(0.0325);
    (scene.heads, scene.qk_dim, scene.v_dim, scene.block) = (heads, 576, 512, 64);
    scene
}

/// The answer without the tokens of a rank. The oracle's streaming form stands for the engine: by the definition it would
/// take a minute.
fn judged_without(scene: &Scene, rank: usize) -> (Report, Report) {
    let inputs = scene.inputs();
    let report = |without| scene.judged(&inputs, &long_answer(scene, &inputs, without));
    (report(None), report(Some(rank)))
}

#[test]
fn a_context_of_a_hundred_thousand_tokens_is_judged_and_a_lost_share_is_named() {
    let (right, wrong) = judged_without(&wide(100_000, 2), 5);
    assert_eq!(right.status, Status::Pass, "{right}");
    assert_eq!(names(&wrong).first(), Some(&Hypothesis::RankMissing.name()), "{wrong}");
    assert_eq!(wrong.diagnosis.unwrap().explanations[0].which.as_deref(), Some("rank 5"));
}

#[test]
fn a_hundred_and_twenty_eight_heads_on_one_wide_latent_are_judged_together() {
    let (right, wrong) = judged_without(&wide(1500, 128), 7);
    assert_eq!((right.status, right.compared), (Status::Pass, 128 * 513), "{right}");
    assert_eq!(names(&wrong).first(), Some(&Hypothesis::RankMissing.name()), "{wrong}");
}

fn long_answer(scene: &Scene, inputs: &scene::Inputs, without: Option<usize>) -> scene::Answer {
    use shardcheck_references::attention::plain::{Problem, Values};
    use shardcheck_references::attention::streaming::attend;
    use shardcheck_references::visibility::Visible;
    let tokens = scene.requests[0].0;
    let kept: Vec<usize> = (0..tokens).filter(|position| Some(position % 8) != without).collect();
    let key = scene.keys_of(inputs, &kept);
    let query = inputs.tensors.get("q").unwrap().to_f32();
    let scale = scene.header.softmax_scale.unwrap();
    let problem = Problem::new(scene.heads, 1, 576, 512, scale, &query, &key, Values::KeyPrefix);
    let attention = attend(&problem, &[Visible::Prefix(kept.len())]);
    let narrow = |values: &[f64]| values.iter().map(|value| *value as f32).collect();
    scene::Answer { out: narrow(&attention.out), lse: narrow(&attention.lse) }
}
