//! The codecs against PyTorch 2.15 and ml_dtypes 0.6, bit for bit, on stored inputs (shared/data/fixtures, when present).

use std::path::Path;

use safetensors::SafeTensors;
use shardcheck_formats::{
    Dtype, Overflow, bf16_from_f32, decode, decode_f32, encode, encode_f32, f16_from_f32,
};

/// The fixture file's bytes, or `None` with a visible line.
fn fixture_bytes(test: &str) -> Option<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/fixtures/fp8.safetensors");
    match std::fs::read(&path) {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            eprintln!("SKIPPED: {test}: {}: {error}", path.display());
            None
        }
    }
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let words = view.data().chunks_exact(4);
    words.map(|word| f32::from_bits(u32::from_le_bytes(word.try_into().unwrap()))).collect()
}

fn bytes(tensors: &SafeTensors<'_>, name: &str) -> Vec<u8> {
    tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}")).data().to_vec()
}

fn halves(tensors: &SafeTensors<'_>, name: &str) -> Vec<u16> {
    bytes(tensors, name).chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

/// Compares an encoder with a column; NaN codes need only be NaN on both sides. Returns how many were equal in bits.
fn compare(dtype: Dtype, overflow: Overflow, inputs: &[f32], expected: &[u8], column: &str) -> usize {
    assert_eq!(inputs.len(), 20_000);
    assert_eq!(expected.len(), inputs.len());
    let mut equal = 0;
    for (&input, &code) in inputs.iter().zip(expected) {
        for ours in [encode_f32(dtype, input, overflow), encode(dtype, f64::from(input), overflow)] {
            let both_nan = decode(dtype, ours).is_nan() && decode(dtype, code.into()).is_nan();
            assert!(
                ours == u64::from(code) || both_nan,
                "{dtype} {column} {input:e}: {ours:#x} != {code:#x}"
            );
        }
        equal += usize::from(encode_f32(dtype, input, overflow) == u64::from(code));
    }
    equal
}

#[test]
fn every_fp8_code_decodes_as_pytorch_does() {
    let Some(file) = fixture_bytes("every_fp8_code_decodes_as_pytorch_does") else { return };
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for dtype in [Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2] {
        let expected = floats(&tensors, &format!("decode_{dtype}.value_bits"));
        assert_eq!(expected.len(), 256);
        for (code, value) in expected.into_iter().enumerate() {
            let ours = decode_f32(dtype, code as u64);
            assert!(
                ours.to_bits() == value.to_bits() || (ours.is_nan() && value.is_nan()),
                "{dtype} {code:#x}"
            );
        }
    }
}

#[test]
fn e4m3fn_saturates_as_pytorch_does_and_gives_nan_as_ml_dtypes_does() {
    let Some(file) = fixture_bytes("e4m3fn against pytorch and ml_dtypes") else { return };
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let inputs = floats(&tensors, "encode_e4m3fn.input_bits");
    let torch = bytes(&tensors, "encode_e4m3fn.torch_bytes");
    let ml_dtypes = bytes(&tensors, "encode_e4m3fn.mldtypes_bytes");
    assert!(compare(Dtype::E4m3fn, Overflow::Saturate, &inputs, &torch, "torch") > 19_900);
    assert!(compare(Dtype::E4m3fn, Overflow::NonFinite, &inputs, &ml_dtypes, "ml_dtypes") > 19_900);
    assert_ne!(torch, ml_dtypes, "the two must differ, or the policy is not tested");
}

#[test]
fn e4m3fnuz_and_e5m2_overflow_as_pytorch_and_ml_dtypes_do() {
    let Some(file) = fixture_bytes("e4m3fnuz and e5m2 against pytorch and ml_dtypes") else { return };
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for dtype in [Dtype::E4m3fnuz, Dtype::E5m2] {
        let inputs = floats(&tensors, &format!("encode_{dtype}.input_bits"));
        for column in ["torch", "mldtypes"] {
            let expected = bytes(&tensors, &format!("encode_{dtype}.{column}_bytes"));
            assert!(compare(dtype, Overflow::NonFinite, &inputs, &expected, column) > 19_900);
        }
    }
}

#[test]
fn bf16_and_f16_round_as_pytorch_does() {
    let Some(file) = fixture_bytes("bf16_and_f16_round_as_pytorch_does") else { return };
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for (dtype, fast) in [(Dtype::Bf16, bf16_from_f32 as fn(f32) -> u16), (Dtype::F16, f16_from_f32)] {
        let inputs = floats(&tensors, &format!("round_{dtype}.input_bits"));
        let expected = halves(&tensors, &format!("round_{dtype}.torch_bits"));
        assert_eq!((inputs.len(), expected.len()), (20_000, 20_000));
        for (&input, &code) in inputs.iter().zip(&expected) {
            if input.is_nan() {
                assert!(decode(dtype, fast(input).into()).is_nan() && decode(dtype, code.into()).is_nan());
                continue;
            }
            assert_eq!(fast(input), code, "{dtype} {input:e}");
            assert_eq!(
                encode(dtype, f64::from(input), Overflow::NonFinite),
                u64::from(code),
                "{dtype} {input:e}"
            );
        }
    }
}
