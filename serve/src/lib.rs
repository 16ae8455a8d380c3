//! A small OpenAI-compatible server.

pub mod attention;
pub mod encoding;
pub mod gguf;
pub mod kernels;
pub mod linear;
pub mod model;
pub mod tokenizer;
