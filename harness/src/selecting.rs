//! Material of a case of selecting tokens: the batch, the step, what each row sees, and what its tokens score.

use std::borrow::Cow;
use std::sync::OnceLock;

use shardcheck_cases::{SelectCase, Workload};
use shardcheck_engine::{Configuration, Operation, OperationKind, Profile, SelectionMode, Tensor, Tensors};
use shardcheck_formats::Contract;
use shardcheck_references::layout::Layout;
use shardcheck_references::sparse::{Heads, Score, score};

/// Most scores that are kept: those of a long prefill are made again for each look at a row.
const MOST_KEPT: usize = 1 << 20;

/// Material of one case of selecting tokens.
pub struct SelectMaterial {
    /// The case.
    pub case: SelectCase,
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: Tensors,
    /// Where tokens lie.
    pub layout: Layout,
    contract: Contract,
    /// Request of each row and how many of its tokens the row sees; `None` for padding.
    rows: Vec<Option<(usize, usize)>>,
    query: Vec<f32>,
    weights: Vec<f32>,
    /// Keys of each request, in the order of positions, and their scales.
    keys: Vec<(Vec<f32>, Vec<f32>)>,
    table: Vec<i32>,
    kept: Vec<OnceLock<Vec<Score>>>,
}

impl SelectMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// That its contract is missing, or that the case has no layout.
    pub fn new(case: &SelectCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let contract =
            profile.operation(OperationKind::SelectSparse).and_then(|operation| operation.contract.as_ref());
        let contract = contract.ok_or("the engine declares no contract for select_sparse")?.clone();
        let layout =
            Layout::new(case.dcp, case.interleave, case.block_size).map_err(|error| error.to_string())?;
        let inputs = case.tensors(seed);
        let values = |name: &str| inputs.find(name).map(Tensor::to_f32);
        let table: Vec<i32> = inputs
            .find("block_table")
            .map(|table| table.to_i64().into_iter().map(|id| id as i32).collect())
            .unwrap_or_default();
        let (cache, scales) = (values("index_cache").unwrap_or_default(), values("index_scale"));
        let mut material = Self {
            case: case.clone(),
            configuration: case.configuration(),
            operation: case.operation(),
            layout,
            contract,
            rows: rows(&case.workload, &layout),
            query: values("index_query").unwrap_or_default(),
            weights: values("index_weights").unwrap_or_default(),
            keys: Vec::new(),
            table,
            kept: std::iter::repeat_with(OnceLock::new).take(case.workload.total_rows()).collect(),
            inputs,
        };
        for request in 0..case.workload.requests.len() {
            material.keys.push(material.keys_of(request, &cache, scales.as_deref()));
        }
        Ok(material)
    }

    /// Ranks of the session.
    pub fn ranks(&self) -> usize {
        self.case.tp
    }

    /// Rank of a rank within its group.
    pub fn member(&self, rank: usize) -> usize {
        rank % self.case.dcp
    }

    /// Rows, padding included.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Tokens of a row that are asked for.
    pub fn top_k(&self) -> usize {
        self.case.selector.top_k
    }

    /// Tokens that a row sees; none for padding.
    pub fn bound(&self, row: usize) -> usize {
        self.rows[row].map_or(0, |(_, bound)| bound)
    }

    /// Entries of one row of the block table.
    pub fn width(&self) -> usize {
        self.table.len() / self.case.workload.requests.len()
    }

    /// Tokens that a row may have on a rank: those that it sees, under `union` those of them that the rank owns.
    pub fn candidates(&self, row: usize, rank: usize) -> Vec<usize> {
        let member = self.member(rank);
        let all = self.case.selector.mode == SelectionMode::Exact;
        (0..self.bound(row)).filter(|position| all || self.layout.owner(*position) == member).collect()
    }

    /// Slot of a position of the row's request on a rank; `None` where another rank owns it, and for padding.
    pub fn slot(&self, row: usize, position: usize, rank: usize) -> Option<i64> {
        let (request, _) = self.rows[row]?;
        let entries = &self.table[request * self.width()..(request + 1) * self.width()];
        let slot = self.layout.slot(position, self.member(rank), entries);
        (slot >= 0).then_some(slot)
    }

    /// Scores of the tokens that a row sees, in the order of positions.
    pub fn scores(&self, row: usize) -> Cow<'_, [Score]> {
        let Some((request, bound)) = self.rows[row] else { return Cow::Borrowed(&[]) };
        let make = || {
            let (heads, dim) = (self.case.index_heads, self.case.index_dim);
            let own = Heads {
                query: &self.query[row * heads * dim..(row + 1) * heads * dim],
                weights: &self.weights[row * heads..(row + 1) * heads],
            };
            let (keys, scales) = &self.keys[request];
            let keys = keys.chunks_exact(dim).zip(scales).take(bound);
            keys.map(|(key, scale)| score(&own, key, f64::from(*scale), &self.contract)).collect::<Vec<_>>()
        };
        if self.case.scores() > MOST_KEPT {
            return Cow::Owned(make());
        }
        Cow::Borrowed(self.kept[row].get_or_init(make))
    }

    /// The inputs of one request by itself, and the rows of the batch that its rows are.
    pub fn alone(&self, request: usize) -> (Tensors, Vec<usize>) {
        let own: Vec<usize> =
            (0..self.rows()).filter(|row| self.rows[*row].is_some_and(|(of, _)| of == request)).collect();
        let mut inputs = self.inputs.clone();
        for name in ["index_query", "index_weights", "seq_lens", "block_table"] {
            let Some(tensor) = inputs.find(name) else { continue };
            let rows = if name.starts_with("index") { own.clone() } else { vec![request] };
            let size = tensor.len() / tensor.shape()[0].max(1);
            let codes = tensor.to_codes();
            let taken: Vec<u64> =
                rows.iter().flat_map(|row| codes[row * size..(row + 1) * size].iter().copied()).collect();
            let shape: Vec<usize> =
                std::iter::once(rows.len()).chain(tensor.shape()[1..].iter().copied()).collect();
            let tensor = Tensor::from_codes(tensor.dtype(), &shape, &taken);
            inputs.insert(name, tensor);
        }
        inputs.insert("query_start_loc", Tensor::from_i32(&[2], &[0, own.len() as i32]));
        (inputs, own)
    }

    /// A row in words.
    pub fn place(&self, row: usize) -> String {
        match self.rows[row] {
            None => format!("row {row} (padding)"),
            Some((request, bound)) => format!("row {row} (request {request}, sees {bound} tokens)"),
        }
    }

    fn keys_of(&self, request: usize, cache: &[f32], scales: Option<&[f32]>) -> (Vec<f32>, Vec<f32>) {
        let (dim, width) = (self.case.index_dim, self.width());
        let entries = &self.table[request * width..(request + 1) * width];
        let per_rank = self.case.blocks * self.case.block_size;
        let (mut keys, mut own) = (Vec::new(), Vec::new());
        for position in 0..self.case.workload.requests[request].seq_len() {
            let owner = self.layout.owner(position);
            let slot = owner * per_rank + self.layout.slot(position, owner, entries) as usize;
            keys.extend_from_slice(&cache[slot * dim..(slot + 1) * dim]);
            own.push(scales.map_or(1.0, |scales| scales[slot]));
        }
        (keys, own)
    }
}

/// Request of each row, and how many of its tokens the row sees.
fn rows(workload: &Workload, layout: &Layout) -> Vec<Option<(usize, usize)>> {
    let bound = |(request, row): (usize, usize)| {
        let of = &workload.requests[request];
        (request, layout.row_boundary(of.seq_len(), of.query_tokens, row))
    };
    workload.rows().into_iter().map(|row| row.map(bound)).collect()
}

#[cfg(test)]
mod tests;
