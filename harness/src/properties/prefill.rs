//! Attention under prefill context parallelism: what each rank gathers, what its rows see and give, and what comes back, against global
//! causal attention over the same batch.

use shardcheck_cases::{AttendPcpCase, Body, Case, Family};
use shardcheck_formats::Dtype;

use super::{Property, always, broken, pcp};
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed};
use crate::prefilling::PrefillMaterial;
use crate::sharing::SharingMaterial;

const ATTEND: &[Family] = &[Family::AttendPcp];
const CERTIFIED: &str =
    "certified interval of the declared rounding contract, with the merge of a context and new tokens";
const EXACT: &str = "exact: integers";
const BITS: &str = "exact: bits";
const BOUNDS: &str = "sum of the certified bounds of both runs";

pub(super) const PROPERTIES: &[Property] = &[
    property!(
        "prefill.rows",
        ATTEND,
        always,
        "each rank attends for the rows that the split gives to it, chunks in one piece, padding behind them",
        "as `pcp.partition`, `pcp.padding` and `pcp.order`",
        &["TransformerEngine#1012", "vllm-ascend#11807"],
        EXACT,
        rows
    ),
    property!(
        "prefill.bounds",
        ATTEND,
        always,
        "a local row sees all positions of its request up to its own, the cached ones included, and padding none",
        "SGLang `kv_len_prev`, `kv_len_next`: prefix + all blocks up to the chunk's end; ATOM: windows before the split",
        &["sglang#27276", "sglang#36297"],
        EXACT,
        bounds
    ),
    property!(
        "prefill.query",
        ATTEND,
        always,
        "the kernel reads the query of its own row, behind the cast that was asked for, scale included",
        "rows of queries and of keys are cut by the same split",
        &[],
        BITS,
        query
    ),
    property!(
        "prefill.gather",
        ATTEND,
        always,
        "on every rank, keys and values are those of all positions of each request in their order, the cached ones first, and no padding",
        "SGLang `cp_all_gather_rerange_kv_cache`; vLLM `hidden_restore_idx`; ATOM gather, transpose, cut",
        &["vllm-ascend#7012"],
        BITS,
        gathered
    ),
    property!(
        "prefill.local",
        ATTEND,
        always,
        "output and LSE of each local row are global causal attention over its request, whatever its rank",
        "every rank has the KV of all positions",
        &["sglang#27276"],
        CERTIFIED,
        local
    ),
    property!(
        "prefill.copies",
        ATTEND,
        has_copies,
        "a row that every rank has, as a decode that is replicated, has the same output on all of them",
        "vLLM: decodes are computed redundantly, and any rank's sample may be taken",
        &[],
        BITS,
        copies
    ),
    property!(
        "prefill.lse",
        ATTEND,
        always,
        "the LSE that comes back is that of global causal attention, row by row in the batch's order, on every rank",
        "log-sum-exp over all positions before the row",
        &[],
        CERTIFIED,
        lse
    ),
    property!(
        "prefill.output",
        ATTEND,
        always,
        "the output that comes back is global causal attention, row by row in the batch's order, without padding, on every rank",
        "the last gather, order restored",
        &["sglang#20360"],
        CERTIFIED,
        output
    ),
    property!(
        "prefill.ranks",
        ATTEND,
        has_ranks,
        "all ranks have the same keys, the same outputs and the same LSEs, bit for bit",
        "what was gathered is one thing",
        &[],
        BITS,
        ranks
    ),
    property!(
        "prefill.world",
        ATTEND,
        has_ranks,
        "one rank gives what P ranks give",
        "attention does not depend on who computes a row",
        &[],
        BOUNDS,
        world
    ),
    property!(
        "prefill.padding",
        ATTEND,
        always,
        "the rows of a graph that a rank runs beside its own change no row of the batch",
        "padding belongs to no request",
        &["vllm-ascend#7012"],
        BOUNDS,
        padding
    ),
    property!(
        "prefill.future",
        ATTEND,
        sees_a_future,
        "the first new row of each request does not depend on the tokens behind it, on whatever rank they are",
        "causality",
        &["sglang#27276"],
        BITS,
        future
    ),
];

fn shared(case: &Case) -> Option<&AttendPcpCase> {
    match &case.body {
        Body::AttendPcp(shared) => Some(shared),
        _ => None,
    }
}

fn has_ranks(case: &Case) -> bool {
    shared(case).is_some_and(|case| case.batch.world > 1)
}

fn has_copies(case: &Case) -> bool {
    has_ranks(case)
        && shared(case).is_some_and(|case| {
            SharingMaterial::new(&case.batch).placed.iter().any(|row| row.owner.is_none())
        })
}

fn sees_a_future(case: &Case) -> bool {
    shared(case).is_some_and(|case| case.batch.requests.iter().any(|request| request.query_tokens > 1))
}

/// Holds with what both measured, or the first that does not.
fn both(first: Finding, second: impl FnOnce() -> Result<Finding, Halt>) -> Result<Finding, Halt> {
    let Finding::Holds(measured) = first else { return Ok(first) };
    Ok(match second()? {
        Finding::Holds(more) => Finding::Holds(measured.and(more)),
        other => other,
    })
}

fn rows(laboratory: &Laboratory) -> Result<Finding, Halt> {
    pcp::placed_rows(laboratory)
}

fn bounds(laboratory: &Laboratory) -> Result<Finding, Halt> {
    pcp::must_show(laboratory, "rows")?;
    pcp::must_show(laboratory, "row_lens")?;
    pcp::bounds(laboratory)
}

fn local_place(material: &PrefillMaterial, width: usize, place: usize, row: usize) -> String {
    let row = material.sharing.row_place(row as i64);
    format!("rank {}, place {}, {row}", place / width, place % width)
}

fn query(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, (rows, width)) = (laboratory.prefilling(), pcp::local_rows(laboratory)?);
    let (heads, dim) = (material.attention.heads(), material.attention.configuration().attention.qk_dim());
    let shape = [material.world(), width, heads, dim];
    let seen = laboratory.observed()?.observable("kernel_query", Dtype::F32, &shape)?.to_f64();
    let mut comparison = Comparison::new("kernel_query");
    for (place, row) in &rows {
        for head in 0..heads {
            for (d, wanted) in material.attention.query(*row, head).iter().enumerate() {
                let flat = (place * heads + head) * dim + d;
                comparison.element(flat, seen[flat], Allowed::Exactly(f64::from(*wanted)));
            }
        }
    }
    let headline = "a kernel reads a query that is not that of its row behind the cast";
    Ok(comparison.finding(headline, Stage::Query, |flat| {
        let place = flat / dim / heads;
        let row = rows.iter().find(|(other, _)| *other == place).map_or(0, |(_, row)| *row);
        let place = local_place(material, width, place, row);
        format!("{place}, head {}, dim {}", flat / dim % heads, flat % dim)
    }))
}

fn gathered(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let attention = &laboratory.prefilling().attention;
    let shape = attention.configuration().attention;
    let keys = (0..attention.case.workload.requests.len()).map(|request| attention.held_keys(request));
    let found = gathered_tensor(laboratory, "gathered_key", keys.collect(), shape.qk_dim())?;
    if shape.is_mla() {
        return Ok(found);
    }
    let values: Vec<&[f32]> = attention.held_values.iter().map(Vec::as_slice).collect();
    both(found, || gathered_tensor(laboratory, "gathered_value", values, shape.value_dim()))
}

/// Judges a tensor of all tokens of all requests on every rank.
fn gathered_tensor(
    laboratory: &Laboratory,
    name: &'static str,
    held: Vec<&[f32]>,
    dim: usize,
) -> Result<Finding, Halt> {
    let material = laboratory.prefilling();
    let heads = material.attention.configuration().attention.kv_heads();
    let wanted: Vec<f32> = held.concat();
    let (token, tokens) = (heads * dim, wanted.len() / (heads * dim));
    let shape = [material.world(), tokens, heads, dim];
    let seen = laboratory.observed()?.observable(name, Dtype::F32, &shape)?.to_f32();
    for (flat, own) in seen.chunks_exact(token).enumerate() {
        let (rank, at) = (flat / tokens, flat % tokens);
        let same =
            |other: usize| own.iter().zip(&wanted[other * token..(other + 1) * token]).all(|(a, b)| a == b);
        if same(at) {
            continue;
        }
        let place = |at: usize| {
            let (request, position) = material.attention.token_at(at);
            format!("request {request}, position {position}")
        };
        let instead = match (0..tokens).find(|other| same(*other)) {
            Some(other) => format!("that of {}", place(other)),
            None if own.iter().any(|value| value.is_nan()) => "NaN, as where nothing was written".to_owned(),
            None => "that of no token".to_owned(),
        };
        let headline = format!("rank {rank}: where {name} of {} belongs stands {instead}", place(at));
        return Err(broken(headline, Stage::Gather));
    }
    Ok(Finding::Holds(Measured::exact(seen.len())))
}

fn local(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, (rows, width)) = (laboratory.prefilling(), pcp::local_rows(laboratory)?);
    let expected = material.attention.expected()?;
    let (heads, dim, dtype) = material.output();
    let shape = [material.world(), width, heads, dim];
    let observed = laboratory.observed()?;
    let lse = observed.observable("local_lse", Dtype::F32, &shape[..3])?.to_f64();
    let out = observed.observable("local_out", dtype, &shape)?.to_f64();
    let (mut lses, mut outs) = (Comparison::new("local_lse"), Comparison::new("local_out"));
    for (place, row) in &rows {
        for head in 0..heads {
            let (flat, wanted) = (place * heads + head, row * heads + head);
            lses.element(flat, lse[flat], expected.lse[wanted]);
            for d in 0..dim {
                outs.element(flat * dim + d, out[flat * dim + d], expected.out[wanted * dim + d]);
            }
        }
    }
    let place = |state: usize| {
        let place = state / heads;
        let row = rows.iter().find(|(other, _)| *other == place).map_or(0, |(_, row)| *row);
        format!("{}, head {}", local_place(material, width, place, row), state % heads)
    };
    let headline = "the LSE of a local row is not that of global causal attention";
    both(lses.finding(headline, Stage::Partial, place), || {
        let headline = "the output of a local row is not global causal attention";
        Ok(outs
            .finding(headline, Stage::Partial, |flat| format!("{}, dim {}", place(flat / dim), flat % dim)))
    })
}

fn copies(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, (rows, width)) = (laboratory.prefilling(), pcp::local_rows(laboratory)?);
    let (heads, dim, dtype) = material.output();
    let shape = [material.world(), width, heads, dim];
    let observed = laboratory.observed()?;
    let out = observed.observable("local_out", dtype, &shape)?.to_codes();
    let lse = observed.observable("local_lse", Dtype::F32, &shape[..3])?.to_codes();
    let mut compared = 0;
    for (row, placed) in material.sharing.placed.iter().enumerate() {
        if placed.owner.is_some() {
            continue;
        }
        let of_row: Vec<usize> =
            rows.iter().filter(|(_, other)| *other == row).map(|(place, _)| *place).collect();
        for pair in of_row.windows(2) {
            let same = |codes: &[u64], size: usize| {
                codes[pair[0] * size..(pair[0] + 1) * size] == codes[pair[1] * size..(pair[1] + 1) * size]
            };
            if !same(&out, heads * dim) || !same(&lse, heads) {
                let (row, ranks) = (material.sharing.row_place(row as i64), pair.iter().map(|at| at / width));
                let ranks: Vec<usize> = ranks.collect();
                return Err(broken(
                    format!("{row} has other bits on rank {} than on rank {}", ranks[1], ranks[0]),
                    Stage::Partial,
                ));
            }
            compared += heads * (dim + 1);
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

fn lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.prefilling();
    let expected = material.attention.expected()?;
    let (rows, (heads, _, _)) = (material.sharing.placed.len(), material.output());
    let seen = laboratory.observed()?.output("lse", Dtype::F32, &[material.world(), rows, heads])?.to_f64();
    let mut comparison = Comparison::new("lse");
    for (flat, seen) in seen.iter().enumerate() {
        comparison.element(flat, *seen, expected.lse[flat % (rows * heads)]);
    }
    let axes = [("rank", material.world()), ("row", rows), ("head", heads)];
    let headline = "the LSE that comes back is not that of global causal attention";
    Ok(comparison.finding(headline, stage_of(laboratory), |flat| material.attention.place(flat, &axes)))
}

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.prefilling();
    let expected = material.attention.expected()?;
    let (rows, (heads, dim, dtype)) = (material.sharing.placed.len(), material.output());
    let shape = [material.world(), rows, heads, dim];
    let seen = laboratory.observed()?.output("out", dtype, &shape)?.to_f64();
    let mut comparison = Comparison::new("out");
    for (flat, seen) in seen.iter().enumerate() {
        comparison.element(flat, *seen, expected.out[flat % (rows * heads * dim)]);
    }
    let axes = [("rank", shape[0]), ("row", rows), ("head", heads), ("dim", dim)];
    let headline = "the output that comes back is not global causal attention";
    Ok(comparison.finding(headline, stage_of(laboratory), |flat| material.attention.place(flat, &axes)))
}

/// What decides a property.
type Check = fn(&Laboratory) -> Result<Finding, Halt>;

/// The first stage of a step that an observable shows to be wrong; the last gather where none does.
fn stage_of(laboratory: &Laboratory) -> Stage {
    let wrong = |check: Check| matches!(check(laboratory), Ok(Finding::Broken(_)) | Err(Halt::Broken(_)));
    let stages: [(Stage, Check); 5] = [
        (Stage::Layout, rows),
        (Stage::RowBound, bounds),
        (Stage::Query, query),
        (Stage::Gather, gathered),
        (Stage::Partial, local),
    ];
    stages.into_iter().find(|(_, check)| wrong(*check)).map_or(Stage::Output, |(stage, _)| stage)
}

fn ranks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.prefilling();
    let outputs = &laboratory.observed()?.reply.outputs;
    let mut compared = 0;
    for name in ["gathered_key", "gathered_value", "out", "lse"] {
        let Some(tensor) = outputs.find(name) else { continue };
        let codes = tensor.to_codes();
        if tensor.shape().first() != Some(&material.world()) {
            return Err(broken(format!("{name} has no axis of {} ranks", material.world()), Stage::Output));
        }
        let size = codes.len() / material.world();
        for (rank, own) in codes.chunks_exact(size.max(1)).enumerate() {
            if let Some(at) = (0..size).find(|at| own[*at] != codes[*at]) {
                let headline = format!(
                    "{name} of rank {rank} has other bits than that of rank 0, first in element {at}"
                );
                let stage = if name.starts_with("gathered") { Stage::Gather } else { Stage::Output };
                return Err(broken(headline, stage));
            }
        }
        compared += codes.len();
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

/// Compares rows of the batch on every rank with those of another run, its ranks taken in turn.
fn compare(
    laboratory: &Laboratory,
    other: &PrefillMaterial,
    rows: &[usize],
    exact: bool,
    headline: &str,
) -> Result<Finding, Halt> {
    let material = laboratory.prefilling();
    let (count, (heads, dim, dtype)) = (material.sharing.placed.len(), material.output());
    let out = |observed: &Observed, world: usize| -> Result<Vec<f64>, Halt> {
        Ok(observed.output("out", dtype, &[world, count, heads, dim])?.to_f64())
    };
    let seen = out(laboratory.observed()?, material.world())?;
    let again = out(&other.observe(&laboratory.engine)?, other.world())?;
    let bounds =
        if exact { None } else { Some((material.attention.expected()?, other.attention.expected()?)) };
    let (size, mut comparison) = (heads * dim, Comparison::new("out"));
    for rank in 0..material.world() {
        for at in rows.iter().flat_map(|row| row * size..(row + 1) * size) {
            let flat = rank * count * size + at;
            let y = again[rank % other.world() * count * size + at];
            let allowed = match bounds {
                None => Allowed::Exactly(y),
                Some((ours, theirs)) => {
                    let ((low, high), (least, most)) = (ours.out_interval(at), theirs.out_interval(at));
                    Allowed::Between { expected: y, low: y + (low - most), high: y + (high - least) }
                }
            };
            comparison.element(flat, seen[flat], allowed);
        }
    }
    let axes = [("rank", material.world()), ("row", count), ("head", heads), ("dim", dim)];
    Ok(comparison.finding(headline, Stage::Output, |flat| material.attention.place(flat, &axes)))
}

fn world(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let other = laboratory.prefilling().variant(|case| case.batch.world = 1)?;
    let rows: Vec<usize> = (0..other.sharing.placed.len()).collect();
    compare(laboratory, &other, &rows, false, "one rank gives another output than P ranks")
}

fn padding(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.prefilling();
    let other =
        material.variant(|case| case.batch.extra_rows = if case.batch.extra_rows == 0 { 3 } else { 0 })?;
    let rows: Vec<usize> = (0..other.sharing.placed.len()).collect();
    compare(laboratory, &other, &rows, false, "rows of a graph change the rows of the batch")
}

fn future(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.prefilling();
    let (mut rows, mut first) = (Vec::new(), 0);
    for request in &material.case.batch.requests {
        rows.extend((request.query_tokens > 1).then_some(first));
        first += request.query_tokens;
    }
    let other = material.with_other_future()?;
    compare(laboratory, &other, &rows, true, "a row depends on tokens behind it")
}
