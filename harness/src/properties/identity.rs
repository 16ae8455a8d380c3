//! Identity of rows and heads: payloads that carry their own names through an exchange come out where they belong, exactly.
//!
//! The gather of queries is compared bit for bit by `decode.query` and `verify.query`, and a decode, verify or draft step end
//! to end by `probe.needle`. Here are the two ways that those do not go: the exchange and scatter of given partials, and the
//! gather of a context with the restoring of its rows.

use shardcheck_cases::{Body, Case, Family, MergePattern, Probe};
use shardcheck_engine::{Attention, Tensor, Tensors};
use shardcheck_formats::{Dtype, round_f32};

use super::Property;
use crate::finding::{Finding, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Run, attend};
use crate::material::AttentionMaterial;

/// Difference of scores beyond which a weight underflows to zero in 32 bits: e^−160.
const GAP: f32 = 160.0;
/// Largest number of rows or heads that a tag tells apart; integers up to 256 are exact in bf16.
const TAGS: usize = 250;

pub(super) const PROPERTIES: &[Property] = &[Property {
    id: "identity.rows",
    statement: "every row and head comes out in its own place with the payload that bears its name, bit for bit: through the exchange of partials, and through the gather and restoring of a context",
    source: "a weight of exactly 1 changes nothing; row and head ids travel as data",
    bugs: &["vllm#29487", "ATOM#1208", "sglang#20360", "sglang#33309", "vllm#26296"],
    tolerance: "exact: bits",
    families: &[Family::MergePartials, Family::Context],
    applies,
    check,
}];

fn applies(case: &Case) -> bool {
    match &case.body {
        Body::Merge(merge) => merge.pattern == MergePattern::Tagged,
        Body::Attention(attention) => {
            crate::run::is_small(case) && matches!(attention.probe, Probe::Gaussian | Probe::TokenCode)
        }
        _ => false,
    }
}

fn check(laboratory: &Laboratory) -> Result<Finding, Halt> {
    if laboratory.case.family == Family::Context { context(laboratory) } else { exchange(laboratory) }
}

/// Element `d` of the partial of a row and head that rank `rank` holds.
fn tag(row: usize, head: usize, rank: usize, d: usize) -> f64 {
    1.0 + [row % TAGS, head % TAGS, rank % TAGS, 0][d % 4] as f64
}

/// One rank holds each row and head, another one each time; the others are empty.
fn exchange(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.merging();
    let shape = material.output_shape();
    let (world, rows, own, dim) = (shape[0], shape[1], shape[2], shape[3]);
    let heads = own * world;
    let holder = |row: usize, head: usize| (row + head) % world;
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for rank in 0..world {
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let holds = holder(row, head) == rank;
            lses.push(if holds { 2.5 } else { f32::NEG_INFINITY });
            let nothing = material.nothing() as f32;
            outs.extend((0..dim).map(|d| if holds { tag(row, head, rank, d) as f32 } else { nothing }));
        }
    }
    let inputs = Tensors::new()
        .with("partial_out", Tensor::from_f32(material.inputs.case.dtype, &[world, rows, heads, dim], &outs))
        .with("partial_lse", Tensor::from_f32(Dtype::F32, &[world, rows, heads], &lses));
    let observed =
        Run::open(&laboratory.engine, &material.configuration)?.step(&material.operation, &inputs)?;
    let seen = observed.output("out", material.output_dtype(), &shape)?.to_f64();
    let mut comparison = Comparison::new("out");
    for (flat, seen) in seen.iter().enumerate() {
        let (rank, row) = (flat / dim / own / rows, flat / dim / own % rows);
        let head = rank * own + flat / dim % own;
        comparison.element(flat, *seen, Allowed::Exactly(tag(row, head, holder(row, head), flat % dim)));
    }
    let headline = "a row or head that bears its name comes out in another's place, or changed";
    Ok(comparison.finding(headline, Stage::Exchange, |flat| material.place(flat)))
}

/// Every row and head picks one token by all bits of its position; its value must come out.
fn context(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let picking = picking(laboratory.attention())?;
    let (observed, _) = attend(&laboratory.engine, &picking)?;
    let shape = picking.output_shape();
    let (rows, own, dim) = (shape[1], shape[2], shape[3]);
    let seen = observed.output("out", picking.output_dtype(), &shape)?.to_f64();
    let kv_heads = picking.configuration().attention.kv_heads();
    let mut comparison = Comparison::new("out");
    for (flat, seen) in seen.iter().enumerate() {
        let (rank, row) = (flat / dim / own / rows, flat / dim / own % rows);
        let Some((request, t)) = picking.rows[row] else { continue };
        let head = rank * own + flat / dim % own;
        let token = needle(&picking, request, t, head);
        let value = (token * kv_heads + picking.inputs.kv_head(head)) * dim + flat % dim;
        let value = round_f32(picking.output_dtype(), picking.held_values[request][value]);
        comparison.element(flat, *seen, Allowed::Exactly(f64::from(value)));
    }
    let axes = [("rank", shape[0]), ("row", rows), ("head", own), ("dim", dim)];
    let headline = "a row picks one token and does not get that token's value";
    Ok(comparison.finding(headline, Stage::Gather, |flat| picking.place(flat, &axes)))
}

/// The position that a row and head picks among those that it sees.
fn needle(material: &AttentionMaterial, request: usize, t: usize, head: usize) -> usize {
    let visible = material.case.workload.requests[request].context_tokens + t + 1;
    (7 * head + 3 * t + request) % visible
}

/// The case with keys that spell their positions in signs, and queries that spell the position they want.
fn picking(material: &AttentionMaterial) -> Result<AttentionMaterial, Halt> {
    let configuration = material.configuration();
    let attention = configuration.attention;
    let dim = attention.qk_dim();
    let longest = material.case.workload.requests.iter().map(|request| request.seq_len()).max().unwrap_or(0);
    let bits = longest.max(2).next_power_of_two().ilog2() as usize;
    // in MLA the latent part is the value as well
    let room = match attention {
        Attention::Mla { qk_rope_head_dim, .. } => qk_rope_head_dim,
        Attention::Gqa { head_dim, .. } => head_dim,
    };
    if bits > room {
        return Err(Halt::Unsupported(format!("{bits} bits of a position do not fit into {room} elements")));
    }
    let sign = |position: usize, bit: usize| if position >> bit & 1 == 1 { 1.0f32 } else { -1.0 };
    let size = if configuration.kv_dtype.is_fp8() {
        round_f32(configuration.dtype, configuration.kv_scale)
    } else {
        1.0
    };
    let strength = GAP / (2.0 * size * configuration.softmax_scale);
    let mut inputs = material.inputs.clone();
    for keys in &mut inputs.keys {
        for (index, key) in keys.chunks_exact_mut(dim).enumerate() {
            let position = index / attention.kv_heads();
            (0..bits).for_each(|bit| key[dim - 1 - bit] = size * sign(position, bit));
        }
    }
    for (row, place) in material.rows.iter().enumerate() {
        let Some((request, t)) = place else { continue };
        for head in 0..material.heads() {
            let at = (row * material.heads() + head) * dim;
            let query = &mut inputs.query[at..at + dim];
            let wanted = needle(material, *request, *t, head);
            query.fill(0.0);
            (0..bits).for_each(|bit| {
                query[dim - 1 - bit] = round_f32(configuration.dtype, strength * sign(wanted, bit))
            });
        }
    }
    material.with_inputs(inputs)
}
