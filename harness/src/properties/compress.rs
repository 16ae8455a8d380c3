//! Compression of tokens of shared rows: which blocks become entries and when, what they hold, who sees them, and what is held for later.

use shardcheck_cases::{Body, Case, Family};
use shardcheck_engine::Tensor;
use shardcheck_formats::Dtype;

use super::{Property, always, broken, pcp};
use crate::compressing::CompressMaterial;
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Run};

const COMPRESS: &[Family] = &[Family::CompressPcp];
const EXACT: &str = "exact: integers";

pub(super) const PROPERTIES: &[Property] = &[
    property!(
        "compress.rows",
        COMPRESS,
        always,
        "each rank has the rows that the split gives to it, chunks in one piece, padding behind them",
        "as `pcp.partition`, `pcp.padding` and `pcp.order`",
        &[],
        EXACT,
        rows
    ),
    property!(
        "compress.blocks",
        COMPRESS,
        always,
        "on every rank, a step makes one entry for each block of m positions of a request whose last token is new, and none for one that is not full",
        "DeepSeek-V4 `Compressor`: an entry where (position + 1) mod m is 0",
        &[],
        EXACT,
        blocks
    ),
    property!(
        "compress.entries",
        COMPRESS,
        always,
        "an entry is the softmax-gated sum over its block and, where blocks overlap, the one before, whatever ranks and steps the tokens came from",
        "DeepSeek-V4 `Compressor`, `overlap_transform`",
        &[],
        "derived: bound of exponents, sums and the division in 32 bits under the declared contract",
        entries
    ),
    property!(
        "compress.visible",
        COMPRESS,
        always,
        "a local row sees the entries of the blocks that end at its position or before, by global position, and padding none",
        "causality: an entry holds tokens up to the end of its block",
        &["vllm-ascend#10827"],
        EXACT,
        visible
    ),
    property!(
        "compress.state",
        COMPRESS,
        always,
        "behind a step, every rank holds the tokens of the block that is not full and, where blocks overlap, of the one before, as they were given",
        "DeepSeek-V4 `kv_state`, `score_state`",
        &[],
        "exact: bits",
        state
    ),
    property!(
        "compress.ranks",
        COMPRESS,
        has_ranks,
        "all ranks make the same entries, bit for bit",
        "every rank holds the compressed cache whole",
        &[],
        "exact: bits",
        ranks
    ),
    property!(
        "compress.chunks",
        COMPRESS,
        divides,
        "a batch in two steps, the second behind the state that the first left, makes the entries of one step",
        "chunked prefill, and decode behind a prompt",
        &[],
        "sum of the bounds of both runs",
        chunks
    ),
];

fn has_ranks(case: &Case) -> bool {
    matches!(&case.body, Body::CompressPcp(case) if case.batch.world > 1)
}

fn divides(case: &Case) -> bool {
    matches!(&case.body, Body::CompressPcp(case) if case.batch.requests.iter().any(|r| r.query_tokens > 1))
}

fn rows(laboratory: &Laboratory) -> Result<Finding, Halt> {
    pcp::placed_rows(laboratory)
}

fn blocks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.compressing();
    let requests = material.case.batch.requests.len();
    let shape = [material.sharing.world, requests + 1];
    let seen = laboratory.observed()?.output("entry_start_loc", Dtype::I32, &shape)?.to_i64();
    let made = material.made();
    for (flat, start) in seen.iter().enumerate() {
        let (rank, request) = (flat / (requests + 1), flat % (requests + 1));
        let wanted = made.iter().filter(|(of, _)| *of < request).count();
        if *start != wanted as i64 {
            let headline =
                format!("rank {rank} has {start} entries before request {request}, where there are {wanted}");
            return Err(broken(headline, Stage::Layout));
        }
    }
    let given = laboratory.observed()?.reply.outputs.find("entries");
    let count = given.and_then(|tensor| tensor.shape().get(1).copied());
    if count != Some(made.len()) {
        let headline = format!("{count:?} entries are returned, where the step fills {} blocks", made.len());
        return Err(broken(headline, Stage::Layout));
    }
    Ok(Finding::Holds(Measured::exact(seen.len())))
}

fn entries(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.compressing();
    let (made, dim, world) = (material.made(), material.blocks.dim, material.sharing.world);
    let shape = [world, made.len(), dim];
    let seen = laboratory.observed()?.output("entries", Dtype::F32, &shape)?.to_f64();
    let mut comparison = Comparison::new("entries");
    for (index, (request, block)) in made.iter().enumerate() {
        for (column, pooled) in material.entry(*request, *block).iter().enumerate() {
            for rank in 0..world {
                let flat = (rank * made.len() + index) * dim + column;
                comparison.element(flat, seen[flat], Allowed::near(pooled.value, pooled.error));
            }
        }
    }
    Ok(comparison.finding("an entry is not the gated sum over its tokens", Stage::Partial, |flat| {
        let (rank, (request, block)) = (flat / dim / made.len(), made[flat / dim % made.len()]);
        format!("rank {rank}, request {request}, block {block}, column {}", flat % dim)
    }))
}

fn visible(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let blocks = &laboratory.compressing().blocks;
    let headline =
        "a local row sees another number of entries than blocks have ended at its position or before";
    pcp::compare(laboratory, ("entry_lens", Dtype::I32), headline, |material, row| {
        Some(pcp::placed(material, row).map_or(0, |placed| blocks.visible_entries(placed.position)))
    })
}

fn state(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.compressing();
    let mut compared = 0;
    for (name, wanted) in ["new_state_kv", "new_state_gate"].into_iter().zip(material.state()) {
        let columns = material.blocks.columns();
        let shape = [material.sharing.world, wanted.len() / columns, columns];
        let seen = laboratory.observed()?.output(name, Dtype::F32, &shape)?.to_f32();
        for (flat, value) in seen.iter().enumerate() {
            let (rank, at) = (flat / wanted.len(), flat % wanted.len());
            if value.to_bits() != wanted[at].to_bits() {
                let (token, column) = (at / columns, at % columns);
                let headline = format!(
                    "rank {rank} holds {value} in column {column} of token {token} of {name}, where {} belongs",
                    wanted[at]
                );
                return Err(broken(headline, Stage::Write));
            }
        }
        compared += seen.len();
    }
    Ok(Finding::Holds(Measured::exact(compared.max(1))))
}

fn ranks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, observed) = (laboratory.compressing(), laboratory.observed()?);
    let first = material.entries(observed, 0)?;
    for rank in 1..material.sharing.world {
        let own = material.entries(observed, rank)?;
        if let Some(at) = (0..own.len()).find(|at| own[*at].to_bits() != first[*at].to_bits()) {
            let headline = format!(
                "rank {rank} has another entry {} than rank 0, first in column {}",
                at / material.blocks.dim,
                at % material.blocks.dim
            );
            return Err(broken(headline, Stage::Gather));
        }
    }
    Ok(Finding::Holds(Measured::exact((first.len() * material.sharing.world).max(1))))
}

/// Entries of both steps in the order of one, each request's own of the first before those of the second.
fn in_two_steps(laboratory: &Laboratory, material: &CompressMaterial) -> Result<Vec<f64>, Halt> {
    let mut run = Run::open(&laboratory.engine, &material.configuration)?;
    let mut state = ["state_kv", "state_gate"].map(|name| material.inputs.find(name).cloned());
    let mut steps = Vec::new();
    for second in [false, true] {
        let (operation, mut inputs) = material.part(second);
        for (name, tensor) in ["state_kv", "state_gate"].into_iter().zip(&state) {
            if let Some(tensor) = tensor {
                inputs.insert(name, tensor.clone());
            }
        }
        let observed = run.step(&operation, &inputs)?;
        let starts = [material.sharing.world, material.case.batch.requests.len() + 1];
        let starts = observed.output("entry_start_loc", Dtype::I32, &starts)?.to_i64();
        let of_rank = |name: &str| -> Result<Tensor, Halt> {
            let tensor = observed.reply.outputs.find(name);
            let held = tensor.and_then(|tensor| tensor.shape().get(1).copied()).unwrap_or(0);
            let shape = [material.sharing.world, held, material.blocks.columns()];
            let all = observed.output(name, Dtype::F32, &shape)?.to_f32();
            Ok(Tensor::from_f32(Dtype::F32, &shape[1..], &all[..shape[1] * shape[2]]))
        };
        state = [Some(of_rank("new_state_kv")?), Some(of_rank("new_state_gate")?)];
        if !second {
            // a state of another length is no input of the next step
            let held = material.held_between();
            let given = state.iter().flatten().map(|tensor| tensor.shape()[0]).find(|given| *given != held);
            if let Some(given) = given {
                let headline = format!("a step leaves a state of {given} rows behind and not of {held}");
                return Err(broken(headline, Stage::Write));
            }
        }
        steps.push((starts, material.entries(&observed, 0)?));
    }
    let (mut together, dim) = (Vec::new(), material.blocks.dim);
    for request in 0..material.case.batch.requests.len() {
        for (starts, entries) in &steps {
            let own = (starts[request].max(0) as usize * dim)..(starts[request + 1].max(0) as usize * dim);
            let own = entries.get(own);
            together.extend(own.ok_or_else(|| broken("an entry lies outside".to_owned(), Stage::Layout))?);
        }
    }
    Ok(together)
}

fn chunks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.compressing();
    let again = in_two_steps(laboratory, material)?;
    let seen = material.entries(laboratory.observed()?, 0)?;
    let (made, dim) = (material.made(), material.blocks.dim);
    if seen.len() != again.len() || seen.len() != made.len() * dim {
        let headline = format!(
            "two steps make {} entries and one makes {}, for {} blocks",
            again.len() / dim,
            seen.len() / dim,
            made.len()
        );
        return Err(broken(headline, Stage::Layout));
    }
    let mut comparison = Comparison::new("entries");
    for (index, (request, block)) in made.iter().enumerate() {
        for (column, pooled) in material.entry(*request, *block).iter().enumerate() {
            let flat = index * dim + column;
            comparison.element(flat, seen[flat], Allowed::near(again[flat], 2.0 * pooled.error));
        }
    }
    Ok(comparison.finding("an entry depends on where a step ends", Stage::Partial, |flat| {
        let (request, block) = made[flat / dim];
        format!("request {request}, block {block}, column {}", flat % dim)
    }))
}
