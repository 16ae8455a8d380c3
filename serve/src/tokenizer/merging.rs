//! The merges of a BPE vocabulary and their application to one word.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::{TokenId, TokenizerError};

/// Which pairs join, in which order, into what.
#[derive(Debug, Default)]
pub struct Merges {
    /// Pair → (rank, id of the joined token).
    pairs: HashMap<(TokenId, TokenId), (u32, TokenId)>,
}

/// No neighbour on this side.
const NONE: usize = usize::MAX;

impl Merges {
    /// Reads merges written as `left right`, in rank order; `ids` maps written tokens to ids.
    ///
    /// # Errors
    /// [`TokenizerError::Vocabulary`] if a line has another form or names a token that is not there.
    pub fn parse(lines: &[&str], ids: &HashMap<&str, TokenId>) -> Result<Self, TokenizerError> {
        let mut pairs = HashMap::with_capacity(lines.len());
        for (rank, line) in (0..).zip(lines) {
            let damaged = || TokenizerError::Vocabulary(format!("merge {rank} {line:?} names no tokens"));
            let (left, right) = line.split_once(' ').ok_or_else(damaged)?;
            let id = |written: &str| ids.get(written).copied().ok_or_else(damaged);
            let joined = id(&format!("{left}{right}"))?;
            pairs.entry((id(left)?, id(right)?)).or_insert((rank, joined));
        }
        Ok(Self { pairs })
    }

    /// Joins the pairs of one word until none is left, lowest rank first, leftmost of equals, and appends the result.
    ///
    /// A heap holds the candidate pairs, so that a word of n bytes takes O(n log n): a megabyte of one letter is one
    /// word, and must not stall the server.
    pub fn apply(&self, mut symbols: Vec<TokenId>, ids: &mut Vec<TokenId>) {
        let count = symbols.len();
        let mut previous: Vec<usize> = (0..count).map(|at| at.wrapping_sub(1)).collect();
        let mut next: Vec<usize> = (1..=count).map(|at| if at == count { NONE } else { at }).collect();
        let mut alive = vec![true; count];
        let mut candidates = BinaryHeap::new();
        let candidate = |left: usize, right: usize, symbols: &[TokenId]| {
            let pair = (symbols[left], symbols[right]);
            self.pairs.get(&pair).map(|(rank, _)| Reverse((*rank, left, pair)))
        };
        for at in 1..count {
            candidates.extend(candidate(at - 1, at, &symbols));
        }
        while let Some(Reverse((_, left, pair))) = candidates.pop() {
            let right = next[left];
            // A candidate is stale once either of its symbols was joined with another.
            if !alive[left] || right == NONE || (symbols[left], symbols[right]) != pair {
                continue;
            }
            symbols[left] = self.pairs[&pair].1;
            alive[right] = false;
            next[left] = next[right];
            if next[left] != NONE {
                previous[next[left]] = left;
                candidates.extend(candidate(left, next[left], &symbols));
            }
            if previous[left] != NONE {
                candidates.extend(candidate(previous[left], left, &symbols));
            }
        }
        ids.extend((0..count).filter(|at| alive[*at]).map(|at| symbols[at]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Merges over single letters a, b, c, … and what they join to.
    fn merges(lines: &[&str]) -> (Merges, Vec<String>) {
        let mut written: Vec<String> = ('a'..='f').map(String::from).collect();
        written.extend(lines.iter().map(|line| line.replace(' ', "")));
        let ids: HashMap<&str, TokenId> = (0..).zip(&written).map(|(id, text)| (text.as_str(), id)).collect();
        let merges = Merges::parse(lines, &ids).expect("well-formed merges");
        (merges, written)
    }

    fn pieces(lines: &[&str], word: &str) -> Vec<String> {
        let (merges, written) = merges(lines);
        let mut ids = Vec::new();
        merges.apply(word.bytes().map(|b| u32::from(b - b'a')).collect(), &mut ids);
        ids.iter().map(|id| written[*id as usize].clone()).collect()
    }

    #[test]
    fn the_lowest_rank_joins_first_wherever_it_stands() {
        assert_eq!(pieces(&["b c", "a b"], "abc"), ["a", "bc"]);
        assert_eq!(pieces(&["a b", "b c"], "abc"), ["ab", "c"]);
    }

    #[test]
    fn of_equal_pairs_the_leftmost_joins_first() {
        assert_eq!(pieces(&["a a"], "aaa"), ["aa", "a"]);
        assert_eq!(pieces(&["a a", "aa aa"], "aaaaaaa"), ["aaaa", "aa", "a"]);
    }

    #[test]
    fn a_joined_token_joins_again() {
        assert_eq!(pieces(&["a b", "c d", "ab cd", "abcd e"], "abcdef"), ["abcde", "f"]);
    }

    #[test]
    fn an_empty_word_gives_nothing_and_one_byte_itself() {
        assert!(pieces(&["a b"], "").is_empty());
        assert_eq!(pieces(&["a b"], "b"), ["b"]);
    }

    #[test]
    fn a_merge_that_names_no_token_is_refused() {
        let ids = HashMap::from([("a", 0), ("b", 1), ("ab", 2)]);
        assert!(Merges::parse(&["a b"], &ids).is_ok());
        for bad in ["a c", "ab", "b a"] {
            assert!(matches!(Merges::parse(&[bad], &ids), Err(TokenizerError::Vocabulary(_))), "{bad}");
        }
    }

    #[test]
    fn the_heap_gives_what_repeated_search_gives() {
        let lines = ["a b", "b a", "ab a", "a a", "aa b", "ba ba", "aba aba"];
        let (merges, _) = merges(&lines);
        for seed in 0..2000u32 {
            let word: Vec<TokenId> = (0..seed % 23).map(|i| seed >> (i % 11) & 1).collect();
            let mut slow = word.clone();
            loop {
                let ranked = (1..slow.len()).filter_map(|at| {
                    let (rank, id) = *merges.pairs.get(&(slow[at - 1], slow[at]))?;
                    Some((rank, at, id))
                });
                let Some((_, at, id)) = ranked.min() else { break };
                slow.splice(at - 1..=at, [id]);
            }
            let mut fast = Vec::new();
            merges.apply(word.clone(), &mut fast);
            assert_eq!(fast, slow, "{word:?}");
        }
    }
}
