//! Exports answered by the embedded engine and by its faults, and spoilt in every way.

use shardcheck_cases::{Case, Family, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, fault};
use shardcheck_engine::{Answer, Engine, Tensors, archive};

use super::plan::pass_of;
use super::*;
use crate::event::CaseResult;
use crate::finding::Finding;
use crate::status::{Exit, Status};
use crate::store::CASE_FILE;

fn cases(wanted: &[Family]) -> Vec<Case> {
    suite(SuiteName::EngineSmoke, 1).into_iter().filter(|case| wanted.contains(&case.family)).collect()
}

fn exported(cases: &[Case], profile: &Profile) -> (tempfile::TempDir, Manifest) {
    let folder = tempfile::tempdir().unwrap();
    let manifest = export(folder.path(), cases, "engine-smoke", 1, profile).unwrap();
    (folder, manifest)
}

/// Plays what the files ask on an engine and writes what it answers, reading nothing but the files.
fn answer(folder: &Path, engine: &dyn Engine) {
    for entry in read_manifest(folder).unwrap().cases {
        let folder = folder.join(entry.folder);
        let request: Request =
            serde_json::from_str(&std::fs::read_to_string(folder.join(REQUEST_FILE)).unwrap()).unwrap();
        let Answer::Done(mut session) = engine.open(&request.configuration).unwrap() else {
            panic!("it opens")
        };
        for step in request.steps {
            let folder = folder.join(step.folder);
            let image = std::fs::read(folder.join(INPUTS_FILE)).unwrap();
            let mut inputs = archive::unpack(&image, &Default::default()).unwrap();
            let names: Vec<_> = step.inputs.iter().map(|tensor| tensor.name.as_str()).collect();
            assert_eq!(inputs.iter().map(|(name, _)| name).collect::<Vec<_>>(), names);
            let Answer::Done(reply) = session.step(&step.operation, &mut inputs).unwrap() else {
                panic!("it does")
            };
            for wanted in step.outputs.iter().filter(|wanted| wanted.required) {
                reply
                    .outputs
                    .get(&wanted.name)
                    .unwrap()
                    .expect(&wanted.name, wanted.dtype, &wanted.shape)
                    .unwrap();
            }
            put_outputs(&folder, &reply.outputs);
            let said =
                FileReply { effective: reply.effective, collectives: reply.collectives, unsupported: None };
            std::fs::write(folder.join(REPLY_FILE), serde_json::to_string(&said).unwrap()).unwrap();
        }
    }
}

fn put_outputs(folder: &Path, outputs: &Tensors) {
    std::fs::write(folder.join(OUTPUTS_FILE), archive::pack(outputs.iter()).unwrap().0).unwrap();
}

fn words(result: &CaseResult) -> String {
    serde_json::to_string(result).unwrap()
}

#[test]
fn a_conforming_engine_passes_by_files_in_every_family_that_files_can_ask() {
    let engine = shardcheck_cpu::engine();
    let all = suite(SuiteName::EngineSmoke, 1);
    let (folder, manifest) = exported(&all, engine.profile());
    assert_eq!((manifest.cases.len(), manifest.left_out.len()), (all.len(), 0));
    answer(folder.path(), &engine);
    let decided = decide(folder.path()).unwrap();
    assert_eq!((decided.exit(), decided.outstanding), (Exit::Passed, 0));
    for result in &decided.results {
        assert_eq!(result.status, Status::Pass, "{}", words(result));
    }
    // the property that gives a family its name is judged, whatever else is not
    for property in [
        "decode.output",
        "verify.output",
        "draft.output",
        "context.output",
        "merge.output",
        "states.output",
        "write.round-trip",
        "layout.slots",
        "sequence.output",
        "sequence.untouched",
        "attend.collectives",
        "dispatch.path",
    ] {
        let judged = decided
            .results
            .iter()
            .flat_map(|result| &result.checks)
            .filter(|check| check.property == property);
        assert!(
            judged.clone().count() > 0 && judged.clone().all(|c| c.finding.status() == Status::Pass),
            "{property}"
        );
    }
    let other = decided
        .results
        .iter()
        .flat_map(|result| &result.checks)
        .find(|check| check.property == "equal.repeat");
    assert!(matches!(&other.unwrap().finding, Finding::Unsupported(why) if why.contains("another run")));
}

#[test]
fn wrong_answers_fail_by_files_as_they_do_in_a_run() {
    for (name, family, property) in [
        ("nan-partial-not-scrubbed", Family::MergePartials, "merge.output"),
        ("two-empty-states-give-nan", Family::MergeStates, "states.all-empty"),
        ("committed-prefix-rows", Family::Verify, "verify.output"),
    ] {
        let engine = CpuEngine::with_fault(fault(name).unwrap());
        let (folder, _) = exported(&cases(&[family]), engine.profile());
        answer(folder.path(), &engine);
        let decided = decide(folder.path()).unwrap();
        assert_eq!(decided.exit(), Exit::Failed, "{name}");
        let mut failing = decided.results.iter().flat_map(CaseResult::failures);
        assert!(failing.any(|check| check.property == property), "{name}");
    }
}

#[test]
fn outputs_that_are_still_to_come_are_named_and_leave_the_rest_decided() {
    let engine = shardcheck_cpu::engine();
    let (folder, manifest) = exported(&cases(&[Family::Decode]), engine.profile());
    let none = decide(folder.path()).unwrap();
    assert_eq!((none.exit(), none.outstanding), (Exit::RerunOutstanding, manifest.cases.len()));
    let reason = none.results[0].reason.clone().unwrap();
    let first = folder.path().join(&manifest.cases[0].folder);
    let text = std::fs::read_to_string(first.join(REQUEST_FILE)).unwrap();
    let last = serde_json::from_str::<Request>(&text).unwrap().steps.pop().unwrap().folder;
    assert!(reason.ends_with(&format!("/{last}/outputs.safetensors")), "a write needs no file: {reason}");
    assert!(!reason.contains("step0"), "{reason}");
    answer(folder.path(), &engine);
    std::fs::remove_file(first.join(last).join(OUTPUTS_FILE)).unwrap();
    let most = decide(folder.path()).unwrap();
    assert_eq!((most.exit(), most.outstanding), (Exit::RerunOutstanding, 1));
    assert_eq!(
        most.results.iter().filter(|result| result.status == Status::Pass).count(),
        manifest.cases.len() - 1
    );
}

#[test]
fn spoilt_outputs_are_verdicts_with_the_reason_and_never_a_panic() {
    let engine = shardcheck_cpu::engine();
    let (folder, manifest) = exported(&cases(&[Family::MergeStates])[..1], engine.profile());
    answer(folder.path(), &engine);
    let step = folder.path().join(&manifest.cases[0].folder).join("step0");
    let good = std::fs::read(step.join(OUTPUTS_FILE)).unwrap();
    let tensors = archive::unpack(&good, &Default::default()).unwrap();
    let out = tensors.get("out").unwrap();
    let verdict = || decide(folder.path()).unwrap().results.remove(0);
    let mut without = tensors.clone();
    without.remove("out");
    let flat = shardcheck_engine::Tensor::new(out.dtype(), vec![out.len()], out.bytes().to_vec()).unwrap();
    let wide = shardcheck_engine::Tensor::from_i64(out.shape(), &vec![0; out.len()]);
    for (spoilt, part) in [
        (without.clone(), "\\\"out\\\" is missing"),
        (without.clone().with("out", flat), "has shape"),
        (without.with("out", wide), "has dtype i64"),
    ] {
        put_outputs(&step, &spoilt);
        let result = verdict();
        assert!(result.status == Status::Fail && words(&result).contains(part), "{part}: {}", words(&result));
    }
    for length in [0, 7, 40, good.len() - 1] {
        std::fs::write(step.join(OUTPUTS_FILE), &good[..length]).unwrap();
        let result = verdict();
        assert_eq!(result.status, Status::Crash, "{length}: {}", words(&result));
        assert!(words(&result).contains("step0/outputs.safetensors can't be read"), "{}", words(&result));
    }
    std::fs::write(step.join(OUTPUTS_FILE), &good).unwrap();
    std::fs::write(step.join(REPLY_FILE), "{\"efective\": {}}").unwrap();
    assert!(verdict().status == Status::Crash && words(&verdict()).contains("efective"));
    std::fs::write(step.join(REPLY_FILE), "{\"unsupported\": \"no such kernel\"}").unwrap();
    assert!(verdict().status == Status::Unsupported && words(&verdict()).contains("no such kernel"));
    std::fs::remove_file(step.join(REPLY_FILE)).unwrap();
    assert_eq!(verdict().status, Status::Pass);
}

#[test]
fn no_flipped_bit_of_an_answer_makes_a_panic_or_an_error() {
    let engine = shardcheck_cpu::engine();
    let (folder, manifest) = exported(&cases(&[Family::MergePartials])[..1], engine.profile());
    answer(folder.path(), &engine);
    let step = folder.path().join(&manifest.cases[0].folder).join("step0");
    for file in [OUTPUTS_FILE, REPLY_FILE] {
        let good = std::fs::read(step.join(file)).unwrap();
        let mut noticed = 0;
        for place in (0..good.len()).step_by(3) {
            let mut bytes = good.clone();
            bytes[place] ^= 1 << (place % 8);
            std::fs::write(step.join(file), bytes).unwrap();
            let status = decide(folder.path()).unwrap().results[0].status;
            assert_ne!(status, Status::HarnessError, "{file}, byte {place}");
            noticed += usize::from(status.is_failure());
        }
        assert!(noticed > good.len() / 30, "{file}: {noticed} of {}", good.len());
        std::fs::write(step.join(file), good).unwrap();
    }
    assert_eq!(decide(folder.path()).unwrap().results[0].status, Status::Pass);
}

#[test]
fn altered_questions_are_refused_with_the_file() {
    let (folder, manifest) = exported(&cases(&[Family::MergeStates])[..2], &default_profile());
    let first = folder.path().join(&manifest.cases[0].folder);
    let spoil = |file: &Path, change: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let good = std::fs::read(file).unwrap();
        std::fs::write(file, change(good.clone())).unwrap();
        let error = decide(folder.path()).unwrap_err().to_string();
        std::fs::write(file, good).unwrap();
        error
    };
    let flip = |mut bytes: Vec<u8>| {
        *bytes.last_mut().unwrap() ^= 1;
        bytes
    };
    assert!(spoil(&first.join("step0/inputs.safetensors"), &flip).contains("inputs.safetensors was altered"));
    let other = std::fs::read(folder.path().join(&manifest.cases[1].folder).join(CASE_FILE)).unwrap();
    assert!(spoil(&first.join(CASE_FILE), &|_| other.clone()).contains("it is the case"));
    let replace = |from: &'static str, to: &'static str| {
        move |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().replacen(from, to, 1).into_bytes()
    };
    let path = folder.path().join(MANIFEST_FILE);
    assert!(
        spoil(&path, &replace("\"schema_version\": 1", "\"schema_version\": 9")).contains("schema version 9")
    );
    assert!(spoil(&path, &replace("\"folder\": \"", "\"folder\": \"../")).contains("no folder beside it"));
    assert!(spoil(&path, &replace("\"kexp\": 2.0", "\"kexp\": 1e9")).contains("kexp"));
    assert_eq!(decide(folder.path()).unwrap().exit(), Exit::RerunOutstanding);
}

#[test]
fn a_folder_that_holds_something_is_not_written_into_and_rules_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("notes"), "mine").unwrap();
    let error = export(folder.path(), &[], "engine-smoke", 1, &default_profile()).unwrap_err();
    assert!(matches!(error, ExportError::NotEmpty { .. }));
    let rules = suite(SuiteName::Gate, 1).into_iter().find(|case| case.family == Family::Rules).unwrap();
    let (_folder, manifest) = exported(std::slice::from_ref(&rules), &default_profile());
    assert!(manifest.cases.is_empty() && manifest.left_out[0].reason.contains("settings"));
}

#[test]
fn the_profile_decides_the_type_of_the_output_that_is_asked_for() {
    let mut profile = default_profile();
    profile.operations.get_mut(&OperationKind::Decode).unwrap().contract.as_mut().unwrap().output =
        Dtype::F32;
    let case = &cases(&[Family::Decode])[0];
    for (profile, dtype) in [(&profile, Dtype::F32), (&default_profile(), Dtype::Bf16)] {
        let pass = pass_of(case, profile).unwrap();
        let out =
            pass.steps.last().unwrap().request.outputs.iter().find(|output| output.name == "out").unwrap();
        assert_eq!((out.dtype, out.required), (dtype, true));
    }
    profile.operations.remove(&OperationKind::Decode);
    assert!(pass_of(case, &profile).is_err_and(|why| why.contains("decode")));
}

#[test]
fn every_file_of_an_export_survives_a_round_trip() {
    let (folder, manifest) = exported(&cases(&[Family::Write])[..1], &default_profile());
    assert_eq!(read_manifest(folder.path()).unwrap(), manifest);
    let text =
        std::fs::read_to_string(folder.path().join(&manifest.cases[0].folder).join(REQUEST_FILE)).unwrap();
    let request: Request = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::from_str::<Request>(&serde_json::to_string(&request).unwrap()).unwrap(), request);
    let kinds: Vec<_> = request.steps.iter().map(|step| step.kind).collect();
    assert!(
        kinds.ends_with(&[OperationKind::ReadCache, OperationKind::WriteKv, OperationKind::ReadCache]),
        "{kinds:?}"
    );
}
