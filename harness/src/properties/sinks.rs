//! Laws of attention whose heads have sinks: a logit that takes its share of the softmax and adds no value.

use shardcheck_cases::{Body, Case, Family};
use shardcheck_engine::Operation;

use super::attend::{self, CERTIFIED, CERTIFIED_LSE};
use super::{Property, always};
use crate::finding::{Finding, Stage};
use crate::laboratory::{Halt, Laboratory, Run};

const SINKS: &[Family] = &[Family::AttendSinks];

pub(super) const PROPERTIES: &[Property] = &[
    property!(
        "sinks.partial-lse",
        SINKS,
        has_ranks,
        "a rank's LSE is that of attention over its own tokens, without the sink, which belongs to no rank",
        "TokenSpeed: sinks behind the merge",
        &["vllm#38416"],
        CERTIFIED_LSE,
        attend::partial_lse
    ),
    property!(
        "sinks.partial-output",
        SINKS,
        has_ranks,
        "a rank's partial output is attention over its own tokens, without the sink",
        "TokenSpeed: sinks behind the merge",
        &[],
        CERTIFIED,
        attend::partial_output
    ),
    property!(
        "sinks.lse",
        SINKS,
        always,
        "the merged LSE of a row is that of global causal attention and of its head's sink, counted once",
        "gpt-oss: softmax over scores and one sink a head",
        &["vllm#28840", "flashinfer#58"],
        CERTIFIED_LSE,
        attend::lse
    ),
    property!(
        "sinks.output",
        SINKS,
        always,
        "the output of a row is global causal attention whose normaliser holds its head's sink once, however many ranks there are",
        "gpt-oss: softmax over scores and one sink a head",
        &["vllm#28840", "vllm#38416"],
        CERTIFIED,
        attend::output
    ),
    property!(
        "sinks.extremes",
        SINKS,
        always,
        "a sink far above all scores leaves nothing of a row and is its LSE; one far below changes nothing",
        "the share of a sink is exp(sink − LSE)",
        &[],
        CERTIFIED,
        extremes
    ),
];

fn has_ranks(case: &Case) -> bool {
    matches!(&case.body, Body::Attention(attention) if attention.configuration.dcp > 1)
}

/// Far above, where exp itself is no number of 32 bits any more, and far below, by turns of heads.
fn extremes(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention().with_sinks(|head| if head % 2 == 0 { 300.0 } else { -300.0 })?;
    let mut run = Run::open(&laboratory.engine, material.configuration())?;
    run.step(&Operation::WriteKv, &material.write_inputs())?;
    let observed = run.step(&material.operation(), &material.step_inputs())?;
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", shape[3])];
    let place = |flat, axes: &[(&'static str, usize)]| material.place(flat, axes);
    let headline = "a sink that takes all of a row, or nothing, does not";
    let first = attend::compare_output(&material, &observed)?
        .finding(headline, Stage::Merge, |flat| place(flat, &axes));
    let Finding::Holds(measured) = first else { return Ok(first) };
    if observed.lacks("lse") {
        return Ok(Finding::Holds(measured));
    }
    let second = attend::compare_lse(&material, &observed)?
        .finding(headline, Stage::Merge, |flat| place(flat, &axes[..3]));
    Ok(if let Finding::Holds(more) = second { Finding::Holds(measured.and(more)) } else { second })
}
