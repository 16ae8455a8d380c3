//! Keys that let chosen tokens through: half of them by one bit of their place (P2), or one alone (P3).
//!
//! A key holds 0 in the column of a bit that its token has set and a large negative number in that of a bit that it has
//! not. A query that is positive in one column scores 0 on tokens with the bit and far below on the others; a negative
//! one scores far above on tokens *without* it. The gap is so wide that what is not chosen underflows to exactly zero.
//! All numbers are powers of two that every 8-bit format holds: 16 and 256, or 32 and 128 for e4m3fnuz, which ends at 240.

use shardcheck_formats::dtype::Dtype;

use super::attribution::Sight;
use super::code::{Bit, Code, Token};
use super::decode::Decoder;
use super::expectation::{Expectation, Rounding};
use super::tally::Tally;

/// Score below the largest at which `exp` is zero in binary32, subnormals included: `ln 2^−150` is −104.
const UNDERFLOW: f64 = 104.0;
/// Largest query and key, so that scores stay exact multiples in binary32.
const LARGEST_QUERY: f64 = 16384.0;
/// Largest key where the format does not limit it before.
const LARGEST_KEY: f64 = 256.0;

/// Half of the tokens: those with a bit, or those without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Selector {
    /// The bit.
    pub bit: Bit,
    /// Whether tokens that have it set are chosen.
    pub set: bool,
}

/// Why keys cannot select.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum SelectError {
    /// A key has no column for a bit.
    #[error("a key has no column to spare: give it at least one that carries no value")]
    NoColumn,
    /// What is not chosen would still count.
    #[error(
        "scores differ by {gap:.1} at most, and exp underflows to zero at 104: use a larger softmax scale or cache scale"
    )]
    NarrowGap {
        /// Widest gap that the formats allow.
        gap: f64,
    },
}

/// One column or more of a key that let a token through or shut it out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gate {
    columns: usize,
    key: f64,
    query: f64,
    gap: f64,
}

impl Gate {
    /// A gate of at most `width` columns, for a cache of `dtype` that multiplies its codes by `kv_scale`.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn new(width: usize, dtype: Dtype, kv_scale: f64, softmax_scale: f64) -> Result<Self, SelectError> {
        if width == 0 {
            return Err(SelectError::NoColumn);
        }
        let narrow = dtype == Dtype::E4m3fnuz;
        let (mut key, mut query) = if narrow { (32.0, 128.0) } else { (16.0, 256.0) };
        let largest = LARGEST_KEY.min(dtype.max_finite());
        let mut columns = 1;
        let gap =
            |key: f64, query: f64, columns: usize| key * kv_scale * query * softmax_scale * columns as f64;
        while gap(key, query, columns) < 1.1 * UNDERFLOW {
            if 2.0 * key <= largest {
                key *= 2.0;
            } else if columns < width {
                columns += 1;
            } else if 2.0 * query <= LARGEST_QUERY {
                query *= 2.0;
            } else {
                return Err(SelectError::NarrowGap { gap: gap(key, query, columns) });
            }
        }
        Ok(Self { columns, key, query, gap: gap(key, query, columns) })
    }

    /// Columns of a key's spare part, as codes of the cache: open for a token or shut.
    ///
    /// # Panics
    /// `out` has fewer columns than were promised.
    pub fn key(&self, open: bool, out: &mut [f32]) {
        out.fill(0.0);
        out[..self.columns].fill(if open { 0.0 } else { -self.key as f32 });
    }

    /// Columns of the query that goes through open tokens alone, which score 0.
    ///
    /// # Panics
    /// As [`Self::key`].
    pub fn query(&self, out: &mut [f32]) {
        out.fill(0.0);
        out[..self.columns].fill(self.query as f32);
    }
}

/// Keys and queries that select by bits of a token's place.
#[derive(Debug, Clone, PartialEq)]
pub struct KeySelect {
    bits: Vec<Bit>,
    width: usize,
    gate: Gate,
}

impl KeySelect {
    /// Selection by these bits, with `width` columns of a key to spare, for a cache of `dtype` that multiplies its codes by
    /// `kv_scale`.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn new(
        bits: Vec<Bit>,
        width: usize,
        dtype: Dtype,
        kv_scale: f64,
        softmax_scale: f64,
    ) -> Result<Self, SelectError> {
        // columns are spent on a wider gap only where each bit still has its own
        let spare = (width / bits.len().max(1)).max(usize::from(width > 0));
        let gate = Gate::new(spare, dtype, kv_scale, softmax_scale)?;
        Ok(Self { bits, width, gate })
    }

    /// Score by which a chosen token exceeds one that differs in one bit.
    pub fn gap(&self) -> f64 {
        self.gate.gap
    }

    /// Bits that one launch selects by.
    fn bits_a_launch(&self) -> usize {
        (self.width / self.gate.columns).min(self.bits.len().max(1))
    }

    /// Launches that all bits need, since a key has room for some of them.
    pub fn launches(&self) -> usize {
        self.bits.len().div_ceil(self.bits_a_launch())
    }

    /// The selectors of a launch: each of its bits, set and not set.
    pub fn selectors(&self, launch: usize) -> Vec<Selector> {
        self.bits_of(launch)
            .iter()
            .flat_map(|bit| [true, false].map(|set| Selector { bit: *bit, set }))
            .collect()
    }

    fn bits_of(&self, launch: usize) -> &[Bit] {
        let first = launch * self.bits_a_launch();
        &self.bits[first..(first + self.bits_a_launch()).min(self.bits.len())]
    }

    /// The spare columns of a token's key, as codes of the cache: to be multiplied by its scale.
    ///
    /// # Panics
    /// `out` has fewer columns than were promised.
    pub fn key(&self, code: &Code, token: Token, launch: usize, out: &mut [f32]) {
        out.fill(0.0);
        for (bit, columns) in self.bits_of(launch).iter().zip(out[..self.width].chunks_mut(self.gate.columns))
        {
            if !code.bit(*bit, token) {
                columns.fill(-self.gate.key as f32);
            }
        }
    }

    /// The spare columns of a query that selects half of the tokens.
    ///
    /// # Panics
    /// The selector is none of that launch.
    pub fn query(&self, selector: Selector, launch: usize, out: &mut [f32]) {
        out.fill(0.0);
        let place = self.bits_of(launch).iter().position(|bit| *bit == selector.bit);
        let first = place.expect("a selector of this launch") * self.gate.columns;
        let query = if selector.set { self.gate.query } else { -self.gate.query };
        out[first..first + self.gate.columns].fill(query as f32);
    }

    /// Whether one launch has all bits, so that a single token can be picked.
    pub fn can_pick(&self) -> bool {
        self.launches() <= 1
    }

    /// The spare columns of a query that picks one token among those of its request.
    ///
    /// # Panics
    /// Not all bits are in one launch.
    pub fn needle(&self, code: &Code, token: Token, out: &mut [f32]) {
        assert!(self.can_pick(), "a needle needs a column for every bit");
        out.fill(0.0);
        for (bit, columns) in self.bits.iter().zip(out.chunks_mut(self.gate.columns)) {
            columns.fill(if code.bit(*bit, token) {
                self.gate.query as f32
            } else {
                -self.gate.query as f32
            });
        }
    }

    /// Tokens that a selector lets through of the first `visible` of a request, and their common score. Where no token is
    /// on its side, all others score alike and come through.
    pub fn chosen(&self, code: &Code, selector: Selector, sight: Sight) -> (Tally, f64) {
        let half = Tally::half(code, sight, (selector.bit.mask(), selector.set));
        match (half.tokens(), selector.set) {
            (0, true) => (Tally::seen(code, sight), -self.gate.gap),
            (0, false) => (Tally::seen(code, sight), 0.0),
            (_, true) => (half, 0.0),
            (_, false) => (half, self.gate.gap),
        }
    }

    /// What a row has to give under a selector, in the first `dims` dimensions of the code.
    pub fn expectation(
        &self,
        code: &Code,
        selector: Selector,
        sight: Sight,
        dims: usize,
        rounding: &Rounding,
    ) -> Expectation {
        let (tally, score) = self.chosen(code, selector, sight);
        let rounding = rounding.with_scores_up_to(self.gap());
        let mut expectation = Expectation::of(&tally, dims, &rounding);
        expectation.lse += score;
        expectation.lse_bound = rounding.lse_bound(tally.tokens(), score);
        expectation
    }

    /// Two tokens whose keys go with each other's values, from what selectors gave instead: `(selector, differences)` of the
    /// spelling dimensions, the selectors whose difference is zero included. The pairs that explain all of them.
    pub fn mispaired(
        decoder: &Decoder,
        sight: Sight,
        differences: &[(Selector, Vec<i64>)],
    ) -> Vec<(Token, Token)> {
        let code = decoder.code;
        let Some((_, shown)) = differences.iter().find(|(_, values)| values.iter().any(|value| *value != 0))
        else {
            return Vec::new();
        };
        let explains = |first: Token, second: Token| {
            differences.iter().all(|(selector, values)| {
                let (a, b) = (code.bit(selector.bit, first), code.bit(selector.bit, second));
                // the one on the selector's side is counted with the other's value
                let (lost, counted) = if a == selector.set { (first, second) } else { (second, first) };
                code.spelling().zip(values).all(|(dim, value)| {
                    let change = code.sign(dim, counted) - code.sign(dim, lost);
                    *value == if a == b { 0 } else { change }
                })
            })
        };
        let mut pairs: Vec<(Token, Token)> = decoder
            .pairs(sight, shown)
            .into_iter()
            .map(|(a, b)| (a.min(b), a.max(b)))
            .filter(|(a, b)| a.request == b.request && explains(*a, *b))
            .collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::probe::code::Space;

    fn code(world: usize) -> Code {
        let layout = Layout::new(world, 2, 8).unwrap();
        Code::new(Space { layout, requests: 2, tokens: 300, blocks: 0 }, &[])
    }

    fn score(select: &KeySelect, key: &[f32], query: &[f32], scale: f64) -> f64 {
        assert_eq!(key.len(), select.width);
        key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>() * scale
    }

    #[test]
    fn a_selector_lets_its_half_through_and_nothing_else() {
        let code = code(3);
        let select = KeySelect::new(code.token_bits(), 4, Dtype::Bf16, 1.0, 0.25).unwrap();
        assert!(select.launches() > 1, "four columns are fewer than the bits");
        let (mut key, mut query) = ([0.0; 4], [0.0; 4]);
        for launch in 0..select.launches() {
            for selector in select.selectors(launch) {
                select.query(selector, launch, &mut query);
                let best = if selector.set { 0.0 } else { select.gap() };
                for position in 0..300 {
                    let token = Token { request: 1, position };
                    select.key(&code, token, launch, &mut key);
                    let score = score(&select, &key, &query, 0.25);
                    let chosen = code.bit(selector.bit, token) == selector.set;
                    assert_eq!(score, if chosen { best } else { best - select.gap() });
                }
            }
        }
        assert!((-select.gap()).exp() as f32 == 0.0);
    }

    #[test]
    fn a_needle_picks_one_token() {
        let code = code(5);
        let bits = code.token_bits();
        let select = KeySelect::new(bits.clone(), bits.len(), Dtype::E4m3fn, 1.0, 0.1).unwrap();
        assert!(select.can_pick());
        let (mut key, mut query) = (vec![0.0; bits.len()], vec![0.0; bits.len()]);
        for picked in [0, 1, 17, 255, 299] {
            select.needle(&code, Token { request: 0, position: picked }, &mut query);
            let scores: Vec<f64> = (0..300)
                .map(|position| {
                    select.key(&code, Token { request: 0, position }, 0, &mut key);
                    score(&select, &key, &query, 0.1)
                })
                .collect();
            for (position, score) in scores.iter().enumerate().filter(|(position, _)| *position != picked) {
                assert!(scores[picked] - score >= 104.0, "{picked} {position}");
            }
        }
    }

    #[test]
    fn numbers_are_held_by_the_cache_format_exactly() {
        for dtype in [Dtype::Bf16, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2] {
            let bits = code(2).token_bits();
            let select = KeySelect::new(bits, 12, dtype, 0.02, 0.25).unwrap();
            let held = shardcheck_formats::codec::round(dtype, select.gate.key);
            assert_eq!(held, select.gate.key, "{dtype}");
            assert!(select.gap() >= 104.0);
            if dtype == Dtype::E4m3fnuz {
                assert!(select.gate.query <= 240.0 || select.gate.key == 128.0);
            }
        }
        let fnuz = KeySelect::new(code(2).token_bits(), 12, Dtype::E4m3fnuz, 1.0, 0.1).unwrap();
        assert_eq!((fnuz.gate.key, fnuz.gate.query), (32.0, 128.0));
    }

    #[test]
    fn a_gap_that_is_too_narrow_is_refused_and_says_what_to_do() {
        let bits = code(2).token_bits();
        let error = KeySelect::new(bits.clone(), 12, Dtype::E4m3fn, 1e-7, 1e-3).unwrap_err();
        assert!(error.to_string().contains("larger softmax scale"), "{error}");
        assert_eq!(KeySelect::new(bits, 0, Dtype::Bf16, 1.0, 1.0).unwrap_err(), SelectError::NoColumn);
    }

    #[test]
    fn chosen_halves_make_the_row_and_an_empty_half_lets_the_others_through() {
        let code = code(3);
        let select = KeySelect::new(code.token_bits(), 16, Dtype::Bf16, 1.0, 0.25).unwrap();
        let sight = Sight::of(0, 0, 2);
        for selector in select.selectors(0) {
            let (tally, _) = select.chosen(&code, selector, sight);
            assert!(tally.tokens() > 0, "{selector:?}");
        }
        let high = Selector { bit: *code.token_bits().last().unwrap(), set: true };
        let (tally, score) = select.chosen(&code, high, sight);
        assert_eq!((tally.tokens(), score), (2, -select.gap()));
    }
}
