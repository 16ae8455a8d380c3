//! The metadata of a batch, checked on the host and handed to the device as it is.

use std::sync::Arc;

use shardcheck_engine::{Configuration, EngineError, Tensor, TensorError, Tensors};
use shardcheck_formats::Dtype;

use crate::queue::{Buffer, Queue};

/// Requests, rows and block table.
pub struct Batch {
    pub lens: Vec<i32>,
    pub starts: Vec<i32>,
    pub table: Vec<i32>,
    pub width: usize,
    /// Rows, graph padding included.
    pub rows: usize,
}

impl Batch {
    /// Reads `lens`, `query_start_loc` and `block_table`; without `rows`, rows are those of the last start.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit, a crash for starts or lengths that no batch has.
    pub fn read(inputs: &Tensors, lens: &str, rows: Option<usize>) -> Result<Self, EngineError> {
        let (table, requests, width) = read_table(inputs, "block_table")?;
        let lens_of = read_i32(inputs.get(lens)?.expect(lens, Dtype::I32, &[requests])?);
        let starts = read_i32(inputs.get("query_start_loc")?.expect(
            "query_start_loc",
            Dtype::I32,
            &[requests + 1],
        )?);
        let last = starts[requests];
        let rows = rows.unwrap_or(last.max(0) as usize);
        if starts[0] != 0 || !starts.is_sorted() || last as usize > rows {
            return Err(crash(format!(
                "query_start_loc {starts:?} does not start at 0 and rise to at most {rows} rows"
            )));
        }
        if lens_of.iter().any(|len| *len < 0) {
            return Err(crash(format!("{lens} holds a negative length")));
        }
        Ok(Self { lens: lens_of, starts, table, width, rows })
    }

    /// A block table alone, of requests without tokens.
    pub fn of_table((table, requests, width): (Vec<i32>, usize, usize)) -> Self {
        Self { lens: vec![0; requests], starts: vec![0; requests + 1], table, width, rows: 0 }
    }

    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.lens.len()
    }

    /// The longest run of rows of one request.
    pub fn max_query_len(&self) -> i32 {
        self.starts.windows(2).map(|edge| edge[1] - edge[0]).max().unwrap_or(0)
    }
}

/// Metadata on the device: `Batch` of the kernels, lengths, starts, table.
pub struct DeviceBatch {
    pub header: Buffer,
    pub lens: Buffer,
    pub starts: Buffer,
    pub table: Buffer,
}

impl DeviceBatch {
    /// Uploads a batch.
    ///
    /// # Errors
    /// What the driver says.
    pub fn upload(queue: &Arc<Queue>, batch: &Batch, causal: bool) -> Result<Self, EngineError> {
        let made = Self::with_room(queue, batch.requests(), batch.table.len())?;
        made.write(queue, batch, causal)?;
        Ok(made)
    }

    /// Room for that many requests and table entries.
    ///
    /// # Errors
    /// What the driver says.
    pub fn with_room(queue: &Arc<Queue>, requests: usize, entries: usize) -> Result<Self, EngineError> {
        Ok(Self {
            header: queue.allocate(16)?,
            lens: queue.allocate(4 * requests)?,
            starts: queue.allocate(4 * (requests + 1))?,
            table: queue.allocate(4 * entries)?,
        })
    }

    /// Replaces what is there.
    ///
    /// # Errors
    /// What the driver says.
    pub fn write(&self, queue: &Arc<Queue>, batch: &Batch, causal: bool) -> Result<(), EngineError> {
        self.write_header(queue, batch, causal)?;
        queue.write(&self.lens, &bytes_of(&batch.lens))?;
        queue.write(&self.starts, &bytes_of(&batch.starts))?;
        queue.write(&self.table, &bytes_of(&batch.table))
    }

    /// Replaces the extents and the mask.
    ///
    /// # Errors
    /// What the driver says.
    pub fn write_header(&self, queue: &Arc<Queue>, batch: &Batch, causal: bool) -> Result<(), EngineError> {
        let header = [batch.requests() as i32, batch.rows as i32, batch.width as i32, i32::from(causal)]
            .map(i32::to_le_bytes);
        queue.write(&self.header, &header.concat())
    }
}

/// Entries, requests and width of a block table.
///
/// # Errors
/// [`EngineError::Input`] for a tensor that is not `i32 [n, width]`.
pub fn read_table(inputs: &Tensors, name: &str) -> Result<(Vec<i32>, usize, usize), EngineError> {
    let tensor = inputs.get(name)?;
    let &[requests, width] = tensor.shape() else {
        return Err(wrong_shape(name, tensor, vec![0, 0]));
    };
    tensor.expect(name, Dtype::I32, &[requests, width])?;
    Ok((read_i32(tensor), requests, width))
}

/// Rows of the query.
///
/// # Errors
/// [`EngineError::Input`] without a query of three axes.
pub fn query_rows(inputs: &Tensors, configuration: &Configuration) -> Result<usize, EngineError> {
    let tensor = inputs.get("query")?;
    match tensor.shape() {
        [rows, _, _] => Ok(*rows),
        _ => {
            let expected = vec![0, configuration.total_heads(), configuration.attention.qk_dim()];
            Err(wrong_shape("query", tensor, expected))
        }
    }
}

/// Bytes of a tensor that has to have that type and shape, row-major.
///
/// # Errors
/// [`EngineError::Input`] where it has not.
pub fn contiguous(
    inputs: &Tensors,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
) -> Result<Vec<u8>, EngineError> {
    let tensor = inputs.get(name)?.expect(name, dtype, shape)?;
    let bytes = tensor.len() * dtype.size_bytes();
    if tensor.is_contiguous() {
        return Ok(tensor.bytes()[..bytes].to_vec());
    }
    Ok(tensor.to_contiguous().bytes()[..bytes].to_vec())
}

fn read_i32(tensor: &Tensor) -> Vec<i32> {
    tensor.to_i64().into_iter().map(|value| value as i32).collect()
}

/// Little-endian bytes of integers.
pub fn bytes_of(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The error of a tensor of another shape.
pub fn wrong_shape(name: &str, tensor: &Tensor, expected: Vec<usize>) -> EngineError {
    let found = tensor.shape().to_vec();
    TensorError::WrongShape { name: name.to_owned(), expected, found }.into()
}

/// The error of an engine that can't go on.
pub fn crash(text: impl Into<String>) -> EngineError {
    EngineError::Crash { text: text.into() }
}
