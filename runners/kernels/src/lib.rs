//! The GPU kernels: one portable source for CUDA and HIP, as text that is compiled at run time on the card that is there.
//!
//! The text includes no header of a vendor, so NVRTC, hipRTC, `nvcc` and a bare `clang` compile it. What every kernel takes and
//! where its results lie stands above it in `source/`. A defect is a `#define`: the healthy text has no branch for it.

use std::collections::BTreeSet;
use std::fmt::Write;

/// The files of the source, in the order in which they are joined.
pub const FILES: [(&str, &str); 20] = [
    ("prelude.h", include_str!("source/prelude.h")),
    ("numeric.h", include_str!("source/numeric.h")),
    ("layout.cu", include_str!("source/layout.cu")),
    ("cache.cu", include_str!("source/cache.cu")),
    ("transfer.cu", include_str!("source/transfer.cu")),
    ("query.cu", include_str!("source/query.cu")),
    ("partial.cu", include_str!("source/partial.cu")),
    ("attend.cu", include_str!("source/attend.cu")),
    ("mla.cu", include_str!("source/mla.cu")),
    ("warpgroup.cu", include_str!("source/warpgroup.cu")),
    ("selected.cu", include_str!("source/selected.cu")),
    ("merge.cu", include_str!("source/merge.cu")),
    ("devices.cu", include_str!("source/devices.cu")),
    ("states.cu", include_str!("source/states.cu")),
    ("context.cu", include_str!("source/context.cu")),
    ("prefill.cu", include_str!("source/prefill.cu")),
    ("router.cu", include_str!("source/router.cu")),
    ("experts.cu", include_str!("source/experts.cu")),
    ("dispatch.cu", include_str!("source/dispatch.cu")),
    ("measure.cu", include_str!("source/measure.cu")),
];

/// Threads of a block of every kernel but the latent ones (`SC_THREADS`).
pub const THREADS: u32 = 128;
/// Query heads of one block of the plain attention kernel (`HEADS`).
pub const BLOCK_HEADS: usize = 8;
/// Tokens of one tile (`TILE`), after which the running maximum is updated.
pub const TILE_TOKENS: usize = 64;
/// Fewest tokens of a segment (`MIN_SEGMENT`).
pub const MIN_SEGMENT_TOKENS: usize = 128;
/// Most segments of a row (`MAX_SEGMENTS`).
pub const MAX_SEGMENTS: usize = 64;
/// Most ranks of a group (`MAX_WORLD`).
pub const MAX_WORLD: usize = 256;
/// Heads, key width, value width and threads of a block of the latent kernels.
pub const LATENT_HEADS: usize = 64;
/// Key width that the latent kernels take.
pub const LATENT_KEY_DIM: usize = 576;
/// Value width that the latent kernels take.
pub const LATENT_VALUE_DIM: usize = 512;
/// Threads of a block of the latent kernels.
pub const LATENT_THREADS: u32 = 256;
/// Dynamic shared memory of the latent kernels in bytes: queries, two tiles of keys, and the probabilities of one tile.
pub const LATENT_SHARED_BYTES: u32 = (LATENT_HEADS * LATENT_KEY_DIM * 2 * 3 + LATENT_HEADS * 64 * 2) as u32;

/// Dynamic shared memory of the plain attention kernels in bytes.
pub fn attend_shared_bytes(key_dim: usize, value_dim: usize) -> u32 {
    let floats = BLOCK_HEADS * (key_dim + value_dim + TILE_TOKENS + 16 + 3);
    (TILE_TOKENS * 8 + floats * 4) as u32
}

/// The whole source, with one defect where `fault` names one that the kernels have.
pub fn source(fault: Option<&str>) -> String {
    let mut text = String::new();
    if let Some(fault) = fault {
        // writing to a string does not fail
        let _ = writeln!(text, "#define {}", macro_name(fault));
    }
    for (name, file) in FILES {
        let _ = writeln!(text, "#line 1 \"{name}\"");
        text.push_str(file);
    }
    text
}

/// The macro that stands for a fault: `lse-is-the-maximum` is `FAULT_LSE_IS_THE_MAXIMUM`.
pub fn macro_name(fault: &str) -> String {
    format!("FAULT_{}", fault.to_uppercase().replace('-', "_"))
}

/// Whether the kernels have that fault.
pub fn has_fault(fault: &str) -> bool {
    fault_macros().contains(&macro_name(fault).as_str())
}

/// Whether the kernels have that fault in another file than those of a layer of experts, whose ranks one device plays.
pub fn has_fault_of_joined_devices(fault: &str) -> bool {
    let files = FILES.iter().filter(|(name, _)| !["experts.cu", "dispatch.cu"].contains(name));
    macros(files).contains(&macro_name(fault).as_str())
}

/// The macros of all faults that the kernels have.
pub fn fault_macros() -> BTreeSet<&'static str> {
    macros(FILES.iter())
}

fn macros<'a>(files: impl Iterator<Item = &'a (&'static str, &'static str)>) -> BTreeSet<&'static str> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = files.flat_map(|(_, text)| text.split(move |c| !is_word(c)));
    words.filter(|word| word.starts_with("FAULT_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_holds_every_file_and_no_include() {
        let text = source(None);
        assert!(FILES.iter().all(|(name, _)| text.contains(&format!("#line 1 \"{name}\""))));
        assert!(!text.contains("#include"));
    }

    #[test]
    fn a_fault_is_a_macro_that_some_kernel_asks_for() {
        assert!(source(Some("ranks-averaged")).starts_with("#define FAULT_RANKS_AVERAGED\n"));
        assert!(has_fault("ranks-averaged") && has_fault("lse-is-the-maximum"));
        assert!(!has_fault("ranks") && !has_fault("drafts-refused-everywhere"));
        // a router is no rank's own, a layer of experts has ranks
        assert!(has_fault("moe-padding-counted") && !has_fault_of_joined_devices("moe-padding-counted"));
        assert!(has_fault_of_joined_devices("router-bias-ignored"));
    }

    #[test]
    fn constants_are_those_of_the_source() {
        let text = source(None);
        for (name, value) in [
            ("SC_THREADS", THREADS as usize),
            ("HEADS", BLOCK_HEADS),
            ("TILE", TILE_TOKENS),
            ("MIN_SEGMENT", MIN_SEGMENT_TOKENS),
            ("MAX_SEGMENTS", MAX_SEGMENTS),
            ("MAX_WORLD", MAX_WORLD),
            ("MLA_HEADS", LATENT_HEADS),
            ("MLA_KEY", LATENT_KEY_DIM),
            ("MLA_VALUE", LATENT_VALUE_DIM),
            ("MLA_THREADS", LATENT_THREADS as usize),
        ] {
            let line = format!("#define {name} {value}");
            assert!(
                text.lines().any(|l| l.trim_end() == line || l.starts_with(&format!("{line} "))),
                "{line}"
            );
        }
    }
}
