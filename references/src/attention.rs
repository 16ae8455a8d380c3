//! Softmax attention in float64: the definition, the fast form that must agree with it, and what leads to it.

pub mod plain;
