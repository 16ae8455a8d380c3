//! Laws of the merge over ranks, on given partials.

use shardcheck_cases::{Body, Case, Family, MergePattern, StateView};
use shardcheck_engine::{LseBase, Operation, Tensors};
use shardcheck_formats::Dtype;

use super::{Property, always};
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed, Run};
use crate::merging::MergeMaterial;

const MERGE: &[Family] = &[Family::MergePartials];
const BOUND: &str = "certified bound of the declared merge arithmetic on exactly known partials";
const BITS: &str = "exact: bits";

pub(super) const PROPERTIES: &[Property] = &[
    property!(
        "merge.output",
        MERGE,
        always,
        "the merged output is Σ exp(lse_r − g)·o_r over the ranks whose LSE is neither −inf, +inf nor NaN",
        "ATOM `cp_lse_ag_out_rs`, `cp_lse_a2a`; vLLM `dcp_a2a_lse_reduce`",
        &["vllm#28840", "vllm#38416", "flashinfer#4975", "ATOM#1832"],
        BOUND,
        output
    ),
    property!(
        "merge.lse",
        MERGE,
        always,
        "the merged LSE is ln Σ exp(lse_r)",
        "log-sum-exp over a partition",
        &["vllm#26509", "flashinfer#58"],
        BOUND,
        lse
    ),
    property!(
        "merge.neutral",
        MERGE,
        always,
        "a state merged with empty states only comes out bit for bit, although the empty outputs hold NaN (zeros where the engine declares that it relies on them)",
        "the empty state is the neutral element",
        &["vllm#38416", "flashinfer#4975", "ATOM#1832", "TensorRT-LLM#15383"],
        BITS,
        neutral
    ),
    property!(
        "merge.all-empty",
        MERGE,
        |case| pattern(case) == Some(MergePattern::AllEmpty),
        "states that are all empty merge to exact zeros with LSE −inf",
        "vLLM `_lse_weighted_combine`; ATOM merge tests",
        &["vllm#28181", "vllm-ascend#5837"],
        BITS,
        all_empty
    ),
    property!(
        "merge.permutation",
        MERGE,
        |case| world(case) > 1,
        "the order of the ranks does not matter beyond rounding",
        "addition commutes",
        &["flashinfer@6cbaf6e", "TransformerEngine#1624"],
        BOUND,
        permutation
    ),
    property!(
        "merge.shift",
        MERGE,
        |case| matches!(pattern(case), Some(MergePattern::Random | MergePattern::SomeEmpty)),
        "adding a constant to all LSEs moves the merged LSE by it and leaves the output",
        "softmax is invariant under a common shift",
        &["vllm#28840"],
        BOUND,
        shift
    ),
    property!(
        "merge.base-2",
        MERGE,
        always,
        "LSEs that are given in base 2 weigh as the natural ones do, and the merged one is in base 2",
        "FlashInfer `merge_state`; vLLM `is_lse_base_on_e=False`",
        &["vllm#28840"],
        BOUND,
        base_2
    ),
    property!(
        "merge.fold",
        MERGE,
        |case| world(case) > 2 && pattern(case) == Some(MergePattern::Random),
        "merging N states at once equals folding the engine's own two-state merge over them",
        "associativity of the merge",
        &["flashinfer@6cbaf6e", "sglang#35045"],
        "sum of the bounds of both routes",
        fold
    ),
    property!(
        "merge.views",
        MERGE,
        |case| view(case).is_some_and(|view| view != StateView::Contiguous),
        "states given as strided views merge to the same bits as their contiguous copies",
        "a tensor's values do not depend on its strides",
        &["vllm#26509"],
        BITS,
        views
    ),
    property!(
        "merge.tags",
        MERGE,
        |case| pattern(case) == Some(MergePattern::Tagged),
        "every rank receives its own heads: outputs that spell row and head come out in their place",
        "head ownership is contiguous: rank j keeps heads [jH, (j+1)H)",
        &["vllm#29487", "ATOM#1208", "sglang#20360"],
        BOUND,
        tags
    ),
];

fn merge_case(case: &Case) -> Option<&shardcheck_cases::MergeCase> {
    match &case.body {
        Body::Merge(merge) => Some(merge),
        _ => None,
    }
}

fn pattern(case: &Case) -> Option<MergePattern> {
    merge_case(case).map(|merge| merge.pattern)
}

fn view(case: &Case) -> Option<StateView> {
    merge_case(case).map(|merge| merge.view)
}

fn world(case: &Case) -> usize {
    merge_case(case).map_or(0, |merge| merge.world)
}

fn base_2(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let (inputs, expected) = material.in_base_2()?;
    let operation = Operation::MergePartials { lse_base: LseBase::Two };
    let observed = Run::open(&laboratory.engine, &material.configuration)?.step(&operation, &inputs)?;
    let headlines = [
        "LSEs in base 2 do not weigh as the natural ones do",
        "the merged LSE of LSEs in base 2 is not their log-sum-exp in that base",
    ];
    compare_both(material, &observed, (&expected.out, &expected.lse), headlines)
}

/// Runs the case's operation on other inputs.
fn rerun(laboratory: &Laboratory, inputs: &Tensors) -> Result<Observed, Halt> {
    let material = laboratory.merging();
    Run::open(&laboratory.engine, &material.configuration)?.step(&material.operation, inputs)
}

fn compare(material: &MergeMaterial, observed: &Observed, expected: &[Allowed]) -> Result<Comparison, Halt> {
    let shape = material.output_shape();
    let seen = observed.output("out", material.output_dtype(), &shape)?.to_f64();
    Ok(Comparison::all("out", &seen, expected))
}

fn compare_lse(
    material: &MergeMaterial,
    observed: &Observed,
    expected: &[Allowed],
) -> Result<Comparison, Halt> {
    let shape = material.output_shape();
    let seen = observed.output("lse", Dtype::F32, &shape[..3])?.to_f64();
    Ok(Comparison::all("lse", &seen, expected))
}

/// Output and merged LSE, in that order; the output alone where the engine declares that it has no LSE.
fn compare_both(
    material: &MergeMaterial,
    observed: &Observed,
    (out, lse): (&[Allowed], &[Allowed]),
    [of_output, of_lse]: [&str; 2],
) -> Result<Finding, Halt> {
    let first =
        compare(material, observed, out)?.finding(of_output, Stage::Merge, |flat| material.place(flat));
    let Finding::Holds(measured) = first else { return Ok(first) };
    if observed.lacks("lse") {
        return Ok(Finding::Holds(measured));
    }
    let lses = compare_lse(material, observed, lse)?;
    let second = lses.finding(of_lse, Stage::Merge, |flat| material.place_state(flat));
    Ok(if let Finding::Holds(more) = second { Finding::Holds(measured.and(more)) } else { second })
}

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let comparison = compare(material, laboratory.observed()?, &material.expected()?.out)?;
    let headline = "a merged output is not the weighted sum of its states";
    Ok(comparison.finding(headline, Stage::Merge, |flat| material.place(flat)))
}

fn lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let comparison = compare_lse(material, laboratory.observed()?, &material.expected()?.lse)?;
    let headline = "a merged LSE is not the log-sum-exp of its states";
    Ok(comparison.finding(headline, Stage::Merge, |flat| material.place_state(flat)))
}

fn neutral(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let mut measured = Measured::default();
    for keep in 0..material.world() {
        let (inputs, state) = material.with_only(keep);
        let observed = rerun(laboratory, &inputs)?;
        let headline =
            format!("the state of rank {keep}, merged with empty states, does not come out as it went in");
        let found = compare_both(material, &observed, (&state.out, &state.lse), [&headline; 2])?;
        let Finding::Holds(more) = found else { return Ok(found) };
        measured = measured.and(more);
    }
    Ok(Finding::Holds(measured))
}

fn all_empty(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let observed = laboratory.observed()?;
    let shape = material.output_shape();
    let out = observed.output("out", material.output_dtype(), &shape)?.to_f64();
    let lse = match observed.lacks("lse") {
        true => None,
        false => Some(observed.output("lse", Dtype::F32, &shape[..3])?.to_f64()),
    };
    let expected = material.expected()?;
    let mut comparison = Comparison::new("out");
    let mut lses = Comparison::new("lse");
    for (flat, wanted) in expected.lse.iter().enumerate() {
        if *wanted != Allowed::NegativeInfinity {
            continue;
        }
        if let Some(lse) = &lse {
            lses.element(flat, lse[flat], Allowed::NegativeInfinity);
        }
        for d in 0..shape[3] {
            comparison.element(flat * shape[3] + d, out[flat * shape[3] + d], Allowed::Exactly(0.0));
        }
    }
    let first =
        comparison.finding("all states are empty, but the output is not zero", Stage::Merge, |flat| {
            material.place(flat)
        });
    let Finding::Holds(measured) = first else { return Ok(first) };
    let second = lses.finding("all states are empty, but the LSE is not −inf", Stage::Merge, |flat| {
        material.place_state(flat)
    });
    Ok(if let Finding::Holds(more) = second { Finding::Holds(measured.and(more)) } else { second })
}

fn permutation(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let observed = rerun(laboratory, &material.reversed())?;
    let expected = material.expected()?;
    let headline = "the merge depends on the order of the ranks";
    compare_both(material, &observed, (&expected.out, &expected.lse), [headline; 2])
}

fn shift(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    // beyond what an exponential in 32 bits holds, so that a merge must subtract a maximum
    let (inputs, expected) = material.shifted(96.0)?;
    let observed = rerun(laboratory, &inputs)?;
    let headline = "a common shift of all LSEs changes the merge";
    compare_both(material, &observed, (&expected.out, &expected.lse), [headline; 2])
}

fn fold(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let mut run = Run::open(&laboratory.engine, &material.configuration)?;
    let mut state = material.state_of(0);
    for rank in 1..material.world() {
        let next = material.state_of(rank);
        let inputs = Tensors::new()
            .with("prefix_out", state.0)
            .with("prefix_lse", state.1)
            .with("suffix_out", next.0)
            .with("suffix_lse", next.1);
        let observed = run.step(&Operation::MergeStates, &inputs)?;
        state = material.state_from(&observed)?;
    }
    let expected = material.expected_fold()?;
    let seen = state.0.to_f64();
    let comparison = Comparison::all("out", &seen, &expected.out);
    let headline = "folding the two-state merge over the ranks does not give the N-way merge";
    let first = comparison.finding(headline, Stage::Merge, |flat| material.place_folded(flat));
    let Finding::Holds(measured) = first else { return Ok(first) };
    let second =
        Comparison::all("lse", &state.1.to_f64(), &expected.lse)
            .finding(headline, Stage::Merge, |flat| format!("state {flat}"));
    let Finding::Holds(more) = second else { return Ok(second) };
    // both routes are held to the same numbers: with either wrong, they are not equal
    let headline = "the N-way merge is not what folding the two-state merge over the ranks gives";
    let third = compare(material, laboratory.observed()?, &material.expected()?.out)?.finding(
        headline,
        Stage::Merge,
        |flat| material.place(flat),
    );
    let Finding::Holds(all) = third else { return Ok(third) };
    Ok(Finding::Holds(measured.and(more).and(all)))
}

fn views(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let copy = rerun(laboratory, &material.contiguous())?;
    let shape = material.output_shape();
    let out = as_given(&copy.output("out", material.output_dtype(), &shape)?.to_f64());
    let lse = match copy.lacks("lse") {
        true => Vec::new(),
        false => as_given(&copy.output("lse", Dtype::F32, &shape[..3])?.to_f64()),
    };
    let headlines = ["out", "lse"]
        .map(|name| format!("{name} of strided states differs from that of their contiguous copies"));
    compare_both(material, laboratory.observed()?, (&out, &lse), headlines.each_ref().map(String::as_str))
}

/// Each value itself. The bits of a NaN mean nothing: that it is one is another law's to say.
fn as_given(values: &[f64]) -> Vec<Allowed> {
    let exactly = |value: &f64| match value.is_nan() {
        true => Allowed::Exactly(f64::NAN).or_nan(),
        false => Allowed::Exactly(*value),
    };
    values.iter().map(exactly).collect()
}

fn tags(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let expected = material.expected()?;
    let observed = laboratory.observed()?;
    let comparison = compare(material, observed, &expected.out)?;
    let headline = "a rank received heads or rows that are not its own";
    if comparison.holds() {
        return Ok(Finding::Holds(comparison.measured()));
    }
    let mut failure = comparison.failure(headline, Stage::Exchange, |flat| material.place(flat));
    let seen = observed.output("out", material.output_dtype(), &material.output_shape())?.to_f64();
    failure.notes.extend(material.identify(&seen, comparison.broken()));
    Ok(Finding::Broken(Box::new(failure)))
}
