//! Rows and elements of an attention case in words.

use super::AttentionMaterial;

impl AttentionMaterial {
    /// Name of a row: request, row, position.
    pub fn row_name(&self, row: usize) -> String {
        match self.rows.get(row).copied().flatten() {
            None => format!("padding row {row}"),
            Some((request, t)) => {
                let spec = self.case.workload.requests[request];
                format!(
                    "request {request} row {t} of {} (position {})",
                    spec.query_tokens,
                    spec.context_tokens + t
                )
            }
        }
    }

    /// Place of a flat index over named axes; an axis named `row` is spelled out.
    pub fn place(&self, flat: usize, axes: &[(&'static str, usize)]) -> String {
        let mut rest = flat;
        let mut words = Vec::new();
        for (name, extent) in axes.iter().rev() {
            let index = rest % extent.max(&1);
            rest /= extent.max(&1);
            words.push(if *name == "row" { self.row_name(index) } else { format!("{name} {index}") });
        }
        words.reverse();
        words.join(", ")
    }
}
