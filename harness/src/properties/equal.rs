//! Equivalences: the same problem run another way must give the same answer.
//!
//! A comparison of two runs whose effective paths are the same proves nothing about the difference that was asked for,
//! and is Inconclusive: a switched-off feature must not turn a comparison into a no-op.

use shardcheck_cases::{AttentionCase, Body, Case, Family, Placement};
use shardcheck_engine::{CommBackend, LaneOrder};

use super::Property;
use crate::finding::{Failure, Finding, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed, attend};
use crate::material::AttentionMaterial;

const ATTEND: &[Family] = &[Family::Decode, Family::Verify, Family::Draft, Family::AttendSelected];
const ATTEND_AND_CONTEXT: &[Family] =
    &[Family::Decode, Family::Verify, Family::Draft, Family::AttendSelected, Family::Context];
const BOUNDS: &str = "sum of the certified bounds of both runs";
const BITS: &str = "exact: bits";

pub(super) const PROPERTIES: &[Property] = &[
    property!(
        "equal.world",
        ATTEND,
        |case| small(case, |c| c.configuration.dcp > 1 && c.configuration.attention.kv_heads() == 1),
        "sharding over W ranks gives what one rank gives",
        "attention does not depend on where tokens are stored",
        &["vllm#41623", "vllm#54300", "TensorRT-LLM#9597"],
        BOUNDS,
        world
    ),
    property!(
        "equal.interleave",
        ATTEND_AND_CONTEXT,
        |case| small(case, |c| c.configuration.dcp > 1 && c.configuration.block_size > 1),
        "another interleave size gives the same output",
        "attention does not depend on where tokens are stored",
        &["vllm-ascend#14876", "vllm-ascend#5767"],
        BOUNDS,
        interleave
    ),
    property!(
        "equal.backend",
        ATTEND,
        |case| small(case, |c| c.configuration.dcp > 1),
        "all-gather with reduce-scatter and all-to-all give the same output",
        "both merge the same partials",
        &["vllm#28840", "vllm#38416"],
        BOUNDS,
        backend
    ),
    property!(
        "equal.lanes",
        ATTEND,
        |case| small(case, |c| c.configuration.dcp > 1 && c.configuration.comm_backend == CommBackend::A2a),
        "the lane order of the packed LSE does not change a bit of the output",
        "packing moves bits",
        &["TransformerEngine#1624"],
        BITS,
        lanes
    ),
    property!(
        "equal.query-replication",
        ATTEND,
        |case| attention(case).is_some_and(|c| c.configuration.dcp > 1),
        "replicated and gathered queries give the same bits",
        "the row view of a widened projection equals its slice",
        &["vllm-ascend#4687"],
        BITS,
        query_replication
    ),
    property!(
        "equal.project-before-merge",
        ATTEND,
        |case| small(case, |c| c.configuration.dcp > 1 && c.configuration.attention.is_mla()),
        "projecting before the merge and after it give the same output",
        "the merge is a weighted sum per head and the projection is linear per head",
        &["vllm-ascend#3850"],
        BOUNDS,
        project_before_merge
    ),
    property!(
        "equal.placement",
        ATTEND_AND_CONTEXT,
        |case| small(case, |_| true),
        "other physical blocks give the same bits",
        "a block table hides where tokens lie",
        &["sglang#29760", "vllm-ascend#4221"],
        BITS,
        placement
    ),
    property!(
        "equal.batch",
        ATTEND,
        |case| small(case, |c| c.workload.requests.len() > 1),
        "a request alone gives what it gives in its batch",
        "requests do not see each other",
        &["ATOM#1208", "TensorRT-LLM#9597", "flashinfer#353", "vllm-ascend#11807"],
        BOUNDS,
        batch
    ),
    property!(
        "equal.padding",
        ATTEND,
        |case| small(case, |_| true),
        "graph-padding rows do not change the rows of the batch",
        "padding rows belong to no request",
        &["ATOM#1700", "vllm-ascend#7012", "flashinfer#3057"],
        BOUNDS,
        padding
    ),
    property!(
        "equal.repeat",
        ATTEND_AND_CONTEXT,
        |case| small(case, |_| true),
        "the same step on a fresh session gives the same bits",
        "nothing but the inputs decides",
        &["ROCm/TransformerEngine#708", "TransformerEngine#3331"],
        BITS,
        repeat
    ),
    property!(
        "equal.future",
        &[Family::Verify],
        |case| small(case, |c| c.workload.requests.iter().any(|r| r.query_tokens > 1)),
        "the first verify row of each request does not depend on the tokens behind it",
        "causality",
        &["vllm#47181", "flash-attention#93"],
        BITS,
        future
    ),
];

fn attention(case: &Case) -> Option<&AttentionCase> {
    match &case.body {
        Body::Attention(attention) => Some(attention),
        _ => None,
    }
}

/// Equivalences that need an oracle of their own run on small shapes only: they say nothing more on large ones.
fn small(case: &Case, also: impl Fn(&AttentionCase) -> bool) -> bool {
    crate::run::is_small(case) && attention(case).is_some_and(also)
}

/// Runs the case changed by `change` and compares the outputs of all ranks.
fn variant(
    laboratory: &Laboratory,
    differs_in: Option<&'static str>,
    headline: &'static str,
    exact: bool,
    change: impl Fn(&mut AttentionCase),
) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let mut case = material.case.clone();
    change(&mut case);
    let other = material.variant(case)?;
    let base = laboratory.observed()?;
    let (observed, _) = attend(&laboratory.engine, &other)?;
    if let Some(key) = differs_in {
        let (a, b) = (base.reply.effective.get(key), observed.reply.effective.get(key));
        if a.is_none() && b.is_none() {
            return Err(Halt::Unsupported(format!(
                "the engine does not report {key}, so nothing shows that two runs differ in it"
            )));
        }
        if a == Some("none") && b == a {
            return Err(Halt::Unsupported(format!("the engine has no {key} that could differ here")));
        }
        if a == b {
            let path = a.unwrap_or("not reported");
            return Err(Halt::Inconclusive(format!(
                "both runs took the same path ({key}: {path}), so nothing was compared"
            )));
        }
    }
    let rows: Vec<_> = (0..material.rows.len()).map(|row| (row, row)).collect();
    compare(material, base, &other, &observed, &rows, exact, headline)
}

/// Compares `rows` (row of `a`, row of `b`) of two runs over all ranks.
pub(super) fn compare(
    material: &AttentionMaterial,
    a: &Observed,
    other: &AttentionMaterial,
    b: &Observed,
    rows: &[(usize, usize)],
    exact: bool,
    headline: &str,
) -> Result<Finding, Halt> {
    let (shape, other_shape) = (material.output_shape(), other.output_shape());
    let seen_a = a.output("out", material.output_dtype(), &shape)?.to_f64();
    let seen_b = b.output("out", other.output_dtype(), &other_shape)?.to_f64();
    let bounds = if exact { None } else { Some((material.expected()?, other.expected()?)) };
    let (heads, dim) = (shape[2], shape[3]);
    let mut comparison = Comparison::new("out");
    for rank in 0..shape[0] {
        for (row_a, row_b) in rows {
            for inner in 0..heads * dim {
                let flat = (rank * shape[1] + row_a) * heads * dim + inner;
                let from = (rank * other_shape[1] + row_b) * heads * dim + inner;
                let (x, y) = (seen_a[flat], seen_b[from]);
                let allowed = match &bounds {
                    None => Allowed::Exactly(y),
                    Some((ours, theirs)) => {
                        let head = rank * heads + inner / dim;
                        let at = |row: usize| (row * material.heads() + head) * dim + inner % dim;
                        let (low_a, high_a) = ours.out_interval(at(*row_a));
                        let (low_b, high_b) = theirs.out_interval(at(*row_b));
                        // ends of intervals are numbers of the output format, so these differences are exact
                        Allowed::Between {
                            expected: y,
                            low: y + (low_a - high_b),
                            high: y + (high_a - low_b),
                        }
                    }
                };
                comparison.element(flat, x, allowed);
            }
        }
    }
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", heads), ("dim", dim)];
    Ok(comparison.finding(headline, Stage::Output, |flat| material.place(flat, &axes)))
}

fn world(laboratory: &Laboratory) -> Result<Finding, Halt> {
    variant(laboratory, None, "one rank gives another output than W ranks", false, |case| {
        // the cache of one rank must hold what W ranks held together
        case.configuration.blocks = case.configuration.blocks.saturating_mul(case.configuration.dcp);
        case.configuration.dcp = 1;
        case.configuration.query_replication = false;
        case.configuration.project_before_merge = false;
    })
}

fn interleave(laboratory: &Laboratory) -> Result<Finding, Halt> {
    variant(laboratory, None, "another interleave size gives another output", false, |case| {
        let configuration = &mut case.configuration;
        configuration.interleave = if configuration.interleave == 1 { configuration.block_size } else { 1 };
    })
}

fn backend(laboratory: &Laboratory) -> Result<Finding, Halt> {
    variant(laboratory, Some("comm_backend"), "the other backend gives another output", false, |case| {
        case.configuration.comm_backend = match case.configuration.comm_backend {
            CommBackend::AgRs => CommBackend::A2a,
            CommBackend::A2a => CommBackend::AgRs,
        };
    })
}

fn lanes(laboratory: &Laboratory) -> Result<Finding, Halt> {
    variant(laboratory, Some("lane_order"), "the lane order changes the output", true, |case| {
        case.configuration.lane_order = match case.configuration.lane_order {
            LaneOrder::HiLo => LaneOrder::LoHi,
            LaneOrder::LoHi => LaneOrder::HiLo,
        };
    })
}

fn query_replication(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "replicated and gathered queries give different outputs";
    variant(laboratory, Some("query_replication"), headline, true, |case| {
        case.configuration.query_replication = !case.configuration.query_replication;
    })
}

fn project_before_merge(laboratory: &Laboratory) -> Result<Finding, Halt> {
    if !laboratory.attention().is_projected() {
        return Err(Halt::Unsupported("the case has no up-projection".to_owned()));
    }
    let headline = "projecting before the merge gives another output than after it";
    variant(laboratory, Some("project_before_merge"), headline, false, |case| {
        case.configuration.project_before_merge = !case.configuration.project_before_merge;
    })
}

fn placement(laboratory: &Laboratory) -> Result<Finding, Halt> {
    variant(laboratory, None, "other physical blocks give another output", true, |case| {
        case.workload.placement = match case.workload.placement {
            Placement::Descending => Placement::Shuffled,
            _ => Placement::Descending,
        };
    })
}

fn repeat(laboratory: &Laboratory) -> Result<Finding, Halt> {
    variant(laboratory, None, "the same step gives another output the second time", true, |_| {})
}

fn padding(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let mut case = material.case.clone();
    case.workload.padded_rows = if case.workload.padded_rows == 0 { 3 } else { 0 };
    let other = material.variant(case)?;
    let (observed, _) = attend(&laboratory.engine, &other)?;
    let rows: Vec<_> = (0..material.case.workload.query_rows()).map(|row| (row, row)).collect();
    let headline = "graph padding changes the rows of the batch";
    compare(material, laboratory.observed()?, &other, &observed, &rows, false, headline)
}

fn batch(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let starts = material.case.workload.query_start_loc();
    let requests = &material.case.workload.requests;
    // the last request that has rows: everything before it can disturb it
    let Some(chosen) = (0..requests.len()).rev().find(|i| requests[*i].query_tokens > 0) else {
        return Err(Halt::Unsupported("no request has a row".to_owned()));
    };
    let other = material.alone(chosen)?;
    let (observed, _) = attend(&laboratory.engine, &other)?;
    let first = starts[chosen] as usize;
    let rows: Vec<_> = (0..requests[chosen].query_tokens).map(|t| (first + t, t)).collect();
    let headline = "a request gives another output in its batch than alone";
    compare(material, laboratory.observed()?, &other, &observed, &rows, false, headline)
}

fn future(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let other = material.with_other_future()?;
    let (observed, _) = attend(&laboratory.engine, &other)?;
    let base = laboratory.observed()?;
    let mut rows = Vec::new();
    for (index, start) in material.case.workload.query_start_loc().iter().enumerate() {
        if material.case.workload.requests.get(index).is_some_and(|r| r.query_tokens > 1) {
            rows.push((*start as usize, *start as usize));
        }
    }
    if rows.is_empty() {
        return Err(Failure::because("no request has two rows").into());
    }
    let headline = "a row depends on tokens behind it";
    compare(material, base, &other, &observed, &rows, true, headline)
}
