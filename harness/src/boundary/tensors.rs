//! Small changes of a tensor that leave its dtype and shape as they were: parts exchanged, numbers changed.

use shardcheck_engine::Tensor;
use shardcheck_formats::Dtype;

/// Exchanges parts `a` and `b` along an axis. A tensor without them comes back as it was.
pub fn exchanged(tensor: &Tensor, axis: usize, a: usize, b: usize) -> Tensor {
    let shape = tensor.shape();
    if axis >= shape.len() || a.max(b) >= shape[axis] {
        return tensor.clone();
    }
    let inner: usize = shape[axis + 1..].iter().product();
    let mut codes = tensor.to_codes();
    for block in codes.chunks_exact_mut((shape[axis] * inner).max(1)) {
        for place in 0..inner {
            block.swap(a * inner + place, b * inner + place);
        }
    }
    Tensor::from_codes(tensor.dtype(), shape, &codes)
}

/// Moves every part along an axis one place on, the last one to the front.
pub fn rolled(tensor: &Tensor, axis: usize) -> Tensor {
    let shape = tensor.shape();
    if axis >= shape.len() {
        return tensor.clone();
    }
    let inner: usize = shape[axis + 1..].iter().product();
    let mut codes = tensor.to_codes();
    codes.chunks_exact_mut((shape[axis] * inner).max(1)).for_each(|block| block.rotate_right(inner));
    Tensor::from_codes(tensor.dtype(), shape, &codes)
}

/// Every number of an f32 tensor changed; other formats come back as they were.
pub fn mapped(tensor: &Tensor, change: fn(f32) -> f32) -> Tensor {
    if tensor.dtype() != Dtype::F32 {
        return tensor.clone();
    }
    let values: Vec<f32> = tensor.to_f32().into_iter().map(change).collect();
    Tensor::from_f32(Dtype::F32, tensor.shape(), &values)
}

/// Integers changed by their place: `(place, all of them)`. Floats come back as they were.
pub fn counted(tensor: &Tensor, change: impl Fn(usize, &[i64]) -> i64) -> Tensor {
    if !matches!(tensor.dtype(), Dtype::I32 | Dtype::I64) {
        return tensor.clone();
    }
    let values = tensor.to_i64();
    let changed: Vec<i64> = (0..values.len()).map(|place| change(place, &values)).collect();
    if tensor.dtype() == Dtype::I64 {
        return Tensor::from_i64(tensor.shape(), &changed);
    }
    let narrow: Vec<i32> = changed.into_iter().map(|value| value as i32).collect();
    Tensor::from_i32(tensor.shape(), &narrow)
}

/// The rows of an integer tensor of two axes changed, each as a whole. Floats come back as they were.
pub fn counted_rows(tensor: &Tensor, change: impl Fn(&[i64]) -> Vec<i64>) -> Tensor {
    let width = tensor.shape().last().copied().unwrap_or(1).max(1);
    let changed: Vec<i64> = match tensor.dtype() {
        Dtype::I32 | Dtype::I64 => tensor.to_i64().chunks(width).flat_map(change).collect(),
        _ => return tensor.clone(),
    };
    counted(tensor, |at, _| changed[at])
}

/// Zeros of the same dtype and shape.
pub fn zeros(tensor: &Tensor) -> Tensor {
    Tensor::from_codes(tensor.dtype(), tensor.shape(), &vec![0; tensor.len()])
}

/// Zeros in the last part along an axis.
pub fn without_last(tensor: &Tensor, axis: usize) -> Tensor {
    let shape = tensor.shape();
    if axis >= shape.len() || tensor.is_empty() {
        return tensor.clone();
    }
    let inner: usize = shape[axis + 1..].iter().product();
    let mut codes = tensor.to_codes();
    for block in codes.chunks_exact_mut(shape[axis] * inner) {
        let start = block.len() - inner;
        block[start..].fill(0);
    }
    Tensor::from_codes(tensor.dtype(), shape, &codes)
}

/// The same numbers in another format, so that the bytes are read wrongly by who expects the old one: the shape and the
/// dtype that is declared stay.
pub fn reinterpreted(tensor: &Tensor, really: Dtype) -> Tensor {
    let other = Tensor::from_f32(really, tensor.shape(), &tensor.to_f32());
    Tensor::from_codes(tensor.dtype(), tensor.shape(), &other.to_codes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers() -> Tensor {
        Tensor::from_f32(Dtype::F32, &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    }

    #[test]
    fn parts_are_exchanged_along_the_axis_that_is_named() {
        assert_eq!(exchanged(&numbers(), 0, 0, 1).to_f32(), [4.0, 5.0, 6.0, 1.0, 2.0, 3.0]);
        assert_eq!(exchanged(&numbers(), 1, 0, 2).to_f32(), [3.0, 2.0, 1.0, 6.0, 5.0, 4.0]);
    }

    #[test]
    fn a_part_or_an_axis_that_is_not_there_changes_nothing() {
        assert_eq!(exchanged(&numbers(), 1, 0, 3), numbers());
        assert_eq!(exchanged(&numbers(), 2, 0, 1), numbers());
        assert_eq!(rolled(&numbers(), 5), numbers());
    }

    #[test]
    fn rolling_moves_the_last_part_to_the_front() {
        assert_eq!(rolled(&numbers(), 1).to_f32(), [3.0, 1.0, 2.0, 6.0, 4.0, 5.0]);
        assert_eq!(rolled(&numbers(), 0).to_f32(), [4.0, 5.0, 6.0, 1.0, 2.0, 3.0]);
    }

    #[test]
    fn integers_are_changed_and_floats_are_left_alone() {
        let lens = Tensor::from_i32(&[3], &[5, 0, 7]);
        assert_eq!(counted(&lens, |place, all| all[place] + 1).to_i64(), [6, 1, 8]);
        assert_eq!(counted(&numbers(), |_, _| 0), numbers());
        assert_eq!(mapped(&lens, |x| x * 2.0), lens);
    }

    #[test]
    fn a_last_part_is_blanked_along_the_axis_that_is_named() {
        assert_eq!(without_last(&numbers(), 0).to_f32(), [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]);
        assert_eq!(without_last(&numbers(), 1).to_f32(), [1.0, 2.0, 0.0, 4.0, 5.0, 0.0]);
        let empty = Tensor::from_f32(Dtype::F32, &[0, 3], &[]);
        assert_eq!((without_last(&numbers(), 2), without_last(&empty, 0)), (numbers(), empty));
        assert_eq!(zeros(&numbers()).to_f32(), [0.0; 6]);
    }

    #[test]
    fn rows_of_integers_are_changed_as_a_whole() {
        let lists = Tensor::from_i32(&[2, 2], &[5, 3, 7, -1]);
        let reversed = counted_rows(&lists, |row| row.iter().rev().copied().collect());
        assert_eq!(reversed.to_i64(), [3, 5, -1, 7]);
        assert_eq!(counted_rows(&numbers(), |row| row.to_vec()), numbers());
    }

    #[test]
    fn another_format_keeps_the_declared_dtype_and_changes_the_values() {
        let query = Tensor::from_f32(Dtype::Bf16, &[2], &[1.0, -2.0]);
        let wrong = reinterpreted(&query, Dtype::F16);
        assert_eq!((wrong.dtype(), wrong.shape()), (Dtype::Bf16, query.shape()));
        assert_ne!(wrong.to_f32(), query.to_f32());
    }
}
