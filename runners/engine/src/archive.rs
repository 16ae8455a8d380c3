//! Tensors as one safetensors image: how they are stored and how they travel.
//!
//! safetensors knows no strides, so a strided view is stored flat, as bytes, and its dtype, shape and strides are kept beside the image.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::{TensorInfo, TensorView};
use safetensors::{Dtype as StoredDtype, SafeTensors};
use serde::{Deserialize, Serialize};
use shardcheck_formats::Dtype;

use crate::{Tensor, Tensors};

/// Longest header of an image that is read, as safetensors has it.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// What an image does not say about a strided view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StridedView {
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each axis.
    pub shape: Vec<usize>,
    /// Strides in elements.
    pub strides: Vec<usize>,
}

/// Strided views of an image by name.
pub type StridedViews = BTreeMap<String, StridedView>;

/// An image that can't be read or made.
#[derive(Debug, thiserror::Error)]
#[error("tensors can't be read: {reason}")]
pub struct ArchiveError {
    /// What is wrong with them.
    pub reason: String,
}

impl ArchiveError {
    fn of(reason: impl ToString) -> Self {
        Self { reason: reason.to_string() }
    }
}

/// The image of `tensors`, and what it does not say about strided views.
///
/// # Errors
/// [`ArchiveError`] when safetensors refuses a tensor.
pub fn pack<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<(Vec<u8>, StridedViews), ArchiveError> {
    let (views, strided) = views_of(tensors)?;
    Ok((safetensors::serialize(views, None).map_err(ArchiveError::of)?, strided))
}

/// As [`pack`], into a file that is made anew.
///
/// # Errors
/// [`ArchiveError`] when safetensors refuses a tensor or the file can't be written.
pub fn pack_into<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<StridedViews, ArchiveError> {
    let (views, strided) = views_of(tensors)?;
    safetensors::serialize_to_file(views, None, path).map_err(ArchiveError::of)?;
    Ok(strided)
}

/// The tensors of an image.
///
/// # Errors
/// [`ArchiveError`] for an image that is damaged, has element types that are not of this project, or views that reach outside.
pub fn unpack(image: &[u8], strided: &StridedViews) -> Result<Tensors, ArchiveError> {
    let stored = SafeTensors::deserialize(image).map_err(ArchiveError::of)?;
    let mut tensors = Tensors::new();
    for (name, view) in stored.iter() {
        tensors.insert(name, tensor_of(&view, strided.get(name)).map_err(|reason| named(name, &reason))?);
    }
    complete(tensors, strided)
}

/// As [`unpack`], from a file of which each tensor is read once, into its place.
///
/// # Errors
/// As [`unpack`], and when the file can't be read.
pub fn unpack_file(file: &File, strided: &StridedViews) -> Result<Tensors, ArchiveError> {
    let length = file.metadata().map_err(ArchiveError::of)?.len();
    let mut word = [0u8; 8];
    file.read_exact_at(&mut word, 0).map_err(ArchiveError::of)?;
    let header = u64::from_le_bytes(word);
    if header > length.saturating_sub(8).min(MAX_HEADER_BYTES) {
        return Err(ArchiveError::of(format!("a header of {header} bytes in a file of {length}")));
    }
    let mut text = vec![0u8; header as usize];
    file.read_exact_at(&mut text, 8).map_err(ArchiveError::of)?;
    let entries: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&text).map_err(ArchiveError::of)?;
    let mut tensors = Tensors::new();
    for (name, entry) in entries.into_iter().filter(|(name, _)| name != "__metadata__") {
        let info: TensorInfo =
            serde_json::from_value(entry).map_err(|error| named(&name, &error.to_string()))?;
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        if start > end || end > length - 8 - header {
            return Err(named(&name, "it reaches beyond the end of the file"));
        }
        let mut bytes = vec![0u8; (end - start) as usize];
        file.read_exact_at(&mut bytes, 8 + header + start).map_err(ArchiveError::of)?;
        let tensor = placed(info.dtype, &info.shape, bytes, strided.get(&name));
        tensors.insert(&name, tensor.map_err(|reason| named(&name, &reason))?);
    }
    complete(tensors, strided)
}

/// One stored tensor.
///
/// # Errors
/// Why it can't be read.
pub fn tensor_of(view: &TensorView<'_>, strided: Option<&StridedView>) -> Result<Tensor, String> {
    placed(view.dtype(), view.shape(), view.data().to_vec(), strided)
}

fn placed(
    dtype: StoredDtype,
    shape: &[usize],
    bytes: Vec<u8>,
    strided: Option<&StridedView>,
) -> Result<Tensor, String> {
    match strided {
        Some(StridedView { dtype, shape, strides }) => {
            Tensor::view(*dtype, shape.clone(), strides.clone(), bytes)
        }
        None => Tensor::new(dtype_of(dtype)?, shape.to_vec(), bytes),
    }
    .map_err(|error| error.to_string())
}

fn complete(tensors: Tensors, strided: &StridedViews) -> Result<Tensors, ArchiveError> {
    match strided.keys().find(|name| tensors.find(name).is_none()) {
        Some(name) => {
            Err(ArchiveError::of(format!("there is no tensor {name:?}, which is said to be strided")))
        }
        None => Ok(tensors),
    }
}

/// What an image would not say about `tensor`: `None` where its bytes are the elements in row-major order and nothing else.
pub fn strided_view(tensor: &Tensor) -> Option<StridedView> {
    let plain = tensor.is_contiguous() && tensor.bytes().len() == tensor.len() * tensor.dtype().size_bytes();
    (!plain).then(|| StridedView {
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
        strides: tensor.strides(),
    })
}

/// Element types as safetensors names them.
pub fn stored_dtype(dtype: Dtype) -> StoredDtype {
    match dtype {
        Dtype::F64 => StoredDtype::F64,
        Dtype::F32 => StoredDtype::F32,
        Dtype::F16 => StoredDtype::F16,
        Dtype::Bf16 => StoredDtype::BF16,
        Dtype::E4m3fn => StoredDtype::F8_E4M3,
        Dtype::E4m3fnuz => StoredDtype::F8_E4M3FNUZ,
        Dtype::E5m2 => StoredDtype::F8_E5M2,
        Dtype::I64 => StoredDtype::I64,
        Dtype::I32 => StoredDtype::I32,
        Dtype::U16 => StoredDtype::U16,
        Dtype::U8 => StoredDtype::U8,
    }
}

fn dtype_of(stored: StoredDtype) -> Result<Dtype, String> {
    Dtype::ALL
        .into_iter()
        .find(|dtype| stored_dtype(*dtype) == stored)
        .ok_or_else(|| format!("element type {stored:?} is not one of this project's"))
}

fn named(name: &str, reason: &str) -> ArchiveError {
    ArchiveError::of(format!("{name}: {reason}"))
}

type Views<'a> = Vec<(&'a str, TensorView<'a>)>;

fn views_of<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<(Views<'a>, StridedViews), ArchiveError> {
    let mut strided = StridedViews::new();
    let mut views = Vec::new();
    for (name, tensor) in tensors {
        let (dtype, shape) = match strided_view(tensor) {
            None => (stored_dtype(tensor.dtype()), tensor.shape().to_vec()),
            Some(view) => {
                strided.insert(name.to_owned(), view);
                (StoredDtype::U8, vec![tensor.bytes().len()])
            }
        };
        let view =
            TensorView::new(dtype, shape, tensor.bytes()).map_err(|error| named(name, &error.to_string()))?;
        views.push((name, view));
    }
    Ok((views, strided))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided() -> Tensor {
        let memory = Tensor::from_f32(Dtype::F32, &[2, 3], &[0., 1., 2., 10., 11., 12.]);
        Tensor::view(Dtype::F32, vec![3, 2], vec![1, 3], memory.bytes().to_vec()).unwrap()
    }

    #[test]
    fn tensors_of_every_type_and_strided_views_come_back_as_they_went() {
        let mut tensors = Tensors::new().with("view", strided());
        for dtype in Dtype::ALL {
            tensors.insert(dtype.name(), Tensor::from_codes(dtype, &[2, 1], &[1, 0x7f]));
        }
        let (image, views) = pack(tensors.iter()).unwrap();
        assert_eq!(views.keys().collect::<Vec<_>>(), ["view"]);
        assert_eq!(unpack(&image, &views).unwrap(), tensors);
    }

    #[test]
    fn a_file_holds_the_same_image() {
        let folder = tempfile::tempdir().unwrap();
        let tensors = Tensors::new().with("view", strided()).with("empty", Tensor::from_i32(&[0, 4], &[]));
        let path = folder.path().join("tensors");
        let views = pack_into(&path, tensors.iter()).unwrap();
        assert_eq!(unpack(&std::fs::read(&path).unwrap(), &views).unwrap(), tensors);
        assert_eq!(unpack_file(&File::open(path).unwrap(), &views).unwrap(), tensors);
    }

    #[test]
    fn a_file_that_is_cut_is_refused_at_every_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tensors");
        let tensors = Tensors::new().with("t", Tensor::from_i32(&[3], &[1, 2, 3]));
        let views = pack_into(&path, tensors.iter()).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(unpack_file(&File::open(&path).unwrap(), &views).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn a_view_that_reaches_outside_and_one_without_a_tensor_are_refused() {
        let (image, mut views) = pack(Tensors::new().with("view", strided()).iter()).unwrap();
        views.get_mut("view").unwrap().strides = vec![1, 400];
        assert!(unpack(&image, &views).unwrap_err().to_string().contains("view"));
        let other = StridedView { dtype: Dtype::F32, shape: vec![1], strides: vec![1] };
        let views = StridedViews::from([("other".to_owned(), other)]);
        assert!(unpack(&image, &views).unwrap_err().to_string().contains("other"));
    }

    #[test]
    fn a_cut_image_is_refused_at_every_length() {
        let (image, views) =
            pack(Tensors::new().with("t", Tensor::from_i32(&[3], &[1, 2, 3])).iter()).unwrap();
        for length in 0..image.len() {
            assert!(unpack(&image[..length], &views).is_err(), "{length} of {} bytes", image.len());
        }
    }
}
