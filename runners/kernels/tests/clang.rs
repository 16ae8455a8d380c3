//! The same text compiles for AMD's cards by a bare clang, without a header or a library of the vendor.

use std::io::ErrorKind;
use std::process::Command;

/// Names of a clang that knows gfx950.
const COMPILERS: [&str; 2] = ["clang-22", "clang-23"];
/// Set where a missing compiler is a failure and not a reason to skip.
const REQUIRED: &str = "SHARDCHECK_REQUIRE_CLANG";

#[test]
fn the_kernels_compile_for_gfx942_and_gfx950() {
    let folder = std::env::temp_dir().join(format!("shardcheck-kernels-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let source = folder.join("kernels.hip");
    std::fs::write(&source, shardcheck_kernels::source(None)).unwrap();
    let mut compiled = 0;
    for target in ["gfx942", "gfx950"] {
        let image = folder.join(target);
        let outcome = COMPILERS.iter().find_map(|compiler| {
            let run = Command::new(compiler)
                .args([
                    "-x",
                    "hip",
                    &format!("--offload-arch={target}"),
                    "--cuda-device-only",
                    "--no-gpu-bundle-output",
                ])
                .args(["-nogpuinc", "-nogpulib", "-std=c++17", "-O3", "-Werror", "-c", "-o"])
                .args([&image, &source])
                .output();
            match run {
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                run => Some(run.unwrap()),
            }
        });
        let Some(outcome) = outcome else {
            assert!(
                std::env::var_os(REQUIRED).is_none(),
                "{REQUIRED} is set and there is none of {COMPILERS:?}"
            );
            eprintln!("skipped: none of {COMPILERS:?} is installed");
            break;
        };
        assert!(outcome.status.success(), "{target}: {}", String::from_utf8_lossy(&outcome.stderr));
        let code = std::fs::read(&image).unwrap();
        assert!(code.starts_with(b"\x7fELF"), "{target}");
        let text = String::from_utf8_lossy(&code);
        assert!(["attend_paged", "list_attend"].iter().all(|kernel| text.contains(kernel)), "{target}");
        compiled += 1;
    }
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(compiled == 0 || compiled == 2);
}
