//! Outputs that nobody wrote: the pattern that buffers are handed out with, found again in a reply.

use shardcheck_engine::{OperationKind, Tensor, Tensors};
use shardcheck_formats::Dtype;

/// The code that an output buffer is full of before anything is written: a NaN that no arithmetic makes, an integer that is no
/// length and no slot. `None` for types where any code may be data.
pub fn pattern(dtype: Dtype) -> Option<u64> {
    match dtype {
        Dtype::F64 => Some(0x7FF5_A5A5_A5A5_A5A5),
        Dtype::F32 => Some(0x7FA5_A5A5),
        Dtype::F16 => Some(0x7DA5),
        Dtype::Bf16 => Some(0x7FA5),
        Dtype::I64 => Some(0xA5A5_A5A5_A5A5_A5A5),
        Dtype::I32 => Some(0xA5A5_A5A5),
        Dtype::E4m3fn | Dtype::E4m3fnuz | Dtype::E5m2 | Dtype::U16 | Dtype::U8 => None,
    }
}

/// Says which outputs were not written: how many elements of which tensor, and the first. `None` when all were.
///
/// Codes of caches and of LSEs under test are data whatever they are, so those operations are exempt.
pub fn unwritten_elements(kind: OperationKind, outputs: &Tensors) -> Option<String> {
    if matches!(kind, OperationKind::PackLse | OperationKind::ReadCache) {
        return None;
    }
    let said: Vec<String> = outputs.iter().filter_map(|(name, tensor)| unwritten(name, tensor)).collect();
    (!said.is_empty()).then(|| said.join("; "))
}

fn unwritten(name: &str, tensor: &Tensor) -> Option<String> {
    let code = pattern(tensor.dtype())?;
    let size = tensor.dtype().size_bytes();
    let bytes = code.to_le_bytes();
    let mut found = tensor.bytes().chunks_exact(size).enumerate().filter(|(_, word)| **word == bytes[..size]);
    let (first, _) = found.next()?;
    let count = 1 + found.count();
    Some(format!(
        "{count} of {} elements of {name} were never written, the first at {:?}",
        tensor.len(),
        place(first, tensor.shape())
    ))
}

fn place(flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = flat;
    let mut place = vec![0; shape.len()];
    for axis in (0..shape.len()).rev() {
        place[axis] = rest % shape[axis].max(1);
        rest /= shape[axis].max(1);
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::decode;

    #[test]
    fn patterns_of_floats_are_not_the_nan_that_arithmetic_makes() {
        for dtype in [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let code = pattern(dtype).unwrap();
            assert!(decode(dtype, code).is_nan(), "{dtype}");
            let made = Tensor::from_f32(dtype, &[1], &[f32::NAN]).to_codes()[0];
            assert_ne!(code, made, "{dtype}");
        }
    }

    #[test]
    fn a_row_that_nobody_wrote_is_counted_and_placed() {
        let code = pattern(Dtype::Bf16).unwrap();
        let out = Tensor::from_codes(Dtype::Bf16, &[2, 2, 2], &[0, 1, 2, 3, code, code, 6, 7]);
        let outputs = Tensors::new().with("out", out).with("lse", Tensor::from_f32(Dtype::F32, &[1], &[0.0]));
        let said = unwritten_elements(OperationKind::Decode, &outputs).unwrap();
        assert_eq!(said, "2 of 8 elements of out were never written, the first at [1, 0, 0]");
        assert_eq!(unwritten_elements(OperationKind::PackLse, &outputs), None);
    }

    #[test]
    fn written_outputs_say_nothing_not_even_nan() {
        let outputs = Tensors::new()
            .with("out", Tensor::from_f32(Dtype::Bf16, &[2], &[f32::NAN, 1.0]))
            .with("slots", Tensor::from_i64(&[2], &[-1, 7]));
        assert_eq!(unwritten_elements(OperationKind::Decode, &outputs), None);
    }
}
