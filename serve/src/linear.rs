//! Linear maps whose weights stay as the file stores them: a panel of rows is decoded, then meets all inputs.

use rayon::prelude::*;

use crate::encoding::Encoding;
use crate::gguf::{Gguf, GgufError, Tensor, TensorBytes};
use crate::kernels::{PANEL_ROWS, Simd, decode, panel_product};

/// One matrix, `[outputs, inputs]`, rows contiguous.
struct Matrix {
    encoding: Encoding,
    bytes: TensorBytes,
    outputs: usize,
}

/// One or several matrices with the same inputs, whose outputs stand one after the other (Q, K and V; gate and up).
pub struct Linear {
    parts: Vec<Matrix>,
    inputs: usize,
    outputs: usize,
}

/// Some rows of one part.
struct Panel<'a> {
    part: &'a Matrix,
    first_row: usize,
    rows: usize,
}

impl Linear {
    /// Reads the tensors `names`, each `[inputs, outputs]` in GGUF's order (fastest first).
    ///
    /// # Errors
    /// [`GgufError`] of [`Gguf::tensor`].
    pub fn from_gguf(gguf: &Gguf, inputs: usize, names: &[(String, usize)]) -> Result<Self, GgufError> {
        let mut parts = Vec::new();
        for (name, outputs) in names {
            let Tensor { encoding, bytes, .. } = gguf.tensor(name, &[inputs, *outputs])?;
            parts.push(Matrix { encoding, bytes, outputs: *outputs });
        }
        let outputs = parts.iter().map(|part| part.outputs).sum();
        Ok(Self { parts, inputs, outputs })
    }

    /// Elements of an input row.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Elements of an output row, over all parts.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Decodes weight row `row` of the first part into `out` (an embedding lookup).
    ///
    /// # Panics
    /// If the row is not there or `out` is not `inputs` long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        let part = &self.parts[0];
        part.encoding.decode(part.row_bytes(self.inputs, row, 1), out);
    }

    /// The product with `rows`, f32 `[R, inputs]`; returns f32 `[R, outputs]`.
    pub fn apply(&self, simd: Simd, rows: &[f32]) -> Vec<f32> {
        let row_count = rows.len() / self.inputs;
        let mut transposed = vec![0.0; row_count * self.outputs];
        let mut work = Vec::new();
        let mut rest = transposed.as_mut_slice();
        for panel in self.panels() {
            let (out, tail) = rest.split_at_mut(panel.rows * row_count);
            work.push((panel, out));
            rest = tail;
        }
        work.into_par_iter().for_each_init(Vec::new, |weights, (panel, out)| {
            weights.resize(panel.rows * self.inputs, 0.0);
            let bytes = panel.part.row_bytes(self.inputs, panel.first_row, panel.rows);
            decode(simd, panel.part.encoding, bytes, weights);
            panel_product(simd, self.inputs, weights, rows, out);
        });
        if row_count == 1 { transposed } else { transpose(&transposed, self.outputs) }
    }

    fn panels(&self) -> impl Iterator<Item = Panel<'_>> {
        self.parts.iter().flat_map(|part| {
            (0..part.outputs).step_by(PANEL_ROWS).map(move |first_row| {
                let rows = PANEL_ROWS.min(part.outputs - first_row);
                Panel { part, first_row, rows }
            })
        })
    }
}

impl Matrix {
    fn row_bytes(&self, inputs: usize, first: usize, rows: usize) -> &[u8] {
        let row = self.encoding.row_bytes(inputs);
        &self.bytes[first * row..(first + rows) * row]
    }
}

/// `[columns, rows]` to `[rows, columns]`.
fn transpose(source: &[f32], columns: usize) -> Vec<f32> {
    let rows = source.len() / columns;
    let mut out = vec![0.0; source.len()];
    out.par_chunks_mut(columns).enumerate().for_each(|(row, out)| {
        for (column, value) in out.iter_mut().enumerate() {
            *value = source[column * rows + row];
        }
    });
    out
}
