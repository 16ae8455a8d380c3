//! Layout laws: owner, lengths, slots, pages. Integers, so every one of them is exact.

use shardcheck_cases::Family;
use shardcheck_formats::Dtype;

use super::{Property, always};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::Comparison;
use crate::laboratory::{Halt, Laboratory};
use crate::material::AttentionMaterial;

const LAYOUT: &[Family] = &[Family::Layout];
const EXACT: &str = "exact: integers";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "layout.local-lengths",
        statement: "rank r holds len(L, r) = (L/(S·W))·S + clamp(L mod (S·W) − r·S, 0, S) tokens of a request of length L",
        source: "ATOM `get_dcp_local_seq_lens`; vLLM `_dcp_local_seq_lens_kernel`",
        bugs: &["vllm#27518", "vllm#46076", "ATOM#1746"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: local_lengths,
    },
    Property {
        id: "layout.partition",
        statement: "the local lengths of a request add up to its length on every group of ranks",
        source: "each token is stored exactly once per group",
        bugs: &["tpu-inference#3344", "vllm#27518"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: partition,
    },
    Property {
        id: "layout.row-lengths",
        statement: "causal row t of q sees len(L − q + 1 + t, r) tokens on rank r, and no rank derives it from its own local length",
        source: "ATOM `get_dcp_local_window_lens`; vLLM `dcp_local_verify_row_lens`",
        bugs: &["vllm#47181", "vllm#46076", "vllm-ascend#6491", "vllm#50391"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: row_lengths,
    },
    Property {
        id: "layout.row-sum",
        statement: "what a causal row sees on all ranks adds up to its global boundary L − q + 1 + t",
        source: "the visible set is partitioned by owner",
        bugs: &["vllm#47181", "vllm-ascend#15600"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: row_sum,
    },
    Property {
        id: "layout.draft-lengths",
        statement: "every row of a bidirectional draft block sees len(L, r) tokens on rank r",
        source: "ATOM `_propose_with_draft`; vLLM DFlash speculator",
        bugs: &["ATOM#1746", "sglang#39799"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: draft_lengths,
    },
    Property {
        id: "layout.slots",
        statement: "position p has slot bt[p/(B·W)]·B + local(p) mod B on its owner and −1 elsewhere",
        source: "ATOM slot mapping; vLLM `cp_local_slot`",
        bugs: &["vllm#26296", "sglang#29760", "vllm-ascend#6344", "vllm-ascend#5767"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: slots,
    },
    Property {
        id: "layout.slot-bijection",
        statement: "each position has exactly one owner in a group, no two positions of a batch share a slot of a rank, and every slot lies in a block of its request",
        source: "a cache slot holds one token",
        bugs: &["sglang#33309", "tpu-inference#3344", "vllm-ascend#6344"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: slot_bijection,
    },
    Property {
        id: "layout.blocks",
        statement: "a request of L tokens needs ceil(L/(B·W)) block-table entries, the same number on every rank",
        source: "ATOM `BlockManager._dcp_num_blocks`; vLLM virtual block",
        bugs: &["vllm#50493", "ATOM#1994", "vllm#29094"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: blocks,
    },
    Property {
        id: "layout.units",
        statement: "a virtual block and a prefix-hash unit are B·W tokens, a sub-page is min(128, largest power of two that divides B)",
        source: "vLLM `hash_block_size`, `_segmented_mla_page_size`; ATOM prefix cache",
        bugs: &["vllm#26296", "vllm#55600", "vllm-ascend#5767"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: units,
    },
    Property {
        id: "layout.sub-pages",
        statement: "a block table expanded to sub-pages lists each block's pages in order: bt·(B/page) + 0 … B/page − 1",
        source: "vLLM segmented MLA page-table expansion",
        bugs: &["sglang#29760", "sglang#20531"],
        tolerance: EXACT,
        families: LAYOUT,
        applies: always,
        check: sub_pages,
    },
];

fn request_place(material: &AttentionMaterial, flat: usize) -> String {
    let n = material.case.workload.requests.len().max(1);
    let (rank, request) = (flat / n, flat % n);
    let length = material.case.workload.requests.get(request).map_or(0, |r| r.seq_len());
    format!("rank {rank}, request {request} (length {length})")
}

fn per_request(
    laboratory: &Laboratory,
    name: &'static str,
    headline: &str,
    expected: impl Fn(&AttentionMaterial, usize, usize) -> usize,
) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let (ranks, n) = (material.ranks(), material.case.workload.requests.len());
    let seen = laboratory.observed()?.output(name, Dtype::I32, &[ranks, n])?.to_i64();
    let mut wanted = Vec::with_capacity(ranks * n);
    for rank in 0..ranks {
        for request in &material.case.workload.requests {
            wanted.push(expected(material, material.dcp_rank(rank), request.seq_len()) as i64);
        }
    }
    Ok(Comparison::integers(name, &seen, &wanted)
        .finding(headline, Stage::Layout, |flat| request_place(material, flat)))
}

fn local_lengths(laboratory: &Laboratory) -> Result<Finding, Halt> {
    per_request(laboratory, "local_lens", "a rank's local length is wrong", |material, rank, length| {
        material.layout.local_len(length, rank)
    })
}

fn blocks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "the number of block-table entries is wrong";
    per_request(laboratory, "blocks_needed", headline, |material, _, length| {
        material.layout.blocks_needed(length)
    })
}

fn partition(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let (ranks, n) = (material.ranks(), material.case.workload.requests.len());
    let seen = laboratory.observed()?.output("local_lens", Dtype::I32, &[ranks, n])?.to_i64();
    let world = material.configuration().dcp;
    let mut comparison = Comparison::new("Σ local_lens");
    for group in 0..ranks / world {
        for (request, spec) in material.case.workload.requests.iter().enumerate() {
            let sum: i64 = (0..world).map(|i| seen[(group * world + i) * n + request]).sum();
            comparison.element(
                group * n + request,
                sum as f64,
                crate::judge::Allowed::Exactly(spec.seq_len() as f64),
            );
        }
    }
    Ok(comparison.finding("local lengths do not add up to the request's length", Stage::Layout, |flat| {
        format!("group {}, request {}", flat / n.max(1), flat % n.max(1))
    }))
}

fn rows_of(
    laboratory: &Laboratory,
    name: &'static str,
    headline: &str,
    expected: impl Fn(&AttentionMaterial, usize, usize, usize, usize) -> usize,
) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    // a layout step is given the rows of requests only: padding is the business of a graph, not of the layout
    let (ranks, rows) = (material.ranks(), material.case.workload.query_rows());
    let seen = laboratory.observed()?.output(name, Dtype::I32, &[ranks, rows])?.to_i64();
    let mut wanted = Vec::with_capacity(ranks * rows);
    for rank in 0..ranks {
        for row in &material.rows[..rows] {
            wanted.push(row.map_or(0, |(request, t)| {
                let spec = material.case.workload.requests[request];
                expected(material, material.dcp_rank(rank), spec.seq_len(), spec.query_tokens, t) as i64
            }));
        }
    }
    Ok(Comparison::integers(name, &seen, &wanted)
        .finding(headline, Stage::RowBound, |flat| material.place(flat, &[("rank", ranks), ("row", rows)])))
}

fn row_lengths(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a causal row's local length is wrong";
    rows_of(laboratory, "row_lens", headline, |material, rank, length, q, t| {
        material.layout.verify_row_len(length, q, t, rank)
    })
}

fn draft_lengths(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a draft row's local length is wrong";
    rows_of(laboratory, "draft_lens", headline, |material, rank, length, _, _| {
        material.layout.draft_row_len(length, rank)
    })
}

fn row_sum(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let (ranks, rows) = (material.ranks(), material.case.workload.query_rows());
    let seen = laboratory.observed()?.output("row_lens", Dtype::I32, &[ranks, rows])?.to_i64();
    let world = material.configuration().dcp;
    let mut comparison = Comparison::new("Σ row_lens");
    for group in 0..ranks / world {
        for (index, row) in material.rows[..rows].iter().enumerate() {
            let sum: i64 = (0..world).map(|i| seen[(group * world + i) * rows + index]).sum();
            let wanted = row.map_or(0, |(request, t)| {
                let spec = material.case.workload.requests[request];
                material.layout.row_boundary(spec.seq_len(), spec.query_tokens, t)
            });
            comparison.element(
                group * rows + index,
                sum as f64,
                crate::judge::Allowed::Exactly(wanted as f64),
            );
        }
    }
    let headline = "what a row sees on all ranks does not add up to its causal boundary";
    Ok(comparison.finding(headline, Stage::RowBound, |flat| {
        material.place(flat, &[("group", ranks / world), ("row", rows)])
    }))
}

fn slots(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let (ranks, tokens) = (material.ranks(), material.case.workload.total_tokens());
    let seen = laboratory.observed()?.output("slots", Dtype::I64, &[ranks, tokens])?.to_i64();
    let mut wanted = Vec::with_capacity(ranks * tokens);
    for rank in 0..ranks {
        for (index, request) in material.case.workload.requests.iter().enumerate() {
            let table = material.block_table(index);
            wanted.extend(
                (0..request.seq_len()).map(|p| material.layout.slot(p, material.dcp_rank(rank), table)),
            );
        }
    }
    Ok(Comparison::integers("slots", &seen, &wanted).finding("a slot is wrong", Stage::Layout, |flat| {
        let (request, position) = material.token_at(flat % tokens);
        format!("rank {}, request {request} position {position}", flat / tokens)
    }))
}

fn slot_bijection(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let (ranks, tokens) = (material.ranks(), material.case.workload.total_tokens());
    let seen = laboratory.observed()?.output("slots", Dtype::I64, &[ranks, tokens])?.to_i64();
    let (world, block) = (material.configuration().dcp, material.configuration().block_size as i64);
    for rank in 0..ranks {
        let mut taken = std::collections::HashMap::new();
        for token in 0..tokens {
            let slot = seen[rank * tokens + token];
            if slot < 0 {
                continue;
            }
            let (request, position) = material.token_at(token);
            if let Some((other, at)) = taken.insert(slot, (request, position)) {
                return Err(Failure::because(format!(
                    "slot {slot} of rank {rank} is given to request {other} position {at} and to request {request} position {position}"
                ))
                .at(Stage::Layout)
                .into());
            }
            if !material.used_blocks(request).contains(&((slot / block) as i32)) {
                return Err(Failure::because(format!(
                    "slot {slot} of rank {rank} for request {request} position {position} lies in block {}, which is not the request's",
                    slot / block
                ))
                .at(Stage::Layout)
                .into());
            }
        }
    }
    for group in 0..ranks / world {
        for token in 0..tokens {
            let owners: Vec<_> =
                (0..world).filter(|i| seen[(group * world + i) * tokens + token] >= 0).collect();
            if owners.len() != 1 {
                let (request, position) = material.token_at(token);
                return Err(Failure::because(format!(
                    "request {request} position {position} is stored by ranks {owners:?} of group {group}; exactly one must store it"
                ))
                .at(Stage::Layout)
                .into());
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(ranks * tokens)))
}

fn units(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let ranks = material.ranks();
    let seen = laboratory.observed()?.output("units", Dtype::I32, &[ranks, 3])?.to_i64();
    let layout = &material.layout;
    let wanted = [
        layout.virtual_block_tokens() as i64,
        layout.hash_unit_tokens() as i64,
        shardcheck_references::layout::sub_page_size(layout.block()) as i64,
    ];
    let wanted: Vec<_> = (0..ranks).flat_map(|_| wanted).collect();
    let names = ["virtual block", "prefix-hash unit", "sub-page"];
    Ok(Comparison::integers("units", &seen, &wanted)
        .finding("a unit is wrong", Stage::Layout, |flat| format!("rank {}, {}", flat / 3, names[flat % 3])))
}

fn sub_pages(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let (ranks, n) = (material.ranks(), material.case.workload.requests.len());
    let observed = laboratory.observed()?;
    let given = observed.reply.outputs.find("sub_page_table");
    let pages = given.and_then(|tensor| tensor.shape().last().copied()).unwrap_or(0);
    let tensor = observed.output("sub_page_table", Dtype::I32, &[ranks, n, pages])?;
    let block = material.layout.block();
    let page_tokens = shardcheck_references::layout::sub_page_size(block);
    let seen = tensor.to_i64();
    let mut comparison = Comparison::new("sub_page_table");
    for rank in 0..ranks {
        for (request, spec) in material.case.workload.requests.iter().enumerate() {
            let held = material.layout.local_len(spec.seq_len(), material.dcp_rank(rank));
            let needed = held.div_ceil(page_tokens);
            if pages < needed {
                return Err(Failure::because(format!(
                    "the sub-page table has {pages} columns, but rank {rank} needs {needed} pages for request {request}"
                ))
                .at(Stage::Layout)
                .into());
            }
            let used = material.used_blocks(request);
            let wanted = shardcheck_references::layout::expand_sub_pages(used, block, needed);
            for (page, wanted) in wanted.iter().enumerate() {
                let flat = (rank * n + request) * pages + page;
                let allowed = crate::judge::Allowed::Exactly(f64::from(*wanted));
                comparison.element(flat, seen[flat] as f64, allowed);
            }
        }
    }
    Ok(comparison.finding("a sub-page is wrong", Stage::Layout, |flat| {
        format!("rank {}, request {}, page {}", flat / pages / n, flat / pages % n, flat % pages)
    }))
}
