//! Attention over selected tokens by the embedded engine: all tokens are what attention without a selection sees, and bad selections are refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_engine::{CommBackend, EngineError, Mask, Operation, Reply, SlotList, Tensor, TensorError};

fn scene(world: usize, backend: CommBackend) -> Scene {
    Scene::small(world).with(|s| {
        s.configuration.interleave = 2;
        s.configuration.comm_backend = backend;
        s.requests = vec![(12, 1), (36, 3), (0, 0), (2, 2)];
    })
}

/// Rows of the scene as `(request, tokens that the row sees)`, padding last.
fn rows(scene: &Scene) -> Vec<usize> {
    let of_request = |(cached, rows): &(usize, usize)| (1..=*rows).map(|t| cached + t).collect::<Vec<_>>();
    let mut seen: Vec<usize> = scene.requests.iter().flat_map(of_request).collect();
    seen.resize(scene.rows(), 0);
    seen
}

/// The step over the tokens that `choose` gives for a row that sees so many.
fn attend(scene: &Scene, list: SlotList, choose: impl Fn(usize) -> Vec<i32>) -> Result<Reply, EngineError> {
    let chosen: Vec<Vec<i32>> = rows(scene).into_iter().map(choose).collect();
    let top_k = chosen.iter().map(Vec::len).max().unwrap();
    let mut topk = Vec::new();
    for (row, own) in chosen.iter().enumerate() {
        topk.extend(own);
        topk.resize((row + 1) * top_k, -1);
    }
    let mut session = scene.open(&engine());
    step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
    let mut inputs = scene.attend_inputs().with("topk", Tensor::from_i32(&[chosen.len(), top_k], &topk));
    step(session.as_mut(), &Operation::AttendSelected { list, shared: false }, &mut inputs)
}

#[test]
fn all_tokens_in_their_order_give_the_bits_of_attention_without_a_selection() {
    for (world, backend) in [(1, CommBackend::A2a), (2, CommBackend::AgRs), (3, CommBackend::A2a)] {
        let scene = scene(world, backend);
        let mut session = scene.open(&engine());
        step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
        let dense = Operation::Attend { mask: Mask::Causal };
        let dense = step(session.as_mut(), &dense, &mut scene.attend_inputs()).unwrap();
        for list in SlotList::ALL {
            let selected = attend(&scene, list, |seen| (0..seen as i32).collect()).unwrap();
            for name in ["out", "lse"] {
                let bytes = |reply: &Reply| reply.outputs.get(name).unwrap().bytes().to_vec();
                assert_eq!(bytes(&selected), bytes(&dense), "{world} {list} {name}");
            }
            let counts = selected.outputs.get("counts").unwrap().to_i64();
            assert_eq!(counts, dense.outputs.get("row_lens").unwrap().to_i64(), "{world} {list}");
        }
    }
}

#[test]
fn a_row_without_a_selected_token_is_zero_and_its_lse_is_minus_infinity() {
    let scene = scene(3, CommBackend::A2a);
    for list in SlotList::ALL {
        let reply = attend(&scene, list, |seen| if seen % 2 == 0 { vec![] } else { vec![seen as i32 - 1] });
        let reply = reply.unwrap();
        let (out, lse) = (reply.outputs.get("out").unwrap(), reply.outputs.get("lse").unwrap().to_f32());
        let (width, heads, rows) = (out.shape()[3], out.shape()[2], rows(&scene));
        for (index, lse) in lse.iter().enumerate() {
            let empty = rows[index / heads % rows.len()] % 2 == 0;
            let own = &out.to_f32()[index * width..(index + 1) * width];
            assert_eq!(*lse == f32::NEG_INFINITY, empty, "{list} {index}");
            assert!(own.iter().all(|value| value.is_finite() && (*value == 0.0 || !empty)), "{list} {index}");
        }
        let counts = reply.outputs.get("counts").unwrap().to_i64();
        assert_eq!(counts.iter().sum::<i64>(), rows.iter().filter(|seen| **seen % 2 == 1).count() as i64);
    }
}

#[test]
fn tokens_that_a_row_does_not_see_are_refused_and_not_answered() {
    let scene = scene(2, CommBackend::A2a);
    for (choose, named) in [
        ((|seen| vec![seen as i32]) as fn(usize) -> Vec<i32>, "position 13 in row 0"),
        (|seen| vec![0; seen.min(2)], "position 0 twice in row 0"),
        (|_| vec![-2], "position -2 in row 0"),
        (|_| vec![-1, 0], "position 0 behind a −1 in row 0"),
        (|seen| if seen == 0 { vec![0] } else { vec![] }, "position 0 in row 6"),
    ] {
        let refused = attend(&scene, SlotList::Packed, choose);
        let Err(EngineError::Input(TensorError::WrongValue { name, value })) = refused else {
            panic!("{named}: {refused:?}")
        };
        assert_eq!(name, "topk");
        assert!(value.starts_with(named), "{value}");
    }
}

#[test]
fn a_layer_that_shares_a_selection_needs_one_for_as_many_rows() {
    let scene = scene(2, CommBackend::A2a);
    let mut session = scene.open(&engine());
    step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
    let shared = Operation::AttendSelected { list: SlotList::Packed, shared: true };
    let refused = step(session.as_mut(), &shared, &mut scene.attend_inputs());
    assert!(
        matches!(&refused, Err(EngineError::Crash { text }) if text.contains("no layer before")),
        "{refused:?}"
    );
}
