//! Which tokens of a context a query row may see.

use crate::layout::Layout;
use thiserror::Error;

/// Why a list of positions is not a visible set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum VisibilityError {
    /// A position is listed twice: attention would count the token twice.
    #[error("position {0} is listed twice: a token is seen once or not at all")]
    Duplicate(usize),
}

/// The tokens that one query row sees, as global positions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Visible {
    /// Positions `0..n`.
    Prefix(usize),
    /// Positions `start..end`; empty if `start >= end`.
    Range {
        /// First visible position.
        start: usize,
        /// One past the last visible position.
        end: usize,
    },
    /// Any positions, strictly ascending. Build it with [`Visible::set`].
    Set(Vec<usize>),
}

impl Visible {
    /// The rows of causal multi-token verification: row `t` of the last `q_len` tokens of a request of
    /// `seq_len` tokens sees every token up to its own. A row before the first token sees nothing.
    pub fn causal(seq_len: usize, q_len: usize) -> Vec<Self> {
        (0..q_len).map(|row| Self::Prefix((seq_len + 1 + row).saturating_sub(q_len))).collect()
    }

    /// The rows of a bidirectional draft block: each sees the whole request, later rows of the block included.
    pub fn draft_block(seq_len: usize, rows: usize) -> Vec<Self> {
        vec![Self::Prefix(seq_len); rows]
    }

    /// The rows of attention to a cached context of `context_len` tokens that all precede the query.
    pub fn context(context_len: usize, rows: usize) -> Vec<Self> {
        vec![Self::Prefix(context_len); rows]
    }

    /// The rows of causal attention in which a row sees itself and the `window − 1` tokens before it
    /// (Mistral, gpt-oss, Gemma 2: key `j` is visible to query `i` iff `i − window < j ≤ i`).
    pub fn sliding_window(seq_len: usize, q_len: usize, window: usize) -> Vec<Self> {
        (0..q_len)
            .map(|row| {
                let end = (seq_len + 1 + row).saturating_sub(q_len);
                Self::Range { start: end.saturating_sub(window), end }
            })
            .collect()
    }

    /// Any set of positions, in any order, as a sparse indexer returns it.
    ///
    /// # Errors
    /// A position is listed twice.
    pub fn set(mut positions: Vec<usize>) -> Result<Self, VisibilityError> {
        positions.sort_unstable();
        match positions.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(VisibilityError::Duplicate(pair[0])),
            None => Ok(Self::Set(positions)),
        }
    }

    /// How many tokens are visible.
    pub fn len(&self) -> usize {
        match self {
            Self::Prefix(n) => *n,
            Self::Range { start, end } => end.saturating_sub(*start),
            Self::Set(positions) => positions.len(),
        }
    }

    /// Whether no token is visible.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the token at `pos` is visible.
    pub fn contains(&self, pos: usize) -> bool {
        match self {
            Self::Prefix(n) => pos < *n,
            Self::Range { start, end } => (*start..*end).contains(&pos),
            Self::Set(positions) => positions.binary_search(&pos).is_ok(),
        }
    }

    /// One past the largest visible position; 0 if nothing is visible.
    pub fn end(&self) -> usize {
        match self {
            Self::Prefix(n) => *n,
            Self::Range { start, end } => {
                if start < end {
                    *end
                } else {
                    0
                }
            }
            Self::Set(positions) => positions.last().map_or(0, |last| last + 1),
        }
    }

    /// The visible positions, ascending.
    pub fn positions(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match self {
            Self::Prefix(n) => Box::new(0..*n),
            Self::Range { start, end } => Box::new(*start..*end),
            Self::Set(positions) => Box::new(positions.iter().copied()),
        }
    }

    /// The part of this set that `rank` stores.
    pub fn on_rank(&self, layout: &Layout, rank: usize) -> Self {
        Self::Set(self.positions().filter(|&pos| layout.owner(pos) == rank).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verification_row_sees_itself_and_nothing_later() {
        let rows = Visible::causal(10, 4);
        assert_eq!(rows.iter().map(Visible::len).collect::<Vec<_>>(), [7, 8, 9, 10]);
        for (row, visible) in rows.iter().enumerate() {
            let own = 10 - 4 + row;
            assert!(visible.contains(own) && !visible.contains(own + 1));
        }
    }

    #[test]
    fn a_query_longer_than_its_request_has_rows_that_see_nothing() {
        let rows = Visible::causal(2, 4);
        assert_eq!(rows.iter().map(Visible::len).collect::<Vec<_>>(), [0, 0, 1, 2]);
        assert!(rows[0].is_empty() && rows[0].end() == 0);
    }

    #[test]
    fn a_draft_row_sees_the_rows_after_it() {
        let rows = Visible::draft_block(9, 3);
        assert!(rows.iter().all(|row| row.contains(8) && row.len() == 9));
    }

    #[test]
    fn a_window_counts_the_query_itself() {
        let lens: Vec<_> = Visible::sliding_window(7, 7, 3).iter().map(Visible::len).collect();
        assert_eq!(lens, [1, 2, 3, 3, 3, 3, 3]);
        let last = &Visible::sliding_window(7, 7, 3)[6];
        assert!(!last.contains(3) && last.contains(4) && last.contains(6));
    }

    #[test]
    fn a_set_is_sorted_and_refuses_a_token_listed_twice() {
        assert_eq!(Visible::set(vec![5, 1, 3]).unwrap(), Visible::Set(vec![1, 3, 5]));
        assert_eq!(Visible::set(vec![5, 1, 5]), Err(VisibilityError::Duplicate(5)));
    }

    #[test]
    fn all_forms_of_the_same_set_agree() {
        let forms = [Visible::Prefix(6), Visible::Range { start: 0, end: 6 }, Visible::Set((0..6).collect())];
        for form in &forms {
            assert_eq!((form.len(), form.end(), form.is_empty()), (6, 6, false));
            assert_eq!(form.positions().collect::<Vec<_>>(), (0..6).collect::<Vec<_>>());
            assert!((0..9).all(|pos| form.contains(pos) == (pos < 6)));
        }
    }

    #[test]
    fn an_inverted_range_is_empty() {
        let none = Visible::Range { start: 4, end: 2 };
        assert!(none.is_empty() && none.positions().next().is_none() && none.end() == 0);
    }

    #[test]
    fn the_parts_of_all_ranks_make_up_the_whole() {
        let layout = Layout::new(3, 2, 4).unwrap();
        let whole = Visible::Range { start: 3, end: 29 };
        let mut parts: Vec<usize> =
            (0..3).flat_map(|rank| whole.on_rank(&layout, rank).positions().collect::<Vec<_>>()).collect();
        parts.sort_unstable();
        assert_eq!(parts, whole.positions().collect::<Vec<_>>());
    }
}
