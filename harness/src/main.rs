//! shardcheck: conformance harness for context-parallel attention engines.
fn main() {}
