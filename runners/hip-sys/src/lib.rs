//! Holds the functions that `shardcheck-hip` loads by name against the bindings that `hip-sys` made of the vendor's headers.
//!
//! Outside the default members: `hip-sys` looks for ROCm's headers when it is built and links its runtime. Where they are,
//! `cargo test -p shardcheck-hip-sys` runs the check; where they are not, `DOCS_RS=1 cargo check -p shardcheck-hip-sys --tests` still
//! compiles it. The bindings are those of HIP 5.4, before hipRTC had a library of its own, so that the compiler's functions are not among them.
