//! MLPs of a stack, and the mixtures of experts that stand in their place.

use shardcheck_references::kda::Near;

use super::{Scene, every_run, grid, updates};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::Allowed;
use crate::laboratory::{Halt, Laboratory};
use crate::routing::Routing;
use crate::stacking::{Shown, StackMaterial, View};

pub(super) fn router(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a router's logits are not those of its normed rows";
    every_run(
        laboratory,
        "router_logits",
        headline,
        Stage::Routing,
        |scene, seen| {
            let normed = scene.shown.tensor("normed")?;
            let dense = scene.material.case.plan().dense();
            let row = |at: Vec<usize>| {
                let [rank, mixture, row] = at[..] else { return None };
                let x = normed.row(&[rank, 2 * (dense + mixture) + 1, row]);
                (row < scene.shown.real_rows).then(|| scene.material.router_logits(mixture, x))
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        |scene, at| {
            let layer = scene.material.case.plan().dense() + at[1];
            format!("layer {layer}, {}", scene.material.row_name(scene.turn, at[2]))
        },
    )
}

/// What was seen of the experts of one step.
struct Experts {
    ids: View,
    /// Of each layer that has experts, by the logits of rank 0; none where they are no numbers.
    routing: Vec<Option<Routing>>,
}

impl Experts {
    fn of(material: &StackMaterial, shown: &Shown<'_>) -> Result<Self, Halt> {
        let (ids, logits) = (shown.tensor("topk_ids")?, shown.tensor("router_logits")?);
        let of_layer = |mixture: usize| -> Vec<f32> {
            (0..shown.real_rows).flat_map(|row| logits.row(&[0, mixture, row]).to_vec()).collect()
        };
        let routing = (0..ids.shape[1]).map(|mixture| material.routing(&of_layer(mixture))).collect();
        Ok(Self { ids, routing })
    }

    fn ids(&self, rank: usize, mixture: usize, row: usize) -> Vec<i64> {
        self.ids.row(&[rank, mixture, row]).iter().map(|id| *id as i64).collect()
    }
}

pub(super) fn experts(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.stack();
    let mut compared = 0;
    for (turn, observed) in material.inputs.turns.iter().zip(laboratory.stepped()?) {
        let shown = Shown::of(material, turn, observed);
        let seen = Experts::of(material, &shown)?;
        for (mixture, routing) in seen.routing.iter().enumerate() {
            let Some(routing) = routing else { continue };
            for (rank, row) in
                (0..material.ranks()).flat_map(|rank| (0..shown.real_rows).map(move |row| (rank, row)))
            {
                let sorted = |rank: usize| {
                    let mut ids = seen.ids(rank, mixture, row);
                    ids.sort_unstable();
                    ids
                };
                let other = || {
                    (sorted(rank) != sorted(0))
                        .then(|| format!("other experts than on rank 0: {:?}", sorted(rank)))
                };
                if let Some(why) = routing.refusal(row, &seen.ids(rank, mixture, row)).or_else(other) {
                    let layer = material.case.plan().dense() + mixture;
                    let (step, place) = (material.name(turn), material.row_name(turn, row));
                    let headline = format!("{step}, rank {rank}, layer {layer}, {place}: {why}");
                    return Err(Failure::because(headline).at(Stage::Routing).into());
                }
                compared += 1;
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

/// What stands behind attention in the layers of one step.
struct Behind {
    normed: View,
    experts: Option<Experts>,
}

pub(super) fn feed_forward(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "what an MLP or its experts add is not what they give of their rows";
    let material = laboratory.stack();
    let dense = material.case.plan().dense();
    let seen = |scene: &Scene<'_>| {
        let of_run = |_| Experts::of(material, &scene.shown);
        let experts = material.case.mixture.map(of_run).transpose()?;
        Ok(Behind { normed: scene.shown.tensor("normed")?, experts })
    };
    updates(laboratory, headline, 1, seen, |Behind { normed, experts }, layer, row| {
        let x = normed.row(&[0, 2 * layer + 1, row]);
        let nothing = vec![Allowed::Undefined; x.len()];
        // where ranks have other rows, which is judged by itself, nobody has the whole MLP of any of them
        if (1..normed.shape[0]).any(|rank| normed.row(&[rank, 2 * layer + 1, row]) != x) {
            return nothing;
        }
        let near: Option<Vec<Near>> = match (layer.checked_sub(dense), experts) {
            (Some(mixture), Some(experts)) => {
                // what is no set of experts is judged by itself
                let routing = experts.routing[mixture].as_ref();
                let chosen =
                    routing.and_then(|r| Some((r, r.experts(row, &experts.ids(0, mixture, row)).ok()?)));
                chosen.map(|(routing, chosen)| material.mixture_update(mixture, routing, (row, &chosen), x))
            }
            _ => {
                let weights = ["w_gate", "w_up", "w_down"].map(|name| material.weight(name, Some(layer)));
                Some(material.feed_forward_update(weights, x))
            }
        };
        near.map_or(nothing, |near| material.stored(&near))
    })
}
