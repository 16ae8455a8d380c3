//! Recordings answer what was asked, in the order in which it was asked, and nothing else.

use super::*;
use shardcheck_cases::{Case, Family, SuiteName, rules, suite};
use shardcheck_engine::Tensor;
use shardcheck_formats::Dtype;

use crate::run::judge_case;
use crate::status::Status;

fn case(family: Family) -> Case {
    suite(SuiteName::EngineSmoke, 1).into_iter().find(|case| case.family == family).unwrap()
}

/// A recording of one step that was answered so.
pub(crate) fn of_step(answer: Answered<Reply>) -> Recording {
    let case = case(Family::Decode);
    let step = StepRecord {
        operation: case.operation().unwrap(),
        inputs: Tensors::new().with("a", Tensor::from_i32(&[2], &[1, 2])),
        inputs_after: None,
        answer,
    };
    let session = SessionRecord {
        configuration: case.configuration().unwrap(),
        opened: Answered::Done(()),
        steps: vec![step],
    };
    Recording {
        schema_version: RECORD_SCHEMA_VERSION,
        profile: shardcheck_cpu::engine().profile().clone(),
        sessions: vec![session],
        validations: Vec::new(),
    }
}

fn play(recording: Recording) -> Box<dyn Session> {
    let configuration = recording.sessions[0].configuration.clone();
    match Recorded::new(recording).unwrap().open(&configuration).unwrap() {
        Answer::Done(session) => session,
        Answer::Unsupported(why) => panic!("{why}"),
    }
}

#[test]
fn every_kind_of_answer_comes_back_as_it_was() {
    let reply =
        Reply { outputs: Tensors::new().with("out", Tensor::from_i32(&[1], &[3])), ..Reply::default() };
    let timeout = EngineError::Timeout { rank: Some(2), waiting_in: "all_gather".to_owned(), waited_s: 1.5 };
    let lost = EngineError::DeviceLost { text: "gone".to_owned() };
    let crash = EngineError::Crash { text: "why".to_owned() };
    for answer in [
        Ok(Answer::Done(reply)),
        Ok(Answer::Unsupported("no".to_owned())),
        Err(timeout),
        Err(lost),
        Err(crash),
    ] {
        let recording = of_step(Answered::of(&answer));
        let step = recording.sessions[0].steps[0].clone();
        let mut inputs = step.inputs.clone();
        assert_eq!(play(recording).step(&step.operation, &mut inputs), answer);
        assert_eq!(inputs, step.inputs);
    }
}

#[test]
fn an_input_that_the_engine_changed_is_changed_again() {
    let mut recording = of_step(Answered::Done(Reply::default()));
    let after = Tensors::new().with("a", Tensor::from_i32(&[2], &[9, 2]));
    recording.sessions[0].steps[0].inputs_after = Some(after.clone());
    let step = recording.sessions[0].steps[0].clone();
    let mut inputs = step.inputs;
    play(recording).step(&step.operation, &mut inputs).unwrap();
    assert_eq!(inputs, after);
}

#[test]
fn a_question_that_was_not_recorded_is_a_crash_that_says_what_to_do() {
    let recording = of_step(Answered::Done(Reply::default()));
    let step = recording.sessions[0].steps[0].clone();
    let says = |result: Result<Answer<Reply>, EngineError>| match result {
        Err(EngineError::Crash { text }) => text,
        other => panic!("{other:?}"),
    };
    let text = says(play(recording.clone()).step(&Operation::ReadCache, &mut step.inputs.clone()));
    assert!(text.contains("not in the recording") && text.contains("replay"), "{text}");
    let text = says(play(recording.clone()).step(&step.operation, &mut Tensors::new()));
    assert!(text.contains("a step with these inputs"), "{text}");
    let mut session = play(recording.clone());
    session.step(&step.operation, &mut step.inputs.clone()).unwrap();
    let text = says(session.step(&step.operation, &mut step.inputs.clone()));
    assert!(text.contains("this step"), "{text}");
    let mut other = recording.sessions[0].configuration.clone();
    other.blocks += 1;
    let error = Recorded::new(recording).unwrap().open(&other).err().unwrap().to_string();
    assert!(error.contains("this session"), "{error}");
}

#[test]
fn a_recording_of_another_version_is_refused() {
    let mut recording = of_step(Answered::Done(Reply::default()));
    recording.schema_version = 2;
    let why = Recorded::new(recording).err().unwrap();
    assert!(why.contains("schema version 2") && why.contains("reads 1"), "{why}");
}

#[test]
fn what_was_recorded_gives_the_same_findings_family_by_family() {
    let engine = shardcheck_cpu::engine();
    for family in Family::ALL {
        let Some(case) = suite(SuiteName::Gate, 1).into_iter().find(|case| case.family == family) else {
            panic!("the gate has no case of {family}")
        };
        let recorder = Recorder::new(&engine);
        let first = judge_case(&case, &recorder, &|_| true);
        assert!(matches!(first.status, Status::Pass | Status::Warn), "{family}: {:?}", first.checks);
        let again = judge_case(&case, &Recorded::new(recorder.recording()).unwrap(), &|_| true);
        assert_eq!(again.checks, first.checks, "{family}");
    }
}

#[test]
fn questions_about_settings_are_answered_once_each() {
    let engine = shardcheck_cpu::engine();
    let rule = &rules::rule_set(RuleSetName::Atom)[0];
    let recorder = Recorder::new(&engine);
    let asked = recorder.validate(rule.rules, &rule.settings).unwrap();
    let recorded = Recorded::new(recorder.recording()).unwrap();
    assert_eq!(recorded.validate(rule.rules, &rule.settings).unwrap(), asked);
    let error = recorded.validate(rule.rules, &rule.settings).unwrap_err().to_string();
    assert!(error.contains("this question about settings"), "{error}");
}

#[test]
fn the_recorder_copies_inputs_from_before_the_step() {
    let engine = shardcheck_cpu::hostile::hostile(shardcheck_cpu::hostile::Hostility::ChangesInput);
    let case = case(Family::MergeStates);
    let recorder = Recorder::new(engine.as_ref());
    judge_case(&case, &recorder, &|property| property.id == "inputs.unchanged");
    let recording = recorder.recording();
    let step = &recording.sessions[0].steps[0];
    let after = step.inputs_after.as_ref().expect("the inputs changed");
    let given = case.merge_inputs().unwrap().tensors;
    assert_eq!(step.inputs, given);
    assert!(after.iter().all(|(name, tensor)| given.get(name).unwrap() != tensor));
    assert_eq!(given.get("prefix_lse").unwrap().dtype(), Dtype::F32);
}
