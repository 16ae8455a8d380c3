//! Laws of Kimi delta attention: what rows give, what states hold, and that neither steps, slots nor ranks change them.

mod again;

use shardcheck_cases::{Body, Case, Family, KdaCase, KdaPattern};
use shardcheck_formats::Dtype;
use shardcheck_references::kda::Near;

use super::{Property, always};
use crate::delta::{ExpectedRequest, KdaMaterial};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed};

const KDA: &[Family] = &[Family::Kda];
const BOUND: &str = "certified bound of convolution, gates, delta rule in any published order, and norm";
const BOTH: &str = "sum of the bounds of both runs";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "kda.window",
        statement: "behind a step the window of a request is the last inputs of its channels, rejected rows left out, zeros where there were none",
        source: "FLA `causal_conv1d` with its state; transformers `KimiLinearDeltaAttention`",
        bugs: &["ATOM#1936"],
        tolerance: "exact: codes",
        families: KDA,
        applies: |case| kda_case(case).is_some_and(|kda| kda.taps > 1),
        check: window,
    },
    Property {
        id: "kda.state",
        statement: "behind a step the state of a request is that of its rows alone, whichever slot it came from; also of one without rows",
        source: "FLA `naive_recurrent_kda`: S ← diag(exp g)S, S ← S + b·k(v − Sᵀk)ᵀ",
        bugs: &["ATOM#1936", "vllm-ascend#11807", "vllm-ascend#11508"],
        tolerance: BOUND,
        families: KDA,
        applies: always,
        check: state,
    },
    Property {
        id: "kda.core",
        statement: "a row reads Sᵀq of the state that its own token is in, q scaled by K^−½",
        source: "FLA `naive_recurrent_kda`, `naive_kda_gate`, `naive_kda_lowerbound_gate`",
        bugs: &["vllm-ascend#11807"],
        tolerance: BOUND,
        families: KDA,
        applies: has_rows,
        check: core,
    },
    Property {
        id: "kda.output",
        statement: "a row comes out as the norm of each head, times its weight and the sigmoid of its gate, on every rank",
        source: "transformers `KimiLinearDeltaAttention`, `KimiLinearRMSNormGated`",
        bugs: &["vllm-ascend#11807", "vllm-ascend#11508"],
        tolerance: BOUND,
        families: KDA,
        applies: has_rows,
        check: output,
    },
    Property {
        id: "kda.gates",
        statement: "rows whose decays are 1 and whose updates are 0 leave the state as it was, bit for bit",
        source: "exp(0) = 1, σ(−∞) = 0: 1·S + k·0 = S in any arithmetic",
        bugs: &[],
        tolerance: "exact: bits",
        families: KDA,
        applies: |case| kda_case(case).is_some_and(|kda| !held(kda).is_empty()),
        check: gates,
    },
    Property {
        id: "kda.split",
        statement: "a step of n rows comes to the same as n steps of one row each, window and state handed over between them",
        source: "the recurrence is a composition: chunked prefill, decode and chunk form are ways to bracket it",
        bugs: &["vllm-ascend#11508"],
        tolerance: BOTH,
        families: KDA,
        applies: |case| kda_case(case).is_some_and(|kda| has_rows(case) && rejections(kda) == 0),
        check: again::split,
    },
    Property {
        id: "kda.rollback",
        statement: "a request that goes on behind rejected rows equals one that never ran them",
        source: "speculative decoding: the state of the accepted prefix is the one that is kept",
        bugs: &[],
        tolerance: BOTH,
        families: KDA,
        applies: |case| kda_case(case).is_some_and(|kda| has_rows(case) && rejections(kda) > 0),
        check: again::rollback,
    },
    Property {
        id: "kda.fork",
        statement: "a request that goes on in another slot equals one that computes its whole prefix anew, also where its source goes on in the same step",
        source: "a prefix hit is a choice of how, not of what",
        bugs: &["ATOM#1936"],
        tolerance: BOTH,
        families: KDA,
        applies: |case| kda_case(case).is_some_and(|kda| has_rows(case) && forks(kda) > 0),
        check: again::fork,
    },
    Property {
        id: "kda.fresh",
        statement: "a new request in a slot that another one left equals one in a session of its own",
        source: "a slot is given out again when its request has ended",
        bugs: &["ATOM#1936"],
        tolerance: BOTH,
        families: KDA,
        applies: |case| kda_case(case).is_some_and(|kda| has_rows(case) && recycled(kda) > 0),
        check: again::fresh,
    },
    Property {
        id: "kda.ranks",
        statement: "the heads of all ranks together are those of one rank: tensor parallelism shares heads out, decode context parallelism shards nothing",
        source: "ATOM guide: the state of KDA is kept for each request, not paged, and not sharded by decode context parallelism",
        bugs: &[],
        tolerance: BOTH,
        families: KDA,
        applies: |case| kda_case(case).is_some_and(|kda| has_rows(case) && kda.tp > 1),
        check: again::ranks,
    },
];

fn kda_case(case: &Case) -> Option<&KdaCase> {
    match &case.body {
        Body::Kda(kda) => Some(kda),
        _ => None,
    }
}

fn has_rows(case: &Case) -> bool {
    kda_case(case).is_some_and(|kda| kda.rows() > 0)
}

fn rejections(case: &KdaCase) -> usize {
    case.steps.iter().flatten().filter(|request| request.rejected > 0).count()
}

fn forks(case: &KdaCase) -> usize {
    case.steps
        .iter()
        .flatten()
        .filter(|request| request.read.is_some_and(|read| read != request.write))
        .count()
}

/// New requests in slots that were written before.
fn recycled(case: &KdaCase) -> usize {
    let written = |step: usize, slot: usize| case.steps[..step].iter().flatten().any(|r| r.write == slot);
    let new = |(step, requests): (usize, &Vec<shardcheck_cases::KdaRequest>)| {
        requests.iter().filter(|r| r.read.is_none() && written(step, r.write)).count()
    };
    case.steps.iter().enumerate().map(new).sum()
}

/// Requests whose rows all leave a state as it is, behind a step all of whose rows count: `(step, request, earlier step, request there)`.
fn held(case: &KdaCase) -> Vec<[usize; 4]> {
    let mut found = Vec::new();
    if case.pattern != KdaPattern::Hold {
        return found;
    }
    for (step, requests) in case.steps.iter().enumerate().filter(|(step, _)| step % 2 == 1) {
        for (index, request) in requests.iter().enumerate().filter(|(_, r)| r.rows > 0 && r.rejected == 0) {
            let writer = |step: usize| case.steps[step].iter().position(|r| Some(r.write) == request.read);
            let source = (0..step).rev().find_map(|earlier| Some((earlier, writer(earlier)?)));
            found.extend(source.map(|(earlier, there)| [step, index, earlier, there]));
        }
    }
    found
}

fn broken(headline: String) -> Halt {
    Failure::because(headline).at(Stage::Output).into()
}

/// Where an element of a step lies, in words.
fn place(step: usize, [rank, row, head, dim]: [usize; 4], of: &str) -> String {
    format!("step {step}, rank {rank}, {of} {row}, value head {head} of the rank, dim {dim}")
}

/// Splits a flat index over `[ranks, rows, heads, dims]`.
fn indices(flat: usize, rows: usize, heads: usize, dims: usize) -> [usize; 4] {
    [
        flat / (dims * heads * rows.max(1)),
        flat / (dims * heads) % rows.max(1),
        flat / dims % heads,
        flat % dims,
    ]
}

/// Judges a tensor `[P, T, HV / P, V]` of every step, given what each row allows all value heads.
fn rows_of_steps(
    laboratory: &Laboratory,
    name: &str,
    headline: &str,
    wanted: impl Fn(&ExpectedRequest) -> Vec<Vec<Allowed>>,
) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let (ranks, own, dims) = (material.case.tp, material.own_heads(), material.case.value_dim);
    let [output, core] = material.dtypes();
    let dtype = if name == "out" { output } else { core };
    let mut measured = Measured::exact(0);
    for (step, (observed, expected)) in laboratory.stepped()?.iter().zip(material.expected()).enumerate() {
        let rows: Vec<Vec<Allowed>> = expected.iter().flat_map(&wanted).collect();
        let shape = [ranks, rows.len(), own, dims];
        let seen = if name == "out" {
            observed.output(name, dtype, &shape)?
        } else {
            observed.observable(name, dtype, &shape)?
        };
        let mut allowed = Vec::new();
        for rank in 0..ranks {
            allowed.extend(
                rows.iter().flat_map(|row| &row[rank * own * dims..(rank + 1) * own * dims]).copied(),
            );
        }
        let comparison = Comparison::all(name, &seen.to_f64(), &allowed);
        let count = rows.len();
        match comparison
            .finding(headline, Stage::Output, |flat| place(step, indices(flat, count, own, dims), "row"))
        {
            Finding::Holds(own) => measured = measured.and(own),
            other => return Ok(other),
        }
    }
    Ok(Finding::Holds(measured))
}

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let headline = "a row of the layer's output is not what its tokens and its state give";
    rows_of_steps(laboratory, "out", headline, |request| {
        request
            .rows
            .iter()
            .map(|row| row.out.iter().map(|near| material.allowed_out(*near)).collect())
            .collect()
    })
}

fn core(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let headline = "a row does not read what the state has for its query";
    rows_of_steps(laboratory, "core", headline, |request| {
        request
            .rows
            .iter()
            .map(|row| row.core.iter().map(|near| material.allowed_core(*near)).collect())
            .collect()
    })
}

/// State of every rank and request as a step has shown it, `[P, n, HV / P, K, V]`.
fn states(material: &KdaMaterial, observed: &Observed, count: usize) -> Result<Vec<f64>, Halt> {
    let shape =
        [material.case.tp, count, material.own_heads(), material.case.key_dim, material.case.value_dim];
    Ok(observed.observable("state", Dtype::F32, &shape)?.to_f64())
}

/// What the elements of a request's state may be, `[HV, K, V]`.
fn allowed_state(request: &ExpectedRequest) -> Vec<Near> {
    let of_head = |head: &shardcheck_references::kda::recurrence::HeadState| {
        let width = head.error.len();
        let near = |(at, value): (usize, &f64)| Near { value: *value, error: head.error[at % width] };
        head.value.iter().enumerate().map(near).collect::<Vec<_>>()
    };
    request.state.heads.iter().flat_map(of_head).collect()
}

fn state(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let (own, size) = (material.own_heads(), material.case.key_dim * material.case.value_dim);
    let mut measured = Measured::exact(0);
    for (step, (observed, expected)) in laboratory.stepped()?.iter().zip(material.expected()).enumerate() {
        let seen = states(material, observed, expected.len())?;
        let wanted: Vec<Vec<Near>> = expected.iter().map(allowed_state).collect();
        let mut allowed = Vec::new();
        for rank in 0..material.case.tp {
            let heads = rank * own * size..(rank + 1) * own * size;
            let near = wanted.iter().flat_map(|request| &request[heads.clone()]);
            allowed.extend(near.map(|near| Allowed::near(near.value, near.error)));
        }
        let comparison = Comparison::all("state", &seen, &allowed);
        let count = expected.len();
        match comparison.finding("a state is not that of its request's rows", Stage::Output, |flat| {
            place(step, indices(flat, count, own, size), "request")
        }) {
            Finding::Holds(own) => measured = measured.and(own),
            other => return Ok(other),
        }
    }
    Ok(Finding::Holds(measured))
}

fn window(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let KdaCase { tp, heads, key_dim, value_heads, value_dim, taps, .. } = material.case;
    let keys = heads * key_dim;
    let mut compared = 0;
    for (step, (observed, expected)) in laboratory.stepped()?.iter().zip(material.expected()).enumerate() {
        let shape = [tp, expected.len(), material.own_channels(), taps - 1];
        let seen = observed.observable("window", Dtype::Bf16, &shape)?.to_f64();
        let mut at = 0;
        for rank in 0..tp {
            let part = |first: usize, all: usize| first + rank * all / tp..first + (rank + 1) * all / tp;
            let own = [part(0, keys), part(keys, keys), part(2 * keys, value_heads * value_dim)];
            for (request, expected) in expected.iter().enumerate() {
                for channel in own.iter().cloned().flatten() {
                    for (age, token) in expected.state.window.iter().enumerate() {
                        if seen[at] != token[channel] {
                            return Err(broken(format!(
                                "step {step}, rank {rank}, request {request}: channel {channel} has {} as input {age} of its window, where {} was given",
                                seen[at], token[channel]
                            )));
                        }
                        at += 1;
                    }
                }
            }
        }
        compared += at;
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

fn gates(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.delta();
    let (ranks, size) =
        (material.case.tp, material.own_heads() * material.case.key_dim * material.case.value_dim);
    let steps = laboratory.stepped()?;
    let mut compared = 0;
    for [step, request, earlier, there] in held(&material.case) {
        let count = |step: usize| material.case.steps[step].len();
        let (seen, before) = (
            states(material, &steps[step], count(step))?,
            states(material, &steps[earlier], count(earlier))?,
        );
        for rank in 0..ranks {
            let of = |all: &[f64], count: usize, request: usize| {
                all[(rank * count + request) * size..][..size].to_vec()
            };
            let (seen, before) = (of(&seen, count(step), request), of(&before, count(earlier), there));
            if let Some(at) = (0..size).find(|at| seen[*at] != before[*at]) {
                return Err(broken(format!(
                    "step {step}, rank {rank}, request {request}: element {at} of the state went from {} to {} where nothing decays and nothing is added",
                    before[at], seen[at]
                )));
            }
            compared += size;
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}
