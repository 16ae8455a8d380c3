//! Why a call can't be judged at all: exit code 2, never a verdict about the call.

use shardcheck_engine::{TensorError, archive::ArchiveError};
use shardcheck_formats::{ContractError, Dtype};
use shardcheck_references::layout::LayoutError;

use super::header::SCHEMA_VERSION;

/// A call that can't be judged. Each message says what was found and what would be accepted.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The image is damaged.
    #[error("{0}")]
    Image(#[from] ArchiveError),
    /// The image says nothing about what it holds.
    #[error("the image has no metadata {key:?}: put the header there (docs/check.md), as JSON text")]
    NoHeader {
        /// Key of the metadata.
        key: &'static str,
    },
    /// The header is no JSON, or has unknown fields or values.
    #[error("the header can't be read: {0}")]
    Header(String),
    /// The header is of another version.
    #[error("the header has schema_version {found}: this program reads {SCHEMA_VERSION}")]
    Version {
        /// Version of the header.
        found: u32,
    },
    /// A tensor is missing.
    #[error("{0}")]
    Tensor(#[from] TensorError),
    /// The layout is none.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// The contract would let anything pass.
    #[error("{0}")]
    Contract(#[from] ContractError),
    /// A field that the check needs is not in the header.
    #[error("the header lacks `{field}`: {why}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it is for.
        why: &'static str,
    },
    /// A number of the header can't be used.
    #[error("`{field}` is {value}: give {wanted}")]
    Number {
        /// The field.
        field: &'static str,
        /// What it held.
        value: f64,
        /// What is accepted.
        wanted: &'static str,
    },
    /// A shape fits neither the others nor the header.
    #[error("{name} has shape {found:?}, which does not fit: {wanted}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// What would fit.
        wanted: String,
    },
    /// An element type that the tensor can't have.
    #[error("{name} has dtype {found}: {wanted}")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its element type.
        found: Dtype,
        /// What would be accepted.
        wanted: &'static str,
    },
    /// A length, an offset or a table entry that can't be.
    #[error("{0}")]
    Value(String),
    /// A block table row ends before its request does.
    #[error(
        "block_table has {width} entries a request, which cover {covers} tokens, but request {request} has {seq_len}"
    )]
    ShortTable {
        /// The request.
        request: usize,
        /// Entries of its row.
        width: usize,
        /// Tokens that they cover.
        covers: usize,
        /// Tokens of the request.
        seq_len: usize,
    },
    /// A table entry names no block of the cache.
    #[error(
        "block_table[{request}][{entry}] is {block}, but the cache has {blocks} blocks (tokens {first}.. of request {request})"
    )]
    NoBlock {
        /// The request.
        request: usize,
        /// Column of the table.
        entry: usize,
        /// What it says.
        block: i64,
        /// Blocks of the cache.
        blocks: usize,
        /// First token that lies there.
        first: usize,
    },
}

impl CheckError {
    /// A shape that does not fit.
    pub(super) fn shape(name: &str, found: &[usize], wanted: impl Into<String>) -> Self {
        Self::Shape { name: name.to_owned(), found: found.to_vec(), wanted: wanted.into() }
    }
}
