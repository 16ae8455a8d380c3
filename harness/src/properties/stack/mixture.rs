//! MLPs of a stack, and the mixtures of experts that stand in their place.

use shardcheck_cases::{Body, Case, StackTurn};
use shardcheck_references::kda::Near;

use super::{BOUND, STACK, Scene, every_run, grid, updates};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::Allowed;
use crate::laboratory::{Halt, Laboratory};
use crate::properties::Property;
use crate::routing::Routing;
use crate::stacking::{MixtureRow, Shown, StackMaterial, View};

pub(in crate::properties) const LATENT: &[Property] = &[
    Property {
        id: "stack.latent",
        statement: "latent experts get the down-projection of a normed row, the same on every rank",
        source: "ATOM `kimi_k3`: down-projection, experts, norm, up-projection",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: has_latent,
        check: latent,
    },
    Property {
        id: "stack.latent-experts",
        statement: "what the latent experts of a row give is summed over all ranks before it is normed",
        source: "a norm of parts is no part of the norm",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: has_latent,
        check: latent_experts,
    },
    Property {
        id: "stack.latent-norm",
        statement: "the sum of latent experts is normed by the weights of its layer before it is projected up",
        source: "ATOM `kimi_k3`",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: has_latent,
        check: latent_norm,
    },
];

fn has_latent(case: &Case) -> bool {
    matches!(&case.body, Body::Stack(stack) if stack.mixture.is_some_and(|own| own.latent > 0))
}

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
    fn of(material: &StackMaterial, turn: &StackTurn, shown: &Shown<'_>) -> Result<Self, Halt> {
        let (ids, logits) = (shown.tensor("topk_ids")?, shown.tensor("router_logits")?);
        let of_layer = |mixture: usize| -> Vec<f32> {
            (0..shown.real_rows).flat_map(|row| logits.row(&[0, mixture, row]).to_vec()).collect()
        };
        let tokens = material.inputs.token_ids(&material.case, turn);
        let of_layer = |mixture: usize| material.routing(mixture, &of_layer(mixture), &tokens);
        let routing = (0..ids.shape[1]).map(of_layer).collect();
        Ok(Self { ids, routing })
    }

    /// What the experts of a row give, of its row in their own width; none where they are no set of experts, which is judged by itself.
    fn update(&self, material: &StackMaterial, (mixture, row): MixtureRow, x: &[f32]) -> Option<Vec<Near>> {
        let routing = self.routing[mixture].as_ref()?;
        let chosen = routing.experts(row, &self.ids(0, mixture, row)).ok()?;
        Some(material.mixture_update((mixture, row), (routing, &chosen), x))
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
        let seen = Experts::of(material, turn, &shown)?;
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
    /// Normed rows of latent experts.
    latent: Option<View>,
}

pub(super) fn feed_forward(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "what an MLP or its experts add is not what they give of their rows";
    let material = laboratory.stack();
    let dense = material.case.plan().dense();
    let seen = |scene: &Scene<'_>| {
        let of_run = |_| Experts::of(material, scene.turn, &scene.shown);
        let experts = material.case.mixture.map(of_run).transpose()?;
        let latent = material.is_latent().then(|| scene.shown.tensor("latent_normed")).transpose()?;
        Ok(Behind { normed: scene.shown.tensor("normed")?, experts, latent })
    };
    updates(laboratory, headline, 1, seen, |Behind { normed, experts, latent }, layer, row| {
        let x = normed.row(&[0, 2 * layer + 1, row]);
        let nothing = vec![Allowed::Undefined; x.len()];
        // where ranks have other rows, which is judged by itself, nobody has the whole MLP of any of them
        if (1..normed.shape[0]).any(|rank| normed.row(&[rank, 2 * layer + 1, row]) != x) {
            return nothing;
        }
        let near: Option<Vec<Near>> = match (layer.checked_sub(dense), experts, latent) {
            (Some(mixture), _, Some(latent)) => {
                let sum = latent.row(&[0, mixture, row]);
                let is_one = (1..latent.shape[0]).all(|rank| latent.row(&[rank, mixture, row]) == sum);
                is_one.then(|| material.latent_update(mixture, sum, x))
            }
            (Some(mixture), Some(experts), None) => experts.update(material, (mixture, row), x),
            _ => {
                let weights = ["w_gate", "w_up", "w_down"].map(|name| material.weight(name, Some(layer)));
                Some(material.feed_forward_update(weights, x))
            }
        };
        near.map_or(nothing, |near| material.stored(&near))
    })
}

/// Judges a tensor `[ranks, X, T, z]` of latent experts; `near` gives what a row may be, of what `prepared` found in the run.
fn latents<T>(
    laboratory: &Laboratory,
    name: &str,
    headline: &str,
    prepared: impl Fn(&Scene<'_>) -> Result<T, Halt>,
    near: impl Fn(&Scene<'_>, &T, [usize; 3]) -> Option<Vec<Near>>,
) -> Result<Finding, Halt> {
    every_run(
        laboratory,
        name,
        headline,
        Stage::Exchange,
        |scene, seen| {
            let source = prepared(scene)?;
            let row = |at: Vec<usize>| {
                let [rank, mixture, row] = at[..] else { return None };
                let near = || near(scene, &source, [rank, mixture, row]);
                let near = (row < scene.shown.real_rows).then(near)??;
                Some(scene.material.stored(&near))
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        |scene, at| {
            let layer = scene.material.case.plan().dense() + at[1];
            format!("layer {layer}, {}", scene.material.row_name(scene.turn, at[2]))
        },
    )
}

pub(super) fn latent(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a row of latent experts is not the down-projection of its normed row";
    let dense = laboratory.stack().case.plan().dense();
    let seen = |scene: &Scene<'_>| scene.shown.tensor("normed");
    latents(laboratory, "latent", headline, seen, |scene, normed, [rank, mixture, row]| {
        let x = normed.row(&[rank, 2 * (dense + mixture) + 1, row]);
        Some(scene.material.project(scene.material.weight("latent_down", Some(mixture)), x))
    })
}

pub(super) fn latent_experts(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "what latent experts give together is not the sum over all ranks";
    let seen = |scene: &Scene<'_>| {
        Ok((scene.shown.tensor("latent")?, Experts::of(scene.material, scene.turn, &scene.shown)?))
    };
    latents(laboratory, "latent_sum", headline, seen, |scene, (latent, experts), [_, mixture, row]| {
        let x = latent.row(&[0, mixture, row]);
        let is_one = (1..latent.shape[0]).all(|rank| latent.row(&[rank, mixture, row]) == x);
        is_one.then(|| experts.update(scene.material, (mixture, row), x))?
    })
}

pub(super) fn latent_norm(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "the row behind latent experts is not normed by the weights of its layer";
    let seen = |scene: &Scene<'_>| scene.shown.tensor("latent_sum");
    latents(laboratory, "latent_normed", headline, seen, |scene, sums, [rank, mixture, row]| {
        Some(scene.material.latent_normed(mixture, sums.row(&[rank, mixture, row])))
    })
}
