//! Tests of shrinking.

use std::time::Duration;

use shardcheck_cases::{Case, Family, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, fault};

use super::{Keep, Size, failing_property, known_case, moves, shrink};

const LONG: Duration = Duration::from_secs(600);
const LARGE: &str =
    "verify/tiny-mla/tp4.dcp4.h2.s4.b8.n12.e4m3fn@0.5.a2a.lo_hi/37+4_0+0_9+3_66+2.pad2.shuf/cold/7";

fn shrunk(name: &str, id: &str, property: &'static str) -> Case {
    let engine = CpuEngine::with_fault(fault(name).unwrap());
    let result = shrink(&id.parse().unwrap(), &engine, Keep::Property(property), LONG, &mut |_, _| {});
    assert!(result.finished);
    result.case
}

#[test]
fn a_causal_slip_shrinks_to_the_smallest_case_that_is_known_of_it_and_still_fails() {
    let case = shrunk("local-causal-trim", LARGE, "verify.row-lengths");
    let size = Size::of(&case);
    assert_eq!(known_case("vllm#47181").unwrap().admits(size), Some(true), "{size} {}", case.id());
    let engine = CpuEngine::with_fault(fault("local-causal-trim").unwrap());
    assert_eq!(failing_property(&case, &engine), Some("verify.row-lengths"));
    assert_eq!(failing_property(&case, &shardcheck_cpu::engine()), None, "the healthy engine passes it");
}

#[test]
fn shrinking_twice_gives_the_same_case_whatever_the_number_of_threads() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| shrunk("row-sees-its-successor", LARGE, "verify.output").id())
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn a_merge_shrinks_along_its_own_axes() {
    let id = "merge_partials/w4.t7.h4.d16.f32.a2a.hi_lo/random/sliced/7";
    let case = shrunk("n-way-merge-counts-two", id, "merge.output");
    let size = Size::of(&case);
    assert_eq!((size.tokens, size.world, size.heads), (1, 3, 1), "{}", case.id());
}

#[test]
fn a_batch_of_prefill_context_parallelism_shrinks_along_its_own_axes() {
    let id = "pcp/head_tail.p8.replicated.pad3/7+1d_37+127_20+3d_11+1d_3+1_16+2d";
    let absent = shrunk("pcp-absent-chunk-has-a-row", id, "pcp.partition");
    assert_eq!(absent.id(), "pcp/head_tail.p1.replicated/0+1");
    let written = shrunk("pcp-decode-written-by-every-rank", id, "pcp.writer");
    assert_eq!(written.id(), "pcp/head_tail.p2.replicated/0+1d");
}

#[test]
fn routers_and_layers_of_experts_shrink_along_their_own_axes() {
    let id = "moe/softmax.biased.e16.k4.g4.kept2.negative_infinity.sum.x2.5/gathered.whole.silu_gated.dp2.pcp2.tp3.replicated/n7+9.h24.i10.j10.random.random/7";
    let size = Size::of(&shrunk("moe-tensor-parallel-sum-missing", id, "moe.output"));
    assert_eq!((size.tokens, size.world), (1, 2), "{size}");
    let id = "route/sigmoid.biased.e16.k4.g4.kept2.negative_infinity.sum_and_tiny.x2.5/t20.negative/7";
    let size = Size::of(&shrunk("router-bias-in-weights", id, "route.weights"));
    assert!(size.tokens == 1 && size.heads <= 2, "{size}");
}

#[test]
fn a_selection_of_tokens_shrinks_along_its_own_axes() {
    let id =
        "select_sparse/exact.packed.k4.i2.d8.bf16/tp6.dcp3.s2.b4.n30/41+4_3+1_8+2_0+0.pad2.shuf/newest/7";
    let offset = shrunk("sparse-offset-is-global", id, "sparse.slots");
    let size = Size::of(&offset);
    assert!(size.world == 2 && size.interleave == 1 && size.tokens <= 5, "{size} {}", offset.id());
    let bound = shrunk("topk-bound-of-the-request", id, "sparse.visible");
    let size = Size::of(&bound);
    assert!(size.world == 1 && size.tokens == 4 && size.heads == 1, "{size} {}", bound.id());
}

#[test]
fn a_session_shrinks_in_its_steps_and_in_its_ranks_heads_and_blocks() {
    let id = "sequence/tiny-gqa/tp3.dcp3.h2.s2.b8.bf16.ag_rs/shrinking/v0+5,1+13,2+2_d0,1,2.pad1_f1_d0,2.pad2_f0_d2.pad3/7";
    let case = shrunk("lengths-captured-by-bucket", id, "sequence.metadata");
    let size = Size::of(&case);
    assert_eq!(known_case("vllm#36070").unwrap().admits(size), Some(true), "{size} {}", case.id());
    assert_eq!((size.heads, size.interleave), (size.world, 1), "{size} {}", case.id());
}

#[test]
fn every_smaller_session_of_the_gate_is_smaller_and_reads_back() {
    let mut cases = suite(SuiteName::Gate, 1);
    cases.retain(|case| case.family == Family::Sequence);
    for case in cases.iter().step_by(5) {
        for smaller in moves::moves(case) {
            assert!(super::size::key(&smaller) < super::size::key(case), "{} {}", case.id(), smaller.id());
            assert_eq!(smaller.id().parse::<Case>().unwrap(), smaller, "{}", case.id());
        }
    }
}

#[test]
fn without_time_the_given_case_comes_back_and_says_so() {
    let engine = CpuEngine::with_fault(fault("local-causal-trim").unwrap());
    let case: Case = LARGE.parse().unwrap();
    let keep = Keep::Property("verify.row-lengths");
    let result = shrink(&case, &engine, keep, Duration::ZERO, &mut |_, _| {});
    assert!(!result.finished && result.case == case);
}

#[test]
fn a_shrunk_case_never_fails_for_another_reason() {
    // this fault breaks the lengths as well, of which a smaller case would do
    let case = shrunk("row-misses-itself", LARGE, "verify.output");
    let engine = CpuEngine::with_fault(fault("row-misses-itself").unwrap());
    let result = crate::run::judge_case(&case, &engine, &|property| property.id == "verify.output");
    assert!(result.status.is_failure());
}

#[test]
fn every_step_is_smaller_and_a_case_that_reads_back() {
    for case in suite(SuiteName::EngineSmoke, 1) {
        for smaller in moves::moves(&case) {
            assert!(super::size::key(&smaller) < super::size::key(&case), "{} {}", case.id(), smaller.id());
            assert_eq!(smaller.id().parse::<Case>().unwrap(), smaller, "{}", case.id());
        }
    }
}
