//! Reading back which tokens a row saw from what came out.

use std::ops::RangeInclusive;

use super::attribution::{Attribution, Sight};
use super::code::{Code, Token};
use super::expectation::{Expectation, Rounding};
use super::tally::Tally;

/// What came out for one row and head.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// `[dims of the code]`, divided by the value that stands for 1.
    pub out: &'a [f64],
    /// Natural LSE, where the engine gives one: it counts the tokens.
    pub lse: Option<f64>,
}

/// Reads rows of a batch whose scores are all zero and whose values spell their tokens.
#[derive(Debug, Clone, Copy)]
pub struct Decoder<'a> {
    /// The code of the values.
    pub code: &'a Code,
    /// How outputs round.
    pub rounding: Rounding<'a>,
    /// The rows of the batch: a row may see what is another one's.
    pub rows: &'a [Sight],
    /// Tokens of each request that were written.
    pub written: &'a [usize],
    /// Block table of each request, to name slots that hold no token; empty where slots of nobody are not coded.
    pub tables: &'a [&'a [i32]],
}

/// How many tokens a row may have counted.
pub(super) type Counts = RangeInclusive<i64>;

/// Tokens of the ranks, and the sum of a dimension on a rank.
pub(super) struct Candidate<'c> {
    pub counts: &'c [i64],
    pub sum: &'c dyn Fn(usize, usize) -> i64,
}

impl<'a> Decoder<'a> {
    /// What a row has to give.
    pub fn expectation(&self, sight: Sight) -> Expectation {
        let tally = Tally::seen(self.code, sight);
        Expectation::of(&tally, self.code.dims(), &self.rounding)
    }

    /// What is wrong with the tokens that a row saw; `None` where nothing is.
    ///
    /// # Panics
    /// `seen` does not have the dimensions of the code.
    pub fn decode(&self, sight: Sight, seen: &Seen) -> Option<Attribution> {
        assert_eq!(seen.out.len(), self.code.dims(), "an output has the dimensions of the code");
        let right = Tally::seen(self.code, sight);
        self.decode_against(sight, &right, seen)
    }

    /// [`Self::decode`] with the tally of what the row has to see, made once for many outputs.
    pub fn decode_against(&self, sight: Sight, right: &Tally, seen: &Seen) -> Option<Attribution> {
        if self.is(right, seen) {
            return None;
        }
        let finite = seen.out.iter().all(|value| value.is_finite());
        if !finite || seen.lse.is_some_and(f64::is_nan) {
            return Some(Attribution::NotFinite);
        }
        // what is lost is looked for on the ranks that own it
        let right = &Tally::prefix(self.code, sight.request, sight.visible);
        let counts = self.counts(right.tokens(), seen);
        let found = None
            .or_else(|| self.as_one_token(sight, right, &counts, seen))
            .or_else(|| self.as_other_prefix(sight, &counts, seen))
            .or_else(|| self.as_other_row(sight, &counts, seen))
            .or_else(|| self.as_other_shares(sight, right, &counts, seen))
            .or_else(|| self.as_exchange(sight, right, &counts, seen))
            .or_else(|| self.as_pages(sight, right, &counts, seen))
            .or_else(|| self.as_other_interleave(sight, &counts, seen))
            .or_else(|| self.as_other_weights(right, seen));
        Some(found.unwrap_or_else(|| Attribution::Unexplained {
            tokens:
                seen.lse.filter(|lse| lse.is_finite() && *lse < 40.0).map(|lse| lse.exp().round() as usize),
        }))
    }

    /// Whether a row that saw these tokens may have come out so.
    pub(super) fn is(&self, tally: &Tally, seen: &Seen) -> bool {
        let sum = |dim: usize, rank: usize| tally.rank_sum(dim, rank);
        self.fits(&Candidate { counts: tally.counts(), sum: &sum }, seen)
    }

    /// Likewise for a candidate whose sums are made as they are needed.
    pub(super) fn fits(&self, candidate: &Candidate, seen: &Seen) -> bool {
        let tokens: i64 = candidate.counts.iter().sum();
        if tokens <= 0 || candidate.counts.iter().any(|count| *count < 0) {
            let empty = seen.lse.is_none_or(|lse| lse == f64::NEG_INFINITY);
            return tokens == 0 && empty && seen.out.iter().all(|value| *value == 0.0);
        }
        let lse = (tokens as f64).ln();
        if seen.lse.is_some_and(|seen| !within(seen, lse, self.rounding.lse_bound(tokens, 0.0))) {
            return false;
        }
        (0..self.code.dims()).all(|dim| {
            let sum = |rank: usize| (candidate.sum)(dim, rank);
            self.rounding.element(candidate.counts, sum, lse).admits(seen.out[dim])
        })
    }

    /// Token counts that the LSE admits; a window around the right count without one.
    fn counts(&self, right: i64, seen: &Seen) -> Counts {
        let Some(lse) = seen.lse else {
            let reach = 2 * self.code.layout().virtual_block_tokens() as i64;
            return (right - reach).max(0)..=right + reach;
        };
        if lse == f64::NEG_INFINITY {
            return 0..=0;
        }
        let bound = self.rounding.lse_bound(lse.min(40.0).exp() as i64, 0.0);
        let (low, high) = ((lse - bound).exp().ceil(), (lse + bound).min(40.0).exp().floor());
        low as i64..=high as i64
    }

    /// One token more or less: its signs are the difference.
    fn as_one_token(&self, sight: Sight, right: &Tally, counts: &Counts, seen: &Seen) -> Option<Attribution> {
        [-1, 1].into_iter().find_map(|times| {
            let tokens = right.tokens() + times;
            if !counts.contains(&tokens) {
                return None;
            }
            let (token, sign) = self.code.spell(&self.difference(right, tokens, seen))?;
            let own = token.request == sight.request && token.position < sight.visible;
            if sign != times || times < 0 && !own {
                return None;
            }
            let owner = self.code.layout().owner(token.position);
            let world = right.counts().len();
            // a copy may lie on any rank; a missing token is missing on its own
            let ranks = std::iter::once(owner).chain((0..world).filter(|rank| times > 0 && *rank != owner));
            for rank in ranks {
                if self.fits_with(right, &[(token, rank, times)], seen) {
                    return Some(one_token(sight, token, times, own));
                }
            }
            None
        })
    }

    /// One token in place of another.
    fn as_exchange(&self, sight: Sight, right: &Tally, counts: &Counts, seen: &Seen) -> Option<Attribution> {
        if !counts.contains(&right.tokens()) {
            return None;
        }
        let difference = self.difference(right, right.tokens(), seen);
        let pairs = self.pairs(sight, &difference);
        let fitting: Vec<(Token, Token)> = pairs
            .into_iter()
            .filter(|(lost, counted)| {
                let layout = self.code.layout();
                let (from, to) = (layout.owner(lost.position), layout.owner(counted.position));
                // the copy lies where the missing token lay, or where the doubled one is at home
                [from, to]
                    .into_iter()
                    .any(|rank| self.fits_with(right, &[(*lost, from, -1), (*counted, rank, 1)], seen))
            })
            .collect();
        let distance = |(lost, counted): &(Token, Token)| {
            let elsewhere = usize::from(counted.request != lost.request);
            (elsewhere, counted.position.abs_diff(lost.position))
        };
        let (lost, counted) = *fitting.iter().min_by_key(|pair| distance(pair))?;
        Some(Attribution::Exchanged { lost, counted, among: fitting.len() })
    }

    /// Pairs *(lost, counted)* whose signs differ as observed.
    ///
    /// Where the first spelling sign of both differs, the bits in which they agree are those whose sign differs too, and
    /// the other way round: either way the bits in which the places differ are known.
    pub(super) fn pairs(&self, sight: Sight, difference: &[i64]) -> Vec<(Token, Token)> {
        if difference.iter().any(|value| ![-2, 0, 2].contains(value)) || difference.iter().all(|v| *v == 0) {
            return Vec::new();
        }
        let mut apart = super::code::Bits::default();
        for (bit, value) in self.code.spelt_bits().into_iter().zip(&difference[1..]) {
            if (*value == 0) == (difference[0] != 0) {
                let mask = bit.mask();
                apart.request |= mask.request;
                apart.owner |= mask.owner;
                apart.page |= mask.page;
                apart.offset |= mask.offset;
            }
        }
        let spelling = self.code.spelling();
        (0..sight.visible)
            .filter_map(|position| {
                let lost = Token { request: sight.request, position };
                let counted = self.code.across(lost, apart)?;
                let differ = |dim: usize| self.code.sign(dim, counted) - self.code.sign(dim, lost);
                let same = spelling.clone().zip(difference).all(|(dim, value)| differ(dim) == *value);
                same.then_some((lost, counted))
            })
            .collect()
    }

    /// Spelling dimensions: rounded output times tokens, less the right sum.
    pub(super) fn difference(&self, right: &Tally, tokens: i64, seen: &Seen) -> Vec<i64> {
        let spelling = self.code.spelling();
        spelling.map(|dim| (seen.out[dim] * tokens as f64).round() as i64 - right.sum(dim)).collect()
    }

    /// Whether the tally with some tokens added or taken away, `(token, rank, times)`, may have come out so.
    pub(super) fn fits_with(&self, right: &Tally, edits: &[(Token, usize, i64)], seen: &Seen) -> bool {
        let mut counts = right.counts().to_vec();
        edits.iter().for_each(|(_, rank, times)| counts[*rank] += times);
        let sum = |dim: usize, rank: usize| {
            let edits = edits.iter().filter(|(_, on, _)| *on == rank);
            right.rank_sum(dim, rank)
                + edits.map(|(token, _, times)| times * self.code.sign(dim, *token)).sum::<i64>()
        };
        self.fits(&Candidate { counts: &counts, sum: &sum }, seen)
    }
}

/// The last token is the end of a prefix, and the next one its continuation.
fn one_token(sight: Sight, token: Token, times: i64, own: bool) -> Attribution {
    let at = |position: usize| token.request == sight.request && token.position == position;
    match (times, own) {
        (-1, _) if at(sight.visible - 1) => Attribution::PrefixShort { seen: sight.visible - 1 },
        (-1, _) => Attribution::Lost(token),
        (_, true) => Attribution::Doubled(token),
        _ if at(sight.visible) => Attribution::PrefixLong { seen: sight.visible + 1 },
        _ => Attribution::Foreign(token),
    }
}

pub(super) fn within(seen: f64, expected: f64, bound: f64) -> bool {
    (seen - expected).abs() <= bound
}
