//! Faults of context-parallel attention, each one replaced policy of the healthy table.

use std::f32::consts::LOG2_E;
use std::fmt;
use std::str::FromStr;

use super::interleave::Interleave;

/// The decisions of sharded attention that a fault can replace.
#[derive(Clone, Copy)]
pub struct Policies {
    /// How many of the first `tokens` positions a rank attends to.
    pub local_tokens: fn(layout: Interleave, tokens: usize, rank: usize) -> usize,
    /// The LSE that a rank with tokens reports, from the true natural one.
    pub reported_lse: fn(layout: Interleave, rank: usize, lse: f32) -> f32,
    /// The LSE that a rank without tokens reports.
    pub empty_lse: f32,
    /// The block-table column that is read for local block `column`.
    pub block_column: fn(column: usize) -> usize,
    /// How many positions row `row` of `rows` attends to, in a sequence of `tokens`.
    pub visible_tokens: fn(tokens: usize, rows: usize, row: usize) -> usize,
}

impl Policies {
    /// What is right.
    pub const HEALTHY: Self = Self {
        local_tokens: Interleave::local_tokens,
        reported_lse: |_, _, lse| lse,
        empty_lse: f32::NEG_INFINITY,
        block_column: |column| column,
        visible_tokens: |tokens, rows, row| tokens - rows + 1 + row,
    };
}

/// The difference that [`Fault::RankLseOffset`] adds.
const LSE_OFFSET: f32 = 0.5;

/// The last local block that [`Fault::BlockTableClamped`] can read.
const LAST_COLUMN: usize = 15;

/// A named defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Every rank reports its LSE in base 2; the merge takes it for natural.
    LseBase2,
    /// Rank 0 alone reports base 2.
    LseMixedBase,
    /// Rank 1 reports its LSE 0.5 too high.
    RankLseOffset,
    /// A rank without tokens reports LSE 0, the weight of a score sum of 1, with output 0. Seen only by sequences that
    /// leave a rank empty: shorter than (W − 1)·S + 1.
    EmptyShardLseZero,
    /// Where the length is a multiple of W·S, the last rank's length is one short: the newest token is lost.
    DropLastTokenOnBoundary,
    /// The last rank is left out of the merge.
    RankLeftOut,
    /// Block-table columns past the sixteenth read the sixteenth again. Seen only by sequences longer than 16·B·W.
    BlockTableClamped,
    /// All rows of a call see what its last row sees: a verification step (or prefill) looks into its future.
    RowsShareLength,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 8] = [
        Self::LseBase2,
        Self::LseMixedBase,
        Self::RankLseOffset,
        Self::EmptyShardLseZero,
        Self::DropLastTokenOnBoundary,
        Self::RankLeftOut,
        Self::BlockTableClamped,
        Self::RowsShareLength,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::LseBase2 => "lse-base-2",
            Self::LseMixedBase => "lse-mixed-base",
            Self::RankLseOffset => "rank-lse-offset",
            Self::EmptyShardLseZero => "empty-shard-lse-zero",
            Self::DropLastTokenOnBoundary => "drop-last-token-on-boundary",
            Self::RankLeftOut => "rank-left-out",
            Self::BlockTableClamped => "block-table-clamped",
            Self::RowsShareLength => "rows-share-length",
        }
    }

    /// The healthy policies with the one that this fault replaces.
    pub fn policies(self) -> Policies {
        let healthy = Policies::HEALTHY;
        match self {
            Self::LseBase2 => Policies { reported_lse: |_, _, lse| lse * LOG2_E, ..healthy },
            Self::LseMixedBase => Policies {
                reported_lse: |_, rank, lse| if rank == 0 { lse * LOG2_E } else { lse },
                ..healthy
            },
            Self::RankLseOffset => Policies {
                reported_lse: |_, rank, lse| if rank == 1 { lse + LSE_OFFSET } else { lse },
                ..healthy
            },
            Self::EmptyShardLseZero => Policies { empty_lse: 0.0, ..healthy },
            Self::DropLastTokenOnBoundary => Policies { local_tokens: one_short_on_boundary, ..healthy },
            Self::RankLeftOut => Policies {
                reported_lse: |layout, rank, lse| {
                    if rank + 1 == layout.ranks() { f32::NEG_INFINITY } else { lse }
                },
                ..healthy
            },
            Self::BlockTableClamped => Policies { block_column: |column| column.min(LAST_COLUMN), ..healthy },
            Self::RowsShareLength => Policies { visible_tokens: |tokens, _, _| tokens, ..healthy },
        }
    }
}

fn one_short_on_boundary(layout: Interleave, tokens: usize, rank: usize) -> usize {
    let right = layout.local_tokens(tokens, rank);
    let newest = rank + 1 == layout.ranks() && tokens.is_multiple_of(layout.round_tokens());
    if newest { right.saturating_sub(1) } else { right }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|f| f.name() == name)
            .ok_or_else(|| format!("`{name}` is none of {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_faults_and_differ() {
        for fault in Fault::ALL {
            assert_eq!(fault.name().parse(), Ok(fault));
        }
        assert!("no-such".parse::<Fault>().expect_err("unknown").contains("lse-base-2"));
    }

    #[test]
    fn the_boundary_fault_takes_the_newest_token_and_only_on_a_boundary() {
        let layout = Interleave::new(4, 2, 4).expect("valid");
        for tokens in 1..64 {
            let lost: Vec<usize> = (0..4)
                .map(|rank| layout.local_tokens(tokens, rank) - one_short_on_boundary(layout, tokens, rank))
                .collect();
            let expected = if tokens % 8 == 0 { [0, 0, 0, 1] } else { [0; 4] };
            assert_eq!(lost, expected, "{tokens} tokens");
            if tokens % 8 == 0 {
                assert_eq!(layout.owner(tokens - 1), 3, "the newest token is the last rank's");
            }
        }
    }
}
