//! Laws of a whole transformer, stage by stage: each of what the engine itself showed of the stage before.

mod gate;
mod lanes;
mod mixture;
mod ranks;
mod recurrent;
mod whole;

use shardcheck_cases::{Body, Case, Family, StackTurn};

use super::{Property, always};
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};
use crate::stacking::{KeyStore, Shown, StackMaterial, View, place};

pub(super) use whole::PROPERTIES as WHOLE;

const STACK: &[Family] = &[Family::Stack];
const BOUND: &str = "certified bound of this stage, for what the engine showed of the stage before";

pub(super) use gate::PROPERTIES as GATE;
pub(super) use lanes::PROPERTIES as LANES;
pub(super) use mixture::LATENT;
pub(super) use ranks::PROPERTIES as RANKS;
pub(super) use recurrent::PROPERTIES as RECURRENT;

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "stack.embedding",
        statement: "the stream begins with the embedding of each row's token, also where the token lies on another rank",
        source: "vLLM `VocabParallelEmbedding`: a rank embeds its own entries, zeros stand for all others, then the sum",
        bugs: &[],
        tolerance: "exact: a sum with zeros",
        families: STACK,
        applies: always,
        check: embedding,
    },
    Property {
        id: "stack.norm",
        statement: "before each attention, each MLP and the head, every rank has all rows of the stream normed by the weights of that place",
        source: "vLLM `RMSNorm`; sequence parallelism gathers behind the norm",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: always,
        check: norm,
    },
    Property {
        id: "stack.query",
        statement: "a layer's queries are projections of its normed rows by its own weights, turned to the rows' positions",
        source: "vLLM `MLAAttention`; positions are L − q + t",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: always,
        check: query,
    },
    Property {
        id: "stack.key",
        statement: "a layer's new keys likewise, on every rank",
        source: "vLLM `MLAAttention`; positions are L − q + t",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: always,
        check: key,
    },
    Property {
        id: "stack.attention",
        statement: "a layer attends to the keys that this layer wrote, those of this step included, rejected ones overwritten; to those of its selection where it has or shares one",
        source: "every layer has a cache of its own; block table and lengths are those of the step for all of them",
        bugs: &["vllm-ascend#7549", "vllm-ascend#10878"],
        tolerance: "certified bound of decode and verify, for the queries and keys that the engine showed",
        families: STACK,
        applies: always,
        check: attention,
    },
    Property {
        id: "stack.attention-update",
        statement: "attention adds the projection of all heads of all ranks",
        source: "vLLM `RowParallelLinear`: parts of ranks are summed once",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: always,
        check: attention_update,
    },
    Property {
        id: "stack.router",
        statement: "a layer of experts routes each row by the product of its normed row and its own router, on every rank",
        source: "vLLM `DeepseekV2MoE`: the gate is replicated, and reads what the experts read",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: has_experts,
        check: mixture::router,
    },
    Property {
        id: "stack.experts",
        statement: "the experts of a row are the best by the logits that rank 0 shows, ties by any rule, and the same on every rank",
        source: "as for a router by itself",
        bugs: &[],
        tolerance: "exact: sets, for scores within their rounding",
        families: STACK,
        applies: has_experts,
        check: mixture::experts,
    },
    Property {
        id: "stack.feed-forward",
        statement: "an MLP, or the experts that a row has, adds what it gives of its normed rows, its parts shared out over ranks",
        source: "vLLM `MergedColumnParallelLinear`, `RowParallelLinear`, `FusedMoE`",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: always,
        check: mixture::feed_forward,
    },
    Property {
        id: "stack.residual",
        statement: "the stream behind an update is the stream before it and the update, once, row by row",
        source: "vLLM `fused_add_rms_norm`; the residual of a sharded stream stays sharded",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: always,
        check: residual,
    },
    Property {
        id: "stack.logits",
        statement: "every rank has the logits of the whole vocabulary in its order, of the last norm's rows",
        source: "vLLM `ParallelLMHead`, `LogitsProcessor`",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: always,
        check: logits,
    },
    Property {
        id: "stack.tokens",
        statement: "the token behind a row is that of the largest of the logits that the rank shows, the lowest of equal ones",
        source: "greedy decoding; argmax of ties as in the reference implementations",
        bugs: &[],
        tolerance: "exact: integers",
        families: STACK,
        applies: always,
        check: tokens,
    },
];

fn has_experts(case: &Case) -> bool {
    matches!(&case.body, Body::Stack(stack) if stack.mixture.is_some())
}

/// One run under judgement.
struct Scene<'a> {
    material: &'a StackMaterial,
    turn: &'a StackTurn,
    shown: Shown<'a>,
}

impl Scene<'_> {
    /// Index of the request of a rank's row, and its position; `None` for padding.
    fn place(&self, rank: usize, row: usize) -> Option<(usize, usize)> {
        place(self.turn, self.shown.lanes.row(rank, row)?)
    }

    /// Whether a rank's row is none of padding.
    fn is_real(&self, rank: usize, row: usize) -> bool {
        self.shown.lanes.row(rank, row).is_some()
    }

    /// A rank's row in words.
    fn words(&self, rank: usize, row: usize) -> String {
        match self.shown.lanes.row(rank, row) {
            Some(row) => self.material.row_name(self.turn, row),
            None => format!("row {row} of the rank (padding)"),
        }
    }
}

/// What a row of a tensor may be.
type RowAllowed = Vec<Allowed>;

/// Judges a tensor of every run, row by row along its last axis; `wanted` gives what the row at some indices may be, nothing where it is
/// not judged, and `words` the place of such a row.
fn every_run(
    laboratory: &Laboratory,
    name: &str,
    headline: &str,
    stage: Stage,
    mut wanted: impl FnMut(&Scene<'_>, &View) -> Result<Vec<Option<RowAllowed>>, Halt>,
    words: impl Fn(&Scene<'_>, &[usize]) -> String,
) -> Result<Finding, Halt> {
    let material = laboratory.stack();
    let mut measured = Measured::exact(0);
    for (turn, observed) in material.inputs.turns.iter().zip(laboratory.stepped()?) {
        let scene = Scene { material, turn, shown: Shown::of(material, turn, observed) };
        let seen = scene.shown.tensor(name)?;
        let width = if seen.shape.len() > 2 { seen.shape[seen.shape.len() - 1] } else { 1 };
        let rows = wanted(&scene, &seen)?;
        let allowed: Vec<Allowed> =
            rows.into_iter().flat_map(|row| row.unwrap_or_else(|| vec![Allowed::Undefined; width])).collect();
        let values: Vec<f64> = seen.values.iter().map(|value| f64::from(*value)).collect();
        let outer = &seen.shape[..if seen.shape.len() > 2 { seen.shape.len() - 1 } else { 2 }];
        let place = |flat: usize| {
            let at = indices(flat / width, outer);
            format!("{}, rank {}, {}, dim {}", material.name(turn), at[0], words(&scene, &at), flat % width)
        };
        let comparison = Comparison::all(name, &values, &allowed);
        if let Some(first) = comparison.broken().first() {
            let failure =
                comparison.failure(headline, stage, place).note(format!("first in {}", place(*first)));
            return Ok(Finding::Broken(Box::new(failure)));
        }
        measured = measured.and(comparison.measured());
    }
    Ok(Finding::Holds(measured))
}

/// Indices of a flat one.
fn indices(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut at: Vec<usize> = shape
        .iter()
        .rev()
        .map(|size| {
            let index = flat % (*size).max(1);
            flat /= (*size).max(1);
            index
        })
        .collect();
    at.reverse();
    at
}

/// Every index of some axes, the last one fastest.
fn grid(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..shape.iter().product()).map(|flat| indices(flat, shape))
}

/// A place of the stream in words.
fn stream_words(place: usize, layers: usize) -> String {
    match place {
        place if place == 2 * layers => "behind the last layer".to_owned(),
        place if place.is_multiple_of(2) => format!("layer {}, before attention", place / 2),
        place => format!("layer {}, before its MLP", place / 2),
    }
}

/// Of an element of what lies in the stream: before which stage, and on which rank and row.
fn in_stream(scene: &Scene<'_>, at: &[usize]) -> String {
    let place = stream_words(at[1], scene.material.case.layers);
    format!("{place}, {}", on_stream(scene, at[0], at[2]))
}

/// A head of a layer that attends, at `[rank, its number, row, head, …]`, in words.
fn of_head(scene: &Scene<'_>, at: &[usize]) -> String {
    let row = scene.words(at[0], at[2]);
    format!("layer {}, {row}, head {} of the rank", scene.material.latent[at[1]], at[3])
}

/// A row of the stream on a rank in words.
fn on_stream(scene: &Scene<'_>, rank: usize, row: usize) -> String {
    scene.words(rank, scene.shown.local_row(rank, row))
}

fn embedding(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "the stream does not begin with the embedding of the row's token";
    let table = laboratory.stack().weight("embedding", None);
    let width = laboratory.stack().case.hidden;
    every_run(
        laboratory,
        "hidden",
        headline,
        Stage::Output,
        |scene, seen| {
            let ids = scene.material.inputs.token_ids(&scene.material.case, scene.turn);
            let row = |at: Vec<usize>| {
                let row = scene.shown.stream_row(at[0], at[2]).filter(|_| at[1] == 0)?;
                let entry = &table[ids[row] as usize * width..][..width];
                Some(entry.iter().map(|value| Allowed::Exactly(f64::from(*value))).collect())
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        in_stream,
    )
}

fn norm(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "rows behind a norm are not the normed rows of the stream";
    every_run(
        laboratory,
        "normed",
        headline,
        Stage::Gather,
        |scene, seen| {
            let hidden = scene.shown.tensor("hidden")?;
            let row = |at: Vec<usize>| {
                let [rank, place, row] = at[..] else { return None };
                let (owner, own) = scene.shown.stream_place(rank, row);
                scene.is_real(rank, row).then(|| {
                    scene.material.stored(&scene.material.normed(hidden.row(&[owner, place, own]), place))
                })
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        |scene, at| {
            let place = stream_words(at[1], scene.material.case.layers);
            format!("{place}, {}", scene.words(at[0], at[2]))
        },
    )
}

fn query(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a query is not the turned projection of its row";
    every_run(
        laboratory,
        "query",
        headline,
        Stage::Query,
        |scene, seen| {
            let normed = scene.shown.tensor("normed")?;
            let material = scene.material;
            let size = seen.shape[4] * material.case.hidden;
            let row = |at: Vec<usize>| {
                let [rank, layer, row, head] = at[..] else { return None };
                let (_, position) = scene.place(rank, row)?;
                let first = (rank % material.ranks() * seen.shape[3] + head) * size;
                let weights = &material.weight("w_query", Some(layer))[first..first + size];
                Some(material.stored(&material.projected(
                    weights,
                    normed.row(&[rank, 2 * material.latent[layer], row]),
                    position,
                )))
            };
            Ok(grid(&seen.shape[..4]).map(row).collect())
        },
        of_head,
    )
}

fn key(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a key is not the turned projection of its row";
    every_run(
        laboratory,
        "key",
        headline,
        Stage::Write,
        |scene, seen| {
            let normed = scene.shown.tensor("normed")?;
            let material = scene.material;
            let row = |at: Vec<usize>| {
                let [rank, layer, row] = at[..] else { return None };
                let (_, position) = scene.place(rank, row)?;
                let x = normed.row(&[rank, 2 * material.latent[layer], row]);
                Some(material.stored(&material.projected(material.weight("w_key", Some(layer)), x, position)))
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        |scene, at| {
            let layer = scene.material.latent[at[1]];
            format!("layer {layer}, {}", scene.words(at[0], at[2]))
        },
    )
}

fn attention(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "attention of a layer is not that over the keys of this layer";
    let mut keys = KeyStore::new(laboratory.stack());
    every_run(
        laboratory,
        "attention",
        headline,
        Stage::Partial,
        |scene, seen| {
            keys.write(scene.turn, &scene.shown)?;
            let allowed = attended(scene, &keys)?;
            let [_, _, _, heads, width] = seen.shape[..] else { return Ok(Vec::new()) };
            let (all, tp) = (scene.material.heads(), scene.material.ranks());
            let row = |at: Vec<usize>| {
                let [rank, layer, row, head] = at[..] else { return None };
                let group = rank / scene.material.configuration().dcp;
                let of_group = allowed[layer][group].as_ref()?;
                let row = scene.shown.lanes.row(rank, row)?;
                Some(of_group[(row * all + rank % tp * heads + head) * width..][..width].to_vec())
            };
            Ok(grid(&seen.shape[..4]).map(row).collect())
        },
        of_head,
    )
}

/// What each layer may give by the caches of each group, `[T, Hall, Vo]`.
fn attended(scene: &Scene<'_>, keys: &KeyStore<'_>) -> Result<Vec<Vec<Option<RowAllowed>>>, Halt> {
    let (material, query) = (scene.material, scene.shown.tensor("query")?);
    let (tp, dcp) = (material.ranks(), material.configuration().dcp);
    let [_, _, _, heads, width] = query.shape[..] else { return Ok(Vec::new()) };
    // rows of a rank of prefill context parallelism are its own, others stand there as their own ranks have them
    let whole = |lane: usize, layer: usize| -> Vec<f32> {
        let of_rank = |row: usize, t: usize| match scene.shown.lanes.held(lane, t, row) {
            Some((rank, place)) => {
                (0..heads).flat_map(|head| query.row(&[rank, layer, place, head])).copied().collect()
            }
            None => vec![0.0; heads * width],
        };
        (0..scene.shown.rows).flat_map(|row| (0..tp).flat_map(move |t| of_rank(row, t))).collect()
    };
    /// Queries and keys, and what they give.
    type Known = (Vec<f32>, Vec<Vec<f32>>, Option<RowAllowed>);
    let mut layers = Vec::new();
    for layer in 0..material.latent.len() {
        let mut found: Vec<Known> = Vec::new();
        let mut by_group = Vec::new();
        for group in 0..material.all_ranks() / dcp {
            let (query, own) = (whole(group * dcp / tp, layer), keys.of_group(scene.turn, layer, group));
            // groups have the same keys unless their ranks went different ways
            let is_known = |known: &&Known| known.0 == query && known.1 == own;
            let allowed = match found.iter().find(is_known).map(|(_, _, allowed)| allowed.clone()) {
                Some(allowed) => allowed,
                None => material.attended(scene.turn, layer, query.clone(), own.clone())?,
            };
            found.push((query, own, allowed.clone()));
            by_group.push(allowed);
        }
        layers.push(by_group);
    }
    Ok(layers)
}

/// A row of a rank of prefill context parallelism: that rank, and the row's place there.
type LaneRow = (usize, usize);

/// Judges the updates of attention (kind 0) or of MLPs (1); `near` gives what a layer adds to a row, of what `prepared` found in the run.
fn updates<T>(
    laboratory: &Laboratory,
    headline: &str,
    kind: usize,
    prepared: impl Fn(&Scene<'_>) -> Result<T, Halt>,
    near: impl Fn(&T, usize, LaneRow) -> RowAllowed,
) -> Result<Finding, Halt> {
    every_run(
        laboratory,
        "update",
        headline,
        Stage::Exchange,
        |scene, seen| {
            let (layers, lanes) = (scene.material.case.layers, &scene.shown.lanes);
            let source = prepared(scene)?;
            let tp = scene.material.ranks();
            let of_row = |layer: usize, lane: usize, place: usize| match lanes.row(lane * tp, place) {
                Some(_) => near(&source, layer, (lane, place)),
                None => Vec::new(),
            };
            let of_lane = |layer: usize, lane: usize| -> Vec<RowAllowed> {
                (0..lanes.count()).map(|place| of_row(layer, lane, place)).collect()
            };
            let of_layer = |layer: usize| (0..lanes.world()).map(|lane| of_lane(layer, lane)).collect();
            let all: Vec<Vec<Vec<RowAllowed>>> = (0..layers).map(of_layer).collect();
            let row = |at: Vec<usize>| {
                let [rank, place, row] = at[..] else { return None };
                scene.shown.stream_row(rank, row).filter(|_| place % 2 == kind)?;
                Some(all[place / 2][rank / tp][scene.shown.local_row(rank, row)].clone())
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        |scene, at| format!("layer {}, {}", at[1] / 2, on_stream(scene, at[0], at[2])),
    )
}

fn attention_update(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "what attention adds is not the projection of all heads";
    let material = laboratory.stack();
    let name = if material.case.output_gate { "gated" } else { "attention" };
    let seen = |scene: &Scene<'_>| scene.shown.tensor(name);
    updates(laboratory, headline, 0, seen, |seen, layer, row| {
        let number = material.latent.iter().position(|own| *own == layer);
        let Some(number) = number else { return vec![Allowed::Undefined; material.case.hidden] };
        let all = of_all_heads(seen, material.ranks(), number, row);
        material.stored(&material.attention_update(material.weight("w_output", Some(number)), &all))
    })
}

/// Rows `[ranks, N, T, H, …]` of all heads of a rank of prefill context parallelism, one rank's behind the other's.
fn of_all_heads(seen: &View, tp: usize, number: usize, (lane, place): LaneRow) -> Vec<f32> {
    let heads = seen.shape[3];
    let of_rank = |t: usize| (0..heads).map(move |head| [lane * tp + t, number, place, head]);
    (0..tp).flat_map(of_rank).flat_map(|at| seen.row(&at).to_vec()).collect()
}

fn residual(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "the stream behind an update is not the stream and the update";
    every_run(
        laboratory,
        "hidden",
        headline,
        Stage::Output,
        |scene, seen| {
            let update = scene.shown.tensor("update")?;
            let row = |at: Vec<usize>| {
                let [rank, place, row] = at[..] else { return None };
                scene.shown.stream_row(rank, row)?;
                let before = place.checked_sub(1)?;
                let (stream, update) = (seen.row(&[rank, before, row]), update.row(&[rank, before, row]));
                let near: Vec<_> = stream
                    .iter()
                    .zip(update)
                    .map(|(stream, update)| shardcheck_references::stack::joined(*stream, *update))
                    .collect();
                Some(scene.material.stored(&near))
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        in_stream,
    )
}

fn logits(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a logit is not the product of its row and its entry of the head";
    let head = laboratory.stack().weight("w_head", None);
    every_run(
        laboratory,
        "logits",
        headline,
        Stage::Output,
        |scene, seen| {
            // rows in their order: those behind the last norm, where a rank has all of them
            let is_shared = scene.material.case.pcp.is_some();
            let rows = scene.shown.tensor(if is_shared { "restored" } else { "normed" })?;
            let last = 2 * scene.material.case.layers;
            let of_rank = |rank: usize, row: usize| match is_shared {
                true => rows.row(&[rank, row]),
                false => rows.row(&[rank, last, row]),
            };
            let tp = scene.material.ranks();
            let row = |at: Vec<usize>| {
                let [rank, row] = at[..] else { return None };
                let first = rank / tp * tp;
                let x = of_rank(first, row);
                // as for an MLP: each rank has a shard of the row that it has itself
                let is_one = (first + 1..first + tp).all(|rank| of_rank(rank, row) == x);
                (row < scene.shown.real_rows && is_one).then(|| scene.material.logits(head, x))
            };
            Ok(grid(&seen.shape[..2]).map(row).collect())
        },
        |scene, at| scene.material.row_name(scene.turn, at[1]),
    )
}

fn tokens(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a token is not that of the largest logit";
    every_run(
        laboratory,
        "tokens",
        headline,
        Stage::Output,
        |scene, seen| {
            let logits = scene.shown.tensor("logits")?;
            let row = |at: Vec<usize>| {
                let [rank, row] = at[..] else { return None };
                let own = logits.row(&[rank, row]);
                // logits that are no numbers have been judged
                let judged = row < scene.shown.real_rows && own.iter().all(|logit| logit.is_finite());
                judged.then(|| vec![Allowed::Exactly(largest(own) as f64)])
            };
            Ok(grid(&seen.shape[..2]).map(row).collect())
        },
        |scene, at| scene.material.row_name(scene.turn, at[1]),
    )
}

/// Index of the largest, the lowest of equal ones.
fn largest(values: &[f32]) -> usize {
    (0..values.len()).find(|at| values.iter().all(|other| *other <= values[*at])).unwrap_or(0)
}
