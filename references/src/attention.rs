//! Softmax attention in float64: the definition, the fast form that must agree with it, and what leads to it.

mod kernel;
pub mod mla;
pub mod plain;
pub mod rope;
mod running;
pub mod streaming;
