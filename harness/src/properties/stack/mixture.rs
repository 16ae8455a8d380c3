//! MLPs of a stack, and the mixtures of experts that stand in their place.

use shardcheck_cases::{Body, Case, StackTurn};
use shardcheck_references::kda::Near;

use super::{BOUND, LaneRow, STACK, Scene, every_run, grid, updates};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::Allowed;
use crate::laboratory::{Halt, Laboratory};
use crate::properties::Property;
use crate::routing::Routing;
use crate::stacking::{Shown, StackMaterial, View};

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
                scene.is_real(rank, row).then(|| scene.material.router_logits(mixture, x))
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        |scene, at| {
            let layer = scene.material.case.plan().dense() + at[1];
            format!("layer {layer}, {}", scene.words(at[0], at[2]))
        },
    )
}

/// What was seen of the experts of one step.
struct Experts {
    ids: View,
    /// Of each rank of prefill context parallelism and each layer that has experts, by the logits of its first rank; none where they are no numbers.
    routing: Vec<Vec<Option<Routing>>>,
    /// Rows of each rank of prefill context parallelism that are no padding.
    rows: Vec<usize>,
    /// Ranks of tensor parallelism.
    tp: usize,
}

impl Experts {
    fn of(material: &StackMaterial, turn: &StackTurn, shown: &Shown<'_>) -> Result<Self, Halt> {
        let (ids, logits) = (shown.tensor("topk_ids")?, shown.tensor("router_logits")?);
        let (tp, all) = (material.ranks(), material.inputs.token_ids(&material.case, turn));
        let (mut routing, mut rows): (Vec<Vec<Option<Routing>>>, _) = (Vec::new(), Vec::new());
        for lane in 0..shown.lanes.world() {
            let own = shown.lanes.front(lane);
            let of_layer = |mixture: usize| -> Vec<f32> {
                (0..own.len()).flat_map(|row| logits.row(&[lane * tp, mixture, row]).to_vec()).collect()
            };
            let tokens: Vec<i32> = own.iter().map(|row| all[*row]).collect();
            let of_layer = |mixture: usize| material.routing(mixture, &of_layer(mixture), &tokens);
            routing.push((0..ids.shape[1]).map(of_layer).collect());
            rows.push(own.len());
        }
        // where experts have all rows once, they can be those of one rank alone if ranks hold other copies
        let differs = |mixture: usize| {
            let own = |(rank, row): &(usize, usize)| logits.row(&[*rank, mixture, *row]);
            (0..shown.real_rows).any(|row| {
                let holders = shown.lanes.everywhere(row);
                holders.iter().any(|holder| own(holder) != own(&holders[0]))
            })
        };
        if material.case.pcp.is_some_and(|pcp| pcp.merged) {
            for mixture in (0..ids.shape[1]).filter(|mixture| differs(*mixture)) {
                routing.iter_mut().for_each(|lane| lane[mixture] = None);
            }
        }
        Ok(Self { ids, routing, rows, tp })
    }

    /// What the experts of a row give, of its row in their own width; none where they are no set of experts, which is judged by itself.
    fn update(
        &self,
        material: &StackMaterial,
        mixture: usize,
        (lane, row): LaneRow,
        x: &[f32],
    ) -> Option<Vec<Near>> {
        let routing = self.routing[lane][mixture].as_ref().filter(|_| row < self.rows[lane])?;
        let chosen = routing.experts(row, &self.ids(lane * self.tp, mixture, row)).ok()?;
        Some(material.mixture_update((mixture, row), (routing, &chosen), x))
    }

    fn ids(&self, rank: usize, mixture: usize, row: usize) -> Vec<i64> {
        self.ids.row(&[rank, mixture, row]).iter().map(|id| *id as i64).collect()
    }

    /// What is wrong with the experts of a row on a rank.
    fn refusal(&self, rank: usize, mixture: usize, row: usize) -> Option<String> {
        let first = rank / self.tp * self.tp;
        let routing = self.routing[rank / self.tp][mixture].as_ref()?;
        let sorted = |rank: usize| {
            let mut ids = self.ids(rank, mixture, row);
            ids.sort_unstable();
            ids
        };
        let other = || {
            let differ = sorted(rank) != sorted(first);
            differ.then(|| format!("other experts than on rank {first}: {:?}", sorted(rank)))
        };
        routing.refusal(row, &self.ids(rank, mixture, row)).or_else(other)
    }
}

pub(super) fn experts(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.stack();
    let mut compared = 0;
    for (turn, observed) in material.inputs.turns.iter().zip(laboratory.stepped()?) {
        let scene = Scene { material, turn, shown: Shown::of(material, turn, observed) };
        let seen = Experts::of(material, turn, &scene.shown)?;
        let rows = |rank: usize| (0..seen.rows[rank / seen.tp]).map(move |row| (rank, row));
        for mixture in 0..seen.ids.shape[1] {
            for (rank, row) in (0..material.all_ranks()).flat_map(rows) {
                if let Some(why) = seen.refusal(rank, mixture, row) {
                    let layer = material.case.plan().dense() + mixture;
                    let (step, place) = (material.name(turn), scene.words(rank, row));
                    let headline = format!("{step}, rank {rank}, layer {layer}, {place}: {why}");
                    return Err(Failure::because(headline).at(Stage::Routing).into());
                }
                compared += usize::from(seen.routing[rank / seen.tp][mixture].is_some());
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
    let tp = material.ranks();
    updates(laboratory, headline, 1, seen, |Behind { normed, experts, latent }, layer, (lane, row)| {
        let first = lane * tp;
        let x = normed.row(&[first, 2 * layer + 1, row]);
        let nothing = vec![Allowed::Undefined; x.len()];
        // where ranks have other rows, which is judged by itself, nobody has the whole MLP of any of them
        if (first + 1..first + tp).any(|rank| normed.row(&[rank, 2 * layer + 1, row]) != x) {
            return nothing;
        }
        let near: Option<Vec<Near>> = match (layer.checked_sub(dense), experts, latent) {
            (Some(mixture), _, Some(latent)) => {
                let sum = latent.row(&[first, mixture, row]);
                let is_one = (first + 1..first + tp).all(|rank| latent.row(&[rank, mixture, row]) == sum);
                is_one.then(|| material.latent_update(mixture, sum, x))
            }
            (Some(mixture), Some(experts), None) => experts.update(material, mixture, (lane, row), x),
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
                let near = scene.is_real(rank, row).then(near)??;
                Some(scene.material.stored(&near))
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        |scene, at| {
            let layer = scene.material.case.plan().dense() + at[1];
            format!("layer {layer}, {}", scene.words(at[0], at[2]))
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
    latents(laboratory, "latent_sum", headline, seen, |scene, (latent, experts), [rank, mixture, row]| {
        let tp = scene.material.ranks();
        let first = rank / tp * tp;
        let x = latent.row(&[first, mixture, row]);
        let is_one = (first + 1..first + tp).all(|rank| latent.row(&[rank, mixture, row]) == x);
        is_one.then(|| experts.update(scene.material, mixture, (rank / tp, row), x))?
    })
}

pub(super) fn latent_norm(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "the row behind latent experts is not normed by the weights of its layer";
    let seen = |scene: &Scene<'_>| scene.shown.tensor("latent_sum");
    latents(laboratory, "latent_normed", headline, seen, |scene, sums, [rank, mixture, row]| {
        Some(scene.material.latent_normed(mixture, sums.row(&[rank, mixture, row])))
    })
}
