//! Stored cases read back whole: every type, every layout in memory, every bit.

use super::*;
use proptest::prelude::*;
use safetensors::{Dtype as StoredDtype, tensor::TensorView};
use shardcheck_engine::{EffectivePath, Reply};

use crate::recording::{Answered, SessionRecord, StepRecord};
use crate::sample;

/// A recording of one session with these steps.
fn recording(steps: Vec<StepRecord>) -> Recording {
    let case = sample::case();
    Recording {
        schema_version: crate::recording::RECORD_SCHEMA_VERSION,
        profile: shardcheck_engine::Engine::profile(&shardcheck_cpu::engine()).clone(),
        sessions: vec![SessionRecord {
            configuration: case.configuration().unwrap(),
            opened: Answered::Done(()),
            steps,
        }],
        validations: Vec::new(),
    }
}

fn step(inputs: Tensors, answer: Answered<Reply>) -> StepRecord {
    StepRecord { operation: sample::case().operation().unwrap(), inputs, inputs_after: None, answer }
}

fn round_trip(recording: &Recording) -> Recording {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &sample::case(), recording, &sample::skipped(sample::CASE_ID)).unwrap();
    let (case, read) = read(folder.path()).unwrap();
    assert_eq!(case, sample::case());
    read
}

#[test]
fn every_element_type_comes_back_with_every_bit() {
    let mut inputs = Tensors::new();
    for dtype in Dtype::ALL {
        let width = 8 * dtype.size_bytes();
        let codes: Vec<u64> =
            (0..6u64).map(|i| (0x9e37_79b9_7f4a_7c15u64.wrapping_mul(i + 1)) >> (64 - width)).collect();
        inputs.insert(dtype.name(), Tensor::from_codes(dtype, &[2, 3], &codes));
    }
    let recording = recording(vec![step(inputs, Answered::Done(Reply::default()))]);
    assert_eq!(round_trip(&recording), recording);
}

#[test]
fn nan_payloads_infinities_and_both_zeros_survive() {
    let codes = [0x7fc0_0001, 0xffc1_2345, 0x7f80_0000, 0xff80_0000, 0x8000_0000, 0, 1];
    let tensor = Tensor::from_codes(Dtype::F32, &[7], &codes);
    let reply = Reply {
        outputs: Tensors::new().with("lse", tensor.clone()),
        effective: EffectivePath::new().with("route", "verify"),
        collectives: vec![3, 3],
    };
    let recording = recording(vec![step(Tensors::new().with("a", tensor), Answered::Done(reply))]);
    let read = round_trip(&recording);
    assert_eq!(read, recording);
    assert_eq!(read.sessions[0].steps[0].inputs.get("a").unwrap().to_codes(), codes);
}

#[test]
fn strided_views_keep_their_strides_and_what_lies_in_the_gaps() {
    let bytes: Vec<u8> = (0..96).collect();
    // heads outermost in memory, and a slice of wider rows
    let head_major = Tensor::view(Dtype::Bf16, vec![4, 3, 2], vec![2, 8, 1], bytes[..48].to_vec()).unwrap();
    let sliced = Tensor::view(Dtype::F32, vec![3, 5], vec![8, 1], bytes.clone()).unwrap();
    let repeated = Tensor::view(Dtype::I32, vec![4, 2], vec![0, 1], bytes[..8].to_vec()).unwrap();
    let inputs = Tensors::new()
        .with("head_major", head_major.clone())
        .with("sliced", sliced.clone())
        .with("repeated", repeated.clone());
    let mut changed =
        step(inputs.clone(), Answered::Done(Reply { outputs: inputs.clone(), ..Reply::default() }));
    changed.inputs_after = Some(inputs);
    let recording = recording(vec![changed]);
    let read = round_trip(&recording);
    assert_eq!(read, recording);
    let stored = read.sessions[0].steps[0].inputs_after.as_ref().unwrap();
    for (name, tensor) in [("head_major", head_major), ("sliced", sliced), ("repeated", repeated)] {
        let found = stored.get(name).unwrap();
        assert_eq!((found.strides(), found.bytes()), (tensor.strides(), tensor.bytes()), "{name}");
        assert!(!found.is_contiguous());
    }
}

#[test]
fn a_slice_at_the_start_of_a_longer_buffer_keeps_the_rest_of_it() {
    let bytes: Vec<u8> = (0..16).collect();
    let slice = Tensor::view(Dtype::I32, vec![3], vec![1], bytes).unwrap();
    assert!(slice.is_contiguous());
    let recording =
        recording(vec![step(Tensors::new().with("slice", slice), Answered::Done(Reply::default()))]);
    assert_eq!(round_trip(&recording), recording);
}

#[test]
fn tensors_without_elements_and_without_axes_come_back() {
    let inputs = Tensors::new()
        .with("none", Tensor::from_i32(&[0], &[]))
        .with("no-rows", Tensor::from_f32(Dtype::Bf16, &[3, 0, 4], &[]))
        .with("scalar", Tensor::from_i64(&[], &[-7]));
    let recording = recording(vec![step(inputs, Answered::Done(Reply::default()))]);
    assert_eq!(round_trip(&recording), recording);
}

#[test]
fn every_kind_of_answer_comes_back() {
    let timeout = Answered::Timeout { rank: Some(3), waiting_in: "all_gather".to_owned(), waited_s: 0.25 };
    let answers = [
        Answered::Unsupported("no".to_owned()),
        Answered::Crash("panicked: \"…\"\n".to_owned()),
        timeout,
        Answered::DeviceLost("gone".to_owned()),
        Answered::Input("misfit".to_owned()),
    ];
    let recording = recording(answers.into_iter().map(|answer| step(Tensors::new(), answer)).collect());
    assert_eq!(round_trip(&recording), recording);
}

#[test]
fn a_recording_without_sessions_comes_back() {
    let mut empty = recording(Vec::new());
    empty.sessions.clear();
    assert_eq!(round_trip(&empty), empty);
}

#[test]
fn the_folder_holds_what_a_person_can_read() {
    let folder = tempfile::tempdir().unwrap();
    let result = sample::failed(sample::CASE_ID, sample::failure());
    write(folder.path(), &sample::case(), &recording(Vec::new()), &result).unwrap();
    let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(Case::from_json(&text("case.json")).unwrap(), sample::case());
    assert_eq!(serde_json::from_str::<CaseResult>(&text("findings.json")).unwrap(), result);
    let document: Value = serde_json::from_str(&text("recording.json")).unwrap();
    assert_eq!(document["tensors"], "tensors.safetensors");
    assert_eq!(document["recording"]["schema_version"], 1);
}

#[test]
fn damage_is_told_by_file() {
    let tensor = Tensor::from_f32(Dtype::F32, &[4], &[1.0, 2.0, 3.0, 4.0]);
    let whole = recording(vec![step(Tensors::new().with("a", tensor), Answered::Done(Reply::default()))]);
    let damaged = |spoil: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &sample::case(), &whole, &sample::skipped(sample::CASE_ID)).unwrap();
        spoil(folder.path());
        read(folder.path()).unwrap_err().to_string()
    };
    let cut = damaged(&|folder| {
        let path = folder.join("tensors.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    });
    assert!(cut.contains("tensors.safetensors is damaged"), "{cut}");
    let other = damaged(&|folder| {
        std::fs::write(
            folder.join("tensors.safetensors"),
            safetensors::serialize([("b", view())], None).unwrap(),
        )
        .unwrap();
    });
    assert!(
        other.contains("recording.json is damaged") && other.contains("session0.step0.input.a"),
        "{other}"
    );
    let gone = damaged(&|folder| std::fs::remove_file(folder.join("case.json")).unwrap());
    assert!(gone.contains("case.json"), "{gone}");
    let empty = damaged(&|folder| std::fs::write(folder.join("recording.json"), "").unwrap());
    assert!(empty.contains("recording.json is damaged") && empty.contains("shardcheck replay"), "{empty}");
}

fn view() -> TensorView<'static> {
    TensorView::new(StoredDtype::U8, vec![1], &[0]).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_view_of_any_bytes_comes_back(
        shape in proptest::collection::vec(1usize..4, 1..4),
        strides in proptest::collection::vec(0usize..6, 3),
        bytes in proptest::collection::vec(any::<u8>(), 200),
    ) {
        let strides = strides[..shape.len()].to_vec();
        let tensor = Tensor::view(Dtype::F32, shape, strides, bytes).unwrap();
        let recording = recording(vec![step(Tensors::new().with("t", tensor), Answered::Done(Reply::default()))]);
        prop_assert_eq!(round_trip(&recording), recording);
    }
}
