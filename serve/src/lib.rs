//! A small OpenAI-compatible server of a real Llama model whose attention is sharded over ranks.
//!
//! It exists so that a GSM8K run and a log-probability comparison can be tried against a real model where there is no
//! network, and against a model whose context parallelism is broken on purpose.

pub mod api;
pub mod attention;
pub mod encoding;
pub mod engine;
pub mod gguf;
pub mod http;
pub mod kernels;
pub mod linear;
pub mod metrics;
pub mod model;
pub mod service;
pub mod tokenizer;
