//! Which row of a step each row of a rank is, where prefill context parallelism shares rows out; without it, the same one.

use shardcheck_cases::{PcpCase, PcpRequest, StackTurn};
use shardcheck_formats::Dtype;

use super::StackMaterial;
use crate::laboratory::Observed;
use crate::sharing::SharingMaterial;

/// Rows of the ranks of prefill context parallelism, as an engine shows them; where it shows none, as they should be.
pub struct Lanes {
    /// Rows of each of them, `None` for padding.
    rows: Vec<Vec<Option<usize>>>,
    /// Of each row of the step: the ranks that have it, and its place there.
    holders: Vec<Vec<(usize, usize)>>,
    /// Ranks of tensor parallelism in each.
    tp: usize,
}

impl StackMaterial {
    /// Ranks P of prefill context parallelism.
    pub fn pcp_ranks(&self) -> usize {
        self.case.plan().pcp_ranks()
    }

    /// All ranks, those of each of them one behind the other.
    pub fn all_ranks(&self) -> usize {
        self.ranks() * self.pcp_ranks()
    }

    /// Ranks that what experts give is summed over.
    pub fn expert_ranks(&self) -> usize {
        if self.case.pcp.is_some_and(|pcp| pcp.merged) { self.all_ranks() } else { self.ranks() }
    }

    /// How the rows of a run are shared out; `None` where there is one rank that has all.
    pub fn sharing(&self, turn: &StackTurn) -> Option<SharingMaterial> {
        let pcp = self.case.pcp?;
        let requests = turn.prefills().into_iter().enumerate().map(|(index, is_prefilling)| {
            let query_tokens = turn.turn.new_tokens[index];
            let context_tokens = turn.turn.tokens[index].len() - query_tokens;
            PcpRequest { context_tokens, query_tokens, is_prefilling }
        });
        Some(SharingMaterial::new(&PcpCase {
            world: pcp.world,
            strategy: pcp.strategy,
            decodes: pcp.decodes,
            extra_rows: turn.turn.padded_rows,
            overlap: false,
            requests: requests.collect(),
        }))
    }
}

impl Lanes {
    /// Those of a run.
    pub fn of(material: &StackMaterial, turn: &StackTurn, observed: &Observed) -> Self {
        let real: usize = turn.turn.new_tokens.iter().sum();
        let rows = match material.sharing(turn) {
            None => vec![padded((0..real).collect(), real + turn.turn.padded_rows)],
            Some(sharing) => match shown_rows(observed, &sharing) {
                Some((width, shown)) => {
                    let known = |row: &i64| usize::try_from(*row).ok().filter(|row| *row < real);
                    let of_rank =
                        |rank: usize| shown[rank * width..(rank + 1) * width].iter().map(known).collect();
                    (0..sharing.world).map(of_rank).collect()
                }
                None => {
                    let of_rank = |rank: usize| padded(sharing.rows_of(rank), sharing.padded);
                    (0..sharing.world).map(of_rank).collect()
                }
            },
        };
        let mut holders = vec![Vec::new(); real];
        for (rank, own) in rows.iter().enumerate() {
            for (place, row) in own.iter().enumerate() {
                let Some(row) = row else { continue };
                // a row that a rank has twice is judged by itself
                if holders[*row].iter().all(|(other, _)| *other != rank) {
                    holders[*row].push((rank, place));
                }
            }
        }
        Self { rows, holders, tp: material.ranks() }
    }

    /// Rows R of a rank, padding included.
    pub fn count(&self) -> usize {
        self.rows.first().map_or(0, Vec::len)
    }

    /// Ranks P of prefill context parallelism.
    pub fn world(&self) -> usize {
        self.rows.len()
    }

    /// Row of the step that a row of a rank is; `None` for padding.
    pub fn row(&self, rank: usize, place: usize) -> Option<usize> {
        self.rows[rank / self.tp].get(place).copied().flatten()
    }

    /// Rows of the step of one of the ranks of prefill context parallelism, up to its padding.
    pub fn front(&self, lane: usize) -> Vec<usize> {
        self.rows[lane].iter().map_while(|row| *row).collect()
    }

    /// Rank and place of a row of the step, as rank `t` of tensor parallelism of a rank of prefill context parallelism has it: its own where
    /// it has the row, else that of the first one that has it. `None` where none has.
    pub fn held(&self, lane: usize, t: usize, row: usize) -> Option<(usize, usize)> {
        let holders = self.holders.get(row)?;
        let own = holders.iter().find(|(rank, _)| *rank == lane).or_else(|| holders.first());
        own.map(|(rank, place)| (rank * self.tp + t, *place))
    }

    /// All ranks that have a row of the step, each with its place there.
    pub fn everywhere(&self, row: usize) -> Vec<(usize, usize)> {
        let of = |(lane, place): &(usize, usize)| {
            let (lane, place) = (*lane, *place);
            (0..self.tp).map(move |t| (lane * self.tp + t, place))
        };
        self.holders[row].iter().flat_map(of).collect()
    }
}

/// Rows of each rank as an engine shows them, with the number of them on a rank, its own as long as all ranks have the same.
pub fn shown_rows(observed: &Observed, sharing: &SharingMaterial) -> Option<(usize, Vec<i64>)> {
    let width = observed.reply.outputs.find("rows")?.shape().last().copied()?;
    let rows = observed.observable("rows", Dtype::I64, &[sharing.world, width]).ok()?;
    Some((width, rows.to_i64()))
}

fn padded(rows: Vec<usize>, count: usize) -> Vec<Option<usize>> {
    let mut rows: Vec<Option<usize>> = rows.into_iter().map(Some).collect();
    rows.resize(count, None);
    rows
}
