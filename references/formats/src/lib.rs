//! Number formats with an explicit overflow policy, rounding contracts, and tensor recipes.
//!
//! Everything here is a pure function of its arguments and depends on nothing of the project: the oracle, the
//! case generators and every runner read the same codecs, so that a disagreement between two of them is never a
//! disagreement about what a byte means.

pub mod codec;
pub mod contract;
pub mod dtype;
pub mod recipe;
pub mod single;

pub use codec::{Overflow, decode, encode, half_ulp, round};
pub use contract::{Contract, ContractError, Depth, Merge};
pub use dtype::{Dtype, UnknownDtype};
pub use recipe::{Counter, Distribution, Recipe, RecipeError, word};
pub use single::{
    bf16_from_f32, bf16_to_f32, decode_f32, encode_f32, f16_from_f32, f16_to_f32, round_bf16, round_f32,
};
