//! KV write: what lies in the cache after tokens went through the engine's own slot mapping.

use shardcheck_cases::Family;
use shardcheck_engine::{Operation, Reply, Tensors};

use super::{Property, always};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Run};
use crate::material::AttentionMaterial;

const WRITE: &[Family] = &[Family::Write];
const EXACT: &str = "exact: codes of the cache format, rounded as the profile declares";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "write.round-trip",
        statement: "every token's key and value lie, cast as declared, in the slot of its owner",
        source: "ATOM and aiter `concat_and_cache_mla`; vLLM `reshape_and_cache`",
        bugs: &["vllm#49435", "sglang#34765", "vllm#45562", "sglang#33309", "ATOM#1772"],
        tolerance: EXACT,
        families: WRITE,
        applies: always,
        check: round_trip,
    },
    Property {
        id: "write.single-writer",
        statement: "each token is written by exactly one rank of a group, its owner; slot −1 writes nothing",
        source: "vLLM PAD_SLOT_ID; ATOM slot −1",
        bugs: &["vllm-ascend#6344", "tpu-inference#3344", "vllm#48392"],
        tolerance: "exact: integers",
        families: WRITE,
        applies: always,
        check: single_writer,
    },
    Property {
        id: "write.untouched",
        statement: "every slot that no token of the step owns keeps its content bit for bit",
        source: "a write must not disturb other requests' tokens",
        bugs: &["vllm-ascend#7549", "vllm-ascend#12840", "ATOM#1229"],
        tolerance: "exact: bytes",
        families: WRITE,
        applies: always,
        check: untouched,
    },
    Property {
        id: "write.overflow",
        statement: "values beyond the range of the cache format saturate or become NaN or infinite as the profile declares",
        source: "CUDA SATFINITE; PyTorch and ml_dtypes differ; aiter follows the hardware mode",
        bugs: &["vllm#49435", "vllm#45562"],
        tolerance: EXACT,
        families: WRITE,
        applies: |case| match &case.body {
            shardcheck_cases::Body::Attention(attention) => attention.configuration.kv_dtype.is_fp8(),
            _ => false,
        },
        check: overflow,
    },
];

/// Cache tensors of the case: name, element width of a slot.
fn caches(laboratory: &Laboratory) -> Vec<(&'static str, usize)> {
    let attention = laboratory.attention().configuration().attention;
    let key = ("key_cache", attention.kv_heads() * attention.qk_dim());
    if attention.is_mla() {
        vec![key]
    } else {
        vec![key, ("value_cache", attention.kv_heads() * attention.value_dim())]
    }
}

fn round_trip(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let written = laboratory.written()?;
    stored(laboratory, laboratory.attention(), &written.after, "a token in the cache is not what was written")
}

fn overflow(laboratory: &Laboratory) -> Result<Finding, Halt> {
    // 2^20 carries even the smallest drawn values of a scale of 0.02 beyond 448
    let material = laboratory.attention().magnified(1_048_576.0)?;
    let mut run = Run::open(&laboratory.engine, material.configuration())?;
    run.step(&Operation::WriteKv, &material.write_inputs())?;
    let after = run.step(&Operation::ReadCache, &Tensors::new())?.reply;
    stored(laboratory, &material, &after, "a value beyond the cache format is not stored as declared")
}

/// Compares every slot that a token owns with the token's codes.
fn stored(
    laboratory: &Laboratory,
    material: &AttentionMaterial,
    after: &Reply,
    headline: &str,
) -> Result<Finding, Halt> {
    let configuration = material.configuration();
    let after = crate::laboratory::Observed::of(after.clone());
    let mut measured = Measured::default();
    for (name, width) in caches(laboratory) {
        let shape = material.cache_shape(name);
        let seen = after.output(name, configuration.kv_dtype, &shape)?.to_codes();
        let slots = configuration.blocks * configuration.block_size;
        let mut comparison = Comparison::new(name);
        for rank in 0..material.ranks() {
            for (request, spec) in material.case.workload.requests.iter().enumerate() {
                let codes = material.cache_codes(name, request);
                for position in 0..spec.seq_len() {
                    let slot = material.layout.slot(
                        position,
                        material.dcp_rank(rank),
                        material.block_table(request),
                    );
                    let Ok(slot) = usize::try_from(slot) else { continue };
                    for element in 0..width {
                        let flat = (rank * slots + slot) * width + element;
                        let wanted = codes[position * width + element];
                        // codes are compared as bit patterns, so that NaN codes and the sign of zero count
                        comparison.element(flat, seen[flat] as f64, Allowed::Exactly(wanted as f64));
                    }
                }
            }
        }
        let place = |flat: usize| {
            let (slot, element) = (flat / width % slots, flat % width);
            format!("rank {}, slot {slot}, element {element} (codes shown)", flat / width / slots)
        };
        match comparison.finding(headline, Stage::Write, place) {
            Finding::Holds(more) => measured = measured.and(more),
            broken => return Ok(broken),
        }
    }
    Ok(Finding::Holds(measured))
}

fn single_writer(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let written = laboratory.written()?;
    let (requests, positions) = material.written_tokens();
    let (ranks, tokens) = (material.ranks(), positions.len());
    let seen = written.write.observable("slots", shardcheck_formats::Dtype::I64, &[ranks, tokens])?.to_i64();
    let mut comparison = Comparison::new("slots");
    for rank in 0..ranks {
        for token in 0..tokens {
            let wanted = match usize::try_from(requests[token]) {
                Err(_) => -1,
                Ok(request) => material.layout.slot(
                    positions[token] as usize,
                    material.dcp_rank(rank),
                    material.block_table(request),
                ),
            };
            let flat = rank * tokens + token;
            comparison.element(flat, seen[flat] as f64, Allowed::Exactly(wanted as f64));
        }
    }
    Ok(comparison.finding(
        "a token is written by the wrong rank or to the wrong slot",
        Stage::Layout,
        |flat| {
            let token = flat % tokens;
            format!("rank {}, request {} position {}", flat / tokens, requests[token], positions[token])
        },
    ))
}

fn untouched(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let configuration = material.configuration();
    let written = laboratory.written()?;
    let mut compared = 0;
    for (name, width) in caches(laboratory) {
        let size = width * configuration.kv_dtype.size_bytes();
        let get = |reply: &Reply| {
            let observed = crate::laboratory::Observed::of(reply.clone());
            observed.output(name, configuration.kv_dtype, &material.cache_shape(name)).cloned()
        };
        let (before, after) = (get(&written.before)?, get(&written.after)?);
        let slots = configuration.blocks * configuration.block_size;
        for rank in 0..material.ranks() {
            let owned = material.owned_slots(rank);
            for slot in (0..slots).filter(|slot| !owned.contains(slot)) {
                let range = (rank * slots + slot) * size..(rank * slots + slot + 1) * size;
                if before.bytes()[range.clone()] != after.bytes()[range] {
                    let headline = format!(
                        "{name}: slot {slot} of rank {rank} (block {}) was changed, but no token of the step belongs there",
                        slot / configuration.block_size
                    );
                    return Err(Failure::because(headline).at(Stage::Write).into());
                }
                compared += width;
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}
