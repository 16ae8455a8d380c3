//! Sequences of steps in one session: what was true of an earlier step must not leak into a later one.

use shardcheck_cases::{AttentionCase, Family, Placement};

use super::{Property, attend};
use crate::finding::{Finding, Stage};
use crate::laboratory::{Halt, Laboratory, Run};
use crate::localise;

pub(super) const PROPERTIES: &[Property] = &[Property {
    id: "sequence.second-step",
    statement: "a second step of the session, with a smaller batch, other lengths and other blocks, is global attention as well",
    source: "captured metadata must be refreshed by every step",
    bugs: &[
        "vllm#36070",
        "ATOM#2102",
        "vllm-ascend#4221",
        "vllm-ascend#11072",
        "vllm-ascend#10895",
        "vllm-ascend#10878",
    ],
    tolerance: "certified interval of the declared rounding contract, per element",
    families: &[Family::Decode, Family::Verify, Family::Draft],
    applies: crate::run::is_small,
    check: second_step,
}];

/// A batch that a scheduler might run next: the last request has finished, contexts are shorter, blocks are others.
fn next(case: &AttentionCase) -> AttentionCase {
    let mut next = case.clone();
    let workload = &mut next.workload;
    if workload.requests.len() > 1 {
        workload.requests.pop();
    }
    workload.requests.reverse();
    for request in &mut workload.requests {
        request.context_tokens -= request.context_tokens.div_ceil(3);
    }
    workload.placement = match workload.placement {
        Placement::Shuffled => Placement::Sequential,
        _ => Placement::Shuffled,
    };
    workload.padded_rows = if workload.padded_rows == 0 { 2 } else { 0 };
    next
}

fn second_step(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let first = laboratory.attention();
    let second = first.variant(next(&first.case))?;
    let mut run = Run::open(laboratory.engine, first.configuration())?;
    run.step(&shardcheck_engine::Operation::WriteKv, &first.write_inputs())?;
    run.step(&first.operation(), &first.step_inputs())?;
    run.step(&shardcheck_engine::Operation::WriteKv, &second.write_inputs())?;
    let observed = run.step(&second.operation(), &second.step_inputs())?;
    let comparison = attend::compare_output(&second, &observed)?;
    let shape = second.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", shape[3])];
    let stage = match localise::row_lengths(&second, &observed) {
        Ok(lengths) if !lengths.holds() => Stage::RowBound,
        _ => Stage::Output,
    };
    let headline =
        "the second step of a session is not global attention, although the first is asked the same way";
    Ok(comparison.finding(headline, stage, |flat| second.place(flat, &axes)))
}
