//! A small HTTP/1.1 server on the standard library: keep-alive, bounded sizes, bounded connections.

pub mod connection;
pub mod message;
pub mod server;
