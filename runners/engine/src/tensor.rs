//! A named, typed, possibly strided array: the only thing that travels between harness and engine.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use shardcheck_formats::{Dtype, Overflow, decode, encode};

/// Why a tensor could not be made or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// The buffer does not hold what shape and strides reach.
    #[error(
        "tensor of shape {shape:?} and dtype {dtype} needs {needed} bytes but has {found}: send the whole buffer"
    )]
    Truncated {
        /// Shape that was declared.
        shape: Vec<usize>,
        /// Element type that was declared.
        dtype: Dtype,
        /// Bytes that shape, strides and dtype reach.
        needed: usize,
        /// Bytes that are there.
        found: usize,
    },
    /// Shape and strides have different numbers of axes.
    #[error("shape {shape:?} and strides {strides:?} differ in length: give one stride per axis")]
    Strides {
        /// Shape that was declared.
        shape: Vec<usize>,
        /// Strides that were declared, in elements.
        strides: Vec<usize>,
    },
    /// The tensor is not in the map.
    #[error("tensor {name:?} is missing; present are: {present}")]
    Missing {
        /// Name that was looked up.
        name: String,
        /// Names that exist, joined by commas.
        present: String,
    },
    /// The tensor has another element type than the operation asks for.
    #[error("tensor {name:?} has dtype {found}, expected {expected}")]
    WrongDtype {
        /// Name of the tensor.
        name: String,
        /// Element type that the operation asks for.
        expected: Dtype,
        /// Element type that was found.
        found: Dtype,
    },
    /// The tensor holds a value that the operation can't have.
    #[error("tensor {name:?} holds {value}")]
    WrongValue {
        /// Name of the tensor.
        name: String,
        /// The value, where it stands, and what it may be.
        value: String,
    },
    /// The tensor has another shape than the operation asks for.
    #[error("tensor {name:?} has shape {found:?}, expected {expected:?}")]
    WrongShape {
        /// Name of the tensor.
        name: String,
        /// Shape that the operation asks for.
        expected: Vec<usize>,
        /// Shape that was found.
        found: Vec<usize>,
    },
}

/// An array of `dtype` elements, little-endian, row-major unless `strides` say otherwise.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Strides in elements; `None` for a contiguous row-major array.
    strides: Option<Vec<usize>>,
    bytes: Vec<u8>,
}

impl Tensor {
    /// A contiguous tensor over `bytes` (little-endian elements).
    ///
    /// # Errors
    /// [`TensorError::Truncated`] when the byte count is not exactly `product(shape) * size_of(dtype)`.
    pub fn new(dtype: Dtype, shape: Vec<usize>, bytes: Vec<u8>) -> Result<Self, TensorError> {
        let needed = reach_bytes(dtype, &shape, None);
        if needed != Some(bytes.len()) {
            let needed = needed.unwrap_or(usize::MAX);
            return Err(TensorError::Truncated { shape, dtype, needed, found: bytes.len() });
        }
        Ok(Self { dtype, shape, strides: None, bytes })
    }

    /// A strided view: element `(i0, i1, …)` lies at `Σ i_k · strides[k]`, in elements from the start of `bytes`. With
    /// row-major strides and no byte to spare it is a contiguous tensor.
    ///
    /// # Errors
    /// [`TensorError::Strides`] when the axes disagree, [`TensorError::Truncated`] when the last element lies outside.
    pub fn view(
        dtype: Dtype,
        shape: Vec<usize>,
        strides: Vec<usize>,
        bytes: Vec<u8>,
    ) -> Result<Self, TensorError> {
        if shape.len() != strides.len() {
            return Err(TensorError::Strides { shape, strides });
        }
        match reach_bytes(dtype, &shape, Some(&strides)) {
            Some(needed) if needed <= bytes.len() => {
                // one array, one form: equal tensors must compare equal however they were made
                let plain = needed == bytes.len() && strides == row_major(&shape);
                Ok(Self { dtype, shape, strides: (!plain).then_some(strides), bytes })
            }
            needed => Err(TensorError::Truncated {
                shape,
                dtype,
                needed: needed.unwrap_or(usize::MAX),
                found: bytes.len(),
            }),
        }
    }

    /// Values rounded once to `dtype` (round to nearest even; beyond the range as the format has it).
    ///
    /// # Panics
    /// When `values` does not fill `shape`: that is a bug of the caller.
    pub fn from_f32(dtype: Dtype, shape: &[usize], values: &[f32]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "values must fill shape {shape:?}");
        let mut bytes = Vec::with_capacity(values.len() * dtype.size_bytes());
        match dtype {
            Dtype::F32 => values.iter().for_each(|v| bytes.extend_from_slice(&v.to_le_bytes())),
            Dtype::Bf16 => values.iter().for_each(|v| {
                bytes.extend_from_slice(&shardcheck_formats::bf16_from_f32(*v).to_le_bytes());
            }),
            _ => values.iter().for_each(|v| {
                push_code(&mut bytes, dtype, encode(dtype, f64::from(*v), Overflow::NonFinite));
            }),
        }
        Self { dtype, shape: shape.to_vec(), strides: None, bytes }
    }

    /// Raw codes of `dtype`, one per element.
    ///
    /// # Panics
    /// When `codes` does not fill `shape`.
    pub fn from_codes(dtype: Dtype, shape: &[usize], codes: &[u64]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), codes.len(), "codes must fill shape {shape:?}");
        let mut bytes = Vec::with_capacity(codes.len() * dtype.size_bytes());
        codes.iter().for_each(|code| push_code(&mut bytes, dtype, *code));
        Self { dtype, shape: shape.to_vec(), strides: None, bytes }
    }

    /// A 32-bit integer tensor.
    ///
    /// # Panics
    /// When `values` does not fill `shape`.
    pub fn from_i32(shape: &[usize], values: &[i32]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "values must fill shape {shape:?}");
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: Dtype::I32, shape: shape.to_vec(), strides: None, bytes }
    }

    /// A 64-bit integer tensor.
    ///
    /// # Panics
    /// When `values` does not fill `shape`.
    pub fn from_i64(shape: &[usize], values: &[i64]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "values must fill shape {shape:?}");
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: Dtype::I64, shape: shape.to_vec(), strides: None, bytes }
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Extent of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes behind the tensor, gaps of a strided view included.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes behind the tensor, to be changed in place.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Strides in elements.
    pub fn strides(&self) -> Vec<usize> {
        self.strides.clone().unwrap_or_else(|| row_major(&self.shape))
    }

    /// Whether elements lie row-major without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.strides.as_ref().is_none_or(|s| *s == row_major(&self.shape))
    }

    /// The same elements, row-major without gaps.
    pub fn to_contiguous(&self) -> Self {
        if self.strides.is_none() {
            return self.clone();
        }
        let codes = self.to_codes();
        Self::from_codes(self.dtype, &self.shape, &codes)
    }

    /// Codes of all elements in row-major order of the index.
    pub fn to_codes(&self) -> Vec<u64> {
        let size = self.dtype.size_bytes();
        let read = |element: usize| {
            let mut word = [0u8; 8];
            word[..size].copy_from_slice(&self.bytes[element * size..(element + 1) * size]);
            u64::from_le_bytes(word)
        };
        match &self.strides {
            None => (0..self.len()).map(read).collect(),
            Some(strides) => {
                (0..self.len()).map(|flat| read(offset_of(flat, &self.shape, strides))).collect()
            }
        }
    }

    /// Values of all elements, row-major, exact (no 64-bit integer of this project leaves the range of f64).
    pub fn to_f64(&self) -> Vec<f64> {
        self.to_codes().into_iter().map(|code| value_of(self.dtype, code)).collect()
    }

    /// Values of all elements, row-major; exact for every float type but F64.
    pub fn to_f32(&self) -> Vec<f32> {
        match (self.dtype, &self.strides) {
            (Dtype::F32, None) => {
                self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
            }
            (Dtype::Bf16, None) => self
                .bytes
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| shardcheck_formats::bf16_to_f32(u16::from_le_bytes(*b)))
                .collect(),
            _ => self.to_codes().into_iter().map(|code| value_of(self.dtype, code) as f32).collect(),
        }
    }

    /// Values of an integer tensor, row-major.
    pub fn to_i64(&self) -> Vec<i64> {
        self.to_codes()
            .into_iter()
            .map(|code| match self.dtype {
                Dtype::I64 => code as i64,
                Dtype::I32 => i64::from(code as u32 as i32),
                Dtype::U16 | Dtype::U8 => code as i64,
                _ => value_of(self.dtype, code) as i64,
            })
            .collect()
    }

    /// This tensor, or the error that names it, when dtype or shape differ from what is asked.
    ///
    /// # Errors
    /// [`TensorError::WrongDtype`] or [`TensorError::WrongShape`].
    pub fn expect(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&Self, TensorError> {
        if self.dtype != dtype {
            let name = name.to_owned();
            return Err(TensorError::WrongDtype { name, expected: dtype, found: self.dtype });
        }
        if self.shape != shape {
            return Err(TensorError::WrongShape {
                name: name.to_owned(),
                expected: shape.to_vec(),
                found: self.shape.clone(),
            });
        }
        Ok(self)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?}", self.dtype, self.shape)?;
        if let Some(strides) = &self.strides {
            write!(f, " strides {strides:?}")?;
        }
        write!(f, ")")
    }
}

/// Tensors by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensors(BTreeMap<String, Tensor>);

impl Tensors {
    /// No tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor, builder style.
    #[must_use]
    pub fn with(mut self, name: &str, tensor: Tensor) -> Self {
        self.insert(name, tensor);
        self
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: &str, tensor: Tensor) {
        self.0.insert(name.to_owned(), tensor);
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// [`TensorError::Missing`], which lists what is there.
    pub fn get(&self, name: &str) -> Result<&Tensor, TensorError> {
        self.0.get(name).ok_or_else(|| TensorError::Missing {
            name: name.to_owned(),
            present: self.0.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    /// The tensor of that name, to be changed in place.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Tensor> {
        self.0.get_mut(name)
    }

    /// The tensor of that name, if there.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    /// Takes a tensor out.
    pub fn remove(&mut self, name: &str) -> Option<Tensor> {
        self.0.remove(name)
    }

    /// Names and tensors, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn push_code(bytes: &mut Vec<u8>, dtype: Dtype, code: u64) {
    bytes.extend_from_slice(&code.to_le_bytes()[..dtype.size_bytes()]);
}

fn value_of(dtype: Dtype, code: u64) -> f64 {
    match dtype {
        Dtype::I64 => code as i64 as f64,
        Dtype::I32 => f64::from(code as u32 as i32),
        Dtype::U16 | Dtype::U8 => code as f64,
        _ => decode(dtype, code),
    }
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    strides
}

fn offset_of(flat: usize, shape: &[usize], strides: &[usize]) -> usize {
    let mut rest = flat;
    let mut offset = 0;
    for axis in (0..shape.len()).rev() {
        offset += rest % shape[axis] * strides[axis];
        rest /= shape[axis];
    }
    offset
}

/// Bytes from the start of the buffer to the end of the farthest element; `None` on overflow.
fn reach_bytes(dtype: Dtype, shape: &[usize], strides: Option<&[usize]>) -> Option<usize> {
    let mut elements = 1usize;
    for extent in shape {
        elements = elements.checked_mul(*extent)?;
    }
    if elements == 0 {
        return Some(0);
    }
    let last = match strides {
        None => elements - 1,
        Some(strides) => {
            let mut last = 0usize;
            for (extent, stride) in shape.iter().zip(strides) {
                last = last.checked_add((extent - 1).checked_mul(*stride)?)?;
            }
            last
        }
    };
    last.checked_add(1)?.checked_mul(dtype.size_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_buffer_is_refused_with_the_missing_size() {
        let error = Tensor::new(Dtype::F32, vec![2, 3], vec![0; 20]).unwrap_err();
        assert!(matches!(error, TensorError::Truncated { needed: 24, found: 20, .. }), "{error}");
    }

    #[test]
    fn a_shape_whose_size_overflows_is_refused() {
        assert!(Tensor::new(Dtype::F32, vec![usize::MAX, 4], vec![]).is_err());
        assert!(Tensor::view(Dtype::F32, vec![2, 2], vec![usize::MAX, 1], vec![0; 16]).is_err());
    }

    #[test]
    fn a_head_major_view_reads_the_same_elements_as_its_contiguous_copy() {
        // memory order is [head][row]; the view is [row, head]
        let memory = Tensor::from_f32(Dtype::F32, &[2, 3], &[0., 1., 2., 10., 11., 12.]);
        let view = Tensor::view(Dtype::F32, vec![3, 2], vec![1, 3], memory.bytes().to_vec()).unwrap();
        assert_eq!(view.to_f32(), [0., 10., 1., 11., 2., 12.]);
        assert!(!view.is_contiguous());
        assert!(view.to_contiguous().is_contiguous());
        assert_eq!(view.to_contiguous().to_f64(), view.to_f64());
    }

    #[test]
    fn integers_keep_their_sign() {
        assert_eq!(Tensor::from_i32(&[2], &[-1, 7]).to_i64(), [-1, 7]);
        assert_eq!(Tensor::from_i64(&[1], &[-1]).to_f64(), [-1.0]);
    }

    #[test]
    fn a_missing_tensor_error_lists_what_is_there() {
        let tensors = Tensors::new().with("query", Tensor::from_i32(&[1], &[0]));
        assert!(tensors.get("qeury").unwrap_err().to_string().contains("query"));
    }

    #[test]
    fn wrong_dtype_and_wrong_shape_are_told_apart() {
        let tensor = Tensor::from_i32(&[2], &[1, 2]);
        assert!(matches!(tensor.expect("t", Dtype::F32, &[2]), Err(TensorError::WrongDtype { .. })));
        assert!(matches!(tensor.expect("t", Dtype::I32, &[3]), Err(TensorError::WrongShape { .. })));
        assert!(tensor.expect("t", Dtype::I32, &[2]).is_ok());
    }
}
