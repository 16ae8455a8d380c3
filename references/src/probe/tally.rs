//! Sums of signs: what a row that sees certain tokens has to give, rank by rank.

use std::ops::Range;

use super::attribution::{Piece, Sight};
use super::code::{Bits, Code, Token};

/// Tokens and sums of signs of each rank, for one row; of a sight with a part of its own ([`Sight::beside_from`]) that is
/// counted as one rank more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tally {
    world: usize,
    /// `[world]`.
    counts: Vec<i64>,
    /// `[dims, world]`.
    sums: Vec<i64>,
}

impl Tally {
    /// Of no token.
    pub fn nothing(code: &Code) -> Self {
        Self::empty(code, code.layout().world())
    }

    fn empty(code: &Code, world: usize) -> Self {
        Self { world, counts: vec![0; world], sums: vec![0; code.dims() * world] }
    }

    /// Of what a row has to see.
    pub fn seen(code: &Code, sight: Sight) -> Self {
        let mut tally = Self::empty(code, sight.parts(code.layout()));
        for piece in sight.pieces(code.layout()) {
            tally.counts[piece.part] += piece.span.len() as i64;
            for dim in 0..code.dims() {
                tally.sums[dim * tally.world + piece.part] +=
                    code.sum(dim, sight.request, piece.rank, piece.span.clone(), Bits::default());
            }
        }
        tally
    }

    /// Of the tokens among those of a sight for which `bit` is `set`.
    pub(super) fn half(code: &Code, sight: Sight, (bit, set): (Bits, bool)) -> Self {
        let mut tally = Self::empty(code, sight.parts(code.layout()));
        let sign = if set { -1 } else { 1 };
        for Piece { rank, span, part } in sight.pieces(code.layout()) {
            // the constant dimension counts the parity of the bit alone
            let twisted = |dim: usize| code.sum(dim, sight.request, rank, span.clone(), bit);
            tally.counts[part] += (span.len() as i64 + sign * twisted(0)) / 2;
            for dim in 0..code.dims() {
                let plain = code.sum(dim, sight.request, rank, span.clone(), Bits::default());
                tally.sums[dim * tally.world + part] += (plain + sign * twisted(dim)) / 2;
            }
        }
        tally
    }

    /// Of the first `visible` tokens of a request.
    pub fn prefix(code: &Code, request: usize, visible: usize) -> Self {
        Self::seen(code, Sight::of(request, 0, visible))
    }

    /// Of the first `lens[rank]` tokens of a request on each rank.
    pub fn shares(code: &Code, request: usize, lens: &[usize]) -> Self {
        let mut tally = Self::nothing(code);
        for (rank, len) in lens.iter().enumerate() {
            tally.add_span(code, request, rank, 0..*len, 1);
        }
        tally
    }

    /// Adds `times` the tokens at these local indices of a request on a rank.
    pub fn add_span(&mut self, code: &Code, request: usize, rank: usize, span: Range<usize>, times: i64) {
        self.counts[rank] += times * span.len() as i64;
        for dim in 0..code.dims() {
            self.sums[dim * self.world + rank] +=
                times * code.sum(dim, request, rank, span.clone(), Bits::default());
        }
    }

    /// Adds a token `times` times on `rank`, which may be another than its owner.
    pub fn add(&mut self, code: &Code, token: Token, rank: usize, times: i64) {
        self.counts[rank] += times;
        for dim in 0..code.dims() {
            self.sums[dim * self.world + rank] += times * code.sign(dim, token);
        }
    }

    /// Tokens of all ranks.
    pub fn tokens(&self) -> i64 {
        self.counts.iter().sum()
    }

    /// Tokens of each rank.
    pub fn counts(&self) -> &[i64] {
        &self.counts
    }

    /// Sum of a dimension on one rank.
    pub fn rank_sum(&self, dim: usize, rank: usize) -> i64 {
        self.sums[dim * self.world + rank]
    }

    /// Sum of a dimension over all ranks.
    pub fn sum(&self, dim: usize) -> i64 {
        self.sums[dim * self.world..(dim + 1) * self.world].iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::probe::code::Space;

    fn code() -> Code {
        let layout = Layout::new(3, 2, 8).unwrap();
        Code::new(Space { layout, requests: 2, tokens: 100, blocks: 4 }, &[])
    }

    #[test]
    fn a_prefix_is_the_sum_of_its_tokens_each_on_its_owner() {
        let code = code();
        let mut one_by_one = Tally::nothing(&code);
        for position in 0..77 {
            assert_eq!(one_by_one, Tally::prefix(&code, 1, position));
            let token = Token { request: 1, position };
            one_by_one.add(&code, token, code.layout().owner(position), 1);
        }
        assert_eq!(one_by_one.tokens(), 77);
        assert_eq!(one_by_one.sum(0), 77, "the constant dimension counts");
    }

    #[test]
    fn both_halves_of_a_bit_make_the_whole() {
        let code = code();
        for bit in code.token_bits() {
            let half = |set: bool| Tally::half(&code, Sight::of(0, 0, 53), (bit.mask(), set));
            let mut one_by_one = Tally::nothing(&code);
            for position in 0..53 {
                let token = Token { request: 0, position };
                if !code.bit(bit, token) {
                    one_by_one.add(&code, token, code.layout().owner(position), 1);
                }
            }
            assert_eq!(half(false), one_by_one, "{bit:?}");
            let (whole, other) = (Tally::prefix(&code, 0, 53), half(true));
            assert_eq!(half(false).tokens() + other.tokens(), whole.tokens());
            for (dim, rank) in (0..code.dims()).flat_map(|dim| (0..3).map(move |rank| (dim, rank))) {
                let sum = half(false).rank_sum(dim, rank) + other.rank_sum(dim, rank);
                assert_eq!(sum, whole.rank_sum(dim, rank), "dim {dim} rank {rank}");
            }
        }
    }

    #[test]
    fn tokens_beside_those_of_the_ranks_are_a_part_of_their_own() {
        let code = code();
        for (visible, from) in [(53, 50), (53, 0), (53, 53), (0, 0), (7, 60)] {
            let sight = Sight { beside_from: Some(from), ..Sight::of(0, 0, visible) };
            let (seen, ranks) = (Tally::seen(&code, sight), Tally::prefix(&code, 0, visible.min(from)));
            assert_eq!(seen.counts()[..3], *ranks.counts());
            let beside = visible.saturating_sub(from);
            assert_eq!(seen.counts()[3], beside as i64);
            for dim in 0..code.dims() {
                let sum: i64 = (from.min(visible)..visible)
                    .map(|position| code.sign(dim, Token { request: 0, position }))
                    .sum();
                assert_eq!(seen.rank_sum(dim, 3), sum);
                assert_eq!(seen.sum(dim), Tally::prefix(&code, 0, visible).sum(dim));
            }
        }
    }

    #[test]
    fn a_token_may_be_counted_on_a_rank_that_does_not_own_it() {
        let code = code();
        let token = Token { request: 0, position: 0 };
        let mut tally = Tally::nothing(&code);
        tally.add(&code, token, 2, 2);
        assert_eq!(tally.counts(), [0, 0, 2]);
        assert_eq!(tally.rank_sum(0, 2), 2);
        assert_eq!(tally.rank_sum(0, 0), 0);
    }
}
