//! The smallest case that shows each public bug, as far as its report or its mechanism states one: what shrunk cases are held
//! against.

use super::size::Size;

/// A public bug and the smallest case that shows it. A part that is not stated is not compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bug {
    /// Ids under which it was reported.
    pub ids: &'static [&'static str],
    /// The smallest case in the words of the field: W ranks, S interleave, L length with query, Q query rows, H heads.
    pub words: &'static str,
    /// Parts of the measure that the words state: tokens, W, heads, S, B, dims. Where rows are stated and lengths are not, a
    /// request is taken to have no context, which is the least that it can have.
    pub stated: [Option<usize>; 6],
}

const fn bug(ids: &'static [&'static str], words: &'static str, stated: [Option<usize>; 6]) -> Bug {
    Bug { ids, words, stated }
}

const N: Option<usize> = None;

const fn s(value: usize) -> Option<usize> {
    Some(value)
}

/// Smallest cases, by bug.
pub const SMALLEST_CASES: &[Bug] = &[
    bug(&["vllm#28840"], "W=2, S=1, Q=1, two ranks with unequal LSEs: L≥2", [s(3), s(2), N, s(1), N, N]),
    bug(&["vllm#47079"], "W=4, Q=1, L≥64", [s(65), s(4), N, N, N, N]),
    bug(&["sglang#35045"], "W=1, prefix 4096, suffix 16, Q=16", [s(4128), s(1), N, N, N, N]),
    bug(&["flashinfer#4485"], "4 requests, H=128, L=256", [s(1028), s(1), s(128), N, N, N]),
    bug(&["vllm#26509"], "W=2, 2 requests, H=2", [N, s(2), s(2), N, N, N]),
    bug(&["flashinfer@6cbaf6e"], "3 states, 1 request, H=1", [N, s(3), s(1), N, N, N]),
    bug(&["flashinfer#3838"], "2 tiles, D=128", [N, N, N, N, N, s(128)]),
    bug(&["TransformerEngine#1624"], "W=2", [N, s(2), N, N, N, N]),
    bug(&["ROCm/TransformerEngine#708"], "W=2, one state pair", [N, s(2), N, N, N, N]),
    bug(&["vllm#38416"], "W=8, S=1, L=5, Q=1, 2 requests", [s(8), s(8), N, s(1), N, N]),
    bug(&["vllm#28181"], "2 empty states, 1 token", [s(1), s(2), N, N, N, N]),
    bug(&["flashinfer#353", "flashinfer#363"], "3 requests with L=[5,0,7], Q=1", [s(14), N, N, N, N, N]),
    bug(&["flashinfer#3251"], "2 requests with L=[0,64], Q=2", [s(66), N, N, N, N, N]),
    bug(&["flashinfer#4975"], "W=2, one rank with L=0", [N, s(2), N, N, N, N]),
    bug(&["ATOM#1832"], "W=8, 1 row", [s(2), s(8), N, N, N, N]),
    bug(&["vllm-ascend#5837"], "W=4, context shorter than S·W, 2 chunks", [N, s(4), N, N, N, N]),
    bug(&["TensorRT-LLM#15383"], "W=4, L below 3 blocks", [N, s(4), N, N, N, N]),
    bug(&["vllm-ascend#11807"], "W=2, S=128, local lengths [128,0,128]", [s(256), s(2), N, s(128), N, N]),
    bug(&["flashinfer#3779"], "3 requests with L=[64,0,32]", [s(96), N, N, N, N, N]),
    bug(&["vllm#47181"], "W=2, S=1, L=2, Q=2", [s(4), s(2), N, s(1), N, N]),
    bug(&["vllm#46076"], "W=2, L=10, Q=3", [s(13), s(2), N, N, N, N]),
    bug(&["flash-attention#93", "vllm#25049", "vllm#28751"], "W=2, L=6, Q=4", [s(10), s(2), N, N, N, N]),
    bug(&["vllm-ascend#6491"], "W=2, Q=2, 2 requests", [s(8), s(2), N, N, N, N]),
    bug(&["sglang#27276", "sglang#36297"], "W=2, L=8, Q=8", [s(16), s(2), N, N, N, N]),
    bug(&["sglang#32098"], "W=2, L=4 (a prefill of 4 rows)", [s(8), s(2), N, N, N, N]),
    bug(&["sglang#33926"], "W=2, Q=2", [s(4), s(2), N, N, N, N]),
    bug(&["vllm#27518"], "W=2, S=1, L=2, Q=1", [s(3), s(2), N, s(1), N, N]),
    bug(&["vllm#26296"], "W=2, B=16, two prompts of 550 tokens", [s(1100), s(2), N, N, s(16), N]),
    bug(&["vllm#29094"], "W=2", [N, s(2), N, N, N, N]),
    bug(&["vllm#41549", "vllm#49962"], "W=2, 64-token prefix, B=16", [s(64), s(2), N, N, s(16), N]),
    bug(&["vllm#50493", "vllm-ascend#9724"], "W=8", [N, s(8), N, N, N, N]),
    bug(&["vllm#55600"], "B=64", [N, N, N, N, s(64), N]),
    bug(&["vllm-ascend#6344"], "W=2, 1 decode and 1 prefill", [N, s(2), N, N, N, N]),
    bug(&["vllm-ascend#8547"], "W=2, Q=[2,1]", [s(6), s(2), N, N, N, N]),
    bug(&["vllm-ascend#7079"], "2 decodes with Q=2 and 1 prefill", [s(14), N, N, N, N, N]),
    bug(&["vllm-ascend#7012"], "W=2, 2 padding rows", [N, s(2), N, N, N, N]),
    bug(&["vllm-ascend#5767"], "W=2, S=B", [N, s(2), N, N, N, N]),
    bug(&["sglang#20531"], "W=8, several requests, L=4000", [s(4000), s(8), N, N, N, N]),
    bug(&["sglang#29760"], "W=4, B=64, L=512", [s(512), s(4), N, N, s(64), N]),
    bug(&["TransformerEngine#1012"], "W=2, L no multiple of 2W", [N, s(2), N, N, N, N]),
    bug(&["sglang#33309"], "W=8, B=64", [N, s(8), N, N, s(64), N]),
    bug(&["ATOM#1994"], "W=2, L no multiple of B·W", [N, s(2), N, N, N, N]),
    bug(&["tpu-inference#3344"], "W=2 in two groups", [N, s(2), N, N, N, N]),
    bug(&["vllm-ascend#12840"], "8 ranks, 3 drafts, about 9 requests", [s(72), s(8), N, N, N, N]),
    bug(&["ATOM#1229"], "tokens [3,5]", [s(8), N, N, N, N, N]),
    bug(&["vllm#36070"], "W=2, replay with another length", [N, s(2), N, N, N, N]),
    bug(&["ATOM#2102"], "W=4", [N, s(4), N, N, N, N]),
    bug(&["vllm-ascend#11072"], "W=2, Q=4, replay", [s(8), s(2), N, N, N, N]),
    bug(&["vllm-ascend#7549"], "W=2, 3 draft steps", [N, s(2), N, N, N, N]),
    bug(&["vllm-ascend#4221", "vllm-ascend#10895"], "2 replays with other lengths", [N; 6]),
    bug(&["vllm#49435"], "one tile whose largest value is no power of two", [N; 6]),
    bug(&["sglang#34765"], "cache scale 0.5", [N; 6]),
    bug(&["vllm#46952"], "H=32, fp8, Q=1", [s(2), N, s(32), N, N, N]),
    bug(&["vllm#45562"], "fp8 cache, 1 block", [N; 6]),
    bug(&["local-inference-lab/vllm#14", "sglang#31514"], "W=2, fp8 cache, a prefix", [N, s(2), N, N, N, N]),
    bug(&["ATOM#1772"], "an alias of a format", [N; 6]),
    bug(&["vllm-ascend#3850"], "H=1", [N, N, s(1), N, N, N]),
    bug(&["vllm#29487"], "W=2", [N, s(2), N, N, N, N]),
    bug(&["vllm-ascend#4687"], "W=2", [N, s(2), N, N, N, N]),
    bug(
        &["aiter#4964", "ATOM#1930", "ATOM#2060"],
        "W=2, L=23, Q=1, 96 gathered heads",
        [s(24), s(2), s(96), N, N, N],
    ),
    bug(&["aiter#3267"], "H=32", [N, N, s(32), N, N, N]),
    bug(&["ATOM#1968", "vllm#47779", "vllm-ascend#14126"], "12 gathered heads", [N, N, s(12), N, N, N]),
    bug(&["vllm#32705"], "2 groups of 2", [N, s(2), N, N, N, N]),
    bug(&["sglang#20360"], "2 groups of W=2", [N, s(2), N, N, N, N]),
    bug(&["ATOM#1764"], "4 ranks", [N, s(4), N, N, N, N]),
    bug(&["ATOM#1208"], "2 groups", [N; 6]),
    bug(&["ATOM#1746"], "W=2, 2 steps", [N, s(2), N, N, N, N]),
    bug(&["vllm-ascend#15600"], "W=16, lengths that differ", [N, s(16), N, N, N, N]),
    bug(&["sglang#39799"], "W=2", [N, s(2), N, N, N, N]),
    bug(&["vllm-ascend#12036"], "3 drafts", [N; 6]),
    bug(&["TensorRT-LLM#10312"], "W=2", [N, s(2), N, N, N, N]),
    bug(&["local-inference-lab/vllm#72"], "W=4, 1 draft", [N, s(4), N, N, N, N]),
    bug(&["vllm#26574"], "W=2", [N, s(2), N, N, N, N]),
    bug(&["vllm#54300"], "W=4, Q of 118 to 205", [s(236), s(4), N, N, N, N]),
    bug(&["vllm-ascend#14876"], "S=1", [N, N, N, s(1), N, N]),
    bug(&["vllm-ascend#10580"], "a chunk no longer than a draft block", [N; 6]),
];

/// The bug of that id, where it is known which case shows it.
pub fn known_case(id: &str) -> Option<&'static Bug> {
    SMALLEST_CASES.iter().find(|bug| bug.ids.contains(&id))
}

impl Bug {
    /// Whether a case of that size is no larger: the first stated part in which the two differ decides, in the order of the
    /// measure. `None` when the smallest case states no part.
    pub fn admits(&self, size: Size) -> Option<bool> {
        let stated = self.stated.iter().zip(size.parts());
        let mut compared = false;
        for (stated, part) in stated {
            let Some(stated) = stated else { continue };
            compared = true;
            if part != *stated {
                return Some(part < *stated);
            }
        }
        compared.then_some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_is_listed_once() {
        let mut ids: Vec<&str> = SMALLEST_CASES.iter().flat_map(|bug| bug.ids).copied().collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }

    #[test]
    fn the_first_stated_part_that_differs_decides() {
        let size = |tokens, world| Size { tokens, world, heads: 9, interleave: 9, block: 9, dims: 9 };
        let bug = known_case("vllm#47181").unwrap();
        assert_eq!(bug.admits(size(3, 8)), Some(true), "fewer tokens");
        assert_eq!(bug.admits(size(5, 1)), Some(false), "more tokens");
        assert_eq!(bug.admits(size(4, 3)), Some(false), "as many tokens on more ranks");
        assert_eq!(known_case("sglang#34765").unwrap().admits(size(1, 1)), None, "nothing is stated");
    }
}
