//! What ranks of a stack have in common.

use shardcheck_cases::{Body, Case};
use shardcheck_engine::StreamLayout;

use super::{STACK, Scene};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::laboratory::{Halt, Laboratory};
use crate::properties::Property;
use crate::stacking::Shown;

pub(in crate::properties) const PROPERTIES: &[Property] = &[Property {
    id: "stack.ranks",
    statement: "what several ranks have is the same on all of them: normed rows, keys, logits, tokens, and a stream that is not sharded",
    source: "ranks go on with their own copies, and must go on alike",
    bugs: &[],
    tolerance: "exact: codes",
    families: STACK,
    applies: |case| stack_ranks(case) > 1,
    check: alike,
}];

fn stack_ranks(case: &Case) -> usize {
    match &case.body {
        Body::Stack(stack) => stack.configuration().tp * stack.plan().pcp_ranks(),
        _ => 1,
    }
}

/// Judges that what several ranks have is the same on all of them.
fn alike(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.stack();
    let mut count = 0;
    for (turn, observed) in material.inputs.turns.iter().zip(laboratory.stepped()?) {
        let scene = Scene { material, turn, shown: Shown::of(material, turn, observed) };
        let is_whole = material.case.stream == StreamLayout::Whole;
        let mixed = material.case.mixture.is_some();
        for name in ["hidden", "normed", "key", "router_logits", "restored", "logits", "tokens"] {
            let absent = match name {
                "hidden" => !is_whole,
                "router_logits" => !mixed,
                "restored" => material.case.pcp.is_none(),
                _ => false,
            };
            if !absent {
                count += compared(&scene, name)?;
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(count)))
}

/// Compares what every rank that has a row shows of it with the first of them; how many elements.
fn compared(scene: &Scene<'_>, name: &str) -> Result<usize, Halt> {
    let (seen, lanes) = (scene.shown.tensor(name)?, &scene.shown.lanes);
    let is_of_batch = ["restored", "logits", "tokens"].contains(&name);
    // rows are the axis behind that of ranks and, where there is one, that of places
    let axis = if is_of_batch { 1 } else { 2 };
    let places: usize = seen.shape[1..axis].iter().product();
    let (rows, inner) = (seen.shape[axis], seen.shape[axis + 1..].iter().product::<usize>());
    let mut compared = 0;
    for row in 0..scene.shown.real_rows {
        let of_batch = || (0..seen.shape[0]).map(|rank| (rank, row)).collect();
        let holders: Vec<(usize, usize)> = if is_of_batch { of_batch() } else { lanes.everywhere(row) };
        let Some(first) = holders.first() else { continue };
        for (place, other) in holders.iter().skip(1).flat_map(|other| (0..places).map(move |at| (at, other)))
        {
            let flat = |(rank, row): &(usize, usize)| ((rank * places + place) * rows + row) * inner;
            let (one, two) = (flat(first), flat(other));
            let differs = |at: &usize| seen.values[one + at].to_bits() != seen.values[two + at].to_bits();
            if let Some(at) = (0..inner).find(differs) {
                let (step, words) =
                    (scene.material.name(scene.turn), scene.material.row_name(scene.turn, row));
                return Err(Failure::because(format!(
                    "{step}: {name} of {words} is {} on rank {} and {} on rank {} (element {at}{})",
                    seen.values[two + at],
                    other.0,
                    seen.values[one + at],
                    first.0,
                    if places > 1 { format!(" of place {place}") } else { String::new() }
                ))
                .at(Stage::Exchange)
                .into());
            }
            compared += inner;
        }
    }
    Ok(compared)
}
