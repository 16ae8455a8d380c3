//! The gate of what latent attention gives.

use shardcheck_cases::{Body, Case};

use super::{BOUND, STACK, every_run, grid, of_head};
use crate::finding::{Finding, Stage};
use crate::laboratory::{Halt, Laboratory};
use crate::properties::Property;

pub(in crate::properties) const PROPERTIES: &[Property] = &[Property {
    id: "stack.gate",
    statement: "what attention gives is multiplied, element by element, by the sigmoid of a projection of the layer's normed rows, each head by its own part of it",
    source: "Kimi-K3, Qwen3-Next: the gate stands between attention and the output projection",
    bugs: &[],
    tolerance: BOUND,
    families: STACK,
    applies: |case: &Case| matches!(&case.body, Body::Stack(stack) if stack.output_gate),
    check: gate,
}];

fn gate(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "what attention gives does not pass the gate of its row and head";
    every_run(
        laboratory,
        "gated",
        headline,
        Stage::Output,
        |scene, seen| {
            let (normed, attention) = (scene.shown.tensor("normed")?, scene.shown.tensor("attention")?);
            let (material, heads) = (scene.material, seen.shape[3]);
            let row = |at: Vec<usize>| {
                let [rank, layer, row, head] = at[..] else { return None };
                scene.is_real(rank, row).then(|| {
                    let x = normed.row(&[rank, 2 * material.latent[layer], row]);
                    let head = rank % material.ranks() * heads + head;
                    material.stored(&material.gated((layer, head), x, attention.row(&at)))
                })
            };
            Ok(grid(&seen.shape[..4]).map(row).collect())
        },
        of_head,
    )
}
