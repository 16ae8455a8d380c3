//! The program `shardcheck-serve`.

fn main() {}
