//! Where a token of a request lies: from the block table to a page, and from there to a rank.

use std::collections::HashMap;

use shardcheck_engine::Tensors;
use shardcheck_references::layout::Layout;

use super::sizes::integers;
use super::{CheckError, Header};

/// Block table and geometry of a paged cache.
#[derive(Debug, Clone)]
pub(super) struct Pages {
    /// Ranks and interleave; its block is the page's where the caches have a rank axis.
    pub(super) layout: Layout,
    /// Whether the caches have a leading axis of ranks. If not, one cache holds all tokens in order.
    pub(super) per_rank: bool,
    /// Tokens of a page.
    pub(super) block: usize,
    /// Pages of the cache that the table speaks of.
    blocks: usize,
    /// Which stored page a block number is, where not all were sent.
    stored: Option<HashMap<i64, usize>>,
    table: Vec<i64>,
    width: usize,
}

/// Where one token lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    /// Rank that owns the token.
    pub(super) rank: usize,
    /// Number of the block, as the table says.
    pub(super) block: i64,
    /// Index of the page among the stored ones.
    pub(super) page: usize,
    /// Row within the page.
    pub(super) offset: usize,
}

impl Pages {
    /// Reads the table for caches of `pages` stored pages of `block` tokens.
    ///
    /// # Errors
    /// The layout is none, the table is no `[n, width]`, or the list of sent blocks does not fit the caches.
    pub(super) fn read(
        header: &Header,
        tensors: &Tensors,
        per_rank: bool,
        pages: usize,
        block: usize,
    ) -> Result<Self, CheckError> {
        // one cache of all tokens has no runs that could straddle a page
        let run = if per_rank || header.world == 1 { block } else { header.interleave };
        let layout = Layout::new(header.world, header.interleave, run)?;
        let table = tensors.get("block_table")?;
        let [_, width] = table.shape() else {
            return Err(CheckError::shape("block_table", table.shape(), "[requests, width]"));
        };
        let width = *width;
        let stored = match tensors.find("blocks") {
            None => None,
            Some(blocks) => {
                let numbers = integers("blocks", blocks)?;
                if numbers.len() != pages {
                    let wanted = format!("one number for each of the {pages} pages that were sent");
                    return Err(CheckError::shape("blocks", blocks.shape(), wanted));
                }
                Some(numbers.into_iter().enumerate().map(|(page, number)| (number, page)).collect())
            }
        };
        let blocks = header.cache_blocks.unwrap_or(pages);
        Ok(Self { layout, per_rank, block, blocks, stored, table: integers("block_table", table)?, width })
    }

    /// Requests of the table.
    pub(super) fn requests(&self) -> usize {
        self.table.len().checked_div(self.width).unwrap_or(0)
    }

    /// Tokens that one entry of the table covers.
    fn span(&self) -> usize {
        if self.per_rank { self.layout.virtual_block_tokens() } else { self.block }
    }

    /// Where position `position` of a request lies; `None` where the table does not reach or names no stored block.
    pub(super) fn slot(&self, request: usize, position: usize) -> Option<Slot> {
        let entry = position / self.span();
        if entry >= self.width {
            return None;
        }
        let block = self.table[request * self.width + entry];
        let offset = if self.per_rank { self.layout.local_index(position) } else { position } % self.block;
        Some(Slot { rank: self.layout.owner(position), block, page: self.page(block)?, offset })
    }

    fn page(&self, block: i64) -> Option<usize> {
        match &self.stored {
            Some(stored) => stored.get(&block).copied(),
            None => usize::try_from(block).ok().filter(|page| *page < self.blocks),
        }
    }

    /// # Errors
    /// The table is too short for `seq_len` tokens of the request, or one of its entries names no block.
    pub(super) fn check(&self, request: usize, seq_len: usize) -> Result<(), CheckError> {
        let (width, span) = (self.width, self.span());
        let covers = width * span;
        if covers < seq_len {
            return Err(CheckError::ShortTable { request, width, covers, seq_len });
        }
        for entry in 0..seq_len.div_ceil(span) {
            let block = self.table[request * width + entry];
            let known = usize::try_from(block).is_ok_and(|block| block < self.blocks);
            if !known || self.page(block).is_none() {
                let (blocks, first) = (self.blocks, entry * span);
                return Err(CheckError::NoBlock { request, entry, block, blocks, first });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Subject;
    use shardcheck_engine::Tensor;

    fn pages(world: usize, per_rank: bool) -> Pages {
        let mut header = Header::new(Subject::Decode);
        header.world = world;
        let tensors = Tensors::new().with("block_table", Tensor::from_i32(&[2, 2], &[7, 3, 1, 9]));
        Pages::read(&header, &tensors, per_rank, 8, 4).unwrap()
    }

    #[test]
    fn a_cache_with_ranks_deals_tokens_to_them_and_one_without_keeps_them_in_order() {
        let slot = |pages: &Pages, position| pages.slot(0, position).map(|s| (s.rank, s.block, s.offset));
        assert_eq!(slot(&pages(2, true), 9), Some((1, 3, 0)));
        assert_eq!(slot(&pages(2, false), 5), Some((1, 3, 1)));
        assert_eq!(slot(&pages(1, true), 8), None, "beyond the table");
    }

    #[test]
    fn a_table_that_is_too_short_or_names_no_block_is_refused_with_the_place() {
        let pages = pages(2, true);
        assert!(pages.check(0, 16).is_ok());
        assert!(matches!(pages.check(0, 17), Err(CheckError::ShortTable { covers: 16, .. })));
        let error = pages.check(1, 9).unwrap_err();
        assert!(matches!(error, CheckError::NoBlock { request: 1, entry: 1, block: 9, blocks: 8, first: 8 }));
        assert!(pages.check(1, 8).is_ok(), "an entry that no token needs may be anything");
    }
}
