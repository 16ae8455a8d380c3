//! The query that a rank's kernel receives: its own heads gathered over the group, or the group's heads at once.

use shardcheck_engine::Tensor;

use crate::communicator::{Link, Stop};

/// Heads of a query tensor.
#[derive(Debug, Clone, Copy)]
pub struct HeadShape {
    /// Rows T.
    pub rows: usize,
    /// Heads of one rank H.
    pub own: usize,
    /// Heads of all ranks.
    pub total: usize,
    /// Width of a head.
    pub dim: usize,
}

/// Own heads `[T, H, dim]` of a rank to the heads of its group `[T, H·W, dim]`.
pub type GatherQuery = fn(&Link<'_>, Vec<u16>, HeadShape) -> Result<Vec<u16>, Stop>;

/// How heads are chosen and gathered.
#[derive(Clone, Copy, PartialEq)]
pub struct QueryPolicies {
    /// First of a rank's own heads: `(rank among all, member, heads per rank)`.
    pub first_own_head: fn(usize, usize, usize) -> usize,
    /// First head of a group: `(group, world, heads per rank)`.
    pub first_group_head: fn(usize, usize, usize) -> usize,
    /// Own heads `[T, H, dim]` to the group's heads `[T, H·W, dim]`.
    pub gather: GatherQuery,
    /// Head of the up-projection for a head of the group: `(first group head, head, heads per rank, member)`.
    pub projected_head: fn(usize, usize, usize, usize) -> usize,
    /// Reads the up-projection `[heads, from, to]` row-major.
    pub read_projection: fn(&Tensor) -> Vec<f32>,
}

impl QueryPolicies {
    /// As published: ranks hold contiguous heads in rank order.
    pub const HEALTHY: Self = Self {
        first_own_head: |rank, _, own| rank * own,
        first_group_head: |group, world, own| group * world * own,
        gather,
        projected_head: |first, head, _, _| first + head,
        read_projection: Tensor::to_f32,
    };
}

/// Heads `first .. first + count` of every row.
pub fn select_heads(query: &[u16], shape: HeadShape, first: usize, count: usize) -> Vec<u16> {
    let row_width = shape.total * shape.dim;
    query
        .chunks_exact(row_width)
        .flat_map(|row| row[first * shape.dim..(first + count) * shape.dim].iter().copied())
        .collect()
}

fn gather(link: &Link<'_>, own: Vec<u16>, shape: HeadShape) -> Result<Vec<u16>, Stop> {
    if link.world == 1 {
        return Ok(own);
    }
    let members: Vec<usize> = (0..link.world).collect();
    let gathered = link.all_gather("all_gather_query", own, &members)?;
    Ok(rows_of_members(&gathered, link.world, shape))
}

/// `[W, T, H, dim]` to `[T, W·H, dim]`.
pub fn rows_of_members(gathered: &[u16], world: usize, shape: HeadShape) -> Vec<u16> {
    let width = shape.own * shape.dim;
    (0..shape.rows)
        .flat_map(|row| (0..world).map(move |member| (member * shape.rows + row) * width))
        .flat_map(|at| gathered[at..at + width].iter().copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::communicator::{Ranks, run_ranks};

    #[test]
    fn gathering_own_heads_gives_what_query_replication_takes_at_once() {
        let shape = HeadShape { rows: 3, own: 2, total: 8, dim: 4 };
        let query: Vec<u16> = (0..3 * 8 * 4).collect();
        let policies = QueryPolicies::HEALTHY;
        let ranks = Ranks { count: 4, world: 2, timeout: Duration::from_secs(5) };
        let gathered = run_ranks(ranks, |link| {
            let first = (policies.first_own_head)(link.rank, link.member, shape.own);
            (policies.gather)(link, select_heads(&query, shape, first, shape.own), shape)
        })
        .unwrap();
        for rank in 0..4 {
            let first = (policies.first_group_head)(rank / 2, 2, shape.own);
            assert_eq!(gathered.results[rank], select_heads(&query, shape, first, 4), "rank {rank}");
        }
        assert_eq!(gathered.collectives, [1; 4]);
    }
}
