//! A whole run against one rank's, and a run with drafts against one without.

use std::collections::{BTreeMap, BTreeSet};

use shardcheck_cases::{Body, Case, NewTokens, RunKind, StackCase, StackWiring, Step};
use shardcheck_formats::Dtype;

use super::super::{Property, broken};
use super::{STACK, every_run, grid, in_stream};
use crate::finding::{Finding, Measured, Stage};
use crate::judge::Allowed;
use crate::laboratory::{Halt, Laboratory, Observed};
use crate::stacking::{Shown, StackMaterial, WholeRun, place};

pub(in crate::properties) const PROPERTIES: &[Property] = &[
    Property {
        id: "stack.whole",
        statement: "the stream of every row is, at every place, that of the whole stack on one rank, whatever lies between the first stage and there",
        source: "the same transformer, one token at a time and all keys in one place",
        bugs: &[],
        tolerance: "certified bound through all stages in front; it needs weights that do not spread errors",
        families: STACK,
        applies: is_laid_out,
        check: streams,
    },
    Property {
        id: "stack.run",
        statement: "the token behind every row is that of the whole stack on one rank",
        source: "the same transformer, one token at a time and all keys in one place",
        bugs: &[],
        tolerance: "exact, where no rounding through all stages makes it another token",
        families: STACK,
        applies: is_laid_out,
        check: tokens,
    },
    Property {
        id: "stack.drafts",
        statement: "drafts are accepted up to the first that is not the target's own token; a draft head makes new ones of the row that was accepted last, and each further one of its own row before",
        source: "vLLM `DeepSeekMultiTokenPredictor`, `SpecDecodeBaseProposer`; greedy rejection",
        bugs: &[],
        tolerance: "exact, where no rounding through all stages makes it another token",
        families: STACK,
        applies: makes_drafts,
        check: drafts,
    },
    Property {
        id: "stack.speculation",
        statement: "what a run with drafts emits is what the same prompts give without drafts, token by token",
        source: "greedy speculation is lossless",
        bugs: &[],
        tolerance: "exact: integers",
        families: STACK,
        applies: makes_drafts,
        check: speculation,
    },
];

fn is_laid_out(case: &Case) -> bool {
    matches!(&case.body, Body::Stack(stack) if stack.wiring.is_some())
}

fn makes_drafts(case: &Case) -> bool {
    matches!(&case.body, Body::Stack(stack) if stack.drafts() > 0)
}

/// The oracle, once the engine has answered: others may be waiting for it.
fn oracle<'a>(laboratory: &Laboratory<'a>) -> Result<WholeRun<'a>, Halt> {
    laboratory.stepped()?;
    Ok(WholeRun::new(laboratory.stack()))
}

/// Numbers of the tokens up to a row of a run.
fn up_to(scene: &super::Scene<'_>, row: usize) -> Option<Vec<u32>> {
    let (index, position) = place(scene.turn, row)?;
    Some(scene.turn.turn.tokens[index][..=position].to_vec())
}

fn streams(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "the stream is not that of the whole stack on one rank";
    let mut run = oracle(laboratory)?;
    every_run(
        laboratory,
        "hidden",
        headline,
        Stage::Output,
        |scene, seen| {
            let mut row = |at: Vec<usize>| {
                let row = scene.shown.stream_row(at[0], at[2])?;
                run.stream(&up_to(scene, row)?, at[1])
            };
            Ok(grid(&seen.shape[..3]).map(&mut row).collect())
        },
        in_stream,
    )
}

fn tokens(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a token is not that of the whole stack on one rank";
    let mut run = oracle(laboratory)?;
    let finding = every_run(
        laboratory,
        "tokens",
        headline,
        Stage::Output,
        |scene, seen| {
            let mut row = |at: Vec<usize>| {
                let token = run.token(&up_to(scene, at[1])?)?;
                Some(vec![Allowed::Exactly(token as f64)])
            };
            Ok(grid(&seen.shape[..2]).map(&mut row).collect())
        },
        |scene, at| scene.material.row_name(scene.turn, at[1]),
    )?;
    decided(finding)
}

/// A finding that compared nothing says nothing.
fn decided(finding: Finding) -> Result<Finding, Halt> {
    match finding {
        Finding::Holds(measured) if measured.compared == 0 => {
            Err(Halt::Inconclusive("rounding may decide every token of this case".to_owned()))
        }
        other => Ok(other),
    }
}

/// Accepted drafts `[ranks, n]` and new ones `[ranks, n, k]` of a run.
fn drafted(material: &StackMaterial, observed: &Observed, requests: usize) -> Result<[Vec<i64>; 2], Halt> {
    let (ranks, drafts) = (material.all_ranks(), material.case.drafts());
    let accepted = observed.output("accepted_drafts", Dtype::I32, &[ranks, requests])?.to_i64();
    let tokens = observed.output("draft_tokens", Dtype::I32, &[ranks, requests, drafts])?.to_i64();
    Ok([accepted, tokens])
}

/// Holds a number to what it must be, where that is known; how many were compared.
fn held(seen: i64, wanted: Option<usize>, words: impl FnOnce(usize) -> String) -> Result<usize, Halt> {
    match wanted {
        Some(wanted) if seen != wanted as i64 => Err(broken(words(wanted), Stage::Output)),
        wanted => Ok(usize::from(wanted.is_some())),
    }
}

fn drafts(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.stack();
    let mut run = oracle(laboratory)?;
    let mut compared = 0;
    for (turn, observed) in material.inputs.turns.iter().zip(laboratory.stepped()?) {
        let requests = turn.turn.requests.len();
        let [accepted, tokens] = drafted(material, observed, requests)?;
        for request in (0..requests).filter(|request| turn.turn.new_tokens[*request] > 0) {
            let known = run.drafts(turn, request);
            for rank in 0..material.all_ranks() {
                let (at, given) = (rank * requests + request, turn.drafted[request]);
                let place =
                    format!("{}, rank {rank}, request {}", material.name(turn), turn.turn.requests[request]);
                compared += held(accepted[at], known.accepted, |wanted| {
                    format!("{place}: {} of {given} drafts are accepted and not {wanted}", accepted[at])
                })?;
                let own = &tokens[at * known.tokens.len()..(at + 1) * known.tokens.len()];
                for (draft, (seen, wanted)) in own.iter().zip(&known.tokens).enumerate() {
                    compared += held(*seen, *wanted, |wanted| {
                        format!("{place}: draft {} is token {seen} and not {wanted}", draft + 1)
                    })?;
                }
            }
        }
    }
    decided(Finding::Holds(Measured::exact(compared)))
}

/// Tokens of each request that a run with drafts gives, as rank 0 accepts and emits them, behind its prompt.
fn emitted(material: &StackMaterial, steps: &[Observed]) -> Result<BTreeMap<usize, Vec<i64>>, Halt> {
    let mut found: BTreeMap<usize, Vec<i64>> = BTreeMap::new();
    for (turn, observed) in material.inputs.turns.iter().zip(steps) {
        let shown = Shown::of(material, turn, observed);
        let (tokens, requests) = (shown.tensor("tokens")?, turn.turn.requests.len());
        let accepted = match material.case.drafts() {
            0 => vec![0; requests],
            _ => drafted(material, observed, requests)?[0][..requests].to_vec(),
        };
        let mut first = 0;
        for (index, request) in turn.turn.requests.iter().enumerate() {
            let rows = turn.turn.new_tokens[index];
            let drafts = turn.drafted[index].max(0) as usize;
            // in front of another chunk of the prompt nothing is emitted
            if turn.next[index] < 0 && rows > drafts {
                let certain = first + rows - 1 - drafts;
                let last = certain + (accepted[index].clamp(0, drafts as i64)) as usize;
                let of_row = |row: usize| tokens.values[row] as i64;
                found.entry(*request).or_default().extend((certain..=last).map(of_row));
            }
            first += rows;
        }
    }
    Ok(found)
}

/// The same prompts, then tokens one by one.
fn undrafted(case: &StackCase, count: usize) -> StackCase {
    let mut plain = case.clone();
    plain.wiring = Some(StackWiring { drafts: 0, rounds: 0 });
    let of_step = |step: &Step| match step {
        Step::Run { batch, .. } => batch.iter().map(|own| own.request).collect(),
        _ => Vec::new(),
    };
    let requests: BTreeSet<usize> = case.session.steps.iter().flat_map(of_step).collect();
    let batch = requests.into_iter().map(|request| NewTokens { request, tokens: 1 }).collect();
    let step = Step::Run { kind: RunKind::Decode, batch, padded_rows: 0, chunk_budget_tokens: 0 };
    plain.session.steps.extend(std::iter::repeat_n(step, count));
    plain
}

fn speculation(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.stack();
    let with = emitted(material, laboratory.stepped()?)?;
    let most = with.values().map(Vec::len).max().unwrap_or(0);
    let case = undrafted(&material.case, most.saturating_sub(1));
    let other = material.variant(&case)?;
    let steps = other.play(&laboratory.engine)?;
    let without = emitted(&other, &steps)?;
    let mut compared = 0;
    for (request, tokens) in &with {
        for (index, (seen, wanted)) in tokens.iter().zip(&without[request]).enumerate() {
            compared += 1;
            if seen != wanted {
                let headline = format!(
                    "request {request}: token {} behind its prompt is {seen} with drafts and {wanted} without",
                    index + 1
                );
                return Err(broken(headline, Stage::Output));
            }
        }
    }
    decided(Finding::Holds(Measured::exact(compared)))
}
