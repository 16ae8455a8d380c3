//! What a rank's kernel is told of each causal row beside its length: the mask over the rank's tokens, and the list of slots to read.
//!
//! An engine has one, both or neither, so these are observables: what is not shown is not judged. All are integers, and every one is exact.

use shardcheck_cases::Family;
use shardcheck_engine::Tensor;
use shardcheck_formats::Dtype;

use super::{Property, always};
use crate::finding::{Failure, Finding, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};
use crate::material::AttentionMaterial;

const LAYOUT: &[Family] = &[Family::Layout];
const EXACT: &str = "exact: integers";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "layout.row-mask",
        statement: "the mask of causal row t of q leaves it local token j of rank r exactly where the token's position is at most L − q + t",
        source: "vLLM-Ascend `generate_mtp_attention_mask_for_decode`; aiter `torch_mla_extend_round_robin`",
        bugs: &["vllm-ascend#6491", "vllm#47181", "vllm-ascend#14876"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: row_mask,
    },
    Property {
        id: "layout.read-slots",
        statement: "the list of causal row t of q on rank r has the slots of the rank's tokens at positions up to L − q + t, in the order of their positions, and no other",
        source: "SGLang `plan_dcp_decode_metadata`, `create_mla_kv_page_table_for_dcp`; FlashInfer `kv_indptr`, `kv_indices`",
        bugs: &["sglang#20531", "vllm#50493", "vllm#47181"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: read_slots,
    },
];

/// An observable `[ranks, rows, …]` whose last axis is the engine's choice, and the length of that axis.
fn open_ended<'a>(
    laboratory: &'a Laboratory,
    name: &str,
    dtype: Dtype,
    leading: &[usize],
) -> Result<(&'a Tensor, usize), Halt> {
    let observed = laboratory.observed()?;
    let width = observed.reply.outputs.find(name).and_then(|tensor| tensor.shape().last().copied());
    let shape = [leading, &[width.unwrap_or(0)]].concat();
    Ok((observed.observable(name, dtype, &shape)?, width.unwrap_or(0)))
}

/// Request and place of a row in words.
fn row_place(material: &AttentionMaterial, index: usize) -> String {
    material.rows[index].map_or_else(
        || format!("row {index}"),
        |(request, t)| {
            let spec = material.case.workload.requests[request];
            let position = spec.seq_len() + t - spec.query_tokens;
            format!("request {request} row {t} of {} (position {position})", spec.query_tokens)
        },
    )
}

fn row_mask(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let (ranks, rows) = (material.ranks(), material.case.workload.query_rows());
    let (tensor, width) = open_ended(laboratory, "row_mask", Dtype::U8, &[ranks, rows])?;
    let seen = tensor.to_i64();
    let mut comparison = Comparison::new("row_mask");
    for rank in 0..ranks {
        let member = material.dcp_rank(rank);
        for (index, row) in material.rows[..rows].iter().enumerate() {
            let Some((request, t)) = *row else { continue };
            let spec = material.case.workload.requests[request];
            let held = material.layout.local_len(spec.seq_len(), member);
            if width < held {
                let text = format!(
                    "the mask has {width} columns, but rank {rank} holds {held} tokens of request {request}"
                );
                return Err(Failure::because(text).at(Stage::RowBound).into());
            }
            for local in 0..held {
                let sees = material.layout.row_sees(spec.seq_len(), spec.query_tokens, t, local, member);
                let flat = (rank * rows + index) * width + local;
                comparison.element(flat, seen[flat] as f64, Allowed::Exactly(f64::from(u8::from(sees))));
            }
        }
    }
    let headline = "the mask of a causal row leaves it other tokens of a rank than those up to its own";
    Ok(comparison.finding(headline, Stage::RowBound, |flat| {
        let (rank, index, local) = (flat / width / rows, flat / width % rows, flat % width);
        let position = material.layout.global_position(local, material.dcp_rank(rank));
        format!("rank {rank}, {}, local token {local} (position {position})", row_place(material, index))
    }))
}

fn read_slots(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let (ranks, rows) = (material.ranks(), material.case.workload.query_rows());
    let (tensor, entries) = open_ended(laboratory, "read_slots", Dtype::I64, &[ranks])?;
    let seen = tensor.to_i64();
    let starts = laboratory.observed()?.output("read_indptr", Dtype::I32, &[ranks, rows + 1])?.to_i64();
    let (mut wanted_starts, mut wanted) = (Vec::new(), Vec::new());
    for rank in 0..ranks {
        let mut slots = Vec::new();
        wanted_starts.push(0);
        for row in &material.rows[..rows] {
            if let Some((request, t)) = *row {
                let spec = material.case.workload.requests[request];
                let table = material.block_table(request);
                let rank = material.dcp_rank(rank);
                slots.extend(material.layout.row_slots(spec.seq_len(), spec.query_tokens, t, rank, table));
            }
            wanted_starts.push(slots.len() as i64);
        }
        wanted.push(slots);
    }
    let counts = Comparison::integers("read_indptr", &starts, &wanted_starts);
    let headline = "a row is told to read another number of tokens than it sees on a rank";
    if !counts.holds() {
        // the first wrong edge is the end of the first row that is wrong
        return Ok(counts.finding(headline, Stage::RowBound, |flat| {
            let (rank, edge) = (flat / (rows + 1), flat % (rows + 1));
            let row =
                edge.checked_sub(1).map_or("before all rows".to_owned(), |row| row_place(material, row));
            format!("rank {rank}, {row}")
        }));
    }
    let mut comparison = Comparison::new("read_slots");
    for (rank, slots) in wanted.iter().enumerate() {
        if entries < slots.len() {
            let text = format!("rank {rank} lists {entries} slots where its rows end at {}", slots.len());
            return Err(Failure::because(text).at(Stage::Layout).into());
        }
        for (at, slot) in slots.iter().enumerate() {
            let flat = rank * entries + at;
            comparison.element(flat, seen[flat] as f64, Allowed::Exactly(*slot as f64));
        }
    }
    let headline = "a row is told to read another slot than that of its token, or in another order";
    Ok(comparison.finding(headline, Stage::Layout, |flat| {
        let (rank, at) = (flat / entries, (flat % entries) as i64);
        let of_rank = &wanted_starts[rank * (rows + 1)..(rank + 1) * (rows + 1)];
        let row = of_rank.partition_point(|start| *start <= at).saturating_sub(1);
        format!("rank {rank}, {}, entry {}", row_place(material, row), at - of_rank[row])
    }))
}
