//! The metadata of a batch as an engine reads it: lengths, rows, block table.

use shardcheck_engine::{Configuration, EngineError, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::communicator::Stop;
use crate::grid::{Grid, LayoutPolicies, RowRef, Sight};

/// A block table, with every read checked: an entry or block beyond the end is what a device calls an illegal address.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockTable {
    ids: Vec<i64>,
    requests: usize,
    width: usize,
    blocks: usize,
}

impl BlockTable {
    /// Reads `block_table i32 [requests, width]` for caches of `blocks` blocks.
    ///
    /// # Errors
    /// [`EngineError::Input`] for another dtype or number of axes.
    pub fn read(inputs: &Tensors, blocks: usize) -> Result<Self, EngineError> {
        Self::read_named(inputs, "block_table", blocks)
    }

    /// The same from a tensor of another name.
    ///
    /// # Errors
    /// As [`BlockTable::read`].
    pub fn read_named(inputs: &Tensors, name: &str, blocks: usize) -> Result<Self, EngineError> {
        let tensor = inputs.get(name)?;
        let &[requests, width] = tensor.shape() else {
            return Err(wrong_shape(name, tensor, vec![0, 0]));
        };
        tensor.expect(name, Dtype::I32, &[requests, width])?;
        Ok(Self { ids: tensor.to_i64(), requests, width, blocks })
    }

    /// Requests of the table.
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// Entries of a request, needed or not.
    pub fn entries(&self, request: usize) -> &[i64] {
        &self.ids[request * self.width..(request + 1) * self.width]
    }

    /// A table of some of its requests, in any order.
    pub fn of_rows(&self, requests: &[usize]) -> Self {
        let ids = requests.iter().flat_map(|request| self.entries(*request).iter().copied()).collect();
        Self { ids, requests: requests.len(), ..*self }
    }

    /// Replaces the entries of a request that lie in the cache by those of `entries` that do.
    pub fn replace(&mut self, request: usize, entries: &[i64]) {
        let (width, blocks) = (self.width, self.blocks as i64);
        let row = &mut self.ids[request * width..(request + 1) * width];
        for (own, other) in row.iter_mut().zip(entries) {
            if (0..blocks).contains(own) && (0..blocks).contains(other) {
                *own = *other;
            }
        }
    }

    /// Block of a table entry.
    ///
    /// # Errors
    /// A crash that names the entry, when it or its block does not exist.
    pub fn block(&self, request: usize, entry: usize, layout: &LayoutPolicies) -> Result<usize, Stop> {
        let entries = if request < self.requests { self.entries(request) } else { &[] };
        self.block_among(entries, request, entry, layout)
    }

    /// Block of an entry among `entries`, which stand for those of a request.
    ///
    /// # Errors
    /// As [`BlockTable::block`].
    pub fn block_among(
        &self,
        entries: &[i64],
        request: usize,
        entry: usize,
        layout: &LayoutPolicies,
    ) -> Result<usize, Stop> {
        let Some(id) = entries.get(entry) else {
            let (requests, width) = (self.requests, self.width);
            return Err(Stop::crash(format!(
                "illegal address: block table entry [{request}, {entry}] of a [{requests}, {width}] table"
            )));
        };
        let id = (layout.block_id)(*id, self.blocks);
        usize::try_from(id).ok().filter(|id| *id < self.blocks).ok_or_else(|| {
            let blocks = self.blocks;
            Stop::crash(format!(
                "illegal address: block {id} of {blocks}, entry {entry} of request {request}"
            ))
        })
    }
}

/// Requests and rows of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Total length of each request (cached length for a context step).
    pub seq_lens: Vec<usize>,
    /// First row of each request, then the number of rows.
    pub starts: Vec<i32>,
    /// Rows, graph padding included.
    pub rows: usize,
    /// Where the blocks lie.
    pub table: BlockTable,
}

impl Batch {
    /// Reads `query_start_loc`, the block table, and the lengths named `lens`; `rows` is T, or `None` to take the
    /// last entry of `query_start_loc` (no padding).
    ///
    /// # Errors
    /// [`EngineError::Input`] for shapes that disagree, [`EngineError::Crash`] for lengths or starts that are negative
    /// or decrease, and for rows beyond T.
    pub fn read(
        inputs: &Tensors,
        lens: &str,
        rows: Option<usize>,
        blocks: usize,
    ) -> Result<Self, EngineError> {
        let table = BlockTable::read(inputs, blocks)?;
        let requests = table.requests();
        let lens_tensor = inputs.get(lens)?.expect(lens, Dtype::I32, &[requests])?;
        let starts_tensor =
            inputs.get("query_start_loc")?.expect("query_start_loc", Dtype::I32, &[requests + 1])?;
        let starts: Vec<i32> = starts_tensor.to_i64().into_iter().map(|v| v as i32).collect();
        let last = starts[requests];
        let rows = rows.unwrap_or(last.max(0) as usize);
        if starts[0] != 0 || !starts.is_sorted() || last as usize > rows {
            let text =
                format!("query_start_loc {starts:?} does not start at 0 and rise to at most {rows} rows");
            return Err(EngineError::Crash { text });
        }
        let seq_lens = lens_tensor.to_i64().into_iter().map(usize::try_from).collect::<Result<_, _>>();
        let seq_lens =
            seq_lens.map_err(|_| EngineError::Crash { text: format!("{lens} holds a negative length") })?;
        Ok(Self { seq_lens, starts, rows, table })
    }

    /// Rows of all requests; those behind are graph padding.
    pub fn real_rows(&self) -> usize {
        self.starts[self.seq_lens.len()].max(0) as usize
    }

    /// The largest number of rows of one request.
    pub fn max_query_len(&self) -> usize {
        self.starts.windows(2).map(|edge| (edge[1] - edge[0]) as usize).max().unwrap_or(0)
    }

    /// Request of each row.
    pub fn row_refs(&self, layout: &LayoutPolicies) -> Vec<Option<RowRef>> {
        (layout.rows)(&self.starts, self.rows)
    }

    /// A row as `member` sees it.
    pub fn sight(&self, row: &RowRef, member: usize, grid: &Grid) -> Sight {
        let seq_len = self.seq_lens[row.request];
        Sight { seq_len, query_len: row.query_len, row: row.row, member, grid: *grid }
    }

    /// Local tokens that each row sees on `member`; 0 for padding.
    pub fn row_lens(&self, layout: &LayoutPolicies, member: usize, grid: &Grid, causal: bool) -> Vec<usize> {
        let visible = if causal { layout.row_len } else { layout.draft_len };
        let len = |row: &RowRef| visible(layout, &self.sight(row, member, grid));
        self.row_refs(layout).iter().map(|row| row.as_ref().map_or(0, len)).collect()
    }
}

/// The error that names a tensor of another shape than expected.
pub fn wrong_shape(name: &str, tensor: &Tensor, expected: Vec<usize>) -> EngineError {
    let found = tensor.shape().to_vec();
    shardcheck_engine::TensorError::WrongShape { name: name.to_owned(), expected, found }.into()
}

/// Codes of a 16-bit tensor of that element type and shape, row-major.
///
/// # Errors
/// [`EngineError::Input`] when it is missing, of another dtype or of another shape.
pub fn read_half(
    inputs: &Tensors,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
) -> Result<Vec<u16>, EngineError> {
    let tensor = inputs.get(name)?.expect(name, dtype, shape)?;
    if tensor.is_contiguous() {
        let words = tensor.bytes().as_chunks::<2>().0;
        return Ok(words[..tensor.len()].iter().map(|b| u16::from_le_bytes(*b)).collect());
    }
    Ok(tensor.to_codes().into_iter().map(|code| code as u16).collect())
}

/// A tensor of a 16-bit element type from its codes.
pub fn half_tensor(dtype: Dtype, shape: &[usize], codes: &[u16]) -> Tensor {
    let bytes = codes.iter().flat_map(|code| code.to_le_bytes()).collect();
    Tensor::new(dtype, shape.to_vec(), bytes).unwrap_or_else(|error| panic!("{error}"))
}

/// Rows T of a query tensor of shape `[T, heads of all ranks, width]`.
///
/// # Errors
/// [`EngineError::Input`] when it has another number of axes.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn table(ids: &[i32], requests: usize) -> BlockTable {
        let tensor = Tensor::from_i32(&[requests, ids.len() / requests], ids);
        BlockTable::read(&Tensors::new().with("block_table", tensor), 10).unwrap()
    }

    #[test]
    fn entries_are_replaced_in_one_request_and_only_where_both_lie_in_the_cache() {
        let longer = [7, 10, -1, 0, 8, 8, 8, 8];
        for request in 0..3 {
            let mut seen = table(&[1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4], 3);
            seen.replace(request, &longer);
            for other in 0..3 {
                let expected: &[i64] = if other == request { &[7, 2, 3, 0] } else { &[1, 2, 3, 4] };
                assert_eq!(seen.entries(other), expected, "request {other} after a change of {request}");
            }
        }
        let mut outside = table(&[-1, 10, 9999, 9], 1);
        outside.replace(0, &[1, 1, 1, 1]);
        assert_eq!(outside.entries(0), [-1, 10, 9999, 1], "what no cache holds is not made right");
    }

    #[test]
    fn blocks_outside_the_table_or_the_cache_are_illegal_addresses_that_are_named() {
        let (table, layout) = (table(&[1, 9, 10, -1], 2), LayoutPolicies::HEALTHY);
        assert_eq!(table.requests(), 2);
        assert_eq!(table.block(0, 1, &layout).ok(), Some(9));
        for (request, entry, named) in [
            (0, 2, "[0, 2] of a [2, 2]"),
            (2, 0, "[2, 0]"),
            (1, 0, "block 10 of 10"),
            (1, 1, "block -1 of 10"),
        ] {
            let Err(Stop::Failed(EngineError::Crash { text })) = table.block(request, entry, &layout) else {
                panic!("[{request}, {entry}] is no crash")
            };
            assert!(text.contains("illegal address") && text.contains(named), "{text}");
        }
    }
}
