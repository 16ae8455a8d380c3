//! Which rank holds which token: KV interleaved over W ranks in runs of S tokens, in blocks of B tokens.

use thiserror::Error;

/// Why a layout is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A size is 0.
    #[error("ranks, interleave and block size must be at least 1")]
    Zero,
    /// B is no multiple of S. The slot formula of vLLM, which works inside a virtual block, and the global one would
    /// then name different slots.
    #[error("block size {block_tokens} is no multiple of interleave {interleave_tokens}")]
    Interleave {
        /// B.
        block_tokens: usize,
        /// S.
        interleave_tokens: usize,
    },
}

/// A valid layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interleave {
    ranks: usize,
    interleave_tokens: usize,
    block_tokens: usize,
}

impl Interleave {
    /// W ranks, interleave S, block B.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn new(ranks: usize, interleave_tokens: usize, block_tokens: usize) -> Result<Self, LayoutError> {
        if ranks == 0 || interleave_tokens == 0 || block_tokens == 0 {
            return Err(LayoutError::Zero);
        }
        if !block_tokens.is_multiple_of(interleave_tokens) {
            return Err(LayoutError::Interleave { block_tokens, interleave_tokens });
        }
        Ok(Self { ranks, interleave_tokens, block_tokens })
    }

    /// W.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// S.
    pub fn interleave_tokens(self) -> usize {
        self.interleave_tokens
    }

    /// B.
    pub fn block_tokens(self) -> usize {
        self.block_tokens
    }

    /// W·S, after which owners repeat.
    pub fn round_tokens(self) -> usize {
        self.ranks * self.interleave_tokens
    }

    /// B·W.
    pub fn virtual_block_tokens(self) -> usize {
        self.block_tokens * self.ranks
    }

    /// The rank that holds global position p: (p / S) mod W. Source: ATOM `dcp_owner_rank`, vLLM `cp_local_slot`.
    pub fn owner(self, position: usize) -> usize {
        position / self.interleave_tokens % self.ranks
    }

    /// The index of position p among the tokens of its owner: p / (S·W) · S + p mod S. Source: ATOM `dcp_local_index`.
    pub fn local_index(self, position: usize) -> usize {
        position / self.round_tokens() * self.interleave_tokens + position % self.interleave_tokens
    }

    /// How many of the first `tokens` positions a rank holds. Source: vLLM and ATOM `get_dcp_local_seq_lens`.
    pub fn local_tokens(self, tokens: usize, rank: usize) -> usize {
        let rounds = tokens / self.round_tokens();
        let rest = tokens % self.round_tokens();
        let before = rank * self.interleave_tokens;
        rounds * self.interleave_tokens + rest.saturating_sub(before).min(self.interleave_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layouts() -> Vec<Interleave> {
        let sizes = [(1, 1, 4), (2, 1, 4), (2, 2, 4), (3, 4, 8), (4, 4, 4), (4, 1, 16), (8, 16, 16)];
        sizes.map(|(w, s, b)| Interleave::new(w, s, b).expect("valid")).to_vec()
    }

    #[test]
    fn local_lengths_count_the_owned_positions() {
        for layout in layouts() {
            let mut owned = vec![0; layout.ranks()];
            for position in 0..600 {
                for rank in 0..layout.ranks() {
                    assert_eq!(layout.local_tokens(position, rank), owned[rank], "{layout:?} {position}");
                }
                let owner = layout.owner(position);
                assert_eq!(layout.local_index(position), owned[owner], "{layout:?} {position}");
                owned[owner] += 1;
            }
        }
    }

    #[test]
    fn a_block_table_entry_covers_the_same_tokens_on_every_rank() {
        for layout in layouts() {
            for position in 0..600 {
                let column = position / layout.virtual_block_tokens();
                assert_eq!(
                    layout.local_index(position) / layout.block_tokens(),
                    column,
                    "{layout:?} {position}"
                );
            }
        }
    }

    #[test]
    fn published_lengths_come_out() {
        let lengths = |w, s, tokens| {
            let layout = Interleave::new(w, s, s).expect("valid");
            (0..w).map(|rank| layout.local_tokens(tokens, rank)).collect::<Vec<_>>()
        };
        assert_eq!(lengths(4, 1, 37), [10, 9, 9, 9]);
        assert_eq!(lengths(4, 4, 37), [12, 9, 8, 8]);
        assert_eq!(lengths(4, 1, 3), [1, 1, 1, 0]);
    }

    #[test]
    fn a_block_that_is_no_multiple_of_the_interleave_is_refused() {
        let error = Interleave::new(2, 3, 4).expect_err("4 is no multiple of 3");
        assert_eq!(error, LayoutError::Interleave { block_tokens: 4, interleave_tokens: 3 });
        assert_eq!(Interleave::new(0, 1, 1), Err(LayoutError::Zero));
    }
}
