//! The same rows run again in another way: split, recomputed, on one rank.

use std::collections::BTreeMap;

use shardcheck_cases::{KdaCase, KdaStep};
use shardcheck_engine::{Configuration, Operation};

use crate::delta::{ExpectedStep, History, KdaMaterial};
use crate::finding::{Finding, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed, Run};

/// What each row has come out as over all value heads, with what it was allowed.
type Rows = Vec<(Vec<f64>, Vec<Allowed>)>;

/// Runs steps in a session of their own.
fn run(
    laboratory: &Laboratory,
    configuration: &Configuration,
    operation: &Operation,
    steps: &[KdaStep],
) -> Result<Vec<Observed>, Halt> {
    let material = laboratory.delta();
    let mut run = Run::open(&laboratory.engine, configuration)?;
    steps.iter().map(|step| run.step(operation, &material.tensors(step))).collect()
}

/// Rows of a step, request after request.
fn rows(
    material: &KdaMaterial,
    tp: usize,
    observed: &Observed,
    expected: &ExpectedStep,
) -> Result<Rows, Halt> {
    let KdaCase { value_heads, value_dim, .. } = material.case;
    let count: usize = expected.iter().map(|request| request.rows.len()).sum();
    let own = value_heads / tp * value_dim;
    let out =
        observed.output("out", material.dtypes()[0], &[tp, count, value_heads / tp, value_dim])?.to_f64();
    let all = expected.iter().flat_map(|request| &request.rows).enumerate().map(|(at, row)| {
        let of_rank = |rank: usize| &out[(rank * count + at) * own..][..own];
        let seen = (0..tp).flat_map(of_rank).copied().collect();
        (seen, row.out.iter().map(|near| material.allowed_out(*near)).collect())
    });
    Ok(all.collect())
}

/// Width of what is allowed.
fn reach(allowed: Allowed) -> f64 {
    match allowed {
        Allowed::Between { low, high, .. } => high - low,
        _ => 0.0,
    }
}

/// Holds two runs of the same rows against each other; `names` says where a row is in the case.
fn compare(first: &Rows, second: &Rows, names: &[String], headline: &str, dims: usize) -> Finding {
    let mut comparison = Comparison::new("out");
    let width = first.first().map_or(1, |row| row.0.len());
    for (row, ((seen, allowed), (again, other))) in first.iter().zip(second).enumerate() {
        let pairs = seen.iter().zip(again).zip(allowed.iter().zip(other));
        for (at, ((seen, again), (allowed, other))) in pairs.enumerate() {
            let reach = reach(*allowed) + reach(*other);
            let both = Allowed::Between { expected: *again, low: again - reach, high: again + reach };
            comparison.element(row * width + at, *seen, both);
        }
    }
    comparison.finding(headline, Stage::Output, |flat| {
        format!("{}, value head {}, dim {}", names[flat / width], flat % width / dims, flat % dims)
    })
}

fn name(step: usize, request: usize, row: usize) -> String {
    format!("step {step}, request {request}, row {row}")
}

/// Every row of the case as it came out in its own steps.
fn own_rows(laboratory: &Laboratory) -> Result<(Rows, Vec<String>), Halt> {
    let material = laboratory.delta();
    let (mut all, mut names) = (Vec::new(), Vec::new());
    for (step, (observed, expected)) in laboratory.stepped()?.iter().zip(material.expected()).enumerate() {
        all.extend(rows(material, material.case.tp, observed, expected)?);
        for (request, expected) in expected.iter().enumerate() {
            names.extend((0..expected.rows.len()).map(|row| name(step, request, row)));
        }
    }
    Ok((all, names))
}

pub(super) fn split(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let (first, names) = own_rows(laboratory)?;
    let steps = material.split();
    let observed = run(laboratory, &material.configuration(), &material.operation(), &steps)?;
    let mut by_row = BTreeMap::new();
    for ((step, observed), expected) in steps.iter().zip(&observed).zip(material.play(&steps)) {
        let numbers = step.rows.iter().flatten().copied();
        by_row.extend(numbers.zip(rows(material, material.case.tp, observed, &expected)?));
    }
    let second = by_row.into_values().collect();
    let headline = "a row comes out otherwise where each step has one row of a request";
    Ok(compare(&first, &second, &names, headline, material.case.value_dim))
}

pub(super) fn ranks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let (first, names) = own_rows(laboratory)?;
    let alone = Configuration { tp: 1, dcp: 1, ..material.configuration() };
    let observed = run(laboratory, &alone, &material.operation(), &material.inputs.steps)?;
    let mut second = Vec::new();
    for (observed, expected) in observed.iter().zip(material.expected()) {
        second.extend(rows(material, 1, observed, expected)?);
    }
    let headline = "a row comes out otherwise where one rank has all heads";
    Ok(compare(&first, &second, &names, headline, material.case.value_dim))
}

/// Runs the whole history of some requests anew, in one step of a session of its own.
fn recomputed(
    laboratory: &Laboratory,
    of: impl Fn(&History) -> bool,
    headline: &str,
) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let mut chosen = Vec::new();
    for (step, histories) in material.histories().iter().enumerate() {
        for (request, history) in histories.iter().enumerate() {
            let own = material.inputs.steps[step].rows[request].len();
            if own > 0 && of(history) {
                chosen.push((step, request, own, history));
            }
        }
    }
    let (step, operation) = material.recomputed(chosen.iter().map(|chosen| chosen.3.rows.clone()).collect());
    let steps = [step];
    let observed = run(laboratory, &material.configuration(), &operation, &steps)?;
    let whole = rows(material, material.case.tp, &observed[0], &material.play(&steps)[0])?;
    let (mut first, mut second, mut names) = (Vec::new(), Vec::new(), Vec::new());
    let mut end = 0;
    for (step, request, own, history) in chosen {
        end += history.rows.len();
        second.extend_from_slice(&whole[end - own..end]);
        let seen = &laboratory.stepped()?[step];
        let all = rows(material, material.case.tp, seen, &material.expected()[step])?;
        let before: usize = material.inputs.steps[step].rows[..request].iter().map(Vec::len).sum();
        first.extend_from_slice(&all[before..before + own]);
        names.extend((0..own).map(|row| name(step, request, row)));
    }
    Ok(compare(&first, &second, &names, headline, material.case.value_dim))
}

pub(super) fn rollback(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a row behind rejected ones comes out otherwise where these never ran";
    recomputed(laboratory, |history| history.is_rolled_back, headline)
}

pub(super) fn fork(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a row of a request that went over into another slot comes out otherwise where all of it is computed anew";
    recomputed(laboratory, |history| history.is_forked, headline)
}

pub(super) fn fresh(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a row of a new request in a used slot comes out otherwise in a session of its own";
    recomputed(laboratory, |history| history.is_recycled, headline)
}
