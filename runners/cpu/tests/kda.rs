//! Kimi delta attention by the embedded engine: worked numbers, slots, and what is refused.

mod scene;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_engine::{EngineError, KdaGate, KdaPlan, Operation, Reply, Session, Tensor, Tensors};
use shardcheck_formats::Dtype;

/// One head of width 1 without convolution: the key is 1 to within 1e-6, decays and shares come from logits.
fn inputs(requests: &[[i32; 4]], rows: &[(f32, f32, f32)]) -> Tensors {
    let mut starts = vec![0];
    requests.iter().for_each(|request| starts.push(starts[starts.len() - 1] + request[0]));
    let column = |at: usize| {
        let values: Vec<i32> = requests.iter().map(|request| request[at]).collect();
        Tensor::from_i32(&[values.len()], &values)
    };
    let count = rows.len();
    let floats = |shape: &[usize], values: Vec<f32>| Tensor::from_f32(Dtype::F32, shape, &values);
    let coded = |values: Vec<f32>| Tensor::from_f32(Dtype::Bf16, &[count, 1, 1], &values);
    // a value that silu leaves as it is, near enough: the weight of the tap makes it large, the state takes it down
    Tensors::new()
        .with("query_start_loc", Tensor::from_i32(&[starts.len()], &starts))
        .with("read_slots", column(1))
        .with("accepted", column(2))
        .with("write_slots", column(3))
        .with("query", coded(vec![100.0; count]))
        .with("key", coded(vec![100.0; count]))
        .with("value", coded(rows.iter().map(|row| row.0).collect()))
        .with("gate", floats(&[count, 1, 1], rows.iter().map(|row| row.1).collect()))
        .with("beta", floats(&[count, 1], rows.iter().map(|row| row.2).collect()))
        .with("output_gate", floats(&[count, 1, 1], vec![0.0; count]))
        .with("conv_query", floats(&[1, 1, 1], vec![1.0]))
        .with("conv_key", floats(&[1, 1, 1], vec![1.0]))
        .with("conv_value", floats(&[1, 1, 1], vec![1.0]))
        .with("a_log", floats(&[1], vec![0.0]))
        .with("dt_bias", floats(&[1, 1], vec![0.0]))
        .with("norm_weight", floats(&[1], vec![1.0]))
}

const FAR: f32 = 2000.0;

fn run(
    session: &mut dyn Session,
    requests: &[[i32; 4]],
    rows: &[(f32, f32, f32)],
) -> Result<Reply, EngineError> {
    let plan = KdaPlan { gate: KdaGate::LowerBound, slots: 3, drafts: 1, chunk: 2 };
    step(session, &Operation::Kda { plan }, &mut inputs(requests, rows))
}

fn states(reply: &Reply) -> Vec<f64> {
    reply.outputs.get("state").unwrap().to_f64()
}

fn assert_near(seen: &[f64], wanted: &[f64]) {
    assert_eq!(seen.len(), wanted.len(), "{seen:?}");
    for (seen, wanted) in seen.iter().zip(wanted) {
        assert!((seen - wanted).abs() < 1e-4 * wanted.abs().max(1.0), "{seen} {wanted}");
    }
}

#[test]
fn states_go_on_fork_and_are_taken_back() {
    let mut session = Scene::small(1).open(&engine());
    let session = session.as_mut();
    // a whole update, then half of the way to 64
    let first = run(session, &[[2, -1, 0, 0]], &[(32.0, -FAR, FAR), (64.0, -FAR, 0.0)]).unwrap();
    assert_near(&states(&first), &[48.0]);
    assert_eq!(first.outputs.get("core").unwrap().shape(), [1, 2, 1, 1]);
    // one request behind the first row alone, one behind both, both in other slots
    let forked = run(session, &[[0, 0, 1, 1], [1, 0, 2, 2]], &[(0.0, FAR, -FAR)]).unwrap();
    assert_near(&states(&forked), &[32.0, 48.0 * (-5f64).exp()]);
    let kept = run(session, &[[0, 0, 2, 0]], &[]).unwrap();
    assert_near(&states(&kept), &[48.0]);
    let fresh = run(session, &[[0, -1, 0, 0]], &[]).unwrap();
    assert_near(&states(&fresh), &[0.0]);
}

#[test]
fn what_can_not_be_is_refused() {
    let mut session = Scene::small(1).open(&engine());
    let session = session.as_mut();
    let row = (1.0, 0.0, 0.0);
    run(session, &[[3, -1, 0, 0]], &[row; 3]).unwrap();
    for (requests, rows, reason) in [
        (vec![[1, 1, 0, 1]], 1, "slot 1 holds nothing"),
        (vec![[1, 0, 1, 0]], 1, "at most 1 can be taken back"),
        (vec![[1, 0, 4, 0]], 1, "4 of 3 rows count"),
        (vec![[1, 3, 0, 1]], 1, "slots are 0 to 2"),
        (vec![[1, -2, 0, 1]], 1, "reads slot -2"),
        (vec![[0, -1, 0, 1], [1, -1, 0, 1]], 1, "each written once"),
        (vec![[2, -1, 0, 1]], 1, "does not share 1 rows out"),
    ] {
        let error = run(session, &requests, &vec![row; rows]).unwrap_err().to_string();
        assert!(error.contains(reason), "{requests:?}: {error}");
    }
    let mut without = inputs(&[[1, -1, 0, 0]], &[row]);
    without.insert("gate", Tensor::from_f32(Dtype::F32, &[1, 1, 2], &[0.0; 2]));
    let plan = KdaPlan { gate: KdaGate::Softplus, slots: 1, drafts: 0, chunk: 1 };
    let error = step(session, &Operation::Kda { plan }, &mut without).unwrap_err().to_string();
    assert!(error.contains("gate"), "{error}");
}
