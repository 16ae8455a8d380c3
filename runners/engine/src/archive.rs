//! Tensors as one safetensors image: how they are stored and how they travel.
//!
//! safetensors knows no strides, so a strided view is stored flat, as bytes, and its dtype, shape and strides are kept beside the image.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use safetensors::Dtype as StoredDtype;
use safetensors::tensor::{Metadata, TensorInfo, TensorView};
use serde::{Deserialize, Serialize};
use shardcheck_formats::Dtype;

use crate::{Tensor, Tensors, large};

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
pub enum ArchiveError {
    /// The image breaks a rule.
    #[error("tensors can't be read: {reason}")]
    Damaged {
        /// What is wrong with them.
        reason: String,
    },
    /// Where the image comes from, or goes to, failed or ended.
    #[error("tensors can't be read: {0}")]
    Stream(#[from] io::Error),
}

impl ArchiveError {
    fn of(reason: impl ToString) -> Self {
        Self::Damaged { reason: reason.to_string() }
    }
}

/// The image of tensors that stay where they are: written piece by piece, none is copied.
#[derive(Debug)]
pub struct Image<'a> {
    head: Vec<u8>,
    pieces: Vec<&'a [u8]>,
    /// What the image does not say about strided views.
    pub strided: StridedViews,
}

impl<'a> Image<'a> {
    /// The image of `tensors`: wide elements first, so that all are aligned.
    ///
    /// # Errors
    /// [`ArchiveError::Damaged`] when safetensors refuses a tensor.
    pub fn of(tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>) -> Result<Self, ArchiveError> {
        let mut strided = StridedViews::new();
        let mut entries = Vec::new();
        for (name, tensor) in tensors {
            let (dtype, shape) = match strided_view(tensor) {
                None => (stored_dtype(tensor.dtype()), tensor.shape().to_vec()),
                Some(view) => {
                    strided.insert(name.to_owned(), view);
                    (StoredDtype::U8, vec![tensor.bytes().len()])
                }
            };
            entries.push((name, dtype, shape, tensor.bytes()));
        }
        entries.sort_by(|a, b| b.1.bitsize().cmp(&a.1.bitsize()).then(a.0.cmp(b.0)));
        let mut infos = Vec::with_capacity(entries.len());
        let mut pieces = Vec::with_capacity(entries.len());
        let mut offset = 0;
        for (name, dtype, shape, bytes) in entries {
            let data_offsets = (offset, offset + bytes.len());
            offset = data_offsets.1;
            infos.push((name.to_owned(), TensorInfo { dtype, shape, data_offsets }));
            pieces.push(bytes);
        }
        let metadata = Metadata::new(None, infos).map_err(ArchiveError::of)?;
        let mut text = serde_json::to_vec(&metadata).map_err(ArchiveError::of)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut head = (text.len() as u64).to_le_bytes().to_vec();
        head.append(&mut text);
        Ok(Self { head, pieces, strided })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.head.len() + self.pieces.iter().map(|piece| piece.len()).sum::<usize>()
    }

    /// Never: an image of no tensors has a header still.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The image in order: its header, then each tensor.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(self.head.as_slice()).chain(self.pieces.iter().copied())
    }

    /// Writes the image.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        self.pieces().try_for_each(|piece| writer.write_all(piece))
    }
}

/// The image of `tensors` in one piece, and what it does not say about strided views.
///
/// # Errors
/// As [`Image::of`].
pub fn pack<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<(Vec<u8>, StridedViews), ArchiveError> {
    let image = Image::of(tensors)?;
    let mut bytes = Vec::with_capacity(image.len());
    image.write_to(&mut bytes)?;
    Ok((bytes, image.strided))
}

/// The tensors of an image.
///
/// # Errors
/// [`ArchiveError::Damaged`] for an image that breaks a rule, has element types that are not of this project, or views that reach outside.
pub fn unpack(mut image: &[u8], strided: &StridedViews) -> Result<Tensors, ArchiveError> {
    let length = image.len() as u64;
    read(&mut image, length, strided)
}

/// The tensors of an image of `length` bytes that comes from `stream`: each is read once, into its place, and no more memory is
/// taken than bytes have come.
///
/// # Errors
/// As [`unpack`], and [`ArchiveError::Stream`] when the stream fails or ends too early.
pub fn read(stream: &mut impl Read, length: u64, strided: &StridedViews) -> Result<Tensors, ArchiveError> {
    let mut word = [0u8; 8];
    if length < word.len() as u64 {
        return Err(ArchiveError::of(format!("an image of {length} bytes has no header")));
    }
    stream.read_exact(&mut word)?;
    let header = u64::from_le_bytes(word);
    let rest = length - word.len() as u64;
    if header > rest.min(MAX_HEADER_BYTES) {
        return Err(ArchiveError::of(format!("a header of {header} bytes in an image of {length}")));
    }
    let text = large::take(stream, header)?;
    let metadata: Metadata = serde_json::from_slice(&text).map_err(ArchiveError::of)?;
    if metadata.data_len() as u64 != rest - header {
        let (found, wanted) = (rest - header, metadata.data_len());
        return Err(ArchiveError::of(format!("{found} bytes of data where the header has {wanted}")));
    }
    let mut tensors = Tensors::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let bytes = large::take(stream, (info.data_offsets.1 - info.data_offsets.0) as u64)?;
        let tensor = placed(info.dtype, &info.shape, bytes, strided.get(&name));
        tensors.insert(&name, tensor.map_err(|reason| named(&name, &reason))?);
    }
    match strided.keys().find(|name| tensors.find(name).is_none()) {
        Some(name) => {
            Err(ArchiveError::of(format!("there is no tensor {name:?}, which is said to be strided")))
        }
        None => Ok(tensors),
    }
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
    fn an_image_is_a_safetensors_file_with_aligned_elements() {
        let tensors = Tensors::new()
            .with("a", Tensor::from_codes(Dtype::U8, &[3], &[1, 2, 3]))
            .with("b", Tensor::from_i64(&[2], &[-1, 7]))
            .with("empty", Tensor::from_i32(&[0, 4], &[]));
        let (image, _) = pack(tensors.iter()).unwrap();
        let stored = safetensors::SafeTensors::deserialize(&image).unwrap();
        for (name, view) in stored.iter() {
            assert_eq!(&tensor_of(&view, None).unwrap(), tensors.find(name).unwrap(), "{name}");
            let offset = view.data().as_ptr() as usize - image.as_ptr() as usize;
            assert!(view.data().is_empty() || offset.is_multiple_of(view.dtype().bitsize() / 8), "{name}");
        }
    }

    #[test]
    fn an_image_in_a_stream_ends_where_it_says_and_what_follows_is_left() {
        let tensors = Tensors::new().with("view", strided()).with("t", Tensor::from_i32(&[3], &[1, 2, 3]));
        let (mut bytes, views) = pack(tensors.iter()).unwrap();
        let length = bytes.len() as u64;
        bytes.extend(b"next");
        let mut stream = bytes.as_slice();
        assert_eq!(read(&mut stream, length, &views).unwrap(), tensors);
        assert_eq!(stream, b"next");
        let cut = read(&mut &bytes[..length as usize - 1], length, &views).unwrap_err();
        assert!(matches!(cut, ArchiveError::Stream(_)), "{cut}");
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
