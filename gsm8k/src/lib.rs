//! GSM8K.
pub mod dataset;
pub mod dialect;
pub mod mersenne;
pub mod outcome;
pub mod prompts;
pub mod score;
pub mod scoring;
pub mod statistics;
