//! Acceptance of drafts by the embedded engine: worked examples, a vocabulary over ranks, and what is refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_engine::{AcceptanceMethod, EngineError, Operation, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

fn logs(laws: &[[f32; 3]]) -> Vec<f32> {
    laws.iter().flatten().map(|chance| chance.ln()).collect()
}

/// One request: its drafts, the laws of the target's rows and of the drafter's, its numbers; all noise is zero.
fn inputs(drafts: &[i32], target: &[[f32; 3]], draft: Option<&[[f32; 3]]>, numbers: &[f32]) -> Tensors {
    let (count, rows) = (drafts.len(), target.len());
    let floats = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values);
    let mut given = Tensors::new()
        .with("query_start_loc", Tensor::from_i32(&[2], &[0, rows as i32]))
        .with("draft_tokens", Tensor::from_i32(&[1, count], drafts))
        .with("target_logits", floats(&[rows, 3], &logs(target)))
        .with("temperature", floats(&[1], &[1.0]))
        .with("uniform", floats(&[rows], numbers))
        .with("noise", floats(&[rows, 3], &vec![0.0; rows * 3]));
    if let Some(draft) = draft {
        given.insert("draft_logits", floats(&[1, count, 3], &logs(draft)));
    }
    given
}

fn accept(method: AcceptanceMethod, ranks: usize, mut given: Tensors) -> Result<Reply, EngineError> {
    let operation = Operation::AcceptDrafts { method, ranks };
    step(Scene::small(1).open(&engine()).as_mut(), &operation, &mut given)
}

fn tokens(method: AcceptanceMethod, ranks: usize, given: Tensors) -> Vec<i64> {
    let reply = accept(method, ranks, given).unwrap();
    let all = reply.outputs.get("tokens").unwrap().to_i64();
    let own = all.len() / ranks;
    assert!(all.chunks(own).all(|rank| rank == &all[..own]), "{all:?}");
    all[..own].to_vec()
}

const TARGET: [[f32; 3]; 3] = [[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.2, 0.7, 0.1]];
const DRAFT: [[f32; 3]; 2] = [[0.8, 0.2, 0.0], [0.3, 0.7, 0.0]];

#[test]
fn each_draft_by_itself_is_accepted_below_its_ratio_and_the_rest_is_drawn_from_what_is_left() {
    use AcceptanceMethod::Standard;
    for ranks in [1, 2, 3, 5] {
        let with = |numbers: &[f32]| tokens(Standard, ranks, inputs(&[0, 1], &TARGET, Some(&DRAFT), numbers));
        assert_eq!(with(&[0.74, 0.71, 0.0]), [0, 1, 1]);
        assert_eq!(with(&[0.74, 0.72, 0.0]), [0, 0, -1]);
        assert_eq!(with(&[0.76, 0.0, 0.0]), [1, -1, -1]);
    }
}

#[test]
fn the_longest_block_is_accepted_though_a_shorter_one_is_not() {
    use AcceptanceMethod::Block;
    let with = |numbers: &[f32]| tokens(Block, 2, inputs(&[0, 1], &TARGET, Some(&DRAFT), numbers));
    // h is 3/13 behind the first draft and 15/28 behind both
    assert_eq!(with(&[0.9, 0.53, 0.0]), [0, 1, 1]);
    assert_eq!(with(&[0.23, 0.54, 0.0]), [0, 0, -1]);
    assert_eq!(with(&[0.24, 0.54, 0.0]), [1, -1, -1]);
}

#[test]
fn a_draft_that_is_none_ends_the_drafts_and_the_target_goes_on() {
    for method in AcceptanceMethod::ALL {
        let target = [[0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [1.0, 0.0, 0.0]];
        let found = tokens(method, 2, inputs(&[1, -1], &target, Some(&DRAFT), &[0.0, 0.0, 0.0]));
        assert_eq!(found, [1, 2, -1], "{method}");
    }
}

#[test]
fn a_rejected_draft_without_a_law_is_not_drawn_again() {
    let given = inputs(&[0], &[[0.6, 0.3, 0.1], [1.0, 0.0, 0.0]], None, &[0.61, 0.0]);
    assert_eq!(tokens(AcceptanceMethod::Standard, 2, given), [1, -1]);
}

#[test]
fn figures_of_a_batch_without_drafts_are_one_and_zero() {
    let mut given = inputs(&[2], &[[0.6, 0.3, 0.1]], None, &[0.5]);
    given.insert("query_start_loc", Tensor::from_i32(&[2], &[0, 1]));
    let reply = accept(AcceptanceMethod::Block, 2, given).unwrap();
    assert_eq!(reply.outputs.get("statistics").unwrap().to_f64(), [1.0, 0.0, 1.0, 0.0]);
    assert_eq!(reply.outputs.get("tokens").unwrap().to_i64(), [0, -1, 0, -1]);
}

#[test]
fn starts_that_do_not_fit_and_drafts_that_are_no_tokens_are_refused() {
    let given = || inputs(&[0, 1], &TARGET, Some(&DRAFT), &[0.5; 3]);
    for (name, wrong) in [
        ("query_start_loc", Tensor::from_i32(&[2], &[0, 2])),
        ("query_start_loc", Tensor::from_i32(&[2], &[-1, 3])),
        ("query_start_loc", Tensor::from_i32(&[2], &[3, 3])),
        ("draft_tokens", Tensor::from_i32(&[1, 2], &[0, 3])),
        ("draft_tokens", Tensor::from_i32(&[1, 2], &[0, -2])),
        ("draft_tokens", Tensor::from_i32(&[2], &[0, 1])),
        ("target_logits", Tensor::from_f32(Dtype::F32, &[3, 0], &[])),
    ] {
        let refused = accept(AcceptanceMethod::Standard, 2, given().with(name, wrong)).unwrap_err();
        assert!(matches!(refused, EngineError::Crash { .. }), "{name}: {refused}");
    }
    let refused = accept(AcceptanceMethod::Standard, 0, given()).unwrap_err();
    assert!(matches!(refused, EngineError::Crash { .. }), "{refused}");
    let short = given().with("noise", Tensor::from_f32(Dtype::F32, &[1, 3], &[0.0; 3]));
    let refused = accept(AcceptanceMethod::Standard, 2, short).unwrap_err();
    assert!(matches!(refused, EngineError::Input(_)), "{refused}");
}

/// Two requests of two columns and five tokens: three rows with two drafts, two rows with one.
fn two_requests(target: &[[f32; 5]; 5], temperature: [f32; 2], numbers: [f32; 5]) -> Tensors {
    let floats = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values);
    Tensors::new()
        .with("query_start_loc", Tensor::from_i32(&[3], &[0, 3, 5]))
        .with("draft_tokens", Tensor::from_i32(&[2, 2], &[1, 4, 3, 2]))
        .with("target_logits", floats(&[5, 5], target.as_flattened()))
        .with("temperature", floats(&[2], &temperature))
        .with("uniform", floats(&[5], &numbers))
        .with("noise", floats(&[5, 5], &[0.0; 25]))
}

/// Logits whose largest is at the given token, and at every other one behind it.
fn peak(token: usize) -> [f32; 5] {
    std::array::from_fn(
        |at| if at >= token && (at - token).is_multiple_of(2) { 2.0 } else { at as f32 * 0.25 },
    )
}

#[test]
fn greedy_requests_of_every_method_accept_while_a_draft_is_the_first_argmax_over_all_shards() {
    for (method, temperature) in
        [(AcceptanceMethod::Greedy, 1.0), (AcceptanceMethod::Standard, 0.0), (AcceptanceMethod::Block, 0.0)]
    {
        for ranks in [1, 2, 3, 5, 7] {
            let of = |peaks: [usize; 5]| {
                let target = peaks.map(peak);
                let given = two_requests(&target, [temperature; 2], [0.999; 5]);
                let reply = accept(method, ranks, given).unwrap();
                let accepted = reply.outputs.get("accepted").unwrap().to_i64();
                let figures = reply.outputs.get("statistics").unwrap().to_f64();
                let tokens = reply.outputs.get("tokens").unwrap().to_i64();
                assert_eq!(reply.collectives, vec![0; ranks]);
                assert!(tokens.chunks(6).all(|rank| rank == &tokens[..6]), "{tokens:?}");
                assert!(accepted.chunks(2).all(|rank| rank == &accepted[..2]), "{accepted:?}");
                assert!(figures.chunks(2).all(|rank| rank == &figures[..2]), "{figures:?}");
                (tokens[..6].to_vec(), [accepted[0], accepted[1]], [figures[0], figures[1]])
            };
            let all = of([1, 4, 2, 3, 0]);
            assert_eq!(all, (vec![1, 4, 2, 3, 0, -1], [2, 1], [2.5, 1.0]), "{method} {ranks}");
            let some = of([1, 2, 3, 0, 4]);
            assert_eq!(
                some,
                (vec![1, 2, -1, 0, -1, -1], [1, 0], [1.5, f64::from(1f32 / 3.0)]),
                "{method} {ranks}"
            );
        }
    }
}

#[test]
fn logits_of_target_and_drafter_are_both_divided_by_the_temperature_of_their_request() {
    // at a temperature of 2 the laws of the worked example again
    let twice = |logits: &Tensors, name: &str| {
        let tensor = logits.get(name).unwrap();
        let values: Vec<f32> = tensor.to_f32().iter().map(|logit| 2.0 * logit).collect();
        Tensor::from_f32(Dtype::F32, tensor.shape(), &values)
    };
    for method in [AcceptanceMethod::Standard, AcceptanceMethod::Block] {
        for numbers in [[0.74, 0.71, 0.0], [0.76, 0.1, 0.0], [0.2, 0.72, 0.0], [0.3, 0.53, 0.0]] {
            let plain = inputs(&[0, 1], &TARGET, Some(&DRAFT), &numbers);
            let mut warm = plain.clone();
            warm.insert("target_logits", twice(&plain, "target_logits"));
            warm.insert("draft_logits", twice(&plain, "draft_logits"));
            warm.insert("temperature", Tensor::from_f32(Dtype::F32, &[1], &[2.0]));
            assert_eq!(tokens(method, 2, warm), tokens(method, 2, plain), "{method} {numbers:?}");
        }
    }
}

#[test]
fn a_token_is_the_argmax_of_the_logarithm_of_its_weight_and_its_own_noise() {
    let target = [[0.6, 0.3, 0.1], [0.25, 0.25, 0.5]];
    for (row, number, accepted) in [(0, 0.9, &[][..]), (1, 0.1, &[0][..])] {
        for token in 0..3 {
            let mut noise = [0.0f32; 6];
            noise[row * 3 + token] = 3.0;
            // of the other row nothing counts
            noise[(1 - row) * 3 + (token + 1) % 3] = 9.0;
            let mut given = inputs(&[0], &target, None, &[number, 0.0]);
            given.insert("noise", Tensor::from_f32(Dtype::F32, &[2, 3], &noise));
            let found = tokens(AcceptanceMethod::Standard, 2, given);
            // the rejected draft has no weight left
            let wanted = if row == 0 && token == 0 { 1 } else { token as i64 };
            assert_eq!(found[..=accepted.len()], [accepted, &[wanted]].concat(), "row {row}, token {token}");
        }
    }
}

#[test]
fn a_block_of_drafts_without_a_law_goes_by_what_the_target_leaves_for_other_tokens() {
    // prefixes 0.6 and 0.3: h is 0.6·0.5/(0.6·0.5 + 0.4) = 3/7 behind the first and 0.3 behind both
    let target = [[0.6, 0.4, 0.0], [0.3, 0.5, 0.2], [0.2, 0.7, 0.1]];
    for ranks in [1, 3] {
        let with =
            |numbers: &[f32]| tokens(AcceptanceMethod::Block, ranks, inputs(&[0, 1], &target, None, numbers));
        assert_eq!(with(&[0.9, 0.29, 0.0]), [0, 1, 1]);
        assert_eq!(with(&[0.42, 0.31, 0.0]), [0, 0, -1]);
        assert_eq!(with(&[0.44, 0.31, 0.0]), [1, -1, -1]);
    }
}

#[test]
fn where_nothing_is_left_over_of_the_target_the_token_comes_from_the_target_itself() {
    let same = [[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]];
    // the number 1 is none that an engine draws: it rejects a draft of the same law
    let given = inputs(&[0], &same, Some(&same[..1]), &[1.0, 0.0]);
    assert_eq!(tokens(AcceptanceMethod::Standard, 2, given), [1, -1]);
}
