//! The kernels compile for every architecture that they are written for, with and without faults; NVRTC needs no GPU.

use shardcheck_cuda::nvrtc;

/// Set where a missing compiler is a failure and not a reason to skip.
const REQUIRED: &str = "SHARDCHECK_REQUIRE_NVRTC";

/// Whether there is a compiler; says so on standard error where there is none.
fn has_compiler() -> bool {
    if nvrtc::is_present() {
        return true;
    }
    assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set: {}", nvrtc::CompileError::Missing);
    eprintln!("skipped: {}", nvrtc::CompileError::Missing);
    false
}

#[test]
fn the_kernels_compile_for_ampere_hopper_and_blackwell() {
    if !has_compiler() {
        return;
    }
    let source = shardcheck_kernels::source(None);
    for target in ["sm_80", "sm_90a", "sm_100a"] {
        let image = nvrtc::compile(&source, target, &[]).unwrap_or_else(|error| panic!("{error}"));
        assert!(image.code.starts_with(b"\x7fELF"), "{target}");
        let text = String::from_utf8_lossy(&image.code);
        for kernel in [
            "attend_paged",
            "attend_latent_bf16",
            "list_attend",
            "sum_partials",
            "reorganise_chunk",
            "share_rows",
            "route_rows",
            "sum_experts",
            "answer_parcels",
        ] {
            assert!(text.contains(kernel), "{kernel} for {target}");
        }
    }
}

#[test]
fn a_fault_changes_the_code_and_an_error_is_told_with_its_file_and_line() {
    if !has_compiler() {
        return;
    }
    let compile = |source: &str| nvrtc::compile(source, "sm_90", &[]);
    let healthy = compile(&shardcheck_kernels::source(None)).unwrap();
    let faulty = compile(&shardcheck_kernels::source(Some("lse-is-the-maximum"))).unwrap();
    assert_ne!(healthy.code, faulty.code);
    let broken =
        shardcheck_kernels::source(None).replace("SC_DEVICE i32 member_of", "SC_DEVICE i33 member_of");
    let error = nvrtc::compile(&broken, "sm_90", &[]).unwrap_err().to_string();
    assert!(error.contains("layout.cu(") && error.contains("i33"), "{error}");
}
