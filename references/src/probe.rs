//! Exact probes: inputs whose right answers are integers, so that one token more or less shows at any length.
//!
//! | probe | inputs | what is exact |
//! |---|---|---|
//! | P1 tokens | equal scores, values spell their token ([`Code`]) | output × tokens is a sum of signs |
//! | P2 pairing | keys let half of the tokens through, one bit of the index at a time ([`KeySelect`]) | the same, over that half |
//! | P3 needle | one token scores, values are random | the output is its value, bit for bit |
//! | P4 rank balance | equal shares of ranks, values +1 on one and −1 on another ([`ranks`]) | the output is zero |
//! | P5 rank dither | unequal shares, values `1 + k/128` on one rank | the output is one of at most two neighbours |
//!
//! What is expected is an [`Expectation`] from a [`Tally`], rounded as a contract says; what was seen instead is put into
//! words by a [`Decoder`].

mod attribution;
mod code;
mod decode;
mod expectation;
mod hypotheses;
mod plain;
pub mod ranks;
mod select;
mod tally;

pub use attribution::{Attribution, AttributionKind, Page, Sight};
pub use code::{Bit, Bits, Code, Sign, Space, Token};
pub use decode::{Decoder, Seen};
pub use expectation::{Element, Expectation, Rounding};
pub use plain::plain_row;
pub use select::{Gate, KeySelect, SelectError, Selector};
pub use tally::Tally;

#[cfg(test)]
mod tests;
