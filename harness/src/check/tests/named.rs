//! Every slip of the list, made for real in the engine: failed, and named first.

use super::*;

/// Judges the slip and asks for its name among the first explanations, which must explain everything looked at.
fn assert_named(scene: &Scene, slip: &Slip, hypothesis: Hypothesis, which: Option<&str>) {
    let report = scene.report(slip);
    assert_named_in(&report, hypothesis, which);
}

fn assert_named_in(report: &Report, hypothesis: Hypothesis, which: Option<&str>) {
    let names = names(report);
    assert_eq!(names.first(), Some(&hypothesis.name()), "{report}");
    let diagnosis = report.diagnosis.as_ref().unwrap();
    let first = &diagnosis.explanations[0];
    assert_eq!(first.explains, diagnosis.looked_at, "{report}");
    assert_eq!(report.stage, Some(hypothesis.stage()));
    if let Some(which) = which {
        assert_eq!(first.which.as_deref(), Some(which), "{report}");
    }
}

fn verify(world: usize, interleave: usize) -> Scene {
    Scene { unused: Unused::Numbers, ..Scene::latent(world, interleave, &[(37, 4), (21, 3), (64, 2)]) }
}

/// Positions `0..end` of the request itself.
fn prefix(end: impl Fn(usize, usize) -> usize + 'static) -> Slip {
    Slip::seeing(move |request, row| (0..end(request, row)).map(|position| (request, position)).collect())
}

const LENS: [(usize, usize); 3] = [(37, 4), (21, 3), (64, 2)];

fn bound(request: usize, row: usize) -> usize {
    LENS[request].0 - LENS[request].1 + 1 + row
}

#[test]
fn row_bounds_that_are_off() {
    for (world, interleave) in [(1, 1), (3, 2)] {
        let scene = verify(world, interleave);
        assert_named(&scene, &prefix(|q, t| bound(q, t) - 1), Hypothesis::LastTokenMissing, None);
        assert_named(&scene, &prefix(|q, t| bound(q, t) + 1), Hypothesis::OneTokenTooMany, None);
        assert_named(&scene, &prefix(|q, _| LENS[q].0 - LENS[q].1), Hypothesis::CommittedPrefix, None);
        assert_named(&scene, &prefix(|q, _| LENS[q].0), Hypothesis::NoCausalMask, None);
    }
}

#[test]
fn a_causal_mask_on_a_bidirectional_block() {
    let mut scene = verify(2, 1);
    scene.header.mask = Mask::Bidirectional;
    assert_eq!(scene.report(&Slip::none()).status, Status::Pass);
    assert_named(&scene, &prefix(bound), Hypothesis::CausalMask, None);
}

#[test]
fn shares_of_ranks() {
    let scene = verify(3, 2);
    assert_named(&scene, &Slip::joining(Join::Missing(1)), Hypothesis::RankMissing, Some("rank 1"));
    assert_named(&scene, &Slip::joining(Join::Twice(2)), Hypothesis::RankTwice, Some("rank 2"));
    assert_named(&scene, &Slip::joining(Join::Alone(0)), Hypothesis::RankAlone, Some("rank 0"));
}

#[test]
fn merges_without_the_right_weights() {
    use std::f64::consts::{LN_2, LOG2_E};
    // long enough that LSEs differ much between bases, and ragged enough that ranks differ
    let scene = Scene { heads: 8, ..verify(4, 8) };
    assert_named(
        &scene,
        &Slip::joining(Join::InBase(LN_2)),
        Hypothesis::MergeBase,
        Some("2^LSE of natural LSEs"),
    );
    let which = Some("e^LSE of LSEs in base 2");
    assert_named(&scene, &Slip::joining(Join::InBase(LOG2_E)), Hypothesis::MergeBase, which);
    assert_named(&scene, &Slip::joining(Join::Average), Hypothesis::Averaged, None);
    assert_named(&scene, &Slip::joining(Join::Sum), Hypothesis::Summed, None);
}

/// Positions that ranks read when they take their lengths from `lens`.
fn by_lengths(world: usize, run: usize, lens: impl Fn(usize, usize) -> usize + 'static) -> Slip {
    Slip::seeing(move |request, row| {
        let n = bound(request, row);
        let of_rank = |rank: usize| {
            (0..lens(n, rank)).map(move |local| (local / run * world + rank) * run + local % run)
        };
        (0..world).flat_map(of_rank).map(|position| (request, position)).collect()
    })
}

#[test]
fn local_lengths_of_another_layout() {
    let one_by_one = |n: usize, rank: usize| n / 4 + usize::from(n % 4 > rank);
    assert_named(
        &verify(4, 8),
        &by_lengths(4, 8, one_by_one),
        Hypothesis::OtherInterleave,
        Some("1 instead of 8"),
    );
    let by_block = |n: usize, rank: usize| n / 32 * 8 + (n % 32).saturating_sub(rank * 8).min(8);
    assert_named(
        &verify(4, 1),
        &by_lengths(4, 1, by_block),
        Hypothesis::OtherInterleave,
        Some("8 instead of 1"),
    );
    let down = |n: usize, _: usize| n / 4;
    assert_named(&verify(4, 2), &by_lengths(4, 2, down), Hypothesis::EvenLengths, Some("rounded down"));
}

#[test]
fn scales_of_the_cache() {
    let mut scene = Scene { cache: Dtype::E4m3fn, ..Scene::grouped(2, 1, &LENS) };
    (scene.header.k_scale, scene.header.v_scale) = (0.25, 1.75);
    assert_eq!(scene.report(&Slip::none()).status, Status::Pass);
    let (k, v) = (0.25, 1.75);
    for (factors, hypothesis) in [
        ((1.0 / k, 1.0), Hypothesis::KeyScaleMissing),
        ((k, 1.0), Hypothesis::KeyScaleTwice),
        ((1.0, 1.0 / v), Hypothesis::ValueScaleMissing),
        ((1.0, v), Hypothesis::ValueScaleTwice),
        ((1.0 / k, 1.0 / v), Hypothesis::ScalesMissing),
        ((k, v), Hypothesis::ScalesTwice),
        ((v / k, k / v), Hypothesis::ScalesSwapped),
    ] {
        assert_named(&scene, &Slip::scaling(factors.0, factors.1), hypothesis, None);
    }
}

#[test]
fn the_softmax_scale() {
    let mut scene = Scene::latent(2, 1, &LENS);
    scene.header.softmax_scale = Some(0.1);
    let slip = |factor: f64| Slip::scaling(factor, 1.0);
    assert_named(&scene, &slip(10.0), Hypothesis::SoftmaxScaleMissing, None);
    assert_named(&scene, &slip(0.1), Hypothesis::SoftmaxScaleTwice, None);
    let which = Some("1/sqrt(32)");
    assert_named(&scene, &slip(10.0 / 32f64.sqrt()), Hypothesis::SoftmaxScaleOfWidth, which);
    assert_named(
        &scene,
        &slip(std::f64::consts::LN_2),
        Hypothesis::ExponentialBase,
        Some("2^score of natural scores"),
    );
}

#[test]
fn outputs_in_another_place() {
    let scene = Scene::grouped(2, 1, &[(37, 2), (21, 2), (64, 2)]);
    let inputs = scene.inputs();
    let right = scene.answer(&inputs, &Slip::none());
    let moved = |place: &dyn Fn(usize, usize) -> (usize, usize)| {
        let mut answer = right.clone();
        for (token, head) in (0..6).flat_map(|token| (0..4).map(move |head| (token, head))) {
            let (from, to) = (place(token, head).0 * 4 + place(token, head).1, token * 4 + head);
            answer.out[to * 16..(to + 1) * 16].copy_from_slice(&right.out[from * 16..(from + 1) * 16]);
            answer.lse[to] = right.lse[from];
        }
        scene.judged(&inputs, &answer)
    };
    let after = Some("the one after it");
    assert_named_in(&moved(&|t, h| (t, (h + 1) % 4)), Hypothesis::HeadsShifted, after);
    assert_named_in(&moved(&|t, h| (t, (h + 3) % 4)), Hypothesis::HeadsShifted, Some("the one before it"));
    assert_named_in(&moved(&|t, h| (t / 2 * 2 + 1 - t % 2, h)), Hypothesis::RowsShifted, after);
    assert_named_in(&moved(&|t, h| ((t + 2) % 6, h)), Hypothesis::RequestsShifted, after);
    let turns = Slip { kv_head: Some(|head, _, kv_heads| head % kv_heads), ..Slip::none() };
    assert_named(&scene, &turns, Hypothesis::KvHeadsByTurns, None);
    let zeros = scene::Answer { out: vec![0.0; right.out.len()], lse: right.lse.clone() };
    assert_named_in(&scene.judged(&inputs, &zeros), Hypothesis::Zeros, None);
}

#[test]
fn the_table_row_of_another_request() {
    let mut scene = verify(2, 1);
    scene.requests = LENS.to_vec();
    let slip = Slip::seeing(|request, row| {
        // request 1 reads through the row of request 2, which is longer
        let table = if request == 1 { 2 } else { request };
        (0..bound(request, row)).map(|position| (table, position)).collect()
    });
    assert_named(&scene, &slip, Hypothesis::TableOfOther, Some("request 2"));
}

#[test]
fn an_lse_that_is_not_what_was_said() {
    let scene = Scene::latent(2, 1, &LENS);
    let inputs = scene.inputs();
    let right = scene.answer(&inputs, &Slip::none());
    let with = |lse: Vec<f32>| scene.judged(&inputs, &scene::Answer { out: right.out.clone(), lse });
    let base = |by: f64| right.lse.iter().map(|lse| (f64::from(*lse) * by) as f32).collect();
    assert_named_in(&with(base(std::f64::consts::LOG2_E)), Hypothesis::LseBase, Some("base 2 instead of e"));
    let (heads, tokens) = (4, 9);
    let exchanged =
        (0..heads * tokens).map(|flat| right.lse[flat % tokens * heads + flat / tokens]).collect();
    assert_named_in(&with(exchanged), Hypothesis::LseTransposed, None);
    let alone = scene.answer(&inputs, &Slip::joining(Join::Alone(1))).lse;
    assert_named_in(&with(alone), Hypothesis::LseOfRank, Some("rank 1"));
}

#[test]
fn one_token_that_is_missing_or_counts_twice_is_named_with_its_slot() {
    let scene = Scene::latent(3, 2, &LENS);
    let report = scene.report(&Slip::seeing(|request, row| {
        (0..bound(request, row)).filter(|p| (request, *p) != (0, 13)).map(|p| (request, p)).collect()
    }));
    let tokens = &report.diagnosis.as_ref().unwrap().tokens;
    assert!(names(&report).is_empty() && tokens.len() == 4, "{report}");
    assert!(tokens.iter().all(|line| line.contains("position 13 (rank 0, block")), "{report}");
    assert!(tokens.iter().all(|line| line.ends_with("is missing")), "{report}");
    let report = scene.report(&Slip::seeing(|request, row| {
        let twice = (request == 2).then_some((2, 30));
        (0..bound(request, row)).map(|p| (request, p)).chain(twice).collect()
    }));
    let tokens = &report.diagnosis.as_ref().unwrap().tokens;
    assert!(!tokens.is_empty() && tokens.iter().all(|line| line.contains("position 30 (rank 0")), "{report}");
    assert!(tokens.iter().all(|line| line.ends_with("counts twice")), "{report}");
}

#[test]
fn a_block_that_is_missing_is_named() {
    let scene = Scene::latent(2, 1, &[(60, 1)]);
    // block 1 of the table on rank 1: odd positions from 16 to 31
    let report = scene.report(&Slip::seeing(|_, _| {
        (0..60).filter(|p| !(p % 2 == 1 && (16..32).contains(p))).map(|p| (0, p)).collect()
    }));
    let tokens = &report.diagnosis.as_ref().unwrap().tokens;
    assert!(tokens.iter().any(|line| line.contains("block 1 of its table on rank 1 is missing")), "{report}");
}

#[test]
fn two_slips_at_once_are_told_apart_by_request() {
    let scene = verify(2, 1);
    let report = scene.report(&Slip::seeing(|request, row| {
        let end = match request {
            0 => bound(0, row) - 1,
            1 => LENS[1].0,
            _ => bound(request, row),
        };
        (0..end).map(|position| (request, position)).collect()
    }));
    let diagnosis = report.diagnosis.as_ref().unwrap();
    let found = |name: &str| diagnosis.explanations.iter().find(|found| found.hypothesis == name);
    assert_eq!(found("last-token-missing").unwrap().requests, [0], "{report}");
    assert_eq!(found("no-causal-mask").unwrap().requests, [1], "{report}");
}
