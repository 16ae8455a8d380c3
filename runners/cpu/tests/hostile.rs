//! Hostile engines do what their names say, and only in steps that return an output.

mod scene;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use scene::{Scene, step};
use shardcheck_cpu::engine;
use shardcheck_cpu::hostile::{Hostility, hostile};
use shardcheck_engine::{Answer, Engine, Mask, Operation, Reply, RuleSetName, Session, Settings, Tensors};
use shardcheck_formats::Dtype;

const ATTEND: Operation = Operation::Attend { mask: Mask::Causal };

fn scene() -> Scene {
    Scene::small(2).with(|s| s.configuration.query_replication = true)
}

fn written(kind: Hostility) -> Box<dyn Session> {
    let scene = scene();
    let Answer::Done(mut session) = hostile(kind).open(&scene.configuration).unwrap() else {
        panic!("{kind}")
    };
    step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
    session
}

fn attend(kind: Hostility) -> (Reply, Tensors) {
    let mut inputs = scene().attend_inputs();
    (step(written(kind).as_mut(), &ATTEND, &mut inputs).unwrap(), inputs)
}

#[test]
fn outputs_of_zeros_or_nan_have_the_right_shape_and_dtype() {
    let healthy = scene().run();
    let (zeros, _) = attend(Hostility::ZeroOutput);
    let (nans, _) = attend(Hostility::NanOutput);
    for name in ["out", "lse"] {
        let expected = healthy.outputs.get(name).unwrap();
        for reply in [&zeros, &nans] {
            reply.outputs.get(name).unwrap().expect(name, expected.dtype(), expected.shape()).unwrap();
        }
        assert!(zeros.outputs.get(name).unwrap().to_f32().iter().all(|v| *v == 0.0));
        assert!(nans.outputs.get(name).unwrap().to_f32().iter().all(|v| v.is_nan()));
    }
}

#[test]
fn a_wrong_shape_a_wrong_dtype_and_a_missing_output_are_what_they_say() {
    let healthy = scene().run();
    let right = healthy.outputs.get("out").unwrap();
    let (shape, _) = attend(Hostility::WrongShape);
    let seen = shape.outputs.get("out").unwrap();
    assert_eq!((seen.len(), seen.dtype()), (right.len(), right.dtype()));
    assert_ne!(seen.shape(), right.shape());
    let (dtype, _) = attend(Hostility::WrongDtype);
    assert_eq!(dtype.outputs.get("out").unwrap().dtype(), Dtype::F32);
    assert!(attend(Hostility::NoOutput).0.outputs.find("out").is_none());
}

#[test]
fn an_engine_that_changes_its_inputs_answers_right_and_leaves_every_input_changed() {
    let (reply, inputs) = attend(Hostility::ChangesInput);
    assert_eq!(reply, scene().run());
    let given = scene().attend_inputs();
    assert!(given.iter().all(|(name, tensor)| inputs.get(name).unwrap() != tensor));
}

#[test]
fn an_engine_that_claims_query_replication_still_gathers() {
    let (claimed, _) = attend(Hostility::ClaimsReplication);
    let honest = scene().run();
    assert_eq!(claimed.effective, honest.effective);
    assert_eq!((claimed.collectives[0], honest.collectives[0]), (2, 1));
}

#[test]
fn a_world_of_one_has_no_queries_to_replicate_and_none_are_claimed() {
    let scene = Scene::small(1).with(|s| s.configuration.query_replication = true);
    let effective = |engine: &dyn Engine| {
        let Answer::Done(mut session) = engine.open(&scene.configuration).unwrap() else {
            panic!("it opens")
        };
        step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs()).unwrap();
        step(session.as_mut(), &ATTEND, &mut scene.attend_inputs()).unwrap().effective
    };
    assert_eq!(effective(hostile(Hostility::ClaimsReplication).as_ref()), effective(&engine()));
}

#[test]
fn a_panicking_engine_panics_out_of_its_step_and_not_before() {
    let mut session = written(Hostility::Panics);
    let caught =
        catch_unwind(AssertUnwindSafe(|| session.step(&ATTEND, &mut scene().attend_inputs()).map(drop)));
    let text = *caught.unwrap_err().downcast::<&str>().unwrap();
    assert!(text.contains("deliberate"), "{text}");
}

#[test]
fn a_hanging_engine_does_not_answer() {
    let (sender, receiver) = mpsc::channel();
    // the thread ends with the process
    std::thread::spawn(move || {
        let mut session = written(Hostility::Hangs);
        sender.send("written").unwrap();
        let _ = session.step(&ATTEND, &mut scene().attend_inputs());
        sender.send("answered").unwrap();
    });
    assert_eq!(receiver.recv(), Ok("written"));
    assert!(receiver.recv_timeout(Duration::from_millis(200)).is_err());
}

#[test]
fn a_hostile_engine_declares_validates_and_refuses_what_the_healthy_one_does() {
    let healthy = engine();
    let settings = Settings::new().with("tensor_parallel_size", 8).with("decode_context_parallel_size", 3);
    let mut refused = scene().configuration;
    refused.blocks = 1 << 40;
    for kind in Hostility::ALL {
        let hostile = hostile(kind);
        assert_eq!(hostile.profile(), healthy.profile(), "{kind}");
        for rules in RuleSetName::ALL {
            assert_eq!(hostile.validate(rules, &settings), healthy.validate(rules, &settings), "{kind}");
        }
        let (Ok(Answer::Unsupported(seen)), Ok(Answer::Unsupported(why))) =
            (hostile.open(&refused).map(drop_session), healthy.open(&refused).map(drop_session))
        else {
            panic!("{kind} opens 2^40 blocks")
        };
        assert_eq!(seen, why);
    }
}

fn drop_session(answer: Answer<Box<dyn Session>>) -> Answer<()> {
    match answer {
        Answer::Done(_) => Answer::Done(()),
        Answer::Unsupported(why) => Answer::Unsupported(why),
    }
}

#[test]
fn hostilities_read_back_by_name() {
    for kind in Hostility::ALL {
        assert_eq!(kind.name().parse::<Hostility>(), Ok(kind));
    }
    assert!("polite".parse::<Hostility>().unwrap_err().contains("zero-output"));
}
