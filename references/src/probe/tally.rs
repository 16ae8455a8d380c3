//! Sums of signs: what a row that sees certain tokens has to give, rank by rank.

use std::ops::Range;

use super::code::{Bits, Code, Token};

/// Tokens and sums of signs of each rank, for one row.
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
        let world = code.layout().world();
        Self { world, counts: vec![0; world], sums: vec![0; code.dims() * world] }
    }

    /// Of the first `visible` tokens of a request.
    pub fn prefix(code: &Code, request: usize, visible: usize) -> Self {
        let lens: Vec<usize> =
            (0..code.layout().world()).map(|rank| code.layout().local_len(visible, rank)).collect();
        Self::shares(code, request, &lens)
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

    /// Adds `times` the tokens of a request's prefix for which `bit` is `set`.
    pub(super) fn add_half(
        &mut self,
        code: &Code,
        request: usize,
        visible: usize,
        (bit, set): (Bits, bool),
        times: i64,
    ) {
        let sign = if set { -1 } else { 1 };
        for rank in 0..self.world {
            let span = 0..code.layout().local_len(visible, rank);
            let count = span.len() as i64;
            // the constant dimension counts the parity of the bit alone
            let twisted = |dim: usize| code.sum(dim, request, rank, span.clone(), bit);
            self.counts[rank] += times * (count + sign * twisted(0)) / 2;
            for dim in 0..code.dims() {
                let plain = code.sum(dim, request, rank, span.clone(), Bits::default());
                self.sums[dim * self.world + rank] += times * (plain + sign * twisted(dim)) / 2;
            }
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
            let mut halves = Tally::nothing(&code);
            halves.add_half(&code, 0, 53, (bit.mask(), false), 1);
            let mut one_by_one = Tally::nothing(&code);
            for position in 0..53 {
                let token = Token { request: 0, position };
                if !code.bit(bit, token) {
                    one_by_one.add(&code, token, code.layout().owner(position), 1);
                }
            }
            assert_eq!(halves, one_by_one, "{bit:?}");
            halves.add_half(&code, 0, 53, (bit.mask(), true), 1);
            assert_eq!(halves, Tally::prefix(&code, 0, 53));
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
