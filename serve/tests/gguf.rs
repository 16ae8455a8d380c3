//! Reading GGUF files: a written one comes back, and a damaged one is refused with a reason.

mod support;

use std::io::Write;

use shardcheck_serve::encoding::Encoding;
use shardcheck_serve::gguf::{Gguf, GgufError, Value};
use shardcheck_serve::kernels::Simd;
use shardcheck_serve::model::{Model, ModelError};
use shardcheck_serve::service::{ServiceError, load};
use shardcheck_serve::tokenizer::{Tokenizer, TokenizerError};
use support::tiny::{Tiny, WIDTH};

fn open(bytes: &[u8]) -> Result<Gguf, GgufError> {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("room");
    Gguf::open(file.path())
}

#[test]
fn metadata_and_tensors_come_back_as_they_were_written() {
    let mut tiny = Tiny::new(1);
    tiny.writer.bool("test.flag", true);
    tiny.writer.integers("test.list", &[-3, 7]);
    let gguf = open(&tiny.writer.bytes()).expect("a good file");
    assert_eq!(gguf.get("test.flag"), Some(&Value::Bool(true)));
    assert_eq!(gguf.integers("test.list").expect("integers"), [-3, 7]);
    assert_eq!(gguf.text("general.architecture").expect("a text"), "llama");
    for (name, rows) in &tiny.weights {
        let shape = if rows.len() == 1 { vec![rows[0].len()] } else { vec![rows[0].len(), rows.len()] };
        let tensor = gguf.tensor(name, &shape).expect("a tensor");
        let mut values = vec![0.0; rows.len() * rows[0].len()];
        tensor.encoding.decode(&tensor.bytes, &mut values);
        for (seen, written) in values.iter().zip(rows.concat()) {
            assert!((f64::from(*seen) - written).abs() < 1e-7, "{name}: {seen} {written}");
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_refused_and_never_panics() {
    let bytes = Tiny::new(1).writer.bytes();
    let path = |cut: usize| {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(&bytes[..cut]).expect("room");
        file
    };
    for cut in (0..bytes.len()).step_by(997).chain(1..64) {
        assert!(load(path(cut).path(), Simd::detect()).is_err(), "cut at {cut} of {}", bytes.len());
    }
    assert!(load(path(bytes.len()).path(), Simd::detect()).is_ok());
}

#[test]
fn a_damaged_header_is_refused_and_never_panics() {
    let bytes = Tiny::new(1).writer.bytes();
    for at in 0..3000 {
        for flip in [0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            // A flipped bit of a name or number can still be a file; the point is that nothing worse happens.
            if let Ok(gguf) = open(&damaged) {
                let _ = (Tokenizer::from_gguf(&gguf), Model::from_gguf(&gguf, Simd::detect()));
            }
        }
    }
    let mut other = bytes.clone();
    other[0] = b'X';
    assert!(matches!(open(&other), Err(GgufError::Magic(_))));
    other[..8].copy_from_slice(b"GGUF\x01\0\0\0");
    assert!(matches!(open(&other), Err(GgufError::Version(1))));
    let mut huge = bytes;
    huge[16..24].fill(0x7f); // number of metadata keys
    assert!(matches!(open(&huge), Err(GgufError::Truncated { what: "metadata count", .. })));
}

#[test]
fn an_encoding_that_is_not_here_is_named_with_those_that_are() {
    let mut tiny = Tiny::new(1);
    tiny.writer.raw_tensor("output_norm.weight", &[WIDTH], 12, vec![0; WIDTH]);
    let gguf = open(&tiny.writer.bytes()).expect("a good header");
    let error = Model::from_gguf(&gguf, Simd::detect()).err().expect("Q4_K is not decoded").to_string();
    assert!(
        error.contains("`output_norm.weight` is stored as Q4_K") && error.contains("F32, Q4_1, Q8_0"),
        "{error}"
    );
}

#[test]
fn what_a_model_lacks_is_named() {
    let model_error = |change: fn(&mut Tiny)| {
        let mut tiny = Tiny::new(1);
        change(&mut tiny);
        let gguf = open(&tiny.writer.bytes()).expect("a good header");
        Model::from_gguf(&gguf, Simd::detect()).err().expect("no model")
    };
    let error = model_error(|tiny| tiny.writer.text("general.architecture", "qwen2"));
    assert!(matches!(error, ModelError::Architecture(name) if name == "qwen2"));
    let error = model_error(|tiny| tiny.writer.remove("llama.block_count"));
    assert!(matches!(error, ModelError::Gguf(GgufError::MissingKey(key)) if key == "llama.block_count"));
    let error = model_error(|tiny| tiny.writer.u32("llama.block_count", 3));
    assert!(
        matches!(error, ModelError::Gguf(GgufError::MissingTensor(name)) if name == "blk.2.attn_norm.weight")
    );
    let error =
        model_error(|tiny| tiny.writer.tensor("output_norm.weight", &[32], Encoding::F32, vec![0; 128]));
    assert!(matches!(error, ModelError::Gguf(GgufError::Shape { found, .. }) if found == [32]));
    let error = model_error(|tiny| {
        let bytes = [f32::NAN; WIDTH].iter().flat_map(|x| x.to_le_bytes()).collect();
        tiny.writer.tensor("output_norm.weight", &[WIDTH], Encoding::F32, bytes);
    });
    assert!(matches!(error, ModelError::Gguf(GgufError::NotFinite(name)) if name == "output_norm.weight"));
    let error = model_error(|tiny| tiny.writer.text("llama.rope.scaling.type", "yarn"));
    assert!(matches!(error, ModelError::Unsupported(_)));
    let error = model_error(|tiny| tiny.writer.u32("llama.attention.head_count_kv", 3));
    assert!(matches!(error, ModelError::Unsupported(_)));
}

#[test]
fn a_tokenizer_of_another_family_is_refused() {
    for (key, value) in [("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "qwen2")] {
        let mut tiny = Tiny::new(1);
        tiny.writer.text(key, value);
        let gguf = open(&tiny.writer.bytes()).expect("a good header");
        let error = Tokenizer::from_gguf(&gguf).err().expect("another family");
        assert!(matches!(error, TokenizerError::Family { found, .. } if found == value));
    }
}

#[test]
fn a_missing_file_is_named() {
    let error = load("/nowhere/model.gguf".as_ref(), Simd::detect()).err().expect("no such file");
    assert!(matches!(error, ServiceError::Gguf(GgufError::Io { .. })));
    assert!(error.to_string().contains("/nowhere/model.gguf"));
}
