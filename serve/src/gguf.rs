//! A GGUF file: its metadata, its tensor table, and the bytes of a tensor, mapped and never copied.
//!
//! The format is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian.

use std::collections::HashMap;
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use thiserror::Error;

use crate::encoding::{Encoding, type_name};

/// Why a file can't be used as a model.
#[derive(Debug, Error)]
pub enum GgufError {
    /// The file can't be opened or mapped.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: it starts with {0:02x?}, not \"GGUF\"")]
    Magic([u8; 4]),
    /// A version other than 2 and 3.
    #[error("GGUF version {0} is not supported; versions 2 and 3 are")]
    Version(u32),
    /// The file ends inside a field, or a count in it can't be true.
    #[error("the GGUF file is cut or damaged: {what} at byte {offset} does not fit into {file_bytes} bytes")]
    Truncated {
        /// The field that was being read.
        what: &'static str,
        /// Where it starts, in bytes from the start of the file.
        offset: usize,
        /// Length of the file in bytes.
        file_bytes: usize,
    },
    /// A field holds what the format does not allow.
    #[error("the GGUF file is damaged: {0}")]
    Damaged(String),
    /// A metadata key that a model needs is absent.
    #[error("the GGUF file has no metadata `{0}`")]
    MissingKey(String),
    /// A metadata key has another type than the model needs.
    #[error("metadata `{key}` is not {wanted}")]
    WrongType {
        /// The key.
        key: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// A tensor that the model needs is absent.
    #[error("the GGUF file has no tensor `{0}`")]
    MissingTensor(String),
    /// A tensor in an encoding that this crate does not decode.
    #[error(
        "tensor `{tensor}` is stored as {found}; this server reads {}: convert the file",
        Encoding::list()
    )]
    Encoding {
        /// Name of the tensor.
        tensor: String,
        /// Name (or number) of its ggml type.
        found: String,
    },
    /// A tensor of a shape that the architecture does not have.
    #[error("tensor `{tensor}` has shape {found:?}, expected {wanted:?} (fastest dimension first)")]
    Shape {
        /// Name of the tensor.
        tensor: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape that the metadata implies.
        wanted: Vec<usize>,
    },
    /// A tensor with an infinite or NaN scale or value.
    #[error("tensor `{0}` holds a scale or value that is not finite")]
    NotFinite(String),
}

/// One metadata value. Integers of every width are widened; arrays are flat.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any of the eight integer types.
    Integer(i128),
    /// `FLOAT32` or `FLOAT64`.
    Float(f64),
    /// `BOOL`.
    Bool(bool),
    /// `STRING`; bytes that are not UTF-8 are replaced.
    Text(String),
    /// `ARRAY` of anything but arrays.
    Array(Vec<Value>),
}

/// Bytes of one tensor, borrowed from the map and kept alive with it.
#[derive(Debug, Clone)]
pub struct TensorBytes {
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

/// One tensor of the file.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Number of elements per dimension, fastest first, as the file has it.
    pub shape: Vec<usize>,
    /// How its elements are stored.
    pub encoding: Encoding,
    /// The stored bytes.
    pub bytes: TensorBytes,
}

struct Entry {
    shape: Vec<usize>,
    type_id: u32,
    offset: usize,
}

/// An opened GGUF file.
pub struct Gguf {
    map: Arc<Mmap>,
    metadata: HashMap<String, Value>,
    entries: HashMap<String, Entry>,
    data_start: usize,
}

impl Gguf {
    /// Maps `path` and reads its header.
    ///
    /// # Errors
    /// Any of [`GgufError`] that concerns the header; tensors are checked when they are asked for.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let io = |source| GgufError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is only read. Another process that shortens the file under a running server can end it
        // with SIGBUS; a model file in a cache is not written to, and copying 100 MB at each start would buy little.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Self::parse(Arc::new(map))
    }

    fn parse(map: Arc<Mmap>) -> Result<Self, GgufError> {
        let mut cursor = Cursor { bytes: &map, at: 0 };
        let magic: [u8; 4] = cursor.array("magic")?;
        if &magic != b"GGUF" {
            return Err(GgufError::Magic(magic));
        }
        let version = cursor.u32("version")?;
        if !matches!(version, 2 | 3) {
            return Err(GgufError::Version(version));
        }
        let tensor_count = cursor.count("tensor count", 24)?;
        let key_count = cursor.count("metadata count", 13)?;
        let mut metadata = HashMap::with_capacity(key_count);
        for _ in 0..key_count {
            let key = cursor.text("metadata key")?;
            let type_id = cursor.u32("metadata type")?;
            let value = cursor.value(type_id)?;
            metadata.insert(key, value);
        }
        let mut entries = HashMap::with_capacity(tensor_count);
        for _ in 0..tensor_count {
            let (name, entry) = cursor.entry()?;
            if entries.insert(name.clone(), entry).is_some() {
                return Err(GgufError::Damaged(format!("tensor `{name}` is listed twice")));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Integer(n)) if *n > 0 && *n <= 1 << 20 => *n as usize,
            Some(other) => return Err(GgufError::Damaged(format!("general.alignment is {other:?}"))),
        };
        let data_start = cursor.at.next_multiple_of(alignment);
        Ok(Self { metadata, entries, data_start, map: map.clone() })
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// A metadata key that must be a string.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`] or [`GgufError::WrongType`].
    pub fn text(&self, key: &str) -> Result<&str, GgufError> {
        match self.required(key)? {
            Value::Text(text) => Ok(text),
            _ => Err(wrong(key, "a string")),
        }
    }

    /// A metadata key that must be a count, as `usize`.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`], or [`GgufError::WrongType`] if it is not an integer between 0 and 2^32 − 1.
    pub fn count(&self, key: &str) -> Result<usize, GgufError> {
        match self.required(key)? {
            Value::Integer(n) if (0..=i128::from(u32::MAX)).contains(n) => Ok(*n as usize),
            _ => Err(wrong(key, "a non-negative 32-bit integer")),
        }
    }

    /// A metadata key that must be a number, as `f64`.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`] or [`GgufError::WrongType`].
    pub fn number(&self, key: &str) -> Result<f64, GgufError> {
        match self.required(key)? {
            Value::Float(x) => Ok(*x),
            Value::Integer(n) => Ok(*n as f64),
            _ => Err(wrong(key, "a number")),
        }
    }

    /// A metadata key that must be an array of strings.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`] or [`GgufError::WrongType`].
    pub fn texts(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        let pick = |value: &'_ Value| matches!(value, Value::Text(_));
        match self.required(key)? {
            Value::Array(values) if values.iter().all(pick) => Ok(values
                .iter()
                .map(|value| if let Value::Text(text) = value { text.as_str() } else { "" })
                .collect()),
            _ => Err(wrong(key, "an array of strings")),
        }
    }

    /// A metadata key that must be an array of integers.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`] or [`GgufError::WrongType`].
    pub fn integers(&self, key: &str) -> Result<Vec<i128>, GgufError> {
        let error = || wrong(key, "an array of integers");
        let Value::Array(values) = self.required(key)? else { return Err(error()) };
        values.iter().map(|v| if let Value::Integer(n) = v { Ok(*n) } else { Err(error()) }).collect()
    }

    /// Whether the file has a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The tensor called `name`, which must have the shape `wanted` (fastest dimension first).
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`], [`GgufError::Encoding`], [`GgufError::Shape`], or [`GgufError::Truncated`] when its
    /// bytes lie outside the file.
    pub fn tensor(&self, name: &str, wanted: &[usize]) -> Result<Tensor, GgufError> {
        let entry = self.entries.get(name).ok_or_else(|| GgufError::MissingTensor(name.to_string()))?;
        let encoding = Encoding::from_type_id(entry.type_id).ok_or_else(|| GgufError::Encoding {
            tensor: name.to_string(),
            found: type_name(entry.type_id),
        })?;
        if entry.shape != wanted {
            let (found, wanted) = (entry.shape.clone(), wanted.to_vec());
            return Err(GgufError::Shape { tensor: name.to_string(), found, wanted });
        }
        let row = entry.shape[0];
        if row % encoding.block_elements() != 0 {
            let block = encoding.block_elements();
            return Err(GgufError::Damaged(format!("rows of `{name}` ({row}) are no multiple of {block}")));
        }
        let rows: usize = entry.shape[1..].iter().product();
        let length = encoding.row_bytes(row) * rows;
        let start = self.data_start.saturating_add(entry.offset);
        if start.checked_add(length).is_none_or(|end| end > self.map.len()) {
            let file_bytes = self.map.len();
            return Err(GgufError::Truncated { what: "tensor data", offset: start, file_bytes });
        }
        let bytes = TensorBytes { map: self.map.clone(), range: start..start + length };
        if !encoding.all_finite(&bytes) {
            return Err(GgufError::NotFinite(name.to_string()));
        }
        Ok(Tensor { name: name.to_string(), shape: entry.shape.clone(), encoding, bytes })
    }

    fn required(&self, key: &str) -> Result<&Value, GgufError> {
        self.get(key).ok_or_else(|| GgufError::MissingKey(key.to_string()))
    }
}

fn wrong(key: &str, wanted: &'static str) -> GgufError {
    GgufError::WrongType { key: key.to_string(), wanted }
}

/// Largest number of elements that a tensor of a small model can have; keeps products inside 64 bits.
const MAX_ELEMENTS: u64 = 1 << 40;

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn truncated(&self, what: &'static str) -> GgufError {
        GgufError::Truncated { what, offset: self.at, file_bytes: self.bytes.len() }
    }

    fn take(&mut self, length: usize, what: &'static str) -> Result<&[u8], GgufError> {
        let end = self.at.checked_add(length).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| self.truncated(what))?;
        let slice = &self.bytes[self.at..end];
        self.at = end;
        Ok(slice)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of items that take at least `item_bytes` each: a damaged count must not become an allocation.
    fn count(&mut self, what: &'static str, item_bytes: usize) -> Result<usize, GgufError> {
        let count = self.u64(what)?;
        let room = (self.bytes.len() - self.at) / item_bytes;
        if count > room as u64 {
            return Err(self.truncated(what));
        }
        Ok(count as usize)
    }

    fn text(&mut self, what: &'static str) -> Result<String, GgufError> {
        let length = self.count(what, 1)?;
        Ok(String::from_utf8_lossy(self.take(length, what)?).into_owned())
    }

    fn value(&mut self, type_id: u32) -> Result<Value, GgufError> {
        const WHAT: &str = "metadata value";
        Ok(match type_id {
            0 => Value::Integer(u8::from_le_bytes(self.array(WHAT)?).into()),
            1 => Value::Integer(i8::from_le_bytes(self.array(WHAT)?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array(WHAT)?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array(WHAT)?).into()),
            4 => Value::Integer(u32::from_le_bytes(self.array(WHAT)?).into()),
            5 => Value::Integer(i32::from_le_bytes(self.array(WHAT)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(WHAT)?).into()),
            7 => Value::Bool(self.array::<1>(WHAT)? != [0]),
            8 => Value::Text(self.text(WHAT)?),
            9 => {
                let item = self.u32(WHAT)?;
                if item == 9 {
                    return Err(GgufError::Damaged("an array of arrays in the metadata".to_string()));
                }
                let count = self.count(WHAT, 1)?;
                Value::Array((0..count).map(|_| self.value(item)).collect::<Result<_, _>>()?)
            }
            10 => Value::Integer(u64::from_le_bytes(self.array(WHAT)?).into()),
            11 => Value::Integer(i64::from_le_bytes(self.array(WHAT)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array(WHAT)?)),
            other => return Err(GgufError::Damaged(format!("metadata type {other}"))),
        })
    }

    fn entry(&mut self) -> Result<(String, Entry), GgufError> {
        let name = self.text("tensor name")?;
        let dimensions = self.u32("tensor dimensions")?;
        if !(1..=4).contains(&dimensions) {
            return Err(GgufError::Damaged(format!("tensor `{name}` has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        let mut elements: u64 = 1;
        for _ in 0..dimensions {
            let extent = self.u64("tensor shape")?;
            elements = elements.saturating_mul(extent);
            if extent == 0 || elements > MAX_ELEMENTS {
                return Err(GgufError::Damaged(format!("tensor `{name}` has an impossible shape")));
            }
            shape.push(extent as usize);
        }
        let type_id = self.u32("tensor type")?;
        let offset = self.u64("tensor offset")? as usize;
        Ok((name, Entry { shape, type_id, offset }))
    }
}
