//! How the tokens of a context are split into parts whose partial results are merged.

use crate::layout::Layout;
use crate::visibility::Visible;

/// A partition of global positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split<'a> {
    /// One part per rank of an interleaved cache.
    Ranks(&'a Layout),
    /// The same for positions before `from`; from there on one more part, whoever's cache they lie in.
    RanksBeside {
        /// Of the positions before `from`.
        layout: &'a Layout,
        /// First position of the part of its own.
        from: usize,
    },
    /// One part per chunk of consecutive tokens; the lengths in tokens. Positions beyond the last chunk belong to
    /// it.
    Chunks(&'a [usize]),
}

impl Split<'_> {
    /// Number of parts.
    pub fn parts(&self) -> usize {
        match self {
            Self::Ranks(layout) => layout.world(),
            Self::RanksBeside { layout, .. } => layout.world() + 1,
            Self::Chunks(lengths) => lengths.len(),
        }
    }

    /// The part that holds the token at `pos`.
    ///
    /// # Panics
    /// There are no parts.
    pub fn part_of(&self, pos: usize) -> usize {
        match self {
            Self::RanksBeside { layout, from } if pos >= *from => layout.world(),
            Self::Ranks(layout) | Self::RanksBeside { layout, .. } => layout.owner(pos),
            Self::Chunks(lengths) => {
                let mut end = 0;
                for (part, length) in lengths.iter().enumerate() {
                    end += length;
                    if pos < end {
                        return part;
                    }
                }
                lengths.len().checked_sub(1).expect("at least one chunk")
            }
        }
    }

    /// The visible positions of each part, ascending.
    pub fn positions(&self, visible: &Visible) -> Vec<Vec<usize>> {
        let mut parts = vec![Vec::new(); self.parts()];
        for pos in visible.positions() {
            parts[self.part_of(pos)].push(pos);
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_consecutive_and_the_last_takes_the_rest() {
        let split = Split::Chunks(&[3, 0, 2]);
        assert_eq!((0..7).map(|pos| split.part_of(pos)).collect::<Vec<_>>(), [0, 0, 0, 2, 2, 2, 2]);
        assert_eq!(split.positions(&Visible::Prefix(5)), [vec![0, 1, 2], vec![], vec![3, 4]]);
    }

    #[test]
    fn ranks_follow_the_layout() {
        let layout = Layout::new(2, 2, 2).unwrap();
        let split = Split::Ranks(&layout);
        assert_eq!(split.positions(&Visible::Range { start: 1, end: 6 }), [vec![1, 4, 5], vec![2, 3]]);
        let beside = Split::RanksBeside { layout: &layout, from: 3 };
        assert_eq!(beside.positions(&Visible::Prefix(6)), [vec![0, 1], vec![2], vec![3, 4, 5]]);
    }
}
