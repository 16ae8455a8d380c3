//! Laws of the two-state merge: a prefix and a suffix, as in chunked prefill.

use shardcheck_cases::{Body, Case, Family, MergePattern};
use shardcheck_engine::Tensors;
use shardcheck_formats::Dtype;

use super::{Property, always};
use crate::finding::{Finding, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed, Run};
use crate::merging::MergeMaterial;

const STATES: &[Family] = &[Family::MergeStates];
const BOUND: &str = "certified bound of a two-state merge on exactly known states";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "states.output",
        statement: "two states merge to the sum of their outputs weighted by exp(lse − g)",
        source: "vLLM and SGLang `merge_attn_states`; FlashInfer `merge_state`",
        bugs: &["sglang#35045", "vllm#28181", "vllm#26509"],
        tolerance: BOUND,
        families: STATES,
        applies: always,
        check: output,
    },
    Property {
        id: "states.lse",
        statement: "the merged LSE of two states is ln(exp a + exp b)",
        source: "log-sum-exp over a partition",
        bugs: &["sglang#35045", "ROCm/TransformerEngine#708"],
        tolerance: BOUND,
        families: STATES,
        applies: always,
        check: lse,
    },
    Property {
        id: "states.neutral",
        statement: "a state merged with an empty one, on either side, comes out bit for bit, although the empty output holds NaN (zeros where the engine declares that it relies on them)",
        source: "the empty state is the neutral element",
        bugs: &["vllm-ascend#5837", "flashinfer#4975"],
        tolerance: "exact: bits",
        families: STATES,
        applies: always,
        check: neutral,
    },
    Property {
        id: "states.all-empty",
        statement: "two empty states merge to exact zeros with LSE −inf, never to NaN",
        source: "vLLM `merge_attn_states`: both LSEs −inf",
        bugs: &["vllm#28181"],
        tolerance: "exact: bits",
        families: STATES,
        applies: |case| pattern(case) == Some(MergePattern::AllEmpty),
        check: all_empty,
    },
    Property {
        id: "states.nan-lse",
        statement: "a state whose LSE is NaN counts as empty or spoils what it is merged with: of its rows, each output and the merged LSE are what the other state alone gives, or NaN",
        source: "FlashInfer `merge_state` and vLLM `merge_attn_states` let NaN through; ATOM `cp_lse_ag_out_rs` takes it for −inf",
        bugs: &[],
        tolerance: BOUND,
        families: STATES,
        applies: has_nan,
        check: nan_lse,
    },
    Property {
        id: "states.commute",
        statement: "prefix and suffix may change places",
        source: "addition commutes",
        bugs: &["TransformerEngine#1624"],
        tolerance: BOUND,
        families: STATES,
        applies: always,
        check: commute,
    },
];

fn pattern(case: &Case) -> Option<MergePattern> {
    match &case.body {
        Body::Merge(merge) => Some(merge.pattern),
        _ => None,
    }
}

/// A single row or two of one head have infinities alone.
fn has_nan(case: &Case) -> bool {
    match &case.body {
        Body::Merge(merge) => {
            merge.pattern == MergePattern::BrokenLse && (merge.rows > 2 || merge.heads_per_rank > 1)
        }
        _ => false,
    }
}

fn judge(
    material: &MergeMaterial,
    observed: &Observed,
    out: &[Allowed],
    lse: &[Allowed],
    headline: &str,
) -> Result<Finding, Halt> {
    let shape = material.output_shape();
    let seen = observed.output("out", material.output_dtype(), &shape)?.to_f64();
    let first =
        Comparison::all("out", &seen, out).finding(headline, Stage::Merge, |flat| material.place(flat));
    let Finding::Holds(measured) = first else { return Ok(first) };
    let seen = observed.output("lse", Dtype::F32, &shape[..3])?.to_f64();
    let second =
        Comparison::all("lse", &seen, lse).finding(headline, Stage::Merge, |flat| material.place_state(flat));
    Ok(if let Finding::Holds(more) = second { Finding::Holds(measured.and(more)) } else { second })
}

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let seen =
        laboratory.observed()?.output("out", material.output_dtype(), &material.output_shape())?.to_f64();
    let headline = "a merged output is not the weighted sum of its two states";
    Ok(Comparison::all("out", &seen, &material.expected()?.out)
        .finding(headline, Stage::Merge, |flat| material.place(flat)))
}

fn lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let shape = material.output_shape();
    let seen = laboratory.observed()?.output("lse", Dtype::F32, &shape[..3])?.to_f64();
    let headline = "a merged LSE is not the log-sum-exp of its two states";
    Ok(Comparison::all("lse", &seen, &material.expected()?.lse)
        .finding(headline, Stage::Merge, |flat| material.place_state(flat)))
}

fn rerun(laboratory: &Laboratory, inputs: &Tensors) -> Result<Observed, Halt> {
    let material = laboratory.merging();
    Run::open(&laboratory.engine, &material.configuration)?.step(&material.operation, inputs)
}

fn neutral(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let mut measured = crate::finding::Measured::default();
    for keep in 0..2 {
        let (inputs, state) = material.with_only(keep);
        let observed = rerun(laboratory, &inputs)?;
        let headline = format!(
            "the {} does not come out as it went in when the other state is empty",
            ["prefix", "suffix"][keep]
        );
        match judge(material, &observed, &state.out, &state.lse, &headline)? {
            Finding::Holds(more) => measured = measured.and(more),
            broken => return Ok(broken),
        }
    }
    Ok(Finding::Holds(measured))
}

fn all_empty(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let expected = material.expected()?;
    let dim = material.output_shape()[3];
    let empty = |state: usize| expected.lse[state] == Allowed::NegativeInfinity;
    let out: Vec<_> = (0..expected.out.len())
        .map(|flat| if empty(flat / dim) { Allowed::Exactly(0.0) } else { Allowed::Undefined })
        .collect();
    let lse: Vec<_> = (0..expected.lse.len())
        .map(|state| if empty(state) { Allowed::NegativeInfinity } else { Allowed::Undefined })
        .collect();
    judge(material, laboratory.observed()?, &out, &lse, "two empty states do not merge to an empty state")
}

fn nan_lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let expected = material.expected()?;
    let of_nan = |allowed: &Allowed| match allowed {
        Allowed::OrNan { .. } => *allowed,
        _ => Allowed::Undefined,
    };
    let out: Vec<_> = expected.out.iter().map(of_nan).collect();
    let lse: Vec<_> = expected.lse.iter().map(of_nan).collect();
    let headline = "an LSE of NaN came out as a number that is not the other state's";
    judge(material, laboratory.observed()?, &out, &lse, headline)
}

fn commute(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let expected = material.expected()?;
    let observed = rerun(laboratory, &material.reversed())?;
    judge(material, &observed, &expected.out, &expected.lse, "the merge depends on which state comes first")
}
