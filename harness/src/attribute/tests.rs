//! Sentences of failed rows, for engines with known faults.

use shardcheck_cases::Case;
use shardcheck_cpu::{CpuEngine, engine, fault};
use shardcheck_engine::Engine;

use super::*;
use crate::finding::Finding;
use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::properties;

const DECODE: &str = "decode/tiny-mla/tp4.dcp4.h1.s1.b4.bf16.a2a.hi_lo.lat/12+1_5+1.seq/gaussian/1";
const VERIFY: &str = "verify/tiny-gqa/tp2.dcp2.h2.s1.b4.bf16.a2a.lo_hi/7+3.seq/gaussian/1";
const DRAFT: &str = "draft/tiny-mla/tp2.dcp2.h2.s1.b4.bf16.ag_rs.lat/6+3.seq/gaussian/1";

/// Sentences for the case on an engine with that fault, joined.
fn said(fault_name: &str, case: &str) -> String {
    let faulty = CpuEngine::with_fault(fault(fault_name).expect("a known fault"));
    let lines = on(&faulty, case);
    lines.join("\n")
}

fn on(engine: &dyn Engine, case: &str) -> Vec<String> {
    let case: Case = case.parse().expect("a case id");
    let material = Material::of(&case, engine.profile()).expect("material");
    sentences(&Laboratory::new(&case, engine, &material))
}

#[track_caller]
fn says(fault_name: &str, case: &str, words: &[&str]) {
    let said = said(fault_name, case);
    for word in words {
        assert!(said.contains(word), "{fault_name} should say {word:?}, and says:\n{said}");
    }
}

#[test]
fn a_healthy_engine_is_told_that_its_tokens_are_right() {
    for case in [DECODE, VERIFY, DRAFT] {
        let lines = on(&engine(), case);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("every row counts its own tokens, each once"), "{lines:?}");
    }
}

#[test]
fn a_prefix_that_ends_early_or_late_gives_the_tokens_concerned() {
    says("row-misses-itself", DECODE, &["row 0 of request 0", "too short, token 12 is missing"]);
    says("row-sees-its-successor", VERIFY, &["row 0 of request 0", "too long, by token 8", "by token 9"]);
    says("committed-prefix-rows", VERIFY, &["row 2 of request 0", "tokens 7 to 9 are missing"]);
    says("no-mask-between-rows", VERIFY, &["row 0 of request 0 sees 10 tokens instead of 8"]);
    says("draft-misses-the-last-token", DRAFT, &["row 2 of request 0", "token 8 is missing"]);
    says("draft-block-unseen", DRAFT, &["tokens 6 to 8 are missing"]);
}

#[test]
fn rows_in_reverse_see_each_other_s_prefixes() {
    says(
        "rows-in-reverse",
        VERIFY,
        &["row 0 of request 0 sees 10 tokens instead of 8", "row 2 of request 0 sees the first 8 of its 10"],
    );
}

#[test]
fn lengths_of_another_interleave_are_called_so() {
    let case = "decode/tiny-mla/tp2.dcp2.h1.s4.b4.bf16.a2a.hi_lo.lat/12+1.seq/gaussian/1";
    says("length-ignores-interleave", case, &["dealt in runs of 1 instead of 4"]);
}

#[test]
fn ranks_that_count_too_much_are_given_with_their_lengths() {
    // seven tokens over four ranks: ranks see [2, 2, 2, 1], and three of the next round with the edges of rank 0
    let case = "verify/tiny-mla/tp4.dcp4.h1.s2.b4.bf16.a2a.hi_lo.lat/8+3.seq/gaussian/1";
    says("edge-on-rank-zero", case, &["tokens of the ranks instead of"]);
}

#[test]
fn a_row_that_reads_another_request_names_it() {
    let case = "decode/tiny-gqa/tp2.dcp2.h2.s1.b4.bf16.a2a.hi_lo/4+1_0+0_6+1.seq/gaussian/1";
    says("empty-request-shifts-rows", case, &["row 0 of request 2 sees no token instead of 7"]);
    let case = "decode/tiny-gqa/tp2.dcp2.h2.s1.b4.bf16.a2a.hi_lo/4+1_5+0_6+1.seq/gaussian/1";
    says("empty-request-shifts-rows", case, &["row 0 of request 2 sees the first 5 tokens of request 1"]);
}

#[test]
fn an_empty_shard_that_takes_part_shows_as_wrong_weights() {
    let case = "decode/tiny-mla/tp4.dcp4.h1.s1.b4.bf16.a2a.hi_lo.lat/2+1.seq/gaussian/1";
    says("empty-shard-lse-zero", case, &["its own tokens, but ranks have the weights", "0.333"]);
    says("partials-summed-unweighted", DECODE, &["its own tokens, but ranks have the weights [1.000"]);
    says("ranks-averaged", DECODE, &["its own tokens, but ranks have the weights [0.250, 0.250"]);
}

#[test]
fn pages_that_are_read_from_other_blocks_are_named() {
    let case = "decode/tiny-mla/tp2.dcp2.h1.s1.b4.n8.bf16.a2a.hi_lo.lat/17+1.desc/gaussian/1";
    let said = said("blocks-taken-as-contiguous", case);
    assert!(said.contains("page 1") || said.contains("block"), "{said}");
    says("page-of-virtual-block", case, &["row 0 of request 0", "lacks"]);
    says(
        "block-table-trimmed",
        case,
        &["reads page 1 (tokens 8 to 15) in place of page 2 (tokens 16 to 23)"],
    );
}

#[test]
fn tokens_on_the_wrong_rank_leave_slots_that_no_token_was_written_to() {
    says("written-by-the-next-rank", DECODE, &["row 0 of request 0", "token"]);
    says("owner-rotated", DECODE, &["row 0 of request 0", "token"]);
}

#[test]
fn a_failed_output_carries_its_sentences_and_a_wrong_query_is_told_from_wrong_tokens() {
    let case: Case = VERIFY.parse().unwrap();
    let output = properties::find("verify.output").unwrap();
    let notes = |fault_name: &str| {
        let faulty = CpuEngine::with_fault(fault(fault_name).unwrap());
        let material = Material::of(&case, faulty.profile()).unwrap();
        match output.judge(&Laboratory::new(&case, &faulty, &material)) {
            Finding::Broken(failure) => failure.notes.join("\n"),
            other => panic!("{fault_name} must break the output: {other:?}"),
        }
    };
    assert!(notes("no-mask-between-rows").contains("its prefix is too long"));
    assert!(notes("query-not-gathered").contains("every row counts its own tokens"));
}
