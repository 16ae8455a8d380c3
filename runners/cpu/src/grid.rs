//! The interleaved KV layout: who owns a position, where it lies, and how much of a row a rank sees.
//!
//! Formulas: ATOM `dcp_ops.py` (`dcp_owner_rank`, `dcp_local_index`, `get_dcp_local_seq_lens`,
//! `get_dcp_local_window_lens`), vLLM `cp_utils.py` (`cp_local_slot`), ATOM `BlockManager`.

use shardcheck_engine::Configuration;

/// Sizes of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Decode-context-parallel ranks W.
    pub world: usize,
    /// Interleave size S in tokens.
    pub interleave: usize,
    /// Physical block size B in tokens.
    pub block: usize,
}

impl Grid {
    /// The layout of a configuration.
    pub fn of(configuration: &Configuration) -> Self {
        Self {
            world: configuration.dcp,
            interleave: configuration.interleave,
            block: configuration.block_size,
        }
    }

    /// Tokens after which ownership repeats: S·W.
    pub fn round_tokens(&self) -> usize {
        self.interleave * self.world
    }
}

/// The layouts that the parts of a step go by: all the same, but for faults that take one of another KV group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grids {
    /// What is derived for the host.
    pub derived: Grid,
    /// Tokens that a row sees on a rank.
    pub lengths: Grid,
    /// Pages that are read.
    pub pages: Grid,
    /// Owners and slots that are written.
    pub slots: Grid,
}

impl Grids {
    /// One layout for all.
    pub fn all(grid: Grid) -> Self {
        Self { derived: grid, lengths: grid, pages: grid, slots: grid }
    }
}

/// One row of a request, seen from one rank.
#[derive(Debug, Clone, Copy)]
pub struct Sight {
    /// Total length L of the request, its new rows included.
    pub seq_len: usize,
    /// New rows q of the request.
    pub query_len: usize,
    /// Row t of the q.
    pub row: usize,
    /// Rank within its group.
    pub member: usize,
    /// Layout.
    pub grid: Grid,
}

/// A row of the batch: its request, its index within the request, and the request's number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRef {
    /// Request.
    pub request: usize,
    /// Row t within the request.
    pub row: usize,
    /// Rows q of the request.
    pub query_len: usize,
}

/// How positions, rows and units are computed.
#[derive(Clone, Copy, PartialEq)]
pub struct LayoutPolicies {
    /// Rank within the group that stores a position.
    pub owner: fn(usize, &Grid) -> usize,
    /// Index of a position among the tokens of its owner.
    pub local_index: fn(usize, &Grid) -> usize,
    /// Tokens that a rank stores of the first `len`: `(len, member, grid)`.
    pub local_len: fn(usize, usize, &Grid) -> usize,
    /// Block-table entry of a position.
    pub table_entry: fn(usize, &Grid) -> usize,
    /// Block that is addressed for an id of the block table: `(id, blocks)`.
    pub block_id: fn(i64, usize) -> i64,
    /// Block-table entry and row in the block of a local token, out of `count` local tokens: `(local, count, grid)`.
    pub page: fn(usize, usize, &Grid) -> (usize, usize),
    /// Local tokens that a causal row sees.
    pub row_len: fn(&LayoutPolicies, &Sight) -> usize,
    /// Local tokens that a bidirectional row sees.
    pub draft_len: fn(&LayoutPolicies, &Sight) -> usize,
    /// Which request each of `rows` rows belongs to, from `query_start_loc`; `None` for graph padding.
    pub rows: fn(&[i32], usize) -> Vec<Option<RowRef>>,
    /// Tokens of one block-table entry.
    pub virtual_block: fn(&Grid) -> usize,
    /// Tokens of one prefix-hash unit.
    pub hash_unit: fn(&Grid) -> usize,
    /// Tokens of one sub-page.
    pub sub_page: fn(&Grid) -> usize,
    /// Block-table entries that a request of a length needs.
    pub blocks_needed: fn(usize, &Grid) -> usize,
    /// Id of sub-page `part` of a block: `(block id, part, parts)`.
    pub sub_page_id: fn(i32, usize, usize) -> i32,
    /// Whether the mask of a row leaves it a local token: `(row, local, local tokens of the request)`.
    pub row_sees: fn(&Sight, usize, usize) -> bool,
    /// Local tokens that a row's list has, in order: `(tokens that it sees, tokens of the request, grid)`.
    pub listed: fn(usize, usize, &Grid) -> Vec<usize>,
}

impl LayoutPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        owner,
        local_index,
        local_len,
        table_entry,
        block_id: |id, _| id,
        page,
        row_len,
        draft_len,
        rows,
        virtual_block,
        hash_unit: virtual_block,
        sub_page,
        blocks_needed,
        sub_page_id,
        row_sees,
        listed,
    };

    /// Local slot of a position, given the block of its table entry: `block·B + local mod B`.
    pub fn slot(&self, position: usize, block: usize, grid: &Grid) -> usize {
        block * grid.block + (self.local_index)(position, grid) % grid.block
    }
}

fn owner(position: usize, grid: &Grid) -> usize {
    position / grid.interleave % grid.world
}

fn local_index(position: usize, grid: &Grid) -> usize {
    position / grid.round_tokens() * grid.interleave + position % grid.interleave
}

fn local_len(len: usize, member: usize, grid: &Grid) -> usize {
    let rounds = len / grid.round_tokens();
    let rest = len - rounds * grid.round_tokens();
    rounds * grid.interleave + rest.saturating_sub(member * grid.interleave).min(grid.interleave)
}

fn table_entry(position: usize, grid: &Grid) -> usize {
    position / virtual_block(grid)
}

fn page(local: usize, _count: usize, grid: &Grid) -> (usize, usize) {
    (local / grid.block, local % grid.block)
}

/// The causal edge is global: row t ends at `L − q + 1 + t`, of which a rank holds what it owns.
fn row_len(layout: &LayoutPolicies, sight: &Sight) -> usize {
    let edge = (sight.seq_len + 1 + sight.row).saturating_sub(sight.query_len);
    (layout.local_len)(edge, sight.member, &sight.grid)
}

/// By positions and not by counting: the mask must not rest on the length that it stands beside.
pub fn row_sees(sight: &Sight, local: usize, _held: usize) -> bool {
    let grid = &sight.grid;
    let position =
        (local / grid.interleave * grid.world + sight.member) * grid.interleave + local % grid.interleave;
    position + sight.query_len <= sight.seq_len + sight.row
}

fn listed(seen: usize, _held: usize, _grid: &Grid) -> Vec<usize> {
    (0..seen).collect()
}

fn draft_len(layout: &LayoutPolicies, sight: &Sight) -> usize {
    (layout.local_len)(sight.seq_len, sight.member, &sight.grid)
}

fn rows(starts: &[i32], count: usize) -> Vec<Option<RowRef>> {
    let mut rows = vec![None; count];
    for (request, edge) in starts.windows(2).enumerate() {
        let (begin, end) = (edge[0].max(0) as usize, edge[1].max(0) as usize);
        for index in begin..end.min(count) {
            rows[index] = Some(RowRef { request, row: index - begin, query_len: end - begin });
        }
    }
    rows
}

fn virtual_block(grid: &Grid) -> usize {
    grid.block * grid.world
}

fn sub_page(grid: &Grid) -> usize {
    let largest_power_of_two = grid.block & grid.block.wrapping_neg();
    largest_power_of_two.min(128)
}

/// Rank 0 is the longest rank, so its need is that of all.
fn blocks_needed(len: usize, grid: &Grid) -> usize {
    local_len(len, 0, grid).div_ceil(grid.block)
}

fn sub_page_id(block: i32, part: usize, parts: usize) -> i32 {
    block.wrapping_mul(parts as i32).wrapping_add(part as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: LayoutPolicies = LayoutPolicies::HEALTHY;

    fn grid(world: usize, interleave: usize, block: usize) -> Grid {
        Grid { world, interleave, block }
    }

    fn slots(interleave: usize, member: usize) -> Vec<i64> {
        let (grid, table) = (grid(2, interleave, 4), [7, 3]);
        (0..12)
            .map(|p| match (LAYOUT.owner)(p, &grid) == member {
                true => LAYOUT.slot(p, table[(LAYOUT.table_entry)(p, &grid)], &grid) as i64,
                false => -1,
            })
            .collect()
    }

    #[test]
    fn slots_follow_the_published_worked_example() {
        assert_eq!(slots(2, 0), [28, 29, -1, -1, 30, 31, -1, -1, 12, 13, -1, -1]);
        assert_eq!(slots(2, 1), [-1, -1, 28, 29, -1, -1, 30, 31, -1, -1, 12, 13]);
        assert_eq!(slots(1, 0), [28, -1, 29, -1, 30, -1, 31, -1, 12, -1, 13, -1]);
    }

    #[test]
    fn local_lengths_follow_the_published_worked_examples() {
        let lens = |len, grid: Grid| (0..grid.world).map(|r| local_len(len, r, &grid)).collect::<Vec<_>>();
        assert_eq!(lens(37, grid(4, 1, 4)), [10, 9, 9, 9]);
        assert_eq!(lens(37, grid(4, 4, 4)), [12, 9, 8, 8]);
        assert_eq!(lens(3, grid(4, 1, 4)), [1, 1, 1, 0]);
    }

    #[test]
    fn a_local_length_counts_the_positions_that_the_rank_owns() {
        for world in [1, 2, 3, 4, 8] {
            for interleave in [1, 2, 4, 16] {
                let grid = grid(world, interleave, 16);
                for len in 0..200 {
                    for member in 0..world {
                        let owned: Vec<usize> = (0..len).filter(|&p| owner(p, &grid) == member).collect();
                        assert_eq!(local_len(len, member, &grid), owned.len());
                        // the owned positions lie densely, in order
                        let local: Vec<usize> = owned.iter().map(|&p| local_index(p, &grid)).collect();
                        assert!(local.iter().copied().eq(0..owned.len()));
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_a_verify_step_follow_the_published_worked_examples() {
        let lens = |seq_len, query_len, world, interleave, member| {
            let grid = grid(world, interleave, 16);
            (0..query_len)
                .map(|row| (LAYOUT.row_len)(&LAYOUT, &Sight { seq_len, query_len, row, member, grid }))
                .collect::<Vec<_>>()
        };
        assert_eq!(lens(10, 4, 2, 1, 0), [4, 4, 5, 5]);
        assert_eq!(lens(10, 4, 2, 1, 1), [3, 4, 4, 5]);
        assert_eq!(lens(12, 4, 2, 1, 0), [5, 5, 6, 6]);
        assert_eq!(lens(10, 4, 4, 2, 0), [2, 2, 3, 4]);
        assert_eq!(lens(10, 4, 4, 2, 3), [1, 2, 2, 2]);
        assert_eq!(lens(1000, 3, 8, 1, 6), [124, 125, 125]);
        assert_eq!(lens(1000, 3, 8, 1, 7), [124, 124, 125]);
        assert_eq!(lens(2, 4, 2, 1, 0), [0, 0, 1, 1]);
        assert_eq!(lens(2, 4, 2, 1, 1), [0, 0, 0, 1]);
    }

    #[test]
    fn rows_skip_requests_without_rows_and_leave_padding_unowned() {
        let row = |request, row, query_len| Some(RowRef { request, row, query_len });
        assert_eq!(rows(&[0, 2, 2, 3], 5), [row(0, 0, 2), row(0, 1, 2), row(2, 0, 1), None, None]);
    }

    #[test]
    fn a_sub_page_is_the_largest_power_of_two_in_a_block_up_to_128() {
        for (block, page) in
            [(1, 1), (2, 2), (16, 16), (96, 32), (128, 128), (256, 128), (1536, 128), (3072, 128)]
        {
            assert_eq!(sub_page(&grid(1, 1, block)), page, "block {block}");
        }
    }

    #[test]
    fn blocks_needed_is_the_length_over_the_virtual_block_rounded_up() {
        for grid in [grid(2, 1, 4), grid(3, 2, 4), grid(8, 4, 4), grid(1, 1, 1)] {
            for len in 0..200 {
                assert_eq!(blocks_needed(len, &grid), len.div_ceil(grid.block * grid.world));
            }
        }
    }
}
