//! First divergent stage: each observable of a step compared with what the oracle gives for it, in the order of the step.

use shardcheck_engine::EmptyPartial;
use shardcheck_formats::Dtype;

use crate::finding::Stage;
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed};
use crate::material::AttentionMaterial;

/// Axes of a tensor `[ranks, T, Hg, dim]`; drop the last where `dim` is 1.
pub(crate) fn gathered_axes(material: &AttentionMaterial, dim: usize) -> Vec<(&'static str, usize)> {
    let configuration = material.configuration();
    let mut axes = vec![
        ("rank", material.ranks()),
        ("row", material.rows.len()),
        ("gathered head", configuration.gathered_heads()),
    ];
    if dim > 1 {
        axes.push(("dim", dim));
    }
    axes
}

/// Row lengths on each rank against the published formulas.
pub(crate) fn row_lengths(material: &AttentionMaterial, observed: &Observed) -> Result<Comparison, Halt> {
    let (ranks, rows) = (material.ranks(), material.rows.len());
    // of selected tokens a rank counts those that it owns
    let name = if material.case.selected.is_some() { "counts" } else { "row_lens" };
    let seen = observed.observable(name, Dtype::I32, &[ranks, rows])?.to_i64();
    let mut wanted = Vec::with_capacity(ranks * rows);
    for rank in 0..ranks {
        wanted
            .extend((0..rows).map(|row| material.local_visible_tokens(row, material.dcp_rank(rank)) as i64));
    }
    Ok(Comparison::integers(name, &seen, &wanted))
}

/// Gathered queries against the queries that were given.
pub(crate) fn gathered_query(material: &AttentionMaterial, observed: &Observed) -> Result<Comparison, Halt> {
    let dim = material.configuration().attention.qk_dim();
    let axes = gathered_axes(material, dim);
    let shape: Vec<_> = [axes[0].1, axes[1].1, axes[2].1, dim].to_vec();
    let seen = observed.observable("gathered_query", material.configuration().dtype, &shape)?.to_f32();
    let mut comparison = Comparison::new("gathered_query");
    let (rows, gathered) = (shape[1], shape[2]);
    for rank in 0..shape[0] {
        let first_head = rank / material.configuration().dcp * gathered;
        for row in (0..rows).filter(|row| material.rows[*row].is_some()) {
            for head in 0..gathered {
                let base = ((rank * rows + row) * gathered + head) * dim;
                let given = material.query(row, first_head + head);
                for d in 0..dim {
                    comparison.element(
                        base + d,
                        f64::from(seen[base + d]),
                        Allowed::Exactly(f64::from(given[d])),
                    );
                }
            }
        }
    }
    Ok(comparison)
}

/// Partial LSEs as natural logarithms, whatever base the engine declares.
pub(crate) fn natural_partial_lse(
    material: &AttentionMaterial,
    observed: &Observed,
) -> Result<Vec<f64>, Halt> {
    let axes = gathered_axes(material, 1);
    let shape: Vec<_> = axes.iter().map(|axis| axis.1).collect();
    let seen = observed.observable("partial_lse", Dtype::F32, &shape)?.to_f64();
    let factor = material.conventions.lse_base.ln();
    Ok(seen.into_iter().map(|lse| lse * factor).collect())
}

/// Partial LSEs against attention over each rank's own tokens.
pub(crate) fn partial_lse(material: &AttentionMaterial, observed: &Observed) -> Result<Comparison, Halt> {
    let seen = natural_partial_lse(material, observed)?;
    let expected = material.expected()?;
    let axes = gathered_axes(material, 1);
    let (rows, gathered) = (axes[1].1, axes[2].1);
    let mut comparison = Comparison::new("partial_lse");
    for (flat, seen) in seen.iter().enumerate() {
        let (rank, row, head) = (flat / gathered / rows, flat / gathered % rows, flat % gathered);
        let global = rank / material.configuration().dcp * gathered + head;
        let allowed = expected.partials[material.dcp_rank(rank)].lse[row * material.heads() + global];
        comparison.element(flat, *seen, allowed);
    }
    Ok(comparison)
}

/// Partial outputs against attention over each rank's own tokens; where a rank sees nothing they are what the engine declares.
pub(crate) fn partial_output(material: &AttentionMaterial, observed: &Observed) -> Result<Comparison, Halt> {
    let dim = material.exchanged_dim(observed);
    let axes = gathered_axes(material, 1);
    let (rows, gathered) = (axes[1].1, axes[2].1);
    let seen = observed.observable("partial_out", Dtype::F32, &[axes[0].1, rows, gathered, dim])?.to_f64();
    let expected = material.expected()?;
    let zeros = material.conventions.empty_partial == EmptyPartial::Zero;
    let mut comparison = Comparison::new("partial_out");
    for rank in 0..axes[0].1 {
        let of_rank = &expected.partials[material.dcp_rank(rank)];
        let partial = of_rank.exchanged(dim).ok_or_else(|| {
            Halt::Inconclusive(format!("no bound is known for a partial output of width {dim}"))
        })?;
        for row in 0..rows {
            for head in 0..gathered {
                let global = rank / material.configuration().dcp * gathered + head;
                let base = ((rank * rows + row) * gathered + head) * dim;
                let wanted = (row * material.heads() + global) * dim;
                let empty = of_rank.lse[row * material.heads() + global] == Allowed::NegativeInfinity;
                for d in 0..dim {
                    let allowed = if empty && zeros { Allowed::Exactly(0.0) } else { partial[wanted + d] };
                    comparison.element(base + d, seen[base + d], allowed);
                }
            }
        }
    }
    Ok(comparison)
}

/// The first stage that diverges; `last` when every observable up to there is right or absent.
pub(crate) fn stage_of(laboratory: &Laboratory, last: Stage) -> Stage {
    let material = laboratory.attention();
    let Ok(observed) = laboratory.observed() else { return last };
    let wrong = |comparison: Result<Comparison, Halt>| comparison.is_ok_and(|c| !c.holds());
    if wrong(row_lengths(material, observed)) {
        return Stage::RowBound;
    }
    if let Ok(caches) = laboratory.caches_after()
        && !material.caches_are_right(&caches)
    {
        return Stage::Write;
    }
    if wrong(gathered_query(material, observed)) {
        return Stage::Query;
    }
    if last == Stage::Partial
        || wrong(partial_lse(material, observed))
        || wrong(partial_output(material, observed))
    {
        return Stage::Partial;
    }
    last
}

/// Lines that go with a failed output: the rows concerned, and what a fixed tolerance would have said.
pub(crate) fn notes(material: &AttentionMaterial, comparison: &Comparison, per_row: usize) -> Vec<String> {
    let rows = material.rows.len().max(1);
    let mut concerned: Vec<usize> = comparison.broken().iter().map(|flat| flat / per_row % rows).collect();
    concerned.sort_unstable();
    concerned.dedup();
    let mut names: Vec<String> = concerned.iter().take(8).map(|row| material.row_name(*row)).collect();
    if concerned.len() > names.len() {
        names.push(format!("and {} more", concerned.len() - names.len()));
    }
    let rule = comparison.fixed_rule();
    let compared = comparison.measured().compared;
    vec![
        format!("rows concerned: {}", names.join(", ")),
        format!(
            "a fixed tolerance of atol = rtol = {:e} would have put {} of {compared} elements outside ({:.2} %); largest difference {:.4}",
            rule.tolerance,
            rule.outside,
            100.0 * rule.outside as f64 / compared.max(1) as f64,
            rule.largest
        ),
    ]
}

#[cfg(test)]
mod tests;
