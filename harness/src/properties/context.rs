//! Cached context: chunk plan, gather, reorder, two-state merges, against global causal attention.

use shardcheck_cases::Family;
use shardcheck_formats::Dtype;

use super::{Property, always, attend};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};

const CONTEXT: &[Family] = &[Family::Context];
const CHAIN: &str = "certified interval plus one rounding for each chunk merge";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "context.chunks",
        statement: "each chunk holds a window of each request's context, and the chunks of a request add up to its context",
        source: "ATOM `_build_mla_chunk_meta_dcp`; vLLM chunked context",
        bugs: &["vllm-ascend#5767", "vllm#41549", "vllm-ascend#5837", "vllm-ascend#10580"],
        tolerance: "exact: integers",
        families: CONTEXT,
        applies: always,
        check: chunks,
    },
    Property {
        id: "context.gather",
        statement: "the gathered context holds each cached token of each request exactly once and nothing else",
        source: "ATOM `reorg_kvcache`: rank-major, padding dropped",
        bugs: &["sglang#33309", "vllm#26296", "sglang#32098", "local-inference-lab/vllm#14"],
        tolerance: "exact: bits, as a multiset for each request and chunk",
        families: CONTEXT,
        applies: always,
        check: gather,
    },
    Property {
        id: "context.state",
        statement: "the state of the context alone is attention over all cached tokens, without a mask; −inf without context",
        source: "ATOM `_dcp_compute_prefill_context`",
        bugs: &["sglang#35045", "vllm#28181", "vllm-ascend#5837"],
        tolerance: CHAIN,
        families: CONTEXT,
        applies: always,
        check: state,
    },
    Property {
        id: "context.lse",
        statement: "the LSE of context and new tokens together is that of global causal attention",
        source: "log-sum-exp over a partition",
        bugs: &["sglang#35045"],
        tolerance: "certified LSE bound plus the two-state merges",
        families: CONTEXT,
        applies: always,
        check: lse,
    },
    Property {
        id: "context.output",
        statement: "context and new tokens together are global causal attention, for any chunk size",
        source: "chunked prefill: prefix and suffix merge",
        bugs: &["sglang#35045", "vllm#54300", "vllm#26296", "vllm-ascend#6344", "sglang#29161"],
        tolerance: CHAIN,
        families: CONTEXT,
        applies: always,
        check: output,
    },
];

fn chunks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let observed = laboratory.observed()?;
    let Some(tensor) = observed.reply.outputs.find("chunk_lens") else {
        return Err(Halt::Unsupported("the engine does not return chunk_lens".to_owned()));
    };
    let (ranks, n) = (material.ranks(), material.case.workload.requests.len());
    let count = tensor.shape().get(1).copied().unwrap_or(0);
    let seen = observed.output("chunk_lens", Dtype::I32, &[ranks, count, n])?.to_i64();
    for rank in 0..ranks {
        for (request, spec) in material.case.workload.requests.iter().enumerate() {
            let lens: Vec<i64> = (0..count).map(|chunk| seen[(rank * count + chunk) * n + request]).collect();
            let sum: i64 = lens.iter().sum();
            if sum != spec.context_tokens as i64 || lens.iter().any(|len| *len < 0) {
                let headline = format!(
                    "rank {rank}: chunks of request {request} hold {lens:?} tokens, which is not its context of {}",
                    spec.context_tokens
                );
                return Err(Failure::because(headline).at(Stage::Gather).into());
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(ranks * count * n)))
}

fn gather(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let observed = laboratory.observed()?;
    let attention = material.configuration().attention;
    let width = attention.kv_heads() * attention.qk_dim();
    let context: usize = material.case.workload.requests.iter().map(|r| r.context_tokens).sum();
    let (ranks, n) = (material.ranks(), material.case.workload.requests.len());
    let shape = [ranks, context, attention.kv_heads(), attention.qk_dim()];
    let seen = observed.observable("gathered_key", Dtype::F32, &shape)?.to_f32();
    let Some(lens) = observed.reply.outputs.find("chunk_lens") else {
        return Err(Halt::Unsupported("the engine does not return chunk_lens".to_owned()));
    };
    let count = lens.shape().get(1).copied().unwrap_or(0);
    let lens = observed.output("chunk_lens", Dtype::I32, &[ranks, count, n])?.to_i64();
    let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for rank in 0..ranks {
        let mut next = rank * context;
        let mut gathered: Vec<Vec<Vec<u32>>> = vec![Vec::new(); n];
        for chunk in 0..count {
            for request in 0..n {
                for _ in 0..lens[(rank * count + chunk) * n + request].max(0) {
                    if next >= (rank + 1) * context {
                        let headline = format!("rank {rank}: chunks hold more tokens than the context");
                        return Err(Failure::because(headline).at(Stage::Gather).into());
                    }
                    gathered[request].push(bits(&seen[next * width..(next + 1) * width]));
                    next += 1;
                }
            }
        }
        for (request, rows) in gathered.iter_mut().enumerate() {
            let length = material.case.workload.requests[request].context_tokens;
            let held = material.held_keys(request);
            let mut wanted: Vec<_> = (0..length).map(|p| bits(&held[p * width..(p + 1) * width])).collect();
            rows.sort_unstable();
            wanted.sort_unstable();
            if let Some(bad) = (0..length).find(|i| rows.get(*i) != wanted.get(*i)) {
                let lost = (0..length)
                    .filter(|p| rows.binary_search(&bits(&held[p * width..(p + 1) * width])).is_err())
                    .collect::<Vec<_>>();
                let headline = format!(
                    "rank {rank}: the gathered context of request {request} is not its {length} cached tokens; missing positions {lost:?}, first difference at sorted row {bad}"
                );
                return Err(Failure::because(headline).at(Stage::Gather).into());
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(ranks * context * width)))
}

fn state(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let observed = laboratory.observed()?;
    let shape = material.output_shape();
    let out = observed.observable("context_out", Dtype::F32, &shape)?.to_f64();
    let lse = observed.observable("context_lse", Dtype::F32, &shape[..3])?.to_f64();
    let expected = material.expected_context()?;
    let (rows, heads, dim) = (shape[1], shape[2], shape[3]);
    let (mut outs, mut lses) = (Comparison::new("context_out"), Comparison::new("context_lse"));
    for flat in 0..shape[0] * rows * heads {
        let (rank, row, head) = (flat / heads / rows, flat / heads % rows, flat % heads);
        let state = row * material.heads() + rank * heads + head;
        lses.element(flat, lse[flat], expected.lse[state]);
        if expected.lse[state] == Allowed::NegativeInfinity {
            continue;
        }
        for d in 0..dim {
            outs.element(flat * dim + d, out[flat * dim + d], expected.out[state * dim + d]);
        }
    }
    let axes = [("rank", shape[0]), ("row", rows), ("head", heads), ("dim", dim)];
    let headline = "the LSE of the cached context is wrong";
    let first = lses.finding(headline, Stage::Gather, |flat| material.place(flat, &axes[..3]));
    let Finding::Holds(measured) = first else { return Ok(first) };
    let headline = "the state of the cached context is not attention over its tokens";
    let second = outs.finding(headline, Stage::Gather, |flat| material.place(flat, &axes));
    Ok(if let Finding::Holds(more) = second { Finding::Holds(measured.and(more)) } else { second })
}

fn lse(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let comparison = attend::compare_lse(material, laboratory.observed()?)?;
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2])];
    let headline = "the LSE of context and new tokens is not that of global attention";
    Ok(comparison.finding(headline, Stage::Merge, |flat| material.place(flat, &axes)))
}

fn output(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let comparison = attend::compare_output(material, laboratory.observed()?)?;
    if comparison.holds() {
        return Ok(Finding::Holds(comparison.measured()));
    }
    let shape = material.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", shape[3])];
    let stage = match (gather(laboratory), state(laboratory)) {
        (Ok(Finding::Broken(_)) | Err(Halt::Broken(_)), _) | (_, Ok(Finding::Broken(_))) => Stage::Gather,
        _ => Stage::Merge,
    };
    let headline = "context and new tokens together are not global causal attention";
    let mut failure = comparison.failure(headline, stage, |flat| material.place(flat, &axes));
    failure.notes.extend(crate::localise::notes(material, &comparison, shape[2] * shape[3]));
    Ok(Finding::Broken(Box::new(failure)))
}
