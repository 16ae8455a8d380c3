//! Exchanges between devices, played in host memory by the kernels themselves: a C++ compiler takes the text with one thread a block.

use std::io::ErrorKind;
use std::process::Command;

use shardcheck_kernels::FILES;

/// What the text takes for granted of a device's dialect.
const DIALECT: &str = r"
#include <cmath>
#include <cstring>
#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
struct Index { int x, y, z; };
static Index threadIdx, blockIdx;
static inline void __syncthreads() {}
static inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline int atomicMax(int *at, int value) { const int before = *at; *at = before < value ? value : before; return before; }
";

/// The portable files that the exchanges need, with one thread a block.
fn source() -> String {
    let wanted = ["prelude.h", "numeric.h", "layout.cu", "cache.cu", "query.cu", "merge.cu", "devices.cu"];
    let files = FILES.iter().filter(|(name, _)| wanted.contains(name));
    let text: String = files.map(|(name, text)| format!("#line 1 \"{name}\"\n{text}")).collect();
    let alone = text.replace("#define SC_THREADS 128", "#define SC_THREADS 1");
    assert_ne!(alone, text, "the number of threads is no longer what this test replaces");
    format!("{DIALECT}{alone}\n#line 1 \"devices.cpp\"\n{}", include_str!("devices.cpp"))
}

/// What the program says with a fault of the kernels or without one; `None` without a compiler.
fn run(fault: Option<&str>) -> Option<(bool, String)> {
    let folder = std::env::temp_dir().join(format!("shardcheck-host-{}-{fault:?}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (file, program) = (folder.join("devices.cpp"), folder.join("devices"));
    std::fs::write(&file, source()).unwrap();
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-o"]).args([&program, &file]);
    if let Some(fault) = fault {
        compiler.arg(format!("-D{}", shardcheck_kernels::macro_name(fault)));
    }
    let compiled = match compiler.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            eprintln!("SKIPPED: there is no g++ to play devices with");
            return None;
        }
        compiled => compiled.unwrap(),
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    Some((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
}

#[test]
fn several_devices_come_to_what_one_device_comes_to() {
    let Some((passed, said)) = run(None) else { return };
    assert!(passed, "{said}");
    assert!(said.contains("sessions, 0 failures"), "{said}");
}

#[test]
fn a_rank_that_is_left_out_of_a_reduce_scatter_between_devices_shows() {
    for fault in ["reduce-scatter-leaves-out-a-rank", "reduce-scatter-keeps-its-own"] {
        let Some((passed, said)) = run(Some(fault)) else { return };
        assert!(!passed && said.contains("reduce-scatter differs") && !said.contains("all-gather"), "{said}");
    }
}
