//! Exact probes: which tokens a row counts, whether keys and values belong together, and what ranks weigh.

use std::collections::HashMap;

use shardcheck_cases::{Body, Case, Family, Probe};
use shardcheck_formats::{Counter, round};
use shardcheck_references::probe::{Expectation, Gate, KeySelect, Selector, Sight, Token, ranks};

use super::Property;
use crate::attribute;
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};
use crate::probing::{Bench, Content, FreeSlots, Reading};

const ATTEND: &[Family] = &[Family::Decode, Family::Verify, Family::Draft];

/// Needles tried on each row and head.
const NEEDLE_ROUNDS: usize = 2;
/// Launches of dither values.
const DITHER_LAUNCHES: usize = 2;

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "probe.tokens",
        statement: "with equal scores and values that spell their tokens, output times tokens is the sum of the row's own tokens, each once",
        source: "Walsh functions and the Thue–Morse sequence: sums of signs stay small at any length, and name what is missing",
        bugs: &["vllm#27518", "vllm#47181", "sglang#29760", "vllm#38416", "ATOM#1994"],
        tolerance: "integers: |out·n − Σ| within the roundings of the declared contract, less than half a token in the dimensions that spell",
        families: ATTEND,
        applies: spells,
        check: tokens,
    },
    Property {
        id: "probe.pairing",
        statement: "keys that let half of the tokens through, one bit of the index at a time, let through the values of just those tokens",
        source: "the sums of the token code over the half that has a bit, and over the half that has not",
        bugs: &["sglang#29760", "TransformerEngine#1896", "vllm#49435"],
        tolerance: "integers, as probe.tokens; what is not chosen underflows to exactly zero",
        families: ATTEND,
        applies: spells,
        check: pairing,
    },
    Property {
        id: "probe.needle",
        statement: "a query that picks one token gives that token's value, bit for bit, on every head",
        source: "softmax of one finite score: its weight is exactly 1",
        bugs: &["vllm-ascend#4221", "vllm-ascend#4687", "sglang#34765"],
        tolerance: "exact: bits",
        families: ATTEND,
        applies: spells,
        check: needle,
    },
    Property {
        id: "probe.rank-lse",
        statement: "ranks weigh what their token counts say: equal and opposite values cancel, and values of one rank come out as its share",
        source: "merge weights e^(lse_r − lse) with lse_r = ln n_r",
        bugs: &["vllm#28840", "vllm#47079", "vllm-ascend#3850", "flashinfer#4485"],
        tolerance: "every rounding of the declared contract applied to both ends of the merge weight's error (η of the certified bound)",
        families: ATTEND,
        applies: |case| spells(case) && ranks_of(case) > 1,
        check: rank_lse,
    },
];

/// The probes make their own inputs, so that one case of a configuration is enough: those of the token code, of few heads.
fn spells(case: &Case) -> bool {
    // each head is read by itself; integers don't mind how many tokens there are
    let chosen = |attention: &shardcheck_cases::AttentionCase| {
        attention.probe == Probe::TokenCode && crate::run::has_few_heads(&attention.configuration)
    };
    matches!(&case.body, Body::Attention(attention) if chosen(attention))
}

fn ranks_of(case: &Case) -> usize {
    match &case.body {
        Body::Attention(attention) => attention.configuration.dcp,
        _ => 1,
    }
}

/// An interval, or the one number that it holds.
fn allowed(expected: f64, low: f64, high: f64) -> Allowed {
    if low < high { Allowed::Between { expected, low, high } } else { Allowed::Exactly(low) }
}

/// Compares a state's output and LSE with what is expected of its row; padding is exactly zero.
fn compare(
    (outs, lses): (&mut Comparison, &mut Comparison),
    reading: &Reading,
    state: usize,
    expected: Option<&Expectation>,
) {
    let seen = reading.state(state);
    for (dim, value) in seen.iter().enumerate() {
        let allowed = match expected.map(|expected| expected.elements[dim]) {
            Some(element) => allowed(element.exact, element.low, element.high),
            None => Allowed::Exactly(0.0),
        };
        outs.element(state * reading.dims + dim, *value, allowed);
    }
    let allowed = match expected {
        Some(expected) => Allowed::near(expected.lse, expected.lse_bound),
        None => Allowed::NegativeInfinity,
    };
    lses.element(state, reading.lse[state], allowed);
}

/// The finding of outputs and LSEs, placed by state, with notes where it fails.
fn finding(
    laboratory: &Laboratory,
    headline: &str,
    (outs, lses): (&Comparison, &Comparison),
    dims: usize,
    notes: impl FnOnce() -> Vec<String>,
) -> Finding {
    if outs.holds() && lses.holds() {
        return Finding::Holds(outs.measured().and(lses.measured()));
    }
    let material = laboratory.attention();
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("sign", dims)];
    let mut failure = if outs.holds() {
        lses.failure(headline, Stage::Partial, |flat| material.place(flat, &axes[..3]))
    } else {
        outs.failure(headline, Stage::Partial, |flat| material.place(flat, &axes))
    };
    failure.notes.extend(notes());
    Finding::Broken(Box::new(failure))
}

fn tokens(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let bench = Bench::new(laboratory)?;
    let reading = bench.tokens()?;
    let tables = bench.tables();
    let decoder = bench.decoder(&tables);
    let expected: Vec<Option<Expectation>> =
        bench.sights.iter().map(|sight| sight.map(|sight| decoder.expectation(sight))).collect();
    let (mut outs, mut lses) = (Comparison::new("out"), Comparison::new("lse"));
    for state in 0..reading.states() {
        compare((&mut outs, &mut lses), &reading, state, expected[reading.row_of(state)].as_ref());
    }
    let headline = "a row does not count its own tokens, each once";
    let notes = || attribute::read(&bench, &reading);
    let blind: Vec<usize> = (0..expected.len())
        .filter(|row| expected[*row].as_ref().is_some_and(|e| e.tolerance(bench.code.spelling()) >= 0.5))
        .collect();
    let mut finding = finding(laboratory, headline, (&outs, &lses), reading.dims, notes);
    if let (Finding::Broken(failure), Some(row)) = (&mut finding, blind.first()) {
        let name = laboratory.attention().row_name(*row);
        failure.notes.push(format!(
            "{} rows can only show that something is missing, not what: the tolerance of {name} is half a token",
            blind.len()
        ));
    }
    Ok(finding)
}

/// Selection by keys on a case's cache format.
fn selection(bench: &Bench) -> Result<KeySelect, Halt> {
    let configuration = bench.material.configuration();
    KeySelect::new(
        bench.code.token_bits(),
        bench.spare_columns(),
        configuration.kv_dtype,
        f64::from(configuration.kv_scale),
        f64::from(configuration.softmax_scale),
    )
    .map_err(|error| Halt::Unsupported(error.to_string()))
}

fn pairing(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let bench = Bench::new(laboratory)?;
    let select = selection(&bench)?;
    let (heads, rounding) = (bench.material.heads(), bench.rounding());
    let dims = bench.code.spelling().end;
    let (mut outs, mut lses) = (Comparison::new("out"), Comparison::new("lse"));
    let mut seen: Vec<(usize, Selector, Vec<f64>)> = Vec::new();
    let mut known: HashMap<(usize, Selector), Expectation> = HashMap::new();
    for launch in 0..select.launches() {
        let selectors = select.selectors(launch);
        for first in (0..selectors.len()).step_by(heads) {
            let chosen = |head: usize| selectors[(first + head) % selectors.len()];
            let reading = select_and_read(&bench, &select, launch, dims, &chosen)?;
            for state in 0..reading.states() {
                let row = reading.row_of(state);
                let selector = chosen(head_of(&reading, state));
                let expected = bench.sights[row].map(|sight| {
                    let make = || select.expectation(&bench.code, selector, sight, dims, &rounding);
                    &*known.entry((row, selector)).or_insert_with(make)
                });
                compare((&mut outs, &mut lses), &reading, state, expected);
                seen.push((row, selector, reading.state(state).to_vec()));
            }
        }
    }
    let headline = "keys let through values of other tokens than their own";
    let notes = || mispaired_tokens(&bench, &select, &seen);
    Ok(finding(laboratory, headline, (&outs, &lses), dims, notes))
}

/// Query head of a state among those of all ranks.
fn head_of(reading: &Reading, state: usize) -> usize {
    state / (reading.rows * reading.heads) * reading.heads + state % reading.heads
}

/// One round of selectors, a head each, over as many launches as the signs need.
fn select_and_read(
    bench: &Bench,
    select: &KeySelect,
    launch: usize,
    dims: usize,
    chosen: &dyn Fn(usize) -> Selector,
) -> Result<Reading, Halt> {
    let key = |token: Token, out: &mut [f32]| select.key(&bench.code, token, launch, out);
    let query = |_: usize, head: usize, out: &mut [f32]| select.query(chosen(head), launch, out);
    let sign = |token: Token, dim: usize| bench.code.sign(dim, token) as f32;
    bench.launched(dims, FreeSlots::Untouched, &sign, &key, &query)
}

/// Pairs of tokens whose keys and values are exchanged, a sentence each row.
fn mispaired_tokens(bench: &Bench, select: &KeySelect, seen: &[(usize, Selector, Vec<f64>)]) -> Vec<String> {
    let tables = bench.tables();
    let decoder = bench.decoder(&tables);
    let mut sentences = Vec::new();
    for (row, sight) in bench.sights.iter().enumerate() {
        let Some(sight) = sight else { continue };
        let differences: Vec<(Selector, Vec<i64>)> = seen
            .iter()
            .filter(|(other, _, _)| *other == row)
            .map(|(_, selector, out)| (*selector, difference(bench, select, *selector, *sight, out)))
            .collect();
        let pairs = KeySelect::mispaired(&decoder, *sight, &differences);
        if let Some((a, b)) = pairs.first() {
            let others = match pairs.len() {
                1 => String::new(),
                count => format!(" (or one of {} other pairs)", count - 1),
            };
            sentences.push(format!(
                "row {} of request {}: the keys of tokens {} and {} go with each other's values{others}",
                sight.row, sight.request, a.position, b.position
            ));
        }
    }
    sentences
}

fn difference(bench: &Bench, select: &KeySelect, selector: Selector, sight: Sight, out: &[f64]) -> Vec<i64> {
    let (right, _) = select.chosen(&bench.code, selector, sight);
    let spelling = bench.code.spelling();
    spelling.map(|dim| (out[dim] * right.tokens() as f64).round() as i64 - right.sum(dim)).collect()
}

fn needle(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let bench = Bench::new(laboratory)?;
    let select = selection(&bench)?;
    if !select.can_pick() {
        return Err(Halt::Unsupported(format!(
            "a key has {} columns to spare, and the index of a token has {} bits",
            bench.spare_columns(),
            bench.code.token_bits().len()
        )));
    }
    let drawn = |token: Token, out: &mut [f32]| {
        let stream = (token.request * 7919 + 1) as u32;
        let mut counter = Counter::new(token.position as u64, stream);
        out.iter_mut().for_each(|value| *value = (2.0 * counter.gaussian()) as f32);
    };
    let key = |token: Token, out: &mut [f32]| select.key(&bench.code, token, 0, out);
    let content = Content { value: &drawn, key: &key };
    let mut outs = Comparison::new("out");
    for turn in 0..NEEDLE_ROUNDS {
        let picked = |row: usize, head: usize| {
            bench.sights[row].filter(|sight| sight.visible > 0).map(|sight| Token {
                request: sight.request,
                position: telling_position(&bench, sight, head + turn * bench.material.heads() + row),
            })
        };
        let query = |row: usize, head: usize, out: &mut [f32]| {
            if let Some(token) = picked(row, head) {
                select.needle(&bench.code, token, out);
            }
        };
        let material = bench.with(&content, &query)?;
        let reading = bench.step(
            &mut bench.open(&content, FreeSlots::Untouched, &material)?,
            &material,
            bench.width,
        )?;
        let mut value = vec![0.0; bench.width];
        for state in 0..reading.states() {
            let token = picked(reading.row_of(state), head_of(&reading, state));
            value.fill(0.0);
            if let Some(token) = token {
                drawn(token, &mut value);
            }
            for (dim, seen) in reading.state(state).iter().enumerate() {
                // what the cache holds, in the format of activations
                let held = round(bench.material.configuration().dtype, bench.held(value[dim]));
                outs.element(state * reading.dims + dim, *seen, Allowed::Exactly(held / bench.unit));
            }
        }
    }
    let material = laboratory.attention();
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", bench.width)];
    let headline = "a token that is picked alone does not come out as its own value";
    Ok(outs.finding(headline, Stage::Partial, |flat| material.place(flat, &axes)))
}

/// Positions at which mistakes show: ends, borders of pages and of interleave runs, and some in between.
fn telling_position(bench: &Bench, sight: Sight, index: usize) -> usize {
    let layout = bench.code.layout();
    let last = sight.visible - 1;
    let page = layout.virtual_block_tokens();
    let run = layout.interleave();
    let telling = [last, 0, page, page - 1, run, run - 1, last / page * page, last / run * run];
    match telling.get(index % (2 * telling.len())) {
        Some(position) => (*position).min(last),
        None => (index * 7919 + 13) % sight.visible,
    }
}

fn rank_lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let bench = Bench::new(laboratory)?;
    let balanced = weigh(laboratory, &bench, Weighing::Balance)?;
    let Finding::Holds(mut measured) = balanced else { return Ok(balanced) };
    for launch in 0..DITHER_LAUNCHES {
        match weigh(laboratory, &bench, Weighing::Dither(launch))? {
            Finding::Holds(more) => measured = measured.and(more),
            other => return Ok(other),
        }
    }
    if measured == Measured::default() {
        return Ok(Finding::Unsupported("no row sees tokens of two ranks".to_owned()));
    }
    Ok(Finding::Holds(measured))
}

#[derive(Clone, Copy, PartialEq)]
enum Weighing {
    Balance,
    Dither(usize),
}

/// Tokens of each request that take part on each rank, fixed for all of its rows.
fn shares(bench: &Bench, weighing: Weighing) -> Vec<Vec<usize>> {
    let layout = bench.code.layout();
    let lens = |visible: usize| -> Vec<usize> {
        (0..layout.world()).map(|rank| layout.local_len(visible, rank)).collect()
    };
    (0..bench.material.case.workload.requests.len())
        .map(|request| {
            let rows = bench.sights.iter().flatten().filter(|sight| sight.request == request);
            // the row that sees least decides
            let least = lens(rows.map(|sight| sight.visible).min().unwrap_or(0));
            match weighing {
                Weighing::Balance => vec![ranks::equal_share(&least); layout.world()],
                Weighing::Dither(_) => ranks::unequal_shares(&least),
            }
        })
        .collect()
}

/// Values of the ranks, in units, in each dimension of each request.
fn looks(bench: &Bench, weighing: Weighing, shares: &[Vec<usize>]) -> Vec<Vec<Vec<f32>>> {
    let world = bench.code.layout().world();
    let dtype = bench.material.configuration().kv_dtype;
    let mantissa_bits = (-dtype.unit_roundoff().log2()).round() as u32 - 1;
    let dither = match weighing {
        Weighing::Balance => Vec::new(),
        Weighing::Dither(launch) => ranks::dither(bench.width, launch, mantissa_bits),
    };
    let of = |pairs: &[(usize, usize)], dim: usize| {
        let mut values = vec![0.0; world];
        match dither.get(dim) {
            Some(value) => values[dim % world] = *value as f32,
            None => {
                if let Some((a, b)) = pairs.get(dim % pairs.len().max(1)) {
                    (values[*a], values[*b]) = (1.0, -1.0);
                }
            }
        }
        values
    };
    shares
        .iter()
        .map(|shares| {
            let pairs = ranks::pairs(shares);
            (0..bench.width).map(|dim| of(&pairs, dim)).collect()
        })
        .collect()
}

/// What a row may come out as, in units; `None` where the probe says nothing of it.
fn weighed_row(
    bench: &Bench,
    sight: Sight,
    shares: &[usize],
    looks: &[Vec<f32>],
    only_equal: bool,
) -> Option<Vec<Allowed>> {
    let layout = bench.code.layout();
    let taking_part = |visible: usize| -> Vec<i64> {
        (0..layout.world()).map(|rank| layout.local_len(visible, rank).min(shares[rank]) as i64).collect()
    };
    let counts = taking_part(sight.visible);
    if sight.beside_from.is_some_and(|from| taking_part(from.min(sight.visible)) != counts) {
        // tokens of several ranks in one part are weighed as none of them
        return None;
    }
    let mut held = counts.iter().filter(|count| **count > 0);
    let first = held.next()?;
    let (several, equal) = (held.clone().count() > 0, held.all(|count| count == first));
    (several && (equal || !only_equal)).then(|| {
        let allowed = |values: &Vec<f32>| {
            let values: Vec<f64> = values.iter().map(|value| bench.held(*value)).collect();
            let element = ranks::weighed(&bench.contract, &counts, &values);
            allowed(element.exact / bench.unit, element.low / bench.unit, element.high / bench.unit)
        };
        looks.iter().map(allowed).collect()
    })
}

fn weigh(laboratory: &Laboratory, bench: &Bench, weighing: Weighing) -> Result<Finding, Halt> {
    let configuration = bench.material.configuration();
    let scales = (f64::from(configuration.kv_scale), f64::from(configuration.softmax_scale));
    let gate = Gate::new(bench.spare_columns(), configuration.kv_dtype, scales.0, scales.1)
        .map_err(|error| Halt::Unsupported(error.to_string()))?;
    let (layout, shares) = (*bench.code.layout(), shares(bench, weighing));
    let looks = looks(bench, weighing, &shares);
    let value = |token: Token, out: &mut [f32]| {
        let rank = layout.owner(token.position);
        out.iter_mut().zip(&looks[token.request]).for_each(|(value, values)| *value = values[rank]);
    };
    let key = |token: Token, out: &mut [f32]| {
        let share = shares[token.request][layout.owner(token.position)];
        gate.key(layout.local_index(token.position) < share, out);
    };
    let content = Content { value: &value, key: &key };
    let material = bench.with(&content, &|_, _, out| gate.query(out))?;
    let mut run = bench.open(&content, FreeSlots::Untouched, &material)?;
    let reading = bench.step(&mut run, &material, bench.width)?;
    let only_equal = weighing == Weighing::Balance;
    let expected: Vec<Option<Vec<Allowed>>> = bench
        .sights
        .iter()
        .map(|sight| {
            sight.and_then(|sight| {
                weighed_row(bench, sight, &shares[sight.request], &looks[sight.request], only_equal)
            })
        })
        .collect();
    let mut outs = Comparison::new("out");
    for state in 0..reading.states() {
        let Some(expected) = &expected[reading.row_of(state)] else { continue };
        for (dim, (seen, allowed)) in reading.state(state).iter().zip(expected).enumerate() {
            outs.element(state * reading.dims + dim, *seen, *allowed);
        }
    }
    let material = laboratory.attention();
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", bench.width)];
    let headline = match weighing {
        Weighing::Balance => "ranks of equal counts do not weigh the same",
        Weighing::Dither(_) => "a rank does not weigh what its count says",
    };
    Ok(outs.finding(headline, Stage::Merge, |flat| material.place(flat, &axes)))
}
