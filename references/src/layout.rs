//! The interleaved layout of a KV cache over context-parallel ranks: owner, local index, slot, lengths.
//!
//! Tokens are dealt to the `W` ranks in runs of `S` (the interleave size). A block-table entry is the same
//! number on every rank and stands for a *virtual block* of `B·W` tokens, of which each rank stores `B`.
//! Sources: ATOM `dcp_owner_rank`, `dcp_local_index`, `dcp_global_pos`, `get_dcp_local_seq_lens`;
//! vLLM `cp_local_slot`, `_dcp_local_seq_lens_kernel`.

use thiserror::Error;

/// The slot of a token that the asking rank does not store (vLLM `PAD_SLOT_ID`).
pub const NO_SLOT: i64 = -1;

/// Why a triple (world size, interleave size, block size) is not a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The world size is zero.
    #[error("world size is 0: use 1 for a cache that is not sharded")]
    NoRanks,
    /// The interleave size is zero.
    #[error("interleave size is 0: use 1 to deal tokens one by one")]
    NoInterleave,
    /// The block size is zero.
    #[error("block size is 0: a block holds at least one token")]
    NoBlock,
    /// An interleave run would straddle a block.
    #[error(
        "block size {block} is not a multiple of interleave size {interleave}: a run of {interleave} tokens would \
         straddle two blocks, so that the slot from the token's position and the slot from its offset in the \
         virtual block name different rows; choose an interleave size that divides the block size"
    )]
    StraddledBlock {
        /// Block size in tokens.
        block: usize,
        /// Interleave size in tokens.
        interleave: usize,
    },
}

/// World size `W`, interleave size `S` and block size `B` of a sharded KV cache.
///
/// Positions and lengths are in tokens; "local" counts the tokens of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    world: usize,
    interleave: usize,
    block: usize,
}

impl Layout {
    /// A layout of `world` ranks, runs of `interleave` tokens and blocks of `block` tokens.
    ///
    /// # Errors
    /// Any argument is zero, or `world > 1` and `interleave` does not divide `block`.
    pub fn new(world: usize, interleave: usize, block: usize) -> Result<Self, LayoutError> {
        if world == 0 {
            return Err(LayoutError::NoRanks);
        }
        if interleave == 0 {
            return Err(LayoutError::NoInterleave);
        }
        if block == 0 {
            return Err(LayoutError::NoBlock);
        }
        if world > 1 && !block.is_multiple_of(interleave) {
            return Err(LayoutError::StraddledBlock { block, interleave });
        }
        Ok(Self { world, interleave, block })
    }

    /// The layout of a cache that is not sharded, in blocks of one token.
    pub fn single() -> Self {
        Self { world: 1, interleave: 1, block: 1 }
    }

    /// Number of ranks, `W`.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Tokens in a run, `S`.
    pub fn interleave(&self) -> usize {
        self.interleave
    }

    /// Tokens in a physical block of one rank, `B`.
    pub fn block(&self) -> usize {
        self.block
    }

    /// The rank that stores the token at global position `pos`: `(pos / S) mod W` (ATOM `dcp_owner_rank`).
    pub fn owner(&self, pos: usize) -> usize {
        (pos / self.interleave) % self.world
    }

    /// The token's index among its owner's tokens: `(pos / (S·W))·S + pos mod S` (ATOM `dcp_local_index`).
    pub fn local_index(&self, pos: usize) -> usize {
        pos / self.round_tokens() * self.interleave + pos % self.interleave
    }

    /// Inverse of ([`Self::owner`], [`Self::local_index`]): `((local / S)·W + rank)·S + local mod S`
    /// (ATOM `dcp_global_pos`).
    pub fn global_position(&self, local: usize, rank: usize) -> usize {
        (local / self.interleave * self.world + rank) * self.interleave + local % self.interleave
    }

    /// How many of the first `len` tokens `rank` stores (ATOM `get_dcp_local_seq_lens`).
    pub fn local_len(&self, len: usize, rank: usize) -> usize {
        let whole_rounds = len / self.round_tokens();
        let rest = len - whole_rounds * self.round_tokens();
        whole_rounds * self.interleave + rest.saturating_sub(rank * self.interleave).min(self.interleave)
    }

    /// The row of `rank`'s cache that holds the token at `pos`, or [`NO_SLOT`] where another rank owns it.
    ///
    /// `block_table` is the request's row: entry `i` is the physical block of virtual block `i`.
    ///
    /// # Panics
    /// The table does not reach the token's virtual block.
    pub fn slot(&self, pos: usize, rank: usize, block_table: &[i32]) -> i64 {
        if self.owner(pos) != rank {
            return NO_SLOT;
        }
        let block = i64::from(block_table[pos / self.virtual_block_tokens()]);
        block * self.block as i64 + (self.local_index(pos) % self.block) as i64
    }

    /// The same row computed as vLLM's `cp_local_slot` does, from the token's offset in its virtual block.
    ///
    /// Equal to [`Self::slot`] for every layout that [`Self::new`] accepts; kept because the equality is
    /// what the rule "`S` divides `B`" buys.
    ///
    /// # Panics
    /// The table does not reach the token's virtual block.
    pub fn slot_virtual_form(&self, pos: usize, rank: usize, block_table: &[i32]) -> i64 {
        let offset = pos % self.virtual_block_tokens();
        if (offset / self.interleave) % self.world != rank {
            return NO_SLOT;
        }
        let local_offset = offset / self.round_tokens() * self.interleave + offset % self.interleave;
        let block = i64::from(block_table[pos / self.virtual_block_tokens()]);
        block * self.block as i64 + local_offset as i64
    }

    /// Global tokens that one block-table entry covers: `B·W`.
    pub fn virtual_block_tokens(&self) -> usize {
        self.block * self.world
    }

    /// Block-table entries that a request of `len` tokens needs: `ceil(len / (B·W))`, which is also the
    /// need of rank 0, the longest rank (ATOM `BlockManager._dcp_num_blocks`).
    pub fn blocks_needed(&self, len: usize) -> usize {
        len.div_ceil(self.virtual_block_tokens())
    }

    /// Tokens that one link of the prefix-cache hash chain covers: a whole virtual block.
    pub fn hash_unit_tokens(&self) -> usize {
        self.virtual_block_tokens()
    }

    /// How many global tokens query row `row` of `q_len` sees in causal verification, when the request
    /// holds `seq_len` tokens in all, the query's own included: `max(seq_len − q_len + 1 + row, 0)`
    /// (ATOM `get_dcp_local_window_lens`, vLLM `_build_dcp_verify_row_view`).
    pub fn row_boundary(&self, seq_len: usize, q_len: usize, row: usize) -> usize {
        (seq_len + 1 + row).saturating_sub(q_len)
    }

    /// How many of them `rank` stores. Ranks do not all advance with `row`.
    pub fn verify_row_len(&self, seq_len: usize, q_len: usize, row: usize, rank: usize) -> usize {
        self.local_len(self.row_boundary(seq_len, q_len, row), rank)
    }

    /// Whether query row `row` of `q_len` sees token `local` of `rank`: its global position is at most that of the row
    /// (aiter `torch_mla_extend_round_robin`, the mask form of [`Self::verify_row_len`]).
    pub fn row_sees(&self, seq_len: usize, q_len: usize, row: usize, local: usize, rank: usize) -> bool {
        self.global_position(local, rank) < self.row_boundary(seq_len, q_len, row)
    }

    /// Slots of `rank` that query row `row` of `q_len` reads: those of all tokens that it sees there, by their position.
    ///
    /// # Panics
    /// The table does not reach the row's virtual block.
    pub fn row_slots(
        &self,
        seq_len: usize,
        q_len: usize,
        row: usize,
        rank: usize,
        block_table: &[i32],
    ) -> Vec<i64> {
        let positions = 0..self.row_boundary(seq_len, q_len, row);
        positions.map(|pos| self.slot(pos, rank, block_table)).filter(|slot| *slot != NO_SLOT).collect()
    }

    /// How many tokens of `rank` each row of a non-causal draft block sees: all of them, the block's own
    /// tokens included (ATOM `_propose_with_draft`).
    pub fn draft_row_len(&self, seq_len: usize, rank: usize) -> usize {
        self.local_len(seq_len, rank)
    }

    /// Tokens of one round of dealing: `S·W`.
    fn round_tokens(&self) -> usize {
        self.interleave * self.world
    }
}

/// Rows of the page that a kernel with small pages sees: the largest power of two that divides `block`, at
/// most 128.
///
/// # Panics
/// `block` is zero.
pub fn sub_page_size(block: usize) -> usize {
    assert!(block > 0, "a block holds at least one token");
    (1 << block.trailing_zeros()).min(128)
}

/// The block table in units of sub-pages: each entry becomes `block / sub_page_size(block)` consecutive
/// ones, and the list is cut at `max_pages`.
///
/// # Panics
/// The table holds fewer than `max_pages` sub-pages.
pub fn expand_sub_pages(block_table: &[i32], block: usize, max_pages: usize) -> Vec<i32> {
    let pages_per_block = block / sub_page_size(block);
    assert!(
        block_table.len() * pages_per_block >= max_pages,
        "{} blocks of {pages_per_block} pages cannot hold {max_pages} pages",
        block_table.len()
    );
    (0..max_pages)
        .map(|page| {
            block_table[page / pages_per_block] * pages_per_block as i32 + (page % pages_per_block) as i32
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(world: usize, interleave: usize, block: usize) -> Layout {
        Layout::new(world, interleave, block).unwrap()
    }

    #[test]
    fn zero_is_no_world_size_no_interleave_and_no_block() {
        assert_eq!(Layout::new(0, 1, 1), Err(LayoutError::NoRanks));
        assert_eq!(Layout::new(1, 0, 1), Err(LayoutError::NoInterleave));
        assert_eq!(Layout::new(1, 1, 0), Err(LayoutError::NoBlock));
    }

    #[test]
    fn a_run_that_straddles_blocks_is_refused_with_the_reason() {
        let error = Layout::new(2, 3, 4).unwrap_err();
        assert_eq!(error, LayoutError::StraddledBlock { block: 4, interleave: 3 });
        assert!(error.to_string().contains("straddle"), "{error}");
        assert!(error.to_string().contains("divides the block size"), "{error}");
    }

    #[test]
    fn a_run_longer_than_a_block_is_refused_too() {
        assert_eq!(Layout::new(2, 8, 4), Err(LayoutError::StraddledBlock { block: 4, interleave: 8 }));
    }

    #[test]
    fn one_rank_accepts_any_interleave_because_nothing_is_dealt() {
        let one = layout(1, 3, 4);
        for pos in 0..40 {
            assert_eq!(one.owner(pos), 0);
            assert_eq!(one.local_index(pos), pos);
            let table: Vec<i32> = (0..10).rev().collect();
            assert_eq!(one.slot(pos, 0, &table), one.slot_virtual_form(pos, 0, &table));
        }
    }

    #[test]
    fn the_two_slot_forms_disagree_where_a_run_would_straddle_a_block() {
        let straddling = Layout { world: 2, interleave: 3, block: 4 };
        let table: Vec<i32> = (0..8).collect();
        let disagree = (0..64).any(|pos| {
            (0..2).any(|rank| {
                straddling.slot(pos, rank, &table) != straddling.slot_virtual_form(pos, rank, &table)
            })
        });
        assert!(disagree);
    }

    #[test]
    fn worked_slots_in_runs_of_two() {
        let two = layout(2, 2, 4);
        let slots = |rank| (0..12).map(|pos| two.slot(pos, rank, &[7, 3])).collect::<Vec<_>>();
        assert_eq!(slots(0), [28, 29, -1, -1, 30, 31, -1, -1, 12, 13, -1, -1]);
        assert_eq!(slots(1), [-1, -1, 28, 29, -1, -1, 30, 31, -1, -1, 12, 13]);
    }

    #[test]
    fn worked_slots_one_by_one() {
        let two = layout(2, 1, 4);
        let slots = (0..12).map(|pos| two.slot(pos, 0, &[7, 3])).collect::<Vec<_>>();
        assert_eq!(slots, [28, -1, 29, -1, 30, -1, 31, -1, 12, -1, 13, -1]);
    }

    #[test]
    fn worked_local_lengths() {
        let lens = |world, interleave, len| {
            let layout = layout(world, interleave, interleave);
            (0..world).map(|rank| layout.local_len(len, rank)).collect::<Vec<_>>()
        };
        assert_eq!(lens(4, 1, 37), [10, 9, 9, 9]);
        assert_eq!(lens(4, 4, 37), [12, 9, 8, 8]);
        assert_eq!(lens(4, 1, 3), [1, 1, 1, 0]);
    }

    #[test]
    fn worked_verification_rows() {
        let rows = |world, interleave, seq_len, q_len, rank| {
            let layout = layout(world, interleave, interleave);
            (0..q_len).map(|row| layout.verify_row_len(seq_len, q_len, row, rank)).collect::<Vec<_>>()
        };
        assert_eq!(rows(2, 1, 10, 4, 0), [4, 4, 5, 5]);
        assert_eq!(rows(2, 1, 10, 4, 1), [3, 4, 4, 5]);
        assert_eq!(rows(2, 1, 12, 4, 0), [5, 5, 6, 6]);
        assert_eq!(rows(4, 2, 10, 4, 0), [2, 2, 3, 4]);
        assert_eq!(rows(4, 2, 10, 4, 1), [2, 2, 2, 2]);
        assert_eq!(rows(4, 2, 10, 4, 2), [2, 2, 2, 2]);
        assert_eq!(rows(4, 2, 10, 4, 3), [1, 2, 2, 2]);
        assert_eq!(rows(8, 1, 1000, 3, 0), [125, 125, 125]);
        assert_eq!(rows(8, 1, 1000, 3, 6), [124, 125, 125]);
        assert_eq!(rows(8, 1, 1000, 3, 7), [124, 124, 125]);
    }

    #[test]
    fn a_row_boundary_before_the_first_token_is_clipped_to_nothing() {
        let two = layout(2, 1, 1);
        let rows = |rank| (0..4).map(|row| two.verify_row_len(2, 4, row, rank)).collect::<Vec<_>>();
        assert_eq!(rows(0), [0, 0, 1, 1]);
        assert_eq!(rows(1), [0, 0, 0, 1]);
    }

    #[test]
    fn every_row_of_a_draft_block_sees_the_whole_block() {
        let four = layout(4, 1, 16);
        assert_eq!((0..4).map(|rank| four.draft_row_len(10, rank)).collect::<Vec<_>>(), [3, 3, 2, 2]);
    }

    #[test]
    fn a_sub_page_is_the_largest_power_of_two_divisor_up_to_128() {
        let pages = [(1, 1), (2, 2), (16, 16), (96, 32), (128, 128), (256, 128), (1536, 128), (3072, 128)];
        for (block, page) in pages {
            assert_eq!(sub_page_size(block), page, "block {block}");
        }
    }

    #[test]
    fn a_block_of_1536_tokens_becomes_twelve_pages() {
        assert_eq!(expand_sub_pages(&[0, 1], 1536, 24), (0..24).collect::<Vec<_>>());
        assert_eq!(expand_sub_pages(&[5, 2], 1536, 14)[11..], [71, 24, 25]);
    }

    #[test]
    #[should_panic(expected = "cannot hold")]
    fn expanding_beyond_the_table_is_a_bug() {
        expand_sub_pages(&[0], 256, 3);
    }
}
