//! Recurrent layers of a stack: each by the inputs that the engine showed for its rows, since its requests began.

use shardcheck_cases::{Body, Case};
use shardcheck_references::kda::Near;

use super::{BOUND, STACK, Scene, every_run, grid, of_all_heads, updates};
use crate::finding::{Finding, Stage};
use crate::judge::Allowed;
use crate::laboratory::{Halt, Laboratory};
use crate::properties::Property;
use crate::stacking::{Played, Recurrence, StateStore};

const OF_SHOWN: &str = "certified bound of Kimi delta attention, for the inputs that the engine showed";

pub(in crate::properties) const PROPERTIES: &[Property] = &[
    Property {
        id: "stack.kda-input",
        statement: "queries, keys, values and gates of a recurrent layer are projections of its normed rows by its own weights, each rank's of its own heads",
        source: "transformers `KimiLinearDeltaAttention`; vLLM `ColumnParallelLinear`",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: has_states,
        check: input,
    },
    Property {
        id: "stack.kda",
        statement: "a recurrent layer gives what its own state has for a row: chunked or row by row, behind accepted rows alone, and behind a shared prefix",
        source: "FLA `naive_recurrent_kda`; the state is one of a request and a layer",
        bugs: &["ATOM#1936", "vllm-ascend#11807"],
        tolerance: OF_SHOWN,
        families: STACK,
        applies: has_states,
        check: output,
    },
    Property {
        id: "stack.state",
        statement: "behind a step each recurrent layer holds the state of a request's rows alone, whole on the rank of its head whatever the size of decode context parallelism",
        source: "ATOM guide: states are kept for each request, not paged, and not sharded by decode context parallelism",
        bugs: &["ATOM#1936", "vllm-ascend#11807"],
        tolerance: OF_SHOWN,
        families: STACK,
        applies: has_states,
        check: state,
    },
    Property {
        id: "stack.window",
        statement: "behind a step the window of each recurrent layer is the last inputs of a request's channels, rejected rows left out",
        source: "FLA `causal_conv1d` with its state",
        bugs: &["ATOM#1936"],
        tolerance: "exact: codes",
        families: STACK,
        applies: |case| has_states(case) && taps(case) > 1,
        check: window,
    },
    Property {
        id: "stack.kda-update",
        statement: "a recurrent layer adds the projection of all value heads of all ranks",
        source: "vLLM `RowParallelLinear`: parts of ranks are summed once",
        bugs: &[],
        tolerance: BOUND,
        families: STACK,
        applies: has_states,
        check: update,
    },
];

fn has_states(case: &Case) -> bool {
    taps(case) > 0
}

fn taps(case: &Case) -> usize {
    match &case.body {
        Body::Stack(stack) => stack.recurrence.map_or(0, |own| own.taps),
        _ => 0,
    }
}

fn recurrence<'a>(laboratory: &Laboratory<'a>) -> Result<&'a Recurrence, Halt> {
    let missing = || Halt::Inconclusive("the case has no recurrent layers".to_owned());
    laboratory.stack().recurrence.as_ref().ok_or_else(missing)
}

/// A recurrent layer at `[rank, its number, row, …]` in words.
fn in_layer(scene: &Scene<'_>, at: &[usize]) -> String {
    format!("layer {}, {}", scene.material.recurrent[at[1]], scene.words(at[0], at[2]))
}

fn input(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let channels = projections(
        laboratory,
        "kda_channels",
        "an input of the convolution is not the projection of its row",
        &["kda_query", "kda_key", "kda_value"],
        |scene, near| scene.material.stored(near),
    )?;
    let Finding::Holds(channels) = channels else { return Ok(channels) };
    let gates = projections(
        laboratory,
        "kda_gates",
        "a gate is not the projection of its row",
        &["kda_gate", "kda_beta", "kda_output_gate"],
        |_, near| near.iter().map(|near| crate::stacking::number(*near)).collect(),
    )?;
    Ok(match gates {
        Finding::Holds(gates) => Finding::Holds(channels.and(gates)),
        other => other,
    })
}

/// Judges a tensor `[ranks, N, T, …]` that is a rank's part of some projections, one behind the other.
fn projections(
    laboratory: &Laboratory,
    name: &str,
    headline: &str,
    weights: &[&str],
    allowed: impl Fn(&Scene<'_>, &[Near]) -> Vec<Allowed>,
) -> Result<Finding, Halt> {
    every_run(
        laboratory,
        name,
        headline,
        Stage::Query,
        |scene, seen| {
            let (material, normed) = (scene.material, scene.shown.tensor("normed")?);
            let row = |at: Vec<usize>| {
                let [rank, number, row] = at[..] else { return None };
                let x = normed.row(&[rank, 2 * material.recurrent[number], row]);
                let of_matrix = |matrix: &&str| {
                    let all = material.weight(matrix, Some(number));
                    let size = all.len() / material.ranks();
                    let own = &all[rank % material.ranks() * size..][..size];
                    if name == "kda_gates" { material.wide(own, x) } else { material.project(own, x) }
                };
                let near: Vec<Near> = weights.iter().flat_map(of_matrix).collect();
                scene.is_real(rank, row).then(|| allowed(scene, &near))
            };
            Ok(grid(&seen.shape[..3]).map(row).collect())
        },
        in_layer,
    )
}

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let own = recurrence(laboratory)?;
    let headline = "a recurrent layer does not give what its state has for a row";
    let tp = laboratory.stack().ranks();
    let wanted = |scene: &Scene<'_>, played: &Played, at: &[usize]| {
        let [rank, _, row, head] = at else { return None };
        let (heads, width) = (own.sizes.value_heads / tp, own.sizes.value_dim);
        let row = scene.shown.lanes.row(*rank, *row)?;
        let out = &played.rows.get(row)?.out[(rank % tp * heads + head) * width..][..width];
        Some(out.iter().map(|near| own.allowed_out(*near)).collect())
    };
    played(laboratory, "kda_out", headline, wanted, |scene, at| {
        format!("{}, value head {} of the rank", in_layer(scene, at), at[3])
    })
}

/// Judges a tensor `[ranks, N, …]` by what the oracle plays; `wanted` gives what its row at some indices may be.
fn played(
    laboratory: &Laboratory,
    name: &str,
    headline: &str,
    wanted: impl Fn(&Scene<'_>, &Played, &[usize]) -> Option<Vec<Allowed>>,
    words: impl Fn(&Scene<'_>, &[usize]) -> String,
) -> Result<Finding, Halt> {
    let mut states = StateStore::new(laboratory.stack());
    every_run(
        laboratory,
        name,
        headline,
        Stage::Output,
        |scene, seen| {
            let played = states.as_mut().map(|states| states.play(scene.turn, &scene.shown)).transpose()?;
            let played = played.unwrap_or_default();
            let (outer, tp) = (&seen.shape[..seen.shape.len() - 1], scene.material.ranks());
            let row = |at: Vec<usize>| wanted(scene, played.get(at[0] / tp)?.get(at[1])?, &at);
            Ok(grid(outer).map(row).collect())
        },
        words,
    )
}

fn request_words(scene: &Scene<'_>, at: &[usize]) -> String {
    format!("layer {}, request {}", scene.material.recurrent[at[1]], scene.turn.turn.requests[at[2]])
}

fn state(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let own = recurrence(laboratory)?;
    let headline = "the state of a recurrent layer is not that of its request's rows";
    let tp = laboratory.stack().ranks();
    let wanted = |_: &Scene<'_>, played: &Played, at: &[usize]| {
        let [rank, _, request, head, channel] = at else { return None };
        let head = &played.states.get(*request)?.heads[rank % tp * (own.sizes.value_heads / tp) + head];
        let width = head.error.len();
        let values = &head.value[channel * width..(channel + 1) * width];
        let near = values.iter().zip(&head.error).map(|(value, error)| Near { value: *value, error: *error });
        Some(near.map(crate::stacking::number).collect())
    };
    played(laboratory, "kda_state", headline, wanted, |scene, at| {
        format!("{}, value head {} of the rank, key dim {}", request_words(scene, at), at[3], at[4])
    })
}

fn window(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let own = recurrence(laboratory)?;
    let ranks = laboratory.stack().ranks();
    let channels: Vec<Vec<usize>> = (0..ranks).map(|rank| own.channels(rank, ranks)).collect();
    let headline = "a window does not hold the last inputs of its request";
    let wanted = |_: &Scene<'_>, played: &Played, at: &[usize]| {
        let [rank, _, request, channel] = at else { return None };
        let channel = channels[rank % ranks][*channel];
        let exactly = |token: &Vec<f64>| match token[channel].is_finite() {
            true => Allowed::Exactly(token[channel]),
            false => Allowed::Undefined,
        };
        Some(played.states.get(*request)?.window.iter().map(exactly).collect())
    };
    played(laboratory, "kda_window", headline, wanted, |scene, at| {
        format!("{}, channel {} of the rank", request_words(scene, at), at[3])
    })
}

fn update(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "what a recurrent layer adds is not the projection of all value heads";
    let material = laboratory.stack();
    let seen = |scene: &Scene<'_>| scene.shown.tensor("kda_out");
    updates(laboratory, headline, 0, seen, |seen, layer, row| {
        let number = material.recurrent.iter().position(|own| *own == layer);
        let Some(number) = number else { return vec![Allowed::Undefined; material.case.hidden] };
        let all = of_all_heads(seen, material.ranks(), number, row);
        material.stored(&material.attention_update(material.weight("kda_output", Some(number)), &all))
    })
}
