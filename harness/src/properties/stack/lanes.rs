//! A stack over ranks of prefill context parallelism: who has which rows, and how they come together.

use shardcheck_cases::{Body, Case};
use shardcheck_formats::Dtype;

use super::super::{Property, broken};
use super::{STACK, every_run, grid};
use crate::finding::{Finding, Measured, Stage};
use crate::judge::Allowed;
use crate::laboratory::{Halt, Laboratory};
use crate::stacking::shown_rows;

pub(in crate::properties) const PROPERTIES: &[Property] = &[
    Property {
        id: "stack.pcp-rows",
        statement: "each rank of prefill context parallelism runs the rows of a prompt that its strategy gives it, and every row of a decode where those are replicated; padding comes last",
        source: "ATOM `pcp_utils`, SGLang `--cp-strategy`, vLLM `PCPManager`",
        bugs: &[],
        tolerance: "exact: integers",
        families: STACK,
        applies: has_pcp,
        check: rows,
    },
    Property {
        id: "stack.restored",
        statement: "the head gets the rows of all ranks of prefill context parallelism in the order of the batch, each as the rank that has it computed it, and none of padding",
        source: "ATOM: gather, order and drop of padding stand in front of the head",
        bugs: &[],
        tolerance: "exact: codes",
        families: STACK,
        applies: has_pcp,
        check: restored,
    },
];

fn has_pcp(case: &Case) -> bool {
    matches!(&case.body, Body::Stack(stack) if stack.pcp.is_some())
}

fn rows(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.stack();
    let mut compared = 0;
    for (turn, observed) in material.inputs.turns.iter().zip(laboratory.stepped()?) {
        let Some(sharing) = material.sharing(turn) else { continue };
        let Some((width, seen)) = shown_rows(observed, &sharing) else {
            // missing, or something else
            observed.observable("rows", Dtype::I64, &[sharing.world, sharing.padded])?;
            continue;
        };
        for (rank, own) in seen.chunks_exact(width.max(1)).enumerate() {
            let wanted: Vec<i64> = sharing.rows_of(rank).into_iter().map(|row| row as i64).collect();
            let (found, padding) = own.split_at(wanted.len().min(width));
            let mut found = found.to_vec();
            found.sort_unstable();
            if found != wanted || width != sharing.padded || padding.iter().any(|row| *row != -1) {
                let headline = format!(
                    "{}: rank {rank} of prefill context parallelism runs rows {own:?}; its own are {wanted:?}, and padding behind them up to {}",
                    material.name(turn),
                    sharing.padded
                );
                return Err(broken(headline, Stage::Layout));
            }
            compared += own.len();
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

fn restored(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a row that the head gets is not the one that its rank computed";
    let last = 2 * laboratory.stack().case.layers;
    every_run(
        laboratory,
        "restored",
        headline,
        Stage::Gather,
        |scene, seen| {
            let (normed, tp) = (scene.shown.tensor("normed")?, scene.material.ranks());
            let row = |at: Vec<usize>| {
                let (holder, place) = scene.shown.lanes.held(at[0] / tp, at[0] % tp, at[1])?;
                let exactly = |value: &f32| match value.is_finite() {
                    true => Allowed::Exactly(f64::from(*value)),
                    false => Allowed::Undefined,
                };
                Some(normed.row(&[holder, last, place]).iter().map(exactly).collect())
            };
            Ok(grid(&seen.shape[..2]).map(row).collect())
        },
        |scene, at| scene.material.row_name(scene.turn, at[1]),
    )
}
