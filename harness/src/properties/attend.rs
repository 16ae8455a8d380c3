//! Decode, verify and draft against global attention: output and LSE, merged and per rank, on all ranks.

use shardcheck_cases::{Case, Family, Probe};
use shardcheck_engine::Tensor;
use shardcheck_formats::Dtype;

use super::{Property, always};
use crate::attribute;
use crate::finding::{Failure, Finding, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed, Run};
use crate::localise;
use crate::material::AttentionMaterial;

const DECODE: &[Family] = &[Family::Decode];
const VERIFY: &[Family] = &[Family::Verify];
const DRAFT: &[Family] = &[Family::Draft];
const ATTEND: &[Family] = &[Family::Decode, Family::Verify, Family::Draft, Family::AttendSelected];
pub(super) const WITH_SINKS: &[Family] =
    &[Family::Decode, Family::Verify, Family::Draft, Family::AttendSelected, Family::AttendSinks];

pub(super) const CERTIFIED: &str = "certified interval of the declared rounding contract, per element";
pub(super) const CERTIFIED_LSE: &str =
    "certified LSE bound of the declared rounding contract, per row and head";
pub(super) const EXACT: &str = "exact: integers";

pub(super) const PROPERTIES: &[Property] = &[
    property!(
        "decode.row-lengths",
        DECODE,
        always,
        "the row that a rank's decode kernel sees is as long as the tokens that the rank holds of its request",
        "ATOM `get_dcp_local_seq_lens`",
        &["vllm#27518", "vllm-ascend#10895"],
        EXACT,
        row_lengths
    ),
    property!(
        "verify.row-lengths",
        VERIFY,
        always,
        "each verify row sees, on each rank, the owned part of the positions below its own global boundary",
        "ATOM `get_dcp_local_window_lens`; vLLM `dcp_local_verify_row_lens`",
        &["vllm#47181", "vllm#46076", "vllm-ascend#6491", "flash-attention#93"],
        EXACT,
        row_lengths
    ),
    property!(
        "draft.row-lengths",
        DRAFT,
        always,
        "each row of a draft block sees, on each rank, all tokens that the rank holds of its request",
        "ATOM `_propose_with_draft`",
        &["sglang#33926", "sglang#39799"],
        EXACT,
        row_lengths
    ),
    property!(
        "decode.query",
        DECODE,
        always,
        "every rank's kernel receives the query heads of its whole group, in head order",
        "ATOM decode: all-gather of Q, or query replication",
        &["vllm-ascend#4687", "vllm#29487"],
        "exact: bits",
        query
    ),
    property!(
        "verify.query",
        VERIFY,
        always,
        "every rank's kernel receives the query heads of its whole group for every verify row, in head order",
        "ATOM decode: all-gather of Q, or query replication",
        &["vllm-ascend#4687", "vllm#29487"],
        "exact: bits",
        query
    ),
    property!(
        "decode.partial-lse",
        DECODE,
        always,
        "each rank's LSE is that of attention over the rank's own tokens, and −inf where it holds none",
        "FlashAttention split-KV; FlashInfer empty-attention contract",
        &["vllm#38416", "flashinfer#3251", "flashinfer#58", "aiter#3267", "flashinfer#4485"],
        CERTIFIED_LSE,
        partial_lse
    ),
    property!(
        "verify.partial-lse",
        VERIFY,
        always,
        "each rank's LSE of a verify row is that of attention over the rank's visible tokens, and −inf where it sees none",
        "FlashAttention split-KV; vLLM segmented MLA verify",
        &["vllm#47181", "vllm#38416", "aiter#3267"],
        CERTIFIED_LSE,
        partial_lse
    ),
    property!(
        "draft.partial-lse",
        DRAFT,
        always,
        "each rank's LSE of a draft row is that of attention over all tokens that the rank holds",
        "FlashAttention split-KV",
        &["sglang#33926", "vllm#38416"],
        CERTIFIED_LSE,
        partial_lse
    ),
    property!(
        "decode.partial-output",
        DECODE,
        always,
        "each rank's partial output is attention over the rank's own tokens",
        "FlashAttention split-KV",
        &["vllm#46952", "sglang#34765", "vllm-ascend#3850"],
        CERTIFIED,
        partial_output
    ),
    property!(
        "verify.partial-output",
        VERIFY,
        always,
        "each rank's partial output of a verify row is attention over the rank's visible tokens",
        "FlashAttention split-KV",
        &["vllm#47181", "vllm#46952"],
        CERTIFIED,
        partial_output
    ),
    property!(
        "draft.partial-output",
        DRAFT,
        always,
        "each rank's partial output of a draft row is attention over all tokens that the rank holds",
        "FlashAttention split-KV",
        &["vllm#46952"],
        CERTIFIED,
        partial_output
    ),
    property!(
        "decode.lse",
        DECODE,
        always,
        "the merged LSE of a decode row is that of global attention, on every rank",
        "log-sum-exp over a partition",
        &["vllm#28840", "vllm#47079", "vllm#26509"],
        CERTIFIED_LSE,
        lse
    ),
    property!(
        "verify.lse",
        VERIFY,
        always,
        "the merged LSE of a verify row is that of global causal attention, on every rank",
        "log-sum-exp over a partition",
        &["vllm#28840", "vllm#47181"],
        CERTIFIED_LSE,
        lse
    ),
    property!(
        "draft.lse",
        DRAFT,
        always,
        "the merged LSE of a draft row is that of global attention over the whole block, on every rank",
        "log-sum-exp over a partition",
        &["vllm#28840"],
        CERTIFIED_LSE,
        lse
    ),
    property!(
        "decode.output",
        DECODE,
        always,
        "the output of a decode row is global attention over its request, on every rank",
        "softmax attention; merge by LSE is exact over a partition",
        &["vllm#28840", "vllm#38416", "flashinfer#4975", "flashinfer#353", "ATOM#1930", "vllm#29487"],
        CERTIFIED,
        output
    ),
    property!(
        "verify.output",
        VERIFY,
        always,
        "the output of each verify row is global causal attention, on every rank",
        "vLLM `test_segmented_dcp_verify_matches_causal_attention`",
        &["vllm#47181", "vllm#51705", "flash-attention#93", "vllm-ascend#6491"],
        CERTIFIED,
        output
    ),
    property!(
        "draft.output",
        DRAFT,
        always,
        "the output of each draft row is global attention over the whole block, without a causal mask",
        "ATOM DSpark, vLLM DFlash: the block is bidirectional",
        &["sglang#33926", "sglang#39799"],
        CERTIFIED,
        output
    ),
    property!(
        "attend.padding",
        WITH_SINKS,
        always,
        "graph-padding rows and rows that see nothing come out as exact zeros with LSE −inf",
        "vLLM empty-shard mask; FlashInfer empty-attention contract",
        &["flashinfer#3779", "vllm-ascend#12840", "vllm-ascend#7012", "flashinfer#4484"],
        "exact: bits",
        padding
    ),
    property!(
        "attend.collectives",
        WITH_SINKS,
        always,
        "all ranks enter the same number of collectives",
        "a rank that enters one less leaves the others waiting",
        &["vllm-ascend#12036", "TensorRT-LLM#10312", "sglang#20360"],
        EXACT,
        collectives
    ),
    property!(
        "attend.given-cache",
        WITH_SINKS,
        always,
        "attention over caches that were laid out by the harness, not by the engine's own write, is global attention",
        "reader and writer of a cache must agree with the published layout, not only with each other",
        &["sglang#29760", "vllm#49435", "sglang#33309"],
        CERTIFIED,
        given_cache
    ),
    Property {
        id: "lse.unit",
        statement: "n equal logits of zero give an LSE of ln n, merged and on every rank",
        source: "ln Σ e⁰ = ln n",
        bugs: &["flashinfer#4485", "vllm#47079", "sglang#35045", "vllm#28840"],
        tolerance: "16 u (1 + ln n), u = 2⁻²⁴: exact summands, one logarithm",
        families: ATTEND,
        applies: equal_logits_say_something,
        check: lse_unit,
    },
];

fn equal_logits_say_something(case: &Case) -> bool {
    // one probe suffices: the queries are replaced by zeros, so that the probe no longer matters
    matches!(&case.body, shardcheck_cases::Body::Attention(attention) if attention.probe == Probe::Gaussian)
}

fn row_lengths(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let comparison = localise::row_lengths(material, laboratory.observed()?)?;
    let axes = [("rank", material.ranks()), ("row", material.rows.len())];
    let headline = "a row sees the wrong number of tokens on a rank";
    Ok(comparison.finding(headline, Stage::RowBound, |flat| material.place(flat, &axes)))
}

pub(super) fn query(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let comparison = localise::gathered_query(material, laboratory.observed()?)?;
    let axes = localise::gathered_axes(material, material.configuration().attention.qk_dim());
    let headline = "a kernel received a query that is not its group's";
    Ok(comparison.finding(headline, Stage::Query, |flat| material.place(flat, &axes)))
}

pub(super) fn partial_lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let comparison = localise::partial_lse(material, laboratory.observed()?)?;
    let axes = localise::gathered_axes(material, 1);
    let headline = "a rank's LSE is outside its bound";
    Ok(located(laboratory, &comparison, headline, Stage::Partial, &axes))
}

pub(super) fn partial_output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let comparison = localise::partial_output(material, laboratory.observed()?)?;
    let axes = localise::gathered_axes(material, material.exchanged_dim(laboratory.observed()?));
    let headline = "a rank's partial output is outside its bound";
    Ok(located(laboratory, &comparison, headline, Stage::Partial, &axes))
}

/// The finding of a comparison. The stage is looked for only where something fails: it reads the caches back.
fn located(
    laboratory: &Laboratory,
    comparison: &Comparison,
    headline: &str,
    last: Stage,
    axes: &[(&'static str, usize)],
) -> Finding {
    let stage = if comparison.holds() { last } else { localise::stage_of(laboratory, last) };
    comparison.finding(headline, stage, |flat| laboratory.attention().place(flat, axes))
}

/// Compares the outputs of all ranks with global attention.
pub(super) fn compare_output(material: &AttentionMaterial, observed: &Observed) -> Result<Comparison, Halt> {
    let expected = material.expected()?;
    let shape = material.output_shape();
    let seen = observed.output("out", material.output_dtype(), &shape)?.to_f64();
    let (rows, heads, dim) = (shape[1], shape[2], shape[3]);
    let mut comparison = Comparison::new("out");
    for rank in 0..shape[0] {
        for row in 0..rows {
            for head in 0..heads {
                let base = ((rank * rows + row) * heads + head) * dim;
                let wanted = (row * material.heads() + rank * heads + head) * dim;
                for d in 0..dim {
                    comparison.element(base + d, seen[base + d], expected.out[wanted + d]);
                }
            }
        }
    }
    Ok(comparison)
}

/// Compares the merged LSEs of all ranks with those of global attention.
pub(super) fn compare_lse(material: &AttentionMaterial, observed: &Observed) -> Result<Comparison, Halt> {
    let expected = material.expected()?;
    let shape = material.output_shape();
    let seen = observed.output("lse", Dtype::F32, &shape[..3])?.to_f64();
    let (rows, heads) = (shape[1], shape[2]);
    let mut comparison = Comparison::new("lse");
    for rank in 0..shape[0] {
        for row in 0..rows {
            for head in 0..heads {
                let flat = (rank * rows + row) * heads + head;
                comparison.element(
                    flat,
                    seen[flat],
                    expected.lse[row * material.heads() + rank * heads + head],
                );
            }
        }
    }
    Ok(comparison)
}

pub(super) fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let comparison = compare_output(material, laboratory.observed()?)?;
    if comparison.holds() {
        return Ok(Finding::Holds(comparison.measured()));
    }
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", shape[3])];
    let stage = localise::stage_of(laboratory, Stage::Merge);
    let mut failure =
        comparison.failure("an output is not global attention", stage, |flat| material.place(flat, &axes));
    failure.notes.extend(localise::notes(material, &comparison, shape[2] * shape[3]));
    // a row of selected tokens counts what it was given, which its lists show; no code is spelt beside a sink
    if material.case.selected.is_none() && material.family != Family::AttendSinks {
        failure.notes.extend(attribute::sentences(laboratory));
    }
    Ok(Finding::Broken(Box::new(failure)))
}

pub(super) fn lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let comparison = compare_lse(material, laboratory.observed()?)?;
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2])];
    let headline = "a merged LSE is not that of global attention";
    Ok(located(laboratory, &comparison, headline, Stage::Merge, &axes))
}

fn padding(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let observed = laboratory.observed()?;
    let shape = material.output_shape();
    let out = observed.output("out", material.output_dtype(), &shape)?.to_f64();
    let lse = observed.output("lse", Dtype::F32, &shape[..3])?.to_f64();
    let empty: Vec<bool> = (0..shape[1]).map(|row| material.visible_tokens(row) == 0).collect();
    if !empty.contains(&true) {
        return Ok(Finding::Unsupported("the batch has no padding row and no row without tokens".to_owned()));
    }
    let (per_row, heads) = (shape[2] * shape[3], shape[2]);
    let mut outs = Comparison::new("out");
    for (flat, seen) in out.iter().enumerate().filter(|(flat, _)| empty[flat / per_row % shape[1]]) {
        outs.element(flat, *seen, Allowed::Exactly(0.0));
    }
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", shape[3])];
    let headline = "a row that sees nothing is not zero";
    let first = outs.finding(headline, Stage::Output, |flat| material.place(flat, &axes));
    let Finding::Holds(measured) = first else { return Ok(first) };
    let mut lses = Comparison::new("lse");
    for (flat, seen) in lse.iter().enumerate().filter(|(flat, _)| empty[flat / heads % shape[1]]) {
        lses.element(flat, *seen, Allowed::NegativeInfinity);
    }
    let headline = "the LSE of a row that sees nothing is not −inf";
    let second = lses.finding(headline, Stage::Output, |flat| material.place(flat, &axes[..3]));
    Ok(if let Finding::Holds(more) = second { Finding::Holds(measured.and(more)) } else { second })
}

fn collectives(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let counts = &laboratory.observed()?.reply.collectives;
    if counts.len() != laboratory.attention().ranks() {
        return Ok(Finding::Unsupported("the engine does not count its collectives".to_owned()));
    }
    if counts.iter().any(|count| *count != counts[0]) {
        let headline = format!("ranks entered {counts:?} collectives");
        return Err(Failure::because(headline).at(Stage::Exchange).into());
    }
    Ok(Finding::Holds(crate::finding::Measured::exact(counts.len())))
}

fn given_cache(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let mut run = Run::open(&laboratory.engine, material.configuration())?;
    run.step(&shardcheck_engine::Operation::LoadCache, &material.laid_out_caches())?;
    let observed = run.step(&material.operation(), &material.step_inputs())?;
    let comparison = compare_output(material, &observed)?;
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", shape[3])];
    let headline = "attention over given caches is not global attention";
    Ok(comparison.finding(headline, Stage::Partial, |flat| material.place(flat, &axes)))
}

/// What is allowed of the LSE of n logits of zero.
fn equal_logits(n: usize) -> Allowed {
    let exact = (n as f64).ln();
    Allowed::near(exact, 16.0 * (1.0 + exact.max(0.0)) / f64::from(1u32 << 24))
}

/// What `lse.unit` allows of the merged LSEs `[ranks, T, H]` where queries are zeros.
pub(crate) fn unit_lse(material: &AttentionMaterial) -> Vec<Allowed> {
    let shape = material.output_shape();
    let count: usize = shape[..3].iter().product();
    (0..count).map(|flat| equal_logits(material.visible_tokens(flat / shape[2] % shape[1]))).collect()
}

fn lse_unit(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let mut inputs = material.step_inputs();
    let zeros =
        vec![0.0; material.rows.len() * material.heads() * material.configuration().attention.qk_dim()];
    let shape = inputs.get("query").map_err(|e| Halt::Inconclusive(e.to_string()))?.shape().to_vec();
    inputs.insert("query", Tensor::from_f32(material.configuration().dtype, &shape, &zeros));
    let mut run = Run::open(&laboratory.engine, material.configuration())?;
    run.step(&shardcheck_engine::Operation::WriteKv, &material.write_inputs())?;
    let observed = run.step(&material.operation(), &inputs)?;
    let shape = material.output_shape();
    let seen = observed.output("lse", Dtype::F32, &shape[..3])?.to_f64();
    let mut merged = Comparison::new("lse");
    for (flat, (seen, wanted)) in seen.iter().zip(unit_lse(material)).enumerate() {
        merged.element(flat, *seen, wanted);
    }
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2])];
    let headline = "equal logits over n tokens do not give ln n after the merge";
    let first = merged.finding(headline, Stage::Merge, |flat| material.place(flat, &axes));
    let Finding::Holds(measured) = first else { return Ok(first) };
    let Ok(seen) = localise::natural_partial_lse(material, &observed) else { return Ok(first) };
    let axes = localise::gathered_axes(material, 1);
    let (rows, gathered) = (shape[1], axes[2].1);
    let mut partial = Comparison::new("partial_lse");
    for (flat, seen) in seen.iter().enumerate() {
        let (rank, row) = (flat / gathered / rows, flat / gathered % rows);
        partial.element(
            flat,
            *seen,
            equal_logits(material.local_visible_tokens(row, material.dcp_rank(rank))),
        );
    }
    let headline = "equal logits over a rank's n tokens do not give ln n on that rank";
    let second = partial.finding(headline, Stage::Partial, |flat| material.place(flat, &axes));
    Ok(if let Finding::Holds(more) = second { Finding::Holds(measured.and(more)) } else { second })
}
