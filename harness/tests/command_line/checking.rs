//! `check`: answers of the embedded engine, healthy and with known faults, as calls of somebody's own function.

use std::io::Write;
use std::process::Stdio;

use shardcheck::check::{ContractChoice, Header, Subject, pack};
use shardcheck::laboratory::Laboratory;
use shardcheck::material::Material;
use shardcheck_cases::Case;
use shardcheck_cpu::{CpuEngine, engine, fault};
use shardcheck_engine::{Engine, Operation, OperationKind, Tensor, Tensors};

use crate::program::Program;

/// The image of a case's step, as the embedded engine answers it with that fault.
fn image(id: &str, name: Option<&str>) -> Vec<u8> {
    let case: Case = id.parse().expect("a case id");
    let engine = name.map_or_else(engine, |name| CpuEngine::with_fault(fault(name).expect("a fault")));
    let material = Material::of(&case, engine.profile()).expect("a case that can be judged");
    let Material::Attention(attention) = &material else { panic!("{id} is no attention case") };
    let laboratory = Laboratory::new(&case, &engine, &material);
    let observed = laboratory.observed().expect("the engine answers");
    let inputs = attention.step_inputs();
    let mut header = Header::new(Subject::Verify);
    let configuration = attention.configuration();
    (header.world, header.interleave) = (configuration.dcp, configuration.interleave);
    header.softmax_scale = Some(f64::from(configuration.softmax_scale));
    header.kv_lora_rank = configuration.attention.is_mla().then(|| configuration.attention.value_dim());
    (header.k_scale, header.v_scale) = (f64::from(configuration.kv_scale), f64::from(configuration.kv_scale));
    if let Operation::Attend { mask } = attention.operation() {
        header.mask = mask;
    }
    let contract = engine.profile().operation(OperationKind::Verify).unwrap().contract.clone().unwrap();
    header.contract = ContractChoice::Full(Box::new(contract));
    let mut tensors = Tensors::new();
    for (name, tensor) in inputs.iter().filter(|(name, _)| *name != "w_uv") {
        tensors.insert(if name == "query" { "q" } else { name }, tensor.clone());
    }
    for (name, tensor) in attention.laid_out_caches().iter() {
        tensors.insert(if header.kv_lora_rank.is_some() { "kv_cache" } else { name }, tensor.clone());
    }
    for name in ["out", "lse"] {
        tensors.insert(name, observed.reply.outputs.get(name).expect("an output").clone());
    }
    pack(&header, &tensors).expect("an image")
}

const LATENT: &str =
    "verify/tiny-mla/tp3.dcp3.h2.s2.b16.n12.bf16.a2a.lo_hi.lat/60+3_0+1_40+2.seq/gaussian/11";
const GROUPED: &str = "decode/tiny-gqa/tp2.dcp2.h2.s1.b16.n8.bf16.a2a.lo_hi/70+1_50+1.seq/gaussian/12";

#[test]
fn what_the_embedded_engine_answers_passes() {
    let program = Program::new();
    for (index, id) in [LATENT, GROUPED].into_iter().enumerate() {
        let name = format!("{index}.safetensors");
        program.write(&name, image(id, None));
        let outcome = program.expect(0, &["check", &name]);
        assert!(outcome.out.contains("passes: "), "{}", outcome.out);
    }
}

#[test]
fn known_faults_of_the_embedded_engine_are_failed_and_named() {
    let program = Program::new();
    for (name, hypothesis) in [
        ("committed-prefix-rows", "committed-prefix-only"),
        ("no-mask-between-rows", "no-causal-mask"),
        ("length-ignores-interleave", "other-interleave"),
        ("ranks-averaged", "partials-averaged"),
        ("merge-in-base-2", "merge-base"),
        ("lse-base-2-as-natural", "merge-base"),
        ("merged-lse-of-the-first-rank", "lse-of-rank"),
        ("score-scale-twice", "softmax-scale-twice"),
    ] {
        program.write("faulty", image(LATENT, Some(name)));
        let outcome = program.expect(1, &["check", "--json", "faulty"]);
        let value: serde_json::Value = serde_json::from_str(&outcome.out).expect("one JSON value");
        assert_eq!(value["status"], "fail");
        assert_eq!(
            value["diagnosis"]["explanations"][0]["hypothesis"], hypothesis,
            "{name}: {}",
            value["text"]
        );
        assert!(value["text"].as_str().unwrap().starts_with("verify fails\n"), "{value}");
    }
}

#[test]
fn a_call_comes_from_standard_input_as_from_a_file() {
    let program = Program::new();
    let mut child = program
        .command(&["check", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().unwrap().write_all(&image(GROUPED, None)).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_file_that_is_no_call_ends_with_usage_and_what_would_be_one() {
    let program = Program::new();
    let missing = program.expect(2, &["check", "nowhere"]);
    assert!(missing.err.contains("failed to read the call nowhere"), "{}", missing.err);
    program.write("text", "no tensors");
    assert!(program.expect(2, &["check", "text"]).err.starts_with("error: "));
    let mut header = Header::new(Subject::Layout);
    header.world = 2;
    let tensors = Tensors::new()
        .with("seq_lens", Tensor::from_i32(&[1], &[3]))
        .with("local_lens", Tensor::from_i32(&[2, 2], &[2, 1, 0, 0]));
    program.write("layout", pack(&header, &tensors).unwrap());
    let outcome = program.expect(2, &["check", "layout"]);
    assert!(outcome.err.contains("local_lens has shape [2, 2]"), "{}", outcome.err);
}

#[test]
fn the_help_shows_a_header_and_the_tensors_of_each_check() {
    let program = Program::new();
    let outcome = program.expect(0, &["check", "--help"]);
    for part in ["\"schema_version\": 1", "partial_lse", "slot_mapping", "docs/check.md"] {
        assert!(outcome.out.contains(part), "{}", outcome.out);
    }
    assert!(program.expect(0, &["--help"]).out.contains("Judge one call"));
}
