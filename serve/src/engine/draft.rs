//! Draft tokens by prompt lookup: what followed the last time that the same few tokens stood there.

use crate::tokenizer::TokenId;

/// Longest and shortest run that is looked up.
const RUN: std::ops::RangeInclusive<usize> = 2..=4;

/// Up to `count` tokens that may come next: those after the latest earlier place where the last 4, else 3, else 2 tokens
/// stood. Empty if there is none. Source of the method: vLLM's `ngram` speculator.
pub fn propose(tokens: &[TokenId], count: usize) -> Vec<TokenId> {
    for length in RUN.rev() {
        let Some(start) = tokens.len().checked_sub(length) else { continue };
        let run = &tokens[start..];
        let earlier = (0..start).rev().find(|at| &tokens[*at..*at + length] == run);
        if let Some(at) = earlier {
            let follows = &tokens[at + length..];
            return follows[..follows.len().min(count)].to_vec();
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_earlier_place_of_the_longest_run_is_continued() {
        assert_eq!(propose(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 3), [4, 8, 1]);
        assert_eq!(
            propose(&[7, 1, 2, 3, 9, 1, 2, 5, 7, 1, 2], 2),
            [3, 9],
            "a run of three beats a later run of two"
        );
        assert_eq!(propose(&[5, 5, 5], 4), [5], "a run may overlap its earlier place");
    }

    #[test]
    fn nothing_is_proposed_where_nothing_repeats() {
        assert!(propose(&[1, 2, 3, 4], 3).is_empty());
        assert!(propose(&[1], 3).is_empty());
        assert!(propose(&[], 3).is_empty());
        assert!(propose(&[1, 2, 1, 2], 0).is_empty());
    }
}
